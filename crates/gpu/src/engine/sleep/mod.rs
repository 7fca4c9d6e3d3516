//! Sleep: an idle arena releases its memory, including that of live blocks, and gets memory at the
//! same addresses when it is entered again.
//!
//! Four states: awake, draining (waiting for leases to end), asleep, waking. Contents are kept
//! (copied to host memory), discarded, or stay in place, set per region and per buffer. Each
//! transition completes or is undone: if a driver call fails, the arena is unchanged; if undoing
//! fails too, it is asleep with its contents saved.
//!
//! Files: `contents` (which granules leave, pure), `phase` (the states, and which thread waits for
//! which), `stores` (host memory and copies), `down`, `up`. It does not decide the time: callers of
//! [`DeviceArena::sleep_if_idle`] do.
//!
//! Invariants: no memory leaves under a lease, nor before the host has seen that every use is
//! complete; host memory is reserved with the host budget before the first copy; after an error the
//! arena is awake or asleep, and no memory, store or address is lost.

mod blocks;
pub(crate) mod contents;
mod down;
mod idle;
pub(crate) mod phase;
pub(crate) mod stores;
mod up;
mod waiting;

use lowtide_core::log;
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use crate::api::arena::DeviceArena;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;

pub use contents::Contents;
pub use waiting::EnterFuture;

/// The sleep state of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum SleepState {
    /// The memory can be used.
    #[default]
    Awake,
    /// The arena is falling asleep: it waits for the last lease, or its contents are being copied.
    Draining,
    /// The memory is released; entering wakes the arena.
    Asleep,
    /// The memory is being committed and restored.
    Waking,
}

impl SleepState {
    /// All of them.
    pub(crate) const ALL: [Self; 4] = [Self::Awake, Self::Draining, Self::Asleep, Self::Waking];

    /// Returns its name in metrics and endpoints.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Awake => "awake",
            Self::Draining => "draining",
            Self::Asleep => "asleep",
            Self::Waking => "waking",
        }
    }
}

/// Options of a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SleepOptions {
    /// Time to wait for leases to end; zero not to wait.
    pub drain: Duration,
    /// The treatment of contents in the stable region;
    /// [`Buffer::set_contents`](crate::Buffer::set_contents) overrides it.
    pub stable: Contents,
    /// The treatment of contents in the dynamic region.
    pub dynamic: Contents,
}

impl Default for SleepOptions {
    /// Waits for a second, and keeps all contents.
    fn default() -> Self {
        let kept = Contents::Keep;
        Self { drain: Duration::from_secs(1), stable: kept, dynamic: kept }
    }
}

/// The configuration of idle sleep and of wakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SleepConfig {
    /// Time without a lease before the arena sleeps; `None` for never. An arena with raw blocks
    /// never sleeps: their use is unknown.
    pub idle_after: Option<Duration>,
    /// The minimum time awake after open or wake.
    pub min_awake: Duration,
    /// The options of an idle sleep, which never waits for leases.
    pub options: SleepOptions,
    /// Time during which a wake without enough memory retries, eight times, before it fails; zero
    /// to fail immediately. Measured by the arena's clock: with a manual clock that is not
    /// advanced, such a wake waits forever.
    pub wake_timeout: Duration,
    /// `true` to keep the host memory for contents, and its reservation, between sleeps: allocating
    /// page-locked memory takes longer than filling it. Otherwise it is released after each wake.
    /// See [`DeviceArena::set_keep_stores`].
    pub keep_stores: bool,
}

impl Default for SleepConfig {
    /// No idle sleep; a wake retries for 2 s: memory freed by another process shows within 1.5 s.
    /// No host memory is kept.
    fn default() -> Self {
        Self {
            idle_after: None,
            min_awake: Duration::ZERO,
            options: SleepOptions::default(),
            wake_timeout: Duration::from_secs(2),
            keep_stores: false,
        }
    }
}

/// The result of a sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SleepReport {
    /// Bytes released to the driver.
    pub released: ByteSize,
    /// Bytes copied to host memory, in whole granules.
    pub offloaded: ByteSize,
    /// Bytes that stay committed.
    pub stayed: ByteSize,
}

/// The result of a wake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WakeReport {
    /// Bytes committed.
    pub committed: ByteSize,
    /// Bytes copied back.
    pub restored: ByteSize,
}

/// A budget of host memory, from which a sleep reserves before it copies contents.
///
/// The arena is falling asleep during these calls: operations that would wait for the end of that,
/// such as entering or allocating there, fail ([`DeviceError::State`]). A panic counts as a
/// refusal.
pub trait HostBudget: Send + Sync {
    /// Reserves `bytes` until the returned value is dropped, which happens on any thread after the
    /// host memory was released. Called with no lock held.
    ///
    /// # Errors
    /// The reason for a refusal, as text: the arena then stays awake.
    fn reserve(&self, bytes: ByteSize) -> Result<Box<dyn Any + Send>, String>;

    /// Called when the host memory of a reservation is allocated and filled: from here on it is
    /// part of measured memory. Called with no lock held. Does nothing by default.
    fn settle(&self, booked: &mut (dyn Any + Send)) {
        let _ = booked;
    }
}

impl DeviceArena {
    /// Releases all memory of the arena, including that of live blocks. The next lease, allocation
    /// or resize restores it at the same addresses. Frees are possible meanwhile.
    ///
    /// Waits for leases until the drain timeout of the options, then for the device's work, without
    /// a timeout. Entering during the wait or the copies cancels the sleep.
    ///
    /// Driver calls: a decommit for each run of at most 1 GiB, and a copy if contents are kept;
    /// none per block. Host memory: whole granules of kept contents, rounded up to 64 KiB, reserved
    /// with the budget of [`DeviceArena::set_host_budget`] before the first copy. If device memory
    /// is host memory, kept contents stay in place.
    ///
    /// A driver without [`same_address_wake`](crate::driver::Capabilities::same_address_wake)
    /// cannot restore a live block at its address: an arena on it sleeps only if nothing is live.
    ///
    /// Use of memory without a lease is at the caller's own risk: raw blocks and captured graphs
    /// find no memory behind their addresses until the arena is awake again.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::clock::SystemClock;
    /// use lowtide_gpu::{
    ///     ArenaConfig, SleepState, Contents, DeviceArena, HostDriver, Region, SleepOptions,
    /// };
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    /// let weights = arena.alloc_from(&[7_u8; 4 << 20], Region::Stable)?;
    /// let cache = arena.alloc_from(&[1_u8; 4 << 20], Region::Dynamic)?;
    /// let options = SleepOptions { dynamic: Contents::Discard, ..SleepOptions::default() };
    /// arena.sleep(options)?;
    /// assert_eq!(arena.state(), SleepState::Asleep);
    /// let lease = arena.enter()?; // wakes it
    /// assert_eq!(weights.slice(&lease)?[0], 7);
    /// assert!(cache.take_discarded()); // to be filled again
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    ///
    /// # Errors
    /// The arena is awake after [`DeviceError::Leased`] (the drain timeout has passed),
    /// [`DeviceError::Exported`] (immediately), [`DeviceError::SleepCancelled`],
    /// [`DeviceError::HostBudget`], [`DeviceError::Capturing`] (the wait would invalidate the
    /// capture of a graph). It is unchanged after [`DeviceError::State`] (it is not awake),
    /// [`DeviceError::Unsupported`] (the driver cannot wake at the same addresses, and blocks are
    /// live), [`DeviceError::Closed`], [`DeviceError::Forked`]. After [`DeviceError::Driver`] it is
    /// awake, or asleep if its memory was released and could not be restored: see
    /// [`DeviceArena::state`]. Only contents to be discarded are lost.
    pub fn sleep(&self, options: SleepOptions) -> Result<SleepReport, DeviceError> {
        let outcome = self.try_sleep(options);
        if let Err(error) = &outcome {
            log!(info, arena = self.name(), %error, "arena sleep failed");
        }
        outcome
    }

    /// Like [`DeviceArena::sleep`], but does not log failures.
    fn try_sleep(&self, options: SleepOptions) -> Result<SleepReport, DeviceError> {
        let inner = self.inner();
        inner.check_open()?;
        inner.empty_fronts();
        inner.check_way_back(&inner.lock())?;
        let outcome = inner.sleep(options);
        inner.flush_events();
        inner.debug_validate();
        if let Ok(SleepReport { released, offloaded, stayed }) = &outcome {
            let arena = self.name();
            log!(info, arena, %released, %offloaded, %stayed, "arena fell asleep");
        }
        outcome
    }

    /// Restores the memory of a sleeping arena at the same addresses, with the kept contents. Waits
    /// for the copies. If another thread is waking it, waits for that and returns an empty report.
    ///
    /// If memory is short, it skips memory of blocks freed meanwhile, releases its own idle memory,
    /// calls the shortage callbacks ([`DeviceArena::on_shortage`]), and retries for
    /// [`SleepConfig::wake_timeout`]. The figures of [`DeviceError::OutOfMemory`] then describe the
    /// wake, also for an allocation that caused it: `requested` is the part of the arena that found
    /// no room, at most 1 GiB, `committed` its memory without that part.
    ///
    /// # Errors
    /// [`DeviceError::State`] if it is awake. It stays asleep, with its contents saved, after
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Driver`], and [`DeviceError::Capturing`] if a
    /// stream captures a graph, which the wait for the copies would invalidate.
    /// [`DeviceError::Closed`], [`DeviceError::Forked`].
    pub fn wake(&self) -> Result<WakeReport, DeviceError> {
        let inner = self.inner();
        inner.check_open()?;
        let woken = inner.wake()?;
        inner.debug_validate();
        Ok(woken)
    }

    /// Like [`DeviceArena::wake`], for a thread that must not wait: it fails if the arena is
    /// already waking or falling asleep, and does not retry if memory is short.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::wake`].
    pub fn wake_at_once(&self) -> Result<WakeReport, DeviceError> {
        let inner = self.inner();
        inner.check_open()?;
        let woken = inner.wake_at_once()?;
        inner.debug_validate();
        Ok(woken)
    }

    /// Returns the sleep state; awake for a closed arena.
    #[must_use]
    pub fn state(&self) -> SleepState {
        let inner = self.inner();
        if inner.check_here().is_err() {
            return SleepState::default();
        }
        inner.lock().sleep.state()
    }

    /// Returns `true` if a thread waits for it to be awake; for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.inner().lock().sleep.is_wanted()
    }

    /// Returns `true` if a call is in progress that a sleep waits for; for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.inner().lock().is_busy()
    }

    /// Sets if the host memory for contents is kept between sleeps ([`SleepConfig::keep_stores`]),
    /// and releases memory kept until now.
    ///
    /// The next sleep uses kept memory if its contents fit, and releases it otherwise.
    /// [`DeviceArena::release_stores`] and the end of the arena release it too.
    pub fn set_keep_stores(&self, keep_stores: bool) {
        let inner = self.inner();
        if inner.check_here().is_ok() {
            inner.set_between(keep_stores);
        }
    }

    /// Releases the host memory kept between sleeps and returns its bytes. If the driver refuses,
    /// it is retried later ([`DeviceArena::decay`]). Contents of a sleeping arena are not affected.
    pub fn release_stores(&self) -> ByteSize {
        let inner = self.inner();
        if inner.check_here().is_err() {
            return ByteSize::ZERO;
        }
        inner.release_kept()
    }

    /// Sets the budget from which a sleep reserves host memory before it copies contents; without
    /// one, nothing is reserved. A `Memory` sets its own ledger for the arenas that it opens.
    ///
    /// ```
    /// use std::any::Any;
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    ///
    /// use lowtide_gpu::ByteSize;
    /// use lowtide_gpu::HostBudget;
    ///
    /// struct Budget(Arc<AtomicU64>);
    ///
    /// /// Released on drop.
    /// struct Reserved(Arc<AtomicU64>, u64);
    ///
    /// impl HostBudget for Budget {
    ///     fn reserve(&self, bytes: ByteSize) -> Result<Box<dyn Any + Send>, String> {
    ///         let left = |left: u64| left.checked_sub(bytes.get());
    ///         let refused = |left| format!("{} are left", ByteSize::new(left));
    ///         self.0.fetch_update(Relaxed, Relaxed, left).map_err(refused)?;
    ///         Ok(Box::new(Reserved(self.0.clone(), bytes.get())))
    ///     }
    /// }
    ///
    /// impl Drop for Reserved {
    ///     fn drop(&mut self) {
    ///         self.0.fetch_add(self.1, Relaxed);
    ///     }
    /// }
    /// # use lowtide_gpu::clock::SystemClock;
    /// # use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    /// let left = Arc::new(AtomicU64::new(ByteSize::gib(4).get()));
    /// arena.set_host_budget(Arc::new(Budget(left)));
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    pub fn set_host_budget(&self, budget: Arc<dyn HostBudget>) {
        if self.inner().check_here().is_ok() {
            let before = self.inner().lock().sleep.budget.replace(budget);
            drop(before); // not ours, and so with no lock held
        }
    }
}

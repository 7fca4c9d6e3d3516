//! Sleep: an idle arena gives its memory away, that of live blocks included, and has it back at the
//! same addresses when somebody enters.
//!
//! Four states: awake, draining (no lease may be left), asleep, waking. Contents are kept (copied
//! into host memory), discarded, or stay where they are, for each region and for each buffer. Each
//! way is taken whole or not at all: where a call of the driver fails, the arena is as it was, or
//! where not even that can be had, asleep with its contents safe.
//!
//! Files: `contents` (which granules go, pure), `phase` (the states, who waits for what), `stores`
//! (host memory and copies), `down`, `up`. It decides how, never when: the idle time is looked at
//! by who calls [`DeviceArena::sleep_if_idle`].
//!
//! Invariants: nothing leaves under a lease, nor before the host has seen that every use is
//! complete; bytes are booked with the host's budget before the first is copied; after an error
//! the arena is awake or asleep, and no memory, store or address is lost.

mod blocks;
pub(super) mod contents;
mod down;
mod idle;
pub(super) mod phase;
mod stores;
mod up;
mod waiting;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use super::arena::DeviceArena;
use super::error::DeviceError;
use crate::bytes::ByteSize;
use crate::sync::lock;

pub use contents::Contents;
pub use waiting::EnterFuture;

/// Whether an arena's memory can be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ArenaState {
    /// It can.
    #[default]
    Awake,
    /// It is about to fall asleep: it waits for the last lease, or its contents are on their way
    /// out.
    Draining,
    /// Its memory is given away; who enters wakes it.
    Asleep,
    /// Its memory is on the way back.
    Waking,
}

impl ArenaState {
    /// All of them.
    pub(super) const ALL: [Self; 4] = [Self::Awake, Self::Draining, Self::Asleep, Self::Waking];

    /// The name under which metrics and endpoints show it.
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

/// How an arena falls asleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SleepOptions {
    /// How long to wait for the leases that are held; zero not to wait.
    pub drain: Duration,
    /// What becomes of the contents of the stable region's buffers, but of those that say otherwise
    /// ([`Buffer::set_contents`](super::Buffer::set_contents)).
    pub stable: Contents,
    /// The same of the dynamic region's.
    pub dynamic: Contents,
}

impl Default for SleepOptions {
    /// Waits for a second, and keeps all contents.
    fn default() -> Self {
        let kept = Contents::Keep;
        Self { drain: Duration::from_secs(1), stable: kept, dynamic: kept }
    }
}

/// When an arena falls asleep by itself, and how it wakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SleepConfig {
    /// How long nobody must have held a lease; `None` for never. An arena that has blocks given out
    /// by address never does: nobody says when those are used.
    pub idle_after: Option<Duration>,
    /// How long it stays awake at least, once it was opened or woken.
    pub min_awake: Duration,
    /// How it falls asleep then; nobody is waited for.
    pub options: SleepOptions,
    /// For how long a wake that finds too little memory tries again, eight times, before it fails;
    /// zero to fail at once. By the arena's clock: over one that stands still, as a manual clock
    /// that nobody advances, such a wake waits for ever.
    pub wake_timeout: Duration,
    /// Whether the host memory for contents stays, and stays booked, from one sleep to the next:
    /// page-locked memory takes longer to be had than to be filled. Else it is given back after
    /// each wake. See [`DeviceArena::set_keep_stores`].
    pub keep_stores: bool,
}

impl Default for SleepConfig {
    /// Never by itself; a wake tries for 2 s: what a neighbour has freed shows within 1.5 s. No
    /// host memory stays.
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

/// What falling asleep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SleepReport {
    /// Bytes given back to the driver.
    pub released: ByteSize,
    /// Bytes copied into host memory: whole granules.
    pub offloaded: ByteSize,
    /// Bytes that stay committed.
    pub stayed: ByteSize,
}

/// What waking did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WakeReport {
    /// Bytes committed.
    pub committed: ByteSize,
    /// Bytes copied back.
    pub restored: ByteSize,
}

/// Where host memory is booked before contents are copied into it.
///
/// The arena is on its way down meanwhile: what would wait for that to end, as to enter it or to
/// allocate there, is refused within these calls ([`DeviceError::State`]). A panic is no booking.
pub trait HostBudget: Send + Sync {
    /// Books so many bytes, for as long as what is returned is kept; it is dropped on any thread,
    /// when the host memory has been given back. Called with no lock held.
    ///
    /// # Errors
    /// Why not: the arena then stays awake.
    fn book(&self, bytes: ByteSize) -> Result<Box<dyn Any + Send>, String>;

    /// Says that the host memory of a booking is there, and the contents are in it: from here on it
    /// is part of what is measured. Called with no lock held. Default: nothing.
    fn settle(&self, booked: &mut (dyn Any + Send)) {
        let _ = booked;
    }
}

impl DeviceArena {
    /// Gives all memory away, that of live blocks included; who enters next has it back at the same
    /// addresses, and so has who allocates or resizes. Frees go on meanwhile.
    ///
    /// Waits for leases until the deadline of the options, then for the device's work, without
    /// deadline. A lease that is taken while it waits, or copies, cancels it.
    ///
    /// Driver calls: for each run of at most 1 GiB a decommit, and where contents are kept a
    /// copy; none for a block. Host memory: whole granules of what is kept, rounded up to 64 KiB,
    /// booked with the budget of [`DeviceArena::set_host_budget`] before the first copy. Where
    /// device memory is the host's own, what is kept stays where it is.
    ///
    /// A driver without [`same_address_wake`](super::driver::Capabilities::same_address_wake) can
    /// give no live block its address again: an arena on it falls asleep while nothing is live, and
    /// else not.
    ///
    /// Who uses memory without a lease uses it at their own risk: blocks by address, and captured
    /// graphs, find nothing behind their addresses until the arena is awake again.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide::clock::SystemClock;
    /// use lowtide::device::{
    ///     ArenaConfig, ArenaState, Contents, DeviceArena, HostDriver, Region, SleepOptions,
    /// };
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    /// let weights = arena.alloc_from(&[7_u8; 4 << 20], Region::Stable)?;
    /// let cache = arena.alloc_from(&[1_u8; 4 << 20], Region::Dynamic)?;
    /// let options = SleepOptions { dynamic: Contents::Discard, ..SleepOptions::default() };
    /// arena.sleep(options)?;
    /// assert_eq!(arena.state(), ArenaState::Asleep);
    /// let lease = arena.enter()?; // wakes it
    /// assert_eq!(weights.slice(&lease)?[0], 7);
    /// assert!(cache.take_discarded()); // to be filled anew
    /// # Ok::<(), lowtide::device::DeviceError>(())
    /// ```
    ///
    /// # Errors
    /// The arena is awake after [`DeviceError::Leased`] (the deadline has passed),
    /// [`DeviceError::Exported`] (at once), [`DeviceError::SleepCancelled`],
    /// [`DeviceError::HostBudget`], [`DeviceError::Capturing`] (to wait would spoil the capture of
    /// a graph), and as it was after [`DeviceError::State`] (it is not awake),
    /// [`DeviceError::Unsupported`] (the driver cannot wake at the same addresses, and something
    /// is live),
    /// [`DeviceError::Closed`], [`DeviceError::Forked`]. After [`DeviceError::Driver`] it is awake,
    /// or where its memory was gone and cannot be had back asleep: [`DeviceArena::state`] says
    /// which; no contents are lost but those to be discarded.
    pub fn sleep(&self, options: SleepOptions) -> Result<SleepReport, DeviceError> {
        let outcome = self.try_sleep(options);
        if let Err(error) = &outcome {
            log!(info, arena = self.name(), %error, "the arena did not sleep");
        }
        outcome
    }

    /// As [`DeviceArena::sleep`], without a word where it fails.
    fn try_sleep(&self, options: SleepOptions) -> Result<SleepReport, DeviceError> {
        let shared = self.shared();
        shared.check_open()?;
        shared.empty_fronts();
        shared.check_way_back(&shared.books())?;
        let outcome = shared.sleep(options);
        shared.pass_on();
        shared.debug_validate();
        if let Ok(SleepReport { released, offloaded, stayed }) = &outcome {
            let arena = self.name();
            log!(info, arena, %released, %offloaded, %stayed, "the arena fell asleep");
        }
        outcome
    }

    /// Has the memory of a sleeping arena back, at the same addresses, with what was kept. Waits
    /// for the copies. Where another thread is at it, waits for that and says nothing was done.
    ///
    /// Where there is too little memory, does without what is freed meanwhile, gives its own idle
    /// memory back, asks the callbacks ([`DeviceArena::on_shortage`]), and tries again for as long
    /// as [`SleepConfig::wake_timeout`] says. The figures of [`DeviceError::OutOfMemory`] are about
    /// the wake then, whoever asked for it: `requested` is the part of the arena that found no
    /// room, at most 1 GiB, `committed` what it holds without it.
    ///
    /// # Errors
    /// [`DeviceError::State`] where it is awake. It sleeps on after [`DeviceError::OutOfMemory`],
    /// [`DeviceError::Driver`], and [`DeviceError::Capturing`] where a stream captures a graph,
    /// which the wait for its copies would spoil; its contents are safe.
    /// [`DeviceError::Closed`], [`DeviceError::Forked`].
    pub fn wake(&self) -> Result<WakeReport, DeviceError> {
        let shared = self.shared();
        shared.check_open()?;
        let woken = shared.wake()?;
        shared.debug_validate();
        Ok(woken)
    }

    /// The same for a thread that has other things to do: where it is on its way up or down already
    /// that is an error, and where memory is short it does not wait for it.
    ///
    /// # Errors
    /// As [`DeviceArena::wake`].
    pub fn wake_at_once(&self) -> Result<WakeReport, DeviceError> {
        let shared = self.shared();
        shared.check_open()?;
        let woken = shared.wake_at_once()?;
        shared.debug_validate();
        Ok(woken)
    }

    /// Whether its memory can be used now; awake, once it is closed.
    #[must_use]
    pub fn state(&self) -> ArenaState {
        let shared = self.shared();
        if shared.check_here().is_err() {
            return ArenaState::default();
        }
        lock(&shared.books).sleep.state()
    }

    /// Whether somebody waits for it to be awake; for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        lock(&self.shared().books).sleep.is_wanted()
    }

    /// Whether a call is under way that who puts it to sleep waits for; for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn is_busy(&self) -> bool {
        lock(&self.shared().books).is_busy()
    }

    /// Says whether the host memory for contents stays between sleeps
    /// ([`SleepConfig::keep_stores`]); gives back what stayed until now.
    ///
    /// What stays is used by the next sleep whose contents fit, and given back by one whose
    /// contents do not, by [`DeviceArena::release_stores`], and at the end of the arena.
    pub fn set_keep_stores(&self, keep_stores: bool) {
        let shared = self.shared();
        if shared.check_here().is_ok() {
            shared.set_between(keep_stores);
        }
    }

    /// Gives back the host memory that stays between sleeps; returns how much that was. What the
    /// driver does not take is tried again later ([`DeviceArena::decay`]). The contents of an arena
    /// that sleeps are not touched.
    pub fn release_stores(&self) -> ByteSize {
        let shared = self.shared();
        if shared.check_here().is_err() {
            return ByteSize::ZERO;
        }
        shared.release_kept()
    }

    /// Sets where host memory is booked before contents are copied into it; without, nowhere. A
    /// `Memory` has set its own ledger for the arenas that it opened.
    ///
    /// ```
    /// use std::any::Any;
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    ///
    /// use lowtide::ByteSize;
    /// use lowtide::device::HostBudget;
    ///
    /// struct Budget(Arc<AtomicU64>);
    ///
    /// /// Given back when it is dropped.
    /// struct Booked(Arc<AtomicU64>, u64);
    ///
    /// impl HostBudget for Budget {
    ///     fn book(&self, bytes: ByteSize) -> Result<Box<dyn Any + Send>, String> {
    ///         let left = |left: u64| left.checked_sub(bytes.get());
    ///         let refused = |left| format!("{} are left", ByteSize::new(left));
    ///         self.0.fetch_update(Relaxed, Relaxed, left).map_err(refused)?;
    ///         Ok(Box::new(Booked(self.0.clone(), bytes.get())))
    ///     }
    /// }
    ///
    /// impl Drop for Booked {
    ///     fn drop(&mut self) {
    ///         self.0.fetch_add(self.1, Relaxed);
    ///     }
    /// }
    /// # use lowtide::clock::SystemClock;
    /// # use lowtide::device::{ArenaConfig, DeviceArena, HostDriver};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    /// let left = Arc::new(AtomicU64::new(ByteSize::gib(4).get()));
    /// arena.set_host_budget(Arc::new(Budget(left)));
    /// # Ok::<(), lowtide::device::DeviceError>(())
    /// ```
    pub fn set_host_budget(&self, budget: Arc<dyn HostBudget>) {
        if self.shared().check_here().is_ok() {
            let before = lock(&self.shared().books).sleep.budget.replace(budget);
            drop(before); // not ours, and so with no lock held
        }
    }
}

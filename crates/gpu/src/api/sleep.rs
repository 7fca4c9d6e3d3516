//! Sleep: an idle arena releases its memory, including that of live blocks, and gets memory at the
//! same addresses when it is entered again.
//!
//! Four states: awake, draining (waiting for leases to end), asleep, waking. Contents are kept
//! (copied to host memory), discarded, or stay in place, set per region and per buffer. Each
//! transition completes or is undone: if a driver call fails, the arena is unchanged; if undoing
//! fails too, it is asleep with its contents saved.
//!
//! `engine::suspend` and `engine::resume` are the transitions, `engine::stores` the copies. Driver
//! calls block, so a separate thread wakes a sleeping arena for a future that enters, and ends
//! afterwards. A future needs no runtime.
//!
//! Invariants: no memory leaves under a lease, nor before the host has seen that every use is
//! complete; host memory is reserved with the host budget before the first copy; after an error the
//! arena is awake or asleep, and no memory, store or address is lost; a future that waits is woken
//! at least once when the wait is over, and a dropped future blocks no operation.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use crate::api::arena::DeviceArena;
use crate::api::lane::Lease;
use crate::engine::resume::{begin_wake, fail_wake, resume, try_enter, wake, wake_at_once};
use crate::engine::stores;
use crate::engine::suspend::{is_busy, next_sleep, suspend};
use crate::exec::ArenaInner;
use crate::state::SleepPhase;
use crate::types::{DeviceError, HostBudget, Result, SleepOptions, SleepReport, SleepState};
use lowtide_core::clock::Moment;
use lowtide_core::sync::caught;
use lowtide_core::{ByteSize, log};

/// The delay before an arena that could not fall asleep, or was interrupted, tries again. A guess.
const AGAIN: Duration = Duration::from_secs(10);

/// The future of [`DeviceArena::enter_async`].
struct EnterFuture {
    arena: Arc<ArenaInner>,
    /// The number of wakes that had ended when the wait began.
    before: Option<u64>,
    /// The id of the wait.
    waits: Option<u64>,
}

impl DeviceArena {
    /// Releases the memory of the arena, including that of live blocks. The next lease, allocation
    /// or resize restores it at the same addresses. Frees are possible meanwhile. Memory with
    /// [`Contents::Stay`](crate::Contents::Stay) stays committed; on a driver whose memory is host
    /// memory, so does memory with [`Contents::Keep`](crate::Contents::Keep), as a copy would need
    /// as much.
    ///
    /// Waits for leases until the drain timeout of the options, then for the device's work, without
    /// a timeout. Entering during the wait or the copies cancels the sleep.
    ///
    /// Driver calls: a decommit for each run of at most 1 GiB, and a copy if contents are kept;
    /// none per block. Host memory: whole granules of kept contents, rounded up to 64 KiB, reserved
    /// with the budget of [`DeviceArena::set_host_budget`] before the first copy.
    ///
    /// A driver without [`virtual_memory`](crate::driver::Capabilities::virtual_memory) cannot
    /// restore a live block at its address: an arena on it sleeps only if nothing is live.
    ///
    /// Use of memory without a lease is at the caller's own risk: raw blocks and captured graphs
    /// have no memory at their addresses until the arena is awake again.
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
    pub fn sleep(&self, options: SleepOptions) -> Result<SleepReport> {
        let outcome = self.try_sleep(options);
        if let Err(error) = &outcome {
            log!(info, arena = self.name(), %error, "arena sleep failed");
        }
        outcome
    }

    /// Like [`DeviceArena::sleep`], but does not log failures.
    fn try_sleep(&self, options: SleepOptions) -> Result<SleepReport> {
        let inner = self.inner();
        inner.check_open()?;
        inner.empty_caches();
        let outcome = inner.run(async |cx| suspend(cx, options).await);
        inner.debug_validate();
        if let Ok(SleepReport { memory: released, copied: offloaded, stayed }) = &outcome {
            let arena = self.name();
            log!(info, arena, %released, %offloaded, %stayed, "arena asleep");
        }
        outcome
    }

    /// Restores the memory of a sleeping arena at the same addresses, with the kept contents. Waits
    /// for the copies. If another thread is waking it, waits for that and returns an empty report.
    ///
    /// If memory is short, it skips memory of blocks freed meanwhile, releases its own idle memory,
    /// calls the shortage callbacks ([`DeviceArena::on_shortage`]), and retries for
    /// [`SleepConfig::wake_timeout`](crate::SleepConfig::wake_timeout). The figures of
    /// [`DeviceError::OutOfMemory`] then describe the wake, also for an allocation that caused it:
    /// `requested` is the part of the arena that found no room, at most 1 GiB, `committed` its
    /// memory without that part.
    ///
    /// # Errors
    /// [`DeviceError::State`] if it is awake. It stays asleep, with its contents saved, after
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Driver`], and [`DeviceError::Capturing`] if a
    /// stream captures a graph, which the wait for the copies would invalidate.
    /// [`DeviceError::Closed`], [`DeviceError::Forked`].
    pub fn wake(&self) -> Result<SleepReport> {
        let inner = self.inner();
        inner.check_open()?;
        let report = inner.run(wake)?;
        inner.debug_validate();
        Ok(report)
    }

    /// Like [`DeviceArena::wake`], for a thread that must not wait: it fails if the arena is
    /// already waking or falling asleep, and does not retry if memory is short.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::wake`].
    pub fn wake_at_once(&self) -> Result<SleepReport> {
        let inner = self.inner();
        inner.check_open()?;
        let report = inner.run(wake_at_once)?;
        inner.debug_validate();
        Ok(report)
    }

    /// Returns the sleep state; awake for a closed arena.
    #[must_use]
    pub fn state(&self) -> SleepState {
        self.inner().run_here(|state| state.sleep.state()).unwrap_or_default()
    }

    /// Returns `true` if a thread waits for the arena to be awake; for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.inner().run_now(|state| state.sleep.is_wanted())
    }

    /// Returns `true` if a call that a sleep waits for is in progress; for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.inner().run_now(|state| is_busy(state))
    }

    /// Allocates the host memory that a sleep with these options would need now, so that the sleep
    /// itself only copies. Returns the bytes allocated; zero if there is enough, or if another
    /// thread is doing this. Leases may be held meanwhile, and others can enter.
    ///
    /// Reserves the memory in the host budget. Takes about 0.1 to 0.4 s for each GiB. A decay
    /// releases what live blocks no longer need. [`DeviceArena::sleep_if_idle`] does this itself,
    /// with the options of [`ArenaConfig::sleep`](crate::ArenaConfig::sleep); in a `Memory` these
    /// are `memory.config().device_sleep().options`.
    ///
    /// It may exceed [`SleepConfig::stores_max`](crate::SleepConfig::stores_max), which applies
    /// again after the wake from the sleep that uses the memory. Does nothing if device memory is
    /// host memory: such an arena copies nothing.
    ///
    /// # Errors
    /// [`DeviceError::State`] if the arena is not awake, [`DeviceError::HostBudget`] if the budget
    /// rejects the bytes, [`DeviceError::Callback`] if it panics, [`DeviceError::Driver`]: memory
    /// allocated before the error stays. [`DeviceError::Closed`], [`DeviceError::Forked`].
    pub fn prepare_stores(&self, options: SleepOptions) -> Result<ByteSize> {
        let inner = self.inner();
        inner.check_open()?;
        inner.run(async |cx| stores::prepare(cx, options, |_| true).await)
    }

    /// Sets the maximum host memory for contents that stays allocated after a wake
    /// ([`SleepConfig::stores_max`](crate::SleepConfig::stores_max)), and releases what exceeds it,
    /// prepared memory included. Releases whole stores of up to 1 GiB, so less than the maximum may
    /// stay.
    ///
    /// The next sleep uses this memory, and allocates what is missing. [`DeviceArena::decay`]
    /// releases what live blocks do not need after the decay time. [`DeviceArena::release_stores`]
    /// and the end of the arena release all of it. Has no effect if device memory is host memory.
    pub fn set_stores_max(&self, stores_max: ByteSize) {
        let inner = self.inner();
        if inner.check_here().is_ok() {
            inner.run(async |cx| stores::set_stores_max(cx, stores_max).await);
        }
    }

    /// Releases the host memory that is allocated for the next sleep and returns its bytes. If the
    /// driver refuses, the memory stays. Releases nothing while the arena wakes, and no contents of
    /// a sleeping arena. There is none to release if device memory is host memory.
    pub fn release_stores(&self) -> ByteSize {
        let inner = self.inner();
        if inner.check_here().is_err() { ByteSize::ZERO } else { inner.run(stores::release_idle) }
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
        let before = self.inner().run_here(|state| state.sleep.budget.replace(budget));
        drop(before); // foreign code, dropped with no lock held
    }

    /// Puts the arena to sleep if no lease was held for [`SleepConfig::idle_after`] at `now`, and
    /// it has been awake for [`SleepConfig::min_awake`]; otherwise returns `None`. Does not wait
    /// for leases. Otherwise like [`DeviceArena::sleep`].
    ///
    /// On the worker of a `Memory` it does not wait for the whole device: an arena with leases
    /// without a lane stays awake there, with [`DriverError::Background`].
    ///
    /// On a driver without [`virtual_memory`](crate::driver::Capabilities) it releases idle memory
    /// instead, stays awake and returns `None`.
    ///
    /// Allocates host memory for contents first, while others can still enter.
    ///
    /// Allocations and frees do not count as leases. An arena without memory stays awake, and so
    /// does one with raw blocks or exported buffers. If a lease or a free interrupts it, it returns
    /// `None`, and does not try again for 10 s; the same holds after an error.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::sleep`].
    ///
    /// [`DriverError::Background`]: crate::driver::DriverError::Background
    /// [`SleepConfig::idle_after`]: crate::SleepConfig::idle_after
    /// [`SleepConfig::min_awake`]: crate::SleepConfig::min_awake
    pub fn sleep_if_idle(&self, now: Moment) -> Result<Option<SleepReport>> {
        self.inner().check_here()?;
        if self.next_sleep() > now {
            return Ok(None);
        }
        let inner = self.inner();
        if !inner.capabilities.virtual_memory {
            self.pause_sleep();
            if !inner.run_now(|state| mem::replace(&mut state.sleep.has_logged_unsupported, true)) {
                let (arena, backend) = (self.name(), self.backend());
                log!(info, arena, %backend, "backend cannot sleep, releasing only idle memory");
            }
            return self.purge().map(|_| None);
        }
        let config = inner.run_now(|state| state.sleep.config);
        let options = SleepOptions { drain: Duration::ZERO, ..config.options };
        let prepared =
            inner.run(async |cx| stores::prepare(cx, options, |state| state.leases == 0).await);
        let outcome = prepared.and_then(|_| self.try_sleep(options));
        let Err(error) = outcome else { return outcome.map(Some) };
        // An allocation that cancels the sleep is not a lease. Without a pause the sleep would be
        // tried again at once, and contents would be copied for nothing.
        self.pause_sleep();
        inner.run_now(|state| state.sleep.idle.prepared = ByteSize::ZERO);
        log!(debug, arena = self.name(), %error, "arena idle sleep failed");
        match error {
            // Another thread was faster, so the arena is not idle.
            DeviceError::Leased { .. }
            | DeviceError::Exported { .. }
            | DeviceError::SleepCancelled { .. }
            | DeviceError::State { .. } => Ok(None),
            error => Err(error),
        }
    }

    /// Keeps the arena from falling asleep by itself for some time.
    fn pause_sleep(&self) {
        let again = self.inner().executor.clock.now() + AGAIN;
        self.inner().run_now(|state| state.sleep.not_before = state.sleep.not_before.max(again));
    }

    /// Returns the time for the next [`DeviceArena::sleep_if_idle`]; [`Moment::NEVER`] if idle
    /// sleep is off, a lease is held, or the arena is not awake, has no memory, or has raw blocks
    /// or exported buffers. Takes the lock for a few comparisons.
    #[must_use]
    pub fn next_sleep(&self) -> Moment {
        self.inner().run_here(|state| next_sleep(state)).unwrap_or(Moment::NEVER)
    }

    /// Returns a lease, like [`DeviceArena::enter`], without blocking while a sleeping arena wakes:
    /// a separate thread wakes it. Needs no runtime. While blocks are being moved it may block for
    /// the duration of one copy. Dropping the future cancels the wait, but not a wake of the arena
    /// in progress.
    ///
    /// # Errors
    /// The future returns the errors of [`DeviceArena::enter`], and [`DeviceError::Thread`] if no
    /// thread could be started.
    pub fn enter_async(&self) -> impl Future<Output = Result<Lease>> + Send + Unpin + use<> {
        EnterFuture { arena: Arc::clone(self.inner()), before: None, waits: None }
    }
}

impl Future for EnterFuture {
    type Output = Result<Lease>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        this.arena.check_open()?;
        // The clone and the drop of a waker are foreign code, called with the lock released.
        let mut waker = Some(context.waker().clone());
        let (before, waits) = (&mut this.before, &mut this.waits);
        let wait = this.arena.run_now(|state| {
            let before = *before.get_or_insert(state.sleep.attempts);
            let wake_timeout = match state.sleep.phase {
                SleepPhase::Awake | SleepPhase::Draining(_) => return Ok(None),
                SleepPhase::Asleep => {
                    if let Some(error) = state.sleep.failed_since(before) {
                        return Err(error);
                    }
                    Some(begin_wake(state))
                }
                SleepPhase::Suspending | SleepPhase::Waking => None,
            };
            Ok(Some((wake_timeout, waker.take().map(|waker| state.sleep.register(waits, waker)))))
        });
        match wait? {
            None => {
                if this.arena.run(try_enter)? {
                    return Poll::Ready(Ok(Lease::new(&this.arena, Vec::new())));
                }
                context.waker().wake_by_ref(); // the arena fell asleep meanwhile
            }
            Some((Some(timeout), _replaced)) => spawn_wake(&this.arena, timeout)?,
            Some((None, _replaced)) => {}
        }
        Poll::Pending
    }
}

/// Starts a thread that wakes an arena, which is already marked as waking.
fn spawn_wake(arena: &Arc<ArenaInner>, wake_timeout: Duration) -> Result<()> {
    let inner = Arc::clone(arena);
    let wake = move || {
        let _ = inner.run(async |cx| resume(cx, wake_timeout).await);
    };
    let thread = thread::Builder::new().name("lowtide-wake".to_owned());
    thread.spawn(wake).map(drop).map_err(|error| {
        let error = DeviceError::Thread { message: error.to_string() };
        arena.run(async |cx| fail_wake(cx, error).await)
    })
}

impl Drop for EnterFuture {
    /// Cancels the wait. Does nothing in a forked child.
    fn drop(&mut self) {
        let Some(waits) = self.waits else { return };
        let waker = self.arena.run_here(|state| state.sleep.wakers.remove(&waits));
        let _ = caught(|| drop(waker)); // foreign code; nothing may unwind out of a drop
    }
}

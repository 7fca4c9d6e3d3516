//! `Managed<T>`: a costly resource that is loaded on first use and unloaded when it has been idle.
//!
//! Concurrent callers share one load, and there are never two copies: callers that arrive during an
//! unload wait for its end. The cost is reserved before the load and released after the cleanup. A
//! load that has no room evicts idle resources (see [`Resources::evict_for`]) or is rejected. Idle
//! time counts from the release of the last guard. Loading and cleanup run outside every lock, and
//! a panic in either is caught. The module starts no permanent thread and needs no async runtime: the
//! future of [`Managed::acquire`] loads on a thread of its own, and dropping it does not stop the
//! load.
//!
//! It does not decide when to unload: the caller of [`Managed::unload_if_due`] supplies the time.
//!
//! States: `Empty -> Loading -> Ready -> Unloading -> Empty`, and `Loading -> Failed -> Loading`
//! after a pause that doubles. A load that exceeds its timeout fails, although its loader still
//! runs.
//!
//! Invariants: `guards > 0 => Ready`; `copies of T <= 1`, except values that loaders return after
//! their timeout, which are cleaned up at once;
//! `reserved cost > 0 <=> Loading, Ready or Unloading`, or handed to the load that evicted it.

mod builder;
mod cell;
mod error;
mod resource;
mod ticket;

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::time::Duration;

use lowtide_core::BoxError;
use lowtide_core::clock::{Clock, Moment};

use super::admission::Admission;

use cell::Cell;
use resource::AnyResource;
use ticket::Ticket;

pub use builder::{LoadScope, ManagedBuilder};
pub use cell::Use;
pub use error::{LoadFailure, ResourceError};
pub use resource::{ResourceStats, Resources, UnloadReason};

impl<T: Send + Sync + 'static> ManagedBuilder<T> {
    /// Builds the resource, which is not loaded yet. It does not keep the `Memory` of `admission`
    /// running.
    #[must_use]
    pub fn build(self, clock: Arc<dyn Clock>, admission: Option<Admission>) -> Managed<T> {
        let admission = admission.map(|admission| admission.unkept());
        Managed { cell: Arc::new(Cell::new(self, clock, admission)) }
    }
}

/// A resource that is loaded while it is in use. Cheap to clone; all clones share one resource.
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use lowtide_admission::clock::{Clock, ManualClock};
/// use lowtide_admission::Managed;
///
/// let clock = Arc::new(ManualClock::new());
/// let words = Managed::builder("words", || Ok(vec!["ebb", "flow"]))
///     .idle(Duration::from_secs(300))
///     .build(clock.clone(), None);
/// assert_eq!(words.acquire_blocking()?.len(), 2);
/// clock.advance(Duration::from_secs(299));
/// assert!(!words.unload_if_due(clock.now()));
/// clock.advance(Duration::from_secs(1));
/// assert!(words.unload_if_due(clock.now()));
/// # Ok::<(), lowtide_admission::ResourceError>(())
/// ```
pub struct Managed<T: Send + Sync + 'static> {
    cell: Arc<Cell<T>>,
}

impl<T: Send + Sync + 'static> Managed<T> {
    /// Creates a builder for a resource of this name.
    ///
    /// `loader` may be called again after an unload or a failure. It must not acquire the resource
    /// itself: that returns [`ResourceError::Recursive`]. It must also not acquire a resource whose
    /// loader acquires this one: two threads that start with one each wait for each other forever,
    /// and this is not detected.
    pub fn builder(
        name: impl Into<Arc<str>>,
        loader: impl Fn() -> Result<T, BoxError> + Send + Sync + 'static,
    ) -> ManagedBuilder<T> {
        ManagedBuilder::new(name.into(), Box::new(loader))
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.cell.name()
    }

    /// Acquires a guard. Runs the loader on this thread if the resource is not loaded and no other
    /// thread loads it, otherwise waits for that load. Blocks for the duration of the load, or of
    /// the clean-up of the previous copy. If there is no room for the load, it waits like
    /// [`Managed::acquire`], and the loader runs on a new thread. The thread that drives the
    /// control loop must not call it: it would wait forever.
    ///
    /// Do not call it on a thread of an async runtime: this is not detected, and the thread serves
    /// no other task meanwhile. With as many such calls as the runtime has workers, all tasks stop.
    /// Use [`Managed::acquire`] there, or the runtime's pool for blocking work
    /// (`tokio::task::spawn_blocking`).
    ///
    /// The caller that runs the loader itself is not interrupted by the
    /// [timeout](ManagedBuilder::load_timeout): it gets the error when its loader returns.
    ///
    /// # Panics
    /// A panic of the loader is caught and becomes [`LoadFailure::Panicked`]. With `panic = "abort"`
    /// in the profile of the binary it cannot be caught and ends the process.
    ///
    /// # Errors
    /// [`ResourceError`]. All callers that waited for a failed load get its error.
    pub fn acquire_blocking(&self) -> Result<Use<T>, ResourceError> {
        let load = || Ticket::new(Arc::clone(&self.cell), true).wait();
        Cell::guard_at_once(&self.cell).map_or_else(load, Ok)
    }

    /// Waits for the resource to be loaded and returns a guard. If no load is running, starts one
    /// on a new thread. Dropping the future stops waiting, not the load. Takes some tens of
    /// nanoseconds if the resource is loaded.
    ///
    /// If evictions cannot make room for the load, or if the level is critical, it waits for at
    /// most 2 s in the queue of requests, ahead of those that have not been admitted. Without a
    /// control loop it is rejected immediately.
    pub fn acquire(
        &self,
    ) -> impl Future<Output = Result<Use<T>, ResourceError>> + Send + Unpin + use<T> {
        let mut ticket = Ticket::new(Arc::clone(&self.cell), false);
        poll_fn(move |cx| ticket.poll(cx))
    }

    /// Returns a guard if the resource is loaded now.
    #[must_use]
    pub fn try_acquire(&self) -> Option<Use<T>> {
        Cell::try_acquire(&self.cell, true)
    }

    /// Like [`Managed::try_acquire`], but does not count as use: the idle time continues.
    #[must_use]
    pub fn peek(&self) -> Option<Use<T>> {
        Cell::try_acquire(&self.cell, false)
    }

    /// Starts a load on a new thread if the resource is not loaded. Does not wait.
    ///
    /// # Errors
    /// [`ResourceError`] if the resource may not be loaded now.
    pub fn warm(&self) -> Result<(), ResourceError> {
        Cell::warm(&self.cell)
    }

    /// Unloads the resource on this thread as soon as it has no guards, and returns `false` if it
    /// was not loaded. New callers still get guards meanwhile, so that under constant traffic the
    /// resource stays loaded.
    ///
    /// # Errors
    /// [`ResourceError::Busy`] if the resource is still in use or loading when `wait` is over, and
    /// [`ResourceError::CleaningUp`] if another thread is still unloading it.
    pub fn unload_now(&self, wait: Duration) -> Result<bool, ResourceError> {
        Cell::unload_within(&self.cell, UnloadReason::Manual, wait)
    }
}

impl<T: Send + Sync + 'static> Clone for Managed<T> {
    fn clone(&self) -> Self {
        Self { cell: Arc::clone(&self.cell) }
    }
}

lowtide_core::debug_as!([T: Send + Sync + 'static] Managed<T>, |it| name: it.cell.name());

/// For programs without a `Memory`. The worker of a `Memory` does this for registered resources.
impl<T: Send + Sync + 'static> Managed<T> {
    /// Returns the time when the resource may be unloaded for idleness, or when its load times out;
    /// [`Moment::NEVER`] if neither applies. Does not allocate.
    #[must_use]
    pub fn next_due(&self) -> Moment {
        self.cell.next_due()
    }

    /// Unloads the resource on the calling thread if it is due, and returns `true` if it did. Also
    /// gives up a load that has timed out.
    pub fn unload_if_due(&self, now: Moment) -> bool {
        self.cell.unload_if(UnloadReason::Idle, Some(now)).is_some()
    }

    /// Unloads the resource on the calling thread if it has no guards, and returns `true` if it
    /// did. For pressure only after its minimum residency.
    pub fn unload(&self, reason: UnloadReason) -> bool {
        self.cell.unload_if(reason, None).is_some()
    }

    /// Closes the resource permanently and waits until it is unloaded.
    ///
    /// # Errors
    /// [`ResourceError::Busy`] if the resource is still in use when `wait` is over, and
    /// [`ResourceError::CleaningUp`] if its clean-up is still running then, and took a second.
    pub fn close(&self, wait: Duration) -> Result<(), ResourceError> {
        Arc::clone(&self.cell).close(wait)
    }

    /// Returns the state and counters; in a forked child only the name and cost.
    #[must_use]
    pub fn stats(&self) -> ResourceStats {
        self.cell.stats()
    }
}

impl Resources {
    /// Adds a resource. It stays, and its name is taken, as long as the registry exists.
    ///
    /// # Errors
    /// [`ResourceError`] if there are already [`Resources::MAX`], if the name is taken, or in a forked
    /// child. Nothing is added then.
    pub fn add<T: Send + Sync + 'static>(
        &self,
        resource: &Managed<T>,
    ) -> Result<(), ResourceError> {
        self.insert(Arc::clone(&resource.cell) as Arc<dyn AnyResource>)
    }
}

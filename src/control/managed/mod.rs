//! `Managed<T>`: something costly that is loaded on first use and unloaded when it has been idle.
//!
//! One load at a time whoever asks; never two copies, since those who come while it is unloaded
//! wait for the end of that; its cost is booked before the load and given back after the clean-up.
//! A load that has no room evicts idle ones (see [`Resources::evict_for`]), or is rejected.
//! Idleness counts from the release of the last guard. Loading and clean-up run off every lock, and
//! a panic in either is caught. It starts no thread that stays and knows no async runtime: the
//! future of [`Managed::acquire`] loads on a thread of its own, and dropping it does not stop the
//! load.
//!
//! It does not decide when to unload: whoever calls [`Resource::unload_if_due`] gives the time.
//!
//! States: `Empty -> Loading -> Ready -> Unloading -> Empty`, and `Loading -> Failed -> Loading`
//! after a pause that doubles. A load that takes longer than its timeout fails, though its loader
//! still runs.
//!
//! Invariants: `guards > 0 => Ready`; `copies of T <= 1`, apart from those that loaders return
//! after their timeout and that are taken apart at once; `booked cost > 0 <=> Loading, Ready or
//! Unloading`, or handed to the load that evicted it.

mod cell;
mod error;
mod load_scope;
mod parts;
mod resource;
mod ticket;

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::clock::{Clock, Moment};

use super::admission::{Admission, Cost};
use super::eviction::Idle;

use cell::Cell;
use parts::Parts;
use ticket::Ticket;

pub use error::{AcquireError, AddError, LoadError, UnloadError};
pub use load_scope::LoadScope;
pub use resource::{Resource, ResourceStats, Resources, UnloadReason, Unloads};

/// The time a load may take by default: enough for 60 GiB at 100 MiB/s. A guess.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// How long to wait after a failed load: doubled with each failure in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// After the first failure.
    pub first: Duration,
    /// At most.
    pub max: Duration,
}

impl Backoff {
    /// The pause after this many failures in a row; none after none.
    #[must_use]
    pub fn pause(self, failures: u32) -> Duration {
        let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
        let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.max)
    }
}

impl Default for Backoff {
    /// 250 ms to 30 s: a guess.
    fn default() -> Self {
        Self { first: Duration::from_millis(250), max: Duration::from_secs(30) }
    }
}

/// Builds a [`Managed`].
pub struct ManagedBuilder<T: Send + Sync + 'static> {
    parts: Parts<T>,
}

impl<T: Send + Sync + 'static> ManagedBuilder<T> {
    /// Unload after this long without use. Without it, it stays until asked or under pressure.
    #[must_use]
    pub fn idle(mut self, idle: Duration) -> Self {
        self.parts.idle = Some(idle);
        self
    }

    /// Keep it at least this long after a load, so that it does not come and go; zero by default.
    /// Holds for idleness, pressure and eviction, not for who asks.
    #[must_use]
    pub fn min_residency(mut self, time: Duration) -> Self {
        self.parts.min_residency = time;
        self
    }

    /// What it holds while it is loaded; booked before the load, which is refused where that does
    /// not fit. Where it was found to hold more of the host's memory the last time, that is booked.
    ///
    /// Nothing by default: no load is refused for its size then, and what it is found to hold is
    /// booked once it is there.
    #[must_use]
    pub fn cost(mut self, cost: Cost) -> Self {
        self.parts.cost = cost;
        self
    }

    /// How long to wait after failed loads.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.parts.backoff = backoff;
        self
    }

    /// The time a load may take, 10 minutes by default; [`Duration::ZERO`] for no timeout.
    ///
    /// When it is over, those who wait get [`LoadError::TimedOut`], the reservation of the load is
    /// released, and the next load may start after the [backoff](Self::backoff). A thread cannot be
    /// stopped: the loader runs on until it returns. What it returns then goes through
    /// [`unload`](Self::unload) on its own thread and never becomes the value of another load. At
    /// most 2 threads of a resource hang in its loader; until one of them returns, no further load
    /// starts and acquiring fails at once.
    ///
    /// The timeout is noticed by a call of [`Resource::unload_if_due`], such as the worker's of a
    /// [`Memory`](crate::Memory) for registered resources.
    #[must_use]
    pub fn load_timeout(mut self, timeout: Duration) -> Self {
        self.parts.load_timeout = (!timeout.is_zero()).then_some(timeout);
        self
    }

    /// How to take it apart; by default it is dropped. Every way out runs it, once for each load.
    ///
    /// For idleness and pressure it runs on the one worker: until it ends nothing else is purged,
    /// unloaded or published, and who asks for the resource waits. To make room for others it runs
    /// on a thread of its own, and they wait for at most 30 s. Let it be short, and bound what it
    /// waits for. Inside it resources cannot be acquired: that is [`AcquireError::Unloading`].
    #[must_use]
    pub fn unload(mut self, unload: impl Fn(T) + Send + Sync + 'static) -> Self {
        self.parts.unload = Box::new(unload);
        self
    }

    /// What loads and clean-ups run within, such as a heap arena of its own; nothing by default, or
    /// with `None`.
    #[must_use]
    pub fn load_scope(mut self, load_scope: Option<Arc<dyn LoadScope>>) -> Self {
        self.parts.load_scope = load_scope;
        self
    }

    /// Builds the resource, which is not loaded yet. It does not keep the `Memory` running that
    /// `admission` belongs to.
    #[must_use]
    pub fn build(self, clock: Arc<dyn Clock>, admission: Option<Admission>) -> Managed<T> {
        let admission = admission.map(|admission| admission.unkept());
        Managed { cell: Arc::new(Cell::new(self.parts, clock, admission)) }
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for ManagedBuilder<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManagedBuilder").field("name", &self.parts.name).finish_non_exhaustive()
    }
}

/// A resource that is there while it is used, and goes when it is not. Cheap to clone; all clones
/// are one.
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use lowtide::clock::{Clock, ManualClock};
/// use lowtide::control::{Managed, Resource};
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
/// # Ok::<(), lowtide::control::AcquireError>(())
/// ```
pub struct Managed<T: Send + Sync + 'static> {
    cell: Arc<Cell<T>>,
}

impl<T: Send + Sync + 'static> Managed<T> {
    /// A resource of this name, loaded by `loader`, which may be called again after an unload or a
    /// failure and must not ask for the resource itself: that is [`AcquireError::Recursive`]. Nor
    /// may it ask for one whose loader asks for this one: where two threads begin with one each,
    /// both wait for ever. Only the former is noticed.
    pub fn builder(
        name: impl Into<Arc<str>>,
        loader: impl Fn() -> Result<T, LoadError> + Send + Sync + 'static,
    ) -> ManagedBuilder<T> {
        ManagedBuilder { parts: Parts::new(name.into(), Box::new(loader)) }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.cell.name()
    }

    /// Returns a guard. Runs the loader on this thread if the resource is not loaded and no other
    /// thread loads it, else waits for that load. Blocks for as long as the load, or the clean-up
    /// of the copy before, takes.
    ///
    /// Do not call it on a thread of an async runtime: nothing detects that, and the thread serves
    /// no other task meanwhile. With as many such calls as the runtime has workers all tasks stand
    /// still. Use [`Managed::acquire`] there, or the runtime's pool for blocking work
    /// (`tokio::task::spawn_blocking`).
    ///
    /// The caller that runs the loader itself is not interrupted by the
    /// [timeout](ManagedBuilder::load_timeout): it gets the error when its loader returns.
    ///
    /// # Panics
    /// A panic of the loader is caught and becomes [`LoadError::Panicked`]. With `panic = "abort"`
    /// in the profile of the binary nothing can be caught: such a panic ends the process.
    ///
    /// # Errors
    /// [`AcquireError`]: all who waited for a load that fails get its error.
    pub fn acquire_blocking(&self) -> Result<Use<T>, AcquireError> {
        self.cell.acquire_blocking().map(|value| self.guard(value, true))
    }

    /// A guard, once it is loaded; where nobody loads yet, a thread is started that does. Dropping
    /// the future gives up waiting, not the load. Some tens of nanoseconds when loaded.
    #[must_use = "futures do nothing unless polled"]
    pub fn acquire(&self) -> Acquire<T> {
        Acquire { ticket: Ticket::new(Arc::clone(&self.cell)) }
    }

    /// A guard if it is loaded now.
    #[must_use]
    pub fn try_acquire(&self) -> Option<Use<T>> {
        self.cell.try_acquire().map(|value| self.guard(value, true))
    }

    /// As [`Managed::try_acquire`], but it does not count as use: the idle time runs on.
    #[must_use]
    pub fn peek(&self) -> Option<Use<T>> {
        self.cell.try_acquire().map(|value| self.guard(value, false))
    }

    /// Starts to load it on a thread of its own where it is not loaded, and does not wait.
    ///
    /// # Errors
    /// [`AcquireError`] where it may not be loaded now.
    pub fn warm(&self) -> Result<(), AcquireError> {
        Cell::warm(&self.cell)
    }

    /// Unloads it on this thread once nobody holds it. Those who ask meanwhile are not kept waiting
    /// for that; while traffic never pauses it stays. `Ok(false)` where it was not loaded.
    ///
    /// # Errors
    /// [`UnloadError::Busy`] where it is still held or loading when `wait` is over.
    pub fn unload_now(&self, wait: Duration) -> Result<bool, UnloadError> {
        self.cell.unload_within(UnloadReason::Asked, wait)
    }

    /// Wraps a value whose guard is counted already.
    fn guard(&self, value: Arc<T>, counts: bool) -> Use<T> {
        Use { value, _stamp: Stamp { cell: Arc::clone(&self.cell), counts } }
    }
}

impl<T: Send + Sync + 'static> Clone for Managed<T> {
    fn clone(&self) -> Self {
        Self { cell: Arc::clone(&self.cell) }
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for Managed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Managed").field("name", &self.cell.name()).finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> Resource for Managed<T> {
    fn name(&self) -> &str {
        self.cell.name()
    }

    fn next_due(&self) -> Moment {
        self.cell.next_due()
    }

    fn unload_if_due(&self, now: Moment) -> bool {
        self.cell.unload_if(UnloadReason::Idle, Some(now))
    }

    fn unload(&self, reason: UnloadReason) -> bool {
        self.cell.unload_if(reason, None)
    }

    fn close(&self, wait: Duration) -> Result<(), UnloadError> {
        self.cell.close();
        self.cell.unload_within(UnloadReason::Shutdown, wait).map(|_| ())
    }

    fn stats(&self) -> ResourceStats {
        self.cell.stats()
    }

    fn idle(&self) -> Option<Idle> {
        Cell::idle(&self.cell)
    }
}

/// A guard: while it lives the resource stays loaded.
#[must_use = "dropping it lets the resource go"]
pub struct Use<T: Send + Sync + 'static> {
    // Dropped in this order: the value's count goes down before the guard's.
    value: Arc<T>,
    _stamp: Stamp<T>,
}

impl<T: Send + Sync + 'static> Deref for Use<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send + Sync + fmt::Debug + 'static> fmt::Debug for Use<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

/// Ends a guard and stamps the time.
struct Stamp<T: Send + Sync + 'static> {
    cell: Arc<Cell<T>>,
    counts: bool,
}

impl<T: Send + Sync + 'static> Drop for Stamp<T> {
    fn drop(&mut self) {
        self.cell.release(self.counts);
    }
}

/// The future of [`Managed::acquire`].
#[must_use = "futures do nothing unless polled"]
pub struct Acquire<T: Send + Sync + 'static> {
    ticket: Ticket<T>,
}

impl<T: Send + Sync + 'static> Future for Acquire<T> {
    type Output = Result<Use<T>, AcquireError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.ticket.poll(cx).map_ok(|(cell, value)| {
            let _stamp = Stamp { cell, counts: true };
            Use { value, _stamp }
        })
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for Acquire<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acquire").finish_non_exhaustive()
    }
}

//! The configuration of a resource: its builder collects it, and its cell keeps it and runs the
//! loader and the cleanup within the load scope.
//!
//! It keeps no value and no state of a load.
//!
//! Invariant: nothing in it changes once the cell has it. One call runs a load at most once and a
//! cleanup exactly once. A value that came too late is cleaned up before `load` returns, within the
//! same scope.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use lowtide_core::BoxError;
use lowtide_core::sync::caught;

use super::error::LoadFailure;
use crate::cost::Cost;

type LoaderFn<T> = Box<dyn Fn() -> Result<T, BoxError> + Send + Sync>;

/// The default load timeout: enough for 60 GiB at 100 MiB/s. A guess.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// The default pauses after the first failed load, and at most: guesses.
const BACKOFF: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(30)];

/// A builder for a [`Managed`](super::Managed).
pub struct ManagedBuilder<T: Send + Sync + 'static> {
    pub(super) name: Arc<str>,
    loader: LoaderFn<T>,
    unload: Box<dyn Fn(T) + Send + Sync>,
    pub(super) load_scope: Option<Arc<dyn LoadScope>>,
    pub(super) idle: Option<Duration>,
    pub(super) min_residency: Duration,
    pub(super) cost: Cost,
    /// The pause after the first failed load, and the longest one.
    pub(super) backoff: [Duration; 2],
    /// `None` for no timeout.
    pub(super) load_timeout: Option<Duration>,
}

impl<T: Send + Sync + 'static> ManagedBuilder<T> {
    /// Sets the idle time after which the resource is unloaded. It begins when the last guard is
    /// released. Default: none, so that the resource stays until it is unloaded explicitly or under
    /// pressure; for `lowtide::Memory::managed` the configured time.
    #[must_use]
    pub fn idle(mut self, idle: Duration) -> Self {
        self.idle = Some(idle);
        self
    }

    /// Sets the minimum time that the resource stays after a load, so that it is not loaded and
    /// unloaded in turns. Default: zero. Applies to idleness, pressure and eviction, not to an
    /// explicit unload.
    #[must_use]
    pub fn min_residency(mut self, time: Duration) -> Self {
        self.min_residency = time;
        self
    }

    /// Sets the bytes that the resource holds while it is loaded. They are reserved before the
    /// load, which is rejected if they do not fit. If the resource was measured to hold more host
    /// memory the last time, that amount is reserved.
    ///
    /// Default: zero. Then no load is rejected for its size, and the measured bytes are reserved
    /// after the load.
    #[must_use]
    pub fn cost(mut self, cost: Cost) -> Self {
        self.cost = cost;
        self
    }

    /// Sets the pause after a failed load, and the longest one. It doubles with each failure in a
    /// row. Default: 250 ms to 30 s.
    #[must_use]
    pub fn backoff(mut self, first: Duration, max: Duration) -> Self {
        self.backoff = [first, max];
        self
    }

    /// Sets the time that a load may take. Default: 10 minutes; [`Duration::ZERO`] disables the
    /// timeout.
    ///
    /// After the timeout, waiting callers get [`LoadFailure::TimedOut`], the reservation of the
    /// load is released, and the next load may start after the [backoff](Self::backoff). A thread
    /// cannot be stopped: the loader runs until it returns. The value that it then returns goes
    /// through [`unload`](Self::unload) on the same thread and never becomes the value of another
    /// load. At most 2 threads of a resource can hang in its loader. Until one of them returns, no
    /// further load starts and acquiring fails at once.
    ///
    /// The timeout is detected by a call of
    /// [`Managed::unload_if_due`](super::Managed::unload_if_due). The worker of a
    /// `lowtide::Memory` makes this call for registered resources.
    #[must_use]
    pub fn load_timeout(mut self, timeout: Duration) -> Self {
        self.load_timeout = (!timeout.is_zero()).then_some(timeout);
        self
    }

    /// Sets the clean-up. By default the value is dropped. It runs exactly once for each
    /// loaded value, however the value is unloaded.
    ///
    /// For idleness and pressure it runs on the one worker: until it returns, nothing else is
    /// purged, unloaded or published, and callers that acquire the resource wait. For an eviction
    /// it runs on a thread of its own, and the load waits for at most 30 s. Keep it short, and
    /// bound its waits. It cannot acquire resources: that returns
    /// [`ResourceError::Unloading`](super::ResourceError::Unloading).
    #[must_use]
    pub fn unload(mut self, unload: impl Fn(T) + Send + Sync + 'static) -> Self {
        self.unload = Box::new(unload);
        self
    }

    /// Sets the scope within which loads and clean-ups run, such as a separate heap arena. Default:
    /// `None`.
    #[must_use]
    pub fn load_scope(mut self, load_scope: Option<Arc<dyn LoadScope>>) -> Self {
        self.load_scope = load_scope;
        self
    }

    pub(super) fn new(name: Arc<str>, loader: LoaderFn<T>) -> Self {
        Self {
            name,
            loader,
            unload: Box::new(drop),
            load_scope: None,
            idle: None,
            min_residency: Duration::ZERO,
            cost: Cost::ZERO,
            backoff: BACKOFF,
            load_timeout: Some(LOAD_TIMEOUT),
        }
    }

    /// Returns the pause after this many failed loads in a row: it doubles with each.
    pub(super) fn pause(&self, failures: u32) -> Duration {
        let [first, max] = self.backoff;
        let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
        let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
        first.saturating_mul(factor).min(max)
    }

    /// Loads on this thread. `returned` gets what the loader returned, inside the load scope, and
    /// passes it on or cleans it up.
    pub(super) fn load(
        &self,
        returned: impl Fn(Result<T, LoadFailure>) -> Result<T, LoadFailure>,
    ) -> Result<T, LoadFailure> {
        let mut loaded = None;
        let mut load = || {
            if loaded.is_none() {
                loaded = Some(returned((self.loader)().map_err(LoadFailure::new)));
            }
            matches!(loaded, Some(Ok(_)))
        };
        match &self.load_scope {
            Some(load_scope) => load_scope.load(&mut load),
            None => {
                load();
            }
        }
        loaded.unwrap_or_else(|| Err(LoadFailure::new("the load scope did not run the loader")))
    }

    /// Cleans up a value that is not wanted any more, on this thread. Returns the message of a
    /// panic.
    pub(super) fn clean_up(&self, value: T) -> Result<(), String> {
        unloading(|| (self.unload)(value))
    }

    /// Cleans up a value on this thread. Returns the bytes released, if measured, or the message of
    /// a panic.
    pub(super) fn take_apart(&self, value: T) -> Result<Option<Cost>, String> {
        unloading(move || {
            let mut value = Some(value);
            let mut unload = || {
                if let Some(value) = value.take() {
                    (self.unload)(value);
                }
            };
            let load_scope = self.load_scope.as_ref();
            let recovered = load_scope.and_then(|load_scope| load_scope.unload(&mut unload));
            unload();
            recovered
        })
    }
}

lowtide_core::debug_as!([T: Send + Sync + 'static] ManagedBuilder<T>, |it| name: it.name);

/// A scope within which a resource's loads and clean-ups run. It may act before and after them, on
/// the thread that they run on.
///
/// A load and the clean-up of its value alternate. They may run on different threads. A load that
/// failed or panicked is followed by the next load. A load that timed out
/// ([`ManagedBuilder::load_timeout`](super::ManagedBuilder::load_timeout)) may still run during
/// later ones; it keeps nothing.
pub trait LoadScope: Send + Sync {
    /// Runs a load before it returns. `load` returns `true` if there is a value to keep: not after
    /// a failure, and not if the load timed out, since its value has then been cleaned up already.
    fn load(&self, load: &mut dyn FnMut() -> bool);

    /// Runs a clean-up before it returns; one that it does not run is run afterwards. Returns
    /// the bytes that it released, if the scope can measure them; zero for a budget that it cannot
    /// measure.
    fn unload(&self, unload: &mut dyn FnMut()) -> Option<Cost>;

    /// Returns the bytes held now, if the scope can measure them; zero for a budget that it cannot
    /// measure. Called after each load.
    fn held(&self) -> Option<Cost> {
        None
    }
}

thread_local! {
    static UNLOADING: Cell<bool> = const { Cell::new(false) };
}

/// Runs a clean-up, with this thread marked as one that unloads. A panic is caught.
fn unloading<R>(clean_up: impl FnOnce() -> R) -> Result<R, String> {
    let before = UNLOADING.replace(true);
    let done = caught(clean_up);
    UNLOADING.set(before);
    done
}

/// Returns `true` inside an unload on this thread. Acquiring there could wait for itself: for a
/// resource whose load waits for the room that this unload makes.
pub(super) fn is_unloading() -> bool {
    UNLOADING.get()
}

//! The configuration of a resource, collected by its builder and kept by its cell.
//!
//! Plain values, two closures and the load scope. It loads and unloads nothing.
//!
//! Invariant: nothing in it changes once the cell has it.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use lowtide_core::BoxError;

use super::error::LoadFailure;
use crate::cost::Cost;

type LoaderFn<T> = Box<dyn Fn() -> Result<T, BoxError> + Send + Sync>;
type Unloader<T> = Box<dyn Fn(T) + Send + Sync>;

/// The default load timeout: enough for 60 GiB at 100 MiB/s. A guess.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// The default pauses after the first failed load, and at most: guesses.
const BACKOFF: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(30)];

/// The values that a builder collects.
pub(super) struct ResourceConfig<T> {
    pub(super) name: Arc<str>,
    pub(super) loader: LoaderFn<T>,
    pub(super) unload: Unloader<T>,
    pub(super) load_scope: Option<Arc<dyn LoadScope>>,
    pub(super) idle: Option<Duration>,
    pub(super) min_residency: Duration,
    pub(super) cost: Cost,
    /// The pause after the first failed load, and the longest one.
    pub(super) backoff: [Duration; 2],
    /// `None` for no timeout.
    pub(super) load_timeout: Option<Duration>,
}

impl<T: 'static> ResourceConfig<T> {
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
}

/// A scope within which a resource's loads and cleanups run. It may act before and after them, on
/// the thread that they run on.
///
/// A load and the cleanup of its value alternate. They may run on different threads. A load that
/// failed or panicked is followed by the next load. A load that timed out
/// ([`ManagedBuilder::load_timeout`](super::ManagedBuilder::load_timeout)) may still run during
/// later ones; it keeps nothing.
pub trait LoadScope: Send + Sync {
    /// Runs a load before it returns. `load` returns `true` if there is a value to keep: not after
    /// a failure, and not if the load timed out, since its value has then been cleaned up already.
    fn load(&self, load: &mut dyn FnMut() -> bool);

    /// Runs a cleanup before it returns; a cleanup that it does not run is run afterwards. Returns
    /// the bytes that it released, if the scope can measure them; zero for a budget that it cannot
    /// measure.
    fn unload(&self, unload: &mut dyn FnMut()) -> Option<Cost>;

    /// Returns the bytes held now, if the scope can measure them; zero for a budget that it cannot
    /// measure. Called after each load.
    fn held(&self) -> Option<Cost> {
        None
    }
}

// Runs the loader and the cleanup of a resource within its load scope.
//
// Invariant: one call runs a load at most once and a cleanup exactly once. A value that came too
// late is cleaned up before `load` returns, within the same scope.
thread_local! {
    static UNLOADING: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as one that unloads, until it is dropped.
struct Unloading {
    before: bool,
}

impl Unloading {
    fn begin() -> Self {
        Self { before: UNLOADING.replace(true) }
    }
}

impl Drop for Unloading {
    fn drop(&mut self) {
        UNLOADING.set(self.before);
    }
}

/// Returns `true` inside an unload on this thread. Acquiring there could wait for itself: for a
/// resource whose load waits for the room that this unload makes.
#[inline]
pub(super) fn is_unloading() -> bool {
    UNLOADING.get()
}

impl<T> ResourceConfig<T> {
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

    /// Cleans up a value that is not wanted any more, on this thread.
    pub(super) fn clean_up(&self, value: T) {
        let _inside = Unloading::begin();
        (self.unload)(value);
    }

    /// Cleans up a value on this thread. Returns the bytes released, if measured.
    pub(super) fn take_apart(&self, value: T) -> Option<Cost> {
        let _inside = Unloading::begin();
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
    }
}

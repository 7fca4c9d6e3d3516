//! What a resource's load and clean-up run within, such as a heap arena of its own.
//!
//! It knows neither the resource nor what the enclosure is; it only hands the one to the other.
//!
//! Invariant: a load is run at most once by a call, a clean-up exactly once; a value that came too
//! late is taken apart before `load` returns, within the same enclosure.

use std::cell::Cell;

use crate::control::admission::Cost;
use crate::sync::caught;

use super::error::LoadError;
use super::parts::Parts;

/// What a resource's load and clean-up run within; it may do something before and after them on the
/// thread that they run on.
///
/// A load and the clean-up of what it loaded come in turns. They may be on different threads. After
/// a load that failed, or panicked, comes the next load. A load that timed out
/// ([`ManagedBuilder::load_timeout`](super::ManagedBuilder::load_timeout)) may still run while
/// later ones come and go; it keeps nothing.
pub trait LoadScope: Send + Sync {
    /// Runs a load before it returns. `load` returns whether there is something to keep: not after
    /// a failure, and not if the load timed out, for then its value has been taken apart already.
    ///
    /// # Errors
    /// Why it was not run.
    fn load(&self, load: &mut dyn FnMut() -> bool) -> Result<(), LoadError>;

    /// Runs a clean-up, before it returns; one that it does not run is run after it. Says what went
    /// with it, where it can tell; nothing of a budget of which it cannot.
    fn unload(&self, unload: &mut dyn FnMut()) -> Option<Cost>;

    /// What it holds now, where it can tell: asked after each load. Nothing of a budget of which it
    /// cannot.
    fn held(&self) -> Option<Cost> {
        None
    }
}

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

/// Whether this thread is inside an unload. One that acquires there could wait for itself: for a
/// resource whose load waits for the room that this unload makes.
pub(super) fn is_unloading() -> bool {
    UNLOADING.get()
}

impl<T> Parts<T> {
    /// Loads on this thread. Asks when the loader has returned whether its value is still wanted,
    /// and takes it apart otherwise.
    pub(super) fn load(&self, is_wanted: impl Fn() -> bool) -> Result<T, LoadError> {
        let mut loaded = None;
        let mut load = || {
            if loaded.is_none() {
                loaded = Some(self.load_if(&is_wanted));
            }
            matches!(loaded, Some(Ok(_)))
        };
        match &self.load_scope {
            Some(load_scope) => load_scope.load(&mut load)?,
            None => {
                load();
            }
        }
        loaded.unwrap_or_else(|| Err(LoadError::new("its enclosure did not run the loader")))
    }

    fn load_if(&self, is_wanted: impl Fn() -> bool) -> Result<T, LoadError> {
        let loaded = (self.loader)();
        if is_wanted() {
            return loaded;
        }
        // Nobody sees this error: those who waited got theirs when the load timed out.
        let _inside = Unloading::begin();
        let _ = caught(|| loaded.map(|value| (self.unload)(value)));
        Err(LoadError::new("the load had timed out"))
    }

    /// Takes what was loaded apart, on this thread; what went with it, where that was measured.
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

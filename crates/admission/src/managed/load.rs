//! Runs the loader and the cleanup of a resource within its load scope.
//!
//! It knows neither the resource nor what the scope does; it only connects the two.
//!
//! Invariant: one call runs a load at most once and a cleanup exactly once. A value that came too
//! late is cleaned up before `load` returns, within the same scope.

use std::cell::Cell;

use crate::cost::Cost;

use super::error::LoadError;
use super::parts::Parts;

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

impl<T> Parts<T> {
    /// Loads on this thread. `returned` gets what the loader returned, inside the load scope, and
    /// passes it on or cleans it up.
    pub(super) fn load(
        &self,
        returned: impl Fn(Result<T, LoadError>) -> Result<T, LoadError>,
    ) -> Result<T, LoadError> {
        let mut loaded = None;
        let mut load = || {
            if loaded.is_none() {
                loaded = Some(returned((self.loader)().map_err(LoadError::new)));
            }
            matches!(loaded, Some(Ok(_)))
        };
        match &self.load_scope {
            Some(load_scope) => load_scope.load(&mut load)?,
            None => {
                load();
            }
        }
        loaded.unwrap_or_else(|| Err(LoadError::new("the load scope did not run the loader")))
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

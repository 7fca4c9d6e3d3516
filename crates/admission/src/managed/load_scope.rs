//! Scopes within which a resource's loads and cleanups run, such as a separate heap arena.
//!
//! `load` runs them in the scope.

use crate::cost::Cost;

use super::error::LoadError;

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
    ///
    /// # Errors
    /// The reason why the load was not run.
    fn load(&self, load: &mut dyn FnMut() -> bool) -> Result<(), LoadError>;

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

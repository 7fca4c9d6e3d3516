//! What a resource's load and clean-up run within, such as a heap arena of its own.
//!
//! It knows neither the resource nor what the enclosure is; it only hands the one to the other.
//!
//! Invariant: a load is run at most once by a call, a clean-up exactly once.

use crate::control::admission::Cost;

use super::error::LoadError;
use super::parts::Parts;

/// What a resource's load and clean-up run within; it may do something before and after them on the
/// thread that they run on.
///
/// A load and the clean-up of what it loaded come in turns. They may be on different threads. After
/// a load that failed, or panicked, comes the next load.
pub trait Enclosure: Send + Sync {
    /// Runs a load, before it returns.
    ///
    /// # Errors
    /// Why it was not run.
    fn load(&self, load: &mut dyn FnMut()) -> Result<(), LoadError>;

    /// Runs a clean-up, before it returns; one that it does not run is run after it. Says what went
    /// with it, where it can tell; nothing of a budget of which it cannot.
    fn unload(&self, unload: &mut dyn FnMut()) -> Option<Cost>;

    /// What it holds now, where it can tell: asked after each load. Nothing of a budget of which it
    /// cannot.
    fn held(&self) -> Option<Cost> {
        None
    }
}

impl<T> Parts<T> {
    /// Loads on this thread.
    pub(super) fn load(&self) -> Result<T, LoadError> {
        let Some(enclosure) = &self.enclosure else { return (self.loader)() };
        let mut loaded = None;
        enclosure.load(&mut || {
            if loaded.is_none() {
                loaded = Some((self.loader)());
            }
        })?;
        loaded.unwrap_or_else(|| Err(LoadError::new("its enclosure did not run the loader")))
    }

    /// Takes what was loaded apart, on this thread; what went with it, where that was measured.
    pub(super) fn take_apart(&self, value: T) -> Option<Cost> {
        let mut value = Some(value);
        let mut unload = || {
            if let Some(value) = value.take() {
                (self.unload)(value);
            }
        };
        let enclosure = self.enclosure.as_ref();
        let recovered = enclosure.and_then(|enclosure| enclosure.unload(&mut unload));
        unload();
        recovered
    }
}

//! Runs operations: the lock of the state, driver calls, thread caches.

pub(crate) mod executor;
pub(crate) mod inner;
pub(crate) mod lane;
pub(crate) mod reserve;
pub(crate) mod thread_cache;
#[cfg(feature = "cuda")]
pub(crate) mod view;

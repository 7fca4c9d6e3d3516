//! Runs operations: the lock of the state, driver calls, thread caches.

pub(crate) mod allocate;
pub(crate) mod bridge;
pub(crate) mod brief;
pub(crate) mod budget;
pub(crate) mod callbacks;
pub(crate) mod executor;
pub(crate) mod front;
pub(crate) mod handles;
pub(crate) mod inner;
pub(crate) mod kept;
pub(crate) mod lane;
pub(crate) mod observer;
pub(crate) mod reserve;

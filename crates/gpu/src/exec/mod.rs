//! Runs operations: the lock of the state, driver calls, thread caches.

pub(crate) mod executor;
pub(crate) mod inner;
pub(crate) mod lane;
pub(crate) mod reserve;
pub(crate) mod thread_cache;
#[cfg(feature = "cuda")]
pub(crate) mod view;

pub(crate) use inner::ArenaInner;
pub(crate) use lane::{DriverEvent, Keeps, LaneInner};
pub(crate) use thread_cache::{BlockHandle, BlockPlace, CacheKey, CacheShard, CacheShards};

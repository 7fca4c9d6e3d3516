//! Device arenas in a `Memory`.

pub(super) mod arenas;
pub(super) mod driver;
#[cfg(feature = "cuda")]
pub(super) mod governors;
pub(super) mod published;
pub(super) mod scopes;
pub(super) mod shrink;
pub(super) mod sleep;
pub(super) mod watch;

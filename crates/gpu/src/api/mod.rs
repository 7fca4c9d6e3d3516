//! Handles for users of an arena.

pub(crate) mod arena;
pub(crate) mod buffer;
pub(crate) mod compact;
pub(crate) mod interop;
pub(crate) mod lane;
pub(crate) mod planned;
pub(crate) mod raw;
pub(crate) mod release;
pub(crate) mod sleep;
#[cfg(feature = "cuda")]
pub(crate) mod view;

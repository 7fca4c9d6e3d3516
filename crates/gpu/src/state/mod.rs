//! The state of an arena as plain values, without a driver, a lock or a thread.

pub(crate) mod aging;
pub(crate) mod arena;
pub(crate) mod compact;
pub(crate) mod event;
pub(crate) mod failure;
pub(crate) mod granules;
pub(crate) mod growth;
pub(crate) mod moves;
pub(crate) mod outstanding;
pub(crate) mod pending;
pub(crate) mod raw;
pub(crate) mod region;
pub(crate) mod region_index;
pub(crate) mod segment;
pub(crate) mod segment_list;
pub(crate) mod sleep;
pub(crate) mod streams;

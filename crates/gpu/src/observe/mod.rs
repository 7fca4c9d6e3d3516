//! Observers of an arena: recordings, history and maps.

pub(crate) mod history;
pub(crate) mod map;
pub(crate) mod occupancy;
pub(crate) mod record;
pub mod visualize;

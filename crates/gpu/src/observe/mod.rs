//! Maps of an arena.

pub mod map;
pub(crate) mod occupancy;

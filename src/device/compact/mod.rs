//! Compaction: live blocks move so that what is free is worth more.
//!
//! Invariant: a block is at one place, whole, whatever fails.

mod contiguous;
mod granules;
pub(in crate::device) mod plan;
mod sketch;

#[cfg(test)]
mod plan_tests;

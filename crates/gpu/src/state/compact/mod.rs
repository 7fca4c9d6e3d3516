//! Plans compactions: which blocks to move, and to which place, from a copy of a region's layout.
//!
//! Pure: spans in, moves out ([`plan`](plan::plan)). It knows no region, driver or lock. Files:
//! `layout_model` (blocks and free spans on which moves are tried), `granules`, `by_segment` and
//! `contiguous` (one for each target), `detours` (moves that can be left out), `batch` (moves that
//! are copied at the same time).

pub(crate) mod batch;
mod by_segment;
mod contiguous;
mod detours;
mod granules;
mod layout_model;
pub(crate) mod plan;

#[cfg(all(test, not(lowtide_loom)))]
mod plan_tests;

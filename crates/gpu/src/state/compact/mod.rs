//! Plans compactions: which blocks to move, and to which place, from a copy of a region's layout.
//!
//! Pure: spans in, moves out ([`plan`](plan::plan)). It knows no region, driver or lock. Files:
//! `layout_model` (blocks and free spans on which moves are tried), `granules` and `contiguous` (one
//! for each target), `plan` (the plan, its moves, and batches of them).

mod contiguous;
mod granules;
mod layout_model;
pub(crate) mod plan;

#[cfg(all(test, not(lowtide_loom)))]
mod plan_tests;

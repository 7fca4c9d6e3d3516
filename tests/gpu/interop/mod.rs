//! Memory that crosses the border of an arena: buffers that are lent, memory of others that is
//! adopted. Over the simulation, in the order of work that finds the most.
//!
//! Invariant: each test without a planted fault ends with no fault on record.
#![cfg(feature = "simulation")]

mod exported;
mod imported;
mod support;

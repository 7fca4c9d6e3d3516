//! Memory that crosses the border of an arena: buffers that are lent, memory of others that is
//! adopted. Over the simulation, in the order of work that finds the most.
//!
//! Invariant: each test ends with no fault on record.

mod exported;
mod imported;
mod support;

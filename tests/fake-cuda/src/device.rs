//! The drivers of lowtide, of which the simulation is one: the crate's own sources.
//!
//! Compiled in here and not taken from the crate: Cargo would join the features of that dependency
//! with those of the tests, and jemalloc, which they ask for, cannot be loaded by `dlopen` (its
//! thread-local memory is of the kind that only a program's start provides).
//!
//! Invariant: the sources are the crate's, to the letter.

#[allow(dead_code, reason = "of the crate's, a part is needed")]
#[path = "../../../src/device/driver/mod.rs"]
pub mod driver;

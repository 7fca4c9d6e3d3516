//! The fake driver: unmodified cudarc, and raw calls, against the simulation behind CUDA's names.
//!
//! Every test takes the library with `Fake::start`, before anything looks for CUDA: cudarc panics
//! where there is none. Tests of one process run one after the other, each with a fresh driver.
//!
//! Invariant: a test that keeps CUDA's contract ends with no fault on record and nothing left.

mod away;
mod bugs;
mod contexts;
mod cudarc;
mod pools;
mod raw;
mod shortage;
mod virtual_memory;

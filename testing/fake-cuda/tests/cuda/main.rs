//! The CUDA driver layer and unmodified cudarc, over a fake of the driver's library.
//!
//! The process has one fake library. `Fake::start` loads it, hands it to one test at a time, and
//! resets it. Every test that touches CUDA starts with that call, because cudarc panics if there
//! is no library.
#![cfg(target_os = "linux")]

#[path = "../../../../examples/proxy/chance.rs"]
mod chance;
mod driver;
mod embed;
mod fake;
mod gpu_check;
mod memory;
mod processes;

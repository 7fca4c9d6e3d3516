//! The CUDA driver layer over the fake of the driver's library: opening, a failure at each call,
//! contexts of threads, captures of graphs, views for cudarc, bad input, the processes by NVML.
//!
//! What an arena keeps over every driver is in `crates/gpu/tests/gpu/contract`; here is what only
//! this one does. Nothing here says how a real driver behaves where the manual is silent.
//!
//! Invariant: each test that lets no call of an end fail leaves nothing behind, and no fault.

mod bad_input;
mod border;
mod captures;
mod contexts;
mod faults;
mod governor;
mod nvml;
mod open;
mod peers;
mod pinned;
mod pinned_schedule;
mod scarce;
mod stores;
mod support;
mod views;

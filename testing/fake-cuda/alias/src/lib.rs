//! The name `libcuda.so` for the fake driver, which itself is `libcuda.so.1`.
//!
//! A library has one name under which the loader knows it once it is loaded, and CUDA is looked
//! for under two: cudarc tries this one first. On a machine with a real driver a test would
//! otherwise have one half of its calls answered by the fake and the other by the driver.
//!
//! Invariant: there is nothing in it.

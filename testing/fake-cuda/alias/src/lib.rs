//! The name `libcuda.so` for the fake driver, which itself is `libcuda.so.1`.
//!
//! The loader knows a loaded library under one name, but CUDA has two, and cudarc tries this one
//! first. Without it, on a machine with a real driver, half of a test's calls would go to the fake
//! and the other half to the driver.
//!
//! Invariant: the library is empty.

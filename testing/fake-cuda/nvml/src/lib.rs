//! The name `libnvidia-ml.so.1` for the fake driver, which has the functions of both libraries, so
//! that CUDA and NVML report the same memory.
//!
//! A test process has NVML only once it has loaded this library
//! (`lowtide_fake_cuda::Guard::nvml`).
//!
//! Invariant: the library is empty.

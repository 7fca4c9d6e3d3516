//! The process heap: jemalloc as global allocator, and glibc's heap beside it. Knows no device.

//! The service without lowtide, on the C library's allocator.

#[global_allocator]
static HEAP: std::alloc::System = std::alloc::System;

fn main() -> Result<(), plain::BoxError> {
    plain::main()
}

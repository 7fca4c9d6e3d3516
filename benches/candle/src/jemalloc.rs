//! The service without lowtide, on jemalloc as its crate builds it. `_RJEM_MALLOC_CONF` sets it up.

#[global_allocator]
static HEAP: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> Result<(), plain::BoxError> {
    plain::main()
}

//! Under jemalloc as `tikv-jemallocator` brings it, told by its variable or not at all.

use clap::Parser as _;
use lowtide::BoxError;
use retention::{Cli, run};
use tikv_jemallocator::Jemalloc;

#[global_allocator]
static HEAP: Jemalloc = Jemalloc;

fn main() -> Result<(), BoxError> {
    run(&Cli::parse(), &())
}

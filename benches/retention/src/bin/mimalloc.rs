//! Under mimalloc, told by its variables.

use clap::Parser as _;
use lowtide::BoxError;
use mimalloc::MiMalloc;
use retention::{Cli, run};

#[global_allocator]
static HEAP: MiMalloc = MiMalloc;

fn main() -> Result<(), BoxError> {
    run(&Cli::parse(), &())
}

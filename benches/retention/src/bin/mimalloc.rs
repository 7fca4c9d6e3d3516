//! Under mimalloc, told by its variables.

use clap::Parser as _;
use lowtide::BoxError;
use mimalloc::MiMalloc;
use retention::{Allocator, Cli, run};

#[global_allocator]
static HEAP: MiMalloc = MiMalloc;

struct Plain;

impl Allocator for Plain {}

fn main() -> Result<(), BoxError> {
    run(&Cli::parse(), &Plain)
}

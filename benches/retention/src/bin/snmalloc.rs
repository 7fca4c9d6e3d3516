//! Under snmalloc as `snmalloc-rs` brings it.

use clap::Parser as _;
use retention::child::{Cli, run};
use retention::workload::model::Shared;
use retention::{Allocator, BoxError};
use snmalloc_rs::SnMalloc;

#[global_allocator]
static HEAP: SnMalloc = SnMalloc;

struct Plain;

impl Allocator for Plain {}

fn main() -> Result<(), BoxError> {
    run(Cli::parse().act, &Plain, &mut Shared)
}

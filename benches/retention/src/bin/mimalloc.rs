//! Under mimalloc, every thread of which collects when it rests.
#![expect(unsafe_code, reason = "mimalloc's own call is C's")]

use clap::Parser as _;
use mimalloc::MiMalloc;
use retention::child::{Cli, run};
use retention::workload::model::Shared;
use retention::{Allocator, BoxError};

#[global_allocator]
static HEAP: MiMalloc = MiMalloc;

struct Collects;

impl Allocator for Collects {
    fn rest(&self) {
        collect();
    }

    fn settle(&self) {
        collect();
    }
}

fn collect() {
    // SAFETY: `mi_collect` may be called from any thread at any time.
    unsafe { libmimalloc_sys::mi_collect(true) }
}

fn main() -> Result<(), BoxError> {
    run(Cli::parse().act, &Collects, &mut Shared)
}

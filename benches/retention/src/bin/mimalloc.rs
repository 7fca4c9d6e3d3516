//! Under mimalloc: every thread collects when it rests, or none does.
#![expect(unsafe_code, reason = "mimalloc's own call is C's")]

use clap::Parser as _;
use mimalloc::MiMalloc;
use retention::child::{Cli, run};
use retention::{Allocator, BoxError};

#[global_allocator]
static HEAP: MiMalloc = MiMalloc;

/// The variant of the run: `collects` is `true` if threads collect.
struct Way {
    collects: bool,
}

impl Allocator for Way {
    fn rest(&self) {
        if self.collects {
            collect();
        }
    }

    fn settle(&self) {
        self.rest();
    }
}

fn collect() {
    // SAFETY: `mi_collect` may be called from any thread at any time.
    unsafe { libmimalloc_sys::mi_collect(true) }
}

fn main() -> Result<(), BoxError> {
    let cli = Cli::parse();
    let collects = cli.way != "plain";
    run(&cli, &Way { collects })
}

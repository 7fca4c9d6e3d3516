//! Under glibc's own heap: with one trim at the end, or with one each 100 ms, which is what
//! text-embeddings-inference does.
#![expect(unsafe_code, reason = "glibc's own call is C's")]
#![expect(clippy::disallowed_methods, reason = "it trims in real time")]

use std::alloc::System;
use std::time::Duration;

use clap::Parser as _;
use lowtide::BoxError;
use retention::{Allocator, Cli, run};

#[global_allocator]
static HEAP: System = System;

struct Trims;

impl Allocator for Trims {
    fn settle(&self) {
        trim();
    }
}

fn trim() {
    // SAFETY: `malloc_trim` may be called from any thread at any time.
    let _ = unsafe { libc::malloc_trim(0) };
}

fn main() -> Result<(), BoxError> {
    let cli = Cli::parse();
    if cli.way == "trim_100ms" {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_millis(100));
                trim();
            }
        });
    }
    run(&cli, &Trims)
}

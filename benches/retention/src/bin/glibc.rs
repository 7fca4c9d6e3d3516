//! Under glibc's own heap, with one trim at the end.
#![expect(unsafe_code, reason = "glibc's own call is C's")]

use std::alloc::System;

use clap::Parser as _;
use lowtide::BoxError;
use retention::{Allocator, Cli, run};

#[global_allocator]
static HEAP: System = System;

struct Trims;

impl Allocator for Trims {
    fn settle(&self) {
        // SAFETY: `malloc_trim` may be called from any thread at any time.
        let _ = unsafe { libc::malloc_trim(0) };
    }
}

fn main() -> Result<(), BoxError> {
    run(&Cli::parse(), &Trims)
}

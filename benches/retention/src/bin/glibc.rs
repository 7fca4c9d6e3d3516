//! Under glibc's own heap: as it is, with one trim at the end, or with one each 100 ms, which is
//! what text-embeddings-inference does.
#![expect(unsafe_code, reason = "glibc's own call is C's")]
#![expect(clippy::disallowed_methods, reason = "it trims in real time")]

use std::alloc::System;
use std::time::Duration;

use clap::Parser as _;
use retention::child::{Cli, run};
use retention::{Allocator, BoxError};

#[global_allocator]
static HEAP: System = System;

/// When it trims.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Never,
    AtEnd,
    Each100ms,
}

impl Allocator for Way {
    fn settle(&self) {
        if *self == Self::AtEnd {
            trim();
        }
    }
}

fn trim() {
    // SAFETY: `malloc_trim` may be called from any thread at any time.
    let _ = unsafe { libc::malloc_trim(0) };
}

fn main() -> Result<(), BoxError> {
    let cli = Cli::parse();
    let way = match &*cli.way {
        "" => Way::Never,
        "trim" => Way::AtEnd,
        "trim_100ms" => Way::Each100ms,
        other => return Err(format!("{other:?}: expected nothing, trim or trim_100ms").into()),
    };
    if way == Way::Each100ms {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_millis(100));
                trim();
            }
        });
    }
    run(&cli, &way)
}

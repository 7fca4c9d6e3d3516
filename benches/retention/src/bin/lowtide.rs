//! Under lowtide: its heap, and a `Memory` with the profile that it is told.
//!
//! jemalloc's own settings come by its variable, so that one program has every profile. A thread
//! that rests empties its cache, as the crate says of threads that park. The traffic is one permit:
//! while it is held the service is not quiet.

use std::any::Any;

use clap::Parser as _;
use lowtide::admission::Cost;
use lowtide::config::Profile;
use lowtide::heap::{self, HostArena};
use lowtide::{BoxError, ByteSize, Memory};
use retention::{Allocator, Cli, run};

#[global_allocator]
static HEAP: heap::Heap = heap::Heap;

struct Lowtide {
    memory: Memory,
    /// The arena of requests that outlive a wave, if they have one.
    lasting: Option<HostArena>,
}

impl Allocator for Lowtide {
    fn begin(&self) -> Box<dyn Any> {
        Box::new(self.memory.admission().try_admit(Cost::host(ByteSize::mib(1))))
    }

    fn rest(&self) {
        let _ = heap::flush_thread_cache();
    }

    fn keep(&self, copy: &mut dyn FnMut()) {
        if let Some(arena) = &self.lasting {
            arena.scope_uncached(copy).unwrap_or_else(|error| panic!("not kept apart: {error}"));
        }
    }
}

fn main() -> Result<(), BoxError> {
    let cli = Cli::parse();
    let (profile, is_apart) = match cli.way.strip_suffix("/apart") {
        Some(profile) => (profile, true),
        None => (&*cli.way, false),
    };
    let profile: Profile = profile.parse()?;
    let memory = Memory::builder().profile(profile).start()?;
    let lasting = is_apart.then(|| HostArena::new("lasting")).transpose()?;
    run(&cli, &Lowtide { memory, lasting })
}

//! Under lowtide: its heap, and a `Memory` with the profile that it is told.
//!
//! jemalloc's own settings come by its variable, so that one program has every profile. A thread
//! that rests empties its cache, as the crate says of threads that park. The traffic is one permit:
//! while it is held the service is not quiet.
#![expect(clippy::disallowed_methods, reason = "it purges in real time")]

use std::any::Any;
use std::time::Duration;

use clap::Parser as _;
use lowtide::admission::Cost;
use lowtide::config::Profile;
use lowtide::heap::{self, HostArena};
use lowtide::{ByteSize, Memory};
use retention::child::{Cli, run};
use retention::workload::model::{Place, Shared};
use retention::{Allocator, BoxError};

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

/// The process's heap, purged when the model is gone.
struct Purged;

impl Place for Purged {
    fn within(&mut self, act: &mut dyn FnMut()) -> Result<(), BoxError> {
        act();
        Ok(())
    }

    fn leave(&mut self) -> Result<(), BoxError> {
        heap::purge_now()?;
        Ok(())
    }
}

/// An arena of the model's own, which is purged and kept for the next model, as a `Memory` does for
/// its resources; then the heap is purged.
#[derive(Default)]
struct OwnArena {
    arena: Option<HostArena>,
    /// `true` if it is retired with its model instead.
    retires: bool,
}

impl Place for OwnArena {
    fn within(&mut self, act: &mut dyn FnMut()) -> Result<(), BoxError> {
        let arena = match self.arena.take() {
            Some(arena) => arena,
            None => HostArena::new("model")?,
        };
        let arena = self.arena.insert(arena);
        Ok(arena.scope(act)?)
    }

    fn leave(&mut self) -> Result<(), BoxError> {
        match self.arena.take() {
            Some(arena) if self.retires => arena.retire()?,
            Some(arena) => self.arena.insert(arena).purge()?,
            None => {}
        }
        // What the neighbours have freed: as the way that shares the heap does.
        Purged.leave()
    }

    fn arenas(&self) -> u64 {
        let snapshot = heap::HeapProbe::new().and_then(|probe| probe.snapshot());
        snapshot.map_or(0, |heap| u64::from(heap.arenas))
    }
}

fn main() -> Result<(), BoxError> {
    let act = Cli::parse().act;
    let (profile, way) = act.way().split_once('/').unwrap_or((act.way(), ""));
    let profile: Profile = profile.parse()?;
    let memory = Memory::builder().profile(profile).start()?;
    let lasting = if way == "apart" { Some(HostArena::new("lasting")?) } else { None };
    let lowtide = Lowtide { memory, lasting };
    match way {
        "" | "shared" | "apart" => run(act, &lowtide, &mut Shared),
        "purging" => {
            std::thread::spawn(|| {
                loop {
                    std::thread::sleep(Duration::from_secs(1));
                    let _ = heap::purge_now();
                }
            });
            run(act, &lowtide, &mut Shared)
        }
        "shared_purge" => run(act, &lowtide, &mut Purged),
        "own_arena" => run(act, &lowtide, &mut OwnArena::default()),
        "retired_arena" => run(act, &lowtide, &mut OwnArena { retires: true, arena: None }),
        other => Err(format!(
            "{other:?}: expected shared, apart, purging, shared_purge, own_arena or retired_arena"
        )
        .into()),
    }
}

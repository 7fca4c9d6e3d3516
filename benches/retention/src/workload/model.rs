//! A model that is loaded, used and unloaded while neighbours work.
//!
//! It consists of tensors (each power of two from 1 KiB to 16 MiB as likely as another) up to its
//! size and of short strings, 667 to a MiB. Using it allocates and frees work space on the thread
//! that loaded it. Where its memory lies, and what happens when it is gone, is the [`Place`]'s.
//!
//! Invariant: the neighbours work from before the base is taken until after the last look.
#![expect(clippy::disallowed_methods, reason = "real processes, real time")]

use std::hint::black_box;
use std::mem;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::burst::block;
use crate::chance::Chance;
use crate::child::slope;
use crate::statm::Process;
use crate::{Allocator, BoxError, count};

/// A place for a model's memory.
pub trait Place {
    /// Runs a part of its life there.
    ///
    /// # Errors
    /// Where that cannot be.
    fn within(&mut self, act: &mut dyn FnMut()) -> Result<(), BoxError>;

    /// When the model is gone, and before each look at what is resident without it.
    ///
    /// # Errors
    /// Where what is to be done then fails.
    fn leave(&mut self) -> Result<(), BoxError>;

    /// Arenas of the process; 0 where there are none.
    fn arenas(&self) -> u64 {
        0
    }
}

/// The process's heap, and nothing is done.
#[derive(Clone, Copy, Debug)]
pub struct Shared;

impl Place for Shared {
    fn within(&mut self, act: &mut dyn FnMut()) -> Result<(), BoxError> {
        act();
        Ok(())
    }

    fn leave(&mut self) -> Result<(), BoxError> {
        Ok(())
    }
}

/// Resident bytes before a model, with it, and after it.
#[derive(Clone, Copy, Debug)]
pub struct Unloaded {
    /// Before.
    pub base: u64,
    /// With it.
    pub loaded: u64,
    /// After.
    pub after: u64,
    /// After a second one of its size.
    pub again: u64,
}

/// The growth over many cycles.
#[derive(Clone, Copy, Debug)]
pub struct Cycled {
    /// Resident bytes more with each cycle.
    pub slope: f64,
    /// Descriptors more at the end than after the first tenth.
    pub descriptors: i64,
    /// Threads more.
    pub threads: i64,
    /// Arenas more.
    pub arenas: i64,
}

struct Model {
    tensors: Vec<Vec<u8>>,
    strings: Vec<Vec<u8>>,
}

const STRINGS_PER_MIB: u64 = 667;
/// Looks at resident memory, of which the median counts: the neighbours' moves about.
const LOOKS: usize = 15;
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Jemalloc's decay and the neighbours have come to rest after this.
const SETTLE: Duration = Duration::from_millis(2_500);
/// Blocks that a neighbour holds, and strings of 16 to 512 bytes.
const HELD: usize = 400;
const HELD_STRINGS: usize = 10_000;
/// The operations that it does before it is looked at: its slack has come to rest then.
const WARM: usize = 10_000;
/// One of so many trades is for any of its blocks, the others for as small a part of them: most
/// blocks come and go, and some that come beside the model stay for long, as those of caches do.
const COLD: usize = 16;
/// A pause of each neighbour after so much: busy, and not a flood.
const OPERATIONS: usize = 20;
const PAUSE: Duration = Duration::from_millis(10);
/// Neighbours: more than lowtide's profiles have arenas, so that some share one with the model's
/// thread where the heap is shared.
const NEIGHBOURS: usize = 8;

impl Model {
    fn load(mib: u64, chance: &mut Chance) -> Self {
        let strings = usize::try_from(mib * STRINGS_PER_MIB).unwrap_or(0);
        let (mut tensors, mut bytes) = (Vec::new(), 0);
        while bytes < mib << 20 {
            let most = (mib << 20) - bytes;
            let size = chance.size(10, 24).min(usize::try_from(most).unwrap_or(usize::MAX));
            bytes += size as u64;
            tensors.push(block(size));
        }
        let strings = (0..strings).map(|_| block(chance.size(4, 8))).collect();
        Self { tensors, strings }
    }

    fn infer(&self, chance: &mut Chance) {
        for _ in 0..100 {
            let space: Vec<_> = (0..8).map(|_| block(chance.size(8, 20))).collect();
            let tensor = self.tensors.get(chance.below(self.tensors.len()));
            let string = self.strings.get(chance.below(self.strings.len().max(1)));
            black_box((space, tensor.map(Vec::capacity), string.map(Vec::capacity)));
        }
    }
}

/// Loads a model of this size, uses it and unloads it, twice.
///
/// # Errors
/// Those of the place.
pub fn unload(
    mib: u64,
    allocator: &dyn Allocator,
    place: &mut dyn Place,
) -> Result<Unloaded, BoxError> {
    beside_neighbours(allocator, || {
        std::thread::sleep(SETTLE);
        let base = looks(place)?;
        let (loaded, after) = once(mib, place)?;
        let (_, again) = once(mib, place)?;
        Ok(Unloaded { base, loaded, after, again })
    })
}

/// Resident bytes with a model and after it.
fn once(mib: u64, place: &mut dyn Place) -> Result<(u64, u64), BoxError> {
    let mut chance = Chance::new(7);
    let mut model = None;
    place.within(&mut || model = Some(Model::load(mib, &mut chance)))?;
    let loaded = Process::own().resident()?;
    place.within(&mut || {
        if let Some(model) = &model {
            model.infer(&mut chance);
        }
    })?;
    place.within(&mut || model = None)?;
    place.leave()?;
    std::thread::sleep(SETTLE);
    Ok((loaded, looks(place)?))
}

/// Loads, uses and unloads a model of this size many times.
///
/// # Errors
/// Those of the place.
pub fn cycles(
    mib: u64,
    times: usize,
    allocator: &dyn Allocator,
    place: &mut dyn Place,
) -> Result<Cycled, BoxError> {
    beside_neighbours(allocator, || {
        let mut chance = Chance::new(7);
        let own = Process::own();
        let mut seen = Vec::with_capacity(times);
        let mut first = None;
        for cycle in 0..times {
            let mut model = None;
            place.within(&mut || {
                let model = model.insert(Model::load(mib, &mut chance));
                model.infer(&mut chance);
            })?;
            place.within(&mut || model = None)?;
            place.leave()?;
            // What grows at first is the process's warmth: it is no growth by cycles.
            if cycle >= times / 10 {
                first = Some(first.map_or_else(|| counts(&own, place), Ok)?);
                seen.push(count(own.resident()?));
            }
        }
        let (first, last) = (first.ok_or("no cycle")?, counts(&own, place)?);
        let [descriptors, threads, arenas] = [0, 1, 2].map(|at| last[at] - first[at]);
        Ok(Cycled { slope: slope(&seen), descriptors, threads, arenas })
    })
}

fn counts(own: &Process, place: &dyn Place) -> Result<[i64; 3], BoxError> {
    let arenas = i64::try_from(place.arenas())?;
    Ok([i64::try_from(own.descriptors()?)?, i64::try_from(own.threads()?)?, arenas])
}

/// The median of some looks at what is resident, each when the place has been left: just after a
/// purge where that is the way, so that what the neighbours have freed a moment ago is not in it.
fn looks(place: &mut dyn Place) -> Result<u64, BoxError> {
    let own = Process::own();
    let mut looks = Vec::with_capacity(LOOKS);
    for _ in 0..LOOKS {
        place.leave()?;
        looks.push(own.resident()?);
        std::thread::sleep(LOOK_EVERY);
    }
    looks.sort_unstable();
    Ok(looks.get(LOOKS / 2).copied().unwrap_or(0))
}

fn beside_neighbours<T>(
    allocator: &dyn Allocator,
    act: impl FnOnce() -> Result<T, BoxError>,
) -> Result<T, BoxError> {
    let traffic = allocator.begin();
    let (ready, stop) = (Barrier::new(NEIGHBOURS + 1), AtomicBool::new(false));
    let done = std::thread::scope(|scope| {
        for seed in 0..NEIGHBOURS {
            let (ready, stop) = (&ready, &stop);
            scope.spawn(move || neighbour(seed as u64, ready, stop));
        }
        ready.wait();
        let done = act();
        stop.store(true, Ordering::Relaxed);
        done
    });
    drop(traffic);
    done
}

/// Holds blocks of up to 256 KiB until it is told to stop. Two at a time are dropped and allocated
/// anew, each at the other's place: what it holds is the same number of bytes at any time, so that
/// the base does not move by chance.
fn neighbour(seed: u64, ready: &Barrier, stop: &AtomicBool) {
    let mut chance = Chance::new(seed);
    let mut held: Vec<_> = (0..HELD).map(|_| block(chance.size(4, 18))).collect();
    let mut strings: Vec<_> = (0..HELD_STRINGS).map(|_| block(chance.size(4, 9))).collect();
    let mut work = |times: usize| {
        for _ in 0..times {
            trade(&mut held, &mut chance);
            for _ in 0..HELD_STRINGS / HELD {
                trade(&mut strings, &mut chance);
            }
        }
    };
    work(WARM);
    ready.wait();
    while !stop.load(Ordering::Relaxed) {
        work(OPERATIONS);
        std::thread::sleep(PAUSE);
    }
}

fn trade(held: &mut [Vec<u8>], chance: &mut Chance) {
    let [first, second] = [(); 2].map(|()| {
        let hot = chance.below(COLD) > 0;
        chance.below(if hot { held.len() / COLD } else { held.len() })
    });
    if first == second {
        return;
    }
    let mut take = |at: usize| held.get_mut(at).map(mem::take).unwrap_or_default();
    let sizes = [take(first), take(second)].map(|block| block.capacity());
    for (at, size) in [(second, sizes[0]), (first, sizes[1])] {
        if let Some(place) = held.get_mut(at) {
            *place = block(size);
        }
    }
}

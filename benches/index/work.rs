//! The work that every peer does, and its timing.
//!
//! The mix picks a slot by chance, frees the block in it or puts one of chance size there. What
//! chance costs is never timed; what the clock itself costs is measured and taken off.
//!
//! Invariant: a slot holds a live block or none; a failed allocation leaves it empty.

use std::time::Instant;

use crate::chance::Chance;
use crate::common::figures::median;
use crate::peers::Peer;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// The pool of every run.
pub(crate) const POOL: u64 = 64 * GIB;
pub(crate) const SEEDS: [u64; 3] = [42, 7, 1234];
/// Blocks that are live at first in the mix, about 78 % of the pool, of twice as many slots.
pub(crate) const MIX_LIVE: usize = 10_000;
/// The same at about 90 % of the pool.
pub(crate) const LOAD90_LIVE: usize = 11_600;
/// Operations at 90 %: about half of them allocate.
pub(crate) const LOAD90_STEPS: usize = 300_000;

/// The slots of a mix.
pub(crate) struct Mix<H> {
    pub(crate) slots: Vec<Option<H>>,
    chance: Chance,
    pub(crate) failures: u64,
}

impl<H> Mix<H> {
    /// Twice as many slots as live blocks; the first half is filled.
    pub(crate) fn filled<P: Peer<Handle = H>>(peer: &mut P, seed: u64, live: usize) -> Self {
        let mut mix = Self { slots: Vec::new(), chance: Chance::new(seed), failures: 0 };
        for _ in 0..live {
            let size = mix.chance.size();
            mix.slots.push(peer.alloc(size));
        }
        mix.slots.resize_with(live * 2, || None);
        mix
    }

    /// Plays steps.
    pub(crate) fn play<P: Peer<Handle = H>>(&mut self, peer: &mut P, steps: usize) {
        for _ in 0..steps {
            let slot = self.chance.below(self.slots.len());
            match self.slots[slot].take() {
                Some(block) => peer.free(block),
                None => {
                    let block = peer.alloc(self.chance.size());
                    self.failures += u64::from(block.is_none());
                    self.slots[slot] = block;
                }
            }
        }
    }

    /// Plays steps; nanoseconds of each, the clock's own taken off.
    pub(crate) fn timed<P: Peer<Handle = H>>(&mut self, peer: &mut P, steps: usize) -> Vec<f64> {
        let nanos = Vec::with_capacity(steps);
        let mut timed = Timed { peer, clock: clock_nanos(), nanos };
        self.play(&mut timed, steps);
        timed.nanos
    }
}

/// Notes the time of each operation of a peer.
struct Timed<'a, P> {
    peer: &'a mut P,
    clock: f64,
    nanos: Vec<f64>,
}

impl<P: Peer> Peer for Timed<'_, P> {
    type Handle = P::Handle;

    fn alloc(&mut self, bytes: u64) -> Option<P::Handle> {
        let start = Instant::now();
        let block = self.peer.alloc(bytes);
        self.nanos.push((start.elapsed().as_nanos() as f64 - self.clock).max(0.0));
        block
    }

    fn free(&mut self, block: P::Handle) {
        let start = Instant::now();
        self.peer.free(block);
        self.nanos.push((start.elapsed().as_nanos() as f64 - self.clock).max(0.0));
    }
}

/// Returns the lower quartile of the times that two reads of the clock take.
fn clock_nanos() -> f64 {
    let each: Vec<_> = (0..2001).map(|_| Instant::now().elapsed().as_nanos() as f64).collect();
    crate::common::figures::quantile(&each, 0.25)
}

/// Median nanoseconds of a pair of 8 MiB in which nothing else is live.
pub(crate) fn pair<P: Peer>(peer: &mut P) -> f64 {
    const EACH: u32 = 1_000;
    let mut batch = || {
        let start = Instant::now();
        for _ in 0..EACH {
            let block = peer.alloc(8 * MIB).map(std::hint::black_box);
            block.into_iter().for_each(|block| peer.free(block));
        }
        start.elapsed().as_nanos() as f64 / f64::from(EACH)
    };
    median(&(0..200).map(|_| batch()).collect::<Vec<_>>())
}

/// Median nanoseconds of a request for 1000 KiB beside 8,192 holes of 520 KiB.
pub(crate) fn beside_holes<P: Peer>(peer: &mut P) -> f64 {
    let mut holes = Vec::new();
    for _ in 0..8_192 {
        holes.extend(peer.alloc(520 << 10));
        let _ = peer.alloc(256);
    }
    holes.into_iter().for_each(|block| peer.free(block));
    let mut timed = Timed { peer, clock: clock_nanos(), nanos: Vec::new() };
    for _ in 0..2_001 {
        let block = timed.alloc(1_000 << 10);
        block.into_iter().for_each(|block| timed.peer.free(block));
    }
    median(&timed.nanos)
}

/// Failures of a mix at 90 % of the pool.
pub(crate) fn load90<P: Peer>(mut peer: P, seed: u64) -> f64 {
    let mut mix = Mix::filled(&mut peer, seed, LOAD90_LIVE);
    mix.failures = 0;
    mix.play(&mut peer, LOAD90_STEPS);
    mix.failures as f64
}

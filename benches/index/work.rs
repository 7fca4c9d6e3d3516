//! The work that every peer does, and its timing.
//!
//! The mix picks a slot by chance, frees the block in it or puts one of chance size there. What
//! chance costs is never timed; what the clock itself costs is measured and taken off.
//!
//! Invariant: a slot holds a live block or none; a failed allocation leaves it empty.

use std::time::Instant;

use crate::chance::Chance;
use crate::peers::Peer;

pub(crate) const KIB: u64 = 1 << 10;
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

/// The work in a step of the mix.
pub(crate) enum Todo<H> {
    Alloc(u64),
    Free(H),
}

/// The slots of a mix.
pub(crate) struct Mix<H> {
    slots: Vec<Option<H>>,
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

    /// The blocks that are live.
    pub(crate) fn into_live(self) -> impl Iterator<Item = H> {
        self.slots.into_iter().flatten()
    }

    fn draw(&mut self) -> (usize, Todo<H>) {
        let slot = self.chance.below(self.slots.len());
        match self.slots[slot].take() {
            Some(block) => (slot, Todo::Free(block)),
            None => (slot, Todo::Alloc(self.chance.size())),
        }
    }

    fn settle(&mut self, slot: usize, was_free: bool, block: Option<H>) {
        self.failures += u64::from(!was_free && block.is_none());
        self.slots[slot] = block;
    }

    /// Plays steps untimed.
    pub(crate) fn play<P: Peer<Handle = H>>(&mut self, peer: &mut P, steps: usize) {
        for _ in 0..steps {
            let (slot, todo) = self.draw();
            let frees = matches!(todo, Todo::Free(_));
            let block = act(peer, todo);
            self.settle(slot, frees, block);
        }
    }

    /// Plays steps; nanoseconds of each, the clock's own taken off, in order of size.
    pub(crate) fn timed(
        &mut self,
        steps: usize,
        mut act: impl FnMut(Todo<H>) -> Option<H>,
    ) -> Vec<u64> {
        let clock = clock_nanos();
        let mut nanos = Vec::with_capacity(steps);
        for _ in 0..steps {
            let (slot, todo) = self.draw();
            let frees = matches!(todo, Todo::Free(_));
            let start = Instant::now();
            let block = act(todo);
            let time = start.elapsed();
            self.settle(slot, frees, block);
            nanos.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).saturating_sub(clock));
        }
        nanos.sort_unstable();
        nanos
    }
}

/// Does it.
pub(crate) fn act<P: Peer>(peer: &mut P, todo: Todo<P::Handle>) -> Option<P::Handle> {
    match todo {
        Todo::Alloc(size) => peer.alloc(size),
        Todo::Free(block) => {
            peer.free(block);
            None
        }
    }
}

/// Returns the lower quartile of the times that two reads of the clock take.
fn clock_nanos() -> u64 {
    let mut each: Vec<u128> = (0..2001).map(|_| Instant::now().elapsed().as_nanos()).collect();
    each.sort_unstable();
    u64::try_from(each[each.len() / 4]).unwrap_or(0)
}

/// Median nanoseconds of `act` over batches of `each`, for one of them.
fn median_of_batches(batches: usize, each: usize, mut act: impl FnMut()) -> f64 {
    let mut nanos: Vec<f64> = (0..batches)
        .map(|_| {
            let start = Instant::now();
            (0..each).for_each(|_| act());
            start.elapsed().as_nanos() as f64 / each as f64
        })
        .collect();
    nanos.sort_unstable_by(f64::total_cmp);
    nanos[nanos.len() / 2]
}

/// The four short loops in which nearly nothing else is live. Nanoseconds: of a pair of 8 MiB, of
/// a pair among 512 of 1 KiB, of a pair with four of 1 MiB live, of a chain of eight sizes.
pub(crate) fn loops<P: Peer>(peer: &mut P) -> [f64; 4] {
    let pair = median_of_batches(200, 1_000, || {
        let block = peer.alloc(8 * MIB).map(std::hint::black_box);
        block.into_iter().for_each(|block| peer.free(block));
    });
    let mut many = Vec::with_capacity(512);
    let batch = median_of_batches(200, 4, || {
        many.extend((0..512).filter_map(|_| peer.alloc(KIB)));
        many.drain(..).for_each(|block| peer.free(block));
    });
    let mut four: Vec<_> = (0..4).map(|_| peer.alloc(MIB)).collect();
    let mut turn = 0;
    let ping_pong = median_of_batches(200, 1_000, || {
        let block = four[turn % 4].take();
        block.into_iter().for_each(|block| peer.free(block));
        four[turn % 4] = peer.alloc(MIB);
        turn += 1;
    });
    four.into_iter().flatten().for_each(|block| peer.free(block));
    let chain = median_of_batches(200, 200, || {
        for nth in 0..8 {
            let block = peer.alloc(MIB << nth).map(std::hint::black_box);
            block.into_iter().for_each(|block| peer.free(block));
        }
    });
    [pair, batch / 512.0, ping_pong, chain]
}

/// Median nanoseconds of a request for 1000 KiB beside 8,192 holes of so many KiB.
pub(crate) fn beside_holes<P: Peer>(peer: &mut P, hole_kib: u64) -> u64 {
    let mut holes = Vec::new();
    let mut kept = Vec::new();
    for _ in 0..8_192 {
        holes.extend(peer.alloc(hole_kib * KIB));
        kept.extend(peer.alloc(256));
    }
    holes.into_iter().for_each(|block| peer.free(block));
    let clock = clock_nanos();
    let mut nanos: Vec<u64> = (0..2_001)
        .map(|_| {
            let start = Instant::now();
            let block = peer.alloc(1_000 * KIB);
            let time = start.elapsed();
            block.into_iter().for_each(|block| peer.free(block));
            u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).saturating_sub(clock)
        })
        .collect();
    nanos.sort_unstable();
    nanos[nanos.len() / 2]
}

/// Failures of a mix at 90 % of the pool.
pub(crate) fn load90<P: Peer>(mut peer: P, seed: u64) -> u64 {
    let mut mix = Mix::filled(&mut peer, seed, LOAD90_LIVE);
    mix.failures = 0;
    mix.play(&mut peer, LOAD90_STEPS);
    mix.failures
}

/// The value below which so many of a thousand are.
pub(crate) fn permille(sorted: &[u64], share: usize) -> u64 {
    sorted.get(sorted.len() * share / 1000).copied().unwrap_or(0)
}

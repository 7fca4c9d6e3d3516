//! Everything an arena does, at random, against a plain model; `validate` after every step.
//!
//! The model knows what is held and what the limit is, and nothing of places and granules. A
//! refusal is checked as well: that the limit, or the addresses, really left no room.
//!
//! Invariant: `requested`, `live` and the counts are the model's after every step, and committed
//! memory is never above the limit but for one that was lowered.

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock, ManualClock};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, DeviceError, Growth, Lease, RawBlock, Region};

use super::{Chance, GRANULE, SECOND, assert_apart, assert_marked, config, mark, open_with, raw};

struct Held {
    mark: u64,
    buffer: Buffer<u64>,
    /// Bytes given, where they are not what was asked for, rounded up to 256.
    given: ByteSize,
}

struct Model {
    arena: DeviceArena,
    clock: ManualClock,
    lease: Lease,
    chance: Chance,
    held: Vec<Held>,
    raw: Vec<RawBlock>,
    /// Blocks had without an error, and reserved.
    reserves: u64,
    refused: u64,
    committed: ByteSize,
}

fn whole(bytes: ByteSize, step: ByteSize) -> ByteSize {
    bytes.next_multiple_of(step).expect("small")
}

impl Model {
    fn open(seed: u64, config: ArenaConfig) -> Self {
        let (arena, clock) = open_with(config);
        let lease = arena.enter().expect("awake");
        Self {
            arena,
            clock,
            lease,
            chance: Chance::new(seed),
            held: Vec::new(),
            raw: Vec::new(),
            reserves: 0,
            refused: 0,
            committed: ByteSize::ZERO,
        }
    }

    fn step(&mut self, number: u64) {
        let many = self.held.len() + self.raw.len() > 60;
        match self.chance.below(20) {
            0..5 if !many => self.alloc(number),
            5..7 if !many => self.alloc_raw(),
            7 if !many => self.reserve(number),
            8..11 => self.resize(number),
            11..14 => self.free(),
            14..16 => self.free_raw(),
            16 => self.give_back(),
            17 => self.decay(),
            18 => self.set(),
            _ if self.chance.below(40) == 0 => self.reset(),
            _ => self.nonsense(),
        }
        self.check();
    }

    fn alloc(&mut self, mark: u64) {
        let (len, region) = (self.chance.bits(18), self.chance.region());
        let outcome = self.arena.alloc(len, region);
        let bytes = ByteSize::of(len * 8);
        let given = whole(bytes, ByteSize::new(256));
        self.keep(outcome, mark, given);
    }

    fn reserve(&mut self, mark: u64) {
        let (len, region) = (self.chance.bits(18), self.chance.region());
        let outcome = self.arena.reserve(len, region);
        self.reserves += u64::from(outcome.is_ok());
        let given = whole(ByteSize::of(len * 8), GRANULE);
        self.keep(outcome, mark, given);
    }

    fn keep(&mut self, outcome: Result<Buffer<u64>, DeviceError>, own: u64, given: ByteSize) {
        match outcome {
            Ok(mut buffer) => {
                mark(&mut buffer, &self.lease, own);
                self.held.push(Held { mark: own, buffer, given });
            }
            Err(error) => self.explain(&error, given),
        }
    }

    fn alloc_raw(&mut self) {
        let size = ByteSize::of(self.chance.bits(21));
        let align = ByteSize::new(1 << self.chance.below(22));
        let region = self.chance.region();
        match self.arena.alloc_raw(size, align, region) {
            Ok(block) => {
                assert!(block.at.is_multiple_of(align), "{block} for {align}");
                assert_eq!((block.requested, block.region), (size, region));
                self.raw.push(block);
                assert_apart(self.raw.iter().copied());
            }
            Err(error) => self.explain(&error, whole(size, ByteSize::new(256))),
        }
    }

    fn resize(&mut self, own: u64) {
        if self.held.is_empty() {
            return;
        }
        let nth = self.chance.below(self.held.len());
        let len = if self.chance.below(8) == 0 { 0 } else { self.chance.bits(18) };
        let held = &mut self.held[nth];
        let before = held.buffer.len();
        let outcome = held.buffer.resize(len);
        let stays = if outcome.is_ok() { before.min(len) } else { before };
        assert_marked(&held.buffer, &self.lease, held.mark, stays);
        mark(&mut held.buffer, &self.lease, own);
        held.mark = own;
        let given = whole(ByteSize::of(len * 8), ByteSize::new(256));
        match outcome {
            Ok(()) => held.given = given,
            // Where it stands, or in a second place: at least what it grows by was missing.
            Err(error) => self.explain(&error, given),
        }
    }

    fn free(&mut self) {
        if !self.held.is_empty() {
            let nth = self.chance.below(self.held.len());
            let held = self.held.swap_remove(nth);
            assert_marked(&held.buffer, &self.lease, held.mark, held.buffer.len());
        }
    }

    fn free_raw(&mut self) {
        if !self.raw.is_empty() {
            let nth = self.chance.below(self.raw.len());
            let block = self.raw.swap_remove(nth);
            assert_eq!(self.arena.free(block.at), Ok(block));
            assert!(self.arena.free(block.at).is_err(), "freed twice");
        }
    }

    fn give_back(&mut self) {
        let before = self.arena.snapshot().committed;
        let keep = ByteSize::of(self.chance.bits(25));
        let given = match self.chance.below(3) {
            0 => self.arena.purge(),
            1 => self.arena.shrink(),
            _ => self.arena.trim(keep),
        };
        let after = self.arena.snapshot();
        assert_eq!(given, Ok(before.saturating_sub(after.committed)));
        assert!(after.idle.is_zero() || after.committed <= keep, "{after:?}");
        assert!(after.idle.is_zero() || after.cached.is_zero(), "{after:?}");
    }

    fn decay(&mut self) {
        self.clock.advance(SECOND * u32::try_from(self.chance.below(4)).expect("small"));
        let now = self.clock.now();
        self.arena.decay(now).expect("the driver takes it");
        assert!(self.arena.next_decay() >= now);
    }

    fn set(&mut self) {
        match self.chance.below(4) {
            0 => self.arena.set_thread_cache(ByteSize::of(self.chance.bits(24))),
            1 => self.arena.set_decay(DecayTime::Within(SECOND * 5)),
            2 => self.arena.set_decay(DecayTime::AtOnce),
            _ => self.arena.set_limit(ByteSize::of(self.chance.bits(26))),
        }
    }

    fn reset(&mut self) {
        let bytes = self.raw.drain(..).map(|block| block.size).sum();
        assert_eq!(self.arena.reset(), Ok(bytes));
    }

    fn nonsense(&mut self) {
        let before = self.arena.snapshot();
        assert!(raw(&self.arena, ByteSize::MAX, Region::Stable).is_err());
        assert!(raw(&self.arena, ByteSize::ZERO, Region::Stable).is_err());
        if let Some(block) = self.raw.first() {
            let inside = block.at.checked_add(ByteSize::new(1)).expect("an address");
            assert!(self.arena.free(inside).is_err());
        }
        let after = self.arena.snapshot();
        assert_eq!((after.live, after.committed), (before.live, before.committed));
    }

    /// Asserts that there was no room: after a refusal idle memory is gone, or not enough.
    fn explain(&mut self, error: &DeviceError, given: ByteSize) {
        self.refused += 1;
        let snapshot = self.arena.snapshot();
        match *error {
            DeviceError::OutOfMemory { requested, live, committed, limit, .. } => {
                assert_eq!((requested, limit), (given, self.arena.limit()), "{error}");
                // A block that is resized is live, at its old size, in the numbers as well.
                assert_eq!((live, committed), (snapshot.live, snapshot.committed), "{error}");
                let granules = whole(given, GRANULE).saturating_add(GRANULE);
                assert!(snapshot.active.saturating_add(granules) > limit, "{error}: {snapshot:?}");
                assert!(snapshot.cached.is_zero(), "a front kept something: {snapshot:?}");
            }
            DeviceError::OutOfAddresses { requested, largest_span, .. } => {
                // The index promises a place where 17/16 of size and alignment are free.
                let enough = (requested.get() + GRANULE.get()) / 16 * 17;
                assert!(largest_span.get() <= enough, "{error}");
            }
            _ => panic!("{error}"),
        }
    }

    fn check(&mut self) {
        self.arena.validate();
        let snapshot = self.arena.snapshot();
        let buffers = |part: fn(&Held) -> ByteSize| self.held.iter().map(part).sum::<ByteSize>();
        let blocks = |part: fn(&RawBlock) -> ByteSize| self.raw.iter().map(part).sum::<ByteSize>();
        let requested =
            buffers(|held| held.buffer.bytes()).saturating_add(blocks(|block| block.requested));
        let live = buffers(|held| held.given).saturating_add(blocks(|block| block.size));
        assert_eq!((snapshot.requested, snapshot.live), (requested, live));
        let with_bytes = self.held.iter().filter(|held| !held.given.is_zero()).count();
        let count = (with_bytes + self.raw.len()) as u64;
        assert_eq!(snapshot.allocs_total - snapshot.frees_total, count);
        assert_eq!(snapshot.reserves_total, self.reserves);
        assert_eq!(snapshot.alloc_failures_driver_total, 0);
        let allowed = snapshot.limit.max(self.committed);
        assert!(snapshot.committed <= allowed, "{snapshot:?}");
        self.committed = snapshot.committed;
    }

    fn end(mut self) {
        println!("{} refused, {} reserved", self.refused, self.reserves);
        assert!(self.refused > 5 && self.reserves > 2, "too tame");
        for held in &self.held {
            assert_marked(&held.buffer, &self.lease, held.mark, held.buffer.len());
        }
        self.held.clear();
        self.reset();
        self.check();
        self.arena.purge().expect("the driver takes it");
        assert_eq!(self.arena.snapshot().committed, ByteSize::ZERO);
        drop(self.lease);
        assert_eq!(self.arena.close(), Ok(()));
    }
}

fn run(seed: u64, config: ArenaConfig) {
    let mut model = Model::open(seed, config);
    for number in 1..=1500 {
        model.step(number << 24);
    }
    model.end();
}

#[test]
fn a_model_and_an_arena_agree_where_memory_is_short() {
    for seed in [0x2127_599B_F432_5C37, 42] {
        run(seed, ArenaConfig { limit: ByteSize::mib(48), ..config() });
    }
}

#[test]
fn a_model_and_an_arena_agree_where_addresses_are_short() {
    let (limit, reserve) = (ByteSize::mib(64), ByteSize::mib(24));
    for seed in [0x8803_55F2_1E6D_1965, 7] {
        run(seed, ArenaConfig { limit, reserve, ..config() });
    }
}

#[test]
fn a_model_and_an_arena_agree_where_growth_doubles() {
    let growth = Growth::NextPowerOfTwo {
        initial: ByteSize::mib(1),
        after_shrink: ByteSize::mib(2),
        cap: ByteSize::mib(16),
    };
    for seed in [0xE703_7ED1_A0B4_28DB, 1234] {
        run(seed, ArenaConfig { limit: ByteSize::mib(48), growth, ..config() });
    }
}

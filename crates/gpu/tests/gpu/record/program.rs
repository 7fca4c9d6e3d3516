//! Random programs: everything that an arena is asked, in an order that a seed decides.

use std::sync::Arc;
use std::time::Duration;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock as _, ManualClock};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::{DeviceAddress, StreamHandle};
use lowtide_gpu::{
    BlockPin, Buffer, CompactOptions, Contents, DeviceArena, Growth, Lane, Lease, Region,
    SleepOptions, SleepState,
};

use super::{MIB, lane_of};
use crate::chance::Chance;

/// Numbers by a seed.
pub(crate) struct Random(Chance);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(Chance::new(seed ^ 0x9E37_79B9_7F4A_7C15))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next()
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).expect("an index")
    }

    fn region(&mut self) -> Region {
        Region::ALL[self.index(2)]
    }

    /// Small ones, large ones, and now and then one that is far too large.
    fn size(&mut self) -> u64 {
        match self.below(40) {
            0 => 1 << 50,
            1..=9 => 1 + self.below(12 * MIB),
            _ => {
                let most = 1 << (8 + self.below(13));
                1 + self.below(most)
            }
        }
    }
}

/// A program and what it holds.
pub(crate) struct Program {
    arena: DeviceArena,
    clock: Arc<ManualClock>,
    random: Random,
    buffers: Vec<Buffer<u8>>,
    raw: Vec<DeviceAddress>,
    pins: Vec<BlockPin>,
    lanes: Vec<Lane>,
    lease: Option<Lease>,
    streams: Vec<StreamHandle>,
}

impl Program {
    /// On these streams, of the arena's driver; any numbers, on one without.
    pub(crate) fn new(
        arena: DeviceArena,
        clock: Arc<ManualClock>,
        seed: u64,
        streams: Vec<StreamHandle>,
    ) -> Self {
        Self {
            arena,
            clock,
            random: Random::new(seed),
            buffers: Vec::new(),
            raw: Vec::new(),
            pins: Vec::new(),
            lanes: Vec::new(),
            lease: None,
            streams,
        }
    }

    /// So many steps.
    pub(crate) fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            self.clock.advance(Duration::from_micros(self.random.below(50_000)));
            self.step();
        }
    }

    /// Everything is freed, and the arena is closed in one of two cases.
    pub(crate) fn end(mut self) {
        self.lease = None;
        let (arena, _) = (self.arena.clone(), self.arena.reset());
        let is_closed = self.random.below(2) == 0;
        drop(self);
        if is_closed {
            let _ = arena.close();
        }
    }

    fn step(&mut self) {
        match self.random.below(72) {
            0..=19 => self.alloc(),
            20..=35 => self.free(),
            36..=41 => self.resize(),
            42..=45 => self.on_lanes(),
            46..=49 => self.raw(),
            50 => {
                let len = usize::try_from(self.random.size()).expect("64 bits");
                self.buffers.extend(self.arena.reserve::<u8>(len, self.random.region()));
            }
            51..=53 => drop(self.arena.decay(self.clock.now())),
            54 => drop(self.arena.trim(ByteSize::new(self.random.below(64 * MIB)))),
            55 => drop(self.arena.shrink()),
            56 => drop(self.arena.purge()),
            57..=58 => self.compact(),
            59 => {
                let limit = self.random.below(96) * MIB;
                let limit = if limit == 0 { ByteSize::MAX } else { ByteSize::new(limit) };
                self.arena.set_limit(limit);
            }
            60 => {
                let times = [DecayTime::AtOnce, DecayTime::Never, DecayTime::from_millis(200)];
                self.arena.set_decay(times[self.random.index(3)]);
            }
            // Refused where it sleeps and the limit has no room for what is to come back.
            61 => {
                self.lease = self.lease.take().is_none().then(|| self.arena.enter().ok()).flatten()
            }
            62 => {
                if let Some(buffer) = self.some_buffer() {
                    let pin = self.buffers[buffer].pin().expect("here");
                    self.pins.push(pin);
                }
                if self.pins.len() > 3 {
                    let pin = self.random.index(self.pins.len());
                    drop(self.pins.swap_remove(pin));
                }
            }
            63 => {
                drop(self.arena.reset());
                self.raw.clear();
            }
            64..=66 => {
                let contents = [None, Some(self.contents())][self.random.index(2)];
                if let Some(buffer) = self.some_buffer() {
                    self.buffers[buffer].set_contents(contents).expect("here");
                }
            }
            67..=69 => {
                let (stable, dynamic) = (self.contents(), self.contents());
                // A lease, and that it sleeps already, are in the way now and then.
                let _ = self.arena.sleep(SleepOptions { drain: Duration::ZERO, stable, dynamic });
            }
            _ => {
                let is_asleep = self.arena.state() == SleepState::Asleep;
                assert!(is_asleep || self.arena.wake().is_err(), "it is awake");
                if is_asleep {
                    let _ = self.arena.wake(); // the limit may be in the way
                }
            }
        }
    }

    fn contents(&mut self) -> Contents {
        Contents::ALL[self.random.index(3)]
    }

    fn some_buffer(&mut self) -> Option<usize> {
        (!self.buffers.is_empty()).then(|| self.random.index(self.buffers.len()))
    }

    fn alloc(&mut self) {
        let len = usize::try_from(self.random.size()).expect("64 bits");
        let region = self.random.region();
        let buffer = match self.random.index(3) {
            0 if !self.lanes.is_empty() => {
                let lane = self.random.index(self.lanes.len());
                self.lanes[lane].alloc(len, region)
            }
            _ => self.arena.alloc(len, region),
        };
        self.buffers.extend(buffer);
    }

    fn free(&mut self) {
        if let Some(buffer) = self.some_buffer() {
            drop(self.buffers.swap_remove(buffer));
        }
    }

    fn resize(&mut self) {
        let len = match self.random.below(8) {
            0 => 0,
            _ => usize::try_from(self.random.size()).expect("64 bits"),
        };
        if let Some(buffer) = self.some_buffer() {
            let _ = self.buffers[buffer].resize(len);
        }
    }

    fn on_lanes(&mut self) {
        let stream = self.streams[self.random.index(self.streams.len())];
        match (self.random.below(4), self.lanes.is_empty()) {
            (0, _) | (_, true) => {
                self.lanes.push(lane_of(&self.arena, stream));
            }
            (1, _) => {
                let lane = self.random.index(self.lanes.len());
                drop(self.lanes.swap_remove(lane));
            }
            (2, _) => {
                let lane = self.random.index(self.lanes.len());
                self.lanes[lane].end_run().expect("marked");
            }
            _ => {
                let lane = self.random.index(self.lanes.len());
                if let Some(buffer) = self.some_buffer() {
                    self.buffers[buffer].record_use(&self.lanes[lane]).expect("of this arena");
                }
            }
        }
    }

    fn raw(&mut self) {
        if self.random.below(3) > 0 || self.raw.is_empty() {
            let size = ByteSize::new(self.random.size());
            let align = ByteSize::new(1 << self.random.below(22));
            let region = self.random.region();
            let block = match self.some_lane() {
                Some(lane) => self.lanes[lane].alloc_raw(size, align, region),
                None => self.arena.alloc_raw(size, align, region),
            };
            self.raw.extend(block.map(|block| block.at));
            return;
        }
        let nth = self.random.index(self.raw.len());
        let at = self.raw[nth];
        if let Some(lane) = self.some_lane() {
            self.arena.record_use(at, &self.lanes[lane]).expect("of this arena");
        }
        if self.random.below(8) == 0 {
            self.arena.record_unknown_use(at).expect("live");
        }
        if self.random.below(2) == 0 {
            self.raw.swap_remove(nth);
            let freed = match self.some_lane() {
                Some(lane) => self.lanes[lane].free(at),
                None => self.arena.free(at),
            };
            freed.expect("live");
        }
    }

    /// A lane, or none in one of three cases.
    fn some_lane(&mut self) -> Option<usize> {
        let is_on_lane = self.random.below(3) > 0 && !self.lanes.is_empty();
        is_on_lane.then(|| self.random.index(self.lanes.len()))
    }

    fn compact(&mut self) {
        let all = CompactOptions::new(self.random.region());
        let spans = [None, Some(ByteSize::mib(8))];
        let budget = ByteSize::new(self.random.below(16 * MIB));
        let moves_raw = self.random.below(2) == 0;
        let contiguous = spans[self.random.index(2)];
        let options = CompactOptions { contiguous, budget, moves_raw, ..all };
        let raw = &mut self.raw;
        let outcome = self.arena.compact(options, |moved| {
            if let Some(at) = raw.iter_mut().find(|at| **at == moved.from) {
                *at = moved.to;
            }
        });
        outcome.expect("nothing fails here");
    }
}

/// Ways to grow.
pub(crate) fn growths() -> [Growth; 2] {
    let (initial, after_shrink) = (ByteSize::mib(1), ByteSize::mib(4));
    let cap = ByteSize::mib(64);
    [Growth::SameAsRequested, Growth::NextPowerOfTwo { initial, after_shrink, cap }]
}

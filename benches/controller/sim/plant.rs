//! The process in its cgroup: what it holds, what its allocator keeps, and when the kernel kills.
//!
//! Amounts are MiB. Freed bytes stay with their thread up to a bound, leave holes in pages that
//! stay active, and else make pages dirty; the next allocation takes thread caches, holes and dirty
//! pages before it touches new memory, as jemalloc does. Dirty pages go along a time constant, or
//! never. The page cache takes what is left of the limit and gives it up to whoever touches memory.
//! The plant admits nothing and purges nothing by itself.
//!
//! Invariants: `physical = base + live + cached + holes + dirty + neighbour`; the kernel kills
//! where
//! `physical > limit`, since nothing but page cache can be reclaimed.

use lowtide_admission::ByteSize;
use lowtide_admission::clock::Moment;
use lowtide_admission::{Limit, Sample};

use super::chance::Chance;

/// Bytes of a MiB.
pub(crate) const MIB: f64 = 1_048_576.0;

/// The properties of the process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Build {
    /// The cgroup's limit at the start.
    pub(crate) limit: f64,
    /// The memory that the process holds without requests.
    pub(crate) base: f64,
    /// The time constant by which dirty pages go, in seconds; `None` for never.
    pub(crate) decay: Option<f64>,
    /// The most freed bytes that threads keep.
    pub(crate) caches: f64,
    /// The part of freed bytes that leaves holes.
    pub(crate) holes: f64,
    /// The part of the limit that files would fill.
    pub(crate) files: f64,
}

impl Build {
    pub(crate) fn draw(chance: &mut Chance, limit: f64) -> Self {
        Self {
            limit,
            base: chance.between(0.04, 0.15) * limit,
            decay: chance.pick(&[None, Some(0.3), Some(1.0), Some(10.0)]),
            caches: chance.between(0.0, 0.015) * limit,
            holes: chance.between(0.0, 0.05),
            files: chance.pick(&[0.0, 0.3, 1.0]),
        }
    }
}

/// The process and its cgroup at one instant.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plant {
    pub(crate) build: Build,
    pub(crate) limit: f64,
    pub(crate) live: f64,
    cached: f64,
    holes: f64,
    pub(crate) dirty: f64,
    pub(crate) neighbour: f64,
    /// By when the dirty pages have decayed.
    decayed_at: Moment,
    pub(crate) killed: Option<Moment>,
}

impl Plant {
    pub(crate) fn new(build: Build) -> Self {
        Self { build, limit: build.limit, ..Self::default() }
    }

    pub(crate) fn physical(&self) -> f64 {
        self.build.base + self.live + self.cached + self.holes + self.dirty + self.neighbour
    }

    /// Returns the charge of the cgroup, with the page cache.
    pub(crate) fn usage(&self) -> f64 {
        let files = (self.build.files * self.limit).min(self.limit - self.physical());
        self.physical() + files.max(0.0)
    }

    /// A thread allocates and touches it.
    pub(crate) fn allocate(&mut self, now: Moment, mib: f64) {
        self.decay(now);
        let mut fresh = mib;
        for kept in [&mut self.cached, &mut self.holes, &mut self.dirty] {
            let taken = fresh.min(*kept);
            *kept -= taken;
            fresh -= taken;
        }
        self.live += mib;
        self.look(now);
    }

    pub(crate) fn free(&mut self, now: Moment, mib: f64) {
        self.decay(now);
        self.live = (self.live - mib).max(0.0);
        let cached = mib.min(self.build.caches - self.cached);
        let holes = (mib - cached) * self.build.holes;
        self.cached += cached;
        self.holes += holes;
        self.dirty += mib - cached - holes;
    }

    /// A purge gives back at most this much; says how much it was.
    pub(crate) fn give_back(&mut self, now: Moment, most: f64) -> f64 {
        self.decay(now);
        let given = most.min(self.dirty);
        self.dirty -= given;
        given
    }

    /// Threads give back this part of what they keep.
    pub(crate) fn recall(&mut self, part: f64) {
        let given = self.cached * part;
        self.cached -= given;
        self.dirty += given;
    }

    pub(crate) fn set_neighbour(&mut self, now: Moment, mib: f64) {
        self.decay(now);
        self.neighbour = mib;
        self.look(now);
    }

    /// Another limit, where the kernel accepts it: it refuses one that leaves no room for what is
    /// held (version 1), and an operator who sees to that leaves some.
    pub(crate) fn set_limit(&mut self, now: Moment, mib: f64) -> bool {
        self.decay(now);
        let accepts = mib >= self.limit || self.physical() <= 0.82 * mib;
        if accepts {
            self.limit = mib;
        }
        accepts
    }

    /// The kernel's limit falls, whatever is held.
    pub(crate) fn lower(&mut self, now: Moment, mib: f64) {
        self.limit = mib;
        self.look(now);
    }

    /// Returns a sensor's reading, without a limit if that cannot be read.
    pub(crate) fn sample(&mut self, now: Moment, knows_limit: bool) -> Sample {
        self.decay(now);
        let limit = if knows_limit { Limit::given(bytes(self.limit)) } else { Limit::UNKNOWN };
        let active = self.build.base + self.live + self.cached + self.holes;
        Sample {
            physical: bytes(self.physical()),
            purgeable: bytes(self.dirty),
            cached: bytes(self.cached),
            anonymous: bytes(active + self.dirty),
            untracked_anonymous: bytes(self.dirty),
            limit,
            heap_live: bytes(self.build.base + self.live),
            heap_active: bytes(active),
            ..Sample::default()
        }
    }

    fn decay(&mut self, now: Moment) {
        if let Some(constant) = self.build.decay {
            let passed = (now - self.decayed_at).as_secs_f64();
            if passed > 0.0 && self.dirty > 0.0 {
                self.dirty *= (-passed / constant).exp();
                if self.dirty < 1e-3 {
                    self.dirty = 0.0;
                }
            }
        }
        self.decayed_at = now;
    }

    fn look(&mut self, now: Moment) {
        let part = self.physical() / self.limit;
        if part > 1.0 && self.killed.is_none() {
            self.killed = Some(now);
        }
    }
}

/// An amount in bytes.
pub(crate) fn bytes(mib: f64) -> ByteSize {
    ByteSize::mib(1).scaled(mib.max(0.0))
}

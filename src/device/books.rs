//! Everything an arena knows, under its one lock: regions, limit, curve, counts.
//!
//! It calls no driver. What it books about a driver call comes from the two places that make such
//! calls, `commit` and `reclaim`, which do so with the lock given up.
//!
//! Invariants: those of [`ArenaSnapshot`]; `backed <= limit` but for a limit that was lowered
//! below it; those of [`Curve`].

use super::compact::step::Moving;
use super::curve::Curve;
use super::driver::{DeviceAddress, Rung};
use super::error::DeviceError;
use super::index::Request;
use super::region::{Placed, Region, RegionBooks};
use super::segment::Run;
use super::snapshot::{AllocFailures, ArenaSnapshot};
use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment};
use crate::decay::DecayTime;

/// Granules in one decommit at most: 1 GiB of 2 MiB granules, so that no single call of the
/// driver is unbounded. A guess; a figure for each driver is to be measured.
const RUN_GRANULES_MAX: u64 = 512;

/// A run on its way out, and where it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaving {
    pub(super) region: Region,
    pub(super) run: Run,
    pub(super) at: DeviceAddress,
    pub(super) size: ByteSize,
}

/// Counts since the arena was opened.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) allocs: u64,
    pub(super) frees: u64,
    pub(super) failures: AllocFailures,
    pub(super) commits: u64,
    pub(super) decommits: u64,
    pub(super) committed_bytes: u64,
    pub(super) decommitted_bytes: u64,
}

/// An arena's books.
#[derive(Debug)]
pub(super) struct Books {
    regions: [RegionBooks; 2],
    granularity: u64,
    pub(super) leases: u32,
    pub(super) limit: ByteSize,
    pub(super) totals: Totals,
    live_peak: u64,
    pub(super) curve: Curve,
    /// The block that a compaction moves now.
    pub(super) moving: Option<Moving>,
    /// Who waits for a lease until that is done.
    pub(super) entering: u32,
    /// A compaction is under way.
    pub(super) compacting: bool,
}

impl Books {
    pub(super) fn new(
        regions: [RegionBooks; 2],
        granularity: ByteSize,
        limit: ByteSize,
        curve: Curve,
    ) -> Self {
        Self {
            regions,
            granularity: granularity.get(),
            leases: 0,
            limit,
            totals: Totals::default(),
            live_peak: 0,
            curve,
            moving: None,
            entering: 0,
            compacting: false,
        }
    }

    pub(super) const fn region(&self, region: Region) -> &RegionBooks {
        &self.regions[region.number()]
    }

    pub(super) const fn region_mut(&mut self, region: Region) -> &mut RegionBooks {
        &mut self.regions[region.number()]
    }

    fn total(&self, part: impl Fn(&RegionBooks) -> u64) -> u64 {
        self.regions.iter().map(part).sum()
    }

    pub(super) fn live(&self) -> u64 {
        self.total(RegionBooks::live)
    }

    pub(super) fn backed(&self) -> u64 {
        self.total(|region| region.segment.backed())
    }

    pub(super) fn active(&self) -> u64 {
        self.total(|region| region.segment.active())
    }

    pub(super) fn idle(&self) -> u64 {
        self.total(|region| region.segment.idle())
    }

    pub(super) fn leaving(&self) -> u64 {
        self.total(|region| region.segment.leaving())
    }

    /// The smallest number of granules that holds so many bytes.
    pub(super) const fn granules_for(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.granularity)
    }

    pub(super) const fn bytes_of(&self, granules: u64) -> u64 {
        granules * self.granularity
    }

    /// By how many bytes committing so many more would pass the limit.
    pub(super) fn over_limit(&self, bytes: u64) -> u64 {
        self.backed().saturating_add(bytes).saturating_sub(self.limit.get())
    }

    /// Finds addresses for a block.
    pub(super) fn place(
        &mut self,
        region: Region,
        request: Request,
    ) -> Result<Placed, DeviceError> {
        let placed = self.region_mut(region).place(request);
        self.note_used();
        placed.ok_or_else(|| {
            self.totals.failures.addresses += 1;
            let books = self.region(region);
            DeviceError::OutOfAddresses {
                requested: ByteSize::new(request.size),
                reserved: ByteSize::new(books.segment.reserved()),
                live: ByteSize::new(books.live()),
                largest_span: ByteSize::new(books.largest_span()),
            }
        })
    }

    /// Books that a placed block has its memory.
    pub(super) fn arrive(&mut self, region: Region, placed: Placed) {
        self.region_mut(region).arrive(placed);
        self.totals.allocs += 1;
        self.live_peak = self.live_peak.max(self.live());
    }

    /// Takes back a placed block that got no memory.
    pub(super) fn withdraw(&mut self, region: Region, placed: Placed, clock: &dyn Clock) {
        let gone = self.region_mut(region).withdraw(placed);
        debug_assert!(gone.is_ok(), "a placed block is known to the index");
        if gone == Ok(true) {
            self.note_idle(clock.now());
        }
    }

    /// Frees a live block.
    pub(super) fn release(&mut self, region: Region, placed: Placed, clock: &dyn Clock) {
        if self.defer_release(region, placed) {
            return;
        }
        let gone = self.region_mut(region).release(placed);
        debug_assert!(gone.is_ok(), "only its buffer frees a block, once");
        if let Ok(went_idle) = gone {
            self.totals.frees += 1;
            if went_idle {
                self.note_idle(clock.now());
            }
        }
    }

    /// What an allocation that finds no memory is told.
    pub(super) fn out_of_memory(&self, requested: u64) -> DeviceError {
        let largest_free = self.regions.iter().map(RegionBooks::largest_free).max();
        DeviceError::OutOfMemory {
            requested: ByteSize::new(requested),
            live: ByteSize::new(self.live()),
            committed: ByteSize::new(self.backed()),
            limit: self.limit,
            largest_free: ByteSize::new(largest_free.unwrap_or(0)),
        }
    }

    /// Marks up to `granules` idle granules as leaving, in at most `runs_max` runs. The stable
    /// region's first: what became idle there is the least likely to be asked for again.
    pub(super) fn begin_leave(&mut self, granules: u64, runs_max: usize) -> Vec<Leaving> {
        let mut runs = Vec::new();
        let mut left = granules;
        for region in Region::ALL {
            let segment = &mut self.region_mut(region).segment;
            while runs.len() < runs_max {
                let Some(run) = segment.begin_leave(left.min(RUN_GRANULES_MAX)) else { break };
                left -= run.granules();
                let (at, size) = segment.place_of(run);
                runs.push(Leaving { region, run, at, size });
            }
        }
        runs
    }

    /// Books what came of a decommit.
    pub(super) fn end_leave(&mut self, leaving: Leaving, done: bool) {
        self.region_mut(leaving.region).segment.end_leave(leaving.run, done);
        if done {
            self.totals.decommits += 1;
            self.totals.decommitted_bytes += leaving.size.get();
            self.curve.note_given_back(leaving.size.get());
        }
    }

    /// Tells the curve what is idle at `now`; returns how much of it may stay.
    pub(super) fn tell_decay(&mut self, now: Moment) -> u64 {
        self.curve.tell(self.idle(), now)
    }

    /// When the next look is due.
    pub(super) fn due(&self) -> Moment {
        if self.idle() == 0 { Moment::NEVER } else { self.curve.due() }
    }

    pub(super) fn set_decay(&mut self, time: DecayTime, now: Moment) {
        self.curve.set_time(time, self.idle(), now);
    }

    /// Tells the curve that idle memory may be active again.
    pub(super) fn note_used(&mut self) {
        self.curve.note_used(self.idle());
    }

    pub(super) fn note_idle(&mut self, now: Moment) {
        self.curve.note_idle(self.idle(), now);
    }

    /// All figures at this instant.
    pub(super) fn snapshot(&self, name: &str, rung: Rung) -> ArenaSnapshot {
        let size = ByteSize::new;
        let regions = Region::ALL.map(|region| self.region(region).snapshot(region));
        ArenaSnapshot {
            requested: regions.iter().map(|region| region.requested).sum(),
            holes: regions.iter().map(|region| region.holes).sum(),
            largest_free: regions.iter().map(|r| r.largest_free).max().unwrap_or_default(),
            live: size(self.live()),
            live_peak: size(self.live_peak),
            active: size(self.active()),
            idle: size(self.idle()),
            committed: size(self.backed()),
            reserved: size(self.total(|region| region.segment.reserved())),
            limit: self.limit,
            leases: self.leases,
            allocs_total: self.totals.allocs,
            frees_total: self.totals.frees,
            alloc_failures_total: self.totals.failures,
            commits_total: self.totals.commits,
            decommits_total: self.totals.decommits,
            committed_bytes_total: self.totals.committed_bytes,
            decommitted_bytes_total: self.totals.decommitted_bytes,
            regions,
            ..ArenaSnapshot::unknown(name, rung)
        }
    }

    /// Walks everything and checks the invariants.
    ///
    /// # Panics
    /// Where one is broken.
    pub(super) fn validate(&self) {
        self.regions.iter().for_each(RegionBooks::validate);
        self.curve.validate(self.idle());
        let totals = &self.totals;
        let settled = totals.committed_bytes - totals.decommitted_bytes;
        assert!(self.backed() >= settled, "every byte committed is on the books");
    }
}

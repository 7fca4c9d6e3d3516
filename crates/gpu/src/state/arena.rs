//! The state of an arena under its one lock: regions, limit, ages, counts.
//!
//! This module calls no driver. The operations in `engine` request the driver calls, which are made
//! with the lock released, and record the results here.
//!
//! Invariants: those of [`ArenaSnapshot`]; `backed <= limit`, unless the limit was lowered below
//! it; those of [`Aging`].

use std::sync::Arc;

use crate::driver::{Backend, Capabilities, DeviceAddress, StreamHandle};
use crate::index::{BlockId, End, Span};
use crate::record::{Line, Recorder};
use crate::state::aging::{Ages, Aging};
use crate::state::failure::{AllocFailure, Cause, CompactionEstimate};
use crate::state::growth::GrowthSteps;
use crate::state::moves::MoveState;
use crate::state::outstanding::{Captured, ImportedRange, Outstanding};
use crate::state::pending::{Dependencies, StreamUses};
use crate::state::raw::{RawBlocks, RawUse};
use crate::state::region::{
    APART_FROM, AllocRequest, CacheCounts, LaneNumber, PlacedRun, Placement, RegionState,
    RequestKind, Search, end_of,
};
use crate::state::segment::{Cursor, GranuleCall, Leave, MemoryCounts, Runs, Segment};
use crate::state::sleep::{Sleep, SleepPhase};
use crate::state::streams::{StreamKey, StreamTable};
use crate::types::config::{ArenaConfig, decay_nanos};
use crate::types::{
    ArenaSnapshot, DeviceCosts, DeviceError, Region, RegionSnapshot, Result, SleepState,
};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, Moment};
use lowtide_core::decay::DecayTime;

/// The maximum bytes of one decommit, if a granule is no larger, so that no single driver call is
/// unbounded. A guess, to be measured per driver.
const RUN_MAX: ByteSize = ByteSize::gib(1);

/// The part of the committed memory that may be idle in handles in use: a hundredth.
const STUCK_PART: u64 = 100;

/// The maximum number of handles of one decommit: .8 ms at the 25.6 us that an A100 takes to unmap
/// one (kvcached's `bench_vmm`). Other calls of the driver wait meanwhile.
const UNMAPS_MAX: usize = 32;

/// The part of the active memory that a new segment may have for other blocks, and that may be idle
/// when a new segment is allocated: a quarter. Measured (`tests/gpu/streams/patterns`): with a
/// sixteenth, blocks of 2 MiB and a byte need more.
const SPARE_PART: u64 = 4;

/// Blocks of up to this size share segments, of up to twice this size. As in PyTorch's caching
/// allocator.
const SHARED_MAX: u64 = 10 << 20;

/// The least number of shared segments under the limit: one that a single block keeps is a small
/// part of it. A guess.
const SEGMENTS_MIN: u64 = 32;

/// How to commit the memory of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommitOptions {
    /// Commits the growth as well.
    pub(crate) grow: bool,
    /// Uses handles of several granules where the block covers them.
    pub(crate) large_handles: bool,
}

/// The clock of an arena, and the recorder of its events, if it has one. Without a recorder no event
/// is built, and the clock is not read for one.
#[derive(Debug)]
pub(crate) struct EventLog {
    pub(crate) clock: Arc<dyn Clock>,
    recorder: Option<Recorder>,
}

impl EventLog {
    /// Records an event that took effect now, under the state's lock: its name, and its fields as
    /// keys of a JSON object (`docs/RECORDING.md`).
    #[inline]
    pub(crate) fn push(
        &self,
        name: &'static str,
        fields: impl for<'a, 'b> FnOnce(&'a mut Line<'b>) -> &'a mut Line<'b>,
    ) {
        if let Some(recorder) = &self.recorder {
            recorder.write(&*self.clock, name, fields);
        }
    }
}

/// The state of an arena.
pub(crate) struct ArenaState {
    /// The arena's name, for errors.
    pub(crate) name: String,
    regions: [RegionState; 2],
    granularity: u64,
    /// The driver's capabilities.
    pub(crate) capabilities: Capabilities,
    pub(crate) backend: Backend,
    /// `true` if the arena hands out no more blocks.
    pub(crate) is_closed: bool,
    /// The number of recorded results of driver calls on granules.
    pub(crate) results: u64,
    pub(crate) leases: u32,
    pub(crate) sleep: Sleep,
    pub(crate) limit: ByteSize,
    /// The maximum size of a handle, and the minimum number of handles.
    handle_max: u64,
    handles_min: u64,
    /// The earliest time of the next division of a handle, after one failed. Reset when memory
    /// becomes idle.
    pub(crate) divide_from: Moment,
    /// The counts and peaks of a snapshot, which only grow. Its other figures are computed.
    pub(crate) totals: ArenaSnapshot,
    pub(crate) aging: Aging,
    pub(crate) steps: GrowthSteps,
    /// `true` if the driver may keep memory of released segments until a trim.
    pub(crate) untrimmed: bool,
    pub(crate) streams: StreamTable,
    /// The live raw blocks, by address.
    pub(crate) raw: RawBlocks,
    /// Exports, and imported memory that is not released.
    pub(crate) outstanding: Outstanding,
    pub(crate) moves: MoveState,
    pub(crate) costs: DeviceCosts,
    /// The clock, and the recorder of the events, if there is one.
    pub(crate) events: EventLog,
    /// The number of lanes that were opened.
    lanes: u64,
    pub(crate) outlook: CompactionEstimate,
}

impl ArenaState {
    pub(crate) fn new(
        [stable, dynamic]: [Segment; 2],
        granularity: ByteSize,
        config: &ArenaConfig,
        (capabilities, backend): (Capabilities, Backend),
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            name: config.name.clone(),
            regions: [
                RegionState::new(Region::Stable, stable),
                RegionState::new(Region::Dynamic, dynamic),
            ],
            granularity: granularity.get(),
            capabilities,
            is_closed: false,
            results: 0,
            leases: 0,
            sleep: Sleep::new(clock.now(), &config.sleep),
            limit: config.limit,
            handle_max: config.handle_max.get(),
            handles_min: u64::from(config.handles_min).max(1),
            divide_from: Moment::ORIGIN,
            totals: ArenaSnapshot::default(),
            aging: Aging::new(config.decay),
            steps: GrowthSteps::new(config.growth),
            untrimmed: false,
            streams: StreamTable::new(),
            backend,
            raw: RawBlocks::new(),
            outstanding: Outstanding::default(),
            moves: MoveState::default(),
            costs: DeviceCosts::default(),
            events: EventLog { clock, recorder: config.recorder.clone() },
            lanes: 0,
            outlook: CompactionEstimate::default(),
        }
    }

    pub(crate) const fn region(&self, region: Region) -> &RegionState {
        &self.regions[region as usize]
    }

    pub(crate) const fn region_mut(&mut self, region: Region) -> &mut RegionState {
        &mut self.regions[region as usize]
    }

    pub(crate) fn live(&self) -> u64 {
        self.regions[0].live + self.regions[1].live
    }

    /// Returns the bytes of memory by its state, over both regions.
    pub(crate) fn memory(&self) -> MemoryCounts {
        let [one, other] = &self.regions;
        MemoryCounts::sum(one.segment.memory(), other.segment.memory(), 1)
    }

    /// Returns `true` if too much idle memory cannot leave.
    pub(crate) fn is_stuck(&self) -> bool {
        let memory = self.memory();
        memory.stuck > memory.backed / STUCK_PART
    }

    /// Returns the time of the next check of memory that cannot leave.
    pub(crate) fn stuck_due(&self) -> Moment {
        let may_leave = self.is_stuck() && self.leases == 0;
        if may_leave { self.aging.due.max(self.divide_from) } else { Moment::NEVER }
    }

    /// Returns the smallest number of granules that holds this many bytes.
    pub(crate) const fn granules_for(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.granularity)
    }

    pub(crate) const fn bytes_of(&self, granules: u64) -> u64 {
        granules * self.granularity
    }

    /// Returns the maximum numbers of granules and of handles of one decommit.
    pub(crate) fn run_max(&self) -> (usize, usize) {
        let granules = (RUN_MAX.get() / self.granularity).max(1);
        let handles = if self.capabilities.handles { UNMAPS_MAX } else { usize::MAX };
        (usize::try_from(granules).unwrap_or(usize::MAX), handles)
    }

    /// Returns the maximum number of granules of a handle, if this many bytes are committed.
    pub(crate) fn handle_max(&self, committed: u64) -> usize {
        // Without remaps a handle cannot be divided, and its idle granules would be lost to others.
        let is_divisible = self.capabilities.handles && self.capabilities.remap;
        let most = if is_divisible { self.handle_max } else { 0 };
        let granules = most.min(committed / self.handles_min) / self.granularity;
        usize::try_from(granules).unwrap_or(usize::MAX).max(1)
    }

    /// Returns by how many bytes a commit of this many more would exceed the limit.
    pub(crate) fn over_limit(&self, bytes: u64) -> u64 {
        self.memory().backed.saturating_add(bytes).saturating_sub(self.limit.get())
    }

    /// Records the new address of a moved block, if it is a raw block.
    pub(crate) fn readdress(&mut self, from: DeviceAddress, id: BlockId) {
        if self.raw.get(&from).is_some_and(|raw| raw.placed.id == id)
            && let Some(mut raw) = self.raw.remove(&from)
        {
            raw.placed = self.region(id.region()).refreshed(raw.placed);
            self.raw.insert(raw.placed.at, raw);
        }
    }

    /// Finds addresses for a block. Returns the uses that must complete before the block is used.
    pub(crate) fn place(
        &mut self,
        wanted: &AllocRequest,
        search: Search,
    ) -> Result<(Placement, Dependencies), AllocFailure> {
        let shares = self.shares_granules() && matches!(search, Search::Usual);
        let search = if shares { Search::AmongLarge } else { search };
        let placed = self.region_mut(wanted.region).place(wanted, search);
        placed.ok_or_else(|| {
            let state = self.region(wanted.region);
            let error = DeviceError::OutOfAddresses {
                requested: ByteSize::new(wanted.size),
                reserved: ByteSize::new(state.segment.reserved()),
                live: ByteSize::new(state.live),
                largest_span: ByteSize::new(state.largest_span()),
                compacted_span: ByteSize::ZERO,
            };
            AllocFailure::new(Cause::Addresses, error)
        })
    }

    /// Records that a placed block has its memory and is allocated.
    pub(crate) fn mark_live(&mut self, request: &AllocRequest, placed: Placement) {
        let (region, size) = (self.region_mut(request.region), placed.span.size);
        debug_assert_eq!(region.segment.missing(placed.span).granules, 0, "it has memory");
        (region.arriving, region.live) = (region.arriving - size, region.live + size);
        region.requested = region.requested.wrapping_add(placed.requested);
        self.events.push("alloc", |line| {
            request.note(line).number("size", placed.span.size).address(placed.at)
        });
        self.totals.allocs_total += 1;
        self.note_live(placed);
    }

    /// Updates the largest block, and the peak of live memory.
    fn note_live(&mut self, placed: Placement) {
        let (size, live) = (ByteSize::new(placed.span.size), ByteSize::new(self.live()));
        self.totals.alloc_size_max = self.totals.alloc_size_max.max(size);
        self.totals.live_peak = self.totals.live_peak.max(live);
    }

    /// Starts resizing a live block in place; returns `None` if there is no room
    /// (`RegionState::begin_resize`).
    pub(crate) fn begin_resize(&mut self, placed: Placement, requested: u64) -> Option<Placement> {
        let idle = self.memory().idle();
        let uses = self.uses(&[]);
        let resized = self.region_mut(placed.id.region()).begin_resize(placed, requested, uses);
        if self.memory().idle() > idle {
            self.note_idle(placed.id.region(), placed.span);
        }
        resized
    }

    /// Records the result of committing the memory that a resized block grew by.
    pub(crate) fn end_resize(&mut self, [before, after]: [Placement; 2], done: bool) {
        let idle = self.memory().idle();
        self.region_mut(after.id.region()).end_resize(before, after, done);
        if self.memory().idle() > idle {
            self.note_idle(after.id.region(), after.span);
        }
        if done {
            self.events.push("resize", |line| {
                line.number("bytes", after.requested)
                    .number("size", after.span.size)
                    .address(after.at)
            });
            self.totals.resizes_total += 1;
            self.note_live(after);
        }
    }

    /// Marks the bare granules of a placed span, and the growth, as committing.
    pub(crate) fn begin_commit(
        &mut self,
        region: Region,
        span: Span,
        needed: u64,
        options: CommitOptions,
    ) -> Runs {
        let CommitOptions { grow, large_handles } = options;
        let handle_max =
            if large_handles { self.handle_max(self.memory().backed + needed) } else { 1 };
        let ahead = if grow { self.growth(needed) } else { 0 };
        self.region_mut(region).segment.begin_commit(span, ahead, handle_max)
    }

    /// Returns the number of granules to commit beyond the need of a block.
    fn growth(&mut self, needed: u64) -> u64 {
        let room = self.limit.get().saturating_sub(self.memory().backed);
        (self.steps.commit(needed, room) - needed) / self.granularity
    }

    /// Records that memory was committed. Returns the memory by its state.
    fn note_committed(&mut self, at: DeviceAddress, size: ByteSize) -> MemoryCounts {
        self.events.push("commit", |line| line.bytes("size", size).address(at));
        self.totals.commits_total += 1;
        self.totals.committed_bytes_total += size.get();
        let memory = self.memory();
        self.totals.committed_peak = self.totals.committed_peak.max(ByteSize::new(memory.there()));
        memory
    }

    /// Records the result of a commit.
    pub(crate) fn end_commit(&mut self, run: PlacedRun, done: bool) {
        let segment = &mut self.region_mut(run.region).segment;
        segment.end(run.run, GranuleCall::Commit, done);
        self.results += 1;
        if done && self.note_committed(run.at, run.size).idle() > 0 {
            let span = self.region(run.region).segment.span_of(run.run);
            self.note_idle(run.region, span); // some of it was committed ahead
        }
    }

    /// Returns `true` if the arena may use and hand out memory: it neither sleeps, nor falls asleep,
    /// nor wakes.
    pub(crate) const fn is_usable(&self) -> bool {
        matches!(self.sleep.phase, SleepPhase::Awake | SleepPhase::Draining(_))
    }

    /// Returns the error of an operation that needs another state of the arena.
    pub(crate) fn not_awake(&self) -> DeviceError {
        DeviceError::State { arena: self.name.clone(), state: self.sleep.state() }
    }

    /// Records one more lease of an open arena, which cancels a drain.
    ///
    /// # Errors
    /// `TooManyLeases`.
    pub(crate) fn enter(&mut self) -> Result<()> {
        debug_assert!(self.is_usable(), "a lease is granted only while memory may be used");
        let leases = self.leases.checked_add(1);
        self.leases = leases.ok_or(DeviceError::TooManyLeases { limit: u32::MAX })?;
        self.moves.leases_total += 1;
        self.sleep.enter(self.leases == 1, || self.events.clock.now());
        Ok(())
    }

    /// Records that a lease was dropped.
    pub(crate) fn leave(&mut self) {
        self.leases -= 1;
        if self.leases == 0 {
            self.sleep.leave(self.events.clock.now());
        }
    }

    /// Returns the number of leases granted until now; `None` while one is held.
    pub(crate) fn unleased(&self) -> Option<u64> {
        (self.leases == 0).then_some(self.moves.leases_total)
    }

    /// Returns `true` if no work uses live blocks, except raw ones.
    pub(crate) fn are_live_unused(&self) -> bool {
        let is_proved = self.moves.is_proved() && self.sleep.is_use_known();
        !self.capabilities.asynchronous || is_proved
    }

    /// Records that all work under this many leases is complete, if no other was granted since.
    pub(crate) fn note_complete(&mut self, leases: Option<u64>) {
        if leases == Some(self.moves.leases_total) {
            self.moves.proved = leases;
            self.sleep.used.clear();
        }
    }

    /// Removes a placed block that got no memory, or whose earlier uses could not be waited for,
    /// and ends its operation.
    pub(crate) fn cancel_placement(&mut self, placed: Placement, claim: Dependencies) {
        let (streams, state) = (&self.streams, &mut self.regions[placed.id.region() as usize]);
        let left = |(part, uses): (Span, StreamUses)| (part, uses.only(|of| !streams.is_done(of)));
        let gone = state.cancel_placement(placed, claim.into_iter().map(left));
        debug_assert!(gone.is_some(), "a placed block is known to the index");
        if gone == Some(true) {
            self.note_idle(placed.id.region(), placed.span);
        }
    }

    /// Adds the counts of a dropped cache, which is empty.
    pub(crate) fn add_cache(&mut self, tally: &CacheCounts) {
        debug_assert_eq!(tally.cached(), 0, "its blocks were freed");
        self.totals.allocs_total += tally.allocs;
        self.totals.thread_cache_allocs_total += tally.allocs;
        self.totals.frees_total += tally.frees;
        for (region, requested) in self.regions.iter_mut().zip(tally.requested) {
            region.requested = region.requested.wrapping_add(requested);
        }
    }

    /// Frees a live block that these streams used; unknown ones if there is none.
    pub(crate) fn release_after(&mut self, placed: Placement, streams: &[StreamKey]) {
        if self.moves.defer_release(placed, streams) {
            return;
        }
        let region = placed.id.region();
        // A copy that was not waited for may be on no stream of the block.
        let is_copied = self.region(region).pins.copied.contains(&placed.id);
        let streams = if is_copied { &[] } else { streams };
        // No work is started on a block whose contents are lost, and its memory may be lost too.
        let is_unused =
            self.sleep.is_quiet || (self.region(region).pins.is_lost(placed.id) && !is_copied);
        let uses = if is_unused { StreamUses::default() } else { self.uses(streams) };
        let gone = self.region_mut(region).release(placed, uses);
        debug_assert!(gone.is_some(), "only its buffer frees a block, once");
        let Some((span, went_idle)) = gone else { return };
        self.totals.frees_total += 1;
        if went_idle {
            self.note_idle(region, span);
        }
        let segment = &self.regions[region as usize].segment;
        self.events.push("free", |line| {
            line.number("size", span.size).address(segment.address_of(span.offset))
        });
    }

    /// Holds a block that its owner has freed and that a graph may have captured: it stays live at
    /// its address.
    pub(crate) fn hold_block(&mut self, placed: Placement) {
        self.region_mut(placed.id.region()).pins.pin(placed.id);
        self.outstanding.captured.blocks.push(placed);
    }

    /// Frees what graphs may have captured, after all work of the device. Returns the bytes of the
    /// blocks.
    pub(crate) fn release_captured(&mut self) -> ByteSize {
        let captured = std::mem::take(&mut self.outstanding.captured);
        let bytes = ByteSize::new(captured.bytes());
        let Captured { blocks, imports } = captured;
        blocks.into_iter().for_each(|placed| self.release_after(placed, &[]));
        for at in imports {
            let after = self.uses(&[]);
            self.outstanding.imported.let_go(at.get(), after);
        }
        bytes
    }

    /// Marks the next run of idle granules as leaving, at most this many, but at least one handle;
    /// with ages, only expired ones. No handle has more than `handle_max` granules. The stable
    /// region comes first, because its idle memory is the least likely to be requested again.
    pub(crate) fn begin_leave(
        &mut self,
        granules: u64,
        handle_max: usize,
        cursors: &mut [Cursor; 2],
        ages: Option<Ages>,
    ) -> Option<PlacedRun> {
        let (granules_max, handles_max) = self.run_max();
        let granules_max = usize::try_from(granules).unwrap_or(usize::MAX).min(granules_max);
        let leave = Leave { granules_max, handles_max, handle_max, ages };
        Region::ALL.into_iter().zip(cursors).find_map(|(region, cursor)| {
            let state = self.region_mut(region);
            let run = match &mut state.segment.pieces {
                Some(pieces) => pieces.begin_leave(&mut state.index, &leave), // as a whole
                None => state.segment.begin_leave(cursor, &leave),
            };
            Some(state.placed_run(run?))
        })
    }

    /// Records the result of a decommit.
    pub(crate) fn end_leave(&mut self, leaving: PlacedRun, done: bool) {
        self.region_mut(leaving.region).end_leave(leaving.run, done);
        if done {
            self.totals.decommits_total += 1;
            self.totals.decommitted_bytes_total += leaving.size.get();
            let PlacedRun { at, size, .. } = leaving;
            self.events.push("decommit", |line| line.bytes("size", size).address(at));
        }
        self.note_result();
    }

    /// Counts the result of a call that takes memory away. Without idle memory no check is due.
    pub(crate) fn note_result(&mut self) {
        self.results += 1;
        if self.memory().idle() == 0 {
            self.aging.due = Moment::NEVER;
        }
    }

    /// Returns the time of the next check.
    pub(crate) fn due(&self) -> Moment {
        if self.memory().releasable() == 0 { Moment::NEVER } else { self.aging.due }
    }

    /// Schedules the check after one at `now`. `failed` is `true` if the driver failed.
    pub(crate) fn set_looked(&mut self, now: Moment, failed: bool) {
        let ages = self.aging.ages(now);
        let oldest = self.regions.iter().filter_map(|region| region.segment.oldest(ages)).max();
        self.aging.set_looked(now, oldest, failed);
    }

    pub(crate) fn set_decay(&mut self, time: DecayTime) {
        let stamp = self.aging.set_time(time, self.events.clock.now());
        for region in &mut self.regions {
            let all = Span { offset: 0, size: region.segment.extent };
            region.segment.stamp(all, stamp);
        }
        self.events.push("decay_time", |line| line.number("decay_ns", decay_nanos(time)));
    }

    pub(crate) fn set_limit(&mut self, limit: ByteSize) {
        self.limit = limit;
        self.events.push("limit", |line| line.limit("limit", limit));
    }

    /// Returns the number of a new lane of a stream.
    pub(crate) fn open_lane(&mut self, stream: StreamHandle) -> LaneNumber {
        let lane = LaneNumber::MIN.saturating_add(self.lanes);
        self.lanes += 1;
        self.events
            .push("lane", |line| line.number("lane", lane.get()).number("stream", stream.get()));
        lane
    }

    /// Records that a lane uses a block.
    pub(crate) fn note_use(&self, id: BlockId, lane: LaneNumber) {
        let address = || self.region(id.region()).address_of(id);
        self.events
            .push("use", |line| line.number("address", address()).number("lane", lane.get()));
    }

    /// Records that the arena did not fall asleep, or only in part.
    pub(crate) fn note_sleepless(&mut self, error: &DeviceError, state: SleepState) {
        self.events
            .push("sleep_failed", |line| line.text("state", state.name()).text("error", error));
    }

    /// Counts a failed request.
    pub(crate) fn note_failure(
        &mut self,
        request: &AllocRequest,
        (cause, error): (Cause, &DeviceError),
    ) {
        let totals = &mut self.totals;
        let (count, why) = match cause {
            Cause::Limit { .. } => (&mut totals.alloc_failures_limit_total, "limit"),
            Cause::Device => (&mut totals.alloc_failures_device_total, "device"),
            Cause::Addresses => (&mut totals.alloc_failures_addresses_total, "addresses"),
            Cause::Driver => (&mut totals.alloc_failures_driver_total, "driver"),
            Cause::Uncounted => return,
        };
        *count += 1;
        self.events.push("alloc_failed", |line| {
            let is_limited =
                matches!(error, DeviceError::OutOfMemory { .. }) && self.limit != ByteSize::MAX;
            let left = self.limit.get().saturating_sub(self.memory().backed);
            request.note(line).text("why", why).number("headroom", is_limited.then_some(left))
        });
    }

    /// Records that granules of a span became idle.
    pub(crate) fn note_idle(&mut self, region: Region, span: Span) {
        self.divide_from = Moment::ORIGIN;
        if !matches!(self.aging.time, DecayTime::Never) {
            let stamp = self.aging.note_idle(self.events.clock.now());
            self.region_mut(region).segment.stamp(span, stamp);
        }
    }

    /// Returns all figures at this instant, including the counts of the caches.
    pub(crate) fn snapshot(&self, caches: &CacheCounts) -> ArenaSnapshot {
        let size = ByteSize::new;
        let is_asleep = matches!(self.sleep.phase, SleepPhase::Asleep | SleepPhase::Waking);
        let regions = Region::ALL.map(|of| self.region(of).snapshot(caches, is_asleep));
        let sum = |part: fn(&RegionSnapshot) -> ByteSize| regions.iter().map(part).sum();
        let totals = &self.totals;
        let Outstanding { exported_count, exported_bytes, imported, captured } = &self.outstanding;
        ArenaSnapshot {
            requested: sum(|region| region.requested),
            live: sum(|region| region.live),
            asleep: sum(|region| region.asleep),
            cached: sum(|region| region.cached),
            active: sum(|region| region.active),
            idle: sum(|region| region.idle),
            committed: sum(|region| region.committed),
            reserved: sum(|region| region.reserved),
            pending: sum(|region| region.pending),
            holes: sum(|region| region.holes),
            largest_free: regions.iter().map(|r| r.largest_free).max().unwrap_or_default(),
            limit: self.limit,
            exported: size(*exported_bytes),
            exported_count: *exported_count,
            captured: size(captured.bytes()),
            imported: size(imported.bytes()),
            imported_count: imported.count(),
            leases: self.leases,
            state: self.sleep.state(),
            offloaded: self.sleep.offloaded(),
            metadata: ByteSize::of(self.metadata()),
            allocs_total: totals.allocs_total + caches.allocs,
            frees_total: totals.frees_total + caches.frees,
            thread_cache_allocs_total: totals.thread_cache_allocs_total + caches.allocs,
            name: self.name.clone(),
            backend: self.backend,
            regions,
            ..totals.clone()
        }
    }

    /// Returns the approximate bytes of the metadata of regions, raw blocks and imports.
    fn metadata(&self) -> usize {
        // The nodes of a tree are at least half full, and mostly two thirds.
        let trees = self.raw.len() * size_of::<(DeviceAddress, RawUse)>()
            + self.outstanding.imported.entries.len() * size_of::<(u64, ImportedRange)>();
        let of_region = |region: &RegionState| {
            region.index.metadata() + region.segment.metadata() + region.pending.metadata()
        };
        self.regions.iter().map(of_region).sum::<usize>() + trees * 3 / 2
    }

    /// Returns the uses to wait for when a block is freed that these streams, or unknown ones,
    /// used.
    pub(crate) fn uses(&mut self, streams: &[StreamKey]) -> StreamUses {
        if !self.capabilities.asynchronous {
            return StreamUses::default();
        }
        let streams = if streams.is_empty() { &[StreamKey::CONTEXT] } else { streams };
        StreamUses::of(streams.iter().map(|&stream| self.streams.use_now(stream)))
    }

    /// Returns `true` if freed or imported memory waits for the end of work.
    pub(crate) fn is_awaiting(&self) -> bool {
        self.pending() > 0 || self.outstanding.imported.waiting() > 0
    }

    /// Returns the bytes that were freed and that the device may still use.
    pub(crate) fn pending(&self) -> u64 {
        self.regions.iter().map(|region| region.pending.bytes).sum()
    }

    /// Records that a stream has completed all uses up to an epoch.
    pub(crate) fn mark_complete(&mut self, stream: StreamKey, epoch: u64) {
        self.streams.complete(stream, epoch);
        for region in Region::ALL {
            for span in self.region_mut(region).mark_complete(stream, epoch) {
                self.note_idle(region, span);
            }
        }
        self.forget_stream(stream);
    }

    /// Forgets a stream that has ended and has no pending uses.
    pub(crate) fn forget_stream(&mut self, stream: StreamKey) {
        let is_pending = Region::ALL.iter().any(|&region| self.region(region).pending.has(stream));
        self.streams.forget(stream, is_pending);
    }

    /// Returns `true` if every granule counts against the limit and all blocks share granules.
    pub(crate) fn shares_granules(&self) -> bool {
        self.limit.get() / self.granularity < APART_FROM
    }

    /// Returns the number of granules that a new segment has for more blocks of the size. None once
    /// half of the limit is there, nor in a page-locked pool, which has watermarks, nor for a
    /// reserved block, whose free is to release it.
    fn shared(&self, kind: RequestKind, needed: u64) -> u64 {
        let memory = self.memory();
        let is_whole =
            matches!((self.backend, kind), (Backend::PinnedHost, _) | (_, RequestKind::Reserve));
        if is_whole || memory.backed > self.limit.get() / 2 || needed > SHARED_MAX {
            return 0;
        }
        let most = (2 * SHARED_MAX).min(self.limit.get() / SEGMENTS_MIN);
        let blocks = most.min(memory.active / SPARE_PART) / needed;
        blocks.saturating_sub(1) * needed / self.granularity
    }

    /// Returns the number of idle granules to release before a new segment of this many.
    pub(crate) fn surplus(&self, granules: u64) -> u64 {
        let memory = self.memory();
        let kept =
            memory.leaving + memory.active.saturating_add(self.bytes_of(granules)) / SPARE_PART;
        let idle = if self.backend == Backend::PinnedHost { 0 } else { memory.releasable() };
        self.granules_for(idle.saturating_sub(kept))
    }

    /// Marks a segment for the block as committing, including the growth. Returns `None` if there
    /// are no offsets for it.
    pub(crate) fn begin_segment(
        &mut self,
        wanted: &AllocRequest,
        search: Search,
        needed: u64,
        grow: bool,
    ) -> Option<Span> {
        let ahead =
            if grow { self.growth(needed).max(self.shared(wanted.origin.kind, needed)) } else { 0 };
        let size = needed + self.bytes_of(ahead);
        let is_shared = self.shares_granules() || search == Search::AmongLarge;
        let state = self.region_mut(wanted.region);
        let is_small = end_of(wanted.size) == End::High && state.index.bounds(End::High).size > 0;
        let end = if is_small && !is_shared { End::High } else { End::Low };
        // If offsets are scarce: first without the growth, then a small block among the large ones.
        let ways = [(end, size), (end, needed), (End::Low, needed)];
        let pieces = state.segment.pieces.as_mut()?;
        ways.into_iter().find_map(|(end, size)| pieces.begin(&mut state.index, end, size))
    }

    /// Records the result of allocating a segment.
    pub(crate) fn end_segment(&mut self, region: Region, span: Span, at: Option<DeviceAddress>) {
        let state = self.region_mut(region);
        if let Some(pieces) = &mut state.segment.pieces {
            pieces.end(&mut state.index, span.offset, (at, at.is_some()));
        }
        self.results += 1;
        if let Some(at) = at {
            self.note_committed(at, ByteSize::new(span.size));
        }
    }

    /// Returns `true` if the driver allocates and frees whole segments.
    #[inline]
    pub(crate) const fn is_whole(&self) -> bool {
        self.regions[0].segment.pieces.is_some()
    }

    /// Walks everything and checks the invariants.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub(crate) fn validate(&self) {
        self.regions.iter().for_each(RegionState::validate);
        self.streams.validate();
        self.outstanding.imported.validate();
        let totals = &self.totals;
        let settled = totals.committed_bytes_total - totals.decommitted_bytes_total;
        assert!(self.memory().backed >= settled, "every committed byte is backed");
        let peak = self.totals.committed_peak.get();
        assert!(self.memory().there() <= peak, "no more is there than at the peak");
    }
}

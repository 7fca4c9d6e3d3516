//! The sleep of an arena as a value: its phase, the operations that wait for it, and its host
//! memory.
//!
//! There is one more phase than public states: a draining arena whose last lease has ended is being
//! suspended, and from then on entering waits for the end of the sleep.
//!
//! Invariants: `leases > 0 => awake or draining`; one operation at a time suspends or resumes the
//! arena; an operation that waits for a wake gets its result, and one wake serves all that wait.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use crate::driver::{DeviceAddress, HOST_GRANULARITY, HostStore, StreamHandle};
use crate::index::BlockId;
use crate::state::region::{PlacedRun, RegionState};
use crate::state::segment::{Run, Segment};
use crate::state::streams::StreamKey;
use crate::types::{Contents, DeviceError, HostBudget, Region, SleepConfig, SleepState};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Moment};
use lowtide_core::decay::DecayTime;

/// The phase of an arena between awake and asleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SleepPhase {
    #[default]
    Awake,
    /// Waiting for leases. The number identifies the drain.
    Draining(u64),
    /// Releasing memory: entering is blocked.
    Suspending,
    Asleep,
    /// Restoring memory.
    Waking,
}

/// Granules whose contents are in one store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SavedRun {
    region: Region,
    run: Run,
    /// The index of the store.
    store: usize,
    offset: ByteSize,
}

/// One copy: the device address and the part of a store.
pub(crate) type StoredCopy = (DeviceAddress, HostStore);

/// Saved contents.
pub(crate) struct Saved {
    pub(crate) runs: Vec<SavedRun>,
    pub(crate) stores: Vec<SleepStore>,
}

/// The sleep state of an arena.
#[derive(Default)]
pub(crate) struct Sleep {
    pub(crate) config: SleepConfig,
    pub(crate) phase: SleepPhase,
    /// The number of drains begun.
    drains: u64,
    /// Rings when the last lease is dropped or the drain is cancelled.
    pub(crate) bell: Option<Arc<Bell>>,
    /// The number of operations that want to enter while the arena is being suspended.
    pub(crate) entering: u32,
    /// `true` if every use of every block is known to be complete, and none can begin before the
    /// arena is awake: memory that is freed now has only completed uses.
    pub(crate) is_quiet: bool,
    /// Streams on which leases were used, and whose work was not waited for since.
    pub(crate) used: BTreeSet<StreamKey>,
    /// The number of wakes that have ended, and the error of the last one.
    pub(crate) attempts: u64,
    failure: Option<DeviceError>,
    /// The wakers of futures, by the id of the wait, and the last id.
    pub(crate) wakers: BTreeMap<u64, Waker>,
    waits: u64,
    /// The stream of the copies, once it was created.
    pub(crate) stream: Option<StreamHandle>,
    pub(crate) budget: Option<Arc<dyn HostBudget>>,
    /// The contents of sleeping blocks.
    pub(crate) saved: Option<Saved>,
    /// The stores without contents.
    pub(crate) idle: SleepStores,
    /// The number of times that copies were begun on the stream, and the last of these whose end
    /// the host has seen.
    copying: u64,
    pub(crate) copied: u64,
    /// `true` if the operation that began the last copies may queue more. Only that operation knows
    /// when the last copy is complete.
    pub(crate) is_queueing: bool,
    /// The start of the period in which leases were held without a pause, and its end.
    pub(crate) leased_since: Moment,
    pub(crate) left_at: Moment,
    /// The time at which the arena was opened or last woken.
    awake_since: Moment,
    /// The arena does not fall asleep by itself before this time, because the last attempt failed.
    pub(crate) not_before: Moment,
    /// `true` if it was logged that the arena cannot sleep on its driver.
    pub(crate) has_logged_unsupported: bool,
}

impl Sleep {
    /// Creates the sleep state of an arena that is opened now.
    pub(crate) fn new(now: Moment, config: &SleepConfig) -> Self {
        Self {
            config: *config,
            leased_since: now,
            left_at: now,
            awake_since: now,
            ..Self::default()
        }
    }

    pub(crate) const fn state(&self) -> SleepState {
        match self.phase {
            SleepPhase::Awake => SleepState::Awake,
            SleepPhase::Draining(_) | SleepPhase::Suspending => SleepState::Draining,
            SleepPhase::Asleep => SleepState::Asleep,
            SleepPhase::Waking => SleepState::Waking,
        }
    }

    /// Returns `true` if blocks may be moved.
    pub(crate) fn is_awake(&self) -> bool {
        self.phase == SleepPhase::Awake
    }

    /// Returns `true` if an operation or future waits for the arena to be awake.
    pub(crate) fn is_wanted(&self) -> bool {
        self.entering > 0 || !self.wakers.is_empty()
    }

    /// Begins to wait for leases if the arena is awake. Returns the drain's number.
    pub(crate) fn begin_drain(&mut self) -> Option<u64> {
        if self.phase != SleepPhase::Awake {
            return None;
        }
        self.drains += 1;
        self.phase = SleepPhase::Draining(self.drains);
        self.bell = Some(Bell::new());
        Some(self.drains)
    }

    /// Ends the wait for leases. The waiting operation itself calls this, so no bell is rung.
    pub(crate) fn end_drain(&mut self, phase: SleepPhase) {
        (self.phase, self.bell) = (phase, None);
    }

    /// Records a lease, which cancels a drain. `is_first` is `true` if no other lease is held.
    pub(crate) fn enter(&mut self, is_first: bool, now: impl FnOnce() -> Moment) {
        if is_first {
            self.leased_since = now();
        }
        if matches!(self.phase, SleepPhase::Draining(_)) {
            self.phase = SleepPhase::Awake;
            if let Some(bell) = self.bell.take() {
                bell.ring();
            }
        }
    }

    /// Records that the last lease was dropped.
    pub(crate) fn leave(&mut self, now: Moment) {
        self.left_at = now;
        if let Some(bell) = &self.bell {
            bell.ring();
        }
    }

    /// Ends a sleep or a wake, or an attempt. The caller calls the returned wakers with the lock
    /// released.
    #[must_use]
    pub(crate) fn finish(&mut self, phase: SleepPhase) -> Vec<Waker> {
        self.phase = phase;
        self.is_quiet = phase == SleepPhase::Asleep;
        self.is_queueing = false;
        std::mem::take(&mut self.wakers).into_values().collect()
    }

    /// Counts a wake that has ended.
    pub(crate) fn end_wake(&mut self, failure: Option<DeviceError>, now: Moment) {
        self.attempts += 1;
        if failure.is_none() {
            (self.awake_since, self.left_at) = (now, now);
            // The wake has used what was prepared.
            (self.idle.since, self.idle.prepared) = (now, ByteSize::ZERO);
        }
        self.failure = failure;
    }

    /// Returns the error of a wake that has failed since this many wakes had ended.
    pub(crate) fn failed_since(&self, attempts: u64) -> Option<DeviceError> {
        self.failure.clone().filter(|_| self.attempts > attempts)
    }

    /// Registers a waker for the end of a wait. Returns the waker that was registered before.
    pub(crate) fn register(&mut self, wait: &mut Option<u64>, waker: Waker) -> Option<Waker> {
        let number = *wait.get_or_insert_with(|| {
            self.waits += 1;
            self.waits
        });
        self.wakers.insert(number, waker)
    }

    /// Returns `true` if all streams used under leases until now are known.
    pub(crate) fn is_use_known(&self) -> bool {
        !self.used.contains(&StreamKey::CONTEXT)
    }

    /// Returns the time at which the arena may fall asleep by itself, if it stays idle.
    pub(crate) fn due(&self) -> Option<Moment> {
        let idle_since = self.left_at + self.config.idle_after?;
        let due = idle_since.max(self.awake_since + self.config.min_awake);
        (self.phase == SleepPhase::Awake).then(|| due.max(self.not_before))
    }

    /// Returns `true` if a copy of a sleep or a wake may still use the arena's memory.
    pub(crate) const fn may_be_copied(&self) -> bool {
        self.copied < self.copying
    }

    /// Records that an operation queues copies from here on.
    pub(crate) const fn begin_copies(&mut self) {
        if !self.is_queueing {
            self.copying += 1;
            self.is_queueing = true;
        }
    }

    /// Returns the number of the last copies, unless an operation still queues more.
    pub(crate) fn queued(&self) -> Option<u64> {
        (!self.is_queueing).then_some(self.copying)
    }

    /// Returns the host memory of all stores, with or without contents.
    pub(crate) fn offloaded(&self) -> ByteSize {
        let saved = self.saved.iter().flat_map(|saved| &saved.stores);
        saved.map(|store| store.memory.size).chain([self.idle.bytes()]).sum()
    }
}

impl Saved {
    /// Takes out the stores without contents.
    pub(crate) fn take_surplus(&mut self) -> Vec<SleepStore> {
        let used = self.runs.iter().map(|run| run.store + 1).max().unwrap_or(0);
        self.stores.split_off(used.min(self.stores.len()))
    }

    /// Returns the copies of all saved contents.
    pub(crate) fn copies<'a>(&self, of: impl Fn(Region) -> &'a Segment) -> Vec<StoredCopy> {
        let place = |saved: &SavedRun| self.place(saved, saved.run, of(saved.region));
        self.runs.iter().map(place).collect()
    }

    /// Returns `true` if a block still touches any of the granules.
    pub(crate) fn is_touched<'a>(&self, of: impl Fn(Region) -> &'a Segment) -> bool {
        self.runs.iter().any(|saved| !of(saved.region).touched_runs(saved.run).is_empty())
    }

    /// Returns the copies of the memory of a run that blocks still touch.
    pub(crate) fn touched_copies(
        &self,
        region: Region,
        run: Run,
        segment: &Segment,
    ) -> Vec<StoredCopy> {
        let Range { start, end } = run.range();
        let key = |saved: &SavedRun| (saved.region as usize, saved.run.range().end);
        let first = self.runs.partition_point(|saved| key(saved) <= (region as usize, start));
        let inside = self.runs[first..].iter();
        let inside =
            inside.take_while(|saved| saved.region == region && saved.run.range().start < end);
        let mut copies = Vec::new();
        for saved in inside {
            let range = saved.run.range();
            let part = Run::of(&(range.start.max(start)..range.end.min(end)));
            let touched = segment.touched_runs(part).into_iter();
            copies.extend(touched.map(|run| self.place(saved, run, segment)));
        }
        copies
    }

    /// Returns the current place of a saved run, or of a part of it, and its place in the store.
    fn place(&self, saved: &SavedRun, run: Run, segment: &Segment) -> StoredCopy {
        let (at, size) = segment.place_of(run);
        let (from, _) = segment.place_of(saved.run);
        let into = at.offset_from(from).unwrap_or_default();
        let first = self.stores[saved.store].memory.at;
        (at, HostStore { at: first + saved.offset.get() + into.get(), size })
    }
}

/// Lays granules out over stores, adjoining ones together: first over those of the sizes in `have`,
/// then over more. Returns the sizes of the stores to create.
pub(crate) fn lay_out(
    kept: impl Iterator<Item = (Region, Run)>,
    granularity: ByteSize,
    have: &[ByteSize],
) -> (Vec<SavedRun>, Vec<ByteSize>) {
    let most = store_max(granularity);
    let fits = |size: ByteSize| size.get() / granularity.get();
    let bytes = |granules: u64| ByteSize::new(granules * granularity.get());
    let (mut saved, mut used) = (Vec::new(), Vec::<u64>::new());
    let mut room = 0; // granules in the last of `used`
    for (region, run) in kept {
        let range = run.range();
        let mut at = range.start;
        while at < range.end {
            while room == 0 {
                room = fits(have.get(used.len()).copied().unwrap_or(most));
                used.push(0);
            }
            let end = range.end.min(at.saturating_add(usize::try_from(room).unwrap_or(usize::MAX)));
            let run = Run::of(&(at..end));
            let (store, offset) = (used.len() - 1, bytes(used[used.len() - 1]));
            // Adjoining runs are one copy.
            let adjoins = |last: &&mut SavedRun| {
                (last.region, last.store, last.run.range().end) == (region, store, at)
            };
            match saved.last_mut().filter(adjoins) {
                Some(last) => last.run = Run::of(&(last.run.range().start..end)),
                None => saved.push(SavedRun { region, run, store, offset }),
            }
            used[store] += run.granules();
            room -= run.granules();
            at = end;
        }
    }
    saved.sort_unstable_by_key(|saved: &SavedRun| (saved.region as usize, saved.run.range().start));
    let missing = used.iter().skip(have.len()).map(|granules| store_size(bytes(*granules)));
    (saved, missing.collect())
}

// Stores: host memory for the contents of sleeping blocks, and those that hold none.
//
// A store becomes idle when the arena has woken, or when it was prepared for a sleep. The next
// sleep takes the idle stores. This module decides how many stay until then, and makes no call.
//
// Invariant: a store is idle, holds saved contents, or is held by the operation that creates or
// releases it; its reservation stays as long as the store.

/// The maximum size of a store, if a granule is no larger.
const STORE_MAX: ByteSize = ByteSize::gib(1);

/// The time after a wake in which no store is released, so that the work of the caller that woke
/// the arena starts before releases keep the driver busy. A guess.
const QUIET_AFTER_WAKE: Duration = Duration::from_millis(100);

/// A reservation with the host budget, released when it is dropped.
pub(crate) type HostReservation = Box<dyn Any + Send>;

/// Host memory for contents.
pub(crate) struct SleepStore {
    pub(crate) memory: HostStore,
    /// Dropped after the store is released, by code that may call the budget.
    pub(crate) reservation: Option<HostReservation>,
}

/// The stores without contents.
#[derive(Default)]
pub(crate) struct SleepStores {
    pub(crate) stores: Vec<SleepStore>,
    /// The last time at which stores became idle, or the arena woke.
    since: Moment,
    /// The bytes prepared for the next sleep, which may be more than the limit.
    pub(crate) prepared: ByteSize,
    pub(crate) is_preparing: bool,
}

impl SleepStores {
    /// Adds stores.
    pub(crate) fn put(&mut self, stores: Vec<SleepStore>, now: Moment) {
        if self.stores.is_empty() {
            self.stores = stores;
        } else {
            self.stores.extend(stores);
        }
        self.since = now;
    }

    /// Returns the bytes of all stores.
    pub(crate) fn bytes(&self) -> ByteSize {
        self.stores.iter().map(|store| store.memory.size).sum()
    }

    /// Begins to prepare stores for a sleep that keeps this much. Returns the sizes of the stores
    /// to create; `None` if another operation prepares stores.
    pub(crate) fn begin_prepare(
        &mut self,
        kept: ByteSize,
        granularity: ByteSize,
    ) -> Option<Vec<ByteSize>> {
        if std::mem::replace(&mut self.is_preparing, true) {
            return None;
        }
        self.prepared = kept;
        let usable =
            |store: &SleepStore| store.memory.size.get() / granularity.get() * granularity.get();
        let mut missing = kept.get().saturating_sub(self.stores.iter().map(usable).sum());
        let most = store_max(granularity);
        let mut sizes = Vec::new();
        while missing > 0 {
            let size = missing.min(most.get());
            missing -= size;
            sizes.push(store_size(ByteSize::new(size)));
        }
        Some(sizes)
    }

    /// Returns `true` if there is more than this limit and what was prepared.
    pub(crate) fn is_over(&self, stores_max: ByteSize) -> bool {
        self.bytes() > stores_max.max(self.prepared)
    }

    /// Returns the time at which the last store is to be released, with this limit, and if blocks
    /// of this size are live: soon if there is more than the limit, after the decay time if it is
    /// not needed.
    pub(crate) fn due(&self, stores_max: ByteSize, need: ByteSize, decay: DecayTime) -> Moment {
        let Some(last) = self.stores.last() else { return Moment::NEVER };
        let soon = self.since + QUIET_AFTER_WAKE;
        if self.is_over(stores_max) {
            return soon;
        }
        let is_needed = self.bytes().saturating_sub(last.memory.size) < need;
        match decay {
            DecayTime::AtOnce if !is_needed => soon,
            DecayTime::Within(time) if !is_needed => soon.max(self.since + time),
            _ => Moment::NEVER,
        }
    }
}

/// Returns the maximum size of a store: 1 GiB, or a granule, so that no single allocation is as
/// large as the device.
pub(crate) const fn store_max(granularity: ByteSize) -> ByteSize {
    let granules = STORE_MAX.get() / granularity.get();
    ByteSize::new(if granules > 1 { granules } else { 1 } * granularity.get())
}

/// Returns the size of a store for contents of this size.
pub(crate) fn store_size(contents: ByteSize) -> ByteSize {
    contents.next_multiple_of(HOST_GRANULARITY).unwrap_or(contents)
}

// Determines how a sleep treats each granule, from the settings of its live blocks.
//
// A granule that several blocks touch gets the strongest of their settings.
//
// Invariant: every committed granule is in exactly one part; a part has one treatment, and lies in
// one half of its segment.

/// Adjoining granules that are leaving for a sleep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutgoingRun {
    pub(crate) place: PlacedRun,
    pub(crate) contents: Contents,
}

impl RegionState {
    /// Marks committed granules as leaving, except those that stay. Contents are treated as `usual`
    /// unless their block has its own setting. In host memory, kept contents stay in place.
    pub(crate) fn begin_suspend(
        &mut self,
        (usual, is_host): (Contents, bool),
        (granules_max, handles_max): (usize, usize),
    ) -> Vec<OutgoingRun> {
        let mut outgoing = Vec::new();
        for (run, contents) in self.run_contents(usual, is_host) {
            let parts = parts(run.start, &contents, |granule| self.segment.handle_of(granule));
            for (range, contents) in parts.into_iter().filter(|part| part.1 != Contents::Stay) {
                let runs = self.segment.runs_of(range, granules_max, handles_max);
                outgoing.extend(runs.into_iter().map(|run| (run, contents)));
            }
        }
        let mark = |(run, contents)| {
            self.begin_part(run);
            OutgoingRun { place: self.placed_run(run), contents }
        };
        outgoing.into_iter().map(mark).collect()
    }

    /// Returns the number of granules whose contents a sleep now would copy.
    pub(crate) fn kept_granules(&self, (usual, is_host): (Contents, bool)) -> u64 {
        let runs = self.run_contents(usual, is_host).into_iter();
        let all = runs.flat_map(|(_, contents)| contents);
        all.filter(|contents| *contents == Contents::Keep).count() as u64
    }

    /// Returns the runs of committed granules, with the treatment of each granule.
    fn run_contents(&self, usual: Contents, is_host: bool) -> Vec<(Range<usize>, Vec<Contents>)> {
        let of = |name: BlockId| match self.pins.contents(name).unwrap_or(usual) {
            Contents::Keep if is_host => Contents::Stay,
            contents => contents,
        };
        let runs = self.segment.committed_runs().into_iter().map(Run::range);
        // Blocks whose contents are discarded are left out.
        let kept = self.live_blocks().filter_map(|(span, name)| {
            let contents = of(name);
            (contents != Contents::Discard).then(|| (self.segment.granules_of(span), contents))
        });
        strongest(runs, kept)
    }

    /// Records which blocks lose their contents with these granules. The owner of a block learns of
    /// one or several losses once.
    pub(crate) fn note_discarded(&mut self, mut lost: Vec<Range<usize>>) {
        if lost.is_empty() {
            return;
        }
        lost.sort_unstable_by_key(|range| range.start);
        let is_lost = |range: Range<usize>| {
            let nth = lost.partition_point(|lost| lost.end <= range.start);
            lost.get(nth).is_some_and(|lost| lost.start < range.end)
        };
        let blocks = self.live_blocks();
        let blocks = blocks.filter(|(span, _)| is_lost(self.segment.granules_of(*span)));
        let names: Vec<_> = blocks.map(|(_, name)| name).collect();
        // Buffers of older blocks are not cached when freed, because a cache would keep this entry.
        self.moves += 1;
        names.into_iter().for_each(|name| self.pins.discard(name));
    }
}

/// Returns runs of granules, which are in order, with the strongest treatment that a block wants
/// for each granule. Granules that no block touches have nothing to keep.
fn strongest(
    runs: impl Iterator<Item = Range<usize>>,
    blocks: impl Iterator<Item = (Range<usize>, Contents)>,
) -> Vec<(Range<usize>, Vec<Contents>)> {
    let nothing = |run: Range<usize>| (run.clone(), vec![Contents::Discard; run.len()]);
    let mut runs: Vec<_> = runs.map(nothing).collect();
    for (range, wanted) in blocks {
        let first = runs.partition_point(|(run, _)| run.end <= range.start);
        for (run, all) in runs[first..].iter_mut().take_while(|(run, _)| run.start < range.end) {
            let part = range.start.max(run.start) - run.start..range.end.min(run.end) - run.start;
            all[part].iter_mut().for_each(|contents| *contents = (*contents).max(wanted));
        }
    }
    runs
}

/// Cuts a run of granules into parts of whole handles with one treatment each. A handle gets the
/// strongest treatment of its granules.
fn parts(
    start: usize,
    contents: &[Contents],
    handle_of: impl Fn(usize) -> Range<usize>,
) -> Vec<(Range<usize>, Contents)> {
    let (mut parts, mut at): (Vec<(Range<usize>, Contents)>, _) = (Vec::new(), start);
    while let Some(&first) = contents.get(at - start) {
        let handle = at..handle_of(at).end;
        let granules = contents[at - start..].iter().take(handle.len());
        let most = granules.copied().max().unwrap_or(first);
        at = handle.end;
        match parts.last_mut().filter(|(_, contents)| *contents == most) {
            Some((range, _)) => range.end = at,
            None => parts.push((handle, most)),
        }
    }
    parts
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::driver::HOST_GRANULARITY;

    #[test]
    fn contents_are_saved_in_stores_of_a_gibibyte_at_most() {
        let runs = [0..500, 600..1200, 2000..2001];
        let runs = runs.each_ref().map(|range| (Region::Dynamic, Run::of(range)));
        let (saved, sizes) = lay_out(runs.into_iter(), ByteSize::mib(2), &[]);
        assert_eq!(sizes, [ByteSize::gib(1), ByteSize::gib(1), ByteSize::mib(2 * 77)]);
        let seen: Vec<_> = saved
            .iter()
            .map(|saved| (saved.run.range(), saved.store, saved.offset.get() >> 21))
            .collect();
        assert_eq!(
            seen,
            [
                (0..500, 0, 0),
                (600..612, 0, 500),
                (612..1124, 1, 0),
                (1124..1200, 2, 0),
                (2000..2001, 2, 76),
            ]
        );
        let (saved, sizes) = lay_out(runs[2..].iter().copied(), ByteSize::kib(4), &[]);
        assert_eq!((saved.len(), sizes), (1, vec![HOST_GRANULARITY]));
        assert_eq!(lay_out([].into_iter(), ByteSize::mib(2), &[]), (Vec::new(), Vec::new()));
    }
    #[test]
    fn stores_that_exist_are_filled_before_more_are_created() {
        let run = [(Region::Stable, Run::of(&(0..10)))];
        let of = |have: &[ByteSize]| lay_out(run.iter().copied(), ByteSize::mib(2), have);
        let places = |saved: &[SavedRun]| -> Vec<_> {
            saved.iter().map(|saved| (saved.run.range(), saved.store)).collect()
        };
        // A store that is smaller than a granule holds nothing.
        let have = [ByteSize::mib(7), ByteSize::kib(64), ByteSize::mib(4)];
        let (saved, missing) = of(&have);
        assert_eq!(places(&saved), [(0..3, 0), (3..5, 2), (5..10, 3)]);
        assert_eq!(missing, [ByteSize::mib(10)]);
        let (saved, missing) = of(&[ByteSize::mib(20), ByteSize::mib(2)]);
        assert_eq!((places(&saved), missing), (vec![(0..10, 0)], Vec::new()));
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod store_tests {
    use super::*;

    fn idle(sizes: &[ByteSize]) -> SleepStores {
        let store = |size| SleepStore { memory: HostStore { at: 1, size }, reservation: None };
        let mut idle = SleepStores::default();
        idle.put(sizes.iter().map(|size| store(*size)).collect(), Moment::ORIGIN);
        idle
    }

    #[test]
    fn what_is_prepared_is_what_the_idle_stores_lack() {
        let mut idle = idle(&[ByteSize::mib(3)]);
        let kept = ByteSize::new((2 << 30) + (4 << 20));
        let sizes = idle.begin_prepare(kept, ByteSize::mib(2));
        assert_eq!(sizes, Some(vec![ByteSize::gib(1), ByteSize::gib(1), ByteSize::mib(2)]));
        assert_eq!(idle.begin_prepare(kept, ByteSize::mib(2)), None, "one at a time");
        idle.is_preparing = false;
        assert_eq!(idle.begin_prepare(ByteSize::mib(2), ByteSize::mib(2)), Some(Vec::new()));
    }

    #[test]
    fn a_store_is_due_beyond_the_limit_soon_and_beyond_the_need_after_the_decay_time() {
        let sizes = [ByteSize::mib(4), ByteSize::mib(2)];
        let time = Duration::from_secs(10);
        let due = |max: u64, need: u64| {
            let (max, need) = (ByteSize::mib(max), ByteSize::mib(need));
            idle(&sizes).due(max, need, DecayTime::Within(time))
        };
        assert_eq!(due(5, 6), Moment::ORIGIN + QUIET_AFTER_WAKE);
        assert_eq!(due(6, 5), Moment::NEVER, "the last store has a part of the need");
        assert_eq!(due(6, 4), Moment::ORIGIN + time);
        let never = idle(&sizes).due(ByteSize::mib(6), ByteSize::ZERO, DecayTime::Never);
        assert_eq!(never, Moment::NEVER);
        assert_eq!(idle(&[]).due(ByteSize::ZERO, ByteSize::ZERO, DecayTime::AtOnce), Moment::NEVER);
    }
}

#[cfg(test)]
mod contents_tests {
    use super::*;
    use Contents::{Discard, Keep, Stay};

    #[test]
    fn a_granule_is_treated_as_the_block_that_wants_the_most() {
        let of = |blocks: &[(Range<usize>, Contents)]| {
            strongest([0..3, 4..8].into_iter(), blocks.iter().cloned())
        };
        let none = [Discard; 4];
        assert_eq!(of(&[]), [(0..3, none[..3].to_vec()), (4..8, none.to_vec())]);
        let all = of(&[(0..2, Discard), (1..5, Keep), (4..5, Stay), (4..6, Discard), (6..7, Keep)]);
        assert_eq!(all[0], (0..3, vec![Discard, Keep, Keep]));
        assert_eq!(all[1], (4..8, vec![Stay, Discard, Keep, Discard]));
        let all = of(&[(1..2, Stay), (1..2, Keep), (1..2, Discard), (3..4, Stay), (7..9, Keep)]);
        assert_eq!(all[0], (0..3, vec![Discard, Stay, Discard]));
        assert_eq!(all[1], (4..8, vec![Discard, Discard, Discard, Keep]));
    }

    #[test]
    fn runs_are_cut_where_the_treatment_changes_and_never_inside_a_handle() {
        let of = |run: Range<usize>, handle: usize| {
            let blocks = [(2..4, Keep), (7..20, Stay)].into_iter();
            let (run, contents) = strongest([run].into_iter(), blocks).remove(0);
            let handle_of = |at: usize| at / handle * handle..(at / handle + 1) * handle;
            parts(run.start, &contents, handle_of)
        };
        assert_eq!(of(0..9, 1), [(0..2, Discard), (2..4, Keep), (4..7, Discard), (7..9, Stay)]);
        assert_eq!(of(3..4, 1), [(3..4, Keep)]);
        assert_eq!(of(8..13, 1), [(8..13, Stay)]);
        assert_eq!(of(30..32, 1), [(30..32, Discard)]);
        assert_eq!(of(5..5, 1), []);
        assert_eq!(of(0..12, 3), [(0..6, Keep), (6..12, Stay)]);
        assert_eq!(of(0..12, 12), [(0..12, Stay)]);
    }
}

//! Decides if the heap is purged now, and for which reason. It purges nothing itself.
//!
//! The reasons are pressure, a load that ended, a quiet service, a time that has passed, and
//! growth. Growth is for busy services, which are never quiet: without a purge their retained
//! memory would grow until memory is short.
//!
//! Memory that requests have reserved and do not hold yet may be allocated faster than the level
//! rises. If the unused pages leave too little room for it, they are purged at once, and again at
//! each tick, but only if more can be released than the floor and than the reserve below the limit
//! holds.
//!
//! Growth is detected in [`Sample::untracked_anonymous`], anonymous memory that belongs to no live
//! page of the heap and no arena. Resident bytes do not work, because a loaded model makes them
//! grow without anything to purge. Retained bytes, jemalloc's resident bytes less live ones, do not
//! work either: they include the holes in its pages, which no purge releases, and exclude memory
//! retained by the C library's heap, which a trim does release.
//!
//! After a load, when the service is quiet and when the interval has passed, a purge must be worth
//! its cost. Unused pages of jemalloc and free blocks of the C library's heap count. The C library
//! also reports free blocks without memory behind them, such as those that the last purge released,
//! so free blocks count only up to the growth of [`Sample::untracked_anonymous`] since that purge.
//! Counting them locks the C library's heap, so they are counted only if they can change the
//! decision.
//!
//! Invariants: a purge for growth starts only if `kept - low > max(floor, part x anonymous at low)`
//! held at every sample of `hold`, with `low` the smallest value since the last purge began; and
//! each `1 MiB` that the last purge found retained adds 10 ms of pause before the next one for
//! growth.

use std::time::Duration;

use crate::pressure::Level;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

use super::{Job, Maintenance, Sample, Tick, Trigger};

/// The pause between purges for growth, for each MiB. A purge takes about 0.1 ms for each MiB, and
/// the pause is a hundred times as long, so that purges take at most a hundredth of a core.
const PAUSE_PER_MIB: Duration = Duration::from_micros(100 * 100);

/// The time after a load in which a purge counts as caused by the load. It is longer than the
/// maximum age of a sample's figures.
const LOAD_WINDOW: Duration = Duration::from_secs(2);

/// The time for which growth must last: pages that decay by themselves cost no page fault, and pages
/// that the next request uses again would be faulted in again.
const HOLD: Duration = Duration::from_secs(2);

/// The growth of memory that a purge may release.
#[derive(Clone, Copy, Debug)]
pub(super) struct RetainedGrowth {
    /// The smallest retained amount since the last purge began, and the anonymous memory at that
    /// time.
    low: ByteSize,
    base: ByteSize,
    /// The time since which the growth has been large enough for a purge.
    since: Option<Moment>,
    /// The earliest time of the next purge for growth.
    next: Moment,
}

impl RetainedGrowth {
    pub(super) const fn new() -> Self {
        Self { low: ByteSize::MAX, base: ByteSize::ZERO, since: None, next: Moment::ORIGIN }
    }

    /// Adds a sample.
    fn see(&mut self, sample: &Sample) {
        if sample.untracked_anonymous <= self.low {
            (self.low, self.base) = (sample.untracked_anonymous, sample.anonymous);
        }
    }

    /// Returns `true` if the growth has lasted for long enough to be worth a purge.
    fn is_due(&mut self, (floor, part): (ByteSize, f64), sample: &Sample, now: Moment) -> bool {
        let worth = floor.max(self.base.scaled(part));
        if sample.untracked_anonymous.saturating_sub(self.low) <= worth {
            self.since = None;
            return false;
        }
        let since = *self.since.get_or_insert(now);
        now - since >= HOLD && now >= self.next
    }

    /// Resets the growth when a purge begins, for any reason.
    fn purged(&mut self, sample: &Sample, now: Moment) {
        let mib = u32::try_from(sample.untracked_anonymous.get() >> 20).unwrap_or(u32::MAX);
        *self = Self {
            low: sample.untracked_anonymous,
            base: sample.anonymous,
            since: None,
            next: now + PAUSE_PER_MIB.saturating_mul(mib),
        };
    }
}

/// Returns what a purge would release and decay would not.
pub(super) const fn purgeable_now(sample: &Sample) -> ByteSize {
    sample.purgeable.saturating_sub(sample.decaying)
}

impl Maintenance {
    /// Decides on a purge and its trigger. All triggers share one rate limit, since a purge
    /// releases everything.
    pub(super) fn decide_purge(&mut self, tick: &Tick) -> Option<Job> {
        let Tick { now, ref sample, worth, .. } = *tick;
        let quiet = self.is_quiet(tick);
        let purgeable = purgeable_now(sample);
        self.growth.see(sample);
        let loads = self.resources.loads_total();
        if std::mem::replace(&mut self.loads, loads) < loads {
            self.loaded_at = Some(now);
        }
        // A resource was loaded, and no purge followed.
        let loaded = self.loaded_at.is_some_and(|at| now - at < LOAD_WINDOW);
        let interval = self.settings.purge_interval;
        let interval_passed = interval.is_some_and(|every| now - self.purged_at >= every);
        let asks = loaded || quiet || interval_passed;
        let much = purgeable > worth || (asks && self.is_much_with_libc(tick, purgeable));
        // Threads flush their caches at an unknown time, so a flush is requested only once in each
        // quiet period.
        self.recalled &= quiet;
        let cached = !self.recalled && purgeable.saturating_add(sample.cached) > worth;
        self.purgeable_low = self.purgeable_low.min(sample.purgeable);
        if sample.purgeable.saturating_sub(self.purgeable_low) > worth {
            // Purges were ineffective while all memory was live, so the pause may be 10 s by now.
            // The load has fallen, and such a pause would keep the level up.
            self.purge.forgive();
        }
        let growth = self.settings.purge_growth;
        let grown = growth.is_some_and(|growth| self.growth.is_due(growth, sample, now));
        // Freed memory stays in the arena of its thread, but the next request may run on a thread
        // of another arena, which cannot reuse it.
        let is_urgent = self.may_fill_up && purgeable > tick.urgent_worth;
        let pressed = self.host.pressure.level >= Level::Elevated || is_urgent;
        let trigger = if pressed || self.exhaustion.wants_purge() {
            Trigger::Pressure
        } else if loaded && much {
            Trigger::Load
        } else if quiet && (much || cached) {
            Trigger::Idle
        } else if grown {
            Trigger::Growth
        } else if much && interval_passed {
            Trigger::Periodic
        } else {
            return None;
        };
        if !(self.purge.start(now) || is_urgent && self.purge.start_without_pause()) {
            return None;
        }
        (self.purged_at, self.recalled, self.loaded_at) = (now, quiet, None);
        self.purgeable_low = sample.purgeable;
        self.growth.purged(sample, now);
        Some(Job::Purge { trigger })
    }

    /// Returns `true` if for the quiet time no request has been held or admitted, and the heap has
    /// neither allocated nor freed as much as is worth a purge: a program that works without
    /// requests would fault in again what a purge releases.
    fn is_quiet(&mut self, tick: &Tick) -> bool {
        let Tick { now, ref sample, ref stats, worth, .. } = *tick;
        let admits = std::mem::replace(&mut self.admitted, stats.admitted_total);
        if stats.held() > 0 || stats.admitted_total != admits {
            self.quiet_since = None;
            return false;
        }
        let rests = |(_, then): &(Moment, Sample)| {
            let moved = then.heap_active.get().abs_diff(sample.heap_active.get());
            let freed = sample.purgeable.saturating_sub(then.purgeable);
            moved <= worth.get() && freed <= worth
        };
        let since = self.quiet_since.filter(rests).unwrap_or((now, *sample));
        now - self.quiet_since.insert(since).0 >= self.settings.quiet
    }

    /// Returns `true` if these unused pages and the C library's free blocks together are worth a
    /// purge.
    fn is_much_with_libc(&mut self, tick: &Tick, pages: ByteSize) -> bool {
        let Tick { now, ref sample, worth, .. } = *tick;
        let grown =
            sample.untracked_anonymous.saturating_sub(self.growth.low).saturating_sub(pages);
        self.growth.next.max(self.purge.next()) <= now
            && pages.saturating_add(grown) > worth
            && pages.saturating_add(self.sensor.libc_idle(now).min(grown)) > worth
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::admission::Admission;
    use crate::cost::Cost;
    use crate::maintenance::{Sensor, Settings};
    use crate::managed::{Managed, Resources};
    use crate::signal::Limit;
    use lowtide_core::clock::ManualClock;
    use lowtide_core::sync::{Mutex, lock};

    const SETTINGS: (ByteSize, f64) = (ByteSize::mib(64), 0.10);

    fn at(millis: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(millis))
    }

    fn sample_of(mib: u64) -> Sample {
        let untracked_anonymous = ByteSize::mib(mib);
        Sample {
            untracked_anonymous,
            anonymous: ByteSize::mib(200).saturating_add(untracked_anonymous),
            ..Sample::default()
        }
    }

    #[test]
    fn growth_counts_from_the_lowest_point_and_only_when_it_stays() {
        let mut growth = RetainedGrowth::new();
        let mut due = |millis, mib| seen_due(&mut growth, &sample_of(mib), at(millis));
        assert!(!due(0, 100) && !due(1_000, 20), "the low is 20 MiB");
        assert!(!due(2_000, 84), "64 MiB more are not more than 64 MiB");
        assert!(!due(3_000, 85) && !due(4_999, 300), "not for long enough");
        assert!(!due(4_999, 84), "it went by itself");
        assert!(!due(5_000, 85) && !due(6_999, 85));
        assert!(due(7_000, 85));
    }

    #[test]
    fn a_large_service_is_not_purged_for_a_small_part_of_it() {
        let mut growth = RetainedGrowth::new();
        let sample = |mib| Sample {
            untracked_anonymous: ByteSize::mib(mib),
            anonymous: ByteSize::mib(2_000),
            ..Sample::default()
        };
        let mut due = |millis, mib| seen_due(&mut growth, &sample(mib), at(millis));
        assert!(!due(0, 0));
        for (step, mib) in [(1, 200), (2, 200)] {
            assert!(!due(step * 60_000, mib), "a tenth at most");
        }
        assert!(!due(200_000, 201));
        assert!(due(202_000, 201));
    }

    #[test]
    fn the_pause_after_a_purge_goes_by_the_bytes_that_it_found() {
        for (mib, pause) in [(100, 2_000), (1_000, 10_000)] {
            let mut growth = RetainedGrowth::new();
            growth.purged(&sample_of(mib), at(0));
            let mut due = |millis, mib| seen_due(&mut growth, &sample_of(mib), at(millis));
            assert!(!due(0, 10) && !due(0, 500), "low, and high again at once");
            assert!(!due(pause - 1, 500), "{mib} MiB");
            assert!(due(pause, 500), "{mib} MiB");
        }
    }

    #[test]
    fn what_a_purge_did_not_return_asks_for_no_other_one() {
        let mut growth = RetainedGrowth::new();
        assert!(!seen_due(&mut growth, &sample_of(10), at(0)));
        assert!(!seen_due(&mut growth, &sample_of(400), at(0)));
        assert!(seen_due(&mut growth, &sample_of(400), at(2_000)));
        growth.purged(&sample_of(400), at(2_000));
        for hour in 1..100 {
            assert!(!seen_due(&mut growth, &sample_of(400), at(hour * 3_600_000)));
        }
    }

    fn seen_due(growth: &mut RetainedGrowth, sample: &Sample, now: Moment) -> bool {
        growth.see(sample);
        growth.is_due(SETTINGS, sample, now)
    }

    /// A sample, the C library's free blocks, and how often these were counted.
    #[derive(Clone, Copy, Default)]
    struct World {
        sample: Sample,
        libc_idle: ByteSize,
        looks: u32,
    }

    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<World>>);

    impl Seen {
        fn of(sample: Sample) -> Self {
            Self(Arc::new(Mutex::new(World { sample, ..World::default() })))
        }
    }

    impl Sensor for Seen {
        fn sample(&mut self, _: Moment) -> Sample {
            lock(&self.0).sample
        }

        fn libc_idle(&mut self, _: Moment) -> ByteSize {
            let mut world = lock(&self.0);
            world.looks += 1;
            world.libc_idle
        }
    }

    /// Loops of an idle service, over these figures.
    fn loops(seen: &Seen, settings: Settings, resources: Resources) -> (Maintenance, Admission) {
        let admission = Admission::new();
        let settings = Settings { publish_interval: None, ..settings };
        let (sensor, ladder) = (Box::new(seen.clone()), Vec::new());
        let loops = Maintenance::new(settings, sensor, admission.clone(), resources, ladder);
        (loops.expect("valid"), admission)
    }

    /// Ticks each 250 ms up to this second; the purges. One returns the free blocks of the C
    /// library that have memory behind them, and leaves them free.
    fn purges_until(loops: &mut Maintenance, seen: &Seen, from: u64, until: u64) -> Vec<Trigger> {
        let mut purges = Vec::new();
        for quarter in from * 4..until * 4 {
            for job in loops.tick(at(quarter * 250)) {
                if let Job::Purge { trigger } = job {
                    purges.push(trigger);
                    lock(&seen.0).sample = sample_of(20);
                    let released = ByteSize::mib(80);
                    loops.purge.finish(ByteSize::ZERO, released, at(quarter * 250 + 10));
                }
            }
        }
        purges
    }

    /// 80 MiB of free blocks of the C library's heap.
    fn burst(seen: &Seen) {
        *lock(&seen.0) =
            World { sample: sample_of(100), libc_idle: ByteSize::mib(80), ..World::default() };
    }

    /// The bug: a program that admits no request counted as idle while it worked, and its purges
    /// doubled its page faults.
    #[test]
    fn a_program_without_requests_is_purged_once_it_rests() {
        let settings = Settings { purge_interval: None, ..Settings::default() };
        for works in [true, false] {
            let seen = Seen::of(Sample::default());
            let (mut loops, _) = loops(&seen, settings, Resources::new());
            let mut triggers = Vec::new();
            for tick in 0..240 {
                // It allocates its pages again, in some of the samples.
                let active = if works && tick % 4 == 0 { 200 } else { 0 };
                let purgeable = if works || triggers.is_empty() { 200 - active } else { 0 };
                lock(&seen.0).sample = Sample {
                    heap_active: ByteSize::mib(active),
                    purgeable: ByteSize::mib(purgeable),
                    ..Sample::default()
                };
                for job in loops.tick(at(tick * 250)) {
                    if let Job::Purge { trigger } = job {
                        triggers.push(trigger);
                        let released = ByteSize::mib(200);
                        loops.purge.finish(ByteSize::ZERO, released, at(tick * 250 + 1));
                    }
                }
            }
            let expected: &[_] = if works { &[] } else { &[Trigger::Idle] };
            assert_eq!(triggers, expected);
        }
    }

    /// Bug: idle and periodic purges counted jemalloc's unused pages only, so that 80 MiB of an
    /// engine written in C++ stayed while the service was idle.
    #[test]
    fn free_blocks_of_the_c_library_are_purged_once_after_each_burst() {
        let seen = Seen::of(sample_of(20));
        let settings = Settings { purge_interval: None, ..Settings::default() };
        let (mut loops, admission) = loops(&seen, settings, Resources::new());
        assert_eq!(purges_until(&mut loops, &seen, 0, 10), []);
        assert_eq!(lock(&seen.0).looks, 0, "nothing has grown: the C library is not asked");
        burst(&seen);
        assert_eq!(purges_until(&mut loops, &seen, 10, 200), [Trigger::Idle]);
        assert!(lock(&seen.0).looks <= 1, "its free blocks without memory are not asked for");
        let request = admission.try_admit(Cost::ZERO).expect("nothing is held");
        burst(&seen);
        assert_eq!(purges_until(&mut loops, &seen, 200, 201), [], "a request is held");
        drop(request);
        assert_eq!(purges_until(&mut loops, &seen, 201, 400), [Trigger::Idle]);
    }

    #[test]
    fn free_blocks_of_the_c_library_are_purged_from_a_busy_service_when_the_interval_has_passed() {
        let seen = Seen::of(sample_of(20));
        let (mut loops, admission) = loops(&seen, Settings::default(), Resources::new());
        let _held = admission.try_admit(Cost::ZERO).expect("nothing is held");
        assert_eq!(purges_until(&mut loops, &seen, 0, 10), []);
        burst(&seen);
        assert_eq!(purges_until(&mut loops, &seen, 10, 29), []);
        assert_eq!(purges_until(&mut loops, &seen, 29, 200), [Trigger::Periodic]);
    }

    #[test]
    fn memory_that_grew_beside_the_heap_and_is_not_free_asks_for_no_purge() {
        let seen = Seen::of(sample_of(20));
        let (mut loops, _) = loops(&seen, Settings::default(), Resources::new());
        assert_eq!(purges_until(&mut loops, &seen, 0, 10), []);
        // A model that the C library holds.
        lock(&seen.0).sample = sample_of(300);
        lock(&seen.0).libc_idle = ByteSize::mib(10);
        assert_eq!(purges_until(&mut loops, &seen, 10, 100), []);
    }

    /// Bug: memory that a load left unused stayed during the first requests and raised their peak.
    #[test]
    fn what_a_load_leaves_behind_is_purged_once_and_without_a_quiet_time() {
        let (seen, resources) = (Seen::of(sample_of(20)), Resources::new());
        let (mut loops, admission) = loops(&seen, Settings::default(), resources.clone());
        let loaded = Managed::builder("model", || Ok(())).build(Arc::new(ManualClock::new()), None);
        resources.add(&loaded).expect("the first");
        let _held = admission.try_admit(Cost::ZERO).expect("nothing is held");
        assert_eq!(purges_until(&mut loops, &seen, 0, 10), []);
        drop(loaded.acquire_blocking().expect("loads"));
        burst(&seen);
        assert_eq!(purges_until(&mut loops, &seen, 10, 20), [Trigger::Load]);
        drop(loaded.acquire_blocking().expect("is loaded"));
        burst(&seen);
        assert_eq!(purges_until(&mut loops, &seen, 20, 30), [], "nothing was loaded");
    }

    /// Returns why a service that holds a request is purged while it keeps 300 MiB more than at its
    /// start.
    fn purged_within_20s(purge_growth: Option<(ByteSize, f64)>, purgeable: u64) -> Vec<Trigger> {
        let settings = Settings { purge_growth, ..Settings::default() };
        let seen = Seen::of(sample_of(20));
        let (mut loops, admission) = loops(&seen, settings, Resources::new());
        let _busy = admission.try_admit(Cost::ZERO).expect("nothing is held");
        let mut triggers = Vec::new();
        for second in 0..20 {
            let now = at(second * 1_000);
            triggers.extend(loops.tick(now).filter_map(|job| match job {
                Job::Purge { trigger } => Some(trigger),
                _ => None,
            }));
            let purgeable = ByteSize::mib(purgeable);
            lock(&seen.0).sample = Sample { purgeable, ..sample_of(320) };
        }
        triggers
    }

    #[test]
    fn a_busy_service_that_keeps_more_is_purged_once_though_its_heap_shows_nothing_purgeable() {
        // The heap of a C library that does not count its free blocks.
        assert_eq!(purged_within_20s(Some(SETTINGS), 0), [Trigger::Growth]);
        assert_eq!(purged_within_20s(Some(SETTINGS), 300), [Trigger::Growth]);
        assert_eq!(purged_within_20s(None, 300), [], "the interval is 30 s");
    }

    /// The bug: unused pages of one thread's arena stayed while requests grew in another's, faster
    /// than the level rose and than purges may follow each other, and the kernel killed the
    /// service.
    #[test]
    fn unused_pages_leave_no_room_for_what_is_reserved_and_are_purged_each_tick() {
        let seen = Seen::of(Sample {
            limit: Limit::given(ByteSize::mib(256)),
            physical: ByteSize::mib(110),
            purgeable: ByteSize::mib(80),
            ..Sample::default()
        });
        let (mut loops, admission) = loops(&seen, Settings::default(), Resources::new());
        let mut purges_at = |millis: u64| {
            let mut jobs = loops.tick(at(millis));
            let purges = jobs.any(|job| job == Job::Purge { trigger: Trigger::Pressure });
            if purges {
                // Another thread freed as much meanwhile.
                loops.purge.finish(ByteSize::ZERO, ByteSize::mib(80), at(millis));
            }
            (purges, loops.may_fill_up)
        };
        let mut permit = admission.try_admit(Cost::host(ByteSize::mib(120))).expect("no limit yet");
        permit.report(ByteSize::ZERO);
        assert_eq!(purges_at(0), (false, false), "110 + 120 MiB are less than 93 % of 256");
        let _more = permit.raise(ByteSize::mib(140));
        assert_eq!(purges_at(10), (true, true));
        assert_eq!(purges_at(20), (true, true), "again, and not 100 ms later");
        lock(&seen.0).sample.purgeable = ByteSize::mib(15);
        assert_eq!(purges_at(30), (false, true), "too little to gain");
        permit.report(ByteSize::mib(140));
        lock(&seen.0).sample.purgeable = ByteSize::mib(80);
        assert_eq!(purges_at(40), (false, false), "they hold it");
    }

    #[test]
    fn thread_caches_are_asked_for_once_in_each_quiet_time() {
        let seen = Seen::of(Sample { cached: ByteSize::mib(100), ..Sample::default() });
        let (mut loops, admission) = loops(&seen, Settings::default(), Resources::new());
        let mut purges = Vec::new();
        for second in 0..300 {
            if second % 100 == 50 {
                drop(admission.try_admit(Cost::ZERO).expect("nothing is held"));
            }
            for job in loops.tick(at(second * 1_000)) {
                if let Job::Purge { trigger } = job {
                    assert_eq!(trigger, Trigger::Idle);
                    // No thread answered.
                    let end = at(second * 1_000 + 10);
                    loops.purge.finish(ByteSize::mib(1), ByteSize::ZERO, end);
                    purges.push(second / 50);
                }
            }
        }
        assert_eq!(purges, [0, 1, 3, 5], "when it starts, and after each request");
    }

    #[test]
    fn growth_by_a_part_that_is_none_is_refused() {
        for part in [0.0, -0.1, 1.1, f64::NAN] {
            let purge_growth = Some((SETTINGS.0, part));
            let settings = Settings { purge_growth, ..Settings::default() };
            assert_eq!(settings.check().expect_err("refused").name, "purge_growth.part");
        }
    }
}

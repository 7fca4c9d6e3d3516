//! The control loop in virtual time: a fluid service under load, and each decision by itself.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use lowtide_admission::ByteSize;
use lowtide_admission::clock::{Bell, Clock, ManualClock, Moment};
use lowtide_admission::{
    Admission, Budget, Cost, DeviceFigures, ExhaustionPolicy, Job, Level, Limit, LimitSource,
    Maintenance, MaintenanceActions, Managed, Permit, Priority, RejectReason, Rejected, Resources,
    Sample, Sensor, Settings, Trigger,
};
use lowtide_core::sync::lock;

const PATIENCE: Duration = Duration::from_secs(120);
const MILLI: Duration = Duration::from_millis(1);
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// The memory of a service: reused pages come from the dirty ones first, as in jemalloc.
#[derive(Clone, Debug, Default)]
struct Memory {
    sample: Sample,
    purges: Vec<(Moment, Trigger)>,
    published: u64,
    decayed: u64,
    /// The decays were background work.
    in_background: bool,
    /// A purge gives this part back.
    purge_works: bool,
    panics: bool,
}

impl Memory {
    fn allocate(&mut self, bytes: u64) {
        let size = ByteSize::new(bytes);
        let reused = size.min(self.sample.purgeable);
        self.sample.purgeable = self.sample.purgeable.saturating_sub(reused);
        let fresh = size.saturating_sub(reused);
        self.sample.physical = self.sample.physical.saturating_add(fresh);
        self.sample.heap_live = self.sample.heap_live.saturating_add(size);
    }

    fn free(&mut self, bytes: u64) {
        let size = ByteSize::new(bytes);
        self.sample.heap_live = self.sample.heap_live.checked_sub(size).expect("was live");
        self.sample.purgeable = self.sample.purgeable.saturating_add(size);
    }
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Memory>>);

impl Shared {
    fn with<R>(&self, change: impl FnOnce(&mut Memory) -> R) -> R {
        change(&mut lock(&self.0))
    }
}

struct FakeSensor(Shared);

impl Sensor for FakeSensor {
    fn sample(&mut self, _: Moment) -> Sample {
        self.0.with(|memory| {
            assert!(!memory.panics, "a sensor panics");
            memory.sample
        })
    }

    fn further_device(&self, _nth: usize) -> DeviceFigures {
        self.0.with(|memory| memory.sample.device)
    }
}

struct FakeHands(Shared, Arc<ManualClock>);

impl MaintenanceActions for FakeHands {
    fn purge(&mut self, trigger: Trigger) -> ByteSize {
        let now = self.1.now();
        self.0.with(|memory| {
            memory.purges.push((now, trigger));
            if !memory.purge_works {
                return ByteSize::ZERO;
            }
            let given = std::mem::take(&mut memory.sample.purgeable);
            memory.sample.physical = memory.sample.physical.saturating_sub(given);
            given
        })
    }

    fn run(&mut self, job: Job, _: Moment) -> bool {
        self.0.with(|memory| match job {
            Job::DecayDevice => {
                memory.decayed += 1;
                memory.in_background = lowtide_core::sync::is_background();
                memory.sample.device_decay_due = None;
            }
            Job::Publish => memory.published += 1,
            _ => {}
        });
        false
    }
}

/// Loop and worker, driven by hand.
struct Rig {
    clock: Arc<ManualClock>,
    memory: Shared,
    admission: Admission,
    resources: Resources,
    maintenance: Maintenance,
    worker: lowtide_admission::Worker,
    next: Moment,
    /// Every job posted.
    posted: Vec<(Moment, Job)>,
}

impl Rig {
    fn new(settings: Settings, limit: ByteSize, base: ByteSize) -> Self {
        let memory = Shared::default();
        memory.with(|memory| {
            memory.purge_works = true;
            memory.sample.limit = Limit::given(limit);
            memory.sample.physical = base;
            memory.sample.heap_live = base;
        });
        let (admission, resources) = (Admission::new(), Resources::new());
        let ladder = vec![resources.reclaimer(Budget::Host)];
        let sensor = Box::new(FakeSensor(memory.clone()));
        let clock = Arc::new(ManualClock::new());
        let maintenance =
            Maintenance::new(settings, sensor, admission.clone(), resources.clone(), ladder)
                .expect("settings");
        let worker = maintenance.worker(Box::new(FakeHands(memory.clone(), Arc::clone(&clock))));
        Self {
            clock,
            memory,
            admission,
            resources,
            maintenance,
            worker,
            next: Moment::ORIGIN,
            posted: Vec::new(),
        }
    }

    /// One millisecond: ticks where one is due, then the worker does one job.
    fn step(&mut self) {
        let now = self.clock.now();
        if now >= self.next {
            self.posted.extend(self.maintenance.tick(now).map(|job| (now, job)));
            self.next = self.maintenance.next_tick();
            assert!(self.next > now);
        }
        if let Some(job) = self.maintenance.state().pop_job() {
            self.worker.run(job, &*self.clock);
        }
        self.clock.advance(MILLI);
    }

    fn run(&mut self, time: Duration) {
        let end = self.clock.now() + time;
        while self.clock.now() < end {
            self.step();
        }
    }

    fn triggers(&self) -> Vec<Trigger> {
        self.memory.with(|memory| memory.purges.iter().map(|(_, trigger)| *trigger).collect())
    }
}

struct Request {
    ends: Moment,
    holds: u64,
    _permit: Permit,
}

struct Outcome {
    admitted: u64,
    last_shed: Option<Moment>,
    peak: u64,
    flips: u64,
}

/// Offers load: requests of 64 KiB (70 %), 1 MiB (25 %) and 8 MiB (5 %), held for 200 ms, whose
/// estimates are `estimate` times the truth.
fn offer(
    rig: &mut Rig,
    running: &mut VecDeque<Request>,
    rate: f64,
    time: Duration,
    estimate: f64,
) -> Outcome {
    let mut state = SEED;
    let end = rig.clock.now() + time;
    let mut outcome = Outcome { admitted: 0, last_shed: None, peak: 0, flips: 0 };
    let (mut owed, mut level) = (0.0, Level::None);
    while rig.clock.now() < end {
        let now = rig.clock.now();
        while running.front().is_some_and(|request| request.ends <= now) {
            let request = running.pop_front().expect("there");
            rig.memory.with(|memory| memory.free(request.holds));
        }
        owed += rate / 1000.0;
        while owed >= 1.0 {
            owed -= 1.0;
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let holds = match state % 100 {
                0..70 => 64 * KIB,
                70..95 => MIB,
                _ => 8 * MIB,
            } * 2;
            match rig.admission.try_admit(Cost::host(ByteSize::new(holds).scaled(estimate))) {
                Ok(permit) => {
                    rig.memory.with(|memory| memory.allocate(holds));
                    outcome.admitted += 1;
                    let ends = now + Duration::from_millis(200);
                    running.push_back(Request { ends, holds, _permit: permit });
                }
                Err(_) => outcome.last_shed = Some(now),
            }
        }
        rig.step();
        let physical = rig.memory.with(|memory| memory.sample.physical);
        outcome.peak = outcome.peak.max(physical.get());
        let found = rig.maintenance.state().level(Budget::Host);
        outcome.flips += u64::from(found != level);
        level = found;
    }
    outcome
}

#[test]
fn overload_with_wrong_estimates_never_passes_the_limit_and_leaves_no_latch() {
    let limit = ByteSize::mib(256);
    println!("seed {SEED:#x}");
    // Nothing decays by itself: what is freed stays until we purge.
    for estimate in [0.5, 0.7, 1.0, 2.0] {
        let mut rig = Rig::new(Settings::default(), limit, ByteSize::mib(20));
        rig.run(Duration::from_millis(300));
        let mut running = VecDeque::new();
        let load = offer(&mut rig, &mut running, 1400.0, Duration::from_secs(5), estimate);
        assert!(load.peak <= limit.get(), "x{estimate}: killed at {} MiB", load.peak / MIB);
        assert!(load.last_shed.is_some(), "x{estimate}: it was no overload");
        assert!(load.flips <= 20, "x{estimate}: {} flips in 5 s", load.flips);
        let fell = rig.clock.now();
        let calm = offer(&mut rig, &mut running, 100.0, Duration::from_secs(5), estimate);
        let shed_for = calm.last_shed.map_or(Duration::ZERO, |at| at - fell);
        println!(
            "x{estimate}: peak {} MiB, {} admitted, {} flips, shed for {shed_for:?} after",
            load.peak / MIB,
            load.admitted,
            load.flips
        );
        assert!(shed_for <= Duration::from_millis(250), "x{estimate}: {shed_for:?}");
        assert!(calm.admitted >= 480, "x{estimate}: {} admitted", calm.admitted);
    }
}

#[test]
fn unpurged_memory_at_the_limit_does_not_shed_once_load_has_fallen() {
    let limit = ByteSize::mib(256);
    let mut rig = Rig::new(Settings::default(), limit, ByteSize::mib(20));
    rig.run(Duration::from_millis(50));
    // All live for a long time: purges are useless and back off to 10 s.
    rig.memory.with(|memory| memory.allocate(222 * MIB));
    rig.run(Duration::from_secs(60));
    assert_eq!(rig.admission.level(), Level::Critical);
    assert!(rig.triggers().len() < 20, "{} useless purges in a minute", rig.triggers().len());
    assert!(rig.admission.try_admit(Cost::host(ByteSize::new(1))).is_err());
    // Now it is freed, and nothing but a purge gives it back.
    rig.memory.with(|memory| memory.free(222 * MIB));
    let fell = rig.clock.now();
    let admits = |rig: &Rig| rig.admission.try_admit(Cost::host(ByteSize::new(MIB))).is_ok();
    while !admits(&rig) {
        rig.step();
        let shed_for = rig.clock.now() - fell;
        assert!(shed_for <= Duration::from_millis(270), "sheds on: {shed_for:?}");
    }
    rig.run(Duration::from_secs(2));
    assert_eq!(rig.admission.level(), Level::None);
}

#[test]
fn memory_is_purged_when_the_service_is_idle_and_not_for_little() {
    let mut rig = Rig::new(Settings::default(), ByteSize::gib(1), ByteSize::mib(100));
    rig.memory.with(|memory| {
        memory.allocate(60 * MIB);
        memory.free(24 * MIB);
    });
    rig.run(Duration::from_secs(10));
    assert_eq!(rig.triggers(), [], "24 MiB are less than a quarter of what is live");
    let permit = rig.admission.try_admit(Cost::ZERO).expect("admitted");
    rig.memory.with(|memory| memory.free(36 * MIB));
    rig.run(Duration::from_secs(5));
    assert_eq!(rig.triggers(), [], "a request is held");
    drop(permit);
    let released = rig.clock.now();
    rig.run(Duration::from_secs(10));
    assert_eq!(rig.triggers(), [Trigger::Idle]);
    let at = rig.memory.with(|memory| memory.purges[0].0);
    let wait = at - released;
    assert!(wait >= Duration::from_millis(1000) - 250 * MILLI && wait <= 1510 * MILLI, "{wait:?}");
}

/// The bug: idle memory of arenas was purged after the quiet time whatever their decay time was, so
/// that each pause of a second or two cost driver calls.
#[test]
fn what_leaves_by_itself_was_purged_in_each_pause() {
    let mut rig = Rig::new(Settings::default(), ByteSize::gib(1), ByteSize::mib(100));
    rig.memory.with(|memory| {
        memory.allocate(60 * MIB);
        memory.free(50 * MIB);
        memory.sample.decaying = ByteSize::mib(40);
    });
    rig.run(Duration::from_secs(40));
    assert_eq!(rig.triggers(), [], "10 MiB of the heap are not worth it");
    rig.memory.with(|memory| memory.sample.decaying = ByteSize::ZERO);
    rig.run(Duration::from_secs(2));
    assert_eq!(rig.triggers(), [Trigger::Idle]);
}

#[test]
fn a_busy_service_is_purged_periodically() {
    let mut rig = Rig::new(Settings::default(), ByteSize::gib(1), ByteSize::mib(10));
    let _permit = rig.admission.try_admit(Cost::ZERO).expect("admitted");
    rig.memory.with(|memory| {
        memory.allocate(100 * MIB);
        memory.free(100 * MIB);
    });
    rig.run(Duration::from_secs(29));
    assert_eq!(rig.triggers(), []);
    rig.run(Duration::from_secs(2));
    assert_eq!(rig.triggers(), [Trigger::Periodic]);
}

/// The bug: two requests were admitted beside the unused pages of a third that had just ended, and
/// both grew in other arenas before the purge: the kernel killed the service.
#[test]
fn a_large_request_is_not_admitted_in_place_of_pages_that_are_not_purged_yet() {
    let settings = Settings { correction_factor: 1.0, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::mib(256), ByteSize::mib(10));
    let large = Cost::host(ByteSize::mib(90));
    rig.run(20 * MILLI);
    // No tick follows for a while: the loop was idle.
    let first = rig.admission.try_admit(large).expect("fits");
    rig.memory.with(|memory| memory.allocate(90 * MIB));
    let mut second = rig.admission.try_admit(large).expect("fits");
    second.report(ByteSize::ZERO); // it will grow
    rig.memory.with(|memory| memory.free(90 * MIB));
    drop(first);
    let third = rig.admission.try_admit(large).map(drop).expect_err("not purged yet");
    assert_eq!(third.reason(), RejectReason::Full);
    assert!(rig.admission.try_admit(Cost::host(ByteSize::mib(1))).is_ok(), "a small one is");
    rig.run(250 * MILLI);
    assert_eq!(rig.triggers(), [Trigger::Pressure]);
    assert!(rig.admission.try_admit(large).is_ok());
}

/// The bug: unused pages of less than a quarter of the live bytes kept no large request out and
/// were not purged, though the reserve below the limit did not hold them.
#[test]
fn a_large_request_is_not_admitted_in_place_of_pages_that_the_reserve_does_not_hold() {
    let settings = Settings { correction_factor: 1.0, ceiling: 0.93, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::gib(1), ByteSize::mib(500));
    rig.memory.with(|memory| {
        memory.sample.heap_live = ByteSize::mib(500);
        memory.allocate(120 * MIB);
        memory.free(120 * MIB);
    });
    rig.run(20 * MILLI);
    let large = Cost::host(ByteSize::mib(420));
    let rejected = rig.admission.try_admit(large).map(drop).expect_err("500 + 120 + 420 MiB");
    assert_eq!(rejected.reason(), RejectReason::Full);
    rig.run(750 * MILLI);
    assert_eq!(rig.triggers(), [Trigger::Pressure]);
    rig.admission.try_admit(large).map(drop).expect("the pages are gone");
}

#[test]
fn a_resource_is_unloaded_within_a_tick_of_its_time_and_the_heap_is_purged_after_it() {
    let mut rig = Rig::new(Settings::default(), ByteSize::gib(1), ByteSize::mib(10));
    let managed = Managed::builder("model", || Ok(()))
        .idle(Duration::from_secs(5))
        .cost(Cost::host(ByteSize::mib(300)))
        .build(rig.clock.clone(), Some(rig.admission.clone()));
    assert_eq!(rig.resources.add(&managed), Ok(()));
    rig.run(Duration::from_millis(7));
    drop(managed.acquire_blocking().expect("fits"));
    rig.run(Duration::from_millis(4999));
    assert!(managed.stats().loaded);
    rig.run(Duration::from_millis(12));
    assert!(!managed.stats().loaded);
    assert_eq!(rig.triggers(), [Trigger::Unload]);
    let unloads = rig.posted.iter().filter(|(_, job)| *job == Job::UnloadIdle).count();
    assert_eq!(unloads, 1, "asked for once");
}

/// The bug: beside an idle model a request was admitted for two thirds of the room that the model
/// left, whatever it needed, and cancelled because it outgrew that. The model could have gone.
#[test]
fn a_request_reserves_its_need_if_an_idle_resource_can_make_room_for_it() {
    let mut rig = Rig::new(Settings::default(), ByteSize::mib(1000), ByteSize::mib(100));
    let model = Managed::builder("model", || Ok(())).cost(Cost::host(ByteSize::mib(500)));
    let model = model.build(rig.clock.clone(), Some(rig.admission.clone()));
    assert_eq!(rig.resources.add(&model), Ok(()));
    rig.run(100 * MILLI);
    let guard = model.acquire_blocking().expect("fits");
    rig.memory.with(|memory| memory.allocate(500 * MIB));
    let need = |rig: &Rig| {
        rig.admission.ledger(Budget::Host).learned_room().limit(ByteSize::mib(200)).get() / MIB
    };
    rig.run(300 * MILLI);
    assert_eq!(need(&rig), 66, "two thirds of the room beside a model in use");
    drop(guard);
    rig.run(300 * MILLI);
    assert_eq!(need(&rig), 200);
    rig.maintenance.leave();
    let room = rig.admission.ledger(Budget::Host).learned_room();
    assert_eq!(room.most, room.all, "no tick sees what is idle");
}

/// A service with a resource of this cost that is loaded and idle.
fn with_idle(cost: ByteSize) -> (Rig, Managed<()>) {
    let mut rig = Rig::new(Settings::default(), ByteSize::mib(1000), ByteSize::mib(300));
    let managed = Managed::builder("model", || Ok(())).cost(Cost::host(cost));
    let managed = managed.build(rig.clock.clone(), None);
    drop(managed.acquire_blocking().expect("loads"));
    assert_eq!(rig.resources.add(&managed), Ok(()));
    rig.run(Duration::from_millis(300));
    (rig, managed)
}

#[test]
fn an_idle_resource_is_unloaded_under_pressure_after_a_purge_was_tried() {
    let (mut rig, managed) = with_idle(ByteSize::mib(600));
    rig.memory.with(|memory| memory.allocate(580 * MIB));
    rig.run(Duration::from_millis(300));
    assert!(!managed.stats().loaded, "level {}", rig.admission.level());
    assert_eq!(managed.stats().unloads_total(lowtide_admission::UnloadReason::Pressure), 1);
    assert_eq!(rig.triggers()[..2], [Trigger::Pressure, Trigger::Unload]);
}

/// The bug: work that spills begins to before the level is high, so that nothing else made room.
#[test]
fn while_work_spills_memory_is_purged_and_idle_resources_are_unloaded() {
    let (mut rig, managed) = with_idle(ByteSize::mib(100));
    rig.memory.with(|memory| memory.free(200 * MIB));
    let before = rig.triggers().len();
    rig.memory.with(|memory| memory.sample.spilled = ByteSize::mib(16));
    assert!(managed.stats().loaded);
    rig.run(Duration::from_secs(2));
    assert_eq!(rig.admission.level(), Level::None);
    assert!(!managed.stats().loaded);
    assert_eq!(rig.triggers()[before..][..2], [Trigger::Pressure, Trigger::Unload]);
}

#[test]
fn the_loop_is_slow_when_nothing_goes_on_and_fast_when_something_does() {
    let settings = Settings { publish_interval: None, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::gib(1), ByteSize::mib(10));
    let step = |rig: &mut Rig| {
        let now = rig.clock.now();
        let _ = rig.maintenance.tick(now);
        let step = rig.maintenance.next_tick() - now;
        rig.clock.advance(step);
        step
    };
    let _first = step(&mut rig);
    assert_eq!(step(&mut rig), 250 * MILLI);
    let permit = rig.admission.try_admit(Cost::host(ByteSize::new(1))).expect("admitted");
    assert_eq!(step(&mut rig).as_millis(), 247, "1 GB/s fills a quarter of the room");
    drop(permit);
    // A loaded model is no traffic.
    let resource_reservations =
        rig.admission.try_reserve_resource(Cost::host(ByteSize::mib(100))).expect("fits");
    assert_eq!(step(&mut rig), 250 * MILLI);
    drop(resource_reservations);
    rig.memory.with(|memory| memory.allocate(20 * MIB));
    assert_eq!(step(&mut rig), 10 * MILLI, "it grows");
    assert_eq!(step(&mut rig), 250 * MILLI);
    rig.memory.with(|memory| memory.allocate(600 * MIB));
    let _grows = step(&mut rig);
    assert_eq!(step(&mut rig), 10 * MILLI, "more than half is required");
}

#[test]
fn a_quiet_service_has_few_ticks_and_its_first_request_asks_for_one() {
    let settings = Settings { publish_interval: None, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::gib(3), ByteSize::mib(10));
    rig.run(1500 * MILLI);
    let now = rig.clock.now();
    let is_asked = |rig: &Rig| rig.maintenance.next_tick() <= rig.clock.now();
    let _ = rig.maintenance.tick(now);
    assert_eq!((rig.maintenance.next_tick() - now).as_millis(), 746);
    let admit = |rig: &Rig, mib| rig.admission.try_admit(Cost::host(ByteSize::mib(mib)));
    let _first = admit(&rig, 1).expect("admitted");
    assert!(is_asked(&rig));
    rig.clock.advance(10 * MILLI);
    let _ = rig.maintenance.tick(rig.clock.now());
    // A sixteenth of half of 3 GiB less the reserve is some 90 MiB.
    let _second = admit(&rig, 50).expect("admitted");
    assert!(!is_asked(&rig));
    let _third = admit(&rig, 50).expect("admitted");
    assert!(is_asked(&rig));
    rig.memory.with(|memory| memory.allocate(1200 * MIB));
    rig.run(100 * MILLI);
    let now = rig.clock.now();
    let _ = rig.maintenance.tick(now);
    assert_eq!((rig.maintenance.next_tick() - now).as_millis(), 10, "half of the room is reserved");
}

/// Returns the milliseconds that the loop leaves to its next tick after so long.
fn step_after(rig: &mut Rig, time: Duration) -> u128 {
    rig.run(time);
    let now = rig.clock.now();
    let _ = rig.maintenance.tick(now);
    (rig.maintenance.next_tick() - now).as_millis()
}

/// The bug: the time since the last tick, up to a second in a quiet time, counted as held, so that
/// the time limits of the first request passed early.
#[test]
fn the_first_request_after_a_quiet_time_has_all_of_its_time() {
    let settings = Settings { publish_interval: None, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::gib(8), ByteSize::mib(10));
    rig.resources.evict_for(&rig.admission, rig.clock.clone(), || {});
    assert_eq!(step_after(&mut rig, 3000 * MILLI), 1000);
    rig.clock.advance(900 * MILLI);
    let _first = rig.admission.try_admit(Cost::host(ByteSize::mib(1))).expect("fits");
    assert_eq!(rig.admission.state().last_tick(), rig.clock.now());
}

/// The bug: the requests of a further device counted as a quiet time of all others.
#[test]
fn no_time_in_which_a_further_device_has_requests_is_quiet() {
    let settings = Settings { publish_interval: None, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::gib(8), ByteSize::mib(10));
    let further = Admission::new();
    rig.maintenance.add_device(further.clone());
    let held = further.try_admit(Cost::device(ByteSize::mib(1))).expect("no limit");
    assert_eq!(step_after(&mut rig, 3000 * MILLI), 250);
    drop(held);
    assert_eq!(step_after(&mut rig, 3000 * MILLI), 1000);
}

/// The bug: requests that need only device memory, and those that did not find it, asked for no
/// tick, and found the room that arenas had released up to 250 ms later. So did those of further
/// devices.
#[test]
fn requests_ask_for_a_tick_by_the_room_of_each_device_too() {
    let settings = Settings { publish_interval: None, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::gib(8), ByteSize::mib(10));
    rig.memory.with(|memory| memory.sample.device.limit = Some(ByteSize::gib(10)));
    let further = Admission::new();
    rig.maintenance.add_device(further.clone());
    for admission in [rig.admission.clone(), further] {
        let admit = |mib| admission.try_admit(Cost::device(ByteSize::mib(mib)));
        let _held = admit(1).expect("no limit yet");
        for (mib, fits, asks) in [(100, true, false), (500, true, true), (7900, false, true)] {
            assert_eq!(step_after(&mut rig, 500 * MILLI), 250);
            assert_eq!(admit(mib).is_ok(), fits, "{mib} MiB");
            assert_eq!(rig.maintenance.next_tick() <= rig.clock.now(), asks, "{mib} MiB");
        }
    }
}

/// The bug: each tick of a quiet time panicked if idle ticks were to come never.
#[test]
fn a_quiet_service_may_do_without_ticks() {
    let settings =
        Settings { publish_interval: None, idle_tick: Duration::MAX, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::gib(1), ByteSize::mib(10));
    for second in 0..3 {
        let _ = rig.maintenance.tick(Moment::after_origin(Duration::from_secs(second)));
        assert_eq!(rig.maintenance.next_tick(), Moment::NEVER);
    }
}

/// The bug: a model, or a lost device, counted as what requests had reserved, so that the loop was
/// busy while there was a request.
#[test]
fn neither_models_nor_lost_devices_make_the_loop_busy() {
    let settings = Settings { publish_interval: None, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::gib(3), ByteSize::mib(10));
    rig.memory.with(|memory| memory.sample.device.limit = Some(ByteSize::ZERO));
    let _held = rig.admission.try_admit(Cost::host(ByteSize::mib(1))).expect("fits");
    assert_eq!(step_after(&mut rig, 100 * MILLI), 250);
    let model = Cost::host(ByteSize::mib(800));
    let _model = rig.admission.try_reserve_resource(model).expect("fits");
    rig.memory.with(|memory| memory.allocate(800 * MIB));
    assert_eq!(step_after(&mut rig, 1000 * MILLI), 250);
}

/// The bug: each request that was rejected at a slow tick, or reserved a sixteenth of the room and
/// had ended when the tick came, caused a tick of its own.
#[test]
fn requests_that_come_and_go_cause_no_more_ticks_than_twice_those_of_a_busy_service() {
    let settings = Settings { publish_interval: None, ..Settings::default() };
    // It fits, now and then alone, not beside less than a fifth of the allowance, and never.
    for (held, mib) in [(0, 100), (0, 600), (60, 600), (0, 900)] {
        let mut rig = Rig::new(settings, ByteSize::gib(1), ByteSize::mib(10));
        rig.run(100 * MILLI);
        let _held = rig.admission.try_admit(Cost::host(ByteSize::mib(held))).expect("admitted");
        let (mut ticks, micro) = (0, Duration::from_micros(100));
        for _ in 0..10_000 {
            drop(rig.admission.try_admit(Cost::host(ByteSize::mib(mib))));
            if rig.maintenance.next_tick() <= rig.clock.now() {
                let _ = rig.maintenance.tick(rig.clock.now());
                ticks += 1;
            }
            rig.clock.advance(micro);
        }
        assert!((1..=200).contains(&ticks), "{ticks} ticks in a second, {mib} MiB beside {held}");
    }
}

/// The bug: while no limit could be read everything was admitted, whatever the limit had been.
#[test]
fn a_limit_that_cannot_be_read_for_a_moment_admitted_everybody() {
    let settings = Settings { publish_interval: None, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::gib(1), ByteSize::mib(10));
    rig.run(Duration::from_millis(300));
    let before = rig.admission.ledger(Budget::Host).allowance();
    rig.memory.with(|memory| memory.sample.limit = Limit::UNKNOWN);
    rig.run(Duration::from_secs(2));
    assert_eq!(rig.admission.ledger(Budget::Host).allowance(), before);
    assert!(rig.admission.try_admit(Cost::host(ByteSize::gib(2))).is_err());
    rig.memory.with(|memory| memory.sample.limit = Limit::given(ByteSize::mib(512)));
    rig.run(Duration::from_secs(1));
    assert!(rig.admission.ledger(Budget::Host).allowance() < before);
}

/// The bug: publication came between two ticks, so that a quiet service was woken for each.
#[test]
fn a_quiet_service_ticks_four_times_a_second() {
    let settings = Settings::default();
    let mut rig = Rig::new(settings, ByteSize::gib(1), ByteSize::mib(10));
    let mut ticks = 0;
    while rig.clock.now() < Moment::ORIGIN + Duration::from_secs(10) {
        let now = rig.clock.now();
        let _ = rig.maintenance.tick(now);
        ticks += 1;
        // The timer is late.
        rig.clock.advance(rig.maintenance.next_tick() - now + MILLI);
    }
    assert_eq!(ticks, 40);
}

#[test]
fn device_decay_and_publication_come_when_they_are_due() {
    let mut rig = Rig::new(Settings::default(), ByteSize::gib(1), ByteSize::mib(10));
    let due = Moment::ORIGIN + Duration::from_millis(333);
    rig.memory.with(|memory| memory.sample.device_decay_due = Some(due));
    rig.run(Duration::from_secs(10));
    assert_eq!(rig.memory.with(|memory| memory.decayed), 1);
    let at = rig.posted.iter().find(|(_, job)| *job == Job::DecayDevice).expect("posted").0;
    assert_eq!(at, due);
    assert_eq!(rig.memory.with(|memory| memory.published), 10);
}

#[test]
fn without_a_limit_everything_is_admitted_and_with_a_device_limit_the_device_is_booked() {
    let mut rig = Rig::new(Settings::default(), ByteSize::gib(1), ByteSize::ZERO);
    rig.memory.with(|memory| {
        memory.sample.limit = Limit::UNKNOWN;
        memory.sample.physical = ByteSize::gib(500);
        memory.sample.device.limit = Some(ByteSize::gib(10));
        memory.sample.device.committed = ByteSize::gib(4);
        memory.sample.device.idle = ByteSize::gib(2);
    });
    rig.run(Duration::from_millis(600));
    assert_eq!(rig.admission.level(), Level::None);
    let _huge = rig.admission.try_admit(Cost::host(ByteSize::gib(9000))).expect("no limit known");
    // (.80 x 10 GiB - 2 GiB) / 2 = 3 GiB; 1 GiB is held.
    let _held = rig.admission.try_admit(Cost::device(ByteSize::gib(1))).expect("fits");
    assert!(rig.admission.try_admit(Cost::device(ByteSize::mib(2047))).is_ok());
    let error = rig.admission.try_admit(Cost::device(ByteSize::mib(2049))).expect_err("full");
    assert_eq!(error.reason(), RejectReason::Full);
    assert_eq!(rig.triggers(), []);
}

/// The bug: a request that began to wait after a quiet time was looked at up to 250 ms later.
#[test]
fn a_request_that_begins_to_wait_wakes_an_idle_loop() {
    let rig = Rig::new(Settings::default(), ByteSize::mib(256), ByteSize::mib(10));
    let Rig { clock, memory, mut maintenance, admission, .. } = rig;
    let (bell, stop) = (Bell::new(), AtomicBool::new(false));
    thread::scope(|scope| {
        let control = scope.spawn(|| {
            lowtide_admission::run_control(&mut maintenance, &*clock, &bell, &stop);
        });
        assert!(clock.wait_for_waiters(1, PATIENCE), "it waits for its second tick");
        memory.with(|memory| memory.sample.physical = ByteSize::mib(250));
        let cost = Cost::host(ByteSize::mib(1));
        let waiting =
            admission.state().wait(cost, Priority::Normal, 0, Some(Duration::from_secs(1)));
        assert!(waiting.is_some());
        // Ends: the clock stands still, so only the bell makes it tick.
        while admission.level() == Level::None {
            thread::yield_now();
        }
        stop.store(true, Ordering::Release);
        bell.ring();
        control.join().expect("no panic");
    });
    assert_eq!(admission.level(), Level::Critical);
}

/// Background work never waits for a whole device, which would spoil captures of graphs.
#[test]
fn what_the_worker_does_is_background_work() {
    let mut rig = Rig::new(Settings::default(), ByteSize::gib(1), ByteSize::mib(10));
    rig.worker.run(Job::DecayDevice, &*rig.clock);
    assert!(rig.memory.with(|memory| memory.in_background && memory.decayed == 1));
    assert!(!lowtide_core::sync::is_background(), "the mark ends with the job");
}

#[test]
fn the_threads_run_until_they_are_told_to_stop_and_outlive_panics() {
    let rig = Rig::new(Settings::default(), ByteSize::gib(1), ByteSize::mib(10));
    let Rig { clock, memory, mut maintenance, mut worker, .. } = rig;
    memory.with(|memory| memory.panics = true);
    let (bell, stop, state) = (Bell::new(), AtomicBool::new(false), maintenance.state());
    thread::scope(|scope| {
        let control = scope.spawn(|| {
            lowtide_admission::run_control(&mut maintenance, &*clock, &bell, &stop);
        });
        let worker = scope.spawn(|| lowtide_admission::run_worker(&mut worker, &*clock));
        assert!(clock.wait_for_waiters(2, PATIENCE));
        memory.with(|memory| {
            assert_eq!(memory.published, 0);
            memory.panics = false;
        });
        clock.advance(Duration::from_secs(1));
        let real = lowtide_admission::clock::SystemClock::new();
        while memory.with(|memory| memory.published) == 0 {
            assert!(real.now() < Moment::ORIGIN + PATIENCE, "never published");
            thread::yield_now();
        }
        stop.store(true, Ordering::Release);
        bell.ring();
        state.close();
        control.join().expect("no panic");
        worker.join().expect("no panic");
    });
}

#[test]
fn memory_that_no_request_owns_exhausts_the_service_and_its_release_ends_that() {
    const SECOND: Duration = Duration::from_secs(1);
    let mut rig = Rig::new(Settings::default(), ByteSize::mib(256), ByteSize::mib(20));
    rig.run(SECOND);
    let request = |rig: &Rig| rig.admission.try_admit(Cost::host(ByteSize::kib(200))).map(drop);
    request(&rig).expect("fits");
    let state = rig.maintenance.state();
    // Requests are rejected for 4 s, each 100 ms, by a burst that ends.
    let hold =
        |rig: &Rig, mib| rig.memory.with(|memory| memory.sample.physical = ByteSize::mib(mib));
    for (held, seconds) in [(210, 4), (20, 1), (210, 4)] {
        hold(&rig, held);
        for _ in 0..10 * seconds {
            rig.run(100 * MILLI);
            assert_eq!(request(&rig).is_err(), held == 210);
            assert!(!state.is_exhausted(), "{held} MiB for {seconds} s");
        }
    }
    let purges = rig.triggers().len();
    assert!(purges > 0, "a purge has to show that it makes no room");
    for _ in 0..20 {
        rig.run(100 * MILLI);
        let _ = request(&rig);
    }
    assert!(state.is_exhausted());
    let rejected = request(&rig).expect_err("no room");
    assert_eq!(rejected.reason(), RejectReason::Exhausted, "{rejected}");
    assert!(rejected.retry_after() >= Some(30 * SECOND), "{rejected}");
    // Without requests as well, and through any level.
    hold(&rig, 250);
    rig.run(60 * SECOND);
    assert_eq!(rig.admission.level(), Level::Critical);
    let rejected = request(&rig).expect_err("no room");
    assert_eq!(rejected.reason(), RejectReason::Exhausted, "{rejected}");
    hold(&rig, 20);
    rig.run(2 * SECOND);
    assert!(!state.is_exhausted());
    request(&rig).expect("fits");
    let reports = rig.posted.iter().filter(|(_, job)| *job == Job::ReportExhaustion).count();
    assert_eq!(reports, 2, "its beginning and its end");
}

/// Starts a service that a leak of so many of 256 MiB has exhausted.
fn exhausted(policy: ExhaustionPolicy, mib: u64) -> Rig {
    let settings = Settings { exhaustion_policy: policy, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::mib(256), ByteSize::mib(20));
    rig.run(Duration::from_secs(1));
    drop(rig.admission.try_admit(Cost::host(ByteSize::kib(64))).expect("fits"));
    rig.memory.with(|memory| memory.sample.physical = ByteSize::mib(mib));
    for _ in 0..60 {
        rig.run(100 * MILLI);
        let _ = rig.admission.try_admit(Cost::host(ByteSize::kib(64)));
    }
    assert!(rig.maintenance.state().is_exhausted());
    rig
}

/// Moves the leak.
fn leak(rig: &mut Rig, mib: u64) {
    rig.memory.with(|memory| memory.sample.physical = ByteSize::mib(mib));
    rig.run(2000 * MILLI);
}

fn admit(rig: &Rig, kib: u64) -> Result<Permit, Rejected> {
    rig.admission.try_admit(Cost::host(ByteSize::kib(kib)))
}

/// Admits requests of 64 KiB until one is rejected.
fn admit_small(rig: &Rig) -> Vec<Permit> {
    std::iter::repeat_with(|| admit(rig, 64)).map_while(Result::ok).collect()
}

#[test]
fn an_exhausted_service_admits_one_request_at_a_time_below_the_critical_mark() {
    // 93 % are 238 MiB; a reserved byte may need two.
    let mut rig = exhausted(ExhaustionPolicy::SERVE_ONE, 210);
    assert!(rig.maintenance.state().serves_one());
    for (kib, fits) in [(14_300, true), (14_400, false)] {
        assert_eq!(admit(&rig, kib).is_ok(), fits, "{kib} KiB");
    }
    for second in 0..100 {
        let mut one = admit(&rig, 8192).unwrap_or_else(|error| panic!("{second} s: {error}"));
        let other = admit(&rig, 64).map(drop).expect_err("one runs");
        assert!(other.may_wait(), "{other}");
        rig.memory.with(|memory| memory.allocate(8192 * KIB));
        one.grow(ByteSize::mib(5)).expect("it may grow like a request of that size");
        one.grow(ByteSize::mib(16)).expect_err("29 of at most 28 MiB");
        rig.run(500 * MILLI);
        rig.memory.with(|memory| memory.sample.physical = ByteSize::mib(210));
        drop(one);
        rig.run(500 * MILLI);
    }
}

/// The bug: a proxy whose upstream is in its own process was ready and served nothing, since each
/// request needed a second one.
#[test]
fn small_requests_of_an_exhausted_service_run_next_to_each_other() {
    let mut rig = exhausted(ExhaustionPolicy::SERVE_ONE, 210);
    let small = admit_small(&rig);
    assert_eq!(small.len(), 102, "a thirty-second of a ceiling of 204.8 MiB");
    drop(small);
    leak(&mut rig, 237);
    assert_eq!(admit_small(&rig).len(), 8, "half of 1.08 MiB");
    leak(&mut rig, 239);
    for _ in 0..60 {
        rig.run(100 * MILLI);
        admit(&rig, 64).map(drop).expect_err("above the mark");
    }
    let rejected = admit(&rig, 64).map(drop).expect_err("above the mark");
    assert_eq!(rejected.reason(), RejectReason::Exhausted, "{rejected}");
    assert!(!rig.maintenance.state().serves_one() && rig.maintenance.state().is_exhausted());
    leak(&mut rig, 236);
    drop(admit(&rig, 64).expect("below the mark"));
    rig.run(300 * MILLI);
    assert!(rig.maintenance.state().serves_one(), "one was admitted");
    leak(&mut rig, 20);
    drop(admit(&rig, 60_000).expect("fits"));
    rig.run(6000 * MILLI);
    assert!(!rig.maintenance.state().is_exhausted(), "there is room for all");
}

/// The bug: 90 % are critical if memory was above 93 % a moment ago, and stay so down to 85 %.
#[test]
fn a_level_that_stays_critical_rejected_what_an_exhausted_service_could_serve() {
    let rig = exhausted(ExhaustionPolicy::SERVE_ONE, 230);
    assert_eq!(rig.admission.level(), Level::Critical);
    drop(admit(&rig, 64).expect("it fits below the mark"));
    let low = rig.admission.try_admit_with(Cost::host(ByteSize::new(1)), Priority::Low).map(drop);
    assert_eq!(low.expect_err("it is shed").reason(), RejectReason::Pressure);
}

#[test]
fn a_request_that_waits_for_single_ones_is_woken_when_one_ends() {
    let rig = exhausted(ExhaustionPolicy::SERVE_ONE, 210);
    for kib in [8192, 64] {
        let cost = Cost::host(ByteSize::kib(kib));
        let admit = || rig.admission.try_admit(cost).ok();
        let mut run: Vec<_> = std::iter::repeat_with(admit).map_while(|permit| permit).collect();
        assert_eq!(run.len(), if kib == 64 { 102 } else { 1 });
        let second = Some(Duration::from_secs(1));
        let (state, normal) = (rig.admission.state(), Priority::Normal);
        let waiting = state.wait(cost, normal, 0, second).expect("it may wait");
        let try_admit = |waiting| state.try_admit_uncounted(Some(waiting), cost, normal, None);
        let cx = Context::from_waker(Waker::noop());
        assert_eq!(waiting.poll_turn(&cx), Poll::Ready(true), "its first attempt");
        try_admit(&waiting).map(drop).expect_err("others run");
        assert_eq!(waiting.poll_turn(&cx), Poll::Pending);
        drop(run.pop());
        assert_eq!(waiting.poll_turn(&cx), Poll::Ready(true));
        drop(try_admit(&waiting).expect("it fits"));
    }
}

#[test]
fn a_loop_that_ends_leaves_no_rule_for_single_requests() {
    let mut rig = exhausted(ExhaustionPolicy::SERVE_ONE, 230);
    rig.maintenance.leave();
    let ledger = rig.admission.ledger(Budget::Host);
    assert_eq!(ledger.request_room(), ledger.allowance());
}

/// A claim is limited to two thirds of the room, and the room of an exhausted service is zero.
#[test]
fn a_claim_of_an_exhausted_service_that_serves_is_not_limited_to_the_room_left() {
    let room = |policy| exhausted(policy, 230).admission.ledger(Budget::Host).request_room();
    assert_eq!(room(ExhaustionPolicy::Report), ByteSize::ZERO);
    assert!(room(ExhaustionPolicy::SERVE_ONE) > ByteSize::mib(200));
}

#[test]
fn other_policies_admit_nothing_while_memory_is_exhausted() {
    for policy in [ExhaustionPolicy::Report, ExhaustionPolicy::EXIT] {
        let mut rig = exhausted(policy, 230);
        for _ in 0..100 {
            let rejected = rig.admission.try_admit(Cost::host(ByteSize::new(1))).map(drop);
            let rejected = rejected.expect_err("no room");
            assert_eq!(rejected.reason(), RejectReason::Exhausted, "{rejected}");
            rig.run(Duration::from_secs(1));
        }
        let needs_restart = matches!(policy, ExhaustionPolicy::Exit { .. });
        assert_eq!(rig.maintenance.state().needs_restart(), needs_restart, "{policy:?}");
        let reports = rig.posted.iter().filter(|(_, job)| *job == Job::ReportExhaustion).count();
        assert_eq!(reports, 1 + usize::from(needs_restart), "{policy:?}");
    }
}

#[test]
fn requests_that_hold_all_memory_do_not_exhaust_the_service() {
    let mut rig = Rig::new(Settings::default(), ByteSize::mib(256), ByteSize::mib(20));
    rig.run(Duration::from_secs(1));
    // Four times what they said, for a minute.
    let large = rig.admission.try_admit(Cost::host(ByteSize::mib(46))).expect("fits");
    rig.memory.with(|memory| memory.allocate(184 * MIB));
    for _ in 0..600 {
        rig.run(100 * MILLI);
        let small = rig.admission.try_admit(Cost::host(ByteSize::kib(200)));
        assert!(small.is_err_and(|rejected| rejected.reason() != RejectReason::Exhausted));
    }
    assert!(!rig.maintenance.state().is_exhausted());
    drop(large);
}

/// A service of 20 MiB under a limit of 256 MiB, whose estimates are right.
fn right() -> Rig {
    let settings = Settings { correction_factor: 1.0, ..Settings::default() };
    Rig::new(settings, ByteSize::mib(256), ByteSize::mib(20))
}

/// The saturation after a minute.
fn saturation(rig: &mut Rig) -> f64 {
    rig.run(Duration::from_secs(60));
    let saturation = rig.maintenance.state().saturation();
    assert!((0.0..=1.0).contains(&saturation), "{saturation}");
    saturation
}

#[test]
fn an_idle_service_is_less_saturated_than_a_busy_one_and_that_less_than_one_that_is_full() {
    let mut rig = right();
    let idle = saturation(&mut rig);
    assert!(idle < 0.05, "{idle}");
    let hold = |rig: &Rig, mib| {
        rig.memory.with(|memory| memory.allocate(mib * MIB));
        rig.admission.try_admit(Cost::host(ByteSize::mib(mib))).expect("fits")
    };
    let mut held = vec![hold(&rig, 60)];
    let busy = saturation(&mut rig);
    assert!((0.3..0.4).contains(&busy), "{busy}");
    held.extend([hold(&rig, 50), hold(&rig, 40)]);
    let fuller = saturation(&mut rig);
    held.push(hold(&rig, 20));
    let full = saturation(&mut rig);
    assert!(busy < fuller && fuller < full && full > 0.99, "{busy}, {fuller}, {full}");
    // A small request would fit, and a large one waits.
    held.pop();
    rig.memory.with(|memory| memory.free(20 * MIB));
    let emptier = saturation(&mut rig);
    assert!(emptier < full - 0.005, "{emptier}");
    let (cost, hour) = (Cost::host(ByteSize::mib(100)), Duration::from_secs(3600));
    let waiting =
        rig.admission.state().wait(cost, Priority::Normal, 0, Some(hour)).expect("may wait");
    let waits = saturation(&mut rig);
    assert!(waits > emptier && waits > 0.99, "{emptier}, then {waits}");
    drop((waiting, held));
    rig.memory.with(|memory| memory.free(150 * MIB));
    let again = saturation(&mut rig);
    assert!(again < 0.1, "{again}");
}

#[test]
fn rejections_of_a_request_that_is_larger_than_the_room_left_saturate_a_service() {
    let mut rig = right();
    rig.run(Duration::from_secs(1));
    rig.memory.with(|memory| memory.allocate(100 * MIB));
    let held = rig.admission.try_admit(Cost::host(ByteSize::mib(100))).expect("fits");
    let rejected = |rig: &mut Rig, mib| {
        for _ in 0..120 {
            rig.run(Duration::from_millis(900));
            drop(rig.admission.try_admit(Cost::host(ByteSize::mib(mib))));
        }
        rig.maintenance.state().saturation()
    };
    let too_large = rejected(&mut rig, 250);
    assert!(too_large < 0.8, "no other instance would admit it: {too_large}");
    let full = rejected(&mut rig, 100);
    assert!(full > 0.95, "{full}");
    drop(held);
}

#[test]
fn a_leak_saturates_a_service_more_and_more_without_any_request() {
    for correction_factor in [1.0, 2.0, 5.0] {
        let settings = Settings { correction_factor, ..Settings::default() };
        let mut rig = Rig::new(settings, ByteSize::mib(256), ByteSize::mib(20));
        let mut last = 0.0;
        for mib in 20..220 {
            rig.memory.with(|memory| memory.sample.physical = ByteSize::mib(mib));
            rig.run(Duration::from_secs(3));
            let found = rig.maintenance.state().saturation();
            assert!(found > last && found <= 1.0, "{last}, then {found} at {mib} MiB");
            last = found;
        }
        assert!(last > 0.95, "{last}");
    }
}

#[test]
fn memory_that_would_go_is_no_load() {
    let mut rig = right();
    let idle = saturation(&mut rig);
    // Pages that a purge would release.
    rig.memory.with(|memory| {
        memory.purge_works = false;
        memory.allocate(150 * MIB);
        memory.free(150 * MIB);
    });
    let unpurged = saturation(&mut rig);
    assert!((unpurged - idle).abs() < 0.005, "{idle}, then {unpurged}");
    // A model that no request uses.
    let managed = Managed::builder("model", || Ok(()))
        .cost(Cost::host(ByteSize::mib(150)))
        .build(rig.clock.clone(), Some(rig.admission.clone()));
    assert_eq!(rig.resources.add(&managed), Ok(()));
    let guard = managed.acquire_blocking().expect("fits");
    rig.memory.with(|memory| memory.allocate(150 * MIB));
    let used = saturation(&mut rig);
    assert!(used > idle + 0.1, "{idle}, then {used}");
    drop(guard);
    let unused = saturation(&mut rig);
    assert!(managed.stats().loaded && (unused - idle).abs() < 0.005, "{idle}, then {unused}");
}

#[test]
fn a_lost_device_and_a_critical_level_saturate_a_service_and_no_limit_does_not() {
    let with = |change: fn(&mut Sample)| {
        let mut rig = right();
        rig.memory.with(|memory| change(&mut memory.sample));
        saturation(&mut rig)
    };
    assert!(with(|sample| sample.device.limit = Some(ByteSize::ZERO)) > 0.99);
    let critical = |sample: &mut Sample| {
        sample.physical = ByteSize::mib(250);
        sample.purgeable = ByteSize::mib(240);
    };
    let mut rig = right();
    rig.memory.with(|memory| {
        memory.purge_works = false;
        critical(&mut memory.sample);
    });
    assert!(saturation(&mut rig) > 0.99);
    let unlimited = with(|sample| {
        sample.limit = Limit::UNKNOWN;
        sample.physical = ByteSize::gib(500);
    });
    assert!(unlimited < 1e-9, "{unlimited}");
}

/// A pod that ends would call for a new one.
#[test]
fn a_service_that_shuts_down_is_not_saturated_by_what_it_rejects() {
    let mut rig = right();
    rig.admission.close();
    for _ in 0..600 {
        rig.run(100 * MILLI);
        assert!(rig.admission.try_admit(Cost::host(ByteSize::mib(1))).is_err());
    }
    let saturation = saturation(&mut rig);
    assert!(saturation < 0.05, "{saturation}");
}

fn fit(mib: u64) -> Limit {
    Limit { bytes: ByteSize::mib(mib), source: LimitSource::Fit }
}

#[test]
fn a_busy_service_tends_a_fit_at_most_ten_times_a_second_until_its_end() {
    let mut rig = Rig::new(Settings::default(), ByteSize::mib(256), ByteSize::mib(20));
    rig.run(1000 * MILLI);
    let tends = |rig: &Rig| rig.posted.iter().filter(|(_, job)| *job == Job::TendFit).count();
    assert_eq!(tends(&rig), 0);
    // Busy, so that it ticks often.
    let permit = rig.admission.try_admit(Cost::host(ByteSize::mib(1))).expect("fits");
    // Bug: one that the limit did not come from was not looked at, such as one below which the
    // limit had been lowered before the first tick.
    for limit in [fit(100), Limit::given(ByteSize::mib(100))] {
        rig.memory.with(|memory| (memory.sample.limit, memory.sample.has_fit) = (limit, true));
        let before = tends(&rig);
        rig.run(1000 * MILLI);
        let found = tends(&rig) - before;
        assert!((5..=11).contains(&found), "{limit:?}: {found}");
    }
    rig.memory.with(|memory| memory.sample.has_fit = false);
    let before = tends(&rig);
    rig.run(1000 * MILLI);
    assert_eq!(tends(&rig), before);
    drop(permit);
}

/// A limit that was known still exists if it cannot be read; a fit does not.
#[test]
fn a_fit_that_has_ended_leaves_no_limit_where_none_was_known() {
    let mut rig = Rig::new(Settings::default(), ByteSize::MAX, ByteSize::mib(20));
    let ceiling = |rig: &Rig| rig.admission.ledger(Budget::Host).ceiling();
    for (limit, expected) in [
        (Limit::UNKNOWN, ByteSize::MAX),
        (fit(100), ByteSize::mib(80)),
        (Limit::UNKNOWN, ByteSize::MAX),
        (Limit::given(ByteSize::mib(200)), ByteSize::mib(160)),
        (Limit::UNKNOWN, ByteSize::mib(160)),
    ] {
        rig.memory.with(|memory| memory.sample.limit = limit);
        rig.run(1000 * MILLI);
        assert_eq!(ceiling(&rig), expected, "{limit:?}");
    }
}

/// A restart would undo what an operator asked for.
#[test]
fn a_fit_without_room_for_requests_asks_for_no_restart() {
    let policy = ExhaustionPolicy::Exit { min_uptime: Duration::ZERO };
    let settings = Settings { exhaustion_policy: policy, ..Settings::default() };
    let mut rig = Rig::new(settings, ByteSize::mib(256), ByteSize::mib(20));
    rig.run(1000 * MILLI);
    drop(rig.admission.try_admit(Cost::host(ByteSize::kib(64))).expect("fits"));
    rig.memory.with(|memory| {
        memory.sample.physical = ByteSize::mib(150);
        memory.sample.limit = fit(100);
    });
    for _ in 0..100 {
        rig.run(100 * MILLI);
        assert!(admit(&rig, 64).is_err(), "no room");
    }
    let state = rig.maintenance.state();
    assert!(!state.is_exhausted() && !state.needs_restart());
    // The kernel's limit is another matter.
    rig.memory.with(|memory| memory.sample.limit = Limit::given(ByteSize::mib(100)));
    for _ in 0..100 {
        rig.run(100 * MILLI);
        assert!(admit(&rig, 64).is_err(), "no room");
    }
    assert!(state.is_exhausted() && state.needs_restart());
}

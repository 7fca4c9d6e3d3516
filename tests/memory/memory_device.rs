//! The device as a whole under a `Memory`, in virtual time over a simulated device: neighbours take
//! its memory, idle memory of ours makes room, and the figures say who holds what.
#![cfg(all(feature = "device", feature = "prometheus", target_os = "linux"))]
#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use lowtide::clock::{Clock, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::decay::DecayTime;
use lowtide::device::driver::Driver as _;
use lowtide::device::{DeviceArena, Lane, PinnedConfig, Region, SleepOptions};
use lowtide::memory::{Builder, DeviceSnapshot};
use lowtide::metrics::MetricsTier;
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Budget, Cost, Level};
use lowtide_cuda_sim::{Call, DriverCosts, Order, SimDriver, SimError, SimOptions};
use test_fork::test;

use crate::recorder;
use crate::support::{Tree, advance_until, until};

const SOON: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(250);
const SECOND: Duration = Duration::from_secs(1);
const MIB: usize = 1 << 20;
const DYNAMIC: Region = Region::Dynamic;

/// 1000 MiB, of which the context takes 100; short below 100, until 150.
struct Bed {
    sim: Arc<SimDriver>,
    clock: Arc<ManualClock>,
    tree: Tree,
}

impl Bed {
    fn new() -> Self {
        Self::of(SimOptions::default())
    }

    fn of(options: SimOptions) -> Self {
        let sim = Arc::new(SimDriver::new(SimOptions {
            costs: DriverCosts::zero(),
            order: Order::Synchronous,
            capacity: ByteSize::mib(1000),
            context_overhead: ByteSize::mib(100),
            ..options
        }));
        let clock = Arc::new(sim.clock());
        Self { sim, clock, tree: Tree::new(ByteSize::gib(4)) }
    }

    /// A lane of a stream of its own.
    fn lane(&self, arena: &DeviceArena) -> Lane {
        let stream = self.sim.stream_create().expect("a stream");
        // SAFETY: the simulation looks whether a stream is there.
        unsafe { arena.lane(stream) }.expect("a lane")
    }

    fn builder(&self) -> Builder {
        Memory::builder()
            .clock(Arc::clone(&self.clock) as Arc<dyn Clock>)
            .signals(self.tree.open())
            .driver(self.sim.clone())
            .device_watermark(0.1)
            .device_decay(DecayTime::Never)
            .metrics(MetricsTier::Detail)
    }

    /// Lets the worker look at the device once more, and once again: what the first look found is
    /// booked before the second.
    fn look(&self) {
        self.looks(2);
    }

    fn looks(&self, count: u64) {
        let before = self.sim.calls(Call::GetInfo);
        let looked = || self.sim.calls(Call::GetInfo) >= before + count;
        advance_until(&self.clock, TICK, "the device is looked at", looked);
    }
}

fn device(memory: &Memory) -> DeviceSnapshot {
    memory.snapshot().devices.memory.expect("the device says what it has")
}

/// A neighbour that takes memory makes idle memory go, and no live memory.
#[test]
fn idle_memory_makes_room_for_a_neighbour_and_live_memory_stays() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let (one, two) =
        (memory.devices().open_arena("one").expect("opens"), memory.devices().open_arena("two"));
    let two = two.expect("opens");
    let lanes = [&one, &two].map(|arena| bed.lane(arena));
    let live = one.alloc::<u8>(100 * MIB, Region::Stable).expect("room");
    drop(lanes[0].alloc::<u8>(200 * MIB, DYNAMIC).expect("room"));
    drop(lanes[1].alloc::<u8>(50 * MIB, DYNAMIC).expect("room"));
    bed.look();
    assert!(!device(&memory).is_short);
    let committed = || [&one, &two].map(|arena| arena.glance().committed);
    assert_eq!(committed(), [ByteSize::mib(300), ByteSize::mib(50)]);

    // 1000 - 100 - 350 - 490 = 60 are free, and 90 go, in handles of 4 MiB.
    bed.sim.set_neighbours(ByteSize::mib(490));
    advance_until(&bed.clock, TICK, "idle memory goes back", || {
        memory.snapshot().devices.memory.is_some_and(|device| device.watermark_released_total > 0)
    });
    let short = device(&memory);
    assert!(
        short.is_short && short.watermark_released_total == ByteSize::mib(92).get(),
        "{short:?}"
    );
    assert_eq!(committed(), [ByteSize::mib(208), ByteSize::mib(50)], "from where there is most");
    assert_eq!(one.glance().live, ByteSize::mib(100));

    // It takes all: what is idle goes, and no more is wanted of us.
    bed.sim.set_neighbours(ByteSize::mib(790));
    let all_idle = ByteSize::mib(250).get();
    advance_until(&bed.clock, TICK, "all idle memory is gone", || {
        memory.snapshot().devices.memory.is_some_and(|it| it.watermark_released_total == all_idle)
    });
    assert_eq!(committed(), [ByteSize::mib(100), ByteSize::ZERO]);
    bed.look();
    assert_eq!(committed(), [ByteSize::mib(100), ByteSize::ZERO], "live memory stays");

    // It leaves: what goes idle then stays for its decay time again.
    bed.sim.set_neighbours(ByteSize::ZERO);
    advance_until(&bed.clock, TICK, "there is room", || !device(&memory).is_short);
    drop(lanes[0].alloc::<u8>(200 * MIB, DYNAMIC).expect("room"));
    for _ in 0..5 {
        bed.look();
    }
    assert_eq!(committed(), [ByteSize::mib(300), ByteSize::ZERO]);
    assert_eq!(device(&memory).watermark_released_total, all_idle);
    drop((live, lanes));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// A pinned pool is host memory: it takes nothing of the device's budget, and relieves the host.
#[test]
fn the_idle_memory_of_a_pinned_pool_is_purgeable_memory_of_the_host_and_none_of_the_device() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let pool = memory.devices().open_pinned_pool(PinnedConfig::new("staging")).expect("opens");
    drop(pool.alloc::<u8>(48 * MIB).expect("room"));
    assert_eq!(pool.glance().idle, ByteSize::mib(48), "below the high watermark");
    advance_until(&bed.clock, TICK, "idle memory counts as purgeable", || {
        memory.snapshot().purgeable >= ByteSize::mib(48)
    });
    bed.look();
    let unmanaged = device(&memory).unmanaged;
    assert_eq!(unmanaged, Some(ByteSize::ZERO), "the device has none of it");
    // A shortage of the device leaves it, and a purge of the host takes it.
    bed.sim.set_neighbours(ByteSize::mib(850));
    advance_until(&bed.clock, TICK, "the device is short", || device(&memory).is_short);
    bed.look();
    assert_eq!(pool.glance().idle, ByteSize::mib(48));
    assert!(memory.heap().purge().expect("purged").released() >= ByteSize::mib(48));
    assert_eq!(pool.glance().committed, ByteSize::ZERO);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn bursts_beside_a_neighbour_that_stays_are_one_shortage_and_looked_at_once_a_second() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("bursts").expect("opens");
    bed.sim.set_neighbours(ByteSize::mib(650));
    drop(arena.alloc::<u8>(200 * MIB, DYNAMIC).expect("room"));
    // Until it was looked at once, nothing is known.
    let is_short = || memory.snapshot().devices.memory.is_some_and(|device| device.is_short);
    advance_until(&bed.clock, TICK, "the device is short", is_short);
    let (from, calls) = (bed.clock.now(), bed.sim.calls(Call::GetInfo));
    for _ in 0..20 {
        drop(arena.alloc::<u8>(200 * MIB, DYNAMIC).expect("room"));
        bed.look();
        assert!(device(&memory).is_short);
    }
    let (seconds, looks) = (bed.clock.now() - from, bed.sim.calls(Call::GetInfo) - calls);
    // One more at each end; another was due before and may have come late.
    assert!(u128::from(looks) <= seconds.as_millis() / 1000 + 2, "{looks} in {seconds:?}");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn without_a_watermark_neighbours_take_nothing() {
    let bed = Bed::new();
    let memory = bed.builder().device_watermark(0.0).start().expect("starts");
    let arena = memory.devices().open_arena("kept").expect("opens");
    drop(arena.alloc::<u8>(200 * MIB, DYNAMIC).expect("room"));
    bed.sim.set_neighbours(ByteSize::mib(700));
    for _ in 0..3 {
        bed.look();
    }
    let found = device(&memory);
    assert!(
        !found.is_short && found.watermark_released_total == 0 && found.free.is_zero(),
        "{found:?}"
    );
    assert_eq!(arena.glance().committed, ByteSize::mib(200));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn the_figures_say_what_the_context_takes_and_what_is_not_ours() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("ours").expect("opens");
    let buffer = arena.alloc::<u8>(64 * MIB, DYNAMIC).expect("room");
    // Another process, and what others in this one allocate beside the arenas.
    bed.sim.set_neighbours(ByteSize::mib(30));
    let beside = bed.sim.raw().alloc(20 << 20).expect("room");
    bed.look();
    let found = device(&memory);
    assert_eq!(
        (found.total, found.context_overhead),
        (ByteSize::mib(1000), Some(ByteSize::mib(100)))
    );
    assert_eq!((found.free, found.unmanaged), (ByteSize::mib(786), Some(ByteSize::mib(50))));
    bed.sim.raw().free(beside).expect("freed");
    bed.sim.set_neighbours(ByteSize::ZERO);
    bed.look();
    assert_eq!(device(&memory).unmanaged, Some(ByteSize::ZERO));
    drop(buffer);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn the_device_is_asked_by_the_worker_and_no_more_once_its_context_is_lost() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("ours").expect("opens");
    let buffer = arena.alloc::<u8>(MIB, DYNAMIC).expect("room");
    let names = Arc::new(Mutex::new(Vec::new()));
    for nth in 0..3 {
        let names = Arc::clone(&names);
        bed.sim.before(Call::GetInfo, nth, move || {
            let name = thread::current().name().map(str::to_owned);
            names.lock().expect("no panic").push(name);
        });
    }
    for _ in 0..4 {
        bed.look();
    }
    let names = names.lock().expect("no panic").clone();
    assert_eq!(names, vec![Some("lowtide-worker".to_owned()); 3]);

    bed.sim.fail_always(Call::GetInfo, Some(SimError::Unknown));
    advance_until(&bed.clock, TICK, "nothing is known", || {
        memory.snapshot().devices.memory.is_none()
    });
    bed.look();
    bed.sim.forget_failures();
    advance_until(&bed.clock, TICK, "it answers again", || {
        memory.snapshot().devices.memory.is_some()
    });
    let diagnostics = || {
        let of_device = |one: &&lowtide::memory::Diagnostic| {
            one.text.contains("cannot query the device's memory")
        };
        memory.report().diagnostics().iter().filter(of_device).count()
    };
    assert_eq!(diagnostics(), 1);

    bed.sim.lose_context();
    bed.looks(1);
    until("it is known to be lost", || memory.snapshot().devices.memory.is_none());
    let asked = bed.sim.calls(Call::GetInfo);
    for _ in 0..40 {
        bed.clock.advance(TICK);
    }
    assert!(memory.shutdown_blocking(SOON).is_clean() || arena.glance().live > ByteSize::ZERO);
    assert_eq!((bed.sim.calls(Call::GetInfo), diagnostics()), (asked, 1));
    drop(buffer);
}

#[test]
fn where_arenas_lie_in_host_memory_there_is_no_device_to_look_at() {
    let bed = Bed::new();
    let clock = Arc::clone(&bed.clock) as Arc<dyn Clock>;
    let builder = Memory::builder().clock(clock).signals(bed.tree.open());
    let memory = builder.device(DeviceChoice::Host).start().expect("starts");
    for _ in 0..8 {
        bed.clock.advance(SECOND);
    }
    assert_eq!(memory.snapshot().devices.memory, None);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The device's series, which `memory_metrics` cannot see on the host.
#[test]
fn the_devices_figures_are_published_and_are_no_numbers_once_nothing_is_known() {
    let recorder = recorder::builder().install_recorder();
    let recorder = recorder.expect("the only one of this process");
    let value = |name: &str| {
        let text = recorder.render();
        let line =
            text.lines().find_map(|line| line.strip_prefix(&format!("{name}{{device=\"0\"}} ")));
        line.and_then(|value| value.parse::<f64>().ok())
    };
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("ours").expect("opens");
    let exported = arena.alloc::<u8>(8 * MIB, DYNAMIC).expect("room").export().expect("awake");
    bed.sim.set_neighbours(ByteSize::mib(30));
    let unmanaged = ByteSize::mib(30).as_f64();
    let differs = |name: &str, from: f64| value(name).is_none_or(|it| (it - from).abs() > 0.5);
    advance_until(&bed.clock, TICK, "published", || {
        !differs("lowtide_device_unmanaged_bytes", unmanaged)
    });
    for (name, expected) in [
        ("lowtide_device_total_bytes", ByteSize::mib(1000).as_f64()),
        ("lowtide_device_free_bytes", ByteSize::mib(862).as_f64()),
        ("lowtide_device_context_overhead_bytes", ByteSize::mib(100).as_f64()),
        ("lowtide_device_watermark_released_bytes_total", 0.0),
        ("lowtide_device_rollback_failures_total", 0.0),
    ] {
        assert!(!differs(name, expected), "{name}: {:?}", value(name));
    }
    let text = recorder.render();
    let exported_bytes = "lowtide_device_exported_bytes{device=\"0\",arena=\"ours\"} 8388608";
    assert!(text.contains(exported_bytes), "{text}");
    drop(exported);
    bed.sim.lose_context();
    advance_until(&bed.clock, TICK, "no number", || {
        value("lowtide_device_unmanaged_bytes").is_some_and(f64::is_nan)
    });
    let _ = memory.shutdown_blocking(SOON);
}

/// A `Memory` over an integrated GPU, in a cgroup of 1000 MiB that is charged with 10.
fn integrated() -> (Bed, Memory) {
    let bed = Bed::of(SimOptions { unified: true, ..SimOptions::default() });
    bed.tree.limit(ByteSize::mib(1000));
    let memory = bed.builder().start().expect("starts");
    assert!(memory.snapshot().unified);
    (bed, memory)
}

/// The bug: the same memory was given away by the host's ledger and by the device's.
#[test]
fn host_and_device_reservations_of_an_integrated_gpu_share_one_limit() {
    let (_bed, memory) = integrated();
    let arena = memory.devices().open_arena("weights").expect("opens");
    let load = |arena: &DeviceArena| Ok(arena.alloc::<u8>(90 * MIB, Region::Stable)?);
    let cost = Cost::host(ByteSize::mib(10)).and_device(ByteSize::mib(90));
    let model = memory.managed_in(&arena, "model", load).cost(cost).register();
    let model = model.expect("registered");
    assert_eq!(model.stats().cost, Cost::host(ByteSize::mib(100)));
    let held = model.acquire_blocking().expect("fits");
    let ledger = |budget| memory.admission().ledger(budget);
    assert!(
        ledger(Budget::Host).resource_reservations() >= ByteSize::mib(100),
        "all of it, on the host"
    );
    let ceiling = ledger(Budget::Host).ceiling();
    assert_eq!(ceiling, ByteSize::mib(800));
    for seed in 1_u64..=20 {
        println!("seed {seed}");
        let (mut chance, mut permits) = (seed, Vec::new());
        for _ in 0..400 {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let size = ByteSize::mib(1 + (chance >> 33) % 48);
            let cost = match (chance >> 60) % 3 {
                0 => Cost::host(size),
                1 => Cost::device(size),
                _ => Cost::host(size).and_device(size),
            };
            permits.extend(memory.admission().try_admit(cost).ok());
        }
        let requests: ByteSize = permits.iter().map(|permit| permit.cost().host).sum();
        let sum = requests.saturating_add(ledger(Budget::Host).resource_reservations());
        assert!(permits.len() > 2 && sum <= ceiling, "{} permits, {sum}", permits.len());
        assert!(permits.iter().all(|permit| permit.cost().device.is_zero()));
        assert_eq!(ledger(Budget::Device).reserved(), ByteSize::ZERO);
    }
    let too_large = memory.managed("large", || Ok(())).cost(Cost::device(ByteSize::gib(27)));
    let refused = too_large.register().map(drop).expect_err("27 GiB in a machine of 32");
    assert!(refused.to_string().contains("of host memory"), "{refused}");
    drop(held);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The kernel counts such memory nowhere; we count it once.
#[test]
fn what_an_integrated_gpu_commits_counts_once_against_the_hosts_limit() {
    let (bed, memory) = integrated();
    let physical = || memory.snapshot().physical;
    let arena = memory.devices().open_arena("weights").expect("opens");
    assert_eq!(physical(), ByteSize::mib(10));
    let lane = bed.lane(&arena);
    let live = arena.alloc::<u8>(100 * MIB, Region::Stable).expect("room");
    drop(lane.alloc::<u8>(200 * MIB, DYNAMIC).expect("room"));
    let snapshot = memory.snapshot();
    assert_eq!(snapshot.physical, ByteSize::mib(310));
    assert_eq!((snapshot.devices.memory, snapshot.device.reserved), (None, ByteSize::ZERO));
    // Idle memory of the arena relieves the host: it is purgeable, and goes at level elevated.
    advance_until(&bed.clock, TICK, "it is sampled", || {
        memory.snapshot().purgeable >= ByteSize::mib(200)
    });
    bed.tree.hold(480);
    advance_until(&bed.clock, TICK, "idle memory goes", || arena.glance().idle.is_zero());
    advance_until(&bed.clock, TICK, "580 of 1000 MiB", || memory.level() == Level::None);
    assert_eq!(physical(), ByteSize::mib(580));
    bed.tree.hold(850);
    advance_until(&bed.clock, TICK, "950 of 1000 MiB", || memory.level() == Level::Critical);
    bed.tree.hold(10);
    // Contents that are kept stay where they are: a copy in host memory would relieve nothing.
    arena.sleep(SleepOptions::default()).expect("asleep");
    assert_eq!(arena.snapshot().offloaded, ByteSize::ZERO);
    assert_eq!(physical(), ByteSize::mib(110));
    drop((live, lane, arena));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

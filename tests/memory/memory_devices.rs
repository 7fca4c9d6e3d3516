//! Several devices in one `Memory`, over simulated devices: each has a budget, arenas, decay, sleep
//! and figures of its own, and a lost one leaves the others alone.
#![cfg(all(feature = "device", feature = "prometheus", target_os = "linux"))]

use std::sync::Arc;
use std::time::Duration;

use lowtide::clock::{Clock, ManualClock};
use lowtide::config::arena::ArenaOptions;
use lowtide::decay::DecayTime;
use lowtide::device::driver::{DeviceUuid, Driver};
use lowtide::device::{DeviceError, PinnedConfig, Region};
use lowtide::memory::{Builder, DeviceSelector, MemoryError, Slot, StartError};
use lowtide::metrics::MetricsTier;
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Cost, Rejected};
use lowtide_cuda_sim::{DriverCosts, SimDriver, SimError, SimOptions};
use test_fork::test;

use crate::support::{Tree, advance_until};
use crate::{device_schedules, recorder};

/// The seeds that a test runs; `benches/gpu` runs 10,000.
const SEEDS: u64 = 40;
const SOON: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(250);
const MIB: usize = 1 << 20;
const DYNAMIC: Region = Region::Dynamic;

#[test]
fn a_device_that_is_lost_at_a_random_point_changes_nothing_for_the_others() {
    for devices in [2, 8] {
        let mut lost = 0;
        for seed in 0..SEEDS {
            let (faults, is_lost) = device_schedules::faults(seed, devices);
            assert!(faults.is_empty(), "{faults:#?}");
            lost += u64::from(is_lost);
        }
        assert!(lost > SEEDS / 2, "{lost} of {SEEDS} schedules lost one of {devices} devices");
    }
}

/// Devices of 1000 MiB with ordinals 4, 5, and so on.
struct Bed {
    sims: Vec<Arc<SimDriver>>,
    clock: Arc<ManualClock>,
    tree: Tree,
}

fn uuid(nth: u8) -> DeviceUuid {
    DeviceUuid::new([nth + 1; 16])
}

impl Bed {
    fn new(devices: u8) -> Self {
        let clock = ManualClock::new();
        let sim = |nth: u8| {
            Arc::new(SimDriver::new(SimOptions {
                address_base: (1 + 64 * u64::from(nth)) << 36,
                address_space: ByteSize::gib(1024),
                capacity: ByteSize::mib(1000),
                context_overhead: ByteSize::mib(100),
                ordinal: Some(4 + u32::from(nth)),
                uuid: Some(uuid(nth)),
                costs: DriverCosts::zero(),
                clock: clock.clone(),
                ..SimOptions::default()
            }))
        };
        let sims = (0..devices).map(sim).collect();
        Self { sims, clock: Arc::new(clock), tree: Tree::new(ByteSize::gib(4)) }
    }

    fn builder(&self) -> Builder {
        let drivers = self.sims.iter().map(|sim| Arc::clone(sim) as Arc<dyn Driver>);
        Memory::builder()
            .clock(Arc::clone(&self.clock) as Arc<dyn Clock>)
            .signals(self.tree.open())
            .drivers(drivers)
            .device_decay(DecayTime::from_millis(2_000))
            .metrics(MetricsTier::Detail)
    }
}

#[test]
fn a_device_is_chosen_by_number_ordinal_uuid_or_headroom_and_the_first_by_default() {
    let bed = Bed::new(3);
    let memory = bed.builder().start().expect("starts");
    let number = |selector| memory.devices().on(selector).status().map(|device| device.number);
    assert_eq!(number(DeviceSelector::Default), Ok(0));
    assert_eq!(number(DeviceSelector::Number(2)), Ok(2));
    assert_eq!(number(DeviceSelector::Ordinal(5)), Ok(1));
    assert_eq!(number(DeviceSelector::Uuid(uuid(2))), Ok(2));
    let uuids = [0, 1, 2].map(|nth| format!("cuda:{}", uuid(nth))).join(" or ");
    for (selector, name, known) in [
        (DeviceSelector::Number(3), "number 3".to_owned(), "number 0 or number 1 or number 2"),
        (DeviceSelector::Ordinal(0), "cuda:0".to_owned(), "cuda:4 or cuda:5 or cuda:6"),
        (DeviceSelector::Uuid(uuid(3)), format!("cuda:{}", uuid(3)), &uuids),
    ] {
        let error = memory.devices().on(selector).status().expect_err("unknown").to_string();
        assert_eq!(error, format!("unknown device {name}: expected {known}"));
        let opened = memory.devices().on(selector).open_arena("none").expect_err("unknown");
        assert_eq!(opened.to_string(), format!("cannot open arena \"none\": {error}"));
    }
    // Equal ones share the arenas, and a neighbour makes a device the last choice.
    let open = |name: &str| {
        memory.devices().on(DeviceSelector::MostHeadroom).open_arena(name).expect("opens")
    };
    bed.sims[1].set_neighbours(ByteSize::mib(500));
    let arenas = ["a", "b", "c", "d"].map(open);
    let snapshot = memory.snapshot().devices;
    assert_eq!(snapshot.arena_devices, vec![0, 2, 0, 2]);
    drop(arenas[0].alloc::<u8>(600 * MIB, DYNAMIC).expect("room"));
    drop(arenas[1].alloc::<u8>(600 * MIB, DYNAMIC).expect("room"));
    assert_eq!(number(DeviceSelector::MostHeadroom), Ok(1));
    // The default is the first, also where no device is named.
    drop((memory.devices().open_arena("default").expect("opens"), arenas));
    assert_eq!(memory.snapshot().devices.arena_devices.last(), Some(&0));
    let slot = Slot::device("CudaEp", 1);
    memory
        .devices()
        .share_arena(&slot, &ArenaOptions::default())
        .expect("a slot of the second device");
    assert_eq!(memory.snapshot().devices.arena_devices.last(), Some(&1));
    let refused =
        memory.devices().share_arena(&Slot::device("CudaEp", 3), &ArenaOptions::default());
    let error = refused.expect_err("there is no fourth");
    assert!(
        matches!(&error, MemoryError::UnknownDevice { known, .. } if known.len() == 3),
        "{error:?}"
    );
    assert!(error.to_string().ends_with("expected gpu:0 or gpu:1 or gpu:2"), "{error}");
    let pool =
        memory.devices().on(DeviceSelector::Ordinal(6)).open_pinned_pool(PinnedConfig::new("pool"));
    drop(pool.expect("opens"));
    assert_eq!(memory.snapshot().devices.arena_devices.last(), Some(&2));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn the_same_device_twice_and_too_many_devices_are_errors_that_name_them() {
    let bed = Bed::new(2);
    let again = Arc::clone(&bed.sims[1]) as Arc<dyn Driver>;
    let all = bed.sims.iter().map(|sim| Arc::clone(sim) as Arc<dyn Driver>).chain([again]);
    let failed = Memory::builder().drivers(all).start();
    let Err(StartError::SameDevice { device }) = failed else { panic!("{failed:?}") };
    assert_eq!(device, uuid(1).to_string());
    let bed = Bed::new(17);
    let failed = bed.builder().start();
    assert!(matches!(failed, Err(StartError::TooManyDevices { count: 17, max: 16 })), "{failed:?}");
    let failed = Memory::builder().devices([]).start().expect("without a device");
    let none = failed.devices().on(DeviceSelector::MostHeadroom).status();
    assert_eq!(none.map(|device| device.number), Err(MemoryError::NoDevice));
}

#[test]
fn each_device_has_a_budget_and_is_shrunk_by_its_number() {
    let bed = Bed::new(2);
    let memory = bed.builder().device_limit(ByteSize::mib(500)).start().expect("starts");
    let second = DeviceSelector::Number(1);
    let ask = |selector, mib| memory.devices().on(selector).reserve(ByteSize::mib(mib));
    advance_until(&bed.clock, TICK, "the limits are in force", || {
        let budgets =
            memory.devices().all().into_iter().map(|device| device.budget.expect("its own"));
        budgets.map(|budget| budget.ceiling).all(|ceiling| ceiling == ByteSize::mib(400))
    });
    let held = ask(second, 190).expect("half of the ceiling, at a factor of 2");
    let full = ask(second, 190).expect_err("the second device is full");
    assert!(matches!(full, MemoryError::Rejected(Rejected::Full { .. })), "{full}");
    let other = ask(DeviceSelector::MostHeadroom, 190).expect("the first is not");
    assert_eq!(other.0, DeviceSelector::Number(0));
    let reserved = || {
        let of = |device: lowtide::memory::DeviceStatus| device.budget.expect("its own").reserved;
        memory.devices().all().into_iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(reserved(), vec![ByteSize::mib(190); 2]);
    drop((held, other));
    assert_eq!(reserved(), vec![ByteSize::ZERO; 2]);

    let arenas = [0, 1].map(|nth| {
        let arena =
            memory.devices().on(DeviceSelector::Number(nth)).open_arena(&format!("on {nth}"));
        let arena = arena.expect("opens");
        drop(arena.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
        arena
    });
    let shrunk = memory.devices().shrink("gpu:1").expect("a target");
    assert_eq!((shrunk[0].released, &shrunk[0].error), (ByteSize::mib(8), &None));
    assert_eq!(arenas[1].glance().committed, ByteSize::ZERO);
    assert_eq!(arenas[0].glance().committed, ByteSize::mib(8));
    let unknown = memory.devices().shrink("gpu:2").expect_err("there is no third").to_string();
    assert_eq!(unknown, "unknown device gpu:2: expected cpu:0 or gpu:0 or gpu:1");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The series of devices, and what remains of a lost one, with the threads running.
#[test]
fn a_lost_device_is_published_as_lost_and_the_others_decay_and_admit_as_before() {
    let recorder = recorder::builder().install_recorder();
    let recorder = recorder.expect("the only one of this process");
    let bed = Bed::new(2);
    let memory = bed.builder().device_limit(ByteSize::mib(500)).start().expect("starts");
    let value = |name: &str, nth: u8, more: &str| {
        let text = recorder.render();
        let start = format!("{name}{{device=\"{}\"{more}}} ", uuid(nth));
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        line.and_then(|value| value.parse::<f64>().ok())
    };
    let is = |name: &str, nth: u8, expected: f64| {
        value(name, nth, "").is_some_and(|found| (found - expected).abs() < 0.5)
    };
    let arenas = [0, 1].map(|nth| {
        let name = format!("on {nth}");
        let arena =
            memory.devices().on(DeviceSelector::Number(nth)).open_arena(&name).expect("opens");
        let buffer = arena.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
        (arena, buffer)
    });
    let mib = |mib| ByteSize::mib(mib).as_f64();
    advance_until(&bed.clock, TICK, "both are published", || {
        (0..2).all(|nth| {
            is("lowtide_device_free_bytes", nth, mib(892))
                && is("lowtide_device_budget_ceiling_bytes", nth, mib(400))
                && is("lowtide_device_lost", nth, 0.0)
        })
    });
    let arena = ",arena=\"on 1\"";
    assert!(value("lowtide_device_committed_bytes", 1, arena).is_some_and(|it| it > 0.0));
    assert_eq!(value("lowtide_device_committed_bytes", 0, arena), None, "on the other device");

    bed.sims[0].poison(SimError::EccUncorrectable);
    let error = arenas[0].0.alloc::<u8>(64 * MIB, DYNAMIC).expect_err("lost");
    assert!(matches!(&error, DeviceError::Driver(error) if error.is_context_lost()), "{error}");
    advance_until(&bed.clock, TICK, "it is published as lost", || {
        is("lowtide_device_lost", 0, 1.0)
            && is("lowtide_device_budget_ceiling_bytes", 0, 0.0)
            && value("lowtide_device_free_bytes", 0, "").is_some_and(f64::is_nan)
    });
    // The default device is lost: nothing is admitted for it, at once.
    let rejected = memory.admission().try_admit(Cost::device(ByteSize::mib(1)));
    assert!(matches!(rejected, Err(Rejected::DeviceLost { .. })), "{rejected:?}");
    let opened = memory.devices().open_arena("more").expect_err("lost");
    let MemoryError::OpenArena { cause, .. } = &opened else { panic!("{opened}") };
    let MemoryError::DeviceLost { device, .. } = &**cause else { panic!("{cause}") };
    assert_eq!(device, &uuid(0).to_string());
    // The other one decays, is sampled, and admits.
    let (_, [(lost, held), (arena, buffer)]) = ((), arenas);
    drop(buffer);
    arena.purge().expect("the device works");
    drop(arena.alloc::<u8>(4 * MIB, DYNAMIC).expect("room"));
    bed.sims[1].set_neighbours(ByteSize::mib(300));
    advance_until(&bed.clock, TICK, "the other one is sampled", || {
        value("lowtide_device_free_bytes", 1, "").is_some_and(|free| free <= mib(600))
    });
    assert!(memory.devices().on(DeviceSelector::MostHeadroom).reserve(ByteSize::mib(1)).is_ok());
    assert_eq!(bed.sims[0].calls_after_loss(), 1, "only the call that reported the loss");
    assert_eq!(bed.sims[1].lost(), None);
    let reports = memory.report().diagnostics();
    assert_eq!(reports.iter().filter(|it| it.text.contains("is lost")).count(), 1, "{reports:?}");
    let _ = memory.shutdown_blocking(SOON);
    drop((held, lost, arena));
    assert_eq!(bed.sims[0].calls_after_loss(), 1, "drops make no call either");
}

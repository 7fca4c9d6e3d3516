//! A plan's memory in an arena, over the host driver.
//!
//! Invariant: what is written into a planned buffer while it is live is there until its end.

use std::sync::Arc;

use lowtide::ByteSize;
use lowtide::clock::ManualClock;
use lowtide::device::plan::{BufferId, Demand, Plan, Problem};
use lowtide::device::{ArenaConfig, DeviceArena, DeviceError, HostDriver, Region, SleepOptions};

use super::{instance, planned, planned_for};

fn arena(limit: ByteSize) -> DeviceArena {
    let config = ArenaConfig { limit, ..ArenaConfig::new("planned") };
    let clock = Arc::new(ManualClock::new());
    DeviceArena::open(Arc::new(HostDriver::new()), clock, config).expect("a host arena")
}

/// Plays a problem: each buffer is filled at its start and read at its end.
fn play(problem: &Problem, plan: &Plan, arena: &DeviceArena) {
    let mut memory = arena.reserve_plan(plan, Region::Dynamic).expect("room for it");
    assert_eq!(memory.bytes(), plan.peak());
    let lease = arena.enter().expect("an open arena");
    let mut events: Vec<(i64, bool, BufferId)> = Vec::new();
    for (id, demand) in problem.ids().zip(problem.demands()) {
        events.push((demand.live.start, true, id));
        events.push((demand.live.end, false, id));
    }
    events.sort_unstable();
    for (_, begins, id) in events {
        let size = problem.demands()[id.index()].size;
        let mark = u8::try_from(id.index() % 251).expect("below 256");
        if begins {
            memory.slice_mut(&lease, id, size).expect("host memory").fill(mark);
        } else {
            let bytes = memory.slice(&lease, id, size).expect("host memory");
            assert!(
                bytes.iter().all(|byte| *byte == mark),
                "buffer {} was overwritten",
                id.index()
            );
        }
    }
}

#[test]
fn what_is_written_while_a_buffer_is_live_is_there_at_its_end() {
    for name in ["A", "D"] {
        let problem = instance(name);
        play(&problem, &planned(&problem, 1_000, 0), &arena(ByteSize::mib(64)));
        let segments = planned_for(&problem, 1_000, Some(256 << 10));
        assert!(segments.segments().len() > 1);
        play(&problem, &segments, &arena(ByteSize::mib(64)));
    }
}

#[test]
fn addresses_are_those_of_the_plan_and_stay_through_a_sleep() {
    let problem = instance("A");
    let plan = planned(&problem, 1_000, 0);
    let arena = arena(ByteSize::mib(64));
    let mut memory = arena.reserve_plan(&plan, Region::Dynamic).expect("room for it");
    let ids: Vec<_> = problem.ids().collect();
    let mut all = || {
        let lease = arena.enter().expect("an open arena");
        memory.slice_mut(&lease, ids[0], ByteSize::new(1)).expect("host memory")[0] = 3;
        let planned = memory.enter(&lease).expect("an open arena");
        ids.iter().map(|id| planned.address(*id).get()).collect::<Vec<_>>()
    };
    let before = all();
    let base = before[0] - plan.offset(ids[0]);
    for (id, address) in ids.iter().zip(&before) {
        assert_eq!(address - base, plan.offset(*id));
    }
    arena.sleep(SleepOptions::default()).expect("nobody uses it");
    assert_eq!(all(), before);
}

#[test]
fn another_plan_comes_into_the_same_memory_where_it_is_large_enough() {
    let posed = |size: u64| {
        let mut problem = Problem::new();
        problem.add(Demand::new("b", ByteSize::new(size), 0..3)).expect("it can be posed");
        planned(&problem, 10, 0)
    };
    let arena = arena(ByteSize::mib(64));
    let mut memory = arena.reserve_plan(&posed(100_000), Region::Dynamic).expect("room for it");
    memory.refit(&posed(50_000)).expect("it is smaller");
    assert_eq!(memory.bytes(), ByteSize::new(100_000));
    memory.refit(&posed(200_000)).expect("there is room");
    assert_eq!(memory.bytes(), ByteSize::new(200_000));
    let found = memory.refit(&posed(1 << 30)).expect_err("it is beyond the limit");
    assert!(matches!(found, DeviceError::OutOfMemory { .. } | DeviceError::OutOfAddresses { .. }));
    assert_eq!(memory.bytes(), ByteSize::new(200_000), "the plan is as it was");
    drop(memory);
    assert!(arena.glance().live.is_zero());
}

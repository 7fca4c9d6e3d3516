//! A plan's memory in an arena, over the host driver and over a simulated device.
//!
//! Invariant: what is written into a planned buffer while it is live is there until its end.

#[path = "../../../planner/tests/planner/counting.rs"]
#[allow(dead_code, reason = "the planner's tests use more of it")]
pub(crate) mod counting;
#[path = "../../../planner/tests/planner/plans.rs"]
mod plans;

use std::sync::Arc;

use lowtide_cuda_sim::{Call, DriverCosts, Outcome, Pattern, SimDriver, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::driver::{DeviceAddress, Driver as _, StreamHandle};
use lowtide_gpu::plan::{BufferId, Demand, Plan, PlanCache, Planner, Problem, Role};
use lowtide_gpu::{
    ArenaConfig, Buffer, CompactOptions, Contents, DeviceArena, DeviceError, HostDriver,
    PlannedMemory, Region, SleepOptions,
};

use counting::allocations;
use plans::{instance, overlapping, planned, planned_for};

fn arena(limit: ByteSize) -> DeviceArena {
    let config = ArenaConfig { limit, ..ArenaConfig::new("planned") };
    let clock = Arc::new(ManualClock::new());
    DeviceArena::open(Arc::new(HostDriver::new()), clock, config).expect("a host arena")
}

/// The starts and ends of all buffers, in order, ends first.
fn events(problem: &Problem) -> Vec<(i64, bool, BufferId)> {
    let mut events: Vec<(i64, bool, BufferId)> = Vec::new();
    for (id, demand) in problem.ids().zip(problem.demands()) {
        events.push((demand.live.start, true, id));
        events.push((demand.live.end, false, id));
    }
    events.sort_unstable();
    events
}

/// Plays a problem: each buffer is filled at its start and read at its end.
fn play(problem: &Problem, plan: &Plan, arena: &DeviceArena) {
    let mut memory = arena.reserve_plan(plan, Region::Dynamic).expect("room for it");
    assert_eq!(memory.bytes(), plan.peak());
    let lease = arena.enter().expect("an open arena");
    for (_, begins, id) in events(problem) {
        let size = problem.demands()[id.index()].size;
        let mark = u8::try_from(id.index() % 251).expect("below 256");
        if begins {
            memory.slice_mut(&lease, id, size).expect("host memory").fill(mark);
        } else {
            let bytes = memory.slice(&lease, id, size).expect("host memory");
            assert!(bytes == vec![mark; bytes.len()], "buffer {} was overwritten", id.index());
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
        let address = memory.addresses(&lease).expect("an open arena");
        ids.iter().map(|id| address(*id).expect("ours").get()).collect::<Vec<_>>()
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

/// An arena over a simulated device of so many MiB, with granules of 64 KiB.
fn simulated(mib: u64) -> (Arc<SimDriver>, DeviceArena, StreamHandle) {
    let granularity = ByteSize::kib(64);
    let options = SimOptions {
        costs: DriverCosts::zero(),
        granularity,
        handle_min: granularity,
        capacity: ByteSize::mib(mib),
        context_overhead: ByteSize::ZERO,
        ..SimOptions::default()
    };
    let sim = Arc::new(SimDriver::new(options));
    let config = ArenaConfig { reserve: ByteSize::gib(1), ..ArenaConfig::new("planned") };
    let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config).expect("an arena");
    let stream = sim.stream_create().expect("a stream");
    (sim, arena, stream)
}

/// Buffers of these sizes that are all live at once.
fn together(sizes: &[u64]) -> Problem {
    let mut problem = Problem::new();
    for size in sizes {
        problem.add(Demand::new("b", ByteSize::new(*size), 0..3)).expect("it can be posed");
    }
    problem
}

/// Plays a problem on a simulated device: each buffer is filled at its start and checked at its
/// end; at some steps the arena sleeps, or is compacted.
#[test]
fn a_simulated_device_finds_what_was_written_through_sleeps_and_compactions() {
    let problem = instance("A");
    for limit in [None, Some(256 << 10)] {
        let (sim, arena, stream) = simulated(64);
        let plan = planned_for(&problem, 1_000, limit);
        let mut memory = arena.reserve_plan(&plan, Region::Dynamic).expect("room for it");
        // Something that a compaction can fill the holes of.
        let mut others: Vec<Option<Buffer<u8>>> =
            (0..40).map(|_| Some(arena.alloc(48 << 10, Region::Dynamic).expect("room"))).collect();
        let mut outcomes = Vec::new();
        for (at, (_, begins, id)) in events(&problem).into_iter().enumerate() {
            match at % 60 {
                20 => drop(arena.sleep(SleepOptions::default()).expect("nobody uses it")),
                40 => {
                    others.iter_mut().step_by(2).for_each(|other| *other = None);
                    arena.compact(CompactOptions::new(Region::Dynamic), |_| {}).expect("moved");
                }
                _ => {}
            }
            let lease = arena.enter().expect("an open arena");
            let address = memory.addresses(&lease).expect("an open arena")(id).expect("ours");
            let size = problem.demands()[id.index()].size;
            let mark = Pattern::new(id.index() as u64);
            if begins {
                sim.fill(stream, address, size, mark).expect("queued");
            } else {
                outcomes.push(sim.check(stream, address, size, mark).expect("queued"));
            }
            sim.stream_synchronize(stream).expect("done");
        }
        for outcome in outcomes {
            assert_eq!(sim.outcome(outcome), Outcome::Held);
        }
        drop((memory, others));
        arena.validate();
        arena.close().expect("nothing is live");
        sim.assert_no_faults();
    }
}

#[test]
fn a_refit_that_finds_no_memory_leaves_the_plan_and_what_is_in_it() {
    let (sim, arena, stream) = simulated(64);
    let small = together(&[1 << 20, 1 << 20]);
    let ids: Vec<BufferId> = small.ids().collect();
    let plan = planned_for(&small, 100, Some(1 << 20));
    let mut memory = arena.reserve_plan(&plan, Region::Stable).expect("room for it");
    let large = planned_for(&together(&[4 << 20; 3]), 100, Some(4 << 20));
    let read = |memory: &mut PlannedMemory, act: &dyn Fn(DeviceAddress)| {
        let lease = arena.enter().expect("an open arena");
        let address = memory.addresses(&lease).expect("an open arena");
        ids.iter().for_each(|id| act(address(*id).expect("ours")));
        sim.stream_synchronize(stream).expect("done");
    };
    let (size, mark) = (ByteSize::mib(1), Pattern::new(7));
    read(&mut memory, &|at| sim.fill(stream, at, size, mark).expect("queued"));
    let mut refused = 0;
    for room in 0..20 {
        // From what there is already to what is enough for both plans.
        sim.set_capacity(arena.snapshot().committed.max(ByteSize::mib(2 + room)));
        let found = memory.refit(&large);
        if found.is_ok() {
            break;
        }
        refused += 1;
        assert!(found.expect_err("refused").is_out_of_memory());
        assert_eq!(memory.bytes(), ByteSize::mib(2), "the plan is as it was");
        assert_eq!(arena.snapshot().live, ByteSize::mib(2), "nothing of the other one stays");
        read(&mut memory, &|at| {
            let check = sim.check(stream, at, size, mark).expect("queued");
            sim.stream_synchronize(stream).expect("done");
            assert_eq!(sim.outcome(check), Outcome::Held);
        });
        arena.purge().expect("idle memory goes back");
    }
    assert!(refused > 5, "refused {refused} times only");
    assert_eq!(memory.bytes(), large.peak(), "in the end there was room");
    drop(memory);
    arena.validate();
}

/// GGML frees everything where one segment grows, also where the sum is equal, and never shrinks.
#[test]
fn only_the_segment_that_grows_is_replaced_and_shrinking_gives_back_the_rest() {
    let kib = |sizes: &[u64]| together(&sizes.iter().map(|size| size << 10).collect::<Vec<_>>());
    let plan = |sizes: &[u64]| planned_for(&kib(sizes), 100, Some(384 << 10));
    let (one, two) = (plan(&[384, 128]), plan(&[256, 256]));
    assert_eq!(one.peak(), two.peak(), "growth with an equal total");
    let (_sim, arena, _) = simulated(64);
    let mut memory = arena.reserve_plan(&one, Region::Dynamic).expect("room for it");
    let first = |memory: &mut PlannedMemory| {
        let lease = arena.enter().expect("an open arena");
        memory.addresses(&lease).expect("an open arena")(kib(&[1]).ids().next().expect("one"))
    };
    let before = first(&mut memory);
    memory.refit(&two).expect("there is room");
    assert_eq!(first(&mut memory), before, "a segment that is large enough stays");
    assert_eq!(memory.bytes(), ByteSize::kib(384 + 256));
    assert_eq!(memory.shrink().expect("there is room"), ByteSize::kib(128));
    assert_eq!(memory.bytes(), two.peak());
    memory.refit(&plan(&[64])).expect("it is smaller");
    assert_eq!(memory.shrink().expect("there is room"), ByteSize::kib(512 - 64));
    assert_eq!(arena.snapshot().live, ByteSize::kib(64));
    assert_eq!(memory.shrink().expect("nothing to do"), ByteSize::ZERO);
}

#[test]
fn memory_for_all_plans_of_a_cache_is_reserved_once() {
    let clock = ManualClock::new();
    let (mut cache, problems) = (PlanCache::new(), [[384, 128], [256, 256], [64, 320]]);
    let mut planner = Planner::new(&clock).segments_of(ByteSize::kib(384));
    for (bucket, [one, two]) in (0..).zip(problems) {
        let problem = together(&[one << 10, two << 10]);
        cache.plan(bucket, &problem, &mut planner).expect("it has plans");
    }
    let (_sim, arena, _) = simulated(64);
    let mut memory = arena.reserve_plan(&cache.plans()[&0], Region::Dynamic).expect("room");
    memory.reserve(&cache.segments()).expect("room");
    let (reserves, bytes) = (arena.snapshot().reserves_total, memory.bytes());
    assert_eq!(bytes, cache.segments().into_iter().sum());
    for plan in cache.plans().values().chain(cache.plans().values()) {
        memory.refit(plan).expect("it was reserved");
    }
    assert_eq!((arena.snapshot().reserves_total, memory.bytes()), (reserves, bytes));
}

/// The bug: two problems of a bucket, each larger in one buffer, took each other's place for ever.
#[test]
fn a_bucket_has_one_plan_for_all_problems_that_differ_in_sizes_only() {
    let clock = ManualClock::new();
    let (mut cache, mut planner) = (PlanCache::new(), Planner::new(&clock));
    let problems = [[384, 128], [256, 256]].map(|sizes| together(&sizes.map(|size| size << 10)));
    for problem in &problems {
        cache.plan(7, problem, &mut planner).expect("it has plans");
    }
    let plan = &cache.plans()[&7];
    assert_eq!(plan.peak(), ByteSize::kib(384 + 256));
    assert!(problems.iter().all(|problem| plan.serves(problem).is_ok()));
}

#[test]
fn contents_that_need_not_be_kept_are_not_copied_by_a_sleep() {
    let (sim, arena, _) = simulated(64);
    let plan = planned(&together(&[1 << 20]), 10, 0);
    let mut memory = arena.reserve_plan(&plan, Region::Dynamic).expect("room for it");
    memory.set_contents(Some(Contents::Discard)).expect("this process");
    arena.sleep(SleepOptions::default()).expect("nobody uses it");
    assert_eq!(sim.calls(Call::Offload), 0);
    assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
    memory.refit(&planned(&together(&[2 << 20]), 10, 0)).expect("it wakes, and there is room");
    arena.sleep(SleepOptions::default()).expect("nobody uses it");
    assert_eq!(sim.calls(Call::Offload), 0, "said once, for later segments as well");
    let lease = arena.enter().expect("it wakes");
    memory.addresses(&lease).map(drop).expect("there is memory again");
}

#[test]
fn alignments_that_no_block_has_and_plans_of_nothing_are_answered() {
    let (_sim, arena, _) = simulated(64);
    let mut problem = Problem::new();
    let demand = Demand::new("b", ByteSize::kib(1), 0..2);
    problem.add(Demand { align: 3 << 20, ..demand }).expect("it can be posed");
    let found = arena.reserve_plan(&planned(&problem, 10, 0), Region::Dynamic);
    assert!(matches!(found, Err(DeviceError::Unsupported { .. })), "{found:?}");
    let nothing = together(&[0]);
    let plan = planned(&nothing, 10, 0);
    let mut memory = arena.reserve_plan(&plan, Region::Dynamic).expect("no bytes");
    let lease = arena.enter().expect("an open arena");
    let id = nothing.ids().next().expect("one");
    let _ = memory.addresses(&lease).expect("an open arena")(id);
    assert!(arena.snapshot().live.is_zero());
}

#[test]
fn slices_of_several_buffers_are_had_at_once_and_are_theirs() {
    let (mut problem, size) = (Problem::new(), ByteSize::kib(24));
    for name in ["a", "b", "c", "d"] {
        problem.add(Demand::new(name, size, 0..2)).expect("it can be posed");
    }
    let mine = Demand { role: Role::External, ..Demand::new("mine", size, 0..2) };
    let mine = problem.add(mine).expect("it can be posed");
    let ids: Vec<BufferId> = problem.ids().collect();
    for limit in [None, Some(48 << 10)] {
        let (plan, arena) = (planned_for(&problem, 100, limit), arena(ByteSize::mib(64)));
        let mut memory = arena.reserve_plan(&plan, Region::Dynamic).expect("room for it");
        let lease = arena.enter().expect("an open arena");
        let buffers = [3, 0, 2, 1].map(|nth| (ids[nth], size));
        let slices = memory.slices_mut(&lease, buffers).expect("host memory");
        for (slice, mark) in slices.into_iter().zip(1_u8..) {
            assert_eq!(ByteSize::of(slice.len()), size);
            slice.fill(mark);
        }
        for ((id, size), mark) in buffers.into_iter().zip(1_u8..) {
            let slice = memory.slice(&lease, id, size).expect("host memory");
            assert!(slice.iter().all(|byte| *byte == mark), "{limit:?}: {id:?}");
        }
        let none = memory.slices_mut(&lease, [(mine, ByteSize::ZERO)]).expect("host memory");
        assert!(none[0].is_empty());
        let address = memory.addresses(&lease).expect("an open arena");
        assert_eq!(address(mine), None, "it is nowhere in the plan's memory");
    }
}

#[test]
#[should_panic(expected = "overlap")]
fn slices_that_overlap_are_not_given() {
    let problem = together(&[1 << 10]);
    let arena = arena(ByteSize::mib(64));
    let plan = planned(&problem, 10, 0);
    let mut memory = arena.reserve_plan(&plan, Region::Dynamic).expect("room for it");
    let lease = arena.enter().expect("an open arena");
    let id = problem.ids().next().expect("one");
    let twice = [(id, ByteSize::new(2)), (id, ByteSize::new(1))];
    drop(memory.slices_mut(&lease, twice));
}

#[test]
fn what_a_plan_is_asked_while_it_is_run_allocates_nothing() {
    let (small, large) = (overlapping(50, 5), overlapping(60, 9));
    let plans = [planned(&small, 100, 0), planned(&large, 100, 0)];
    let driver = Arc::new(HostDriver::new());
    let clock = Arc::new(ManualClock::new());
    let arena = DeviceArena::open(driver, clock, ArenaConfig::new("planned")).expect("an arena");
    let mut memory = arena.reserve_plan(&plans[1], Region::Dynamic).expect("room for it");
    let mut cache = PlanCache::new();
    let planner_clock = ManualClock::new();
    let mut planner = Planner::new(&planner_clock);
    cache.plan(0, &small, &mut planner).expect("it has plans");
    let lease = arena.enter().expect("an open arena");
    memory.refit(&plans[0]).expect("it is reserved");
    let made = allocations(|| {
        for (plan, problem) in plans.iter().zip([&small, &large]) {
            plan.serves(problem).expect("its own problem");
            let address = memory.addresses(&lease).expect("an open arena");
            let sum: u64 =
                small.ids().map(|id| address(id).expect("ours").get() ^ plan.offset(id)).sum();
            std::hint::black_box(sum);
        }
        memory.refit(&plans[1]).expect("it is reserved");
        cache.plan(0, &small, &mut planner).expect("it is there");
    });
    assert_eq!(made, 0);
    assert!(allocations(|| drop(planned(&small, 1, 0))) > 0, "the count does not count");
}

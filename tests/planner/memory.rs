//! What the planner allocates, counted in a process of its own.
//!
//! Planning holds no more than its formula says; what a plan is asked while it is run allocates
//! nothing.
//!
//! Invariant: every allocation of this process is counted, on whatever thread.
#![expect(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use lowtide::ByteSize;
use lowtide::clock::ManualClock;
use lowtide::device::plan::{Budget, Demand, Plan, PlanCache, Planner, Problem};
use lowtide::device::{ArenaConfig, DeviceArena, HostDriver, Region};

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static LIVE: Cell<i64> = const { Cell::new(0) };
    static MOST: Cell<i64> = const { Cell::new(0) };
}

struct Counting;

fn count(change: i64) {
    LIVE.set(LIVE.get() + change);
    MOST.set(MOST.get().max(LIVE.get()));
    COUNT.set(COUNT.get() + u64::from(change > 0));
}

fn bytes(layout: Layout) -> i64 {
    i64::try_from(layout.size()).unwrap_or(i64::MAX)
}

// SAFETY: every call is handed on to the system's allocator unchanged; counting touches only
// thread-local integers without destructors, which does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(bytes(layout));
        // SAFETY: the caller's promise about `layout` is handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-bytes(layout));
        // SAFETY: `block` came from `alloc` above, so from the system, with this layout.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// How many allocations it makes.
fn allocations(act: impl FnOnce()) -> u64 {
    let before = COUNT.get();
    act();
    COUNT.get() - before
}

/// The most that is live meanwhile, beyond what was live before.
fn most_bytes<T>(act: impl FnOnce() -> T) -> (T, u64) {
    let before = LIVE.get();
    MOST.set(before);
    let result = act();
    (result, (MOST.get() - before).unsigned_abs())
}

/// Within so many nodes; of none, by one rule.
fn planned(problem: &Problem, nodes: u64) -> Plan {
    let clock = ManualClock::new();
    let budget = Budget { time: Duration::from_secs(nodes.min(1)), nodes };
    Planner::new(&clock).budget(budget).plan(problem).expect("it has plans")
}

/// Buffers of which some `width` are live at once.
fn problem(count: i64, width: i64) -> Problem {
    let mut problem = Problem::new();
    for at in 0..count {
        let size = ByteSize::new(1 + (at.unsigned_abs() * 7919) % 1_000);
        let end = at + 1 + (at * 31) % (2 * width);
        problem.add(Demand::new("b", size, at..end)).expect("it can be posed");
    }
    problem
}

#[test]
fn planning_holds_no_more_than_its_formula_says() {
    for (count, width, nodes) in [
        (0, 1, 10),
        (1, 1, 10),
        (100, 10, 2_000),
        (1_000, 30, 2_000),
        (2_000, 400, 500),
        (2_500, 20, 500),
        (20_000, 100, 0),
    ] {
        let problem = problem(count, width);
        let (plan, most) = most_bytes(|| planned(&problem, nodes));
        let limit = problem.planning_bytes().get();
        println!("{count} of width {width}: {most} of {limit}, {} nodes", plan.nodes());
        assert!(most <= limit, "{count} of width {width}: {most} of {limit}");
    }
}

#[test]
fn what_a_plan_is_asked_while_it_is_run_allocates_nothing() {
    let (small, large) = (problem(50, 5), problem(60, 9));
    let plans = [planned(&small, 100), planned(&large, 100)];
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
            let planned = memory.enter(&lease).expect("an open arena");
            let sum: u64 = small
                .ids()
                .map(|id| planned.address(id).expect("ours").get() ^ plan.offset(id))
                .sum();
            std::hint::black_box(sum);
        }
        memory.refit(&plans[1]).expect("it is reserved");
        cache.plan(0, &small, &mut planner).expect("it is there");
    });
    assert_eq!(made, 0);
    assert!(allocations(|| drop(planned(&small, 1))) > 0, "the count does not count");
}

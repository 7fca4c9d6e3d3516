//! Failures that GGML's allocator has or had, each with a test that this one does not have it.
//!
//! Invariant: none of them ends the process, and none is passed over in silence.

use lowtide_planner::ByteSize;
use lowtide_planner::clock::ManualClock;
use lowtide_planner::{BufferId, Bump, Demand, Graph, Plan, PlanError, Planner, Problem, Role};

use super::peer_segments;
use super::plans::{planned, planned_for};

fn bytes(size: u64) -> ByteSize {
    ByteSize::new(size)
}

fn posed(graph: &Graph) -> Problem {
    graph.problem(8).expect("a graph that can be posed")
}

fn sizes(plan: &Plan) -> Vec<u64> {
    plan.segments().iter().map(|size| size.get()).collect()
}

/// Four nodes of one size; only the operands of the last one are told.
fn wired(last: impl Fn([BufferId; 3]) -> Vec<BufferId>) -> Problem {
    let mut graph = Graph::new();
    let x = graph.input("x", bytes(16));
    let one = graph.node("one", bytes(16), &[x], false);
    let two = graph.node("two", bytes(16), &[one], false);
    let three = graph.node("three", bytes(16), &[two], false);
    let sum = graph.node("sum", bytes(16), &last([one, two, three]), false);
    graph.keep(sum);
    posed(&graph)
}

/// GGML compares numbers and sizes of nodes, and serves the second graph with offsets at which
/// `three` lies over `one`.
#[test]
fn a_graph_of_as_many_equal_nodes_wired_otherwise_is_not_served() {
    let (chain, skip) =
        (wired(|[_, _, three]| vec![three]), wired(|[one, _, three]| vec![one, three]));
    let plan = planned(&chain, 1_000, 0);
    assert!(plan.verify(&skip).is_err(), "the offsets would be wrong");
    assert_eq!(plan.serves(&skip), Err(PlanError::OtherShape));
    plan.serves(&wired(|[_, _, three]| vec![three])).expect("the same graph");
}

/// GGML notices where a size grows, and where data was external and is not any more.
#[test]
fn larger_sizes_and_memory_that_is_not_the_callers_any_more_need_another_plan() {
    let graph = |size: u64, is_external: bool| {
        let mut graph = Graph::new();
        let x = graph.input("x", bytes(8));
        let weights = if is_external {
            graph.external("weights", bytes(size))
        } else {
            graph.input("weights", bytes(size))
        };
        let y = graph.node("y", bytes(size), &[x, weights], false);
        graph.keep(y);
        posed(&graph)
    };
    let plan = planned(&graph(64, true), 1_000, 0);
    plan.serves(&graph(64, true)).expect("the same");
    plan.serves(&graph(8, true)).expect("smaller");
    let larger = plan.serves(&graph(65, true)).expect_err("larger");
    assert_eq!(larger.to_string(), "y: 65 B is larger than the planned 64 B");
    assert_eq!(plan.serves(&graph(64, false)), Err(PlanError::OtherShape));
}

/// GGML has 16 segments; the last one grows without a limit.
#[test]
fn there_are_as_many_segments_as_it_takes_none_larger_than_allowed() {
    let mut problem = Problem::new();
    for _ in 0..100 {
        problem.add(Demand::new("b", bytes(8), 0..2)).expect("it can be posed");
    }
    let plan = planned_for(&problem, 100, Some(8));
    assert_eq!(sizes(&plan), [8; 100]);
}

/// GGML ends the process at the 257th free block.
#[test]
fn there_are_as_many_free_blocks_as_there_are() {
    let mut problem = Problem::new();
    for at in 0..1_000 {
        let end = if at % 2 == 0 { 2 } else { 9 };
        problem.add(Demand::new("b", bytes(8 + at % 3), 0..end)).expect("it can be posed");
    }
    problem.add(Demand::new("late", bytes(64), 3..9)).expect("it can be posed");
    assert_eq!(peer_segments::ggml_segments(&problem, u64::MAX / 4), None, "where GGML ends");
    let plan = planned(&problem, 0, 0);
    assert!(plan.peak() < plan.bound().scaled(1.1), "{} of {}", plan.peak(), plan.bound());
}

/// The tensor whose memory is taken may be larger by what the backend adds: GGML asserted.
#[test]
fn in_place_of_a_larger_operand_frees_the_rest_and_of_a_smaller_one_is_not_done() {
    let graph = |node: u64| {
        let mut graph = Graph::new();
        let x = graph.input("x", bytes(32));
        let y = graph.node("y", bytes(node), &[x], true);
        let z = graph.node("z", bytes(24), &[y], false);
        graph.keep(y);
        graph.keep(z);
        planned(&posed(&graph), 1_000, 0).peak().get()
    };
    assert_eq!(graph(8), 32, "z lies in what x leaves");
    assert_eq!(graph(32), 32 + 24);
    assert_eq!(graph(40), 32 + 40, "y is beside x, and z in the place of x");
}

#[test]
fn a_view_of_a_view_keeps_what_it_shows_and_no_more() {
    let mut graph = Graph::new();
    let x = graph.node("x", bytes(64), &[], false);
    let part = graph.view("part", x, 32, bytes(32));
    let inner = graph.view("inner", part, 16, bytes(16));
    let other = graph.node("other", bytes(48), &[x], false);
    let last = graph.node("last", bytes(48), &[other], false);
    let end = graph.node("end", ByteSize::ZERO, &[inner, last], false);
    graph.keep(end);
    let problem = graph.problem(1).expect("a graph that can be posed");
    let plan = planned(&problem, 10_000, 0);
    assert_eq!(plan.offset(inner), plan.offset(x) + 48);
    assert_eq!(plan.peak().get(), 64 + 48, "last lies over the first 48 bytes of x");
}

/// Not even where it is computed in place: a kept value is nobody's place.
#[test]
fn an_output_may_take_a_place_and_gives_none() {
    let mut graph = Graph::new();
    let x = graph.input("x", bytes(16));
    let one = graph.node("one", bytes(16), &[x], true);
    graph.keep(one);
    let two = graph.node("two", bytes(16), &[one], true);
    graph.keep(two);
    let problem = graph.problem(8).expect("a graph that can be posed");
    let plan = planned(&problem, 1_000, 0);
    assert_eq!(plan.offset(one), plan.offset(x), "an output in place");
    assert_ne!(plan.offset(two), plan.offset(one), "and not overwritten");
    // Nor where only a view of it is kept.
    let mut graph = Graph::new();
    let x = graph.node("x", bytes(16), &[], false);
    let view = graph.view("view", x, 8, bytes(8));
    graph.keep(view);
    let y = graph.node("y", bytes(16), &[x], true);
    graph.keep(y);
    assert_eq!(planned(&posed(&graph), 1_000, 0).peak().get(), 32);
}

/// An element-wise node that reads `x` and a shifted view of it would overwrite what it reads.
#[test]
fn a_node_is_not_in_place_of_what_it_reads_by_another_name_too() {
    let mut graph = Graph::new();
    let x = graph.input("x", bytes(16));
    let shifted = graph.view("shifted", x, 8, bytes(8));
    let sum = graph.node("sum", bytes(16), &[x, shifted], true);
    graph.keep(sum);
    assert_eq!(planned(&posed(&graph), 1_000, 0).peak().get(), 32);
    // By one name twice it may, and through a view from the first byte on.
    let mut graph = Graph::new();
    let x = graph.input("x", bytes(16));
    let twice = graph.node("twice", bytes(16), &[x, x], true);
    let flat = graph.view("flat", twice, 0, bytes(16));
    let last = graph.node("last", bytes(16), &[flat], true);
    graph.keep(last);
    assert_eq!(planned(&posed(&graph), 1_000, 0).peak().get(), 16);
}

/// GGML forgets in which buffer type a node was to be where it takes an operand's place.
#[test]
fn a_node_is_in_the_kind_of_memory_that_was_asked_for() {
    let mut graph = Graph::new();
    let x = graph.input("x", bytes(16));
    let y = graph.node("y", bytes(16), &[x], true);
    graph.set_kind(y, 1);
    graph.keep(y);
    let problems = graph.kinds(8, 2).expect("two kinds");
    let kinds = [("device", &problems[0], None), ("host", &problems[1], None)];
    let clock = ManualClock::new();
    let plans = Planner::new(&clock).plan_kinds(&kinds).expect("plans");
    let peaks: Vec<_> = plans.iter().map(|plan| plan.peak().get()).collect();
    assert_eq!(peaks, [16, 16]);
    let found = graph.kinds(8, 1).expect_err("one kind only").to_string();
    assert_eq!(found, "y: unknown memory kind 1: expected a number below 1");
}

/// GGML counts the memory of a type that is listed twice once, and says 0 for the second.
#[test]
fn a_kind_of_memory_that_is_listed_twice_is_refused() {
    let empty = Problem::new();
    let kind = |name| (name, &empty, None);
    let clock = ManualClock::new();
    let kinds = [kind("host"), kind("device"), kind("host")];
    let found = Planner::new(&clock).plan_kinds(&kinds).expect_err("twice");
    assert_eq!(found, PlanError::KindTwice { name: String::from("host") });
}

#[test]
fn nothing_needs_nothing() {
    let mut graph = Graph::new();
    let x = graph.input("x", ByteSize::ZERO);
    let y = graph.node("y", ByteSize::ZERO, &[x], true);
    let view = graph.view("view", y, 0, ByteSize::ZERO);
    graph.keep(view);
    let problem = posed(&graph);
    let plan = planned(&problem, 100, 0);
    assert_eq!((plan.peak(), plan.segments().len()), (ByteSize::ZERO, 0));
    assert_eq!(planned_for(&problem, 100, Some(8)).segments().len(), 0);
    assert_eq!(planned(&posed(&Graph::new()), 100, 0).peak(), ByteSize::ZERO);
}

#[test]
fn a_view_beyond_its_value_is_refused_by_name() {
    let mut graph = Graph::new();
    let x = graph.input("x", bytes(16));
    let part = graph.view("part", x, 8, bytes(8));
    graph.view("inner", part, 4, bytes(8));
    let found = graph.problem(8).expect_err("beyond").to_string();
    assert_eq!(found, "inner: 8 bytes at offset 4 do not fit part, which has 8 bytes");
    graph.view("far", x, u64::MAX, bytes(1));
    assert!(graph.problem(8).is_err());
}

/// A larger tensor in one place made GGML free and allocate all memory anew, also where the sum was
/// equal; and the sum that it reported went down where memory did not.
#[test]
fn what_a_set_of_graphs_needs_is_the_largest_of_each_segment() {
    let problem = |sizes: [u64; 2]| {
        let mut problem = Problem::new();
        for size in sizes {
            let demand = Demand::new("b", bytes(size), 0..2);
            problem.add(Demand { role: Role::Input, ..demand }).expect("it can be posed");
        }
        problem
    };
    let clock = ManualClock::new();
    let mut planner = Planner::new(&clock).segments_of(bytes(32));
    let mut cache = lowtide_planner::PlanCache::new();
    let mut before = ByteSize::ZERO;
    for (bucket, sizes) in (0..).zip([[24, 16], [20, 20], [8, 8], [30, 4]]) {
        cache.plan(bucket, &problem(sizes), &mut planner).expect("it has plans");
        let all: ByteSize = cache.segments().into_iter().sum();
        assert!(all >= before, "what is reserved for all never goes down");
        before = all;
    }
    let most = cache.segments().iter().map(|size| size.get()).collect::<Vec<_>>();
    for plan in cache.plans().values() {
        assert!(sizes(plan).iter().zip(&most).all(|(own, all)| own <= all));
    }
}

/// GGML's allocator for weights ends the process where the block is full.
#[test]
fn a_full_block_is_an_error() {
    let mut block = Bump::new(bytes(16));
    block.take(bytes(12), 8).expect("it fits");
    assert!(block.take(bytes(1), 8).is_err());
    assert_eq!(block.take(bytes(4), 4), Ok(12));
}

/// Every leaf was allocated as an input: 7 MiB became 70 in one model.
#[test]
fn weights_of_the_callers_own_take_nothing() {
    let mut graph = Graph::new();
    let mut at = graph.input("tokens", bytes(64));
    for _ in 0..40 {
        let weights = graph.external("weights", bytes(1 << 30));
        at = graph.node("layer", bytes(64), &[at, weights], false);
    }
    graph.keep(at);
    assert_eq!(planned(&posed(&graph), 100, 0).peak().get(), 128);
}

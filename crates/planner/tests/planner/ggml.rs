//! The 13 runs of GGML's own tests of its graph allocator (llama.cpp, `tests/test-alloc.cpp`), with
//! totals at most the asserted ones.
//!
//! Sizes are in bytes; inputs are in memory of the plan. What GGML pads to an alignment of 8 is
//! aligned here and not padded.
//!
//! Invariant: every plan was verified; no segment is larger than the limit or its largest buffer.

use lowtide_planner::ByteSize;
use lowtide_planner::{BufferId, Graph, Plan, Problem};

use super::plans::planned_for;

fn input(graph: &mut Graph, size: u64) -> BufferId {
    graph.input("input", ByteSize::new(size))
}

/// A node that GGML never computes in place.
fn apart(graph: &mut Graph, size: u64, operands: &[BufferId]) -> BufferId {
    graph.node("apart", ByteSize::new(size), operands, false)
}

/// One that it may: add, mul, scale.
fn over(graph: &mut Graph, size: u64, operands: &[BufferId]) -> BufferId {
    graph.node("over", ByteSize::new(size), operands, true)
}

fn plan_of(problem: &Problem, limit: u64) -> Plan {
    let plan = planned_for(problem, 10_000, Some(limit));
    let largest = problem.demands().iter().map(|demand| demand.size).max();
    for size in plan.segments() {
        assert!(size.get() <= limit || Some(*size) <= largest, "a segment of {size}");
    }
    plan
}

fn total(graph: &mut Graph, last: BufferId, limit: u64, align: u64) -> u64 {
    graph.keep(last);
    let problem = graph.problem(align).expect("a graph that can be posed");
    plan_of(&problem, limit).peak().get()
}

#[test]
fn max_size_too_many_tensors() {
    let graph = &mut Graph::new();
    let x: [BufferId; 3] = std::array::from_fn(|_| input(graph, 8));
    // In the order of GGML's walk from the result down, here and below.
    let x4 = over(graph, 8, &[x[1], x[2]]);
    let x3 = over(graph, 8, &[x[0], x[1]]);
    let x5 = over(graph, 8, &[x3, x[0]]);
    let x6 = over(graph, 8, &[x4, x5]);
    assert!(total(graph, x6, 16, 8) <= 16 + 16);
}

#[test]
fn max_size_tensor_too_large() {
    let graph = &mut Graph::new();
    let (x0, x1) = (input(graph, 16), input(graph, 8));
    let x2 = apart(graph, 24, &[x0, x1]);
    assert!(total(graph, x2, 32, 8) <= 32 + 24);
}

#[test]
fn tensor_larger_than_max_size() {
    let graph = &mut Graph::new();
    let x0 = input(graph, 24);
    let x1 = over(graph, 24, &[x0]);
    assert_eq!(total(graph, x1, 16, 8), 24);
}

#[test]
// GGML's name.
fn not_enough_chunks() {
    let graph = &mut Graph::new();
    let x: Vec<BufferId> = (0..17).map(|_| input(graph, 8)).collect();
    let sum = x[1..].iter().fold(x[0], |sum, next| over(graph, 8, &[sum, *next]));
    let total = total(graph, sum, 8, 8);
    assert!(total > 16 * 8, "{total}: more than the 16 that GGML has");
}

#[test]
fn fill_leftover_space() {
    let graph = &mut Graph::new();
    let x0 = input(graph, 8);
    let x1 = apart(graph, 16, &[x0]);
    let x2 = apart(graph, 4, &[x1]);
    assert!(total(graph, x2, 16, 8) <= 12 + 16);
}

#[test]
fn view_inplace() {
    let graph = &mut Graph::new();
    let x0 = input(graph, 16);
    let x1 = graph.view("reshaped", x0, 0, ByteSize::new(16));
    let x2 = graph.view("permuted", x1, 0, ByteSize::new(16));
    let x3 = graph.view("part", x2, 4, ByteSize::new(8));
    let x4 = input(graph, 8);
    let x5 = over(graph, 8, &[x3, x4]);
    assert!(total(graph, x5, 32, 8) <= 24);
}

#[test]
fn reuse_and_free() {
    let graph = &mut Graph::new();
    let (x0, x1, x2) = (input(graph, 24), input(graph, 8), input(graph, 8));
    let x3 = over(graph, 8, &[x1, x2]);
    let x4 = apart(graph, 32, &[x0]);
    let x5 = over(graph, 32, &[x4]);
    let x6 = over(graph, 32, &[x4, x5]);
    let x7 = graph.view("part", x6, 8, ByteSize::new(8));
    let x8 = over(graph, 8, &[x3, x7]);
    assert!(total(graph, x8, 40, 8) <= 40 + 32 + 32);
}

fn merged_free_blocks(limit: u64) -> u64 {
    let graph = &mut Graph::new();
    let x: [BufferId; 3] = std::array::from_fn(|_| input(graph, 16));
    let x5 = apart(graph, 24, &[x[2]]);
    let x3 = apart(graph, 4, &[x[0]]);
    let x4 = apart(graph, 4, &[x[1]]);
    let x6 = over(graph, 4, &[x3, x4]);
    let x7 = apart(graph, 24, &[x6]);
    let x8 = over(graph, 24, &[x5, x7]);
    total(graph, x8, limit, 8)
}

#[test]
fn merge_free_block() {
    assert!(merged_free_blocks(32) <= 32 + 32 + 24);
}

#[test]
fn merge_free_block_without_a_limit() {
    assert!(merged_free_blocks(u64::MAX) <= 32 + 32 + 24);
}

#[test]
fn prefer_already_allocated_memory() {
    let graph = &mut Graph::new();
    let x0 = input(graph, 24);
    let x1 = apart(graph, 4, &[x0]);
    let x2 = apart(graph, 4, &[x1]);
    assert!(total(graph, x2, 32, 4) <= 28);
}

#[test]
fn multiple_buffer_types() {
    let (a, b) = (0, 1);
    let graph = &mut Graph::new();
    let held = |graph: &mut Graph, size| graph.external("held", ByteSize::new(size));
    let (a0, a1, b0, b1) = (held(graph, 16), held(graph, 16), held(graph, 24), held(graph, 4));
    let x0 = input(graph, 16);
    let x1 = over(graph, 16, &[x0, a0]);
    let x2 = apart(graph, 24, &[x1]);
    let x3 = over(graph, 24, &[x2, b0]);
    let x4 = apart(graph, 4, &[x3]);
    let x5 = over(graph, 4, &[x4, b1]);
    let x6 = apart(graph, 16, &[x5]);
    let x7 = over(graph, 16, &[x6, a1]);
    let x8 = over(graph, 16, &[x7]);
    graph.keep(x8);
    // GGML computes `x3` in the place of `x2`, whatever type was asked for.
    for value in [x4, x5, x6] {
        graph.set_kind(value, b);
    }
    let total = |kind: u32, limit: u64, held: u64| {
        let problem = graph.problem_of(kind, 8).expect("a graph that can be posed");
        plan_of(&problem, limit).peak().get() + held
    };
    assert!(total(a, 32, 32) <= 32 + 32 + 24);
    assert!(total(b, u64::MAX, 32) <= 32 + 24);
}

#[test]
fn buffer_size_zero() {
    let graph = &mut Graph::new();
    let x0 = input(graph, 16);
    let x1 = over(graph, 16, &[x0]);
    let other = graph.problem_of(1, 8).expect("a graph that can be posed");
    assert_eq!(plan_of(&other, u64::MAX).peak(), ByteSize::ZERO);
    assert_eq!(total(graph, x1, u64::MAX, 8), 16);
}

#[test]
fn reallocation() {
    let first = &mut Graph::new();
    let (x0, x1) = (input(first, 24), input(first, 16));
    let x2 = first.view("part", x0, 0, ByteSize::new(16));
    let x3 = over(first, 16, &[x2, x1]);
    assert_eq!(total(first, x3, 32, 4), 40);
    let second = &mut Graph::new();
    let (x0, x1) = (input(second, 20), input(second, 20));
    let x2 = over(second, 20, &[x0, x1]);
    assert_eq!(total(second, x2, 32, 4), 40);
}

//! The memory that planning takes, against the formula that states it.

use std::time::Duration;

use lowtide_planner::clock::ManualClock;
use lowtide_planner::{Plan, Planner, Problem};

use super::counting::most_bytes;
use super::plans::overlapping;

/// Within so many nodes; of none, by one rule.
fn planned(problem: &Problem, nodes: u64) -> Plan {
    let clock = ManualClock::new();
    Planner::new(&clock)
        .budget(Duration::from_secs(nodes.min(1)), nodes)
        .plan(problem)
        .expect("it has plans")
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
        let problem = overlapping(count, width);
        let (plan, most) = most_bytes(|| planned(&problem, nodes));
        let limit = problem.planning_bytes().get();
        println!("{count} of width {width}: {most} of {limit}, {} nodes", plan.nodes());
        assert!(most <= limit, "{count} of width {width}: {most} of {limit}");
    }
}

//! Plans of a problem within a budget of nodes, and the instances of the planner's field.
//!
//! Each plan is verified. The tests of planned memory in an arena use them as well.

use std::time::Duration;

use lowtide_planner::ByteSize;
use lowtide_planner::clock::ManualClock;
use lowtide_planner::{Demand, Plan, Planner, Problem};

/// A plan within so many nodes, which stops at a peak of `enough`.
pub(crate) fn planned(problem: &Problem, nodes: u64, enough: u64) -> Plan {
    let clock = ManualClock::new();
    let mut planner =
        Planner::new(&clock).budget(Duration::from_secs(1), nodes).enough(ByteSize::new(enough));
    let plan = planner.plan(problem).expect("a problem that has plans");
    plan.verify(problem).expect("its own plan");
    plan
}

/// A plan for segments of at most so many bytes.
pub(crate) fn planned_for(problem: &Problem, nodes: u64, limit: Option<u64>) -> Plan {
    let clock = ManualClock::new();
    let mut planner = Planner::new(&clock).budget(Duration::from_secs(1), nodes);
    if let Some(limit) = limit {
        planner = planner.segments_of(ByteSize::new(limit));
    }
    let plan = planner.plan(problem).expect("a problem that has plans");
    plan.verify(problem).expect("its own plan");
    plan
}

/// An instance of the field.
pub(crate) fn instance(name: &str) -> Problem {
    let text = match name {
        "A" => include_str!("../data/planning/A.1048576.csv"),
        "B" => include_str!("../data/planning/B.1048576.csv"),
        "C" => include_str!("../data/planning/C.1048576.csv"),
        "D" => include_str!("../data/planning/D.1048576.csv"),
        "E" => include_str!("../data/planning/E.1048576.csv"),
        "F" => include_str!("../data/planning/F.1048576.csv"),
        "I" => include_str!("../data/planning/I.1048576.csv"),
        "J" => include_str!("../data/planning/J.1048576.csv"),
        "input.12" => include_str!("../data/planning/input.12.csv"),
        "resnet50" => include_str!("../data/planning/resnet50.csv"),
        "G_1" => include_str!("../data/planning/G_1.csv"),
        _ => unreachable!("no such instance"),
    };
    Problem::read_csv(text.as_bytes(), false).expect("a file of its field")
}

/// Buffers of which some `width` are live at once.
pub(crate) fn overlapping(count: i64, width: i64) -> Problem {
    let mut problem = Problem::new();
    for at in 0..count {
        let size = ByteSize::new(1 + (at.unsigned_abs() * 7919) % 1_000);
        let end = at + 1 + (at * 31) % (2 * width);
        problem.add(Demand::new("b", size, at..end)).expect("it can be posed");
    }
    problem
}

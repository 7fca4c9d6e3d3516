//! Invalid plans, problems and files, each with an error that names the cause.
//!
//! Invariant: nothing that is wrong panics.

use std::time::Duration;

use lowtide_planner::ByteSize;
use lowtide_planner::clock::ManualClock;
use lowtide_planner::{Demand, Gap, PlanCache, PlanError, Planner, Problem, Role};

use super::plans::planned;

fn two() -> Problem {
    let mut problem = Problem::new();
    let demand = |name: &str, live| Demand::new(name, ByteSize::new(8), live);
    problem.add(Demand { align: 4, ..demand("a", 0..3) }).expect("it can be posed");
    problem.add(demand("b", 2..5)).expect("it can be posed");
    problem
}

#[test]
fn plans_from_elsewhere_are_verified() {
    let problem = two();
    assert_eq!(problem.verify(&[0, 8]), Ok(ByteSize::new(16)));
    assert_eq!(problem.verify(&[100, 0]), Ok(ByteSize::new(108)));
    let text = |offsets: &[u64]| problem.verify(offsets).expect_err("a fault").to_string();
    assert_eq!(text(&[0, 7]), "b at 7 and a at 0 overlap at step 2");
    assert_eq!(text(&[2, 16]), "a at 2: expected a multiple of 4");
    assert_eq!(text(&[0]), "found 1 offsets: expected 2, one for each buffer");
    assert!(matches!(problem.verify(&[0, u64::MAX]), Err(PlanError::BeyondPeak { .. })));
}

#[test]
fn a_plan_does_not_pass_for_another_problem() {
    let plan = planned(&two(), 10, 0);
    let mut longer = Problem::new();
    for demand in two().demands() {
        longer.add(Demand { live: 0..9, ..demand.clone() }).expect("it can be posed");
    }
    plan.verify(&longer).expect("they were live at once before");
    let mut larger = Problem::new();
    for demand in two().demands() {
        let size = ByteSize::new(12);
        larger.add(Demand { size, ..demand.clone() }).expect("it can be posed");
    }
    assert!(plan.verify(&larger).is_err());
}

#[test]
fn shared_memory_that_is_apart_and_fixed_offsets_that_moved_are_found() {
    let mut problem = two();
    let ids: Vec<_> = problem.ids().collect();
    let view = problem.add(Demand::new("view", ByteSize::new(2), 1..4)).expect("it can be posed");
    problem.view(view, ids[0], 4).expect("it lies within");
    let fixed = Demand { offset: Some(64), ..Demand::new("fixed", ByteSize::new(8), 0..9) };
    problem.add(fixed).expect("it can be posed");
    problem.verify(&[0, 8, 4, 64]).expect("as it must be");
    let text = |offsets: &[u64]| problem.verify(offsets).expect_err("a fault").to_string();
    let apart = "view at 5: expected to share the memory of a at 0";
    assert_eq!(text(&[0, 8, 5, 64]), apart);
    assert_eq!(text(&[0, 8, 4, 65]), "fixed at 65: expected its fixed offset 64");
}

#[test]
fn what_cannot_be_posed_is_refused_by_name() {
    let mut problem = two();
    let mut refused = |demand: Demand| problem.add(demand).expect_err("it is wrong").to_string();
    let plain = |live| Demand::new("c", ByteSize::new(8), live);
    let inverted = Demand { live: std::ops::Range { start: 5, end: 4 }, ..plain(0..9) };
    let expected = "c: live from 5 until 4: expected an end at or after the start";
    assert_eq!(refused(inverted), expected);
    assert_eq!(
        refused(Demand { align: 0, ..plain(0..9) }),
        "c: invalid alignment 0: expected 1 or more"
    );
    let gap = |span, window| Demand { gaps: vec![Gap { span, window }], ..plain(2..9) };
    let expected = "c: gap from 1 until 3: expected a gap within 2 to 9";
    assert_eq!(refused(gap(1..3, None)), expected);
    let window = Some(4..9);
    assert_eq!(refused(gap(3..4, window)), "c: window 4..9: expected a window within its 8 bytes");
    let fixed = Demand { align: 4, offset: Some(6), ..plain(0..9) };
    assert_eq!(refused(fixed), "c at 6: expected a multiple of 4");
    let huge = Demand { size: ByteSize::new(u64::MAX >> 2), ..plain(0..9) };
    assert!(refused(huge).contains("exceeds the total size limit: expected at most"));
    let far = Demand { offset: Some(u64::MAX), ..plain(0..9) };
    assert!(refused(far).contains("exceeds the total size limit: expected at most"));
}

#[test]
fn sharing_that_cannot_be_is_refused_by_name() {
    let mut problem = two();
    let ids: Vec<_> = problem.ids().collect();
    let small = problem.add(Demand::new("small", ByteSize::new(4), 2..9)).expect("posed");
    let text = |found: Result<(), PlanError>| found.expect_err("it is wrong").to_string();
    assert_eq!(
        text(problem.view(small, ids[0], 5)),
        "small: 4 bytes at offset 5 do not fit a, which has 8 bytes"
    );
    assert_eq!(
        text(problem.reuse(ids[0], small)),
        "a: 8 bytes at offset 0 do not fit small, which has 4 bytes"
    );
    problem.reuse(small, ids[0]).expect("it is smaller");
    let twice = "small: cannot share memory of b: expected a buffer that shares no memory yet";
    assert_eq!(text(problem.reuse(small, ids[1])), twice);
    let external = Demand { role: Role::External, ..Demand::new("w", ByteSize::new(8), 0..9) };
    let external = problem.add(external).expect("posed");
    let held = "b: cannot overwrite w, which is external memory";
    assert_eq!(text(problem.reuse(ids[1], external)), held);
    let mut ring = two();
    ring.view(ids[0], ids[1], 0).expect("they are as large");
    assert!(matches!(ring.view(ids[1], ids[0], 0), Err(PlanError::SharedTwice { .. })));
    assert!(matches!(two().view(small, ids[0], 0), Err(PlanError::Unknown { number: 2, .. })));
}

#[test]
fn fixed_offsets_that_contradict_each_other_are_refused_by_name() {
    let mut problem = Problem::new();
    for (name, offset, live) in [("a", 0, 0..4), ("b", 4, 3..6)] {
        let demand = Demand::new(name, ByteSize::new(8), live);
        problem.add(Demand { offset: Some(offset), ..demand }).expect("it can be posed");
    }
    let found = Planner::new(&ManualClock::new()).plan(&problem).expect_err("they overlap");
    assert_eq!(found.to_string(), "b at 4 and a at 0 overlap at step 3");
}

#[test]
fn a_wrong_file_is_refused_with_the_line() {
    let cases: [(&str, u64, &str); 13] = [
        ("", 1, "invalid column \"\": expected id, lower, upper, size, alignment, offset, gaps"),
        ("id,lower,upper\n", 1, "invalid header \"id,lower,upper\": expected a column size"),
        ("id,lower,upper,end,size\n", 1, "invalid column \"end\": expected each at most once"),
        ("id,lower,upper,size\na,0,1\n", 2, "invalid number of values \"3\": expected 4"),
        (
            "id,lower,upper,size\na,0,1,4\nb,0,1,4,5\n",
            3,
            "invalid number of values \"5\": expected 4",
        ),
        (
            "id,lower,upper,size\na,x,1,4\n",
            2,
            "invalid lower \"x\": expected a whole number below 2^63",
        ),
        (
            "id,lower,upper,size\na,0,1,-4\n",
            2,
            "invalid size \"-4\": expected a number of bytes below 2^64",
        ),
        (
            "id,lower,end,size\na,0,9223372036854775807,4\n",
            2,
            "invalid upper \"9223372036854775807\": expected a last step below 2^63 - 1",
        ),
        (
            "id,lower,upper,size\na,5,1,4\n",
            2,
            "a: live from 5 until 1: expected an end at or after the start",
        ),
        (
            "id,lower,upper,size,gaps\na,0,9,4,3\n",
            2,
            "invalid gaps \"3\": expected gaps such as 3-5 or 3-5@0:16",
        ),
        (
            "id,lower,upper,size,gaps\na,0,9,4,3-5@0\n",
            2,
            "invalid gaps \"3-5@0\": expected gaps such as 3-5 or 3-5@0:16",
        ),
        (
            "id,lower,upper,size,gaps\na,0,9,4,-\n",
            2,
            "invalid gaps \"-\": expected gaps such as 3-5 or 3-5@0:16",
        ),
        (
            "id,lower,upper,size\na,0,1,4\n\nb,0,1,4\n",
            4,
            "unexpected line after the empty line that ends the file",
        ),
    ];
    for (text, line, fault) in cases {
        let found = Problem::read_csv(text.as_bytes(), false).expect_err(text);
        assert_eq!(found.to_string(), format!("line {line}: {fault}"), "{text:?}");
    }
    let huge = "id,lower,upper,size\na,0,1,18446744073709551615\n";
    let found = Problem::read_csv(huge.as_bytes(), false).expect_err("too large");
    let PlanError::AtLine { line: 2, error } = found else { panic!("{found}") };
    assert!(matches!(*error, PlanError::TooLarge { .. }));
    let long = format!("id,lower,upper,size\n{},0,1,4\n", "x".repeat(2 << 20));
    let found = Problem::read_csv(long.as_bytes(), false).expect_err("too long");
    let error = Box::new(PlanError::LineTooLong { limit: 1 << 20 });
    assert_eq!(found, PlanError::AtLine { line: 2, error });
    let found = Problem::read_csv(&[0xFF, 0xFE, 0][..], false).expect_err("no text");
    assert!(matches!(found, PlanError::AtLine { line: 1, .. }), "{found}");
}

#[test]
fn extreme_steps_and_sizes_do_not_overflow() {
    let mut problem = Problem::new();
    let large = ByteSize::new(1 << 60);
    for (name, live) in [("a", i64::MIN..i64::MAX), ("b", i64::MIN..0), ("c", 0..i64::MAX)] {
        problem.add(Demand::new(name, large, live)).expect("it can be posed");
    }
    let clock = ManualClock::new();
    let plan = Planner::new(&clock)
        .budget(Duration::from_secs(1), 1_000)
        .plan(&problem)
        .expect("it has plans");
    assert_eq!((plan.peak().get(), plan.is_optimal()), (1 << 61, true));
}

#[test]
fn very_many_buffers_have_a_plan_even_without_time() {
    const BUFFERS: i64 = if cfg!(lowtide_soak) { 1_000_000 } else { 100_000 };
    let mut problem = Problem::new();
    for at in 0..BUFFERS {
        let size = ByteSize::new(1 + at.unsigned_abs() % 7);
        problem.add(Demand::new("b", size, at..at + 5)).expect("it can be posed");
    }
    let clock = ManualClock::new();
    let plan =
        Planner::new(&clock).budget(Duration::ZERO, u64::MAX).plan(&problem).expect("it has plans");
    assert!(plan.peak() <= plan.bound().checked_mul(2).expect("small"), "{}", plan.peak());
}

/// The bug: the check of the plan laid out all segments with the size of the largest one, and
/// the sum wrapped.
#[test]
fn many_segments_beside_a_very_large_one_do_not_overflow() {
    let mut problem = Problem::new();
    for size in std::iter::once(1 << 61).chain([256; 16]) {
        problem.add(Demand::new("b", ByteSize::new(size), 0..1)).expect("it can be posed");
    }
    let clock = ManualClock::new();
    let plan = Planner::new(&clock).segments_of(ByteSize::new(256)).plan(&problem);
    assert_eq!(plan.expect("it has plans").segments().len(), 17);
}

/// The bug: buffers that share memory have the common multiple of their alignments, which counted
/// in no sum, so that offsets wrapped.
#[test]
fn alignments_of_shared_memory_that_exceed_all_offsets_are_refused() {
    let mut problem = Problem::new();
    for _ in 0..9 {
        let demand = |align| Demand { align, ..Demand::new("b", ByteSize::new(8), 0..1) };
        let base = problem.add(demand(1 << 31)).expect("it can be posed");
        let view = problem.add(demand(1_162_261_467)).expect("it can be posed");
        problem.view(view, base, 0).expect("it lies within");
    }
    let found = Planner::new(&ManualClock::new()).plan(&problem).expect_err("too large");
    assert!(matches!(found, PlanError::CannotShare { .. }), "{found}");
    assert!(problem.lower_bound().is_err());
}

/// The bug: the step after the last one was computed.
#[test]
fn a_view_before_its_base_at_the_last_step_is_refused() {
    let mut problem = Problem::new();
    let mut add = |name: &str, live| {
        problem.add(Demand::new(name, ByteSize::new(8), live)).expect("it can be posed")
    };
    let (parent, child) = (add("parent", 0..5), add("child", i64::MAX..i64::MAX));
    let view = add("view", 0..5);
    problem.reuse(child, parent).expect("it is as large");
    problem.view(view, child, 0).expect("it lies within");
    let found = problem.lower_bound().expect_err("both are live");
    assert!(matches!(found, PlanError::ReuseBeforeLastUse { .. }), "{found}");
}

/// The bug: the largest sizes of two problems had no limit in all.
#[test]
fn problems_of_one_bucket_that_are_too_large_together_replace_each_other() {
    let of = |sizes: [u64; 9]| {
        let mut problem = Problem::new();
        for size in sizes {
            problem.add(Demand::new("b", ByteSize::new(size), 0..1)).expect("it can be posed");
        }
        problem
    };
    let clock = ManualClock::new();
    let (mut planner, mut cache) = (Planner::new(&clock), PlanCache::new());
    for large in 0..9 {
        let mut sizes = [1; 9];
        sizes[large] = 1 << 61;
        let problem = of(sizes);
        let plan = cache.plan(0, &problem, &mut planner).expect("it has plans");
        plan.serves(&problem).expect("its own");
    }
}

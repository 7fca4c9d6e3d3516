//! The lifetime planner through its public interface: against brute force on small problems,
//! against the allocators of GGML and ONNX Runtime, on the instances of its field, and with what
//! is wrong.
//!
//! Nothing here reads time: budgets are nodes. Seeds are printed.

mod brute;
#[allow(dead_code, reason = "the tests of planned memory use more of it")]
mod counting;
mod features;
mod ggml;
mod graphs;
mod hazards;
mod memory;
mod peer_segments;
mod peers;
mod plans;
mod random;
mod wrong;

use std::time::Duration;

use lowtide_planner::ByteSize;
use lowtide_planner::clock::ManualClock;
use lowtide_planner::{Demand, Gap, PlanCache, PlanError, Planner, Problem, Role};
use plans::{instance, planned, planned_for};
use random::{Gaps, Kind};

/// Random problems of each kind; more of them in `.ci/run --soak`.
const SMALL: u64 = if cfg!(lowtide_soak) { 2_500 } else { 60 };

const EVERYTHING: Kind =
    Kind { aligned: true, gaps: Gaps::Windows, fixed: true, roles: true, shared: true };

/// Plans so many problems of a kind, and compares them with brute force.
fn against_brute_force(kind: Kind, first: u64, count: u64) {
    for seed in first..first + count {
        let (problem, shares) = random::posed(seed, 8, kind);
        let plan = planned(&problem, 100_000, 0);
        let least = brute::least_peak(&problem, &shares);
        assert!(plan.bound().get() <= least, "seed {seed}: the bound {} is wrong", plan.bound());
        // Where windows slide, or memory is shared, of which parts are needed at times, the search
        // does not look at everything, and says so.
        if kind.gaps != Gaps::Windows && !kind.shared || plan.is_optimal() {
            assert_eq!(plan.peak().get(), least, "seed {seed}");
            assert!(plan.is_optimal(), "seed {seed}: nothing was proved");
        }
    }
}

#[test]
fn plain_problems_are_solved_as_well_as_brute_force_does() {
    against_brute_force(Kind::default(), 0, SMALL);
}

#[test]
fn alignments_gaps_and_fixed_offsets_are_solved_as_well_as_brute_force_does() {
    against_brute_force(Kind { aligned: true, ..Kind::default() }, 10_000, SMALL);
    against_brute_force(Kind { gaps: Gaps::Empty, ..Kind::default() }, 20_000, SMALL);
    against_brute_force(Kind { fixed: true, ..Kind::default() }, 30_000, SMALL);
    let no_windows = Kind { aligned: true, gaps: Gaps::Empty, fixed: true, ..Kind::default() };
    against_brute_force(Kind { roles: true, ..no_windows }, 40_000, SMALL);
}

#[test]
fn roles_and_shared_memory_are_solved_as_well_as_brute_force_does() {
    against_brute_force(Kind { roles: true, ..Kind::default() }, 60_000, SMALL);
    against_brute_force(Kind { shared: true, ..Kind::default() }, 70_000, SMALL);
    against_brute_force(
        Kind { roles: true, shared: true, aligned: true, ..Kind::default() },
        80_000,
        SMALL,
    );
}

#[test]
fn windows_are_planned_soundly_and_what_is_called_optimal_is() {
    against_brute_force(EVERYTHING, 50_000, SMALL);
}

#[test]
fn every_instance_of_minimallocs_set_fits_its_capacity() {
    for name in ["A", "B", "C", "D", "E", "F", "I", "J"] {
        let plan = planned(&instance(name), 200_000, 1_048_576);
        println!("{name}: {} nodes", plan.nodes());
        assert!(plan.peak().get() <= 1_048_576, "{name}: {}", plan.peak().get());
    }
}

#[test]
fn a_peak_at_the_bound_is_found_and_proved() {
    for name in ["A", "B", "C", "F", "I", "input.12", "resnet50", "G_1"] {
        let plan = planned(&instance(name), 200_000, 0);
        assert!(plan.is_optimal(), "{name}: {} nodes", plan.nodes());
        assert!(plan.gap().is_zero());
    }
}

#[test]
fn no_plan_is_worse_than_those_of_ggml_and_onnx_runtime() {
    for name in ["A", "B", "C", "D", "E", "F", "I", "J", "resnet50", "G_1"] {
        let problem = instance(name);
        let peak = planned(&problem, 0, 0).peak().get();
        let (ggml, onnx) = (peers::ggml(&problem), peers::onnx_runtime(&problem));
        assert!(peak <= ggml.min(onnx), "{name}: {peak}, GGML {ggml}, ONNX Runtime {onnx}");
    }
    for seed in 0..SMALL {
        let problem = random::problem(seed, 8, Kind::default());
        let peak = planned(&problem, 0, 0).peak().get();
        assert!(peak <= peers::ggml(&problem), "seed {seed}: GGML is better");
        assert!(peak <= peers::onnx_runtime(&problem), "seed {seed}: ONNX Runtime is better");
    }
}

#[test]
fn what_ggml_was_measured_to_make_of_the_set_is_what_the_model_of_it_makes() {
    // Peak over bound of the real ggml-alloc.c.
    for (name, expected) in [("A", 1.7520), ("D", 1.4798), ("F", 1.2217), ("I", 1.7549)] {
        let problem = instance(name);
        let bound = problem.lower_bound().expect("nothing is shared").as_f64();
        let ratio = ByteSize::new(peers::ggml(&problem)).as_f64() / bound;
        assert!((ratio - expected).abs() < 0.0001, "{name}: {ratio}");
    }
}

#[test]
fn the_same_budget_of_nodes_gives_the_same_plan() {
    let problem = instance("D");
    assert_eq!(planned(&problem, 3_000, 0), planned(&problem, 3_000, 0));
}

#[test]
fn a_better_plan_is_reported_when_it_is_found() {
    let (clock, mut peaks) = (ManualClock::new(), Vec::new());
    let mut planner = Planner::new(&clock)
        .budget(Duration::from_secs(1), 100_000)
        .on_better(|peak| peaks.push(peak));
    let plan = planner.plan(&instance("C")).expect("it has plans");
    drop(planner);
    assert!(peaks.len() > 1 && peaks.is_sorted_by(|one, next| one > next), "{peaks:?}");
    assert_eq!(peaks.last(), Some(&plan.peak()));
}

#[test]
fn without_time_there_is_a_plan_by_one_rule() {
    let clock = ManualClock::new();
    let problem = instance("A");
    let plan =
        Planner::new(&clock).budget(Duration::ZERO, u64::MAX).plan(&problem).expect("it has plans");
    assert_eq!((plan.peak().get(), plan.nodes()), (peers::ggml(&problem), 0));
}

#[test]
fn buffers_that_are_never_live_or_have_no_bytes_need_nothing() {
    let mut problem = Problem::new();
    for (size, live) in [(0, 0..9), (7, 3..3), (5, 0..9)] {
        problem.add(Demand::new("b", ByteSize::new(size), live)).expect("it can be posed");
    }
    assert_eq!(planned(&problem, 10, 0).peak().get(), 5);
    assert_eq!(planned(&Problem::new(), 10, 0).peak().get(), 0);
}

#[test]
fn views_and_reuse_in_place_take_no_memory_of_their_own() {
    let mut problem = Problem::new();
    let mut add = |name: &str, size, live, role| {
        let demand = Demand { role, ..Demand::new(name, ByteSize::new(size), live) };
        problem.add(demand).expect("it can be posed")
    };
    let input = add("input", 16, 0..2, Role::Input);
    let other = add("other", 8, 1..4, Role::Input);
    let view = add("view", 8, 1..3, Role::Inner);
    let sum = add("sum", 16, 2..3, Role::Inner);
    let output = add("output", 4, 3..4, Role::Output);
    let weights = add("weights", 1 << 40, 0..9, Role::External);
    problem.view(view, input, 8).expect("it lies within");
    problem.reuse(output, sum).expect("it is smaller");
    let plan = planned(&problem, 1_000, 0);
    assert_eq!(plan.offset(view), plan.offset(input) + 8);
    // `output` begins when `sum` has ended: in its place by choice, and not only by right.
    assert_eq!(plan.offset(output), plan.offset(sum));
    assert!(problem.is_external(weights));
    assert_eq!(plan.peak().get(), 16 + 8 + 16 - 8, "the first half of `input` is free at step 2");
    let _ = other;
}

/// A problem without roles as a file, whose column of ends is `end` or `upper`.
fn written(problem: &Problem, is_inclusive: bool) -> String {
    let mut text = format!(
        "{},id,lower,size,alignment,offset,gaps\n",
        ["upper", "end"][usize::from(is_inclusive)]
    );
    for Demand { name, live, size, align, offset, gaps, .. } in problem.demands() {
        let gap = |Gap { span, window }: &Gap| {
            let window =
                window.as_ref().map_or(String::new(), |of| format!("@{}:{}", of.start, of.end));
            format!("{}-{}{window}", span.start, span.end)
        };
        let gaps = gaps.iter().map(gap).collect::<Vec<_>>().join(" ");
        let offset = offset.map_or(String::new(), |offset| offset.to_string());
        let end = live.end - i64::from(is_inclusive);
        text += &format!("{end},{name},{},{},{align},{offset},{gaps}\n", live.start, size.get());
    }
    text
}

#[test]
fn files_read_as_they_were_written() {
    for (seed, ends) in (0..200).flat_map(|seed| [false, true].map(|ends| (seed, ends))) {
        let problem = random::problem(seed, 8, Kind { roles: false, ..EVERYTHING });
        let text = written(&problem, ends);
        let read = Problem::read_csv(text.as_bytes(), false).expect("what was written");
        assert_eq!(read.demands(), problem.demands(), "seed {seed}");
    }
    let text =
        "buffer_id,start,end,size,alignment,gaps,hint\r\nx,-3,4,16,8,-2--1@0:4 1-3,7\r\n\r\n";
    let read = Problem::read_csv(text.as_bytes(), false).expect("a file");
    let gap = |span, window| Gap { span, window };
    let expected = Demand {
        align: 8,
        gaps: vec![gap(-2..-1, Some(0..4)), gap(1..3, None)],
        ..Demand::new("x", ByteSize::new(16), -3..5)
    };
    assert_eq!(read.demands(), [expected]);
}

#[test]
fn the_offsets_of_a_file_are_kept() {
    let problem = instance("input.12");
    let plan = planned(&problem, 1_000, 0);
    let mut fixed = Problem::new();
    for (id, demand) in problem.ids().zip(problem.demands()) {
        let demand = Demand { offset: Some(plan.offset(id)), ..demand.clone() };
        fixed.add(demand).expect("it can be posed");
    }
    let read = Problem::read_csv(written(&fixed, false).as_bytes(), false).expect("a file");
    assert_eq!(planned(&read, 0, 0).places(), plan.places());
}

/// The bytes that the real ggml-alloc.c needs for segments of 256 KiB.
const GGML_SEGMENTS: [(&str, u64); 8] = [
    ("A", 2_484_224),
    ("B", 2_668_544),
    ("C", 3_654_656),
    ("D", 1_543_168),
    ("E", 3_169_280),
    ("F", 1_323_008),
    ("I", 2_561_024),
    ("J", 2_140_160),
];

#[test]
fn segments_need_no_more_than_ggml_does() {
    for (name, ggml) in GGML_SEGMENTS {
        let problem = instance(name);
        let plan = planned_for(&problem, 2_000, Some(256 << 10));
        let total = plan.peak().get();
        println!("{name}: {total} of {ggml} in {} segments", plan.segments().len());
        assert!(total <= ggml, "{name}: {total}, GGML {ggml}");
    }
}

#[test]
fn a_buffer_larger_than_a_segment_gets_its_own_which_others_share() {
    let mut problem = Problem::new();
    for (size, live) in [(100, 0..2), (90, 2..4), (8, 2..3), (8, 0..4)] {
        problem.add(Demand::new("b", ByteSize::new(size), live)).expect("it can be posed");
    }
    let plan = planned_for(&problem, 1_000, Some(16));
    let sizes: Vec<u64> = plan.segments().iter().map(|size| size.get()).collect();
    assert_eq!(sizes, [100, 8], "90 and 8 lie in the segment of the 100");
    let clock = ManualClock::new();
    let mut planner = Planner::new(&clock).segments_of(ByteSize::ZERO);
    let found = planner.plan(&problem).expect_err("no bytes");
    assert_eq!(
        found.to_string(),
        "b: segments of 0 B cannot satisfy its fixed offset or alignment"
    );
}

#[test]
fn a_plan_serves_smaller_shapes_and_none_that_is_wired_otherwise() {
    let posed = |sizes: [u64; 3], last: i64| {
        let mut problem = Problem::new();
        for (size, live) in sizes.into_iter().zip([0..3, 1..4, 2..last]) {
            problem.add(Demand::new("b", ByteSize::new(size), live)).expect("it can be posed");
        }
        problem
    };
    let plan = planned(&posed([8, 8, 8], 5), 100, 0);
    plan.serves(&posed([8, 4, 0], 5)).expect("smaller everywhere");
    plan.verify(&posed([8, 4, 0], 5)).expect("what serves is sound");
    assert_eq!(plan.serves(&posed([8, 8, 8], 6)), Err(PlanError::OtherShape));
    let larger = plan.serves(&posed([8, 9, 1], 5)).expect_err("it is larger").to_string();
    assert_eq!(larger, "b: 9 B is larger than the planned 8 B");
    // The hazard: as many buffers of the same sizes, of which two share memory in one problem.
    let mut shared = posed([8, 8, 8], 5);
    let ids: Vec<_> = shared.ids().collect();
    shared.reuse(ids[2], ids[0]).expect("it is as large");
    assert_eq!(plan.serves(&shared), Err(PlanError::OtherShape));
    assert_eq!(planned(&shared, 100, 0).serves(&posed([8, 8, 8], 5)), Err(PlanError::OtherShape));
}

#[test]
fn a_cache_plans_once_for_a_bucket_and_again_for_what_is_larger() {
    let (clock, mut cache) = (ManualClock::new(), PlanCache::new());
    let mut planner = Planner::new(&clock);
    let mut peak = |bucket: u64, size: u64| {
        let mut problem = Problem::new();
        problem.add(Demand::new("b", ByteSize::new(size), 0..3)).expect("it can be posed");
        cache.plan(bucket, &problem, &mut planner).expect("it has plans").peak().get()
    };
    assert_eq!([peak(8, 6), peak(8, 5), peak(8, 7), peak(16, 12)], [6, 6, 7, 12]);
    assert_eq!(cache.segments(), [ByteSize::new(12)]);
}

#[test]
fn a_new_plan_keeps_unchanged_buffers_where_they_were() {
    let before = instance("D");
    let plan = planned(&before, 1_000, 0);
    let mut after = Problem::new();
    for (at, demand) in before.demands().iter().enumerate() {
        let size = if at == 17 { ByteSize::kib(200) } else { demand.size };
        after.add(Demand { size, ..demand.clone() }).expect("it can be posed");
    }
    let clock = ManualClock::new();
    let mut planner = Planner::new(&clock).budget(Duration::from_secs(1), 1_000);
    let again = planner.replan(&after, &before, &plan).expect("it has plans");
    again.verify(&after).expect("it is sound");
    let moved = after.ids().filter(|id| again.place(*id) != plan.place(*id)).count();
    assert!(moved <= 1, "{moved} moved");
}

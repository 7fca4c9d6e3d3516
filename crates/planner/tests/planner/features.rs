//! Properties of what is around the solver, on random problems: segments, kinds, reuse of plans,
//! plans after a change.
//!
//! Invariant: whatever is planned, by whatever way, passes the verifier for its problem.

use std::time::Duration;

use lowtide_planner::ByteSize;
use lowtide_planner::clock::ManualClock;
use lowtide_planner::{Demand, PlanCache, PlanError, Planner, Problem, Role};

use super::plans::{instance, planned, planned_for};
use super::random::{self, Gaps, Random};
use super::{GGML_SEGMENTS, SMALL, brute, peer_segments};

/// Of a random problem: all but gaps and fixed offsets.
const PLAIN: random::Kind =
    random::Kind { aligned: true, gaps: Gaps::None, fixed: false, roles: true, shared: true };

/// A copy of which each buffer has another size, as far as it can.
fn resized(
    problem: &Problem,
    shares: &[random::Share],
    size: impl Fn(usize, u64) -> u64,
) -> Problem {
    let mut resized = Problem::new();
    for (at, demand) in problem.demands().iter().enumerate() {
        let size = ByteSize::new(size(at, demand.size.get()));
        resized.add(Demand { size, ..demand.clone() }).expect("it can be posed");
    }
    let ids: Vec<_> = problem.ids().collect();
    for share in shares {
        let (child, over) = (ids[share.child], ids[share.over]);
        let shared = if share.replaces {
            resized.reuse(child, over)
        } else {
            resized.view(child, over, share.at)
        };
        shared.expect("it shared before");
    }
    resized
}

#[test]
fn what_ggml_was_measured_to_make_of_segments_is_what_the_model_of_it_makes() {
    for (name, expected) in GGML_SEGMENTS {
        assert_eq!(
            peer_segments::ggml_segments(&instance(name), 256 << 10),
            Some(expected),
            "{name}"
        );
    }
}

#[test]
fn every_buffer_lies_within_a_segment_and_only_larger_ones_get_larger_segments() {
    for seed in 0..SMALL {
        let (problem, shares) = random::posed(seed, 12, PLAIN);
        let limit = 2 + seed % 7;
        let plan = planned_for(&problem, 1_000, Some(limit));
        let largest = problem.demands().iter().map(|demand| demand.size.get()).max();
        for size in plan.segments() {
            let most = limit.max(largest.unwrap_or(0));
            assert!(size.get() <= most, "seed {seed}: a segment of {size}, limit {limit}");
        }
        let larger = plan.segments().iter().filter(|size| size.get() > limit).count();
        let owners = problem.demands().iter().filter(|demand| demand.size.get() > limit).count();
        assert!(larger <= owners, "seed {seed}: {larger} segments for {owners} buffers");
        assert_eq!(plan.peak(), plan.segments().iter().copied().sum());
        // Below what one segment needs it may be: each segment begins aligned.
        let least = brute::live_most(&problem, &shares);
        assert!(plan.peak().get() >= least, "seed {seed}: {} below {least}", plan.peak());
        assert!(plan.bound().get() <= least, "seed {seed}: {} is no bound", plan.bound());
        let one = planned(&problem, 1_000, 0).peak();
        assert_eq!(planned_for(&problem, 1_000, Some(1 << 40)).peak(), one, "seed {seed}");
    }
}

#[test]
fn segments_of_random_problems_need_less_in_all_than_ggmls() {
    let (mut ours, mut theirs, mut worse) = (0, 0, 0);
    for seed in 0..SMALL {
        let problem = random::problem(seed, 30, random::Kind::default());
        let limit = 5 + seed % 6;
        let total = planned_for(&problem, 1_000, Some(limit)).peak().get();
        let ggml = peer_segments::ggml_segments(&problem, limit).expect("few free blocks");
        (ours, theirs, worse) = (ours + total, theirs + ggml, worse + u32::from(total > ggml));
    }
    println!("{ours} of {theirs}; worse {worse} times of {SMALL}");
    assert!(ours <= theirs, "{ours} of {theirs}");
}

#[test]
fn what_segments_cannot_have_is_refused_by_name() {
    let mut problem = Problem::new();
    problem.add(Demand::new("free", ByteSize::new(8), 0..3)).expect("it can be posed");
    let fixed = Demand { offset: Some(16), ..Demand::new("fixed", ByteSize::new(8), 0..3) };
    problem.add(fixed).expect("it can be posed");
    let clock = ManualClock::new();
    let mut planner = Planner::new(&clock).segments_of(ByteSize::new(32));
    let found = planner.plan(&problem).expect_err("where would it be").to_string();
    assert_eq!(found, "fixed: segments of 32 B cannot satisfy its fixed offset or alignment");
    let mut problem = Problem::new();
    for (name, align) in [("even", 1 << 20), ("odd", (1 << 31) - 1)] {
        let demand = Demand::new(name, ByteSize::new(8), 0..3);
        problem.add(Demand { align, ..demand }).expect("it can be posed");
    }
    let found = planner.plan(&problem).expect_err("no segment begins there").to_string();
    assert_eq!(found, "odd: segments of 32 B cannot satisfy its fixed offset or alignment");
}

#[test]
fn kinds_are_planned_together_each_within_its_own_segments() {
    for seed in 0..SMALL / 3 {
        let limits = [None, Some(ByteSize::new(6)), Some(ByteSize::new(9))];
        let problems = [0, 1, 2].map(|number| random::posed(3 * seed + number, 10, PLAIN).0);
        let names = ["none", "six", "nine"].into_iter();
        let kinds: Vec<_> =
            names.zip(&problems).zip(limits).map(|((name, of), limit)| (name, of, limit)).collect();
        let clock = ManualClock::new();
        let plans = Planner::new(&clock)
            .budget(Duration::from_secs(1), 3_000)
            .plan_kinds(&kinds)
            .expect("plans");
        for ((_, problem, limit), plan) in kinds.iter().zip(&plans) {
            plan.verify(problem).expect("its own plan");
            let limit = limit.map(ByteSize::get);
            assert_eq!(plan.peak(), planned_for(problem, 1_000, limit).peak());
        }
    }
}

#[test]
fn what_is_wrong_in_a_kind_names_the_kind() {
    let mut problem = Problem::new();
    let fixed = Demand { offset: Some(16), ..Demand::new("fixed", ByteSize::new(8), 0..3) };
    problem.add(fixed).expect("it can be posed");
    let limit = Some(ByteSize::new(32));
    let empty = Problem::new();
    let kinds = [("device", &empty, None), ("host", &problem, limit)];
    let clock = ManualClock::new();
    let mut planner = Planner::new(&clock);
    let found = planner.plan_kinds(&kinds).expect_err("no place for it").to_string();
    assert!(found.starts_with("memory kind host: fixed: "), "{found}");
    // The planner is as it was: no segments, all of its budget.
    assert_eq!(planner.plan(kinds[1].1).expect("a plan").peak(), ByteSize::new(24));
}

#[test]
fn a_plan_that_serves_a_problem_is_sound_for_it() {
    let (mut served, mut larger) = (0, 0);
    for seed in 0..SMALL {
        let (problem, shares) = random::posed(seed, 10, PLAIN);
        let plan = planned(&problem, 1_000, 0);
        plan.serves(&problem).expect("its own problem");
        let mut random = Random::new(seed);
        let sizes: Vec<u64> = problem.demands().iter().map(|_| random.below(7)).collect();
        // What others lie in has to hold them.
        let holds = |at: usize| shares.iter().any(|share| share.over == at);
        let less = |at: usize, size: u64| if holds(at) { size } else { size.min(sizes[at]) };
        let other = resized(&problem, &shares, less);
        plan.serves(&other).expect("nothing is larger");
        plan.verify(&other).expect("what serves is sound");
        served += 1;
        if !shares.is_empty() {
            continue;
        }
        let other = resized(&problem, &shares, |at, _| sizes[at]);
        match plan.serves(&other) {
            Ok(()) => plan.verify(&other).expect("what serves is sound"),
            Err(PlanError::LargerThanPlanned { size, planned, .. }) => {
                assert!(size > planned);
                larger += 1;
            }
            Err(other) => panic!("seed {seed}: {other}"),
        }
    }
    assert!(served > SMALL / 3 && larger > SMALL / 15, "{served} served, {larger} larger");
}

/// Errors that a caller may make about a problem without changing its sizes.
#[test]
fn a_plan_serves_nothing_of_another_shape() {
    let mut problem = Problem::new();
    for live in [0..3, 1..5, 3..6] {
        problem.add(Demand::new("b", ByteSize::new(8), live)).expect("it can be posed");
    }
    let plan = planned(&problem, 100, 0);
    type Change = fn(&mut Demand);
    let changes: [Change; 6] = [
        |demand| demand.live.end += 1,
        |demand| demand.live.start -= 1,
        |demand| demand.align = 2,
        |demand| demand.offset = Some(0),
        |demand| demand.role = Role::Output,
        |demand| demand.gaps = vec![lowtide_planner::Gap { span: 2..3, window: None }],
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut other = Problem::new();
        for (at, demand) in problem.demands().iter().enumerate() {
            let mut demand = demand.clone();
            if at == 1 {
                change(&mut demand);
            }
            other.add(demand).expect("it can be posed");
        }
        assert_eq!(plan.serves(&other), Err(PlanError::OtherShape), "change {number}");
    }
    let mut more = problem.clone();
    more.add(Demand::new("b", ByteSize::ZERO, 0..0)).expect("it can be posed");
    assert_eq!(plan.serves(&more), Err(PlanError::OtherShape));
    let mut renamed = Problem::new();
    for demand in problem.demands() {
        renamed.add(Demand { name: String::from("c"), ..demand.clone() }).expect("posed");
    }
    plan.serves(&renamed).expect("names mean nothing");
}

#[test]
fn a_new_plan_keeps_what_is_as_it_was_where_it_was_shared_memory_included() {
    let mut kept = 0_u64;
    for seed in 0..SMALL {
        let (before, shares) = random::posed(seed, 10, PLAIN);
        let plan = planned(&before, 1_000, 0);
        let changed = usize::try_from(seed).expect("small") % before.demands().len();
        // The same, with one buffer more and one that is larger, if nobody shares its memory.
        let is_shared = |at: usize| shares.iter().any(|s| s.child == at || s.over == at);
        let mut after = before.clone();
        if !is_shared(changed) {
            after = resized(&before, &shares, |at, size| size + u64::from(at == changed) * 3);
        }
        after.add(Demand::new("new", ByteSize::new(3), 2..6)).expect("it can be posed");
        let clock = ManualClock::new();
        let mut planner = Planner::new(&clock).budget(Duration::from_secs(1), 1_000);
        let again = planner.replan(&after, &before, &plan).expect("it has plans");
        again.verify(&after).expect("it is sound");
        assert!(again.peak() >= planned(&after, 10_000, 0).bound());
        for (id, demand) in before.ids().zip(before.demands()) {
            // What is held to the ends of the plan may have come to be held for longer.
            let is_same = after.demands()[id.index()] == *demand && demand.role == Role::Inner;
            let is_placed = !demand.live.is_empty() && !demand.size.is_zero();
            if is_same && is_placed && !is_shared(id.index()) {
                assert_eq!(again.place(id), plan.place(id), "seed {seed}: buffer {}", id.index());
                kept += 1;
            }
        }
        again.serves(&after).expect("its own problem");
    }
    assert!(kept > SMALL / 2, "{kept}");
}

#[test]
fn a_new_fixed_offset_where_something_was_is_planned_anew() {
    let mut before = Problem::new();
    before.add(Demand::new("old", ByteSize::new(8), 0..4)).expect("it can be posed");
    let plan = planned(&before, 100, 0);
    let mut after = before.clone();
    let fixed = Demand { offset: Some(0), ..Demand::new("fixed", ByteSize::new(8), 2..6) };
    after.add(fixed).expect("it can be posed");
    let clock = ManualClock::new();
    let again = Planner::new(&clock).replan(&after, &before, &plan).expect("there is a plan");
    again.verify(&after).expect("it is sound");
    assert_eq!(again.peak(), ByteSize::new(16));
    // A plan that is not of the problem before is no help.
    let other = Planner::new(&clock).replan(&before, &after, &plan).expect("there is a plan");
    other.verify(&before).expect("it is sound");
}

#[test]
fn a_cache_has_a_sound_plan_for_whatever_comes_and_memory_for_all_of_them() {
    let (clock, mut cache) = (ManualClock::new(), PlanCache::new());
    let mut planner = Planner::new(&clock).segments_of(ByteSize::new(10));
    let mut most: Vec<ByteSize> = Vec::new();
    for seed in 0..SMALL / 3 {
        let problem = random::problem(seed % 7, 12, random::Kind::default());
        let mut random = Random::new(seed);
        let sizes: Vec<u64> = problem.demands().iter().map(|_| random.below(9)).collect();
        let problem = resized(&problem, &[], |at, _| sizes[at]);
        let plan = cache.plan(seed % 7, &problem, &mut planner).expect("it has plans");
        plan.verify(&problem).expect("it is sound");
        let segments = cache.segments();
        for plan in cache.plans().values() {
            assert!(plan.segments().iter().zip(&segments).all(|(own, all)| own <= all));
            assert!(plan.segments().len() <= segments.len());
        }
        most.clone_from(&segments);
    }
    assert_eq!(cache.plans().len(), 7);
    let largest =
        |at: usize| cache.plans().values().filter_map(|plan| plan.segments().get(at)).max();
    assert!(most.iter().enumerate().all(|(at, size)| largest(at) == Some(size)));
}

#[test]
fn two_kinds_of_one_name_are_refused() {
    let empty = Problem::new();
    let kind = || ("device", &empty, None);
    let clock = ManualClock::new();
    let found = Planner::new(&clock).plan_kinds(&[kind(), kind()]).expect_err("twice");
    assert_eq!(found, PlanError::KindTwice { name: String::from("device") });
}

//! The whole controller in virtual time: some of the scenarios that `benches/controller`
//! runs by thousands, short days, and single cases that name what they hold.
//!
//! Invariant: the simulator's claims.

#[path = "sim/mod.rs"]
#[allow(dead_code, reason = "the bench uses more of it")]
pub(crate) mod sim;

use std::time::Duration;

use lowtide_admission::{Settings, Thresholds};

use sim::claims::{self, judge, run};
use sim::days::{self, LOADS};
use sim::scenario::{Kind, Late, Load, MIXES, Scenario, Shape};

/// The number of random scenarios: some seconds without optimisation. `benches/controller` runs
/// more.
const SEEDS: u64 = sample(100);

/// Returns the number of cases of these that run: a quarter, or all in `.ci/run --soak`.
const fn sample(all: u64) -> u64 {
    if cfg!(lowtide_soak) { all } else { all.div_ceil(4) }
}

#[test]
fn no_seed_is_killed_latches_oscillates_or_leaves_anything_behind() {
    for seed in 0..SEEDS {
        for measured in [true, false] {
            if let Err(failure) = judge(&Scenario { measured, ..Scenario::of(seed) }) {
                panic!("{failure}");
            }
        }
    }
}

/// Days of half an hour each, or of two hours in `.ci/run --soak`: the same hours, shorter.
#[test]
fn days_of_traffic_leave_no_trace() {
    let (count, seconds) = if cfg!(lowtide_soak) { (4, 7200.0) } else { (2, 1800.0) };
    let month = days::run(7, count, seconds);
    assert!(month.faults.is_empty(), "{:#?}", month.faults);
    assert!(month.seen.shed_mib > 0.0, "no day had overload");
}

/// Four times what fits, and from the eighth second on a quarter of it.
fn falls(seed: u64) -> Scenario {
    let mut scenario = Scenario::steady(seed, MIXES[1], 1.0, 4.0);
    scenario.load = Load { low: 4.0, high: 0.25, shape: Shape::Step { at: 8.0 } };
    scenario.lasts = 12.0;
    scenario
}

#[test]
fn sheds_end_within_a_quarter_of_a_second_with_decay_off_and_the_page_cache_at_the_limit() {
    for (decay, files) in [(Some(1.0), 0.0), (None, 0.0), (Some(1.0), 0.99), (None, 1.0)] {
        for seed in 0..sample(10) {
            let mut scenario = falls(seed);
            scenario.build.decay = decay;
            scenario.build.files = files;
            let seen = run(&scenario, Settings::default());
            let faults = claims::faults(&scenario, &seen);
            assert!(faults.is_empty(), "seed {seed}, decay {decay:?}: {faults:?}");
            let last = seen.last_shed.expect("it was overload");
            assert!(last <= 8.25, "seed {seed}, decay {decay:?}, files {files}: shed at {last:.3}");
        }
    }
}

#[test]
fn page_cache_alone_sheds_nothing() {
    for seed in 0..10 {
        let mut scenario = Scenario::steady(seed, MIXES[0], 1.0, 0.3);
        scenario.build.files = 0.99;
        let seen = run(&scenario, Settings::default());
        assert_eq!(seen.shed_mib, 0.0, "seed {seed}");
        assert_eq!(seen.levels, [], "seed {seed}");
    }
}

#[test]
fn k_finds_the_truth_within_seconds_however_late_the_loop_ticks() {
    let millis = Duration::from_millis;
    for late in [Late::Sometimes(0.0), Late::Always(millis(10), millis(250))] {
        for (one, other) in [(0.5, 1.0), (1.0, 2.0), (2.0, 0.5)] {
            for seed in 0..sample(5) {
                let mut scenario = Scenario::steady(seed, MIXES[0], one, 4.0);
                scenario.kind = Kind::Change;
                scenario.truth.change = Some((8.0, other));
                scenario.sampler.late = late;
                let seen = run(&scenario, Settings::default());
                let settles = claims::settles(&scenario, &seen);
                assert!(settles <= 10.0, "{one} to {other}, {late:?}, seed {seed}: {settles:.1} s");
                assert_eq!(seen.killed, None, "{one} to {other}, {late:?}, seed {seed}");
            }
        }
    }
}

/// The purpose of the simulator: a controller without one of its parts does not pass it. If
/// requests are measured, it does: then their reservations hold the load back.
#[test]
fn a_loop_without_dwell_time_or_with_marks_beyond_the_limit_is_found() {
    let dwell = Duration::ZERO;
    let flips = Thresholds { up: [0.75, 0.85, 0.93], down: [0.749, 0.849, 0.929], dwell };
    let blind = Thresholds { up: [0.98, 0.99, 1.0], down: [0.97, 0.98, 0.99], dwell };
    for (what, thresholds) in [("flips", flips), ("blind", blind)] {
        let settings = Settings { thresholds, ceiling: 0.95, ..Settings::default() };
        let found = (0..60).any(|seed| {
            let scenario = Scenario { measured: false, ..Scenario::of(seed) };
            let seen = run(&scenario, settings);
            !claims::faults(&scenario, &seen).is_empty()
        });
        assert!(found, "{what}");
    }
}

/// With other arrivals than those that were recorded.
#[test]
fn the_smallest_advised_limit_rejects_next_to_nothing_and_half_of_it_about_what_is_predicted() {
    for (name, load) in LOADS {
        let advised = days::compare(7, MIXES[1], load, 120.0).expect("enough requests");
        println!("{name}, seed 7: {advised:?}");
        assert!(!advised.killed, "{name}");
        assert!(advised.smallest.real < 0.002, "{name}");
        let ratio = advised.half.real / advised.half.predicted;
        assert!((0.5..=1.5).contains(&ratio), "{name}: {ratio:.2}");
    }
}

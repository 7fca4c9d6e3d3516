//! Random schedules of an arena beside streams, over the simulation.
//!
//! Some here, where the arena checks all of its books after each reclaim; twenty thousand and more
//! with `cargo bench --bench schedules`, which also runs a single seed.
//!
//! Invariant: the harness's.

mod calls;
mod harness;

use lowtide_cuda_sim::sample;

use harness::{Done, Memory, Schedule};

/// All schedules: a few seconds with optimisation.
const ALL_SEEDS: u64 = 300;
/// Schedules that run at least.
const SEEDS: u64 = sample(ALL_SEEDS);

/// Few schedules are refused memory: more run until one is.
#[test]
fn random_schedules_keep_every_byte_and_leave_nothing_behind() {
    let all = run(Schedule::of, |all| all.refused > 0);
    println!("{all:?}");
    assert!(all.sleeps > SEEDS / 2 && all.refused > 0);
    assert!(all.moves > 0, "no block moved");
}

#[test]
fn random_schedules_on_plain_segments_keep_every_byte_and_leave_nothing_behind() {
    println!("{:?}", run(|seed| Schedule::of(seed).over(Memory::Plain), |_| true));
}

#[test]
fn random_schedules_on_segments_of_a_pool_keep_every_byte_and_leave_nothing_behind() {
    println!("{:?}", run(|seed| Schedule::of(seed).over(Memory::Pool), |_| true));
}

/// Seeds of which many use a buffer of a ring twice in one sleep or wake.
#[test]
fn random_schedules_through_a_ring_keep_every_byte_and_leave_nothing_behind() {
    println!("{:?}", run(|seed| Schedule::of(ALL_SEEDS + seed).through_ring(), |_| true));
}

fn run(of: impl Fn(u64) -> Schedule, is_enough: impl Fn(&Done) -> bool) -> Done {
    let mut all = Done::default();
    for seed in 0..ALL_SEEDS {
        if seed >= SEEDS && is_enough(&all) {
            break;
        }
        match of(seed).run() {
            Ok(done) => {
                all.acts += done.acts;
                all.sleeps += done.sleeps;
                all.moves += done.moves;
                all.refused += done.refused;
                all.driver_calls += done.driver_calls;
                all.unsafe_unmaps += done.unsafe_unmaps;
            }
            Err(failure) => panic!("{failure}"),
        }
    }
    assert!(all.acts >= SEEDS * 400 && all.driver_calls > all.acts);
    assert_eq!(all.unsafe_unmaps, 0);
    all
}

//! Random schedules of an arena beside streams, over the simulation.
//!
//! A few hundred here, where the arena checks all of its books after each reclaim; twenty thousand
//! and more with `cargo bench --bench schedules`, which also runs a single seed.
//!
//! Invariant: the harness's.

mod harness;
mod planted;

use harness::{Done, Schedule};

/// Schedules: a few seconds without optimisation.
const SEEDS: u64 = 300;

#[test]
fn random_schedules_keep_every_byte_and_leave_nothing_behind() {
    let mut all = Done::default();
    for seed in 0..SEEDS {
        match Schedule::of(seed).run() {
            Ok(done) => {
                all.acts += done.acts;
                all.sleeps += done.sleeps;
                all.refused += done.refused;
                all.driver_calls += done.driver_calls;
                all.unsafe_unmaps += done.unsafe_unmaps;
            }
            Err(failure) => panic!("{failure}"),
        }
    }
    println!("{all:?}");
    assert!(all.acts >= SEEDS * 400 && all.driver_calls > all.acts);
    assert!(all.sleeps > SEEDS && all.refused > 0);
    assert_eq!(all.unsafe_unmaps, 0);
}

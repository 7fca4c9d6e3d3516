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

/// Schedules: a few seconds without optimisation.
const SEEDS: u64 = sample(300);

#[test]
fn random_schedules_keep_every_byte_and_leave_nothing_behind() {
    let all = run(Memory::Virtual);
    println!("{all:?}");
    assert!(all.sleeps > SEEDS && all.refused > 0);
}

#[test]
fn random_schedules_on_plain_segments_keep_every_byte_and_leave_nothing_behind() {
    println!("{:?}", run(Memory::Plain));
}

#[test]
fn random_schedules_on_segments_of_a_pool_keep_every_byte_and_leave_nothing_behind() {
    println!("{:?}", run(Memory::Pool));
}

fn run(memory: Memory) -> Done {
    let mut all = Done::default();
    for seed in 0..SEEDS {
        match Schedule::of(seed).over(memory).run() {
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
    assert!(all.acts >= SEEDS * 400 && all.driver_calls > all.acts);
    assert_eq!(all.unsafe_unmaps, 0);
    all
}

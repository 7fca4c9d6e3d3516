//! Fits in virtual time; the bench `room` runs real ones.
//!
//! Invariant: the simulator's claims.

use super::simulated::sim::fit;

/// The number of schedules: some seconds without optimisation.
const SEEDS: u64 = if cfg!(lowtide_soak) { 1_000 } else { 40 };

#[test]
fn no_possible_fit_is_refused_and_no_process_is_killed_when_its_limit_falls() {
    let (mut fitted, mut refused, mut served) = (0, 0, 0);
    for seed in 0..SEEDS {
        let seen = fit::run(seed).unwrap_or_else(|fault| panic!("seed {seed}: {fault:?}"));
        assert!(seen.seconds.is_none() || !seen.impossible, "seed {seed}: {seen:?}");
        assert!(seen.seconds.is_some() || !seen.possible, "seed {seed}: {seen:?}");
        fitted += u64::from(seen.seconds.is_some());
        refused += u64::from(seen.seconds.is_none());
        served += u64::from(seen.served > 0);
    }
    println!("{SEEDS} seeds: {fitted} fitted, {refused} were refused, {served} served afterwards");
    assert!(fitted > SEEDS / 2 && refused > SEEDS / 20, "the schedules are too easy or too hard");
    assert!(served > SEEDS / 3, "{served}: too few have requests");
}

//! Prints the figures of evictions under requests by Zipf's law; [`crate::zipf`] serves them.

use clap::Args;

use crate::common::figures::{Figures, count};
use crate::zipf::{self, CASES, Compared, FAULTS, Hits, NAMES};

/// The least part of the hits of the best of LRU, LFU and GDSF in each case, as means of its seeds.
const HIT_RATIO_MIN: f64 = 0.97;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The number of requests of each case.
    #[arg(long, default_value_t = 100_000)]
    requests: usize,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The number of seeds of each case.
    #[arg(long, default_value_t = 10)]
    seeds: u64,
    /// Only cases whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
}

/// Adds the figures of the cases.
pub(crate) fn measure(arguments: &Arguments, figures: &mut Figures) {
    let Arguments { requests, seed, seeds, only } = arguments;
    let mut faults = [0; FAULTS.len()];
    // The least of all cases, and that of all cases and seeds.
    let [mut least, mut worst] = [Hits { requests: f64::INFINITY, load_time: f64::INFINITY }; 2];
    for case in CASES.iter().filter(|case| case.name.contains(only)) {
        let mut all = Vec::new();
        for seed in *seed..seed.saturating_add(*seeds) {
            let compared = zipf::compare(case, seed, *requests);
            worst = worst.with(compared.ratio(), f64::min);
            faults.iter_mut().zip(compared.faults).for_each(|(sum, more)| *sum += more);
            all.push(compared);
        }
        let mean = Compared::mean(&all);
        least = least.with(mean.ratio(), f64::min);
        for (name, hits) in NAMES.into_iter().zip(mean.hits) {
            figures.add(format!("room.zipf.{}.{name}", case.name), hits.requests, "ratio");
        }
    }
    for (name, found) in FAULTS.into_iter().zip(faults) {
        figures.at_most(format!("room.zipf.{name}"), count(found), "requests", 0.0);
    }
    figures.at_least("room.zipf.hit_ratio", least.requests, "of_the_best", HIT_RATIO_MIN);
    figures.add("room.zipf.hit_ratio_worst_seed", worst.requests, "of_the_best");
    figures.add("room.zipf.saved_ratio", least.load_time, "of_the_best");
    figures.add("room.zipf.saved_ratio_worst_seed", worst.load_time, "of_the_best");
}

//! Prints the figures of evictions under requests by Zipf's law; [`crate::zipf`] serves them.

use std::ops::RangeInclusive;

use crate::common::figures::{Figures, count};
use crate::zipf::{self, CASES, Compared, FAULTS, Hits, NAMES};

/// The least part of the hits of the best of LRU, LFU and GDSF in each case, as means of its seeds.
const HIT_RATIO_MIN: f64 = 0.97;

/// The requests of each case, and its seeds.
const REQUESTS: usize = 100_000;
const SEEDS: RangeInclusive<u64> = 1..=10;

/// Adds the figures of the cases.
pub(crate) fn measure(figures: &mut Figures) {
    let mut faults = [0; FAULTS.len()];
    let mut least = Hits { requests: f64::INFINITY, load_time: f64::INFINITY };
    for case in CASES {
        let all: Vec<_> = SEEDS.map(|seed| zipf::compare(case, seed, REQUESTS)).collect();
        for compared in &all {
            faults.iter_mut().zip(compared.faults).for_each(|(sum, more)| *sum += more);
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
    figures.add("room.zipf.saved_ratio", least.load_time, "of_the_best");
}

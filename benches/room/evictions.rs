//! Prints the figures of evictions under requests by Zipf's law; [`crate::zipf`] serves them.

#![expect(clippy::cast_precision_loss, reason = "the number of seeds is far below 2^52")]

use clap::Args;

use crate::zipf::{self, Case, Compared, Draw, Drift, Hits};

/// The least part of the hits of the best of LRU, LFU and GDSF.
const HIT_RATIO_MIN: f64 = 0.97;

const CASES: &[Case] = &[
    case("equal", 1.0, Draw::Equal, Drift::Never),
    case("flat", 0.9, Draw::Equal, Drift::Never),
    case("steep", 1.1, Draw::Equal, Drift::Never),
    case("equal_swap", 1.0, Draw::Equal, Drift::Swap(500)),
    case("equal_shuffle", 1.0, Draw::Equal, Drift::Shuffle(5000)),
    case("sizes", 1.0, Draw::Sizes, Drift::Never),
    case("sizes_swap", 1.0, Draw::Sizes, Drift::Swap(500)),
    case("sizes_shuffle", 1.0, Draw::Sizes, Drift::Shuffle(5000)),
    case("independent", 1.0, Draw::Independent, Drift::Never),
    case("independent_swap", 1.0, Draw::Independent, Drift::Swap(500)),
];

const fn case(name: &'static str, exponent: f64, draw: Draw, drift: Drift) -> Case {
    Case { name, exponent, draw, drift }
}

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The number of requests of each case.
    #[arg(long, default_value_t = 100_000)]
    requests: usize,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The number of seeds of each case.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Only cases whose name contains this.
    #[arg(long)]
    only: Option<String>,
}

impl Default for Arguments {
    fn default() -> Self {
        Self { requests: 100_000, seed: 1, seeds: 1, only: None }
    }
}

/// Runs the cases and prints their figures. Returns `true` if every goal held.
pub(crate) fn measure(arguments: &Arguments) -> bool {
    let Arguments { requests, seed, seeds, only } = arguments;
    println!("10 models, room for 3, {requests} requests: the share that hits, and in");
    println!("parentheses the share of the load time that the hits save");
    let (mut refused, mut over_limit, mut other) = (0, 0, 0);
    let (mut hit_ratio, mut saved_ratio) = (f64::INFINITY, f64::INFINITY);
    let is_chosen = |case: &&Case| only.as_ref().is_none_or(|only| case.name.contains(only));
    for case in CASES.iter().filter(is_chosen) {
        let mut all = Vec::new();
        for seed in *seed..seed.saturating_add(*seeds) {
            let compared = zipf::compare(case, seed, *requests);
            show(case, seed, &compared);
            let ratio = compared.ratio();
            hit_ratio = hit_ratio.min(ratio.requests);
            saved_ratio = saved_ratio.min(ratio.load_time);
            refused += compared.faults.refused;
            over_limit += compared.faults.over_limit;
            other += compared.faults.other;
            all.push(compared);
        }
        show_means(case, &all);
    }
    println!("figure room.zipf.refused {refused} requests");
    println!("figure room.zipf.over_limit {over_limit} times");
    println!("figure room.zipf.other_faults {other} requests");
    println!("figure room.zipf.hit_ratio {hit_ratio:.4} of_the_best");
    println!("figure room.zipf.saved_ratio {saved_ratio:.4} of_the_best");
    let holds = hit_ratio >= HIT_RATIO_MIN && refused + over_limit + other == 0;
    let held = if holds { "held" } else { "missed" };
    println!("goals: no refusal, never over the limit, hit_ratio at least {HIT_RATIO_MIN}: {held}");
    holds
}

/// The policies by name.
fn policies(compared: &Compared) -> [(&'static str, Hits); 5] {
    let Compared { ours, lru, lfu, gdsf, belady, .. } = *compared;
    [("ours", ours), ("lru", lru), ("lfu", lfu), ("gdsf", gdsf), ("belady", belady)]
}

/// Prints the hits of each policy.
fn show(case: &Case, seed: u64, compared: &Compared) {
    print!("{:<16} seed {seed}:", case.name);
    for (name, hits) in policies(compared) {
        print!(" {name} {:.4} ({:.4})", hits.requests, hits.load_time);
    }
    let ratio = compared.ratio();
    println!("; of the best {:.4} ({:.4})", ratio.requests, ratio.load_time);
}

/// Prints the hit ratio of each policy, the mean of all seeds, as a figure.
fn show_means(case: &Case, all: &[Compared]) {
    let mut sums = [0.0; 5];
    let mut names = [""; 5];
    for compared in all {
        for (at, (name, hits)) in policies(compared).into_iter().enumerate() {
            sums[at] += hits.requests;
            names[at] = name;
        }
    }
    for (name, sum) in names.into_iter().zip(sums) {
        println!("figure room.zipf.{}.{name} {:.4} ratio", case.name, sum / all.len() as f64);
    }
}

//! Prints the figures of evictions under requests by Zipf's law; [`crate::zipf`] serves them.

use clap::Args;

use crate::zipf::{self, Case, Compared, Draw, Drift, Faults, Hits};

/// The least part of the hits of the best of LRU, LFU and GDSF in each case, as means of its seeds.
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
    #[arg(long, default_value_t = 10)]
    seeds: u64,
    /// Only cases whose name contains this.
    #[arg(long)]
    only: Option<String>,
}

/// Runs the cases and prints their figures. Returns `true` if every goal held.
pub(crate) fn measure(arguments: &Arguments) -> bool {
    let Arguments { requests, seed, seeds, only } = arguments;
    println!("10 models, room for 3, {requests} requests: the share that hits, and in");
    println!("parentheses the share of the load time that the hits save");
    let mut faults = Faults::default();
    // The least of all cases, and that of all cases and seeds.
    let [mut least, mut worst] = [Hits { requests: f64::INFINITY, load_time: f64::INFINITY }; 2];
    let is_chosen = |case: &&Case| only.as_ref().is_none_or(|only| case.name.contains(only));
    for case in CASES.iter().filter(is_chosen) {
        let mut all = Vec::new();
        for seed in *seed..seed.saturating_add(*seeds) {
            let compared = zipf::compare(case, seed, *requests);
            show(case, &format!("seed {seed}"), &compared);
            worst = worst.min(compared.ratio());
            faults.refused += compared.faults.refused;
            faults.over_limit += compared.faults.over_limit;
            faults.other += compared.faults.other;
            all.push(compared);
        }
        let mean = Compared::mean(&all);
        show(case, "mean", &mean);
        least = least.min(mean.ratio());
        for (name, hits) in policies(&mean) {
            println!("figure room.zipf.{}.{name} {:.4} ratio", case.name, hits.requests);
        }
    }
    let Faults { refused, over_limit, other } = faults;
    println!("figure room.zipf.refused {refused} requests");
    println!("figure room.zipf.over_limit {over_limit} times");
    println!("figure room.zipf.other_faults {other} requests");
    println!("figure room.zipf.hit_ratio {:.4} of_the_best", least.requests);
    println!("figure room.zipf.hit_ratio_worst_seed {:.4} of_the_best", worst.requests);
    println!("figure room.zipf.saved_ratio {:.4} of_the_best", least.load_time);
    println!("figure room.zipf.saved_ratio_worst_seed {:.4} of_the_best", worst.load_time);
    let holds = least.requests >= HIT_RATIO_MIN && refused + over_limit + other == 0;
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
fn show(case: &Case, of: &str, compared: &Compared) {
    print!("{:<16} {of}:", case.name);
    for (name, hits) in policies(compared) {
        print!(" {name} {:.4} ({:.4})", hits.requests, hits.load_time);
    }
    let ratio = compared.ratio();
    println!("; of the best {:.4} ({:.4})", ratio.requests, ratio.load_time);
}

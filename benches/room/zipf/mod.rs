//! Requests for models that do not all fit, in virtual time: the hits of lowtide's evictions and of
//! rival policies.
//!
//! A seed draws models, arrivals and the time for which each request holds its model. `ours` drives
//! `Admission`, `Resources` and `Managed`; `rivals` are exact models of other policies. All serve
//! the same requests under the same rules: a model in use is not evicted, a model that is requested
//! is loaded if idle models can make room for it, and otherwise the request counts as a miss.
//! Nothing but the load of its model delays a request: while a model is loaded, no request arrives
//! or ends.

#![allow(clippy::cast_precision_loss, reason = "sizes and counts are far below 2^52")]

#[path = "../../index/chance.rs"]
#[allow(dead_code, reason = "another bench draws sizes too")]
mod chance;
mod ours;
mod rivals;
mod work;

use clap::Args;

use self::ours::Faults;
use self::rivals::{Counts, Frequency, Policy, Weight};
use self::work::{Case, Draw, Drift, MODELS, Work};

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

/// The share of requests that found their model loaded, and the share of the load time of a service
/// that loads for each request that these hits saved.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Hits {
    requests: f64,
    load_time: f64,
}

impl Hits {
    fn max(self, other: Self) -> Self {
        Self {
            requests: self.requests.max(other.requests),
            load_time: self.load_time.max(other.load_time),
        }
    }
}

/// The hits of all policies with the same requests.
#[derive(Clone, Copy, Debug)]
struct Compared {
    ours: Hits,
    faults: Faults,
    lru: Hits,
    /// The better of two: one counts uses since the last load, the other all.
    lfu: Hits,
    /// The better of two: the cost of a load is 1, or its time.
    gdsf: Hits,
    /// Evicts the model whose next request is furthest away. A bound if all models are of one size.
    belady: Hits,
}

impl Compared {
    /// Returns our hits divided by those of the best of LRU, LFU and GDSF.
    fn ratio(&self) -> Hits {
        let best = self.lru.max(self.lfu).max(self.gdsf);
        Hits {
            requests: self.ours.requests / best.requests,
            load_time: self.ours.load_time / best.load_time,
        }
    }
}

/// Serves the requests of a seed with all policies.
fn compare(case: &Case, seed: u64, requests: usize) -> Compared {
    let work = Work::draw(case, seed, requests);
    let run = |mut policy: Policy| rivals::run(&work, &mut policy);
    let lfu = |of| run(Policy::Frequency(Frequency::new(of)));
    let gdsf = |weight| run(Policy::gdsf(weight));
    let (ours, faults) = ours::run(&work);
    Compared {
        ours,
        faults,
        lru: run(Policy::lru()),
        lfu: lfu(Counts::SinceLoad).max(lfu(Counts::All)),
        gdsf: gdsf(Weight::One).max(gdsf(Weight::LoadTime)),
        belady: run(Policy::belady(&work)),
    }
}

/// Runs the cases and prints their figures. Returns `true` if every goal held.
pub(crate) fn measure(arguments: &Arguments) -> bool {
    let Arguments { requests, seed, seeds, only } = arguments;
    println!("{MODELS} models, room for 3, {requests} requests: the share that hits, and in");
    println!("parentheses the share of the load time that the hits save");
    let (mut refused, mut over_limit, mut other) = (0, 0, 0);
    let (mut hit_ratio, mut saved_ratio) = (f64::INFINITY, f64::INFINITY);
    let is_chosen = |case: &&Case| only.as_ref().is_none_or(|only| case.name.contains(only));
    for case in CASES.iter().filter(is_chosen) {
        for seed in *seed..seed.saturating_add(*seeds) {
            let compared = compare(case, seed, *requests);
            show(case, seed, &compared);
            let ratio = compared.ratio();
            hit_ratio = hit_ratio.min(ratio.requests);
            saved_ratio = saved_ratio.min(ratio.load_time);
            refused += compared.faults.refused;
            over_limit += compared.faults.over_limit;
            other += compared.faults.other;
        }
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

/// Prints the hits of each policy.
fn show(case: &Case, seed: u64, compared: &Compared) {
    let Compared { ours, lru, lfu, gdsf, belady, .. } = compared;
    let all = [("ours", ours), ("lru", lru), ("lfu", lfu), ("gdsf", gdsf), ("belady", belady)];
    print!("{:<16} seed {seed}:", case.name);
    for (name, hits) in all {
        print!(" {name} {:.4} ({:.4})", hits.requests, hits.load_time);
    }
    let ratio = compared.ratio();
    println!("; of the best {:.4} ({:.4})", ratio.requests, ratio.load_time);
    for (name, hits) in all {
        println!("figure room.zipf.{}.{name} {:.4} ratio", case.name, hits.requests);
    }
}

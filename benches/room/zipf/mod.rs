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
#[allow(clippy::duplicate_mod, reason = "the tests run the controller's simulation too")]
mod chance;
mod ours;
mod rivals;
mod work;

use self::rivals::{Counts, Frequency, Policy, Weight};

pub(crate) use self::ours::Faults;
use self::work::Work;
pub(crate) use self::work::{Case, Draw, Drift};

/// The share of requests that found their model loaded, and the share of the load time of a service
/// that loads for each request that these hits saved.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Hits {
    pub(crate) requests: f64,
    pub(crate) load_time: f64,
}

impl Hits {
    pub(crate) fn min(self, other: Self) -> Self {
        Self {
            requests: self.requests.min(other.requests),
            load_time: self.load_time.min(other.load_time),
        }
    }

    fn max(self, other: Self) -> Self {
        Self {
            requests: self.requests.max(other.requests),
            load_time: self.load_time.max(other.load_time),
        }
    }
}

/// The hits of all policies with the same requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compared {
    pub(crate) ours: Hits,
    pub(crate) faults: Faults,
    pub(crate) lru: Hits,
    /// The better of two: one counts uses since the last load, the other all.
    pub(crate) lfu: Hits,
    /// The better of two: the cost of a load is 1, or its time.
    pub(crate) gdsf: Hits,
    /// Evicts the model whose next request is furthest away. A bound if all models are of one size.
    pub(crate) belady: Hits,
}

impl Compared {
    /// Returns the mean hits of each policy, without faults.
    pub(crate) fn mean(all: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> Hits| {
            let sum = |part: fn(Hits) -> f64| all.iter().map(|one| part(of(one))).sum::<f64>();
            let count = all.len() as f64;
            Hits {
                requests: sum(|hits| hits.requests) / count,
                load_time: sum(|hits| hits.load_time) / count,
            }
        };
        Self {
            ours: mean(|one| one.ours),
            faults: Faults::default(),
            lru: mean(|one| one.lru),
            lfu: mean(|one| one.lfu),
            gdsf: mean(|one| one.gdsf),
            belady: mean(|one| one.belady),
        }
    }

    /// Returns our hits divided by those of the best of LRU, LFU and GDSF.
    pub(crate) fn ratio(&self) -> Hits {
        let best = self.lru.max(self.lfu).max(self.gdsf);
        Hits {
            requests: self.ours.requests / best.requests,
            load_time: self.ours.load_time / best.load_time,
        }
    }
}

/// Serves the requests of a seed with all policies.
pub(crate) fn compare(case: &Case, seed: u64, requests: usize) -> Compared {
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

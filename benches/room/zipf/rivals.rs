//! Exact models of other policies. They evict in the order of a value, the least first, with
//! lowtide's rule for how many: as few as make room, or none.
//!
//! Invariant: a model in use is not evicted, and the models that are loaded fit the room.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use lowtide_admission::ByteSize;

use super::Hits;
use super::work::{MODELS, Model, Work};

/// The uses that LFU counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counts {
    SinceLoad,
    All,
}

/// The cost of a load to GDSF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weight {
    One,
    LoadTime,
}

pub(super) struct Frequency {
    of: Counts,
    counts: [f64; MODELS],
}

impl Frequency {
    pub(super) const fn new(of: Counts) -> Self {
        Self { of, counts: [0.0; MODELS] }
    }
}

/// GDSF (Cherkasova, 1998, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency
/// Caching Policy").
pub(super) struct Gdsf {
    weight: Weight,
    counts: [f64; MODELS],
    values: [f64; MODELS],
    /// The value of the model that was evicted last: what a model that is used starts from.
    clock: f64,
}

pub(super) enum Policy {
    /// The number of the last request for each.
    Lru([f64; MODELS]),
    Frequency(Frequency),
    Gdsf(Gdsf),
    /// The numbers of the requests for each.
    Belady([VecDeque<usize>; MODELS]),
}

impl Policy {
    pub(super) const fn lru() -> Self {
        Self::Lru([0.0; MODELS])
    }

    pub(super) const fn gdsf(weight: Weight) -> Self {
        Self::Gdsf(Gdsf { weight, counts: [0.0; MODELS], values: [0.0; MODELS], clock: 0.0 })
    }

    pub(super) fn belady(work: &Work) -> Self {
        let mut next: [VecDeque<usize>; MODELS] = std::array::from_fn(|_| VecDeque::new());
        for (nth, request) in work.requests.iter().enumerate() {
            next[request.model].push_back(nth);
        }
        Self::Belady(next)
    }

    /// Notes that the request of this number is served.
    fn used(&mut self, nth: usize, model: usize, Model { size, load_time }: Model) {
        match self {
            Self::Lru(last) => last[model] = nth as f64,
            Self::Frequency(frequency) => frequency.counts[model] += 1.0,
            Self::Gdsf(gdsf) => {
                gdsf.counts[model] += 1.0;
                let cost = match gdsf.weight {
                    Weight::One => 1.0,
                    Weight::LoadTime => load_time.as_secs_f64(),
                };
                gdsf.values[model] = gdsf.clock + gdsf.counts[model] * cost / size.as_f64();
            }
            Self::Belady(_) => {}
        }
    }

    fn evicted(&mut self, model: usize) {
        match self {
            Self::Frequency(Frequency { of: Counts::SinceLoad, counts }) => counts[model] = 0.0,
            Self::Gdsf(gdsf) => {
                gdsf.clock = gdsf.clock.max(gdsf.values[model]);
                gdsf.counts[model] = 0.0;
            }
            Self::Lru(_) | Self::Frequency(_) | Self::Belady(_) => {}
        }
    }

    /// Returns the value of a model at the request of this number: the least is evicted first.
    fn value(&mut self, nth: usize, model: usize) -> f64 {
        match self {
            Self::Lru(last) => last[model],
            Self::Frequency(frequency) => frequency.counts[model],
            Self::Gdsf(gdsf) => gdsf.values[model],
            Self::Belady(next) => {
                let next = &mut next[model];
                while next.front().is_some_and(|at| *at <= nth) {
                    next.pop_front();
                }
                next.front().map_or(f64::NEG_INFINITY, |at| -(*at as f64))
            }
        }
    }
}

/// The models that are loaded.
struct Loaded<'a> {
    work: &'a Work,
    loaded: [bool; MODELS],
    guards: [u32; MODELS],
    free: ByteSize,
}

impl Loaded<'_> {
    fn size(&self, model: usize) -> ByteSize {
        self.work.models[model].size
    }

    /// Loads a model. Returns `false` if idle models cannot make room for it.
    fn load(&mut self, nth: usize, model: usize, policy: &mut Policy) -> bool {
        let needs = self.size(model);
        let is_idle = |other: &usize| self.loaded[*other] && self.guards[*other] == 0;
        let idle = (0..MODELS).filter(is_idle).map(|other| (policy.value(nth, other), other));
        let mut idle: Vec<_> = idle.collect();
        idle.sort_by(|one, other| one.0.total_cmp(&other.0));
        let (mut free, mut victims) = (self.free, Vec::new());
        for (_, other) in idle {
            if free >= needs {
                break;
            }
            free = free.saturating_add(self.size(other));
            victims.push(other);
        }
        if free < needs {
            return false;
        }
        // The last one may have made earlier ones superfluous.
        for at in (0..victims.len()).rev() {
            let without = free.saturating_sub(self.size(victims[at]));
            if without >= needs {
                free = without;
                victims.remove(at);
            }
        }
        for victim in victims {
            self.loaded[victim] = false;
            policy.evicted(victim);
        }
        self.loaded[model] = true;
        self.free = free.saturating_sub(needs);
        true
    }
}

/// Serves the requests.
pub(super) fn run(work: &Work, policy: &mut Policy) -> Hits {
    let (loaded, guards) = ([false; MODELS], [0; MODELS]);
    let mut models = Loaded { work, loaded, guards, free: work.room };
    let mut ends: BinaryHeap<(Reverse<Duration>, usize)> = BinaryHeap::new();
    let (mut hits, mut saved) = (0_u32, Duration::ZERO);
    for (nth, request) in work.requests.iter().enumerate() {
        while ends.peek().is_some_and(|(Reverse(end), _)| *end <= request.at) {
            if let Some((_, model)) = ends.pop() {
                models.guards[model] -= 1;
            }
        }
        let model = request.model;
        if models.loaded[model] {
            hits += 1;
            saved += work.models[model].load_time;
        } else if !models.load(nth, model, policy) {
            continue;
        }
        policy.used(nth, model, work.models[model]);
        models.guards[model] += 1;
        ends.push((Reverse(request.at + request.hold), model));
    }
    work.hits(hits, saved)
}

impl Work {
    pub(super) fn hits(&self, hits: u32, saved: Duration) -> Hits {
        let time = |request: &super::work::Request| self.models[request.model].load_time;
        let all: Duration = self.requests.iter().map(time).sum();
        let requests = f64::from(hits) / self.requests.len() as f64;
        Hits { requests, load_time: saved.as_secs_f64() / all.as_secs_f64() }
    }
}

//! Requests for models that do not all fit, in virtual time: the hits of lowtide's evictions and of
//! other policies.
//!
//! A seed draws models, arrivals and the time for which each request holds its model. `ours` drives
//! `Admission`, `Resources` and `Managed`; the [`RIVALS`] are exact models of other policies. All
//! serve the same requests under the same rules: a model in use is not evicted, a model that is
//! requested is loaded if idle models can make room for it, and otherwise the request counts as a
//! miss. Nothing but the load of its model delays a request: while a model is loaded, no request
//! arrives or ends.

#![allow(clippy::cast_precision_loss, reason = "sizes and counts are far below 2^52")]

#[path = "../sim/chance.rs"]
#[allow(dead_code, clippy::duplicate_mod, reason = "other simulations have it too")]
mod chance;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lowtide_admission::clock::{Clock as _, ManualClock, Moment};
use lowtide_admission::{
    Admission, Budget, ByteSize, Cost, Managed, ResourceError, Resources, Use,
};
use lowtide_core::sync::lock;

pub(crate) use self::chance::Chance;

/// The number of models.
const MODELS: usize = 10;
/// There is room for so many models of mean size.
const ROOM: u64 = 3;
/// Requests a second, and the rate at which those that hold a model end.
const ARRIVALS: f64 = 1.0;
const ENDS: f64 = 2.0;

/// The sizes and load times of the models.
#[derive(Clone, Copy, Debug)]
enum Draw {
    /// 1 GiB and 4 s each.
    Equal,
    /// 0.5 to 2 GiB; 0.5 s and the time to read them at 256 to 1024 MiB/s.
    Sizes,
    /// 0.5 to 2 GiB, and 0.5 to 8 s independent of the size.
    Independent,
}

/// How the popularity of the models changes.
#[derive(Clone, Copy, Debug)]
enum Drift {
    Never,
    /// Two models change places after each so many requests.
    Swap(usize),
    /// All models change places after each so many requests.
    Shuffle(usize),
}

/// What is drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The model of rank k is requested in proportion to `1 / k^exponent`.
    exponent: f64,
    draw: Draw,
    drift: Drift,
}

pub(crate) const CASES: &[Case] = &[
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

#[derive(Clone, Copy)]
struct Model {
    size: ByteSize,
    load_time: Duration,
}

struct Request {
    /// The time of its arrival without loads.
    at: Duration,
    model: usize,
    hold: Duration,
}

struct Work {
    models: [Model; MODELS],
    room: ByteSize,
    requests: Vec<Request>,
}

impl Work {
    fn draw(case: &Case, seed: u64, count: usize) -> Self {
        let mut chance = Chance::new(seed);
        let models: [Model; MODELS] = std::array::from_fn(|_| model(case.draw, &mut chance));
        let sizes = || models.iter().map(|model| model.size.get());
        let mean = sizes().sum::<u64>() / MODELS as u64;
        let room = ByteSize::new((ROOM * mean).max(sizes().max().unwrap_or_default()));
        let mut ranks: [usize; MODELS] = std::array::from_fn(|rank| rank);
        shuffle(&mut ranks, &mut chance);
        let weights: [f64; MODELS] =
            std::array::from_fn(|rank| ((rank + 1) as f64).powf(-case.exponent));
        let mut at = Duration::ZERO;
        let requests = (0..count).map(|nth| {
            match case.drift {
                Drift::Swap(each) if nth > 0 && nth % each == 0 => {
                    ranks.swap(chance.below(MODELS), chance.below(MODELS));
                }
                Drift::Shuffle(each) if nth > 0 && nth % each == 0 => {
                    shuffle(&mut ranks, &mut chance);
                }
                _ => {}
            }
            let mut left = chance.unit() * weights.iter().sum::<f64>();
            let is_over = |weight: &f64| {
                left -= weight;
                left < 0.0
            };
            let rank = weights.iter().position(is_over).unwrap_or(MODELS - 1);
            at += Duration::from_secs_f64(chance.gap(ARRIVALS));
            let hold = Duration::from_secs_f64(chance.gap(ENDS));
            Request { at, model: ranks[rank], hold }
        });
        let requests = requests.collect();
        Self { models, room, requests }
    }

    fn hits(&self, hits: u32, saved: Duration) -> Hits {
        let all: Duration = self.requests.iter().map(|of| self.models[of.model].load_time).sum();
        let requests = f64::from(hits) / self.requests.len() as f64;
        Hits { requests, load_time: saved.as_secs_f64() / all.as_secs_f64() }
    }
}

fn model(draw: Draw, chance: &mut Chance) -> Model {
    let mut between = |least: f64, most: f64| least * (most / least).powf(chance.unit());
    let (mib, seconds) = match draw {
        Draw::Equal => (1024.0, 4.0),
        Draw::Sizes => {
            let mib = between(512.0, 2048.0);
            (mib, 0.5 + mib / between(256.0, 1024.0))
        }
        Draw::Independent => (between(512.0, 2048.0), between(0.5, 8.0)),
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "512 to 2048")]
    let size = ByteSize::mib(mib as u64);
    Model { size, load_time: Duration::from_secs_f64(seconds) }
}

fn shuffle(ranks: &mut [usize; MODELS], chance: &mut Chance) {
    for at in (1..MODELS).rev() {
        ranks.swap(at, chance.below(at + 1));
    }
}

/// The share of requests that found their model loaded, and the share of the load time of a service
/// that loads for each request that these hits saved.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hits {
    pub(crate) requests: f64,
    pub(crate) load_time: f64,
}

impl Hits {
    /// Combines each part with that of another one.
    pub(crate) fn with(self, other: Self, of: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            requests: of(self.requests, other.requests),
            load_time: of(self.load_time, other.load_time),
        }
    }
}

/// The policies that are compared. Of two variants of LFU and of GDSF the better one counts.
pub(crate) const NAMES: [&str; 5] = ["ours", "lru", "lfu", "gdsf", "belady"];
/// What must not happen: requests rejected although free and idle bytes were enough for their
/// model; times that the loaded models did not fit the room, or that the ledger was over its
/// ceiling; other requests that failed.
pub(crate) const FAULTS: [&str; 3] = ["refused", "over_limit", "other_faults"];

/// The hits of all policies with the same requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Compared {
    pub(crate) hits: [Hits; NAMES.len()],
    pub(crate) faults: [u64; FAULTS.len()],
}

impl Compared {
    /// Returns the mean hits of each policy, without faults.
    pub(crate) fn mean(all: &[Self]) -> Self {
        let mut mean = Self::default();
        for (nth, hits) in mean.hits.iter_mut().enumerate() {
            let sum = all.iter().fold(*hits, |sum, one| sum.with(one.hits[nth], |a, b| a + b));
            *hits = sum.with(sum, |sum, _| sum / all.len() as f64);
        }
        mean
    }

    /// Returns our hits divided by those of the best of LRU, LFU and GDSF.
    pub(crate) fn ratio(&self) -> Hits {
        let [ours, lru, lfu, gdsf, _] = self.hits;
        ours.with(lru.with(lfu, f64::max).with(gdsf, f64::max), |ours, best| ours / best)
    }
}

/// Serves the requests of a seed with all policies.
pub(crate) fn compare(case: &Case, seed: u64, requests: usize) -> Compared {
    let work = Work::draw(case, seed, requests);
    let mut compared = Compared::default();
    (compared.hits[0], compared.faults) = World::run(&work);
    for rival in RIVALS {
        let hits = rival.run(&work);
        for (of, _) in compared.hits.iter_mut().zip(NAMES).filter(|(_, name)| *name == rival.name) {
            *of = of.with(hits, f64::max);
        }
    }
    compared
}

/// What is known of a model's requests. Numbers of requests are those of the work.
#[derive(Clone, Copy, Default)]
struct Uses {
    last: f64,
    next: f64,
    since_load: f64,
    all: f64,
    gdsf: f64,
}

/// Another policy. It evicts the models with the least value, with lowtide's rule for how many: as
/// few as make room, or none.
struct Rival {
    name: &'static str,
    value: fn(&Uses) -> f64,
    /// The cost of a load to GDSF.
    cost: fn(&Model) -> f64,
}

const RIVALS: [Rival; 6] = [
    Rival { name: "lru", value: |of| of.last, cost: |_| 1.0 },
    Rival { name: "lfu", value: |of| of.since_load, cost: |_| 1.0 },
    Rival { name: "lfu", value: |of| of.all, cost: |_| 1.0 },
    // Cherkasova, 1998, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
    // Policy".
    Rival { name: "gdsf", value: |of| of.gdsf, cost: |_| 1.0 },
    Rival { name: "gdsf", value: |of| of.gdsf, cost: |model| model.load_time.as_secs_f64() },
    // Evicts the model whose next request is furthest away. A bound if all are of one size.
    Rival { name: "belady", value: |of| -of.next, cost: |_| 1.0 },
];

impl Rival {
    /// Serves the requests. A model in use is not evicted, and the loaded models fit the room.
    fn run(&self, work: &Work) -> Hits {
        let mut next = vec![f64::INFINITY; work.requests.len()];
        let mut first = [f64::INFINITY; MODELS];
        for (nth, request) in work.requests.iter().enumerate().rev() {
            next[nth] = std::mem::replace(&mut first[request.model], nth as f64);
        }
        let (mut loaded, mut guards) = ([false; MODELS], [0_u32; MODELS]);
        let (mut uses, mut clock) = ([Uses::default(); MODELS], 0.0_f64);
        let (mut free, mut ends) = (work.room, BTreeMap::<(Duration, usize), usize>::new());
        let (mut hits, mut saved) = (0, Duration::ZERO);
        for (nth, request) in work.requests.iter().enumerate() {
            while let Some(end) = ends.first_entry().filter(|end| end.key().0 <= request.at) {
                guards[end.remove()] -= 1_u32;
            }
            let (at, model) = (request.model, work.models[request.model]);
            uses[at].next = next[nth];
            if loaded[at] {
                hits += 1;
                saved += model.load_time;
            } else {
                let is_idle = |other: &usize| loaded[*other] && guards[*other] == 0;
                let mut idle: Vec<_> = (0..MODELS).filter(is_idle).collect();
                let value = |at: &usize| (self.value)(&uses[*at]);
                idle.sort_by(|one, other| value(one).total_cmp(&value(other)));
                let Some(victims) = work.victims(idle, &mut free, model.size) else { continue };
                for victim in victims {
                    loaded[victim] = false;
                    clock = clock.max(uses[victim].gdsf);
                    uses[victim].since_load = 0.0;
                }
                loaded[at] = true;
            }
            let of = &mut uses[at];
            (of.last, of.since_load, of.all) = (nth as f64, of.since_load + 1.0, of.all + 1.0);
            of.gdsf = clock + of.since_load * (self.cost)(&model) / model.size.as_f64();
            guards[at] += 1;
            ends.insert((request.at + request.hold, nth), at);
        }
        work.hits(hits, saved)
    }
}

impl Work {
    /// Returns the fewest of these models, the first ones first, that leave room for so many bytes,
    /// and takes those; `None` if all of them are too few.
    fn victims(
        &self,
        idle: Vec<usize>,
        free: &mut ByteSize,
        needs: ByteSize,
    ) -> Option<Vec<usize>> {
        let (mut left, mut victims) = (*free, Vec::new());
        for other in idle {
            if left >= needs {
                break;
            }
            left = left.saturating_add(self.models[other].size);
            victims.push(other);
        }
        // The last one may have made earlier ones superfluous.
        for at in (0..victims.len()).rev() {
            let without = left.saturating_sub(self.models[victims[at]].size);
            if without >= needs {
                left = without;
                victims.remove(at);
            }
        }
        *free = left.checked_sub(needs)?;
        Some(victims)
    }
}

/// What the loaders and unloaders see.
struct Watch {
    admission: Admission,
    room: ByteSize,
    /// The bytes of each model that is loaded.
    loaded: Mutex<[u64; MODELS]>,
    over_limit: AtomicU64,
}

impl Watch {
    fn check(&self) {
        let ledger = self.admission.ledger(Budget::Host);
        let is_over = lock(&self.loaded).iter().sum::<u64>() > self.room.get()
            || ledger.reserved() > ledger.ceiling();
        self.over_limit.fetch_add(u64::from(is_over), Ordering::SeqCst);
    }
}

/// The same requests, served by `Managed` resources that an `Admission` evicts.
///
/// A load waits for the unloads that make room for it, so the threads that unload end their work
/// before the next request, and no result depends on their order.
///
/// Invariant: `time of the clock = time of the requests + time of the loads`.
struct World<'a> {
    work: &'a Work,
    clock: Arc<ManualClock>,
    watch: Arc<Watch>,
    models: Vec<Managed<()>>,
    guards: [u32; MODELS],
    /// The time of the loads so far.
    loads: Duration,
    /// By the end of each, in the time of the requests, and its number.
    held: BTreeMap<(Duration, usize), (usize, Use<()>)>,
}

impl World<'_> {
    /// Serves the requests.
    fn run(work: &Work) -> (Hits, [u64; FAULTS.len()]) {
        let clock = Arc::new(ManualClock::new());
        // What resources reserve is rounded up.
        let limit = work.room.saturating_add(ByteSize::kib(1));
        let (admission, resources) = (Admission::with_limit(limit), Resources::new());
        resources.evict_for(&admission, clock.clone(), || {});
        let (room, loaded, over_limit) = (work.room, Mutex::default(), AtomicU64::new(0));
        let watch = Arc::new(Watch { admission: admission.clone(), room, loaded, over_limit });
        let models = work.models.iter().enumerate().map(|(nth, model)| {
            let (loads, unloads, time) = (Arc::clone(&watch), Arc::clone(&watch), clock.clone());
            let Model { size, load_time } = *model;
            let load = move || {
                lock(&loads.loaded)[nth] = size.get();
                loads.check();
                time.advance(load_time);
                Ok(())
            };
            let unload = move |()| {
                unloads.check();
                lock(&unloads.loaded)[nth] = 0;
            };
            let managed = Managed::builder(format!("model {nth}"), load)
                .unload(unload)
                .cost(Cost::host(size))
                .build(clock.clone(), Some(admission.clone()));
            assert_eq!(resources.add(&managed), Ok(()));
            managed
        });
        let models = models.collect();
        let (guards, loads, held) = ([0; MODELS], Duration::ZERO, BTreeMap::new());
        World { work, clock, watch: Arc::clone(&watch), models, guards, loads, held }.serve_all()
    }

    fn serve_all(mut self) -> (Hits, [u64; FAULTS.len()]) {
        let (mut hits, mut saved, mut refused, mut failed) = (0, Duration::ZERO, 0, 0);
        for (nth, request) in self.work.requests.iter().enumerate() {
            while let Some(end) = self.held.first_entry().filter(|end| end.key().0 <= request.at) {
                let ((end, _), (model, guard)) = end.remove_entry();
                self.set_time(end);
                self.guards[model] -= 1;
                drop(guard);
            }
            self.set_time(request.at);
            let model = request.model;
            let was_loaded = lock(&self.watch.loaded)[model] > 0;
            let before = self.clock.now();
            match self.models[model].acquire_blocking() {
                Ok(guard) => {
                    if was_loaded {
                        hits += 1;
                        saved += self.work.models[model].load_time;
                    }
                    self.loads += self.clock.now() - before;
                    self.guards[model] += 1;
                    self.held.insert((request.at + request.hold, nth), (model, guard));
                }
                Err(ResourceError::Rejected { .. }) => refused += u64::from(self.could_fit(model)),
                Err(_) => failed += 1,
            }
            self.watch.check();
        }
        let over_limit = self.watch.over_limit.load(Ordering::SeqCst);
        (self.work.hits(hits, saved), [refused, over_limit, failed])
    }

    /// Returns `true` if the free bytes and those of idle models are enough for this one.
    fn could_fit(&self, model: usize) -> bool {
        let size = |other: usize| self.work.models[other].size.get();
        let busy: u64 = (0..MODELS).filter(|other| self.guards[*other] > 0).map(size).sum();
        busy + size(model) <= self.work.room.get()
    }

    /// Moves the clock to this time of the requests.
    fn set_time(&self, time: Duration) {
        let to = Moment::ORIGIN + time + self.loads;
        self.clock.advance(to - self.clock.now());
    }
}

//! The same requests, served by `Managed` resources that an `Admission` evicts.
//!
//! A load waits for the unloads that make room for it, so the threads that unload end their work
//! before the next request, and no result depends on their order.
//!
//! Invariant: `time of the clock = time of the requests + time of the loads`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lowtide_admission::clock::{Clock, ManualClock, Moment};
use lowtide_admission::{
    Admission, Budget, ByteSize, Cost, Managed, ResourceError, Resources, Use,
};

use super::Hits;
use super::work::{MODELS, Work};

/// What must not happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// Requests that were rejected although free and idle bytes were enough for their model.
    pub(crate) refused: u64,
    /// Times that the models that were loaded did not fit the room, or that the ledger was over its
    /// ceiling.
    pub(crate) over_limit: u64,
    /// Loads that failed, and requests that were rejected for other reasons.
    pub(crate) other: u64,
}

/// What the loaders and unloaders see.
struct Watch {
    admission: Admission,
    room: ByteSize,
    /// The bytes of the models that are loaded.
    held: AtomicU64,
    loaded: [AtomicBool; MODELS],
    over_limit: AtomicU64,
}

impl Watch {
    fn check(&self) {
        let ledger = self.admission.ledger(Budget::Host);
        let is_over = self.held.load(Ordering::SeqCst) > self.room.get()
            || ledger.reserved() > ledger.ceiling();
        self.over_limit.fetch_add(u64::from(is_over), Ordering::SeqCst);
    }

    fn load(&self, model: usize, size: ByteSize) {
        self.held.fetch_add(size.get(), Ordering::SeqCst);
        self.loaded[model].store(true, Ordering::SeqCst);
        self.check();
    }

    fn unload(&self, model: usize, size: ByteSize) {
        self.check();
        self.held.fetch_sub(size.get(), Ordering::SeqCst);
        self.loaded[model].store(false, Ordering::SeqCst);
    }

    fn is_loaded(&self, model: usize) -> bool {
        self.loaded[model].load(Ordering::SeqCst)
    }
}

/// A request that holds its model, in the order of its end.
struct Held {
    /// The time of the requests at which it ends, and its number.
    end: Reverse<(Duration, usize)>,
    model: usize,
    guard: Use<()>,
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.end == other.end
    }
}

impl Eq for Held {}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Held {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.end.cmp(&other.end)
    }
}

struct World<'a> {
    work: &'a Work,
    clock: Arc<ManualClock>,
    watch: Arc<Watch>,
    models: Vec<Managed<()>>,
    guards: [u32; MODELS],
    /// The time of the loads so far.
    loads: Duration,
    held: BinaryHeap<Held>,
}

/// Serves the requests.
pub(super) fn run(work: &Work) -> (Hits, Faults) {
    let clock = Arc::new(ManualClock::new());
    // What resources reserve is rounded up.
    let limit = work.room.saturating_add(ByteSize::kib(1));
    let (admission, resources) = (Admission::with_limit(limit), Resources::new());
    resources.evict_for(&admission, clock.clone(), || {});
    let watch = Arc::new(Watch {
        admission: admission.clone(),
        room: work.room,
        held: AtomicU64::new(0),
        loaded: [const { AtomicBool::new(false) }; MODELS],
        over_limit: AtomicU64::new(0),
    });
    let models = work.models.iter().enumerate().map(|(nth, model)| {
        let (loads, unloads, time) = (Arc::clone(&watch), Arc::clone(&watch), clock.clone());
        let (size, load_time) = (model.size, model.load_time);
        let load = move || {
            loads.load(nth, size);
            time.advance(load_time);
            Ok(())
        };
        let managed = Managed::builder(format!("model {nth}"), load)
            .unload(move |()| unloads.unload(nth, size))
            .cost(Cost::host(size))
            .build(clock.clone(), Some(admission.clone()));
        assert_eq!(resources.add(Arc::new(managed.clone())), Ok(()));
        managed
    });
    let models = models.collect();
    let (guards, loads, held) = ([0; MODELS], Duration::ZERO, BinaryHeap::new());
    let mut world = World { work, clock, watch: Arc::clone(&watch), models, guards, loads, held };
    let found = world.serve_all();
    drop(world);
    found
}

impl World<'_> {
    fn serve_all(&mut self) -> (Hits, Faults) {
        let (mut hits, mut saved, mut faults) = (0, Duration::ZERO, Faults::default());
        for (nth, request) in self.work.requests.iter().enumerate() {
            self.end_requests(request.at);
            self.set_time(request.at);
            let model = request.model;
            let was_loaded = self.watch.is_loaded(model);
            let before = self.clock.now();
            match self.models[model].acquire_blocking() {
                Ok(guard) => {
                    if was_loaded {
                        hits += 1;
                        saved += self.work.models[model].load_time;
                    }
                    self.loads += self.clock.now() - before;
                    self.guards[model] += 1;
                    let end = Reverse((request.at + request.hold, nth));
                    self.held.push(Held { end, model, guard });
                }
                Err(ResourceError::Rejected { .. }) => {
                    faults.refused += u64::from(self.could_fit(model));
                }
                Err(_) => faults.other += 1,
            }
            self.watch.check();
        }
        faults.over_limit = self.watch.over_limit.load(Ordering::SeqCst);
        (self.work.hits(hits, saved), faults)
    }

    /// Returns `true` if the free bytes and those of idle models are enough for this one.
    fn could_fit(&self, model: usize) -> bool {
        let is_busy = |other: &usize| self.guards[*other] > 0;
        let size = |other: usize| self.work.models[other].size.get();
        let busy: u64 = (0..MODELS).filter(is_busy).map(size).sum();
        busy + size(model) <= self.work.room.get()
    }

    /// Ends the requests that end by this time of the requests.
    fn end_requests(&mut self, until: Duration) {
        while self.held.peek().is_some_and(|held| held.end.0.0 <= until) {
            if let Some(Held { end: Reverse((end, _)), model, guard }) = self.held.pop() {
                self.set_time(end);
                self.guards[model] -= 1;
                drop(guard);
            }
        }
    }

    /// Moves the clock to this time of the requests.
    fn set_time(&self, time: Duration) {
        let to = Moment::ORIGIN + time + self.loads;
        self.clock.advance(to - self.clock.now());
    }
}

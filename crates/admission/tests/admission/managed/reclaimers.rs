//! Reclaimers of the application: asked in order, for what is lacking, and believed only by sample.

use std::future::Future as _;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use lowtide_admission::clock::{Bell, Clock, ManualClock, Moment};
use lowtide_admission::{
    Admission, Budget, ByteSize, Cost, Managed, Reclaimable, Reclaimer, RejectReason, Rejected,
    ResourceError, Resources, UnloadReason,
};
use lowtide_core::sync::lock;

use super::SECOND;
use super::support::{Gate, PATIENCE, until};

const PAGE: ByteSize = ByteSize::kib(4);
const PAUSE: Duration = Duration::from_millis(100);
/// The memory of the process besides caches and models.
const BASE: ByteSize = ByteSize::mib(4);

/// A cache that counts what it is asked for, in whole MiB.
#[derive(Default)]
struct Cache {
    bytes: AtomicU64,
    asked: Mutex<Vec<u64>>,
}

impl Cache {
    fn held(&self) -> ByteSize {
        ByteSize::new(self.bytes.load(Ordering::SeqCst))
    }

    /// Returns the MiB that it holds, rounded up.
    fn mib(&self) -> u64 {
        self.held().get().div_ceil(ByteSize::mib(1).get())
    }

    fn asked(&self) -> Vec<u64> {
        lock(&self.asked).clone()
    }

    fn release(&self, wanted: ByteSize) -> ByteSize {
        lock(&self.asked).push(wanted.get() >> 20);
        let released = wanted.min(self.held());
        self.bytes.fetch_sub(released.get(), Ordering::SeqCst);
        released
    }

    fn reclaimable(self: &Arc<Self>, name: &'static str) -> Reclaimable {
        let (held, cache) = (Arc::clone(self), Arc::clone(self));
        Reclaimable::new(name, move || held.held(), move |wanted| cache.release(wanted))
    }
}

/// A manual clock that counts the pauses of the thread that asks for requests.
#[derive(Debug, Default)]
struct PausesCounted {
    clock: ManualClock,
    pauses: AtomicU64,
}

impl Clock for PausesCounted {
    fn now(&self) -> Moment {
        self.clock.now()
    }

    fn since_epoch(&self) -> Duration {
        self.clock.since_epoch()
    }

    fn wait_until(&self, bell: &Arc<Bell>, deadline: Moment) -> bool {
        let is_pause = deadline - self.now() == PAUSE;
        self.pauses.fetch_add(u64::from(is_pause), Ordering::SeqCst);
        self.clock.wait_until(bell, deadline)
    }
}

/// A process with a ceiling of 100 MiB, whose samples the test takes.
struct Rig {
    clock: Arc<PausesCounted>,
    admission: Admission,
    resources: Resources,
    purges: Arc<AtomicU64>,
    caches: Mutex<Vec<Arc<Cache>>>,
}

impl Rig {
    fn new() -> Self {
        let (clock, resources) = (Arc::new(PausesCounted::default()), Resources::new());
        let admission = Admission::with_limit(ByteSize::mib(100)); // estimates are trusted
        let purges = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&purges);
        resources.evict_for(&admission, clock.clone(), move || {
            counted.fetch_add(1, Ordering::SeqCst);
        });
        let rig = Self { clock, admission, resources, purges, caches: Mutex::default() };
        rig.sample();
        rig
    }

    fn cache(&self, mib: u64) -> Arc<Cache> {
        let bytes = AtomicU64::new(ByteSize::mib(mib).get());
        let cache = Arc::new(Cache { bytes, ..Cache::default() });
        lock(&self.caches).push(Arc::clone(&cache));
        self.sample();
        cache
    }

    fn add(&self, reclaimable: Reclaimable) -> Reclaimer {
        let added = self.resources.add_reclaimer(reclaimable, &self.admission, self.clock.clone());
        added.expect("a new name")
    }

    fn model(&self, name: &'static str, mib: u64) -> Managed<()> {
        let model = Managed::builder(name, || Ok(())).cost(Cost::host(ByteSize::mib(mib)));
        let model = model.build(self.clock.clone(), Some(self.admission.clone()));
        assert_eq!(self.resources.add(&model), Ok(()));
        model
    }

    /// A tick of the control loop: what the caches and the loaded models hold is measured.
    fn sample(&self) {
        let held: ByteSize = lock(&self.caches).iter().map(|cache| cache.held()).sum();
        let ledger = self.admission.ledger(Budget::Host);
        let held = BASE.saturating_add(held).saturating_add(ledger.resource_reservations());
        ledger.set_measured(held, ByteSize::mib(100));
        self.admission.state().tend_queue(self.clock.now());
    }

    /// Passes the time in pauses, with a sample in each, while a request waits.
    fn pass(&self, time: Duration) {
        let pauses = || self.clock.pauses.load(Ordering::SeqCst);
        let end = self.clock.now() + time;
        until("the first pause", || pauses() > 0);
        while self.clock.now() < end {
            let before = pauses();
            self.sample();
            self.sample();
            self.advance(PAUSE);
            until("the next pause", || pauses() > before);
        }
    }

    fn advance(&self, time: Duration) {
        self.clock.clock.advance(time);
    }
}

fn mib(mib: u64) -> Cost {
    Cost::host(ByteSize::mib(mib))
}

#[test]
fn a_request_waits_until_a_sample_finds_the_bytes_released_and_no_longer() {
    let rig = Rig::new();
    let cache = rig.cache(80);
    let reclaimer = rig.add(cache.reclaimable("cache"));
    let mut request = pin!(rig.admission.reserve(mib(30)));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(request.as_mut().poll(&mut cx).is_pending(), "16 of 100 MiB are free");
    until("the cache is asked and the heap purged", || rig.purges.load(Ordering::SeqCst) == 1);
    assert_eq!((cache.asked(), cache.mib()), (vec![14], 66), "what lacks, and no more");
    assert!(request.as_mut().poll(&mut cx).is_pending(), "released, but not observed");
    let refused = rig.admission.try_admit(mib(20)).expect_err("the same");
    assert_eq!(refused.reason(), RejectReason::Full);
    rig.sample();
    assert!(matches!(request.as_mut().poll(&mut cx), Poll::Ready(Ok(_))));
    let stats = reclaimer.stats();
    let rest = stats.released_total.saturating_sub(ByteSize::mib(14));
    assert!(stats.calls_total == 1 && rest <= PAGE, "{stats:?}");
    assert_eq!((stats.panics_total, stats.releasable), (0, cache.held()));
    assert_eq!(rig.admission.stats().rejected_total(RejectReason::Full), 1, "the other request");
}

#[test]
fn one_round_releases_enough_for_all_requests_that_wait() {
    let rig = Rig::new();
    let (cache, gate) = (rig.cache(96), Arc::new(Gate::default()));
    let (held, releases, passes) = (Arc::clone(&cache), Arc::clone(&cache), Arc::clone(&gate));
    let _reclaimer = rig.add(Reclaimable::new(
        "cache",
        move || held.held(),
        move |wanted| {
            let released = releases.release(wanted);
            passes.pass();
            released
        },
    ));
    let mut cx = Context::from_waker(Waker::noop());
    let mut requests: Vec<_> = (0..10).map(|_| Box::pin(rig.admission.reserve(mib(5)))).collect();
    for request in &mut requests {
        assert!(request.as_mut().poll(&mut cx).is_pending());
    }
    gate.open();
    rig.pass(4 * PAUSE);
    let admitted = requests.iter_mut().map(|it| it.as_mut().poll(&mut cx));
    assert_eq!(admitted.filter(|it| matches!(it, Poll::Ready(Ok(_)))).count(), 10);
    let asked = cache.asked();
    assert!(asked.len() <= 2 && asked.iter().sum::<u64>() <= 50, "{asked:?}");
}

#[test]
fn a_reclaimer_that_lies_is_asked_ever_more_rarely_and_resources_are_evicted_instead() {
    let rig = Rig::new();
    let calls = Arc::new(AtomicU64::new(0));
    let called = Arc::clone(&calls);
    let liar = Reclaimable::new(
        "liar",
        || ByteSize::gib(1),
        move |_| {
            called.fetch_add(1, Ordering::SeqCst);
            ByteSize::ZERO
        },
    );
    let _liar = rig.add(liar);
    let model = rig.model("model", 40);
    drop(model.acquire_blocking().expect("fits"));
    rig.clock.clock.advance(10 * SECOND);
    rig.sample();
    let mut cx = Context::from_waker(Waker::noop());
    let mut request = pin!(rig.admission.reserve(mib(70)));
    assert!(request.as_mut().poll(&mut cx).is_pending(), "56 MiB are free");
    until("the liar is asked", || calls.load(Ordering::SeqCst) == 1);
    rig.pass(3 * PAUSE);
    until("the model is unloaded", || !model.stats().loaded);
    rig.sample();
    let permit = match request.as_mut().poll(&mut cx) {
        Poll::Ready(Ok(permit)) => permit,
        other => panic!("{other:?}"),
    };
    // And with nothing else to release.
    let before = calls.load(Ordering::SeqCst);
    let mut request = pin!(rig.admission.reserve(mib(40)));
    assert!(request.as_mut().poll(&mut cx).is_pending());
    rig.pass(60 * SECOND);
    assert!(request.as_mut().poll(&mut cx).is_pending());
    let calls = calls.load(Ordering::SeqCst) - before;
    assert!((5..=12).contains(&calls), "with pauses of up to 10 s: {calls}");
    drop(permit);
}

#[test]
fn a_reclaimer_that_panics_is_counted_and_asked_again_after_a_pause() {
    let rig = Rig::new();
    let cache = rig.cache(80);
    let (held, releases, calls) = (Arc::clone(&cache), Arc::clone(&cache), AtomicU64::new(0));
    let reclaimer = rig.add(Reclaimable::new(
        "cache",
        move || held.held(),
        move |wanted| {
            assert!(calls.fetch_add(1, Ordering::SeqCst) > 0, "planted");
            releases.release(wanted)
        },
    ));
    let mut cx = Context::from_waker(Waker::noop());
    let mut request = pin!(rig.admission.reserve(mib(30)));
    assert!(request.as_mut().poll(&mut cx).is_pending());
    rig.pass(6 * PAUSE);
    assert!(matches!(request.as_mut().poll(&mut cx), Poll::Ready(Ok(_))));
    let stats = reclaimer.stats();
    assert_eq!((stats.calls_total, stats.panics_total), (2, 1));
    assert!(stats.panic.is_some_and(|message| message.contains("planted")));
}

#[test]
fn functions_that_use_admission_wait_for_no_lock() {
    let rig = Rig::new();
    let cache = rig.cache(80);
    let (held, releases) = (Arc::clone(&cache), Arc::clone(&cache));
    let admission = rig.admission.clone();
    let refused = move || admission.try_admit(mib(90)).expect_err("does not fit").reason();
    let asks = refused.clone();
    let reclaimer = rig.add(Reclaimable::new(
        "cache",
        move || {
            assert_eq!(asks(), RejectReason::Full);
            held.held()
        },
        move |wanted| {
            assert_eq!(refused(), RejectReason::Full);
            releases.release(wanted)
        },
    ));
    assert!(rig.admission.try_admit(mib(30)).is_err());
    until("the cache has released", || cache.mib() == 66);
    assert_eq!(reclaimer.stats().panics_total, 0);
}

#[test]
fn a_reclaimer_that_is_removed_during_a_call_is_not_called_again_and_its_name_is_free() {
    let rig = Rig::new();
    let (entered, gate) = (Arc::new(AtomicU64::new(0)), Arc::new(Gate::default()));
    let (enters, passes) = (Arc::clone(&entered), Arc::clone(&gate));
    let cache = rig.cache(80);
    let held = Arc::clone(&cache);
    let slow = Reclaimable::new(
        "cache",
        move || held.held(),
        move |wanted| {
            enters.fetch_add(1, Ordering::SeqCst);
            passes.pass();
            wanted
        },
    );
    let reclaimer = rig.add(slow);
    assert!(rig.admission.try_admit(mib(30)).is_err());
    until("it is called", || entered.load(Ordering::SeqCst) == 1);
    // A slow call delays no admission.
    drop(rig.admission.try_admit(mib(10)).expect("fits"));
    drop(reclaimer);
    let again = rig.add(cache.reclaimable("cache"));
    gate.open();
    until("the call ends", || again.stats().calls_total == 1);
    let wanted = ByteSize::mib(5);
    let ask = wanted;
    assert_eq!(rig.resources.reclaimer(Budget::Host).reclaim(ask), wanted);
    assert_eq!((cache.mib(), entered.load(Ordering::SeqCst)), (75, 1));
    drop(again);
    assert!(!rig.resources.reclaimer_stats()[0].registered);
    assert!(rig.admission.try_admit(mib(30)).is_err());
    assert_eq!(cache.asked(), [5], "nobody is asked any more");
}

#[test]
fn level_high_asks_by_cost_for_what_is_left_to_release() {
    let rig = Rig::new();
    let (cheap, dear) = (rig.cache(10), rig.cache(10));
    // A model of 20 MiB that takes 10 s to load, used once in 10 s: worth 51 s per GiB.
    let clock = Arc::clone(&rig.clock);
    let model = Managed::builder("model", move || {
        clock.clock.advance(10 * SECOND);
        Ok(())
    });
    let model = model.cost(mib(20)).build(rig.clock.clone(), Some(rig.admission.clone()));
    assert_eq!(rig.resources.add(&model), Ok(()));
    drop(model.acquire_blocking().expect("fits"));
    rig.advance(10 * SECOND);
    let _dear = rig.add(dear.reclaimable("dear").cost_per_gib(60 * SECOND));
    let _cheap = rig.add(cheap.reclaimable("cheap").cost_per_gib(40 * SECOND));
    let step = rig.resources.reclaimer(Budget::Host);
    let reclaim = |mib| {
        rig.advance(SECOND);
        let ask = ByteSize::mib(mib);
        let released = step.reclaim(ask);
        (released, cheap.mib(), model.stats().loaded, dear.mib())
    };
    assert_eq!(reclaim(4), (ByteSize::mib(4), 6, true, 10));
    assert_eq!(reclaim(7), (ByteSize::mib(26), 0, false, 10), "the model as a whole");
    assert_eq!(reclaim(3), (ByteSize::mib(3), 0, false, 7));
    let step = rig.resources.reclaimer(Budget::Device);
    let ask = ByteSize::mib(1);
    assert_eq!(step.reclaim(ask), ByteSize::ZERO, "reclaimers hold host memory");
}

#[test]
fn level_high_waits_a_second_for_a_reclaimer_that_hangs() {
    let rig = Rig::new();
    let gate = Arc::new(Gate::default());
    let passes = Arc::clone(&gate);
    let reclaimer = rig.add(Reclaimable::new(
        "slow",
        || ByteSize::mib(9),
        move |wanted| {
            passes.pass();
            wanted
        },
    ));
    let step = rig.resources.reclaimer(Budget::Host);
    let ask = ByteSize::mib(1);
    let worker = thread::spawn(move || step.reclaim(ask));
    assert!(rig.clock.clock.wait_for_waiters(1, PATIENCE));
    rig.advance(SECOND);
    assert_eq!(worker.join().expect("no panic"), ByteSize::ZERO);
    let step = rig.resources.reclaimer(Budget::Host);
    assert_eq!(step.reclaim(ask), ByteSize::ZERO, "it still runs, and is not called again");
    gate.open();
    until("the call ends", || reclaimer.stats().calls_total == 1);
}

#[test]
fn a_load_waits_for_a_sample_that_finds_the_bytes_released() {
    let rig = Rig::new();
    let cache = rig.cache(80);
    let _reclaimer = rig.add(cache.reclaimable("cache"));
    let model = rig.model("model", 40);
    thread::scope(|scope| {
        let load = scope.spawn(|| model.acquire_blocking().map(drop));
        until("the cache is asked", || cache.asked() == [24]);
        // It waits for a sample.
        assert!(rig.clock.clock.wait_for_waiters(1, PATIENCE) && !model.stats().loaded);
        assert_eq!(rig.admission.ledger(Budget::Host).reserved_bytes(), ByteSize::ZERO);
        rig.sample();
        until("the load ends", || {
            rig.advance(Duration::from_millis(10));
            load.is_finished()
        });
        load.join().expect("no panic").expect("fits");
    });
    assert_eq!((model.stats().loads_ok_total, model.stats().loads_refused_total), (1, 0));
    assert_eq!(rig.admission.ledger(Budget::Host).reserved_bytes(), ByteSize::mib(40));
}

#[test]
fn a_load_is_rejected_if_a_reclaimer_lies_and_evicts_if_resources_suffice() {
    let rig = Rig::new();
    let _liar = rig.add(Reclaimable::new("liar", || ByteSize::gib(1), |_| ByteSize::gib(1)));
    let (first, second) = (rig.model("first", 60), rig.model("second", 70));
    let guard = first.acquire_blocking().expect("fits");
    rig.sample();
    // The bug: a load began to wait again after each false promise of a reclaimer, forever.
    let load = |model: &Managed<()>| {
        thread::scope(|scope| {
            let load = scope.spawn(|| model.acquire_blocking().map(drop));
            until("the load ends", || {
                rig.sample();
                rig.advance(Duration::from_millis(10));
                load.is_finished()
            });
            load.join().expect("no panic")
        })
    };
    let rejected = load(&second).expect_err("the first is in use");
    assert!(
        matches!(rejected, ResourceError::Rejected { rejected: Rejected::Full { .. }, .. }),
        "{rejected}"
    );
    assert_eq!(rig.admission.ledger(Budget::Host).reserved_bytes(), ByteSize::mib(60));
    drop(guard);
    load(&second).expect("takes the place of the first");
    assert_eq!(first.stats().unloads_total(UnloadReason::Eviction), 1);
    assert_eq!(rig.admission.ledger(Budget::Host).reserved_bytes(), ByteSize::mib(70));
}

#[test]
fn names_are_unique_and_bounded_for_the_life_of_a_registry() {
    let rig = Rig::new();
    let none = |name: String| Reclaimable::new(name, || ByteSize::ZERO, |_| ByteSize::ZERO);
    let add = |name: &str| {
        rig.resources.add_reclaimer(none(name.to_owned()), &rig.admission, rig.clock.clone())
    };
    let first = add("first").expect("free");
    let error = add("first").map(drop).expect_err("taken");
    assert_eq!(error, ResourceError::Duplicate { name: "first".into() });
    drop(first);
    for nth in 0..63 {
        drop(add(&nth.to_string()).expect("free"));
    }
    assert_eq!(add("more").map(drop), Err(ResourceError::TooMany { name: "more".into(), max: 64 }));
    assert_eq!(add("first").expect("known").name(), "first");
    assert_eq!(rig.resources.reclaimer_stats().len(), 64);
}

#[test]
fn a_resource_stays_until_a_load_that_also_asks_a_reclaimer_takes_its_place() {
    let rig = Rig::new();
    let (first, second) = (rig.model("first", 60), rig.model("second", 80));
    drop(first.acquire_blocking().expect("fits"));
    let cache = rig.cache(20);
    let _reclaimer = rig.add(cache.reclaimable("cache"));
    thread::scope(|scope| {
        let load = scope.spawn(|| second.acquire_blocking().map(drop));
        until("the cache is asked", || rig.purges.load(Ordering::SeqCst) == 1);
        assert!(first.stats().loaded, "its room is not free for others");
        assert_eq!(rig.admission.ledger(Budget::Host).reserved_bytes(), ByteSize::mib(60));
        rig.sample();
        until("the load ends", || {
            rig.advance(Duration::from_millis(10));
            load.is_finished()
        });
        load.join().expect("no panic").expect("fits");
    });
    assert_eq!(first.stats().unloads_total(UnloadReason::Eviction), 1);
    assert_eq!((cache.asked().len(), rig.purges.load(Ordering::SeqCst)), (1, 2));
}

#[test]
fn a_function_that_hangs_keeps_no_load_from_evicting() {
    let rig = Rig::new();
    let (entered, gate) = (Arc::new(AtomicU64::new(0)), Arc::new(Gate::default()));
    let (enters, passes) = (Arc::clone(&entered), Arc::clone(&gate));
    let hangs = move || {
        enters.fetch_add(1, Ordering::SeqCst);
        passes.pass();
        ByteSize::ZERO
    };
    let _reclaimer = rig.add(Reclaimable::new("hangs", hangs, |_| ByteSize::ZERO));
    let (first, second) = (rig.model("first", 60), rig.model("second", 60));
    drop(first.acquire_blocking().expect("fits"));
    rig.sample();
    assert!(rig.admission.try_admit(mib(50)).is_err());
    until("it hangs", || entered.load(Ordering::SeqCst) == 1);
    drop(rig.admission.try_admit(mib(30)).expect("fits"));
    thread::scope(|scope| {
        let load = scope.spawn(|| second.acquire_blocking().map(drop));
        until("the load ends", || {
            rig.advance(Duration::from_millis(10));
            load.is_finished()
        });
        load.join().expect("no panic").expect("takes the place of the first");
    });
    assert_eq!(entered.load(Ordering::SeqCst), 1, "not called twice at once");
    gate.open();
    assert_eq!(first.stats().unloads_total(UnloadReason::Eviction), 1);
}

#[test]
fn a_reclaimer_that_removes_itself_while_it_is_looked_at_is_not_called() {
    let rig = Rig::new();
    let cache = rig.cache(80);
    let slot: Arc<Mutex<Option<Reclaimer>>> = Arc::default();
    let (held, releases, own) = (Arc::clone(&cache), Arc::clone(&cache), Arc::clone(&slot));
    let looked = Arc::new(AtomicU64::new(0));
    let looks = Arc::clone(&looked);
    let reclaimer = rig.add(Reclaimable::new(
        "cache",
        move || {
            drop(lock(&own).take());
            looks.fetch_add(1, Ordering::SeqCst);
            held.held()
        },
        move |wanted| releases.release(wanted),
    ));
    *lock(&slot) = Some(reclaimer);
    assert!(rig.admission.try_admit(mib(30)).is_err());
    until("the round is over", || rig.clock.pauses.load(Ordering::SeqCst) == 1);
    assert_eq!((looked.load(Ordering::SeqCst), cache.asked()), (1, vec![]));
}

/// A thread may hold the lock of its cache while it loads a model.
#[test]
fn no_function_runs_on_the_thread_of_a_request_or_of_a_load() {
    let rig = Rig::new();
    let cache = rig.cache(80);
    let own = thread::current().id();
    let (held, releases) = (Arc::clone(&cache), Arc::clone(&cache));
    let reclaimer = rig.add(Reclaimable::new(
        "cache",
        move || {
            assert_ne!(thread::current().id(), own);
            held.held()
        },
        move |wanted| {
            assert_ne!(thread::current().id(), own);
            releases.release(wanted)
        },
    ));
    let model = rig.model("model", 40);
    let is_over = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            until("the load ends", || {
                rig.sample();
                rig.advance(Duration::from_millis(1));
                is_over.load(Ordering::SeqCst) == 1
            });
        });
        drop(model.acquire_blocking().expect("fits"));
        is_over.store(1, Ordering::SeqCst);
    });
    rig.advance(SECOND);
    assert!(rig.admission.try_admit(mib(50)).is_err());
    until("the cache is asked again", || cache.asked().len() == 2);
    let ask = ByteSize::mib(1);
    // That release may not have returned yet.
    until("the cache is asked once more", || {
        rig.advance(SECOND);
        rig.resources.reclaimer(Budget::Host).reclaim(ask) == ask
    });
    assert_eq!((cache.asked().len(), reclaimer.stats().panics_total), (3, 0));
}

/// A release would make no room, and a request that waits would empty the cache.
#[test]
fn without_measurement_no_reclaimer_is_asked() {
    let rig = Rig::new();
    let cache = rig.cache(40);
    let _reclaimer = rig.add(cache.reclaimable("cache"));
    rig.resources.disable_reclaimers();
    let model = rig.model("model", 40);
    drop(model.acquire_blocking().expect("fits"));
    rig.clock.clock.advance(10 * SECOND);
    rig.sample();
    assert!(rig.admission.try_admit(mib(50)).is_err(), "16 MiB are free");
    until("the model makes room", || !model.stats().loaded);
    assert_eq!(cache.asked(), []);
}

/// The bug: a request that came while the only reclaimer paused was not helped when the pause was
/// over.
#[test]
fn a_request_that_comes_during_a_pause_is_helped_after_it() {
    let rig = Rig::new();
    let cache = rig.cache(80);
    let _reclaimer = rig.add(cache.reclaimable("cache"));
    let ask = ByteSize::mib(1);
    assert_eq!(rig.resources.reclaimer(Budget::Host).reclaim(ask), ByteSize::mib(1));
    rig.sample();
    let mut request = pin!(rig.admission.reserve(mib(30)));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(request.as_mut().poll(&mut cx).is_pending());
    assert_eq!(cache.asked().len(), 1, "it pauses");
    rig.pass(3 * PAUSE);
    assert!(matches!(request.as_mut().poll(&mut cx), Poll::Ready(Ok(_))));
}

//! Evictions for requests: a resource that is in use again and again stays while they can wait for
//! each other, and goes if they need its room.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use lowtide_admission::clock::{Clock as _, ManualClock};
use lowtide_admission::layer::Waiting;
use lowtide_admission::{
    Admission, Budget, ByteSize, Cost, Level, Managed, ManagedBuilder, Permit, Priority, Resources,
    UnloadReason,
};

use super::SECOND;
use super::support::until;

const STEP: Duration = Duration::from_millis(10);
const MAX_WAIT: Duration = Duration::from_secs(2);

fn mib(mib: u64) -> Cost {
    Cost::host(ByteSize::mib(mib))
}

/// A service in virtual time.
struct Service {
    clock: Arc<ManualClock>,
    admission: Admission,
    resources: Resources,
}

impl Service {
    fn with_limit(mib: u64) -> Self {
        let limit = ByteSize::mib(mib).saturating_add(ByteSize::kib(1));
        let (admission, clock) = (Admission::with_limit(limit), Arc::new(ManualClock::new()));
        let resources = Resources::new();
        resources.evict_for(&admission, clock.clone(), || {});
        let service = Self { clock, admission, resources };
        service.step(Duration::ZERO);
        service
    }

    fn add(&self, builder: ManagedBuilder<()>) -> Managed<()> {
        let managed = builder.build(self.clock.clone(), Some(self.admission.clone()));
        assert_eq!(self.resources.add(&managed), Ok(()));
        managed
    }

    /// A loaded model whose loads take so long.
    fn model(&self, name: &'static str, mib: u64, millis: u64) -> Managed<()> {
        let clock = self.clock.clone();
        let load = move || {
            clock.advance(Duration::from_millis(millis));
            Ok(())
        };
        let model = self.add(Managed::builder(name, load).cost(self::mib(mib)));
        drop(model.acquire_blocking().expect("fits"));
        model
    }

    /// Time passes, and the control loop ticks.
    fn step(&self, time: Duration) {
        self.clock.advance(time);
        self.admission.state().tend_queue(self.clock.now());
    }

    fn admit(&self, cost: Cost) -> Option<Permit> {
        self.admission.try_admit(cost).ok()
    }

    fn wait(&self, cost: Cost) -> Waiting {
        let waiting = self.admission.state().wait(cost, Priority::Normal, 0, Some(MAX_WAIT));
        waiting.expect("there is room in the queue")
    }

    /// Tries to admit a request that waits. `None` if its time is over.
    fn try_turn(&self, waiting: &Waiting, cost: Cost) -> Poll<Option<Permit>> {
        match waiting.poll_turn(&Context::from_waker(Waker::noop())) {
            Poll::Ready(true) => match self.admission.state().try_admit_uncounted(
                Some(waiting),
                cost,
                Priority::Normal,
                None,
            ) {
                Ok(permit) => Poll::Ready(Some(permit)),
                Err(_) => Poll::Pending,
            },
            Poll::Ready(false) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }

    fn resource_reservations(&self) -> ByteSize {
        self.admission.ledger(Budget::Host).resource_reservations()
    }

    /// Returns the time that a request waits that fits once this model is unloaded. The model is
    /// used in each step.
    fn waits_for(&self, model: &Managed<()>, cost: Cost) -> Duration {
        let (start, waiting) = (self.clock.now(), self.wait(cost));
        while self.try_turn(&waiting, cost).is_pending() {
            if model.try_acquire().is_some() {
                self.step(STEP);
            } else {
                until("it is unloaded", || self.resource_reservations().is_zero());
            }
        }
        self.clock.now() - start
    }
}

fn evictions(model: &Managed<()>) -> u64 {
    model.stats().unloads_total(UnloadReason::Eviction)
}

/// An upload of so many bytes, which takes 300 ms.
struct Upload {
    cost: Cost,
    waiting: Option<Waiting>,
    permit: Option<Permit>,
    /// The steps that are left of its run, or of the pause before the next one.
    left: u32,
}

impl Upload {
    /// Returns `true` if it begins to run.
    fn step(&mut self, service: &Service) -> bool {
        if let Some(waiting) = &self.waiting {
            let Poll::Ready(turn) = service.try_turn(waiting, self.cost) else { return false };
            self.waiting = None;
            (self.permit, self.left) = (turn, 30);
            return self.permit.is_some();
        }
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return false;
        }
        if self.permit.take().is_some() {
            self.left = 5;
            return false;
        }
        self.permit = service.admit(self.cost);
        self.waiting = self.permit.is_none().then(|| service.wait(self.cost));
        self.left = 30;
        self.permit.is_some()
    }
}

/// The bug (case n7): a model of 48 MiB that small calls used each 50 ms beside uploads that filled
/// the ledger was loaded 26 times in 40 s, once for a request of 11.8 KiB.
#[test]
fn a_model_in_use_was_loaded_again_and_again_beside_uploads() {
    let service = Service::with_limit(200);
    let model = service.model("embedder", 48, 90);
    let sizes = [11, 23, 46, 92, 31, 46, 23, 92].map(mib);
    let mut uploads = sizes.map(|cost| Upload { cost, waiting: None, permit: None, left: 0 });
    let (mut served, mut used, mut call) = (0, 0, None);
    for step in 0..4000 {
        service.step(STEP);
        served +=
            uploads.iter_mut().filter_map(|upload| upload.step(&service).then_some(())).count();
        if step % 5 == 0 && call.is_none() {
            call = Some(model.acquire());
        }
        if let Some(acquiring) = &mut call
            && let Poll::Ready(acquired) =
                Pin::new(acquiring).poll(&mut Context::from_waker(Waker::noop()))
        {
            used += u32::from(acquired.is_ok());
            call = None;
        }
        let is_settled = || model.stats().loaded || service.resource_reservations().is_zero();
        until("its load or unload has ended", is_settled);
    }
    let loads = model.stats().loads_ok_total;
    println!("{loads} loads, {served} uploads, {used} uses");
    assert!(loads <= 4, "{loads} loads in 40 s");
    assert!(served >= 380 && used >= 780, "{served} uploads, {used} uses");
}

#[test]
fn a_request_that_needs_the_room_of_a_model_in_use_gets_it_after_half_of_its_wait() {
    let service = Service::with_limit(100);
    let model = service.model("model", 60, 500);
    let waited = service.waits_for(&model, mib(60));
    assert!(waited >= SECOND && waited <= SECOND + 2 * STEP, "{waited:?}");
}

#[test]
fn a_request_that_needs_its_room_is_not_kept_waiting_once_its_load_has_paid_off() {
    let service = Service::with_limit(100);
    let model = service.model("model", 60, 500);
    use_for(&service, &model, 10 * SECOND);
    assert!(service.waits_for(&model, mib(60)) <= STEP);
}

/// Time passes, in which the model is used in each step.
fn use_for(service: &Service, model: &Managed<()>, time: Duration) {
    let end = service.clock.now() + time;
    while service.clock.now() < end {
        service.step(STEP);
        drop(model.try_acquire().expect("it stays loaded"));
    }
}

#[test]
fn a_request_that_fits_once_others_end_evicts_a_model_in_use_after_half_of_its_wait_at_the_earliest()
 {
    let service = Service::with_limit(100);
    let model = service.model("model", 60, 500);
    let _stream = service.admit(mib(30)).expect("fits");
    let waiting = service.wait(mib(35));
    assert!(service.try_turn(&waiting, mib(35)).is_pending());
    use_for(&service, &model, MAX_WAIT - STEP);
    drop(waiting);
    assert_eq!(evictions(&model), 0, "its load has not paid off");
    use_for(&service, &model, 10 * SECOND);
    let waited = service.waits_for(&model, mib(35));
    assert!(waited >= SECOND && waited <= SECOND + 2 * STEP, "{waited:?}");
}

#[test]
fn the_model_that_is_not_used_goes_for_a_request_and_the_other_one_stays() {
    let service = Service::with_limit(130);
    let [used, unused] = ["used", "unused"].map(|name| service.model(name, 40, 90));
    use_for(&service, &used, 10 * SECOND);
    let _runs = service.admit(mib(45)).expect("fits");
    assert!(service.admit(mib(40)).is_none(), "comes again");
    until("it is unloaded", || !unused.stats().loaded && unused.stats().last_unload.is_some());
    assert_eq!([&used, &unused].map(evictions), [0, 1]);
    let _also = service.admit(mib(40)).expect("fits now");
    assert!(service.admit(mib(40)).is_none(), "waits for others");
    assert!(used.stats().loaded);
}

#[test]
fn a_request_that_lacks_little_waits_for_others_before_it_evicts() {
    let service = Service::with_limit(100);
    let model = service.model("model", 60, 90);
    service.step(10 * SECOND);
    let _runs = service.admit(mib(38)).expect("fits");
    let (start, waiting) = (service.clock.now(), service.wait(mib(4)));
    while service.try_turn(&waiting, mib(4)).is_pending() {
        match model.stats().loaded {
            true => service.step(STEP),
            false => until("it is unloaded", || service.resource_reservations().is_zero()),
        }
    }
    let waited = service.clock.now() - start;
    assert!(waited >= SECOND && waited <= SECOND + 2 * STEP, "{waited:?}");
}

#[test]
fn at_level_high_a_request_evicts_a_model_in_use_at_once() {
    for level in [Level::Elevated, Level::High] {
        let service = Service::with_limit(100);
        let model = service.model("model", 60, 500);
        let _runs = service.admit(mib(30)).expect("fits");
        service.admission.set_level(level);
        let _ = service.admit(mib(20));
        assert_eq!(model.stats().loaded, level == Level::Elevated, "{level:?}");
    }
}

/// It cannot wait: what it holds is wasted if it is rejected.
#[test]
fn an_admitted_request_that_grows_evicts_a_model_in_use_at_once() {
    let service = Service::with_limit(100);
    let model = service.model("model", 60, 500);
    let mut runs = service.admit(mib(30)).expect("fits");
    assert!(runs.grow(ByteSize::mib(20)).is_err(), "the model is still there");
    until("it is unloaded", || service.resource_reservations().is_zero());
    assert!(runs.grow(ByteSize::mib(20)).is_ok() && evictions(&model) == 1);
}

/// Returns the retry time of a request that needs the room of this model.
fn retry_after(service: &Service, cost: Cost) -> Duration {
    let rejected = service.admission.try_admit(cost).expect_err("there is no room");
    rejected.retry_after().expect("it may fit later")
}

#[test]
fn the_time_that_a_model_stays_follows_its_smoothed_load_time_between_10_s_and_5_min() {
    for (millis, least, most) in [(0, 10, 12), (20_000, 200, 230), (900_000, 300, 345)] {
        let service = Service::with_limit(100);
        let _model = service.model("model", 60, millis);
        let after = retry_after(&service, mib(60));
        assert!(after >= least * SECOND && after <= most * SECOND, "{millis} ms: {after:?}");
    }
    let service = Service::with_limit(100);
    let (clock, loads) = (service.clock.clone(), AtomicU32::new(0));
    let load = move || {
        let nth = loads.fetch_add(1, Ordering::SeqCst);
        clock.advance(SECOND * [8, 100, 16][nth as usize]);
        if nth == 1 { Err("no such file".into()) } else { Ok(()) }
    };
    let builder = Managed::builder("model", load).cost(mib(60));
    let model = service.add(builder.backoff(Duration::ZERO, Duration::ZERO));
    for outcome in [true, false, true] {
        let _ = model.unload(UnloadReason::Manual);
        assert_eq!(model.acquire_blocking().is_ok(), outcome);
    }
    let after = retry_after(&service, mib(60));
    assert!(after >= 100 * SECOND && after <= 115 * SECOND, "(3 x 8 s + 16 s) / 4: {after:?}");
}

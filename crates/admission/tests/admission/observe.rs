//! Observe mode: everything is admitted, and what would have happened is counted.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use lowtide_admission::clock::{Moment, SystemClock};
use lowtide_admission::{
    Admission, AdmissionMode, Budget, ByteSize, Cost, Level, Managed, Priority, RejectReason,
    Rejected,
};

const fn mib(mib: u64) -> Cost {
    Cost::host(ByteSize::mib(mib))
}

/// An admission of 100 MiB in observe mode.
fn observing() -> Admission {
    let admission = Admission::with_limit(ByteSize::mib(100));
    admission.set_mode(AdmissionMode::Observe);
    admission
}

/// Returns how many were counted for this reason.
fn observed(admission: &Admission, reason: RejectReason) -> u64 {
    admission.stats().observed[reason as usize]
}

#[test]
fn what_would_be_rejected_is_admitted_and_counted_by_its_reason() {
    let admission = observing();
    let fits = admission.try_admit(mib(100)).expect("it fits");
    assert_eq!(admission.stats().observed, [0; 10], "it would have been admitted");
    let full = admission.try_admit(mib(1)).expect("observe mode");
    let too_large = admission.try_admit(mib(101)).expect("observe mode");
    admission.set_level(Level::Critical);
    let pressed = admission.try_admit(Cost::ZERO).expect("observe mode");
    for reason in [RejectReason::Full, RejectReason::TooLarge, RejectReason::Pressure] {
        assert_eq!(observed(&admission, reason), 1, "{reason}");
    }
    let stats = admission.stats();
    assert_eq!((stats.admitted_total, stats.rejected), (4, [0; 10]));
    assert!(stats.observe_mode);
    drop((fits, full, too_large, pressed));
    assert_eq!(admission.ledger(Budget::Host).reserved(), ByteSize::ZERO);
}

#[test]
fn a_request_is_counted_once_however_often_it_would_be_refused() {
    let admission = observing();
    let mut permit = admission.try_admit(mib(101)).expect("observe mode");
    for _ in 0..3 {
        permit.grow(ByteSize::mib(50)).expect("observe mode");
    }
    let mut other = admission.try_admit(Cost::ZERO).expect("observe mode");
    other.grow_with(ByteSize::mib(1), Priority::Low).expect("observe mode");
    assert_eq!(permit.observed(), Some(RejectReason::TooLarge));
    assert_eq!(other.observed(), Some(RejectReason::Full));
    assert_eq!(admission.stats().observed.iter().sum::<u64>(), 2);
    assert_eq!(permit.cost(), mib(250), "100 at first, no more than the ceiling");
}

#[test]
fn the_switch_to_observe_mode_admits_those_that_wait() {
    let admission = Admission::with_limit(ByteSize::mib(100));
    admission.state().tend_queue(Moment::ORIGIN);
    let held = admission.try_admit(mib(100)).expect("it fits");
    let mut waits = pin!(admission.reserve(mib(10)));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(waits.as_mut().poll(&mut cx).is_pending());
    admission.set_mode(AdmissionMode::Observe);
    let Poll::Ready(Ok(admitted)) = waits.as_mut().poll(&mut cx) else { panic!("it waits") };
    assert_eq!((admission.stats().waiting, observed(&admission, RejectReason::Full)), (0, 1));
    admission.set_mode(AdmissionMode::Enforce);
    assert_eq!(admission.mode(), AdmissionMode::Enforce);
    assert!(admission.try_admit(mib(1)).is_err(), "what runs counts in full again");
    drop((held, admitted));
    assert!(admission.try_admit(mib(100)).is_ok());
}

#[test]
fn a_load_without_room_is_admitted_and_evicts_nothing() {
    let admission = observing();
    let model = |name: &str| {
        let cost = mib(80);
        let clock = Arc::new(SystemClock::new());
        Managed::builder(name, || Ok(())).cost(cost).build(clock, Some(admission.clone()))
    };
    let (one, other) = (model("one"), model("other"));
    drop((one.acquire_blocking().expect("it fits"), other.acquire_blocking().expect("observed")));
    assert!(one.stats().loaded && other.stats().loaded);
    assert_eq!(observed(&admission, RejectReason::Full), 1);
    assert_eq!(admission.ledger(Budget::Host).resource_reservations(), ByteSize::mib(160));
}

#[test]
fn nothing_is_admitted_during_shutdown() {
    let admission = observing();
    admission.close();
    let rejected = admission.try_admit(mib(1)).map(drop);
    assert_eq!(rejected, Err(Rejected::ShuttingDown));
    assert!(admission.try_reserve_resource(mib(1)).is_err());
    assert_eq!(admission.stats().observed, [0; 10]);
}

/// Otherwise all would be counted from the first one on that does not fit, while any of them runs.
#[test]
fn what_would_not_run_takes_no_room_from_what_would() {
    let admission = observing();
    let (host, all) = (admission.ledger(Budget::Host), ByteSize::mib(100));
    let _fits = admission.try_admit(mib(60)).expect("it fits");
    let _observed = admission.try_admit(mib(60)).expect("observe mode");
    host.set_measured(ByteSize::ZERO, all);
    let _also_fits = admission.try_admit(mib(40)).expect("it fits");
    assert_eq!(observed(&admission, RejectReason::Full), 1);
    admission.set_mode(AdmissionMode::Enforce);
    host.set_measured(ByteSize::ZERO, all);
    assert!(admission.try_admit(mib(1)).is_err(), "it holds memory all the same");
}

#[test]
fn a_mode_is_read_as_it_is_written_and_nothing_else_is() {
    for mode in AdmissionMode::ALL {
        assert_eq!(mode.name().parse(), Ok(mode));
    }
    for text in ["", "Observe", "off"] {
        assert_eq!(text.parse::<AdmissionMode>(), Err("enforce or observe"), "{text:?}");
    }
}

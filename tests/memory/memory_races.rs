//! Acts of several threads, or callbacks, on one `Memory` at a time, each after a bug of that kind.
#![cfg(target_os = "linux")]

use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use lowtide::clock::ManualClock;
use lowtide::config::DeviceChoice;
use lowtide::memory::{Builder, StartError};
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Cost, Level, Managed, Priority, Rejected};
use test_fork::test;

use crate::support::{
    PATIENCE, Tree, advance_until, shutdown_apart, threads, until, until_both_threads,
    until_no_threads,
};

const SECOND: Duration = Duration::from_secs(1);
const SOON: Duration = Duration::from_secs(5);

fn quiet() -> Builder {
    Memory::builder().device(DeviceChoice::Host)
}

fn is_refused() -> bool {
    matches!(quiet().start(), Err(StartError::AlreadyStarted))
}

/// The bug: a second shutdown found no thread to join, because the first had taken them, reported
/// nothing outstanding, and let another `Memory` start beside the worker that still ran.
#[test]
fn a_shutdown_beside_one_that_waits_did_not_see_the_threads() {
    let clock = Arc::new(ManualClock::new());
    let (entered, worker_is_in) = mpsc::channel();
    let (open, gate) = mpsc::channel::<()>();
    let hook = move || {
        let _ = entered.send(());
        let _ = gate.recv_timeout(PATIENCE);
    };
    let memory = quiet().clock(clock.clone()).after_publish(hook).start().expect("starts");
    worker_is_in.recv_timeout(PATIENCE).expect("metrics are published at once");
    until_both_threads();
    let first = shutdown_apart(&memory, 60 * SECOND);
    until("the control thread ends", || threads() == ["lowtide-worker"]);
    let (second, third) = (shutdown_apart(&memory, SECOND), shutdown_apart(&memory, 60 * SECOND));
    assert!(clock.wait_for_waiters(3, PATIENCE));
    clock.advance(SECOND);
    let report = second.join().expect("no panic");
    assert_eq!(report.busy, ["lowtide-worker"], "{report}");
    assert!(!first.is_finished() && !third.is_finished());
    assert!(is_refused(), "its worker still runs");

    open.send(()).expect("the hook waits");
    for ending in [first, third] {
        let report = ending.join().expect("no panic");
        assert!(report.is_clean(), "each is woken by the end: {report}");
    }
    assert!(quiet().start().expect("starts").shutdown_blocking(SOON).is_clean());
    until_no_threads();
}

/// The bug: a shutdown from a hook let another `Memory` start beside the worker that ran the hook.
#[test]
fn a_shutdown_on_the_worker_gave_the_claim_back_before_the_worker_ended() {
    let handle: Arc<OnceLock<Memory>> = Arc::default();
    let (tell, told) = mpsc::channel();
    let (open, gate) = mpsc::channel::<()>();
    let hook = {
        let handle = Arc::clone(&handle);
        move || {
            let _ = gate.recv_timeout(PATIENCE);
            if let Some(memory) = handle.get() {
                let clean = memory.shutdown_blocking(SOON).is_clean();
                let _ = tell.send((clean, is_refused()));
            }
        }
    };
    let memory = quiet().after_publish(hook).start().expect("starts");
    handle.set(memory).expect("set once");
    open.send(()).expect("the hook waits");
    assert_eq!(told.recv_timeout(PATIENCE), Ok((true, true)), "clean, and refused");
    until_no_threads();
    // The old handle lives on; nobody had to call again.
    assert!(quiet().start().expect("the claim was given back").shutdown_blocking(SOON).is_clean());
    until_no_threads();
}

/// The bug: a service that kept only an admission handle was measured no more, and admitted beyond
/// its limit.
#[test]
fn an_admission_handle_keeps_its_memory_running_and_corrected() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = quiet().clock(clock.clone()).signals(tree.open()).start().expect("starts");
    let door = memory.admission().clone();
    tree.hold(99);
    advance_until(&clock, Duration::from_millis(250), "critical", || {
        door.level() == Level::Critical
    });
    let cost = Cost::host(ByteSize::mib(5));
    assert!(matches!(door.try_admit(cost), Err(Rejected::Pressure { .. })));
    let clone = door.clone();
    drop((memory, door));
    tree.hold(10);
    advance_until(&clock, Duration::from_millis(250), "measured", || clone.level() == Level::None);
    clone.try_admit(cost).map(drop).expect("it fits");
    tree.hold(90);
    advance_until(&clock, Duration::from_millis(250), "measured again", || {
        clone.try_admit(cost).is_err()
    });
    assert_eq!(threads(), ["lowtide-control", "lowtide-worker"]);
    drop(clone);
    until_no_threads();

    let memory = quiet().start().expect("starts");
    let door = memory.admission().clone();
    let _ = memory.shutdown_blocking(SOON);
    drop(memory);
    assert_eq!(door.try_admit(cost).map(drop), Err(Rejected::ShuttingDown));
    until_no_threads();
}

/// The bug: a model could not be loaded any more if the last handle was dropped at a critical
/// moment. It does not keep the `Memory` running either, registered or not.
#[test]
fn a_resource_does_not_keep_its_memory_and_loads_after_its_end() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = quiet().clock(clock.clone()).signals(tree.open()).start().expect("starts");
    let door = memory.admission().clone();
    let cost = Cost::host(ByteSize::mib(5));
    let registered = memory.managed("model", || Ok(7)).cost(cost).load_scope(None);
    let registered = registered.register().expect("registered");
    let apart = Managed::builder("model", || Ok(7)).cost(cost);
    let apart = apart.build(clock.clone(), Some(door.clone()));
    tree.hold(99);
    advance_until(&clock, Duration::from_millis(250), "critical", || {
        door.level() == Level::Critical
    });
    let kept = door.try_admit_with(cost, Priority::Exempt).expect("exempt");
    drop((memory, door));
    until_no_threads();
    for model in [registered, apart] {
        let loaded = model.acquire_blocking().map(|value| *value);
        assert_eq!(loaded.expect("it fits beside what is booked"), 7);
    }
    drop(kept);
}

/// The bug: a loader that held the `Memory` kept its threads running when every other handle had
/// gone. A weak handle does not.
#[test]
fn a_loader_with_a_weak_handle_does_not_keep_the_memory() {
    let memory = quiet().start().expect("starts");
    let weak = memory.downgrade();
    let own = weak.clone();
    let level = memory.managed("level", move || {
        let memory = own.upgrade().ok_or_else(|| lowtide::BoxError::from("it has ended"))?;
        Ok(memory.level())
    });
    let level = level.register().expect("registered");
    assert_eq!(*level.acquire_blocking().expect("loads"), Level::None);
    drop(memory);
    until_no_threads();
    assert!(weak.upgrade().is_none());
}

//! A `Memory` in tests of a service: any number that is detached, and one that is shared.

use std::sync::Arc;
use std::time::Duration;

use lowtide::admission::{Cost, LoadFailure, ResourceError};
use lowtide::clock::ManualClock;
use lowtide::device::DeviceError;
use lowtide::memory::Diagnostic;
use lowtide::{ByteSize, Memory};

const SOON: Duration = Duration::from_secs(5);

fn detached(limit: ByteSize) -> Memory {
    let memory =
        Memory::builder().detached().memory_limit(limit).clock(Arc::new(ManualClock::new()));
    memory.start().expect("it needs nothing of the process")
}

#[test]
fn many_run_at_once_and_admit_by_their_own_limits_alone() {
    let all: Vec<_> = (1..=8).map(|nth| detached(ByteSize::mib(10 * nth))).collect();
    for (memory, nth) in all.iter().zip(1..) {
        let most = ByteSize::mib(8 * nth); // 80 %
        let admission = memory.admission();
        assert!(
            admission.try_admit(Cost::host(most.saturating_add(ByteSize::new(1)))).is_err(),
            "{nth}"
        );
        let held = admission.try_admit(Cost::host(most)).expect("nothing else counts");
        assert!(admission.try_admit(Cost::host(ByteSize::mib(1))).is_err(), "{nth}");
        drop(held);
        let is_warning = |note: &Diagnostic| note.is_problem;
        assert!(
            !memory.report().diagnostics().iter().any(is_warning),
            "{:?}",
            memory.report().diagnostics()
        );
    }
    for memory in &all {
        assert!(memory.shutdown_blocking(SOON).is_clean());
    }
}

#[test]
fn models_load_in_one_that_is_detached() {
    let memory = detached(ByteSize::mib(100));
    let model = memory.managed("model", || Ok(7)).cost(Cost::host(ByteSize::mib(60)));
    let model = model.register().expect("it fits");
    assert_eq!(*model.acquire_blocking().expect("it loads"), 7);
    assert_eq!(memory.snapshot().host.reserved, ByteSize::mib(60));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test_fork::test]
fn one_is_shared_while_it_runs_and_the_next_call_starts_another() {
    let one = Memory::shared().expect("the first");
    let same = Memory::shared().expect("the same");
    let held = one.admission().try_admit(Cost::host(ByteSize::mib(1))).expect("fits");
    assert_eq!(same.admission().stats().held(), 1);
    let beside = detached(ByteSize::mib(10));
    drop((held, beside));
    assert!(one.shutdown_blocking(SOON).is_clean());
    let next = Memory::shared().expect("the first has ended");
    assert!(!next.admission().is_closed() && same.admission().is_closed());
    assert!(next.shutdown_blocking(SOON).is_clean());
}

/// An arena's error that `?` converts in a loader is still that error, with its numbers.
#[test]
fn a_device_error_in_a_loader_keeps_its_numbers() {
    let load = || Err::<(), _>(DeviceError::Forked.into());
    let memory = Memory::builder().detached().start().expect("it needs nothing");
    let model = memory.managed("model", load).register().expect("registered");
    let Err(ResourceError::Load { failure: LoadFailure::Failed(source), .. }) =
        model.acquire_blocking()
    else {
        panic!("it fails")
    };
    assert_eq!(source.downcast_ref::<DeviceError>(), Some(&DeviceError::Forked));
}

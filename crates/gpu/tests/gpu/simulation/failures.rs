//! Failures that are planned, contexts that are lost, and what a failed call leaves behind.

use std::time::Duration;

use lowtide_cuda_sim::{
    Call, Cost, DriverCosts, Order, Outcome, Pattern, SimDriver, SimError, SimOptions,
};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::driver::{Driver as _, DriverError};

use super::{GRANULE, code, committed, device};

const SIZE: ByteSize = ByteSize::mib(8);
/// The part of it that is touched if the amount does not matter.
const PART: ByteSize = ByteSize::kib(64);

#[test]
fn each_error_is_answered_as_its_variant_and_the_sticky_ones_for_ever() {
    let refused = |code, message: &str| DriverError::Refused {
        call: "cuEventCreate",
        code,
        message: message.to_owned(),
    };
    let lost = |code, message: &str| DriverError::ContextLost {
        call: "cuEventCreate",
        code,
        message: message.to_owned(),
    };
    let (call, requested) = ("cuEventCreate", ByteSize::ZERO);
    for (error, wanted) in [
        (SimError::InvalidValue, refused(1, "unnamed")),
        (SimError::OutOfMemory, DriverError::OutOfMemory { call, requested }),
        (SimError::EccUncorrectable, lost(214, "unnamed")),
        (SimError::IllegalAddress, DriverError::IllegalAddress { call }),
        (SimError::LaunchFailed, lost(719, "unnamed")),
        (SimError::NotSupported, DriverError::Unsupported { what: call }),
        (SimError::Unknown, refused(999, "unnamed")),
        (SimError::Code(0), refused(999, "unnamed")),
        (SimError::Code(710), lost(710, "unnamed")),
        (SimError::Code(4242), refused(4242, "unnamed")),
    ] {
        let sim = device(Order::Lazy);
        sim.fail_nth(Some(Call::EventCreate), 1, error);
        sim.event_create().expect("the first passes");
        assert_eq!(sim.event_create(), Err(wanted.clone()), "{error:?}");
        let sticky = wanted.is_context_lost();
        assert_eq!(sim.lost().is_some(), sticky, "{error:?}");
        let later = sim.event_create();
        if sticky {
            assert_eq!(later, Err(wanted), "{error:?}");
            assert!(sim.headroom().is_err_and(|error| error.is_context_lost()));
            assert!(sim.synchronize().is_err_and(|error| error.is_context_lost()));
            assert_eq!(sim.calls_after_loss(), 3);
        } else {
            later.expect("one call failed");
            assert_eq!(sim.calls_after_loss(), 0);
        }
        assert_eq!(sim.leaks().events, if sticky { 1 } else { 2 });
        sim.assert_no_faults();
    }
}

/// A round through all that the driver offers; the first error ends it.
fn round(sim: &SimDriver) -> Result<(), DriverError> {
    let at = sim.reserve(SIZE)?;
    sim.commit(at, SIZE, GRANULE)?;
    let (a, b) = (sim.stream_create()?, sim.stream_create()?);
    let mark = sim.event_create()?;
    let store = sim.host_store_create(PART)?;
    sim.fill(a, at, PART, Pattern::new(1))?;
    sim.event_record(mark, a)?;
    sim.stream_wait_event(b, mark)?;
    sim.offload(at, store, b)?;
    sim.restore(store, at, b)?;
    sim.copy_async(at, super::on(at, GRANULE.get()), PART, b)?;
    sim.host_function(b, 1)?;
    sim.is_capturing(b)?;
    sim.event_query(mark)?;
    sim.event_synchronize(mark)?;
    sim.stream_synchronize(b)?;
    sim.synchronize()?;
    sim.copy(at, super::on(at, 2 * GRANULE.get()), PART)?;
    sim.headroom()?;
    sim.begin_capture(a)?;
    let graph = sim.end_capture(a)?;
    sim.graph_launch(graph, a)?;
    sim.graph_destroy(graph)?;
    sim.host_store_destroy(store)?;
    sim.event_destroy(mark)?;
    sim.stream_destroy(a)?;
    sim.stream_destroy(b)?;
    sim.decommit(at, SIZE, GRANULE)?;
    sim.unreserve(at, SIZE)
}

#[test]
fn any_call_can_fail_and_a_failed_call_has_no_effect() {
    let whole = device(Order::Lazy);
    round(&whole).expect("nothing fails");
    assert!(whole.leaks().is_empty(), "{:?}", whole.leaks());
    let calls = whole.calls_total();
    // What comes after them has its round in `raw`.
    for call in Call::ALL.into_iter().filter(|call| *call <= Call::GraphDestroy) {
        assert!(whole.calls(call) > 0, "{call:?} is not in the round");
    }
    for order in [Order::Lazy, Order::Synchronous, Order::Random { seed: 9 }] {
        for nth in 0..calls {
            for error in [SimError::OutOfMemory, SimError::Unknown, SimError::LaunchFailed] {
                let sim = device(order);
                sim.fail_nth(None, nth, error);
                let failed = round(&sim).expect_err("a call failed");
                assert_eq!(failed.is_context_lost(), error == SimError::LaunchFailed, "{failed}");
                sim.validate();
                let faults = sim.faults();
                assert!(faults.is_empty(), "call {nth} of {order:?}, {error:?}: {faults:?}");
            }
        }
    }
}

#[test]
fn a_commit_that_fails_anywhere_leaves_the_range_bare_and_nothing_behind() {
    let calls_of_a_commit = 4 * 3 + 1;
    for nth in 0..calls_of_a_commit {
        for error in [SimError::OutOfMemory, SimError::InvalidValue, SimError::EccUncorrectable] {
            let sim = device(Order::Lazy);
            let at = sim.reserve(SIZE).expect("addresses");
            sim.fail_nth(None, nth, error);
            sim.commit(at, SIZE, GRANULE).expect_err("a call failed");
            assert_eq!(sim.leaks().handles, 0, "call {nth}, {error:?}");
            let mapped = sim.calls(Call::Map).saturating_sub(u64::from(nth % 3 == 1));
            let releases = sim.calls(Call::Release);
            if error == SimError::EccUncorrectable {
                assert_eq!(sim.calls(Call::Unmap), 0, "nothing is called after the loss");
            } else {
                assert_eq!(sim.calls(Call::Unmap), (nth + 1) / 3, "call {nth}");
                assert!(releases >= mapped.min(nth / 3), "call {nth}: {releases} of {mapped}");
                sim.commit(at, SIZE, GRANULE).expect("the range is bare");
            }
            sim.assert_no_faults();
        }
    }
}

#[test]
fn what_a_failed_call_was_to_take_or_write_is_unspecified_after() {
    let sim = device(Order::Lazy);
    let stream = sim.stream_create().expect("stream");
    let (at, to) = (committed(&sim, 1), committed(&sim, 1));
    let pattern = Pattern::new(5);
    sim.fill(stream, at, GRANULE, pattern).expect("queued");
    sim.stream_synchronize(stream).expect("done");
    sim.copy(at, to, GRANULE).expect("copied");
    sim.fail_nth(Some(Call::Copy), 0, SimError::Unknown);
    sim.copy(at, to, GRANULE).expect_err("planned");
    let scribbled = sim.check(stream, to, GRANULE, pattern).expect("queued");
    sim.fail_nth(Some(Call::Unmap), 0, SimError::Unknown);
    sim.stream_synchronize(stream).expect("done");
    sim.decommit(at, GRANULE, GRANULE).expect_err("planned");
    let wiped = sim.check(stream, at, GRANULE, pattern).expect("it is committed still");
    sim.stream_synchronize(stream).expect("done");
    for ticket in [scribbled, wiped] {
        assert!(matches!(sim.outcome(ticket), Outcome::Differs { .. }));
    }
}

#[test]
fn a_call_that_always_fails_does_so_until_told_otherwise() {
    let sim = device(Order::Lazy);
    sim.fail_always(Call::AddressReserve, Some(SimError::NotSupported));
    for _ in 0..3 {
        assert!(matches!(sim.reserve(GRANULE), Err(DriverError::Unsupported { .. })));
    }
    sim.fail_always(Call::AddressReserve, None);
    sim.reserve(GRANULE).expect("offered again");
    sim.fail_nth(None, 0, SimError::Unknown);
    sim.forget_failures();
    sim.reserve(GRANULE).expect("forgotten");
}

#[test]
fn a_context_that_is_destroyed_or_poisoned_does_no_more_work() {
    type Lose = fn(&SimDriver);
    let ways: [(Lose, i64); 4] = [
        (SimDriver::lose_context, 709),
        (|sim| sim.poison(SimError::EccUncorrectable), 214),
        (|sim| sim.poison(SimError::LaunchFailed), 719),
        (|sim| sim.poison(SimError::IllegalAddress), 700),
    ];
    for (lose, number) in ways {
        let sim = device(Order::Lazy);
        let stream = sim.stream_create().expect("stream");
        let at = committed(&sim, 1);
        let found = sim.sum(stream, at, GRANULE).expect("queued");
        lose(&sim);
        assert_eq!((sim.unfinished(), sim.outcome(found)), (0, Outcome::Lost));
        assert_eq!(code(sim.stream_synchronize(stream)), Some(number));
        assert_eq!(code(sim.decommit(at, GRANULE, GRANULE)), Some(number));
        assert_eq!(code(sim.stream_destroy(stream)), Some(number));
        assert_eq!(sim.lost(), u32::try_from(number).ok());
        assert_eq!((sim.leaks().handles, sim.leaks().streams), (1, 1), "they are lost with it");
        assert_eq!(sim.calls_after_loss(), 3);
        sim.lose_context();
        assert_eq!(sim.lost(), u32::try_from(number).ok(), "the first cause stays");
    }
}

#[test]
fn calls_advance_the_clock_by_what_they_cost() {
    let ns = |call_ns, handle_ns, mib_ns| Cost { call_ns, handle_ns, mib_ns };
    let costs = DriverCosts::zero()
        .with(Call::AddressReserve, ns(7, 0, 0))
        .with(Call::Create, ns(100, 10, 1))
        .with(Call::SetAccess, ns(0, 1000, 0))
        .with(Call::Unmap, ns(50_000, 100_000, 0))
        .with(Call::Offload, ns(1_000_000, 0, 500_000));
    let sim = SimDriver::new(SimOptions { costs, ..SimOptions::default() });
    let clock = sim.clock();
    let mut last = clock.now();
    let mut step = || {
        let now = clock.now();
        let passed = now - last;
        last = now;
        u64::try_from(passed.as_nanos()).expect("short")
    };
    let at = sim.reserve(SIZE).expect("addresses");
    assert_eq!(step(), 7);
    sim.commit(at, SIZE, GRANULE).expect("memory");
    assert_eq!(step(), 4 * (100 + 10 + 2) + 4 * 1000);
    let stream = sim.stream_create().expect("stream");
    let store = sim.host_store_create(GRANULE).expect("host memory");
    sim.offload(at, store, stream).expect("queued");
    assert_eq!(step(), 1_000_000, "the bytes are not copied yet");
    sim.stream_synchronize(stream).expect("done");
    assert_eq!(step(), 1_000_000);
    sim.decommit(at, ByteSize::mib(6), GRANULE).expect("done with");
    assert_eq!(step(), 3 * (50_000 + 100_000));
    let slow = SimDriver::new(SimOptions::default());
    slow.reserve(GRANULE).expect("addresses");
    assert!(slow.clock().now().since_origin() > Duration::ZERO);
}

#[test]
fn devices_that_offer_less_than_they_say_fail_at_the_call_that_does_it() {
    // A share of a device that says it has virtual memory, and has not.
    let share = device(Order::Lazy);
    share.fail_always(Call::Create, Some(SimError::NotSupported));
    let at = share.reserve(SIZE).expect("addresses are given");
    let refused = share.commit(at, SIZE, GRANULE);
    assert_eq!(refused, Err(DriverError::Unsupported { what: "cuMemCreate" }));
    // A system on which memory is mapped and access refused.
    let system = device(Order::Lazy);
    system.fail_always(Call::SetAccess, Some(SimError::Unknown));
    let at = system.reserve(SIZE).expect("addresses");
    assert_eq!(code(system.commit(at, SIZE, GRANULE)), Some(999));
    assert_eq!((system.leaks().handles, system.calls(Call::Unmap)), (0, 4));
    // A small device, with little address space: half is there where the whole is not.
    let small = SimOptions { address_space: ByteSize::gib(20), ..SimOptions::default() };
    let small = SimDriver::new(small);
    assert!(small.reserve(ByteSize::gib(32)).is_err());
    small.reserve(ByteSize::gib(16)).expect("half of it");
}

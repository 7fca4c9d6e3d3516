//! Copies of a sleep whose end could not be waited for, and who needs memory that they may work on.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use lowtide_cuda_sim::{Call, Order, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::{Buffer, Contents, DeviceError, Region, SleepOptions, SleepState};

use super::support::{Bed, MIB};

const KEEPS: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Keep, dynamic: Contents::Keep };

/// An arena that is awake, with 1 MiB kept and 2 MiB idle on which copies may work, that nobody has
/// waited for.
fn copied(bed: &Bed) -> Buffer<u8> {
    let kept = bed.marked(MIB, Region::Stable, 1);
    let idle = bed.marked(2 * MIB, Region::Dynamic, 2);
    bed.sim.fail_always(Call::StreamSynchronize, Some(SimError::Unknown));
    assert!(bed.arena.sleep(KEEPS).is_err());
    bed.sim.forget_failures();
    assert_eq!(bed.arena.state(), SleepState::Awake);
    drop(idle);
    kept
}

/// A sleep that had nothing to copy itself did not wait for the copies of one that had failed:
/// seed 198448 of the schedules.
#[test]
fn a_sleep_that_discards_waits_for_the_copies_of_one_that_failed() {
    let bed = Bed::new(Order::Lazy);
    let kept = copied(&bed);
    bed.sim.fail_nth(Some(Call::StreamSynchronize), 0, SimError::Unknown);
    let discards = SleepOptions { stable: Contents::Discard, dynamic: Contents::Discard, ..KEEPS };
    assert!(bed.arena.sleep(discards).is_err());
    assert_eq!((bed.arena.state(), kept.take_discarded()), (SleepState::Awake, false));
    bed.arena.sleep(discards).expect("asleep");
    assert_eq!(bed.sim.unsafe_unmaps(), 0);
    drop(kept);
    bed.end();
}

/// Runs this in a thread, and does not wait for ever.
fn in_time<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(act()));
    told.recv_timeout(Duration::from_secs(120)).expect("it waits for ever")
}

/// A thread that waited for the copies found nothing idle any more and nothing on its way, and
/// waited forever: seed 38426 of the schedules.
#[test]
fn memory_that_another_gives_back_while_copies_are_waited_for_is_not_waited_for() {
    let bed = Bed::with(Order::Lazy, |config| config.limit = ByteSize::mib(4));
    let kept = copied(&bed);
    let arena = bed.arena.clone();
    bed.sim.before(Call::StreamSynchronize, 0, move || {
        assert_eq!(arena.purge(), Ok(ByteSize::mib(2)));
    });
    let arena = bed.arena.clone();
    let taken = in_time(move || arena.alloc::<u8>(3 * MIB, Region::Stable)).expect("room");
    bed.assert_marked(&kept, 1);
    drop((kept, taken));
    bed.end();
}

/// A thread that had a place and no memory yet left it to the thread that put the arena to sleep to
/// wait for the copies, and that one waited for the thread that had a place.
#[test]
fn a_sleep_that_waits_for_an_allocation_is_not_waited_for_by_it() {
    let bed = Bed::with(Order::Lazy, |_| {});
    let kept = copied(&bed);
    bed.sim.set_capacity(ByteSize::mib(512 + 4)); // the context itself takes 512
    let arena = bed.arena.clone();
    let (tell, told) = mpsc::channel();
    bed.sim.before(Call::Create, 0, move || {
        let sleeper = arena.clone();
        thread::spawn(move || tell.send(sleeper.sleep(KEEPS)));
        while arena.state() != SleepState::Draining {
            thread::yield_now();
        }
    });
    let arena = bed.arena.clone();
    let taken = in_time(move || arena.alloc::<u8>(3 * MIB, Region::Stable)).expect("room");
    let slept = told.recv_timeout(Duration::from_secs(120)).expect("it waits for ever");
    assert!(matches!(slept, Ok(_) | Err(DeviceError::SleepCancelled { .. })), "{slept:?}");
    bed.assert_marked(&kept, 1);
    drop((kept, taken));
    bed.end();
}

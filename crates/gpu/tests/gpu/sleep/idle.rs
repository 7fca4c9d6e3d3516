//! The idle time: who asks at the right moments finds the arena asleep by itself, and never sooner.

use std::time::Duration;

use lowtide_cuda_sim::{Call, Order, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock as _, Moment};
use lowtide_gpu::{Region, SleepConfig, SleepState};

use super::support::{Bed, MIB};

const SECOND: Duration = Duration::from_secs(1);

fn bed() -> Bed {
    Bed::with(Order::Lazy, |config| {
        let (idle_after, min_awake) = (Some(30 * SECOND), 100 * SECOND);
        config.sleep = SleepConfig { idle_after, min_awake, ..config.sleep };
    })
}

#[test]
fn it_sleeps_after_the_idle_time_and_the_residency_and_not_before() {
    let bed = bed();
    let (arena, clock) = (&bed.arena, bed.sim.clock());
    assert_eq!(arena.next_sleep(), Moment::NEVER, "there is no memory to give away");
    let kept = bed.marked(MIB, Region::Stable, 1);
    let opened = clock.now();
    assert_eq!(arena.next_sleep(), opened + 100 * SECOND, "the residency");
    clock.advance(90 * SECOND);
    bed.assert_marked(&kept, 1);
    let due = clock.now() + 30 * SECOND;
    assert_eq!(arena.next_sleep(), due, "the idle time, from the last lease");
    clock.advance(30 * SECOND - Duration::from_nanos(1));
    assert_eq!(arena.sleep_if_idle(clock.now()), Ok(None));
    clock.advance(Duration::from_nanos(1));
    let slept = arena.sleep_if_idle(clock.now()).expect("no error").expect("its time");
    assert_eq!(slept.memory, ByteSize::mib(1));
    assert_eq!((arena.state(), arena.next_sleep()), (SleepState::Asleep, Moment::NEVER));
    // A wake begins a new residency.
    bed.assert_marked(&kept, 1);
    assert_eq!(arena.next_sleep(), clock.now() + 100 * SECOND);
    drop(kept);
    bed.end();
}

#[test]
fn a_lease_keeps_it_awake_for_as_long_as_it_is_held() {
    let bed = bed();
    let (arena, clock) = (&bed.arena, bed.sim.clock());
    let kept = bed.marked(MIB, Region::Stable, 1);
    let lease = arena.enter().expect("a lease");
    clock.advance(1000 * SECOND);
    assert_eq!(arena.next_sleep(), Moment::NEVER);
    assert_eq!(arena.sleep_if_idle(clock.now()), Ok(None));
    drop(lease);
    assert_eq!(arena.next_sleep(), clock.now() + 30 * SECOND);
    drop(kept);
    bed.end();
}

#[test]
fn blocks_by_address_keep_it_awake() {
    let bed = bed();
    let (arena, clock) = (&bed.arena, bed.sim.clock());
    let raw = arena.alloc_raw(ByteSize::mib(1), ByteSize::new(256), Region::Dynamic);
    clock.advance(1000 * SECOND);
    assert_eq!(arena.sleep_if_idle(clock.now()), Ok(None), "nobody says when it is used");
    arena.free(raw.expect("room").at).expect("live");
    let kept = bed.marked(MIB, Region::Stable, 1);
    clock.advance(1000 * SECOND);
    assert!(arena.sleep_if_idle(clock.now()).expect("no error").is_some());
    drop(kept);
    bed.end();
}

#[test]
fn an_arena_that_cannot_fall_asleep_does_not_try_all_the_time() {
    let bed = bed();
    let (arena, clock) = (&bed.arena, bed.sim.clock());
    let kept = bed.marked(MIB, Region::Stable, 1);
    clock.advance(1000 * SECOND);
    bed.sim.fail_always(Call::HostAlloc, Some(SimError::OutOfMemory));
    assert!(arena.sleep_if_idle(clock.now()).is_err());
    assert_eq!(arena.state(), SleepState::Awake);
    assert!(arena.next_sleep() > clock.now());
    assert_eq!(arena.sleep_if_idle(clock.now()), Ok(None), "not at once again");
    bed.sim.forget_failures();
    clock.advance(30 * SECOND);
    assert!(arena.sleep_if_idle(clock.now()).expect("no error").is_some());
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

/// The bug: an allocation that cancelled it was no lease, so that it was due again at once, and
/// copied its contents again and again for nothing.
#[test]
fn an_arena_that_was_wanted_meanwhile_was_due_again_at_once() {
    let bed = bed();
    let (arena, clock) = (&bed.arena, bed.sim.clock());
    let kept = bed.marked(MIB, Region::Stable, 1);
    clock.advance(1000 * SECOND);
    let (allocating, at_copies) = (arena.clone(), arena.clone());
    let (held, hold) = std::sync::mpsc::channel();
    bed.sim.before(Call::Offload, 0, move || {
        let alloc = move || allocating.alloc::<u8>(MIB, Region::Dynamic).expect("room");
        held.send(std::thread::spawn(alloc)).expect("the test waits");
        crate::wait_until(|| at_copies.is_wanted());
    });
    assert_eq!(arena.sleep_if_idle(clock.now()), Ok(None), "it was wanted");
    let block = hold.recv().expect("sent").join().expect("no panic");
    assert_eq!(arena.state(), SleepState::Awake);
    assert_eq!(arena.next_sleep(), clock.now() + 10 * SECOND);
    clock.advance(10 * SECOND);
    assert!(arena.sleep_if_idle(clock.now()).expect("no error").is_some());
    bed.assert_marked(&kept, 1);
    drop((kept, block));
    bed.end();
}

#[test]
fn without_an_idle_time_it_never_sleeps_by_itself() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Stable, 1);
    bed.sim.clock().advance(1_000_000 * SECOND);
    assert_eq!(bed.arena.next_sleep(), Moment::NEVER);
    assert_eq!(bed.arena.sleep_if_idle(bed.sim.clock().now()), Ok(None));
    drop(kept);
    bed.end();
}

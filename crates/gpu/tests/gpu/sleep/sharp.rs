//! Tests for small changes to sleep or wake that would go unnoticed: each test stands for one line.
//!
//! Invariant: as the others'; what is written under a lease is read again.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use lowtide_cuda_sim::{Call, DriverCosts, Order, SimDriver, SimError, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock as _, Moment};
use lowtide_gpu::{Contents, DeviceError, Region, SleepConfig, SleepOptions, SleepState};

use super::states::NOW;
use super::support::{Bed, MIB};
use crate::wait_until;

const DISCARD: SleepOptions =
    SleepOptions { stable: Contents::Discard, dynamic: Contents::Discard, ..NOW };

/// A copy back is of what blocks still touch: a piece in the middle comes from the middle of its
/// store.
#[test]
fn what_is_left_of_a_run_comes_from_its_own_place_in_the_store() {
    let bed = Bed::new(Order::Lazy);
    let buffers: Vec<_> = (0..12_u64).map(|nth| bed.marked(MIB, Region::Dynamic, nth)).collect();
    bed.arena.sleep(NOW).expect("asleep");
    let left: Vec<_> =
        (0_u64..).zip(buffers).filter(|(nth, _)| [2, 3, 7, 11].contains(nth)).collect();
    let woken = bed.arena.wake().expect("awake");
    assert_eq!(woken.copied, ByteSize::mib(4));
    for (nth, buffer) in &left {
        bed.assert_marked(buffer, *nth);
    }
    drop(left);
    bed.end();
}

/// A block that is freed after a wake has uses again.
#[test]
fn what_is_freed_after_a_wake_waits_for_its_work() {
    let bed = Bed::new(Order::Lazy);
    let lane = bed.lane();
    let buffer = lane.alloc::<u8>(MIB, Region::Dynamic).expect("room");
    bed.arena.sleep(NOW).expect("asleep");
    bed.arena.wake().expect("awake");
    bed.mark(&buffer, &lane.enter().expect("a lease"), 1);
    drop(buffer);
    assert_eq!(bed.arena.snapshot().pending, ByteSize::mib(1));
    assert_eq!(bed.arena.purge(), Ok(ByteSize::ZERO), "it is worked on");
    assert_eq!(bed.sim.unsafe_unmaps(), 0);
    drop(lane);
    bed.end();
}

/// A block that is freed during the sleep has none: the arena has waited for all of them.
#[test]
fn what_is_freed_while_contents_are_copied_out_waits_for_nothing() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Stable, 1);
    let freed = bed.marked(MIB, Region::Dynamic, 2);
    let (arena, (tell, told)) = (bed.arena.clone(), mpsc::channel());
    bed.sim.before(Call::Offload, 0, move || {
        drop(freed);
        tell.send(arena.snapshot().pending).expect("heard");
    });
    bed.arena.sleep(NOW).expect("asleep");
    assert_eq!(told.recv(), Ok(ByteSize::ZERO));
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

/// A call releases at most a gibibyte in at most 32 handles, and commits at most 256 MiB, so that
/// copies begin early. A handle has a 64th of the three gibibytes, 48 MiB.
#[test]
fn three_gibibytes_leave_in_four_calls_and_come_back_in_thirteen() {
    let (costs, capacity) = (DriverCosts::zero(), ByteSize::gib(8));
    let options = SimOptions { costs, capacity, ..SimOptions::default() };
    let bed = Bed::over(std::sync::Arc::new(SimDriver::new(options)), |_| {});
    let cache = bed.arena.alloc::<u8>(3 << 30, Region::Dynamic).expect("room");
    let before = bed.arena.snapshot();
    bed.arena.sleep(DISCARD).expect("asleep");
    let asleep = bed.arena.snapshot();
    assert_eq!(asleep.decommits_total - before.decommits_total, 4);
    assert_eq!(asleep.decommitted_bytes_total - before.decommitted_bytes_total, 3 << 30);
    bed.arena.wake().expect("awake");
    assert_eq!(bed.arena.snapshot().commits_total - asleep.commits_total, 13);
    drop(cache);
    bed.end();
}

/// Without copies there is nothing to wait for that could spoil a capture.
#[test]
fn a_wake_that_copies_nothing_goes_on_while_a_stream_captures() {
    let bed = Bed::new(Order::Lazy);
    let (cache, lane) = (bed.marked(MIB, Region::Dynamic, 1), bed.lane());
    bed.arena.sleep(DISCARD).expect("asleep");
    bed.sim.begin_capture(bed.stream).expect("nothing captures");
    bed.arena.wake().expect("awake");
    let graph = bed.sim.end_capture(bed.stream).expect("not spoiled");
    bed.sim.graph_destroy(graph).expect("a graph");
    drop((cache, lane));
    bed.end();
}

/// A wake under too low a limit asks for memory, as an allocation does; who is asked may not wait
/// for that wake.
#[test]
fn a_wake_asks_for_memory_and_who_is_asked_does_not_wait_for_it() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(4 * MIB, Region::Dynamic, 1);
    bed.arena.sleep(NOW).expect("asleep");
    bed.arena.set_limit(ByteSize::mib(1));
    let (asked, (tell, told)) = (bed.arena.clone(), mpsc::channel());
    let callback = bed.arena.on_shortage(move |shortage| {
        tell.send((shortage.region, asked.wake().map(drop))).expect("heard");
        asked.set_limit(ByteSize::mib(4));
        true
    });
    let waking = {
        let arena = bed.arena.clone();
        thread::spawn(move || arena.wake())
    };
    wait_until(|| waking.is_finished());
    waking.join().expect("no panic").expect("there is room now");
    let (region, refused) = told.recv().expect("it was asked");
    assert_eq!(region, Region::Dynamic);
    let waking = SleepState::Waking;
    assert!(matches!(refused, Err(DeviceError::State { state, .. }) if state == waking));
    bed.assert_marked(&kept, 1);
    drop((callback, kept));
    bed.end();
}

/// A thread that waits for the wake of another thread receives its error.
#[test]
fn a_wake_beside_one_that_fails_fails_as_well() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    bed.arena.sleep(NOW).expect("asleep");
    bed.sim.fail_always(Call::Create, Some(SimError::OutOfMemory));
    let (arena, (tell, told)) = (bed.arena.clone(), mpsc::channel());
    bed.sim.before(Call::Create, 0, move || {
        let beside = thread::spawn(move || arena.wake().map(drop));
        // It waits by now, or it comes later and fails by itself.
        (0..1000).for_each(|_| thread::yield_now());
        tell.send(beside).expect("heard");
    });
    assert!(bed.arena.wake().expect_err("no memory").is_out_of_memory());
    let beside = told.recv().expect("sent").join().expect("no panic");
    assert!(beside.expect_err("no memory").is_out_of_memory());
    assert_eq!(bed.arena.state(), SleepState::Asleep);
    bed.sim.forget_failures();
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

/// A wake by nobody's lease begins a new idle time.
#[test]
fn the_idle_time_begins_anew_with_a_wake() {
    let idle_after = Duration::from_secs(30);
    let bed = Bed::with(Order::Lazy, |config| {
        config.sleep = SleepConfig { idle_after: Some(idle_after), ..config.sleep };
    });
    let kept = bed.marked(MIB, Region::Stable, 1);
    bed.arena.sleep(NOW).expect("asleep");
    let clock = bed.sim.clock();
    clock.advance(Duration::from_secs(1000));
    bed.arena.wake().expect("awake");
    assert_eq!(bed.arena.next_sleep(), clock.now() + idle_after);
    drop(kept);
    bed.end();
}

/// A caller of `next_decay` is not asked to return at once, again and again, while blocks are live.
#[test]
fn a_sleeper_is_looked_at_only_when_no_block_is_left_to_wake_for() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Stable, 1);
    bed.arena.sleep(NOW).expect("asleep");
    assert_eq!(bed.arena.next_decay(), Moment::NEVER);
    drop(kept);
    assert!(bed.arena.next_decay() <= bed.sim.clock().now());
    bed.arena.decay(bed.sim.clock().now()).expect("no error");
    assert_eq!(bed.arena.next_decay(), Moment::NEVER);
    bed.end();
}

/// A handle that the device cannot create is replaced by smaller ones, with no copy missing.
#[test]
fn a_wake_takes_small_handles_if_a_large_one_is_not_to_be_had() {
    let bed = Bed::new(Order::Lazy);
    let kept = [1, 2].map(|mark| bed.marked(4 * MIB, Region::Stable, mark));
    let before = bed.sim.calls(Call::Create);
    assert_eq!(before, 64 + 32, "64 KiB, and 128 KiB when 8 MiB are committed");
    bed.arena.sleep(NOW).expect("asleep");
    bed.sim.fail_nth(Some(Call::Create), 0, SimError::OutOfMemory);
    bed.arena.wake().expect("awake");
    assert_eq!(
        bed.sim.calls(Call::Create) - before,
        1 + 8 * 16,
        "all in one call, and then 64 KiB each"
    );
    bed.assert_all_marked(1, &kept);
    drop(kept);
    bed.end();
}

/// Memory leaves in whole handles: a small block where a large one was keeps all of its handle.
#[test]
fn a_handle_stays_while_a_block_touches_it() {
    let bed = Bed::new(Order::Lazy);
    let large = bed.arena.alloc::<u8>(64 * MIB, Region::Dynamic).expect("room");
    drop(large);
    let small = bed.arena.alloc::<u8>(3 * MIB / 2, Region::Dynamic).expect("room");
    let lease = bed.arena.enter().expect("a lease");
    bed.arena.purge().expect("all other handles");
    assert_eq!(bed.arena.snapshot().committed, ByteSize::mib(2), "two handles of a 64th");
    drop(lease);
    drop(small);
    bed.arena.purge().expect("all of it");
    assert_eq!(bed.arena.snapshot().committed, ByteSize::ZERO);
    bed.end();
}

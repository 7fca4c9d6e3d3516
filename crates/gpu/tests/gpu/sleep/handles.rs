//! Handles that blocks touch in part, after a wake that put several blocks into one handle.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lowtide_cuda_sim::{Call, Order, Pattern, SimError};
use lowtide_gpu::clock::{Clock as _, Moment};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::{DeviceAddress, Driver as _};
use lowtide_gpu::{Buffer, ByteSize, DeviceError, Region};

use super::states::NOW;
use super::support::{Bed, MIB, at};

/// Blocks that a wake put into few handles. The mark of a block is its number.
fn packed(bed: &Bed) -> Vec<(u64, Buffer<u8>)> {
    let blocks = (0..256).map(|mark| (mark, bed.marked(MIB / 8, Region::Stable, mark))).collect();
    bed.arena.sleep(NOW).expect("asleep");
    bed.arena.wake().expect("awake");
    blocks
}

/// The same, of which most were freed since.
fn scattered(bed: &Bed) -> Vec<(u64, Buffer<u8>)> {
    let mut blocks = packed(bed);
    blocks.retain(|(mark, _)| mark % 4 == 1);
    bed.arena.wait_for_pending().expect("idle");
    blocks
}

/// Lets stuck memory leave, and returns what stays committed.
fn committed(bed: &Bed) -> ByteSize {
    // Each check divides a few handles.
    for _ in 0..8 {
        bed.arena.decay(later(bed)).expect("no error");
    }
    bed.arena.purge().expect("no error");
    bed.arena.snapshot().committed
}

/// Returns a time at which all idle memory has expired.
fn later(bed: &Bed) -> Moment {
    bed.sim.clock().now() + Duration::from_secs(60)
}

/// Calls the decay whenever it is due for this time. Returns the number of calls.
fn decays_when_due(bed: &Bed, time: Duration) -> u32 {
    let clock = bed.sim.clock();
    let (end, mut calls) = (clock.now() + time, 0);
    while clock.now() < end {
        clock.advance(Duration::from_millis(100));
        if bed.arena.next_decay() <= clock.now() {
            bed.arena.decay(clock.now()).expect("no error");
            calls += 1;
        }
    }
    calls
}

fn assert_whole(bed: &Bed, blocks: &[(u64, Buffer<u8>)]) {
    for (mark, buffer) in blocks {
        bed.assert_marked(buffer, *mark);
    }
}

fn addresses(bed: &Bed, blocks: &[(u64, Buffer<u8>)]) -> Vec<DeviceAddress> {
    let lease = bed.arena.enter().expect("a lease");
    let addresses = blocks.iter().map(|(_, buffer)| at(buffer, &lease)).collect();
    drop(lease);
    bed.arena.wait_for_pending().expect("the lease named no lane");
    addresses
}

#[test]
fn idle_memory_in_a_handle_leaves_and_the_blocks_stay_whole_where_they_are() {
    let bed = Bed::new(Order::Lazy);
    let blocks = scattered(&bed);
    let before = addresses(&bed, &blocks);
    let committed = committed(&bed);
    assert!(committed <= ByteSize::mib(9), "{committed}: 64 blocks are live, 8 MiB");
    assert_eq!(addresses(&bed, &blocks), before);
    assert_whole(&bed, &blocks);
    drop(blocks);
    bed.end();
}

/// A lease is granted between two handles, and while one is held none is divided.
#[test]
fn no_handle_is_divided_while_a_lease_is_held() {
    let bed = Bed::new(Order::Lazy);
    let blocks = scattered(&bed);
    let lease = bed.arena.enter().expect("a lease");
    let before = bed.arena.snapshot().committed;
    assert_eq!(committed(&bed), before, "all is in handles that blocks touch");
    drop(lease);
    bed.arena.wait_for_pending().expect("the lease named no lane");
    assert!(committed(&bed) < before);
    drop(blocks);
    bed.end();
}

/// Raw blocks may be used without a lease, and pinned ones by their address.
#[test]
fn a_handle_with_a_block_that_may_not_move_stays() {
    let bed = Bed::new(Order::Lazy);
    let blocks = scattered(&bed);
    let pins: Vec<_> = blocks.iter().map(|(_, buffer)| buffer.pin()).collect();
    let before = bed.arena.snapshot().committed;
    assert_eq!(committed(&bed), before);
    drop(pins);
    assert!(committed(&bed) < before);
    drop(blocks);
    bed.end();
}

/// Each call of the division fails in turn: the contents are whole, or the blocks say that they are
/// lost, and the next check goes on.
#[test]
fn contents_are_whole_or_known_to_be_lost_wherever_a_call_fails() {
    let (mut lost, mut nth) = (0, 0);
    loop {
        let bed = Bed::new(Order::Lazy);
        let blocks = scattered(&bed);
        let before = bed.sim.calls_total();
        bed.sim.fail_nth(None, nth, SimError::InvalidValue);
        let _ = bed.arena.decay(later(&bed)); // the failed call may be its own
        let is_over = bed.sim.calls_total() - before <= nth;
        while is_over && bed.sim.headroom().is_ok() {} // until the planned failure has happened
        for (mark, buffer) in &blocks {
            let lease = bed.arena.enter().expect("a lease");
            match buffer.address(&lease) {
                Ok(_) => bed.assert_marked(buffer, *mark),
                Err(error) => {
                    assert!(matches!(error, DeviceError::ContentsLost { .. }), "{error}");
                    lost += 1;
                }
            }
        }
        drop(blocks);
        bed.end();
        if is_over {
            break;
        }
        nth += 1;
    }
    println!("{nth} calls failed, {lost} blocks lost their contents");
    assert!(nth > 20 && lost <= 128);
}

/// Bug: the memory that a handle released was allocated again for its blocks. If another process
/// took it first, the contents were lost.
#[test]
fn another_process_that_takes_all_free_memory_takes_no_contents() {
    let bed = Bed::new(Order::Lazy);
    let blocks = scattered(&bed);
    let sim = Arc::downgrade(&bed.sim);
    bed.sim.before(Call::Unmap, 1, move || {
        if let Some(sim) = sim.upgrade() {
            sim.set_neighbours(ByteSize::gib(1 << 10));
        }
    });
    for _ in 0..8 {
        bed.arena.decay(later(&bed)).expect("no error");
    }
    assert_whole(&bed, &blocks);
    drop(blocks);
    bed.end();
}

/// Bug: a handle with memory of several ages was due from the oldest on, and left at the youngest:
/// a program that calls decay when it is due made calls without an effect.
#[test]
fn a_handle_is_due_when_its_youngest_memory_has_expired() {
    let second = Duration::from_secs(1);
    let bed = Bed::with(Order::Lazy, |config| config.decay = DecayTime::Within(10 * second));
    let large = bed.arena.alloc::<u8>(64 * MIB, Region::Dynamic).expect("room");
    drop(large);
    let small = bed.arena.alloc::<u8>(MIB / 4, Region::Dynamic).expect("room");
    bed.arena.wait_for_pending().expect("idle");
    bed.sim.clock().advance(6 * second);
    drop(small);
    bed.arena.wait_for_pending().expect("idle");
    let calls = decays_when_due(&bed, 12 * second);
    assert_eq!(bed.arena.snapshot().committed, ByteSize::ZERO);
    assert!(calls <= 20, "{calls} calls in 12 s");
    bed.end();
}

/// Bug: after a division for which the device had no memory, the next was due only when other
/// memory became idle.
#[test]
fn a_division_that_failed_is_due_again() {
    let second = Duration::from_secs(1);
    let bed = Bed::with(Order::Lazy, |config| config.decay = DecayTime::Within(10 * second));
    let blocks = scattered(&bed);
    bed.sim.fail_nth(Some(Call::Create), 0, SimError::OutOfMemory);
    let first = decays_when_due(&bed, 15 * second);
    assert_eq!(bed.arena.snapshot().committed, ByteSize::mib(32), "none was divided");
    let calls = decays_when_due(&bed, 15 * second);
    assert_eq!(bed.arena.snapshot().committed, ByteSize::mib(8), "what is live");
    assert!(first + calls <= 40, "{first} and {calls} calls");
    assert_whole(&bed, &blocks);
    drop(blocks);
    bed.end();
}

/// A purge divides handles as well, and memory that never decays is left alone by a decay.
#[test]
fn a_purge_divides_handles_and_a_decay_only_those_that_have_expired() {
    let bed = Bed::with(Order::Lazy, |config| config.decay = DecayTime::Never);
    let blocks = scattered(&bed);
    let before = bed.arena.snapshot().committed;
    bed.arena.decay(bed.sim.clock().now()).expect("no error");
    assert_eq!(bed.arena.snapshot().committed, before);
    bed.arena.purge().expect("no error");
    assert_eq!(bed.arena.snapshot().committed, ByteSize::mib(8), "what is live");
    drop(blocks);
    bed.end();
}

/// A decay does not wait for work either.
#[test]
fn no_handle_is_divided_while_work_may_use_its_blocks() {
    let bed = Bed::new(Order::Lazy);
    let blocks = scattered(&bed);
    let lane = bed.lane();
    let lease = lane.enter().expect("a lease");
    for (mark, buffer) in &blocks {
        bed.mark(buffer, &lease, *mark);
    }
    drop(lease);
    let before = bed.arena.snapshot().committed;
    let waits = bed.sim.calls(Call::EventSynchronize);
    bed.arena.decay(later(&bed)).expect("no error");
    assert_eq!(bed.arena.snapshot().committed, before, "the work is queued");
    assert_eq!(bed.sim.calls(Call::EventSynchronize), waits);
    bed.sim.run_all();
    bed.arena.decay(later(&bed)).expect("no error");
    assert!(bed.arena.snapshot().committed < before);
    assert_whole(&bed, &blocks);
    drop((blocks, lane));
    bed.end();
}

/// Bug: while the arena asked whether work was complete, a program could write to raw blocks, free
/// them, and get blocks at their place in the order of the stream. The handle was released while
/// the work still wrote to it.
#[test]
fn no_handle_is_divided_while_work_of_a_raw_block_writes_where_another_block_is_now() {
    const SIZE: ByteSize = ByteSize::kib(128);
    let bed = Bed::new(Order::Lazy);
    let mut blocks = packed(&bed);
    let lane = bed.lane();
    blocks.retain(|(mark, _)| mark % 4 != 2);
    bed.arena.wait_for_pending().expect("idle");
    let align = ByteSize::new(1);
    let raw = |_| lane.alloc_raw(SIZE, align, Region::Stable).expect("room");
    let raws: Vec<_> = (0..64).map(raw).collect();
    blocks.retain(|(mark, _)| mark % 4 == 1);
    bed.arena.wait_for_pending().expect("idle");
    // The first check after a lease only records events.
    for _ in 0..2 {
        drop(lane.enter().expect("a lease"));
        bed.arena.decay(later(&bed)).expect("no error");
        bed.sim.run_all();
    }
    let taken = Arc::new(Mutex::new(Vec::new()));
    let (sim, stream, program) = (Arc::downgrade(&bed.sim), bed.stream, lane.clone());
    let (placed, count) = (Arc::clone(&taken), raws.len());
    bed.sim.before(Call::EventQuery, 0, move || {
        let Some(sim) = sim.upgrade() else { return };
        for raw in raws {
            sim.fill(stream, raw.at, raw.size, Pattern::new(999)).expect("queued");
            program.free(raw.at).expect("a raw block");
        }
        let again = |_| program.alloc::<u8>(MIB / 8, Region::Stable).expect("room");
        placed.lock().expect("no panic").extend((0..count).map(again));
    });
    bed.arena.decay(later(&bed)).expect("no error");
    let taken = std::mem::take(&mut *taken.lock().expect("no panic"));
    assert_eq!(taken.len(), 64, "the work was asked for");
    assert_eq!(bed.sim.unsafe_unmaps(), 0);
    bed.sim.run_all();
    drop((taken, lane));
    assert_whole(&bed, &blocks);
    drop(blocks);
    bed.end();
}

/// Bug: if the idle memory of a handle had not all expired at the first check, no other check was
/// due, and it stayed.
#[test]
fn memory_of_a_handle_that_expires_after_the_first_check_leaves() {
    let second = Duration::from_secs(1);
    let bed = Bed::with(Order::Lazy, |config| config.decay = DecayTime::Within(10 * second));
    let mut blocks = packed(&bed);
    for rest in [3, 2] {
        blocks.retain(|(mark, _)| mark % 4 != rest);
        bed.arena.wait_for_pending().expect("idle");
        bed.sim.clock().advance(5 * second);
    }
    let calls = decays_when_due(&bed, 30 * second);
    let snapshot = bed.arena.snapshot();
    assert_eq!(snapshot.committed, ByteSize::mib(16), "what is live: {snapshot:?}");
    assert!(calls <= 40, "{calls} calls in 30 s");
    drop(blocks);
    bed.end();
}

/// Bug: an allocation at the limit divided 16 handles, and failed although more could be divided.
#[test]
fn an_allocation_at_the_limit_divides_as_many_handles_as_it_needs() {
    let bed = Bed::with(Order::Lazy, |config| {
        (config.limit, config.decay) = (ByteSize::mib(33), DecayTime::Never);
    });
    let blocks = scattered(&bed);
    let snapshot = bed.arena.snapshot();
    assert_eq!((snapshot.live, snapshot.committed), (ByteSize::mib(8), ByteSize::mib(32)));
    drop(bed.arena.alloc::<u8>(16 * MIB, Region::Dynamic).expect("room"));
    assert_whole(&bed, &blocks);
    drop(blocks);
    bed.end();
}

/// Bug: an allocation at the limit divided no handle while other idle memory could leave, because
/// there was no room for the copies.
#[test]
fn idle_memory_makes_room_for_a_division_at_the_limit() {
    let bed = Bed::with(Order::Lazy, |config| {
        (config.limit, config.decay) = (ByteSize::mib(36), DecayTime::Never);
    });
    let mut blocks: Vec<_> =
        (0..64).map(|mark| (mark, bed.marked(MIB / 8, Region::Stable, mark))).collect();
    let idle = bed.arena.alloc::<u8>(28 * MIB, Region::Dynamic).expect("room");
    bed.arena.sleep(NOW).expect("asleep");
    bed.arena.wake().expect("awake");
    blocks.retain(|(mark, _)| mark % 4 == 1);
    drop(idle);
    bed.arena.wait_for_pending().expect("idle");
    assert_eq!(bed.arena.snapshot().committed, ByteSize::mib(36), "28 MiB may leave, 6 are stuck");
    drop(bed.arena.alloc::<u8>(30 * MIB, Region::Dynamic).expect("room"));
    assert_whole(&bed, &blocks);
    drop(blocks);
    bed.end();
}

/// Small and large blocks have different ends of the addresses of each region.
#[test]
fn handles_are_divided_in_both_halves_of_both_regions() {
    let bed = Bed::with(Order::Lazy, |config| {
        (config.handles_min, config.handle_max) = (4, ByteSize::mib(8));
    });
    let block = |mark: u64| {
        let kib =
            if mark.is_multiple_of(4) { 1024 + mark * 37 % 700 } else { 20 + mark * 97 % 300 };
        let region = Region::ALL[usize::from(mark % 8 < 4)];
        (mark, bed.marked(usize::try_from(kib << 10).expect("small"), region, mark))
    };
    let mut blocks: Vec<_> = (0..160).map(block).collect();
    bed.arena.sleep(NOW).expect("asleep");
    bed.arena.wake().expect("awake");
    blocks.retain(|(mark, _)| mark % 3 == 0);
    bed.arena.wait_for_pending().expect("idle");
    let before = addresses(&bed, &blocks);
    assert!(bed.arena.snapshot().idle > ByteSize::mib(8), "much is idle");
    committed(&bed);
    let snapshot = bed.arena.snapshot();
    assert_eq!(snapshot.idle, ByteSize::ZERO, "{snapshot:?}");
    assert_eq!(addresses(&bed, &blocks), before);
    assert_whole(&bed, &blocks);
    drop(blocks);
    bed.end();
}

#[test]
fn a_device_that_is_lost_in_the_middle_of_a_division_leaves_the_arena_whole() {
    for call in [Call::Create, Call::Copy, Call::Unmap, Call::Map] {
        for nth in 0..3 {
            let bed = Bed::with(Order::Lazy, |config| config.handles_min = 4);
            let blocks = scattered(&bed);
            let sim = Arc::downgrade(&bed.sim);
            bed.sim.before(call, nth, move || {
                if let Some(sim) = sim.upgrade() {
                    sim.lose_context();
                }
            });
            // A division that fails is logged; the next call of the decay may fail as well.
            let _ = bed.arena.decay(later(&bed));
            assert!(bed.sim.lost().is_some(), "{call:?} {nth}");
            bed.arena.validate();
            assert!(!bed.arena.is_busy(), "{call:?} {nth}");
            let lease = bed.arena.enter().expect("an arena that is awake grants leases");
            let known = |(_, buffer): &(u64, Buffer<u8>)| match buffer.address(&lease) {
                Ok(_) => true,
                Err(error) => matches!(error, DeviceError::ContentsLost { .. }),
            };
            assert!(blocks.iter().all(known), "{call:?} {nth}");
            drop((lease, blocks));
            bed.arena.validate();
        }
    }
}

/// Bug: a block that was freed by its lane while its handle was divided stayed pending until a call
/// of the program waited for the whole device.
#[test]
fn a_block_that_its_lane_frees_during_a_division_waits_for_that_lane_alone() {
    let bed = Bed::new(Order::Lazy);
    let lane = bed.lane();
    let block = |_| lane.alloc::<u8>(MIB / 8, Region::Stable).expect("room");
    let mut blocks: Vec<_> = (0..256).map(block).collect();
    bed.arena.sleep(NOW).expect("asleep");
    bed.arena.wake().expect("awake");
    let mut nth = 0;
    blocks.retain(|_| {
        nth += 1;
        nth % 4 == 1
    });
    bed.arena.wait_for_pending().expect("idle");
    let mut blocks = Some(blocks);
    bed.sim.before(Call::Unmap, 0, move || drop(blocks.take()));
    for _ in 0..10 {
        bed.arena.decay(later(&bed)).expect("no error");
        bed.sim.run_all();
    }
    let snapshot = bed.arena.snapshot();
    assert_eq!((snapshot.live, snapshot.pending), (ByteSize::ZERO, ByteSize::ZERO));
    drop(lane);
    bed.end();
}

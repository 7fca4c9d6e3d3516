//! Buffers that are lent: what the arena does not do meanwhile, and what it waits for afterwards.

use std::sync::Arc;
use std::time::Duration;

use lowtide_cuda_sim::{Call, Pattern, SimDriver, SimError, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock as _, ManualClock, Moment};
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{
    ArenaConfig, Buffer, CompactOptions, DeviceArena, DeviceError, DeviceErrorWith, HostDriver,
    Lane, Region, SleepConfig, SleepOptions, SleepState,
};

use super::support::{Bed, MIB};

const DYNAMIC: Region = Region::Dynamic;

fn at_once() -> SleepOptions {
    SleepOptions { drain: Duration::ZERO, ..SleepOptions::default() }
}

/// A buffer of a lane was lent; a foreign stream writes it, and is not done when the loan ends.
fn written_by_a_stranger(bed: &Bed, lane: &Lane) -> Buffer<u8> {
    let exported = lane.alloc::<u8>(4 * MIB, DYNAMIC).expect("room").export().expect("awake");
    let (at, size) = (exported.address(), exported.buffer().bytes());
    bed.sim.fill(bed.foreign, at, size, Pattern::new(1)).expect("queued");
    exported.end()
}

/// Faults when the memory of a lent buffer is freed and its lane has it again, whose stream knows
/// nothing of the foreign work.
fn freed_and_taken_again() -> u64 {
    let bed = Bed::new();
    let lane = bed.lane();
    drop(written_by_a_stranger(&bed, &lane));
    let next = lane.alloc::<u8>(4 * MIB, DYNAMIC).expect("room");
    let lease = lane.enter().expect("awake");
    let at = next.address(&lease).expect("ours").expect("not empty");
    bed.sim.fill(lane.stream(), at, next.bytes(), Pattern::new(2)).expect("queued");
    bed.sim.stream_synchronize(lane.stream()).expect("done");
    bed.sim.stream_synchronize(bed.foreign).expect("done");
    bed.sim.check(lane.stream(), at, next.bytes(), Pattern::new(2)).expect("queued");
    bed.faults()
}

/// Faults when an arena sleeps after a loan, and no lease has let any stream in.
fn slept() -> u64 {
    let bed = Bed::new();
    let lane = bed.lane();
    let exported = lane.alloc::<u8>(4 * MIB, DYNAMIC).expect("room").export().expect("awake");
    let exported = {
        // A sleep and a wake before the work: what the lease of the loan let in is waited for.
        let buffer = exported.end();
        bed.arena.sleep(at_once()).expect("asleep");
        drop(lane.enter().expect("awake"));
        buffer.export().expect("awake")
    };
    let (at, size) = (exported.address(), exported.buffer().bytes());
    bed.sim.fill(bed.foreign, at, size, Pattern::new(1)).expect("queued");
    let buffer = exported.end();
    bed.arena.sleep(at_once()).expect("asleep");
    let lease = lane.enter().expect("awake");
    bed.sim.check(lane.stream(), at, size, Pattern::new(1)).expect("queued");
    bed.sim.synchronize().expect("done");
    drop((lease, buffer));
    bed.faults()
}

#[test]
fn lent_memory_is_another_blocks_only_after_all_work_of_the_context() {
    assert_eq!(freed_and_taken_again(), 0);
}

#[test]
fn contents_of_what_was_lent_go_to_sleep_only_after_all_work_of_the_context() {
    assert_eq!(slept(), 0);
}

#[test]
fn memory_that_was_lent_leaves_only_after_all_work_of_the_context() {
    let bed = Bed::new();
    let lane = bed.lane();
    drop(written_by_a_stranger(&bed, &lane));
    assert_eq!(bed.arena.snapshot().pending, ByteSize::mib(4));
    assert_eq!(bed.arena.purge().expect("waits"), ByteSize::mib(4));
    assert_eq!((bed.sim.unsafe_unmaps(), bed.faults()), (0, 0));
}

#[test]
fn an_arena_does_not_sleep_while_a_buffer_is_lent_and_does_afterwards() {
    let bed = Bed::new();
    let export = || bed.arena.alloc::<u8>(MIB, DYNAMIC).expect("room").export().expect("awake");
    let mut exported = vec![export(), export()];
    while let Some(one) = exported.pop() {
        let (count, bytes) = (exported.len() as u64 + 1, ByteSize::mib(exported.len() as u64 + 1));
        let error = bed.arena.sleep(at_once()).expect_err("lent");
        assert_eq!(error, DeviceError::Exported { arena: "border".to_owned(), count, bytes });
        assert!(error.to_string().contains("\"border\" cannot sleep: "), "{error}");
        let snapshot = bed.arena.snapshot();
        assert_eq!((snapshot.state, snapshot.exported_count), (SleepState::Awake, count));
        assert_eq!(snapshot.exported, bytes);
        snapshot.validate();
        drop(one);
    }
    let kept = bed.arena.alloc::<u8>(MIB, DYNAMIC).expect("room");
    bed.arena.sleep(at_once()).expect("nothing is lent");
    let exported = kept.export().expect("woken");
    assert_eq!(bed.arena.state(), SleepState::Awake);
    drop(exported);
    assert_eq!(bed.faults(), 0);
}

#[test]
fn a_lent_buffer_keeps_an_arena_from_falling_asleep_by_itself_and_its_return_counts_as_use() {
    let (sim, clock) = (Arc::new(SimDriver::new(SimOptions::default())), ManualClock::new());
    let idle_after = Duration::from_secs(10);
    let sleep = SleepConfig { idle_after: Some(idle_after), ..SleepConfig::default() };
    let config = ArenaConfig { sleep, ..ArenaConfig::new("border") };
    let arena = DeviceArena::open(sim, Arc::new(clock.clone()), config).expect("opens");
    let exported = arena.alloc::<u8>(MIB, DYNAMIC).expect("room").export().expect("awake");
    clock.advance(Duration::from_secs(60));
    assert_eq!(arena.next_sleep(), Moment::NEVER);
    assert_eq!(arena.sleep_if_idle(clock.now()).expect("not now"), None);
    let buffer = exported.end();
    assert_eq!(arena.next_sleep(), clock.now() + idle_after);
    clock.advance(idle_after);
    assert!(arena.sleep_if_idle(clock.now()).expect("sleeps").is_some());
    drop(buffer);
}

#[test]
fn a_lent_block_stays_where_it_is_through_a_compaction_and_moves_after_its_return() {
    let bed = Bed::new();
    let part = 512 << 10;
    let mut blocks: Vec<_> =
        (0..16).map(|_| bed.arena.alloc::<u8>(part, DYNAMIC).expect("room")).collect();
    let last = blocks.pop().expect("sixteen");
    let exported = last.export().expect("awake");
    let mut nth = 0;
    blocks.retain(|_| {
        nth += 1;
        nth % 4 == 0
    });
    bed.arena.purge().expect("nothing whole is idle");
    bed.arena.compact(CompactOptions::new(DYNAMIC), |_| {}).expect("compacted");
    let here = |buffer: &Buffer<u8>| {
        let lease = bed.arena.enter().expect("awake");
        buffer.address(&lease).expect("ours").expect("not empty")
    };
    assert_eq!(here(exported.buffer()), exported.address());
    let at = exported.address();
    bed.sim.fill(bed.foreign, at, exported.buffer().bytes(), Pattern::new(7)).expect("queued");
    let buffer = exported.end();
    drop(blocks);
    let before = bed.arena.alloc::<u8>(part, DYNAMIC).expect("room");
    bed.arena.compact(CompactOptions::new(DYNAMIC), |_| {}).expect("compacted");
    let (to, size) = (here(&buffer), buffer.bytes());
    bed.sim.check(bed.foreign, to, size, Pattern::new(7)).expect("queued");
    assert_eq!(bed.faults(), 0, "moved from {at} to {to}");
    drop((before, buffer));
}

#[test]
fn what_cannot_be_lent_comes_back_with_the_error() {
    let bed = Bed::new();
    let empty = bed.arena.alloc::<u8>(0, DYNAMIC).expect("nothing");
    let DeviceErrorWith { value: buffer, error } = empty.export().expect_err("no address");
    assert_eq!((buffer.len(), &error), (0, &DeviceError::ZeroSize));
    let buffer = bed.arena.alloc::<u8>(MIB, DYNAMIC).expect("room");
    bed.arena.sleep(at_once()).expect("asleep");
    bed.sim.fail_always(Call::Create, Some(SimError::Unknown));
    let refused = buffer.export().expect_err("it cannot be woken");
    bed.sim.forget_failures();
    assert!(matches!(refused.error, DeviceError::Driver(_)), "{refused}");
    assert_eq!(bed.arena.snapshot().exported_count, 0);
    let exported = refused.value.export().expect("now it can");
    assert_eq!((exported.buffer().len(), exported.buffer().is_empty()), (MIB, false));
}

#[test]
fn a_loan_that_is_forgotten_leaks_and_harms_nobody() {
    let bed = Bed::new();
    let exported = bed.arena.alloc::<u8>(MIB, DYNAMIC).expect("room").export().expect("awake");
    let forgotten = std::mem::ManuallyDrop::new(exported);
    let error = bed.arena.close().expect_err("the block is live");
    assert!(matches!(error, DeviceError::LiveBlocks { count: 1, .. }), "{error}");
    assert!(matches!(bed.arena.sleep(at_once()), Err(DeviceError::Exported { .. })));
    drop(std::mem::ManuallyDrop::into_inner(forgotten));
    bed.arena.close().expect("nothing is live");
    assert_eq!(bed.faults(), 0);
}

#[test]
fn a_loan_on_the_host_is_over_when_it_ends() {
    let clock = Arc::new(ManualClock::new());
    let config = ArenaConfig::new("host");
    let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, config).expect("opens");
    for _ in 0..16 {
        let exported =
            arena.alloc_from(&[7_u8; 4096], DYNAMIC).expect("room").export().expect("awake");
        let lease = arena.enter().expect("awake");
        assert_eq!(exported.buffer().slice(&lease).expect("host memory")[4095], 7);
        let at = exported.buffer().slice(&lease).expect("host memory").as_ptr().addr() as u64;
        assert_eq!(exported.address().get(), at);
        drop(lease);
        drop(exported);
        arena.validate();
    }
    arena.close().expect("nothing is live");
}

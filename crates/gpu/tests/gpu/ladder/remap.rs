//! Idle memory that moves to where it is needed, over the simulation: no neighbour gets in between,
//! fewer calls are made, and a failure at any of them leaves everything whole.

#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use lowtide_cuda_sim::{Call, Outcome, Pattern, SimDriver, SimError, Ticket};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::{Driver as _, StreamHandle};
use lowtide_gpu::{Buffer, DeviceArena, DeviceCosts, DeviceError, Lane, Region};

use super::{DYNAMIC, GRANULE, config, device, mib, on_device};

pub(crate) fn lane_of(arena: &DeviceArena, stream: StreamHandle) -> Lane {
    // SAFETY: the simulation looks whether a stream is there.
    unsafe { arena.lane(stream) }.expect("a lane")
}

/// The bytes of a buffer that are written, from its beginning on.
const PART: ByteSize = ByteSize::kib(64);

/// Writes a buffer, and has it checked when that is asked.
fn fill(sim: &SimDriver, stream: StreamHandle, buffer: &Buffer<u8>, mark: u64) {
    let lease = buffer.enter().expect("a lease");
    let at = buffer.address(&lease).expect("ours").expect("not empty");
    sim.fill(stream, at, PART, Pattern::new(mark)).expect("queued");
}

fn check(sim: &SimDriver, stream: StreamHandle, buffer: &Buffer<u8>, mark: u64) -> Ticket {
    let lease = buffer.enter().expect("a lease");
    let at = buffer.address(&lease).expect("ours").expect("not empty");
    sim.check(stream, at, PART, Pattern::new(mark)).expect("queued")
}

/// Calls that give physical memory back or ask for some.
fn traffic(sim: &SimDriver) -> [u64; 2] {
    [sim.calls(Call::Create), sim.calls(Call::Release)]
}

/// Idle memory in four pieces that no block of 8 MiB fits in, between blocks that stay.
fn scattered(arena: &DeviceArena) -> Vec<Buffer<u8>> {
    let mut pieces = Vec::new();
    let mut stay = Vec::new();
    for _ in 0..4 {
        pieces.push(mib(arena, 2).expect("room"));
        stay.push(mib(arena, 2).expect("room"));
    }
    drop(pieces);
    stay
}

#[test]
fn idle_memory_in_pieces_goes_behind_one_block_and_none_is_given_back_for_it() {
    let sim = device(|_| {});
    let arena = on_device(&sim, config(ByteSize::mib(16)));
    let stream = sim.stream_create().expect("a stream");
    let stay = scattered(&arena);
    for (mark, buffer) in (0..).zip(&stay) {
        fill(&sim, stream, buffer, mark);
    }
    let before = traffic(&sim);
    let whole = mib(&arena, 8).expect("its memory is there, in pieces");
    assert_eq!(traffic(&sim), before, "nothing is created, nothing released");
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.remaps_total, snapshot.remapped_bytes_total), (4, 8 << 20));
    assert_eq!((snapshot.committed, snapshot.idle), (ByteSize::mib(16), ByteSize::ZERO));
    assert_eq!((snapshot.commits_total, snapshot.decommits_total), (8, 0));
    fill(&sim, stream, &whole, 99);
    let checks: Vec<_> =
        (0..).zip(&stay).map(|(mark, buffer)| check(&sim, stream, buffer, mark)).collect();
    let last = check(&sim, stream, &whole, 99);
    sim.run_all();
    for ticket in checks.into_iter().chain([last]) {
        assert_eq!(sim.outcome(ticket), Outcome::Held);
    }
    arena.validate();
    drop((stay, whole));
    arena.close().expect("nothing is live");
    drop(arena);
    assert_eq!(sim.leaks().handles, 0);
    sim.assert_no_faults();
}

#[test]
fn idle_memory_is_released_and_committed_anew_if_that_costs_less() {
    let sim = device(|_| {});
    let arena = on_device(&sim, config(ByteSize::mib(16)));
    arena.set_costs(DeviceCosts { recommit: Duration::from_micros(62), ..DeviceCosts::default() });
    let stay = scattered(&arena);
    let [created, released] = traffic(&sim);
    let whole = mib(&arena, 8).expect("its memory is there, in pieces");
    assert_eq!(traffic(&sim), [created + 4, released + 4]);
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.remaps_total, snapshot.decommits_total), (0, 4));
    assert_eq!((snapshot.committed, snapshot.idle), (ByteSize::mib(16), ByteSize::ZERO));
    arena.validate();
    drop((stay, whole));
    sim.assert_no_faults();
}

/// Between a decommit and a commit the memory is anybody's.
#[test]
fn a_neighbour_that_takes_whatever_is_given_back_gets_nothing_of_what_is_remapped() {
    for remap in [true, false] {
        let sim = device(|options| {
            options.capacity = ByteSize::mib(16);
            options.remap = remap;
        });
        let arena = on_device(&sim, config(ByteSize::MAX));
        let stay = scattered(&arena);
        let greedy = Arc::clone(&sim);
        // With the first unmap of the arena there is something to take, before its next create.
        sim.before(Call::Unmap, 0, move || {
            let neighbour = Arc::clone(&greedy);
            greedy.before(Call::Create, 0, move || neighbour.set_neighbours(ByteSize::mib(8)));
        });
        let outcome = mib(&arena, 8);
        assert_eq!(outcome.is_ok(), remap, "{outcome:?}");
        drop((outcome, stay));
        arena.validate();
        sim.assert_no_faults();
    }
}

#[test]
fn a_full_device_and_a_lowered_limit_are_helped_as_well() {
    let sim = device(|options| options.capacity = ByteSize::mib(24));
    let arena = on_device(&sim, config(ByteSize::MAX));
    let stay = scattered(&arena);
    let stable = arena.alloc::<u8>(12 << 20, Region::Stable).expect("8 are left, 8 are idle");
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.committed, snapshot.idle), (ByteSize::mib(20), ByteSize::ZERO));
    assert!(snapshot.remaps_total > 0, "{snapshot:?}");
    drop(stable);
    sim.run_all();
    // 12 MiB are idle or pending, 20 committed; 14 of them may stay.
    arena.set_limit(ByteSize::mib(14));
    let six = mib(&arena, 6).expect("8 stay, and 6");
    assert_eq!(arena.snapshot().committed, ByteSize::mib(14));
    drop((stay, six));
    arena.validate();
    sim.assert_no_faults();
}

#[test]
fn what_lies_farthest_from_where_blocks_are_placed_is_moved_first() {
    let sim = device(|_| {});
    let arena = on_device(&sim, config(ByteSize::mib(20)));
    let mut pieces: Vec<_> = (0..5).map(|_| mib(&arena, 4).expect("room")).collect();
    let address = |buffer: &Buffer<u8>| {
        let lease = buffer.enter().expect("a lease");
        buffer.address(&lease).expect("ours").expect("not empty")
    };
    let places: Vec<_> = pieces.iter().map(address).collect();
    let mapped = || {
        let region = arena.occupancy(usize::MAX).remove(DYNAMIC.number());
        let cells = region
            .cells
            .iter()
            .filter(|(_, [.., active, idle])| active.max(idle) > &ByteSize::ZERO);
        cells.map(|(nth, _)| nth * region.cell.get()).collect::<Vec<_>>()
    };
    let base = places.iter().map(|at| at.get()).min().expect("five") - mapped()[0];
    pieces.clear();
    arena.trim(ByteSize::MAX).expect("looks what is done");
    assert_eq!(arena.snapshot().idle, ByteSize::mib(20));
    let stable = arena.alloc::<u8>(8 << 20, Region::Stable).expect("the last two go there");
    let mapped = mapped();
    let left: Vec<_> = places.iter().map(|at| mapped.contains(&(at.get() - base))).collect();
    assert_eq!(left, [true, true, true, false, false]);
    drop(stable);
    arena.validate();
    sim.assert_no_faults();
}

/// A scenario in which memory is remapped for the limit, with live blocks whose contents count.
/// Returns whether the last block was had.
fn scenario(arena: &DeviceArena, sim: &SimDriver, plan: impl FnOnce()) -> Option<bool> {
    let stream = sim.stream_create().expect("a stream");
    let stay = scattered(arena);
    for (mark, buffer) in (0..).zip(&stay) {
        fill(sim, stream, buffer, mark);
    }
    sim.synchronize().expect("done");
    arena.trim(ByteSize::MAX).expect("no error");
    plan();
    let whole = mib(arena, 8);
    sim.forget_failures();
    arena.validate();
    let snapshot = arena.snapshot();
    if sim.lost().is_some() {
        assert!(matches!(whole, Err(DeviceError::Driver(_))), "{whole:?}");
        return None;
    }
    assert_eq!(sim.leaks().committed, snapshot.committed, "{snapshot:?}");
    let checks: Vec<_> =
        (0..).zip(&stay).map(|(mark, buffer)| check(sim, stream, buffer, mark)).collect();
    sim.synchronize().expect("done");
    for ticket in checks {
        assert_eq!(sim.outcome(ticket), Outcome::Held, "a live block was touched");
    }
    Some(whole.is_ok())
}

#[test]
fn a_failure_at_any_call_of_a_remap_leaves_the_books_right_and_every_byte_where_it_was() {
    let whole = device(|_| {});
    let arena = on_device(&whole, config(ByteSize::mib(16)));
    let calls = || [Call::Map, Call::SetAccess, Call::Unmap].map(|call| whole.calls(call));
    let mut before = [0; 3];
    assert_eq!(scenario(&arena, &whole, || before = calls()), Some(true));
    let calls: u64 = calls().iter().sum::<u64>() - before.iter().sum::<u64>();
    assert_eq!(calls, 12, "four remaps of a handle each");
    for error in [
        SimError::InvalidValue,
        SimError::OutOfMemory,
        SimError::EccUncorrectable,
        SimError::IllegalAddress,
        SimError::LaunchFailed,
        SimError::NotSupported,
        SimError::Unknown,
    ] {
        for nth in 0..calls {
            let sim = device(|_| {});
            let arena = on_device(&sim, config(ByteSize::mib(16)));
            let plan = || sim.fail_nth(None, nth, error);
            let had = scenario(&arena, &sim, plan);
            println!("call {nth} fails with {error:?}: had {had:?}");
            if let Some(had) = had {
                assert!(had, "one failure, and then memory leaves and comes anew");
                arena.close().expect("nothing is live");
                drop(arena);
                assert_eq!((sim.leaks().handles, sim.leaks().reservations), (0, 0));
            }
            sim.assert_no_faults();
        }
    }
}

#[test]
fn a_driver_that_does_not_remap_after_all_is_asked_once_for_a_block() {
    let sim = device(|_| {});
    let arena = on_device(&sim, config(ByteSize::mib(16)));
    let plan = || sim.fail_nth(Some(Call::Map), 0, SimError::NotSupported);
    assert_eq!(scenario(&arena, &sim, plan), Some(true));
    let snapshot = arena.snapshot();
    assert_eq!(snapshot.remaps_total, 0);
    assert!(snapshot.decommits_total > 0);
    sim.assert_no_faults();
}

#[test]
fn other_threads_wait_for_a_granule_that_is_on_its_way_and_for_nothing_else() {
    let sim = device(|_| {});
    let arena = on_device(&sim, config(ByteSize::mib(16)));
    let stay = scattered(&arena);
    sim.run_all();
    arena.trim(ByteSize::MAX).expect("no error");
    let other = arena.clone();
    let (tell, told) = mpsc::channel();
    sim.before(Call::Map, 0, move || {
        // Under way: the books add up, and what moves does not leave.
        let snapshot = other.snapshot();
        assert_eq!((snapshot.committed, snapshot.idle), (ByteSize::mib(16), ByteSize::mib(8)));
        other.validate();
        assert_eq!(other.purge(), Ok(ByteSize::mib(2)), "one granule is wanted by nobody");
        // One more block waits for what is on its way: there is nothing else.
        let thread = thread::spawn(move || mib(&other, 4).is_ok());
        tell.send(thread).expect("it is listened to");
    });
    let whole = mib(&arena, 6).expect("of 8 that are idle");
    let had = told.recv().expect("there was a remap").join().expect("no panic");
    assert!(!had, "8 and 6 are active, and the limit is 16");
    assert_eq!(arena.snapshot().remaps_total, 3);
    drop((stay, whole));
    arena.validate();
    sim.assert_no_faults();
}

#[test]
fn only_whole_handles_are_remapped() {
    let sim = device(|_| ());
    let at = sim.reserve(ByteSize::mib(16)).expect("addresses");
    let on = |mib| at.checked_add(ByteSize::mib(mib)).expect("inside");
    let whole = ByteSize::mib(4);
    sim.commit(at, whole, whole).expect("memory");
    for (size, handle) in [(GRANULE, GRANULE), (whole, GRANULE)] {
        let refused = sim.remap(at, on(8), size, handle).expect_err("half a handle");
        assert_eq!(refused.code(), Some(1));
    }
    assert_eq!(sim.faults_total(), 2);
    sim.remap(at, on(8), whole, whole).expect("all of it");
    assert_eq!((sim.leaks().handles, sim.leaks().committed), (1, ByteSize::mib(4)));
    sim.decommit(on(8), whole, whole).expect("there it is");
}

/// A handle that cannot be divided keeps its idle granules from other blocks: allocations near the
/// limit failed although there was room.
#[test]
fn without_remaps_each_handle_is_one_granule() {
    for remap in [true, false] {
        let sim = device(|options| options.remap = remap);
        let arena = on_device(&sim, config(ByteSize::gib(1)));
        let large = mib(&arena, 512).expect("room");
        let (handles, granules) = (sim.calls(Call::Create), 512 / (GRANULE.get() >> 20));
        assert_eq!(handles == granules, !remap, "{handles}");
        drop(large);
        arena.close().expect("nothing is live");
        sim.assert_no_faults();
    }
}

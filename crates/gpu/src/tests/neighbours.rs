//! Tests of blocks whose neighbours have a place but no memory yet: the search, and the waits.
//!
//! The neighbours are put into the state by hand, as calls in progress would leave them, so that
//! each case is deterministic.
//!
//! Invariant: if an error is returned, there is no room by the error's own figures.
#![expect(unsafe_code, reason = "a driver call is made by hand")]

use super::*;
use crate::driver::Driver as _;
use crate::state::RequestOrigin;
use crate::state::arena::ArenaState;
use crate::state::pending::Dependencies;
use crate::state::region::{AllocRequest, Placement, Search};
use crate::state::segment::START;

const DYNAMIC: Region = Region::Dynamic;
const ALIGN: ByteSize = ByteSize::new(256);

/// Opens an arena with this many granules of addresses per region, one live granule, and room under
/// the limit for one more.
fn nearly_full(granules: u64) -> (DeviceArena, Arc<FaultInjectingDriver>, Buffer<u8>) {
    let driver = Arc::new(FaultInjectingDriver::new());
    let reserve = ByteSize::new(granules * GRANULE.get());
    let config = ArenaConfig { reserve, ..config(ByteSize::mib(4)) };
    let arena = DeviceArena::open(driver.clone(), Arc::new(ManualClock::new()), config);
    let arena = arena.expect("open");
    let live = bytes(&arena, GRANULE, Region::Stable).expect("room");
    (arena, driver, live)
}

/// Places a block that waits for its memory.
fn place(arena: &DeviceArena, size: ByteSize) -> Placement {
    let target = AllocRequest::new(DYNAMIC, size.get(), ALIGN.get(), RequestOrigin::BUFFER);
    let placed = arena.inner().run_now(|state| state.place(&target, Search::Usual));
    placed.expect("room").0
}

/// Removes a placed block, as after a failed call.
fn cancel(arena: &DeviceArena, placed: Placement) {
    let inner = arena.inner();
    inner.run_now(|state| state.cancel_placement(placed, Dependencies::default()));
}

/// Places two blocks that wait for their memory, with this gap between them.
fn apart(arena: &DeviceArena, gap: u64) -> [Placement; 2] {
    let [before, gone, after] = [3, gap, 5].map(|mib| place(arena, ByteSize::mib(mib)));
    cancel(arena, gone);
    [before, after]
}

/// At both ends of the free span the block would share a granule with a neighbour, and so need one
/// more granule than there is.
#[test]
fn a_block_beside_one_that_waits_for_its_memory_is_placed_where_a_granule_begins() {
    let (arena, driver, live) = nearly_full(6);
    let neighbours = apart(&arena, 4);
    let block = bytes(&arena, GRANULE, DYNAMIC).expect("one granule has room");
    let at = block.address(&block.enter().expect("a lease")).expect("ours").expect("not empty");
    assert_eq!(at.offset_from(neighbours[0].at), Some(ByteSize::mib(4)));
    assert_eq!(arena.snapshot().committed, ByteSize::mib(4));
    neighbours.into_iter().for_each(|placed| cancel(&arena, placed));
    drop((block, live));
    arena.validate();
    driver.assert_no_faults();
}

#[test]
fn a_block_that_fits_at_no_granules_start_is_short_of_memory_and_not_of_addresses() {
    let (arena, driver, live) = nearly_full(5);
    let neighbours = apart(&arena, 2);
    // No call is in progress, so nothing is waited for.
    let refused = bytes(&arena, GRANULE, DYNAMIC).expect_err("it needs two granules there");
    assert!(matches!(refused, DeviceError::OutOfMemory { .. }), "{refused}");
    neighbours.into_iter().for_each(|placed| cancel(&arena, placed));
    drop((bytes(&arena, GRANULE, DYNAMIC).expect("they are gone"), live));
    arena.validate();
    driver.assert_no_faults();
}

#[test]
fn a_block_that_fits_at_no_granules_start_waits_for_the_calls_of_its_neighbours() {
    let (arena, driver, live) = nearly_full(5);
    let neighbours = apart(&arena, 2);
    // A call is in progress: idle memory leaves.
    drop(bytes(&arena, GRANULE, Region::Stable).expect("room"));
    let mut cursors = [START; 2];
    let begin = |state: &mut ArenaState| state.begin_leave(1, usize::MAX, &mut cursors, None);
    let leaving = arena.inner().run_now(begin).expect("idle");
    let (asked, short) = std::sync::mpsc::channel();
    let callback = arena.on_shortage(move |_| asked.send(()).is_err());
    let waiting = {
        let arena = arena.clone();
        thread::spawn(move || bytes(&arena, GRANULE, DYNAMIC))
    };
    short.recv().expect("it has asked for memory");
    // Regression test: an unrelated acquisition of the lock counted as the end of the call.
    for _ in 0..10_000 {
        let _ = arena.glance();
        assert!(!waiting.is_finished(), "it is refused though by its figures there is room");
        thread::yield_now();
    }
    neighbours.into_iter().for_each(|placed| cancel(&arena, placed));
    // SAFETY: an idle granule, marked as leaving above.
    unsafe { driver.decommit(leaving.at, leaving.size, leaving.handle) }.expect("committed");
    arena.inner().run_now(|state| state.end_leave(leaving, true));
    let block = waiting.join().expect("no panic").expect("there is room");
    drop((block, callback, live));
    arena.validate();
    driver.assert_no_faults();
}

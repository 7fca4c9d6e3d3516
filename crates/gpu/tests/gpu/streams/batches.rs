//! Batches of a compaction: one proof by events, one wait for all copies, and never a wait for the
//! whole device.

use lowtide_gpu::DeviceCosts;

use super::*;

const COMPACT: CompactOptions = CompactOptions::new(DYNAMIC);
const SMALL: usize = 64 << 10;

/// An arena with live blocks of two lanes scattered over its granules. The blocks are written by
/// work that is queued and not done.
struct Scattered {
    arena: DeviceArena,
    sim: Arc<SimDriver>,
    lanes: [Lane; 2],
    blocks: Vec<(u64, Buffer<u8>)>,
    waits: u64,
}

impl Scattered {
    /// One in four of so many blocks stays, and with them nearly every granule.
    fn new(count: u64) -> Self {
        let (arena, sim) = open(Order::Lazy, ByteSize::mib(256));
        arena.set_thread_cache(ByteSize::ZERO); // what is freed is pending at once
        let lanes = [lane(&arena, &sim), lane(&arena, &sim)];
        let on = |mark: u64| &lanes[usize::from(mark % 8 == 3)];
        let block = |mark| (mark, on(mark).alloc::<u8>(SMALL, DYNAMIC).expect("room"));
        let mut blocks: Vec<_> = (0..count).map(block).collect();
        blocks.retain(|(mark, _)| mark % 4 == 3);
        arena.wait_for_pending().expect("what was freed is idle");
        for (mark, block) in &blocks {
            write(&sim, on(*mark), block, *mark);
        }
        let waits = sim.calls(Call::Synchronize);
        Self { arena, sim, lanes, blocks, waits }
    }

    /// Lets each copy be a batch.
    fn one_by_one(&self) {
        let costs = DeviceCosts { copy_per_second: ByteSize::ZERO, ..DeviceCosts::default() };
        self.arena.set_costs(costs);
    }

    /// Checks every block, and that nothing waited for the whole device.
    fn check(&self) {
        assert_eq!(self.sim.calls(Call::Synchronize), self.waits, "waited for the device");
        let check = |(mark, block): &(u64, Buffer<u8>)| {
            let lane = &self.lanes[usize::from(mark % 8 == 3)];
            let (at, pattern) = (address(lane, block), Pattern::new(*mark));
            self.sim.check(lane.stream(), at, block.bytes(), pattern).expect("queued")
        };
        let checks: Vec<_> = self.blocks.iter().map(check).collect();
        self.arena.validate();
        assert_sound(&self.sim, &checks);
    }

    fn end(self) {
        let Self { arena, sim, lanes, blocks, .. } = self;
        drop((blocks, lanes));
        arena.close().expect("nothing is live");
        assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
        sim.assert_no_faults();
        assert_eq!(sim.unsafe_unmaps(), 0);
    }
}

/// Returns a buffer's address, under a lease that names the lane.
fn address(lane: &Lane, buffer: &Buffer<u8>) -> DeviceAddress {
    let lease = lane.enter().expect("a lease");
    buffer.address(&lease).expect("ours").expect("not empty")
}

fn write(sim: &SimDriver, lane: &Lane, buffer: &Buffer<u8>, mark: u64) {
    let at = address(lane, buffer);
    sim.fill(lane.stream(), at, buffer.bytes(), Pattern::new(mark)).expect("queued");
}

#[test]
fn a_batch_waits_once_for_each_stream_and_once_for_its_copies() {
    let all = Scattered::new(1_024);
    let waits = [Call::EventSynchronize, Call::StreamSynchronize];
    let before = waits.map(|call| all.sim.calls(call));
    let done = all.arena.compact(COMPACT, |_| {}).expect("no error");
    assert!(done.moves > 100, "{done:?}");
    let made = [0, 1].map(|nth| all.sim.calls(waits[nth]) - before[nth]);
    assert_eq!(made, [2, 1], "{done:?}");
    assert_eq!(all.sim.calls(Call::CopyAsync), done.moves);
    all.check();
    all.end();
}

#[test]
fn later_batches_repeat_no_proof() {
    let all = Scattered::new(256);
    all.one_by_one();
    let proofs = all.sim.calls(Call::EventSynchronize);
    let copied = all.sim.calls(Call::StreamSynchronize);
    let done = all.arena.compact(COMPACT, |_| {}).expect("no error");
    assert!(done.moves > 20, "{done:?}");
    assert_eq!(all.sim.calls(Call::EventSynchronize) - proofs, 2);
    assert_eq!(all.sim.calls(Call::StreamSynchronize) - copied, done.moves);
    all.check();
    all.end();
}

#[test]
fn no_block_moves_twice_in_one_compaction() {
    let all = Scattered::new(2_048);
    let mut places = Vec::new();
    let done = all.arena.compact(COMPACT, |moved| places.push(moved)).expect("no error");
    assert!(done.moves > 200, "{done:?}");
    let twice = places.iter().filter(|moved| places.iter().any(|other| other.to == moved.from));
    assert_eq!(twice.count(), 0);
    all.check();
    all.end();
}

/// The lease is held when the copies would start, so nothing moves; dropped, it is waited for.
#[test]
fn work_that_a_lease_lets_in_during_the_wait_is_waited_for_too() {
    let all = Scattered::new(64);
    let (sim, lane) = (Arc::clone(&all.sim), all.lanes[0].clone());
    let (mark, block) = all.blocks.iter().find(|(mark, _)| mark % 8 != 3).expect("one of lane 0");
    let (mark, at) = (*mark, address(&lane, block));
    write(&sim, &lane, block, mark + 1_000);
    all.sim.before(Call::EventSynchronize, 1, move || {
        let lease = lane.enter().expect("no wait: the copies have not started");
        sim.fill(lane.stream(), at, ByteSize::of(SMALL), Pattern::new(mark)).expect("queued");
        drop(lease);
    });
    let done = all.arena.compact(COMPACT, |_| {}).expect("no error");
    assert!(done.moves > 0, "{done:?}");
    all.check();
    all.end();
}

#[test]
fn blocks_that_unknown_streams_may_use_stay_until_the_program_waits() {
    let mut all = Scattered::new(256);
    drop(all.arena.enter().expect("a lease that names no lane"));
    let done = all.arena.compact(COMPACT, |_| {}).expect("no error");
    assert_eq!((done.moves, done.is_busy), (0, false));
    assert!(done.skipped > 20, "{done:?}");
    all.check();
    drop(all.arena.enter().expect("a lease that names no lane"));
    all.arena.wait_for_pending().expect("waits for the device");
    all.waits += 1;
    let again = all.arena.compact(COMPACT, |_| {}).expect("no error");
    assert_eq!((again.moves, again.skipped), (done.skipped, 0));
    all.check();
    all.end();
}

#[test]
fn a_capture_keeps_blocks_where_they_are_and_stays_valid() {
    let all = Scattered::new(256);
    let stream = all.lanes[1].stream();
    all.sim.begin_capture(stream).expect("captures");
    let done = all.arena.compact(COMPACT, |_| {}).expect("no error");
    assert_eq!((done.moves, done.is_busy), (0, false));
    assert!(done.skipped > 20, "{done:?}");
    let graph = all.sim.end_capture(stream).expect("nothing broke it");
    all.sim.graph_destroy(graph).expect("it is there");
    assert!(all.arena.compact(COMPACT, |_| {}).expect("no error").moves > 20);
    all.check();
    all.end();
}

#[test]
fn copies_whose_end_is_not_seen_leave_blocks_at_their_old_places() {
    let all = Scattered::new(256);
    all.sim.fail_always(Call::StreamSynchronize, Some(SimError::Unknown));
    let failed = all.arena.compact(COMPACT, |_| panic!("moved")).expect_err("a trial");
    assert!(matches!(failed.error, DeviceError::Driver(_)), "{failed}");
    assert_eq!(failed.value.moves, 0);
    assert!(!all.arena.snapshot().pending.is_zero(), "the copies may still write");
    all.sim.forget_failures();
    all.check();
    all.arena.wait_for_pending().expect("an event of the copies");
    all.check();
    all.end();
}

/// A block of 8 MiB that slides by 1 MiB, written by work that is queued.
fn sliding() -> (DeviceArena, Arc<SimDriver>, Lane, Buffer<u8>) {
    let sim = Arc::new(SimDriver::new(SimOptions::default()));
    let size = ByteSize::mib(12);
    let config = ArenaConfig { limit: size, reserve: size, ..ArenaConfig::new("slide") };
    let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config).expect("opens");
    arena.set_thread_cache(ByteSize::ZERO);
    let lane = lane(&arena, &sim);
    let gone = lane.alloc::<u8>(MIB, DYNAMIC).expect("room");
    let slides = lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    drop(gone);
    arena.wait_for_pending().expect("idle");
    write(&sim, &lane, &slides, 1);
    (arena, sim, lane, slides)
}

const JOIN: CompactOptions = CompactOptions { contiguous: Some(ByteSize::MAX), ..COMPACT };

#[test]
fn a_slide_is_queued_piece_by_piece_and_waited_for_once() {
    let (arena, sim, lane, slides) = sliding();
    assert_eq!(arena.compact(JOIN, |_| {}).expect("no error").moves, 1);
    let calls = [Call::CopyAsync, Call::StreamSynchronize, Call::Synchronize];
    assert_eq!(calls.map(|call| sim.calls(call)), [8, 1, 0]);
    let at = address(&lane, &slides);
    let check = sim.check(lane.stream(), at, slides.bytes(), Pattern::new(1)).expect("queued");
    assert_sound(&sim, &[check]);
    drop((slides, lane));
    arena.close().expect("nothing is live");
}

#[test]
fn a_slide_whose_copy_fails_is_undone_on_the_stream() {
    let (arena, sim, lane, slides) = sliding();
    let before = address(&lane, &slides);
    sim.fail_nth(Some(Call::CopyAsync), 5, SimError::Unknown);
    let failed = arena.compact(JOIN, |_| panic!("moved")).expect_err("a trial");
    assert!(matches!(failed.error, DeviceError::Driver(_)), "{failed}");
    assert_eq!((sim.calls(Call::CopyAsync), address(&lane, &slides)), (11, before));
    let check = sim.check(lane.stream(), before, slides.bytes(), Pattern::new(1)).expect("queued");
    assert_sound(&sim, &[check]);
    drop((slides, lane));
    arena.close().expect("nothing is live");
}

#[test]
fn memory_of_a_slide_whose_end_is_not_seen_is_reused_only_after_a_proof() {
    let (arena, sim, lane, slides) = sliding();
    sim.fail_always(Call::StreamSynchronize, Some(SimError::Unknown));
    let failed = arena.compact(JOIN, |_| panic!("moved")).expect_err("a trial");
    assert!(matches!(failed.error, DeviceError::ContentsLost { .. }), "{failed}");
    sim.forget_failures();
    let lease = lane.enter().expect("awake");
    assert!(matches!(slides.address(&lease), Err(DeviceError::ContentsLost { .. })));
    drop(lease);
    drop(slides);
    assert_eq!(arena.snapshot().pending, ByteSize::mib(9), "the copies may still write");
    lane.end_run().expect("an event");
    let waits = sim.calls(Call::Synchronize);
    let next = lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    assert!(sim.calls(Call::Synchronize) > waits, "a proof for all streams");
    assert_sound(&sim, &[fill(&sim, lane.stream(), &next, 2)]);
    drop((next, lane));
    arena.close().expect("nothing is live");
}

#[test]
fn a_raw_block_moves_if_its_streams_are_known() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let one = lane(&arena, &sim);
    let size = ByteSize::of(SMALL);
    let known = |_| one.alloc_raw(size, ByteSize::new(256), DYNAMIC).expect("room").at;
    let unknown = |_| arena.alloc_raw(size, ByteSize::new(256), DYNAMIC).expect("room").at;
    let mut blocks: Vec<_> = (0..128).map(known).chain((0..128).map(unknown)).collect();
    let mut stay = Vec::new();
    let free = |at| assert_eq!(one.free(at).expect("live").at, at);
    for (nth, at) in blocks.drain(..).enumerate() {
        if nth % 8 == 3 { stay.push((nth, at)) } else { free(at) }
    }
    arena.wait_for_pending().expect("idle");
    for &(nth, at) in stay.iter().filter(|(nth, _)| *nth < 128) {
        sim.fill(one.stream(), at, size, Pattern::new(nth as u64)).expect("queued");
    }
    let waits = sim.calls(Call::Synchronize);
    let options = CompactOptions { moves_raw: true, ..COMPACT };
    let done = arena.compact(options, |moved| {
        let it = stay.iter_mut().find(|(_, at)| *at == moved.from).expect("one of ours");
        assert!(it.0 < 128, "any stream may use it");
        it.1 = moved.to;
    });
    let done = done.expect("no error");
    assert!(done.moves > 0 && done.skipped > 0, "{done:?}");
    assert_eq!(sim.calls(Call::Synchronize), waits);
    let known = stay.iter().filter(|(nth, _)| *nth < 128);
    let check = |&(nth, at): &(usize, DeviceAddress)| {
        sim.check(one.stream(), at, size, Pattern::new(nth as u64)).expect("queued")
    };
    assert_sound(&sim, &known.map(check).collect::<Vec<_>>());
    stay.into_iter().for_each(|(_, at)| free(at));
    arena.close().expect("nothing is live");
}

/// A block takes the place of a raw one in the order of their stream, without a lease. Its old
/// place is released after the work on the raw block.
#[test]
fn a_place_that_moved_blocks_leave_is_released_after_the_work_of_raw_blocks_there() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    arena.set_thread_cache(ByteSize::ZERO);
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    drop(arena.enter().expect("a lease"));
    arena.wait_for_pending().expect("all work is known to be complete");
    let alloc = |of: &Lane| of.alloc::<u8>(MIB, DYNAMIC).expect("room");
    let (stays, gone) = (alloc(&two), alloc(&two));
    let pin = stays.pin().expect("here");
    let size = ByteSize::mib(1);
    let raw = one.alloc_raw(size, ByteSize::new(256), DYNAMIC).expect("room").at;
    sim.fill(one.stream(), raw, size, Pattern::new(1)).expect("queued");
    assert_eq!(one.free(raw).expect("live").at, raw);
    let moves = alloc(&one); // where the raw block was
    drop(gone);
    arena.set_decay(DecayTime::AtOnce);
    arena.decay(sim.clock().now()).expect("records events");
    sim.stream_synchronize(two.stream()).expect("one of them is complete");
    arena.decay(sim.clock().now()).expect("queries them");
    let done = arena.compact(COMPACT, |moved| assert_eq!(moved.from, raw)).expect("no error");
    assert_eq!(done.moves, 1, "{done:?}");
    arena.decay(sim.clock().now()).expect("releases what is idle");
    assert_eq!(arena.snapshot().committed, GRANULE);
    sim.assert_no_faults();
    assert_eq!((sim.unsafe_unmaps(), sim.calls(Call::Synchronize)), (0, 1));
    drop((pin, stays, moves, one, two));
    arena.close().expect("nothing is live");
}

#[test]
fn work_of_a_lane_that_ended_in_a_capture_is_waited_for_with_the_device() {
    let mut all = Scattered::new(256);
    let third = lane(&all.arena, &all.sim);
    let stream = third.stream();
    drop(third.enter().expect("a lease"));
    all.sim.begin_capture(stream).expect("captures");
    drop(third);
    let graph = all.sim.end_capture(stream).expect("nothing broke it");
    all.sim.graph_destroy(graph).expect("it is there");
    let done = all.arena.compact(COMPACT, |_| {}).expect("no error");
    assert!(done.moves == 0 && done.skipped > 20, "{done:?}");
    all.check();
    all.arena.wait_for_pending().expect("waits for the device");
    all.waits += 1;
    assert!(all.arena.compact(COMPACT, |_| {}).expect("no error").moves > 20);
    all.check();
    all.end();
}

//! Faults that are planted into the arena, and how soon the schedules find each.
//!
//! A search that finds nothing says little by itself; one that finds each of these, and nothing
//! without them, says that such a fault is not there.
//!
//! Invariant: a fault is found within as many seeds as stand beside it.
#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use lowtide::ByteSize;
use lowtide::device::driver::Driver as _;
use lowtide::device::{ArenaConfig, CompactOptions, DeviceArena, Lane, Planted, Region};
use lowtide_cuda_sim::{Call, SimDriver, SimOptions};

use super::harness::Schedule;

/// The first seed that finds a fault, and what it finds.
fn found(fault: Planted, seeds: u64) -> String {
    let mut failures = (0..seeds).filter_map(|seed| {
        let run = Schedule::of(seed).run_on(move |arena| arena.plant(fault));
        run.err().map(|failure| failure.to_string())
    });
    failures.next().unwrap_or_else(|| panic!("{fault:?} is not found in {seeds} seeds"))
}

/// Asserts that a fault is found, as one of these.
fn assert_found(fault: Planted, seeds: u64, signs: &[&str]) {
    let what = found(fault, seeds);
    assert!(signs.iter().any(|sign| what.contains(sign)), "{fault:?} is found as {what}");
}

/// Work that reads what somebody else wrote, or memory that is gone.
const WRONG: &[&str] = &["checks found something else", "no memory behind it", "UnmapBeforeDone"];

#[test]
fn a_stream_that_is_not_made_to_wait_is_found() {
    assert_found(Planted::NoEventWait, 40, WRONG);
}

#[test]
fn memory_that_is_handed_on_before_its_uses_are_complete_is_found() {
    assert_found(Planted::CrossStreamReuse, 40, WRONG);
}

#[test]
fn memory_that_leaves_on_an_event_that_was_not_asked_is_found() {
    assert_found(Planted::EarlyUnmap, 40, WRONG);
}

#[test]
fn a_use_on_another_lane_that_is_not_noted_is_found() {
    assert_found(Planted::ForgottenUse, 100, WRONG);
}

#[test]
fn a_move_that_does_not_wait_for_the_work_on_its_block_is_found() {
    assert_found(Planted::MoveBeforeDone, 200, WRONG);
}

#[test]
fn pending_space_that_a_failed_allocation_gives_back_as_free_is_found() {
    assert_found(Planted::LostClaim, 200, WRONG);
}

#[test]
fn a_stream_that_stays_known_when_it_has_ended_is_found() {
    assert_found(Planted::StaleOwner, 40, &["INVALID_HANDLE", "StaleHandle"]);
}

#[test]
fn an_event_that_is_recorded_in_a_capture_is_found() {
    assert_found(Planted::CapturedEvent, 100, &["CAPTURE", "CaptureSpoiled"]);
}

#[test]
fn a_sleep_that_does_not_wait_for_the_work_of_leases_is_found() {
    assert_found(Planted::SleepBeforeDone, 100, WRONG);
}

#[test]
fn a_loan_whose_end_counts_as_the_end_of_its_work_is_found() {
    assert_found(Planted::ForgottenLoan, 100, WRONG);
}

const DYNAMIC: Region = Region::Dynamic;
const MIB: usize = 1 << 20;

/// Long enough for a thread that waits for nothing, and so often waited for in vain.
const MOMENT: Duration = Duration::from_millis(300);

/// An arena of 8 MiB with this fault, its device, and two lanes.
fn open(fault: Option<Planted>) -> (DeviceArena, Arc<SimDriver>, [Lane; 2]) {
    let sim = Arc::new(SimDriver::new(SimOptions::default()));
    let config = ArenaConfig { limit: ByteSize::mib(8), ..ArenaConfig::new("planted") };
    let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config).expect("opens");
    if let Some(fault) = fault {
        arena.plant(fault);
    }
    let lanes = [1, 2].map(|_| {
        let stream = sim.stream_create().expect("a stream");
        // SAFETY: the simulation looks whether a stream is there.
        unsafe { arena.lane(stream) }.expect("a lane")
    });
    (arena, sim, lanes)
}

/// The calls in the midst of which another thread could not look at the arena.
fn calls_with_the_lock(fault: Option<Planted>) -> Vec<Call> {
    let (arena, sim, [one, two]) = open(fault);
    let (tell, told) = mpsc::channel();
    let calls = [
        Call::Create,
        Call::StreamIsCapturing,
        Call::EventCreate,
        Call::EventRecord,
        Call::StreamWaitEvent,
        Call::EventQuery,
        Call::EventSynchronize,
        Call::Synchronize,
        Call::Copy,
        Call::Unmap,
    ];
    for call in calls {
        let (arena, tell) = (arena.clone(), tell.clone());
        sim.before(call, 0, move || {
            let (look, looked) = mpsc::channel();
            thread::spawn(move || look.send(arena.snapshot().live));
            let free = looked.recv_timeout(MOMENT).is_ok();
            tell.send((call, free)).expect("listens");
        });
    }
    drop(one.alloc::<u8>(8 * MIB, DYNAMIC).expect("commits"));
    arena.purge().expect("asks an event");
    drop(one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
    drop(two.alloc::<u8>(8 * MIB, DYNAMIC).expect("waits in its stream"));
    drop(arena.alloc::<u8>(4 * MIB, DYNAMIC).expect("this thread waits"));
    let mut buffer = one.alloc::<u8>(2 * MIB, DYNAMIC).expect("room");
    let beside = one.alloc::<u8>(2 * MIB, DYNAMIC).expect("room");
    buffer.resize(4 * MIB).expect("copied");
    drop((buffer, beside));
    arena.purge().expect("gives back");
    let seen: Vec<_> = told.try_iter().collect();
    assert_eq!(seen.len(), calls.len(), "{seen:?}");
    seen.into_iter().filter(|(_, free)| !free).map(|(call, _)| call).collect()
}

#[test]
fn a_call_with_the_lock_held_is_found_and_there_is_none() {
    assert_eq!(calls_with_the_lock(None), []);
    assert_eq!(calls_with_the_lock(Some(Planted::LockAcrossCall)), [Call::EventRecord]);
}

/// Drops a stream's last lane, and destroys the stream, while another records an event on it.
fn stale_calls(fault: Option<Planted>) -> u64 {
    let (_arena, sim, [one, two]) = open(fault);
    drop(one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
    let device = Arc::clone(&sim);
    let (tell, told) = mpsc::channel();
    sim.before(Call::EventRecord, 0, move || {
        let (end, ended) = mpsc::channel();
        let program = thread::spawn(move || {
            let stream = one.stream();
            drop(one);
            device.stream_destroy(stream).expect("nobody has a lane of it");
            end.send(()) // whether anybody listens or not
        });
        let _ = ended.recv_timeout(MOMENT);
        tell.send(program).expect("listens");
    });
    drop(two.alloc::<u8>(8 * MIB, DYNAMIC));
    let _ = told.try_recv().expect("an event is recorded").join().expect("no panic");
    sim.faults_total()
}

#[test]
fn a_call_with_the_handle_of_a_stream_that_is_gone_is_found_and_there_is_none() {
    assert_eq!(stale_calls(None), 0);
    assert!(stale_calls(Some(Planted::StaleCall)) > 0);
}

/// Compacts while a block waits for another stream's work; what the arena's assertions say.
fn move_of_what_arrives(fault: Option<Planted>) -> Result<(), ()> {
    let (arena, sim, [one, two]) = open(fault);
    let [low, beside, between, high] =
        [1, 1, 2, 1].map(|size| one.alloc::<u8>(size * MIB, DYNAMIC).expect("room"));
    let _stays = beside.pin().expect("a pin");
    drop(high);
    one.end_run().expect("an event");
    let (other, device) = (arena.clone(), Arc::clone(&sim));
    sim.before(Call::StreamWaitEvent, 0, move || {
        drop(low);
        other.purge().expect("an event is recorded");
        device.run_all();
        other.purge().expect("and asked");
        other.compact(CompactOptions::new(DYNAMIC), |_| {}).expect("no error");
        other.purge().expect("no error");
    });
    let taken = catch_unwind(AssertUnwindSafe(|| two.alloc::<u8>(MIB, DYNAMIC).expect("room")));
    drop(between);
    taken.map(drop).map_err(drop)
}

#[test]
fn a_move_of_a_block_that_has_not_arrived_is_found_and_there_is_none() {
    assert_eq!(move_of_what_arrives(None), Ok(()));
    // It is the arena's own assertion that finds it.
    if cfg!(debug_assertions) {
        assert_eq!(move_of_what_arrives(Some(Planted::MovesWhatArrives)), Err(()));
    }
}

//! Moments that random schedules seldom meet: a look at the arena in the midst of a driver call.
//!
//! `cargo xtask mutants` takes each of these cares out of the arena, and requires that a test here
//! or a schedule fails.
//!
//! Invariant: no call is made with the arena's lock held, or with the handle of a stream that is
//! gone.
#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use lowtide_cuda_sim::{Call, SimDriver, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{ArenaConfig, DeviceArena, Lane, Region};

const DYNAMIC: Region = Region::Dynamic;
const MIB: usize = 1 << 20;

/// Long enough for a thread that waits for nothing, and so often waited for in vain.
const MOMENT: Duration = Duration::from_millis(300);

/// An arena of 8 MiB, its device, and two lanes.
fn open() -> (DeviceArena, Arc<SimDriver>, [Lane; 2]) {
    let sim = Arc::new(SimDriver::new(SimOptions::default()));
    let config = ArenaConfig { limit: ByteSize::mib(8), ..ArenaConfig::new("calls") };
    let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config).expect("opens");
    let lanes = [1, 2].map(|_| {
        let stream = sim.stream_create().expect("a stream");
        // SAFETY: the simulation looks whether a stream is there.
        unsafe { arena.lane(stream) }.expect("a lane")
    });
    (arena, sim, lanes)
}

#[test]
fn no_call_is_made_with_the_lock_held() {
    let (arena, sim, [one, two]) = open();
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
    assert!(seen.iter().all(|&(_, free)| free), "another thread could not look: {seen:?}");
}

/// A stream's last lane is dropped, and the stream destroyed, while another records an event on it.
#[test]
fn no_call_is_made_with_the_handle_of_a_stream_that_is_gone() {
    let (_arena, sim, [one, two]) = open();
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
    assert_eq!(sim.faults_total(), 0);
}

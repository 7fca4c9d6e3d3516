//! Streams that end beside others' calls.
//!
//! Invariant: no call is made with the handle of a stream that its program may have destroyed.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use lowtide_cuda_sim::{Call, Order};
use lowtide_gpu::ByteSize;

use super::{DYNAMIC, MIB, assert_sound, fill, lane, open};

/// Long enough for a thread that waits for nothing, and so often waited for in vain.
const MOMENT: Duration = Duration::from_millis(300);

/// An event was recorded on the stream after its last lane had been dropped, and the stream
/// destroyed: a call with a handle of nothing.
#[test]
fn a_stream_does_not_end_in_the_midst_of_a_call_with_its_handle() {
    for call in [Call::EventRecord, Call::StreamIsCapturing] {
        let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
        let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
        let buffer = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
        let check = fill(&sim, one.stream(), &buffer, 1);
        drop(buffer);
        let (tell, told) = mpsc::channel();
        let (device, stream) = (Arc::clone(&sim), one.stream());
        sim.before(call, 0, move || {
            let (end, ended) = mpsc::channel();
            let program = thread::spawn(move || {
                drop(one);
                device.stream_destroy(stream).expect("nobody has a lane of it");
                let _ = end.send(());
            });
            assert!(ended.recv_timeout(MOMENT).is_err(), "the drop did not wait for the call");
            tell.send(program).expect("listens");
        });
        let buffer = two.alloc::<u8>(8 * MIB, DYNAMIC).expect("waits in its stream");
        told.try_recv().expect("the call was made").join().expect("no panic");
        let other = fill(&sim, two.stream(), &buffer, 2);
        drop(buffer);
        assert_sound(&sim, &[check, other]);
        arena.close().expect("nothing is live");
    }
}

/// Two who wanted memory of one stream recorded an event each; where the stream ended by the first
/// of them, the second was lost.
#[test]
fn events_of_a_stream_that_has_ended_are_used_again_or_destroyed() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(16));
    let (gone, two, three) = (lane(&arena, &sim), lane(&arena, &sim), lane(&arena, &sim));
    let stream = gone.stream();
    let [first, second] = [1, 2].map(|_| gone.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
    drop((first, second));
    sim.before(Call::EventRecord, 0, move || {
        drop(three.alloc::<u8>(8 * MIB, DYNAMIC).expect("waits in its stream"));
    });
    drop(two.alloc::<u8>(8 * MIB, DYNAMIC).expect("waits in its stream"));
    drop(gone);
    sim.stream_destroy(stream).expect("its work goes on");
    sim.run_all();
    arena.close().expect("nothing is live");
    drop((arena, two));
    assert_eq!(sim.leaks().events, 0, "{:?}", sim.leaks());
}

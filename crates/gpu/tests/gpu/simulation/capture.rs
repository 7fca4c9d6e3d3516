//! Captures: what is recorded, what spoils them, and what a graph does when it is launched.

use lowtide_cuda_sim::{Call, CaptureMode, Fault, Order, Outcome, Pattern, SimDriver};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::{Driver as _, StreamHandle};

use super::{GRANULE, code, committed, device};

const SIZE: ByteSize = ByteSize::kib(8);

fn capturing() -> (SimDriver, StreamHandle) {
    let sim = device(Order::Lazy);
    let stream = sim.stream_create().expect("stream");
    sim.begin_capture(stream).expect("not capturing yet");
    (sim, stream)
}

#[test]
fn captured_work_is_done_when_the_graph_is_launched_and_at_its_addresses() {
    let (sim, stream) = capturing();
    let at = committed(&sim, 1);
    sim.fill(stream, at, SIZE, Pattern::new(1)).expect("captured");
    let found = sim.check(stream, at, SIZE, Pattern::new(1)).expect("captured");
    assert_eq!(sim.unfinished(), 0);
    let graph = sim.end_capture(stream).expect("sound");
    sim.synchronize().expect("nothing to do");
    assert_eq!(sim.outcome(found), Outcome::Pending);
    sim.graph_launch(graph, stream).expect("queued");
    sim.stream_synchronize(stream).expect("done");
    assert_eq!(sim.outcome(found), Outcome::Held);
    // Other memory behind the same addresses: the graph is still good.
    sim.decommit(at, GRANULE, GRANULE).expect("done with");
    sim.commit(at, GRANULE, GRANULE).expect("memory");
    sim.graph_launch(graph, stream).expect("queued");
    sim.stream_synchronize(stream).expect("done");
    sim.graph_destroy(graph).expect("there");
    assert_eq!(code(sim.graph_launch(graph, stream)), Some(400));
    assert_eq!((sim.differences(), sim.lost(), sim.leaks().graphs), (0, None, 0));
}

#[test]
fn a_graph_launched_after_its_memory_went_loses_the_context() {
    let (sim, stream) = capturing();
    let at = committed(&sim, 1);
    sim.fill(stream, at, SIZE, Pattern::new(1)).expect("captured");
    let graph = sim.end_capture(stream).expect("sound");
    sim.decommit(at, GRANULE, GRANULE).expect("nothing is queued");
    sim.assert_no_faults();
    sim.graph_launch(graph, stream).expect("queued");
    assert_eq!(code(sim.stream_synchronize(stream)), Some(700));
}

#[test]
fn asking_an_event_or_waiting_spoils_the_capture() {
    type Act = fn(&SimDriver, StreamHandle) -> Option<i64>;
    let acts: [(Act, Call); 4] = [
        (|sim, _| code(sim.event_query(sim.event_create().expect("event"))), Call::EventQuery),
        (
            |sim, _| code(sim.event_synchronize(sim.event_create().expect("event"))),
            Call::EventSynchronize,
        ),
        (|sim, stream| code(sim.stream_synchronize(stream)), Call::StreamSynchronize),
        (|sim, _| code(sim.synchronize()), Call::Synchronize),
    ];
    for (act, call) in acts {
        let (sim, stream) = capturing();
        assert_eq!(sim.is_capturing(stream), Ok(true));
        assert_eq!(act(&sim, stream), Some(900), "{call:?}");
        assert_eq!(sim.is_capturing(stream), Ok(true), "until it is ended");
        assert_eq!(code(sim.host_function(stream, 1)), Some(901), "{call:?}");
        assert_eq!(code(sim.end_capture(stream)), Some(901), "{call:?}");
        assert_eq!(sim.is_capturing(stream), Ok(false));
        assert_eq!(sim.faults(), [Fault::CaptureSpoiled { call }]);
        assert_eq!(sim.lost(), None);
        sim.synchronize().expect("captures are over");
    }
}

#[test]
fn an_event_recorded_in_a_capture_is_no_event_for_the_host() {
    let (sim, stream) = capturing();
    let mark = sim.event_create().expect("event");
    sim.event_record(mark, stream).expect("captured");
    sim.stream_wait_event(stream, mark).expect("in the same capture");
    let graph = sim.end_capture(stream).expect("sound");
    assert_eq!(code(sim.event_query(mark)), Some(907));
    assert_eq!(code(sim.stream_wait_event(stream, mark)), Some(907));
    sim.event_record(mark, stream).expect("outside now");
    assert_eq!(sim.event_query(mark), Ok(false));
    sim.graph_destroy(graph).expect("there");
    sim.assert_no_faults();
}

#[test]
fn a_capture_depends_on_nothing_outside_it() {
    let (sim, stream) = capturing();
    let other = sim.stream_create().expect("stream");
    let mark = sim.event_create().expect("event");
    sim.event_record(mark, other).expect("recorded");
    assert_eq!(code(sim.stream_wait_event(stream, mark)), Some(905));
    assert_eq!(code(sim.end_capture(stream)), Some(901));
    sim.begin_capture(stream).expect("again");
    sim.event_record(mark, stream).expect("captured");
    assert_eq!(code(sim.stream_wait_event(other, mark)), Some(905));
    assert_eq!(code(sim.end_capture(stream)), Some(901));
    assert_eq!(sim.faults_total(), 2);
}

#[test]
fn captures_begin_and_end_in_turn() {
    let (sim, stream) = capturing();
    assert_eq!(code(sim.begin_capture(stream)), Some(401));
    let graph = sim.end_capture(stream).expect("sound all the same");
    sim.graph_destroy(graph).expect("there");
    assert_eq!(code(sim.end_capture(stream)), Some(401));
    sim.begin_capture(stream).expect("again");
    sim.stream_destroy(stream).expect("and its capture with it");
    sim.synchronize().expect("nothing captures");
    sim.assert_no_faults();
}

/// cuda.h, `cuThreadExchangeStreamCaptureMode`: what a thread may do beside a capture goes by the
/// capture's mode, by the thread's, and by whose capture it is.
#[test]
fn unsafe_calls_are_forbidden_by_the_modes_of_the_capture_and_of_the_thread() {
    use CaptureMode::{Global, Relaxed, ThreadLocal};
    let cases = [
        // The mode of the capture, of a thread; whether its own is spoiled, and another's.
        (Global, Global, true, true),
        (Global, ThreadLocal, true, false),
        (Global, Relaxed, false, false),
        (ThreadLocal, Global, true, false),
        (ThreadLocal, ThreadLocal, true, false),
        (ThreadLocal, Relaxed, false, false),
        (Relaxed, Global, false, false),
        (Relaxed, ThreadLocal, false, false),
        (Relaxed, Relaxed, false, false),
    ];
    for (of_capture, of_thread, own, others) in cases {
        for (is_own, spoils) in [(true, own), (false, others)] {
            let sim = device(Order::Lazy);
            let stream = sim.stream_create().expect("stream");
            let mark = sim.event_create().expect("event");
            sim.event_record(mark, stream).expect("recorded");
            sim.raw().begin_capture(stream.get(), of_capture).expect("begun");
            let ask = || {
                let before = of_thread.exchange();
                let asked = sim.event_query(mark).err().and_then(|error| error.code());
                let outcome = [asked, sim.raw().alloc(8).err().map(i64::from)];
                assert_eq!(before.exchange(), of_thread);
                outcome
            };
            let elsewhere = || std::thread::scope(|it| it.spawn(ask).join().expect("no panic"));
            let outcome = if is_own { ask() } else { elsewhere() };
            let told = format!("{of_capture:?}, {of_thread:?}, own: {is_own}");
            assert_eq!(outcome, if spoils { [Some(900); 2] } else { [None; 2] }, "{told}");
            let ended = sim.end_capture(stream).err().and_then(|error| error.code());
            assert_eq!(ended, spoils.then_some(901), "{told}");
        }
    }
}

/// cuda.h: a thread is "still prohibited from API calls which necessarily conflict".
#[test]
fn a_wait_for_the_context_or_for_what_is_captured_spoils_in_any_mode() {
    type Act = fn(&SimDriver, StreamHandle) -> Option<i64>;
    let acts: [Act; 3] = [
        |sim, _| code(sim.synchronize()),
        |sim, stream| code(sim.stream_synchronize(stream)),
        |sim, stream| {
            let mark = sim.event_create().expect("event");
            sim.event_record(mark, stream).expect("captured");
            code(sim.event_query(mark))
        },
    ];
    for (act, expected) in acts.into_iter().zip([900, 900, 907]) {
        let sim = device(Order::Lazy);
        let stream = sim.stream_create().expect("stream");
        sim.raw().begin_capture(stream.get(), CaptureMode::Relaxed).expect("begun");
        let before = CaptureMode::Relaxed.exchange();
        assert_eq!(act(&sim, stream), Some(expected));
        let _ = before.exchange();
        assert_eq!(code(sim.end_capture(stream)), Some(901));
    }
}

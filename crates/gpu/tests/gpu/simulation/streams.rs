//! Streams and events: what is waited for, and what is not.

use lowtide_cuda_sim::{Call, Fault, HandleKind, Order, Outcome, Pattern, SimDriver};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::{Driver as _, EventHandle, StreamHandle};

use super::{code, committed, device};

fn streams<const N: usize>(sim: &SimDriver) -> [StreamHandle; N] {
    [(); N].map(|()| sim.stream_create().expect("stream"))
}

fn event(sim: &SimDriver) -> EventHandle {
    sim.event_create().expect("event")
}

#[test]
fn in_lazy_order_a_wait_does_what_it_depends_on_and_nothing_else() {
    let sim = device(Order::Lazy);
    let [a, b, c] = streams(&sim);
    let mark = event(&sim);
    sim.host_function(a, 1).expect("queued");
    sim.event_record(mark, a).expect("recorded");
    sim.host_function(a, 2).expect("queued");
    sim.stream_wait_event(b, mark).expect("queued");
    sim.host_function(b, 3).expect("queued");
    sim.host_function(c, 4).expect("queued");
    assert_eq!((sim.ran(), sim.unfinished()), (vec![], 6));
    sim.stream_synchronize(b).expect("done");
    assert_eq!(sim.ran(), [1, 3]);
    sim.event_synchronize(mark).expect("done");
    assert_eq!(sim.ran(), [1, 3]);
    sim.synchronize().expect("done");
    assert_eq!((sim.ran().len(), sim.unfinished()), (4, 0));
}

#[test]
fn asking_is_no_wait_and_advance_is_what_moves_a_lazy_device() {
    let sim = device(Order::Lazy);
    let [a] = streams(&sim);
    let mark = event(&sim);
    sim.host_function(a, 1).expect("queued");
    sim.event_record(mark, a).expect("recorded");
    for _ in 0..10 {
        assert_eq!(sim.event_query(mark), Ok(false));
    }
    assert_eq!(sim.advance(1), 1);
    assert_eq!(sim.event_query(mark), Ok(false));
    assert_eq!(sim.advance(9), 1);
    assert_eq!(sim.event_query(mark), Ok(true));
}

#[test]
fn an_event_that_was_never_recorded_marks_nothing() {
    let sim = device(Order::Lazy);
    let [a, b] = streams(&sim);
    let mark = event(&sim);
    sim.host_function(a, 1).expect("queued");
    assert_eq!(sim.event_query(mark), Ok(true));
    sim.event_synchronize(mark).expect("at once");
    sim.stream_wait_event(b, mark).expect("no wait");
    sim.stream_synchronize(b).expect("at once");
    assert_eq!(sim.unfinished(), 1);
}

#[test]
fn a_record_replaces_what_was_marked_and_not_what_already_waits() {
    let sim = device(Order::Lazy);
    let [a, b, c] = streams(&sim);
    let mark = event(&sim);
    sim.host_function(a, 1).expect("queued");
    sim.event_record(mark, a).expect("recorded");
    sim.stream_wait_event(c, mark).expect("queued");
    sim.host_function(c, 3).expect("queued");
    sim.host_function(b, 2).expect("queued");
    sim.event_record(mark, b).expect("recorded again");
    sim.event_synchronize(mark).expect("done");
    assert_eq!(sim.ran(), [2], "it marks the other stream now");
    sim.stream_synchronize(c).expect("done");
    assert_eq!(sim.ran(), [2, 1, 3], "the wait is for what was marked then");
}

#[test]
fn an_event_destroyed_while_a_wait_is_queued_is_still_waited_for() {
    let sim = device(Order::Lazy);
    let [a, b] = streams(&sim);
    let mark = event(&sim);
    sim.host_function(a, 1).expect("queued");
    sim.event_record(mark, a).expect("recorded");
    sim.stream_wait_event(b, mark).expect("queued");
    sim.host_function(b, 2).expect("queued");
    sim.event_destroy(mark).expect("at once");
    assert_eq!((sim.ran(), sim.leaks().events), (vec![], 0));
    sim.stream_synchronize(b).expect("done");
    assert_eq!(sim.ran(), [1, 2]);
    sim.assert_no_faults();
}

#[test]
fn a_stream_destroyed_with_work_does_it_and_its_events_complete() {
    let sim = device(Order::Lazy);
    let [a, b] = streams(&sim);
    let mark = event(&sim);
    sim.host_function(a, 1).expect("queued");
    sim.event_record(mark, a).expect("recorded");
    sim.stream_destroy(a).expect("at once");
    assert_eq!((sim.unfinished(), sim.leaks().streams), (2, 1));
    assert_eq!(sim.event_query(mark), Ok(false));
    sim.stream_wait_event(b, mark).expect("queued");
    sim.stream_synchronize(b).expect("done");
    assert_eq!((sim.ran(), sim.event_query(mark)), (vec![1], Ok(true)));
    sim.assert_no_faults();
    sim.validate();
}

#[test]
fn waiting_for_the_context_includes_streams_given_up() {
    let sim = device(Order::Lazy);
    let [a] = streams(&sim);
    sim.host_function(a, 1).expect("queued");
    sim.stream_destroy(a).expect("at once");
    sim.synchronize().expect("done");
    assert_eq!((sim.ran(), sim.unfinished()), (vec![1], 0));
    assert!(sim.leaks().is_empty());
}

#[test]
fn handles_that_are_gone_or_never_were_are_refused_and_on_record() {
    let sim = device(Order::Lazy);
    let [a] = streams(&sim);
    let mark = event(&sim);
    sim.event_destroy(mark).expect("at once");
    sim.stream_destroy(a).expect("at once");
    let (again, other) = (event(&sim), streams::<1>(&sim)[0]);
    assert_ne!((again, other), (mark, a), "a number is not given again");
    assert_eq!(code(sim.stream_wait_event(other, mark)), Some(400));
    assert_eq!(code(sim.event_query(mark)), Some(400));
    assert_eq!(code(sim.event_destroy(mark)), Some(400));
    assert_eq!(code(sim.event_record(again, a)), Some(400));
    assert_eq!(code(sim.stream_synchronize(a)), Some(400));
    assert_eq!(code(sim.stream_destroy(StreamHandle::new(0))), Some(400));
    assert_eq!(sim.faults_total(), 6);
    let (call, kind) = (Call::StreamWaitEvent, HandleKind::Event);
    let waited = Fault::StaleHandle { call, kind, number: mark.get() };
    assert_eq!(sim.faults()[0], waited);
    assert_eq!(sim.lost(), None);
}

#[test]
fn a_stream_waits_for_its_own_event_without_a_deadlock() {
    let sim = device(Order::Lazy);
    let [a, b] = streams(&sim);
    let (first, second) = (event(&sim), event(&sim));
    for _ in 0..50 {
        sim.event_record(first, a).expect("recorded");
        sim.stream_wait_event(a, first).expect("queued");
        sim.stream_wait_event(b, first).expect("queued");
        sim.event_record(second, b).expect("recorded");
        sim.stream_wait_event(a, second).expect("queued");
    }
    sim.stream_synchronize(a).expect("done");
    sim.validate();
    assert_eq!(sim.unfinished(), 0);
}

#[test]
fn work_is_done_in_the_order_of_its_stream() {
    let size = ByteSize::kib(9);
    for seed in 0..100 {
        let sim = device(Order::Random { seed });
        let [a] = streams(&sim);
        let at = committed(&sim, 1);
        sim.fill(a, at, size, Pattern::new(seed)).expect("queued");
        let before = sim.sum(a, at, size).expect("queued");
        sim.add(a, at, size, 3).expect("queued");
        sim.add(a, at, size, 253).expect("queued"); // together 256: as before
        let held = sim.check(a, at, size, Pattern::new(seed)).expect("queued");
        sim.stream_synchronize(a).expect("done");
        assert_eq!(sim.outcome(held), Outcome::Held, "seed {seed}");
        let wanted = (0..size.get()).map(|at| u64::from(Pattern::new(seed).byte(at))).sum();
        assert_eq!(sim.outcome(before), Outcome::Sum(wanted), "seed {seed}");
    }
}

#[test]
fn what_is_queued_is_bounded_and_the_rest_is_done_in_its_order() {
    let sim = device(Order::Lazy);
    let [a] = streams(&sim);
    let mark = event(&sim);
    sim.event_record(mark, a).expect("recorded");
    for tag in 0..1 << 20 {
        sim.host_function(a, tag).expect("queued");
    }
    assert_eq!((sim.unfinished(), sim.event_query(mark)), (1 << 20, Ok(true)));
}

//! Contexts: current on a thread, retained and released, destroyed, lost.

use lowtide_fake_cuda::{Fake, Options};

use super::raw;

const NOT_INITIALIZED: u32 = 3;
const INVALID_CONTEXT: u32 = 201;
const DESTROYED: u32 = 709;

#[test]
fn before_the_start_nothing_works_and_after_a_reset_the_start_is_needed_again() {
    let fake = Fake::start(Options::default());
    assert_eq!(raw::retain(0).map(drop), Err(NOT_INITIALIZED));
    raw::init().expect("started");
    assert_eq!(raw::retain(7).map(drop), Err(101), "no such device");
    fake.reset(Options::default());
    assert_eq!(raw::retain(0).map(drop), Err(NOT_INITIALIZED));
}

#[test]
fn a_call_needs_a_context_on_its_own_thread() {
    let fake = Fake::start(Options::default());
    let context = raw::context(0);
    let stream = context.new_stream().expect("a stream");
    let at = raw::alloc(64).expect("room");
    let queue = stream.cu_stream() as usize;
    let answers = std::thread::spawn(move || {
        let queue = std::ptr::without_provenance_mut(queue);
        let none = std::ptr::null_mut();
        [
            raw::alloc(64).map(drop),
            raw::info().map(drop),
            raw::synchronize(),
            raw::stream_create().map(drop),
            raw::set(at, 1, 64, none),
            raw::set(at, 1, 64, queue), // a stream brings its context along
            raw::reserve(2 << 20).and_then(|at| raw::unreserve(at, 2 << 20)), // needs none
        ]
    });
    let mut wanted = [Err(INVALID_CONTEXT); 7];
    wanted[5..].fill(Ok(()));
    assert_eq!(answers.join().expect("no panic"), wanted);
    raw::free(at).expect("freed");
    drop((stream, context));
    fake.assert_clean();
}

#[test]
fn the_last_release_destroys_the_context_and_says_with_what() {
    let fake = Fake::start(Options::default());
    raw::init().expect("started");
    let context = raw::retain(0).expect("a context");
    raw::retain(0).expect("another share");
    raw::set_current(context).expect("current");
    let (stream, _lost) = (raw::stream_create().expect("a stream"), raw::alloc(64).expect("room"));
    raw::release(0).expect("one share");
    assert_eq!((fake.retains(0), raw::info().map(drop)), (1, Ok(())));
    raw::release(0).expect("the last");
    assert_eq!(raw::info().map(drop), Err(DESTROYED));
    assert_eq!(raw::stream_query(stream), Err(DESTROYED));
    assert_eq!(raw::set_current(context), Err(INVALID_CONTEXT));
    assert_eq!(raw::release(0), Err(INVALID_CONTEXT), "there is no share");
    assert_eq!(fake.leaks(), "context of device 0 destroyed with 1 plain allocations, 1 streams");
    assert_eq!(fake.numbers(0).taken_bytes, 0);
    // A new life of it: the thread's current one works again, and old handles do not.
    raw::retain(0).expect("a context");
    assert!(raw::info().is_ok());
    assert_eq!(raw::stream_destroy(stream), Err(400));
    assert!(fake.faults().contains("of a context that was destroyed"), "{}", fake.faults());
}

#[test]
fn a_lost_context_answers_every_call_with_its_error() {
    let fake = Fake::start(Options::default());
    let context = raw::context(0);
    let stream = context.new_stream().expect("a stream");
    let other = raw::context(1);
    fake.poison(0, 719);
    assert_eq!(stream.synchronize().map_err(|error| error.0 as u32), Err(719));
    context.bind_to_thread().expect("current");
    assert_eq!(raw::alloc(64), Err(719));
    assert_eq!(raw::create(2 << 20), Err(719));
    other.bind_to_thread().expect("current");
    let at = raw::alloc(64).expect("the other device is well");
    raw::free(at).expect("freed");
}

#[test]
fn handles_of_another_kind_and_of_nothing_are_refused_and_on_record() {
    let fake = Fake::start(Options::default());
    let context = raw::context(0);
    let event = context.new_event(None).expect("an event");
    assert_eq!(raw::stream_query(event.cu_event().cast()), Err(400));
    assert_eq!(raw::stream_query(std::ptr::without_provenance_mut(77)), Err(400));
    let stream = raw::stream_create().expect("a stream");
    raw::stream_destroy(stream).expect("destroyed");
    assert_eq!(raw::stream_destroy(stream), Err(400));
    assert_eq!(fake.faults().lines().count(), 3, "{}", fake.faults());
}

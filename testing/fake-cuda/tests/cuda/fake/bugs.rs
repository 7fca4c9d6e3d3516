//! Seeded bugs: programs with one mistake each, which the lazy order finds every time, and the
//! same programs without it, which pass.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use lowtide_fake_cuda::{Fake, Guard, Options};

use super::raw;

const SIZE: usize = 4_096;

/// Two streams that nobody orders but the test.
fn streams() -> (Guard, Arc<CudaContext>, Arc<CudaStream>, Arc<CudaStream>) {
    let fake = Fake::start(Options::default());
    let context = raw::context(0);
    raw::untracked(&context);
    let (first, second) = (context.new_stream().expect("one"), context.new_stream().expect("two"));
    (fake, context, first, second)
}

#[test]
fn a_missing_wait_for_an_event_shows() {
    for waits in [true, false] {
        let (fake, context, writer, reader) = streams();
        let at = raw::alloc(SIZE).expect("room");
        raw::set(at, 1, SIZE, writer.cu_stream()).expect("queued");
        let written = writer.record_event(None).expect("recorded");
        if waits {
            reader.wait(&written).expect("queued");
        }
        let found = raw::peek(at, 1, reader.cu_stream()).expect("read");
        assert_eq!(found == [1], waits, "{found:?}");
        drop((written, writer, reader, context));
        assert_eq!(fake.faults(), "");
    }
}

#[test]
fn a_use_after_a_free_on_another_stream_shows() {
    for waits in [true, false] {
        let (_fake, _context, owner, user) = streams();
        let at = raw::alloc_async(SIZE, owner.cu_stream()).expect("room");
        raw::set(at, 1, SIZE, owner.cu_stream()).expect("queued");
        user.join(&owner).expect("queued");
        raw::set(at, 2, SIZE, user.cu_stream()).expect("queued");
        if waits {
            owner.join(&user).expect("queued");
        }
        raw::free_async(at, owner.cu_stream()).expect("queued");
        owner.synchronize().expect("done");
        let done = user.synchronize().map_err(|error| error.0 as u32);
        assert_eq!(done, if waits { Ok(()) } else { Err(700) });
    }
}

#[test]
fn a_page_locked_buffer_written_again_in_flight_shows() {
    for waits in [true, false] {
        let (_fake, _context, stream, _) = streams();
        let at = raw::alloc(SIZE).expect("room");
        let mut staging = raw::Pinned::new(SIZE).expect("locked");
        staging.bytes().fill(1);
        staging.copy_to(at, stream.cu_stream()).expect("queued");
        if waits {
            stream.synchronize().expect("done");
        }
        staging.bytes().fill(2);
        let found = raw::peek(at, 1, stream.cu_stream()).expect("read");
        assert_eq!(found == [1], waits, "{found:?}");
    }
}

#[test]
fn a_pageable_buffer_may_be_written_again_after_the_call() {
    let (_fake, _context, stream, _) = streams();
    let mut numbers = vec![1_u32; 100];
    let there = stream.clone_htod(&numbers).expect("there");
    numbers.fill(2);
    assert_eq!(stream.clone_dtoh(&there), Ok(vec![1; 100]));
}

#[test]
fn an_overrun_by_one_byte_shows_in_plain_and_in_pooled_memory() {
    for (pooled, over) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
        let (fake, _context, stream, _) = streams();
        let queue = stream.cu_stream();
        let room = if pooled { raw::alloc_async(1_000, queue) } else { raw::alloc(1_000) };
        raw::set(room.expect("room"), 1, 1_000 + over, queue).expect("queued");
        let done = stream.synchronize().map_err(|error| error.0 as u32);
        assert_eq!(done, if over == 0 { Ok(()) } else { Err(700) }, "{}", fake.faults());
    }
}

#[test]
fn a_double_free_shows_and_frees_nothing() {
    let (fake, _context, stream, _) = streams();
    let queue = stream.cu_stream();
    let (plain, pooled) = (raw::alloc(SIZE).expect("room"), raw::alloc_async(SIZE, queue));
    let pooled = pooled.expect("room");
    raw::free(plain).expect("freed");
    assert_eq!(raw::free(plain), Err(1));
    raw::free_async(pooled, queue).expect("freed");
    assert_eq!(raw::free_async(pooled, queue), Err(1));
    assert_eq!(fake.faults().matches("NotAllocated").count(), 2, "{}", fake.faults());
    fake.validate(0);
}

#[test]
fn page_locked_memory_freed_under_a_copy_is_on_record() {
    let (fake, _context, stream, _) = streams();
    let at = raw::alloc(SIZE).expect("room");
    let staging = raw::Pinned::new(SIZE).expect("locked");
    staging.copy_to(at, stream.cu_stream()).expect("queued");
    drop(staging);
    assert!(fake.faults().contains("HostGoneBeforeDone"), "{}", fake.faults());
    stream.synchronize().expect("done, and nothing else touched");
}

#[test]
fn a_stream_that_does_not_block_is_not_ordered_with_the_default_one() {
    let (_fake, context, apart, _) = streams();
    let at = raw::alloc(SIZE).expect("room");
    let default = context.default_stream();
    raw::set(at, 1, SIZE, default.cu_stream()).expect("queued");
    assert_ne!(raw::peek(at, 1, apart.cu_stream()), Ok(vec![1]), "not ordered");
    assert_eq!(raw::peek(at, 1, default.cu_stream()), Ok(vec![1]));
    raw::set(at, 2, SIZE, default.cu_stream()).expect("queued");
    let thread = context.per_thread_stream();
    assert_eq!(raw::peek(at, 1, thread.cu_stream()), Ok(vec![2]), "ordered");
}

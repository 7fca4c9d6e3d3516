//! Stream-ordered memory: threshold, trim, limits, the device's current pool under cudarc.

use lowtide_fake_cuda::{Fake, Options};

use super::raw;

const MIB: usize = 1 << 20;
const OUT_OF_MEMORY: u32 = 2;

fn bytes(mib: usize) -> u64 {
    (mib * MIB) as u64
}

#[test]
fn a_pool_keeps_up_to_its_threshold_at_a_wait_and_gives_the_rest_back() {
    let fake = Fake::start(Options::default());
    let context = raw::context(0);
    let stream = context.new_stream().expect("a stream");
    let pool = raw::default_pool().expect("a pool");
    let slices = [raw::bare(&stream, MIB), raw::bare(&stream, MIB)]; // 4 MiB each
    assert_eq!(raw::pool_bytes(pool), Ok((bytes(8), bytes(8))));
    drop(slices);
    assert_eq!(raw::pool_bytes(pool), Ok((0, bytes(8))), "nobody waited");
    stream.synchronize().expect("done");
    assert_eq!(raw::pool_bytes(pool), Ok((0, 0)), "the threshold is 0 at first");
    raw::threshold(pool, u64::MAX).expect("set");
    drop(raw::bare(&stream, MIB));
    stream.synchronize().expect("done");
    assert_eq!(raw::pool_bytes(pool), Ok((0, bytes(4))));
    assert_eq!(fake.numbers(0).taken_bytes, bytes(4));
    raw::trim(pool, 0).expect("trimmed");
    assert_eq!(raw::pool_bytes(pool), Ok((0, 0)));
    fake.validate(0);
    drop((stream, context));
    fake.assert_clean();
}

#[test]
fn a_trim_takes_nothing_whose_free_the_host_has_not_seen_done() {
    let fake = Fake::start(Options::default());
    let context = raw::context(0);
    let (first, second) = (context.new_stream().expect("one"), context.new_stream().expect("two"));
    let pool = raw::default_pool().expect("a pool");
    raw::threshold(pool, u64::MAX).expect("set");
    drop(raw::bare(&first, MIB));
    raw::trim(pool, 0).expect("trimmed");
    assert_eq!(raw::pool_bytes(pool), Ok((0, bytes(4))), "not done");
    while fake.run(0, 100) > 0 {}
    raw::trim(pool, 0).expect("trimmed");
    second.synchronize().expect("another stream");
    raw::trim(pool, 0).expect("trimmed");
    assert_eq!(raw::pool_bytes(pool), Ok((0, bytes(4))), "done, and not seen");
    assert_eq!(raw::stream_query(first.cu_stream()), Ok(()));
    raw::trim(pool, 0).expect("trimmed");
    assert_eq!(raw::pool_bytes(pool), Ok((0, 0)), "seen");
    drop((first, second, context));
    fake.assert_clean();
}

#[test]
fn a_pool_of_ours_as_the_current_one_bounds_what_cudarc_allocates() {
    let fake = Fake::start(Options::default());
    let context = raw::context(0);
    let stream = context.new_stream().expect("a stream");
    let pool = raw::pool_create(bytes(1)).expect("a pool");
    raw::use_pool(pool).expect("current");
    let over = raw::try_bare(&stream, MIB / 2).map(drop);
    assert_eq!(over, Err(OUT_OF_MEMORY), "2 MiB");
    let half = raw::bare(&stream, MIB / 8);
    assert_eq!(raw::pool_bytes(pool), Ok((bytes(1) / 2, bytes(1) / 2)));
    // Destroyed while some of it is used, it is there until that is freed.
    raw::pool_destroy(pool).expect("destroyed");
    assert_eq!(raw::pool_bytes(pool), Err(1));
    assert_eq!(stream.clone_dtoh(&half).map(|numbers| numbers.len()), Ok(MIB / 8));
    drop(half);
    stream.synchronize().expect("done");
    assert_eq!(fake.numbers(0).taken_bytes, 0);
    drop(raw::bare(&stream, MIB)); // of the default pool again
    drop((stream, context));
    assert!(fake.faults().contains("StaleHandle"), "the question above: {}", fake.faults());
    assert_eq!(fake.leaks(), "");
}

#[test]
fn freed_memory_is_given_again_to_its_stream_at_once_and_to_others_when_it_is_done() {
    let fake = Fake::start(Options::default());
    let context = raw::context(0);
    let (first, second) = (context.new_stream().expect("one"), context.new_stream().expect("two"));
    let (one, two) = (first.cu_stream(), second.cu_stream());
    raw::threshold(raw::default_pool().expect("a pool"), u64::MAX).expect("set");
    let at = raw::alloc_async(MIB, one).expect("room");
    raw::set(at, 1, MIB, one).expect("queued");
    raw::free_async(at, one).expect("queued");
    let other = raw::alloc_async(MIB, two).expect("room");
    assert_ne!(other, at, "its free is not done");
    let again = raw::alloc_async(MIB, one).expect("room");
    assert_eq!(again, at);
    assert_eq!(raw::peek(at, 1, one), Ok(vec![0xA5]), "with nobody's contents");
    raw::free_async(again, one).expect("queued");
    first.synchronize().expect("done");
    assert_eq!(raw::alloc_async(MIB, two), Ok(at));
    raw::free_async(at, two).expect("queued");
    raw::free_async(other, two).expect("queued");
    fake.validate(0);
    drop((first, second, context));
    fake.assert_clean();
}

#[test]
fn memory_of_a_pool_can_be_freed_by_a_call_that_waits() {
    let fake = Fake::start(Options::default());
    let stream = raw::context(0).new_stream().expect("a stream");
    let at = raw::alloc_async(MIB, stream.cu_stream()).expect("room");
    raw::set(at, 1, MIB, stream.cu_stream()).expect("queued");
    raw::free(at).expect("freed");
    let numbers = fake.numbers(0);
    assert_eq!((numbers.taken_bytes, numbers.unfinished), (0, 0));
    drop(stream);
    fake.assert_clean();
}

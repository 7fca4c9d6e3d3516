//! Virtual memory by raw calls: the rules of reserve, create, map, access, unmap and release.

use lowtide_fake_cuda::{Fake, Options};

use super::raw;

const ILLEGAL_ADDRESS: u32 = 700;

#[test]
fn data_goes_with_the_handle_and_not_with_the_address() {
    let fake = Fake::start(Options::default());
    let stream = raw::context(0).new_stream().expect("a stream");
    let queue = stream.cu_stream();
    let size = raw::granularity().expect("a size");
    let free = || raw::info().expect("asked").0;
    let (at, before) = (raw::reserve(8 * size).expect("addresses"), free());
    let handles = [raw::create(size).expect("memory"), raw::create(size).expect("memory")];
    assert_eq!(before - free(), 2 * size);
    let second = at + size as u64;
    raw::map(at, size, handles[0]).expect("mapped");
    raw::map(second, size, handles[1]).expect("mapped");
    raw::set_access(at, 2 * size).expect("open");
    raw::set(at, 0x11, size, queue).expect("queued");
    raw::set(second, 0x22, size, queue).expect("queued");
    let last = |at: u64| raw::peek(at + size as u64 - 1, 1, queue).expect("read")[0];
    assert_eq!((last(at), last(second)), (0x11, 0x22));
    raw::unmap(at, 2 * size).expect("whole mappings in one call");
    raw::map(at, size, handles[1]).expect("mapped");
    raw::map(second, size, handles[0]).expect("mapped");
    raw::set_access(at, 2 * size).expect("open");
    assert_eq!((last(at), last(second)), (0x22, 0x11));
    // Released while mapped, the memory stays until the unmap.
    handles.iter().for_each(|handle| raw::release_handle(*handle).expect("released"));
    assert_eq!((before - free(), last(at)), (2 * size, 0x22));
    assert_eq!(raw::map(at + 2 * size as u64, size, handles[0]), Err(1), "released");
    let again = raw::retain_handle(at).expect("found by its address");
    raw::unmap(at, 2 * size).expect("unmapped");
    assert_eq!(before - free(), size, "one is held still");
    raw::release_handle(again).expect("released");
    assert_eq!(before, free());
    raw::unreserve(at, 8 * size).expect("given back");
    drop(stream);
    assert!(fake.faults().contains("StaleHandle"), "{}", fake.faults());
    assert_eq!(fake.leaks(), "");
}

#[test]
fn one_handle_behind_two_addresses_is_one_memory() {
    let fake = Fake::start(Options::default());
    let stream = raw::context(0).new_stream().expect("a stream");
    let size = raw::granularity().expect("a size");
    let at = raw::reserve(2 * size).expect("addresses");
    let handle = raw::create(size).expect("memory");
    for at in [at, at + size as u64] {
        raw::map(at, size, handle).expect("mapped");
    }
    raw::set_access(at, 2 * size).expect("open");
    assert_eq!(fake.numbers(0).taken_bytes, size as u64);
    raw::set(at + 5, 9, 1, stream.cu_stream()).expect("queued");
    assert_eq!(raw::peek(at + size as u64 + 5, 1, stream.cu_stream()), Ok(vec![9]));
    raw::unmap(at, size).expect("one");
    assert_eq!(raw::peek(at + size as u64 + 5, 1, stream.cu_stream()), Ok(vec![9]));
    raw::unmap(at + size as u64, size).expect("the other");
    raw::release_handle(handle).expect("released");
    raw::unreserve(at, 2 * size).expect("given back");
    drop(stream);
    fake.assert_clean();
}

#[test]
fn wrong_calls_are_refused_on_record_and_change_nothing() {
    let fake = Fake::start(Options::default());
    let _context = raw::context(0);
    let size = raw::granularity().expect("a size");
    let at = raw::reserve(4 * size).expect("addresses");
    let two = raw::create(2 * size).expect("memory");
    let third = at + 2 * size as u64;
    assert_eq!(raw::reserve(size + 1), Err(1), "whole granules");
    assert_eq!(raw::create(size / 2), Err(1), "whole granules");
    assert_eq!(raw::map(at, size, two), Err(1), "a handle is not split");
    assert_eq!(raw::map(at + 4096, 2 * size, two), Err(1), "whole granules");
    assert_eq!(raw::map(at + 3 * size as u64, 2 * size, two), Err(1), "beyond the reservation");
    assert_eq!(raw::set_access(at, 2 * size), Err(1), "nothing is mapped");
    raw::map(at, 2 * size, two).expect("mapped");
    assert_eq!(raw::map(at, 2 * size, two), Err(1), "mapped already");
    assert_eq!(raw::unmap(at, size), Err(1), "a part");
    assert_eq!(raw::unmap(third, size), Err(1), "bare");
    assert_eq!(raw::unreserve(at, 4 * size), Err(1), "something is mapped");
    assert_eq!(raw::unreserve(at, size), Err(1), "a part");
    raw::unmap(at, 2 * size).expect("whole");
    raw::release_handle(two).expect("released");
    assert_eq!(raw::release_handle(two), Err(1), "released before");
    raw::unreserve(at, 4 * size).expect("given back");
    assert_eq!(fake.numbers(0).reservations, 0);
    let faults = fake.faults();
    for fault in ["MapPart", "DoubleMap", "UnmapPart", "UnmapBare", "UnreserveMapped"] {
        assert!(faults.contains(fault), "{fault} in\n{faults}");
    }
    fake.validate(0);
}

#[test]
fn memory_that_is_not_mapped_or_not_open_loses_the_context_and_segfaults_nothing() {
    for open in [false, true] {
        let fake = Fake::start(Options::default());
        let context = raw::context(0);
        let stream = context.new_stream().expect("a stream");
        let size = raw::granularity().expect("a size");
        let at = raw::reserve(2 * size).expect("addresses");
        let handle = raw::create(size).expect("memory");
        raw::map(at, size, handle).expect("mapped");
        if open {
            raw::set_access(at, size).expect("open");
        }
        // Without access from its first byte, with it over its end.
        let from = if open { at + size as u64 - 8 } else { at };
        assert_eq!(raw::set(from, 1, 16, stream.cu_stream()), Ok(()), "only queued");
        let error = stream.synchronize().expect_err("an illegal address");
        assert_eq!(error.0 as u32, ILLEGAL_ADDRESS);
        assert_eq!(raw::info(), Err(ILLEGAL_ADDRESS), "for good");
        assert_eq!(raw::unmap(at, size), Err(ILLEGAL_ADDRESS));
        assert!(fake.faults().contains("IllegalAddress"), "{}", fake.faults());
    }
}

#[test]
fn an_unmap_waits_for_nothing_and_is_on_record_where_work_is_unfinished() {
    let fake = Fake::start(Options::default());
    let stream = raw::context(0).new_stream().expect("a stream");
    let size = raw::granularity().expect("a size");
    let at = raw::reserve(size).expect("addresses");
    let handle = raw::create(size).expect("memory");
    raw::map(at, size, handle).expect("mapped");
    raw::release_handle(handle).expect("released");
    raw::set_access(at, size).expect("open");
    let fill = raw::function(stream.context(), "fill_u32");
    raw::launch(&fill, &[at, 1, 16], stream.cu_stream()).expect("queued");
    assert_eq!(raw::unmap(at, size), Ok(()), "the driver does not notice");
    assert!(fake.faults().contains("UnmapBeforeDone"), "{}", fake.faults());
    assert_eq!(fake.numbers(0).taken_bytes, 0);
    let error = stream.synchronize().expect_err("nothing is there any more");
    assert_eq!(error.0 as u32, ILLEGAL_ADDRESS);
}

#[test]
fn reservations_start_at_multiples_and_share_addresses_with_nobody() {
    let fake = Fake::start(Options::default());
    let _contexts = [raw::context(0), raw::context(1)];
    let size = raw::granularity().expect("a size");
    let plain = raw::alloc(100).expect("room");
    let at = raw::reserve(size).expect("addresses");
    assert_eq!(at % size as u64, 0);
    assert!(at.abs_diff(plain) >= size as u64);
    assert_eq!(raw::unmap(plain, size), Err(1), "memory of another kind");
    assert_eq!(raw::retain_handle(plain), Err(1));
    raw::free(plain).expect("freed");
    raw::unreserve(at, size).expect("given back");
    assert_eq!(fake.leaks(), "device 0: 1 context retains\ndevice 1: 1 context retains");
}

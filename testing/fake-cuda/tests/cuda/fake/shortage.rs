//! Memory that runs out, calls that are told to fail, and devices that offer less.

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use lowtide_fake_cuda::{Fake, Options};

use super::raw;

const GIB: u64 = 1 << 30;
const MIB: usize = 1 << 20;
const OUT_OF_MEMORY: u32 = 2;
const NOT_SUPPORTED: u32 = 801;

#[test]
fn the_memory_of_the_device_the_context_and_neighbours_bound_what_is_given() {
    let options = Options { capacity: GIB, context_overhead: GIB / 4, ..Options::default() };
    let fake = Fake::start(options);
    let stream = raw::context(0).new_stream().expect("a stream");
    assert_eq!(raw::info(), Ok((3 * MIB * 256, 4 * MIB * 256)));
    assert_eq!(raw::try_bare(&stream, 192 * MIB + 1).map(drop), Err(OUT_OF_MEMORY));
    fake.neighbours(0, GIB / 2);
    assert_eq!(raw::alloc(300 * MIB), Err(OUT_OF_MEMORY));
    assert_eq!(raw::create(300 * MIB), Err(OUT_OF_MEMORY));
    fake.neighbours(0, 0);
    let at = raw::alloc(300 * MIB).expect("room");
    raw::free(at).expect("freed");
    drop(stream);
    fake.assert_clean();
}

#[test]
fn the_nth_call_from_now_fails_as_told_and_no_other() {
    let fake = Fake::start(Options::default());
    let stream = raw::context(0).new_stream().expect("a stream");
    fake.fail(c"cuMemAllocAsync", 2, OUT_OF_MEMORY);
    let first = raw::bare(&stream, 4);
    assert_eq!(raw::try_bare(&stream, 4).map(drop), Err(OUT_OF_MEMORY));
    let third = raw::bare(&stream, 4);
    assert_eq!(fake.calls(c"cuMemAllocAsync"), 3);
    let size = raw::granularity().expect("a size");
    let (at, handle) = (raw::reserve(size).expect("room"), raw::create(size).expect("room"));
    fake.fail(c"cuMemMap", 1, OUT_OF_MEMORY);
    assert_eq!(raw::map(at, size, handle), Err(OUT_OF_MEMORY));
    assert_eq!(fake.numbers(0).mappings, 0);
    fake.fail(c"cuMemMap", 1, OUT_OF_MEMORY);
    fake.forget_failures();
    raw::map(at, size, handle).expect("mapped");
    raw::unmap(at, size).expect("unmapped");
    raw::release_handle(handle).expect("released");
    raw::unreserve(at, size).expect("given back");
    drop((first, third, stream));
    fake.assert_clean();
}

#[test]
fn a_device_without_virtual_memory_or_pools_says_so_and_cudarc_works_on() {
    let none = Options::NO_VIRTUAL_MEMORY | Options::NO_POOLS;
    let fake = Fake::start(Options { flags: none, ..Options::default() });
    let context = raw::context(0);
    let virtual_memory = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
    assert_eq!(context.attribute(virtual_memory), Ok(0));
    assert!(!context.has_async_alloc());
    assert_eq!(raw::granularity(), Err(NOT_SUPPORTED));
    assert_eq!(raw::reserve(2 * MIB), Err(NOT_SUPPORTED));
    assert_eq!(raw::create(2 * MIB), Err(NOT_SUPPORTED));
    assert!(raw::default_pool().is_err() && raw::pool_create(0).is_err());
    let stream = context.new_stream().expect("a stream");
    let there = stream.clone_htod(&[1_u32, 2, 3]).expect("plain memory");
    assert_eq!(stream.clone_dtoh(&there), Ok(vec![1, 2, 3]));
    assert_eq!(fake.numbers(0).plain_live, 1);
    drop((there, stream, context));
    fake.assert_clean();
}

#[test]
fn a_device_may_claim_what_it_has_not_refuse_pools_and_be_short_of_addresses() {
    let flags = Options::NO_VIRTUAL_MEMORY | Options::CLAIMS_VIRTUAL_MEMORY;
    let fake = Fake::start(Options { flags, ..Options::default() });
    let context = raw::context(0);
    let claimed = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
    assert_eq!(context.attribute(claimed), Ok(1));
    assert_eq!(raw::create(2 * MIB), Err(NOT_SUPPORTED));
    drop(context);
    let short = Options {
        flags: Options::NO_POOL_CREATE,
        address_space: GIB,
        granularity: 64 << 10,
        ..Options::default()
    };
    fake.reset(short);
    let context = raw::context(0);
    assert_eq!(raw::pool_create(0).map(drop), Err(NOT_SUPPORTED));
    assert!(raw::default_pool().is_ok());
    assert_eq!(raw::granularity(), Ok(64 << 10));
    assert_eq!(raw::reserve(2_048 * MIB), Err(OUT_OF_MEMORY));
    let at = raw::reserve(1_024 * MIB).expect("all of it");
    assert_eq!(raw::reserve(64 << 10), Err(OUT_OF_MEMORY));
    raw::unreserve(at, 1_024 * MIB).expect("given back");
    drop(context);
    fake.assert_clean();
}

#[test]
fn page_locked_memory_is_bounded_and_its_bytes_are_known() {
    let fake = Fake::start(Options::default());
    let context = raw::context(0);
    fake.lock_limit(0, 1 << 20);
    assert_eq!(raw::Pinned::new(2 << 20).map(drop), Err(OUT_OF_MEMORY));
    let pinned = raw::Pinned::new(1 << 20).expect("within the limit");
    assert_eq!(fake.numbers(0).locked_bytes, 1 << 20);
    assert_eq!(raw::Pinned::new(1).map(drop), Err(OUT_OF_MEMORY));
    drop(pinned);
    drop(context);
    fake.assert_clean();
}

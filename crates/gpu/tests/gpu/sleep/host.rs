//! Sleep over host memory: what is kept stays, what is discarded is given back to the system.

use std::sync::Arc;
use std::time::Duration;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::{
    ArenaConfig, Contents, DeviceArena, HostDriver, Region, SleepOptions, SleepState,
};

const NOW: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Keep, dynamic: Contents::Discard };

fn open() -> DeviceArena {
    let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
    DeviceArena::open(driver, clock, ArenaConfig::new("host")).expect("open")
}

#[test]
fn contents_of_host_memory_stay_or_go() {
    let arena = open();
    let weights = arena.alloc_from(&[7_u32; 1 << 20], Region::Stable).expect("room");
    let mut cache = arena.alloc_from(&[9_u32; 1 << 20], Region::Dynamic).expect("room");
    let slept = arena.sleep(NOW).expect("asleep");
    assert_eq!((slept.memory, slept.stayed), (ByteSize::mib(4), ByteSize::mib(4)));
    assert_eq!(slept.copied, ByteSize::ZERO, "host memory is not copied to the host");
    arena.snapshot().validate();
    let lease = arena.enter().expect("a lease");
    assert!(weights.slice(&lease).expect("here").iter().all(|&word| word == 7));
    assert!(!weights.take_discarded() && cache.take_discarded());
    assert!(cache.slice(&lease).expect("here").iter().all(|&word| word == 0), "as new");
    cache.slice_mut(&lease).expect("here").fill(1);
    arena.validate();
}

#[test]
fn what_a_threads_front_keeps_is_not_handed_out_while_it_sleeps() {
    let arena = open();
    let kept = arena.alloc_from(&[1_u8; 4096], Region::Stable).expect("room");
    // The size is hot: from here on the front hands it out, without a look at the books.
    for _ in 0..100 {
        drop(arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("room"));
    }
    assert!(!arena.snapshot().cached.is_zero());
    arena.sleep(NOW).expect("asleep");
    assert_eq!(arena.snapshot().cached, ByteSize::ZERO);
    let lease_less = arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("it wakes");
    assert_eq!(arena.state(), SleepState::Awake);
    let lease = arena.enter().expect("a lease");
    assert_eq!(lease_less.slice(&lease).expect("there is memory behind it").len(), 1 << 20);
    drop(lease_less);
    // And it is hot again.
    for _ in 0..100 {
        drop(arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("room"));
    }
    assert!(!arena.snapshot().cached.is_zero());
    drop((kept, lease));
    arena.validate();
}

#[test]
fn what_is_said_of_one_buffer_is_not_said_of_the_next_that_has_its_block() {
    let arena = open();
    let alloc = || arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("room");
    for _ in 0..100 {
        drop(alloc());
    }
    let mut stays = alloc();
    stays.set_contents(Some(Contents::Stay)).expect("here");
    drop(stays);
    let next = alloc();
    let slept = arena.sleep(NOW).expect("asleep");
    assert_eq!(slept.stayed, ByteSize::ZERO, "it was another buffer that was to stay");
    arena.wake().expect("awake");
    drop(next); // without a look whether it was discarded
    let another = alloc();
    assert!(!another.take_discarded());
    arena.validate();
}

/// The copy of a block whose contents were discarded was taken for contents.
#[test]
fn a_resize_that_takes_another_block_does_not_hide_that_contents_were_discarded() {
    let arena = open();
    let mut cache = arena.alloc_from(&[1_u8; 4096], Region::Dynamic).expect("room");
    let next = arena.alloc_from(&[2_u8; 4096], Region::Dynamic).expect("room");
    arena.sleep(NOW).expect("asleep");
    cache.resize(3 * 4096).expect("woken, and copied");
    assert!(cache.take_discarded() && !cache.take_discarded(), "it is said once");
    arena.sleep(NOW).expect("asleep");
    cache.resize(6 * 4096).expect("woken, and copied");
    drop(cache);
    // Nobody is told of what another lost.
    let after = arena.alloc::<u8>(6 * 4096, Region::Dynamic).expect("room");
    assert!(!after.take_discarded());
    drop((after, next));
}

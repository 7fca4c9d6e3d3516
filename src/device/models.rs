//! The arena under loom: every interleaving of a few calls, up to the bound on preemptions.
//!
//! The driver here is a model that keeps a bit for each granule. It takes the lock of the books in
//! every call: if its caller held that lock, loom would see the deadlock. It refuses nothing.
//!
//! Invariant of each model: the driver's contract is kept, the books are right when the threads
//! have ended, and after a purge nothing is committed.

use std::sync::{Arc, OnceLock, Weak};

use super::driver::sealed::{self, Key};
use super::driver::{Capabilities, DeviceAddress, Driver, DriverError, Rung};
use super::shared::Shared;
use super::*;
use crate::bytes::ByteSize;
use crate::clock::ManualClock;
use crate::sync::{Mutex, lock};

const GRANULE: u64 = 512;
const GRANULES: usize = 4;
/// Where the first reservation begins; the second follows.
const BASE: u64 = 1 << 20;

#[derive(Default)]
struct Model {
    remap: bool,
    reserved: Mutex<u64>,
    committed: Mutex<[bool; 2 * GRANULES]>,
    arena: OnceLock<Weak<Shared>>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Model")
    }
}

impl Model {
    fn set(&self, at: DeviceAddress, size: ByteSize, to: bool) {
        if let Some(arena) = self.arena.get().and_then(Weak::upgrade) {
            drop(lock(&arena.books));
        }
        let first = usize::try_from((at.get() - BASE) / GRANULE).expect("small");
        let count = usize::try_from(size.get() / GRANULE).expect("small");
        let mut committed = lock(&self.committed);
        for granule in &mut committed[first..first + count] {
            assert_ne!(*granule, to, "granule {first} is {to} already");
            *granule = to;
        }
    }
}

impl sealed::Sealed for Model {}

impl Driver for Model {
    fn rung(&self) -> Rung {
        Rung::Host
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            virtual_memory: true,
            host_access: false,
            host_backed: false,
            page_locked: false,
            same_address_wake: false,
            remap: self.remap,
            asynchronous: false,
            granularity: ByteSize::new(GRANULE),
        }
    }

    fn reserve(&self, size: ByteSize) -> Result<DeviceAddress, DriverError> {
        let mut reserved = lock(&self.reserved);
        let at = BASE + *reserved;
        *reserved += size.get();
        Ok(DeviceAddress::new(at))
    }

    fn unreserve(&self, _: DeviceAddress, _: ByteSize, _: Key) -> Result<(), DriverError> {
        Ok(())
    }

    fn commit(&self, at: DeviceAddress, size: ByteSize, _: Key) -> Result<(), DriverError> {
        self.set(at, size, true);
        Ok(())
    }

    fn decommit(&self, at: DeviceAddress, size: ByteSize, _: Key) -> Result<(), DriverError> {
        self.set(at, size, false);
        Ok(())
    }

    fn remap(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        _: Key,
    ) -> Result<(), DriverError> {
        self.set(from, size, false);
        self.set(to, size, true);
        Ok(())
    }

    fn copy(
        &self,
        _: DeviceAddress,
        _: DeviceAddress,
        _: ByteSize,
        _: Key,
    ) -> Result<(), DriverError> {
        if let Some(arena) = self.arena.get().and_then(Weak::upgrade) {
            assert_eq!(lock(&arena.books).leases, 0, "a block moves under a lease");
        }
        Ok(())
    }

    fn headroom(&self) -> Result<Option<ByteSize>, DriverError> {
        Ok(None)
    }
}

fn open(limit_granules: u64) -> (DeviceArena, Arc<Model>) {
    open_over(Model::default(), limit_granules)
}

fn open_over(driver: Model, limit_granules: u64) -> (DeviceArena, Arc<Model>) {
    let driver = Arc::new(driver);
    let config = ArenaConfig {
        limit: ByteSize::new(limit_granules * GRANULE),
        reserve: ByteSize::new(GRANULES as u64 * GRANULE),
        ..ArenaConfig::new("model")
    };
    let clock = Arc::new(ManualClock::new());
    let arena = DeviceArena::open(driver.clone(), clock, config).expect("opens");
    let known = driver.arena.set(Arc::downgrade(arena.shared_arc()));
    assert!(known.is_ok(), "opened once");
    (arena, driver)
}

/// Allocates this much and frees it; whether there was room.
fn pass(arena: &DeviceArena, bytes: usize) -> bool {
    match arena.alloc::<u8>(bytes, Region::Dynamic) {
        Ok(buffer) => {
            assert_eq!(buffer.len(), bytes);
            true
        }
        Err(DeviceError::OutOfMemory { .. } | DeviceError::OutOfAddresses { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

fn end(arena: &DeviceArena, driver: &Model) {
    arena.validate();
    arena.purge().expect("gives back");
    arena.validate();
    assert!(arena.snapshot().committed.is_zero());
    assert!(lock(&driver.committed).iter().all(|committed| !committed));
}

/// Runs both at once on an arena, and looks at it afterwards.
fn both(
    arena: DeviceArena,
    driver: &Model,
    one: impl FnOnce(&DeviceArena) + 'static,
    other: impl FnOnce(&DeviceArena),
) {
    let thread = loom::thread::spawn({
        let arena = arena.clone();
        move || one(&arena)
    });
    other(&arena);
    thread.join().expect("no panic");
    end(&arena, driver);
}

#[test]
fn one_granule_of_limit_serves_two_threads_one_at_a_time() {
    loom::model(|| {
        let (arena, driver) = open(1);
        let granule = usize::try_from(GRANULE).expect("small");
        let act = move |arena: &DeviceArena| {
            let _ = pass(arena, granule); // there is room or not
        };
        both(arena, &driver, act, act);
    });
}

#[test]
fn a_granule_on_its_way_out_is_waited_for_and_committed_again() {
    loom::model(|| {
        let (arena, driver) = open(2);
        assert!(pass(&arena, 700));
        let purge = |arena: &DeviceArena| {
            arena.purge().expect("gives back");
        };
        both(arena, &driver, purge, |arena| assert!(pass(arena, 900)));
    });
}

#[test]
fn two_blocks_of_one_granule_arrive_by_one_commit() {
    loom::model(|| {
        let (arena, driver) = open(1);
        both(arena, &driver, |arena| assert!(pass(arena, 256)), |arena| assert!(pass(arena, 256)));
    });
}

#[test]
fn idle_memory_of_one_region_serves_two_threads_in_the_other_and_refuses_neither() {
    loom::model(|| {
        let (arena, driver) = open_over(Model { remap: true, ..Model::default() }, 2);
        arena.set_front(ByteSize::ZERO);
        drop(arena.alloc::<u8>(1024, Region::Stable).expect("room"));
        let hold = |arena: &DeviceArena| arena.alloc::<u8>(512, Region::Dynamic).expect("room");
        let other = arena.clone();
        let thread = loom::thread::spawn(move || hold(&other));
        let mine = hold(&arena);
        drop((thread.join().expect("no panic"), mine));
        assert!(arena.snapshot().remaps_total > 0);
        end(&arena, &driver);
    });
}

#[test]
fn threads_that_are_short_at_once_ask_one_after_the_other_and_both_come_to_an_end() {
    loom::model(|| {
        let (arena, driver) = open(1);
        arena.set_front(ByteSize::ZERO);
        let held = Mutex::new(Some(arena.alloc::<u8>(512, Region::Dynamic).expect("room")));
        let guard = arena.on_shortage(move |_| lock(&held).take().is_some());
        let act = |arena: &DeviceArena| {
            let _ = pass(arena, 512); // there is room or not
        };
        both(arena, &driver, act, act);
        drop(guard);
    });
}

#[test]
fn a_front_that_is_emptied_hands_nothing_out_twice() {
    loom::model(|| {
        let (arena, driver) = open(4);
        for _ in 0..6 {
            assert!(pass(&arena, 256));
        }
        assert!(!arena.snapshot().cached.is_zero(), "the size is hot");
        let trim = |arena: &DeviceArena| {
            arena.trim(ByteSize::ZERO).expect("gives back");
        };
        both(arena, &driver, trim, |arena| {
            let held = arena.alloc::<u8>(256, Region::Dynamic).expect("room");
            let other = arena.alloc::<u8>(256, Region::Dynamic).expect("room");
            // What is on its way from the front to the books counts as live meanwhile. A block
            // that was handed out twice would be freed twice, which the books refuse.
            assert!(arena.glance().live >= ByteSize::new(512));
            drop((held, other));
        });
    });
}

/// Two blocks of a region, apart from each other: a compaction moves one.
fn fragmented(arena: &DeviceArena) -> [Buffer<u8>; 2] {
    let block = || arena.alloc::<u8>(512, Region::Dynamic).expect("room");
    let (first, gone, second) = (block(), block(), block());
    drop(gone);
    [first, second]
}

fn compact(arena: &DeviceArena) {
    let goal = Goal::Contiguous(ByteSize::MAX);
    let options = CompactOptions { goal, ..CompactOptions::new(Region::Dynamic) };
    arena.compact(options, |_| {}).expect("nothing fails");
}

#[test]
fn a_lease_and_a_move_exclude_each_other() {
    loom::model(|| {
        let (arena, driver) = open(4);
        let blocks = fragmented(&arena);
        both(arena.clone(), &driver, compact, |arena| {
            let lease = arena.enter().expect("after one move at most");
            assert!(lock(&arena.shared_arc().books).moving.is_none());
            drop(lease);
            drop(blocks);
        });
    });
}

#[test]
fn a_block_is_freed_once_before_while_or_after_it_moves() {
    loom::model(|| {
        let (arena, driver) = open(4);
        let blocks = fragmented(&arena);
        both(arena, &driver, compact, |_| drop(blocks));
    });
}

//! The arena under loom: every interleaving of a few calls, up to the bound on preemptions.
//!
//! The driver is a model that keeps a bit for each granule, and for each stream its queued and
//! completed work (`work`). It takes the lock of the state in every call: if its caller held that
//! lock, loom would detect the deadlock. The model rejects nothing, and no stream captures.
//!
//! Invariant of each model: the driver's contract is kept, the figures are right when the threads
//! have ended, and after a purge no memory is committed.
#![expect(unsafe_code, reason = "the model is a driver, and its lanes are of any number")]

mod caches;
mod granules;
mod lanes;
mod moves;
mod shortage;
mod sleep;
mod work;

use std::sync::{Arc, OnceLock, Weak};

use super::*;
use crate::driver::{
    Backend, Capabilities, DeviceAddress, Driver, DriverError, EventHandle, StreamHandle,
};
use crate::exec::inner::ArenaInner;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::ManualClock;
use lowtide_core::sync::{Mutex, lock};
use work::Work;

const GRANULE: u64 = 512;
const GRANULES: usize = 4;
/// The start of the first reservation. The second follows it.
const BASE: u64 = 1 << 20;

#[derive(Default)]
struct Model {
    remap: bool,
    reserved: Mutex<u64>,
    committed: Mutex<[bool; 2 * GRANULES]>,
    work: Mutex<Work>,
    /// `true` if work continues after its call.
    asynchronous: bool,
    arena: OnceLock<Weak<ArenaInner>>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Model")
    }
}

impl Model {
    /// Checks that the caller holds no lock of the arena.
    fn unlocked(&self) {
        if let Some(arena) = self.arena.get().and_then(Weak::upgrade) {
            drop(arena.lock_state());
        }
    }

    /// Asserts that a range of whole granules has memory.
    fn assert_there(&self, at: DeviceAddress, size: ByteSize) {
        let [first, count] = granules(at, size);
        let there = lock(&self.committed)[first..first + count].iter().all(|&there| there);
        assert!(there, "no memory at granule {first}");
    }

    fn set(&self, at: DeviceAddress, size: ByteSize, to: bool) {
        self.unlocked();
        let [first, count] = granules(at, size);
        let mut committed = lock(&self.committed);
        for granule in &mut committed[first..first + count] {
            assert_ne!(*granule, to, "granule {first} is {to} already");
            *granule = to;
        }
    }
}

/// The arena's own stream.
const OWN_STREAM: u64 = 1_000;

/// Returns the first granule of a range, and the number of granules in it.
fn granules(at: DeviceAddress, size: ByteSize) -> [usize; 2] {
    [at.get() - BASE, size.get()].map(|bytes| usize::try_from(bytes / GRANULE).expect("small"))
}

// SAFETY: the memory is a bit for each granule, with no pointer to it.
unsafe impl Driver for Model {
    fn backend(&self) -> Backend {
        Backend::Host
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            virtual_memory: true,
            host_access: false,
            host_backed: false,
            unified: false,
            page_locked: false,
            remap: self.remap,
            asynchronous: self.asynchronous,
            handles: false,
            granularity: ByteSize::new(GRANULE),
        }
    }

    fn reserve(&self, size: ByteSize) -> Result<DeviceAddress, DriverError> {
        let mut reserved = lock(&self.reserved);
        let at = BASE + *reserved;
        *reserved += size.get();
        Ok(DeviceAddress::new(at))
    }

    unsafe fn unreserve(&self, _: DeviceAddress, _: ByteSize) -> Result<(), DriverError> {
        Ok(())
    }

    unsafe fn commit(
        &self,
        at: DeviceAddress,
        size: ByteSize,
        _handle: ByteSize,
    ) -> Result<(), DriverError> {
        self.set(at, size, true);
        Ok(())
    }

    unsafe fn decommit(
        &self,
        at: DeviceAddress,
        size: ByteSize,
        _handle: ByteSize,
    ) -> Result<(), DriverError> {
        lock(&self.work).assert_done(at, size);
        self.set(at, size, false);
        Ok(())
    }

    unsafe fn remap(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        _handle: ByteSize,
    ) -> Result<(), DriverError> {
        self.set(from, size, false);
        self.set(to, size, true);
        Ok(())
    }

    unsafe fn copy(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
    ) -> Result<(), DriverError> {
        let work = lock(&self.work);
        work.assert_done(from, size);
        work.assert_done(to, size);
        drop(work);
        self.assert_there(from, size);
        self.assert_there(to, size);
        if let Some(arena) = self.arena.get().and_then(Weak::upgrade) {
            assert_eq!(arena.lock_state().leases, 0, "a block moves under a lease");
        }
        Ok(())
    }

    fn stream_create(&self) -> Result<StreamHandle, DriverError> {
        Ok(StreamHandle::new(OWN_STREAM))
    }

    unsafe fn stream_destroy(&self, _: StreamHandle) -> Result<(), DriverError> {
        Ok(())
    }

    unsafe fn copy_async(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        assert_eq!(stream.get(), OWN_STREAM);
        // SAFETY: as for this call; the copy is complete before it returns.
        unsafe { self.copy(from, to, size) }
    }

    unsafe fn stream_synchronize(&self, _: StreamHandle) -> Result<(), DriverError> {
        self.unlocked();
        Ok(())
    }

    unsafe fn stream_wait_event(
        &self,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<(), DriverError> {
        self.unlocked();
        lock(&self.work).wait(stream, event);
        Ok(())
    }

    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool, DriverError> {
        lock(&self.work).assert_there(stream);
        Ok(false)
    }

    fn event_create(&self) -> Result<EventHandle, DriverError> {
        Ok(lock(&self.work).event())
    }

    unsafe fn event_destroy(&self, _: EventHandle) -> Result<(), DriverError> {
        Ok(())
    }

    unsafe fn event_record(
        &self,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        self.unlocked();
        lock(&self.work).record(event, stream);
        Ok(())
    }

    unsafe fn event_query(&self, event: EventHandle) -> Result<bool, DriverError> {
        self.unlocked();
        Ok(lock(&self.work).is_done(event))
    }

    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<(), DriverError> {
        self.unlocked();
        lock(&self.work).finish_event(event);
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        self.unlocked();
        lock(&self.work).finish_all();
        Ok(())
    }
}

fn open(limit_granules: u64) -> (DeviceArena, Arc<Model>) {
    open_on(limit_granules, Model::default())
}

/// Opens an arena whose driver's work continues after its calls.
fn open_beside_streams(limit_granules: u64) -> (DeviceArena, Arc<Model>) {
    open_on(limit_granules, Model { asynchronous: true, ..Model::default() })
}

fn open_on(limit_granules: u64, driver: Model) -> (DeviceArena, Arc<Model>) {
    let driver = Arc::new(driver);
    let config = ArenaConfig {
        limit: ByteSize::new(limit_granules * GRANULE),
        reserve: ByteSize::new(GRANULES as u64 * GRANULE),
        ..ArenaConfig::new("model")
    };
    let clock = Arc::new(ManualClock::new());
    let arena = DeviceArena::open(driver.clone(), clock, config).expect("opens");
    let known = driver.arena.set(Arc::downgrade(arena.inner()));
    assert!(known.is_ok(), "opened once");
    (arena, driver)
}

/// Allocates this many bytes and frees them. Returns `true` if there was room.
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
    arena.purge().expect("marks the ends of what was freed");
    lock(&driver.work).finish_all();
    arena.purge().expect("gives back");
    arena.validate();
    assert!(arena.snapshot().committed.is_zero());
    assert!(lock(&driver.committed).iter().all(|committed| !committed));
}

/// Runs both closures at once on an arena, and checks the arena afterwards.
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

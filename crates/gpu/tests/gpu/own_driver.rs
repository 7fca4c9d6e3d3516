//! A driver that is written outside the workspace, from the public API alone, and an arena on it.
//!
//! Its memory is the process's global allocator: a reservation is one allocation, and a commit only
//! makes its bytes zero. It counts what is committed, and refuses more than it has.
//!
//! Invariant: a test ends with nothing committed and nothing reserved.
#![expect(unsafe_code, reason = "a driver's calls take memory away")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock as _, ManualClock};
use lowtide_gpu::driver::{Backend, Capabilities, DeviceAddress, Driver, DriverError};
use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, Region};

const GRANULE: ByteSize = ByteSize::kib(64);

/// The driver.
#[derive(Debug)]
struct Slab {
    capacity: u64,
    reserved: AtomicU64,
    committed: AtomicU64,
}

impl Slab {
    fn new(capacity: ByteSize) -> Self {
        let (reserved, committed) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { capacity: capacity.get(), reserved, committed }
    }

    fn assert_empty(&self) {
        let left = [&self.reserved, &self.committed].map(|bytes| bytes.load(Ordering::Relaxed));
        assert_eq!(left, [0, 0]);
    }
}

fn layout_of(size: ByteSize) -> Result<Layout, DriverError> {
    let layout = size.as_usize().zip(GRANULE.as_usize());
    let layout = layout.and_then(|(size, align)| Layout::from_size_align(size, align).ok());
    layout.ok_or(DriverError::OutOfMemory { call: "alloc", requested: size })
}

fn pointer(at: DeviceAddress) -> *mut u8 {
    ptr::with_exposed_provenance_mut(usize::try_from(at.get()).expect("an address of ours"))
}

// SAFETY: a reservation is an allocation of its own, which stays until `unreserve`. Its bytes are
// initialised from the start, so that a committed range can be read and written, and only `commit`
// and `copy` write to them. All work is complete when its call returns.
unsafe impl Driver for Slab {
    fn backend(&self) -> Backend {
        Backend::Custom
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            virtual_memory: true,
            host_access: true,
            host_backed: true,
            unified: false,
            remap: false,
            asynchronous: false,
            page_locked: false,
            handles: false,
            granularity: GRANULE,
        }
    }

    fn reserve(&self, size: ByteSize) -> Result<DeviceAddress, DriverError> {
        let layout = layout_of(size)?;
        // SAFETY: the size is not zero (contract of `Driver`).
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return Err(DriverError::OutOfMemory { call: "alloc", requested: size });
        }
        self.reserved.fetch_add(size.get(), Ordering::Relaxed);
        Ok(DeviceAddress::new(start.expose_provenance() as u64))
    }

    unsafe fn unreserve(&self, at: DeviceAddress, size: ByteSize) -> Result<(), DriverError> {
        let layout = layout_of(size)?;
        self.reserved.fetch_sub(size.get(), Ordering::Relaxed);
        // SAFETY: a whole reservation, so an allocation of `reserve` with this layout, which
        // nothing uses any more (contract of this call).
        unsafe { dealloc(pointer(at), layout) };
        Ok(())
    }

    unsafe fn commit(
        &self,
        at: DeviceAddress,
        size: ByteSize,
        _: ByteSize,
    ) -> Result<(), DriverError> {
        let before = self.committed.fetch_add(size.get(), Ordering::Relaxed);
        if before + size.get() > self.capacity {
            self.committed.fetch_sub(size.get(), Ordering::Relaxed);
            return Err(DriverError::OutOfMemory { call: "commit", requested: size });
        }
        let length = layout_of(size)?.size();
        // SAFETY: inside a reservation, and bare: nothing uses it (contract of this call).
        unsafe { ptr::write_bytes(pointer(at), 0, length) };
        Ok(())
    }

    unsafe fn decommit(
        &self,
        _: DeviceAddress,
        size: ByteSize,
        _: ByteSize,
    ) -> Result<(), DriverError> {
        self.committed.fetch_sub(size.get(), Ordering::Relaxed);
        Ok(())
    }

    unsafe fn copy(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
    ) -> Result<(), DriverError> {
        let length = size.as_usize().unwrap_or(0);
        // SAFETY: two committed parts that do not overlap and that nothing else uses (contract of
        // this call).
        unsafe { ptr::copy_nonoverlapping(pointer(from), pointer(to), length) };
        Ok(())
    }

    fn host_pointer(&self, at: DeviceAddress) -> Option<NonNull<u8>> {
        NonNull::new(pointer(at))
    }
}

fn open(capacity: ByteSize) -> (DeviceArena, Arc<Slab>, Arc<ManualClock>) {
    let (driver, clock) = (Arc::new(Slab::new(capacity)), Arc::new(ManualClock::new()));
    let config = ArenaConfig {
        limit: ByteSize::mib(1),
        reserve: ByteSize::mib(2),
        ..ArenaConfig::new("outside")
    };
    let arena = DeviceArena::open(driver.clone(), clock.clone(), config).expect("opens");
    (arena, driver, clock)
}

#[test]
fn an_arena_runs_on_a_driver_from_outside_the_workspace() {
    let (arena, driver, clock) = open(ByteSize::mib(1));
    assert_eq!(arena.snapshot().backend.name(), "custom");
    let mut buffer = arena.alloc::<u32>(1000, Region::Dynamic).expect("room");
    let lease = arena.enter().expect("a lease");
    let numbers: Vec<u32> = (0..1000).collect();
    buffer.slice_mut(&lease).expect("host access").copy_from_slice(&numbers);
    let beside = arena.alloc::<u32>(100, Region::Dynamic).expect("room");
    drop(lease);
    buffer.resize(100_000).expect("moved"); // a copy by the driver
    let lease = arena.enter().expect("a lease");
    assert_eq!(buffer.slice(&lease).expect("host access")[..1000], numbers);
    drop((buffer, beside, lease));
    assert!(driver.committed.load(Ordering::Relaxed) > 0, "idle memory stays for some time");
    while !arena.glance().idle.is_zero() {
        arena.decay(clock.now()).expect("decays");
        let due = arena.next_decay();
        clock.advance(due - clock.now());
    }
    drop(arena);
    driver.assert_empty();
}

#[test]
fn an_error_of_a_driver_from_outside_the_workspace_is_the_arenas() {
    let (arena, driver, _) = open(ByteSize::kib(256));
    let refused = arena.alloc::<u8>(512 << 10, Region::Stable).expect_err("the driver has less");
    assert!(matches!(refused, DeviceError::OutOfMemory { .. }), "{refused}");
    drop(arena.alloc::<u8>(256 << 10, Region::Stable).expect("all of it"));
    drop(arena);
    driver.assert_empty();
}

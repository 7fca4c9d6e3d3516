//! The open allocators of the process: handles and arenas of devices.
//!
//! A call looks its handle and device up under one read lock, and clones one reference. A device is
//! opened with the lock released, by the first allocation there. A handle has a generation, so that
//! one of a closed allocator is recognized. Streams are not kept here: an arena knows a stream
//! while a live block uses it.
//!
//! Invariants: no driver call and no call of an arena under the lock of the state; devices are
//! opened, and allocators closed, by one thread at a time; at most [`ALLOCATORS_MAX`] allocators
//! and [`DEVICES_MAX`] devices.
#![expect(unsafe_code, reason = "a fork handler is installed by a C call")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};

use lowtide_core::sync::lock;
use lowtide_gpu::{DeviceArena, DeviceError, HostDriver};
use lowtide_gpu_driver::cuda::{CudaDriver, CudaOptions, DeviceChoice};
use lowtide_gpu_driver::{DeviceAddress, Driver, Guarded, StreamHandle};
use spin::Yield;
use spin::rwlock::RwLock;

use crate::decay;
use crate::failure::{Failure, Outcome, Status};
use crate::options::Config;

/// The most allocators that are open at once. A guess: a process has one for each engine.
pub(crate) const ALLOCATORS_MAX: usize = 64;

/// The most devices of an allocator, by number. PyTorch's limit (`C10_COMPILE_TIME_MAX_GPUS`) is
/// 120; machines have 16.
pub(crate) const DEVICES_MAX: usize = 128;

/// Bits of a handle for the slot of its allocator.
const SLOT_BITS: u32 = ALLOCATORS_MAX.trailing_zeros();
const _: () = assert!(ALLOCATORS_MAX.is_power_of_two());

/// A stream, as a call names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamRef(u64);

impl StreamRef {
    /// Any stream: a use that only a wait for the whole device proves complete.
    pub(crate) const ANY: Self = Self(u64::MAX);

    pub(crate) const fn of(handle: u64) -> Self {
        match StreamHandle::of_cuda(handle) {
            Some(stream) => Self(stream.get()),
            None => Self::ANY,
        }
    }

    /// Returns the handle; `None` for any stream.
    pub(crate) fn handle(self) -> Option<StreamHandle> {
        (self != Self::ANY).then_some(StreamHandle::new(self.0))
    }
}

/// An open device.
#[derive(Debug)]
pub(crate) struct OpenDevice {
    pub(crate) arena: DeviceArena,
    pub(crate) driver: Arc<dyn Driver>,
}

/// A place for an allocator; without one there is no configuration.
#[derive(Debug)]
struct AllocatorSlot {
    /// The handle of its allocator, or of the last one. Its upper 58 bits are a generation, which
    /// grows with each allocator and does not come round.
    handle: u64,
    config: Option<Arc<Config>>,
    /// By number, `None` if not open; empty without an allocator.
    devices: Vec<Option<Arc<OpenDevice>>>,
}

#[derive(Debug)]
struct RegistryState {
    slots: [AllocatorSlot; ALLOCATORS_MAX],
}

/// Readers hold it for a lookup, writers for the change of a list. So a thread spins instead of
/// sleeping, which a reader would pay for with each call.
static STATE: RwLock<RegistryState, Yield> =
    RwLock::new(RegistryState { slots: [const { AllocatorSlot::EMPTY }; ALLOCATORS_MAX] });

/// The handle of the default allocator; 0 for none. Changes with the state locked.
static DEFAULT: AtomicU64 = AtomicU64::new(0);

/// Held while a device is opened or an allocator is closed, across calls of the driver: so that a
/// device is opened once, and none is opened while its allocator is closed.
static CHANGES: Mutex<()> = Mutex::new(());

/// Set in the child of a fork after the first allocator was opened.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    // An atomic store is async-signal-safe, as a handler in the child of a threaded process must be
    // (POSIX.1-2017, pthread_atfork, rationale).
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Fails in the child of a fork, in which a lock may be held by a thread that does not exist there.
#[inline(always)]
fn check_here() -> Outcome<()> {
    if IS_CHILD.load(Ordering::Relaxed) { Err(forked()) } else { Ok(()) }
}

#[cold]
fn forked() -> Box<Failure> {
    Failure::Forked.into()
}

impl AllocatorSlot {
    const EMPTY: Self = Self { handle: 0, config: None, devices: Vec::new() };
}

impl RegistryState {
    fn find(&self, handle: u64) -> Outcome<&AllocatorSlot> {
        let slot = &self.slots[slot_of(handle)];
        let is_open = slot.handle == handle && slot.config.is_some();
        if is_open { Ok(slot) } else { Err(no_such_handle(handle)) }
    }

    fn find_mut(&mut self, handle: u64) -> Outcome<&mut AllocatorSlot> {
        self.find(handle)?;
        Ok(&mut self.slots[slot_of(handle)])
    }

    /// Returns the device with this number if it is open.
    fn device(&self, handle: u64, number: usize) -> Outcome<Option<&Arc<OpenDevice>>> {
        Ok(self.find(handle)?.devices.get(number).and_then(Option::as_ref))
    }
}

#[inline]
const fn slot_of(handle: u64) -> usize {
    // Masked to `ALLOCATORS_MAX`, so it fits.
    #[expect(clippy::cast_possible_truncation, reason = "six bits")]
    {
        (handle & (ALLOCATORS_MAX as u64 - 1)) as usize
    }
}

#[cold]
fn no_such_handle(handle: u64) -> Box<Failure> {
    Failure::InvalidHandle { handle }.into()
}

#[inline]
pub(crate) fn number_of(device: i32) -> Outcome<usize> {
    let number = usize::try_from(device).ok().filter(|&number| number < DEVICES_MAX);
    number.ok_or_else(|| Failure::InvalidDevice { device, last: DEVICES_MAX - 1 }.into())
}

/// Opens an allocator; returns its handle. Opens no device.
pub(crate) fn open(config: Config) -> Outcome<u64> {
    static REGISTER: Once = Once::new();
    check_here()?;
    REGISTER.call_once(|| {
        // SAFETY: null handlers are accepted; `in_child` has the required type and static lifetime,
        // and does only an atomic store. A failure (ENOMEM) leaves forks undetected here.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    decay::start()?;
    let mut state = STATE.write();
    let Some(at) = state.slots.iter().position(|slot| slot.config.is_none()) else {
        let (count, hint) = (ALLOCATORS_MAX, "close those that are not used");
        return Err(Failure::TooMany { count, what: "allocators", hint }.into());
    };
    let slot = &mut state.slots[at];
    slot.handle = (((slot.handle >> SLOT_BITS) + 1) << SLOT_BITS) | at as u64;
    slot.config = Some(Arc::new(config));
    Ok(slot.handle)
}

/// Makes an allocator the default one of the process.
pub(crate) fn set_default(handle: u64) -> Outcome<()> {
    check_here()?;
    let state = STATE.write();
    state.find(handle)?;
    if ![0, handle].contains(&DEFAULT.load(Ordering::Relaxed)) {
        return Err(Failure::DefaultIsSet.into());
    }
    DEFAULT.store(handle, Ordering::Relaxed);
    Ok(())
}

/// Returns the handle of the default allocator. If there is none, opens one with the default
/// options.
#[inline(always)]
pub(crate) fn default_handle() -> Outcome<u64> {
    check_here()?;
    match DEFAULT.load(Ordering::Relaxed) {
        0 => make_default(),
        found => Ok(found),
    }
}

#[cold]
fn make_default() -> Outcome<u64> {
    let _change = lock(&CHANGES);
    let found = DEFAULT.load(Ordering::Relaxed);
    if found != 0 {
        return Ok(found);
    }
    let made = open(Config::default())?;
    match set_default(made) {
        // Another thread has set one meanwhile.
        Err(failure) if failure.status() == Status::DefaultIsSet => {
            drop(forget(made));
            Ok(DEFAULT.load(Ordering::Relaxed))
        }
        outcome => outcome.map(|()| made),
    }
}

/// Takes an allocator out; its handle is not valid any more.
fn forget(handle: u64) -> Outcome<Vec<Option<Arc<OpenDevice>>>> {
    let mut state = STATE.write();
    let slot = state.find_mut(handle)?;
    slot.config = None;
    let devices = std::mem::take(&mut slot.devices);
    if DEFAULT.load(Ordering::Relaxed) == handle {
        DEFAULT.store(0, Ordering::Relaxed);
    }
    Ok(devices)
}

/// Closes an allocator that has no live block, and waits for the work of its freed blocks.
pub(crate) fn close(handle: u64) -> Outcome<()> {
    check_here()?;
    let _change = lock(&CHANGES);
    let devices = devices(handle)?;
    // Before the first is closed, so that usually all are, or none.
    for (_, arena) in &devices {
        let figures = arena.snapshot();
        let count = figures.allocs_total - figures.frees_total;
        if count > 0 {
            let (arena, bytes) = (arena.name().to_owned(), figures.live);
            return Err(DeviceError::LiveBlocks { arena, count, bytes }.into());
        }
    }
    for (_, arena) in devices {
        arena.close()?;
    }
    let taken = forget(handle)?;
    decay::wait_for_pass();
    drop(taken);
    Ok(())
}

/// Returns the open devices of an allocator, with their numbers.
pub(crate) fn devices(handle: u64) -> Outcome<Vec<(i32, DeviceArena)>> {
    check_here()?;
    let state = STATE.read();
    let devices = state.find(handle)?.devices.iter().zip(0..);
    let opened = |(device, number): (&Option<Arc<OpenDevice>>, i32)| {
        Some((number, device.as_ref()?.arena.clone()))
    };
    Ok(devices.filter_map(opened).collect())
}

/// Returns every arena of the process.
pub(crate) fn arenas() -> Vec<DeviceArena> {
    let state = STATE.read();
    let devices = state.slots.iter().flat_map(|slot| &slot.devices).flatten();
    devices.map(|device| device.arena.clone()).collect()
}

/// Returns a device; opens it if it is not open.
#[inline(always)]
pub(crate) fn device(handle: u64, device: i32) -> Outcome<Arc<OpenDevice>> {
    check_here()?;
    match known(handle, device) {
        Some(device) => Ok(device),
        None => slow_device(handle, device),
    }
}

#[cold]
fn slow_device(handle: u64, device: i32) -> Outcome<Arc<OpenDevice>> {
    let number = number_of(device)?;
    open_device(handle, number)?;
    let found = STATE.read().device(handle, number)?.cloned();
    found.ok_or_else(|| no_such_handle(handle))
}

/// As [`device`], for a block that exists: its device is open.
#[inline(always)]
pub(crate) fn device_of(handle: u64, device: i32, at: DeviceAddress) -> Outcome<Arc<OpenDevice>> {
    check_here()?;
    match known(handle, device) {
        Some(device) => Ok(device),
        None => opened(handle, device)?.ok_or_else(|| Failure::NoSuchArena { device, at }.into()),
    }
}

/// Returns a device if it is open.
#[cold]
pub(crate) fn opened(handle: u64, device: i32) -> Outcome<Option<Arc<OpenDevice>>> {
    check_here()?;
    let number = number_of(device)?;
    Ok(STATE.read().device(handle, number)?.cloned())
}

/// Returns an open device; `None` if it is not open, or the lock is taken.
#[inline(always)]
fn known(handle: u64, device: i32) -> Option<Arc<OpenDevice>> {
    let state = STATE.try_read()?;
    let slot = Some(&state.slots[slot_of(handle)]).filter(|slot| slot.handle == handle)?;
    #[expect(clippy::cast_sign_loss, reason = "a number below zero is beyond all devices")]
    slot.devices.get(device as usize)?.clone()
}

fn is_open(handle: u64, number: usize) -> Outcome<bool> {
    Ok(STATE.read().device(handle, number)?.is_some())
}

fn open_device(handle: u64, number: usize) -> Outcome<()> {
    if is_open(handle, number)? {
        return Ok(());
    }
    let _change = lock(&CHANGES);
    if is_open(handle, number)? {
        return Ok(());
    }
    let config = STATE.read().find(handle)?.config.clone().ok_or_else(|| no_such_handle(handle))?;
    let driver: Arc<dyn Driver> = if config.is_host {
        Arc::new(HostDriver::new())
    } else {
        let ordinal = u32::try_from(number).unwrap_or(u32::MAX);
        let device = DeviceChoice::Ordinal(ordinal);
        let driver = CudaDriver::open(CudaOptions { device, ..CudaOptions::default() });
        let driver = driver.map_err(|error| Box::new(Failure::Open(error)))?;
        Arc::new(Guarded::new(Arc::new(driver)))
    };
    let arena = DeviceArena::open(Arc::clone(&driver), decay::clock(), config.of_device(number))?;
    let mut state = STATE.write();
    let devices = &mut state.find_mut(handle)?.devices;
    if devices.len() <= number {
        devices.resize(number + 1, None);
    }
    devices[number] = Some(Arc::new(OpenDevice { arena, driver }));
    drop(state);
    decay::wake();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_of_cuda_with_a_meaning_of_their_own_are_known() {
        assert_eq!([0, 1, 3, 1 << 63].map(|handle| StreamRef::of(handle).0), [1, 1, 3, 1 << 63]);
        // Another stream in each thread, and the one for any.
        assert_eq!([2, u64::MAX].map(StreamRef::of), [StreamRef::ANY; 2]);
    }
}

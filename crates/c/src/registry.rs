//! The open allocators of the process: handles, arenas of devices, lanes of streams.
//!
//! A call looks its handle, device and stream up under one read lock, and clones one reference.
//! What is missing is made with the lock released: a device on the first allocation there, a lane
//! on the first call with its stream. A handle has a generation, so that one of a closed allocator
//! is recognized.
//!
//! Invariants: no driver call and no call of an arena under the lock of the state; devices are
//! opened, and allocators closed, by one thread at a time; at most [`ALLOCATORS_MAX`] allocators,
//! [`DEVICES_MAX`] devices and [`STREAMS_MAX`] streams of a device.
#![expect(unsafe_code, reason = "only the caller knows that a stream exists")]

use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use lowtide_core::fork::Birth;
use lowtide_gpu::{DeviceArena, DeviceError, HostDriver, Lane};
use lowtide_gpu_driver::cuda::{CudaDriver, CudaOptions, DeviceChoice};
use lowtide_gpu_driver::{DeviceAddress, Driver, StreamHandle};

use crate::decay;
use crate::failure::Failure;
use crate::options::Config;

/// The most allocators that are open at once. A guess: a process has one for each engine.
pub(crate) const ALLOCATORS_MAX: usize = 64;

/// The most devices of an allocator, by number. PyTorch's limit (`C10_COMPILE_TIME_MAX_GPUS`) is
/// 120; machines have 16.
pub(crate) const DEVICES_MAX: usize = 128;

/// The most streams of a device. A guess: far above PyTorch's 32 of each priority; a program that
/// reaches it does not call `lowtide_end_stream`.
pub(crate) const STREAMS_MAX: usize = 4096;

/// Bits of a handle for the slot of its allocator.
const SLOT_BITS: u32 = ALLOCATORS_MAX.trailing_zeros();
const _: () = assert!(ALLOCATORS_MAX.is_power_of_two());

/// A stream, as a call names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stream(u64);

impl Stream {
    /// Any stream: a use that only a wait for the whole device proves complete.
    pub(crate) const ANY: Self = Self(u64::MAX);

    /// The handles of CUDA with a meaning of their own: 0 and 1 are the legacy default stream, 2 is
    /// another stream in each thread, which an arena cannot tell apart.
    pub(crate) const fn of(handle: u64) -> Self {
        match handle {
            0 | 1 => Self(StreamHandle::LEGACY.get()),
            2 => Self::ANY,
            handle => Self(handle),
        }
    }
}

/// An arena, and the lane of a stream on it; none for [`Stream::ANY`].
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) arena: DeviceArena,
    pub(crate) lane: Option<Lane>,
}

#[derive(Debug)]
struct Device {
    driver: Arc<dyn Driver>,
    arena: DeviceArena,
    /// In the order of streams.
    routes: Vec<(Stream, Arc<Route>)>,
}

impl Device {
    #[inline]
    fn route(&self, stream: Stream) -> Result<&Arc<Route>, usize> {
        let found = self.routes.binary_search_by_key(&stream, |(of, _)| *of);
        found.map(|at| &self.routes[at].1)
    }
}

#[derive(Debug)]
struct Allocator {
    config: Arc<Config>,
    /// By number.
    devices: Vec<Option<Device>>,
}

#[derive(Debug)]
struct Slot {
    /// From 1, and one more with each allocator: 58 bits, which do not come round.
    generation: u64,
    allocator: Option<Allocator>,
}

#[derive(Debug)]
struct State {
    slots: Vec<Slot>,
    /// The handle of the default allocator; 0 for none.
    default: u64,
}

static STATE: RwLock<State> = RwLock::new(State { slots: Vec::new(), default: 0 });

/// Held while a device is opened or an allocator is closed, across calls of the driver: so that a
/// device is opened once, and none is opened while its allocator is closed.
static CHANGES: Mutex<()> = Mutex::new(());

fn read() -> RwLockReadGuard<'static, State> {
    STATE.read().unwrap_or_else(PoisonError::into_inner)
}

fn write() -> RwLockWriteGuard<'static, State> {
    STATE.write().unwrap_or_else(PoisonError::into_inner)
}

/// Fails in the child of a fork, in which a lock may be held by a thread that does not exist there.
#[inline]
fn check_here() -> Result<(), Failure> {
    static BIRTH: OnceLock<Birth> = OnceLock::new();
    if BIRTH.get_or_init(Birth::now).is_here() { Ok(()) } else { Err(Failure::Forked) }
}

impl State {
    #[inline]
    fn find(&self, handle: u64) -> Result<&Allocator, Failure> {
        let slot = self.slots.get(slot_of(handle));
        let slot = slot.filter(|slot| slot.generation == handle >> SLOT_BITS);
        let found = slot.and_then(|slot| slot.allocator.as_ref());
        found.ok_or(Failure::InvalidHandle { handle })
    }

    fn find_mut(&mut self, handle: u64) -> Result<&mut Allocator, Failure> {
        self.find(handle)?;
        let slot = self.slots.get_mut(slot_of(handle));
        let found = slot.and_then(|slot| slot.allocator.as_mut());
        found.ok_or(Failure::InvalidHandle { handle })
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

fn no_such_device(device: i32) -> Failure {
    Failure::InvalidDevice { device, last: DEVICES_MAX - 1 }
}

#[inline]
pub(crate) fn number_of(device: i32) -> Result<usize, Failure> {
    let number = usize::try_from(device).ok().filter(|&number| number < DEVICES_MAX);
    number.ok_or_else(|| no_such_device(device))
}

/// Opens an allocator; returns its handle. Opens no device.
pub(crate) fn open(config: Config) -> Result<u64, Failure> {
    check_here()?;
    decay::start()?;
    let mut state = write();
    let free = state.slots.iter().position(|slot| slot.allocator.is_none());
    let at = free.unwrap_or(state.slots.len());
    if at >= ALLOCATORS_MAX {
        let hint = "close those that are not used";
        return Err(Failure::TooMany { count: at, what: "allocators", hint });
    }
    if at == state.slots.len() {
        state.slots.push(Slot { generation: 0, allocator: None });
    }
    let slot = &mut state.slots[at];
    slot.generation += 1;
    slot.allocator = Some(Allocator { config: Arc::new(config), devices: Vec::new() });
    Ok((slot.generation << SLOT_BITS) | at as u64)
}

/// Makes an allocator the default one of the process.
pub(crate) fn set_default(handle: u64) -> Result<(), Failure> {
    check_here()?;
    let mut state = write();
    state.find(handle)?;
    if state.default != 0 && state.default != handle {
        return Err(Failure::DefaultIsSet);
    }
    state.default = handle;
    Ok(())
}

/// Returns the handle of the default allocator. If there is none, opens one with the default
/// options.
pub(crate) fn default_handle() -> Result<u64, Failure> {
    check_here()?;
    let found = read().default;
    if found != 0 {
        return Ok(found);
    }
    let _change = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    let found = read().default;
    if found != 0 {
        return Ok(found);
    }
    let made = open(Config::default())?;
    match set_default(made) {
        // Another thread has set one meanwhile.
        Err(Failure::DefaultIsSet) => {
            drop(forget(made));
            Ok(read().default)
        }
        outcome => outcome.map(|()| made),
    }
}

/// Takes an allocator out; its handle is not valid any more.
fn forget(handle: u64) -> Result<Allocator, Failure> {
    let mut state = write();
    state.find(handle)?;
    if state.default == handle {
        state.default = 0;
    }
    let taken = state.slots.get_mut(slot_of(handle)).and_then(|slot| slot.allocator.take());
    taken.ok_or(Failure::InvalidHandle { handle })
}

/// Closes an allocator that has no live block, and waits for the work of its freed blocks.
pub(crate) fn close(handle: u64) -> Result<(), Failure> {
    check_here()?;
    let _change = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
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
pub(crate) fn devices(handle: u64) -> Result<Vec<(i32, DeviceArena)>, Failure> {
    check_here()?;
    let state = read();
    let devices = state.find(handle)?.devices.iter().zip(0..);
    Ok(devices
        .filter_map(|(device, number)| Some((number, device.as_ref()?.arena.clone())))
        .collect())
}

/// Returns every arena of the process.
pub(crate) fn arenas() -> Vec<DeviceArena> {
    let state = read();
    let allocators = state.slots.iter().filter_map(|slot| slot.allocator.as_ref());
    let devices = allocators.flat_map(|allocator| allocator.devices.iter().flatten());
    devices.map(|device| device.arena.clone()).collect()
}

/// Returns the arena of a device and its driver; opens the device if it is not open.
pub(crate) fn device(handle: u64, device: i32) -> Result<(DeviceArena, Arc<dyn Driver>), Failure> {
    check_here()?;
    let number = number_of(device)?;
    open_device(handle, number)?;
    let state = read();
    let found = state.find(handle)?.devices.get(number).and_then(Option::as_ref);
    let found = found.map(|device| (device.arena.clone(), Arc::clone(&device.driver)));
    found.ok_or(Failure::InvalidHandle { handle })
}

/// Returns the way to a stream of a device for an allocation; opens the device and makes the lane
/// if they are not there.
#[inline]
pub(crate) fn route(handle: u64, device: i32, stream: Stream) -> Result<Arc<Route>, Failure> {
    check_here()?;
    let number = number_of(device)?;
    if let Some(route) = known_route(handle, number, stream)? {
        return Ok(route);
    }
    open_device(handle, number)?;
    open_route(handle, number, stream)
}

/// As [`route`], for a block that exists: its device is open.
#[inline]
pub(crate) fn route_of(
    handle: u64,
    device: i32,
    stream: Stream,
    at: DeviceAddress,
) -> Result<Arc<Route>, Failure> {
    check_here()?;
    let number = number_of(device)?;
    if let Some(route) = known_route(handle, number, stream)? {
        return Ok(route);
    }
    if !is_open(handle, number)? {
        return Err(Failure::NoSuchArena { device, at });
    }
    open_route(handle, number, stream)
}

#[inline]
fn known_route(handle: u64, number: usize, stream: Stream) -> Result<Option<Arc<Route>>, Failure> {
    let state = read();
    let device = state.find(handle)?.devices.get(number).and_then(Option::as_ref);
    Ok(device.and_then(|device| device.route(stream).ok()).cloned())
}

fn is_open(handle: u64, number: usize) -> Result<bool, Failure> {
    Ok(read().find(handle)?.devices.get(number).is_some_and(Option::is_some))
}

#[cold]
fn open_device(handle: u64, number: usize) -> Result<(), Failure> {
    if is_open(handle, number)? {
        return Ok(());
    }
    let _change = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    if is_open(handle, number)? {
        return Ok(());
    }
    let config = Arc::clone(&read().find(handle)?.config);
    let driver: Arc<dyn Driver> = if config.is_host {
        Arc::new(HostDriver::new())
    } else {
        let ordinal = u32::try_from(number).unwrap_or(u32::MAX);
        let device = DeviceChoice::Ordinal(ordinal);
        Arc::new(CudaDriver::open(CudaOptions { device, ..CudaOptions::default() })?)
    };
    let arena = DeviceArena::open(Arc::clone(&driver), decay::clock(), config.of_device(number))?;
    let mut state = write();
    let devices = &mut state.find_mut(handle)?.devices;
    if devices.len() <= number {
        devices.resize_with(number + 1, || None);
    }
    devices[number] = Some(Device { driver, arena, routes: Vec::new() });
    drop(state);
    decay::wake();
    Ok(())
}

#[cold]
fn open_route(handle: u64, number: usize, stream: Stream) -> Result<Arc<Route>, Failure> {
    let arena = {
        let state = read();
        let device = state.find(handle)?.devices.get(number).and_then(Option::as_ref);
        let gone = || Failure::InvalidHandle { handle };
        device.map(|device| device.arena.clone()).ok_or_else(gone)?
    };
    let lane = if stream == Stream::ANY {
        None
    } else {
        // SAFETY: the caller of the C function vouches for the stream, until `lowtide_end_stream`
        // drops the lane or the allocator is closed.
        Some(unsafe { arena.lane(StreamHandle::new(stream.0)) }?)
    };
    let made = Arc::new(Route { arena, lane });
    let mut state = write();
    let device = state.find_mut(handle)?.devices.get_mut(number).and_then(Option::as_mut);
    let Some(device) = device else { return Ok(made) };
    let at = match device.route(stream) {
        // Another thread was faster.
        Ok(known) => {
            let known = Arc::clone(known);
            drop(state);
            return Ok(known);
        }
        Err(at) => at,
    };
    if device.routes.len() >= STREAMS_MAX {
        drop(state);
        let hint = "call lowtide_end_stream before a stream is destroyed";
        return Err(Failure::TooMany { count: STREAMS_MAX, what: "streams", hint });
    }
    device.routes.insert(at, (stream, Arc::clone(&made)));
    Ok(made)
}

/// Forgets the lane of a stream, if there is one; its drop records an event and waits for nothing.
pub(crate) fn end_stream(handle: u64, device: i32, stream: Stream) -> Result<(), Failure> {
    check_here()?;
    let number = number_of(device)?;
    let mut state = write();
    let device = state.find_mut(handle)?.devices.get_mut(number).and_then(Option::as_mut);
    let ended = device.and_then(|device| {
        let at = device.routes.binary_search_by_key(&stream, |(of, _)| *of).ok()?;
        Some(device.routes.remove(at))
    });
    drop(state);
    drop(ended);
    Ok(())
}

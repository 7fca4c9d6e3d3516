//! The backend order: virtual memory, a pool, plain memory. The first that passes a trial is used.
//!
//! Device attributes are not trusted: some MIG instances report virtual memory and then refuse a
//! call, and some refuse pools other than their own. One unit of memory is allocated, written, read
//! back and released before an arena is built on it. Each trial is released before the next one
//! begins.
//!
//! Invariant: `climb = Ok => a round trip through that memory returned the data written`.
#![expect(unsafe_code, reason = "copying from and to page-locked memory")]

use std::collections::VecDeque;

use super::abi::{ATTRIBUTE_MANAGED, ATTRIBUTE_POOLS, ATTRIBUTE_RDMA, ATTRIBUTE_VIRTUAL_MEMORY};
use super::calls::{Answer, Calls};
use super::context::DeviceContext;
use super::device::CudaDevice;
use super::driver::CudaDriver;
use super::memory::{Memory, Source};
use super::open::{CudaOptions, DeviceChoice, MemoryKind, choose};
use super::segments::{Pool, UNIT, UNIT_MIN};
use super::stores::Stores;
use super::vmm::Mapping;
use crate::{Backend, DriverError};
use lowtide_core::bytes::ByteSize;
use lowtide_core::log;

/// The backends, the best first.
const LADDER: [Backend; 3] = [Backend::CudaVirtualMemory, Backend::CudaPool, Backend::CudaPlain];

/// The expected backends, in messages.
const CUDA_BACKEND: &str = "a CUDA backend: cuda_virtual_memory, cuda_pool or cuda_plain";

/// The first driver that limits a pool: CUDA 12.2.
pub(super) const POOL_LIMITS: u32 = 12_020;

/// A backend that the driver's functions and the device's attributes allow.
enum Way {
    Memory(Memory),
    /// A pool with this limit, and the unit of segment sizes.
    Pool(Option<ByteSize>, ByteSize),
}

/// A device for which a backend is being selected.
struct Ground {
    device: CudaDevice,
    /// The device's handle.
    number: i32,
    driver_version: u32,
    options: CudaOptions,
}

/// Selects the first backend that works, or the requested one. Creates no context before a backend
/// is found that may work.
pub(super) fn climb(calls: Calls, device: CudaDevice, options: CudaOptions) -> Answer<CudaDriver> {
    let (ordinal, driver_version) = (device.ordinal, calls.driver_version()?);
    let ground = Ground { number: calls.device(ordinal)?, device, driver_version, options };
    let unusable = |backend, cause| {
        let cause = Box::new(cause);
        DriverError::NoSuchBackend { backend, device: ordinal, cause }
    };
    let wanted = wanted(options)
        .map_err(|cause| unusable(options.backend.unwrap_or(Backend::CudaPlain), cause))?;
    // With a choice of backends virtual memory needs as many addresses as the device has memory.
    let addresses = Some(ground.device.memory).filter(|_| wanted.len() > 1);
    let mut queue: VecDeque<_> = wanted.into_iter().map(|it| (it, addresses)).collect();
    let (mut place, mut skipped) = (Place::Bare(calls), Vec::new());
    while let Some((backend, addresses)) = queue.pop_front() {
        let cause = match offered(place.calls(), backend, &ground) {
            Ok(way) => {
                let context = place.context(ground.number)?;
                match take(&context, way, &ground, addresses) {
                    Ok(memory) => {
                        let Ground { device, .. } = ground;
                        let stores = Stores::default();
                        return Ok(CudaDriver {
                            context,
                            device,
                            memory,
                            skipped,
                            stores,
                            driver_version,
                        });
                    }
                    Err(cause) => {
                        place = Place::Entered(context);
                        cause
                    }
                }
            }
            Err(error) if is_invalid(&error) => return Err(error),
            Err(cause) => cause,
        };
        if matches!(cause, DriverError::Addresses { .. }) {
            queue.push_back((backend, None)); // better than none
        }
        let is_lost = cause.is_context_lost();
        skipped.push((backend, cause));
        if is_lost {
            break;
        }
    }
    if options.backend.is_some()
        && let Some((backend, cause)) = skipped.pop()
    {
        return Err(unusable(backend, cause));
    }
    Err(DriverError::NoBackend { device: ordinal, skipped })
}

/// Returns `true` if the request is invalid for every backend.
const fn is_invalid(error: &DriverError) -> bool {
    matches!(
        error,
        DriverError::HandleSize { .. }
            | DriverError::PoolLimit { .. }
            | DriverError::NoPeerAccess { .. }
            | DriverError::NoRdma { .. }
            | DriverError::NoSuchDevice { .. }
    )
}

/// The object that calls are made through: the library alone, or a context.
enum Place {
    Bare(Calls),
    Entered(DeviceContext),
}

impl Place {
    const fn calls(&self) -> &Calls {
        match self {
            Self::Bare(calls) => calls,
            Self::Entered(context) => context.calls(),
        }
    }

    fn context(self, device: i32) -> Answer<DeviceContext> {
        match self {
            Self::Bare(calls) => DeviceContext::retain(calls, device),
            Self::Entered(context) => Ok(context),
        }
    }
}

/// Returns the backends to try, in order.
fn wanted(options: CudaOptions) -> Answer<Vec<Backend>> {
    let wrong = |expected| Err(DriverError::WrongBackend { expected });
    let is_shared = options.rdma || !options.peers.is_empty();
    match (options.backend, options.memory) {
        (Some(Backend::Host), _) => wrong(CUDA_BACKEND),
        (None | Some(Backend::CudaVirtualMemory), MemoryKind::Device) if is_shared => {
            Ok(vec![Backend::CudaVirtualMemory])
        }
        _ if is_shared => wrong("the backend cuda_virtual_memory for peer access and RDMA"),
        (None | Some(Backend::CudaPlain), MemoryKind::Managed) => Ok(vec![Backend::CudaPlain]),
        (Some(_), MemoryKind::Managed) => wrong("the backend cuda_plain for managed memory"),
        (Some(backend), MemoryKind::Device) => Ok(vec![backend]),
        (None, MemoryKind::Device) => Ok(LADDER.to_vec()),
    }
}

/// Checks the functions and attributes that a backend needs. Allocates nothing and needs no
/// context.
fn offered(calls: &Calls, backend: Backend, ground: &Ground) -> Answer<Way> {
    let options = ground.options;
    let has = |attribute| calls.device_attribute(attribute, ground.number).map(|it| it != 0);
    let needs = |attribute, what| match has(attribute)? {
        true => Ok(()),
        false => Err(DriverError::Unsupported { what }),
    };
    match backend {
        Backend::CudaVirtualMemory => {
            calls.table.virtual_memory()?;
            needs(ATTRIBUTE_VIRTUAL_MEMORY, "virtual memory")?;
            if options.rdma && !has(ATTRIBUTE_RDMA)? {
                return Err(DriverError::NoRdma { device: ground.device.ordinal });
            }
            let mapping = Mapping::new(calls, &accessing(calls, ground)?, options.rdma);
            let granularity = mapping.granularity(calls)?;
            let unit = unit_of(options.handle, granularity, granularity)?;
            Ok(Way::Memory(Memory::new(Source::Virtual(mapping), unit)))
        }
        Backend::CudaPool => {
            calls.table.pools()?;
            needs(ATTRIBUTE_POOLS, "memory pools")?;
            let unit = unit_of(options.handle, UNIT_MIN, UNIT)?;
            if let Some(requested) = options.pool_limit.filter(|&limit| limit < unit) {
                return Err(DriverError::PoolLimit { requested, unit });
            }
            let limit = options.pool_limit.filter(|_| ground.driver_version >= POOL_LIMITS);
            Ok(Way::Pool(limit, unit))
        }
        Backend::CudaPlain => {
            calls.table.plain()?;
            let is_managed = options.memory == MemoryKind::Managed;
            if is_managed {
                calls.table.managed()?;
                needs(ATTRIBUTE_MANAGED, "managed memory")?;
            }
            let unit = unit_of(options.handle, UNIT_MIN, UNIT)?;
            Ok(Way::Memory(Memory::new(Source::Plain { is_managed }, unit)))
        }
        Backend::Host | Backend::PinnedHost | Backend::Custom => {
            Err(DriverError::WrongBackend { expected: CUDA_BACKEND })
        }
    }
}

/// Returns the handles of the device and of the peers that are to access its memory.
fn accessing(calls: &Calls, ground: &Ground) -> Answer<Vec<i32>> {
    let device = ground.device.ordinal;
    let mut accessing = vec![ground.number];
    for peer in ground.options.peers.ordinals().filter(|&peer| peer != device) {
        let choice = DeviceChoice::Ordinal(peer);
        let number = calls.device(choose(calls, choice)?.ordinal)?;
        if calls.can_access(number, ground.number)? == 0 {
            return Err(DriverError::NoPeerAccess { device, peer });
        }
        accessing.push(number);
    }
    Ok(accessing)
}

/// Returns the unit in which memory is allocated.
fn unit_of(asked: Option<ByteSize>, granularity: ByteSize, usual: ByteSize) -> Answer<ByteSize> {
    let requested = asked.unwrap_or(usual);
    if requested < granularity || !requested.get().is_power_of_two() {
        return Err(DriverError::HandleSize { requested, granularity });
    }
    Ok(requested)
}

/// Opens a backend and tries it once; virtual memory only if each region of an arena can have this
/// many addresses.
fn take(
    context: &DeviceContext,
    way: Way,
    ground: &Ground,
    addresses: Option<ByteSize>,
) -> Answer<Memory> {
    let (limit, unit) = match way {
        Way::Memory(memory) => {
            if let Some(of_region) = addresses.filter(|_| memory.is_virtual()) {
                check_addresses(context, &memory, of_region)?;
            }
            return tried(context, memory);
        }
        Way::Pool(limit, unit) => (limit, unit),
    };
    let tried = |pool: Answer<Pool>| tried(context, Memory::new(Source::Pool(pool?), unit));
    let own = tried(context.call(|calls| Pool::create(calls, ground.number, limit)));
    own.or_else(|cause| {
        if cause.is_context_lost() || cause.is_out_of_memory() {
            return Err(cause); // another pool has no more memory either
        }
        let shared = tried(context.call(|calls| Pool::of_device(calls, ground.number)));
        let Ok(memory) = shared else { return Err(cause) };
        log!(info, %cause, "own CUDA pool not usable, using the pool of the device");
        Ok(memory)
    })
}

/// Reserves addresses for both regions of an arena, with what a region has beyond its blocks, and
/// releases them.
fn check_addresses(context: &DeviceContext, memory: &Memory, of_region: ByteSize) -> Answer {
    let size = of_region.saturating_add(ByteSize::new(of_region.get() / 8));
    let size = size.next_multiple_of(memory.unit).unwrap_or(size);
    let reserved = context.call(|calls| {
        let reserved = [(); 2].map(|()| memory.reserve(calls, size));
        for &at in reserved.iter().flatten() {
            memory.unreserve(calls, at, size)?;
        }
        Ok(reserved)
    })?;
    reserved.into_iter().try_for_each(|at| match at {
        Err(error) if error.is_out_of_memory() => Err(DriverError::Addresses { needed: size }),
        at => at.map(drop),
    })
}

/// Returns a private pool that passed a trial.
pub(super) fn try_pool(
    context: &DeviceContext,
    device: i32,
    limit: Option<ByteSize>,
) -> Answer<Pool> {
    let pool = context.call(|calls| Pool::create(calls, device, limit))?;
    tried(context, Memory::new(Source::Pool(pool), UNIT_MIN)).map(|_| pool)
}

/// Returns the memory if it passes a round trip; releases it otherwise.
fn tried(context: &DeviceContext, memory: Memory) -> Answer<Memory> {
    match round_trip(context, &memory) {
        Ok(()) => Ok(memory),
        Err(cause) => {
            log_undone(memory.close(context));
            Err(cause)
        }
    }
}

/// Logs a failed rollback call, because no caller can receive the error.
pub(super) fn log_undone(outcome: Answer) {
    if let Err(error) = outcome {
        log!(warn, %error, "rollback of a driver call failed, memory may leak");
    }
}

/// Allocates one unit of memory, writes it, reads it, and releases it.
fn round_trip(context: &DeviceContext, memory: &Memory) -> Answer {
    let (size, stream) = (memory.unit, context.stream);
    let held = context.call(|calls| {
        if memory.is_virtual() {
            let at = memory.reserve(calls, size)?;
            let held = match memory.commit(calls, at, size, size) {
                Ok(()) => {
                    let held = write_and_read(calls, stream, (at.get(), size));
                    // Memory that stays mapped keeps its addresses.
                    memory.decommit(calls, at, size, size)?;
                    held
                }
                Err(error) => Err(error),
            };
            let gone = memory.unreserve(calls, at, size);
            held.and_then(|held| gone.map(|()| held))
        } else {
            let at = memory.create(calls, size, stream)?;
            let held = write_and_read(calls, stream, (at.get(), size));
            let gone = memory.destroy(calls, (at, size), stream);
            let gone = gone.and_then(|()| memory.trim(calls, stream));
            held.and_then(|held| gone.map(|()| held))
        }
    })?;
    if held { Ok(()) } else { Err(DriverError::Contents) }
}

/// Returns `true` if the data read at an address is the data written there.
fn write_and_read(calls: &Calls, stream: usize, (at, unit): (u64, ByteSize)) -> Answer<bool> {
    let mut locked = calls.host_memory(ByteSize::kib(64).min(unit))?;
    locked.fill(0x5A);
    // SAFETY: the memory exists and is not written to until the copy was waited for.
    let written = unsafe { locked.write_device(calls, at, stream) }
        .and_then(|()| calls.stream_synchronize(stream));
    // After an error of the wait the copy may still be in progress.
    let read = written.and_then(|()| {
        locked.fill(0);
        // SAFETY: the memory exists and is not accessed until the copy was waited for.
        unsafe { locked.read_device(calls, at, stream) }?;
        calls.stream_synchronize(stream)
    });
    let held = read.map(|()| locked.holds(0x5A));
    if held.is_err() && calls.stream_synchronize(stream).is_err() {
        return held; // the host memory stays allocated for the copies
    }
    // SAFETY: memory of `host_memory`, with which every copy is complete.
    let freed = unsafe { calls.host_free(locked.start()) };
    held.and_then(|held| freed.map(|()| held))
}

//! The backend order: virtual memory, a pool, plain memory. The first that passes a trial is used.
//!
//! Device attributes are not trusted: some MIG instances report virtual memory and then refuse a
//! call, and some refuse pools other than their own. One unit of memory is allocated, written, read
//! back and released before an arena is built on it. Each trial is released before the next one
//! begins.
//!
//! Invariant: `climb = Ok => a round trip through that memory returned the data written`.

use super::abi::{ATTRIBUTE_MANAGED, ATTRIBUTE_POOLS, ATTRIBUTE_RDMA, ATTRIBUTE_VIRTUAL_MEMORY};
use super::calls::{Answer, Calls};
use super::context::Seat;
use super::device::CudaDevice;
use super::error::{BackendFailure, CudaError, Skipped};
use super::mapping::Mapping;
use super::memory::Memory;
use super::open::{CudaOptions, DeviceChoice, MemoryKind, choose};
use super::pool::Pool;
use super::pooling::{Pieces, Pooling};
use super::segments::{Segments, Source, UNIT, UNIT_MIN};
use super::table::Missing;
use super::vmm::VirtualMemory;
use crate::{Backend, DriverError};
use lowtide_core::bytes::ByteSize;
use lowtide_core::log;

/// The backends, the best first.
const LADDER: [Backend; 3] = [Backend::CudaVirtualMemory, Backend::CudaPool, Backend::CudaPlain];

/// The first driver that limits a pool: CUDA 12.2.
pub(super) const POOL_LIMITS: u32 = 12_020;

/// A device for which a backend is being selected.
pub(super) struct Ground {
    pub(super) device: CudaDevice,
    /// The device's handle.
    pub(super) number: i32,
    pub(super) driver_version: u32,
}

/// The result of the search.
pub(super) struct Found {
    pub(super) seat: Seat,
    pub(super) memory: Memory,
    pub(super) skipped: Vec<Skipped>,
}

/// A backend that the driver's functions and the device's attributes allow.
enum Way {
    Virtual(VirtualMemory),
    /// A pool with this limit, and the unit of segment sizes.
    Pool(Pooling, Option<ByteSize>, ByteSize),
    Plain(Segments),
}

/// A reason to reject a backend.
enum Refusal {
    /// The next backend may work.
    Backend(BackendFailure),
    /// The request is invalid for every backend.
    Asked(CudaError),
}

impl<T: Into<BackendFailure>> From<T> for Refusal {
    fn from(cause: T) -> Self {
        Self::Backend(cause.into())
    }
}

impl From<Missing> for BackendFailure {
    fn from(Missing(name): Missing) -> Self {
        Self::NoFunction(name)
    }
}

/// Selects the first backend that works, or the requested one. Creates no context before a backend
/// is found that may work.
pub(super) fn climb(
    calls: Calls,
    ground: &Ground,
    options: CudaOptions,
) -> Result<Found, CudaError> {
    let device = ground.device.ordinal;
    let (mut place, mut skipped) = (Place::Bare(calls), Vec::new());
    let wanted = wanted(options).map_err(|cause| no_rung(options, device, cause))?;
    // With a choice of backends virtual memory needs as many addresses as the device has memory.
    let addresses = Some(ground.device.memory).filter(|_| wanted.len() > 1);
    let mut queue: Vec<_> = wanted.into_iter().map(|backend| (backend, addresses)).collect();
    let mut nth = 0;
    while let Some(&(backend, addresses)) = queue.get(nth) {
        nth += 1;
        let cause = match offered(place.calls(), backend, ground, options) {
            Ok(way) => {
                let seat = place.seat(ground.number)?;
                match take(&seat, way, addresses) {
                    Ok(memory) => return Ok(Found { seat, memory, skipped }),
                    Err(cause) => {
                        place = Place::Seated(seat);
                        cause
                    }
                }
            }
            Err(Refusal::Backend(cause)) => cause,
            Err(Refusal::Asked(error)) => return Err(error),
        };
        if matches!(cause, BackendFailure::Addresses { .. }) {
            queue.push((backend, None)); // better than none
        }
        let is_lost = matches!(&cause, BackendFailure::Driver(error) if error.is_context_lost());
        skipped.push(Skipped { backend, cause });
        if is_lost {
            break;
        }
    }
    if options.backend.is_some()
        && let Some(Skipped { backend, cause }) = skipped.pop()
    {
        return Err(CudaError::NoSuchBackend { backend, device, cause });
    }
    Err(CudaError::NoBackend { device, skipped })
}

/// The object that calls are made through: the library alone, or a context.
enum Place {
    Bare(Calls),
    Seated(Seat),
}

impl Place {
    fn calls(&self) -> &Calls {
        match self {
            Self::Bare(calls) => calls,
            Self::Seated(seat) => seat.context.calls(),
        }
    }

    fn seat(self, device: i32) -> Answer<Seat> {
        match self {
            Self::Bare(calls) => Seat::take(calls, device),
            Self::Seated(seat) => Ok(seat),
        }
    }
}

/// Returns the backends to try, in order.
fn wanted(options: CudaOptions) -> Result<Vec<Backend>, BackendFailure> {
    let is_shared = options.rdma || !options.peers.is_empty();
    match (options.backend, options.memory) {
        (Some(Backend::Host), _) => Err(BackendFailure::NotCuda),
        (None | Some(Backend::CudaVirtualMemory), MemoryKind::Device) if is_shared => {
            Ok(vec![Backend::CudaVirtualMemory])
        }
        _ if is_shared => Err(BackendFailure::NotShared),
        (None | Some(Backend::CudaPlain), MemoryKind::Managed) => Ok(vec![Backend::CudaPlain]),
        (Some(_), MemoryKind::Managed) => Err(BackendFailure::NotManaged),
        (Some(backend), MemoryKind::Device) => Ok(vec![backend]),
        (None, MemoryKind::Device) => Ok(LADDER.to_vec()),
    }
}

fn no_rung(options: CudaOptions, device: u32, cause: BackendFailure) -> CudaError {
    CudaError::NoSuchBackend {
        backend: options.backend.unwrap_or(Backend::CudaPlain),
        device,
        cause,
    }
}

/// Checks the functions and attributes that a backend needs. Allocates nothing and needs no
/// context.
fn offered(
    calls: &Calls,
    backend: Backend,
    ground: &Ground,
    options: CudaOptions,
) -> Result<Way, Refusal> {
    let has = |attribute| match calls.device_attribute(attribute, ground.number)? {
        0 => Err(BackendFailure::NotOffered),
        _ => Ok(()),
    };
    match backend {
        Backend::CudaVirtualMemory => {
            let of_virtual = calls.table.virtual_memory?;
            has(ATTRIBUTE_VIRTUAL_MEMORY)?;
            if options.rdma && calls.device_attribute(ATTRIBUTE_RDMA, ground.number)? == 0 {
                return Err(Refusal::Asked(CudaError::NoRdma { device: ground.device.ordinal }));
            }
            let shared = (&*accessing(calls, ground, options)?, options.rdma);
            let mapping = Mapping::new(of_virtual, calls.table.retain.ok(), shared);
            let granularity = mapping.granularity(calls)?;
            let unit = unit_of(options.handle, granularity, granularity)?;
            Ok(Way::Virtual(VirtualMemory::new(mapping, unit)))
        }
        Backend::CudaPool => {
            let pooling = Pooling::new(calls.table.pools?, ground.number);
            has(ATTRIBUTE_POOLS)?;
            let unit = unit_of(options.handle, UNIT_MIN, UNIT)?;
            if let Some(requested) = options.pool_limit.filter(|&limit| limit < unit) {
                return Err(Refusal::Asked(CudaError::PoolLimit { requested, unit }));
            }
            let limit = options.pool_limit.filter(|_| ground.driver_version >= POOL_LIMITS);
            Ok(Way::Pool(pooling, limit, unit))
        }
        Backend::CudaPlain => {
            let plain = calls.table.plain?;
            let managed = match options.memory {
                MemoryKind::Device => None,
                MemoryKind::Managed => {
                    let managed = calls.table.managed?;
                    has(ATTRIBUTE_MANAGED)?;
                    Some(managed)
                }
            };
            let unit = unit_of(options.handle, UNIT_MIN, UNIT)?;
            let source = Source::Plain(Pieces::new(plain, managed));
            Ok(Way::Plain(Segments::new(source, unit)))
        }
        Backend::Host | Backend::PinnedHost | Backend::Custom => {
            Err(Refusal::Backend(BackendFailure::NotCuda))
        }
    }
}

/// Returns the handles of the device and of the peers that are to access its memory.
fn accessing(calls: &Calls, ground: &Ground, options: CudaOptions) -> Result<Vec<i32>, Refusal> {
    let device = ground.device.ordinal;
    let mut accessing = vec![ground.number];
    for peer in options.peers.ordinals().filter(|&peer| peer != device) {
        let choice = DeviceChoice::Ordinal(peer);
        let number = calls.device(choose(calls, choice).map_err(Refusal::Asked)?.ordinal)?;
        if !calls.can_access_peer(number, ground.number)? {
            return Err(Refusal::Asked(CudaError::NoPeerAccess { device, peer }));
        }
        accessing.push(number);
    }
    Ok(accessing)
}

/// Returns the unit in which memory is allocated.
fn unit_of(
    asked: Option<ByteSize>,
    granularity: ByteSize,
    usual: ByteSize,
) -> Result<ByteSize, Refusal> {
    let requested = asked.unwrap_or(usual);
    if requested < granularity || !requested.get().is_power_of_two() {
        return Err(Refusal::Asked(CudaError::HandleSize { requested, granularity }));
    }
    Ok(requested)
}

/// Opens a backend and tries it once; virtual memory only if each region of an arena can have this
/// many addresses.
fn take(seat: &Seat, way: Way, addresses: Option<ByteSize>) -> Result<Memory, BackendFailure> {
    match way {
        Way::Virtual(memory) => {
            addresses.map_or(Ok(()), |of_region| check_addresses(seat, &memory, of_region))?;
            tried(seat, Memory::Virtual(memory))
        }
        Way::Plain(segments) => tried(seat, Memory::Segments(segments)),
        Way::Pool(pooling, limit, unit) => {
            let with = |pool: Answer<Pool>| {
                tried(seat, Memory::Segments(Segments::new(Source::Pool(pool?), unit)))
            };
            let cause = match with(seat.call(|calls| Pool::create(calls, pooling, limit))) {
                Ok(memory) => return Ok(memory),
                Err(cause) => cause,
            };
            if let BackendFailure::Driver(error) = &cause
                && (error.is_context_lost() || error.is_out_of_memory())
            {
                return Err(cause); // another pool has no more memory either
            }
            let Ok(memory) = with(seat.call(|calls| Pool::of_device(calls, pooling))) else {
                return Err(cause);
            };
            log!(info, %cause, "own CUDA pool not usable, using the pool of the device");
            Ok(memory)
        }
    }
}

/// Reserves addresses for both regions of an arena, with what a region has beyond its blocks, and
/// releases them.
fn check_addresses(
    seat: &Seat,
    memory: &VirtualMemory,
    of_region: ByteSize,
) -> Result<(), BackendFailure> {
    let size = of_region.saturating_add(ByteSize::new(of_region.get() / 8));
    let size = size.next_multiple_of(memory.unit()).unwrap_or(size);
    seat.call(|calls| {
        let reserved = [(); 2].map(|()| memory.reserve(calls, size));
        for &at in reserved.iter().flatten() {
            memory.unreserve(calls, at, size)?;
        }
        Ok(reserved.into_iter().collect::<Answer<Vec<_>>>().map(drop))
    })?
    .map_err(|error: DriverError| match error {
        error if error.is_out_of_memory() => BackendFailure::Addresses { needed: size },
        error => error.into(),
    })
}

/// Returns a private pool that passed a trial.
pub(super) fn try_pool(
    seat: &Seat,
    pooling: Pooling,
    limit: Option<ByteSize>,
) -> Result<Pool, BackendFailure> {
    let pool = seat.call(|calls| Pool::create(calls, pooling, limit))?;
    let segments = Segments::new(Source::Pool(pool), UNIT_MIN);
    tried(seat, Memory::Segments(segments)).map(|_| pool)
}

/// Returns the memory if it passes a round trip; releases it otherwise.
fn tried(seat: &Seat, memory: Memory) -> Result<Memory, BackendFailure> {
    let outcome = round_trip(seat, &memory);
    match outcome {
        Ok(()) => Ok(memory),
        Err(cause) => {
            if let Err(error) = memory.close(seat) {
                log!(warn, %error, "rollback of a driver call failed, memory may leak");
            }
            Err(cause)
        }
    }
}

/// Allocates one unit of memory, writes it, reads it, and releases it.
fn round_trip(seat: &Seat, memory: &Memory) -> Result<(), BackendFailure> {
    let size = memory.unit();
    let held = seat.call(|calls| match memory {
        Memory::Virtual(memory) => {
            let at = memory.reserve(calls, size)?;
            let held = match memory.commit(calls, at, size, size) {
                Ok(()) => {
                    let held = write_and_read(seat, calls, (at.get(), size));
                    // Memory that stays mapped keeps its addresses.
                    memory.decommit(calls, at, size, size)?;
                    held
                }
                Err(error) => Err(error),
            };
            let gone = memory.unreserve(calls, at, size);
            held.and_then(|held| gone.map(|()| held))
        }
        Memory::Segments(memory) => {
            let at = memory.create(calls, size, seat.own)?;
            let held = write_and_read(seat, calls, (at.get(), size));
            let gone = memory.destroy(calls, (at, size), seat.own);
            let gone = gone.and_then(|()| memory.trim(calls, seat.own));
            held.and_then(|held| gone.map(|()| held))
        }
    })?;
    if held { Ok(()) } else { Err(BackendFailure::Contents) }
}

/// Returns `true` if the data read at an address is the data written there.
fn write_and_read(seat: &Seat, calls: &Calls, (at, unit): (u64, ByteSize)) -> Answer<bool> {
    let size = ByteSize::kib(64).min(unit);
    let all = 0..size.as_usize().unwrap_or(0);
    let mut locked = calls.host_alloc(size)?;
    locked.fill(0x5A);
    let written = calls
        .copy_to_device((&locked, all.clone()), at, seat.own)
        .and_then(|()| calls.stream_synchronize(seat.own));
    // After an error of the wait the copy may still be in progress.
    let read = written.and_then(|()| {
        locked.fill(0);
        calls.copy_to_host(at, (&locked, all), seat.own)?;
        calls.stream_synchronize(seat.own)
    });
    let held = read.map(|()| locked.holds(0x5A));
    if held.is_err() && calls.stream_synchronize(seat.own).is_err() {
        return held; // the host memory stays allocated for the copies
    }
    let freed = calls.host_free(&locked);
    held.and_then(|held| freed.map(|()| held))
}

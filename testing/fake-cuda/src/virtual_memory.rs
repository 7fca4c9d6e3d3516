//! Virtual memory management: addresses, handles, mappings, access.
//!
//! No call needs a current context, because cuda.h lists no such error. The device follows from the
//! properties, the handle or the address.
//!
//! Invariant: a handle names its device, and is mapped only in addresses of that device.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{c_int, c_uint, c_ulonglong};

use crate::call::{Answer, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED};
use crate::control::Options;
use crate::ffi::{In, Out, Untyped, export};
use crate::handle::Kind;
use crate::state::{Seat, of_address, state};

/// `CUmemLocation`, as in every cuda.h from 11.0 on.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    windows: usize,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Access {
    location: Location,
    flags: c_int,
}

impl Location {
    /// The device that is meant; other places are not offered.
    pub(crate) fn seat(self) -> Answer<Seat> {
        let state = state();
        state.started()?;
        match self.kind {
            1 => state.anywhere(state.ordinal(self.id)?),
            0 => Err(INVALID_VALUE),
            _ => Err(NOT_SUPPORTED),
        }
    }
}

impl Properties {
    fn seat(self) -> Answer<Seat> {
        if self.kind != 1 {
            return Err(INVALID_VALUE); // CU_MEM_ALLOCATION_TYPE_PINNED
        }
        if self.handle_types != 0 || self.flags[0] != 0 {
            return Err(NOT_SUPPORTED); // export, compression
        }
        if self.is_rdma() && state().options.flags & Options::NO_RDMA != 0 {
            return Err(NOT_SUPPORTED);
        }
        self.location.seat()
    }

    const fn is_rdma(&self) -> bool {
        self.flags[1] != 0
    }
}

fn device_of(at: u64) -> Answer<Seat> {
    state().started()?;
    of_address(at).ok_or(INVALID_VALUE)
}

fn handle(bits: u64) -> Answer<(Seat, u64)> {
    state().find(bits, Kind::Physical, INVALID_VALUE)
}

/// Opens mapped granules to another device, or closes them.
fn open_to_peer((seat, peer): (&Seat, usize), (at, size): (u64, usize), is_open: bool) -> Answer {
    let granule = usize::try_from(seat.sim.raw().granularity()?).unwrap_or(usize::MAX);
    let mut state = state();
    if state.options.flags & Options::NO_PEERS != 0 {
        return Err(INVALID_DEVICE);
    }
    for granule in (at..at.saturating_add(size as u64)).step_by(granule) {
        let peers = state.devices[seat.device].peers.entry(granule).or_default();
        peers.retain(|&known| known != peer);
        peers.extend(is_open.then_some(peer));
    }
    Ok(())
}

export! {
    fn cuMemGetAllocationGranularity(size: Out<usize>, properties: In<Properties>, _o: c_uint) {
        let seat = properties.get()?.seat()?;
        let granularity = seat.sim.raw().granularity()?;
        size.put(usize::try_from(granularity).unwrap_or(usize::MAX))
    }

    fn cuMemAddressReserve(
        at: Out<u64>,
        size: usize,
        alignment: usize,
        _hint: u64,
        flags: c_ulonglong,
    ) {
        if at.is_absent() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        // Addresses are of one device here: that of the current context, else the first.
        let seat = {
            let state = state();
            state.started()?;
            state.current().or_else(|_| state.anywhere(state.ordinal(0)?))?
        };
        at.put(seat.sim.raw().address_reserve(size as u64, alignment as u64)?)
    }

    fn cuMemAddressFree(at: u64, size: usize) {
        device_of(at)?.sim.raw().address_free(at, size as u64)
    }

    fn cuMemCreate(to: Out<u64>, size: usize, properties: In<Properties>, flags: c_ulonglong) {
        if to.is_absent() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let properties = properties.get()?;
        let seat = properties.seat()?;
        let number = seat.sim.raw().create(size as u64)?;
        if properties.is_rdma() {
            state().devices[seat.device].rdma.insert(number);
        }
        to.put(seat.handle(Kind::Physical, number))
    }

    fn cuMemGetAllocationPropertiesFromHandle(to: Out<Properties>, bits: u64) {
        let (seat, number) = handle(bits)?;
        let state = state();
        let id = state.visible.iter().flatten().position(|&device| device == seat.device);
        let location = Location { kind: 1, id: id.and_then(|id| id.try_into().ok()).unwrap_or(-1) };
        let is_rdma = state.devices[seat.device].rdma.contains(&number);
        let flags = [0, u8::from(is_rdma), 0, 0, 0, 0, 0, 0];
        to.put(Properties { kind: 1, handle_types: 0, location, windows: 0, flags })
    }

    fn cuMemRelease(bits: u64) {
        let (seat, number) = handle(bits)?;
        seat.sim.raw().release(number)
    }

    fn cuMemRetainAllocationHandle(to: Out<u64>, at: Untyped) {
        if to.is_absent() {
            return Err(INVALID_VALUE);
        }
        let seat = device_of(at.address())?;
        let number = seat.sim.raw().retain_handle(at.address())?;
        to.put(seat.handle(Kind::Physical, number))
    }

    fn cuMemMap(at: u64, size: usize, offset: usize, bits: u64, flags: c_ulonglong) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let (seat, number) = handle(bits)?;
        if device_of(at)?.device != seat.device {
            return Err(INVALID_DEVICE);
        }
        seat.sim.raw().map(at, size as u64, offset as u64, number)
    }

    fn cuMemUnmap(at: u64, size: usize) {
        let seat = device_of(at)?;
        seat.sim.raw().unmap(at, size as u64)?;
        let peers = &mut state().devices[seat.device].peers;
        peers.retain(|&granule, _| !(at..at.saturating_add(size as u64)).contains(&granule));
        Ok(())
    }

    fn cuMemSetAccess(at: u64, size: usize, access: In<Access>, count: usize) {
        let seat = device_of(at)?;
        if count == 0 {
            return Err(INVALID_VALUE);
        }
        for nth in 0..count {
            let access = access.element(nth)?;
            let device = access.location.seat()?.device;
            let is_open = match access.flags {
                0 => false,
                3 => true,
                1 => return Err(NOT_SUPPORTED),
                _ => return Err(INVALID_VALUE),
            };
            if device == seat.device {
                seat.sim.raw().set_access(at, size as u64, is_open)?;
            } else {
                open_to_peer((&seat, device), (at, size), is_open)?;
            }
        }
        Ok(())
    }

    fn cuMemGetAccess(flags: Out<c_ulonglong>, location: In<Location>, at: u64) {
        let seat = device_of(at)?;
        let device = location.get()?.seat()?.device;
        let is_open = if device == seat.device {
            seat.sim.raw().is_open(at)
        } else {
            let granule = at - at % seat.sim.raw().granularity()?;
            let peers = &state().devices[seat.device].peers;
            peers.get(&granule).is_some_and(|peers| peers.contains(&device))
        };
        flags.put(if is_open { 3 } else { 0 })
    }
}

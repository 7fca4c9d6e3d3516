//! Virtual memory management: addresses, handles, mappings, access.
//!
//! No call needs a current context, because cuda.h lists no such error. The device follows from the
//! properties, the handle or the address.
//!
//! Invariant: a handle names its device, and is mapped only in addresses of that device.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{c_int, c_uint, c_ulonglong};

use crate::call::{Answer, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED};
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
        if self.handle_types != 0 || self.flags[0] != 0 || self.flags[1] != 0 {
            return Err(NOT_SUPPORTED); // export, compression, RDMA
        }
        self.location.seat()
    }
}

fn device_of(at: u64) -> Answer<Seat> {
    state().started()?;
    of_address(at).ok_or(INVALID_VALUE)
}

fn handle(bits: u64) -> Answer<(Seat, u64)> {
    state().find(bits, Kind::Physical, INVALID_VALUE)
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
        let seat = properties.get()?.seat()?;
        let number = seat.sim.raw().create(size as u64)?;
        to.put(seat.handle(Kind::Physical, number))
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
        device_of(at)?.sim.raw().unmap(at, size as u64)
    }

    fn cuMemSetAccess(at: u64, size: usize, access: In<Access>, count: usize) {
        let seat = device_of(at)?;
        if count != 1 {
            // Of one device only: peers are not offered.
            return Err(if count == 0 { INVALID_VALUE } else { NOT_SUPPORTED });
        }
        let access = access.get()?;
        if access.location.seat()?.device != seat.device {
            return Err(NOT_SUPPORTED);
        }
        match access.flags {
            0 => seat.sim.raw().set_access(at, size as u64, false),
            3 => seat.sim.raw().set_access(at, size as u64, true),
            1 => Err(NOT_SUPPORTED),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemGetAccess(flags: Out<c_ulonglong>, location: In<Location>, at: u64) {
        let seat = device_of(at)?;
        if location.get()?.seat()?.device != seat.device {
            return flags.put(0);
        }
        flags.put(if seat.sim.raw().is_open(at) { 3 } else { 0 })
    }
}

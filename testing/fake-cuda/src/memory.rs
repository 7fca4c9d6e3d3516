//! Plain and managed memory, page-locked host memory, and lookups by address.
//!
//! Managed memory is host memory that the device can access too; its address is a pointer here.
//!
//! Invariant: host memory is unmapped only after the model released it.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{c_int, c_uint};

use lowtide_cuda_sim::raw::{Found, HostKind};

use crate::call::{Answer, INVALID_VALUE, OUT_OF_MEMORY};
use crate::ffi::{Out, Untyped, export};
use crate::host::{map, of_caller};
use crate::state::{Seat, State, current, of_address, seats, state};

/// Takes real host memory that the device reaches.
fn host_alloc(size: usize, kind: HostKind) -> Answer<Untyped> {
    let seat = current()?;
    if size == 0 {
        return Err(INVALID_VALUE);
    }
    seat.sim.raw().host_enter(size as u64, kind)?;
    let (at, memory) = map(size).ok_or(OUT_OF_MEMORY)?;
    seat.sim.raw().host_insert(at.address(), kind, memory)?;
    Ok(at)
}

/// The device that knows host memory at an address, and where that begins.
pub(crate) fn host_at(at: u64) -> Option<(Seat, HostKind, u64)> {
    seats().into_iter().find_map(|seat| {
        let (kind, base, _) = seat.sim.raw().host_find(at, 1)?;
        Some((seat, kind, base))
    })
}

fn host_free(at: Untyped, kind: HostKind) -> Answer {
    let here = current()?;
    let seat = host_at(at.address()).map_or(here, |(seat, ..)| seat);
    seat.sim.raw().host_remove(at.address(), kind)
}

fn register(at: Untyped, size: usize) -> Answer {
    let seat = current()?;
    if at.address() == 0 || size == 0 {
        return Err(INVALID_VALUE);
    }
    seat.sim.raw().host_enter(size as u64, HostKind::Registered)?;
    seat.sim.raw().host_insert(at.address(), HostKind::Registered, of_caller(at, size))
}

/// `CUpointer_attribute`: what an address is.
fn pointer_attribute(which: c_int, at: u64, to: Untyped) -> Answer {
    let seat = host_at(at).map(|(seat, ..)| seat).or_else(|| of_address(at));
    let seat = seat.ok_or(INVALID_VALUE)?;
    let found = seat.sim.raw().find(at).ok_or(INVALID_VALUE)?;
    let (start, size) = match found {
        Found::Allocation(start, size) | Found::Host(_, start, size) => (start, size),
        Found::Mapped => (at, 0),
    };
    let managed = matches!(found, Found::Host(HostKind::Managed, ..));
    match which {
        1 => to.out().put(State::context(seat.device)),
        2 => to.out().put(if matches!(found, Found::Host(..)) && !managed { 1_u32 } else { 2 }),
        3 | 4 => to.out().put(at),
        8 => to.out().put(u32::from(managed)),
        9 => to.out().put(state().number_of(seat.device)),
        11 => to.out().put(start),
        12 => to.out().put(size),
        13 => to.out().put(1_u32),
        _ => Err(crate::call::NOT_SUPPORTED),
    }
}

export! {
    fn cuMemGetInfo_v2(free: Out<usize>, all: Out<usize>) {
        let (left, total) = current()?.sim.raw().memory_info()?;
        free.put(usize::try_from(left).unwrap_or(usize::MAX))?;
        all.put(usize::try_from(total).unwrap_or(usize::MAX))
    }

    fn cuMemAlloc_v2(at: Out<u64>, size: usize) {
        if at.is_absent() {
            return Err(INVALID_VALUE);
        }
        at.put(current()?.sim.raw().alloc(size as u64)?)
    }

    fn cuMemFree_v2(at: u64) {
        let here = current()?;
        if at == 0 {
            return Ok(());
        }
        if let Some((seat, HostKind::Managed, _)) = host_at(at) {
            return seat.sim.raw().host_remove(at, HostKind::Managed);
        }
        of_address(at).unwrap_or(here).sim.raw().free(at)
    }

    fn cuMemAllocManaged(at: Out<u64>, size: usize, flags: c_uint) {
        if at.is_absent() || !(1..=2).contains(&flags) {
            return Err(INVALID_VALUE);
        }
        at.put(host_alloc(size, HostKind::Managed)?.address())
    }

    fn cuMemHostAlloc(at: Out<Untyped>, size: usize, _flags: c_uint) {
        if at.is_absent() {
            return Err(INVALID_VALUE);
        }
        at.put(host_alloc(size, HostKind::Locked)?)
    }

    fn cuMemFreeHost(at: Untyped) {
        host_free(at, HostKind::Locked)
    }

    fn cuMemHostRegister_v2(at: Untyped, size: usize, _flags: c_uint) {
        register(at, size)
    }

    fn cuMemHostUnregister(at: Untyped) {
        host_free(at, HostKind::Registered)
    }

    fn cuPointerGetAttribute(to: Untyped, which: c_int, at: u64) {
        state().started()?;
        pointer_attribute(which, at, to)
    }
}

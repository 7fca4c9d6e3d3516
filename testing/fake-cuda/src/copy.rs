//! Copies and fills.
//!
//! They follow cuda.h ("API synchronization behavior"). Page-locked memory is accessed when the
//! copy runs, however much later. Pageable memory is read at the call, and a copy into pageable
//! memory completes before the call returns. Calls without a stream run on the legacy default
//! stream; those within the device, and fills, return at once.
//!
//! Invariant: host memory that is not known to the device is not accessed after the call.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use lowtide_cuda_sim::raw::Place;

use crate::call::{Answer, INVALID_VALUE, NOT_SUPPORTED};
use crate::ffi::{Untyped, export};
use crate::host::{of_caller, staged};
use crate::memory::host_at;
use crate::state::{Seat, of_address, stream};

/// The legacy default stream.
const LEGACY: u64 = 0;

/// Returns the memory's place if the device reaches it: its own, or host memory known to a device.
fn place(seat: &Seat, at: u64, size: u64) -> Option<Place> {
    let raw = seat.sim.raw();
    let reached = raw.is_inside(at) || raw.host_find(at, size).is_some();
    // Page-locked memory is portable: what another device knows is written through that one.
    let elsewhere = || {
        let (other, _, base) = host_at(at)?;
        let (_, _, bytes) = other.sim.raw().host_find(at, size)?;
        Some(Place::Host(bytes, at - base))
    };
    if reached { Some(Place::Device(at)) } else { elsewhere() }
}

fn capturing(seat: &Seat, stream: u64) -> Answer<bool> {
    Ok(seat.sim.raw().stream_capture_status(stream)? != 0)
}

fn to_device(to: u64, from: Untyped, size: usize, queue: u64) -> Answer {
    let (seat, stream) = stream(queue)?;
    if size == 0 {
        return Ok(());
    }
    if from.address() == 0 {
        return Err(INVALID_VALUE);
    }
    let bytes = size as u64;
    let known = place(&seat, from.address(), bytes);
    let source = known.unwrap_or_else(|| Place::Host(staged(from, size), 0));
    seat.sim.raw().copy_async(Place::Device(to), source, bytes, stream)
}

fn from_device(to: Untyped, from: u64, size: usize, queue: u64, wait: bool) -> Answer {
    let (seat, stream) = stream(queue)?;
    if size == 0 {
        return Ok(());
    }
    if to.address() == 0 {
        return Err(INVALID_VALUE);
    }
    let bytes = size as u64;
    let known = place(&seat, to.address(), bytes);
    let wait = wait || known.is_none();
    let raw = seat.sim.raw();
    if known.is_none() && capturing(&seat, stream)? {
        // Would be written at each launch, whatever is there by then: the wait spoils the capture.
        return raw.stream_synchronize(stream);
    }
    let target = known.unwrap_or_else(|| Place::Host(of_caller(to, size), 0));
    raw.copy_async(target, Place::Device(from), bytes, stream)?;
    if wait {
        // A refused wait would leave the copy queued, and the memory is the caller's again.
        raw.stream_synchronize(stream).inspect_err(|_| seat.sim.run_all())
    } else {
        Ok(())
    }
}

fn within(to: u64, from: u64, size: usize, queue: u64) -> Answer {
    let (seat, stream) = stream(queue)?;
    let across = |at| of_address(at).is_some_and(|owner| owner.device != seat.device);
    if across(to) || across(from) {
        return Err(NOT_SUPPORTED);
    }
    let raw = seat.sim.raw();
    raw.copy_async(Place::Device(to), Place::Device(from), size as u64, stream)
}

fn set(at: u64, value: u8, count: usize, queue: u64) -> Answer {
    let (seat, stream) = stream(queue)?;
    seat.sim.raw().set_async(at, &[value], count as u64, stream)
}

export! {
    fn cuMemcpyHtoDAsync_v2(to: u64, from: Untyped, size: usize, stream: u64) {
        to_device(to, from, size, stream)
    }

    fn cuMemcpyDtoHAsync_v2(to: Untyped, from: u64, size: usize, stream: u64) {
        from_device(to, from, size, stream, false)
    }

    fn cuMemcpyDtoH_v2(to: Untyped, from: u64, size: usize) {
        from_device(to, from, size, LEGACY, true)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, size: usize, stream: u64) {
        within(to, from, size, stream)
    }

    // A program that links cudarc needs the name.
    fn cuMemcpyPeerAsync() {
        Err(NOT_SUPPORTED)
    }

    fn cuMemsetD8Async(at: u64, value: u8, count: usize, stream: u64) {
        set(at, value, count, stream)
    }

    fn cuMemsetD8_v2(at: u64, value: u8, count: usize) {
        set(at, value, count, LEGACY)
    }
}

//! Stream-ordered memory: pools, their attributes, the device's current one.
//!
//! Invariant: a device without pools answers 801 to each of these calls.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::c_int;

use lowtide_cuda_sim::raw::Pool;

use crate::call::{Answer, INVALID_VALUE, NOT_SUPPORTED};
use crate::control::Options;
use crate::ffi::{In, Out, Untyped, export};
use crate::handle::Kind;
use crate::state::{Seat, of_address, state, stream};
use crate::virtual_memory::Location;

/// `CUmemPoolProps`, of equal size in every cuda.h; the limit counts from 12.2 on.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    windows: usize,
    max: usize,
    rest: [u8; 56],
}

/// Returns an error if there are no pools.
fn offered() -> Answer {
    let state = state();
    state.started()?;
    if state.options.flags & Options::NO_POOLS == 0 { Ok(()) } else { Err(NOT_SUPPORTED) }
}

fn pool(bits: u64) -> Answer<(Seat, u64)> {
    offered()?;
    state().find(bits, Kind::Pool, INVALID_VALUE)
}

fn seat_of(device: c_int) -> Answer<Seat> {
    offered()?;
    let state = state();
    state.anywhere(state.ordinal(device)?)
}

fn attribute(it: Pool, which: c_int) -> Answer<u64> {
    Ok(match which {
        4 => it.threshold,
        5 => it.reserved,
        6 => it.reserved_high,
        7 => it.used,
        8 => it.used_high,
        _ => return Err(INVALID_VALUE),
    })
}

export! {
    fn cuMemPoolCreate(to: Out<u64>, properties: In<Properties>) {
        offered()?;
        let asked = properties.get()?;
        if to.is_absent() || asked.kind != 1 {
            return Err(INVALID_VALUE);
        }
        if asked.handle_types != 0 || state().options.flags & Options::NO_POOL_CREATE != 0 {
            return Err(NOT_SUPPORTED);
        }
        let seat = asked.location.seat()?;
        let number = seat.sim.raw().pool_create(asked.max as u64)?;
        to.put(seat.handle(Kind::Pool, number))
    }

    fn cuMemPoolDestroy(bits: u64) {
        let (seat, number) = pool(bits)?;
        seat.sim.raw().pool_destroy(number)
    }

    fn cuMemPoolTrimTo(bits: u64, keep: usize) {
        let (seat, number) = pool(bits)?;
        seat.sim.raw().pool_trim(number, keep as u64)
    }

    fn cuMemPoolGetAttribute(bits: u64, which: c_int, to: Untyped) {
        let (seat, number) = pool(bits)?;
        let it = seat.sim.raw().pool(number, |it| *it)?;
        match which {
            // Reuse: across streams by what is done, not by events.
            1 | 3 => to.out().put(0_i32),
            2 => to.out().put(1_i32),
            _ => to.out().put(attribute(it, which)?),
        }
    }

    fn cuMemPoolSetAttribute(bits: u64, which: c_int, from: Untyped) {
        let (seat, number) = pool(bits)?;
        match which {
            1..=3 => from.input::<i32>().get().map(drop),
            4 => {
                let keep = from.input::<u64>().get()?;
                seat.sim.raw().pool(number, |it| it.threshold = keep)
            }
            6 | 8 if from.input::<u64>().get()? == 0 => seat.sim.raw().pool(number, |it| {
                if which == 8 { it.used_high = it.used } else { it.reserved_high = it.reserved }
            }),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuDeviceGetDefaultMemPool(to: Out<u64>, device: c_int) {
        let seat = seat_of(device)?;
        let (default, _) = seat.sim.raw().device_pools();
        to.put(seat.handle(Kind::Pool, default))
    }

    fn cuDeviceGetMemPool(to: Out<u64>, device: c_int) {
        let seat = seat_of(device)?;
        let (_, current) = seat.sim.raw().device_pools();
        to.put(seat.handle(Kind::Pool, current))
    }

    fn cuDeviceSetMemPool(device: c_int, bits: u64) {
        let (seat, number) = pool(bits)?;
        if seat_of(device)?.device != seat.device {
            return Err(INVALID_VALUE);
        }
        seat.sim.raw().pool_use(number)
    }

    fn cuMemAllocAsync(at: Out<u64>, size: usize, queue: u64) {
        offered()?;
        if at.is_absent() {
            return Err(INVALID_VALUE);
        }
        let (seat, stream) = stream(queue)?;
        at.put(seat.sim.raw().alloc_async(None, size as u64, stream)?)
    }

    fn cuMemAllocFromPoolAsync(at: Out<u64>, size: usize, bits: u64, queue: u64) {
        if at.is_absent() {
            return Err(INVALID_VALUE);
        }
        let (seat, number) = pool(bits)?;
        let (here, stream) = stream(queue)?;
        if here.device != seat.device {
            return Err(NOT_SUPPORTED);
        }
        at.put(seat.sim.raw().alloc_async(Some(number), size as u64, stream)?)
    }

    fn cuMemFreeAsync(at: u64, queue: u64) {
        offered()?;
        let (seat, stream) = stream(queue)?;
        if of_address(at).is_some_and(|owner| owner.device != seat.device) {
            return Err(NOT_SUPPORTED);
        }
        seat.sim.raw().free_async(at, stream)
    }

    fn cuDeviceGraphMemTrim(device: c_int) {
        let mut state = state();
        let at = state.ordinal(device)?;
        let [used, _, reserved] = &mut state.devices[at].context.graph_memory;
        *reserved = *used;
        Ok(())
    }

    fn cuDeviceGetGraphMemAttribute(device: c_int, which: c_int, to: Untyped) {
        let state = state();
        let figures = state.devices[state.ordinal(device)?].context.graph_memory;
        let value = usize::try_from(which).ok().and_then(|which| figures.get(which));
        to.out().put(*value.ok_or(INVALID_VALUE)?)
    }

    fn cuDeviceSetGraphMemAttribute(device: c_int, which: c_int, from: Untyped) {
        let mut state = state();
        let at = state.ordinal(device)?;
        if which != 1 || from.input::<u64>().get()? != 0 {
            return Err(INVALID_VALUE);
        }
        let [used, high, _] = &mut state.devices[at].context.graph_memory;
        *high = *used;
        Ok(())
    }
}

//! Streams: create, destroy, synchronize, query, and host functions in their order.
//!
//! Invariant: a stream with flag 1 (non-blocking) is ordered with no other.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{c_int, c_uint, c_ulonglong};

use crate::call::{Answer, INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, as_callback};
use crate::control::Options;
use crate::ffi::{Callback, Function, Out, Untyped, export};
use crate::handle::Kind;
use crate::state::{State, current, event, state, stream};

/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: c_uint = 1;

fn create(to: Out<u64>, flags: c_uint, priority: c_int) -> Answer {
    let seat = current()?;
    if to.is_absent() || flags > NON_BLOCKING {
        return Err(INVALID_VALUE);
    }
    let number = seat.sim.raw().stream_create(flags != NON_BLOCKING)?;
    let about = (flags, priority.clamp(-5, 0));
    let mut state = state();
    let reuses = state.options.flags & Options::REUSED_STREAMS != 0;
    let device = &mut state.devices[seat.device];
    device.stream_flags.insert(number, about);
    let handle = match device.spare_streams.pop().filter(|_| reuses) {
        Some(reused) => {
            device.reused_streams.insert(reused, number);
            reused
        }
        None => seat.handle(Kind::Stream, number),
    };
    drop(state);
    to.put(handle)
}

/// The flags and the priority of a stream.
fn about(bits: u64) -> Answer<(c_uint, c_int)> {
    let (seat, number) = stream(bits)?;
    let known = state().devices[seat.device].stream_flags.get(&number).copied();
    known.map_or_else(|| if bits <= 2 { Ok((0, 0)) } else { Err(INVALID_HANDLE) }, Ok)
}

export! {
    fn cuStreamCreate(to: Out<u64>, flags: c_uint) {
        create(to, flags, 0)
    }

    fn cuStreamCreateWithPriority(to: Out<u64>, flags: c_uint, priority: c_int) {
        create(to, flags, priority)
    }

    fn cuStreamDestroy_v2(bits: u64) {
        if bits <= 2 {
            return Err(INVALID_HANDLE);
        }
        let (seat, number) = stream(bits)?;
        seat.sim.raw().stream_destroy(number)?;
        let mut state = state();
        let device = &mut state.devices[seat.device];
        device.stream_flags.remove(&number);
        device.spare_streams.push(bits);
        Ok(())
    }

    fn cuStreamSynchronize(bits: u64) {
        let (seat, number) = stream(bits)?;
        state().spins += 1;
        seat.sim.raw().stream_synchronize(number)
    }

    fn cuStreamQuery(bits: u64) {
        let (seat, number) = stream(bits)?;
        if seat.sim.raw().stream_query(number)? { Ok(()) } else { Err(NOT_READY) }
    }

    fn cuStreamGetFlags(bits: u64, flags: Out<c_uint>) {
        flags.put(about(bits)?.0)
    }

    fn cuStreamGetPriority(bits: u64, priority: Out<c_int>) {
        priority.put(about(bits)?.1)
    }

    fn cuStreamGetCtx(bits: u64, context: Out<u64>) {
        context.put(State::context(stream(bits)?.0.device))
    }

    fn cuStreamGetId(bits: u64, id: Out<c_ulonglong>) {
        id.put(stream(bits)?.1)
    }

    fn cuStreamGetDevice(bits: u64, device: Out<c_int>) {
        let seat = stream(bits)?.0;
        device.put(state().number_of(seat.device))
    }

    fn cuStreamWaitEvent(bits: u64, of: u64, _flags: c_uint) {
        let (seat, number) = stream(bits)?;
        let (other, event) = event(of)?;
        if state().drops_wait() {
            return Ok(());
        }
        if seat.device != other.device {
            // A wait for another device is legal; here the host waits in its place.
            return other.sim.raw().event_synchronize(event);
        }
        seat.sim.raw().stream_wait_event(number, event)
    }

    fn cuLaunchHostFunc(bits: u64, function: Function, data: Untyped) {
        let callback = Callback::new(function, data)?;
        let (seat, number) = stream(bits)?;
        let call = Box::new(move || as_callback(|| callback.call()));
        seat.sim.raw().host_function(number, call)
    }

    fn cuStreamWaitValue32_v2(_bits: u64, _at: u64, _value: u32, _flags: c_uint) {
        Err(NOT_SUPPORTED)
    }

    fn cuStreamWriteValue32_v2(_bits: u64, _at: u64, _value: u32, _flags: c_uint) {
        Err(NOT_SUPPORTED)
    }
}

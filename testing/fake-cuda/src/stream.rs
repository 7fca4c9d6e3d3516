//! Streams: create, destroy, synchronize, query, and host functions in their order.
//!
//! Invariant: a stream with flag 1 (non-blocking) is ordered with no other.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::c_uint;

use crate::call::{INVALID_HANDLE, INVALID_VALUE, NOT_READY, as_callback};
use crate::control::Options;
use crate::ffi::{Callback, Function, Out, Untyped, export};
use crate::handle::Kind;
use crate::state::{current, event, state, stream};

/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: c_uint = 1;

export! {
    fn cuStreamCreate(to: Out<u64>, flags: c_uint) {
        let seat = current()?;
        if to.is_absent() || flags > NON_BLOCKING {
            return Err(INVALID_VALUE);
        }
        let number = seat.sim.raw().stream_create(flags != NON_BLOCKING)?;
        let mut state = state();
        let reuses = state.options.flags & Options::REUSED_STREAMS != 0;
        let device = &mut state.devices[seat.device].context;
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

    fn cuStreamDestroy_v2(bits: u64) {
        if bits <= 2 {
            return Err(INVALID_HANDLE);
        }
        let (seat, number) = stream(bits)?;
        seat.sim.raw().stream_destroy(number)?;
        state().devices[seat.device].context.spare_streams.push(bits);
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
}

//! Events: create, destroy, record, query, wait.
//!
//! Time is not modelled: the time between two completed events is 0.
//!
//! Invariant: an event that was never recorded is complete, and has no time.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::c_uint;

use crate::call::{INVALID_HANDLE, INVALID_VALUE, NOT_READY};
use crate::ffi::{Out, export};
use crate::handle::Kind;
use crate::state::{current, event, state, stream};

/// `CU_EVENT_BLOCKING_SYNC`
const BLOCKING: c_uint = 1;

/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMING: c_uint = 2;

/// All flags that there are.
const FLAGS: c_uint = 7;

export! {
    fn cuEventCreate(to: Out<u64>, flags: c_uint) {
        let seat = current()?;
        if to.is_absent() || flags > FLAGS {
            return Err(INVALID_VALUE);
        }
        let number = seat.sim.raw().event_create()?;
        state().devices[seat.device].context.event_flags.insert(number, flags);
        to.put(seat.handle(Kind::Event, number))
    }

    fn cuEventDestroy_v2(bits: u64) {
        let (seat, number) = event(bits)?;
        seat.sim.raw().event_destroy(number)?;
        state().devices[seat.device].context.event_flags.remove(&number);
        Ok(())
    }

    fn cuEventRecord(bits: u64, queue: u64) {
        let (seat, number) = event(bits)?;
        let (other, stream) = stream(queue)?;
        if seat.device != other.device {
            return Err(INVALID_HANDLE);
        }
        seat.sim.raw().event_record(number, stream)
    }

    fn cuEventQuery(bits: u64) {
        let (seat, number) = event(bits)?;
        if seat.sim.raw().event_query(number)? { Ok(()) } else { Err(NOT_READY) }
    }

    fn cuEventSynchronize(bits: u64) {
        let (seat, number) = event(bits)?;
        let mut locked = state();
        let flags = locked.devices[seat.device].context.event_flags.get(&number).copied();
        locked.spins += u64::from(flags.unwrap_or(0) & BLOCKING == 0);
        drop(locked);
        seat.sim.raw().event_synchronize(number)
    }

    fn cuEventElapsedTime(to: Out<f32>, from: u64, till: u64) {
        for bits in [from, till] {
            let (seat, number) = event(bits)?;
            let flags = state().devices[seat.device].context.event_flags.get(&number).copied();
            let raw = seat.sim.raw();
            if flags.unwrap_or(0) & NO_TIMING != 0 || !raw.event_is_recorded(number)? {
                return Err(INVALID_HANDLE);
            }
            if !raw.event_query(number)? {
                return Err(NOT_READY);
            }
        }
        to.put(0.0)
    }
}

//! Start, devices, and their primary contexts.
//!
//! `CUDA_VISIBLE_DEVICES` is read when the driver is first started after a reset, by ordinal or by
//! UUID; from the first entry that names no device on, nothing is visible.
//!
//! Invariant: the ordinals that programs see are those of the visible devices, in their order.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{c_char, c_int, c_uint};

use crate::call::{Answer, INVALID_VALUE, NOT_SUPPORTED};
use crate::control::Options;
use crate::ffi::{Out, export, put_text};
use crate::state::{State, bury, current, state};

/// The variable that says which devices a process sees.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The name of each device.
const NAME: &str = "lowtide simulated device";

/// The UUID of a device.
///
/// # Panics
/// If there can be no such device.
pub(crate) const fn uuid(device: usize) -> [u8; 16] {
    let mut bytes = *b"lowtide-fake-gpu";
    bytes[15] = [b'0', b'1', b'2'][device];
    bytes
}

/// The UUID as programs write it.
pub(crate) fn uuid_text(device: usize) -> String {
    let hex: String = uuid(device).iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("GPU-{}", parts.join("-"))
}

/// The devices that a value of the variable makes visible.
pub(crate) fn visible(value: Option<&str>, count: usize) -> Vec<usize> {
    let Some(value) = value else { return (0..count).collect() };
    let named = value.split(',').map(|entry| {
        let entry = entry.trim();
        let by_name = |at: &usize| entry.len() > 4 && uuid_text(*at).starts_with(entry);
        let by_number = entry.parse::<usize>().ok().filter(|at| *at < count);
        by_number.or_else(|| (0..count).find(by_name))
    });
    let mut seen = Vec::new();
    for device in named {
        match device {
            Some(device) if !seen.contains(&device) => seen.push(device),
            // A device named twice is an error to the driver: none is visible then.
            Some(_) => return Vec::new(),
            None => break,
        }
    }
    seen
}

fn environment() -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "a driver reads it, and this stands for one")]
    std::env::var(VISIBLE).ok()
}

/// `CUdevice_attribute`: what a device answers.
fn attribute(options: &Options, attribute: c_int) -> Answer<c_int> {
    let has = |flag: u32| c_int::from(options.flags & flag == 0);
    Ok(match attribute {
        1..=3 => 1_024,  // threads: of a block, by x, by y
        4 => 64,         // by z
        5 => c_int::MAX, // grid by x
        6 | 7 => 65_535, // by y, by z
        8 => 49_152,     // shared memory of a block
        10 => 32,        // warp
        12 => 65_536,    // registers of a block
        16 => 132,       // multiprocessors
        18 => c_int::from(options.flags & Options::INTEGRATED != 0),
        39 => 2_048,       // threads of a multiprocessor
        41 | 83 | 89 => 1, // unified addresses, managed memory
        75 => 9,           // compute capability
        102 if options.flags & Options::CLAIMS_VIRTUAL_MEMORY != 0 => 1,
        102 => has(Options::NO_VIRTUAL_MEMORY),
        110 => has(Options::NO_RDMA),
        115 => has(Options::NO_POOLS),
        ..=0 => return Err(INVALID_VALUE),
        _ => 0,
    })
}

export! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let visible = environment();
        state().init(visible.as_deref())
    }

    fn cuDriverGetVersion(version: Out<c_int>) {
        version.put(state().options.driver_version)
    }

    fn cuDeviceGetCount(count: Out<c_int>) {
        let state = state();
        state.started()?;
        let visible = state.visible.as_ref().map_or(0, Vec::len);
        count.put(c_int::try_from(visible).unwrap_or(c_int::MAX))
    }

    fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        state().ordinal(ordinal)?;
        device.put(ordinal)
    }

    fn cuDeviceGetName(name: Out<c_char>, room: c_int, device: c_int) {
        let device = state().ordinal(device)?;
        let room = usize::try_from(room).map_err(|_| INVALID_VALUE)?;
        put_text(name, room, &format!("{NAME} {device}"))
    }

    fn cuDeviceGetUuid(to: Out<[u8; 16]>, device: c_int) {
        to.put(uuid(state().ordinal(device)?))
    }

    fn cuDeviceGetUuid_v2(to: Out<[u8; 16]>, device: c_int) {
        to.put(uuid(state().ordinal(device)?))
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        let seat = { let state = state(); state.anywhere(state.ordinal(device)?)? };
        let all = seat.sim.raw().capacity();
        bytes.put(usize::try_from(all).unwrap_or(usize::MAX))
    }

    fn cuDeviceGetAttribute(value: Out<c_int>, which: c_int, device: c_int) {
        let state = state();
        state.ordinal(device)?;
        value.put(attribute(&state.options, which)?)
    }

    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, of: c_int) {
        let state = state();
        let is_other = state.ordinal(device)? != state.ordinal(of)?;
        can.put(c_int::from(is_other && state.options.flags & Options::NO_PEERS == 0))
    }

    fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: c_int) {
        let mut state = state();
        let device = state.ordinal(device)?;
        context.put(State::context(device))?;
        state.devices[device].retains += 1;
        Ok(())
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let (device, old) = {
            let mut state = state();
            let device = state.ordinal(device)?;
            (device, state.release(device)?)
        };
        if let Some(old) = old {
            bury(device, &old);
        }
        Ok(())
    }

    fn cuCtxGetCurrent(context: Out<u64>) {
        let state = state();
        state.started()?;
        context.put(state.current_context())
    }

    fn cuCtxSetCurrent(context: u64) {
        state().set_current(context)
    }

    // Only primary contexts exist; a program that links cudarc needs the name.
    fn cuCtxDestroy_v2() {
        Err(NOT_SUPPORTED)
    }

    fn cuCtxSynchronize() {
        let seat = current()?;
        state().spins += 1;
        seat.sim.raw().synchronize()
    }
}

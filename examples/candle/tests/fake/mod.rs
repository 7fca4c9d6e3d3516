//! The calls with which a test configures and queries the fake driver (`testing/fake-cuda`).
//!
//! candle links the driver, so the fake's Rust half, which has the driver's functions too, would
//! be a second driver in this process. These are the same calls of the one that is linked.
#![expect(unsafe_code, reason = "C functions of the library that stands for the driver")]

use std::ffi::{CStr, c_char, c_int};

/// `lowtide_fake_cuda::Options`.
#[repr(C)]
struct Options {
    order: u32,
    flags: u32,
    seed: u64,
    capacity: u64,
    granularity: u64,
    address_space: u64,
    context_overhead: u64,
    devices: u32,
    driver_version: c_int,
}

/// `Options::UNKNOWN_KERNELS`.
const UNKNOWN_KERNELS: u32 = 32;

/// `lowtide_cuda_sim::raw::Numbers`, of which the seventh is that of the pools.
type Numbers = [u64; 13];

/// The commands of `lowtide_fake_cuda` that the tests give, under its numbers. The options are the
/// largest part of both.
#[repr(C, u32)]
enum Command {
    Reset(Options) = 0,
    Calls { name: *const c_char } = 3,
    Numbers { device: u32, to: *mut Numbers } = 8,
    Faults { to: *mut c_char, room: usize } = 10,
}

unsafe extern "C" {
    fn fake_control(command: *const Command) -> u64;
}

/// Gives a command, and returns its answer.
fn act(command: &Command) -> u64 {
    // SAFETY: a command of the library's layout, whose pointers outlive the call.
    let answer = unsafe { fake_control(command) };
    assert_ne!(answer, u64::MAX, "the command failed");
    answer
}

/// Starts anew with one device of 80 GiB that has every kernel.
pub(crate) fn reset() {
    let options = Options {
        order: 0,
        flags: UNKNOWN_KERNELS,
        seed: 0,
        capacity: 0,
        granularity: 0,
        address_space: 0,
        context_overhead: 512 << 20,
        devices: 1,
        driver_version: 12_080,
    };
    act(&Command::Reset(options));
}

/// The number of calls of a function of the driver.
pub(crate) fn calls(name: &CStr) -> u64 {
    act(&Command::Calls { name: name.as_ptr() })
}

/// The number of pools, without the device's own.
pub(crate) fn pools() -> u64 {
    let mut numbers = [0; 13];
    act(&Command::Numbers { device: 0, to: &raw mut numbers });
    numbers[6]
}

/// Misuse of the driver, in words.
pub(crate) fn faults() -> String {
    let mut text = vec![0_u8; 1 << 16];
    act(&Command::Faults { to: text.as_mut_ptr().cast(), room: text.len() });
    let text = CStr::from_bytes_until_nul(&text).unwrap_or(c"too many faults");
    text.to_string_lossy().into_owned()
}

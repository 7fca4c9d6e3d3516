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

unsafe extern "C" {
    fn fake_reset(options: *const Options) -> u32;
    fn fake_calls(name: *const c_char) -> u64;
    fn fake_numbers(device: u32, to: *mut [u64; 14]) -> u32;
    fn fake_faults(to: *mut c_char, size: usize) -> usize;
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
    // SAFETY: options of the library's layout; it copies them.
    assert_eq!(unsafe { fake_reset(&raw const options) }, 0);
}

/// The number of calls of a function of the driver.
pub(crate) fn calls(name: &CStr) -> u64 {
    // SAFETY: a C string that outlives the call.
    unsafe { fake_calls(name.as_ptr()) }
}

/// The number of pools, without the device's own.
pub(crate) fn pools() -> u64 {
    let mut numbers = [0; 14];
    // SAFETY: room for as many numbers as the library has.
    assert_eq!(unsafe { fake_numbers(0, &raw mut numbers) }, 0);
    numbers[6]
}

/// Misuse of the driver, in words.
pub(crate) fn faults() -> String {
    let mut text = vec![0_u8; 1 << 16];
    // SAFETY: room for as many bytes as it says.
    unsafe { fake_faults(text.as_mut_ptr().cast(), text.len()) };
    let text = CStr::from_bytes_until_nul(&text).unwrap_or(c"too many faults");
    text.to_string_lossy().into_owned()
}

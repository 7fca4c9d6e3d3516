//! The structs of the header, and their versions.
//!
//! Each begins with `struct_size`: the caller's `sizeof`. A later version of a struct adds fields
//! at its end. A caller with an older header passes a smaller size, and gets the defaults of the
//! fields that it does not know. A caller with a newer header may pass a larger one: the fields
//! that this library does not know must be zero.
//!
//! Invariant: no byte beyond the caller's `struct_size` is read or written.
#![expect(unsafe_code, reason = "structs of the caller are read and written by address")]

use std::ffi::c_char;
use std::time::Duration;

use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{ArenaConfig, ByteSize};

use crate::failure::{Failure, Outcome, not_null};

/// Memory of CUDA devices.
pub const LOWTIDE_BACKEND_CUDA: u32 = 0;
/// Memory of the host, as on a device: for programs without a GPU, and tests.
pub const LOWTIDE_BACKEND_HOST: u32 = 1;

/// A decay time: idle memory is released at the next check, within a quarter of a second.
pub const LOWTIDE_DECAY_IMMEDIATE: u64 = u64::MAX - 1;
/// A decay time: idle memory stays until a shrink, or until other memory is short.
pub const LOWTIDE_DECAY_NEVER: u64 = u64::MAX;

/// The most bytes of a name, with its NUL. A guess: a name is a word or two.
const NAME_MAX: usize = 256;

/// The largest `struct_size` that is read: a page, which no struct here will reach.
const SIZE_MAX: usize = 4096;

/// The options of an allocator. Set `struct_size` to `sizeof(lowtide_options)`, and the other bytes
/// to zero for the defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "its layout is the header's")]
pub struct Options {
    /// `sizeof(lowtide_options)`.
    pub struct_size: usize,
    /// `LOWTIDE_BACKEND_CUDA` (default) or `LOWTIDE_BACKEND_HOST`.
    pub backend: u32,
    /// 0.
    pub reserved: u32,
    /// The name in error texts: UTF-8 that ends in NUL, at most 256 bytes, copied. NULL: `c`.
    pub name: *const c_char,
    /// The most bytes that each device may have committed. 0: no limit.
    pub limit_bytes: u64,
    /// The address space of each device and region, in bytes. 0: by the device's memory.
    pub reserve_bytes: u64,
    /// The time in milliseconds that idle memory stays, `LOWTIDE_DECAY_IMMEDIATE` or
    /// `LOWTIDE_DECAY_NEVER`. 0: 10,000.
    pub decay_ms: u64,
}

/// The figures of one device, or the sum of all devices of an allocator, at one instant. Sizes are
/// in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "its layout is the header's")]
pub struct Statistics {
    /// `sizeof(lowtide_statistics)`, set by the caller. After the call, the size that was filled
    /// in.
    pub struct_size: usize,
    /// Live blocks as they were requested.
    pub requested_bytes: u64,
    /// Live blocks after rounding up to 256 bytes.
    pub live_bytes: u64,
    /// Freed blocks whose work on a stream is not known to be complete.
    pub pending_bytes: u64,
    /// Committed memory in which nothing is live or pending.
    pub idle_bytes: u64,
    /// Memory obtained from the driver.
    pub committed_bytes: u64,
    /// The most memory that was ever committed; the sum of the devices' peaks for all devices.
    pub committed_peak_bytes: u64,
    /// The limit of committed memory; `UINT64_MAX` for none.
    pub limit_bytes: u64,
    /// Live blocks.
    pub live_blocks: u64,
    /// Successful allocations.
    pub allocs_total: u64,
    /// Freed blocks.
    pub frees_total: u64,
    /// Failed allocations.
    pub alloc_failures_total: u64,
    /// Failed calls of this library in the process, on every allocator.
    pub failed_calls_total: u64,
}

/// A live block.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "its layout is the header's")]
pub struct Block {
    /// `sizeof(lowtide_block)`, set by the caller. After the call, the size that was filled in.
    pub struct_size: usize,
    /// The first address.
    pub base: *mut std::ffi::c_void,
    /// The size after rounding up to 256 bytes.
    pub size: usize,
    /// The requested size in bytes.
    pub requested: usize,
    /// The device.
    pub device: i32,
    /// 0.
    pub reserved: u32,
}

/// A struct of the header, which begins with its size.
///
/// # Safety
/// The type is `repr(C)`, begins with a `usize`, and every byte of it may be zero.
pub(crate) unsafe trait Versioned: Copy {
    const NAME: &'static str;
    /// The size of its first version.
    const LEAST: usize;
}

// SAFETY: `repr(C)`, a `usize` first, then integers and a pointer that may be null.
unsafe impl Versioned for Options {
    const NAME: &'static str = "lowtide_options";
    const LEAST: usize = 48;
}

// SAFETY: `repr(C)`, a `usize` first, then integers.
unsafe impl Versioned for Statistics {
    const NAME: &'static str = "lowtide_statistics";
    const LEAST: usize = 104;
}

// SAFETY: `repr(C)`, a `usize` first, then integers and a pointer that may be null.
unsafe impl Versioned for Block {
    const NAME: &'static str = "lowtide_block";
    const LEAST: usize = 40;
}

const _: () = assert!(size_of::<Options>() >= Options::LEAST);
const _: () = assert!(size_of::<Statistics>() >= Statistics::LEAST);
const _: () = assert!(size_of::<Block>() >= Block::LEAST);

/// Reads the size of a struct of the caller, and checks it.
///
/// # Safety
/// `from` is NULL, or points to a `size_t` that may be read.
unsafe fn size_of_callers<T: Versioned>(from: *const T) -> Outcome<usize> {
    // SAFETY: the contract of this function, and not null: see `read` and `write`.
    let size = unsafe { from.cast::<usize>().read_unaligned() };
    if (T::LEAST..=SIZE_MAX).contains(&size) { Ok(size) } else { Err(of_other_version::<T>(size)) }
}

#[cold]
fn of_other_version<T: Versioned>(size: usize) -> Box<Failure> {
    Failure::Version { name: T::NAME, size, least: T::LEAST, known: size_of::<T>() }.into()
}

/// Reads a struct of the caller, whatever its version.
///
/// # Safety
/// `from` is NULL, or points to as many bytes as its first field says.
unsafe fn read<T: Versioned>(from: *const T, argument: &'static str) -> Outcome<T> {
    not_null(from, argument)?;
    // SAFETY: the contract of this function.
    let size = unsafe { size_of_callers(from) }?;
    let mut read = std::mem::MaybeUninit::<T>::zeroed();
    let known = size.min(size_of::<T>());
    // SAFETY: so many bytes may be read at `from`, and as many are at `read`, which is ours.
    unsafe {
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), read.as_mut_ptr().cast::<u8>(), known)
    };
    for offset in known..size {
        // SAFETY: within the bytes that the caller's size says.
        let beyond = unsafe { from.cast::<u8>().add(offset) };
        // SAFETY: as above.
        if unsafe { beyond.read() } != 0 {
            return Err(of_other_version::<T>(size));
        }
    }
    // SAFETY: every byte was zero or was copied, and any such bytes are a value (`Versioned`).
    Ok(unsafe { read.assume_init() })
}

/// Checks that a struct of the caller can be filled in, before the work is done.
///
/// # Safety
/// `to` is NULL, or points to as many bytes as its first field says.
pub(crate) unsafe fn check_room<T: Versioned>(to: *mut T, argument: &'static str) -> Outcome<()> {
    not_null(to, argument)?;
    // SAFETY: the contract of this function.
    unsafe { size_of_callers(to) }.map(drop)
}

/// Fills in a struct of the caller as far as both know it. The first field becomes that size.
///
/// # Safety
/// As for [`check_room`]; the bytes may be written.
pub(crate) unsafe fn write<T: Versioned>(
    to: *mut T,
    argument: &'static str,
    value: &T,
) -> Outcome<()> {
    not_null(to, argument)?;
    // SAFETY: the contract of this function.
    let known = unsafe { size_of_callers(to) }?.min(size_of::<T>());
    let from = std::ptr::from_ref(value).cast::<u8>();
    // SAFETY: `known` bytes are at both, and they are different objects: `value` is ours.
    unsafe { std::ptr::copy_nonoverlapping(from, to.cast::<u8>(), known) };
    // SAFETY: the caller's first field, which may be written.
    unsafe { to.cast::<usize>().write_unaligned(known) };
    Ok(())
}

/// The checked options of an allocator.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) is_host: bool,
    /// That of each arena, but for its name.
    arena: ArenaConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self { is_host: false, arena: ArenaConfig::new("c") }
    }
}

impl Config {
    /// Reads and checks options; the defaults for NULL.
    ///
    /// # Safety
    /// NULL, or options of as many bytes as their first field says, whose name is NULL or may be
    /// read up to its NUL.
    pub(crate) unsafe fn read(options: *const Options) -> Outcome<Self> {
        let mut config = Self::default();
        if options.is_null() {
            return Ok(config);
        }
        // SAFETY: the contract of this function.
        let options = unsafe { read(options, "options") }?;
        config.is_host = match options.backend {
            LOWTIDE_BACKEND_CUDA => false,
            LOWTIDE_BACKEND_HOST => true,
            other => return Err(invalid("options.backend", other, "0 (CUDA) or 1 (host)")),
        };
        if options.reserved != 0 {
            return Err(invalid("options.reserved", options.reserved, "0"));
        }
        let arena = &mut config.arena;
        if !options.name.is_null() {
            // SAFETY: the contract of this function.
            arena.name = unsafe { text(options.name, "options.name") }?;
        }
        if options.limit_bytes > 0 {
            arena.limit = ByteSize::new(options.limit_bytes);
        }
        if options.reserve_bytes > 0 {
            arena.reserve = ByteSize::new(options.reserve_bytes);
        }
        arena.decay = match options.decay_ms {
            0 => arena.decay,
            LOWTIDE_DECAY_NEVER => DecayTime::Never,
            LOWTIDE_DECAY_IMMEDIATE => DecayTime::AtOnce,
            millis => DecayTime::from_duration(Duration::from_millis(millis)),
        };
        Ok(config)
    }

    /// Returns the configuration of a device's arena.
    pub(crate) fn of_device(&self, device: usize) -> ArenaConfig {
        let mut config = self.arena.clone();
        config.name = format!("{}:{device}", config.name);
        config
    }
}

pub(crate) fn invalid(
    argument: &'static str,
    value: impl Into<i128>,
    expected: &'static str,
) -> Box<Failure> {
    Failure::InvalidArgument { argument, value: value.into(), expected }.into()
}

/// Copies a text of the caller.
///
/// # Safety
/// The text may be read up to its NUL, or its first [`NAME_MAX`] bytes.
unsafe fn text(from: *const c_char, argument: &'static str) -> Outcome<String> {
    // SAFETY: the contract of this function; it stops at the NUL.
    let length = unsafe { libc::strnlen(from, NAME_MAX) };
    // SAFETY: so many bytes were just read.
    let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), length) };
    match str::from_utf8(bytes) {
        Ok(text) if length < NAME_MAX => Ok(text.to_owned()),
        _ => Err(Failure::InvalidText { argument, most: NAME_MAX }.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Status;

    fn options() -> Options {
        Options {
            struct_size: size_of::<Options>(),
            backend: LOWTIDE_BACKEND_HOST,
            reserved: 0,
            name: c"tests".as_ptr(),
            limit_bytes: 1 << 20,
            reserve_bytes: 1 << 30,
            decay_ms: 250,
        }
    }

    fn status(options: &Options) -> Status {
        // SAFETY: options of their size, with a name of the program.
        let read = unsafe { Config::read(options) };
        read.map_or_else(|failure| failure.status(), |_| Status::Ok)
    }

    #[test]
    fn options_are_read_with_their_defaults() {
        // SAFETY: options of their size, with a name of the program.
        let config = unsafe { Config::read(&options()) }.expect("valid");
        let of = config.of_device(3);
        assert!(config.is_host && of.name == "tests:3");
        assert_eq!((of.limit, of.reserve), (ByteSize::mib(1), ByteSize::gib(1)));
        assert_eq!(of.decay, DecayTime::from_millis(250));
        let zero = Options {
            struct_size: size_of::<Options>(),
            backend: 0,
            reserved: 0,
            name: std::ptr::null(),
            limit_bytes: 0,
            reserve_bytes: 0,
            decay_ms: 0,
        };
        for zero in [&raw const zero, std::ptr::null()] {
            // SAFETY: null, or options of their size without a name.
            let config = unsafe { Config::read(zero) }.expect("valid");
            assert!(!config.is_host);
            assert_eq!(config.of_device(0), ArenaConfig::new("c:0"));
        }
        for (decay_ms, expected) in
            [(LOWTIDE_DECAY_IMMEDIATE, DecayTime::AtOnce), (LOWTIDE_DECAY_NEVER, DecayTime::Never)]
        {
            // SAFETY: as above.
            let config = unsafe { Config::read(&Options { decay_ms, ..options() }) };
            assert_eq!(config.expect("valid").of_device(0).decay, expected);
        }
    }

    #[test]
    fn values_outside_their_range_are_refused() {
        assert_eq!(status(&options()), Status::Ok);
        assert_eq!(status(&Options { backend: 2, ..options() }), Status::InvalidArgument);
        assert_eq!(status(&Options { reserved: 1, ..options() }), Status::InvalidArgument);
        let no_end = [b'x'; NAME_MAX + 1];
        let name = no_end.as_ptr().cast();
        assert_eq!(status(&Options { name, ..options() }), Status::InvalidArgument);
        let name = c"\xff".as_ptr();
        assert_eq!(status(&Options { name, ..options() }), Status::InvalidArgument);
        for struct_size in [0, 1, Options::LEAST - 1, SIZE_MAX + 1, usize::MAX] {
            let refused = status(&Options { struct_size, ..options() });
            assert_eq!(refused, Status::Version, "{struct_size}");
        }
    }

    #[test]
    fn a_newer_struct_is_read_if_what_is_unknown_is_zero() {
        #[repr(C)]
        struct Newer {
            options: Options,
            added: u64,
        }
        let struct_size = size_of::<Newer>();
        let mut newer = Newer { options: Options { struct_size, ..options() }, added: 0 };
        let read = |newer: &Newer| {
            // SAFETY: as many bytes as the size says.
            unsafe { Config::read(std::ptr::from_ref(newer).cast()) }.map(drop)
        };
        read(&newer).expect("nothing unknown is asked for");
        newer.added = 1 << 63;
        let refused = read(&newer).expect_err("it asks for something unknown");
        assert_eq!(refused.status(), Status::Version);
    }

    #[test]
    fn a_struct_is_filled_in_as_far_as_both_know_it() {
        #[repr(C)]
        struct Newer {
            block: Block,
            added: u64,
        }
        let base = std::ptr::without_provenance_mut(512);
        let found = Block { struct_size: 0, base, size: 256, requested: 1, device: 2, reserved: 0 };
        let mut newer =
            Newer { block: Block { struct_size: size_of::<Newer>(), ..found }, added: 7 };
        // SAFETY: as many bytes as the size says.
        unsafe { write((&raw mut newer).cast::<Block>(), "out", &found) }.expect("room");
        assert_eq!((newer.block.struct_size, newer.added), (size_of::<Block>(), 7));
        assert_eq!((newer.block.base, newer.block.size, newer.block.device), (base, 256, 2));
        let mut small = Block { struct_size: 8, ..found };
        // SAFETY: as above.
        let refused = unsafe { check_room(&raw mut small, "out") }.expect_err("too small");
        assert_eq!(refused.status(), Status::Version);
        // SAFETY: null is refused.
        let refused = unsafe { check_room(std::ptr::null_mut::<Block>(), "out") };
        assert_eq!(refused.expect_err("null").status(), Status::NullPointer);
    }
}

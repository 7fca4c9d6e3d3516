//! Failures of C calls: their codes, and the text of the last one of each thread.
//!
//! The text is in a buffer of the thread, so that a failure allocates nothing for it and a reader
//! needs no copy.
//!
//! Invariant: the buffer ends in NUL, and holds at most [`TEXT_MAX`] bytes with it.
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::fmt::{self, Write as _};
use std::mem::ManuallyDrop;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_gpu::DeviceError;
use lowtide_gpu_driver::{DeviceAddress, DriverError};
use thiserror::Error;

/// The result of a call. New codes may be added; treat an unknown one as a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[expect(clippy::exhaustive_enums, reason = "the codes of the header")]
pub enum Status {
    /// The call succeeded.
    Ok = 0,
    /// A pointer that must not be NULL is.
    NullPointer = 1,
    /// The handle is not that of an open allocator.
    InvalidHandle = 2,
    /// A value is outside its range; the text names it.
    InvalidArgument = 3,
    /// There is no device with this number.
    InvalidDevice = 4,
    /// `struct_size` or the fields of a struct are not of a version that the library knows.
    Version = 5,
    /// No memory or no addresses are left, or the limit is reached.
    OutOfMemory = 6,
    /// The size can never be allocated.
    TooLarge = 7,
    /// No live block starts at the address: it was freed before.
    NotLive = 8,
    /// The address is inside a block; expected its start.
    InteriorAddress = 9,
    /// The address is not of this allocator, or not of this device.
    ForeignAddress = 10,
    /// Blocks are live; expected none.
    LiveBlocks = 11,
    /// The allocator is being closed by another thread.
    Closed = 12,
    /// Too many allocators or streams are open.
    TooMany = 13,
    /// A default allocator is set already.
    DefaultIsSet = 14,
    /// There is no CUDA driver, or no usable device.
    Unavailable = 15,
    /// A stream captures a CUDA graph, and the call would invalidate the capture.
    Capturing = 16,
    /// A call of the CUDA driver failed.
    Driver = 17,
    /// The process was forked after the library was used, and this is the child.
    Forked = 18,
    /// The library failed: a bug.
    Internal = 19,
}

/// The bytes of the text of a failure, with the NUL at its end. A guess: the longest of an
/// arena, with its figures, has some 300.
pub(crate) const TEXT_MAX: usize = 512;

/// A failed call.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    #[error("`{argument}` is NULL: expected a pointer")]
    NullPointer { argument: &'static str },
    #[error("handle {handle:#x} is not that of an open allocator (closed, or never opened)")]
    InvalidHandle { handle: u64 },
    #[error("`{argument}` is {value}: expected {expected}")]
    InvalidArgument { argument: &'static str, value: i128, expected: &'static str },
    #[error("`{argument}` has no end within {most} bytes, or is not UTF-8")]
    InvalidText { argument: &'static str, most: usize },
    #[error("`device` is {device}: expected 0 to {last}")]
    InvalidDevice { device: i32, last: usize },
    #[error(
        "`struct_size` of {name} is {size}: expected {least} or more, and zeros beyond the {known} \
         bytes that this library knows"
    )]
    Version { name: &'static str, size: usize, least: usize, known: usize },
    #[error("no allocation was made on device {device}: address {at} is not of this allocator")]
    NoSuchArena { device: i32, at: DeviceAddress },
    #[error("address {at} is not of this allocator, on none of its devices")]
    NoSuchAddress { at: DeviceAddress },
    #[error("{count} {what} are open: expected fewer; {hint}")]
    TooMany { count: usize, what: &'static str, hint: &'static str },
    #[error("a default allocator is set already: expected none; close it first")]
    DefaultIsSet,
    #[error("cannot start a thread: {message}")]
    Thread { message: String },
    #[error("the process was forked after the library was used: expected a new process (exec)")]
    Forked,
    #[error(transparent)]
    Arena(DeviceError),
    /// A device cannot be opened.
    #[error(transparent)]
    Open(DriverError),
}

/// The result of an act. The failure is boxed, so that a success is returned in registers.
pub(crate) type Outcome<T> = Result<T, Box<Failure>>;

impl From<DeviceError> for Box<Failure> {
    #[cold]
    fn from(error: DeviceError) -> Self {
        Self::new(Failure::Arena(error))
    }
}

impl From<DriverError> for Box<Failure> {
    #[cold]
    fn from(error: DriverError) -> Self {
        DeviceError::from(error).into()
    }
}

impl Failure {
    /// Returns the code of the failure.
    pub(crate) fn status(&self) -> Status {
        match self {
            Self::NullPointer { .. } => Status::NullPointer,
            Self::InvalidHandle { .. } => Status::InvalidHandle,
            Self::InvalidArgument { .. } | Self::InvalidText { .. } => Status::InvalidArgument,
            Self::InvalidDevice { .. } => Status::InvalidDevice,
            Self::Version { .. } => Status::Version,
            Self::NoSuchArena { .. } | Self::NoSuchAddress { .. } => Status::ForeignAddress,
            Self::TooMany { .. } => Status::TooMany,
            Self::DefaultIsSet => Status::DefaultIsSet,
            Self::Thread { .. } => Status::Internal,
            Self::Forked => Status::Forked,
            Self::Arena(error) => of_arena(error),
            Self::Open(error) => of_open(error),
        }
    }
}

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` to `CUDA_ERROR_CAPTURED_EVENT`: the codes of captures.
const CAPTURES: RangeInclusive<i64> = 900..=907;

const fn of_arena(error: &DeviceError) -> Status {
    match error {
        error if error.is_out_of_memory() => Status::OutOfMemory,
        DeviceError::TooLarge { .. } => Status::TooLarge,
        DeviceError::Alignment { .. } | DeviceError::ZeroSize => Status::InvalidArgument,
        DeviceError::NotLive { .. } => Status::NotLive,
        DeviceError::InteriorAddress { .. } => Status::InteriorAddress,
        DeviceError::ForeignAddress { .. } => Status::ForeignAddress,
        DeviceError::LiveBlocks { .. } => Status::LiveBlocks,
        DeviceError::Closed { .. } => Status::Closed,
        DeviceError::Capturing { .. } => Status::Capturing,
        DeviceError::Forked => Status::Forked,
        DeviceError::Driver(error) => of_driver(error),
        _ => Status::Internal,
    }
}

const fn of_driver(error: &DriverError) -> Status {
    match error {
        DriverError::Refused { code, .. }
            if *code >= *CAPTURES.start() && *code <= *CAPTURES.end() =>
        {
            Status::Capturing
        }
        _ => Status::Driver,
    }
}

fn of_open(error: &DriverError) -> Status {
    match error {
        DriverError::NoSuchDevice { .. } => Status::InvalidDevice,
        // The driver does not start.
        DriverError::Refused { call: "cuInit", .. } => Status::Unavailable,
        DriverError::OutOfMemory { .. }
        | DriverError::Refused { .. }
        | DriverError::IllegalAddress { .. }
        | DriverError::ContextLost { .. } => of_driver(error),
        _ => Status::Unavailable,
    }
}

/// Returns the code with its name in the header.
pub(crate) const fn name(status: i32) -> &'static CStr {
    match status {
        0 => c"LOWTIDE_STATUS_OK",
        1 => c"LOWTIDE_STATUS_NULL_POINTER",
        2 => c"LOWTIDE_STATUS_INVALID_HANDLE",
        3 => c"LOWTIDE_STATUS_INVALID_ARGUMENT",
        4 => c"LOWTIDE_STATUS_INVALID_DEVICE",
        5 => c"LOWTIDE_STATUS_VERSION",
        6 => c"LOWTIDE_STATUS_OUT_OF_MEMORY",
        7 => c"LOWTIDE_STATUS_TOO_LARGE",
        8 => c"LOWTIDE_STATUS_NOT_LIVE",
        9 => c"LOWTIDE_STATUS_INTERIOR_ADDRESS",
        10 => c"LOWTIDE_STATUS_FOREIGN_ADDRESS",
        11 => c"LOWTIDE_STATUS_LIVE_BLOCKS",
        12 => c"LOWTIDE_STATUS_CLOSED",
        13 => c"LOWTIDE_STATUS_TOO_MANY",
        14 => c"LOWTIDE_STATUS_DEFAULT_IS_SET",
        15 => c"LOWTIDE_STATUS_UNAVAILABLE",
        16 => c"LOWTIDE_STATUS_CAPTURING",
        17 => c"LOWTIDE_STATUS_DRIVER",
        18 => c"LOWTIDE_STATUS_FORKED",
        19 => c"LOWTIDE_STATUS_INTERNAL",
        _ => c"unknown status",
    }
}

/// The number of failed calls of the process.
static FAILED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of failed calls of the process.
pub(crate) fn failed_total() -> u64 {
    FAILED.load(Ordering::Relaxed)
}

/// Runs the body of a C function. A failure is counted and noted, a panic too; neither leaves this
/// function.
#[inline(always)]
pub(crate) fn guard(act: impl FnOnce() -> Outcome<()>) -> Status {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(())) => Status::Ok,
        Ok(Err(failure)) => refuse(&failure),
        Err(payload) => {
            // Its drop may panic as well.
            let payload = ManuallyDrop::new(payload);
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            note(format_args!("internal error: {}", text.unwrap_or("a panic")));
            Status::Internal
        }
    }
}

/// As [`guard`], for a function that returns an address: NULL after a failure.
#[inline(always)]
pub(crate) fn guard_address(act: impl FnOnce() -> Outcome<*mut c_void>) -> *mut c_void {
    let mut address = std::ptr::null_mut();
    guard(|| {
        address = act()?;
        Ok(())
    });
    address
}

#[cold]
fn refuse(failure: &Failure) -> Status {
    note(format_args!("{failure}"));
    failure.status()
}

thread_local! {
    /// The text of the last failure of this thread. Without a destructor: its address stays valid
    /// until the thread has ended.
    static LAST: Cell<[u8; TEXT_MAX]> = const { Cell::new([0; TEXT_MAX]) };
}

/// Returns the text of the last failure of this thread; empty before the first.
pub(crate) fn last() -> *const c_char {
    LAST.try_with(|last| last.as_ptr().cast::<c_char>().cast_const()).unwrap_or(c"".as_ptr())
}

#[cold]
fn note(text: fmt::Arguments<'_>) {
    FAILED.fetch_add(1, Ordering::Relaxed);
    let mut written = Bounded { bytes: [0; TEXT_MAX], len: 0 };
    // A `Display` that panics leaves what was written so far.
    let _ = catch_unwind(AssertUnwindSafe(|| written.write_fmt(text)));
    // C reads it between calls on this thread.
    let _ = LAST.try_with(|last| last.set(written.bytes));
}

/// Takes as much text as fits before the NUL, in whole characters.
struct Bounded {
    bytes: [u8; TEXT_MAX],
    len: usize,
}

impl fmt::Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            // A NUL would end the text.
            let character = if character == '\0' { ' ' } else { character };
            let end = self.len + character.len_utf8();
            if end >= TEXT_MAX {
                return Err(fmt::Error);
            }
            character.encode_utf8(&mut self.bytes[self.len..end]);
            self.len = end;
        }
        Ok(())
    }
}

/// Returns an error unless the pointer is one.
pub(crate) fn not_null<T>(pointer: *const T, argument: &'static str) -> Outcome<()> {
    if pointer.is_null() { Err(Failure::NullPointer { argument }.into()) } else { Ok(()) }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "the text is read by its address")]
mod tests {
    use super::*;

    fn last_text() -> String {
        // SAFETY: the text of this thread, which ends in NUL.
        let text = unsafe { CStr::from_ptr(last()) };
        text.to_str().expect("whole characters").to_owned()
    }

    #[test]
    fn a_failure_is_noted_and_a_success_leaves_the_last_one() {
        assert_eq!(last_text(), "");
        let before = failed_total();
        let status = guard(|| Err(Failure::InvalidHandle { handle: 0x42 }.into()));
        assert_eq!(status, Status::InvalidHandle);
        assert!(last_text().starts_with("handle 0x42 is not"), "{}", last_text());
        assert_eq!(guard(|| Ok(())), Status::Ok);
        assert!(last_text().starts_with("handle 0x42 is not"));
        assert!(failed_total() > before);
    }

    #[test]
    fn a_panic_is_a_status_and_so_is_one_whose_value_panics_when_dropped() {
        struct Explosive;
        impl Drop for Explosive {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        assert_eq!(guard(|| panic!("on purpose")), Status::Internal);
        assert_eq!(last_text(), "internal error: on purpose");
        let status = guard(|| std::panic::panic_any(Explosive));
        assert_eq!((status, last_text().as_str()), (Status::Internal, "internal error: a panic"));
        assert!(guard_address(|| panic!("again")).is_null());
    }

    #[test]
    fn a_long_text_ends_in_whole_characters_and_a_nul_in_it_is_a_space() {
        note(format_args!("{}", "a\0é".repeat(TEXT_MAX)));
        let text = last_text();
        assert!(text.starts_with("a éa é") && text.len() >= TEXT_MAX - 3 && text.len() < TEXT_MAX);
        note(format_args!("{}", "x".repeat(TEXT_MAX)));
        assert_eq!(last_text().len(), TEXT_MAX - 1);
        note(format_args!("short"));
        assert_eq!(last_text(), "short");
    }

    #[test]
    fn every_code_has_its_name() {
        let last = Status::Internal as i32;
        for status in 0..=last {
            assert!(name(status).to_bytes().starts_with(b"LOWTIDE_STATUS_"), "{status}");
        }
        for unknown in [-1, last + 1, i32::MAX, i32::MIN] {
            assert_eq!(name(unknown), c"unknown status");
        }
    }
}

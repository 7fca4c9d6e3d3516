//! Pointers that cross the boundary. They are read and written in this file only.
//!
//! The types appear in the signatures of exported functions, where a C caller passes a pointer. As
//! cuda.h demands, such a pointer is null, or valid during the call for the reads and writes of the
//! function.
//!
//! Invariant: a null pointer is an error (1) and is never followed.
#![expect(unsafe_code, reason = "follows pointers of C callers")]

use std::ffi::{CStr, c_char, c_void};

use crate::call::{Answer, INVALID_VALUE};

/// A pointer through which a call returns an answer.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// A place of the caller's.
    pub(crate) const fn of(place: *mut T) -> Self {
        Self(place)
    }

    pub(crate) const fn is_absent(&self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn put(self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and then by the promise of the C caller (head of this file) valid for
        // the write of one T; no alignment is asked for.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Returns what is there before the answer: for an argument that goes both ways.
    pub(crate) fn get(&self) -> Answer<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }

    /// As [`Out::put`], where the caller may leave the answer out.
    pub(crate) fn put_if_asked(self, value: T) {
        let _ = self.put(value);
    }

    /// The place of the element `at` of an array.
    pub(crate) fn element(self, at: usize) -> Self {
        Self(self.0.wrapping_add(at))
    }
}

/// An argument that a call receives by reference.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// An argument of the caller's.
    pub(crate) const fn of(argument: &T) -> Self {
        Self(argument)
    }

    pub(crate) fn get(self) -> Answer<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and then by the promise of the C caller (head of this file) valid for
        // the read of one T of plain numbers; no alignment is asked for.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The element `at` of an array.
    pub(crate) fn element(self, at: usize) -> Answer<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        Self(self.0.wrapping_add(at)).get()
    }
}

/// An untyped place or value, whose size follows from another argument.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Untyped(*mut c_void);

impl Untyped {
    pub(crate) fn address(self) -> u64 {
        self.0.addr() as u64
    }

    pub(crate) const fn pointer(self) -> *mut c_void {
        self.0
    }

    pub(crate) const fn of(pointer: *mut c_void) -> Self {
        Self(pointer)
    }

    pub(crate) const fn out<T>(self) -> Out<T> {
        Out(self.0.cast())
    }

    pub(crate) const fn input<T>(self) -> In<T> {
        In(self.0.cast())
    }
}

/// A text that ends with a zero.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// A text of the caller's.
    pub(crate) const fn of(text: &CStr) -> Self {
        Self(text.as_ptr())
    }

    pub(crate) fn get(self) -> Answer<String> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and then by the promise of the C caller (head of this file) a text
        // that ends with a zero; it is copied before the call returns.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// Puts a text with its zero into an array of so many bytes; cut off where it is too long.
pub(crate) fn put_text(to: Out<c_char>, room: usize, text: &str) -> Answer {
    let Some(last) = room.checked_sub(1) else { return Err(INVALID_VALUE) };
    let bytes = text.bytes().take(last).chain([0]);
    for (at, byte) in bytes.enumerate() {
        to.element(at).put(byte.cast_signed())?;
    }
    Ok(())
}

/// The arguments of a kernel: a pointer to each.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arguments(*mut *mut c_void);

impl Arguments {
    /// The argument `at`, of 1, 2, 4 or 8 bytes, widened.
    pub(crate) fn get(self, at: usize, size: usize) -> Answer<u64> {
        let pointer = In(self.0.cast_const()).element(at)?;
        let mut bytes = [0; 8];
        for (offset, byte) in bytes.iter_mut().enumerate().take(size) {
            *byte = In(pointer.cast::<u8>().cast_const()).element(offset)?;
        }
        Ok(u64::from_le_bytes(bytes))
    }

    pub(crate) const fn is_absent(&self) -> bool {
        self.0.is_null()
    }
}

/// A function of the C caller's; null is `None`.
pub(crate) type Function = Option<unsafe extern "C" fn(*mut c_void)>;

/// A function of the C caller's, and what it is called with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Callback {
    function: unsafe extern "C" fn(*mut c_void),
    data: usize,
}

impl Callback {
    pub(crate) fn new(function: Function, data: Untyped) -> Answer<Self> {
        let function = function.ok_or(INVALID_VALUE)?;
        Ok(Self { function, data: data.0.expose_provenance() })
    }

    pub(crate) fn call(self) {
        let data = std::ptr::with_exposed_provenance_mut(self.data);
        // SAFETY: cuda.h, cuLaunchHostFunc: the function is called with the data that was given
        // with it, from a thread of the driver's choice; the C caller keeps both alive till then.
        unsafe { (self.function)(data) };
    }
}

/// Exports functions under their C names. Each passes [`crate::call::called`].
macro_rules! export {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> u32 {
            $crate::call::called(stringify!($name), move || -> $crate::call::Answer { $body })
        }
    )* };
}
pub(crate) use export;

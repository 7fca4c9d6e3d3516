//! Detection of `fork`: is this still the process that created an object?
//!
//! After `fork` only the calling thread exists in the child. The crate's threads are gone, and a
//! device context is unusable. Each part that owns threads or device memory keeps a [`Birth`] and
//! checks it before every operation. In a child the operation returns a typed error, and drop does
//! nothing.
//!
//! Cost: one atomic load. A handler, registered once with `pthread_atfork`, counts the process
//! generations.
//!
//! Invariant: `birth.is_here() = (forks between the birth's process and this one = 0)`.
#![expect(unsafe_code, reason = "registering a fork handler is a C call")]

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

static GENERATION: AtomicU64 = AtomicU64::new(0);
static REGISTER: Once = Once::new();

extern "C" fn in_child() {
    // An atomic addition is async-signal-safe, as a handler in the child of a threaded process
    // must be (POSIX.1-2017, pthread_atfork, rationale).
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Registers functions that run around each fork, on the thread that forks: `before`, if any, in the
/// parent before the fork, `after` in the parent and in the child after it. Does nothing if the
/// registration fails.
pub fn around(before: Option<extern "C" fn()>, after: extern "C" fn()) {
    // SAFETY: these are functions of the required type with static lifetime; what they may do in a
    // child is their author's to keep to.
    let _ = unsafe { libc::pthread_atfork(before.map(|it| it as _), Some(after), Some(after)) };
}

/// The process generation in which an object was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Birth(u64);

impl Default for Birth {
    fn default() -> Self {
        Self::now()
    }
}

impl Birth {
    /// Returns the generation of the current process.
    #[must_use]
    pub fn now() -> Self {
        REGISTER.call_once(|| {
            // SAFETY: `pthread_atfork` accepts null handlers; `in_child` is a function of the
            // required type with static lifetime and does only an atomic addition. A failure
            // (ENOMEM) leaves forks undetected, which only loses the typed error.
            let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Returns the number of the process generation; never `u64::MAX`.
    #[must_use]
    pub const fn generation(self) -> u64 {
        self.0
    }

    /// Returns `true` if this is still the process in which the value was created. Costs one
    /// relaxed load.
    #[must_use]
    #[inline]
    pub fn is_here(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_knows_that_it_is_not_the_parent() {
        let birth = Birth::now();
        assert!(birth.is_here());
        // SAFETY: the child calls only an atomic load and `_exit`, both async-signal-safe.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(birth.is_here());
            // SAFETY: ends the child at once, without running the parent's exit handlers.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0, "fork failed");
        let mut status = 0;
        // SAFETY: `status` is a valid place for an int, and `child` is our own child.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(waited, child);
        assert!(libc::WIFEXITED(status));
        assert_eq!(libc::WEXITSTATUS(status), 0, "the child took itself for the parent");
        assert!(birth.is_here());
    }
}

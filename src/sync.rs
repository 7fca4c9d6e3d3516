//! The standard library's synchronisation, or loom's in a build for model checking.
//!
//! Code that is model-checked imports from here and from nowhere else, so that one source runs
//! under both. Locks are taken through [`lock`], which ignores poison: every critical section in
//! this crate keeps its invariants at each point where it can unwind, and a panic of a caller's
//! closure on one thread must not stop the service on the others.

#[cfg(lowtide_loom)]
pub use loom::sync::atomic;
#[cfg(lowtide_loom)]
pub use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(not(lowtide_loom))]
pub use std::sync::atomic;
#[cfg(not(lowtide_loom))]
pub use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use std::sync::PoisonError;

/// Takes the lock, poisoned or not.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives the lock up until the condition variable is notified, then takes it again; may also
/// return without a notification.
pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

//! Locks for critical sections of a few instructions. In a build for model checking, loom's locks.

/// A lock for critical sections of a few instructions that is almost never contended. Acquiring the
/// lock costs one atomic operation, and releasing it none. A waiting thread yields.
#[cfg(not(lowtide_loom))]
pub(crate) type Brief<T> = spin::mutex::SpinMutex<T, spin::Yield>;
#[cfg(not(lowtide_loom))]
pub(crate) use spin::mutex::SpinMutexGuard as BriefGuard;

#[cfg(lowtide_loom)]
pub(crate) use loom::sync::{Mutex as Brief, MutexGuard as BriefGuard};

/// Takes a brief lock.
pub(crate) fn brief<T>(brief: &Brief<T>) -> BriefGuard<'_, T> {
    #[cfg(not(lowtide_loom))]
    return brief.lock();
    #[cfg(lowtide_loom)]
    return lowtide_core::sync::lock(brief);
}

/// Takes a brief lock if it is free.
#[inline]
pub(crate) fn try_brief<T>(brief: &Brief<T>) -> Option<BriefGuard<'_, T>> {
    #[cfg(not(lowtide_loom))]
    return brief.try_lock();
    #[cfg(lowtide_loom)]
    return lowtide_core::sync::try_lock(brief);
}

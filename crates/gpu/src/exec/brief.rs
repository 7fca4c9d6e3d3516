//! Locks for critical sections of a few instructions, or loom's in a build for model checking.

/// A lock for critical sections of a few instructions that is almost never contended. Taking it
/// costs one atomic operation, releasing it none. A waiting thread yields.
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

//! Atomics and locks in place of those of `lowtide_core::sync`, for tests: they record the addresses
//! that a thread writes. Counts of references are not recorded; they are next to what is.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Deref;
use std::ptr::from_ref;
use std::sync::{self, LockResult, MutexGuard, RwLockReadGuard, RwLockWriteGuard};

thread_local! {
    static WRITTEN: RefCell<Option<BTreeSet<usize>>> = const { RefCell::new(None) };
}

/// Runs the work, and returns the addresses that it writes on this thread.
pub(crate) fn written(work: impl FnOnce()) -> BTreeSet<usize> {
    WRITTEN.set(Some(BTreeSet::new()));
    work();
    WRITTEN.take().unwrap_or_default()
}

fn writes<T>(at: &T) {
    let add = |written: &RefCell<Option<BTreeSet<usize>>>| {
        written.borrow_mut().as_mut().map(|written| written.insert(from_ref(at).addr()))
    };
    // A thread that ends records nothing.
    let _ = WRITTEN.try_with(add);
}

/// The atomics.
pub(crate) mod atomic {
    pub(crate) use std::sync::atomic::Ordering;

    use super::{Deref, writes};

    macro_rules! recording {
        ($name:ident, $value:ty $(, $write:ident)*) => {
            #[derive(Debug, Default)]
            pub(crate) struct $name(std::sync::atomic::$name);

            impl Deref for $name {
                type Target = std::sync::atomic::$name;

                fn deref(&self) -> &Self::Target {
                    &self.0
                }
            }

            impl $name {
                #[allow(dead_code, reason = "not each is created with a value")]
                pub(crate) const fn new(value: $value) -> Self {
                    Self(std::sync::atomic::$name::new(value))
                }

                pub(crate) fn store(&self, value: $value, order: Ordering) {
                    writes(self);
                    self.0.store(value, order);
                }

                $(pub(crate) fn $write(&self, value: $value, order: Ordering) -> $value {
                    writes(self);
                    self.0.$write(value, order)
                })*
            }
        };
    }

    recording!(AtomicBool, bool);
    recording!(AtomicU8, u8, fetch_or);
    recording!(AtomicU64, u64, fetch_add, fetch_sub, fetch_max);

    impl AtomicU64 {
        pub(crate) fn fetch_update(
            &self,
            set: Ordering,
            fetch: Ordering,
            to: impl FnMut(u64) -> Option<u64>,
        ) -> Result<u64, u64> {
            self.0.fetch_update(set, fetch, to).inspect(|_| writes(self))
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    writes(mutex);
    lowtide_core::sync::lock(&mutex.0)
}

#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        writes(self);
        self.0.read()
    }

    pub(crate) fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        writes(self);
        self.0.write()
    }
}

//! The standard library's synchronisation primitives, or loom's in a build for model checking.
//!
//! Model-checked code imports its primitives only from here, so that one source runs under both.
//! [`lock`] ignores poison: every critical section in this crate keeps its invariants at each point
//! where it can unwind, and a panic in a caller's closure on one thread must not stop the service
//! on the others. Such closures run in [`caught`].

#[cfg(lowtide_loom)]
pub use loom::sync::atomic;
#[cfg(lowtide_loom)]
pub use loom::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};
#[cfg(not(lowtide_loom))]
pub use std::sync::atomic;
#[cfg(not(lowtide_loom))]
pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};

use std::any::Any;
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{PoisonError, TryLockError};

/// Takes the lock and ignores poison.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the lock if it is free and ignores poison.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Releases the lock until the condition variable is notified, then takes it again. May also return
/// without a notification.
pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Runs code that may panic. Nothing unwinds out of it, not even from the drop of the panic's
/// payload.
///
/// # Errors
/// The panic's message, or "no message".
pub fn caught<T>(act: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(act)).map_err(|thrown| {
        let said = message(&*thrown);
        if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(thrown))) {
            // Its drop may panic as well, and so on, so it is leaked.
            let _ = ManuallyDrop::new(second);
        }
        said
    })
}

#[cfg(not(lowtide_loom))]
thread_local! {
    /// `true` while this thread does background work.
    static BACKGROUND: Cell<bool> = const { Cell::new(false) };
}
#[cfg(lowtide_loom)]
loom::thread_local! {
    static BACKGROUND: Cell<bool> = Cell::new(false);
}

/// Marks its thread as background or foreground until it is dropped.
struct Background {
    before: bool,
    /// The mark belongs to the thread, so the guard must be dropped there.
    _here: PhantomData<*const ()>,
}

/// Marks this thread as one that does background work, at times that the program does not choose.
/// On such a thread nothing waits for all work of a device, because that would invalidate every
/// graph capture in the context.
#[must_use = "the mark ends when this is dropped"]
pub fn background() -> impl Drop {
    Background { before: BACKGROUND.with(|of| of.replace(true)), _here: PhantomData }
}

/// Marks the following work on this thread as the program's own. A callback that runs in background
/// work may wait for the device work that it requests.
#[must_use = "the mark ends when this is dropped"]
pub fn foreground() -> impl Drop {
    Background { before: BACKGROUND.with(|of| of.replace(false)), _here: PhantomData }
}

/// Returns `true` while this thread does background work.
pub fn is_background() -> bool {
    BACKGROUND.with(Cell::get)
}

impl Drop for Background {
    fn drop(&mut self) {
        BACKGROUND.with(|of| of.set(self.before));
    }
}

fn message(thrown: &(dyn Any + Send)) -> String {
    let text = thrown.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| thrown.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".to_owned())
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::panic::panic_any;

    use super::*;

    #[test]
    fn background_work_ends_with_its_guard_on_its_own_thread() {
        let outer = background();
        drop(background());
        {
            let _own = foreground();
            assert!(!is_background());
        }
        assert!(is_background() && !std::thread::spawn(is_background).join().expect("no panic"));
        let unwound = caught(|| {
            let _inner = background();
            panic!("in the background");
        });
        drop(outer);
        assert!(unwound.is_err() && !is_background());
    }

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic_any(Self);
        }
    }

    #[test]
    fn nothing_unwinds_out_of_what_was_caught() {
        assert_eq!(caught(|| 7), Ok(7));
        assert_eq!(caught(|| panic!("text")), Err::<(), _>("text".to_owned()));
        assert_eq!(caught(|| panic!("text {}", 1)), Err::<(), _>("text 1".to_owned()));
        assert_eq!(caught(|| panic_any(Bomb)), Err::<(), _>("no message".to_owned()));
    }
}

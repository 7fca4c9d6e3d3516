//! Entering without blocking a thread: a future that resolves to the lease.
//!
//! A separate thread wakes a sleeping arena and ends afterwards, since the driver's calls block. It
//! is independent of runtimes.
//!
//! Invariants: a future that waits is woken at least once when the wait is over; a dropped future
//! blocks no one.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;

use super::phase::{Phase, Sleep};
use crate::api::arena::DeviceArena;
use crate::api::lease::Lease;
use crate::exec::inner::ArenaInner;
use crate::types::error::DeviceError;
use lowtide_core::sync::caught;

/// The future of [`DeviceArena::enter_async`]. Dropping it cancels the wait, but not a wake of the
/// arena in progress.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is awaited"]
pub struct EnterFuture {
    arena: Arc<ArenaInner>,
    /// The number of wakes that had ended when it began to wait.
    before: Option<u64>,
    /// The id of its wait.
    waits: Option<u64>,
}

impl DeviceArena {
    /// Returns a lease, like [`DeviceArena::enter`], without blocking while a sleeping arena wakes:
    /// a separate thread wakes it. Needs no runtime. While blocks are being moved it may block for
    /// the duration of one copy.
    ///
    /// # Errors
    /// The future returns the errors of [`DeviceArena::enter`], and [`DeviceError::Thread`] if no
    /// thread could be started.
    pub fn enter_async(&self) -> EnterFuture {
        EnterFuture { arena: Arc::clone(self.inner()), before: None, waits: None }
    }
}

impl Future for EnterFuture {
    type Output = Result<Lease, DeviceError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Err(error) = this.arena.check_open() {
            return Poll::Ready(Err(error));
        }
        // Its clone and its drop are not ours, and so with no lock held.
        let mut waker = Some(context.waker().clone());
        let mut books = this.arena.lock();
        let ended = books.sleep.attempts;
        let before = *this.before.get_or_insert(ended);
        match books.sleep.phase {
            Phase::Awake | Phase::Draining(_) => {
                drop(books);
                if let Some(entered) = Lease::try_of(&this.arena).transpose() {
                    return Poll::Ready(entered);
                }
                context.waker().wake_by_ref(); // it fell asleep meanwhile
            }
            Phase::Asleep => {
                if let Some(error) = books.sleep.failed_since(before) {
                    return Poll::Ready(Err(error));
                }
                books.sleep.phase = Phase::Waking;
                books.sleep.tell(&mut this.waits, &mut waker);
                drop(books);
                let arena = Arc::clone(&this.arena);
                let rise = move || drop(arena.rise(arena.sleep.wake_timeout));
                let thread = thread::Builder::new().name("lowtide-wake".to_owned());
                if let Err(error) = thread.spawn(rise) {
                    return Poll::Ready(Err(this.arena.no_thread(&error)));
                }
            }
            Phase::Falling | Phase::Waking => books.sleep.tell(&mut this.waits, &mut waker),
        }
        Poll::Pending
    }
}

impl Drop for EnterFuture {
    /// Gives up the wait. In a forked child does nothing.
    fn drop(&mut self) {
        let Some(waits) = self.waits.filter(|_| self.arena.check_here().is_ok()) else { return };
        let waker = self.arena.lock().sleep.wakers.remove(&waits);
        let _ = caught(|| drop(waker)); // not ours, and nothing unwinds out of a drop
    }
}

impl Sleep {
    /// Registers this waker for the end of a wait; the waker registered before is replaced.
    fn tell(&mut self, waits: &mut Option<u64>, waker: &mut Option<Waker>) {
        let number = *waits.get_or_insert_with(|| {
            self.waits += 1;
            self.waits
        });
        if let Some(new) = waker.take() {
            *waker = self.wakers.insert(number, new);
        }
    }
}

impl ArenaInner {
    /// Asleep again: there is no thread to wake it.
    fn no_thread(&self, error: &std::io::Error) -> DeviceError {
        let error = DeviceError::Thread { message: error.to_string() };
        self.arrive_at(Phase::Asleep, |books| books.end_wake(Some(error.clone())));
        error
    }
}

//! Entering without a thread to wait on: a future that is ready with the lease.
//!
//! A sleeping arena is woken by a thread of its own that ends with it, since the calls of the
//! driver block. It knows no runtime.
//!
//! Invariants: whoever is told to wait is told when that is over, once at least; who has given up
//! is waited for by nobody.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;

use super::phase::{Phase, Sleep};
use crate::device::arena::DeviceArena;
use crate::device::error::DeviceError;
use crate::device::lease::Lease;
use crate::device::shared::Shared;
use crate::sync::caught;

/// The lease to come of [`DeviceArena::enter_async`]. Dropping it gives up the wait, and lets a
/// wake that is under way go on.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is awaited"]
pub struct EnterFuture {
    arena: Arc<Shared>,
    /// Wakes that had ended when this one began to wait.
    before: Option<u64>,
    /// The number of its wait.
    waits: Option<u64>,
}

impl DeviceArena {
    /// As [`DeviceArena::enter`], without blocking a thread on a sleeping arena: that is woken by a
    /// thread of its own. Needs no runtime. While blocks are being moved it may block for the
    /// length of one copy.
    ///
    /// # Errors
    /// The future's: as [`DeviceArena::enter`], and [`DeviceError::Thread`] where none could be
    /// started.
    pub fn enter_async(&self) -> EnterFuture {
        EnterFuture { arena: Arc::clone(self.shared()), before: None, waits: None }
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
        let mut books = this.arena.books();
        let ended = books.sleep.attempts;
        let before = *this.before.get_or_insert(ended);
        match books.sleep.phase {
            Phase::Awake | Phase::Draining(_) => {
                return Poll::Ready(Lease::under(&this.arena, books));
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
        let waker = self.arena.books().sleep.wakers.remove(&waits);
        let _ = caught(|| drop(waker)); // not ours, and nothing unwinds out of a drop
    }
}

impl Sleep {
    /// Has the end of a wait told to this waker; the one to which it was to be told before is put
    /// in its place.
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

impl Shared {
    /// Asleep again: there is no thread to wake it.
    fn no_thread(&self, error: &std::io::Error) -> DeviceError {
        let error = DeviceError::Thread { message: error.to_string() };
        self.arrive_at(Phase::Asleep, |books| books.end_wake(Some(error.clone())));
        error
    }
}

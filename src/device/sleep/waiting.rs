//! Entering without a thread to wait on: a future that is ready with the lease.
//!
//! A sleeping arena is woken by a thread of its own that ends with it, since the calls of the
//! driver block. It knows no runtime.
//!
//! Invariant: whoever is told to wait is told when that is over, once at least.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread;

use super::phase::Phase;
use crate::device::arena::DeviceArena;
use crate::device::error::DeviceError;
use crate::device::lease::Lease;
use crate::device::shared::Shared;

/// The lease to come of [`DeviceArena::enter_async`]. Dropping it gives up the wait, and lets a
/// wake that is under way go on.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is awaited"]
pub struct Entering {
    arena: Arc<Shared>,
    /// Wakes that had ended when this one began to wait.
    before: Option<u64>,
}

impl DeviceArena {
    /// As [`DeviceArena::enter`], without blocking a thread on a sleeping arena: that is woken by a
    /// thread of its own. Needs no runtime. While blocks are being moved it may block for the
    /// length of one copy.
    ///
    /// # Errors
    /// The future's: as [`DeviceArena::enter`], and [`DeviceError::Thread`] where none could be
    /// started.
    pub fn enter_async(&self) -> Entering {
        Entering { arena: Arc::clone(self.shared()), before: None }
    }
}

impl Future for Entering {
    type Output = Result<Lease, DeviceError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Err(error) = this.arena.check_open() {
            return Poll::Ready(Err(error));
        }
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
                books.sleep.wakers.push(context.waker().clone());
                drop(books);
                let arena = Arc::clone(&this.arena);
                let rise = move || drop(arena.rise());
                let thread = thread::Builder::new().name("lowtide-wake".to_owned());
                if let Err(error) = thread.spawn(rise) {
                    return Poll::Ready(Err(this.arena.no_thread(&error)));
                }
            }
            Phase::Falling | Phase::Waking => books.sleep.wakers.push(context.waker().clone()),
        }
        Poll::Pending
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

//! A budget of the host that refuses now and then, and writes down what is booked.
//!
//! It has no room for more than so much at once, and refuses one booking in so many besides. Both
//! come from the schedule, so that the same seed gives the same answers where workers take turns.
//!
//! Invariant: what is booked is given back once, and settled once at most.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use lowtide_gpu::ByteSize;
use lowtide_gpu::HostBudget;

/// The state of a budget.
#[derive(Debug)]
pub(super) struct Account {
    room: ByteSize,
    /// One booking in so many is refused.
    refuses: u64,
    asked: AtomicU64,
    booked: Mutex<Booked>,
}

/// The current booking, and totals since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Booked {
    pub(super) bytes: ByteSize,
    settled: ByteSize,
    pub(super) refused: u64,
    bookings: u64,
    /// Bookings that were settled twice, or are not of this budget.
    wrong: u64,
}

/// One booking.
struct Booking {
    account: Arc<Account>,
    bytes: ByteSize,
    is_settled: bool,
}

/// The budget that an arena asks.
pub(super) struct Budget(pub(super) Arc<Account>);

impl Account {
    pub(super) fn new(room: ByteSize, refuses: u64) -> Arc<Self> {
        Arc::new(Self { room, refuses, asked: AtomicU64::new(0), booked: Mutex::default() })
    }

    fn change<T>(&self, act: impl FnOnce(&mut Booked) -> T) -> T {
        act(&mut self.booked.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn booked(&self) -> Booked {
        self.change(|booked| *booked)
    }

    /// Returns the error in the account of an arena that has returned everything, if any.
    pub(super) fn fault(&self) -> Option<String> {
        let booked = self.booked();
        let is_even = booked.bytes.is_zero() && booked.settled.is_zero() && booked.wrong == 0;
        (!is_even).then(|| format!("the host's budget is not even: {booked:?}"))
    }
}

impl HostBudget for Budget {
    fn reserve(&self, bytes: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        let account = &self.0;
        let nth = account.asked.fetch_add(1, Ordering::Relaxed);
        account.change(|booked| {
            let sum = booked.bytes.saturating_add(bytes);
            if sum > account.room || nth % account.refuses == account.refuses - 1 {
                booked.refused += 1;
                return Err(format!("{} of {} are booked", booked.bytes, account.room));
            }
            booked.bytes = sum;
            booked.bookings += 1;
            Ok(())
        })?;
        Ok(Box::new(Booking { account: Arc::clone(account), bytes, is_settled: false }))
    }

    fn settle(&self, booked: &mut (dyn Any + Send)) {
        let booking = booked.downcast_mut::<Booking>();
        let bytes = booking.and_then(|booking| {
            let first = !std::mem::replace(&mut booking.is_settled, true);
            first.then_some(booking.bytes)
        });
        self.0.change(|booked| match bytes {
            Some(bytes) => booked.settled = booked.settled.saturating_add(bytes),
            None => booked.wrong += 1,
        });
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.account.change(|booked| {
            booked.bytes = booked.bytes.saturating_sub(self.bytes);
            if self.is_settled {
                booked.settled = booked.settled.saturating_sub(self.bytes);
            }
        });
    }
}

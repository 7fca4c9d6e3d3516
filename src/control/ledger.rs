//! The account of booked bytes of one budget, and how measurement corrects it.
//!
//! [`Ledger`] is shared and atomic: an admission is one compare-and-exchange. What may be booked it
//! is told by the control loop ([`Correction`]). It neither sheds by level nor reads a signal.
//!
//! Two kinds of bookings. A request's is an estimate: it counts `K` times, with `K` learned from
//! measurement. A resource's (a loaded model) is *standing*: it stays for hours, its size is known,
//! and it counts once. So that both share one atomic admission, a standing booking of `F` bytes
//! takes `units = F / K` of the allowance when it is booked, and the allowance is raised by those
//! units from the next correction on, when `F` has become part of `other`.
//!
//! While large requests get less than their share, each request has to leave room as if it were as
//! large as one of them: the *berth* (how large it is the module `fairness` says).
//!
//! Invariants: at every admission `reserved + max(asked, reserved_headroom) <= allowance`, or
//! `requests <= ceiling / 32` and `asked <= alone`, so that no request is refused for want of room
//! where a larger one would be admitted. What is admitted and grows, and a request of high
//! priority, may take the berth.

use std::fmt;
use std::num::NonZero;
use std::ops::Deref;
use std::time::Duration;

use thiserror::Error;

use crate::bytes::ByteSize;
use crate::sync::atomic::{AtomicU64, Ordering};

use super::correction::few;
use super::fairness::Balance;

pub use super::correction::{Books, Correction, K_MAX, K_MIN, K_START, Measured, Turnover};

/// Whose bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Budget {
    /// The host's memory.
    Host,
    /// The device's memory.
    Device,
}

impl Budget {
    /// Its name, lower-case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Why a booking failed.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{asked} more do not fit: {reserved} of an allowance of {allowance} are booked")]
pub struct Shortfall {
    /// What was asked for.
    pub asked: ByteSize,
    /// What was booked at that moment.
    pub reserved: ByteSize,
    /// What may be booked: less the part of the berth that a request of this size leaves free.
    pub allowance: ByteSize,
}

/// What a standing booking holds; given back to [`Ledger::release_standing`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is not released stays booked"]
pub(crate) struct Standing {
    bytes: ByteSize,
    units: u64,
    settled: bool,
}

impl Standing {
    /// Its bytes.
    #[must_use]
    pub(crate) const fn bytes(&self) -> ByteSize {
        self.bytes
    }
}

/// What a standing booking will take once others are gone, and the part that is booked already.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "what is not released stays booked"]
pub(crate) struct Reservation {
    units: u64,
    reserved: u64,
}

/// The account: shared by all who book. Starts without a limit, until the first correction. It is
/// booked on through [`Admission`](super::admission::Admission) only, whose permits give back
/// exactly what they took.
#[derive(Debug)]
pub struct Ledger {
    reserved: CachePadded,
    /// Written by the control loop only.
    allowance: AtomicU64,
    /// Written by the control loop only.
    ceiling: AtomicU64,
    /// What a request may book that is nearly alone. Written by the control loop only.
    alone: AtomicU64,
    /// How many standing bytes have to go before `alone` grows with them; [`u64::MAX`] while no
    /// request counts as alone. Written by the control loop only.
    alone_debt: AtomicU64,
    /// Bits of an `f64`. Written by the control loop only.
    correction_factor: AtomicU64,
    /// What each request has to leave room for. Written by the control loop only.
    reserved_headroom: AtomicU64,
    /// Bytes a second that come free for those who were refused; 0 where nothing does or nothing
    /// is known. Written by the control loop only.
    drain: AtomicU64,
    /// The least time after which they should come again, in milliseconds. Written by the control
    /// loop only.
    pause_ms: AtomicU64,
    /// What standing bookings hold of `reserved`.
    units: AtomicU64,
    resource_reservations: AtomicU64,
    /// The part of `resource_reservations` that is loaded, and so part of what is measured.
    settled: AtomicU64,
}

impl Ledger {
    /// An empty account without a limit.
    #[must_use]
    pub fn new() -> Self {
        Self {
            reserved: CachePadded(AtomicU64::new(0)),
            allowance: AtomicU64::new(u64::MAX),
            ceiling: AtomicU64::new(u64::MAX),
            alone: AtomicU64::new(0),
            alone_debt: AtomicU64::new(u64::MAX),
            correction_factor: AtomicU64::new(K_START.to_bits()),
            reserved_headroom: AtomicU64::new(0),
            drain: AtomicU64::new(0),
            pause_ms: AtomicU64::new(0),
            units: AtomicU64::new(0),
            resource_reservations: AtomicU64::new(0),
            settled: AtomicU64::new(0),
        }
    }

    /// An empty account with a ceiling that stays, for use without measurement: each byte counts
    /// once (`K = 1`), and what is booked never passes the ceiling. A [`Ledger::correct`] by a
    /// control loop ends that.
    #[must_use]
    pub fn with_ceiling(ceiling: ByteSize) -> Self {
        Self {
            allowance: AtomicU64::new(ceiling.get()),
            ceiling: AtomicU64::new(ceiling.get()),
            correction_factor: AtomicU64::new(K_MIN.to_bits()),
            ..Self::new()
        }
    }

    /// Begins anew as the other one is. Nobody books meanwhile, and nothing is booked.
    pub(crate) fn begin(&self, other: &Self) {
        debug_assert!(self.reserved().is_zero(), "{} are booked", self.reserved());
        for (mine, theirs) in self.figures().into_iter().zip(other.figures()) {
            mine.store(theirs.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    fn figures(&self) -> [&AtomicU64; 12] {
        let Self {
            reserved,
            allowance,
            ceiling,
            alone,
            alone_debt,
            correction_factor,
            reserved_headroom,
            drain,
            ..
        } = self;
        let Self { pause_ms, units, resource_reservations, settled, .. } = self;
        [
            reserved,
            allowance,
            ceiling,
            alone,
            alone_debt,
            correction_factor,
            reserved_headroom,
            drain,
            pause_ms,
            units,
            resource_reservations,
            settled,
        ]
    }

    /// Books bytes of a request if they fit and leave the berth; no bytes always fit. One
    /// compare-and-exchange, tried again only when another thread's booking came in between.
    ///
    /// # Errors
    /// Where the bytes fit neither beside what is booked nor alone (see the module), or the sum
    /// does not fit 64 bits; nothing is booked then.
    #[inline]
    pub(crate) fn try_book(&self, bytes: ByteSize) -> Result<(), Shortfall> {
        let reserved_headroom = self.reserved_headroom.load(Ordering::Relaxed);
        self.book_request(bytes, reserved_headroom.saturating_sub(bytes.get()))
    }

    /// The same for what may take the berth as well: a request of high priority, and one that is
    /// admitted already and grows, since to reject it would waste what was done for it.
    ///
    /// # Errors
    /// As for [`Ledger::try_book`].
    pub(crate) fn try_book_more(&self, bytes: ByteSize) -> Result<(), Shortfall> {
        self.book_request(bytes, 0)
    }

    #[inline]
    fn book_request(&self, bytes: ByteSize, left: u64) -> Result<(), Shortfall> {
        let alone = self.alone.load(Ordering::Relaxed);
        let few = few(self.ceiling()).get();
        self.book_where(bytes, left, |reserved| {
            bytes.get() <= alone
                && reserved.saturating_sub(self.units.load(Ordering::Relaxed)) <= few
        })
    }

    /// Books bytes where the allowance has room and so much of it is left, or where what is booked
    /// before them does no harm.
    #[inline]
    fn book_where(
        &self,
        bytes: ByteSize,
        left: u64,
        harmless: impl Fn(u64) -> bool,
    ) -> Result<(), Shortfall> {
        if bytes.is_zero() {
            return Ok(());
        }
        let allowance = self.allowance.load(Ordering::Relaxed).saturating_sub(left);
        let mut reserved = self.reserved.load(Ordering::Relaxed);
        // Ends: a failed exchange means that another one succeeded (or, rarely, a spurious one).
        loop {
            let fits = |sum: &u64| *sum <= allowance || harmless(reserved);
            let Some(sum) = reserved.checked_add(bytes.get()).filter(fits) else {
                return Err(Shortfall {
                    asked: bytes,
                    reserved: ByteSize::new(reserved),
                    allowance: ByteSize::new(allowance),
                });
            };
            let exchanged = self.reserved.compare_exchange_weak(
                reserved,
                sum,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match exchanged {
                Ok(_) => return Ok(()),
                Err(now) => reserved = now,
            }
        }
    }

    /// Books as much of the bytes as 64 bits hold, whatever the allowance says: for what is exempt.
    /// Says what was booked, which is what has to be released.
    pub(crate) fn book_exempt(&self, bytes: ByteSize) -> ByteSize {
        if bytes.is_zero() {
            return bytes;
        }
        let mut reserved = self.reserved.load(Ordering::Relaxed);
        loop {
            let sum = reserved.saturating_add(bytes.get());
            let exchanged = self.reserved.compare_exchange_weak(
                reserved,
                sum,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match exchanged {
                Ok(_) => return ByteSize::new(sum - reserved),
                Err(now) => reserved = now,
            }
        }
    }

    /// Gives back bytes that were booked, no more than were.
    #[inline]
    pub(crate) fn release(&self, bytes: ByteSize) {
        if bytes.is_zero() {
            return;
        }
        let before = self.reserved.fetch_sub(bytes.get(), Ordering::Relaxed);
        debug_assert!(before >= bytes.get(), "released {bytes}, booked were {before} bytes");
    }

    /// Books what will stay: counted once, not `K` times.
    ///
    /// # Errors
    /// As for [`Ledger::try_book`].
    pub(crate) fn try_book_standing(&self, bytes: ByteSize) -> Result<Standing, Shortfall> {
        let units = units_of(bytes, self.correction_factor());
        self.book_where(ByteSize::new(units), 0, |_| false)
            .map_err(|short| Shortfall { asked: bytes, ..short })?;
        // After the booking: a correction in between takes the units for a request's, which is
        // the same room.
        self.resource_reservations.fetch_add(bytes.get(), Ordering::Relaxed);
        self.units.fetch_add(units, Ordering::Relaxed);
        Ok(Standing { bytes, units, settled: false })
    }

    /// Books more for what will stay, up to these bytes in all, whatever the allowance says.
    pub(crate) fn raise(&self, resource_reservations: &mut Standing, bytes: ByteSize) {
        let more = bytes.saturating_sub(resource_reservations.bytes);
        let units = self.book_exempt(ByteSize::new(units_of(more, self.correction_factor()))).get();
        // As for a new booking.
        self.resource_reservations.fetch_add(more.get(), Ordering::Relaxed);
        self.units.fetch_add(units, Ordering::Relaxed);
        if resource_reservations.settled {
            self.settled.fetch_add(more.get(), Ordering::Relaxed);
        }
        resource_reservations.bytes = resource_reservations.bytes.saturating_add(more);
        resource_reservations.units = resource_reservations.units.saturating_add(units);
    }

    /// Says that what was booked is loaded now, and so part of what is measured.
    pub(crate) fn settle(&self, resource_reservations: &mut Standing) {
        if !std::mem::replace(&mut resource_reservations.settled, true) {
            self.settled.fetch_add(resource_reservations.bytes.get(), Ordering::Relaxed);
        }
    }

    /// Whether a request of these bytes would fit if standing bookings of `freed` bytes were gone.
    pub(crate) fn fits(&self, bytes: ByteSize, freed: ByteSize) -> bool {
        if bytes.is_zero() {
            return true;
        }
        let reserved = self.reserved.load(Ordering::Relaxed);
        let reserved_headroom = self.reserved_headroom.load(Ordering::Relaxed).max(bytes.get());
        let alone = self.alone.load(Ordering::Relaxed).saturating_add(freed.get());
        let alone = alone.saturating_sub(self.alone_debt.load(Ordering::Relaxed));
        let (requests, few) = (self.requests(), few(self.ceiling()));
        reserved
            .checked_add(reserved_headroom)
            .is_some_and(|sum| sum <= self.allowance_without(freed))
            || bytes.get() <= alone && requests <= few
    }

    /// Whether a standing booking of these bytes would fit if others of `freed` bytes were gone.
    pub(crate) fn fits_standing(&self, bytes: ByteSize, freed: ByteSize) -> bool {
        let sum = self
            .reserved
            .load(Ordering::Relaxed)
            .checked_add(units_of(bytes, self.correction_factor()));
        bytes.is_zero() || sum.is_some_and(|sum| sum <= self.allowance_without(freed))
    }

    /// Books what a standing booking of these bytes needs beyond others of `freed` bytes that are
    /// going; [`Ledger::exchange`] makes one booking of both. `None` where it does not fit.
    pub(crate) fn reserve(&self, bytes: ByteSize, freed: ByteSize) -> Option<Reservation> {
        let units = units_of(bytes, self.correction_factor());
        let more = units.saturating_sub(self.units_without(freed));
        let allowance = self.allowance_without(freed);
        let fits = |reserved: u64| reserved.checked_add(units).is_some_and(|sum| sum <= allowance);
        let book = |reserved| (units == 0 || fits(reserved)).then(|| reserved.saturating_add(more));
        let reserved = self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, book);
        reserved.ok().map(|_| Reservation { units, reserved: more })
    }

    /// Releases a reservation that is not wanted any more.
    pub(crate) fn unreserve(&self, reserved: Reservation) {
        self.release(ByteSize::new(reserved.reserved));
    }

    /// Makes one standing booking of these bytes out of a reservation and of the bookings that it
    /// counted on, whose memory is gone. No other booking comes in between.
    pub(crate) fn exchange(
        &self,
        freed: &[Standing],
        reserved: Reservation,
        bytes: ByteSize,
    ) -> Standing {
        let sum = |of: fn(&Standing) -> u64| freed.iter().map(of).fold(0, u64::wrapping_add);
        let (units, held) = (sum(|of| of.units), sum(|of| of.bytes.get()));
        let settled = sum(|of| if of.settled { of.bytes.get() } else { 0 });
        // Differences, which may be negative: additions wrap.
        let added = reserved.units.wrapping_sub(units).wrapping_sub(reserved.reserved);
        let units = reserved.units.wrapping_sub(units);
        let add = |counter: &AtomicU64, amount| counter.fetch_add(amount, Ordering::Relaxed);
        // In this order, so that `requests` is never less than what requests have booked.
        if units.cast_signed() < 0 {
            add(&self.units, units);
            add(&self.reserved, added);
        } else {
            add(&self.reserved, added);
            add(&self.units, units);
        }
        add(&self.resource_reservations, bytes.get().wrapping_sub(held));
        self.settled.fetch_sub(settled, Ordering::Relaxed);
        Standing { bytes, units: reserved.units, settled: false }
    }

    /// The units that standing bookings of so many bytes free, by the present `K`: rounded as they
    /// were booked, so that a booking of the same size fits in their place.
    fn units_without(&self, freed: ByteSize) -> u64 {
        units_of(freed, self.correction_factor())
    }

    /// The allowance if standing bookings of so many bytes were gone, with their units counted as
    /// booked still.
    fn allowance_without(&self, freed: ByteSize) -> u64 {
        self.allowance.load(Ordering::Relaxed).saturating_add(self.units_without(freed))
    }

    /// Whether a request that did not fit would, once all requests have ended.
    pub(crate) fn drains(&self, short: &Shortfall) -> bool {
        let resource_reservations = short.reserved.saturating_sub(self.requests());
        resource_reservations.saturating_add(short.asked) <= short.allowance
    }

    /// Gives a standing booking back, after its memory has been given back.
    pub(crate) fn release_standing(&self, resource_reservations: Standing) {
        if resource_reservations.settled {
            self.settled.fetch_sub(resource_reservations.bytes.get(), Ordering::Relaxed);
        }
        // In the reverse order of booking, so that `units <= booked` for who reads in between.
        self.units.fetch_sub(resource_reservations.units, Ordering::Relaxed);
        self.resource_reservations.fetch_sub(resource_reservations.bytes.get(), Ordering::Relaxed);
        self.release(ByteSize::new(resource_reservations.units));
    }

    /// All that is booked, standing bookings by their units.
    #[must_use]
    pub fn reserved(&self) -> ByteSize {
        ByteSize::new(self.reserved.load(Ordering::Relaxed))
    }

    /// What requests have booked, not multiplied.
    #[must_use]
    pub fn requests(&self) -> ByteSize {
        let units = self.units.load(Ordering::Relaxed);
        self.reserved().saturating_sub(ByteSize::new(units))
    }

    /// What resources have booked.
    #[must_use]
    pub fn resource_reservations(&self) -> ByteSize {
        ByteSize::new(self.resource_reservations.load(Ordering::Relaxed))
    }

    /// What requests and resources have booked, in the bytes that they gave: `requests + standing`.
    #[must_use]
    pub fn reserved_bytes(&self) -> ByteSize {
        self.in_bytes(self.reserved())
    }

    /// Up to which [`Ledger::reserved_bytes`] a request fits; [`ByteSize::MAX`] where no limit is
    /// known.
    #[must_use]
    pub fn allowance_bytes(&self) -> ByteSize {
        self.in_bytes(self.allowance())
    }

    /// An amount of the allowance with standing bookings by their bytes in place of their units.
    #[must_use]
    pub fn in_bytes(&self, amount: ByteSize) -> ByteSize {
        if amount == ByteSize::MAX {
            return amount;
        }
        let units = ByteSize::new(self.units.load(Ordering::Relaxed));
        amount.saturating_sub(units).saturating_add(self.resource_reservations())
    }

    /// What may be booked, standing bookings by their units; [`ByteSize::MAX`] where no limit is
    /// known.
    #[must_use]
    pub fn allowance(&self) -> ByteSize {
        ByteSize::new(self.allowance.load(Ordering::Relaxed))
    }

    /// What all requests together may book; [`ByteSize::MAX`] where no limit is known.
    #[cfg(feature = "service")]
    pub(crate) fn request_room(&self) -> ByteSize {
        let allowance = self.allowance();
        if allowance == ByteSize::MAX {
            return allowance;
        }
        allowance.saturating_sub(ByteSize::new(self.units.load(Ordering::Relaxed)))
    }

    /// What may be held altogether; [`ByteSize::MAX`] where no limit is known.
    #[must_use]
    pub fn ceiling(&self) -> ByteSize {
        ByteSize::new(self.ceiling.load(Ordering::Relaxed))
    }

    /// By how much estimates are multiplied.
    #[must_use]
    pub fn correction_factor(&self) -> f64 {
        f64::from_bits(self.correction_factor.load(Ordering::Relaxed))
    }

    /// What each request has to leave room for now, be it smaller itself; none while larger ones
    /// get their share, and where no control loop runs.
    #[must_use]
    pub fn reserved_headroom(&self) -> ByteSize {
        ByteSize::new(self.reserved_headroom.load(Ordering::Relaxed))
    }

    /// After what time who was refused may find room, as far as is known: the time in which what
    /// was missing comes free, shared with all who are refused.
    pub(crate) fn wait_for(&self, short: &Shortfall) -> Option<Duration> {
        let drain = NonZero::new(self.drain.load(Ordering::Relaxed))?.get();
        let missing = short.reserved.saturating_add(short.asked).saturating_sub(short.allowance);
        let millis = u128::from(missing.get()) * 1000 / u128::from(drain);
        let least = self.pause_ms.load(Ordering::Relaxed);
        Some(Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX).max(least)))
    }

    /// Publishes how the room is to be shared. Called by one owner.
    pub(crate) fn balance(&self, balance: Balance) {
        self.reserved_headroom.store(balance.reserved_headroom.get(), Ordering::Relaxed);
        self.drain.store(balance.drain.get(), Ordering::Relaxed);
        let pause = u64::try_from(balance.pause.as_millis()).unwrap_or(u64::MAX);
        self.pause_ms.store(pause, Ordering::Relaxed);
    }

    /// Publishes what the control loop found. Called by one owner.
    pub fn correct(&self, correction: &mut Correction, measured: Measured) {
        let books = Books {
            requests: self.requests(),
            units: ByteSize::new(self.units.load(Ordering::Relaxed)),
            resource_reservations: self.resource_reservations(),
            settled: ByteSize::new(self.settled.load(Ordering::Relaxed)),
        };
        let allowance = correction.update(books, measured);
        self.correction_factor.store(correction.correction_factor.to_bits(), Ordering::Relaxed);
        self.ceiling.store(measured.ceiling.get(), Ordering::Relaxed);
        self.allowance.store(allowance.get(), Ordering::Relaxed);
        self.alone.store(correction.alone.get(), Ordering::Relaxed);
        self.alone_debt.store(correction.alone_debt.get(), Ordering::Relaxed);
    }
}

impl Default for Ledger {
    fn default() -> Self {
        Self::new()
    }
}

/// A counter on cache lines of its own: what all threads write does not slow what all read.
#[derive(Debug)]
#[repr(align(128))]
struct CachePadded(AtomicU64);

impl Deref for CachePadded {
    type Target = AtomicU64;

    fn deref(&self) -> &AtomicU64 {
        &self.0
    }
}

/// The allowance that `bytes` of standing memory take at this `K`, rounded up; none for no bytes,
/// which always fit, and all of it for [`ByteSize::MAX`].
fn units_of(bytes: ByteSize, correction_factor: f64) -> u64 {
    match bytes {
        ByteSize::ZERO => 0,
        ByteSize::MAX => u64::MAX,
        _ => bytes.scaled(1.0 / correction_factor).get().saturating_add(1),
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::super::correction::UNMEASURED;
    use super::super::correction::tests::sample;
    use super::*;

    impl Ledger {
        /// Books as often as it fits, at least until `sum` is booked: why it fits no more.
        fn book_and_fill(&self, each: ByteSize, sum: ByteSize) -> Shortfall {
            let short = std::iter::repeat_with(|| self.try_book(each)).find_map(Result::err);
            assert!(self.reserved() >= sum, "{} are booked", self.reserved());
            short.expect("an allowance ends")
        }
    }

    #[test]
    fn bookings_hold_at_the_ends() {
        let ledger = Ledger::new();
        assert_eq!(ledger.try_book(ByteSize::ZERO), Ok(()));
        assert_eq!(ledger.try_book(ByteSize::MAX), Ok(()));
        let short = ledger.try_book(ByteSize::new(1)).expect_err("no 64 bits hold it");
        assert_eq!(short.reserved, ByteSize::MAX);
        assert_eq!(ledger.try_book(ByteSize::ZERO), Ok(()));
        assert_eq!(ledger.book_exempt(ByteSize::new(9)), ByteSize::ZERO);
        ledger.release(ByteSize::MAX);
        assert_eq!(ledger.reserved(), ByteSize::ZERO);
        let resource_reservations = ledger.try_book_standing(ByteSize::MAX).expect("no limit");
        ledger.release_standing(resource_reservations);
        assert_eq!(ledger.reserved(), ByteSize::ZERO);
    }

    #[test]
    fn a_berth_is_left_free_by_smaller_requests_and_taken_by_those_it_is_for() {
        let ledger = Ledger::with_ceiling(ByteSize::mib(100));
        let reserved_headroom = ByteSize::mib(8);
        ledger.balance(Balance { reserved_headroom, ..Balance::default() });
        let short = ledger.book_and_fill(ByteSize::mib(1), ByteSize::mib(93));
        // 93 of 93: one more would leave 6 of the 8 MiB, besides its own.
        assert_eq!((short.reserved, short.allowance), (ByteSize::mib(93), ByteSize::mib(93)));
        assert!(ledger.try_book(ByteSize::new(1)).is_err(), "be it as small as it may");
        assert_eq!(ledger.try_book(ByteSize::ZERO), Ok(()), "no bytes always fit");
        assert!(ledger.try_book(reserved_headroom).is_err(), "7 MiB are left");
        ledger.release(ByteSize::mib(1));
        ledger.try_book(reserved_headroom).expect("the berth is its own");
        ledger.release(ByteSize::mib(4));
        assert!(ledger.try_book(ByteSize::mib(4)).is_err(), "another berth is to be left");
        ledger.try_book_more(ByteSize::mib(2)).expect("who is admitted grows into it");
        let resource_reservations =
            ledger.try_book_standing(ByteSize::mib(1)).expect("so does what stands");
        ledger.release_standing(resource_reservations);
        ledger.balance(Balance::default());
        ledger.try_book(ByteSize::mib(2)).expect("no berth any more");
        assert_eq!(ledger.reserved(), ledger.allowance());
    }

    #[test]
    fn nobody_waits_for_less_than_what_is_missing_takes_to_come_free() {
        let ledger = Ledger::with_ceiling(ByteSize::mib(100));
        ledger.try_book(ByteSize::mib(90)).expect("fits");
        let wait = |mib| ledger.wait_for(&ledger.try_book(ByteSize::mib(mib)).expect_err("full"));
        assert_eq!(wait(30), None, "nothing is known to come free");
        let pause = Duration::from_secs(3);
        let drain = ByteSize::mib(4);
        ledger.balance(Balance { reserved_headroom: ByteSize::ZERO, drain, pause });
        assert_eq!(wait(30), Some(Duration::from_secs(5)), "20 MiB at 4 a second");
        assert_eq!(wait(11), Some(pause), "others ask as well");
        ledger.balance(Balance { reserved_headroom: ByteSize::mib(30), drain, pause });
        assert_eq!(wait(1), Some(Duration::from_secs(5)), "it has to leave the berth");
        let most = Balance { drain: ByteSize::new(1), pause, ..Balance::default() };
        ledger.balance(most);
        assert!(wait(100).is_some_and(|wait| wait > Duration::from_secs(1 << 20)));
    }

    #[test]
    fn a_booking_that_does_not_fit_leaves_no_trace_and_names_the_numbers() {
        let ledger = Ledger::new();
        ledger.correct(&mut Correction::new(), sample(0, 0));
        assert_eq!(ledger.allowance(), ByteSize::mib(400)); // 800 MiB at K = 2
        ledger.try_book(ByteSize::mib(399)).expect("fits");
        let asked = ByteSize::mib(2);
        let allowance = ByteSize::mib(400);
        let expected = Shortfall { asked, reserved: ByteSize::mib(399), allowance };
        assert_eq!(ledger.try_book(asked), Err(expected));
        ledger.try_book(ByteSize::mib(1)).expect("fits to the byte");
        assert_eq!(ledger.reserved(), allowance);
        assert!(ledger.try_book(ByteSize::MAX).is_err());
    }

    /// The bug: `K` starts at 2 and is learned from admitted requests only, so that one which fits
    /// once but not twice was refused each time for ever, with nothing else to do.
    #[test]
    fn a_large_request_was_refused_for_ever_by_a_k_that_nothing_measured() {
        let ledger = Ledger::new();
        let mut correction = Correction::new();
        let large = ByteSize::mib(600);
        ledger.correct(&mut correction, sample(100, 0));
        assert!(ledger.allowance() < large, "it does not fit at K = 2");
        ledger.try_book(ByteSize::mib(20)).expect("a small one leaves it nearly alone");
        ledger.try_book(large).expect("alone");
        assert!(ledger.try_book(ByteSize::mib(5)).is_err(), "and no second one");
        // It is measured now, and turns out to need what it said: so do those after it.
        ledger.correct(&mut correction, sample(720, 0));
        assert!(correction.correction_factor() < K_START);
        ledger.release(ByteSize::mib(620));
        ledger.correct(&mut correction, sample(100, 0));
        assert!(ledger.try_book(large).is_err(), "K was measured a moment ago, and it is high");
        let mut waits = 0;
        while ledger.try_book(large).is_err() {
            ledger.correct(&mut correction, sample(100, 0));
            waits += 1;
        }
        assert_eq!(waits, UNMEASURED - 1);
        ledger.release(large);
    }

    #[test]
    fn a_resource_and_what_passes_the_ceiling_do_not_count_as_alone() {
        let ledger = Ledger::new();
        let mut correction = Correction::new();
        ledger.correct(&mut correction, sample(100, 0));
        assert!(ledger.try_book(ByteSize::mib(701)).is_err());
        assert!(ledger.try_book_standing(ByteSize::mib(701)).is_err());
        let model = ledger.try_book_standing(ByteSize::mib(300)).expect("fits");
        ledger.correct(&mut correction, sample(100, 0));
        ledger.try_book(ByteSize::mib(340)).expect("alone beside the resource");
        ledger.release(ByteSize::mib(340));
        assert!(ledger.try_book(ByteSize::mib(401)).is_err(), "the resource counts");
        ledger.release_standing(model);
        ledger.correct(&mut correction, sample(850, 0));
        assert!(ledger.try_book(ByteSize::mib(1)).is_err(), "over the ceiling nothing fits");
    }

    #[test]
    fn a_standing_booking_counts_once_from_booking_to_release() {
        let ledger = Ledger::new();
        let mut correction = Correction::new();
        ledger.correct(&mut correction, sample(100, 0));
        let room = |ledger: &Ledger| ledger.allowance().saturating_sub(ledger.reserved()).get();
        let near = |found: u64, mib: u64| found.abs_diff(ByteSize::mib(mib).get()) <= 4;
        assert!(near(room(&ledger), 350));
        // 500 MiB fit though K x 500 MiB would not.
        let mut model = ledger.try_book_standing(ByteSize::mib(500)).expect("fits");
        assert!(near(room(&ledger), 100), "booked: {}", room(&ledger));
        for physical in [100, 350, 600] {
            ledger.correct(&mut correction, sample(physical, 0));
            assert!(room(&ledger) <= ByteSize::mib(100).get() + 4, "while loading");
        }
        ledger.settle(&mut model);
        ledger.correct(&mut correction, sample(600, 0));
        assert!(near(room(&ledger), 100), "loaded: {}", room(&ledger));
        assert!(
            (correction.correction_factor() - K_START).abs() < 1e-9,
            "a load is no wrong estimate"
        );
        assert!(ledger.try_book_standing(ByteSize::mib(201)).is_err());
        // It said 500 MiB and all that is held is 400 as yet: what it said stays its own.
        ledger.correct(&mut correction, sample(400, 0));
        assert!(near(room(&ledger), 150), "smaller: {}", room(&ledger));
        ledger.release_standing(model);
        ledger.correct(&mut correction, sample(100, 0));
        assert!(near(room(&ledger), 350));
        assert_eq!(
            (ledger.reserved(), ledger.resource_reservations()),
            (ByteSize::ZERO, ByteSize::ZERO)
        );
    }

    #[test]
    fn what_stands_is_raised_beyond_the_allowance_and_given_back_whole() {
        let ledger = Ledger::new();
        ledger.correct(&mut Correction::new(), sample(0, 0));
        for settled in [false, true] {
            let mut model = ledger.try_book_standing(ByteSize::mib(10)).expect("fits");
            if settled {
                ledger.settle(&mut model);
            }
            ledger.raise(&mut model, ByteSize::mib(5));
            assert_eq!(ledger.resource_reservations(), ByteSize::mib(10), "it is never lowered");
            ledger.raise(&mut model, ByteSize::gib(3));
            assert_eq!(
                (ledger.resource_reservations(), model.bytes()),
                (ByteSize::gib(3), ByteSize::gib(3))
            );
            assert_eq!(ledger.requests(), ByteSize::ZERO);
            ledger.raise(&mut model, ByteSize::MAX);
            ledger.release_standing(model);
            assert_eq!(
                (ledger.reserved(), ledger.resource_reservations()),
                (ByteSize::ZERO, ByteSize::ZERO)
            );
        }
    }

    #[test]
    fn threads_never_book_more_than_the_allowance_and_releases_balance() {
        let ledger = Ledger::new();
        ledger.correct(&mut Correction::new(), sample(0, 0));
        let allowance = ledger.allowance();
        std::thread::scope(|scope| {
            for seed in 1..=4_u64 {
                let ledger = &ledger;
                scope.spawn(move || {
                    let mut state = seed;
                    for _ in 0..20_000 {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let bytes = ByteSize::new(state >> 36);
                        if ledger.try_book(bytes).is_ok() {
                            assert!(ledger.reserved() <= allowance);
                            ledger.release(bytes);
                        }
                    }
                });
            }
        });
        assert_eq!(ledger.reserved(), ByteSize::ZERO);
    }
}

#[cfg(all(test, lowtide_loom))]
mod models {
    use super::super::correction::MEASURED_PART;
    use super::*;

    #[test]
    fn booked_never_exceeds_a_constant_allowance_and_releases_balance() {
        loom::model(|| {
            let ledger = loom::sync::Arc::new(Ledger::new());
            ledger.allowance.store(10, Ordering::Relaxed);
            let threads: Vec<_> = [6, 5]
                .into_iter()
                .map(|bytes| {
                    let ledger = loom::sync::Arc::clone(&ledger);
                    loom::thread::spawn(move || {
                        if ledger.try_book(ByteSize::new(bytes)).is_ok() {
                            assert!(ledger.reserved() <= ByteSize::new(10));
                            ledger.release(ByteSize::new(bytes));
                        }
                    })
                })
                .collect();
            assert!(ledger.reserved() <= ByteSize::new(10));
            for thread in threads {
                thread.join().expect("no panic");
            }
            assert_eq!(ledger.reserved(), ByteSize::ZERO);
        });
    }

    /// Whoever comes first, a small one never takes the room of a large one.
    #[test]
    fn a_small_request_that_is_admitted_leaves_room_for_the_berth() {
        loom::model(|| {
            let ledger = loom::sync::Arc::new(Ledger::new());
            ledger.allowance.store(10, Ordering::Relaxed);
            ledger.ceiling.store(10, Ordering::Relaxed);
            ledger.reserved_headroom.store(6, Ordering::Relaxed);
            let threads = [3, 3].map(|bytes| {
                let ledger = loom::sync::Arc::clone(&ledger);
                loom::thread::spawn(move || ledger.try_book(ByteSize::new(bytes)).is_ok())
            });
            let large = ledger.try_book(ByteSize::new(6)).is_ok();
            let small = threads.map(|thread| thread.join().expect("no panic"));
            let count = small.into_iter().filter(|admitted| *admitted).count();
            assert!(ledger.reserved() <= ByteSize::new(10));
            assert!(count <= if large { 1 } else { 2 }, "large {large}, small {small:?}");
            assert!(large || count == 2, "who was refused was refused for those admitted");
            let reserved = if large { 6 } else { 0 } + 3 * count as u64;
            assert_eq!(ledger.reserved(), ByteSize::new(reserved));
        });
    }

    #[test]
    fn of_two_that_are_alone_one_is() {
        loom::model(|| {
            let ledger = loom::sync::Arc::new(Ledger::new());
            ledger.allowance.store(0, Ordering::Relaxed);
            ledger.ceiling.store(MEASURED_PART, Ordering::Relaxed);
            ledger.alone.store(6, Ordering::Relaxed);
            let other = loom::sync::Arc::clone(&ledger);
            let thread = loom::thread::spawn(move || other.try_book(ByteSize::new(6)).is_ok());
            let mine = ledger.try_book(ByteSize::new(5)).is_ok();
            let theirs = thread.join().expect("no panic");
            assert!(mine != theirs);
        });
    }

    #[test]
    fn units_of_standing_bookings_are_never_more_than_what_is_booked() {
        loom::model(|| {
            let ledger = loom::sync::Arc::new(Ledger::new());
            let other = loom::sync::Arc::clone(&ledger);
            let thread = loom::thread::spawn(move || {
                let mut resource_reservations =
                    other.try_book_standing(ByteSize::new(8)).expect("no limit");
                other.settle(&mut resource_reservations);
                other.release_standing(resource_reservations);
            });
            assert!(ledger.requests() <= ByteSize::new(5));
            thread.join().expect("no panic");
            assert_eq!(ledger.reserved(), ByteSize::ZERO);
            assert_eq!(ledger.resource_reservations(), ByteSize::ZERO);
        });
    }
}

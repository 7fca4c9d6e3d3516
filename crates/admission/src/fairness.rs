//! Shares scarce room between request sizes, so that every size class gets its part.
//!
//! If each request is admitted that fits, small requests fill each gap, and a large one finds room
//! once in a hundred times. Requests do not wait here, so a queue cannot help. Telephony solves
//! this with *trunk reservation*: if every call needs as many free lines as the widest one, all are
//! blocked alike. So while a class of large requests is behind, every request has to leave
//! *headroom*: as much room as if it were as large as one of that class. Gaps then grow until a
//! large request comes, and once the class has caught up they are filled again. The cost is the
//! room that stays empty in the meantime, about `share x size / load` of it; that cost is bounded.
//!
//! [`Fairness`] is pure and owned by the control loop. From counts it computes the reserved
//! headroom, how fast room becomes free, and when to retry. It reads no clock, rejects no request
//! itself, and orders no request before another.
//!
//! With `admitted` and `offered` the bytes of a class, and `g` the same ratio over all classes, all
//! of them decayed: a class is behind if
//! `admitted < TARGET x (1 - size / allowance) x g x offered`.
//!
//! Invariants: `reserved headroom <= allowance / 3`; it is zero if fewer than four requests were
//! rejected lately, or if at least .9 of the bytes were admitted; the room that stays empty for it
//! is on average not much more than a twentieth of the allowance.
//!
//! Not promised: a share to requests larger than a third of the allowance, since the room for one
//! would have to be taken from all others; to classes with less than one request in several
//! seconds; or within the first seconds of a new load. Within a class all requests count alike,
//! though one may be twice another.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;

use super::ledger::RoomSharing;
use super::tally::{BudgetCounts, ClassStats};

/// The part of its proportional share that a class should get at least. The requirement is one
/// half.
const TARGET: f64 = 0.75;
/// The time over which admitted and offered bytes are compared. A shorter time forgets rare
/// classes, a longer one follows a change of the load later.
const SETTLING: Duration = Duration::from_secs(4);
/// Fewer recent rejections are chance, not overload: a load that fits causes one now and then.
const SHEDS_MIN: f64 = 4.0;
/// If this part of the bytes was admitted, it is not overload.
const ADMITTED_MOST: f64 = 0.9;
/// The part of the allowance that may stay empty, on average, when headroom is first reserved.
/// Existing headroom is kept up to twice that.
const PRICE_MAX: f64 = 0.05;
/// The largest reserved headroom is the allowance divided by this.
const HEADROOM_PART: u64 = 3;
/// Headroom is reserved if this part of it is already free, for example because a large request
/// just ended. Then nothing has to be held back while it fills.
const READY: f64 = 0.75;
/// Otherwise headroom is reserved when a class has been behind for this long.
const PATIENCE: Duration = Duration::from_secs(1);
/// If less of a class than this part of one request was offered lately, the class is inactive.
const OFFERED_MIN: f64 = 0.5;
/// The largest factor by which the retry time grows because of other rejected requests.
const CROWD_MAX: f64 = 30.0;

/// The state of one budget's account.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LedgerFigures {
    /// Time since the last update.
    pub(crate) since: Duration,
    /// Bytes reserved in total.
    pub(crate) reserved: ByteSize,
    /// The part of it that requests hold.
    pub(crate) requests: ByteSize,
    /// Bytes that may be reserved.
    pub(crate) allowance: ByteSize,
}

/// One class, bytes decayed.
#[derive(Clone, Copy, Debug, Default)]
struct ClassShare {
    before: ClassStats,
    offered: f64,
    admitted: f64,
    /// The largest rejected size in this settling time and in the previous one, averaged over the
    /// rejections between two updates.
    sizes: [f64; 2],
    /// The time for which it has been behind.
    behind: Duration,
    /// `true` if headroom is reserved for it.
    has_headroom: bool,
}

impl ClassShare {
    fn size(&self) -> f64 {
        self.sizes[0].max(self.sizes[1])
    }
}

/// The controller of one budget's reserved headroom. Owned by the control loop.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fairness {
    classes: [ClassShare; ClassStats::COUNT],
    /// Requests rejected, decayed.
    sheds: f64,
    /// The part of the allowance that stayed empty for the headroom, decayed.
    price: f64,
    reserved_headroom: f64,
    /// Time since the last turn of `sizes`.
    turned: Duration,
    /// Bytes that requests released and the time in which they did, decayed.
    released: f64,
    passed: f64,
    /// Bytes reserved by requests outside their classes, and bytes reserved by all requests, at the
    /// last update.
    beside: u64,
    requests: ByteSize,
    /// `false` before the first update: counts before it belong to an unknown time.
    has_looked: bool,
}

impl Fairness {
    /// Updates the state from the account and returns how the room is shared.
    pub(crate) fn update(&mut self, seen: LedgerFigures, counts: &BudgetCounts) -> RoomSharing {
        if !std::mem::replace(&mut self.has_looked, true) {
            for (class, now) in self.classes.iter_mut().zip(&counts.classes) {
                class.before = *now;
            }
            (self.beside, self.requests) = (counts.beside, seen.requests);
            return RoomSharing::default();
        }
        let passed = seen.since.as_secs_f64();
        let kept = SETTLING.as_secs_f64() / (SETTLING.as_secs_f64() + passed);
        self.turned = self.turned.saturating_add(seen.since);
        if self.turned >= SETTLING {
            self.turned = Duration::ZERO;
            for class in &mut self.classes {
                class.sizes = [0.0, class.sizes[0]];
            }
        }
        // The cost of the headroom since the last update.
        let room = seen.allowance.saturating_sub(seen.reserved).as_f64();
        let empty = room.min(self.reserved_headroom) / seen.allowance.as_f64().max(1.0);
        self.price = self.price * kept + empty * (1.0 - kept);
        self.drain(&seen, counts, kept);
        self.sheds *= kept;
        let bound = ByteSize::new(seen.allowance.get() / HEADROOM_PART).as_f64();
        let (mut offered, mut admitted) = (0.0, 0.0);
        for (class, now) in self.classes.iter_mut().zip(&counts.classes) {
            let sheds = count(class, now, kept);
            // A class that can have no headroom takes no part.
            if class.size() <= bound {
                self.sheds += sheds;
                offered += class.offered;
                admitted += class.admitted;
            }
        }
        let overall = if offered > 0.0 { (admitted / offered).min(1.0) } else { 1.0 };
        // Without a limit the allowance means nothing, and no request is rejected.
        let is_short =
            seen.allowance != ByteSize::MAX && self.sheds >= SHEDS_MIN && overall < ADMITTED_MOST;
        let reserved_headroom = self.reserved_headroom(&seen, is_short, overall, bound);
        self.reserved_headroom = reserved_headroom;
        debug_assert!(
            reserved_headroom <= bound.max(0.0),
            "headroom of {reserved_headroom} in a bound of {bound}"
        );
        let crowd = (1.0 / overall).min(CROWD_MAX);
        let drain = if self.passed > 0.0 { self.released / self.passed } else { 0.0 };
        RoomSharing {
            // Up to the next byte, so that the largest of the class fits.
            reserved_headroom: ByteSize::new(1).scaled(reserved_headroom.ceil()),
            drain: ByteSize::new(1).scaled(drain / crowd),
            pause: Duration::from_secs_f64(crowd),
        }
    }

    /// Returns the largest headroom that a class needs, of those that are behind; none unless room
    /// is short.
    fn reserved_headroom(
        &mut self,
        seen: &LedgerFigures,
        is_short: bool,
        overall: f64,
        bound: f64,
    ) -> f64 {
        let allowance = seen.allowance.as_f64();
        let room = seen.allowance.saturating_sub(seen.reserved).as_f64();
        let mut reserved_headroom = 0.0_f64;
        for class in &mut self.classes {
            let size = class.size();
            let target = TARGET * (1.0 - size / allowance) * overall;
            let comes = size > 0.0 && size <= bound && class.offered >= OFFERED_MIN * size;
            if !is_short || !comes || class.admitted >= target * class.offered {
                class.behind = Duration::ZERO;
                class.has_headroom = false;
                continue;
            }
            class.behind = class.behind.saturating_add(seen.since);
            class.has_headroom = if class.has_headroom {
                self.price <= 2.0 * PRICE_MAX
            } else {
                self.price <= PRICE_MAX && (room >= READY * size || class.behind >= PATIENCE)
            };
            if class.has_headroom {
                reserved_headroom = reserved_headroom.max(size);
            }
        }
        reserved_headroom
    }

    /// Adds the bytes that requests released: those they held and reserved since, less those they
    /// hold now.
    fn drain(&mut self, seen: &LedgerFigures, counts: &BudgetCounts, kept: f64) {
        let mut reserved = counts.beside.wrapping_sub(self.beside);
        for (class, now) in self.classes.iter().zip(&counts.classes) {
            let before = class.before.admitted_bytes_total;
            reserved = reserved.wrapping_add(now.admitted_bytes_total.wrapping_sub(before));
        }
        let held = self.requests.as_f64() - seen.requests.as_f64();
        // Below zero if a request is counted a moment after it reserved; corrected at the next
        // update.
        self.released = self.released * kept + held + ByteSize::new(reserved).as_f64();
        self.passed = self.passed * kept + seen.since.as_secs_f64();
        self.requests = seen.requests;
        self.beside = counts.beside;
    }
}

/// Adds the counts since the last update to a class. Returns the number of rejections.
fn count(class: &mut ClassShare, now: &ClassStats, kept: f64) -> f64 {
    let since = |now: u64, before: u64| ByteSize::new(now.wrapping_sub(before)).as_f64();
    let before = std::mem::replace(&mut class.before, *now);
    let admitted = since(now.admitted_bytes_total, before.admitted_bytes_total);
    let rejected = since(now.rejected_bytes_total, before.rejected_bytes_total);
    let sheds = since(now.rejected_total, before.rejected_total);
    class.admitted = class.admitted * kept + admitted;
    class.offered = class.offered * kept + admitted + rejected;
    if sheds > 0.0 {
        class.sizes[0] = class.sizes[0].max(rejected / sheds);
    }
    sheds
}

#[cfg(all(test, not(lowtide_loom)))]
mod model;

//! Who gets the room when there is too little of it: every size of request its part.
//!
//! Where each request is admitted that fits, the small ones fill each gap, and a large one finds
//! room once in a hundred times. No request waits here, so a queue is no way out. Telephony has
//! another: *trunk reservation*. Where every call needs as many free lines as the widest one, all
//! are blocked alike. So while a class of large requests is behind, every request has to leave a
//! *berth*: room as if it were as large as one of that class itself. Gaps then grow until a large
//! one comes, and once the class has caught up they are filled again. What it costs is the room
//! that stands empty meanwhile, about `share x size / load` of it; that price is bounded.
//!
//! [`Fairness`] is pure and owned by the control loop: it is given counts, and says how large the
//! berth is, how fast room comes free, and when to come again. It reads no clock, refuses nobody
//! itself, and orders no request before another.
//!
//! With `admitted` and `offered` the bytes of a class, `g` the same ratio over all classes, all of
//! them decayed: a class is behind where
//! `admitted < TARGET x (1 - size / allowance) x g x offered`.
//!
//! Invariants: `berth <= allowance / 3`; there is no berth where fewer than four requests were
//! shed lately, or at least .9 of the bytes were admitted; what stands empty for berths is on
//! average not much more than a twentieth of the allowance.
//!
//! Not promised: a share to requests larger than a third of the allowance, since the room for one
//! would have to be taken from all others; to classes of which one comes in several seconds; or
//! before some seconds of a new load have passed. Within a class all count alike, though one may
//! be twice another.

use std::time::Duration;

use crate::bytes::ByteSize;

use super::ledger::Ledger;
use super::size_class::SizeClass;
use super::tally::{BudgetCounts, ClassStats};

/// The part of its proportional share that a class is to have at least. What is asked of it is
/// one half.
const TARGET: f64 = 0.75;
/// The time over which admitted and offered bytes are compared. Shorter forgets classes that come
/// rarely, longer follows a change of the load later.
const SETTLING: Duration = Duration::from_secs(4);
/// Fewer recent sheds are chance, not overload: a load that fits sheds a large one now and then.
const SHEDS_MIN: f64 = 4.0;
/// Nor is it overload where this part of the bytes was admitted.
const ADMITTED_MOST: f64 = 0.9;
/// The part of the allowance that may stand empty, on average, when a berth is begun; one that is
/// begun is kept up to twice that.
const PRICE_MAX: f64 = 0.05;
/// The largest berth is the allowance divided by this.
const BERTH_PART: u64 = 3;
/// A berth is begun when this part of it is empty already, as it is where a large request just
/// ended: so nothing has to be held back while it fills.
const READY: f64 = 0.75;
/// Or else when a class has been behind for this long.
const PATIENCE: Duration = Duration::from_secs(1);
/// Less of a class than this part of one request was offered lately: it does not come any more.
const OFFERED_MIN: f64 = 0.5;
/// Nobody is told to wait for longer because of others who ask.
const CROWD_MAX: f64 = 30.0;

/// How the room of one budget is to be shared, until the next look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Balance {
    /// What each request has to leave room for, itself included.
    pub(crate) reserved_headroom: ByteSize,
    /// Bytes a second that come free for those who are refused; none where that is not known.
    pub(crate) drain: ByteSize,
    /// The least time after which they should come again.
    pub(crate) pause: Duration,
}

/// What one budget's account shows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    /// Time since the last look.
    pub(crate) since: Duration,
    /// What all hold.
    pub(crate) reserved: ByteSize,
    /// What of it requests hold.
    pub(crate) requests: ByteSize,
    /// What may be booked.
    pub(crate) allowance: ByteSize,
}

impl Seen {
    /// What the ledger shows, this long after the last look.
    pub(crate) fn of(ledger: &Ledger, since: Duration) -> Self {
        let (reserved, allowance) = (ledger.reserved(), ledger.allowance());
        Self { since, reserved, requests: ledger.requests(), allowance }
    }
}

/// One class, bytes decayed.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    before: ClassStats,
    offered: f64,
    admitted: f64,
    /// The largest that was shed in this settling time and in the one before it, on average over
    /// what came between two looks.
    sizes: [f64; 2],
    /// For how long it has been behind.
    behind: Duration,
    /// Whether there is a berth for it.
    has_berth: bool,
}

impl Class {
    fn size(&self) -> f64 {
        self.sizes[0].max(self.sizes[1])
    }
}

/// The controller of one budget's berth. Owned by the control loop.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fairness {
    classes: [Class; SizeClass::COUNT],
    /// Requests shed, decayed.
    sheds: f64,
    /// The part of the allowance that stood empty for a berth, decayed.
    price: f64,
    reserved_headroom: f64,
    /// Since the last turn of `sizes`.
    turned: Duration,
    /// Bytes that requests gave back and the time in which they did, decayed.
    released: f64,
    passed: f64,
    /// Booked by requests beside their classes, and booked by all requests, at the last look.
    beside: u64,
    requests: ByteSize,
    /// Whether there was a look before: what was counted before the first is of no known time.
    has_looked: bool,
}

impl Fairness {
    /// Looks at the account and says how the room is to be shared.
    pub(crate) fn update(&mut self, seen: Seen, counts: &BudgetCounts) -> Balance {
        if !std::mem::replace(&mut self.has_looked, true) {
            for (class, now) in self.classes.iter_mut().zip(&counts.classes) {
                class.before = *now;
            }
            (self.beside, self.requests) = (counts.beside, seen.requests);
            return Balance::default();
        }
        let passed = seen.since.as_secs_f64();
        let kept = SETTLING.as_secs_f64() / (SETTLING.as_secs_f64() + passed);
        self.turn(seen.since);
        self.weigh(&seen, kept);
        self.drain(&seen, counts, kept);
        self.sheds *= kept;
        let bound = ByteSize::new(seen.allowance.get() / BERTH_PART).as_f64();
        let (mut offered, mut admitted) = (0.0, 0.0);
        for (class, now) in self.classes.iter_mut().zip(&counts.classes) {
            let sheds = count(class, now, kept);
            // What can have no berth takes no part: nobody waits for it, and it proves nothing.
            if class.size() <= bound {
                self.sheds += sheds;
                offered += class.offered;
                admitted += class.admitted;
            }
        }
        let overall = if offered > 0.0 { (admitted / offered).min(1.0) } else { 1.0 };
        // Without a limit the allowance says nothing, and nothing is refused.
        let is_short =
            seen.allowance != ByteSize::MAX && self.sheds >= SHEDS_MIN && overall < ADMITTED_MOST;
        let reserved_headroom =
            if is_short { self.reserved_headroom(&seen, overall, bound) } else { self.no_berth() };
        self.reserved_headroom = reserved_headroom;
        debug_assert!(
            reserved_headroom <= bound.max(0.0),
            "a berth of {reserved_headroom} in a bound of {bound}"
        );
        let crowd = (1.0 / overall).min(CROWD_MAX);
        let drain = if self.passed > 0.0 { self.released / self.passed } else { 0.0 };
        Balance {
            // Up to the next byte, so that the largest of the class fits.
            reserved_headroom: ByteSize::new(1).scaled(reserved_headroom.ceil()),
            drain: ByteSize::new(1).scaled(drain / crowd),
            pause: Duration::from_secs_f64(crowd),
        }
    }

    /// The largest berth that a class needs, of those that are behind.
    fn reserved_headroom(&mut self, seen: &Seen, overall: f64, bound: f64) -> f64 {
        let allowance = seen.allowance.as_f64();
        let room = seen.allowance.saturating_sub(seen.reserved).as_f64();
        let mut reserved_headroom = 0.0_f64;
        for class in &mut self.classes {
            let size = class.size();
            let target = TARGET * (1.0 - size / allowance) * overall;
            let comes = size > 0.0 && size <= bound && class.offered >= OFFERED_MIN * size;
            if !comes || class.admitted >= target * class.offered {
                class.behind = Duration::ZERO;
                class.has_berth = false;
                continue;
            }
            class.behind = class.behind.saturating_add(seen.since);
            class.has_berth = if class.has_berth {
                self.price <= 2.0 * PRICE_MAX
            } else {
                self.price <= PRICE_MAX && (room >= READY * size || class.behind >= PATIENCE)
            };
            if class.has_berth {
                reserved_headroom = reserved_headroom.max(size);
            }
        }
        reserved_headroom
    }

    fn no_berth(&mut self) -> f64 {
        for class in &mut self.classes {
            class.behind = Duration::ZERO;
            class.has_berth = false;
        }
        0.0
    }

    /// What the berth has cost since the last look.
    fn weigh(&mut self, seen: &Seen, kept: f64) {
        let room = seen.allowance.saturating_sub(seen.reserved).as_f64();
        let empty = if seen.allowance.is_zero() {
            0.0
        } else {
            room.min(self.reserved_headroom) / seen.allowance.as_f64()
        };
        self.price = self.price * kept + empty * (1.0 - kept);
    }

    /// What requests gave back: what they held and were given since, less what they hold now.
    fn drain(&mut self, seen: &Seen, counts: &BudgetCounts, kept: f64) {
        let reserved: u64 = (self.classes.iter().zip(&counts.classes))
            .map(|(class, now)| {
                now.admitted_bytes_total.wrapping_sub(class.before.admitted_bytes_total)
            })
            .fold(counts.beside.wrapping_sub(self.beside), u64::wrapping_add);
        let held = self.requests.as_f64() - seen.requests.as_f64();
        // Below zero where a request is counted a moment after it booked; made up for at the next.
        self.released = self.released * kept + held + ByteSize::new(reserved).as_f64();
        self.passed = self.passed * kept + seen.since.as_secs_f64();
        self.requests = seen.requests;
        self.beside = counts.beside;
    }

    fn turn(&mut self, since: Duration) {
        self.turned = self.turned.saturating_add(since);
        if self.turned >= SETTLING {
            self.turned = Duration::ZERO;
            for class in &mut self.classes {
                class.sizes = [0.0, class.sizes[0]];
            }
        }
    }
}

/// Takes what came since the last look into a class; says how many were shed.
fn count(class: &mut Class, now: &ClassStats, kept: f64) -> f64 {
    let since = |now: u64, before: u64| ByteSize::new(now.wrapping_sub(before)).as_f64();
    let before = std::mem::replace(&mut class.before, *now);
    let admitted = since(now.admitted_bytes_total, before.admitted_bytes_total);
    let shed = since(now.rejected_bytes_total, before.rejected_bytes_total);
    let sheds = since(now.rejected_total, before.rejected_total);
    class.admitted = class.admitted * kept + admitted;
    class.offered = class.offered * kept + admitted + shed;
    if sheds > 0.0 {
        class.sizes[0] = class.sizes[0].max(shed / sheds);
    }
    sheds
}

#[cfg(all(test, not(lowtide_loom)))]
mod model;

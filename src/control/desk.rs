//! What doors and permits work on: the ledgers, the level, and the counts.
//!
//! A permit has to keep it alive, and a reference count would cost two atomic operations for each
//! request, as many as the booking itself. So a desk is never freed: when its door is gone and its
//! last permit has been dropped, the next door has it, and there are as many as there were doors
//! at once.
//!
//! Invariant: at most one door has a desk; whoever has a permit of it finds it as the door left it.

use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use crate::bytes::ByteSize;

use super::admission::{Cost, Priority};
use super::eviction::{Eviction, Evictor, Hint};
use super::ledger::{Budget, Ledger, Reservation, Shortfall, Standing};
use super::permit::Permit;
use super::pressure::Level;
use super::rejected::Rejected;
use super::tally::{BudgetCounts, Counts, Place, STRIPES, Tally};

/// When to come again where an operator has to act. A guess.
const EXHAUSTED: Duration = Duration::from_secs(30);
/// The latest time to come again, unless it is known when there will be room.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Desks whose doors are gone.
static LEFT: Mutex<Vec<&'static Desk>> = Mutex::new(Vec::new());

/// The books behind a door.
#[derive(Debug, Default)]
pub(super) struct Desk {
    pub(super) host: Ledger,
    pub(super) device: Ledger,
    pub(super) level: AtomicU8,
    pub(super) closed: AtomicBool,
    /// What no request owns while that leaves no room for requests, else 0.
    pub(super) unowned: AtomicU64,
    /// Bytes of the device are bytes of the host: what is asked of the one is booked in the other.
    pub(super) unified: AtomicBool,
    tallies: [Tally; STRIPES],
    /// What makes room for those who find none. Read only where a request or a load is rejected.
    evictor: RwLock<Option<Arc<Evictor>>>,
}

/// What a load has, in place of a rejection.
pub(super) enum Stood {
    /// Its bytes are booked.
    Booked(Permit),
    /// They will be, when the resources that were claimed for it are unloaded.
    Evicting(Eviction),
}

impl Desk {
    /// A desk that nobody has, with this account of the host's memory.
    pub(super) fn take(host: &Ledger) -> &'static Self {
        let desk = Self::left().unwrap_or_else(|| Box::leak(Box::default()));
        desk.host.begin(host);
        desk.device.begin(&Ledger::new());
        desk.level.store(Level::None.as_u8(), Ordering::Relaxed);
        desk.closed.store(false, Ordering::Release);
        desk.unowned.store(0, Ordering::Relaxed);
        desk.set_evictor(None);
        desk.unified.store(false, Ordering::Relaxed);
        for tally in &desk.tallies {
            tally.begin();
        }
        desk
    }

    /// One whose door is gone, and all whose permits have been dropped.
    fn left() -> Option<&'static Self> {
        // Tried, not waited for: a process that was forked off meanwhile would wait for ever.
        let mut left = LEFT.try_lock().ok()?;
        let at = left.iter().position(|desk| desk.counts().held() == 0)?;
        Some(left.swap_remove(at))
    }

    /// The last door to it goes.
    pub(super) fn leave(&'static self) {
        self.set_evictor(None);
        if cfg!(lowtide_loom) {
            // Its atomics are of one run of a model.
            return;
        }
        // Tried, as above. Where another door comes or goes at this moment, the desk is let go.
        if let Ok(mut left) = LEFT.try_lock() {
            left.push(self);
        }
    }

    /// A cost by the budgets that there are: with one for host and device all of it is the host's.
    pub(super) fn by_budget(&self, cost: Cost) -> Cost {
        // Most requests ask for nothing of the device.
        if cost.device.is_zero() || !self.unified.load(Ordering::Relaxed) {
            return cost;
        }
        Cost::host(cost.host.saturating_add(cost.device))
    }

    /// Admits a request, or counts it as shed.
    pub(super) fn admit(&'static self, cost: Cost, priority: Priority) -> Result<Permit, Rejected> {
        let cost = self.by_budget(cost);
        let place = Place::here();
        let tally = self.tally(place);
        let exempt = priority == Priority::Exempt;
        if exempt {
            let host = self.host.book_exempt(cost.host);
            let device = self.device.book_exempt(cost.device);
            tally.admit_exempt(place, host, device);
            return Ok(Permit::request(self, Cost { host, device }, exempt));
        }
        if self.sheds(priority) {
            return Err(self.turn_away(place));
        }
        let how = if priority == Priority::High { Ledger::try_book_more } else { Ledger::try_book };
        let host = match book(&self.host, cost.host, how) {
            Ok(host) => host,
            Err(short) => return Err(self.refuse(cost, Budget::Host, short, place)),
        };
        let device = match book(&self.device, cost.device, how) {
            Ok(device) => device,
            Err(short) => {
                self.host.release(host);
                return Err(self.refuse(cost, Budget::Device, short, place));
            }
        };
        tally.admit(place, host, device);
        Ok(Permit::request(self, Cost { host, device }, exempt))
    }

    /// Gives back what a request holds, which ends.
    pub(super) fn finish(&self, cost: Cost) {
        self.host.release(cost.host);
        self.device.release(cost.device);
        let place = Place::here();
        self.tally(place).finish(place);
    }

    /// Books what stays.
    pub(super) fn stand(&self, cost: Cost) -> Result<(Standing, Standing), Rejected> {
        self.stand_where(cost, || Hint::Unknown)
    }

    /// Books what stays, or claims idle resources whose unload makes room for it. Not to be called
    /// with the lock of a resource held.
    pub(super) fn stand_or_evict(&'static self, cost: Cost) -> Result<Stood, Rejected> {
        let cost = self.by_budget(cost);
        let mut eviction = None;
        let evict = || match self.evictor().map(|evictor| evictor.for_load(self, cost)) {
            Some(Ok(claimed)) => {
                eviction = Some(claimed);
                Hint::Unknown
            }
            Some(Err(Some(stays))) => Hint::Resident(stays),
            Some(Err(None)) | None => Hint::Unknown,
        };
        let stood = self.stand_where(cost, evict);
        match (stood, eviction) {
            (Ok((host, device)), _) => Ok(Stood::Booked(Permit::standing(self, host, device))),
            (Err(_), Some(eviction)) => Ok(Stood::Evicting(eviction)),
            (Err(rejected), None) => Err(rejected),
        }
    }

    fn stand_where(
        &self,
        cost: Cost,
        make_room: impl FnMut() -> Hint,
    ) -> Result<(Standing, Standing), Rejected> {
        let cost = self.by_budget(cost);
        let place = Place::here();
        if self.sheds(Priority::Normal) {
            return Err(self.away(place));
        }
        let host = match stand(&self.host, cost.host) {
            Ok(host) => host,
            Err(short) => return Err(self.full(Budget::Host, short, place, make_room)),
        };
        let device = match stand(&self.device, cost.device) {
            Ok(device) => device,
            Err(short) => {
                self.host.release_standing(host);
                return Err(self.full(Budget::Device, short, place, make_room));
            }
        };
        self.tally(place).stand(place);
        Ok((host, device))
    }

    /// Gives back what stood.
    pub(super) fn unload(&self, host: Standing, device: Standing) {
        self.host.release_standing(host);
        self.device.release_standing(device);
        let place = Place::here();
        self.tally(place).unload(place);
    }

    /// What makes room for those who find none.
    pub(super) fn set_evictor(&self, evictor: Option<Arc<Evictor>>) {
        // Tried, as above. The one that was there is dropped with the lock given up.
        let before =
            self.evictor.try_write().map(|mut slot| std::mem::replace(&mut *slot, evictor));
        drop(before);
    }

    fn evictor(&self) -> Option<Arc<Evictor>> {
        let stand = !self.host.resource_reservations().is_zero()
            || !self.device.resource_reservations().is_zero();
        self.evictor.try_read().ok().filter(|_| stand)?.clone()
    }

    /// Whether a request of this cost would fit if so much of what stands were gone.
    pub(super) fn fits(&self, cost: Cost, freed: Cost) -> bool {
        self.host.fits(cost.host, freed.host) && self.device.fits(cost.device, freed.device)
    }

    /// Whether this would fit, to stand, if so much of what stands were gone.
    pub(super) fn fits_standing(&self, cost: Cost, freed: Cost) -> bool {
        self.host.fits_standing(cost.host, freed.host)
            && self.device.fits_standing(cost.device, freed.device)
    }

    /// Books what this needs, to stand, beyond so much that is going.
    pub(super) fn reserve(&self, cost: Cost, freed: Cost) -> Option<[Reservation; 2]> {
        let host = self.host.reserve(cost.host, freed.host)?;
        match self.device.reserve(cost.device, freed.device) {
            Some(device) => Some([host, device]),
            None => {
                self.host.unreserve(host);
                None
            }
        }
    }

    /// Releases what was reserved.
    pub(super) fn unreserve(&self, [host, device]: [Reservation; 2]) {
        self.host.unreserve(host);
        self.device.unreserve(device);
    }

    /// Books what stays, in place of what is gone and of what was reserved for it.
    pub(super) fn exchange(
        &'static self,
        freed: Vec<Permit>,
        [host, device]: [Reservation; 2],
        cost: Cost,
    ) -> Permit {
        let (hosts, devices): (Vec<_>, Vec<_>) =
            freed.into_iter().filter_map(Permit::into_standing).unzip();
        let host = self.host.exchange(&hosts, host, cost.host);
        let device = self.device.exchange(&devices, device, cost.device);
        let place = Place::here();
        self.tally(place).stand(place);
        for _ in hosts {
            self.tally(place).unload(place);
        }
        Permit::standing(self, host, device)
    }

    /// Books more of the host's memory for a request that holds `held`: what was booked.
    pub(super) fn grow(
        &'static self,
        held: ByteSize,
        bytes: ByteSize,
        exempt: bool,
    ) -> Result<ByteSize, Rejected> {
        let place = Place::here();
        let reserved = if exempt {
            self.host.book_exempt(bytes)
        } else {
            self.book_more(held, bytes, place).inspect_err(|rejected| {
                self.tally(place).shed(place, rejected.reason(), None);
            })?
        };
        self.tally(place).grow(place, reserved);
        Ok(reserved)
    }

    /// Books more of the host's memory for a request, whatever the allowance says: what was booked.
    #[cfg(feature = "service")]
    pub(super) fn raise(&self, bytes: ByteSize) -> ByteSize {
        let place = Place::here();
        let reserved = self.host.book_exempt(bytes);
        self.tally(place).grow(place, reserved);
        reserved
    }

    /// A request shed for what it is, not for want of room.
    pub(super) fn shed(&self, rejected: Rejected) -> Rejected {
        let place = Place::here();
        self.tally(place).shed(place, rejected.reason(), None);
        rejected
    }

    pub(super) fn ledger(&self, budget: Budget) -> &Ledger {
        match budget {
            Budget::Host => &self.host,
            Budget::Device => &self.device,
        }
    }

    /// What all stripes say.
    pub(super) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        // What ended first: it began before, and so is counted below.
        for tally in &self.tallies {
            counts.add_ended(tally);
        }
        for tally in &self.tallies {
            counts.add(tally);
        }
        counts
    }

    pub(super) fn budget_counts(&self, budget: Budget) -> BudgetCounts {
        let mut counts = BudgetCounts::default();
        for tally in &self.tallies {
            counts.add(tally, budget);
        }
        counts
    }

    fn tally(&self, place: Place) -> &Tally {
        // A place is one of the stripes.
        self.tallies.get(place.stripe).unwrap_or(&self.tallies[0])
    }

    /// A number that differs from one shed request to the next.
    fn spread(&self, place: Place) -> u64 {
        self.tally(place).spread(place)
    }

    pub(super) fn level(&self) -> Level {
        Level::from_u8(self.level.load(Ordering::Relaxed))
    }

    /// Whether requests of this priority are shed now, whatever they ask for.
    fn sheds(&self, priority: Priority) -> bool {
        let by_level = match self.level() {
            Level::None | Level::Elevated => false,
            Level::High => priority == Priority::Low,
            Level::Critical => matches!(priority, Priority::Low | Priority::Normal),
        };
        by_level || self.closed.load(Ordering::Acquire)
    }

    /// Why a request is shed whatever it asks for.
    fn away(&self, place: Place) -> Rejected {
        if self.closed.load(Ordering::Acquire) {
            return Rejected::ShuttingDown;
        }
        if let Some(rejected) = self.exhausted(place) {
            return rejected;
        }
        let retry_after = self.retry_after(None, self.spread(place));
        Rejected::Pressure { level: self.level(), retry_after }
    }

    /// Why a request is rejected while memory that no request owns leaves no room.
    fn exhausted(&self, place: Place) -> Option<Rejected> {
        let unowned = NonZero::new(self.unowned.load(Ordering::Relaxed))?;
        let retry_after = self.retry_after(Some(EXHAUSTED), self.spread(place));
        let (unowned, ceiling) = (ByteSize::new(unowned.get()), self.host.ceiling());
        Some(Rejected::Exhausted { unowned, ceiling, retry_after })
    }

    #[cold]
    fn turn_away(&self, place: Place) -> Rejected {
        let rejected = self.away(place);
        self.tally(place).shed(place, rejected.reason(), None);
        rejected
    }

    #[cold]
    fn refuse(
        &'static self,
        cost: Cost,
        budget: Budget,
        short: Shortfall,
        place: Place,
    ) -> Rejected {
        let rejected = self.full(budget, short, place, || self.make_room(cost));
        self.tally(place).shed(place, rejected.reason(), rejected.shortage());
        rejected
    }

    /// Unloads idle resources, where that makes room for a request that is being rejected.
    fn make_room(&'static self, cost: Cost) -> Hint {
        let evictor = self.evictor();
        evictor.map_or(Hint::Unknown, |evictor| evictor.for_request(self, cost))
    }

    /// Books more of the host's memory for a request of this much: what was booked.
    fn book_more(
        &'static self,
        held: ByteSize,
        bytes: ByteSize,
        place: Place,
    ) -> Result<ByteSize, Rejected> {
        book(&self.host, bytes, Ledger::try_book_more).map_err(|short| {
            // What it holds already and what it asks for must fit together, ever.
            let total = held.saturating_add(bytes);
            let never = total > self.host.ceiling();
            let short = Shortfall { asked: if never { total } else { bytes }, ..short };
            self.full(Budget::Host, short, place, || self.make_room(Cost::host(bytes)))
        })
    }

    /// Why something does not fit. What may fit later has room made for it.
    fn full(
        &self,
        budget: Budget,
        short: Shortfall,
        place: Place,
        mut make_room: impl FnMut() -> Hint,
    ) -> Rejected {
        let ledger = self.ledger(budget);
        let Shortfall { asked, reserved, allowance } = short;
        let ceiling = ledger.ceiling();
        if asked > ceiling {
            return Rejected::TooLarge { budget, asked, ceiling };
        }
        let (wait, spread) = (ledger.wait_for(&short), self.spread(place));
        let hint = make_room();
        if budget == Budget::Host
            && !matches!(hint, Hint::Unloading(_))
            && let Some(rejected) = self.exhausted(place)
        {
            return rejected;
        }
        let retry_after = match hint {
            Hint::Unloading(takes) => self.retry_after(Some(takes), spread),
            Hint::Resident(stays) if !ledger.drains(&short) => known(stays, spread),
            Hint::Resident(_) | Hint::Unknown => self.retry_after(wait, spread),
        };
        let (reserved, allowance) = (ledger.in_bytes(reserved), ledger.in_bytes(allowance));
        Rejected::Full { budget, asked, reserved, allowance, retry_after }
    }

    /// As long as it takes for what is missing to come free, where that is known; else from 1 s at
    /// no pressure to 4 s at critical, a guess. Up to as much again is added, so that clients do
    /// not come back at once: by a number that differs from one to the next.
    fn retry_after(&self, wait: Option<Duration>, spread: u64) -> Duration {
        let seconds = match wait {
            Some(wait) => wait.as_secs() + u64::from(wait.subsec_nanos() > 0),
            None => 1 + u64::from(self.level.load(Ordering::Relaxed)),
        };
        let seconds = seconds.clamp(1, RETRY_MAX.as_secs() / 2);
        Duration::from_secs(seconds + spread % (seconds + 1))
    }
}

/// A time that is known, in whole seconds, and up to a tenth and a second more.
fn known(time: Duration, spread: u64) -> Duration {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    Duration::from_secs(seconds + spread % (seconds / 10 + 2))
}

/// Books for a request and says what was booked, which is what has to be released. Where no limit
/// is known nothing is refused: it is as much as 64 bits hold.
fn book(
    ledger: &Ledger,
    bytes: ByteSize,
    how: impl Fn(&Ledger, ByteSize) -> Result<(), Shortfall>,
) -> Result<ByteSize, Shortfall> {
    // Most requests ask for nothing of the device.
    if bytes.is_zero() {
        return Ok(bytes);
    }
    if ledger.ceiling() == ByteSize::MAX {
        return Ok(ledger.book_exempt(bytes));
    }
    how(ledger, bytes).map(|()| bytes)
}

/// Books what stays. Where no limit is known nothing is refused: nothing is booked where 64 bits
/// are full.
fn stand(ledger: &Ledger, bytes: ByteSize) -> Result<Standing, Shortfall> {
    let reserved = ledger.try_book_standing(bytes);
    if reserved.is_err() && ledger.ceiling() == ByteSize::MAX {
        return ledger.try_book_standing(ByteSize::ZERO);
    }
    reserved
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::control::admission::Admission;

    /// Desks are of the whole process, and other tests have doors meanwhile: so it is told from the
    /// outside only that a new door is a new door.
    #[test]
    fn a_new_door_is_open_empty_and_without_limit_whatever_the_last_one_was() {
        let one = ByteSize::mib(1);
        for _ in 0..200 {
            let door = Admission::with_limit(one);
            let permit = door.try_admit(Cost::host(one)).expect("fits");
            let model = door.try_reserve_resource(Cost::device(one)).expect("no limit");
            assert!(door.try_admit(Cost::host(one)).is_err());
            door.set_level(Level::Critical);
            door.close();
            let before = door.clone();
            drop(door);
            let new = Admission::new();
            assert_eq!(new.stats(), crate::control::AdmissionStats::default());
            assert_eq!((new.level(), new.is_closed()), (Level::None, false));
            assert_eq!(new.ledger(Budget::Host).ceiling(), ByteSize::MAX);
            for budget in [Budget::Host, Budget::Device] {
                assert_eq!(new.ledger(budget).reserved_bytes(), ByteSize::ZERO);
                let classes = new.classes(budget);
                assert!(
                    classes.iter().all(|class| class.admitted_total + class.rejected_total == 0)
                );
            }
            assert_eq!((before.stats().held(), before.is_closed()), (1, true));
            drop((before, new));
            // They outlive their door, and nobody else has its desk meanwhile.
            let other = Admission::with_limit(one);
            drop((permit, model));
            assert_eq!(other.stats().finished_total, 0);
            assert_eq!(other.ledger(Budget::Host).reserved(), ByteSize::ZERO);
        }
    }

    #[test]
    fn a_desk_whose_door_and_permits_are_gone_is_taken_again() {
        // More than all other tests of this process ever have at once.
        const MANY: usize = 400;
        let addresses: Vec<_> = (0..MANY)
            .map(|_| {
                let desk = Desk::take(&Ledger::new());
                desk.leave();
                std::ptr::from_ref(desk)
            })
            .collect();
        let mut different = addresses;
        different.sort_unstable();
        different.dedup();
        assert!(different.len() < MANY / 2, "{} of {MANY}", different.len());
    }

    #[test]
    fn permits_that_end_on_other_threads_are_counted() {
        let door = Admission::with_limit(ByteSize::mib(64));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let door = &door;
                scope.spawn(move || {
                    let permits: Vec<_> = (0..16)
                        .filter_map(|_| door.try_admit(Cost::host(ByteSize::mib(1))).ok())
                        .collect();
                    assert_eq!(permits.len(), 16);
                    std::thread::spawn(move || drop(permits)).join().expect("no panic");
                });
            }
        });
        let stats = door.stats();
        assert_eq!((stats.admitted_total, stats.finished_total, stats.held()), (64, 64, 0));
        assert_eq!(door.ledger(Budget::Host).reserved(), ByteSize::ZERO);
    }
}

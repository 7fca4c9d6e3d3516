//! Admission by bytes: what a request will hold is booked before it starts, in every budget.
//!
//! Admission decides with two atomic operations and one load; it reads no file, takes no lock and
//! waits for nothing. It does not measure: the control loop corrects the ledgers and sets the
//! level. A [`Permit`] gives back what it holds when it is dropped.
//!
//! Invariant: `booked = sum of the costs of live permits` (standing permits by their units), in
//! each budget; after a rejection nothing is booked for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use crate::bytes::ByteSize;

use super::ledger::{Budget, Ledger, Shortfall, Standing};
use super::pressure::Level;
use super::rejected::{Rejected, ShedReason};

/// What a request or resource will hold at its peak, by budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of the host's memory.
    pub host: ByteSize,
    /// Bytes of the device's memory.
    pub device: ByteSize,
}

impl Cost {
    /// Holds nothing.
    pub const ZERO: Self = Self { host: ByteSize::ZERO, device: ByteSize::ZERO };

    /// This much of the host's memory.
    #[must_use]
    pub const fn host(bytes: ByteSize) -> Self {
        Self { host: bytes, device: ByteSize::ZERO }
    }

    /// This much of the device's memory.
    #[must_use]
    pub const fn device(bytes: ByteSize) -> Self {
        Self { host: ByteSize::ZERO, device: bytes }
    }

    /// And this much of the host's memory.
    #[must_use]
    pub const fn and_host(self, bytes: ByteSize) -> Self {
        Self { host: self.host.saturating_add(bytes), ..self }
    }

    /// And this much of the device's memory.
    #[must_use]
    pub const fn and_device(self, bytes: ByteSize) -> Self {
        Self { device: self.device.saturating_add(bytes), ..self }
    }
}

/// Who is shed last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Shed from level high on.
    Low,
    /// Shed at level critical.
    #[default]
    Normal,
    /// Shed at level critical.
    High,
    /// Never shed, and booked beyond the allowance: health, metrics, calls to oneself.
    Exempt,
}

/// A cost of normal priority.
impl From<Cost> for (Cost, Priority) {
    fn from(cost: Cost) -> Self {
        (cost, Priority::Normal)
    }
}

/// What has been admitted and shed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmissionStats {
    /// Requests admitted since start.
    pub admitted_total: u64,
    /// Admitted requests whose permit has been dropped.
    pub finished_total: u64,
    /// Requests shed since start, in the order of [`ShedReason::ALL`].
    pub shed: [u64; 4],
}

impl AdmissionStats {
    /// Requests shed for this reason.
    #[must_use]
    pub fn shed_total(&self, reason: ShedReason) -> u64 {
        self.shed.get(reason as usize).copied().unwrap_or(0)
    }

    /// Requests that hold a permit now.
    #[must_use]
    pub const fn held(&self) -> u64 {
        self.admitted_total.saturating_sub(self.finished_total)
    }
}

#[derive(Debug, Default)]
struct Shared {
    host: Ledger,
    device: Ledger,
    level: AtomicU8,
    closed: AtomicBool,
    admitted: AtomicU64,
    finished: AtomicU64,
    shed: [AtomicU64; 4],
}

/// The door: cheap to clone, all clones are one. Admits everything until a limit is known.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    shared: Arc<Shared>,
}

impl Admission {
    /// An open door without a limit.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An open door with a fixed ceiling on the host's memory, and none on the device's.
    ///
    /// Nothing is measured: estimates are taken at their word, and the costs of all that is held
    /// never pass the ceiling. Where a control loop measures, use [`Admission::new`] and have it
    /// correct the ledgers.
    #[must_use]
    pub fn with_limit(ceiling: ByteSize) -> Self {
        let host = Ledger::with_ceiling(ceiling);
        Self { shared: Arc::new(Shared { host, ..Shared::default() }) }
    }

    /// Admits a request of normal priority.
    ///
    /// # Errors
    /// As for [`Admission::try_admit_with`].
    pub fn try_admit(&self, cost: Cost) -> Result<Permit, Rejected> {
        self.try_admit_with(cost, Priority::Normal)
    }

    /// Admits a request: books its cost in every budget, or in none. Some nanoseconds; no system
    /// call, no allocation.
    ///
    /// # Errors
    /// [`Rejected`], with the numbers; it is counted.
    pub fn try_admit_with(&self, cost: Cost, priority: Priority) -> Result<Permit, Rejected> {
        let booked = if priority == Priority::Exempt {
            Cost {
                host: self.shared.host.book_exempt(cost.host),
                device: self.shared.device.book_exempt(cost.device),
            }
        } else {
            let booked = self.pass_level(priority).and_then(|()| self.book(cost));
            booked.map_err(|rejected| self.shared.count(rejected))?
        };
        self.shared.admitted.fetch_add(1, Ordering::Relaxed);
        let exempt = priority == Priority::Exempt;
        Ok(Permit { shared: Arc::clone(&self.shared), held: Held::Request(booked), exempt })
    }

    /// Books what a resource holds while it is loaded: counted once, not multiplied, and not among
    /// the requests. Say [`Permit::settle`] when it is loaded.
    ///
    /// # Errors
    /// [`Rejected`]; it is not counted among the requests shed.
    pub fn try_stand(&self, cost: Cost) -> Result<Permit, Rejected> {
        self.pass_level(Priority::High)?;
        let host = stand(&self.shared.host, cost.host);
        let host = host.map_err(|short| self.shared.full(Budget::Host, short))?;
        match stand(&self.shared.device, cost.device) {
            Ok(device) => {
                let held = Held::Standing(Some((host, device)));
                Ok(Permit { shared: Arc::clone(&self.shared), held, exempt: false })
            }
            Err(short) => {
                self.shared.host.release_standing(host);
                Err(self.shared.full(Budget::Device, short))
            }
        }
    }

    /// Ends admission: all that comes now is [`Rejected::ShuttingDown`], but for what is exempt.
    pub fn close(&self) {
        self.shared.closed.store(true, Ordering::Release);
    }

    /// Whether admission has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// The level by which requests are shed now.
    #[must_use]
    pub fn level(&self) -> Level {
        Level::from_u8(self.shared.level.load(Ordering::Relaxed))
    }

    /// Sets the level by which requests are shed. Called by the control loop.
    pub fn set_level(&self, level: Level) {
        self.shared.level.store(level.as_u8(), Ordering::Relaxed);
    }

    /// The account of a budget.
    #[must_use]
    pub fn ledger(&self, budget: Budget) -> &Ledger {
        match budget {
            Budget::Host => &self.shared.host,
            Budget::Device => &self.shared.device,
        }
    }

    /// What has been admitted and shed.
    #[must_use]
    pub fn stats(&self) -> AdmissionStats {
        // `finished` first: a permit that ends in between must not make `held` negative.
        let finished_total = self.shared.finished.load(Ordering::Acquire);
        AdmissionStats {
            admitted_total: self.shared.admitted.load(Ordering::Relaxed),
            finished_total,
            shed: std::array::from_fn(|at| {
                self.shared.shed.get(at).map_or(0, |count| count.load(Ordering::Relaxed))
            }),
        }
    }

    fn pass_level(&self, priority: Priority) -> Result<(), Rejected> {
        if self.is_closed() {
            return Err(Rejected::ShuttingDown);
        }
        let level = self.level();
        let sheds = match level {
            Level::None | Level::Elevated => false,
            Level::High => priority == Priority::Low,
            Level::Critical => priority != Priority::Exempt,
        };
        if !sheds {
            return Ok(());
        }
        Err(Rejected::Pressure { level, retry_after: self.shared.retry_after() })
    }

    fn book(&self, cost: Cost) -> Result<Cost, Rejected> {
        let host = book(&self.shared.host, cost.host);
        let host = host.map_err(|short| self.shared.full(Budget::Host, short))?;
        let device = book(&self.shared.device, cost.device).map_err(|short| {
            self.shared.host.release(host);
            self.shared.full(Budget::Device, short)
        })?;
        Ok(Cost { host, device })
    }
}

/// Books for a request and says what was booked, which is what has to be released. Where no limit
/// is known nothing is refused: it is as much as 64 bits hold.
fn book(ledger: &Ledger, bytes: ByteSize) -> Result<ByteSize, Shortfall> {
    if ledger.ceiling() == ByteSize::MAX {
        return Ok(ledger.book_exempt(bytes));
    }
    ledger.try_book(bytes).map(|()| bytes)
}

/// Books what stays. Where no limit is known nothing is refused: nothing is booked where 64 bits
/// are full.
fn stand(ledger: &Ledger, bytes: ByteSize) -> Result<Standing, Shortfall> {
    let booked = ledger.try_book_standing(bytes);
    if booked.is_err() && ledger.ceiling() == ByteSize::MAX {
        return ledger.try_book_standing(ByteSize::ZERO);
    }
    booked
}

impl Shared {
    fn full(&self, budget: Budget, short: Shortfall) -> Rejected {
        let ledger = match budget {
            Budget::Host => &self.host,
            Budget::Device => &self.device,
        };
        let Shortfall { asked, booked, allowance } = short;
        let ceiling = ledger.ceiling();
        if asked > ceiling {
            return Rejected::TooLarge { budget, asked, ceiling };
        }
        let (booked, allowance) = (ledger.in_bytes(booked), ledger.in_bytes(allowance));
        Rejected::Full { budget, asked, booked, allowance, retry_after: self.retry_after() }
    }

    fn count(&self, rejected: Rejected) -> Rejected {
        if let Some(count) = self.shed.get(rejected.reason() as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        rejected
    }

    /// From 1 s at no pressure to 4 s at critical, plus up to as much again: a guess, spread by
    /// the number of requests shed so that clients do not come back at once.
    fn retry_after(&self) -> Duration {
        let level = u64::from(self.level.load(Ordering::Relaxed));
        let shed: u64 = self.shed.iter().map(|count| count.load(Ordering::Relaxed)).sum();
        let spread = shed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        Duration::from_secs(1 + level + spread % (2 + level))
    }
}

#[derive(Debug)]
enum Held {
    Request(Cost),
    /// `None` only while it is being dropped.
    Standing(Option<(Standing, Standing)>),
}

/// The right to hold bytes; dropping it gives them back.
#[derive(Debug)]
#[must_use = "dropping a permit gives its bytes back at once"]
pub struct Permit {
    shared: Arc<Shared>,
    held: Held,
    /// Grows as it was booked: beyond the allowance.
    exempt: bool,
}

impl Permit {
    /// What it holds.
    #[must_use]
    pub const fn cost(&self) -> Cost {
        match &self.held {
            Held::Request(cost) => *cost,
            Held::Standing(Some((host, device))) => {
                Cost { host: host.bytes(), device: device.bytes() }
            }
            Held::Standing(None) => Cost::ZERO,
        }
    }

    /// Books more of the host's memory: a body turned out larger than it said. What is admitted is
    /// not shed by level, since ending it is what frees memory. The permit of a request that was
    /// exempt always grows.
    ///
    /// # Errors
    /// [`Rejected`], which is counted; the permit keeps what it has. A standing permit does not
    /// grow: [`Rejected::TooLarge`] with its own cost as the ceiling.
    pub fn grow(&mut self, bytes: ByteSize) -> Result<(), Rejected> {
        let budget = Budget::Host;
        let ceiling = self.cost().host;
        let Held::Request(cost) = &mut self.held else {
            let asked = ceiling.saturating_add(bytes);
            return Err(self.shared.count(Rejected::TooLarge { budget, asked, ceiling }));
        };
        let total = cost.host.saturating_add(bytes);
        let host = &self.shared.host;
        let booked = if self.exempt { Ok(host.book_exempt(bytes)) } else { book(host, bytes) };
        let booked = booked.map_err(|short| {
            // What it holds already and what it asks for must fit together, ever.
            let never = total > self.shared.host.ceiling();
            let short = Shortfall { asked: if never { total } else { bytes }, ..short };
            self.shared.count(self.shared.full(budget, short))
        })?;
        cost.host = cost.host.saturating_add(booked);
        Ok(())
    }

    /// Gives some of the host's memory back early; at most what it holds. Does nothing on a
    /// standing permit.
    pub fn shrink(&mut self, bytes: ByteSize) {
        if let Held::Request(cost) = &mut self.held {
            let part = bytes.min(cost.host);
            cost.host = cost.host.saturating_sub(part);
            self.shared.host.release(part);
        }
    }

    /// Says that the resource of a standing permit is loaded, and so part of what is measured.
    pub fn settle(&mut self) {
        if let Held::Standing(Some((host, device))) = &mut self.held {
            self.shared.host.settle(host);
            self.shared.device.settle(device);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        match &mut self.held {
            Held::Request(cost) => {
                self.shared.host.release(cost.host);
                self.shared.device.release(cost.device);
                self.shared.finished.fetch_add(1, Ordering::Release);
            }
            Held::Standing(held) => {
                if let Some((host, device)) = held.take() {
                    self.shared.host.release_standing(host);
                    self.shared.device.release_standing(device);
                }
            }
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::control::ledger::{Correction, Measured};

    /// A door whose ceilings are these; the allowances are half of them at K = 2, but for a request
    /// that is nearly alone.
    fn door(host: u64, device: u64) -> Admission {
        let admission = Admission::new();
        for (budget, mib) in [(Budget::Host, host), (Budget::Device, device)] {
            let ceiling = ByteSize::mib(mib);
            let measured = Measured { ceiling, ..Measured::default() };
            admission.ledger(budget).correct(&mut Correction::new(), measured);
        }
        admission
    }

    fn booked(admission: &Admission) -> (ByteSize, ByteSize) {
        (admission.ledger(Budget::Host).booked(), admission.ledger(Budget::Device).booked())
    }

    const NOTHING: (ByteSize, ByteSize) = (ByteSize::ZERO, ByteSize::ZERO);

    #[test]
    fn a_permit_books_and_its_drop_gives_back() {
        let admission = door(100, 100);
        let cost = Cost::host(ByteSize::mib(40)).and_device(ByteSize::mib(10));
        let permit = admission.try_admit(cost).expect("fits");
        assert_eq!(permit.cost(), cost);
        assert_eq!(booked(&admission), (ByteSize::mib(40), ByteSize::mib(10)));
        assert_eq!(admission.stats().held(), 1);
        drop(permit);
        assert_eq!(booked(&admission), NOTHING);
        assert_eq!(admission.stats().held(), 0);
    }

    #[test]
    fn a_cost_that_fails_in_one_budget_is_booked_in_none() {
        let admission = door(100, 10);
        let cost = Cost::host(ByteSize::mib(1)).and_device(ByteSize::mib(4));
        let held = admission.try_admit(cost).expect("fits");
        let error = admission.try_admit(cost).expect_err("the device is full");
        assert!(matches!(error, Rejected::Full { budget: Budget::Device, .. }), "{error:?}");
        drop(held);
        assert_eq!(booked(&admission), NOTHING);
        let error = admission.try_stand(Cost { device: ByteSize::mib(11), ..cost });
        assert!(matches!(error, Err(Rejected::TooLarge { budget: Budget::Device, .. })));
        assert_eq!(booked(&admission), NOTHING);
        assert_eq!(admission.stats().shed, [0, 1, 0, 0], "a resource is no request");
    }

    #[test]
    fn what_can_never_fit_is_told_from_what_does_not_fit_now() {
        let admission = door(100, 100);
        let _held = admission.try_admit(Cost::host(ByteSize::mib(10))).expect("fits");
        let full = admission.try_admit(Cost::host(ByteSize::mib(41))).expect_err("full");
        assert!(matches!(full, Rejected::Full { .. }));
        assert!(full.retry_after().expect("later") >= Duration::from_secs(1));
        let large = admission.try_admit(Cost::host(ByteSize::mib(101))).expect_err("too large");
        assert_eq!(
            large,
            Rejected::TooLarge {
                budget: Budget::Host,
                asked: ByteSize::mib(101),
                ceiling: ByteSize::mib(100),
            }
        );
        assert_eq!(large.retry_after(), None);
        let extreme = admission.try_admit(Cost::host(ByteSize::MAX)).expect_err("too large");
        assert_eq!(extreme.reason(), ShedReason::TooLarge);
    }

    #[test]
    fn priorities_are_shed_in_their_order_and_the_exempt_never() {
        let admission = door(100, 100);
        let cost = Cost::host(ByteSize::mib(1));
        let admitted = |level| {
            admission.set_level(level);
            [Priority::Low, Priority::Normal, Priority::High, Priority::Exempt]
                .map(|priority| admission.try_admit_with(cost, priority).is_ok())
        };
        assert_eq!(admitted(Level::None), [true; 4]);
        assert_eq!(admitted(Level::Elevated), [true; 4]);
        assert_eq!(admitted(Level::High), [false, true, true, true]);
        assert_eq!(admitted(Level::Critical), [false, false, false, true]);
        assert_eq!(admission.stats().shed_total(ShedReason::Pressure), 4);
        // Beyond the allowance as well, and what it books is given back.
        let huge = admission.try_admit_with(Cost::host(ByteSize::MAX), Priority::Exempt);
        let more = admission.try_admit_with(cost, Priority::Exempt).expect("exempt");
        assert_eq!(more.cost(), Cost::ZERO, "64 bits are full");
        drop((huge, more));
        assert_eq!(booked(&admission), NOTHING);
    }

    #[test]
    fn a_closed_door_admits_only_what_is_exempt() {
        let admission = Admission::new();
        let permit = admission.try_admit(Cost::host(ByteSize::gib(900))).expect("no limit known");
        admission.clone().close();
        assert_eq!(admission.try_admit(Cost::ZERO).expect_err("closed"), Rejected::ShuttingDown);
        assert!(admission.try_admit_with(Cost::ZERO, Priority::Exempt).is_ok());
        drop(permit);
        assert_eq!(admission.stats().shed_total(ShedReason::ShuttingDown), 1);
    }

    #[test]
    fn permits_grow_and_shrink_within_the_allowance() {
        let admission = door(100, 100);
        let mut permit = admission.try_admit(Cost::host(ByteSize::mib(30))).expect("fits");
        permit.grow(ByteSize::mib(20)).expect("fits to the byte");
        let full = permit.grow(ByteSize::new(1)).expect_err("full");
        assert_eq!(full.reason(), ShedReason::Full);
        let never = permit.grow(ByteSize::mib(60)).expect_err("110 MiB never fit");
        assert_eq!(never.reason(), ShedReason::TooLarge);
        assert_eq!(permit.cost(), Cost::host(ByteSize::mib(50)));
        permit.shrink(ByteSize::mib(45));
        assert_eq!(booked(&admission).0, ByteSize::mib(5));
        permit.shrink(ByteSize::MAX);
        assert_eq!(booked(&admission), NOTHING);
        drop(permit);
        assert_eq!(booked(&admission), NOTHING);
    }

    /// The bug: it was admitted beyond the allowance, and refused when it grew by a byte.
    #[test]
    fn an_exempt_permit_did_not_grow() {
        let admission = door(100, 100);
        let cost = Cost::host(ByteSize::mib(90));
        let mut permit = admission.try_admit_with(cost, Priority::Exempt).expect("exempt");
        permit.grow(ByteSize::mib(20)).expect("beyond the ceiling as well");
        assert_eq!(permit.cost(), Cost::host(ByteSize::mib(110)));
        permit.grow(ByteSize::MAX).expect("as much as 64 bits hold");
        assert_eq!(booked(&admission).0, ByteSize::MAX);
        permit.shrink(ByteSize::MAX);
        assert_eq!(booked(&admission), NOTHING);
        drop(permit);
        assert_eq!((booked(&admission), admission.stats().shed), (NOTHING, [0; 4]));
    }

    /// The bug: one estimate of 64 bits refused everybody else, where nothing is to be refused.
    #[test]
    fn without_a_limit_one_boundless_request_shut_out_all_others() {
        let admission = Admission::new();
        let most = Cost::host(ByteSize::MAX).and_device(ByteSize::MAX);
        let some = Cost::host(ByteSize::mib(2)).and_device(ByteSize::mib(1));
        let before = admission.try_admit(some).expect("no limit");
        let boundless = admission.try_admit(most).expect("no limit");
        let mut after = admission.try_admit(some).expect("no limit");
        after.grow(ByteSize::mib(1)).expect("no limit");
        let model = admission.try_stand(some).expect("no limit");
        assert_eq!((after.cost(), model.cost()), (Cost::ZERO, Cost::ZERO), "64 bits are full");
        assert_eq!(booked(&admission), (ByteSize::MAX, ByteSize::MAX));
        drop(boundless);
        assert_eq!(booked(&admission), (some.host, some.device), "each gives back what it booked");
        drop((before, after, model));
        assert_eq!(booked(&admission), NOTHING);
        let model = admission.try_stand(most).expect("no limit");
        let request = admission.try_admit(some).expect("no limit");
        drop((model, request));
        assert_eq!(booked(&admission), NOTHING);
    }

    #[test]
    fn a_fixed_limit_holds_to_the_byte_and_each_byte_counts_once() {
        let admission = Admission::with_limit(ByteSize::mib(100));
        let cost = |mib| Cost::host(ByteSize::mib(mib)).and_device(ByteSize::gib(9));
        let model = admission.try_stand(cost(30)).expect("fits");
        let first = admission.try_admit(cost(60)).expect("fits");
        let full = admission.try_admit(cost(11)).expect_err("full");
        assert_eq!(full.reason(), ShedReason::Full);
        let large = admission.try_admit(cost(101)).expect_err("never");
        assert_eq!(large.reason(), ShedReason::TooLarge);
        assert_eq!(admission.ledger(Budget::Host).booked_bytes(), ByteSize::mib(90));
        drop((model, first));
        drop(admission.try_admit(cost(100)).expect("fits to the byte"));
        assert_eq!(booked(&admission), NOTHING);
    }

    #[test]
    fn a_standing_permit_is_no_request() {
        let admission = door(100, 100);
        let mut permit = admission.try_stand(Cost::host(ByteSize::mib(80))).expect("counts once");
        assert_eq!(admission.stats(), AdmissionStats::default());
        permit.settle();
        assert!(permit.grow(ByteSize::new(1)).is_err());
        permit.shrink(ByteSize::new(1));
        assert_eq!(permit.cost(), Cost::host(ByteSize::mib(80)));
        drop(permit);
        assert_eq!(booked(&admission), NOTHING);
        assert_eq!(admission.ledger(Budget::Host).standing(), ByteSize::ZERO);
    }
}

//! The learned state of one budget, and its publication to the budget's ledger.
//!
//! It takes no sample and sets no level: the loop does.
//!
//! Invariants: each tick first corrects the ledger and then shares the room, so that no headroom is
//! computed from an old allowance; the figures of one device change the allowance of no other.

use std::sync::atomic::Ordering;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

use crate::admission::Admission;
use crate::correction::{Correction, Measured, RequestRate};
use crate::cost::Budget;
use crate::fairness::{Fairness, LedgerFigures};
use crate::ledger::{Ledger, RoomSharing};
use crate::pressure::{Level, PressureTracker, Thresholds};
use crate::state::AdmissionState;
use crate::tally::{AdmissionStats, BudgetCounts};

/// The level and the learned figures of one budget.
#[derive(Debug)]
pub(super) struct BudgetAccount {
    admission: Admission,
    pub(super) budget: Budget,
    pub(super) pressure: PressureTracker,
    pub(super) correction: Correction,
    /// Requests by class since start.
    pub(super) counts: BudgetCounts,
    fairness: Fairness,
    /// The time of the last tick, and the requests that had ended by then.
    at: Moment,
    finished: u64,
}

impl BudgetAccount {
    pub(super) fn new(
        admission: Admission,
        budget: Budget,
        thresholds: Thresholds,
        correction_factor: f64,
    ) -> Self {
        let (correction, fairness) =
            (Correction::starting_at(correction_factor), Fairness::default());
        let (pressure, counts) = (PressureTracker::new(thresholds), BudgetCounts::default());
        let (at, finished) = (Moment::ORIGIN, 0);
        Self { admission, budget, pressure, correction, counts, fairness, at, finished }
    }

    pub(super) fn state(&self) -> &'static AdmissionState {
        self.admission.state()
    }

    pub(super) fn ledger(&self) -> &'static Ledger {
        self.state().ledger(self.budget)
    }

    /// Returns `true` if there is nothing to correct and nothing to share: no limit is known or in
    /// force, and nothing is held or reserved. The device's budget without a device is so always.
    pub(super) fn is_unused(&self, physical: ByteSize, limit: ByteSize) -> bool {
        let ledger = self.ledger();
        limit == ByteSize::MAX
            && physical.is_zero()
            && ledger.ceiling() == ByteSize::MAX
            && ledger.reserved().is_zero()
            && self.pressure.level == Level::None
    }

    /// Returns the progress of requests since the last tick.
    pub(super) fn turnover(&mut self, stats: &AdmissionStats, now: Moment) -> RequestRate {
        let ended = stats.finished_total.saturating_sub(self.finished);
        let turnover = RequestRate { time: now - self.at, ended, held: stats.held() };
        (self.at, self.finished) = (now, stats.finished_total);
        turnover
    }

    /// Updates the allowance and the headroom reserved within it.
    pub(super) fn correct(&mut self, measured: Measured) {
        let since = measured.turnover.time;
        let ledger = self.ledger();
        ledger.correct(&mut self.correction, measured);
        self.counts = self.state().budget_counts(self.budget);
        let balance = self.fairness.update(LedgerFigures::of(ledger, since), &self.counts);
        ledger.balance(balance);
    }

    /// Publishes a last allowance, as if nothing were held but the reservations, and no reserved
    /// headroom: no further update will follow.
    pub(super) fn leave(&mut self) {
        let ledger = self.ledger();
        let measured = Measured { ceiling: ledger.ceiling(), ..Measured::default() };
        ledger.correct(&mut self.correction, measured);
        ledger.balance(RoomSharing::default());
    }

    /// Updates the allowance of a further device, whose admission is its own: only the device's
    /// bytes are reserved in it. It has neither a level nor reclaim steps: its owner releases idle
    /// memory by its own figures.
    pub(super) fn update_device(&mut self, figures: DeviceFigures, share: f64, now: Moment) {
        let DeviceFigures { committed, idle, limit } = figures;
        let limit = limit.unwrap_or(ByteSize::MAX);
        self.state().is_device_lost.store(limit.is_zero(), Ordering::Relaxed);
        if self.is_unused(committed, limit) {
            return;
        }
        let turnover = self.turnover(&self.state().counts(), now);
        let ceiling = ceiling(limit, share);
        self.correct(Measured { physical: committed, purgeable: idle, ceiling, turnover });
    }
}

/// The memory of one device in a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceFigures {
    /// The memory that arenas have committed.
    pub committed: ByteSize,
    /// The part of `committed` that is wholly idle.
    pub idle: ByteSize,
    /// The limit of the device's budget; `None` for none, zero for a device that is lost.
    pub limit: Option<ByteSize>,
}

/// Returns the most bytes that may be held of a device if requests may fill `share` of its limit.
pub(super) const fn ceiling(limit: ByteSize, share: f64) -> ByteSize {
    match limit {
        ByteSize::MAX => ByteSize::MAX,
        limit => limit.scaled(share),
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::cost::Cost;

    #[test]
    fn a_budget_is_corrected_while_it_is_limited_held_or_reserved() {
        let (admission, none) = (Admission::new(), ByteSize::ZERO);
        let mut account =
            BudgetAccount::new(admission.clone(), Budget::Device, Thresholds::default(), 2.0);
        let limit = ByteSize::mib(100);
        assert!(account.is_unused(none, ByteSize::MAX));
        assert!(!account.is_unused(ByteSize::new(1), ByteSize::MAX));
        assert!(!account.is_unused(none, limit));
        let permit = admission.try_admit(Cost::device(ByteSize::new(1))).expect("no limit");
        assert!(!account.is_unused(none, ByteSize::MAX));
        drop(permit);
        assert!(account.is_unused(none, ByteSize::MAX));
        account.correct(Measured { ceiling: limit, ..Measured::default() });
        assert!(!account.is_unused(none, ByteSize::MAX), "a limit is in force");
        let unlimited = Measured { ceiling: ByteSize::MAX, ..Measured::default() };
        account.correct(unlimited);
        assert!(account.is_unused(none, ByteSize::MAX));
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod device_tests {
    use super::*;
    use crate::cost::Cost;
    use crate::cost::Rejected;

    #[test]
    fn a_device_admits_by_its_own_figures_and_nothing_once_it_is_lost() {
        let (admission, marks) = (Admission::new(), Thresholds::default());
        let mut account = BudgetAccount::new(admission.clone(), Budget::Device, marks, 2.0);
        let figures = DeviceFigures {
            committed: ByteSize::mib(40),
            idle: ByteSize::mib(40),
            limit: Some(ByteSize::mib(100)),
        };
        account.update_device(figures, 0.8, Moment::ORIGIN);
        let ask = |mib| admission.try_admit(Cost::device(ByteSize::mib(mib)));
        let held = ask(30).expect("idle memory is room");
        assert!(!account.ledger().requests().is_zero());
        assert!(matches!(ask(81), Err(Rejected::TooLarge { .. })));
        let lost = DeviceFigures { limit: Some(ByteSize::ZERO), ..DeviceFigures::default() };
        account.update_device(lost, 0.8, Moment::ORIGIN);
        let rejected = Rejected::DeviceLost { asked: ByteSize::mib(1) };
        assert_eq!(ask(1).map(drop), Err(rejected));
        let host = admission.try_admit(Cost::host(ByteSize::mib(1)));
        assert!(host.is_ok(), "what needs no device is admitted");
        drop((held, host));
        assert!(account.ledger().requests().is_zero());
        account.update_device(figures, 0.8, Moment::ORIGIN);
        assert!(ask(30).is_ok());
    }
}

//! The learned state of one budget, and its publication to the budget's ledger.
//!
//! It takes no sample and sets no level: the loop does.
//!
//! Invariants: each tick first corrects the ledger and then shares the room, so that no headroom is
//! computed from an old allowance; the figures of one device change the allowance of no other.

use std::sync::atomic::Ordering;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

use super::Settings;
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
    pub(super) budget: Budget,
    pub(super) pressure: PressureTracker,
    pub(super) correction: Correction,
    /// Requests by class since start.
    pub(super) counts: BudgetCounts,
    fairness: Fairness,
}

impl BudgetAccount {
    pub(super) fn new(budget: Budget, thresholds: Thresholds, correction_factor: f64) -> Self {
        let (correction, fairness) =
            (Correction::starting_at(correction_factor), Fairness::default());
        let (pressure, counts) = (PressureTracker::new(thresholds), BudgetCounts::default());
        Self { budget, pressure, correction, counts, fairness }
    }

    /// Returns `true` if there is nothing to correct and nothing to share: no limit is known or in
    /// force, and nothing is held or reserved. The device's budget without a device is so always.
    pub(super) fn is_unused(
        &self,
        admission: &Admission,
        physical: ByteSize,
        limit: ByteSize,
    ) -> bool {
        let ledger = admission.ledger(self.budget);
        limit == ByteSize::MAX
            && physical.is_zero()
            && ledger.ceiling() == ByteSize::MAX
            && ledger.reserved().is_zero()
            && self.pressure.level() == Level::None
    }

    /// Updates the allowance and the headroom reserved within it.
    pub(super) fn correct(&mut self, admission: &Admission, measured: Measured) {
        let since = measured.turnover.time;
        let ledger = admission.ledger(self.budget);
        ledger.correct(&mut self.correction, measured);
        self.counts = admission.state().budget_counts(self.budget);
        let balance = self.fairness.update(LedgerFigures::of(ledger, since), &self.counts);
        ledger.balance(balance);
    }

    /// Publishes a last allowance, as if nothing were held but the reservations, and no reserved
    /// headroom: no further update will follow.
    pub(super) fn leave(&mut self, admission: &Admission) {
        let ledger = admission.ledger(self.budget);
        let measured = Measured { ceiling: ledger.ceiling(), ..Measured::default() };
        ledger.correct(&mut self.correction, measured);
        ledger.balance(RoomSharing::default());
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

/// Returns `true` if a device with this limit is lost.
pub(super) fn is_lost(limit: Option<ByteSize>) -> bool {
    limit == Some(ByteSize::ZERO)
}

/// Returns the most bytes that may be held of a device if requests may fill `share` of its limit.
pub(super) const fn ceiling(limit: ByteSize, share: f64) -> ByteSize {
    match limit {
        ByteSize::MAX => ByteSize::MAX,
        limit => limit.scaled(share),
    }
}

/// The budget of one further device, with an admission of its own, in which only the device's bytes
/// are reserved. The first device's budget is in the service's admission, with its level and its
/// reclaim steps. A further device has neither: its owner releases idle memory by its own figures.
#[derive(Debug)]
pub(super) struct DeviceAccount {
    admission: Admission,
    account: BudgetAccount,
    turns: RateMeter,
}

impl DeviceAccount {
    pub(super) fn new(admission: Admission, settings: &Settings) -> Self {
        let (thresholds, factor) = (Thresholds::default(), settings.correction_factor);
        let account = BudgetAccount::new(Budget::Device, thresholds, factor);
        Self { admission, account, turns: RateMeter::default() }
    }

    /// Updates the allowance.
    pub(super) fn update(&mut self, figures: DeviceFigures, share: f64, now: Moment) {
        let DeviceFigures { committed, idle, limit } = figures;
        self.admission.state().is_device_lost.store(is_lost(limit), Ordering::Relaxed);
        let limit = limit.unwrap_or(ByteSize::MAX);
        if self.account.is_unused(&self.admission, committed, limit) {
            return;
        }
        let turnover = self.turns.next(&self.admission.stats(), now);
        let ceiling = ceiling(limit, share);
        let measured = Measured { physical: committed, purgeable: idle, ceiling, turnover };
        self.account.correct(&self.admission, measured);
    }

    pub(super) fn state(&self) -> &'static AdmissionState {
        self.admission.state()
    }

    /// Returns the account of the device's bytes.
    pub(super) fn ledger(&self) -> &'static Ledger {
        &self.state().device
    }

    /// Publishes a last allowance, as if nothing were held but the reservations.
    pub(super) fn leave(&mut self) {
        self.account.leave(&self.admission);
    }
}

/// The time of the last tick, and the requests that had ended by then.
#[derive(Debug, Default)]
pub(super) struct RateMeter {
    at: Moment,
    finished: u64,
}

impl RateMeter {
    /// Returns the progress of requests since the last tick.
    pub(super) fn next(&mut self, stats: &AdmissionStats, now: Moment) -> RequestRate {
        let last = std::mem::replace(self, Self { at: now, finished: stats.finished_total });
        let ended = stats.finished_total.saturating_sub(last.finished);
        RequestRate { time: now - last.at, ended, held: stats.held() }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::cost::Cost;

    #[test]
    fn a_budget_is_corrected_while_it_is_limited_held_or_reserved() {
        let (admission, none) = (Admission::new(), ByteSize::ZERO);
        let mut account = BudgetAccount::new(Budget::Device, Thresholds::default(), 2.0);
        let limit = ByteSize::mib(100);
        assert!(account.is_unused(&admission, none, ByteSize::MAX));
        assert!(!account.is_unused(&admission, ByteSize::new(1), ByteSize::MAX));
        assert!(!account.is_unused(&admission, none, limit));
        let permit = admission.try_admit(Cost::device(ByteSize::new(1))).expect("no limit");
        assert!(!account.is_unused(&admission, none, ByteSize::MAX));
        drop(permit);
        assert!(account.is_unused(&admission, none, ByteSize::MAX));
        account.correct(&admission, Measured { ceiling: limit, ..Measured::default() });
        assert!(!account.is_unused(&admission, none, ByteSize::MAX), "a limit is in force");
        let unlimited = Measured { ceiling: ByteSize::MAX, ..Measured::default() };
        account.correct(&admission, unlimited);
        assert!(account.is_unused(&admission, none, ByteSize::MAX));
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod device_tests {
    use super::*;
    use crate::cost::Cost;
    use crate::cost::Rejected;

    #[test]
    fn a_device_admits_by_its_own_figures_and_nothing_once_it_is_lost() {
        let (settings, admission) = (Settings::default(), Admission::new());
        let mut account = DeviceAccount::new(admission.clone(), &settings);
        let figures = DeviceFigures {
            committed: ByteSize::mib(40),
            idle: ByteSize::mib(40),
            limit: Some(ByteSize::mib(100)),
        };
        account.update(figures, 0.8, Moment::ORIGIN);
        let ask = |mib| admission.try_admit(Cost::device(ByteSize::mib(mib)));
        let held = ask(30).expect("idle memory is room");
        assert!(!account.ledger().requests().is_zero());
        assert!(matches!(ask(81), Err(Rejected::TooLarge { .. })));
        let lost = DeviceFigures { limit: Some(ByteSize::ZERO), ..DeviceFigures::default() };
        account.update(lost, 0.8, Moment::ORIGIN);
        let rejected = Rejected::DeviceLost { asked: ByteSize::mib(1) };
        assert_eq!(ask(1).map(drop), Err(rejected));
        let host = admission.try_admit(Cost::host(ByteSize::mib(1)));
        assert!(host.is_ok(), "what needs no device is admitted");
        drop((held, host));
        assert!(account.ledger().requests().is_zero());
        account.update(figures, 0.8, Moment::ORIGIN);
        assert!(ask(30).is_ok());
    }
}

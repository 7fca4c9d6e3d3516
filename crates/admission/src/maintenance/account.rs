//! The learned state of one budget, and its publication to the budget's ledger.
//!
//! It takes no sample and sets no level: the loop does.
//!
//! Invariant: each tick first corrects the ledger and then shares the room, so that no headroom is
//! computed from an old allowance.

use crate::admission::Admission;
use crate::cost::Budget;
use crate::fairness::{Fairness, Seen};
use crate::ledger::{Balance, Correction, Measured};
use crate::pressure::{Level, Pressure, Thresholds};
use crate::size_class::SizeClass;
use crate::tally::{BudgetCounts, ClassStats};
use lowtide_core::bytes::ByteSize;

/// The level and the learned figures of one budget.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) budget: Budget,
    pub(super) pressure: Pressure,
    pub(super) correction: Correction,
    /// The smallest request seen.
    pub(super) smallest: ByteSize,
    /// Requests admitted since start, without exempt ones.
    pub(super) admitted: u64,
    /// Requests by class since start.
    pub(super) classes: [ClassStats; SizeClass::COUNT],
    fairness: Fairness,
}

impl Account {
    pub(super) fn new(budget: Budget, thresholds: Thresholds, correction_factor: f64) -> Self {
        let (correction, fairness) =
            (Correction::starting_at(correction_factor), Fairness::default());
        let (pressure, smallest) = (Pressure::new(thresholds), ByteSize::new(1));
        let classes = BudgetCounts::default().classes;
        Self { budget, pressure, correction, smallest, admitted: 0, classes, fairness }
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
        let counts = admission.counts(self.budget);
        self.smallest = counts.smallest();
        self.admitted = counts.classes.iter().map(|class| class.admitted_total).sum();
        self.classes = counts.classes;
        let balance = self.fairness.update(Seen::of(ledger, since), &counts);
        ledger.balance(balance);
    }

    /// Publishes a last allowance, as if nothing were held but the reservations, and no reserved
    /// headroom: no further update will follow.
    pub(super) fn leave(&mut self, admission: &Admission) {
        let ledger = admission.ledger(self.budget);
        let measured = Measured { ceiling: ledger.ceiling(), ..Measured::default() };
        ledger.correct(&mut self.correction, measured);
        ledger.balance(Balance::default());
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::cost::Cost;

    #[test]
    fn a_budget_is_corrected_while_it_is_limited_held_or_reserved() {
        let (admission, none) = (Admission::new(), ByteSize::ZERO);
        let mut account = Account::new(Budget::Device, Thresholds::default(), 2.0);
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

//! The learned state of one budget, and its publication to the budget's ledger.
//!
//! It takes no sample and sets no level: the loop does.
//!
//! Invariant: each tick first corrects the ledger and then shares the room, so that no headroom is
//! computed from an old allowance.

use crate::admission::Admission;
use crate::fairness::{Balance, Fairness, Seen};
use crate::ledger::{Budget, Correction, Measured};
use crate::pressure::{Pressure, Thresholds};
use lowtide_core::bytes::ByteSize;

/// The level and the learned figures of one budget.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) budget: Budget,
    pub(super) pressure: Pressure,
    pub(super) correction: Correction,
    /// The smallest request seen.
    pub(super) smallest: ByteSize,
    fairness: Fairness,
}

impl Account {
    pub(super) fn new(budget: Budget, thresholds: Thresholds, correction_factor: f64) -> Self {
        let (correction, fairness) =
            (Correction::starting_at(correction_factor), Fairness::default());
        let (pressure, smallest) = (Pressure::new(thresholds), ByteSize::new(1));
        Self { budget, pressure, correction, smallest, fairness }
    }

    /// Updates the allowance and the headroom reserved within it.
    pub(super) fn correct(&mut self, admission: &Admission, measured: Measured) {
        let since = measured.turnover.time;
        let ledger = admission.ledger(self.budget);
        ledger.correct(&mut self.correction, measured);
        let counts = admission.counts(self.budget);
        self.smallest = counts.smallest();
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

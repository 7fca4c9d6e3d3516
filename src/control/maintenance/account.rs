//! What the control loop has learned about one budget, and how it tells the budget's ledger.
//!
//! It takes no sample and sets no level: the loop does.
//!
//! Invariant: at each tick the ledger is corrected first and shared out after, so that no berth is
//! measured by an allowance of before.

use crate::bytes::ByteSize;
use crate::control::admission::Admission;
use crate::control::fairness::{Balance, Fairness, Seen};
use crate::control::ledger::{Budget, Correction, Measured};
use crate::control::pressure::{Pressure, Thresholds};

/// The level and the learned figures of one budget.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) budget: Budget,
    pub(super) pressure: Pressure,
    pub(super) correction: Correction,
    /// The smallest request that was seen.
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

    /// What may be booked, and what of it is a berth.
    pub(super) fn correct(&mut self, admission: &Admission, measured: Measured) {
        let since = measured.turnover.time;
        let ledger = admission.ledger(self.budget);
        ledger.correct(&mut self.correction, measured);
        let counts = admission.counts(self.budget);
        self.smallest = counts.smallest();
        let balance = self.fairness.update(Seen::of(ledger, since), &counts);
        ledger.balance(balance);
    }

    /// What may be booked as if nothing were held but what is booked, and no berth: nobody will
    /// say so any more.
    pub(super) fn leave(&mut self, admission: &Admission) {
        let ledger = admission.ledger(self.budget);
        let measured = Measured { ceiling: ledger.ceiling(), ..Measured::default() };
        ledger.correct(&mut self.correction, measured);
        ledger.balance(Balance::default());
    }
}

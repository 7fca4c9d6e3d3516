//! The budgets of further devices: each has an admission of its own, in which only the device's
//! bytes are reserved.
//!
//! The first device's budget is in the service's admission, with its level and its reclaim steps.
//! A further device has neither: its owner releases idle memory by its own figures.
//!
//! Invariant: the figures of one device change the allowance of no other.

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

use crate::admission::{Admission, AdmissionStats};
use crate::cost::Budget;
use crate::ledger::{Measured, Turnover};
use crate::pressure::Thresholds;

use super::Settings;
use super::account::Account;
use super::saturation::taken;

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

/// The budget of one further device.
#[derive(Debug)]
pub(super) struct DeviceAccount {
    admission: Admission,
    account: Account,
    turns: Turns,
}

impl DeviceAccount {
    pub(super) fn new(admission: Admission, settings: &Settings) -> Self {
        let (thresholds, factor) = (Thresholds::default(), settings.correction_factor);
        let account = Account::new(Budget::Device, thresholds, factor);
        Self { admission, account, turns: Turns::default() }
    }

    /// Updates the allowance.
    pub(super) fn update(&mut self, figures: DeviceFigures, share: f64, now: Moment) {
        let DeviceFigures { committed, idle, limit } = figures;
        self.admission.set_device_lost(is_lost(limit));
        let limit = limit.unwrap_or(ByteSize::MAX);
        if self.account.is_unused(&self.admission, committed, limit) {
            return;
        }
        let turnover = self.turns.next(&self.admission.stats(), now);
        let ceiling = ceiling(limit, share);
        let measured = Measured { physical: committed, purgeable: idle, ceiling, turnover };
        self.account.correct(&self.admission, measured);
    }

    /// Returns the reserved part of the allowance; `None` without a limit.
    pub(super) fn utilization(&self) -> Option<f64> {
        self.admission.ledger(Budget::Device).utilization()
    }

    /// Returns `true` while requests hold bytes of the device.
    pub(super) fn is_held(&self) -> bool {
        !self.admission.ledger(Budget::Device).requests().is_zero()
    }

    /// Returns how often a request was shed, since the start.
    pub(super) fn sheds_total(&self) -> u64 {
        self.admission.sheds_total()
    }

    /// Returns the part of the room that is taken.
    pub(super) fn taken(&self) -> f64 {
        taken(self.admission.ledger(Budget::Device), ByteSize::ZERO)
    }

    /// Publishes a last allowance, as if nothing were held but the reservations.
    pub(super) fn leave(&mut self) {
        self.account.leave(&self.admission);
    }
}

/// The time of the last tick, and the requests that had ended by then.
#[derive(Debug)]
pub(super) struct Turns {
    at: Moment,
    finished: u64,
}

impl Default for Turns {
    fn default() -> Self {
        Self { at: Moment::ORIGIN, finished: 0 }
    }
}

impl Turns {
    /// Returns the progress of requests since the last tick.
    pub(super) fn next(&mut self, stats: &AdmissionStats, now: Moment) -> Turnover {
        let last = std::mem::replace(self, Self { at: now, finished: stats.finished_total });
        let ended = stats.finished_total.saturating_sub(last.finished);
        Turnover { time: now - last.at, ended, held: stats.held() }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::cost::Cost;
    use crate::rejected::Rejected;

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
        assert!(account.is_held());
        assert!(matches!(ask(81), Err(Rejected::TooLarge { .. })));
        let lost = DeviceFigures { limit: Some(ByteSize::ZERO), ..DeviceFigures::default() };
        account.update(lost, 0.8, Moment::ORIGIN);
        let rejected = Rejected::DeviceLost { asked: ByteSize::mib(1) };
        assert_eq!(ask(1).map(drop), Err(rejected));
        let host = admission.try_admit(Cost::host(ByteSize::mib(1)));
        assert!(host.is_ok(), "what needs no device is admitted");
        drop((held, host));
        assert!(!account.is_held());
        account.update(figures, 0.8, Moment::ORIGIN);
        assert!(ask(30).is_ok());
    }
}

//! The best fixed settings, found by arithmetic: a model of the service in this process.
//!
//! It meets the very requests of a real cell: each that is admitted takes its bytes from its
//! arrival to the end of its hold. No HTTP, no allocator, no time for a body to arrive, so that a
//! setting that survives here may die for real; which it is, a real cell says. A setting survives
//! where the peak of what is held never passes the limit less the base.
//!
//! Invariant: the model never admits what the setting forbids.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use lowtide::ByteSize;

use crate::figures::count;
use crate::mix::{BASE, Mix, held, taken};
use crate::policy::{CONCURRENCY, Policy};
use crate::schedule::Offer;

/// Seeds that a setting has to survive, beginning with the cell's own.
const SEEDS: u64 = 10;
/// The length of each trial.
const LASTS: Duration = Duration::from_secs(30);
/// Static budgets are tried in steps of this, in percent of the limit.
pub(crate) const STEP: u32 = 2;

/// Under which circumstances a setting is tried.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    /// As of the cell.
    pub(crate) mix: Mix,
    /// As of the cell.
    pub(crate) limit: ByteSize,
    /// Requests a second.
    pub(crate) rate: f64,
    /// The factor by which estimates are multiplied.
    pub(crate) estimate: f64,
    /// As of the cell.
    pub(crate) seed: u64,
}

impl Setting {
    /// The best static budget that survives.
    pub(crate) fn best_static(&self) -> Option<Policy> {
        self.best((1..=100 / STEP).map(|step| Policy::Static(Some(step * STEP))))
    }

    /// The best limit on requests under way that survives.
    pub(crate) fn best_concurrency(&self) -> Option<Policy> {
        self.best(CONCURRENCY.map(Policy::Concurrency).into_iter())
    }

    fn best(&self, all: impl Iterator<Item = Policy>) -> Option<Policy> {
        let served = |policy| Some((self.served(policy)?, policy));
        let survivors = all.filter_map(served);
        survivors.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, policy)| policy)
    }

    /// Bytes of body served a second; `None` where it does not survive every seed.
    fn served(&self, policy: Policy) -> Option<f64> {
        let runs: Option<Vec<f64>> =
            (self.seed..self.seed + SEEDS).map(|seed| self.run(policy, seed)).collect();
        let runs = runs?;
        Some(runs.iter().sum::<f64>() / count(runs.len() as u64))
    }

    fn run(&self, policy: Policy, seed: u64) -> Option<f64> {
        let budget = match policy {
            Policy::Static(Some(percent)) => self.limit.scaled(f64::from(percent) / 100.0),
            _ => ByteSize::MAX,
        };
        let most = match policy {
            Policy::Concurrency(most) => most as usize,
            _ => usize::MAX,
        };
        let room = self.limit.saturating_sub(BASE);
        // By the end of their holds: what each holds, and what it has booked.
        let mut under_way = BinaryHeap::new();
        let (mut held_now, mut reserved, mut served) = (ByteSize::ZERO, ByteSize::ZERO, 0);
        for arrival in Offer::steady(self.mix, self.rate, LASTS, seed).arrivals() {
            while let Some(Reverse((end, holds, books))) = under_way.peek().copied() {
                if end > arrival.at {
                    break;
                }
                under_way.pop();
                held_now = held_now.saturating_sub(holds);
                reserved = reserved.saturating_sub(books);
            }
            let holds = taken(arrival.size);
            let overhead = holds.saturating_sub(held(arrival.size));
            let books = held(arrival.size).scaled(self.estimate).saturating_add(overhead);
            if under_way.len() >= most || reserved.saturating_add(books) > budget {
                continue;
            }
            held_now = held_now.saturating_add(holds);
            reserved = reserved.saturating_add(books);
            if held_now > room {
                return None;
            }
            served += arrival.size.get();
            under_way.push(Reverse((arrival.at + arrival.hold, holds, books)));
        }
        Some(count(served) / LASTS.as_secs_f64())
    }
}

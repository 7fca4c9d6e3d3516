//! The right to hold bytes, from admission to its drop.
//!
//! It is moved between threads and dropped on any of them. It decides nothing: what it asks for
//! more is booked as at admission ([`Admission`](super::Admission)).
//!
//! Invariant: what it says that it holds is what is booked for it, until its drop gives it back.

use std::sync::Arc;

use crate::bytes::ByteSize;

use super::admission::{Cost, Shard};
use super::ledger::{Budget, Standing};
use super::rejected::Rejected;
use super::tally::Place;

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
    shard: Arc<Shard>,
    held: Held,
    /// Grows as it was booked: beyond the allowance.
    exempt: bool,
}

impl Permit {
    pub(super) const fn request(shard: Arc<Shard>, cost: Cost, exempt: bool) -> Self {
        Self { shard, held: Held::Request(cost), exempt }
    }

    pub(super) const fn standing(shard: Arc<Shard>, host: Standing, device: Standing) -> Self {
        Self { shard, held: Held::Standing(Some((host, device))), exempt: false }
    }

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
        let Shard { core, tally } = &*self.shard;
        let shed = |rejected: Rejected| {
            tally.shed_growth(rejected.reason());
            rejected
        };
        let Held::Request(cost) = &mut self.held else {
            let (budget, ceiling) = (Budget::Host, self.cost().host);
            let asked = ceiling.saturating_add(bytes);
            return Err(shed(Rejected::TooLarge { budget, asked, ceiling }));
        };
        let booked = if self.exempt {
            core.host.book_exempt(bytes)
        } else {
            let spread = || tally.spread(Place::here());
            core.book_more(cost.host, bytes, &spread).map_err(shed)?
        };
        tally.grow(booked);
        cost.host = cost.host.saturating_add(booked);
        Ok(())
    }

    /// Gives some of the host's memory back early; at most what it holds. Does nothing on a
    /// standing permit.
    pub fn shrink(&mut self, bytes: ByteSize) {
        if let Held::Request(cost) = &mut self.held {
            let part = bytes.min(cost.host);
            cost.host = cost.host.saturating_sub(part);
            self.shard.core.host.release(part);
        }
    }

    /// Says that the resource of a standing permit is loaded, and so part of what is measured.
    pub fn settle(&mut self) {
        if let Held::Standing(Some((host, device))) = &mut self.held {
            self.shard.core.host.settle(host);
            self.shard.core.device.settle(device);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        match &mut self.held {
            Held::Request(cost) => {
                // Then the stripe's count falls, with the field.
                self.shard.core.host.release(cost.host);
                self.shard.core.device.release(cost.device);
            }
            Held::Standing(held) => {
                if let Some((host, device)) = held.take() {
                    self.shard.core.host.release_standing(host);
                    self.shard.core.device.release_standing(device);
                }
            }
        }
    }
}

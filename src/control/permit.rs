//! The right to hold bytes, from admission to its drop.
//!
//! It is moved between threads and dropped on any of them. It decides nothing: what it asks for
//! more is booked as at admission ([`Admission`](super::Admission)).
//!
//! Invariant: what it says that it holds is what is booked for it, until its drop gives it back.

use crate::bytes::ByteSize;

use super::admission::Cost;
use super::desk::Desk;
use super::ledger::{Budget, Standing};
use super::rejected::Rejected;

#[derive(Debug)]
enum Held {
    Request(Cost),
    /// Apart, so that a request's permit is small: it is moved about. `None` once it was taken out.
    Standing(Option<Box<(Standing, Standing)>>),
}

/// The right to hold bytes; dropping it gives them back.
#[derive(Debug)]
#[must_use = "dropping a permit gives its bytes back at once"]
pub struct Permit {
    desk: &'static Desk,
    held: Held,
    /// Grows as it was booked: beyond the allowance.
    exempt: bool,
}

impl Permit {
    pub(super) const fn request(desk: &'static Desk, cost: Cost, exempt: bool) -> Self {
        Self { desk, held: Held::Request(cost), exempt }
    }

    pub(super) fn standing(desk: &'static Desk, host: Standing, device: Standing) -> Self {
        Self { desk, held: Held::Standing(Some(Box::new((host, device)))), exempt: false }
    }

    /// The desk on which it is booked.
    pub(super) const fn desk(&self) -> &'static Desk {
        self.desk
    }

    /// What a standing permit has booked, still booked; `None` for a request's, which ends.
    pub(super) fn into_standing(mut self) -> Option<(Standing, Standing)> {
        match &mut self.held {
            Held::Request(_) => None,
            Held::Standing(held) => held.take().map(|both| *both),
        }
    }

    /// What it holds.
    #[must_use]
    pub fn cost(&self) -> Cost {
        match &self.held {
            Held::Request(cost) => *cost,
            Held::Standing(Some(both)) => Cost { host: both.0.bytes(), device: both.1.bytes() },
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
        let held = self.cost().host;
        let Held::Request(cost) = &mut self.held else {
            let asked = held.saturating_add(bytes);
            let rejected = Rejected::TooLarge { budget: Budget::Host, asked, ceiling: held };
            return Err(self.desk.shed(rejected));
        };
        let reserved = self.desk.grow(held, bytes, self.exempt)?;
        cost.host = cost.host.saturating_add(reserved);
        Ok(())
    }

    /// Books up to these bytes of the host's memory in all, whatever the allowance says: they are
    /// in use. Returns what was added. Does nothing on a standing permit.
    #[cfg(feature = "service")]
    pub(crate) fn raise(&mut self, held: ByteSize) -> ByteSize {
        let Held::Request(cost) = &mut self.held else { return ByteSize::ZERO };
        let more = held.saturating_sub(cost.host);
        if more.is_zero() {
            return more;
        }
        let reserved = self.desk.raise(more);
        cost.host = cost.host.saturating_add(reserved);
        reserved
    }

    /// Gives some of the host's memory back early; at most what it holds. Does nothing on a
    /// standing permit.
    pub fn shrink(&mut self, bytes: ByteSize) {
        if let Held::Request(cost) = &mut self.held {
            let part = bytes.min(cost.host);
            cost.host = cost.host.saturating_sub(part);
            self.desk.host.release(part);
        }
    }

    /// Says that the resource of a standing permit is loaded, and so part of what is measured.
    pub fn settle(&mut self) {
        self.settle_at(Cost::ZERO);
    }

    /// The same, with what it was found to hold. Where that is more than it booked it books it,
    /// whatever the allowance says: it is there, and would be taken for wrong estimates of
    /// requests.
    pub fn settle_at(&mut self, held: Cost) {
        let held = self.desk.by_budget(held);
        if let Held::Standing(Some(both)) = &mut self.held {
            let (host, device) = &mut **both;
            self.desk.host.raise(host, held.host);
            self.desk.device.raise(device, held.device);
            self.desk.host.settle(host);
            self.desk.device.settle(device);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        match &mut self.held {
            Held::Request(cost) => self.desk.finish(*cost),
            Held::Standing(held) => {
                if let Some(both) = held.take() {
                    let (host, device) = *both;
                    self.desk.unload(host, device);
                }
            }
        }
    }
}

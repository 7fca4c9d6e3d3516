//! The right to hold bytes, from admission until drop.
//!
//! A permit can move between threads and be dropped on any of them. It decides nothing: growth is
//! reserved as at admission ([`Admission`](super::Admission)).
//!
//! Invariant: the cost that a permit reports is reserved until the permit is dropped.

use lowtide_core::bytes::ByteSize;

use super::admission::Cost;
use super::desk::Desk;
use super::ledger::{Budget, Standing};
use super::rejected::Rejected;

#[derive(Debug)]
enum Held {
    Request(Cost),
    /// Boxed so that a request's permit is small to move. `None` once it was taken out.
    Standing(Option<Box<(Standing, Standing)>>),
}

/// The right to hold bytes. Dropping it releases them.
#[derive(Debug)]
#[must_use = "dropping a permit releases its bytes at once"]
pub struct Permit {
    desk: &'static Desk,
    held: Held,
    /// The permit grows beyond the allowance, as it was reserved.
    exempt: bool,
}

impl Permit {
    pub(super) const fn request(desk: &'static Desk, cost: Cost, exempt: bool) -> Self {
        Self { desk, held: Held::Request(cost), exempt }
    }

    pub(super) fn standing(desk: &'static Desk, host: Standing, device: Standing) -> Self {
        Self { desk, held: Held::Standing(Some(Box::new((host, device)))), exempt: false }
    }

    /// Returns the admission state that holds the reservation.
    pub(super) const fn desk(&self) -> &'static Desk {
        self.desk
    }

    /// Returns the reservations of a resource's permit, still reserved; `None` for a request's
    /// permit, which ends.
    pub(super) fn into_standing(mut self) -> Option<(Standing, Standing)> {
        match &mut self.held {
            Held::Request(_) => None,
            Held::Standing(held) => held.take().map(|both| *both),
        }
    }

    /// Returns the bytes that the permit holds.
    #[must_use]
    pub fn cost(&self) -> Cost {
        match &self.held {
            Held::Request(cost) => *cost,
            Held::Standing(Some(both)) => Cost { host: both.0.bytes(), device: both.1.bytes() },
            Held::Standing(None) => Cost::ZERO,
        }
    }

    /// Reserves more host memory, for example if a body is larger than declared. An admitted
    /// request is not rejected by level, since its end frees memory. The permit of an exempt
    /// request always grows.
    ///
    /// # Errors
    /// [`Rejected`], which is counted; the permit keeps what it holds. A resource's permit does not
    /// grow: the error is [`Rejected::TooLarge`] with its own cost as the ceiling.
    pub fn grow(&mut self, bytes: ByteSize) -> Result<(), Rejected> {
        let held = self.cost().host;
        let Held::Request(cost) = &mut self.held else {
            let asked = held.saturating_add(bytes);
            let rejected = Rejected::TooLarge { budget: Budget::Host, asked, ceiling: held };
            return Err(self.desk.reject(rejected));
        };
        let reserved = self.desk.grow(held, bytes, self.exempt)?;
        cost.host = cost.host.saturating_add(reserved);
        Ok(())
    }

    /// Reserves host memory up to `held` bytes in total, even beyond the allowance, because the
    /// bytes are in use. Returns the bytes added. Does nothing on a resource's permit.
    #[doc(hidden)]
    pub fn raise(&mut self, held: ByteSize) -> ByteSize {
        let Held::Request(cost) = &mut self.held else { return ByteSize::ZERO };
        let more = held.saturating_sub(cost.host);
        if more.is_zero() {
            return more;
        }
        let reserved = self.desk.raise(more);
        cost.host = cost.host.saturating_add(reserved);
        reserved
    }

    /// Releases part of the host memory early, at most what the permit holds. Does nothing on a
    /// resource's permit.
    pub fn shrink(&mut self, bytes: ByteSize) {
        if let Held::Request(cost) = &mut self.held {
            let part = bytes.min(cost.host);
            cost.host = cost.host.saturating_sub(part);
            self.desk.host.release(part);
        }
    }

    /// Marks the resource of the permit as loaded, so that its memory is part of what is measured.
    pub fn settle(&mut self) {
        self.settle_at(Cost::ZERO);
    }

    /// Marks the resource as loaded and raises the reservation to what it was measured to hold,
    /// even beyond the allowance. Otherwise the excess would count as wrong estimates of requests.
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

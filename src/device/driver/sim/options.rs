//! What is simulated: the size of the device, what it offers, and the order of its work.
//!
//! Values only. What changes while the device runs (neighbours, limits, faults) is told to the
//! driver itself.
//!
//! Invariant: options that are accepted make `granularity <= handle <= address space`.

use super::call::DriverCosts;
use crate::bytes::ByteSize;
use crate::clock::ManualClock;

/// Where the address space begins: not at 0, so that no address is taken for "none".
const SPACE_BASE: u64 = 64 << 30;

/// In which order, and when, queued work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Nothing is done until something waits for it, and then only what that wait depends on, or
    /// until 2^20 pieces of work are queued: the worst order for a program that forgot a
    /// dependency. Asking whether an event is done is no wait, so a program that only asks needs
    /// [`SimDriver::advance`](super::SimDriver::advance).
    Lazy,
    /// Before every call a random number of pieces of work of random streams is done. The same
    /// seed and the same calls give the same order.
    Random {
        /// Where the chance begins.
        seed: u64,
    },
    /// Work is done before the call that queues it returns. Nearly blind to faults of order.
    Synchronous,
}

/// How large a physical handle is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handles {
    /// Each handle has this size, which is then the granularity that the driver reports.
    Fixed(ByteSize),
    /// One handle for each commit, whatever its size: a handle cannot be unmapped in part, so a
    /// decommit of a part of a commit is a fault.
    PerCommit,
}

/// A device to simulate.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each with its name")]
pub struct SimOptions {
    /// The order of work. Default: [`Order::Lazy`].
    pub order: Order,
    /// The smallest unit that the device maps: a power of two of at least 4 KiB. Default: 2 MiB.
    pub granularity: ByteSize,
    /// The size of physical handles; a power of two and a multiple of the granularity. Default:
    /// fixed, of 2 MiB.
    pub handles: Handles,
    /// Where the address space begins: a multiple of 64 GiB below 2^60. Default: 64 GiB. Devices
    /// of one process are apart in it.
    pub address_base: u64,
    /// How much address space there is; at least a handle. Default: 128 TiB; some devices have
    /// less than 32 GiB.
    pub address_space: ByteSize,
    /// The memory of the device. Default: 80 GiB.
    pub capacity: ByteSize,
    /// Whether its memory is the host's, as that of an integrated GPU. Default: false.
    pub unified: bool,
    /// What the context itself takes of it for as long as it lives. Default: 512 MiB, a guess:
    /// 300 to 600 MiB are reported.
    pub context_overhead: ByteSize,
    /// Whether there are virtual memory calls; some shares of a device have none. Default: true.
    pub virtual_memory: bool,
    /// Whether the segments of a device without virtual memory are of a pool, which keeps what is
    /// given back until it is trimmed. Default: false, they are plain memory.
    pub pool: bool,
    /// Whether memory can go from one address to another without being given back. Default: true.
    pub remap: bool,
    /// Whether host memory can be page-locked. Default: true.
    pub page_locked: bool,
    /// What the calls cost in virtual time. Default: guesses, see [`DriverCosts`].
    pub costs: DriverCosts,
    /// The clock that the calls advance.
    pub clock: ManualClock,
    /// How many of the last entries of the log are kept. Default: 0, the log is only hashed.
    pub log_entries: usize,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            order: Order::Lazy,
            granularity: ByteSize::mib(2),
            handles: Handles::Fixed(ByteSize::mib(2)),
            address_base: SPACE_BASE,
            address_space: ByteSize::gib(128 << 10),
            capacity: ByteSize::gib(80),
            unified: false,
            context_overhead: ByteSize::mib(512),
            virtual_memory: true,
            pool: false,
            remap: true,
            page_locked: true,
            costs: DriverCosts::default(),
            clock: ManualClock::new(),
            log_entries: 0,
        }
    }
}

impl SimOptions {
    /// The granularity that the driver reports.
    pub(super) const fn unit(&self) -> ByteSize {
        match self.handles {
            Handles::Fixed(size) => size,
            Handles::PerCommit => self.granularity,
        }
    }

    /// # Panics
    /// Where no such device can be.
    pub(super) fn validate(&self) {
        let least = ByteSize::kib(4);
        let units = [self.granularity, self.unit()];
        let powers = units.iter().all(|unit| unit.get().is_power_of_two() && *unit >= least);
        assert!(powers, "{units:?}: granularity and handle are powers of two of at least {least}");
        assert!(self.unit() >= self.granularity, "{units:?}: a handle is at least a granule");
        let space = self.address_space;
        assert!(space >= self.unit(), "{space} of addresses, less than a handle");
        assert!(space.get() <= 1 << 60, "{space} of addresses: at most 2^60 B");
        let base = self.address_base;
        let whole = base.is_multiple_of(SPACE_BASE) && (SPACE_BASE..1 << 60).contains(&base);
        assert!(whole, "{base:#x}: addresses begin at a multiple of 64 GiB below 2^60");
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::sync::caught;

    #[test]
    fn options_of_no_possible_device_are_refused() {
        let accepted = |change: fn(&mut SimOptions)| {
            let mut options = SimOptions::default();
            change(&mut options);
            caught(|| options.validate()).is_ok()
        };
        assert!(accepted(|_| {}));
        assert!(accepted(|it| it.granularity = ByteSize::kib(64)));
        assert!(accepted(|it| it.handles = Handles::PerCommit));
        assert!(accepted(|it| it.address_space = ByteSize::mib(2)));
        assert!(!accepted(|it| it.granularity = ByteSize::mib(3)));
        assert!(!accepted(|it| it.granularity = ByteSize::ZERO));
        assert!(!accepted(|it| it.granularity = ByteSize::mib(4)));
        assert!(!accepted(|it| it.handles = Handles::Fixed(ByteSize::mib(3))));
        assert!(!accepted(|it| it.handles = Handles::Fixed(ByteSize::kib(1))));
        assert!(!accepted(|it| it.address_space = ByteSize::mib(1)));
        assert!(!accepted(|it| it.address_space = ByteSize::MAX));
    }
}

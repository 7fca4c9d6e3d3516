//! The options of the simulation: the size of the device, its features, and the order of its work.
//!
//! Plain values. State that changes while the device runs (neighbours, limits, faults) is set on
//! the driver itself.
//!
//! Invariant: options that are accepted satisfy `granularity <= handle <= address space`.

use super::call::DriverCosts;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::ManualClock;
use lowtide_gpu_driver::DeviceUuid;

/// The start of the address space: not 0, so that no address is mistaken for "none".
const SPACE_BASE: u64 = 64 << 30;

/// The order and time at which queued work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Work is done only when a call waits for it, and then only the work that the wait depends on,
    /// or when 2^20 pieces are queued: the worst order for a program that forgot a dependency.
    /// Querying an event is not a wait, so a program that only queries needs
    /// [`SimDriver::advance`](super::SimDriver::advance).
    Lazy,
    /// Before every call a random number of pieces of work of random streams is done. The same seed
    /// and the same calls produce the same order.
    Random {
        /// The seed of the generator.
        seed: u64,
    },
    /// Work is done before the call that queues it returns. This finds almost no ordering faults.
    Synchronous,
}

/// Options of a simulated device.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each with its name")]
pub struct SimOptions {
    /// The order of work. Default: [`Order::Lazy`].
    pub order: Order,
    /// The smallest unit that the device maps: a power of two of at least 4 KiB. Default: 2 MiB.
    pub granularity: ByteSize,
    /// The size of the smallest handle, which is the granularity that the driver reports: a power
    /// of two and a multiple of the granularity. Default: 2 MiB.
    pub handle_min: ByteSize,
    /// The start of the address space: a multiple of 64 GiB below 2^60. Default: 64 GiB. Devices of
    /// one process must not overlap.
    pub address_base: u64,
    /// The size of the address space; at least one handle. Default: 128 TiB; some devices have less
    /// than 32 GiB.
    pub address_space: ByteSize,
    /// The memory of the device. Default: 80 GiB.
    pub capacity: ByteSize,
    /// The ordinal of the device, among several of one process. Default: `None`.
    pub ordinal: Option<u32>,
    /// The UUID of the device. Default: `None`.
    pub uuid: Option<DeviceUuid>,
    /// `true` if its memory is the host's, as in an integrated GPU. Default: false.
    pub unified: bool,
    /// The memory that the context itself uses. Default: 512 MiB, a guess: 300 to 600 MiB are
    /// reported.
    pub context_overhead: ByteSize,
    /// `true` if the device supports virtual memory calls; some MIG instances do not. Default:
    /// true.
    pub virtual_memory: bool,
    /// `true` if the segments of a device without virtual memory come from a pool, which caches
    /// released memory until it is trimmed. Default: false, plain memory.
    pub pool: bool,
    /// `true` if memory can be remapped to another address without being released. Default: true.
    pub remap: bool,
    /// `true` if host memory can be page-locked. Default: true.
    pub page_locked: bool,
    /// The costs of calls in virtual time. Default: guesses, see [`DriverCosts`].
    pub costs: DriverCosts,
    /// The clock that the calls advance.
    pub clock: ManualClock,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            order: Order::Lazy,
            granularity: ByteSize::mib(2),
            handle_min: ByteSize::mib(2),
            address_base: SPACE_BASE,
            address_space: ByteSize::gib(128 << 10),
            capacity: ByteSize::gib(80),
            ordinal: None,
            uuid: None,
            unified: false,
            context_overhead: ByteSize::mib(512),
            virtual_memory: true,
            pool: false,
            remap: true,
            page_locked: true,
            costs: DriverCosts::default(),
            clock: ManualClock::new(),
        }
    }
}

impl SimOptions {
    /// # Panics
    /// If the options are inconsistent.
    pub(super) fn validate(&self) {
        let least = ByteSize::kib(4);
        let units = [self.granularity, self.handle_min];
        let powers = units.iter().all(|unit| unit.get().is_power_of_two() && *unit >= least);
        assert!(
            powers,
            "invalid sizes {units:?}: granularity and handle must be powers \
             of two of at least {least}"
        );
        assert!(
            self.handle_min >= self.granularity,
            "invalid sizes {units:?}: a handle must be at least a granule"
        );
        let space = self.address_space;
        assert!(
            space >= self.handle_min,
            "invalid address space of {space}: expected at least one handle"
        );
        assert!(space.get() <= 1 << 60, "invalid address space of {space}: at most 2^60 B");
        let base = self.address_base;
        let whole = base.is_multiple_of(SPACE_BASE) && (SPACE_BASE..1 << 60).contains(&base);
        assert!(whole, "invalid address base {base:#x}: expected a multiple of 64 GiB below 2^60");
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use lowtide_core::sync::caught;

    #[test]
    fn options_of_no_possible_device_are_refused() {
        let accepted = |change: fn(&mut SimOptions)| {
            let mut options = SimOptions::default();
            change(&mut options);
            caught(|| options.validate()).is_ok()
        };
        assert!(accepted(|_| {}));
        assert!(accepted(|it| it.granularity = ByteSize::kib(64)));
        assert!(accepted(|it| it.address_space = ByteSize::mib(2)));
        assert!(!accepted(|it| it.granularity = ByteSize::mib(3)));
        assert!(!accepted(|it| it.granularity = ByteSize::ZERO));
        assert!(!accepted(|it| it.granularity = ByteSize::mib(4)));
        assert!(!accepted(|it| it.handle_min = ByteSize::mib(3)));
        assert!(!accepted(|it| it.handle_min = ByteSize::kib(1)));
        assert!(!accepted(|it| it.address_space = ByteSize::mib(1)));
        assert!(!accepted(|it| it.address_space = ByteSize::MAX));
    }
}

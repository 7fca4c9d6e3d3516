//! Public values of sleep: states, options, reports, and the budget of host memory.

use std::any::Any;
use std::time::Duration;

use crate::driver::host::physical_memory;
use lowtide_core::bytes::ByteSize;

lowtide_core::named_enum! {
    /// The sleep state of an arena.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    pub enum SleepState {
        /// The memory can be used.
        #[default]
        Awake = "awake",
        /// The arena is falling asleep: it waits for the last lease, or its contents are being
        /// copied.
        Draining = "draining",
        /// The memory is released, except for memory that stays; entering wakes the arena.
        Asleep = "asleep",
        /// The memory is being committed and restored.
        Waking = "waking",
    }
}

/// Options of a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SleepOptions {
    /// Time to wait for leases to end; zero not to wait.
    pub drain: Duration,
    /// The treatment of contents in the stable region;
    /// [`Buffer::set_contents`](crate::Buffer::set_contents) overrides it.
    pub stable: Contents,
    /// The treatment of contents in the dynamic region.
    pub dynamic: Contents,
}

impl Default for SleepOptions {
    /// Waits for a second, and keeps all contents.
    fn default() -> Self {
        let kept = Contents::Keep;
        Self { drain: Duration::from_secs(1), stable: kept, dynamic: kept }
    }
}

/// The configuration of idle sleep and of wakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SleepConfig {
    /// Time without a lease before the arena sleeps; `None` for never. An arena with raw blocks
    /// never sleeps: their use is unknown.
    pub idle_after: Option<Duration>,
    /// The minimum time awake after open or wake.
    pub min_awake: Duration,
    /// The options of an idle sleep, which never waits for leases.
    pub options: SleepOptions,
    /// Time during which a wake without enough memory retries, eight times, before it fails; zero
    /// to fail immediately. Measured by the arena's clock: with a manual clock that is not
    /// advanced, such a wake waits forever.
    pub wake_timeout: Duration,
    /// The maximum host memory for contents that stays allocated, and reserved, after a wake for
    /// the next sleep: page-locking memory takes longer than filling it. A decay soon after the
    /// wake releases the rest; with zero, all of it. Host memory is released in whole stores of up
    /// to 1 GiB, so less than the maximum may stay: nothing of a single store of 64 MiB if the
    /// maximum is 32 MiB. See [`DeviceArena::set_stores_max`](crate::DeviceArena::set_stores_max).
    /// Default: half of the host's physical memory; 0 if its size is unknown. A `Memory` also
    /// limits it to a quarter of its memory limit.
    pub stores_max: ByteSize,
}

impl Default for SleepConfig {
    /// No idle sleep; a wake retries for 2 s: memory freed by another process shows within 1.5 s.
    /// After a wake at most half of the host's physical memory stays, as much as Linux gives a
    /// tmpfs; nothing if that size is unknown.
    fn default() -> Self {
        Self {
            idle_after: None,
            min_awake: Duration::ZERO,
            options: SleepOptions::default(),
            wake_timeout: Duration::from_secs(2),
            stores_max: ByteSize::new(physical_memory().unwrap_or_default().get() / 2),
        }
    }
}

/// The result of a sleep or a wake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SleepReport {
    /// Bytes that a sleep released to the driver, or that a wake committed.
    pub memory: ByteSize,
    /// Bytes that a sleep copied to host memory, in whole granules, or that a wake copied back.
    pub copied: ByteSize,
    /// Bytes that stayed committed in a sleep: those with [`Contents::Stay`], and on a driver whose
    /// memory is host memory also those with [`Contents::Keep`].
    pub stayed: ByteSize,
}

/// A budget of host memory, from which a sleep reserves before it copies contents.
///
/// The arena may be falling asleep during these calls. Operations that would wait for the end of
/// the sleep, such as entering or allocating, fail there with
/// [`DeviceError::State`](crate::DeviceError::State). A panic counts as a rejection.
pub trait HostBudget: Send + Sync {
    /// Reserves `bytes` until the returned value is dropped. Any thread may drop it, after the host
    /// memory was released. Called with no lock held.
    ///
    /// # Errors
    /// The reason for the rejection, as text: the arena then stays awake.
    fn reserve(&self, bytes: ByteSize) -> Result<Box<dyn Any + Send>, String>;

    /// Called when the host memory of a reservation is allocated: from here on its pages are part
    /// of measured memory. Called with no lock held. Does nothing by default.
    fn settle(&self, booked: &mut (dyn Any + Send)) {
        let _ = booked;
    }
}

lowtide_core::named_enum! {
    /// The treatment of contents when the arena falls asleep, from the weakest to the strongest.
    /// [`Contents::Keep`] is the default.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[non_exhaustive]
    pub enum Contents {
        /// Contents are lost: for caches, activations, and data that is loaded again from
        /// elsewhere.
        Discard = "discard",
        /// Contents are copied to host memory and back. If device memory is host memory, they stay
        /// in place.
        #[default]
        Keep = "keep",
        /// Contents and memory stay in place: for memory whose address other code holds, such as
        /// buffers registered with NCCL.
        Stay = "stay",
    }
}

lowtide_core::by_name!(Contents, "keep, discard or stay");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_a_name_and_nothing_else_is_one() {
        for contents in Contents::ALL {
            assert_eq!(contents.to_string().parse(), Ok(contents));
        }
        for text in ["", "Keep", "offload", "keep "] {
            assert_eq!(text.parse::<Contents>(), Err("keep, discard or stay"), "{text:?}");
        }
    }
}

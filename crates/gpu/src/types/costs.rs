//! The costs of driver calls, by which an arena decides.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;

/// The costs of a device's driver calls, by which an arena chooses between calls that have the same
/// result; from [`DeviceArena::set_costs`](crate::DeviceArena::set_costs).
///
/// The defaults are for NVIDIA data centre GPUs. None was measured by this project; measure them on
/// the device with `examples/gpu_check`. A wrong figure costs time, and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCosts {
    /// The bytes that the device copies within itself in a second. Zero counts as 1. Default: 100
    /// GB/s, less than any data centre GPU since the T4 (300 GB/s of reads and writes); an H200
    /// copies 2,150 GB/s.
    pub copy_per_second: ByteSize,
    /// The time to queue one copy. Default: 4 us, a guess.
    pub copy_call: Duration,
}

impl Default for DeviceCosts {
    fn default() -> Self {
        Self {
            copy_per_second: ByteSize::new(100_000_000_000),
            copy_call: Duration::from_micros(4),
        }
    }
}

impl DeviceCosts {
    /// Returns the number of bytes, and the number of copies, that take this time.
    pub(crate) fn copied_within(self, time: Duration) -> [u64; 2] {
        let bytes = u128::from(self.copy_per_second.get()) * time.as_nanos() / 1_000_000_000;
        let copies = time.as_nanos() / self.copy_call.as_nanos().max(1);
        [bytes, copies].map(|count| u64::try_from(count).unwrap_or(u64::MAX))
    }
}

//! The host driver as a device of the suite.

#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_gpu::driver::{Driver, StreamHandle};
use lowtide_gpu::{Buffer, DeviceArena, HostDriver, Lane, Lease};

use super::cases::{Device, Fault, Outcome};

#[derive(Default)]
struct Host {
    streams: AtomicU64,
}

impl Device for Host {
    fn driver(&self) -> Arc<dyn Driver> {
        Arc::new(HostDriver::new())
    }

    fn lane(&self, arena: &DeviceArena) -> Result<Lane, Fault> {
        let stream = StreamHandle::new(self.streams.fetch_add(1, Ordering::Relaxed));
        // SAFETY: the host driver has no streams.
        Ok(unsafe { arena.lane(stream) }?)
    }

    fn write(&self, _: &Lane, to: &mut Buffer<u8>, lease: &Lease, value: u8) -> Outcome {
        to.slice_mut(lease)?.fill(value);
        Ok(())
    }

    fn holds(&self, _: &Lane, of: &Buffer<u8>, lease: &Lease, value: u8) -> Result<bool, Fault> {
        let bytes = of.slice(lease)?;
        Ok(bytes == vec![value; bytes.len()])
    }
}

#[test]
fn the_host_driver_keeps_the_contract() {
    super::run(&Host::default());
}

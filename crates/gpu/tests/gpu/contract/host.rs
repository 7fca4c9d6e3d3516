//! The host driver as a device of the suite.

#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_gpu::driver::{Driver, StreamHandle};
use lowtide_gpu::{Buffer, DeviceArena, HostDriver, Lane, Lease, RawBlock};

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

    fn write_raw(&self, _: &Lane, to: RawBlock, value: u8) -> Outcome {
        let (start, size) = pointer(to)?;
        // SAFETY: a live block of host memory, of this size; only this thread uses it.
        unsafe { start.write_bytes(value, size) };
        Ok(())
    }

    fn raw_holds(&self, _: &Lane, of: RawBlock, value: u8) -> Result<bool, Fault> {
        let (start, size) = pointer(of)?;
        // SAFETY: a live block of host memory, of this size, which was written; only this thread
        // uses it.
        let bytes = unsafe { std::slice::from_raw_parts(start, size) };
        Ok(bytes == vec![value; size])
    }
}

/// Returns the pointer to a block, and its size.
fn pointer(block: RawBlock) -> Result<(*mut u8, usize), Fault> {
    let at = usize::try_from(block.at.get())?;
    Ok((std::ptr::with_exposed_provenance_mut(at), usize::try_from(block.size.get())?))
}

#[test]
fn the_host_driver_keeps_the_contract() {
    super::run(&Host::default());
}

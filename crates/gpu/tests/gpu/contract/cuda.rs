//! A CUDA device as a device of the suite: our driver for memory, unmodified cudarc for work.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use lowtide_gpu::driver::Driver;
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::{Buffer, DeviceArena, Lane, Lease};

use super::cases::{Device, Fault, Outcome};

/// A device, and the context that cudarc shares with our driver.
pub(crate) struct Cuda {
    driver: Arc<CudaDriver>,
    context: Arc<CudaContext>,
}

impl Cuda {
    /// Opens a device.
    pub(crate) fn open(options: CudaOptions) -> Result<Self, Fault> {
        let driver = Arc::new(CudaDriver::open(options)?);
        let ordinal = usize::try_from(driver.device().ordinal)?;
        Ok(Self { driver, context: CudaContext::new(ordinal)? })
    }

    fn stream(&self) -> Result<Arc<CudaStream>, Fault> {
        Ok(self.context.new_stream()?)
    }
}

impl Device for Cuda {
    fn driver(&self) -> Arc<dyn Driver> {
        self.driver.clone()
    }

    fn lane(&self, arena: &DeviceArena) -> Result<Lane, Fault> {
        Ok(arena.cuda_lane(&self.stream()?)?)
    }

    fn write(&self, lane: &Lane, to: &mut Buffer<u8>, lease: &Lease, value: u8) -> Outcome {
        let stream = lane.cuda_stream().ok_or("not a lane of cudarc's")?.clone();
        let bytes = vec![value; to.len()];
        stream.memcpy_htod(&bytes, &mut to.cuda_mut(lease)?)?;
        Ok(())
    }

    fn holds(&self, lane: &Lane, of: &Buffer<u8>, lease: &Lease, value: u8) -> Result<bool, Fault> {
        let stream = lane.cuda_stream().ok_or("not a lane of cudarc's")?;
        let bytes = stream.clone_dtoh(of.cuda(lease)?)?;
        stream.synchronize()?;
        Ok(bytes == vec![value; bytes.len()])
    }

    fn takes_at_once(&self) -> bool {
        !self.driver.is_managed()
    }
}

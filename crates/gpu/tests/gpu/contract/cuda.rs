//! A CUDA device as a device of the suite: our driver for memory, unmodified cudarc for work.
#![expect(unsafe_code, reason = "raw blocks are copied by address")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result};
use lowtide_gpu::driver::Driver;
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::{Buffer, DeviceArena, Lane, Lease, RawBlock};

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

    fn write_raw(&self, lane: &Lane, to: RawBlock, value: u8) -> Outcome {
        let stream = lane.cuda_stream().ok_or("not a lane of cudarc's")?;
        let bytes = vec![value; usize::try_from(to.size.get())?];
        // SAFETY: a live block of the device, of this size; the copy from pageable memory has read
        // it when the call returns.
        unsafe { result::memcpy_htod_async(to.at.get(), &bytes, stream.cu_stream()) }?;
        Ok(())
    }

    fn raw_holds(&self, lane: &Lane, of: RawBlock, value: u8) -> Result<bool, Fault> {
        let stream = lane.cuda_stream().ok_or("not a lane of cudarc's")?;
        let mut bytes = vec![!value; usize::try_from(of.size.get())?];
        // SAFETY: a live block of the device, of this size; `bytes` outlives the copy, which is
        // complete after the wait below.
        unsafe { result::memcpy_dtoh_async(&mut bytes, of.at.get(), stream.cu_stream()) }?;
        stream.synchronize()?;
        Ok(bytes == vec![value; bytes.len()])
    }

    fn takes_at_once(&self) -> bool {
        !self.driver.is_managed()
    }
}

//! A GPU whose memory is limited and returned.
//!
//! candle allocates through cudarc from the device's current memory pool. The governor makes a pool
//! of its own the current one, so it has to be opened before the first tensor. The worker of a
//! `Memory` returns only memory whose free the program has waited for. `Device::new_cuda` has a
//! stream for each thread, and a wait on one of them waits for no other. Therefore all threads
//! share one stream here, and the unload of the model waits for it.
//!
//! It has run over a simulated driver only, never on a GPU.

use std::sync::Arc;

use candle_core::Device;
use lowtide::decay::DecayTime;
use lowtide::device::driver::cuda::{DeviceChoice, PoolGovernor};
use lowtide::{BoxError, ByteSize, Memory};

/// Opens the first GPU. candle holds at most `limit` bytes on it, in use and cached; what it has
/// not needed for the decay time is returned by the worker of `memory`, as long as the governor
/// lives.
///
/// # Errors
/// There is no usable GPU, or its pool is governed already.
pub fn open(
    memory: &Memory,
    limit: Option<ByteSize>,
    decay: DecayTime,
) -> Result<(Device, Arc<PoolGovernor>), BoxError> {
    let governor = Arc::new(PoolGovernor::open(DeviceChoice::Ordinal(0), limit, decay)?);
    memory.devices().govern(&governor)?;
    let number = usize::try_from(governor.device().ordinal)?;
    Ok((Device::new_cuda_with_stream(number)?, governor))
}

//! The model's arithmetic on a CUDA device: two kernels, and copies through cudarc.
//!
//! The kernels are PTX text, so the driver alone suffices. Each has one block of [`WIDTH`] threads:
//! a thread sums one column of the rows of a text, then computes one number of the projection. Sums
//! have the same order as on the host, so results differ only in the last digits.
//!
//! Invariant: the work of one text is in one stream, and done when its embedding is returned.
#![expect(unsafe_code, reason = "a kernel reads what its arguments point at")]

use std::fmt;
use std::sync::Arc;

use lowtide::cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, CudaViewMut, LaunchConfig, PushKernelArg as _,
};
use lowtide::cudarc::nvrtc::Ptx;
use lowtide::device::{Buffer, DeviceArena, Lane, Lease, Region};

use super::{ModelError, WIDTH};

/// Both kernels; 1024 is the bytes of a row.
const KERNELS: &str = include_str!("embed.ptx");

/// Threads of a block: one for each number of an embedding.
const THREADS: u32 = 256;
const _: () = assert!(THREADS as usize == WIDTH);

/// Weights that go over at once, so that the host holds no more of them.
const PART: usize = 256 * WIDTH;

/// A stream of the device and the kernels.
#[derive(Clone)]
pub(crate) struct Cuda {
    stream: Arc<CudaStream>,
    lane: Lane,
    gather_sum: CudaFunction,
    project: CudaFunction,
}

impl Cuda {
    /// Loads the kernels on the arena's device.
    pub(crate) fn open(arena: &DeviceArena) -> Result<Self, ModelError> {
        let context = CudaContext::new(arena.cuda_ordinal().unwrap_or(0))?;
        let stream = context.new_stream()?;
        let module = context.load_module(Ptx::from_src(KERNELS))?;
        let gather_sum = module.load_function("gather_sum")?;
        let project = module.load_function("project")?;
        let lane = arena.cuda_lane(&stream)?;
        Ok(Self { stream, lane, gather_sum, project })
    }

    /// Room for weights.
    pub(crate) fn alloc(&self, len: usize) -> Result<Buffer<f32>, ModelError> {
        Ok(self.lane.alloc(len, Region::Stable)?)
    }

    /// Writes weights, one after the other.
    pub(crate) fn fill(
        &self,
        weights: &mut Buffer<f32>,
        lease: &Lease,
        mut next: impl FnMut() -> f32,
    ) -> Result<(), ModelError> {
        let len = weights.len();
        let mut view = weights.cuda_mut(lease)?;
        for from in (0..len).step_by(PART) {
            let part: Vec<f32> = (from..len.min(from + PART)).map(|_| next()).collect();
            let mut to: CudaViewMut<'_, f32> = view.slice_mut(from..from + part.len());
            self.stream.memcpy_htod(&part, &mut to)?;
        }
        Ok(self.stream.synchronize()?)
    }

    /// The projection of the sum of these rows of the table.
    pub(crate) fn embed(
        &self,
        table: &Buffer<f32>,
        projection: &Buffer<f32>,
        rows: &[u32],
        lease: &Lease,
    ) -> Result<Vec<f32>, ModelError> {
        let mut picked = self.lane.alloc::<u32>(rows.len(), Region::Dynamic)?;
        let mut pooled = self.lane.alloc::<f32>(WIDTH, Region::Dynamic)?;
        let mut embedding = self.lane.alloc::<f32>(WIDTH, Region::Dynamic)?;
        let (count, table_rows) = (rows.len() as u64, (table.len() / WIDTH) as u64);
        let table = table.cuda(lease)?;
        if !rows.is_empty() {
            self.stream.memcpy_htod(rows, &mut picked.cuda_mut(lease)?)?;
        }
        let one_block =
            LaunchConfig { grid_dim: (1, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        {
            let (rows, mut sum) = (picked.cuda(lease)?, pooled.cuda_mut(lease)?);
            let mut launch = self.stream.launch_builder(&self.gather_sum);
            launch.arg(table).arg(&table_rows).arg(rows).arg(&count).arg(&mut sum);
            // SAFETY: the arguments are the kernel's: a table and how many rows it has, as many
            // numbers of rows as `count` says, and room for the sum of each column.
            unsafe { launch.launch(one_block) }?;
        }
        {
            let (sum, mut out) = (pooled.cuda(lease)?, embedding.cuda_mut(lease)?);
            let mut launch = self.stream.launch_builder(&self.project);
            launch.arg(projection.cuda(lease)?).arg(sum).arg(&mut out);
            // SAFETY: the arguments are the kernel's: a square matrix, a vector, and room for one.
            unsafe { launch.launch(one_block) }?;
        }
        let result = self.stream.clone_dtoh(embedding.cuda(lease)?)?;
        self.stream.synchronize()?;
        Ok(result)
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("lane", &self.lane).finish_non_exhaustive()
    }
}

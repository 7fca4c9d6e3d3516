//! The kernels of the torture: one writes a block's pattern, one counts the words that differ.
//!
//! The driver compiles their text; `testing/cuda-sim` has the same by name. Their counts are in
//! plain device memory of their own, so that a fault of the arena does not reach them.
//!
//! Invariant: the counts live until the device is idle.
#![expect(unsafe_code, reason = "launches kernels with raw addresses")]

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg, result,
};
use cudarc::nvrtc::Ptx;

use super::super::cases::{Fault, Outcome};

const TEXT: &str = include_str!("torture.ptx");

/// Few enough threads for eight kernels at once on a small device.
const GRID: LaunchConfig =
    LaunchConfig { grid_dim: (16, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };

/// The words of the counts: wrong words, the seed of a block with one, a word found there.
const COUNTS: usize = 3;

/// Words of a block in device memory, and the seed of their pattern.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    pub(super) at: u64,
    pub(super) count: u64,
    pub(super) seed: u32,
}

/// The words that the checks found wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) words: u64,
    /// The seed of one of the blocks.
    pub(super) seed: u64,
    /// A word found in it.
    pub(super) found: u64,
}

/// The loaded kernels.
pub(super) struct Kernels {
    context: Arc<CudaContext>,
    fill: CudaFunction,
    check: CudaFunction,
    counts: u64,
}

impl Kernels {
    /// Loads the kernels and lets them find a block with another pattern.
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Self, Fault> {
        let module = context.load_module(Ptx::from_src(TEXT))?;
        let (fill, check) =
            (module.load_function("torture_fill")?, module.load_function("torture_check")?);
        // SAFETY: written before it is read, by `clear`; the module made the context current.
        let counts = unsafe { result::malloc_sync(COUNTS * 8) }?;
        let kernels = Self { context: Arc::clone(context), fill, check, counts };
        kernels.clear()?;
        kernels.try_out()?;
        kernels.clear()?;
        Ok(kernels)
    }

    fn clear(&self) -> Outcome {
        self.context.bind_to_thread()?;
        // SAFETY: the counts have this size; no kernel runs.
        unsafe { result::memset_d8_sync(self.counts, 0, COUNTS * 8) }?;
        Ok(self.context.synchronize()?)
    }

    /// Checks that the kernel finds no wrong word in a correct block, and every word in a wrong
    /// one.
    fn try_out(&self) -> Outcome {
        let stream = self.context.new_stream()?;
        // SAFETY: written by the first kernel below before it is read.
        let at = unsafe { result::malloc_sync(64 << 10) }?;
        let words = Words { at, count: 16 << 10, seed: 1 };
        let found = |words: Words| -> Result<u64, Fault> {
            self.queue(&stream, words, Duration::ZERO, true)?;
            stream.synchronize()?;
            Ok(self.wrong()?.words)
        };
        let ran = self.queue(&stream, words, Duration::from_millis(1), false);
        let ran = ran.and_then(|()| Ok((found(words)?, found(Words { seed: 2, ..words })?)));
        stream.synchronize()?;
        // SAFETY: allocated above, and all work on it is done.
        unsafe { result::free_sync(at) }?;
        match ran? {
            (0, all) if all == words.count => Ok(()),
            (right, all) => Err(format!(
                "the check kernel found {right} wrong words in a correct block, and {all} in total \
                 after a wrong block: expected 0 and {}",
                words.count
            )
            .into()),
        }
    }

    /// Queues a kernel that waits for so long and then writes the pattern, or the one that then
    /// counts the words that differ.
    pub(super) fn queue(
        &self,
        stream: &CudaStream,
        words: Words,
        delay: Duration,
        is_check: bool,
    ) -> Outcome {
        let (Words { at, count, seed }, ns) = (words, delay.as_nanos());
        let ns = u64::try_from(ns).unwrap_or(u64::MAX);
        let mut launch = stream.launch_builder(if is_check { &self.check } else { &self.fill });
        launch.arg(&at).arg(&count).arg(&seed).arg(&ns);
        if is_check {
            launch.arg(&self.counts);
        }
        // SAFETY: the kernels take these four, and one the counts (torture.ptx). They stay within
        // the words, which the caller's lease keeps alive until they are done; the counts live
        // until the device is idle.
        unsafe { launch.launch(GRID) }?;
        Ok(())
    }

    /// The words found wrong until now; waits for no stream.
    pub(super) fn wrong(&self) -> Result<Wrong, Fault> {
        let mut read = [0_u64; COUNTS];
        self.context.bind_to_thread()?;
        // SAFETY: the counts have this size.
        unsafe { result::memcpy_dtoh_sync(&mut read, self.counts) }?;
        let [words, seed, found] = read;
        Ok(Wrong { words, seed, found })
    }

    /// Queues a kernel that waits and touches nothing, and waits for it.
    pub(super) fn launch_and_wait(&self, stream: &CudaStream) -> Outcome {
        let nothing = Words { at: self.counts, count: 0, seed: 0 };
        self.queue(stream, nothing, Duration::ZERO, false)?;
        Ok(stream.synchronize()?)
    }

    /// Writes to an address without memory, which loses the context.
    pub(super) fn lose_context(&self, stream: &CudaStream) -> Result<(), DriverError> {
        let nowhere = Words { at: 1 << 20, count: 1, seed: 0 };
        // The launch succeeds; the wait says what became of it.
        let _ = self.queue(stream, nowhere, Duration::ZERO, false);
        stream.synchronize()
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.context.synchronize().is_ok() {
            // SAFETY: the device is idle, so no kernel adds to the counts; freed once. Without the
            // proof they stay.
            let _ = unsafe { result::free_sync(self.counts) };
        }
    }
}

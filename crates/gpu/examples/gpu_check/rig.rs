//! Shared by the parts: the device, its memory, arenas, blocks with a pattern in them, time.
//!
//! Copies are cudarc's, unmodified; time is the crate's clock. It decides nothing.
//!
//! Invariant: `word(block, at, seed)` always returns the same value.
#![expect(unsafe_code, reason = "allocations without an arena, whose contents are never read")]

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DeviceRepr, PinnedHostSlice};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Bell, Clock, SystemClock};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::Driver;
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions, DeviceChoice};
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, Lane, Region};

use super::cases::{Fault, Outcome};
use super::cli::Args;

/// The share of the device's headroom that a part takes at most.
const SHARE: f64 = 0.85;

/// The device and the command line.
pub(crate) struct Rig<'a> {
    pub(crate) args: &'a Args,
    pub(crate) driver: Arc<CudaDriver>,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) clock: Arc<SystemClock>,
}

impl<'a> Rig<'a> {
    pub(crate) fn open(args: &'a Args) -> Result<Self, Fault> {
        let driver = Arc::new(CudaDriver::open(options(args))?);
        let context = CudaContext::new(usize::try_from(args.device)?)?;
        Ok(Self { args, driver, context, clock: Arc::new(SystemClock::new()) })
    }

    /// Returns the free and the total bytes of the device.
    pub(crate) fn memory(&self) -> Result<(ByteSize, ByteSize), Fault> {
        let (headroom, total) = self.context.mem_get_info()?;
        Ok((ByteSize::of(headroom), ByteSize::of(total)))
    }

    pub(crate) fn headroom(&self) -> Result<ByteSize, Fault> {
        Ok(self.memory()?.0)
    }

    /// The bytes of an allocation in the pairs.
    pub(crate) fn pair_len(&self) -> Result<usize, Fault> {
        let len = self.args.pair_size.as_usize();
        Ok(len.ok_or("the size of the pairs exceeds the address range")?)
    }

    /// So much, or what fits of it into the headroom with some to spare; whole blocks.
    pub(crate) fn fitting(&self, wanted: ByteSize, block: ByteSize) -> Result<ByteSize, Fault> {
        whole_blocks(wanted.min(self.headroom()?.scaled(SHARE)), block)
    }

    /// Opens an arena that releases only memory that was idle for this long, and a lane of a stream
    /// of its own.
    pub(crate) fn arena(
        &self,
        name: &str,
        limit: ByteSize,
        decay: DecayTime,
    ) -> Result<(DeviceArena, Lane), Fault> {
        let config = ArenaConfig { limit, decay, ..ArenaConfig::new(name) };
        let clock: Arc<dyn Clock> = self.clock.clone();
        let arena = DeviceArena::open(self.driver.clone(), clock, config)?;
        let lane = self.lane(&arena)?;
        Ok((arena, lane))
    }

    pub(crate) fn lane(&self, arena: &DeviceArena) -> Result<Lane, Fault> {
        Ok(arena.cuda_lane(&self.context.new_stream()?)?)
    }

    /// Measures the duration of an operation.
    pub(crate) fn timed<T, E>(
        &self,
        act: impl FnOnce() -> Result<T, E>,
    ) -> Result<(Duration, T), Fault>
    where
        Fault: From<E>,
    {
        let start = self.clock.now();
        let done = act()?;
        Ok((self.clock.now() - start, done))
    }

    /// Looks every so often until the look says that it is enough, or the time is over; returns the
    /// last value seen.
    pub(crate) fn poll<T>(
        &self,
        within: Duration,
        every: Duration,
        mut look: impl FnMut() -> Result<(bool, T), Fault>,
    ) -> Result<T, Fault> {
        let (bell, end) = (Bell::new(), self.clock.now() + within);
        loop {
            let (is_enough, value) = look()?;
            let now = self.clock.now();
            if is_enough || now >= end {
                return Ok(value);
            }
            // No other thread rings this bell: the wait ends by time alone.
            self.clock.wait_until(&bell, now + every);
        }
    }

    /// Waits until freed memory is idle: all work of the device is done, and the arena has seen it.
    pub(crate) fn settle(&self, arena: &DeviceArena) -> Outcome {
        for _ in 0..2 {
            self.driver.synchronize()?;
            arena.decay(self.clock.now())?;
        }
        Ok(())
    }
}

pub(crate) fn options(args: &Args) -> CudaOptions {
    let (device, handle) = (DeviceChoice::Ordinal(args.device), args.handle);
    CudaOptions { device, handle, ..CudaOptions::default() }
}

/// So many bytes rounded down to whole blocks, at least two of them.
pub(crate) fn whole_blocks(size: ByteSize, block: ByteSize) -> Result<ByteSize, Fault> {
    let count = size.get().checked_div(block.get()).unwrap_or(0);
    if count < 2 {
        return Err(format!("{size} is too little: two blocks of {block} are needed").into());
    }
    Ok(ByteSize::new(count * block.get()))
}

/// Blocks of a lane, so many bytes together.
pub(crate) fn blocks(
    lane: &Lane,
    size: ByteSize,
    block: ByteSize,
) -> Result<Vec<Buffer<u64>>, Fault> {
    let (count, words) = (size.get() / block.get(), words_of(block)?);
    (0..count).map(|_| Ok(lane.alloc(words, Region::Dynamic)?)).collect()
}

/// Words of eight bytes in so many bytes.
pub(crate) fn words_of(size: ByteSize) -> Result<usize, Fault> {
    let bytes = size.as_usize().ok_or("the size exceeds this machine's address range")?;
    if bytes < 8 { Err(format!("{size}: expected at least 8 B").into()) } else { Ok(bytes / 8) }
}

/// The stream of a lane.
pub(crate) fn stream(lane: &Lane) -> Result<&Arc<CudaStream>, Fault> {
    lane.cuda_stream().ok_or_else(|| "the lane is not one of cudarc".into())
}

/// The word that belongs at a place of a block.
fn word(block: usize, at: usize, seed: u64) -> u64 {
    let mixed = (at as u64).wrapping_add(seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed ^ (mixed >> 29) ^ (block as u64).wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

/// Writes the pattern of each block into it.
pub(crate) fn fill(lane: &Lane, blocks: &mut [Buffer<u64>], seed: u64) -> Outcome {
    for (number, block) in blocks.iter_mut().enumerate() {
        let words: Vec<_> = (0..block.len()).map(|at| word(number, at, seed)).collect();
        let lease = lane.enter()?;
        stream(lane)?.memcpy_htod(&words, &mut block.cuda_mut(&lease)?)?;
        stream(lane)?.synchronize()?;
    }
    Ok(())
}

/// Returns the number of bytes in these words of a block that differ from those written.
pub(crate) fn changed(
    lane: &Lane,
    (number, block): (usize, &Buffer<u64>),
    words: Range<usize>,
    seed: u64,
) -> Result<u64, Fault> {
    let lease = lane.enter()?;
    let found = stream(lane)?.clone_dtoh(&block.cuda(&lease)?.slice(words.clone()))?;
    stream(lane)?.synchronize()?;
    let bytes = found.iter().zip(words).map(|(&found, at)| {
        let differs = (found ^ word(number, at, seed)).to_ne_bytes();
        differs.iter().filter(|&&byte| byte != 0).count() as u64
    });
    Ok(bytes.sum())
}

/// The same of all bytes of all blocks.
pub(crate) fn changed_all(lane: &Lane, held: &[Buffer<u64>], seed: u64) -> Result<u64, Fault> {
    held.iter().enumerate().map(|it| changed(lane, it, 0..it.1.len(), seed)).sum()
}

/// Device memory from cudarc, freed on drop, without an arena.
pub(crate) fn plain<T: DeviceRepr>(
    stream: &Arc<CudaStream>,
    len: usize,
) -> Result<CudaSlice<T>, Fault> {
    // SAFETY: the uninitialised contents are never read.
    Ok(unsafe { stream.alloc(len) }?)
}

/// Page-locked host memory, not from a pool of ours.
pub(crate) fn page_locked(
    context: &Arc<CudaContext>,
    words: usize,
) -> Result<PinnedHostSlice<u64>, Fault> {
    // SAFETY: any bytes are numbers. Flags 0: cached, as the stores of a sleep are.
    Ok(unsafe { context.alloc_pinned_with_flags(words, 0) }?)
}

/// Returns the median; NaN if there are no values.
pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 500)
}

/// Returns the value below or at which so many thousandths of the values lie; NaN if there are
/// none.
pub(crate) fn quantile(values: &[f64], thousandths: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() * thousandths / 1_000).min(sorted.len().saturating_sub(1));
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
pub(crate) fn float(count: impl TryInto<u64>) -> f64 {
    count.try_into().unwrap_or(u64::MAX) as f64
}

pub(crate) fn nanos(took: Duration) -> f64 {
    took.as_secs_f64() * 1e9
}

/// Returns the process's resident bytes; 0 if the kernel does not report them.
pub(crate) fn resident() -> ByteSize {
    kernel_bytes("/proc/self/status", "VmRSS:").unwrap_or_default()
}

/// Reads an entry in kB of one of the kernel's files.
pub(crate) fn kernel_bytes(file: &str, entry: &str) -> Option<ByteSize> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(entry))?;
    Some(ByteSize::kib(line.trim().strip_suffix(" kB")?.trim().parse().ok()?))
}

/// The generator `SplitMix64` of random numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// A number below `end`; 0 if that is 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }

    /// An index of a list with so many entries.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap_or(0)
    }
}

/// Bytes a second.
pub(crate) fn rate(bytes: ByteSize, took: Duration) -> f64 {
    bytes.as_f64() / took.as_secs_f64()
}

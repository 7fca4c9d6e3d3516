//! Waking 40 GiB: driver calls, and the bytes committed before the first copy, over the simulation.

#![expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide::{BoxError, ByteSize};
use lowtide_cuda_sim::{Call, DriverCosts, SimDriver, SimOptions};
use lowtide_gpu::{ArenaConfig, Buffer, Contents, DeviceArena, Region, SleepOptions};

use crate::common::figures::Figures;

/// The bytes that are live.
const LIVE: ByteSize = ByteSize::gib(40);
/// The number of blocks of the case with holes.
const BLOCKS: usize = 1_000;

/// A simulated device with room for twice the live memory, and an arena over it.
struct Bed {
    sim: Arc<SimDriver>,
    arena: DeviceArena,
}

impl Bed {
    fn open(handle_max: ByteSize) -> Result<Self, BoxError> {
        let (costs, capacity) = (DriverCosts::zero(), ByteSize::gib(90));
        let sim = Arc::new(SimDriver::new(SimOptions { costs, capacity, ..SimOptions::default() }));
        let limit = ByteSize::gib(80);
        let config = ArenaConfig { limit, handle_max, ..ArenaConfig::new("wake") };
        let arena = DeviceArena::open(Arc::clone(&sim) as _, Arc::new(sim.clock()), config)?;
        Ok(Self { sim, arena })
    }

    /// Puts the arena to sleep with its contents kept, and wakes it. Returns the driver calls of
    /// the wake, and the bytes committed before its first copy.
    fn sleep_and_wake(&self) -> Result<(u64, u64), BoxError> {
        let keep = SleepOptions { dynamic: Contents::Keep, ..SleepOptions::default() };
        self.arena.sleep(keep)?;
        let before = self.sim.calls_total();
        let committed = Arc::new(AtomicU64::new(0));
        let (sim, seen) = (Arc::downgrade(&self.sim), Arc::clone(&committed));
        self.sim.before(Call::Restore, 0, move || {
            if let Some(sim) = sim.upgrade() {
                seen.store(sim.leaks().committed.get(), Ordering::Relaxed);
            }
        });
        self.arena.wake()?;
        Ok((self.sim.calls_total() - before, committed.load(Ordering::Relaxed)))
    }

    /// Allocates live memory in so many blocks, in MiB each.
    fn fill(&self, sizes: impl Iterator<Item = usize>) -> Result<Vec<Buffer<u8>>, BoxError> {
        sizes.map(|size| Ok(self.arena.alloc(size << 20, Region::Dynamic)?)).collect()
    }

    fn close(self) -> Result<(), BoxError> {
        self.arena.close()?;
        self.sim.assert_no_faults();
        Ok(())
    }
}

pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let (default, granule) = (ArenaConfig::new("").handle_max, ByteSize::ZERO);
    let total = usize::try_from(LIVE.get() >> 20)?;
    let bed = Bed::open(granule)?;
    let blocks = bed.fill(std::iter::repeat_n(512, total / 512))?;
    let (calls, _) = bed.sleep_and_wake()?;
    figures.add("gpu.wake.small_handles.calls", calls as f64, "calls");
    drop(blocks);
    bed.close()?;

    let bed = Bed::open(default)?;
    let blocks = bed.fill(std::iter::repeat_n(512, total / 512))?;
    let (calls, first) = bed.sleep_and_wake()?;
    figures.at_most("gpu.wake.calls", calls as f64, "calls", 2_500.0);
    let goal = ByteSize::mib(256).as_f64();
    figures.at_most("gpu.wake.bytes_before_first_copy", first as f64, "bytes", goal);
    drop(blocks);
    bed.close()?;

    // Small blocks adjoin, and share granules.
    let bed = Bed::open(default)?;
    let blocks = bed.fill(std::iter::repeat_n(5, total / 5))?;
    let (calls, _) = bed.sleep_and_wake()?;
    figures.add("gpu.wake.small_blocks.calls", calls as f64, "calls");
    drop(blocks);
    bed.close()?;

    // Each block of 40 MiB is followed by a hole of 5 %.
    let bed = Bed::open(default)?;
    let sizes = (0..2 * BLOCKS).map(|nth| if nth % 2 == 0 { 40 } else { 2 });
    let mut blocks = bed.fill(sizes)?;
    let mut nth = 0;
    blocks.retain(|_| {
        nth += 1;
        nth % 2 == 1
    });
    let (calls, _) = bed.sleep_and_wake()?;
    figures.at_most("gpu.wake.holes.calls", calls as f64, "calls", 6_000.0);
    drop(blocks);
    bed.close()
}

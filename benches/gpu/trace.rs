//! Committed over live memory, on recorded traces and on a large random one, with handles of up to
//! 64 MiB. The driver is the host's, with the rule that memory leaves in whole handles.

use std::path::Path;
use std::sync::Arc;

use lowtide::{BoxError, ByteSize};
use lowtide_cuda_sim::trial::FaultInjectingDriver;
use lowtide_gpu::clock::{Clock as _, ManualClock};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{ArenaConfig, Buffer, Contents, DeviceArena, Region, SleepOptions};

use crate::common::figures::Figures;
use crate::device_schedules::chance::Chance;
use crate::recorded::{Event, Trace};

/// The seeds of the large traces.
const SEEDS: u64 = 4;
/// The events of a large trace after its wake.
const EVENTS: u64 = 4_000;

/// An arena over a driver with handles.
struct Bed {
    driver: Arc<FaultInjectingDriver>,
    arena: DeviceArena,
    clock: Arc<ManualClock>,
}

impl Bed {
    fn open(handle_max: ByteSize) -> Result<Self, BoxError> {
        let mut driver = FaultInjectingDriver::new();
        (driver.capabilities.handles, driver.capabilities.remap) = (true, true);
        let (driver, clock) = (Arc::new(driver), Arc::new(ManualClock::new()));
        let decay = DecayTime::AtOnce;
        let config = ArenaConfig { handle_max, decay, ..ArenaConfig::new("trace") };
        let arena = DeviceArena::open(Arc::clone(&driver) as _, Arc::clone(&clock) as _, config)?;
        Ok(Self { driver, arena, clock })
    }

    /// Releases what is due now. Each turn releases something, or is the last.
    fn decay(&self) -> Result<(), BoxError> {
        let now = self.clock.now();
        while self.arena.next_decay() <= now {
            if self.arena.decay(now)?.released.is_zero() {
                break;
            }
        }
        Ok(())
    }

    fn close(self) -> Result<(), BoxError> {
        self.arena.close()?;
        self.driver.assert_no_faults();
        Ok(())
    }
}

pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
    let mut paths: Vec<_> = std::fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_, BoxError>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "gz"));
    paths.sort();
    let default = ArenaConfig::new("").handle_max;
    let mut worst = f64::MIN;
    for path in paths {
        let trace = Trace::open(&path)?;
        let (large, small) = (replay(&trace, default)?, replay(&trace, ByteSize::ZERO)?);
        figures.add(format!("gpu.trace.{}.committed_per_live", trace.name), large, "ratio");
        worst = worst.max(large - small);
    }
    figures.at_most("gpu.trace.added_committed_per_live", worst, "ratio", 0.01);
    let worst_with = |handle_max| -> Result<f64, BoxError> {
        let of = |seed| after_wake(seed, handle_max);
        (0..SEEDS).try_fold(0.0, |worst, seed| Ok(of(seed)?.max(worst)))
    };
    let small = worst_with(ByteSize::ZERO)?;
    figures.add("gpu.trace.small_handles.committed_per_live", small, "ratio");
    figures.at_most("gpu.trace.committed_per_live", worst_with(default)?, "ratio", 1.03);
    Ok(())
}

/// Replays a trace. Returns the peak of committed memory over that of live memory.
fn replay(trace: &Trace, handle_max: ByteSize) -> Result<f64, BoxError> {
    let bed = Bed::open(handle_max)?;
    let mut buffers: Vec<Option<Buffer<u8>>> = (0..trace.blocks).map(|_| None).collect();
    let mut peak = ByteSize::ZERO;
    for &event in &trace.events {
        match event {
            Event::Alloc { block, bytes } => {
                let len = usize::try_from(bytes)?;
                buffers[block] = Some(bed.arena.alloc(len, Region::Dynamic)?);
            }
            Event::Free { block } => buffers[block] = None,
        }
        peak = peak.max(bed.arena.glance().committed);
        bed.decay()?;
    }
    drop(buffers);
    bed.close()?;
    Ok(peak.as_f64() / ByteSize::new(trace.live_peak).as_f64())
}

/// Fills an arena with 40 GiB, lets it sleep and wake, and then lets random blocks come and go,
/// with 10 to 40 GiB live. Returns the largest ratio of committed over live memory.
fn after_wake(seed: u64, handle_max: ByteSize) -> Result<f64, BoxError> {
    println!("seed {seed}");
    let bed = Bed::open(handle_max)?;
    let mut chance = Chance::new(seed);
    let mut blocks: Vec<Buffer<u8>> = Vec::new();
    // From 64 KiB to 1 GiB, each power of two as likely.
    let mut size = move || {
        let power = 16 + chance.below(14);
        ((1_usize << power) + chance.below(1 << power), chance.below(usize::MAX))
    };
    while bed.arena.glance().live < ByteSize::gib(40) {
        blocks.push(bed.arena.alloc(size().0, Region::Dynamic)?);
    }
    let discard = SleepOptions { dynamic: Contents::Discard, ..SleepOptions::default() };
    bed.arena.sleep(discard)?;
    bed.arena.wake()?;
    let (mut worst, mut target) = (0.0_f64, ByteSize::gib(25));
    for event in 0..EVENTS {
        let (bytes, random) = size();
        if event % 500 == 0 {
            target = ByteSize::gib(10 + random as u64 % 31);
        }
        let live = bed.arena.glance().live;
        if live > target && !blocks.is_empty() {
            let nth = random % blocks.len();
            drop(blocks.swap_remove(nth));
        } else {
            blocks.push(bed.arena.alloc(bytes, Region::Dynamic)?);
        }
        bed.decay()?;
        let now = bed.arena.glance();
        if now.live >= ByteSize::gib(10) {
            worst = worst.max(now.committed.as_f64() / now.live.as_f64());
        }
    }
    drop(blocks);
    bed.close()?;
    Ok(worst)
}

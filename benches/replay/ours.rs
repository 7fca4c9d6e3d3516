//! Our arena on a trace, through its public API, over the host driver.
//!
//! Blocks go to the dynamic region, the weights among them: the arena is told no more than the
//! peers are. No block is touched, so committing costs the calls and no page faults. The arena's
//! clock stands still, so that nothing depends on how fast the machine is; where memory is given
//! back at once, `decay` is called whenever the arena says that it is due.
//!
//! Invariant: `live_peak <= committed_peak` for every replay.

use std::sync::Arc;
use std::time::Instant;

use lowtide::ByteSize;
use lowtide_gpu::clock::{Clock, ManualClock};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, DeviceError, HostDriver, Region};

use crate::rivals::smallest;
use crate::trace::{Event, Trace};

/// The number of times that a replay is timed.
const TIMED: usize = 5;

/// The result of a replay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Replay {
    /// The most that was committed at once.
    pub(crate) committed_peak: u64,
    /// Committed when everything has been freed, and what was due to be given back has been.
    pub(crate) after_unload: u64,
    /// Calls that committed or decommitted memory.
    pub(crate) driver_calls: u64,
    /// Median over `TIMED` replays, per event.
    pub(crate) event_nanos: f64,
}

/// All figures of a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ours {
    /// Idle memory is given back at once.
    pub(crate) at_once: Replay,
    /// The default decay, of whose time nothing passes.
    pub(crate) standing: Replay,
    /// The smallest limit with which the trace succeeds, by the granule, with the default decay.
    pub(crate) limit: Option<u64>,
}

/// Replays a trace in every way.
pub(crate) fn measure(trace: &Trace) -> Result<Ours, DeviceError> {
    let default = ArenaConfig::new("").decay;
    Ok(Ours {
        at_once: replay(trace, DecayTime::AtOnce)?,
        standing: replay(trace, default)?,
        limit: smallest_limit(trace)?,
    })
}

fn replay(trace: &Trace, decay: DecayTime) -> Result<Replay, DeviceError> {
    let mut player = Player::new(trace, ByteSize::MAX, decay)?;
    let mut committed_peak = ByteSize::ZERO;
    for &event in &trace.events {
        player.play(event)?;
        // Before what is due is given back: the most that it was in between.
        committed_peak = committed_peak.max(player.arena.glance().committed);
        player.give_back()?;
    }
    let end = player.arena.snapshot();
    let mut nanos = Vec::new();
    for _ in 0..TIMED {
        let mut player = Player::new(trace, ByteSize::MAX, decay)?;
        let start = Instant::now();
        for &event in &trace.events {
            player.play(event)?;
            player.give_back()?;
        }
        let nanos_all = start.elapsed().as_secs_f64() * 1e9;
        nanos.push(nanos_all / ByteSize::of(trace.events.len()).as_f64());
    }
    nanos.sort_unstable_by(f64::total_cmp);
    Ok(Replay {
        committed_peak: committed_peak.get(),
        after_unload: end.committed.get(),
        driver_calls: end.commits_total + end.decommits_total,
        event_nanos: nanos[TIMED / 2],
    })
}

fn smallest_limit(trace: &Trace) -> Result<Option<u64>, DeviceError> {
    let default = ArenaConfig::new("").decay;
    let granule = Player::new(trace, ByteSize::MAX, default)?.arena.capabilities().granularity;
    let mut failed = None;
    let fits = |granules: u64| {
        let outcome =
            Player::new(trace, ByteSize::new(granules.saturating_mul(granule.get())), default)
                .and_then(|mut player| {
                    trace.events.iter().try_for_each(|&event| player.play(event))
                });
        match outcome {
            Ok(()) => true,
            Err(DeviceError::OutOfMemory { .. }) => false,
            Err(error) => {
                failed = Some(error);
                false
            }
        }
    };
    let granules = smallest(trace.live_peak.div_ceil(granule.get()), fits);
    let limit = granules.map(|granules| granules.saturating_mul(granule.get()));
    failed.map_or(Ok(limit), Err)
}

/// An arena in the middle of a trace.
struct Player {
    arena: DeviceArena,
    clock: Arc<ManualClock>,
    decay: DecayTime,
    buffers: Vec<Option<Buffer<u8>>>,
}

impl Player {
    fn new(trace: &Trace, limit: ByteSize, decay: DecayTime) -> Result<Self, DeviceError> {
        let clock = Arc::new(ManualClock::new());
        let config = ArenaConfig { limit, decay, ..ArenaConfig::new(&trace.name) };
        let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock.clone(), config)?;
        let buffers = (0..trace.blocks).map(|_| None).collect();
        Ok(Self { arena, clock, decay, buffers })
    }

    fn play(&mut self, event: Event) -> Result<(), DeviceError> {
        match event {
            Event::Alloc { block, bytes } => {
                // 64 bits are all that a length has on the platforms of the host driver.
                let len = usize::try_from(bytes).unwrap_or(usize::MAX);
                self.buffers[block] = Some(self.arena.alloc(len, Region::Dynamic)?);
            }
            Event::Free { block } => self.buffers[block] = None,
        }
        Ok(())
    }

    /// Gives back what is due now. Each turn gives something back, or is the last.
    fn give_back(&self) -> Result<(), DeviceError> {
        if self.decay != DecayTime::AtOnce {
            return Ok(());
        }
        let now = self.clock.now();
        while self.arena.next_decay() <= now {
            if self.arena.decay(now)?.released.is_zero() {
                break;
            }
        }
        Ok(())
    }
}

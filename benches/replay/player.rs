//! An arena that plays a trace through its public API, on a clock that the bench moves.
//!
//! Blocks go to the dynamic region, the weights among them: the arena is told no more than the
//! peers are. No block is touched, so committing costs the calls and no page faults.

use std::sync::Arc;

use lowtide_gpu::clock::{Clock as _, ManualClock};
use lowtide_gpu::driver::Driver;
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, DeviceError, Region};

use crate::trace::{Event, Trace};

/// An arena in the middle of a trace.
pub struct Player {
    pub arena: DeviceArena,
    pub clock: Arc<ManualClock>,
    buffers: Vec<Option<Buffer<u8>>>,
}

impl Player {
    pub fn new(
        trace: &Trace,
        driver: Arc<dyn Driver>,
        config: ArenaConfig,
    ) -> Result<Self, DeviceError> {
        let clock = Arc::new(ManualClock::new());
        let arena = DeviceArena::open(driver, clock.clone(), config)?;
        Ok(Self { arena, clock, buffers: (0..trace.blocks).map(|_| None).collect() })
    }

    pub fn play(&mut self, event: Event) -> Result<(), DeviceError> {
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

    /// Releases what is due now. Each turn releases something, or is the last.
    pub fn decay(&self) -> Result<(), DeviceError> {
        let now = self.clock.now();
        while self.arena.next_decay() <= now && !self.arena.decay(now)?.is_zero() {}
        Ok(())
    }
}

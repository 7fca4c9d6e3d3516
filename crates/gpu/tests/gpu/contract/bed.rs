//! The fixture of a case of the contract: an arena of its own, a lane, and a clock that stands.
//!
//! Invariant: as in [`super`].

use std::sync::Arc;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock, ManualClock};
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, Lane, Region};

use super::{Device, Fault, Outcome};

/// An arena, a lane, and the clock that it goes by.
pub(crate) struct Bed<'a> {
    pub(crate) device: &'a dyn Device,
    pub(crate) arena: DeviceArena,
    pub(crate) lane: Lane,
    pub(crate) clock: Arc<ManualClock>,
    /// A granule.
    pub(crate) unit: usize,
}

impl<'a> Bed<'a> {
    pub(crate) fn new(device: &'a dyn Device) -> Result<Self, Fault> {
        Self::with(device, None)
    }

    pub(crate) fn with(device: &'a dyn Device, limit: Option<u64>) -> Result<Self, Fault> {
        let clock = Arc::new(ManualClock::new());
        let unit = device.driver().capabilities().granularity;
        let limit = limit.and_then(|granules| unit.checked_mul(granules)).unwrap_or(ByteSize::MAX);
        let reserve = ByteSize::gib(4);
        let config = ArenaConfig { reserve, limit, ..ArenaConfig::new("contract") };
        let arena = DeviceArena::open(device.driver(), clock.clone() as Arc<dyn Clock>, config)?;
        let lane = device.lane(&arena)?;
        let unit = usize::try_from(arena.capabilities().granularity.get())?;
        Ok(Self { device, arena, lane, clock, unit })
    }

    /// A buffer of the first lane with a value in every byte.
    pub(crate) fn written(
        &self,
        size: usize,
        region: Region,
        value: u8,
    ) -> Result<Buffer<u8>, Fault> {
        self.written_on(&self.lane, size, region, value)
    }

    pub(crate) fn written_on(
        &self,
        lane: &Lane,
        size: usize,
        region: Region,
        value: u8,
    ) -> Result<Buffer<u8>, Fault> {
        let mut buffer = lane.alloc::<u8>(size, region)?;
        let lease = lane.enter()?;
        self.device.write(lane, &mut buffer, &lease, value)?;
        Ok(buffer)
    }

    pub(crate) fn check(&self, buffer: &Buffer<u8>, value: u8) -> Outcome {
        let lease = self.lane.enter()?;
        let holds = self.device.holds(&self.lane, buffer, &lease, value)?;
        ensure!(holds, "a buffer of {} holds something else than {value}", buffer.bytes());
        Ok(())
    }

    pub(crate) fn address(&self, buffer: &Buffer<u8>) -> Result<u64, Fault> {
        let lease = self.lane.enter()?;
        let at = buffer.address(&lease)?.ok_or("a buffer with bytes has no address")?;
        Ok(at.get())
    }

    /// Waits until all work of the device is done: what was freed is idle then.
    pub(crate) fn settle(&self) -> Outcome {
        if self.arena.capabilities().asynchronous {
            // The second look takes out what the lane cached, the third marks what was freed by an
            // event, and the fourth sees it done.
            for _ in 0..4 {
                self.device.driver().synchronize()?;
                self.arena.decay(self.clock.now())?;
            }
        }
        Ok(())
    }

    /// Ends the arena: nothing is live and nothing stays.
    pub(crate) fn end(self) -> Outcome {
        let Self { arena, lane, .. } = self;
        arena.validate();
        drop(lane);
        arena.close()?;
        let committed = arena.snapshot().committed;
        ensure!(committed.is_zero(), "{committed} are committed after the end");
        Ok(())
    }
}

//! Operations of the engine for callers that are no operations yet.

use crate::driver::DriverError;
use crate::engine::move_block::{self, MoveOutcome};
use crate::engine::{completion, import, place, resume};
use crate::exec::executor::Locked;
use crate::exec::inner::ArenaInner;
use crate::state::compact::plan::Move;
use crate::state::pending::Uses;
use crate::state::ranges::BlockName;
use crate::state::streams::StreamKey;
use crate::types::compact::CompactOptions;
use crate::types::error::DeviceError;
use crate::types::region::Region;

impl ArenaInner {
    /// Waits until the arena is awake; wakes it if it sleeps.
    #[inline]
    pub(crate) fn awake<'a>(&'a self, mut locked: Locked<'a>) -> Result<Locked<'a>, DeviceError> {
        while !locked.sleep.is_open() {
            drop(locked);
            self.run(resume::awake)?;
            locked = self.lock();
        }
        Ok(locked)
    }
    pub(crate) fn complete_all(&self) -> Result<(), DriverError> {
        self.run(completion::complete_all)
    }
    pub(crate) fn complete_used(&self) -> Result<(), DeviceError> {
        self.run(completion::complete_used)
    }
    pub(crate) fn complete_pending(&self) -> Result<(), DeviceError> {
        self.run(completion::complete_pending)
    }
    pub(crate) fn is_any_capturing(&self) -> Result<bool, DriverError> {
        self.run(completion::is_any_capturing)
    }
    pub(crate) fn look_for_ends(&self, may_wait: bool) -> Result<(), DriverError> {
        self.run(async |port| completion::look_for_ends(port, may_wait).await)
    }
    pub(crate) fn come_after(
        &self,
        taker: Option<StreamKey>,
        uses: &Uses,
    ) -> Result<(), DriverError> {
        self.run(async |port| completion::come_after(port, taker, uses).await)
    }
    pub(crate) fn wait_until_still<'a>(
        &'a self,
        locked: Locked<'a>,
        region: Region,
        id: BlockName,
    ) -> Locked<'a> {
        if !locked.moves.is_moving(region, id) {
            return locked;
        }
        drop(locked);
        self.run(async |port| place::wait_until_still(port, region, id).await);
        self.wait_until_still(self.lock(), region, id)
    }

    /// Moves a block, if it may still move and is still at the planned place.
    pub(crate) fn move_block(
        &self,
        options: CompactOptions,
        id: BlockName,
        made: Move,
    ) -> Result<MoveOutcome, DeviceError> {
        let taken = self.run_now(|state| move_block::take_place(state, options, id, made));
        let new = match taken {
            Ok(new) => new,
            Err(outcome) => return Ok(outcome),
        };
        let (locked, outcome) = self.back(self.lock(), options.region, new.placed.span);
        drop(locked);
        let committed = outcome.map_err(|failure| failure.error);
        self.run(async |port| move_block::move_to(port, (options, id), made, new, committed).await)
    }

    pub(crate) fn release_adopted(&self) -> u64 {
        self.run(import::release_imports)
    }
}

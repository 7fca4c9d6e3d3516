//! Compaction: moves live blocks so that whole granules become idle or free space becomes
//! contiguous.
//!
//! First a plan is made from a copy of the metadata, with the lock released. Then its moves are
//! made one by one; each is checked before it starts and is complete in itself. Other threads
//! allocate and free meanwhile, and moves that no longer fit are skipped. Buffers find their block
//! by id, so they need no update; a callback reports each move to owners of addresses.
//!
//! This module decides the moves, never the time: a control thread or the program calls it.
//!
//! Invariants: `moved <= budget`; no block moves while a lease is held; a pinned block does not
//! move.

use lowtide_core::log;
use std::sync::Arc;

use crate::api::arena::DeviceArena;
use crate::engine::compact::Layout;
use crate::engine::move_block::{MoveOutcome, move_block};
use crate::engine::place;
use crate::exec::inner::ArenaInner;
use crate::state::event::ArenaEvent;
use crate::state::region_index::BlockName;
use crate::types::compact::{CompactError, CompactOptions, CompactReport, Moved, StopReason};
use crate::types::error::DeviceError;
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::caught;

/// Prevents moves of one block in device memory; from [`Buffer::pin`](crate::Buffer::pin). (Not
/// page-locked host memory, which is [`PinnedPool`](crate::PinnedPool).)
///
/// Pins are counted: the block may move again when the last is dropped.
#[derive(Debug)]
#[must_use = "a block stays only while its pin is held"]
pub struct BlockPin {
    inner: Arc<ArenaInner>,
    region: Region,
    /// The pinned block; `None` if the buffer has no block.
    id: Option<BlockName>,
}

impl BlockPin {
    /// Pins a block, after waiting for the end of its move if it moves.
    pub(crate) fn new(inner: &Arc<ArenaInner>, region: Region, id: Option<BlockName>) -> Self {
        if let Some(id) = id {
            inner.run(async |port| place::pin(port, region, id).await);
            inner.flush_events();
        }
        Self { inner: Arc::clone(inner), region, id }
    }
}

impl Drop for BlockPin {
    /// Unpins the block, under the arena's lock. Does nothing in a forked child.
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        if self.inner.check_here().is_ok() {
            self.inner.run_now(|state| {
                state.region_mut(self.region).pins.unpin(id);
                let region = self.region;
                state.events.push(&*self.inner.clock, || ArenaEvent::Unpinned { region, id });
            });
            self.inner.flush_events();
        }
    }
}

impl DeviceArena {
    /// Moves live blocks of a region, up to the budget, so that whole granules become idle or free
    /// space becomes contiguous. Calls `moved` after each move, in the order of the moves, with no
    /// lock held. A block may move more than once: its next move begins where the last one ended.
    ///
    /// Buffers follow automatically and need no entry in `moved`: it serves tables of raw blocks,
    /// which move if [`moves_raw`](CompactOptions::moves_raw) is set.
    ///
    /// No block moves while a lease is held: the compaction ends after the current move, as `Busy`,
    /// and entering waits only for that move. Other threads allocate and free meanwhile. Holds the
    /// lock to copy the metadata, O(blocks), and to record each move.
    ///
    /// It does not release idle memory: call [`DeviceArena::decay`] or [`DeviceArena::purge`].
    ///
    /// On a driver with streams each move waits for all work of the device. Free memory that a
    /// stream may still use is not a target; such moves are `skipped`. Call a decay first, which
    /// checks for completed work.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use lowtide_gpu::ByteSize;
    /// use lowtide_gpu::clock::ManualClock;
    /// use lowtide_gpu::{ArenaConfig, CompactOptions, DeviceArena, HostDriver, Region};
    ///
    /// let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
    /// let arena = DeviceArena::open(driver, clock, ArenaConfig::new("cache"))?;
    /// let entry = |number: u8| arena.alloc_from(&[number; 512 << 10], Region::Dynamic);
    /// let mut entries = (0..64).map(entry).collect::<Result<Vec<_>, _>>()?;
    /// // Most are dropped; one in eight stays, and with it nearly every granule.
    /// entries.retain(|entry| {
    ///     let lease = arena.enter();
    ///     lease.is_ok_and(|lease| entry.slice(&lease).is_ok_and(|bytes| bytes[0] % 8 == 0))
    /// });
    /// arena.purge()?;
    /// let before = arena.snapshot().committed;
    ///
    /// // In small steps, until no gain is left.
    /// let all = CompactOptions::new(Region::Dynamic);
    /// let options = CompactOptions { budget: ByteSize::mib(4), ..all };
    /// while arena.compact(options, |_| {})?.moves > 0 {}
    /// arena.purge()?;
    /// assert!(arena.snapshot().committed.get() * 2 <= before.get());
    /// let lease = arena.enter()?;
    /// assert_eq!(entries[7].slice(&lease)?[0], 56); // followed
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    ///
    /// # Errors
    /// [`CompactError`], with the result until then: [`DeviceError::Driver`] if a copy or a commit
    /// failed, with the block at its old place; [`DeviceError::ContentsLost`] if a block had to
    /// overlap its old place, and both the copy and undoing it failed; [`DeviceError::Callback`] if
    /// `moved` panicked; [`DeviceError::Forked`].
    pub fn compact(
        &self,
        options: CompactOptions,
        mut moved: impl FnMut(Moved),
    ) -> Result<CompactReport, CompactError> {
        let mut done = CompactReport::default();
        let inner = self.inner();
        if let Err(error) = inner.check_here() {
            return Err(CompactError { error, done });
        }
        let Some(_turn) = Turn::take(inner) else {
            done.stopped = StopReason::Busy;
            return Ok(done);
        };
        // Cached blocks are free.
        inner.empty_caches();
        let outcome = make_moves(inner, options, &mut done, &mut moved);
        if let Err(error) = inner.check_here() {
            return Err(CompactError { error, done });
        }
        done.stopped = *outcome.as_ref().unwrap_or(&StopReason::Failed);
        inner.run_now(|state| {
            done.largest_span = ByteSize::new(state.region(options.region).largest_span());
            state.events.push(&*inner.clock, || ArenaEvent::Compacted { options, report: done });
        });
        inner.flush_events();
        log!(
            debug,
            arena = self.name(),
            region = options.region.name(),
            moves = done.moves,
            moved = %done.moved,
            recovered = %done.recovered,
            stopped = done.stopped.name(),
            "arena compacted"
        );
        inner.debug_validate();
        match outcome {
            Ok(_) => Ok(done),
            Err(error) => Err(CompactError { error, done }),
        }
    }
}

/// Plans a compaction and makes its moves, each with its callback.
fn make_moves(
    inner: &ArenaInner,
    options: CompactOptions,
    done: &mut CompactReport,
    moved: &mut impl FnMut(Moved),
) -> Result<StopReason, DeviceError> {
    let region = options.region;
    let mut layout = inner.run_now(|state| Layout::of(state, options));
    let plan = layout.plan(options);
    let (mut made_idle, mut made_active) = (0, 0);
    for made in plan.moves {
        let outcome = match layout.names.get(&made.from) {
            Some(&id) => inner.run(async |port| move_block(port, options, id, made).await)?,
            None => MoveOutcome::Skipped,
        };
        let (from, to, is_freed) = match outcome {
            MoveOutcome::Moved { from, to, is_freed, idle, active } => {
                (made_idle, made_active) = (made_idle + idle, made_active + active);
                (from, to, is_freed)
            }
            MoveOutcome::Skipped => {
                done.skipped += 1;
                continue;
            }
            MoveOutcome::Busy => return Ok(StopReason::Busy),
        };
        let names = &mut layout.names;
        names.remove(&made.from).and_then(|id| names.insert(made.to, id));
        let size = ByteSize::new(made.size);
        done.moves += 1;
        done.moved = done.moved.saturating_add(size);
        done.recovered = ByteSize::new(made_idle.saturating_sub(made_active));
        if !is_freed {
            caught(|| moved(Moved { region, from, to, size }))
                .map_err(|message| DeviceError::Callback { message })?;
            // The callback may have forked.
            inner.check_here()?;
        }
    }
    Ok(StopReason::Finished)
}

/// The turn of a compaction. At most one is in progress.
struct Turn<'a>(&'a ArenaInner);

impl<'a> Turn<'a> {
    fn take(inner: &'a ArenaInner) -> Option<Self> {
        let is_taken =
            inner.run_now(|state| std::mem::replace(&mut state.moves.is_compacting, true));
        (!is_taken).then(|| Self(inner))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.0.check_here().is_ok() {
            self.0.run_now(|state| state.moves.is_compacting = false);
        }
    }
}

//! Compaction: moves live blocks so that whole granules become idle or free space becomes
//! contiguous.
//!
//! First a plan is made from a copy of the metadata, with the lock released. Then its moves are
//! made in batches; each move is checked before its batch starts, and each batch is complete in
//! itself. Other threads allocate and free meanwhile, and moves that no longer fit are skipped.
//! Buffers find their block by id, so they need no update; a callback reports each move to owners
//! of addresses.
//!
//! This module decides the moves, never the time: a control thread or the program calls it.
//!
//! Invariants: `moved <= budget`; no block moves while a lease is held; a pinned block does not
//! move.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::api::arena::DeviceArena;
use crate::engine::move_block::{
    self, BatchOutcome, BatchRefusal, Layout, MovedBlock, batch_limit, move_batch,
};
use crate::exec::ArenaInner;
use crate::index::BlockId;
use crate::state::StreamKey;
use crate::state::compact::plan::{PASSES_MAX, first_batch};
use crate::types::{
    CompactOptions, CompactReport, DeviceError, DeviceErrorWith, Moved, Region, Result,
};
use lowtide_core::sync::caught;
use lowtide_core::{ByteSize, log};

/// Prevents moves of one block in device memory; from [`Buffer::pin`](crate::Buffer::pin). (Not
/// page-locked host memory, which is [`PinnedPool`](crate::PinnedPool).)
///
/// Pins are counted: the block may move again when the last is dropped.
#[derive(Debug)]
#[must_use = "a block stays only while its pin is held"]
pub struct BlockPin {
    inner: Arc<ArenaInner>,
    /// The pinned block; `None` if the buffer has no block.
    id: Option<BlockId>,
    /// Bytes of the export that ends with this pin; `None` for a pin alone.
    exported: Option<u64>,
}

impl BlockPin {
    /// Pins a block, after waiting for the end of its move if it moves.
    pub(crate) fn new(inner: &Arc<ArenaInner>, id: Option<BlockId>) -> Self {
        if let Some(id) = id {
            inner.run(async |cx| move_block::pin(cx, id).await);
        }
        Self { inner: Arc::clone(inner), id, exported: None }
    }

    /// Counts an export of the block, which keeps the arena from sleeping until the pin is dropped.
    pub(crate) fn count_export(&mut self, bytes: u64) {
        self.exported = Some(bytes);
        self.inner.run_now(|state| {
            state.outstanding.exported_count += 1;
            state.outstanding.exported_bytes += bytes;
        });
    }
}

impl Drop for BlockPin {
    /// Ends the export and unpins the block: only updates bookkeeping under the arena's lock. Does
    /// nothing in a forked child.
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        let _ = self.inner.run_here(|state| {
            if let Some(bytes) = self.exported {
                state.outstanding.exported_count -= 1;
                state.outstanding.exported_bytes -= bytes;
                state.sleep.left_at = state.sleep.left_at.max(self.inner.executor.clock.now());
                if state.capabilities.asynchronous {
                    state.sleep.used.insert(StreamKey::CONTEXT);
                }
            }
            state.region_mut(id.region()).pins.unpin(id);
            let region = state.region(id.region());
            state.events.push("unpin", |line| line.number("address", region.address_of(id)));
        });
    }
}

impl DeviceArena {
    /// Moves live blocks of a region, up to the budget, so that whole granules become idle or free
    /// space becomes contiguous. Calls `moved` for each move, in the order of the moves, with no
    /// lock held. A block may move more than once: its next move begins where the last one ended.
    ///
    /// Buffers follow automatically and need no entry in `moved`: it serves tables of raw blocks,
    /// which move if [`moves_raw`](CompactOptions::moves_raw) is set.
    ///
    /// No block moves while a lease is held: the compaction ends after the current batch
    /// ([`CompactReport::is_busy`]), and entering waits only for that batch. Other threads allocate
    /// and free meanwhile. Holds the lock to copy the metadata, O(blocks), and to record each
    /// batch.
    ///
    /// A driver without streams moves one block at a time. On a driver with streams, a batch has as
    /// many blocks as can be copied within about a millisecond by [`DeviceArena::set_costs`]; a
    /// larger block moves alone. Its copies are queued and waited for once, and `moved` is called
    /// after that. Before a batch that follows a lease, events prove that the work of all lanes is
    /// complete; the wait for them does not block leases.
    ///
    /// It does not release idle memory: call [`DeviceArena::decay`] or [`DeviceArena::purge`].
    ///
    /// A compaction never waits for the whole device (`cuCtxSynchronize`). If work of unknown
    /// streams may use live blocks, its moves are `skipped`: after a lease that names no lane, a
    /// view for cudarc, an export; for raw blocks without a lane. Call
    /// [`DeviceArena::wait_for_pending`] first, which waits for such work, except that of raw
    /// blocks. The moves are also `skipped` while a lane's stream captures a graph.
    ///
    /// Free memory that a stream may still use is not a target; such moves are `skipped`. Call a
    /// decay first, which checks for completed work.
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
    /// With the result until then: [`DeviceError::Driver`] if a copy or a commit failed, with the
    /// block at its old place; [`DeviceError::ContentsLost`] if a block had to overlap its old
    /// place, and both the copy and undoing it failed; [`DeviceError::Callback`] if `moved`
    /// panicked; [`DeviceError::Forked`]. Completed moves stay.
    pub fn compact(
        &self,
        options: CompactOptions,
        mut moved: impl FnMut(Moved),
    ) -> Result<CompactReport, DeviceErrorWith<CompactReport>> {
        let mut done = CompactReport::default();
        match self.compact_in_turn(options, &mut done, &mut moved) {
            Ok(()) => Ok(done),
            Err(error) => Err(DeviceErrorWith { error, value: Box::new(done) }),
        }
    }

    fn compact_in_turn(
        &self,
        options: CompactOptions,
        done: &mut CompactReport,
        moved: &mut impl FnMut(Moved),
    ) -> Result<()> {
        let inner = self.inner();
        inner.check_here()?;
        let Some(_turn) = CompactionTurn::take(inner) else {
            done.is_busy = true;
            return Ok(());
        };
        // Cached blocks are free.
        inner.empty_caches();
        let outcome = make_moves(inner, options, done, moved);
        inner.check_here()?;
        let stopped = match &outcome {
            Ok(()) if done.is_busy => "busy",
            Ok(()) => "finished",
            Err(_) => "failed",
        };
        inner.run_now(|state| {
            done.largest_span = ByteSize::new(state.region(options.region).largest_span());
            state.events.push("compact", |line| {
                line.text("region", options.region.name())
                    .number("moves", done.moves)
                    .bytes("moved", done.moved)
                    .number("skipped", done.skipped)
                    .text("stopped", stopped)
            });
        });
        log!(
            debug,
            arena = self.name(),
            region = options.region.name(),
            moves = done.moves,
            moved = %done.moved,
            recovered = %done.recovered,
            stopped,
            "arena compacted"
        );
        inner.debug_validate();
        outcome
    }
}

/// Plans a compaction and makes its moves in batches, each move with its callback.
fn make_moves(
    inner: &ArenaInner,
    options: CompactOptions,
    done: &mut CompactReport,
    moved: &mut impl FnMut(Moved),
) -> Result<()> {
    let (layout, mut names, limit) = inner.run_now(|state| {
        let blocks = state.region(options.region).index.blocks();
        let names = blocks.filter_map(|(span, id)| Some((span.offset, id?)));
        let names: BTreeMap<_, _> = names.collect();
        (Layout::of(state, options), names, batch_limit(state))
    });
    let plan = layout.plan(options, PASSES_MAX);
    let (mut made_idle, mut made_active) = (0, 0);
    let mut rest = plan.moves.as_slice();
    while !rest.is_empty() {
        let (planned, later) = rest.split_at(first_batch(rest, limit));
        rest = later;
        let named = planned.iter().filter_map(|made| Some((*names.get(&made.from)?, *made)));
        let named: Vec<_> = named.collect();
        done.skipped += (planned.len() - named.len()) as u64;
        let outcome = inner.run(async |cx| move_batch(cx, options, &named).await);
        (made_idle, made_active) = (made_idle + outcome.idle, made_active + outcome.active);
        for &MovedBlock { id, made, .. } in &outcome.moved {
            names.remove(&made.from);
            names.insert(made.to, id);
            done.moves += 1;
            done.moved = done.moved.saturating_add(ByteSize::new(made.size));
        }
        done.recovered = ByteSize::new(made_idle.saturating_sub(made_active));
        done.skipped += outcome.skipped;
        report(inner, options.region, &outcome, moved)?;
        match (outcome.error, outcome.refusal) {
            (Some(error), _) => return Err(error),
            (None, Some(BatchRefusal::Busy)) => {
                done.is_busy = true;
                break;
            }
            // It may be known after a call of the program, and not during this one.
            (None, Some(BatchRefusal::Unprovable)) => {
                done.skipped += rest.len() as u64;
                break;
            }
            (None, None) => {}
        }
    }
    Ok(())
}

/// Calls the callback for each block of a batch that has an owner. After a panic it is still called
/// for the others, which have moved as well.
fn report(
    inner: &ArenaInner,
    region: Region,
    outcome: &BatchOutcome,
    moved: &mut impl FnMut(Moved),
) -> Result<()> {
    let mut panicked = Ok(());
    for &MovedBlock { made, from, to, .. } in outcome.moved.iter().filter(|it| !it.is_freed) {
        let size = ByteSize::new(made.size);
        let called = caught(|| moved(Moved { region, from, to, size }));
        // The callback may have forked.
        inner.check_here()?;
        panicked = panicked.and(called);
    }
    panicked.map_err(|message| DeviceError::Callback { message })
}

/// The turn of a compaction. At most one is in progress.
struct CompactionTurn<'a>(&'a ArenaInner);

impl<'a> CompactionTurn<'a> {
    fn take(inner: &'a ArenaInner) -> Option<Self> {
        let is_taken =
            inner.run_now(|state| std::mem::replace(&mut state.moves.is_compacting, true));
        (!is_taken).then(|| Self(inner))
    }
}

impl Drop for CompactionTurn<'_> {
    fn drop(&mut self) {
        let _ = self.0.run_here(|state| state.moves.is_compacting = false);
    }
}

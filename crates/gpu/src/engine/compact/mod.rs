//! Compaction: moves live blocks so that whole granules become idle or free space becomes
//! contiguous.
//!
//! First a plan, made from a copy of the metadata with the lock released; then its moves, one by
//! one, each checked before it starts and complete in itself. Other threads allocate and free
//! meanwhile; moves that no longer fit are skipped. Buffers find their block by id, so they need no
//! update; a callback reports each move to owners of addresses.
//!
//! It decides the moves, never the time: a control thread or the program calls it.
//!
//! Invariants: `moved <= budget`; nothing moves while a lease is held; a pinned block does not
//! move.

mod books;
mod contiguous;
mod granules;
pub(crate) mod pins;
pub(crate) mod plan;
mod sketch;
pub(crate) mod step;
mod whole;

use lowtide_core::log;
use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;

use crate::api::arena::DeviceArena;
use crate::driver::DeviceAddress;
use crate::exec::inner::ArenaInner;
use crate::index::Span;
use crate::observe::record::Operation;
use crate::state::ranges::BlockName;
use crate::state::region::Region;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::caught;
use plan::{Part, Target};
use step::Step;

/// The goal of a compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Goal {
    /// Maximizes idle granules for the bytes moved; a decay or purge then releases them. For arenas
    /// with more addresses than memory. On drivers that allocate whole segments: idle segments.
    Granules,
    /// One free span of addresses of at least this size, or the largest possible; [`ByteSize::MAX`]
    /// to join all free space. For arenas whose addresses are as scarce as memory. Within one
    /// segment, on drivers that allocate segments.
    Contiguous(ByteSize),
}

/// Options of a compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompactOptions {
    /// The region. Blocks of the other region do not move.
    pub region: Region,
    /// The goal.
    pub goal: Goal,
    /// The maximum of bytes moved in this call; a larger block does not move. Less than about two
    /// granules may be too little to clear any.
    pub budget: ByteSize,
    /// `true` if raw blocks may move as well; their owner takes the new addresses from the
    /// callback, and does not use them meanwhile. Default: `false`.
    pub moves_raw: bool,
}

impl CompactOptions {
    /// Creates options for idle granules in this region, without a budget.
    #[must_use]
    pub const fn new(region: Region) -> Self {
        Self { region, goal: Goal::Granules, budget: ByteSize::MAX, moves_raw: false }
    }
}

/// A block that was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// Its region.
    pub region: Region,
    /// Its address before the move.
    pub from: DeviceAddress,
    /// Its address after the move.
    pub to: DeviceAddress,
    /// Its size.
    pub size: ByteSize,
}

/// The reason a compaction ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// All moves of the plan that were still valid are done.
    Finished,
    /// A lease was held or requested, which blocks moves, or another compaction of the arena is
    /// running.
    Busy,
    /// An error occurred before the plan was completed; see [`CompactError::done`].
    #[default]
    Failed,
}

impl StopReason {
    /// Returns its name in events.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Busy => "busy",
            Self::Failed => "failed",
        }
    }
}

/// The result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompactReport {
    /// The number of blocks moved.
    pub moves: u64,
    /// Bytes moved.
    pub moved: ByteSize,
    /// The number of planned moves skipped: the block or its new place had changed, or there was no
    /// memory for it.
    pub skipped: u64,
    /// Bytes of granules that became idle: those left by the moves, minus those made active.
    pub recovered: ByteSize,
    /// The longest free span of addresses in the region afterwards.
    pub largest_span: ByteSize,
    /// The reason it ended. After [`StopReason::Busy`] more may be possible: try again later.
    pub stopped: StopReason,
}

/// A failed compaction, and its result until then. Completed moves stay.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("compaction failed after {} moves: {error}", done.moves)]
#[non_exhaustive]
pub struct CompactError {
    /// The error.
    #[source]
    pub error: DeviceError,
    /// The result of the moves before it.
    pub done: CompactReport,
}

impl From<CompactError> for DeviceError {
    fn from(failed: CompactError) -> Self {
        failed.error
    }
}

/// Prevents moves of one block in device memory; from [`Buffer::pin`](crate::Buffer::pin). (Not
/// page-locked host memory, which is [`PinnedPool`](crate::PinnedPool).)
///
/// Pins are counted: the block may move again when the last is dropped.
#[derive(Debug)]
#[must_use = "a block stays only while its pin is held"]
pub struct BlockPin {
    inner: Arc<ArenaInner>,
    region: Region,
    /// `None` if there is no block to pin.
    id: Option<BlockName>,
}

impl BlockPin {
    /// Waits for the end of the block's move, if it moves.
    pub(crate) fn new(inner: &Arc<ArenaInner>, region: Region, id: Option<BlockName>) -> Self {
        if let Some(id) = id {
            let mut books = inner.wait_until_still(inner.lock(), region, id);
            books.region_mut(region).pins.pin(id);
            books.tell(&*inner.clock, |numbers| {
                Some(Operation::Pin { id: numbers.of(region, id)? })
            });
            drop(books);
            inner.pass_on();
        }
        Self { inner: Arc::clone(inner), region, id }
    }
}

impl Drop for BlockPin {
    /// Takes the arena's lock; in a forked child does nothing.
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        if self.inner.check_here().is_ok() {
            let mut books = self.inner.lock();
            books.region_mut(self.region).pins.unpin(id);
            books.tell(&*self.inner.clock, |numbers| {
                Some(Operation::Unpin { id: numbers.of(self.region, id)? })
            });
            drop(books);
            self.inner.pass_on();
        }
    }
}

impl DeviceArena {
    /// Moves live blocks of a region, up to the budget, so that whole granules become idle or free
    /// space becomes contiguous. Calls `moved` for each block, in order, with no lock held.
    ///
    /// Buffers follow automatically and need no entry in `moved`: it serves tables of raw blocks,
    /// which move if [`moves_raw`](CompactOptions::moves_raw) is set.
    ///
    /// Nothing moves while a lease is held: the compaction ends after the current move, as `Busy`,
    /// and entering waits only for that move. Other threads allocate and free meanwhile. Holds the
    /// lock to copy the metadata, O(blocks), and for the accounting of each move.
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
        inner.empty_fronts();
        let outcome = inner.compact(options, &mut done, &mut moved);
        if let Err(error) = inner.check_here() {
            return Err(CompactError { error, done });
        }
        done.stopped = *outcome.as_ref().unwrap_or(&StopReason::Failed);
        let books = inner.lock();
        done.largest_span = ByteSize::new(books.region(options.region).largest_span());
        books.tell(&*inner.clock, |_| Some(Operation::compact(options, &done)));
        drop(books);
        inner.pass_on();
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

type RegionLayout = (Vec<Part>, BTreeMap<u64, BlockName>, Option<Vec<Span>>);

impl ArenaInner {
    fn compact(
        &self,
        options: CompactOptions,
        done: &mut CompactReport,
        moved: &mut impl FnMut(Moved),
    ) -> Result<StopReason, DeviceError> {
        let region = options.region;
        let (parts, mut names, segments) = self.layout_of(options);
        let granule = self.granule.get();
        let target = match options.goal {
            Goal::Granules => segments.as_deref().map_or(Target::Granules, Target::Segments),
            Goal::Contiguous(size) => Target::Contiguous(size.get()),
        };
        let plan = plan::plan(&parts, granule, target, options.budget.get());
        drop(parts);
        let (mut made_idle, mut made_active) = (0, 0);
        for made in plan.moves {
            let step = match names.get(&made.from) {
                Some(&id) => self.move_block(options, id, made)?,
                None => Step::Skipped,
            };
            let (from, to, is_freed) = match step {
                Step::Moved { from, to, is_freed, idle, active } => {
                    (made_idle, made_active) = (made_idle + idle, made_active + active);
                    (from, to, is_freed)
                }
                Step::Skipped => {
                    done.skipped += 1;
                    continue;
                }
                Step::Busy => return Ok(StopReason::Busy),
            };
            names.remove(&made.from).and_then(|id| names.insert(made.to, id));
            let size = ByteSize::new(made.size);
            done.moves += 1;
            done.moved = done.moved.saturating_add(size);
            done.recovered = ByteSize::new(made_idle.saturating_sub(made_active));
            if !is_freed {
                caught(|| moved(Moved { region, from, to, size }))
                    .map_err(|message| DeviceError::Callback { message })?;
                // It may have forked.
                self.check_here()?;
            }
        }
        Ok(StopReason::Finished)
    }

    /// Returns the parts of a region for the plan, the ids of its blocks by offset, and its
    /// segments, on drivers that allocate segments.
    fn layout_of(&self, options: CompactOptions) -> RegionLayout {
        let books = self.lock();
        let parts = books.parts(options);
        let segments = books.region(options.region).segment.segments();
        drop(books);
        let names = parts.iter().filter_map(|&(part, id)| Some((part.span.offset, id?))).collect();
        (parts.into_iter().map(|(part, _)| part).collect(), names, segments)
    }
}

/// The turn of the one compaction that is under way.
struct Turn<'a>(&'a ArenaInner);

impl<'a> Turn<'a> {
    fn take(inner: &'a ArenaInner) -> Option<Self> {
        let mut books = inner.lock();
        let is_free = !std::mem::replace(&mut books.compacting, true);
        is_free.then(|| Self(inner))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.0.check_here().is_ok() {
            self.0.lock().compacting = false;
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod plan_tests;
#[cfg(all(test, not(lowtide_loom)))]
mod tests;
#[cfg(all(test, not(lowtide_loom)))]
mod tests_beside;

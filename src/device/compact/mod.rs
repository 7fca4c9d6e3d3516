//! Compaction: live blocks move, so that whole granules fall idle or free space is contiguous.
//!
//! First a plan, made of a copy of the books with the lock given up; then its moves, one by one,
//! each checked when its turn comes and complete in itself. Other threads allocate and free
//! meanwhile; what does not fit any more is left out. Buffers find their block by name, so nobody
//! has to be told; who keeps addresses gets each move by a callback.
//!
//! It decides what moves where, never when: a control thread, or whoever wants to, asks.
//!
//! Invariants: `moved <= budget`; nothing moves while a lease is held; a block that is pinned
//! stays.

mod books;
mod contiguous;
mod granules;
pub(super) mod pins;
pub(super) mod plan;
mod sketch;
pub(super) mod step;
mod whole;

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;

use super::arena::DeviceArena;
use super::driver::DeviceAddress;
use super::error::DeviceError;
use super::index::Span;
use super::ranges::BlockName;
use super::record::Operation;
use super::region::Region;
use super::shared::Shared;
use crate::bytes::ByteSize;
use crate::sync::{caught, lock};
use plan::{Part, Target};
use step::Step;

/// What to move blocks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Goal {
    /// As many idle granules as possible for the bytes moved; a decay or purge then gives them
    /// back. For arenas with more addresses than memory. Where a driver gives and takes memory in
    /// whole segments, as many of those.
    Granules,
    /// One free span of addresses of at least so many bytes, or the largest that can be had;
    /// [`ByteSize::MAX`] for all that is free. For arenas whose addresses are as short as memory.
    /// Within one segment, where a driver gives memory in those.
    Contiguous(ByteSize),
}

/// What to compact, and how much of it at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompactOptions {
    /// Which region. The blocks of the other one stay.
    pub region: Region,
    /// What for.
    pub goal: Goal,
    /// The most bytes that are moved in this call; a block larger than it stays. Below about two
    /// granules it may be too little to clear any one of them.
    pub budget: ByteSize,
    /// Whether blocks that were had by address move as well; their owner takes the new addresses
    /// from the callback, and uses none of them meanwhile. Unless told otherwise they stay.
    pub moves_raw: bool,
}

impl CompactOptions {
    /// Idle granules in this region, with no bound on the bytes moved.
    #[must_use]
    pub const fn new(region: Region) -> Self {
        Self { region, goal: Goal::Granules, budget: ByteSize::MAX, moves_raw: false }
    }
}

/// A block that was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// The region that it is in.
    pub region: Region,
    /// Where it was.
    pub from: DeviceAddress,
    /// Where it is.
    pub to: DeviceAddress,
    /// How large it is.
    pub size: ByteSize,
}

/// Why a compaction ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The plan was carried out, as far as it still held.
    Finished,
    /// A lease was held, or somebody waited for one: nothing moves then. Also where another
    /// compaction of the arena is under way.
    Busy,
    /// It failed, before the plan was carried out: as in [`CompactError::done`].
    #[default]
    Failed,
}

impl StopReason {
    /// The name under which events show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Busy => "busy",
            Self::Failed => "failed",
        }
    }
}

/// What a compaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompactReport {
    /// Blocks moved.
    pub moves: u64,
    /// Their bytes.
    pub moved: ByteSize,
    /// Moves that were planned and left out: the block or its new place had changed, or there was
    /// no memory for it.
    pub skipped: u64,
    /// Bytes of granules that are idle by these moves: those that they left, less those that they
    /// made active.
    pub recovered: ByteSize,
    /// The longest free span of addresses in the region afterwards.
    pub largest_span: ByteSize,
    /// Why it ended. After [`StopReason::Busy`] there may be more to gain: try again later.
    pub stopped: StopReason,
}

/// A compaction that failed, and what it had done by then. Every move that was complete stays.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("a compaction failed; moves before that: {}; {error}", done.moves)]
#[non_exhaustive]
pub struct CompactError {
    /// Why.
    #[source]
    pub error: DeviceError,
    /// What was done before.
    pub done: CompactReport,
}

impl From<CompactError> for DeviceError {
    fn from(failed: CompactError) -> Self {
        failed.error
    }
}

/// Keeps one block where it is, in device memory; had from [`Buffer::pin`](super::Buffer::pin).
/// (Page-locked memory of the host is another thing: [`PinnedPool`](super::PinnedPool).)
///
/// Pins are counted: the block may move again when the last is dropped.
#[derive(Debug)]
#[must_use = "a block stays only while its pin is held"]
pub struct BlockPin {
    shared: Arc<Shared>,
    region: Region,
    /// None: there is no block, and nothing to keep.
    id: Option<BlockName>,
}

impl BlockPin {
    /// Waits for the end of the block's move, if it moves.
    pub(super) fn new(shared: &Arc<Shared>, region: Region, id: Option<BlockName>) -> Self {
        if let Some(id) = id {
            let mut books = shared.wait_until_still(lock(&shared.books), region, id);
            books.region_mut(region).pins.pin(id);
            books.tell(&*shared.clock, |numbers| {
                Some(Operation::Pin { id: numbers.of(region, id)? })
            });
            drop(books);
            shared.pass_on();
        }
        Self { shared: Arc::clone(shared), region, id }
    }
}

impl Drop for BlockPin {
    /// Takes the arena's lock; in a forked child does nothing.
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        if self.shared.check_here().is_ok() {
            let mut books = lock(&self.shared.books);
            books.region_mut(self.region).pins.unpin(id);
            books.tell(&*self.shared.clock, |numbers| {
                Some(Operation::Unpin { id: numbers.of(self.region, id)? })
            });
            drop(books);
            self.shared.pass_on();
        }
    }
}

impl DeviceArena {
    /// Moves live blocks of a region, at most so many bytes of them, so that whole granules fall
    /// idle or free space is contiguous. Says what it moved; `moved` is called for each block, in
    /// order, with no lock held.
    ///
    /// Buffers follow by themselves, and have no address to look for in `moved`: it is for tables
    /// of blocks that were had by address, which move where
    /// [`moves_raw`](CompactOptions::moves_raw) says so.
    ///
    /// Nothing moves while a lease is held: it ends then, as `Busy`, after the move that it is at,
    /// and who wants a lease waits no longer than for that. Other threads allocate and free
    /// meanwhile. Holds the lock to copy the books, O(blocks), and for bookkeeping at each move.
    ///
    /// What is idle afterwards is not given back by this: [`DeviceArena::decay`] does, or
    /// [`DeviceArena::purge`].
    ///
    /// On a driver with streams each move waits for all work of the device. Free memory that a
    /// stream may still work on is no place to move to: such moves are `skipped`. Let a decay see
    /// first that its work is complete.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use lowtide::ByteSize;
    /// use lowtide::clock::ManualClock;
    /// use lowtide::device::{ArenaConfig, CompactOptions, DeviceArena, HostDriver, Region};
    ///
    /// let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
    /// let arena = DeviceArena::open(driver, clock, ArenaConfig::new("cache"))?;
    /// let entry = |number: u8| arena.alloc_from(&[number; 512 << 10], Region::Dynamic);
    /// let mut entries = (0..64).map(entry).collect::<Result<Vec<_>, _>>()?;
    /// // Most go; one in eight stays, and with it nearly every granule.
    /// entries.retain(|entry| {
    ///     let lease = arena.enter();
    ///     lease.is_ok_and(|lease| entry.slice(&lease).is_ok_and(|bytes| bytes[0] % 8 == 0))
    /// });
    /// arena.purge()?;
    /// let before = arena.snapshot().committed;
    ///
    /// // A bit at a time, until there is nothing left to gain.
    /// let all = CompactOptions::new(Region::Dynamic);
    /// let options = CompactOptions { budget: ByteSize::mib(4), ..all };
    /// while arena.compact(options, |_| {})?.moves > 0 {}
    /// arena.purge()?;
    /// assert!(arena.snapshot().committed.get() * 2 <= before.get());
    /// let lease = arena.enter()?;
    /// assert_eq!(entries[7].slice(&lease)?[0], 56); // followed
    /// # Ok::<(), lowtide::device::DeviceError>(())
    /// ```
    ///
    /// # Errors
    /// [`CompactError`], with what was done before: [`DeviceError::Driver`] where a copy or a
    /// commit failed, and the block is where it was; [`DeviceError::ContentsLost`] where a block
    /// had to slide onto its own place, the copy failed and so did its undoing;
    /// [`DeviceError::Callback`] where `moved` panicked; [`DeviceError::Forked`].
    pub fn compact(
        &self,
        options: CompactOptions,
        mut moved: impl FnMut(Moved),
    ) -> Result<CompactReport, CompactError> {
        let mut done = CompactReport::default();
        let shared = self.shared();
        if let Err(error) = shared.check_here() {
            return Err(CompactError { error, done });
        }
        let Some(_turn) = Turn::take(shared) else {
            done.stopped = StopReason::Busy;
            return Ok(done);
        };
        // What the fronts hold is free.
        shared.empty_fronts();
        let outcome = shared.compact(options, &mut done, &mut moved);
        if let Err(error) = shared.check_here() {
            return Err(CompactError { error, done });
        }
        done.stopped = *outcome.as_ref().unwrap_or(&StopReason::Failed);
        let books = lock(&shared.books);
        done.largest_span = ByteSize::new(books.region(options.region).largest_span());
        books.tell(&*shared.clock, |_| Some(Operation::compact(options, &done)));
        drop(books);
        shared.pass_on();
        log!(
            debug,
            arena = self.name(),
            region = options.region.name(),
            moves = done.moves,
            moved = %done.moved,
            recovered = %done.recovered,
            stopped = done.stopped.name(),
            "the arena was compacted"
        );
        shared.debug_validate();
        match outcome {
            Ok(_) => Ok(done),
            Err(error) => Err(CompactError { error, done }),
        }
    }
}

type Layout = (Vec<Part>, BTreeMap<u64, BlockName>, Option<Vec<Span>>);

impl Shared {
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

    /// The parts of a region for the plan, the names of its blocks by offset, and its segments,
    /// where memory comes in those.
    fn layout_of(&self, options: CompactOptions) -> Layout {
        let books = lock(&self.books);
        let parts = books.parts(options);
        let segments = books.region(options.region).segment.segments();
        drop(books);
        let names = parts.iter().filter_map(|&(part, id)| Some((part.span.offset, id?))).collect();
        (parts.into_iter().map(|(part, _)| part).collect(), names, segments)
    }
}

/// The turn of the one compaction that is under way.
struct Turn<'a>(&'a Shared);

impl<'a> Turn<'a> {
    fn take(shared: &'a Shared) -> Option<Self> {
        let mut books = lock(&shared.books);
        let is_free = !std::mem::replace(&mut books.compacting, true);
        is_free.then(|| Self(shared))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.0.check_here().is_ok() {
            lock(&self.0.books).compacting = false;
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod plan_tests;
#[cfg(all(test, not(lowtide_loom)))]
mod tests;
#[cfg(all(test, not(lowtide_loom)))]
mod tests_beside;

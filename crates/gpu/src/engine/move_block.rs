//! Moves blocks in batches: takes their places, waits until no work uses live blocks, copies the
//! contents with the lock released, and moves the blocks.
//!
//! Leases are granted until the copies start, and again after the last has ended. The wait for work
//! that was started earlier does not block them: if a lease was granted meanwhile, the wait is
//! repeated. While the batch moves no lease is granted, so no new work starts. If the owner of a
//! block frees it meanwhile, the move ends first, and then the block is freed. Pinning or resizing
//! a block of the batch waits.
//!
//! On a driver with streams all copies are queued on the arena's own stream, and then waited for
//! once. The proof that work is complete uses events only: a block that work of an unknown stream
//! may use stays ([`complete_live`]).
//!
//! A failed copy is undone: for a slide, each piece is copied back, in reverse order. Only if that
//! fails too are the contents lost; then every further use of the block is an error. If the end of
//! queued copies cannot be observed, the blocks stay at their old places. The new places, and the
//! old ones when their blocks are freed, are reused only after later proofs.
//!
//! Invariant: a block is whole at its recorded place, or known to be lost.
#![expect(unsafe_code, reason = "queues copies of memory")]

use std::time::Duration;

use super::commit::ensure_committed;
use super::completion::{Proof, complete_live, leave_stream, own_stream};
use super::context::OpContext;
use crate::driver::{DeviceAddress, DriverError, StreamHandle};
use crate::index::{BlockId, End, Span};
use crate::state::compact::plan::{self, CompactPlan, CompactTarget, Hold, LayoutPart, Move};
use crate::state::{ArenaState, Dependencies, Placement, RawUse, StreamKey, StreamUses};
use crate::types::{CompactOptions, DeviceError, Region, Result};
use lowtide_core::bytes::ByteSize;

/// The maximum number of waits for work of new leases before a batch is given up as busy. A guess:
/// each takes as long as that work.
const ROUNDS_MAX: usize = 3;

/// A block that moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MovedBlock {
    pub(crate) id: BlockId,
    pub(crate) made: Move,
    pub(crate) from: DeviceAddress,
    pub(crate) to: DeviceAddress,
    /// The owner freed the block meanwhile.
    pub(crate) is_freed: bool,
}

/// The reason that a batch moved nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchRefusal {
    /// A lease is held or requested, or the arena sleeps or is falling asleep.
    Busy,
    /// Work of an unknown stream may use live blocks, or a stream captures a graph.
    Unprovable,
}

/// The result of a batch.
#[derive(Debug, Default)]
pub(crate) struct BatchOutcome {
    /// The blocks that moved, in the order of the plan.
    pub(crate) moved: Vec<MovedBlock>,
    /// The number of blocks that stay, although no error occurred: the block or its new place has
    /// changed, there is no memory for it, or its uses are unknown.
    pub(crate) skipped: u64,
    pub(crate) refusal: Option<BatchRefusal>,
    /// The bytes of granules that the moves made idle, and the bytes that they made active.
    pub(crate) idle: u64,
    pub(crate) active: u64,
    /// The first error: that of the commit of a new place or of a copy, with the block at its old
    /// place; `ContentsLost`.
    pub(crate) error: Option<DeviceError>,
}

/// A block with the place that was taken for it, as arriving.
#[derive(Clone, Copy, Debug)]
struct TakenPlace {
    id: BlockId,
    made: Move,
    placed: Placement,
    /// The bytes of granules that the place made active.
    active: u64,
    /// `true` if work may use the block without a lease.
    is_raw: bool,
    /// The contents after the copies; `None` for a block that was not reached before an error.
    contents: Option<CopyOutcome>,
}

/// A batch in progress.
#[derive(Debug)]
struct Batch {
    options: CompactOptions,
    taken: Vec<TakenPlace>,
    /// The stream of the copies; `None` if the driver copies before its call returns.
    stream: Option<StreamHandle>,
    /// `true` if the end of queued copies was not observed.
    is_unfinished: bool,
    outcome: BatchOutcome,
}

/// The contents of a block after the copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyOutcome {
    /// They are at the new place.
    Whole,
    /// They are at the old place.
    Undone,
    Lost,
}

/// Moves blocks that may still move and are still at the place that the plan recorded. No place of
/// one block overlaps a place of another.
pub(crate) async fn move_batch(
    cx: &OpContext<'_>,
    options: CompactOptions,
    moves: &[(BlockId, Move)],
) -> BatchOutcome {
    let (taken, outcome) = (Vec::with_capacity(moves.len()), BatchOutcome::default());
    let mut batch = Batch { options, taken, stream: None, is_unfinished: false, outcome };
    match prepare(cx, moves, &mut batch).await {
        Ok(true) => {
            copy_all(cx, &mut batch).await;
            end(cx, &mut batch).await;
        }
        stopped => {
            batch.outcome.error = stopped.err();
            for TakenPlace { placed, .. } in batch.taken.drain(..) {
                cx.with(|state| state.cancel_placement(placed, Dependencies::new()));
            }
        }
    }
    batch.outcome
}

/// Takes the places, commits them, waits until no work uses live blocks, and marks the blocks as
/// moving. Returns `false` if no block moves.
async fn prepare(cx: &OpContext<'_>, moves: &[(BlockId, Move)], batch: &mut Batch) -> Result<bool> {
    for &(id, made) in moves {
        if cx.with(|state| is_busy(state)) {
            return Ok(batch.refuse(BatchRefusal::Busy));
        }
        let Some(taken) = cx.with(|state| take_place(state, batch.options, id, made)) else {
            batch.outcome.skipped += 1;
            continue;
        };
        batch.taken.push(taken);
        match ensure_committed(cx, batch.options.region, made.room()).await {
            Err(failure) if failure.error.is_out_of_memory() => {
                let last = batch.taken.len() - 1;
                cx.with(|state| batch.skip(state, last));
            }
            committed => committed.map_err(|failure| *failure.error)?,
        }
    }
    if batch.taken.is_empty() {
        return Ok(false);
    }
    if cx.with(|state| state.capabilities.asynchronous) {
        batch.stream = Some(own_stream(cx).await?);
    }
    let has_raw = batch.taken.iter().any(|taken| taken.is_raw);
    let proof = if has_raw { Proof::WaitAgain } else { Proof::Wait };
    for _ in 0..ROUNDS_MAX {
        if !complete_live(cx, proof).await? {
            batch.outcome.skipped += batch.taken.len() as u64;
            return Ok(batch.refuse(BatchRefusal::Unprovable));
        }
        if cx.with(|state| is_busy(state)) {
            break;
        }
        if cx.with(|state| batch.begin(state)) {
            return Ok(!batch.taken.is_empty());
        }
    }
    Ok(batch.refuse(BatchRefusal::Busy))
}

/// Takes the planned place for a block, as arriving. Returns `None` if the block or its new place
/// has changed, or its uses are unknown.
fn take_place(
    state: &mut ArenaState,
    options: CompactOptions,
    id: BlockId,
    made: Move,
) -> Option<TakenPlace> {
    if !may_move(state, options, id, made) {
        return None;
    }
    let (region, span) = (options.region, made.room());
    let is_raw = raw_at(state, region, made.from).is_some();
    let active = state.memory().active;
    let placed = state.region_mut(region).take_room(span)?;
    let missing = state.region(region).segment.missing(span).granules;
    let active = state.memory().active - active + state.bytes_of(missing);
    Some(TakenPlace { id, made, placed, active, is_raw, contents: None })
}

/// Returns `true` if no block moves now.
pub(super) fn is_busy(state: &ArenaState) -> bool {
    let is_moving = state.moves.moving.is_some() || state.moves.entering > 0;
    state.leases > 0 || is_moving || !state.sleep.is_awake()
}

/// Returns `true` if a block may still make its move.
fn may_move(state: &ArenaState, options: CompactOptions, id: BlockId, made: Move) -> bool {
    let region = state.region(options.region);
    // Checked first: if the block was freed, its memory may be gone too.
    if region.index.span_of(id) != Some(made.source()) {
        return false;
    }
    let fits = match hold(state, options, id, made.source()) {
        Hold::Moves { align, .. } => made.to.is_multiple_of(align),
        Hold::Stays | Hold::Wall => false,
    };
    // A block stays in its range.
    fits && region.index.end_at(made.from) == region.index.end_at(made.to)
        && is_known(state, options, made)
}

/// Returns `true` unless the block is raw and work of unknown streams may use it.
fn is_known(state: &ArenaState, options: CompactOptions, made: Move) -> bool {
    if !state.capabilities.asynchronous {
        return true;
    }
    let is_alive = |&stream: &StreamKey| state.streams.handle(stream).is_some();
    raw_at(state, options.region, made.from).is_none_or(|raw| {
        let streams = raw.users.streams();
        !streams.is_empty() && streams.iter().all(is_alive)
    })
}

impl Batch {
    /// Records that no block moves. Returns `false`.
    const fn refuse(&mut self, refusal: BatchRefusal) -> bool {
        self.outcome.refusal = Some(refusal);
        false
    }

    /// Returns a taken place, and counts its block as skipped.
    fn skip(&mut self, state: &mut ArenaState, nth: usize) {
        let taken = self.taken.remove(nth);
        state.cancel_placement(taken.placed, Dependencies::new());
        self.outcome.skipped += 1;
    }

    /// Marks the blocks that may still move as moving, and skips the others. Returns `false` if a
    /// lease was granted and dropped since the work was waited for.
    fn begin(&mut self, state: &mut ArenaState) -> bool {
        if !state.are_live_unused() {
            return false;
        }
        for nth in (0..self.taken.len()).rev() {
            let TakenPlace { id, made, .. } = self.taken[nth];
            if !may_move(state, self.options, id, made) {
                self.skip(state, nth);
            }
        }
        if !self.taken.is_empty() {
            state.moves.moving = Some(self.taken.iter().map(|taken| (taken.id, None)).collect());
        }
        true
    }
}

/// Copies the blocks of a batch, in order, until a copy fails, and waits for the end of the copies.
async fn copy_all(cx: &OpContext<'_>, batch: &mut Batch) {
    for taken in &mut batch.taken {
        let copied = copy_block(cx, batch.stream, batch.options.region, taken.made).await;
        taken.contents = Some(copied.as_ref().err().map_or(CopyOutcome::Whole, |failed| failed.1));
        if let Err((error, _)) = copied {
            batch.outcome.error = Some(error.into());
            break;
        }
    }
    let Some(stream) = batch.stream else { return };
    let mut waited = cx.synchronize(stream).await;
    if waited.is_err() {
        waited = cx.synchronize(stream).await; // if this succeeds, the copies are complete
    }
    let Err(error) = waited else { return };
    batch.is_unfinished = true;
    batch.outcome.error.get_or_insert_with(|| error.into());
    for taken in batch.taken.iter_mut().filter(|taken| taken.contents.is_some()) {
        let is_lost = taken.made.overlaps();
        taken.contents = Some(if is_lost { CopyOutcome::Lost } else { CopyOutcome::Undone });
    }
}

/// Copies a block, or queues its copies. If a copy fails, the pieces are copied back, in reverse
/// order.
///
/// # Errors
/// The driver's, and where the contents are then.
async fn copy_block(
    cx: &OpContext<'_>,
    stream: Option<StreamHandle>,
    region: Region,
    made: Move,
) -> Result<(), (DriverError, CopyOutcome)> {
    let mut done = Vec::new();
    for piece in made.pieces() {
        if let Err(error) = copy_piece(cx, stream, region, piece).await {
            for Move { from, to, size } in done.into_iter().rev() {
                let back = Move { from: to, to: from, size };
                if copy_piece(cx, stream, region, back).await.is_err() {
                    return Err((error, CopyOutcome::Lost));
                }
            }
            return Err((error, CopyOutcome::Undone));
        }
        done.push(piece);
    }
    Ok(())
}

/// Copies a piece of a block. Both places are committed: the block is live, and the move holds the
/// new place. While the batch moves no lease is granted, and so no slice and no new work of the
/// block. The ends of one piece do not overlap: [`Move::pieces`] cuts a slide accordingly, and its
/// copies run in the order of the stream.
async fn copy_piece(
    cx: &OpContext<'_>,
    stream: Option<StreamHandle>,
    region: Region,
    piece: Move,
) -> Result<(), DriverError> {
    let ([from, to], size) =
        (cx.with(|state| ends_of(state, region, piece)), ByteSize::new(piece.size));
    let Some(stream) = stream else { return cx.copy(from, to, size).await };
    // SAFETY: two committed ranges that the operation holds until the copy is complete, and that do
    // not overlap. Only earlier copies on the same stream, the arena's own, use them.
    cx.outside(|| unsafe { cx.driver.copy_async(from, to, size, stream) }).await
}

/// Records the end of a batch: the blocks that were copied are at their new places.
async fn end(cx: &OpContext<'_>, batch: &mut Batch) {
    let unfinished = cx.with(|state| {
        let stream = batch.stream.filter(|_| batch.is_unfinished);
        let stream = stream.map(|stream| state.streams.enter(stream));
        let uses = stream.map(|key| StreamUses::of([state.streams.use_now(key)]));
        let mut moving = state.moves.moving.take();
        for taken in std::mem::take(&mut batch.taken) {
            let freed = moving.as_mut().and_then(|moving| moving.remove(&taken.id)?);
            if taken.contents == Some(CopyOutcome::Whole) {
                batch.end_move(state, taken, freed.is_some());
            } else {
                let uses = uses.clone().filter(|_| taken.contents.is_some());
                batch.undo_move(state, taken, uses, freed.is_some());
            }
            if let Some((placed, streams)) = freed {
                state.release_after(placed, &streams);
            }
        }
        stream
    });
    if let Some(stream) = unfinished {
        leave_stream(cx, stream).await;
    }
}

impl Batch {
    /// Records that a block is at its new place.
    fn end_move(&mut self, state: &mut ArenaState, taken: TakenPlace, is_freed: bool) {
        let TakenPlace { id, made, placed, active, .. } = taken;
        let region = self.options.region;
        let [from, to] = ends_of(state, region, made);
        let active_before = state.memory().active;
        if state.region_mut(region).trade(id, placed) {
            for left in [placed.span, made.source()] {
                state.note_idle(region, left);
            }
        }
        self.outcome.idle += active_before.saturating_sub(state.memory().active);
        self.outcome.active += active;
        state.totals.moves_total += 1;
        state.totals.moved_bytes_total += made.size;
        state.events.push("move", |line| {
            line.number("size", made.size).address(from).number("to", to.get())
        });
        state.readdress(from, id);
        self.outcome.moved.push(MovedBlock { id, made, from, to, is_freed });
    }

    /// Records that a block stays at its old place, perhaps without its contents. With uses, copies
    /// from or to it may still run.
    fn undo_move(
        &mut self,
        state: &mut ArenaState,
        taken: TakenPlace,
        uses: Option<StreamUses>,
        is_freed: bool,
    ) {
        let TakenPlace { id, made, placed, contents, .. } = taken;
        let region = self.options.region;
        let is_copied = uses.is_some();
        let parts = uses.into_iter().map(|uses| (placed.span, uses)).collect();
        state.cancel_placement(placed, parts);
        if is_freed {
            return;
        }
        if is_copied {
            state.region_mut(region).pins.copied.push(id);
        }
        if contents == Some(CopyOutcome::Lost) {
            state.region_mut(region).lose(id);
            let size = ByteSize::new(made.size);
            self.outcome.error = Some(DeviceError::ContentsLost { region, size });
        }
    }
}

/// Returns the old and the new address of a block.
fn ends_of(state: &ArenaState, region: Region, made: Move) -> [DeviceAddress; 2] {
    let segment = &state.region(region).segment;
    [made.from, made.to].map(|offset| segment.address_of(offset))
}

// Finds the current place of a block, and waits for a move in progress.
//
// Invariant: a place that is returned under a lease stays until the lease ends.

/// Waits until this block does not move.
pub(crate) async fn wait_until_still(cx: &OpContext<'_>, id: BlockId) {
    cx.wait_while(|state| state.moves.is_moving(id)).await;
}

/// Returns the current place of a live block.
///
/// # Errors
/// `ContentsLost`.
pub(crate) async fn resolve(cx: &OpContext<'_>, placed: Placement) -> Result<Placement> {
    wait_until_still(cx, placed.id).await;
    cx.with(|state| {
        check_whole(state, placed)?;
        Ok(state.region(placed.id.region()).refreshed(placed))
    })
}

/// Checks that the contents of a block were not lost in a move.
///
/// # Errors
/// `ContentsLost`.
pub(crate) fn check_whole(state: &ArenaState, placed: Placement) -> Result<()> {
    let region = placed.id.region();
    if state.region(region).pins.is_lost(placed.id) {
        let size = ByteSize::new(placed.span.size);
        return Err(DeviceError::ContentsLost { region, size });
    }
    Ok(())
}

/// Pins a block after the end of a move in progress. A pinned block does not move.
pub(crate) async fn pin(cx: &OpContext<'_>, id: BlockId) {
    wait_until_still(cx, id).await;
    cx.with(|state| {
        state.region_mut(id.region()).pins.pin(id);
        let region = state.region(id.region());
        state.events.push("pin", |line| line.number("address", region.address_of(id)));
    });
}

// The layout of a region for the plan of a compaction.
//
// A plan is made from a copy of the layout, with the lock released. Then its moves are made, in
// batches.

/// The time for which the copies of a batch may block leases, unless one block needs more.
const BLOCKED_MAX: Duration = Duration::from_millis(1);

/// The layout of a region at one instant.
#[derive(Debug)]
pub(crate) struct Layout {
    parts: Vec<LayoutPart>,
    /// The segments, on drivers that allocate segments.
    segments: Option<Vec<Span>>,
    granule: u64,
}

impl Layout {
    /// Copies the layout of the region of a compaction: O(blocks).
    pub(crate) fn of(state: &ArenaState, options: CompactOptions) -> Self {
        let mut parts: Vec<_> = parts_of(state, options, End::Low).collect();
        // A requested free span is for a large block.
        if options.contiguous.is_none() {
            // The wall between the ranges is a block that does not move.
            let wall = state.region(options.region).index.wall();
            parts.extend(wall.map(|span| LayoutPart { span, hold: Some(Hold::Wall) }));
            parts.extend(parts_of(state, options, End::High));
        }
        Self::new(state, options.region, parts)
    }

    /// Copies the first blocks and free spans of one range of a region, at most this many; the last
    /// of them is fixed, since its successor is unknown.
    pub(crate) fn first(
        state: &ArenaState,
        options: CompactOptions,
        end: End,
        parts_max: usize,
    ) -> Self {
        let mut parts: Vec<_> = parts_of(state, options, end).take(parts_max).collect();
        if parts.len() == parts_max
            && let Some(last) = parts.last_mut()
        {
            last.hold = Some(Hold::Stays);
        }
        Self::new(state, options.region, parts)
    }

    fn new(state: &ArenaState, region: Region, parts: Vec<LayoutPart>) -> Self {
        let segments = state.region(region).segment.segments();
        Self { parts, segments, granule: state.bytes_of(1) }
    }

    /// Plans a compaction in at most this many passes.
    pub(crate) fn plan(&self, options: CompactOptions, passes: usize) -> CompactPlan {
        let target = match (options.contiguous, self.segments.as_deref()) {
            (Some(size), _) => CompactTarget::Contiguous(size.get()),
            (None, Some(segments)) => CompactTarget::Segments(segments),
            (None, None) => CompactTarget::Granules,
        };
        plan::plan(&self.parts, self.granule, target, options.budget.get(), passes)
    }
}

/// Returns the maximum bytes and copies of a batch: one block on a driver that copies before its
/// call returns, which a batch would not make faster.
pub(crate) fn batch_limit(state: &ArenaState) -> [u64; 2] {
    if state.capabilities.asynchronous { state.costs.copied_within(BLOCKED_MAX) } else { [0, 0] }
}

/// Returns the blocks and free spans of one range of a region in address order.
fn parts_of(
    state: &ArenaState,
    options: CompactOptions,
    end: End,
) -> impl Iterator<Item = LayoutPart> {
    let blocks = state.region(options.region).index.blocks_of(end);
    blocks.map(move |(span, id)| LayoutPart {
        span,
        hold: id.map(|id| hold(state, options, id, span)),
    })
}

/// Returns if and how a block may move.
pub(super) fn hold(state: &ArenaState, options: CompactOptions, id: BlockId, span: Span) -> Hold {
    let region = state.region(options.region);
    if region.is_held(span) {
        return Hold::Stays;
    }
    if !options.moves_raw && raw_at(state, options.region, span.offset).is_some() {
        return Hold::Stays;
    }
    region.pins.hold(id, id.end())
}

/// Returns the raw block at an offset of a region.
pub(super) fn raw_at(state: &ArenaState, region: Region, offset: u64) -> Option<&RawUse> {
    if state.raw.is_empty() {
        return None;
    }
    state.raw.get(&state.region(region).segment.address_of(offset))
}

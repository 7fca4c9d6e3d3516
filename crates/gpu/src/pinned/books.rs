//! The state under the lock of a pinned pool: its segments, and the counts.
//!
//! Plain values: it calls no driver and takes no lock. A segment is one piece of host memory with
//! its own block index. During a driver call for it, it is arriving or leaving: no block is placed
//! in it, and it counts as committed.
//!
//! Invariants: `committed = sum of all segments, arriving and leaving ones too`;
//! `live + pending + quarantined = sum of index.live`; a segment leaves only when wholly free;
//! `segments <= SEGMENTS_MAX`; `blocks that wait <= blocks`.

use super::Range;
use super::config::segment_for;
use super::segment::{PinnedSegment, with_slack};
use super::snapshot::PinnedFailures;
use crate::driver::HostMemory;
use crate::exec::handles::DriverEvent;
use crate::index::{BlockId, Request, Span};
use crate::types::error::{Bound, DeviceError};
use lowtide_core::bytes::ByteSize;

/// The most segments of one pool. An allocation looks at each of them at worst: some microseconds.
pub(super) const SEGMENTS_MAX: usize = 4096;

/// A live block: its segment and its id.
#[derive(Clone, Copy, Debug)]
pub(super) struct PinnedBlock {
    pub(super) slot: usize,
    pub(super) id: BlockId,
    pub(super) span: Span,
    /// The requested size.
    pub(super) requested: u64,
    pub(super) range: Range,
}

/// A block that was freed, and is used by a copy until an event is complete.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) placed: PinnedBlock,
    pub(super) event: DriverEvent,
}

/// Blocks that were freed and are not free: how many, and their bytes.
#[derive(Clone, Copy, Debug, Default)]
struct PendingCounts {
    blocks: u64,
    bytes: u64,
}

impl PendingCounts {
    const fn add(&mut self, placed: &PinnedBlock) {
        self.blocks += 1;
        self.bytes += placed.span.size;
    }

    const fn remove(&mut self, placed: &PinnedBlock) {
        self.blocks -= 1;
        self.bytes -= placed.span.size;
    }
}

#[derive(Debug)]
enum SegmentSlot {
    Vacant,
    Arriving {
        size: u64,
        /// Bytes that no thread waits for yet.
        spare: u64,
        ticket: Ticket,
    },
    Ready(PinnedSegment),
    Leaving(PinnedSegment),
}

/// The name of one arrival; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket(u64);

/// The way to make room for a block that no segment holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PinnedRoom {
    /// A segment of this size may be obtained.
    For(u64),
    /// This many idle bytes must be released first.
    After(u64),
    /// A release by another thread will make room.
    Coming,
    /// The limit forbids it.
    None,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PinnedTotals {
    pub(super) allocs: u64,
    pub(super) frees: u64,
    pub(super) failures: PinnedFailures,
    pub(super) segments_obtained: u64,
    pub(super) obtained_bytes: u64,
    pub(super) segments_given_back: u64,
    pub(super) given_back_bytes: u64,
    pub(super) fallbacks: u64,
}

/// The figures of a snapshot, in bytes except for the number of segments.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    pub(super) limit: u64,
    pub(super) requested: u64,
    pub(super) live: u64,
    pub(super) live_peak: u64,
    pub(super) pending: u64,
    pub(super) quarantined: u64,
    pub(super) idle: u64,
    pub(super) committed: u64,
    pub(super) committed_peak: u64,
    pub(super) page_locked: u64,
    pub(super) pageable: u64,
    pub(super) arriving: u64,
    pub(super) largest_free: u64,
    pub(super) metadata: u64,
    pub(super) segments: u64,
    pub(super) totals: PinnedTotals,
}

#[derive(Debug)]
pub(super) struct PinnedBooks {
    pub(super) limit: u64,
    pub(super) closed: bool,
    pub(super) totals: PinnedTotals,
    /// Pending blocks, except those whose events are being queried.
    pub(super) waiting: Vec<Waiting>,
    /// Freed, and used by a copy that is not known to be complete.
    pending: PendingCounts,
    /// Freed, and never to be used again.
    quarantined: PendingCounts,
    segment: u64,
    /// The kind of memory requested from the driver first.
    first: HostMemory,
    slots: Vec<SegmentSlot>,
    /// The value of [`PinnedSegment::room`] for each slot, 0 if not ready: contiguous, because each
    /// allocation searches them.
    rooms: Vec<u64>,
    requested: u64,
    live: u64,
    live_peak: u64,
    committed: u64,
    committed_peak: u64,
    tickets: u64,
}

impl PinnedBooks {
    pub(super) fn new(limit: u64, segment: u64, first: HostMemory) -> Self {
        Self {
            limit,
            closed: false,
            totals: PinnedTotals::default(),
            waiting: Vec::new(),
            pending: PendingCounts::default(),
            quarantined: PendingCounts::default(),
            segment,
            first,
            slots: Vec::new(),
            rooms: Vec::new(),
            requested: 0,
            live: 0,
            live_peak: 0,
            committed: 0,
            committed_peak: 0,
            tickets: 0,
        }
    }

    /// Places a block in a ready segment: of the preferred kind first, active before idle, then the
    /// lowest active one or the smallest idle one. So the other segments become empty, and can be
    /// released.
    pub(super) fn place(&mut self, request: Request) -> Option<PinnedBlock> {
        // A segment that refuses has no such room from then on: as many turns as segments at most.
        for _ in 0..=self.slots.len() {
            let slot = self.best_for(request)?;
            if let Some(placed) = self.place_in(slot, request) {
                return Some(placed);
            }
        }
        None
    }

    fn best_for(&self, request: Request) -> Option<usize> {
        let mut best: Option<(bool, bool, u64, usize)> = None;
        let mut candidate = |key| best = Some(best.map_or(key, |best| best.min(key)));
        let wanted = with_slack(request);
        let roomy = self.rooms.iter().enumerate().filter(|(_, room)| **room >= request.size);
        for (slot, room) in roomy {
            let Some(segment) = self.ready(slot) else { continue };
            let is_other = segment.range.memory() != self.first;
            if segment.is_idle() {
                // Its one free block begins at offset 0, which has every alignment.
                candidate((is_other, true, segment.size(), slot));
            } else if *room >= wanted {
                if !is_other {
                    return Some(slot);
                }
                candidate((is_other, false, 0, slot));
            }
        }
        best.map(|(.., slot)| slot)
    }

    fn place_in(&mut self, slot: usize, request: Request) -> Option<PinnedBlock> {
        let Some(SegmentSlot::Ready(segment)) = self.slots.get_mut(slot) else { return None };
        let taken = segment.take(request);
        let range = segment.range;
        self.rooms[slot] = segment.room();
        let (id, span) = taken?;
        self.totals.allocs += 1;
        self.requested += request.size;
        self.live += span.size;
        self.live_peak = self.live_peak.max(self.live);
        Some(PinnedBlock { slot, id, span, requested: request.size, range })
    }

    /// Makes a live block free.
    pub(super) fn release(&mut self, placed: &PinnedBlock) {
        self.count_free(placed);
        self.make_free(placed);
    }

    /// Makes a live block pending.
    pub(super) fn release_after(&mut self, waiting: Waiting) {
        self.count_free(&waiting.placed);
        self.pending.add(&waiting.placed);
        self.waiting.push(waiting);
    }

    /// Makes a live block quarantined.
    pub(super) fn quarantine(&mut self, placed: &PinnedBlock) {
        self.count_free(placed);
        self.quarantined.add(placed);
    }

    /// Makes a pending block free.
    pub(super) fn settle(&mut self, placed: &PinnedBlock) {
        self.pending.remove(placed);
        self.make_free(placed);
    }

    /// Makes a pending block quarantined.
    pub(super) const fn give_up(&mut self, placed: &PinnedBlock) {
        self.pending.remove(placed);
        self.quarantined.add(placed);
    }

    /// Counts that the caller has freed a block.
    const fn count_free(&mut self, placed: &PinnedBlock) {
        self.totals.frees += 1;
        self.requested -= placed.requested;
        self.live -= placed.span.size;
    }

    fn make_free(&mut self, placed: &PinnedBlock) {
        let Some(SegmentSlot::Ready(segment)) = self.slots.get_mut(placed.slot) else {
            debug_assert!(false, "a segment with a block is ready");
            return;
        };
        let released = segment.release(placed.id);
        debug_assert!(released.is_ok(), "a block is freed once");
        self.rooms[placed.slot] = segment.room();
    }

    /// Resizes a block in place; returns `true` if it fits. The rest of a smaller size is free.
    pub(super) fn resize(&mut self, placed: &mut PinnedBlock, requested: u64) -> bool {
        let Some(SegmentSlot::Ready(segment)) = self.slots.get_mut(placed.slot) else {
            debug_assert!(false, "a segment with a live block is ready");
            return false;
        };
        let Some(span) = segment.resize(placed.id, requested) else { return false };
        self.rooms[placed.slot] = segment.room();
        self.live = self.live - placed.span.size + span.size;
        self.live_peak = self.live_peak.max(self.live);
        self.requested = self.requested - placed.requested + requested;
        (placed.span, placed.requested) = (span, requested);
        true
    }

    /// Returns the arrival with room for the request, and reserves that room.
    pub(super) fn expect(&mut self, request: Request) -> Option<Ticket> {
        let wanted = request.size.checked_add(request.align)?;
        self.slots.iter_mut().find_map(|slot| match slot {
            SegmentSlot::Arriving { spare, ticket, .. } if *spare >= wanted => {
                *spare -= wanted;
                Some(*ticket)
            }
            _ => None,
        })
    }

    pub(super) fn is_arriving(&self, wanted: Ticket) -> bool {
        self.slots.iter().any(|slot| match slot {
            SegmentSlot::Arriving { ticket, .. } => *ticket == wanted,
            _ => false,
        })
    }

    /// Returns the way to make room for a block of `need` bytes, whole granules.
    pub(super) fn room(&self, need: u64) -> PinnedRoom {
        let headroom = self.limit.saturating_sub(self.committed);
        if need <= headroom {
            return PinnedRoom::For(segment_for(need, self.segment, self.limit, headroom));
        }
        if need > self.limit {
            return PinnedRoom::None;
        }
        // The missing bytes, and the excess over a lowered limit. Requests in progress by others
        // may fail and be of any size: a sum with them may overflow.
        let short = (need - headroom) + self.committed.saturating_sub(self.limit);
        if self.idle() >= short {
            PinnedRoom::After(short)
        } else if self.leaving() > 0 && self.idle() + self.leaving() >= short {
            PinnedRoom::Coming
        } else {
            PinnedRoom::None
        }
    }

    /// Records a segment that is being allocated for the request.
    pub(super) fn begin_arrive(
        &mut self,
        size: u64,
        request: Request,
    ) -> Result<usize, DeviceError> {
        let vacant = self.slots.iter().position(|slot| matches!(slot, SegmentSlot::Vacant));
        let slot = match vacant {
            Some(slot) => slot,
            None if self.slots.len() < SEGMENTS_MAX => {
                self.slots.push(SegmentSlot::Vacant);
                self.rooms.push(0);
                self.slots.len() - 1
            }
            None => {
                let requested = ByteSize::new(request.size);
                return Err(DeviceError::TooManySegments { requested, limit: SEGMENTS_MAX });
            }
        };
        self.tickets += 1;
        let spare = size.saturating_sub(request.size);
        self.slots[slot] = SegmentSlot::Arriving { size, spare, ticket: Ticket(self.tickets) };
        self.committed += size;
        Ok(slot)
    }

    /// Records the result: a segment, perhaps a smaller one, with the request's block in it; or
    /// none.
    pub(super) fn end_arrive(
        &mut self,
        slot: usize,
        range: Option<Range>,
        request: Request,
    ) -> Option<PinnedBlock> {
        let Some(&SegmentSlot::Arriving { size, .. }) = self.slots.get(slot) else {
            debug_assert!(false, "an arrival ends once");
            return None;
        };
        self.committed -= size;
        let Some(range) = range else {
            self.slots[slot] = SegmentSlot::Vacant;
            return None;
        };
        self.committed += range.size().get();
        self.totals.segments_obtained += 1;
        self.totals.obtained_bytes += range.size().get();
        self.slots[slot] = SegmentSlot::Ready(PinnedSegment::new(range));
        // A failed request does not count.
        self.committed_peak = self.committed_peak.max(self.committed - self.arriving());
        self.place_in(slot, request)
    }

    /// Marks wholly free segments as leaving, so that at most `keep` bytes stay idle. Keeps those
    /// that are used next: the lower slots, as far as they fit.
    pub(super) fn begin_leave(&mut self, keep: u64) -> Vec<(usize, Range)> {
        let mut kept = 0;
        let mut leaving = Vec::new();
        for (number, slot) in self.slots.iter_mut().enumerate() {
            if !matches!(slot, SegmentSlot::Ready(segment) if segment.is_idle()) {
                continue;
            }
            let SegmentSlot::Ready(segment) = std::mem::replace(slot, SegmentSlot::Vacant) else {
                continue;
            };
            if kept + segment.size() <= keep {
                kept += segment.size();
                *slot = SegmentSlot::Ready(segment);
            } else {
                leaving.push((number, segment.range));
                self.rooms[number] = 0;
                *slot = SegmentSlot::Leaving(segment);
            }
        }
        leaving
    }

    /// Records that a marked segment is freed, or that the driver kept it.
    pub(super) fn end_leave(&mut self, slot: usize, gone: bool) {
        let taken = std::mem::replace(&mut self.slots[slot], SegmentSlot::Vacant);
        let SegmentSlot::Leaving(segment) = taken else {
            debug_assert!(false, "only a marked segment leaves");
            self.slots[slot] = taken;
            return;
        };
        if gone {
            self.committed -= segment.size();
            self.totals.segments_given_back += 1;
            self.totals.given_back_bytes += segment.size();
        } else {
            self.rooms[slot] = segment.room();
            self.slots[slot] = SegmentSlot::Ready(segment);
        }
    }

    fn ready(&self, slot: usize) -> Option<&PinnedSegment> {
        match self.slots.get(slot) {
            Some(SegmentSlot::Ready(segment)) => Some(segment),
            _ => None,
        }
    }

    /// The segments in which blocks may be placed.
    fn segments(&self) -> impl Iterator<Item = (usize, &PinnedSegment)> {
        let numbered = self.slots.iter().enumerate();
        numbered.filter_map(|(number, slot)| match slot {
            SegmentSlot::Ready(segment) => Some((number, segment)),
            _ => None,
        })
    }

    /// Bytes of wholly free segments, less those that are leaving.
    pub(super) fn idle(&self) -> u64 {
        let idle = self.segments().filter(|(_, segment)| segment.is_idle());
        idle.map(|(_, segment)| segment.size()).sum()
    }

    /// Bytes of the segments that are leaving.
    pub(super) fn leaving(&self) -> u64 {
        let leaving = self.slots.iter().filter_map(|slot| match slot {
            SegmentSlot::Leaving(segment) => Some(segment.size()),
            _ => None,
        });
        leaving.sum()
    }

    /// Returns the bytes of segments being allocated, which may fail.
    fn arriving(&self) -> u64 {
        let arriving = self.slots.iter().filter_map(|slot| match slot {
            SegmentSlot::Arriving { size, .. } => Some(*size),
            _ => None,
        });
        arriving.sum()
    }

    /// Blocks that are live, and those whose memory is on its way.
    pub(super) fn blocks(&self) -> u64 {
        let arriving =
            self.slots.iter().filter(|slot| matches!(slot, SegmentSlot::Arriving { .. }));
        self.totals.allocs - self.totals.frees + arriving.count() as u64
    }

    /// Blocks that were freed and whose copies are not known to be complete.
    pub(super) const fn pending_blocks(&self) -> u64 {
        self.pending.blocks
    }

    pub(super) const fn live(&self) -> u64 {
        self.live
    }

    pub(super) const fn pending(&self) -> u64 {
        self.pending.bytes
    }

    pub(super) const fn quarantined(&self) -> u64 {
        self.quarantined.bytes
    }

    /// Bytes that are not free: the segments' blocks.
    const fn taken(&self) -> u64 {
        self.live + self.pending.bytes + self.quarantined.bytes
    }

    pub(super) const fn committed(&self) -> u64 {
        self.committed
    }

    /// All memory in which no block is, for the end of the pool.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range> {
        let idle = self.segments().filter(|(_, segment)| segment.is_idle());
        idle.map(|(_, segment)| segment.range)
    }

    /// The largest free block.
    pub(super) fn largest_free(&self) -> u64 {
        let largest = self.segments().map(|(_, segment)| segment.index.largest(|span| span.size));
        largest.max().unwrap_or(0)
    }

    /// The error of an allocation for which there is no memory, below a limit or in the host.
    pub(super) fn out_of_memory(&self, requested: u64, bound: Bound) -> DeviceError {
        DeviceError::OutOfMemory {
            requested: ByteSize::new(requested),
            live: ByteSize::new(self.live),
            active: ByteSize::new(self.committed - self.idle() - self.leaving()),
            committed: ByteSize::new(self.committed),
            limit: ByteSize::new(self.limit),
            bound,
            holes: ByteSize::new(self.committed - self.idle() - self.leaving() - self.taken()),
            largest_free: ByteSize::new(self.largest_free()),
            recoverable: ByteSize::ZERO, // nothing moves in a pool
        }
    }

    /// All figures. Looks for the largest free span: at worst at every free block.
    pub(super) fn counted(&self) -> Counted {
        let mut counted = Counted {
            limit: self.limit,
            requested: self.requested,
            live: self.live,
            live_peak: self.live_peak,
            pending: self.pending.bytes,
            quarantined: self.quarantined.bytes,
            idle: self.idle() + self.leaving(),
            committed: self.committed,
            committed_peak: self.committed_peak,
            largest_free: self.largest_free(),
            totals: self.totals,
            ..Counted::default()
        };
        for (_, segment) in self.segments() {
            counted.metadata += ByteSize::of(segment.index.metadata()).get();
        }
        for slot in &self.slots {
            match slot {
                SegmentSlot::Vacant => continue,
                SegmentSlot::Arriving { size, .. } => counted.arriving += size,
                SegmentSlot::Ready(segment) | SegmentSlot::Leaving(segment) => {
                    match segment.range.memory() {
                        HostMemory::PageLocked => counted.page_locked += segment.size(),
                        HostMemory::Pageable => counted.pageable += segment.size(),
                    }
                }
            }
            counted.segments += 1;
        }
        counted
    }

    /// Walks everything and checks the invariants.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub(super) fn validate(&self) {
        let (mut committed, mut taken, mut blocks) = (0, 0, 0);
        assert_eq!(self.rooms.len(), self.slots.len());
        for (slot, room) in self.slots.iter().zip(&self.rooms) {
            let ready = if let SegmentSlot::Ready(segment) = slot { segment.room() } else { 0 };
            assert_eq!(*room, ready, "room");
            match slot {
                SegmentSlot::Vacant => {}
                SegmentSlot::Arriving { size, spare, .. } => {
                    assert!(spare < size, "{spare} of {size}");
                    committed += size;
                }
                SegmentSlot::Ready(segment) | SegmentSlot::Leaving(segment) => {
                    segment.index.validate();
                    committed += segment.size();
                    taken += segment.index.live();
                    let is_leaving = matches!(slot, SegmentSlot::Leaving(_));
                    assert!(!is_leaving || segment.is_idle(), "a block is live in what leaves");
                    let all = segment.index.blocks();
                    blocks += all.filter(|(_, name)| name.is_some()).count() as u64;
                }
            }
        }
        assert_eq!((committed, taken), (self.committed, self.taken()), "committed, taken");
        let kept = self.pending.blocks + self.quarantined.blocks;
        assert_eq!(blocks, self.totals.allocs - self.totals.frees + kept, "blocks");
        assert!(self.waiting.len() as u64 <= self.pending.blocks, "waiting");
        assert!(self.slots.len() <= SEGMENTS_MAX);
    }
}

//! The accounting of moves, under the arena's lock.
//!
//! A place taken for a block to move to is arriving until the block is there; then the block's old
//! place is free.
//!
//! Invariants: those of the region; `moves` increases whenever a block of the region has moved, so
//! that a cached address is stale if the number differs.

use super::plan::{Hold, Part};
use super::step::Moving;
use super::{CompactOptions, Goal};
use crate::api::raw::RawUse;
use crate::driver::DeviceAddress;
use crate::index::{End, Span, StaleBlock};
use crate::observe::record::Operation;
use crate::observe::visualize::Act;
use crate::state::arena::ArenaState;
use crate::state::ranges::BlockName;
use crate::state::region::{Placement, Region, RegionState};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Clock;

impl RegionState {
    /// Returns the number of times that blocks of the region were moved, or lost.
    pub(crate) const fn moves(&self) -> u64 {
        self.moves
    }

    pub(super) fn span_of(&self, id: BlockName) -> Result<Span, StaleBlock> {
        self.index.span_of(id)
    }

    /// Returns the current place of a live block.
    pub(crate) fn refreshed(&self, placed: Placement) -> Placement {
        if placed.moves == self.moves {
            return placed;
        }
        let Ok(span) = self.index.span_of(placed.id) else {
            debug_assert!(false, "only its owner asks, and it is live");
            return placed;
        };
        let at = self.segment.address_of(ByteSize::new(span.offset));
        Placement { span, at, moves: self.moves, ..placed }
    }

    pub(super) fn is_lost(&self, id: BlockName) -> bool {
        self.pins.is_lost(id)
    }

    /// Records that the contents of a block are lost; its owner gets an error at the next use.
    pub(super) fn lose(&mut self, id: BlockName) {
        self.pins.lose(id);
        self.moves += 1;
    }

    /// Takes a free span for a block to move to, arriving.
    fn take_room(&mut self, span: Span) -> Option<Placement> {
        if !self.pending.is_clear(span) {
            return None;
        }
        let id = self.index.take_at(span)?;
        self.segment.touch(span);
        self.arriving += span.size;
        let at = self.segment.address_of(ByteSize::new(span.offset));
        Some(Placement { id, span, at, requested: 0, moves: self.moves })
    }

    /// Moves a block to the place taken for it and frees the old one; returns `true` if granules
    /// became idle.
    fn trade(&mut self, id: BlockName, room: Placement) -> bool {
        let old = self.index.span_of(id);
        let traded = self.index.exchange(id, room.id);
        debug_assert!(traded.is_ok(), "of one size, or neighbours: {traded:?}");
        let (Ok(old), Ok(new)) = (old, self.index.span_of(id)) else { return false };
        let left = self.index.release(room.id);
        debug_assert_eq!(left.map(|left| left.size), Ok(room.span.size));
        let idle = self.segment.idle();
        self.arriving -= room.span.size;
        self.segment.untouch(room.span);
        self.segment.untouch(old);
        self.segment.touch(new);
        self.moves += 1;
        self.segment.idle() > idle
    }
}

impl ArenaState {
    /// Blocks and free spans in address order, and the name of each block; the wall between the
    /// ranges as a block that stays.
    pub(super) fn parts(&self, options: CompactOptions) -> Vec<(Part, Option<BlockName>)> {
        let index = &self.region(options.region).index;
        let part = |(span, id): (Span, Option<BlockName>)| {
            (Part { span, hold: id.map(|id| self.hold(options, id, span)) }, id)
        };
        let mut parts: Vec<_> = index.blocks().map(part).collect();
        if let Some(wall) = index.wall() {
            let nth = parts.partition_point(|(part, _)| part.span.offset < wall.offset);
            match options.goal {
                Goal::Granules => {
                    parts.insert(nth, (Part { span: wall, hold: Some(Hold::Wall) }, None));
                }
                // The free span that is wanted is for a large block.
                Goal::Contiguous(_) => parts.truncate(nth),
            }
        }
        parts
    }

    /// Returns the first blocks and free spans of one range of a region in address order, at most
    /// this many; the last of them is fixed, since its successor is unknown.
    pub(crate) fn first_parts(
        &self,
        options: CompactOptions,
        end: End,
        parts_max: usize,
    ) -> Vec<Part> {
        let blocks = self.region(options.region).index.blocks_of(end).take(parts_max);
        let part = |(span, id): (Span, Option<BlockName>)| Part {
            span,
            hold: id.map(|id| self.hold(options, id, span)),
        };
        let mut parts: Vec<_> = blocks.map(part).collect();
        if parts.len() == parts_max
            && let Some(last) = parts.last_mut()
        {
            last.hold = Some(Hold::Stays);
        }
        parts
    }

    /// Returns the hold of a block.
    pub(super) fn hold(&self, options: CompactOptions, id: BlockName, span: Span) -> Hold {
        let region = self.region(options.region);
        if region.segment.is_held(span.offset) {
            return Hold::Stays;
        }
        if !self.raw.is_empty() && !options.moves_raw {
            let at = region.segment.address_of(ByteSize::new(span.offset));
            if self.raw.contains_key(&at) {
                return Hold::Stays;
            }
        }
        region.pins.hold(id, id.end())
    }

    /// Records the new address of a raw block.
    pub(super) fn readdress(&mut self, region: Region, from: DeviceAddress, id: BlockName) {
        let is_it = |raw: &RawUse| raw.kept.0 == region && raw.kept.1.id == id;
        if self.raw.get(&from).is_some_and(is_it)
            && let Some(mut raw) = self.raw.remove(&from)
        {
            raw.kept.1 = self.region(region).refreshed(raw.kept.1);
            self.raw.insert(raw.kept.1.at, raw);
        }
    }

    /// Takes a free span for a block to move to, arriving; with it, the bytes of granules that are
    /// active by it.
    pub(super) fn take_room(&mut self, region: Region, span: Span) -> Option<(Placement, u64)> {
        let active = self.active();
        let room = self.region_mut(region).take_room(span)?;
        let wanting = self.region(region).segment.wanting(span);
        let made_active = self.active() - active + self.bytes_of(wanting);
        Some((room, made_active))
    }

    /// Moves a block of this size to its place; returns the bytes of granules that are no longer
    /// active.
    pub(super) fn trade(
        &mut self,
        region: Region,
        (id, size): (BlockName, u64),
        room: Placement,
        clock: &dyn Clock,
    ) -> u64 {
        let active = self.active();
        self.totals.moves += 1;
        self.totals.moved_bytes += size;
        let from = self.address_of(region, id);
        let old = self.region(region).span_of(id);
        if self.region_mut(region).trade(id, room) {
            for left in [Some(room.span), old.ok()].into_iter().flatten() {
                self.note_idle(region, left, clock);
            }
        }
        let to = self.address_of(region, id);
        // The requested size is not known here: the events show the block's size.
        self.history.record(clock, Act::Free, from.get(), ByteSize::new(size));
        self.history.record(clock, Act::Alloc, to.get(), ByteSize::new(size));
        let ground = &self.region(region).segment;
        self.tell(clock, |numbers| {
            let id = numbers.of(region, id)?;
            let [from, to] = [from, to].map(|at| ground.offset_of(at).unwrap_or_default());
            Some(Operation::Move { id, region, from, to, size: ByteSize::new(size) })
        });
        active.saturating_sub(self.active())
    }

    fn address_of(&self, region: Region, id: BlockName) -> DeviceAddress {
        let region = self.region(region);
        let offset = region.span_of(id).map_or(0, |span| span.offset);
        region.segment.address_of(ByteSize::new(offset))
    }

    /// Leaves the freeing of a moving block to the mover; returns `true` if it moves.
    pub(crate) fn defer_release(&mut self, region: Region, placed: Placement) -> bool {
        match &mut self.moving {
            Some(Moving { region: its, id, freed }) if (*its, *id) == (region, placed.id) => {
                debug_assert!(freed.is_none(), "only its owner frees a block, once");
                *freed = Some(placed);
                true
            }
            _ => false,
        }
    }
}

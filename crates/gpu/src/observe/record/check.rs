//! Consistency checks over the lines of a recording: blocks are live when used, lanes exist, places
//! lie in their region, and time does not go back.
//!
//! This module does not check for overlapping places: a recording of several threads has them in
//! the order in which they were recorded, and a replay places blocks itself.
//!
//! Invariant: after a line is accepted, everything that it names is known.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::error::LogFault;
use super::fields::{BYTES_MAX, nanos};
use super::operation::{Asked, BlockKind, Header, Layout, Operation, Place, Resized};
use crate::state::region::Region;
use lowtide_core::bytes::ByteSize;

type Checked = Result<(), LogFault>;

/// The largest number of a block or lane. One more than any of them is still a number, so that no
/// number is used twice.
const NUMBER_MAX: u64 = u64::MAX - 1;

/// The state after the lines so far.
#[derive(Default)]
pub(super) struct Check {
    layout: Option<Layout>,
    last: Duration,
    /// Each block that was allocated, by its number.
    blocks: BTreeMap<u64, CheckedBlock>,
    last_block: u64,
    lanes: BTreeSet<u64>,
    last_lane: u64,
}

struct CheckedBlock {
    is_raw: bool,
    pins: u64,
    /// The line in which the block was freed.
    freed: Option<u64>,
}

impl Check {
    pub(super) fn new(header: &Header) -> Self {
        Self { layout: header.layout, ..Self::default() }
    }

    /// Accepts the time of a line.
    pub(super) fn time(&mut self, at: Duration) -> Checked {
        at_least("the time", nanos(at), nanos(self.last))?;
        self.last = at;
        Ok(())
    }

    /// Accepts an operation in this line.
    pub(super) fn operation(&mut self, line: u64, operation: &Operation) -> Checked {
        match operation {
            Operation::Alloc { id, asked, place } => self.alloc(*id, *asked, *place)?,
            Operation::Refuse { asked, .. } => self.asked(*asked)?,
            Operation::Free { id, .. } => self.live(*id)?.freed = Some(line),
            Operation::Resize { id, bytes, outcome } => {
                self.live(*id)?;
                if let Resized::InPlace(place) | Resized::Moved(place) = outcome {
                    self.place(*place, *bytes)?;
                }
            }
            Operation::Move { id, region, from, to, size } => {
                self.live(*id)?;
                for offset in [*from, *to] {
                    self.place(Place { region: *region, offset, size: *size }, ByteSize::ZERO)?;
                }
            }
            Operation::Use { id, lane } => {
                self.live(*id)?;
                self.lane(*lane)?;
            }
            Operation::Contents { id, .. } => {
                self.live(*id)?;
            }
            Operation::Pin { id } => {
                let block = self.live(*id)?;
                block.pins = block.pins.saturating_add(1);
            }
            Operation::Unpin { id } => {
                let block = self.live(*id)?;
                at_least("the pins of the block", block.pins, 1)?;
                block.pins -= 1;
            }
            Operation::Lane { lane, .. } => {
                at_most("lane=", *lane, NUMBER_MAX)?;
                at_least("lane=", *lane, self.last_lane.saturating_add(1))?;
                self.last_lane = *lane;
                self.lanes.insert(*lane);
            }
            Operation::LaneEnd { lane } => {
                self.lane(*lane)?;
                self.lanes.remove(lane);
            }
            Operation::EndRun { lane, .. } => self.lane(*lane)?,
            Operation::Reset { .. } => {
                for block in self.blocks.values_mut().filter(|block| block.is_raw) {
                    block.freed.get_or_insert(line);
                }
            }
            Operation::Limit { .. }
            | Operation::DecayTime { .. }
            | Operation::Decay { .. }
            | Operation::Trim { .. }
            | Operation::Shrink { .. }
            | Operation::Compact { .. }
            | Operation::Sleep { .. }
            | Operation::Wake { .. }
            | Operation::Close { .. } => {}
        }
        Ok(())
    }

    fn alloc(&mut self, id: u64, asked: Asked, place: Option<Place>) -> Checked {
        at_most("id=", id, NUMBER_MAX)?;
        at_least("id=", id, self.last_block.saturating_add(1))?;
        self.asked(asked)?;
        at_most("bytes=", asked.bytes.get(), BYTES_MAX)?;
        at_least("bytes=", asked.bytes.get(), 1)?;
        if let Some(place) = place {
            self.place(place, asked.bytes)?;
        }
        let is_raw = asked.kind == BlockKind::Raw;
        self.last_block = id;
        self.blocks.insert(id, CheckedBlock { is_raw, pins: 0, freed: None });
        Ok(())
    }

    fn asked(&self, asked: Asked) -> Checked {
        if let Some(layout) = self.layout {
            at_most("align=", asked.align.get(), layout.granularity.get())?;
        }
        asked.lane.map_or(Ok(()), |lane| self.lane(lane))
    }

    /// Accepts a place for this many bytes.
    fn place(&self, place: Place, bytes: ByteSize) -> Checked {
        at_least("size=", place.size.get(), bytes.get())?;
        let reserved = self.reserved(place.region);
        at_most("size=", place.size.get(), reserved)?;
        at_most("the offset of the place", place.offset.get(), reserved - place.size.get())
    }

    fn reserved(&self, region: Region) -> u64 {
        self.layout.map_or(BYTES_MAX, |layout| layout.reserved[region.number()].get())
    }

    fn live(&mut self, id: u64) -> Result<&mut CheckedBlock, LogFault> {
        match self.blocks.get_mut(&id) {
            Some(CheckedBlock { freed: Some(freed), .. }) => {
                Err(LogFault::FreedTwice { id, freed: *freed })
            }
            Some(block) => Ok(block),
            None => Err(LogFault::UnknownBlock { id }),
        }
    }

    fn lane(&self, lane: u64) -> Checked {
        if self.lanes.contains(&lane) { Ok(()) } else { Err(LogFault::UnknownLane { lane }) }
    }
}

fn at_least(field: &'static str, found: u64, least: u64) -> Checked {
    if found >= least { Ok(()) } else { Err(LogFault::TooSmall { field, least, found }) }
}

fn at_most(field: &'static str, found: u64, most: u64) -> Checked {
    let fault = || {
        let found = super::error::Found::new(&found.to_string());
        LogFault::Number { field, most, found }
    };
    if found <= most { Ok(()) } else { Err(fault()) }
}

//! One region of an arena: the part for one kind of lifetime, with its own addresses.
//!
//! It joins the block index (which offsets are free) with the segment (which granules have memory)
//! and calls neither driver nor clock. A block is arriving from when it is placed until the memory
//! behind it is there; only then is it live.
//!
//! Invariants: `requested <= live`; `live + arriving = index.live`; `live <= active`.

use super::compact::pins::Pins;
use super::driver::DeviceAddress;
use super::index::{ALIGN, BlockId, BlockIndex, End, Request, Span, StaleBlock};
use super::segment::Segment;
use super::snapshot::RegionSnapshot;
use crate::bytes::ByteSize;

/// The part of an arena for one kind of lifetime. Neither has a fixed share of the memory.
///
/// Blocks that stay, among those that come and go, would pin granules that could be given back.
/// ```
/// use std::sync::Arc;
/// use lowtide::clock::SystemClock;
/// use lowtide::device::{ArenaConfig, DeviceArena, HostDriver, Region};
///
/// let clock = Arc::new(SystemClock::new());
/// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
/// let weights = arena.alloc::<f32>(1 << 20, Region::Stable)?; // while the model is loaded
/// let activations = arena.alloc::<f32>(1 << 16, Region::Dynamic)?; // while a request runs
/// drop(activations);
/// arena.purge()?; // all that is left is committed for the weights
/// let snapshot = arena.snapshot();
/// assert!(snapshot.idle.is_zero() && snapshot.active == snapshot.committed);
/// # drop(weights);
/// # Ok::<(), lowtide::device::DeviceError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    /// For what stays: weights, tables.
    Stable,
    /// For what comes and goes: activations, caches, requests.
    Dynamic,
}

impl Region {
    /// Both, in the order of their numbers.
    pub const ALL: [Self; 2] = [Self::Stable, Self::Dynamic];

    /// Its place in [`Region::ALL`].
    #[must_use]
    pub const fn number(self) -> usize {
        match self {
            Self::Stable => 0,
            Self::Dynamic => 1,
        }
    }

    /// The name under which metrics and endpoints show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stable => "stable",
            Self::Dynamic => "dynamic",
        }
    }
}

/// A block that has been placed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    pub(super) id: BlockId,
    pub(super) span: Span,
    pub(super) at: DeviceAddress,
    /// What the caller asked for, in bytes.
    pub(super) requested: u64,
    /// How often blocks of the region had moved when `span` and `at` were true.
    pub(super) moves: u64,
}

/// Where blocks of a size are placed.
pub(super) const fn end_of(_size: u64) -> End {
    End::Low
}

/// The books of one region.
#[derive(Debug)]
pub(super) struct RegionBooks {
    pub(super) segment: Segment,
    pub(super) index: BlockIndex,
    requested: u64,
    live: u64,
    pub(super) arriving: u64,
    pub(super) pins: Pins,
    pub(super) moves: u64,
}

impl RegionBooks {
    pub(super) fn new(segment: Segment) -> Self {
        let index = BlockIndex::new(segment.reserved());
        let pins = Pins::default();
        Self { segment, index, requested: 0, live: 0, arriving: 0, pins, moves: 0 }
    }

    pub(super) const fn live(&self) -> u64 {
        self.live
    }

    /// Bytes of blocks that have a place and no memory yet.
    #[cfg(test)]
    pub(super) const fn arriving(&self) -> u64 {
        self.arriving
    }

    /// Finds a place, preferring those with the fewest granules to commit, and marks it arriving.
    pub(super) fn place(&mut self, request: Request) -> Option<Placed> {
        let segment = &self.segment;
        let (id, span) = self.index.take(request, |place| segment.cost(place))?;
        self.segment.touch(span);
        self.arriving += span.size;
        let at = self.segment.address_of(ByteSize::new(span.offset));
        if request.align > ALIGN {
            self.pins.align(id, request.align);
        }
        Some(Placed { id, span, at, requested: request.size, moves: self.moves })
    }

    /// Books that the memory behind an arriving block is there.
    pub(super) fn arrive(&mut self, placed: Placed) {
        debug_assert_eq!(self.segment.wanting(placed.span), 0, "a live block has memory");
        self.arriving -= placed.span.size;
        self.live += placed.span.size;
        self.requested += placed.requested;
    }

    /// Takes an arriving block back; says whether granules went idle by it.
    pub(super) fn withdraw(&mut self, placed: Placed) -> Result<bool, StaleBlock> {
        let span = self.index.release(placed.id)?;
        self.pins.forget(placed.id);
        self.arriving -= span.size;
        Ok(self.segment.untouch(span))
    }

    /// Frees a live block; says whether granules went idle by it.
    pub(super) fn release(&mut self, placed: Placed) -> Result<bool, StaleBlock> {
        let span = self.index.release(placed.id)?;
        self.pins.forget(placed.id);
        self.live -= span.size;
        self.requested -= placed.requested;
        Ok(self.segment.untouch(span))
    }

    /// The longest free span of addresses.
    pub(super) fn largest_span(&self) -> u64 {
        self.index.largest(|span| span.size)
    }

    /// The longest free span with memory behind it. At worst it looks at every free block and
    /// every granule.
    pub(super) fn largest_free(&self) -> u64 {
        self.index.largest(|span| self.segment.committed_run_max(span))
    }

    pub(super) fn snapshot(&self, region: Region) -> RegionSnapshot {
        let size = ByteSize::new;
        RegionSnapshot {
            region,
            requested: size(self.requested),
            live: size(self.live),
            active: size(self.segment.active()),
            idle: size(self.segment.idle()),
            committed: size(self.segment.backed()),
            reserved: size(self.segment.reserved()),
            pending: ByteSize::ZERO,
            holes: size(self.segment.active() - self.live),
            largest_free: size(self.largest_free()),
        }
    }

    /// Walks everything and checks the invariants.
    ///
    /// # Panics
    /// Where one is broken.
    pub(super) fn validate(&self) {
        self.index.validate();
        self.pins.validate(|id| self.index.span_of(id).is_ok());
        let live = self.index.blocks().filter(|(_, name)| name.is_some()).map(|(span, _)| span);
        self.segment.validate(live);
        assert!(self.requested <= self.live, "requested <= live");
        assert_eq!(self.live + self.arriving, self.index.live());
        assert!(self.live <= self.segment.active(), "live blocks lie on active granules");
    }
}

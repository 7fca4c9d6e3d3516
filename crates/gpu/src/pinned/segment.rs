//! One segment of a pool: a piece of host memory, and the index of its blocks.
//!
//! It remembers the size that it could not serve, so that larger requests skip it, and calls no
//! driver.
//!
//! Invariant: it has no free block of more than `room()` bytes.

use super::Range;
use crate::index::{ALIGN, BlockId, BlockIndex, Request, Span, StaleBlock};

/// One piece of host memory.
#[derive(Debug)]
pub(super) struct PinnedSegment {
    pub(super) range: Range,
    pub(super) index: BlockIndex,
    /// No block of this size was available here since the last release.
    refused_from: u64,
}

impl PinnedSegment {
    pub(super) fn new(range: Range) -> Self {
        let index = BlockIndex::new(range.size().get());
        Self { range, index, refused_from: u64::MAX }
    }

    pub(super) fn size(&self) -> u64 {
        self.range.size().get()
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.index.live() == 0
    }

    /// Returns the size of the largest free block; 0 if nothing is free.
    pub(super) fn room(&self) -> u64 {
        (self.size() - self.index.live()).min(self.refused_from - 1)
    }

    pub(super) fn release(&mut self, id: BlockId) -> Result<Span, StaleBlock> {
        let span = self.index.release(id)?;
        self.refused_from = u64::MAX;
        Ok(span)
    }

    /// Resizes a block in place, or changes nothing.
    pub(super) fn resize(&mut self, id: BlockId, size: u64) -> Option<Span> {
        let before = self.index.span_of(id).ok()?;
        let span = self.index.resize(id, size).ok()??;
        if span.size < before.size {
            self.refused_from = u64::MAX;
        }
        Some(span)
    }

    pub(super) fn take(&mut self, request: Request) -> Option<(BlockId, Span)> {
        let taken = self.index.take(request, |_| 0);
        if taken.is_none() {
            self.refused_from = self.refused_from.min(with_slack(request));
        }
        taken
    }
}

/// A free block of this size holds the request, wherever it begins.
pub(super) const fn with_slack(request: Request) -> u64 {
    let slack = request.align.saturating_sub(ALIGN);
    request.size.saturating_add(slack)
}

//! Changes of blocks in place: resize, placement at a given offset, exchange.
//!
//! This module does not move contents: the caller moves them before or after the call, and updates
//! users of the old offset.
//!
//! Invariants: those of the index; a failed call changes nothing.

use super::bins::Bin;
use super::records::{FREE, NONE};
use super::{ALIGN, BlockId, BlockIndex, ExchangeError, Span, StaleBlock};

impl BlockIndex {
    /// Makes exactly this span live, if all of it is free and its ends are multiples of [`ALIGN`].
    ///
    /// Not O(1): it searches the free blocks of the span's size or more, in the worst case all of
    /// them.
    ///
    /// ```
    /// use lowtide_gpu::index::{BlockIndex, Span};
    ///
    /// let mut index = BlockIndex::new(1 << 20);
    /// let span = Span { offset: 4096, size: 512 };
    /// let id = index.take_at(span).ok_or("not free")?;
    /// assert_eq!(index.span_of(id), Ok(span));
    /// assert_eq!(index.take_at(span), None);
    /// # Ok::<(), &str>(())
    /// ```
    pub fn take_at(&mut self, span: Span) -> Option<BlockId> {
        span.offset.checked_add(span.size)?;
        let aligned = span.offset.is_multiple_of(ALIGN) && span.size.is_multiple_of(ALIGN);
        if span.size == 0 || !aligned || !self.records.have_room() {
            return None;
        }
        let slot = self.free_around(span)?;
        let bin = Bin::of(self.records[slot].size);
        Some(self.carve(slot, bin, span))
    }

    /// Resizes a live block in place (0 counts as 1) and returns its new span; `None`, with nothing
    /// changed, if there is no room after it. The rest of a smaller size is free. O(1).
    ///
    /// # Errors
    /// [`StaleBlock`] if the block is not live.
    pub fn resize(&mut self, id: BlockId, size: u64) -> Result<Option<Span>, StaleBlock> {
        let span = self.span_of(id)?;
        let Some(size) = size.max(1).checked_next_multiple_of(ALIGN) else { return Ok(None) };
        let next = self.records[id.slot].next;
        let after = self.records[next];
        let beside = if next != NONE && after.is_free() { after.size } else { 0 };
        // The range is below 2^64, and both spans are in it.
        let rest = match (span.size + beside).checked_sub(size) {
            None => return Ok(None),
            Some(rest) if rest == beside => return Ok(Some(span)),
            Some(rest) => rest,
        };
        if beside == 0 && !self.records.have_room() {
            return Ok(None);
        }
        self.records[id.slot].size = size;
        self.live = self.live - span.size + size;
        let left = Span { offset: span.offset + size, size: rest };
        if beside == 0 {
            let slot = self.records.insert(left, FREE, id.slot, next);
            self.file(slot, left);
        } else if rest == 0 {
            self.unfile(next);
            self.records.remove(next);
        } else {
            self.reshape(next, Bin::of(beside), left);
        }
        Ok(Some(Span { size, ..span }))
    }

    /// Exchanges the places of two live blocks; each keeps its id and its size. O(1).
    ///
    /// Blocks of equal size can be anywhere; blocks of different sizes must be neighbours, and then
    /// span the same range in reverse order.
    ///
    /// ```
    /// use lowtide_gpu::index::{BlockIndex, End, Request};
    ///
    /// let mut index = BlockIndex::new(1 << 20);
    /// let mut take = |size| index.take(Request { size, align: 256, end: End::Low }, |_| 0);
    /// let ((a, _), (b, _)) = take(256).zip(take(1024)).ok_or("no room")?;
    /// index.exchange(a, b).map_err(|_| "neither neighbours nor equals")?;
    /// assert_eq!(index.span_of(b).map(|span| span.offset), Ok(0));
    /// assert_eq!(index.span_of(a).map(|span| span.offset), Ok(1024));
    /// # Ok::<(), &str>(())
    /// ```
    ///
    /// # Errors
    /// [`ExchangeError`]; nothing has changed then.
    pub fn exchange(&mut self, a: BlockId, b: BlockId) -> Result<(), ExchangeError> {
        let (left, right) = (self.span_of(a)?, self.span_of(b)?);
        if a == b {
            return Ok(());
        }
        if self.records[a.slot].next == b.slot {
            self.records.swap_neighbours(a.slot, b.slot);
        } else if self.records[b.slot].next == a.slot {
            self.records.swap_neighbours(b.slot, a.slot);
        } else if left.size == right.size {
            self.records.swap_equals(a.slot, b.slot);
        } else {
            return Err(ExchangeError::Unlike { left, right });
        }
        Ok(())
    }

    /// Returns the free block that holds all of a span.
    fn free_around(&self, span: Span) -> Option<u32> {
        let mut bin = self.bins.at_or_above(Bin::of(span.size));
        while let Some(at) = bin {
            let around = self.filed(at).find(|&slot| {
                let free = self.records[slot].span();
                free.offset <= span.offset && span.end() <= free.end()
            });
            if around.is_some() {
                return around;
            }
            bin = self.bins.above(at);
        }
        None
    }
}

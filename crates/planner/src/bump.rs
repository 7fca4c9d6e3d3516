//! Offsets in the order of requests, never freed: for weights, which live as long as the model.
//!
//! [`Bump`] fills one block upward; [`packed`] fills segments of a maximum size one after the
//! other, as GGML does with the tensors of a context. Neither considers lifetimes.
//!
//! Invariant: allocations do not overlap, and none reaches beyond its block or segment.

use super::error::PlanError;
use super::planned::PlannedPlace;
use lowtide_core::bytes::ByteSize;

/// A block in which offsets are allocated upward.
///
/// ```
/// use lowtide_planner::ByteSize;
/// use lowtide_planner::Bump;
///
/// let mut block = Bump::new(ByteSize::new(64));
/// assert_eq!(block.take(ByteSize::new(10), 8)?, 0);
/// assert_eq!(block.take(ByteSize::new(40), 8)?, 16);
/// let full = block.take(ByteSize::new(16), 8).unwrap_err();
/// assert_eq!(full.to_string(), "no room for 16 B: 8 B of 64 B are left");
/// # Ok::<(), lowtide_planner::PlanError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bump {
    taken: u64,
    capacity: u64,
}

impl Bump {
    /// Creates an empty block of this size.
    #[must_use]
    pub const fn new(capacity: ByteSize) -> Self {
        Self { taken: 0, capacity: capacity.get() }
    }

    /// Allocates `size` bytes and returns their offset, a multiple of `align`. An alignment of 0
    /// counts as 1. O(1).
    ///
    /// # Errors
    /// [`PlanError::BumpFull`]; the block is unchanged.
    pub fn take(&mut self, size: ByteSize, align: u64) -> Result<u64, PlanError> {
        let align = align.max(1);
        let start = self.taken.checked_next_multiple_of(align);
        let start = start.unwrap_or(u64::MAX).min(self.capacity);
        let left = self.capacity - start;
        if size.get() > left || !start.is_multiple_of(align) {
            let (left, capacity) = (ByteSize::new(left), ByteSize::new(self.capacity));
            return Err(PlanError::BumpFull { requested: size, left, capacity });
        }
        self.taken = start + size.get();
        Ok(start)
    }

    /// Returns the bytes allocated so far, including alignment padding.
    #[must_use]
    pub const fn taken(&self) -> ByteSize {
        ByteSize::new(self.taken)
    }
}

/// Places sizes one after the other in segments of at most `limit`; a larger size gets a segment of
/// its own. Returns the places and the sizes of the segments. O(n). An alignment of 0 counts as 1.
#[must_use]
pub fn packed(
    sizes: &[ByteSize],
    limit: ByteSize,
    align: u64,
) -> (Vec<PlannedPlace>, Vec<ByteSize>) {
    let (mut places, mut segments) = (Vec::with_capacity(sizes.len()), Vec::new());
    let mut open = Bump::new(ByteSize::ZERO);
    for &size in sizes {
        let offset = open.take(size, align).unwrap_or_else(|_| {
            segments.push(ByteSize::ZERO);
            open = Bump { taken: size.get(), capacity: limit.max(size).get() };
            0
        });
        if segments.is_empty() {
            segments.push(ByteSize::ZERO); // nothing but empty ones so far
        }
        let segment = u32::try_from(segments.len() - 1).unwrap_or(u32::MAX);
        if let Some(last) = segments.last_mut() {
            *last = open.taken();
        }
        places.push(PlannedPlace { segment, offset });
    }
    (places, segments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_fill_segments_and_larger_ones_get_their_own() {
        let sizes = [6, 4, 8, 40, 3, 0].map(ByteSize::new);
        let (places, segments) = packed(&sizes, ByteSize::new(16), 4);
        let places: Vec<_> = places.iter().map(|place| (place.segment, place.offset)).collect();
        assert_eq!(places, [(0, 0), (0, 8), (1, 0), (2, 0), (3, 0), (3, 4)]);
        assert_eq!(segments, [12, 8, 40, 4].map(ByteSize::new));
    }

    #[test]
    fn what_does_not_fit_is_an_error_and_leaves_the_block_as_it_was() {
        let mut block = Bump::new(ByteSize::new(10));
        block.take(ByteSize::new(3), 1).expect("it fits");
        let before = block;
        for (size, align) in [(8, 1), (7, 4), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(block.take(ByteSize::new(size), align).is_err(), "{size} at {align}");
            assert_eq!(block, before);
        }
        assert_eq!(block.take(ByteSize::new(7), 1), Ok(3));
    }
}

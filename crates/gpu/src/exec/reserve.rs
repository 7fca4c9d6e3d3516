//! Reserves the address space of an arena's regions at open, and releases it at the end. Reserves
//! as much as requested or a fair share of the available address space; on drivers with segments,
//! only offsets.
//!
//! This module commits nothing and has no accounting.
//!
//! Invariant: the returned ranges are reserved, and no others stay reserved, unless the driver
//! refuses to release address space.
#![expect(unsafe_code, reason = "memory and addresses are given back to the driver")]

use crate::driver::{DeviceAddress, Driver, DriverError};
use crate::state::backing::Backing;
use crate::state::region_index;
use crate::state::segment::Segment;
use crate::state::segment_list::SegmentList;
use lowtide_core::bytes::ByteSize;

/// The maximum address space to request: below `isize::MAX`, so that every block can be a slice,
/// and a multiple of every granule.
const RESERVE_MAX: ByteSize = ByteSize::new(1 << 62);

/// The extent of the offsets of pieces, as a multiple of the largest block. Walls between pieces,
/// and gaps that are too small, waste only offsets.
const ROOM_FOR_WALLS: u64 = 4;

/// Creates the backing of both regions.
pub(crate) fn backings(
    driver: &dyn Driver,
    granule: ByteSize,
    wanted: ByteSize,
) -> Result<[Backing; 2], DriverError> {
    if !driver.capabilities().virtual_memory {
        return Ok([(); 2].map(|()| offsets(granule, wanted)));
    }
    let stable = Backing::Reserved(reserve_region(driver, granule, wanted)?);
    match reserve_region(driver, granule, wanted) {
        Ok(dynamic) => Ok([stable, Backing::Reserved(dynamic)]),
        Err(error) => {
            // SAFETY: reserved above from this driver, and nothing of it is handed out.
            unsafe { give_up(driver, &stable) };
            Err(error)
        }
    }
}

/// Releases a region's memory and addresses to the driver. If the driver refuses, addresses stay
/// reserved, or a segment stays allocated.
///
/// # Safety
/// The backing is of this driver, and is not used afterwards, nor by another thread meanwhile. No
/// block is live in it, and all work with its memory is complete.
pub(crate) unsafe fn give_up(driver: &dyn Driver, ground: &Backing) {
    match ground {
        Backing::Reserved(segment) => {
            let runs = segment.backed_runs().into_iter();
            let runs = runs.flat_map(|run| segment.runs_of(run.range(), usize::MAX, usize::MAX));
            let bare = runs.fold(true, |bare, run| {
                let (span, handle) = (segment.span_of(run), segment.handle_size(run));
                let at = segment.address_of(span.offset);
                // SAFETY: backed granules of the reservation, which no call is in progress for and
                // nothing uses (contract of this function).
                bare & unsafe { driver.decommit(at, ByteSize::new(span.size), handle) }.is_ok()
            });
            if bare {
                let size = ByteSize::new(segment.reserved());
                // SAFETY: the whole reservation, in which nothing is committed any more.
                let _ = unsafe { driver.unreserve(segment.base(), size) };
            }
        }
        Backing::SegmentList(pieces) => {
            let gone = pieces.there().filter(|piece| {
                let size = ByteSize::new(piece.span.size);
                // SAFETY: a whole segment that is there, and that nothing uses (contract of this
                // function).
                unsafe { driver.segment_destroy(piece.at, size) }.is_ok()
            });
            if gone.count() > 0 {
                let _ = driver.trim();
            }
        }
    }
}

/// Creates the offsets for the pieces of a region, whose largest piece is `wanted`.
fn offsets(granule: ByteSize, wanted: ByteSize) -> Backing {
    let largest = wanted.min(RESERVE_MAX).max(granule).next_multiple_of(granule);
    let largest = largest.unwrap_or(RESERVE_MAX).min(RESERVE_MAX).get();
    let extent = region_index::span_for(largest.saturating_mul(ROOM_FOR_WALLS), granule.get());
    let extent = extent.min(RESERVE_MAX.get());
    Backing::SegmentList(SegmentList::new(extent, largest, granule))
}

/// Reserves address space for a region: the requested size or, if the driver refuses that, an
/// eighth of the size that it accepts, and so a quarter for both regions. In that case addresses
/// are scarce (`ulimit -v`), and the heap, stacks and other arenas need some too.
fn reserve_region(
    driver: &dyn Driver,
    granularity: ByteSize,
    wanted: ByteSize,
) -> Result<Segment, DriverError> {
    let whole = wanted.min(RESERVE_MAX).max(granularity).next_multiple_of(granularity);
    // Plus the share of small blocks.
    let whole = region_index::span_for(whole.unwrap_or(RESERVE_MAX).get(), granularity.get());
    let whole = ByteSize::new(whole).min(RESERVE_MAX);
    let (base, size) = reserve_or_halve(driver, granularity, whole)?;
    let part = ByteSize::new(size.get() / 8).next_multiple_of(granularity);
    let part = part.unwrap_or(granularity).max(granularity);
    if size == whole || size <= part {
        return Ok(Segment::new(base, size, granularity));
    }
    // SAFETY: the whole reservation just made: nothing is committed in it, and nobody knows it.
    if unsafe { driver.unreserve(base, size) }.is_err() {
        // If the range cannot be released, it is kept.
        return Ok(Segment::new(base, size, granularity));
    }
    let (base, size) = reserve_or_halve(driver, granularity, part)?;
    Ok(Segment::new(base, size, granularity))
}

/// Reserves this size, halved until the driver accepts it. Returns the accepted size.
fn reserve_or_halve(
    driver: &dyn Driver,
    granularity: ByteSize,
    mut size: ByteSize,
) -> Result<(DeviceAddress, ByteSize), DriverError> {
    // At most 62 halvings, from 2^62 bytes down to one granule.
    loop {
        match driver.reserve(size) {
            Ok(base) => return Ok((base, size)),
            Err(error) if size <= granularity => return Err(error),
            Err(_) => {
                let half = ByteSize::new(size.get() / 2).next_multiple_of(granularity);
                size = half.unwrap_or(granularity);
            }
        }
    }
}

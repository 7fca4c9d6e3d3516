//! Reserves the address space of an arena's regions at open, and releases it at the end. Reserves
//! as much as requested or a share of the available address space, the same for both regions; on
//! drivers with segments, only offsets.
//!
//! This module commits nothing and has no accounting.
//!
//! Invariant: the returned ranges are reserved, and no others stay reserved, unless the driver
//! refuses to release address space.
#![expect(unsafe_code, reason = "memory and addresses are given back to the driver")]

use crate::driver::{DeviceAddress, Driver, DriverError};
use crate::state::Segment;
use crate::state::region::span_for;
use lowtide_core::bytes::ByteSize;

/// The address space of a region if neither the device's memory nor a limit is known. 512 GiB: more
/// than the memory of any current GPU (288 GiB), and 1/256 of the 128 TiB that an `x86_64` process
/// has.
const RESERVE: ByteSize = ByteSize::gib(512);

/// The maximum address space to request: below `isize::MAX`, so that every block can be a slice,
/// and a multiple of every granule.
const RESERVE_MAX: ByteSize = ByteSize::new(1 << 62);

/// The extent of the offsets of pieces, as a multiple of the largest block. Walls between pieces,
/// and gaps that are too small, waste only offsets.
const ROOM_FOR_WALLS: u64 = 4;

/// The least address space of a region that is derived: for an arena with a small limit, which may
/// rise.
const DERIVED_MIN: ByteSize = ByteSize::gib(4);

/// Returns the address space to request for a region, which is derived if `asked` is the maximum.
pub(crate) fn wanted(asked: ByteSize, limit: ByteSize, device: Option<ByteSize>) -> ByteSize {
    if asked != ByteSize::MAX {
        return asked;
    }
    // Free addresses between blocks do not fit every block, so there are more than of memory.
    let by_limit = limit.checked_mul(3).unwrap_or(ByteSize::MAX);
    let by_device = device.and_then(|device| device.checked_mul(2)).unwrap_or(RESERVE);
    by_limit.min(by_device).max(DERIVED_MIN)
}

/// Creates the segments of both regions, with the address space of each and the memory of the
/// device, if it is known.
pub(crate) fn segments(
    driver: &dyn Driver,
    granule: ByteSize,
    (wanted, device): (ByteSize, Option<ByteSize>),
) -> Result<[Segment; 2], DriverError> {
    if !driver.capabilities().virtual_memory {
        return Ok([(); 2].map(|()| offsets(granule, wanted)));
    }
    let (whole, device) = (extent(wanted, granule), device.map(|device| extent(device, granule)));
    let mut size = whole;
    loop {
        // If addresses are scarce (`ulimit -v`, a Jetson), others need some too: the heap and the
        // stacks, if it is not known that a device has fewer.
        let spare = if device.is_some() { size.get() / 8 } else { size.get().saturating_mul(6) };
        let is_scarce = size != whole && size > granule;
        let spare = ByteSize::new(spare).min(RESERVE_MAX).next_multiple_of(granule);
        match reserve_both(driver, size, spare.filter(|_| is_scarce)) {
            Ok(bases) => return Ok(bases.map(|base| Segment::new(base, size, granule))),
            Err(error) if size <= granule => return Err(error),
            Err(_) => {
                let less = match device {
                    Some(device) if size > device => device.max(ByteSize::new(size.get() / 2)),
                    Some(_) => ByteSize::new(size.get() / 4 * 3),
                    None => ByteSize::new(size.get() / 2),
                };
                // At most 148 steps, from 2^62 bytes down to one granule.
                let granules = less.get() / granule.get();
                size = ByteSize::new(granules * granule.get()).max(granule);
            }
        }
    }
}

/// Releases a region's memory and addresses to the driver. If the driver refuses, addresses stay
/// reserved, or a segment stays allocated.
///
/// # Safety
/// The segment is of this driver, and is not used afterwards, nor by another thread meanwhile. No
/// block is live in it, and all work with its memory is complete.
pub(crate) unsafe fn give_up(driver: &dyn Driver, segment: &Segment) {
    if let Some(pieces) = &segment.pieces {
        let gone = pieces.there().filter(|(span, piece)| {
            // SAFETY: a whole segment that is there, and that nothing uses (contract of this
            // function).
            unsafe { driver.segment_destroy(piece.at, ByteSize::new(span.size)) }.is_ok()
        });
        if gone.count() > 0 {
            let _ = driver.trim();
        }
        return;
    }
    let runs = segment.backed_runs().into_iter();
    let runs = runs.flat_map(|run| segment.runs_of(run.range(), usize::MAX, usize::MAX));
    let bare = runs.fold(true, |bare, run| {
        let ((at, size), handle) = (segment.place_of(run), segment.handle_size(run));
        // SAFETY: backed granules of the reservation, which no call is in progress for and nothing
        // uses (contract of this function).
        bare & unsafe { driver.decommit(at, size, handle) }.is_ok()
    });
    if bare {
        // SAFETY: the whole reservation, in which nothing is committed any more.
        let _ = unsafe { driver.unreserve(segment.base, ByteSize::new(segment.extent)) };
    }
}

/// Creates the offsets for the pieces of a region, whose largest piece is `wanted`.
fn offsets(granule: ByteSize, wanted: ByteSize) -> Segment {
    let largest = wanted.min(RESERVE_MAX).max(granule).next_multiple_of(granule);
    let largest = largest.unwrap_or(RESERVE_MAX).min(RESERVE_MAX).get();
    let extent = span_for(largest.saturating_mul(ROOM_FOR_WALLS), granule.get());
    Segment::of_pieces(ByteSize::new(extent).min(RESERVE_MAX), largest, granule)
}

/// Returns the extent of a region in which blocks of a granule or more can have `size` bytes.
fn extent(size: ByteSize, granule: ByteSize) -> ByteSize {
    let whole = size.min(RESERVE_MAX).max(granule).next_multiple_of(granule);
    // Plus the share of small blocks.
    let whole = span_for(whole.unwrap_or(RESERVE_MAX).get(), granule.get());
    ByteSize::new(whole).min(RESERVE_MAX)
}

/// Reserves the ranges of both regions, if this leaves a range of the size of `spare`.
fn reserve_both(
    driver: &dyn Driver,
    size: ByteSize,
    spare: Option<ByteSize>,
) -> Result<[DeviceAddress; 2], DriverError> {
    // SAFETY: the caller passes whole reservations made here: nothing is committed in them, and
    // nobody knows them. If the driver keeps one, its addresses are lost until the process ends.
    let release = |at, size| drop(unsafe { driver.unreserve(at, size) });
    let stable = driver.reserve(size)?;
    let dynamic = driver.reserve(size).inspect_err(|_| release(stable, size))?;
    if let Some(spare) = spare {
        match driver.reserve(spare) {
            Ok(at) => release(at, spare),
            Err(error) => {
                release(stable, size);
                release(dynamic, size);
                return Err(error);
            }
        }
    }
    Ok([stable, dynamic])
}

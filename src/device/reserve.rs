//! Reserves the address space of an arena: as much as is wanted, or a fair part of what there is.
//!
//! It commits nothing and keeps no books.
//!
//! Invariant: what is returned is reserved, and nothing else stays so, but where the driver refuses
//! to take address space back.

use super::driver::sealed::Key;
use super::driver::{DeviceAddress, Driver, DriverError};
use super::ranges;
use super::segment::Segment;
use crate::bytes::ByteSize;

/// The most address space that is asked for: below `isize::MAX`, so that every block can be a
/// slice, and a multiple of every granule.
const RESERVE_MAX: ByteSize = ByteSize::new(1 << 62);

/// Reserves address space for a region: what is wanted or, where the driver refuses that, an eighth
/// of what it accepts, a quarter for both regions. Addresses are short then (`ulimit -v`), and the
/// heap, stacks and other arenas need some too.
pub(super) fn reserve_region(
    driver: &dyn Driver,
    granularity: ByteSize,
    wanted: ByteSize,
) -> Result<Segment, DriverError> {
    let whole = wanted.min(RESERVE_MAX).max(granularity).next_multiple_of(granularity);
    // And what small blocks get beside it.
    let whole = ranges::span_for(whole.unwrap_or(RESERVE_MAX).get(), granularity.get());
    let whole = ByteSize::new(whole).min(RESERVE_MAX);
    let (base, size) = reserve_or_halve(driver, granularity, whole)?;
    let part = ByteSize::new(size.get() / 8).next_multiple_of(granularity);
    let part = part.unwrap_or(granularity).max(granularity);
    // Where it cannot be given back it is kept.
    if size == whole || size <= part || driver.unreserve(base, size, Key::new()).is_err() {
        return Ok(Segment::new(base, size, granularity));
    }
    let (base, size) = reserve_or_halve(driver, granularity, part)?;
    Ok(Segment::new(base, size, granularity))
}

/// Reserves this much, halved until the driver accepts it; says how much.
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

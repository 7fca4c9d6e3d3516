//! What the C functions do with blocks: allocate, free, record a use, look up, shrink, count.
//!
//! It takes checked values and Rust types; `api`, `torch` and `onnxruntime` convert those of C.
//!
//! Invariant: a block is freed on the device that it was allocated on, and no other block with it.
#![expect(unsafe_code, reason = "only the caller knows that a stream or a graph exists")]

use lowtide_gpu::{ByteSize, DeviceArena, DeviceError, RawBlock, Region};
use lowtide_gpu_driver::{DeviceAddress, StreamHandle};

use crate::api::LOWTIDE_ALL_DEVICES as ALL_DEVICES;
use crate::failure::{Failure, Outcome, failed_total};
use crate::options::{Statistics, invalid};
use crate::registry::{self, StreamRef};

/// The alignment of blocks for which none is asked: that of `cudaMalloc`, and the unit to which an
/// arena rounds.
pub(crate) const ALIGN: usize = 256;

/// Allocates a block for the next work of a stream. A size of 0 takes no block and returns `None`,
/// as `cudaMalloc`.
#[inline(always)]
pub(crate) fn alloc(
    handle: u64,
    device: i32,
    size: usize,
    align: usize,
    stream: StreamRef,
) -> Outcome<Option<DeviceAddress>> {
    let device = registry::device(handle, device)?;
    if size == 0 {
        return Ok(None);
    }
    let align = if align == 0 { ALIGN } else { align };
    let (size, align) = (ByteSize::of(size), ByteSize::of(align));
    let block = match stream.handle() {
        // SAFETY: the caller of the C function vouches for the stream.
        Some(stream) => unsafe { device.arena.alloc_raw_on(stream, size, align, Region::Dynamic) },
        None => device.arena.alloc_raw(size, align, Region::Dynamic),
    };
    Ok(Some(block?.at))
}

/// Frees a block after its last use on a stream.
#[inline(always)]
pub(crate) fn free(handle: u64, device: i32, at: DeviceAddress, stream: StreamRef) -> Outcome<()> {
    let device = registry::device_of(handle, device, at)?;
    if let Some(stream) = stream.handle() {
        // SAFETY: the caller of the C function vouches for the stream.
        unsafe { device.arena.free_on(at, stream) }?;
    } else {
        device.arena.record_unknown_use(at)?;
        device.arena.free(at)?;
    }
    Ok(())
}

/// Records that a stream also uses a block.
pub(crate) fn record_use(
    handle: u64,
    device: i32,
    at: DeviceAddress,
    stream: StreamRef,
) -> Outcome<()> {
    let device = registry::device_of(handle, device, at)?;
    match stream.handle() {
        // SAFETY: the caller of the C function vouches for the stream.
        Some(stream) => unsafe { device.arena.record_use_on(at, stream) }?,
        None => device.arena.record_unknown_use(at)?,
    }
    Ok(())
}

/// Ends a stream that is about to be destroyed.
pub(crate) fn end_stream(handle: u64, device: i32, stream: StreamRef) -> Outcome<()> {
    if let (Some(device), Some(stream)) = (registry::opened(handle, device)?, stream.handle()) {
        // SAFETY: the caller of the C function vouches for the stream.
        unsafe { device.arena.end_stream(stream) }?;
    }
    Ok(())
}

/// Records that a stream captures a graph from now on, or no more; opens the device.
pub(crate) fn set_capturing(
    handle: u64,
    device: i32,
    stream: StreamRef,
    captures: bool,
) -> Outcome<()> {
    let device = registry::device(handle, device)?;
    let named = stream.handle().filter(|&stream| stream != StreamHandle::LEGACY);
    let stream = named.ok_or_else(|| invalid("stream", 0, "one that can capture"))?;
    Ok(device.arena.set_capturing(stream, captures)?)
}

/// Frees what graphs of the named devices have captured; returns its bytes.
pub(crate) fn release_captured(handle: u64, device: i32) -> Outcome<ByteSize> {
    let mut released = ByteSize::ZERO;
    for arena in named(handle, device)? {
        // SAFETY: the caller of the C function vouches for the graphs.
        released = released.saturating_add(unsafe { arena.release_captured() }?);
    }
    Ok(released)
}

/// Returns the block that contains an address, and its device.
pub(crate) fn find(handle: u64, at: DeviceAddress) -> Outcome<(i32, RawBlock)> {
    for (device, arena) in registry::devices(handle)? {
        match arena.raw_block_containing(at) {
            Ok(block) => return Ok((device, block)),
            Err(DeviceError::ForeignAddress { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Failure::NoSuchAddress { at }.into())
}

/// Releases idle memory of the named devices until at most `keep` bytes are committed on each;
/// returns the bytes released.
pub(crate) fn shrink(handle: u64, device: i32, keep: ByteSize) -> Outcome<ByteSize> {
    let mut released = ByteSize::ZERO;
    for arena in named(handle, device)? {
        match arena.wait_for_pending() {
            // What is idle already needs no wait.
            Ok(()) | Err(DeviceError::Capturing { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        released = released.saturating_add(arena.trim(keep)?);
    }
    Ok(released)
}

/// Returns the figures of the named devices.
pub(crate) fn statistics(handle: u64, device: i32) -> Outcome<Statistics> {
    let mut sum = Statistics { failed_calls_total: failed_total(), ..Statistics::default() };
    for arena in named(handle, device)? {
        let figures = arena.snapshot();
        for (to, more) in [
            (&mut sum.requested_bytes, figures.requested.get()),
            (&mut sum.live_bytes, figures.live.get()),
            (&mut sum.pending_bytes, figures.pending.get()),
            (&mut sum.idle_bytes, figures.idle.get()),
            (&mut sum.committed_bytes, figures.committed.get()),
            (&mut sum.committed_peak_bytes, figures.committed_peak.get()),
            (&mut sum.limit_bytes, figures.limit.get()),
            (&mut sum.live_blocks, figures.allocs_total.saturating_sub(figures.frees_total)),
            (&mut sum.allocs_total, figures.allocs_total),
            (&mut sum.frees_total, figures.frees_total),
            (&mut sum.alloc_failures_total, figures.alloc_failures().map(|of| of.1).iter().sum()),
        ] {
            *to = to.saturating_add(more);
        }
    }
    Ok(sum)
}

/// Sets the limit of committed memory of a device; opens the device.
pub(crate) fn set_limit(handle: u64, device: i32, limit: ByteSize) -> Outcome<()> {
    registry::device(handle, device)?.arena.set_limit(limit);
    Ok(())
}

/// Sets the limit to a share of the device's memory; opens the device.
pub(crate) fn set_fraction(handle: u64, device: i32, fraction: f64) -> Outcome<()> {
    if !(0.0..=1.0).contains(&fraction) {
        // Shown in thousandths; a value that is no number as 0.
        #[expect(clippy::cast_possible_truncation, reason = "saturates")]
        let thousandths = (fraction * 1000.0) as i64;
        return Err(invalid("fraction in thousandths", thousandths, "0 to 1000"));
    }
    let device = registry::device(handle, device)?;
    let memory = device.driver.device_memory()?;
    device.arena.set_limit(memory.map_or(ByteSize::MAX, |memory| memory.total.scaled(fraction)));
    Ok(())
}

/// Returns the arenas of a device, or of all devices for -1. A device that is not open has none.
fn named(handle: u64, device: i32) -> Outcome<Vec<DeviceArena>> {
    if device != ALL_DEVICES {
        registry::number_of(device)?;
    }
    let all = registry::devices(handle)?.into_iter();
    let named = all.filter(|&(number, _)| device == ALL_DEVICES || number == device);
    Ok(named.map(|(_, arena)| arena).collect())
}

//! Writes a map as PyTorch's snapshot: a pickle of dictionaries that its viewers read.
//!
//! The viewers' expectations beyond PyTorch's documentation, from `MemoryViz.js` and
//! `_memory_viz.py` (2.15): a segment has its `device`; blocks tile their segment, because their
//! addresses are summed up; a block that waits for the device is `active_pending_free`; a free that
//! is requested and completed at one address is one event. An integer has at most 8 bytes: longer
//! ones, as `u64` is written, become another type in the browser, and drawing fails.
//!
//! Invariants: the sizes of a segment's blocks sum up to its own; every event lies in a current or
//! former segment.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;
use serde_pickle::SerOptions;

use super::{ArenaMap, BlockSpan, BlockState, MapEvent, SegmentMap, bounds};
use lowtide_core::bytes::ByteSize;

#[derive(Serialize)]
struct Snapshot<'a> {
    segments: Vec<VizSegment<'a>>,
    device_traces: Vec<Vec<TraceEntry<'a>>>,
}

#[derive(Serialize)]
struct VizSegment<'a> {
    device: u32,
    address: i64,
    total_size: i64,
    allocated_size: i64,
    active_size: i64,
    requested_size: i64,
    stream: u32,
    segment_type: &'static str,
    segment_pool_id: (u32, u32),
    is_expandable: bool,
    frames: Vec<Frame<'a>>,
    blocks: Vec<VizBlock<'a>>,
}

#[derive(Serialize)]
struct VizBlock<'a> {
    address: i64,
    size: i64,
    requested_size: i64,
    state: &'static str,
    frames: Vec<Frame<'a>>,
}

#[derive(Serialize)]
struct TraceEntry<'a> {
    action: &'static str,
    addr: i64,
    size: i64,
    stream: u32,
    time_us: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_free: Option<i64>,
    frames: Vec<Frame<'a>>,
}

/// A line of a stack. Here it names the place of a block.
#[derive(Clone, Copy, Serialize)]
struct Frame<'a> {
    filename: &'a str,
    line: u32,
    name: &'a str,
}

pub(super) fn write(map: &ArenaMap, mut to: impl Write) -> io::Result<()> {
    let segments = map.segments.iter().flat_map(|segment| segments(map, segment)).collect();
    // The viewers find a device's events by its number, so the lists before it are empty.
    let mut device_traces: Vec<Vec<TraceEntry<'_>>> = Vec::new();
    device_traces.resize_with(usize::try_from(map.device).unwrap_or(0), Vec::new);
    device_traces.push(map.events.iter().flat_map(|event| entries(map, event)).collect());
    let snapshot = Snapshot { segments, device_traces };
    serde_pickle::to_writer(&mut to, &snapshot, SerOptions::new()).map_err(|error| match error {
        serde_pickle::Error::Io(error) => error,
        error => io::Error::other(error),
    })
}

/// Returns a segment for each stretch of committed memory.
fn segments<'a>(
    map: &'a ArenaMap,
    segment: &'a SegmentMap,
) -> impl Iterator<Item = VizSegment<'a>> {
    let frame = Frame { filename: &map.name, line: 0, name: &segment.region };
    let mut blocks = segment.blocks.as_slice();
    segment.stretches().into_iter().map(move |(start, end)| {
        let within = |block: &BlockSpan| bounds(block.offset, block.size).1 <= end;
        let (here, rest) = blocks.split_at(blocks.partition_point(within));
        blocks = rest;
        let sum = |size: fn(&BlockSpan) -> ByteSize, pending: bool| {
            let counted = here.iter().filter(|block| pending || block.state == BlockState::Live);
            limited(counted.map(size).sum::<ByteSize>().get())
        };
        VizSegment {
            device: map.device,
            address: address(segment, start),
            total_size: limited(end - start),
            allocated_size: sum(|block| block.size, false),
            active_size: sum(|block| block.size, true),
            requested_size: sum(|block| block.requested, false),
            stream: 0,
            segment_type: "large",
            segment_pool_id: (0, 0),
            is_expandable: true,
            frames: vec![frame],
            blocks: tiles(segment, here, (start, end), frame),
        }
    })
}

/// Returns the blocks of a stretch, and the free ones between them.
fn tiles<'a>(
    segment: &SegmentMap,
    blocks: &[BlockSpan],
    (start, end): (u64, u64),
    frame: Frame<'a>,
) -> Vec<VizBlock<'a>> {
    let mut tiles = Vec::new();
    let mut at = start;
    let free = |at: u64, size: u64| VizBlock {
        address: address(segment, at),
        size: limited(size),
        requested_size: 0,
        state: "inactive",
        frames: Vec::new(),
    };
    for block in blocks {
        let (block_start, block_end) = bounds(block.offset, block.size);
        if block_start > at {
            tiles.push(free(at, block_start - at));
        }
        at = block_end;
        tiles.push(VizBlock {
            address: address(segment, block_start),
            size: limited(block.size.get()),
            requested_size: limited(block.requested.get()),
            state: match block.state {
                BlockState::Live => "active_allocated",
                BlockState::Pending => "active_pending_free",
            },
            frames: vec![frame],
        });
    }
    if at < end {
        tiles.push(free(at, end - at));
    }
    tiles
}

/// Returns an event's entries: one, or two for a free.
fn entries<'a>(map: &'a ArenaMap, event: &MapEvent) -> impl Iterator<Item = TraceEntry<'a>> {
    let mut device_free = None;
    let (actions, address, size): (&[&'static str], _, _) = match *event {
        MapEvent::Alloc { address, size, .. } => (&["alloc"], address, size),
        MapEvent::Free { address, size, .. } => {
            (&["free_requested", "free_completed"], address, size)
        }
        MapEvent::Commit { address, size, .. } => (&["segment_map"], address, size),
        MapEvent::Decommit { address, size, .. } => (&["segment_unmap"], address, size),
        MapEvent::OutOfMemory { requested, headroom, .. } => {
            device_free = Some(limited(headroom.get()));
            (&["oom"], 0, requested)
        }
    };
    let time_us = micros(map.since_epoch.saturating_sub(map.taken - event.at()));
    let (addr, size) = (limited(address), limited(size.get()));
    let region = region_at(map, address);
    actions.iter().map(move |&action| TraceEntry {
        action,
        addr,
        size,
        stream: 0,
        time_us,
        device_free,
        frames: vec![Frame { filename: &map.name, line: 0, name: region }],
    })
}

/// Returns the name of the region that contains an address.
fn region_at(map: &ArenaMap, address: u64) -> &str {
    let holds = |segment: &&SegmentMap| {
        address.checked_sub(segment.base).is_some_and(|offset| offset < segment.size.get())
    };
    map.segments.iter().find(holds).map_or("", |segment| &segment.region)
}

fn address(segment: &SegmentMap, offset: u64) -> i64 {
    limited(segment.base.saturating_add(offset))
}

fn micros(time: Duration) -> i64 {
    limited(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

/// Returns the number as a signed one, at most the maximum.
fn limited(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

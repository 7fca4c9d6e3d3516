//! The parts of the endpoints about device arenas: states, figures, history, maps, commands.
//!
//! Invariant: the cells of all maps are at most [`CELLS_MAX`], but four for each arena.

use std::time::Duration;

use serde_json::{Value, json};

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::{ArenaSnapshot, RegionOccupancy};
use crate::memory::{DeviceSnapshot, DeviceStatus, Memory, MemorySnapshot};
use crate::metrics::record as read;
use crate::sync::{Mutex, lock};

#[cfg(feature = "cuda")]
use super::answer::seconds;
use super::answer::{budget, figures};

/// The maximum number of cells of all arenas: as many as a wide screen shows; each is at most some
/// 60 bytes.
const CELLS_MAX: usize = 2048;

/// The maximum number of blocks that maps may walk each second. A walk holds the arena's lock, for
/// 11 ns per block (measured by `benches/render`): at most a thousandth or two of each second,
/// since a map is kept for half of the time after which clients should request another.
const BLOCKS_EACH_SECOND: u64 = 100_000;

/// Adds backend and state of each arena to the answer of `/readyz`.
pub(super) fn with_states(snapshot: &MemorySnapshot, mut body: Value) -> Value {
    let each = |of: fn(&ArenaSnapshot) -> &'static str| -> Value {
        let arenas = snapshot.devices.arenas.iter();
        arenas.map(|arena| (arena.name.clone(), json!(of(arena)))).collect()
    };
    body["device"] = each(|arena| arena.backend.name());
    body["arenas"] = each(|arena| arena.state.name());
    body
}

/// Adds the figures of arenas and device to those of `/memory`.
pub(super) fn with_figures(snapshot: &MemorySnapshot, mut document: Value) -> Value {
    let devices = &snapshot.devices;
    let mut arenas = devices.placed().map(arena);
    document["device"] = json!({
        "unified": snapshot.unified,
        "budget": budget(&snapshot.device),
        "memory": devices.memory.as_ref().map(memory),
        "rollback_failures": devices.rollback_failures_total,
        "devices": devices.devices.iter().map(device).collect::<Vec<_>>(),
        "arenas": arenas.by_ref().take(devices.arenas.len()).collect::<Vec<_>>(),
        "draining": arenas.collect::<Vec<_>>(),
    });
    document
}

fn memory(device: &DeviceSnapshot) -> Value {
    let others = json!({ "short": device.is_short });
    figures("lowtide_device_", |each| read::device_memory(device, each), others)
}

fn device(device: &DeviceStatus) -> Value {
    json!({
        "name": device.name,
        "number": device.number,
        "ordinal": device.ordinal,
        "backend": device.backend.name(),
        "lost": device.lost,
        "budget": device.budget.as_ref().map(budget),
        "memory": device.memory.as_ref().map(memory),
        "rollback_failures": device.rollback_failures_total,
    })
}

fn arena((device, arena): (&DeviceStatus, &ArenaSnapshot)) -> Value {
    let others = json!({
        "name": arena.name,
        "device": device.name,
        "backend": arena.backend.name(),
        "state": arena.state.name(),
        "active_bytes": arena.active.get(),
        "reserved_bytes": arena.reserved.get(),
        "thread_cache_allocs": arena.thread_cache_allocs_total,
        "failures": arena.alloc_failures().into_iter().collect::<Value>(),
        "trimmed_bytes": arena.trimmed_bytes_total,
        "shrunk_bytes": arena.shrunk_bytes_total,
    });
    figures("lowtide_device_", |each| read::arena(arena, each), others)
}

/// Returns the processes on each device.
#[cfg(feature = "cuda")]
pub(super) fn processes(memory: &Memory) -> Value {
    let bytes = |size: Option<ByteSize>| size.map(ByteSize::get);
    let process = |process: &crate::device::driver::cuda::ProcessUsage| {
        json!({
            "pid": process.pid,
            "name": process.name,
            "used_bytes": bytes(process.used),
            "is_this_process": process.is_this_process,
        })
    };
    let list = memory.devices().processes();
    let devices = list.iter().map(|of| {
        json!({
            "device": of.device,
            "number": of.number,
            "age_seconds": seconds(of.age),
            "error": of.error,
            "used_bytes": bytes(of.used),
            "arena_bytes": of.arenas.get(),
            "context_overhead_bytes": bytes(of.context_overhead),
            "own_unmanaged_bytes": bytes(of.own_unmanaged),
            "other_process_bytes": bytes(of.other_processes),
            "unattributed_bytes": bytes(of.unattributed),
            "processes": of.processes.iter().map(process).collect::<Vec<_>>(),
            "omitted": of.omitted,
        })
    });
    devices.collect()
}

/// The last maps. Requests in between get the same maps, so the number of clients does not increase
/// the time under the arenas' locks.
#[derive(Debug, Default)]
pub(super) struct Maps(Mutex<Option<CachedMaps>>);

/// Maps of arenas of these names, and the end of their validity.
#[derive(Debug)]
struct CachedMaps {
    names: Vec<String>,
    until: Moment,
    maps: Value,
}

impl Maps {
    /// Returns the maps of all arenas.
    pub(super) fn of(&self, memory: &Memory) -> Value {
        let (now, names) = (memory.clock().now(), memory.arena_names());
        // In a forked child there are none, and a thread of the parent may hold the lock.
        if names.is_empty() {
            return json!([]);
        }
        let mut kept = lock(&self.0);
        if let Some(kept) = kept.as_ref().filter(|kept| now < kept.until && kept.names == names) {
            return kept.maps.clone();
        }
        let occupancy = memory.devices().occupancy(CELLS_MAX);
        let maps: Value = occupancy.iter().map(map).collect();
        let most = occupancy.iter().map(|(_, occupancy)| again(blocks(occupancy))).max();
        // A client that waits as advised gets new maps.
        let until = now + Duration::from_secs(most.unwrap_or(1)).mul_f64(0.5);
        *kept = Some(CachedMaps { names, until, maps: maps.clone() });
        maps
    }
}

fn blocks(occupancy: &[RegionOccupancy]) -> u64 {
    occupancy.iter().map(|region| region.blocks).sum()
}

fn map((name, occupancy): &(String, Vec<RegionOccupancy>)) -> Value {
    json!({
        "arena": name,
        "again_in_seconds": again(blocks(occupancy)),
        "granule_bytes": occupancy.first().map_or(0, |region| region.granularity.get()),
        "regions": occupancy.iter().map(region).collect::<Vec<_>>(),
    })
}

/// Returns the seconds after which a client should request another map of an arena with this number
/// of blocks.
fn again(blocks: u64) -> u64 {
    blocks.div_ceil(BLOCKS_EACH_SECOND).max(1)
}

/// Returns runs of equal cells: the first, the count, and the live, pending, active and idle bytes
/// of each.
fn region(region: &RegionOccupancy) -> Value {
    let mut runs: Vec<[u64; 6]> = Vec::new();
    for &(nth, sizes) in &region.cells {
        let [live, pending, active, idle] = sizes.map(ByteSize::get);
        match runs.last_mut() {
            Some([first, count, rest @ ..])
                if nth == *first + *count && *rest == [live, pending, active, idle] =>
            {
                *count += 1;
            }
            _ => runs.push([nth, 1, live, pending, active, idle]),
        }
    }
    json!({
        "region": region.region,
        "blocks": region.blocks,
        "cell_bytes": region.cell.get(),
        "cells": runs,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_of_an_arena_with_many_blocks_is_asked_for_less_often() {
        for (blocks, seconds) in [
            (0, 1),
            (1, 1),
            (100_000, 1),
            (100_001, 2),
            (1_000_000, 10),
            (u64::MAX, u64::MAX / 100_000 + 1),
        ] {
            assert_eq!(again(blocks), seconds, "{blocks} blocks");
        }
    }

    /// The bug: `/memory?with=map` of a forked child waited for ever.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_forked_child_has_no_maps_whoever_held_them_at_the_fork() {
        let memory = Memory::builder().detached().start().expect("it needs nothing");
        let maps = Maps::default();
        let held = lock(&maps.0);
        assert!(crate::memory::holds_in_child(|| maps.of(&memory) == json!([])));
        drop(held);
    }
}

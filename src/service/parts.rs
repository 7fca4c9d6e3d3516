//! The optional parts of `/memory`: maps of arenas, history, events, admin tasks.
//!
//! Each part is bounded, whatever the arenas contain; the figures themselves are in `endpoints`.
//!
//! Invariant: the cells of all arenas are at most [`CELLS_MAX`], but four for each arena.

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::{ArenaOccupancy, OccupancyCell, RegionOccupancy};
use crate::memory::{AdminTask, Event, HistorySample, Memory};
use crate::sync::{Mutex, lock};

use super::asked::QueryError;

/// The maximum number of cells of all arenas: as many as a wide screen shows; each is at most some
/// 60 bytes.
const CELLS_MAX: usize = 2048;

/// The maximum number of blocks that maps may walk each second. A walk holds the arena's lock, for
/// 11 ns per block (measured by `benches/render`): at most a thousandth or two of each second,
/// since a map is kept for half of the time after which clients should request another.
const BLOCKS_EACH_SECOND: u64 = 100_000;

/// An optional part, by its name in the query and in the JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Map,
    MetricsHistory,
    Events,
    AdminTasks,
}

impl Part {
    const ALL: [Self; 4] = [Self::Map, Self::MetricsHistory, Self::Events, Self::AdminTasks];

    const fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::MetricsHistory => "history",
            Self::Events => "events",
            Self::AdminTasks => "admin_tasks",
        }
    }

    /// Parses names separated by commas.
    pub(super) fn read(text: &str) -> Result<Vec<Self>, QueryError> {
        let part = |name: &str| {
            let known = Self::ALL.into_iter().find(|part| part.name() == name);
            known.ok_or_else(|| QueryError::Value {
                name: "with",
                value: name.to_owned(),
                expected: Self::ALL.map(Self::name).join(", "),
            })
        };
        let mut parts = Vec::new();
        for name in text.split(',').filter(|name| !name.is_empty()) {
            let part = part(name)?;
            if parts.contains(&part) {
                return Err(QueryError::Twice { name: part.name() });
            }
            parts.push(part);
        }
        Ok(parts)
    }

    /// Adds the part to the document. `needs_token` is for admin tasks: `None` if they are
    /// disabled.
    pub(super) fn add(
        self,
        memory: &Memory,
        maps: &Maps,
        needs_token: Option<bool>,
        to: &mut Map<String, Value>,
    ) {
        let value = match self {
            Self::Map => maps.of(memory),
            Self::MetricsHistory => history(&memory.history()),
            Self::Events => memory.events().iter().map(event).collect(),
            Self::AdminTasks => needs_token.map_or(Value::Null, |needs_token| {
                let list: Value = memory.admin_tasks().iter().map(admin_task).collect();
                json!({ "needs_token": needs_token, "list": list })
            }),
        };
        to.insert(self.name().to_owned(), value);
    }
}

/// The last maps. Requests in between get the same maps, so the number of clients does not increase
/// the time under the arenas' locks.
#[derive(Debug, Default)]
pub(super) struct Maps(Mutex<Option<Kept>>);

/// Maps of arenas of these names, and the end of their validity.
#[derive(Debug)]
struct Kept {
    names: Vec<String>,
    until: Moment,
    maps: Value,
}

impl Maps {
    fn of(&self, memory: &Memory) -> Value {
        let (now, names) = (memory.now(), memory.arena_names());
        let mut kept = lock(&self.0);
        if let Some(kept) = kept.as_ref().filter(|kept| now < kept.until && kept.names == names) {
            return kept.maps.clone();
        }
        let occupancy = memory.occupancy(CELLS_MAX);
        let maps: Value = occupancy.iter().map(arena).collect();
        let most = occupancy.iter().map(|(_, occupancy)| again(blocks(occupancy))).max();
        // A client that waits as advised gets new maps.
        let until = now + Duration::from_secs(most.unwrap_or(1)).mul_f64(0.5);
        *kept = Some(Kept { names, until, maps: maps.clone() });
        maps
    }
}

fn blocks(occupancy: &ArenaOccupancy) -> u64 {
    occupancy.regions.iter().map(|region| region.blocks).sum()
}

fn arena((name, occupancy): &(String, ArenaOccupancy)) -> Value {
    json!({
        "arena": name,
        "again_in_seconds": again(blocks(occupancy)),
        "granule_bytes": occupancy.granularity.get(),
        "regions": occupancy.regions.iter().map(region).collect::<Vec<_>>(),
    })
}

/// Returns the seconds after which a client should request another map of an arena with this number
/// of blocks.
const fn again(blocks: u64) -> u64 {
    let seconds = blocks.div_ceil(BLOCKS_EACH_SECOND);
    if seconds == 0 { 1 } else { seconds }
}

/// Returns runs of equal cells: the first, the count, and the live, pending, active and idle bytes
/// of each.
fn region(region: &RegionOccupancy) -> Value {
    let mut runs: Vec<(u64, OccupancyCell)> = Vec::new();
    for &cell in &region.occupancy {
        match runs.last_mut() {
            Some((count, last)) if continues(last, *count, &cell) => *count += 1,
            _ => runs.push((1, cell)),
        }
    }
    let run = |(count, cell): &(u64, OccupancyCell)| {
        let bytes = [cell.live, cell.pending, cell.active, cell.idle].map(ByteSize::get);
        json!([cell.nth, count, bytes[0], bytes[1], bytes[2], bytes[3]])
    };
    json!({
        "region": region.region,
        "blocks": region.blocks,
        "cell_bytes": region.cell.get(),
        "cells": runs.iter().map(run).collect::<Vec<_>>(),
    })
}

/// Returns `true` if a cell follows a run and equals its cells.
fn continues(run: &OccupancyCell, count: u64, cell: &OccupancyCell) -> bool {
    let parts = |cell: &OccupancyCell| [cell.live, cell.pending, cell.active, cell.idle];
    cell.nth == run.nth + count && parts(cell) == parts(run)
}

/// Returns the history by column, so that names appear once.
fn history(points: &[HistorySample]) -> Value {
    let bytes = |of: fn(&HistorySample) -> ByteSize| -> Vec<u64> {
        points.iter().map(|point| of(point).get()).collect()
    };
    json!({
        "at_seconds": points.iter().map(|point| seconds(point.at)).collect::<Vec<_>>(),
        "physical_bytes": bytes(|point| point.physical),
        "heap_live_bytes": bytes(|point| point.heap_live),
        "heap_retained_bytes": bytes(|point| point.heap_retained),
        "device_live_bytes": bytes(|point| point.device_live),
        "device_retained_bytes": bytes(|point| point.device_retained),
    })
}

fn event(event: &Event) -> Value {
    json!({
        "at_seconds": seconds(event.at),
        "kind": event.kind,
        "about": event.about,
        "text": event.text,
        "times": event.times,
    })
}

fn admin_task(admin_task: &AdminTask) -> Value {
    json!({
        "id": admin_task.id,
        "command": admin_task.command.name(),
        "subject": admin_task.command.subject(),
        "requested_at_seconds": seconds(admin_task.asked_at),
        "state": admin_task.state.name(),
        "outcome": admin_task.state.outcome(),
    })
}

/// Rounds to milliseconds.
pub(super) fn seconds(at: Duration) -> f64 {
    (at.as_secs_f64() * 1e3).round() / 1e3
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
}

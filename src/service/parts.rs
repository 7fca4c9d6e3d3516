//! What `/memory` tells beyond the figures, where it is asked to: where memory lies, the last
//! minutes, the last events, errands.
//!
//! Each part is bounded, whatever the arenas hold; the figures themselves are `endpoints`'s.
//!
//! Invariant: the cells of all arenas are at most [`CELLS_MAX`], but four for each arena.

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::{ArenaCells, Cell, RegionCells};
use crate::memory::{AdminTask, Event, HistorySample, Memory};
use crate::sync::{Mutex, lock};

use super::asked::QueryError;

/// Cells of all arenas together: as many as a wide screen shows; each is at most some 60 bytes.
const CELLS_MAX: usize = 2048;

/// Blocks that a map may walk each second. Meanwhile it holds their arena's lock, 11 ns for each
/// block as measured by `benches/render`: of that second a thousandth, or two, since a map is kept
/// for half of the time after which it is to be asked for again.
const BLOCKS_EACH_SECOND: u64 = 100_000;

/// A part, by the name under which it is asked for and told.
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

    /// Reads names with commas between them.
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

    /// Adds it to the document. `needs_token` is about errands: `None` where there are none.
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

/// The maps that were told last. Whoever asks meanwhile is told the same, so that no number of
/// those who look on has the locks of arenas held for longer.
#[derive(Debug, Default)]
pub(super) struct Maps(Mutex<Option<Kept>>);

/// Maps of arenas of these names, and until when they are told.
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
        let cells = memory.cells(CELLS_MAX);
        let maps: Value = cells.iter().map(arena).collect();
        let most = cells.iter().map(|(_, cells)| again(blocks(cells))).max();
        // Whoever asks again when told to is told anew.
        let until = now + Duration::from_secs(most.unwrap_or(1)).mul_f64(0.5);
        *kept = Some(Kept { names, until, maps: maps.clone() });
        maps
    }
}

fn blocks(cells: &ArenaCells) -> u64 {
    cells.regions.iter().map(|region| region.blocks).sum()
}

fn arena((name, cells): &(String, ArenaCells)) -> Value {
    json!({
        "arena": name,
        "again_in_seconds": again(blocks(cells)),
        "granule_bytes": cells.granularity.get(),
        "regions": cells.regions.iter().map(region).collect::<Vec<_>>(),
    })
}

/// After how many seconds whoever looks on is to ask for a map again, of an arena with so many
/// blocks.
const fn again(blocks: u64) -> u64 {
    let seconds = blocks.div_ceil(BLOCKS_EACH_SECOND);
    if seconds == 0 { 1 } else { seconds }
}

/// Runs of equal cells: the first, how many, and of each the bytes that are live, pending, active
/// and idle.
fn region(region: &RegionCells) -> Value {
    let mut runs: Vec<(u64, Cell)> = Vec::new();
    for &cell in &region.cells {
        match runs.last_mut() {
            Some((count, last)) if continues(last, *count, &cell) => *count += 1,
            _ => runs.push((1, cell)),
        }
    }
    let run = |(count, cell): &(u64, Cell)| {
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

/// Whether a cell is the next after a run, and like it.
fn continues(run: &Cell, count: u64, cell: &Cell) -> bool {
    let parts = |cell: &Cell| [cell.live, cell.pending, cell.active, cell.idle];
    cell.nth == run.nth + count && parts(cell) == parts(run)
}

/// By column: names once, not for each point.
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

/// To the millisecond.
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

//! What `/memory` tells beyond the figures, where it is asked to: where memory lies, the last
//! minutes, the last events, errands.
//!
//! Each part is bounded, whatever the arenas hold; the figures themselves are `endpoints`'s.
//!
//! Invariant: the cells of all arenas are at most [`CELLS_MAX`], but four for each arena.

use serde_json::{Map, Value, json};

use crate::bytes::ByteSize;
use crate::device::{ArenaCells, Cell, RegionCells};
use crate::memory::{Errand, Event, Memory, TrailPoint};

use super::asked::QueryError;

/// Cells of all arenas together: as many as a wide screen shows; each is at most some 60 bytes.
const CELLS_MAX: usize = 2048;

/// A part, by the name under which it is asked for and told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Map,
    Trail,
    Events,
    Errands,
}

impl Part {
    const ALL: [Self; 4] = [Self::Map, Self::Trail, Self::Events, Self::Errands];

    const fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Trail => "trail",
            Self::Events => "events",
            Self::Errands => "errands",
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
        text.split(',').filter(|name| !name.is_empty()).map(part).collect()
    }

    /// Adds it to the document. `needs_token` is about errands: `None` where there are none.
    pub(super) fn add(
        self,
        memory: &Memory,
        needs_token: Option<bool>,
        to: &mut Map<String, Value>,
    ) {
        let value = match self {
            Self::Map => memory.cells(CELLS_MAX).iter().map(arena).collect(),
            Self::Trail => trail(&memory.trail()),
            Self::Events => memory.events().iter().map(event).collect(),
            Self::Errands => needs_token.map_or(Value::Null, |needs_token| {
                let list: Value = memory.errands().iter().map(errand).collect();
                json!({ "needs_token": needs_token, "list": list })
            }),
        };
        to.insert(self.name().to_owned(), value);
    }
}

fn arena((name, cells): &(String, ArenaCells)) -> Value {
    json!({
        "arena": name,
        "granule_bytes": cells.granularity.get(),
        "regions": cells.regions.iter().map(region).collect::<Vec<_>>(),
    })
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
fn trail(points: &[TrailPoint]) -> Value {
    let bytes = |of: fn(&TrailPoint) -> ByteSize| -> Vec<u64> {
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

fn errand(errand: &Errand) -> Value {
    json!({
        "id": errand.id,
        "verb": errand.verb.name(),
        "about": errand.verb.about(),
        "asked_at_seconds": seconds(errand.asked_at),
        "state": errand.state.name(),
        "outcome": errand.state.outcome(),
    })
}

/// To the millisecond.
pub(super) fn seconds(at: std::time::Duration) -> f64 {
    (at.as_secs_f64() * 1e3).round() / 1e3
}

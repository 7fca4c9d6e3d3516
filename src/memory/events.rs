//! The last events of a `Memory`, for people: purges, levels, sleeps, loads, calls of reclaimers,
//! rejections, cancelled requests, OOM kills, diagnostics and admin tasks.
//!
//! The worker finds most of them as differences between two snapshots when it publishes. They are
//! therefore as old as a publication, and a change that is reverted between two snapshots is not
//! seen. This is not a log: use `tracing` for lasting records.
//!
//! Invariant: `events <= EVENTS_MAX`; adjacent events of one kind about one subject are merged,
//! except admin tasks.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::sync::{Mutex, lock};
use lowtide_admission::{Level, ReclaimerStats, RejectReason, ResourceStats, UnloadReason};

use super::snapshot::MemorySnapshot;

/// The maximum number of events: one screen.
const EVENTS_MAX: usize = 64;
/// The maximum length of an event's text, in bytes.
const TEXT_MAX: usize = 400;

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Event {
    /// The time of its last occurrence, since the Unix epoch.
    pub at: Duration,
    /// The kind: `purge`, `level`, `sleep`, `wake`, `load`, `unload`, `reclaim`, `reject`,
    /// `cancel`, `kill`, `diagnostic` or `admin`.
    pub kind: &'static str,
    /// The subject: an arena, a resource, a reclaimer, a budget, a trigger, a route.
    pub about: String,
    /// A description of the last occurrence.
    pub text: String,
    /// The number of consecutive occurrences.
    pub times: u64,
}

/// The ring of events.
#[derive(Debug, Default)]
pub(super) struct Events(Mutex<VecDeque<Event>>);

impl Events {
    /// Adds an event and drops the oldest if the ring is full.
    pub(super) fn add(&self, at: Duration, kind: &'static str, about: &str, mut text: String) {
        while text.len() > TEXT_MAX {
            text.pop();
        }
        let mut events = lock(&self.0);
        if let Some(last) = events.back_mut().filter(|last| last.kind == kind)
            && last.about == about
            && kind != "admin"
        {
            (last.at, last.text, last.times) = (at, text, last.times.saturating_add(1));
            return;
        }
        if events.len() == EVENTS_MAX {
            events.pop_front();
        }
        events.push_back(Event { at, kind, about: about.to_owned(), text, times: 1 });
    }

    /// Returns the events, oldest first.
    pub(super) fn all(&self) -> Vec<Event> {
        lock(&self.0).iter().cloned().collect()
    }
}

/// The last snapshot of the worker, to find the changes since then.
#[derive(Debug, Default)]
pub(super) struct Watch {
    seen: Option<Seen>,
}

#[derive(Debug)]
struct Seen {
    levels: [Level; 2],
    /// Sleeps, wakes and failed wakes, by name.
    arenas: BTreeMap<String, [u64; 3]>,
    /// Loads, failures, and unloads by reason; by name.
    resources: BTreeMap<String, ([u64; 2], [u64; UnloadReason::ALL.len()])>,
    /// The calls of each reclaimer, and the bytes that they reported.
    reclaimers: BTreeMap<String, (u64, ByteSize)>,
    shed: [u64; RejectReason::ALL.len()],
    kills: u64,
}

impl Watch {
    /// Adds an event for each change since the last snapshot.
    pub(super) fn see(&mut self, snapshot: &MemorySnapshot, events: &Events) {
        let now = Seen::of(snapshot);
        if let Some(before) = self.seen.take() {
            now.since(&before, |kind, about, text| {
                events.add(snapshot.since_epoch, kind, about, text);
            });
        }
        self.seen = Some(now);
    }
}

impl Seen {
    fn of(snapshot: &MemorySnapshot) -> Self {
        let resource = |stats: &ResourceStats| {
            let loads = [stats.loads_ok_total, stats.loads_failed_total];
            (stats.name.to_string(), (loads, UnloadReason::ALL.map(|why| stats.unloads.total(why))))
        };
        let reclaimer = |stats: &ReclaimerStats| {
            (stats.name.to_string(), (stats.calls_total, stats.released_total))
        };
        Self {
            levels: [snapshot.host.level, snapshot.device.level],
            arenas: snapshot.devices.sleeps(),
            resources: snapshot.resources.iter().map(resource).collect(),
            reclaimers: snapshot.reclaimers.iter().map(reclaimer).collect(),
            shed: RejectReason::ALL.map(|why| snapshot.admission.rejected_total(why)),
            kills: snapshot.oom_kills.unwrap_or(0),
        }
    }

    fn since(&self, before: &Self, mut tell: impl FnMut(&'static str, &str, String)) {
        let levels = self.levels.into_iter().zip(before.levels).zip(["host", "device"]);
        for ((level, was), budget) in levels.filter(|((level, was), _)| level != was) {
            tell("level", budget, format!("pressure {}, was {}", level.name(), was.name()));
        }
        for (name, counts) in &self.arenas {
            let was = before.arenas.get(name).unwrap_or(&[0; 3]);
            let said = [("sleep", "fell asleep"), ("wake", "woke"), ("wake", "wake failed")];
            for ((count, was), (kind, text)) in counts.iter().zip(was).zip(said) {
                if count > was {
                    tell(kind, name, text.to_owned());
                }
            }
        }
        for (name, ([loads, failures], unloads)) in &self.resources {
            let (none, no_unload) = ([0; 2], [0; UnloadReason::ALL.len()]);
            let was = before.resources.get(name);
            let (was_loads, was_unloads) =
                was.map_or((&none, &no_unload), |(loads, unloads)| (loads, unloads));
            if *failures > was_loads[1] {
                tell("load", name, "load failed".to_owned());
            }
            let unloads = unloads.iter().zip(was_unloads).zip(UnloadReason::ALL);
            for (_, why) in unloads.filter(|((count, was), _)| count > was) {
                tell("unload", name, format!("unloaded: {}", why.name()));
            }
            if *loads > was_loads[0] {
                tell("load", name, "loaded".to_owned());
            }
        }
        for (name, (calls, released)) in &self.reclaimers {
            let (was_calls, was_released) =
                before.reclaimers.get(name).copied().unwrap_or_default();
            if *calls > was_calls {
                let released = released.saturating_sub(was_released);
                tell("reclaim", name, format!("{released} released"));
            }
        }
        let mut text = String::new();
        let shed = self.shed.iter().zip(&before.shed).zip(RejectReason::ALL);
        for ((count, was), why) in shed.filter(|((count, was), _)| count > was) {
            let comma = if text.is_empty() { "" } else { ", " };
            // Writing to a string does not fail.
            let _ = write!(text, "{comma}{} {}", count - was, why.name());
        }
        if !text.is_empty() {
            tell("reject", "requests", format!("rejected: {text}"));
        }
        if self.kills > before.kills {
            let killed = self.kills - before.kills;
            tell("kill", "cgroup", format!("processes killed by the kernel (OOM): {killed}"));
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn events_are_bounded_in_number_and_length_and_repeats_are_one() {
        let events = Events::default();
        for nth in 0..200_u64 {
            let (at, about) = (Duration::from_secs(nth), (nth / 2).to_string());
            events.add(at, "diagnostic", &about, "ä".repeat(500));
        }
        let kept = events.all();
        assert_eq!(kept.len(), EVENTS_MAX);
        assert!(kept.iter().all(|event| event.times == 2 && event.text.len() <= TEXT_MAX));
        assert_eq!(kept.last().map(|event| event.at), Some(Duration::from_secs(199)));
        assert_eq!(kept[0].about, "36", "the oldest made way");
    }

    #[test]
    fn a_difference_is_told_once_with_what_it_is_about() {
        let before = Seen {
            levels: [Level::None; 2],
            arenas: BTreeMap::new(),
            resources: BTreeMap::new(),
            reclaimers: BTreeMap::new(),
            shed: [0, 7, 0, 0, 0, 0, 0, 0, 0],
            kills: 1,
        };
        let now = Seen {
            levels: [Level::High, Level::None],
            arenas: BTreeMap::from([("a".to_owned(), [1, 1, 0])]),
            resources: BTreeMap::from([("m".to_owned(), ([1, 1], [0, 1, 0, 0, 0]))]),
            reclaimers: BTreeMap::from([("c".to_owned(), (2, ByteSize::mib(3)))]),
            shed: [1, 10, 0, 0, 0, 0, 0, 0, 0],
            kills: 3,
        };
        let mut told = Vec::new();
        now.since(&before, |kind, about, text| told.push(format!("{kind} {about}: {text}")));
        let expected = [
            "level host: pressure high, was none",
            "sleep a: fell asleep",
            "wake a: woke",
            "load m: load failed",
            "unload m: unloaded: pressure",
            "load m: loaded",
            "reclaim c: 3.0 MiB released",
            "reject requests: rejected: 1 too_large, 3 full",
            "kill cgroup: processes killed by the kernel (OOM): 2",
        ];
        assert_eq!(told, expected);
        now.since(&now, |kind, about, text| panic!("nothing new: {kind} {about}: {text}"));
    }
}

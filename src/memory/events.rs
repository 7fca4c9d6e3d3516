//! The last events of a `Memory`, for people: purges, levels, limits, sleeps, loads, evictions,
//! calls of reclaimers, rejections, cancelled requests, OOM kills, diagnostics and admin tasks.
//!
//! The worker finds most of them as differences between two snapshots when it publishes. They are
//! therefore as old as a publication; of a level that was reached and left between two snapshots
//! only the highest is known. Changes that nothing else logs are logged here as well: levels of
//! the host, the limit, and episodes of rejections.
//!
//! Invariant: `events of a kind <= KIND_MAX`, so no kind removes another's. Events of one kind
//! about one subject within [`MERGED`] are one event with the sum of their amounts, except admin
//! tasks.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::Duration;

use crate::bytes::{ByteSize, prefix};
use crate::clock::Moment;
use crate::rate::TokenBucket;
use crate::sync::{Mutex, lock};
use lowtide_admission::{
    LastUnload, Level, ReclaimerStats, RejectReason, ResourceStats, UnloadReason,
};

use super::snapshot::MemorySnapshot;

/// The maximum number of events of a kind.
const KIND_MAX: usize = 16;
/// The maximum length of an event's text, in bytes.
const TEXT_MAX: usize = 400;
/// The longest time that a merged event spans.
const MERGED: Duration = Duration::from_secs(60);
/// An episode of rejections ends after this time without one.
const EPISODE_GAP: Duration = Duration::from_secs(30);
/// Log lines about levels at once, and the time for one more.
const LINES: (u32, Duration) = (10, Duration::from_secs(10));

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Event {
    /// The time of its last occurrence, since the Unix epoch.
    pub at: Duration,
    /// The time of its first occurrence.
    pub since: Duration,
    /// The kind: `purge`, `level`, `limit`, `sleep`, `wake`, `load`, `unload`, `evict`, `reclaim`,
    /// `reject`, `cancel`, `kill`, `diagnostic` or `admin`.
    pub kind: &'static str,
    /// The subject: an arena, a resource, a reclaimer, a budget, a trigger, a route, a reason.
    pub about: String,
    /// The text of the last occurrence; amounts in it are sums over all occurrences.
    pub text: String,
    /// The number of occurrences.
    pub times: u64,
    /// The sum over all occurrences: bytes of `purge` and `reclaim`, requests of `reject`,
    /// processes of `kill`, otherwise 0.
    pub sum: u64,
}

/// The events, in a ring for each kind.
#[derive(Debug, Default)]
pub(super) struct EventLog(Mutex<BTreeMap<&'static str, VecDeque<Event>>>);

impl EventLog {
    /// Adds an event without an amount.
    pub(super) fn add(&self, at: Duration, kind: &'static str, about: &str, text: String) {
        self.add_event(at, kind, about, 0, text);
    }

    /// Adds an event whose text is about the sum of the amounts: a purge, a reclaim, a rejection or
    /// a kill.
    pub(super) fn add_sum(&self, at: Duration, kind: &'static str, about: &str, amount: u64) {
        let text = text_of_sum(kind, amount).unwrap_or_default();
        self.add_event(at, kind, about, amount, text);
    }

    /// Drops the oldest event of the kind if its ring is full.
    fn add_event(&self, at: Duration, kind: &'static str, about: &str, amount: u64, text: String) {
        let mut events = lock(&self.0);
        let ring = events.entry(kind).or_default();
        // A clock that was set back begins an event of its own.
        let merges = |last: &Event| {
            kind != "admin" && last.about == about && at >= last.at && at - last.since <= MERGED
        };
        let same = ring.iter().rposition(merges);
        if let Some(mut last) = same.and_then(|place| ring.remove(place)) {
            last.sum = last.sum.saturating_add(amount);
            (last.at, last.times) = (at, last.times.saturating_add(1));
            last.text = bounded(text_of_sum(kind, last.sum).unwrap_or(text));
            ring.push_back(last);
            return;
        }
        if ring.len() == KIND_MAX {
            ring.pop_front();
        }
        let (about, text) = (about.to_owned(), bounded(text));
        ring.push_back(Event { at, since: at, kind, about, text, times: 1, sum: amount });
    }

    /// Passes the last events of each kind to `act`, about `most` in all, with the lock held.
    /// Allocates nothing.
    pub(super) fn last(&self, most: usize, mut act: impl FnMut(&Event)) {
        let events = lock(&self.0);
        let each = most / events.len().max(1);
        for ring in events.values() {
            ring.iter().skip(ring.len().saturating_sub(each)).for_each(&mut act);
        }
    }

    /// Returns the events, by the time of their last occurrence, oldest first.
    pub(super) fn all(&self) -> Vec<Event> {
        let mut all: Vec<_> = lock(&self.0).values().flatten().cloned().collect();
        all.sort_by_key(|event| event.at);
        all
    }
}

fn bounded(mut text: String) -> String {
    text.truncate(prefix(&text, TEXT_MAX).len());
    text
}

/// The last snapshot of the worker, to find the changes since then.
#[derive(Debug)]
pub(super) struct Watch {
    seen: Option<EventBasis>,
    episode: Option<Episode>,
    lines: TokenBucket,
}

impl Default for Watch {
    fn default() -> Self {
        let lines = TokenBucket::new(LINES.0, LINES.1, Moment::ORIGIN);
        Self { seen: None, episode: None, lines }
    }
}

/// Rejections without a pause of [`EPISODE_GAP`].
#[derive(Debug)]
struct Episode {
    began: Moment,
    last: Moment,
    counts: [u64; RejectReason::ALL.len()],
}

#[derive(Debug)]
struct EventBasis {
    levels: [Level; 2],
    /// The number of times that the host has entered each level.
    entered: [u64; Level::ALL.len()],
    limit: ByteSize,
    /// The directory of the memory cgroup.
    cgroup: Option<PathBuf>,
    /// Sleeps, wakes and failed wakes, by name.
    #[cfg(feature = "device")]
    arenas: BTreeMap<String, [u64; 3]>,
    resources: BTreeMap<String, ResourceCounts>,
    /// The calls of each reclaimer, and the bytes that they reported.
    reclaimers: BTreeMap<String, (u64, ByteSize)>,
    shed: [u64; RejectReason::ALL.len()],
    /// `None` while the kernel's count cannot be read.
    kills: Option<u64>,
}

/// The loads and unloads of a resource.
#[derive(Debug, Default)]
struct ResourceCounts {
    loads: u64,
    failures: u64,
    unloads: [u64; UnloadReason::ALL.len()],
    last: Option<LastUnload>,
}

/// Returns the text about the sum of an event's amounts; of most kinds there is none.
fn text_of_sum(kind: &str, sum: u64) -> Option<String> {
    Some(match kind {
        "purge" | "reclaim" => format!("{} released", ByteSize::new(sum)),
        "reject" if sum == 1 => "1 request rejected".to_owned(),
        "reject" => format!("{sum} requests rejected"),
        "kill" => format!("processes killed by the kernel (OOM): {sum}"),
        _ => return None,
    })
}

impl Watch {
    /// Adds an event for each change since the last snapshot, and logs changes that nothing else
    /// logs. `entered` is how often the host has entered each level.
    pub(super) fn see(
        &mut self,
        snapshot: &MemorySnapshot,
        entered: [u64; Level::ALL.len()],
        events: &EventLog,
    ) {
        let now = EventBasis::of(snapshot, entered);
        let before = self.seen.take().unwrap_or_else(|| EventBasis::at_start(&now));
        now.since(&before, |kind, about, amount, text| {
            events.add_event(snapshot.since_epoch, kind, about, amount, text);
        });
        self.log_level(&now, &before, snapshot);
        if now.limit != before.limit {
            let (limit, was) = (shown(now.limit), shown(before.limit));
            let source = snapshot.signal.limit.source.name();
            log!(info, target: "lowtide", limit, was, source, "memory limit changed");
        }
        if now.cgroup != before.cgroup {
            let (cgroup, was) = (now.cgroup.as_deref(), before.cgroup.as_deref());
            log!(info, target: "lowtide", ?cgroup, ?was, "memory cgroup changed");
        }
        self.log_rejections(now.new_rejections(&before), snapshot);
        self.seen = Some(now);
    }

    fn log_level(&mut self, now: &EventBasis, before: &EventBasis, snapshot: &MemorySnapshot) {
        let highest = now.highest_since(before).map(Level::name);
        let [level, was] = [now.levels[0], before.levels[0]].map(Level::name);
        if (level == was && highest.is_none()) || self.lines.take(snapshot.now).is_err() {
            return;
        }
        let (physical, limit) = (snapshot.physical, shown(snapshot.signal.limit.bytes));
        let (required, reserved) = (snapshot.required(), snapshot.host.reserved);
        log!(
            info,
            target: "lowtide",
            level,
            was,
            highest,
            %physical,
            %required,
            %reserved,
            limit,
            "pressure level changed"
        );
    }

    /// Logs the first rejections of an episode, and the total when it has ended.
    fn log_rejections(&mut self, new: [u64; RejectReason::ALL.len()], snapshot: &MemorySnapshot) {
        let now = snapshot.now;
        let any = new.iter().any(|count| *count > 0);
        if any && self.episode.is_none() {
            self.episode =
                Some(Episode { began: now, last: now, counts: [0; RejectReason::ALL.len()] });
            let (physical, limit) = (snapshot.physical, shown(snapshot.signal.limit.bytes));
            let (host, held) = (&snapshot.host, snapshot.admission.held());
            log!(
                warn,
                target: "lowtide",
                reasons = by_reason(&new),
                level = host.level.name(),
                %physical,
                limit,
                reserved = %host.reserved,
                allowance = shown(host.allowance),
                held,
                waiting = snapshot.admission.waiting,
                "requests rejected"
            );
        }
        let Some(episode) = &mut self.episode else { return };
        for (total, count) in episode.counts.iter_mut().zip(new) {
            *total += count;
        }
        if any {
            episode.last = now;
        } else if now - episode.last >= EPISODE_GAP {
            let rejected: u64 = episode.counts.iter().sum();
            let (reasons, lasted) = (by_reason(&episode.counts), episode.last - episode.began);
            self.episode = None;
            let lasted_seconds = lasted.as_secs();
            log!(info, target: "lowtide", rejected, reasons, lasted_seconds, "rejections ended");
        }
    }
}

/// Returns `true` if requests are rejected for this reason for lack of memory.
pub(super) const fn is_shortage(reason: RejectReason) -> bool {
    !matches!(reason, RejectReason::ShuttingDown | RejectReason::SlowClient)
}

/// Formats the counts that are not zero, such as `3 full, 1 pressure`.
fn by_reason(counts: &[u64; RejectReason::ALL.len()]) -> String {
    let counts = counts.iter().zip(RejectReason::ALL).filter(|(count, _)| **count > 0);
    let list: Vec<_> = counts.map(|(count, why)| format!("{count} {}", why.name())).collect();
    list.join(", ")
}

/// Formats a limit.
pub(super) fn shown(limit: ByteSize) -> String {
    if limit == ByteSize::MAX { "none".to_owned() } else { limit.to_string() }
}

impl EventBasis {
    fn of(snapshot: &MemorySnapshot, entered: [u64; Level::ALL.len()]) -> Self {
        let resource = |stats: &ResourceStats| {
            let counts = ResourceCounts {
                loads: stats.loads_ok_total,
                failures: stats.loads_failed_total,
                unloads: UnloadReason::ALL.map(|why| stats.unloads_total(why)),
                last: stats.last_unload.clone(),
            };
            (stats.name.to_string(), counts)
        };
        let reclaimer = |stats: &ReclaimerStats| {
            (stats.name.to_string(), (stats.calls_total, stats.released_total))
        };
        Self {
            levels: [snapshot.host.level, snapshot.device.level],
            entered,
            limit: snapshot.signal.limit.bytes,
            cgroup: snapshot.cgroup.clone(),
            #[cfg(feature = "device")]
            arenas: snapshot.devices.sleeps(),
            resources: snapshot.resources.iter().map(resource).collect(),
            reclaimers: snapshot.reclaimers.iter().map(reclaimer).collect(),
            shed: RejectReason::ALL.map(|why| snapshot.admission.rejected_total(why)),
            kills: snapshot.oom_kills,
        }
    }

    /// Returns the state before anything happened. The limit, the cgroup and its kills are older
    /// than the process.
    fn at_start(first: &Self) -> Self {
        Self {
            levels: [Level::None; 2],
            entered: [0; Level::ALL.len()],
            limit: first.limit,
            cgroup: first.cgroup.clone(),
            #[cfg(feature = "device")]
            arenas: BTreeMap::new(),
            resources: BTreeMap::new(),
            reclaimers: BTreeMap::new(),
            shed: [0; RejectReason::ALL.len()],
            kills: first.kills,
        }
    }

    /// Returns the highest level that the host has entered since then, if any.
    fn highest_since(&self, before: &Self) -> Option<Level> {
        let entered = self.entered.iter().zip(&before.entered).zip(Level::ALL).skip(1);
        entered.filter(|((now, was), _)| now > was).map(|(_, level)| level).next_back()
    }

    /// Returns the rejections since then for lack of memory: not those during shutdown, and not of
    /// slow clients.
    fn new_rejections(&self, before: &Self) -> [u64; RejectReason::ALL.len()] {
        let mut new = [0; RejectReason::ALL.len()];
        let counts = self.shed.iter().zip(&before.shed).zip(RejectReason::ALL);
        for (place, ((now, was), why)) in new.iter_mut().zip(counts) {
            if is_shortage(why) {
                *place = now.saturating_sub(*was);
            }
        }
        new
    }

    /// Passes each change since then to `tell`: kind, subject, amount and text.
    fn since(&self, before: &Self, mut tell: impl FnMut(&'static str, &str, u64, String)) {
        let mut fixed = |kind, about: &str, text| tell(kind, about, 0, text);
        let highest = self.highest_since(before);
        let levels = self.levels.into_iter().zip(before.levels).zip(["host", "device"]);
        for ((level, was), budget) in levels {
            let passed = highest.filter(|high| budget == "host" && *high > level.max(was));
            match passed {
                Some(high) => {
                    let (high, level, was) = (high.name(), level.name(), was.name());
                    fixed("level", budget, format!("pressure {level}, was {was}, reached {high}"));
                }
                None if level != was => {
                    let text = format!("pressure {}, was {}", level.name(), was.name());
                    fixed("level", budget, text);
                }
                None => {}
            }
        }
        if self.limit != before.limit {
            let text = format!("limit {}, was {}", shown(self.limit), shown(before.limit));
            fixed("limit", "host", text);
        }
        #[cfg(feature = "device")]
        for (name, counts) in &self.arenas {
            let was = before.arenas.get(name).unwrap_or(&[0; 3]);
            let said = [("sleep", "fell asleep"), ("wake", "woke"), ("wake", "wake failed")];
            for ((count, was), (kind, text)) in counts.iter().zip(was).zip(said) {
                if count > was {
                    fixed(kind, name, text.to_owned());
                }
            }
        }
        for (name, counts) in &self.resources {
            let none = ResourceCounts::default();
            let was = before.resources.get(name).unwrap_or(&none);
            if counts.failures > was.failures {
                fixed("load", name, "load failed".to_owned());
            }
            let unloads = counts.unloads.iter().zip(&was.unloads).zip(UnloadReason::ALL);
            for (_, why) in unloads.filter(|((count, was), _)| count > was) {
                let kind = if why == UnloadReason::Eviction { "evict" } else { "unload" };
                let last = counts.last.as_ref().filter(|last| last.reason == why);
                let unknown = || format!("unloaded: {}", why.name());
                fixed(kind, name, last.map_or_else(unknown, LastUnload::to_string));
            }
            if counts.loads > was.loads {
                fixed("load", name, "loaded".to_owned());
            }
        }
        let mut counted = |kind, about: &str, amount| {
            tell(kind, about, amount, text_of_sum(kind, amount).unwrap_or_default());
        };
        for (name, (calls, released)) in &self.reclaimers {
            let (was_calls, was_released) =
                before.reclaimers.get(name).copied().unwrap_or_default();
            if *calls > was_calls {
                let amount = released.saturating_sub(was_released).get();
                counted("reclaim", name, amount);
            }
        }
        let shed = self.shed.iter().zip(&before.shed).zip(RejectReason::ALL);
        for ((count, was), why) in shed.filter(|((count, was), _)| count > was) {
            counted("reject", why.name(), count - was);
        }
        // A count that could not be read is no kill when it is read again.
        let kills = self.kills.zip(before.kills).map_or(0, |(now, was)| now.saturating_sub(was));
        if kills > 0 {
            counted("kill", "cgroup", kills);
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn events_are_bounded_in_number_and_length_and_repeats_are_one() {
        let events = EventLog::default();
        for nth in 0..200_u64 {
            let (at, about) = (Duration::from_secs(nth), (nth / 2).to_string());
            events.add(at, "diagnostic", &about, "ä".repeat(500));
        }
        let kept = events.all();
        assert_eq!(kept.len(), KIND_MAX);
        assert!(kept.iter().all(|event| event.times == 2 && event.text.len() <= TEXT_MAX));
        assert_eq!(kept.last().map(|event| event.at), Some(Duration::from_secs(199)));
        assert_eq!(kept[0].about, "84", "the oldest made way");
    }

    /// The bug: rejections of one minute removed the eviction that an operator looked for, and of
    /// merged rejections only the last count was shown.
    #[test]
    fn no_kind_removes_another_and_merged_events_keep_their_sum() {
        let events = EventLog::default();
        let at = Duration::from_secs;
        events.add(at(0), "evict", "embedder", "evicted for the load of \"ranker\"".to_owned());
        for nth in 1..=1_000 {
            let about = if nth % 2 == 0 { "full" } else { "pressure" };
            events.add_sum(at(nth), "reject", about, 1);
        }
        for nth in 1_001..=1_050 {
            events.add_sum(at(nth), "reject", "full", 3);
        }
        let all = events.all();
        assert_eq!(all[0].kind, "evict", "still there");
        let last = all.last().expect("many");
        assert_eq!((&*last.about, last.at), ("full", at(1_050)));
        assert!(last.sum > 2 * last.times && last.times > 10, "{last:?}");
        assert_eq!(last.text, format!("{} requests rejected", last.sum));
        // Two reasons that alternate are merged as well: the ring spans more than a few seconds.
        let rejects = all.iter().filter(|event| event.kind == "reject");
        assert!(
            rejects.clone().count() == KIND_MAX
                && rejects.map(|event| event.times).sum::<u64>() > 400
        );
        // The bug: after the clock was set back, new events were merged with those of the future.
        events.add_sum(at(500), "reject", "full", 1);
        let back = events.all().into_iter().find(|event| event.at == at(500) && event.sum == 1);
        assert_eq!(back.map(|event| (event.since, event.times)), Some((at(500), 1)));
        // A later episode is an event of its own.
        events.add_sum(at(1_200), "reject", "full", 1);
        assert_eq!(events.all().last().map(|event| event.sum), Some(1));
    }

    fn seen() -> EventBasis {
        EventBasis {
            levels: [Level::None; 2],
            entered: [0; 4],
            limit: ByteSize::gib(1),
            cgroup: None,
            arenas: BTreeMap::new(),
            resources: BTreeMap::new(),
            reclaimers: BTreeMap::new(),
            shed: [0, 7, 0, 0, 0, 0, 0, 0, 0, 0],
            kills: Some(1),
        }
    }

    #[test]
    fn a_difference_is_told_once_with_what_it_is_about() {
        let before = seen();
        let model = ResourceCounts { loads: 1, failures: 1, unloads: [0, 1, 0, 0, 0], last: None };
        let now = EventBasis {
            levels: [Level::High, Level::None],
            entered: [0, 1, 1, 0],
            limit: ByteSize::mib(512),
            cgroup: None,
            arenas: BTreeMap::from([("a".to_owned(), [1, 1, 0])]),
            resources: BTreeMap::from([("m".to_owned(), model)]),
            reclaimers: BTreeMap::from([("c".to_owned(), (2, ByteSize::mib(3)))]),
            shed: [1, 10, 0, 0, 0, 0, 0, 0, 0, 0],
            kills: Some(3),
        };
        let told = |now: &EventBasis, before: &EventBasis| {
            let mut told = Vec::new();
            now.since(before, |kind, about, _, text| told.push(format!("{kind} {about}: {text}")));
            told
        };
        let expected = [
            "level host: pressure high, was none",
            "limit host: limit 512.0 MiB, was 1.0 GiB",
            "sleep a: fell asleep",
            "wake a: woke",
            "load m: load failed",
            "unload m: unloaded: pressure",
            "load m: loaded",
            "reclaim c: 3.0 MiB released",
            "reject too_large: 1 request rejected",
            "reject full: 3 requests rejected",
            "kill cgroup: processes killed by the kernel (OOM): 2",
        ];
        assert_eq!(told(&now, &before), expected);
        assert!(told(&now, &now).is_empty(), "nothing new");
        // The bug: what happened before the first publication was never told.
        let model = ResourceCounts { loads: 1, ..ResourceCounts::default() };
        let first = EventBasis { resources: BTreeMap::from([("m".to_owned(), model)]), ..seen() };
        assert_eq!(
            told(&first, &EventBasis::at_start(&first)),
            ["load m: loaded", "reject full: 7 requests rejected"]
        );
        // A level that was reached and left in between.
        let after = EventBasis { entered: [1, 1, 1, 1], levels: [Level::None; 2], ..seen() };
        let expected = ["level host: pressure none, was none, reached critical"];
        assert_eq!(told(&after, &before), expected);
    }
}

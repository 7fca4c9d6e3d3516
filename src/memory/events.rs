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

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::bytes::{ByteSize, prefix};
use crate::clock::Moment;
#[cfg(feature = "device")]
use crate::device::ArenaSnapshot;
use crate::rate::TokenBucket;
use crate::sync::{Mutex, lock};
use lowtide_admission::{AdmissionStats, Level, RejectReason, ResourceStats, UnloadReason};

use super::snapshot::MemorySnapshot;

/// The maximum number of events of a kind.
const KIND_MAX: usize = 16;
/// The maximum length of an event's text, in bytes.
const TEXT_MAX: usize = 400;
/// The longest time that a merged event spans.
const MERGED: Duration = Duration::from_secs(60);
/// An episode of rejections ends after this time without one.
const EPISODE_GAP: Duration = Duration::from_secs(30);
/// Log lines about levels, or about the limit, at once, and the time for one more.
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
    /// `reject`, `observe`, `cancel`, `kill`, `diagnostic` or `admin`.
    pub kind: Cow<'static, str>,
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

    /// Adds an event with an amount; of a purge, a reclaim, a rejection and a kill the text is about
    /// the sum of the amounts. Drops the oldest event of the kind if its ring is full.
    pub(super) fn add_event(
        &self,
        at: Duration,
        kind: &'static str,
        about: &str,
        amount: u64,
        text: String,
    ) {
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
        let text = bounded(text_of_sum(kind, amount).unwrap_or(text));
        let (kind, about) = (kind.into(), about.to_owned());
        ring.push_back(Event { at, since: at, kind, about, text, times: 1, sum: amount });
    }

    /// Passes the last events of each kind to `act`, about `most` in all, with the lock held.
    /// Allocates nothing.
    pub(super) fn last(&self, most: usize, act: impl FnOnce(&mut dyn Iterator<Item = &Event>)) {
        let events = lock(&self.0);
        let each = most / events.len().max(1);
        let last = |ring: &VecDeque<Event>| ring.len().saturating_sub(each);
        act(&mut events.values().flat_map(|ring| ring.iter().skip(last(ring))));
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

/// The last publication of the worker, to find the changes since then.
#[derive(Debug)]
pub(super) struct Watch {
    seen: Option<Arc<MemorySnapshot>>,
    /// The OOM kills in the own cgroup that have been logged.
    kills_logged: u64,
    episode: Option<Episode>,
    lines: TokenBucket,
    /// The same for lines about the limit, which moves with the memory of others in its cgroup.
    limits: TokenBucket,
}

impl Default for Watch {
    fn default() -> Self {
        let lines = || TokenBucket::new(LINES.0, LINES.1, Moment::ORIGIN);
        Self { seen: None, kills_logged: 0, episode: None, lines: lines(), limits: lines() }
    }
}

/// Rejections without a pause of [`EPISODE_GAP`].
#[derive(Debug)]
struct Episode {
    began: Moment,
    last: Moment,
    counts: ByReason,
}

/// Requests, in the order of [`RejectReason::ALL`].
type ByReason = [u64; RejectReason::ALL.len()];

/// Returns the text about the sum of an event's amounts; of most kinds there is none.
fn text_of_sum(kind: &str, sum: u64) -> Option<String> {
    Some(match kind {
        "purge" | "reclaim" => format!("{} released", ByteSize::new(sum)),
        "reject" if sum == 1 => "1 request rejected".to_owned(),
        "reject" => format!("{sum} requests rejected"),
        "observe" => format!("{sum} would have waited or been rejected"),
        "kill" => format!("processes killed by the kernel (OOM): {sum}"),
        _ => return None,
    })
}

impl Watch {
    /// Adds an event for each change since the last publication, and logs changes that nothing else
    /// logs. Keeps the publication, so that a panic later on repeats nothing.
    pub(super) fn see(&mut self, snapshot: &Arc<MemorySnapshot>, events: &EventLog) {
        let was = self.seen.replace(Arc::clone(snapshot));
        let was = was.unwrap_or_else(|| Arc::new(snapshot.at_start()));
        snapshot.since(&was, |kind, about, amount, text| {
            events.add_event(snapshot.since_epoch, kind, about, amount, text);
        });
        self.log_level(snapshot, &was);
        if snapshot.limit() != was.limit() && self.limits.take(snapshot.now).is_ok() {
            let (limit, was) = (shown(snapshot.limit()), shown(was.limit()));
            let source = snapshot.signal.limit.source.name();
            log!(info, limit, was, source, "memory limit changed");
        }
        if snapshot.cgroup != was.cgroup {
            let (cgroup, was) = (snapshot.cgroup.as_deref(), was.cgroup.as_deref());
            log!(info, ?cgroup, ?was, "memory cgroup changed");
        }
        // A count that cannot be read for a while is not logged again. A smaller one is of another
        // cgroup.
        let kills = snapshot.events.as_ref().and_then(|events| events.own.oom_kill);
        let kills = kills.unwrap_or(self.kills_logged);
        let killed = kills.saturating_sub(std::mem::replace(&mut self.kills_logged, kills));
        if killed > 0 {
            let (limit, physical) = (snapshot.limit(), snapshot.physical);
            log!(warn, killed, %limit, %physical, "processes OOM-killed");
        }
        let observed = &snapshot.admission.observed;
        if *observed != was.admission.observed && self.lines.take(snapshot.now).is_ok() {
            let reasons = by_reason(observed);
            log!(info, reasons, "requests admitted in observe mode");
        }
        // For lack of memory: not those during shutdown, and not of slow clients.
        let mut new = snapshot.requests_since(&was, |stats| stats.rejected);
        for (count, why) in new.iter_mut().zip(RejectReason::ALL) {
            *count *= u64::from(is_shortage(why));
        }
        self.log_rejections(new, snapshot);
    }

    fn log_level(&mut self, snapshot: &MemorySnapshot, before: &MemorySnapshot) {
        let highest = snapshot.highest_since(before).map(Level::name);
        let [level, was] = [snapshot, before].map(|of| of.host.level.name());
        if (level == was && highest.is_none()) || self.lines.take(snapshot.now).is_err() {
            return;
        }
        let (physical, limit) = (snapshot.physical, shown(snapshot.signal.limit.bytes));
        let (required, reserved) = (snapshot.required(), snapshot.host.reserved);
        log!(info, level, was, highest, %physical, %required, %reserved, limit,
            "pressure level changed");
    }

    /// Logs the first rejections of an episode, and the total when it has ended.
    fn log_rejections(&mut self, new: ByReason, snapshot: &MemorySnapshot) {
        let now = snapshot.now;
        let any = new.iter().any(|count| *count > 0);
        if any && self.episode.is_none() {
            self.episode =
                Some(Episode { began: now, last: now, counts: [0; RejectReason::ALL.len()] });
            let (physical, limit) = (snapshot.physical, shown(snapshot.signal.limit.bytes));
            let (host, held) = (&snapshot.host, snapshot.admission.held());
            log!(warn, reasons = by_reason(&new), level = host.level.name(), %physical, limit,
                reserved = %host.reserved, allowance = shown(host.allowance), held,
                waiting = snapshot.admission.waiting, "requests rejected");
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
            log!(info, rejected, reasons, lasted_seconds, "rejections ended");
        }
    }
}

/// Returns `true` if requests are rejected for this reason for lack of memory.
pub(super) const fn is_shortage(reason: RejectReason) -> bool {
    !matches!(reason, RejectReason::ShuttingDown | RejectReason::SlowClient)
}

/// Formats the counts that are not zero, such as `3 full, 1 pressure`.
pub(super) fn by_reason(counts: &ByReason) -> String {
    let counts = counts.iter().zip(RejectReason::ALL).filter(|(count, _)| **count > 0);
    let list: Vec<_> = counts.map(|(count, why)| format!("{count} {}", why.name())).collect();
    list.join(", ")
}

/// Formats a limit.
pub(super) fn shown(limit: ByteSize) -> String {
    if limit == ByteSize::MAX { "none".to_owned() } else { limit.to_string() }
}

impl MemorySnapshot {
    /// Returns the state before anything happened. The limit, the cgroup and its kills are older
    /// than the process.
    fn at_start(&self) -> Self {
        let mut snapshot = self.clone();
        (snapshot.host.level, snapshot.device.level) = (Level::None, Level::None);
        #[cfg(feature = "device")]
        snapshot.devices.arenas.clear();
        snapshot.resources.clear();
        snapshot.reclaimers.clear();
        snapshot.events = None;
        snapshot.admission = AdmissionStats::default();
        snapshot.entered = [0; Level::ALL.len()];
        snapshot
    }

    /// Returns the highest level that the host has entered since then, if any.
    fn highest_since(&self, before: &Self) -> Option<Level> {
        let entered = self.entered.iter().zip(&before.entered).zip(Level::ALL).skip(1);
        entered.filter(|((now, was), _)| now > was).map(|(_, level)| level).next_back()
    }

    /// Returns the requests since then by reason: those of one of the counts.
    fn requests_since(&self, before: &Self, of: fn(&AdmissionStats) -> ByReason) -> ByReason {
        let mut new = of(&self.admission);
        for (count, was) in new.iter_mut().zip(of(&before.admission)) {
            *count = count.saturating_sub(was);
        }
        new
    }

    /// Passes each change since then to `tell`: kind, subject, amount and text.
    fn since(&self, before: &Self, mut tell: impl FnMut(&'static str, &str, u64, String)) {
        let (now, was) = (self, before);
        let mut fixed = |kind, about: &str, text| tell(kind, about, 0, text);
        let highest = self.highest_since(before);
        for (budget, level, was) in [
            ("host", now.host.level, was.host.level),
            ("device", now.device.level, was.device.level),
        ] {
            let passed = highest.filter(|high| budget == "host" && *high > level.max(was));
            let text = format!("pressure {}, was {}", level.name(), was.name());
            match passed {
                Some(high) => fixed("level", budget, format!("{text}, reached {}", high.name())),
                None if level != was => fixed("level", budget, text),
                None => {}
            }
        }
        if now.limit() != was.limit() {
            let text = format!("limit {}, was {}", shown(now.limit()), shown(was.limit()));
            fixed("limit", "host", text);
        }
        #[cfg(feature = "device")]
        for arena in &now.devices.arenas {
            let counts =
                |of: &ArenaSnapshot| [of.sleeps_total, of.wakes_total, of.wake_failures_total];
            let was = was.devices.arenas.iter().find(|of| of.name == arena.name);
            let was = was.map_or([0; 3], counts);
            let said = [("sleep", "fell asleep"), ("wake", "woke"), ("wake", "wake failed")];
            for ((count, was), (kind, text)) in counts(arena).into_iter().zip(was).zip(said) {
                if count > was {
                    fixed(kind, &arena.name, text.to_owned());
                }
            }
        }
        for resource in &now.resources {
            let was = was.resources.iter().find(|of| of.name == resource.name);
            resource_since(resource, was, &mut fixed);
        }
        let mut counted = |kind, about: &str, amount| {
            tell(kind, about, amount, text_of_sum(kind, amount).unwrap_or_default());
        };
        for reclaimer in &now.reclaimers {
            let was = was.reclaimers.iter().find(|of| of.name == reclaimer.name);
            let (calls, released) =
                was.map_or((0, ByteSize::ZERO), |of| (of.calls_total, of.released_total));
            if reclaimer.calls_total > calls {
                let amount = reclaimer.released_total.saturating_sub(released).get();
                counted("reclaim", &reclaimer.name, amount);
            }
        }
        let rejected = self.requests_since(before, |stats| stats.rejected);
        let observed = self.requests_since(before, |stats| stats.observed);
        for (kind, new) in [("reject", rejected), ("observe", observed)] {
            let new = new.into_iter().zip(RejectReason::ALL);
            for (count, why) in new.filter(|(count, _)| *count > 0) {
                counted(kind, why.name(), count);
            }
        }
        // A count that could not be read is no kill when it is read again.
        let kills = now.oom_kills.zip(was.oom_kills);
        let kills = kills.map_or(0, |(now, was)| now.saturating_sub(was));
        if kills > 0 {
            counted("kill", "cgroup", kills);
        }
    }
}

/// Passes each load and unload of a resource since then to `tell`.
fn resource_since(
    now: &ResourceStats,
    was: Option<&ResourceStats>,
    tell: &mut impl FnMut(&'static str, &str, String),
) {
    let rose = |total: fn(&ResourceStats) -> u64| total(now) > was.map_or(0, total);
    let refused = |of: &ResourceStats| of.last_refusal.clone();
    if let Some((_, why)) = refused(now).filter(|it| Some(it) != was.and_then(refused).as_ref()) {
        tell("load", &now.name, format!("load refused: {why}"));
    }
    if rose(|of| of.loads_failed_total) {
        tell("load", &now.name, "load failed; the log has the error".to_owned());
    }
    for why in UnloadReason::ALL {
        if now.unloads_total(why) > was.map_or(0, |of| of.unloads_total(why)) {
            let kind = if why == UnloadReason::Eviction { "evict" } else { "unload" };
            let cause = now.last_eviction.as_deref().filter(|_| why == UnloadReason::Eviction);
            let text = cause.map_or_else(|| format!("unloaded: {why}"), ToOwned::to_owned);
            tell(kind, &now.name, text);
        }
    }
    if rose(|of| of.loads_ok_total) {
        tell("load", &now.name, "loaded".to_owned());
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use lowtide_admission::ReclaimerStats;
    use tracing_subscriber::layer::{Context, SubscriberExt as _};

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
            events.add_event(at(nth), "reject", about, 1, String::new());
        }
        for nth in 1_001..=1_050 {
            events.add_event(at(nth), "reject", "full", 3, String::new());
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
        events.add_event(at(500), "reject", "full", 1, String::new());
        let back = events.all().into_iter().find(|event| event.at == at(500) && event.sum == 1);
        assert_eq!(back.map(|event| (event.since, event.times)), Some((at(500), 1)));
        // A later episode is an event of its own.
        events.add_event(at(1_200), "reject", "full", 1, String::new());
        assert_eq!(events.all().last().map(|event| event.sum), Some(1));
    }

    /// A publication of a `Memory` with an arena, a resource and a reclaimer.
    fn published(memory: &crate::Memory) -> MemorySnapshot {
        let mut snapshot = memory.snapshot();
        (snapshot.host.level, snapshot.oom_kills) = (Level::None, Some(1));
        snapshot.signal.limit.bytes = ByteSize::gib(1);
        snapshot.admission.rejected = [0, 7, 0, 0, 0, 0, 0, 0, 0, 0];
        snapshot.entered = [0; 4];
        snapshot
    }

    #[test]
    fn a_difference_is_told_once_with_what_it_is_about() {
        let memory = crate::Memory::builder().detached().start().expect("it needs nothing");
        let arena = memory.devices().open_arena("a").expect("opens");
        let model = memory.managed("m", || Ok(())).register().expect("registered");
        let before = published(&memory);
        arena.sleep(crate::device::SleepOptions::default()).expect("asleep");
        drop(arena.enter().expect("awake"));
        drop(model.acquire_blocking().expect("loaded"));
        assert!(model.unload(UnloadReason::Pressure));
        let mut now = published(&memory);
        now.entered = [0, 1, 1, 0];
        let snapshot = &mut now;
        (snapshot.host.level, snapshot.oom_kills) = (Level::High, Some(3));
        snapshot.signal.limit.bytes = ByteSize::mib(512);
        (snapshot.admission.rejected[0], snapshot.admission.rejected[1]) = (1, 10);
        snapshot.admission.observed[5] = 2;
        snapshot.resources[0].loads_failed_total = 1;
        let mut reclaimer = ReclaimerStats::default();
        (reclaimer.name, reclaimer.calls_total) = ("c".into(), 2);
        reclaimer.released_total = ByteSize::mib(3);
        snapshot.reclaimers = vec![reclaimer];
        let told = |now: &MemorySnapshot, before: &MemorySnapshot| {
            let mut told = Vec::new();
            now.since(before, |kind, about, _, text| told.push(format!("{kind} {about}: {text}")));
            told
        };
        let expected = [
            "level host: pressure high, was none",
            "limit host: limit 512.0 MiB, was 1.0 GiB",
            "sleep a: fell asleep",
            "wake a: woke",
            "load m: load failed; the log has the error",
            "unload m: unloaded: pressure",
            "load m: loaded",
            "reclaim c: 3.0 MiB released",
            "reject too_large: 1 request rejected",
            "reject full: 3 requests rejected",
            "observe slow_start: 2 would have waited or been rejected",
            "kill cgroup: processes killed by the kernel (OOM): 2",
        ];
        assert_eq!(told(&now, &before), expected);
        assert!(told(&now, &now).is_empty(), "nothing new");
        // The bug: what happened before the first publication was never told.
        let mut first = before.clone();
        first.resources[0].loads_ok_total = 1;
        assert_eq!(
            told(&first, &first.at_start()),
            ["load m: loaded", "reject full: 7 requests rejected"]
        );
        // A level that was reached and left in between.
        let after = MemorySnapshot { entered: [1, 1, 1, 1], ..before.clone() };
        let expected = ["level host: pressure none, was none, reached critical"];
        assert_eq!(told(&after, &before), expected);
    }

    /// The bug: a limit that moves with the memory of others, as that of an ancestor of the cgroup,
    /// was a line of the log each second.
    #[test]
    fn a_limit_that_moves_all_the_time_is_logged_rarely() {
        let memory = crate::Memory::builder().detached().start().expect("it needs nothing");
        let (mut watch, events) = (Watch::default(), EventLog::default());
        let lines = Lines::default();
        let subscriber = tracing_subscriber::registry().with(lines.clone());
        tracing::subscriber::with_default(subscriber, || {
            for second in 0..600 {
                let mut now = published(&memory);
                now.now = Moment::after_origin(Duration::from_secs(second));
                now.signal.limit.bytes = ByteSize::mib(1000 + second % 2);
                watch.see(&Arc::new(now), &events);
            }
        });
        let count = lines.0.load(Ordering::Relaxed);
        assert!((10..=70).contains(&count), "{count} in ten minutes");
    }

    /// Counts log lines about the limit.
    #[derive(Clone, Default)]
    struct Lines(Arc<AtomicUsize>);

    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Lines {
        fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
            if format!("{event:?}").contains("memory limit changed") {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    #[test]
    fn a_publication_is_told_once_even_if_nothing_follows_it() {
        let memory = crate::Memory::builder().detached().start().expect("it needs nothing");
        let (mut watch, events) = (Watch::default(), EventLog::default());
        let first = Arc::new(published(&memory));
        watch.see(&first, &events);
        let told = events.all();
        assert!(told.iter().any(|event| event.kind == "reject" && event.sum == 7), "{told:?}");
        // The bug: after a panic of a recorder or a hook, all of it was told again.
        watch.see(&first, &events);
        assert_eq!(events.all(), told);
    }
}

//! Answers "where did the memory go, and is anything wrong?" in sentences.
//!
//! Called for the endpoints. It relies on a snapshot, the breakdown of the physical memory, the
//! running requests and the last events; it measures nothing itself. Each finding is one sentence
//! that names its figures. The rules are in the order of their urgency, so the first finding that
//! is a problem is the summary.
//!
//! Invariant: without a problem the summary says that memory is in order.

use std::fmt;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::short;
use crate::sync::lock;
use lowtide_admission::{Budget, Level, LimitSource, RejectReason, RequestPhase};

use super::breakdown::{Breakdown, MemoryPart, PartKind, list};
use super::error::Diagnostic;
use super::events::{Event, by_reason, is_shortage};
use super::report::MemoryReport;
use super::shared::Shared;
use super::snapshot::MemorySnapshot;
use super::trend::LeakReport;

/// Rejections in this time are a problem of now.
const RECENT: Duration = Duration::from_secs(60);
/// Evictions in this time are mentioned.
const EVICTED: Duration = Duration::from_secs(3600);
/// Memory that is not live is mentioned from this size on, if it is also half of what is physical.
const RETAINED_MIN: ByteSize = ByteSize::mib(32);
/// Below this part of the limit, in percent, a high level is a remainder of a peak.
const FALLEN_PERCENT: u64 = 70;
/// The time for which live memory is observed before its growth is mentioned.
const OBSERVED_MIN: Duration = Duration::from_secs(600);
/// A growth that fills the limit within this time is mentioned.
const FULL_WITHIN: Duration = Duration::from_secs(24 * 3600);
/// A growth that fills the limit within this time is a problem.
const SOON_FULL: Duration = Duration::from_secs(6 * 3600);
/// The factor from which requests use memory that is not attributed to them.
const FACTOR_HIGH: f64 = 1.6;

/// The state of the host's memory in sentences.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Verdict {
    /// The most urgent problem, or that memory is in order.
    pub summary: String,
    /// All findings, in the fixed order of their subjects. The first that is a problem is the
    /// summary.
    pub findings: Vec<Diagnostic>,
}

/// Writes the summary, and each other finding in a line of its own.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.summary)?;
        let mut others = self.findings.iter().filter(|finding| finding.text != self.summary);
        others.try_for_each(|finding| write!(f, "\n{}", finding.text))
    }
}

impl Verdict {
    pub(super) fn new(shared: &Shared, snapshot: &MemorySnapshot, breakdown: &Breakdown) -> Self {
        let events = &shared.here(|shared| shared.events.all());
        let trend = shared.here(|shared| Some(lock(&shared.quiet_times).report(None)));
        let rules = [
            exhausted(snapshot, breakdown),
            observing(snapshot),
            rejections(shared, snapshot, breakdown, events),
            level(snapshot, breakdown),
            misfit(snapshot, shared.admission.state().loadable(Budget::Host)),
            trend.and_then(|trend| leak(breakdown, &trend)),
            retained(snapshot, breakdown),
            untracked(snapshot, breakdown),
            #[cfg(feature = "device")]
            snapshot.devices.first_lost().and_then(|(name, error)| {
                let text = format!("Device {name} is lost until the process restarts: {error}.");
                problem("device", text)
            }),
            eviction(snapshot, events),
        ];
        let findings: Vec<_> = rules.into_iter().flatten().collect();
        let problem = findings.iter().find(|finding| finding.is_problem);
        let summary = match problem {
            Some(problem) => problem.text.clone(),
            None => format!("Memory is in order: {}.", used(snapshot, breakdown)),
        };
        Self { summary, findings }
    }
}

/// Returns the physical memory against the limit, with its largest parts.
fn used(snapshot: &MemorySnapshot, breakdown: &Breakdown) -> String {
    let (physical, limit) = (snapshot.physical, snapshot.limit());
    let mut of_limit = match percent(snapshot) {
        Some(percent) => format!("{physical} of {limit} ({percent} %)"),
        None => format!("{physical}"),
    };
    if snapshot.signal.limit.source == LimitSource::Fit {
        of_limit.push_str(" in a fit");
    }
    let largest = list(&breakdown.largest(2), " and ");
    if largest.is_empty() { of_limit } else { format!("{of_limit}, mostly {largest}") }
}

/// Returns the physical memory as a percentage of the limit, if there is one.
fn percent(snapshot: &MemorySnapshot) -> Option<u64> {
    let (physical, limit) = (snapshot.physical, snapshot.limit());
    let known = limit != ByteSize::MAX && !limit.is_zero();
    known.then(|| physical.get().saturating_mul(100) / limit.get())
}

fn problem(about: &'static str, text: String) -> Option<Diagnostic> {
    Some(Diagnostic::warning(about, text))
}

fn exhausted(snapshot: &MemorySnapshot, breakdown: &Breakdown) -> Option<Diagnostic> {
    if !snapshot.exhausted {
        return None;
    }
    let ceiling = snapshot.host.ceiling;
    let held = breakdown.largest(3);
    let held: Vec<_> = held.into_iter().filter(|part| part.kind != PartKind::Requests).collect();
    let held = list(&held, ", ");
    let text = format!(
        "Memory that no request owns leaves no room for requests below the ceiling of {ceiling}: \
         {held}."
    );
    problem("exhausted", text)
}

fn observing(snapshot: &MemorySnapshot) -> Option<Diagnostic> {
    let counts = by_reason(&snapshot.admission.observed);
    let counts = if counts.is_empty() { "none" } else { &counts };
    let text = format!(
        "Observe mode: every request is admitted; would have waited or been rejected: {counts}."
    );
    snapshot.admission.observe_mode.then(|| Diagnostic::info("admission", text))
}

fn rejections(
    shared: &Shared,
    snapshot: &MemorySnapshot,
    breakdown: &Breakdown,
    events: &[Event],
) -> Option<Diagnostic> {
    let since = snapshot.since_epoch.saturating_sub(RECENT);
    let now = snapshot.since_epoch;
    let is_recent = |event: &&Event| (since..=now).contains(&event.at);
    let recent = events.iter().filter(|event| event.kind == "reject").filter(is_recent);
    let reason = |event: &Event| {
        let why = RejectReason::ALL.into_iter().find(|why| why.name() == event.about);
        why.filter(|why| is_shortage(*why))
    };
    let recent = recent.filter_map(|event| Some((event, reason(event)?)));
    let (most, why) = recent.max_by_key(|(event, _)| event.sum)?;
    let ceiling = snapshot.host.ceiling;
    let cause = match why {
        RejectReason::Full => full(shared, snapshot, breakdown),
        RejectReason::Pressure => format!(
            "the pressure level was {} or higher; now {}",
            Level::High.name(),
            used(snapshot, breakdown)
        ),
        RejectReason::TooLarge => {
            format!("each needs more than the ceiling of {ceiling}; look for the client")
        }
        RejectReason::Exhausted => format!("memory outside requests fills all of {ceiling}"),
        RejectReason::SlowStart => {
            "their routes are not measured yet; it ends after eight successes".to_owned()
        }
        RejectReason::Outgrown => {
            "more was held than reserved; the events `cancel` name the routes".to_owned()
        }
        RejectReason::HeldTooLong => "memory was held for longer than allowed".to_owned(),
        RejectReason::DeviceLost => "the device is lost; restart the process".to_owned(),
        _ => why.name().to_owned(),
    };
    let (count, reason) = (most.sum, &most.about);
    let ago = short(snapshot.since_epoch.saturating_sub(most.at));
    let were = if count == 1 { "request was" } else { "requests were" };
    let text = format!("{count} {were} rejected as `{reason}`, the last {ago} ago: {cause}.");
    problem("rejections", text)
}

/// Explains why requests did not fit, from the running ones.
fn full(shared: &Shared, snapshot: &MemorySnapshot, breakdown: &Breakdown) -> String {
    let ledger = shared.admission.ledger(Budget::Host);
    let (reserved, room) = (ledger.requests(), ledger.request_room());
    let oldest = MemoryReport(shared).oldest_requests();
    let (ceiling, physical) = (snapshot.host.ceiling, snapshot.physical);
    let live = breakdown.total(PartKind::Requests);
    let held = snapshot.admission.held();
    let factor = snapshot.host.correction_factor;
    let waits = |phase| matches!(phase, RequestPhase::Receiving | RequestPhase::Suspended);
    let slow = oldest.iter().filter(|request| waits(request.phase)).count();
    let at = match percent(snapshot) {
        Some(percent) => format!("physical memory is at {percent} % of the limit"),
        None => format!("physical memory is {physical}"),
    };
    let reserves = format!("{held} requests have reserved {reserved} of {room} and hold {live}");
    if 4 * room.get().min(u64::MAX / 4) < ceiling.get() {
        let owner = breakdown.largest(3);
        let owner = owner.into_iter().find(|part| part.kind != PartKind::Requests);
        let owner = owner.map_or_else(String::new, |part| format!(", mostly {part}"));
        return format!(
            "{at}, and memory that no request owns leaves requests {room} of the ceiling of \
             {ceiling}{owner}"
        );
    }
    if slow > 0 && 2 * slow >= oldest.len() && live.get() < reserved.get() / 2 {
        return format!(
            "{at}, but room is reserved, not used: {reserves}, because {slow} of the {} oldest \
             wait for their clients to send bodies; see the minimum data rate",
            oldest.len()
        );
    }
    if factor >= FACTOR_HIGH {
        return format!(
            "{at}; {reserves}, but the process uses {factor:.1} bytes for each byte that requests \
             hold: some memory of requests is not attributed to them (spawned work without a \
             scope, C code), or estimates are too low"
        );
    }
    format!("{at}; {reserves}: the service is at its capacity for requests of this size")
}

fn level(snapshot: &MemorySnapshot, breakdown: &Breakdown) -> Option<Diagnostic> {
    if snapshot.host.level < Level::High {
        return None;
    }
    let (used, level) = (used(snapshot, breakdown), snapshot.host.level.name());
    if percent(snapshot) < Some(FALLEN_PERCENT) {
        // A level is left one step at a time.
        let text = format!("Pressure is still {level}, but physical memory has fallen to {used}.");
        return Some(Diagnostic::info("level", text));
    }
    problem("level", format!("Pressure is {level}: {used}."))
}

/// Names a resource that was to be loaded and can never fit.
fn misfit(snapshot: &MemorySnapshot, loadable: ByteSize) -> Option<Diagnostic> {
    let mut refused = snapshot.resources.iter().filter(|of| of.loads_refused_total > 0);
    let resource = refused.find(|of| !of.loaded && of.cost.host > loadable)?;
    let text = format!(
        "The resource {:?} cannot be loaded: it needs {}, of which the ceiling of {} leaves \
         {loadable}; expected a larger limit or a smaller cost.",
        resource.name, resource.cost.host, snapshot.host.ceiling
    );
    problem("resource", text)
}

/// Extrapolates the growth of live memory between quiet times to the limit.
fn leak(breakdown: &Breakdown, trend: &LeakReport) -> Option<Diagnostic> {
    let growth = trend.growth_per_hour.filter(|growth| *growth > 0.0)?;
    let (first, last) = (trend.points.first()?.0, trend.points.last()?.0);
    if last.saturating_sub(first) < OBSERVED_MIN {
        return None; // a service that warms up
    }
    let hours = breakdown.headroom?.as_f64() / growth;
    let left = Duration::try_from_secs_f64(hours * 3600.0).ok()?;
    if left > FULL_WITHIN {
        return None;
    }
    let text = format!(
        "Live memory between quiet times grows by {} an hour, and would fill the limit in {}; \
         `/memory?with=leaks` lists the call sites that grow.",
        ByteSize::new(1).scaled(growth),
        short(left)
    );
    Some(Diagnostic { about: "leak", is_problem: left <= SOON_FULL, text })
}

/// Returns `true` if bytes that are not live are to be mentioned.
fn is_large(bytes: ByteSize, snapshot: &MemorySnapshot) -> bool {
    bytes >= RETAINED_MIN && bytes.get() >= snapshot.physical.get() / 2
}

/// Explains physical memory of the heap that is not live.
fn retained(snapshot: &MemorySnapshot, breakdown: &Breakdown) -> Option<Diagnostic> {
    let heap = snapshot.heap?;
    let free = match snapshot.unreleased.is_zero() {
        true => "which decay or a purge releases",
        false => "which the kernel does not take back and requests use again: see the diagnostics",
    };
    let kinds = [
        (PartKind::FreePages, free),
        (PartKind::Fragmentation, "which no purge releases: see the size classes"),
        (PartKind::ThreadCaches, "which threads release when they park"),
    ];
    let total: ByteSize = kinds.iter().map(|(kind, _)| breakdown.total(*kind)).sum();
    if !is_large(total, snapshot) {
        return None;
    }
    let (kind, release) = kinds.into_iter().max_by_key(|(kind, _)| breakdown.total(*kind))?;
    let parts = MemoryPart { kind, name: None, bytes: breakdown.total(kind) };
    let text = format!(
        "physical memory is {}, live heap {}: the heap retains {total}, mostly {parts}, {release}.",
        snapshot.physical, heap.live
    );
    let is_problem = percent(snapshot) >= Some(50);
    Some(Diagnostic { about: "retained", is_problem, text })
}

fn untracked(snapshot: &MemorySnapshot, breakdown: &Breakdown) -> Option<Diagnostic> {
    let bytes = breakdown.total(PartKind::Untracked);
    if !is_large(bytes, snapshot) {
        return None;
    }
    let text = format!(
        "{bytes} of {} physical memory are neither heap nor arenas: C code, stacks or other \
         processes of the container; `/memory?with=mappings` lists the memory of this process.",
        snapshot.physical
    );
    let is_problem = percent(snapshot) >= Some(50);
    Some(Diagnostic { about: "untracked", is_problem, text })
}

/// Names the last eviction.
fn eviction(snapshot: &MemorySnapshot, events: &[Event]) -> Option<Diagnostic> {
    let since = snapshot.since_epoch.saturating_sub(EVICTED);
    let recent = since..=snapshot.since_epoch;
    let last = events.iter().rfind(|event| event.kind == "evict" && recent.contains(&event.at))?;
    let ago = short(snapshot.since_epoch.saturating_sub(last.at));
    let text = format!("{:?} was {}, {ago} ago.", last.about, last.text);
    Some(Diagnostic::info("eviction", text))
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::memory::trend::QuietTimes;

    /// Live memory that grows by this many MiB an hour, observed for this time.
    fn trend(mib: f64, minutes: u64) -> LeakReport {
        let point = |minute| (Duration::from_secs(minute * 60), ByteSize::mib(10));
        let growth_per_hour = Some(mib * ByteSize::mib(1).as_f64());
        let points = vec![point(0), point(minutes)];
        LeakReport { points, growth_per_hour, ..QuietTimes::default().report(None) }
    }

    #[test]
    fn a_verdict_is_written_as_its_summary_and_the_other_findings_once_each() {
        let finding =
            |is_problem, text: &str| Diagnostic { about: "level", is_problem, text: text.into() };
        let findings = vec![finding(false, "One."), finding(true, "Two."), finding(true, "Three.")];
        let verdict = Verdict { summary: "Two.".to_owned(), findings };
        assert_eq!(verdict.to_string(), "Two.\nOne.\nThree.");
        let verdict = Verdict { summary: "Memory is in order.".to_owned(), findings: Vec::new() };
        assert_eq!(verdict.to_string(), "Memory is in order.");
    }

    /// The bug: a leak that would fill the limit within half an hour was "in order".
    #[test]
    fn a_growth_that_fills_the_limit_is_a_problem_and_a_warm_up_is_not() {
        let breakdown = |headroom: Option<u64>| Breakdown {
            parts: Vec::new(),
            headroom: headroom.map(ByteSize::mib),
        };
        let found = |mib, minutes, headroom| leak(&breakdown(headroom), &trend(mib, minutes));
        let soon = found(100.0, 20, Some(50)).expect("half an hour");
        let text = "Live memory between quiet times grows by 100.0 MiB an hour, and would fill the \
                    limit in 30.0 min; `/memory?with=leaks` lists the call sites that grow.";
        assert_eq!((soon.is_problem, soon.text.as_str()), (true, text));
        assert!(!found(10.0, 20, Some(100)).expect("ten hours").is_problem);
        assert!(found(10.0, 20, Some(10_000)).is_none(), "weeks");
        assert!(found(100.0, 9, Some(50)).is_none(), "it may warm up");
        assert!(found(-100.0, 20, Some(50)).is_none() && found(100.0, 20, None).is_none());
    }
}

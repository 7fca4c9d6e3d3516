//! Why the last run ended: a cause and a sentence, from its recording.
//!
//! A run that ended in order recorded that. A run that was killed could not: the kernel's counts,
//! and the memory at its last samples, then tell a lack of memory from other causes.
//!
//! Pure: no file, clock or environment.

use std::fmt::Write as _;
use std::time::Duration;

use crate::bytes::ByteSize;
use lowtide_admission::{Level, RequestMemory};

use crate::memory::events::Event;

use super::format::{FileContents, FlightRecording, FlightResource, FlightSample, RunEnd};

/// The share of the limit from which a killed run is taken to have reached it: at this level
/// requests are rejected, since the kernel may kill.
const AT_LIMIT: f64 = 0.93;
/// The same after the growth that is expected until the next look. Lower than one, because page
/// cache that the kernel cannot reclaim at once counts too.
const REACHED: f64 = 0.95;
/// The share of the limit from which a kill on this machine since the last sample is taken to have
/// been this one's.
const KILLED_NEARBY: f64 = 0.5;
/// The time after the last sample for which growth is expected to continue. An estimate: two looks.
const EXPECTED: Duration = Duration::from_millis(100);
/// The share of the memory by which it must be expected to grow for the growth to be named.
const GROWTH_TOLD: f64 = 0.01;

lowtide_core::named_enum! {
    /// The cause of the end of a run.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum ExitCause {
        /// `Memory::shutdown` was called.
        Shutdown = "shutdown",
        /// The same, because memory was exhausted and the policy is
        /// [`ExhaustionPolicy::Exit`](crate::config::ExhaustionPolicy::Exit).
        Exhausted = "exhausted",
        /// The last handle was dropped without a shutdown.
        Dropped = "dropped",
        /// The last handle was dropped by a panic.
        Panicked = "panicked",
        /// It was killed for memory: by the kernel's count of kills, or because its memory was at
        /// the limit or was about to reach it.
        OutOfMemory = "out_of_memory",
        /// It was killed after it had been asked to end: it took longer than its supervisor waits.
        KilledWhileEnding = "killed_while_ending",
        /// The machine was restarted, or has stopped.
        Rebooted = "rebooted",
        /// It was killed, it crashed, or it exited without a shutdown. Nothing suggests a lack of
        /// memory.
        Killed = "killed",
        /// The recording is damaged, or of another version of the format.
        #[default]
        Unknown = "unknown",
    }
}

impl ExitCause {
    /// Returns `true` if the run ended as it should.
    #[must_use]
    pub const fn is_orderly(self) -> bool {
        matches!(self, Self::Shutdown)
    }
}

/// The last run of a service, as its flight recorder left it ([`MemoryReport::last_exit`]).
///
/// [`MemoryReport::last_exit`]: crate::memory::MemoryReport::last_exit
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LastExit {
    /// Why it ended.
    pub cause: ExitCause,
    /// The cause as a sentence, with the figures from which it was concluded.
    pub summary: String,
    /// The time of its last sample, since the Unix epoch; `None` if it recorded none.
    pub at: Option<Duration>,
    /// Its process id.
    pub pid: u32,
    /// The time of its start, since the Unix epoch.
    pub started_at: Duration,
    /// The version of the service; empty if unknown.
    pub version: String,
    /// Its last samples, oldest first: at most 301, one a second.
    pub samples: Vec<FlightSample>,
    /// Its last events, oldest first: at most 256.
    pub events: Vec<Event>,
    /// The requests that had reserved most memory at the end, the largest first: at most 16.
    pub permits: Vec<RequestMemory>,
    /// Its resources: at most 32.
    pub resources: Vec<FlightResource>,
}

/// The share of the physical memory from which its largest published part is named: that of three
/// parts.
const LARGEST_PART: f64 = 0.34;

/// The kernel's state at the next start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Now {
    pub(super) boot_id: [u8; 16],
    /// The inode of the cgroup's folder; zero if unknown.
    pub(super) cgroup: u64,
    /// The processes of the cgroup that were OOM-killed.
    pub(super) cgroup_kills: Option<u64>,
    /// The processes of the machine that were OOM-killed.
    pub(super) machine_kills: Option<u64>,
}

impl LastExit {
    /// Returns the last run of these contents; `None` if there was none.
    pub(super) fn of(contents: FileContents, now: &Now) -> Option<Self> {
        let recording = match contents {
            FileContents::Nothing | FileContents::Foreign => return None,
            FileContents::Unreadable => {
                let summary = "the recording is damaged, or of another version of the format";
                return Some(Self { summary: summary.to_owned(), ..Self::default() });
            }
            FileContents::Recording(recording) => *recording,
        };
        let (cause, summary) = recording.verdict(now);
        let FlightRecording { run, samples, events, permits, resources, .. } = recording;
        Some(Self {
            cause,
            summary,
            at: samples.last().map(|sample| sample.at),
            pid: run.pid,
            started_at: run.started_at,
            version: run.version,
            samples,
            events,
            permits,
            resources,
        })
    }
}

impl FlightRecording {
    fn verdict(&self, now: &Now) -> (ExitCause, String) {
        let after = self.samples.last().map_or(Duration::ZERO, |last| last.uptime);
        let seconds = (after + Duration::from_millis(500)).as_secs();
        let after = humantime::format_duration(Duration::from_secs(seconds)).to_string();
        match self.end {
            RunEnd::ShutDown => (ExitCause::Shutdown, format!("shut down in order after {after}")),
            RunEnd::Exhausted => self.with_memory(
                ExitCause::Exhausted,
                format!("ended by the policy exit after {after}: memory was exhausted"),
            ),
            RunEnd::Dropped => (
                ExitCause::Dropped,
                format!("ended without a shutdown after {after}: its last handle was dropped"),
            ),
            RunEnd::Panicked => (ExitCause::Panicked, format!("ended by a panic after {after}")),
            RunEnd::Running => self.killed(&after, now),
        }
    }

    /// Concludes why a run that did not end was killed.
    fn killed(&self, after: &str, now: &Now) -> (ExitCause, String) {
        let Some(last) = self.samples.last() else {
            return (ExitCause::Killed, "killed or crashed before its first sample".to_owned());
        };
        let known = |id: &[u8; 16]| id.iter().any(|byte| *byte != 0);
        if known(&now.boot_id) && known(&self.run.boot_id) && now.boot_id != self.run.boot_id {
            let text = format!("the machine was restarted or stopped after {after}");
            return self.with_memory(ExitCause::Rebooted, text);
        }
        let physical = share(last.physical, last.limit);
        // A moment after the last sample.
        let growth = last.growth.scaled(EXPECTED.as_secs_f64());
        let expected = share(last.physical.saturating_add(growth), last.limit);
        let is_full = physical >= AT_LIMIT || expected >= REACHED;
        let rose = |then: Option<u64>, now: Option<u64>| {
            then.zip(now).is_some_and(|(then, now)| now > then)
        };
        let is_same_cgroup = now.cgroup != 0 && now.cgroup == self.run.cgroup;
        let is_nearby = is_full || physical >= KILLED_NEARBY;
        let by = if is_same_cgroup && rose(last.oom_kills, now.cgroup_kills) {
            "by the kernel's OOM killer, which counts a kill in its cgroup"
        } else if is_nearby && rose(self.machine_kills, now.machine_kills) {
            "by the kernel's OOM killer, which counts a kill on this machine"
        } else if last.ending {
            // Memory may be full at a shutdown: nothing counted a kill.
            let text = format!(
                "killed after {after}, after it was asked to end: it took longer than its \
                 supervisor waits"
            );
            return self.with_memory(ExitCause::KilledWhileEnding, text);
        } else if is_full {
            "most likely by the kernel's OOM killer"
        } else {
            let text = format!("killed, crashed or exited without a shutdown after {after}");
            return self.with_memory(ExitCause::Killed, text);
        };
        self.with_memory(ExitCause::OutOfMemory, format!("killed {by}, after {after}"))
    }

    /// Adds the memory at the end to a sentence, and the request that held most.
    fn with_memory(&self, cause: ExitCause, mut text: String) -> (ExitCause, String) {
        let Some(last) = self.samples.last() else { return (cause, text) };
        // Writing to a string does not fail.
        let _ = write!(text, "; physical memory was {}", last.physical);
        if last.limit != ByteSize::MAX {
            let percent = 100.0 * share(last.physical, last.limit);
            let _ = write!(text, ", {percent:.0} % of the limit of {}", last.limit);
        }
        if last.growth.scaled(EXPECTED.as_secs_f64()) > last.physical.scaled(GROWTH_TOLD) {
            let _ = write!(text, ", and grew by {}/s", last.growth);
        }
        if last.exhausted {
            text.push_str("; memory that no request owns left no room for requests");
        } else if last.level >= Level::High {
            let _ = write!(text, "; the level was {}", last.level.name());
        }
        let holders = [
            ("live heap", last.heap_live),
            ("retained heap", last.heap_retained),
            ("other memory", last.other.unwrap_or_default()),
        ];
        let largest = holders.into_iter().max_by_key(|(_, bytes)| *bytes);
        if let Some((name, bytes)) = largest.filter(|(_, bytes)| !bytes.is_zero()) {
            // Less than that is of the time before it grew.
            let _ = if bytes >= last.physical.scaled(LARGEST_PART) {
                write!(text, "; the largest part was {name} with {bytes}")
            } else {
                write!(text, "; most of it was allocated since metrics were last published")
            };
        }
        if let Some(permit) = self.permits.iter().max_by_key(|permit| permit.live)
            && !permit.live.is_zero()
        {
            let RequestMemory { method, route, live, .. } = permit;
            let _ = write!(text, "; the largest request was {method} {route} with {live}");
        }
        (cause, text)
    }
}

fn share(physical: ByteSize, limit: ByteSize) -> f64 {
    if limit == ByteSize::MAX || limit.is_zero() { 0.0 } else { physical.as_f64() / limit.as_f64() }
}

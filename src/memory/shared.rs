//! The state shared by the handle and the two threads.
//!
//! Holds the parts and connects them; contains no policy. None of its locks is held across a driver
//! call, a purge or a callback.
//!
//! Invariant: `purges[t]` counts each purge of trigger `t` once, when it has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Clock, short};
use crate::config::{Config, ExhaustionPolicy};
use crate::fork::Birth;
use crate::metrics::record::MetricsWriter;
use crate::sync::{Mutex, lock};
use lowtide_admission::{
    Admission, Budget, Level, Mappings, PressureState, ResourceStats, Resources, Signal, Signals,
    Trigger,
};
use lowtide_heap::{self as heap, HeapProbe, HostArena, HostArenaStats, HostError, PurgeReport};

use super::admin::AdminTasks;
use super::breakdown::{Breakdown, PartKind, list};
#[cfg(feature = "device")]
use super::devices::Devices;
use super::error::{Diagnostic, MemoryError};
use super::events::EventLog;
use super::fit::FitTask;
use super::flight::Flight;
use super::own_arena::Loads;
use super::profiles::Profiles;
use super::running::ProcessClaim;
use super::slow_value::SlowValue;
use super::snapshot::{BudgetSnapshot, MemorySnapshot};
use super::trend::{MetricsHistory, QuietTimes};

/// The maximum number of holders that are named when memory is exhausted.
const HOLDERS_MAX: usize = 5;
/// The maximum number of diagnostics.
const NOTES_MAX: usize = 64;

pub(super) struct Shared {
    /// The memory of this process at the start, without free pages of the heap.
    pub(super) held_at_start: ByteSize,
    pub(super) config: Config,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) birth: Birth,
    /// The time of the start, since the Unix epoch.
    pub(super) started_at: Duration,
    pub(super) admission: Admission,
    pub(super) resources: Resources,
    pub(super) state: Arc<PressureState>,
    #[cfg(feature = "device")]
    pub(super) devices: Devices,
    pub(super) heap: Option<HeapProbe>,
    pub(super) signals: Arc<Signals>,
    pub(super) bound_arenas: Option<u32>,
    /// The maximum number of jemalloc's background threads.
    pub(super) background_threads: u32,
    pub(super) diagnostics: Mutex<Vec<Diagnostic>>,
    pub(super) purges: Purges,
    pub(super) claim: Arc<ProcessClaim>,
    pub(super) events: Arc<EventLog>,
    pub(super) flight: Arc<Flight>,
    pub(super) history: MetricsHistory,
    pub(super) quiet_times: Mutex<QuietTimes>,
    pub(super) mappings: SlowValue<Option<Mappings>>,
    /// `None` if the heap profiler is not active.
    pub(super) profiles: Option<Arc<Profiles>>,
    pub(super) admin_tasks: AdminTasks,
    /// The fit in force.
    pub(super) fit: Mutex<Option<FitTask>>,
    pub(super) loads: Loads,
    /// `true` once the policy for exhaustion ends the process: completes `Memory::terminated`.
    #[cfg(feature = "tokio")]
    pub(super) ending: tokio::sync::watch::Sender<bool>,
}

/// Counts of purges, for metrics.
#[derive(Debug, Default)]
pub(super) struct Purges {
    by_trigger: [AtomicU64; Trigger::ALL.len()],
    /// The released bytes, by [`Purges::HEAPS`].
    bytes: [AtomicU64; 3],
}

impl Purges {
    pub(super) fn total(&self, trigger: Trigger) -> u64 {
        self.by_trigger[trigger as usize].load(Ordering::Relaxed)
    }

    /// The heaps, with jemalloc's muzzy pages separately.
    const HEAPS: [&str; 3] = ["jemalloc", "muzzy", "libc"];

    /// Returns the released bytes by heap.
    pub(super) fn bytes(&self) -> [(&'static str, u64); 3] {
        std::array::from_fn(|nth| (Self::HEAPS[nth], self.bytes[nth].load(Ordering::Relaxed)))
    }

    fn add(&self, report: &PurgeReport) {
        let released = [report.dirty(), report.muzzy, report.libc.unwrap_or_default()];
        for (total, bytes) in self.bytes.iter().zip(released) {
            total.fetch_add(bytes.get(), Ordering::Relaxed);
        }
    }
}

/// The result of a purge.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Purged {
    /// The result for the heap: jemalloc's and the C library's, each with bytes and time.
    pub heap: Result<PurgeReport, HostError>,
    /// The bytes released by device arenas, including host memory kept for their next sleep; zero
    /// in a build without device arenas.
    pub device: ByteSize,
    /// The duration of the purge.
    pub took: Duration,
}

impl Purged {
    /// Returns all bytes released.
    #[must_use]
    pub fn released(&self) -> ByteSize {
        let heap = self.heap.as_ref().map_or(ByteSize::ZERO, PurgeReport::released);
        heap.saturating_add(self.device)
    }
}

impl Shared {
    pub(super) fn check_here(&self) -> Result<(), MemoryError> {
        if self.birth.is_here() { Ok(()) } else { Err(MemoryError::Forked) }
    }

    /// Returns what `get` finds; the default in a forked child, in which a thread of the parent may
    /// hold a lock.
    pub(super) fn here<R: Default>(&self, get: impl FnOnce(&Self) -> R) -> R {
        if self.birth.is_here() { get(self) } else { R::default() }
    }

    /// Keeps a diagnostic unless it is known, and logs it once, without holding the lock: a
    /// subscriber may read the diagnostics.
    pub(super) fn add_diagnostic(&self, diagnostic: Diagnostic) {
        let mut diagnostics = lock(&self.diagnostics);
        if diagnostics.len() < NOTES_MAX && !diagnostics.contains(&diagnostic) {
            diagnostics.push(diagnostic.clone());
            drop(diagnostics);
            self.events.add(
                self.clock.since_epoch(),
                "diagnostic",
                diagnostic.about,
                diagnostic.text.clone(),
            );
            let Diagnostic { about, is_problem, text } = diagnostic;
            if is_problem {
                log!(warn, about, "{text}");
            } else {
                log!(info, about, "{text}");
            }
        }
    }

    /// Keeps a diagnostic unless there is one with the same subject and beginning.
    pub(super) fn add_diagnostic_once(&self, start: &str, diagnostic: Diagnostic) {
        let said =
            |other: &Diagnostic| other.about == diagnostic.about && other.text.starts_with(start);
        let is_said = lock(&self.diagnostics).iter().any(said);
        if !is_said {
            self.add_diagnostic(diagnostic);
        }
    }

    /// Purges the heap on this thread, and the arenas unless the trigger leaves them to their
    /// decay. Counts the purge.
    pub(super) fn purge(&self, trigger: Trigger) -> Purged {
        let start = self.clock.now();
        let heap = self.purge_heap();
        let device = match trigger.leaves_decaying() {
            #[cfg(feature = "device")]
            false => self.purge_devices(),
            _ => ByteSize::ZERO,
        };
        let took = self.clock.now() - start;
        self.purges.by_trigger[trigger as usize].fetch_add(1, Ordering::Relaxed);
        let purged = Purged { heap, device, took };
        let (trigger, released) = (trigger.name(), purged.released());
        if !released.is_zero() {
            let at = self.clock.since_epoch();
            self.events.add_event(at, "purge", trigger, released.get(), String::new());
        }
        log!(debug, trigger, %released, took = %short(took), "memory purged");
        purged
    }

    /// Returns the memory that counts against the limit, with that of arenas which the kernel does
    /// not count.
    pub(super) fn physical(&self, signal: &Signal) -> ByteSize {
        match signal.physical {
            #[cfg(feature = "device")]
            physical => physical.saturating_add(self.committed_beside_kernel()),
            #[cfg(not(feature = "device"))]
            physical => physical,
        }
    }

    /// Returns a writer of the metrics that are published.
    pub(super) fn metrics(&self) -> MetricsWriter {
        MetricsWriter::new(self.config.metrics.value, self.config.process_metrics.value)
    }

    /// Purges the heap and counts the bytes. An error also becomes a diagnostic.
    pub(super) fn purge_heap(&self) -> Result<PurgeReport, HostError> {
        let heap = heap::purge(&*self.clock);
        match &heap {
            Ok(report) => {
                self.purges.add(report);
                if let Some(cause) = report.failure {
                    self.add_diagnostic(Diagnostic::unreleased(cause));
                }
                let to = self.metrics();
                to.purge_duration("jemalloc", report.jemalloc_took);
                to.purge_duration("libc", report.libc_took);
            }
            Err(error) => self.add_diagnostic(Diagnostic::warning("heap", error.to_string())),
        }
        heap
    }

    /// Rejects a resource whose cost is above a ceiling that cannot rise while this `Memory` runs.
    /// The limit of a cgroup can.
    pub(super) fn check_fits(&self, resource: &ResourceStats) -> Result<(), MemoryError> {
        let given = self.config.memory_limit.value.unwrap_or(ByteSize::MAX);
        let host = self.signals.machine().map_or(given, |machine| given.min(machine));
        let cost = self.admission.state().by_budget(resource.cost);
        let limits = [
            (Budget::Host, cost.host, host),
            #[cfg(feature = "device")]
            (Budget::Device, cost.device, self.config.device_limit.value),
        ];
        for (budget, cost, limit) in limits {
            let ceiling = match limit {
                ByteSize::MAX => limit,
                _ => limit.scaled(self.config.ceiling.value),
            };
            if cost > ceiling {
                let name = resource.name.to_string();
                return Err(MemoryError::ResourceTooLarge { name, budget, cost, ceiling });
            }
        }
        Ok(())
    }

    /// Adds a diagnostic, once, if a resource cannot be loaded because its cost is above what the
    /// ceiling leaves. That may change with the limit of a cgroup, so this is checked after each
    /// rejected load.
    pub(super) fn note_misfit(&self, resource: &ResourceStats) {
        for (budget, cost) in
            [(Budget::Host, resource.cost.host), (Budget::Device, resource.cost.device)]
        {
            let most = self.admission.state().loadable(budget);
            if cost <= most {
                continue;
            }
            let ceiling = self.admission.ledger(budget).ceiling();
            let start = format!("{:?} needs ", resource.name);
            let text = format!(
                "{start}{cost} of {budget} memory, of which the ceiling of {ceiling} leaves \
                 {most}: it cannot be loaded; expected a larger limit or a smaller cost"
            );
            self.add_diagnostic_once(&start, Diagnostic::warning("resources", text));
        }
    }

    /// Logs the start or end of exhaustion: memory outside requests leaves no room for requests.
    /// Adds an event first. The largest holders are listed.
    pub(super) fn report_exhaustion(&self, exhausted: bool) {
        let snapshot = self.snapshot();
        let breakdown = self.breakdown(&snapshot);
        let largest = list(&breakdown.largest(HOLDERS_MAX), ", ");
        let text = if exhausted {
            format!("no room for requests: {largest}")
        } else {
            "room for requests again".to_owned()
        };
        // A separate subject, because the host's level changes at the same moment, and one event
        // would replace the other.
        self.events.add(snapshot.since_epoch, "level", "requests", text);
        let (physical, ceiling) = (snapshot.physical, snapshot.host.ceiling);
        if exhausted {
            let heap = snapshot.heap.unwrap_or_default();
            let (heap_live, heap_retained) = (heap.live, heap.retained());
            let [arenas, resources, untracked] =
                [PartKind::Arena, PartKind::Resource, PartKind::Untracked]
                    .map(|kind| breakdown.total(kind));
            log!(
                error,
                policy = self.config.exhaustion_policy.value.name(),
                %physical,
                %ceiling,
                %heap_live,
                %heap_retained,
                %arenas,
                %resources,
                %untracked,
                largest,
                "memory exhausted"
            );
        } else {
            log!(info, %physical, %ceiling, "memory exhaustion ended");
        }
    }

    /// Logs that exhaustion asks for a restart of the process, and completes the shutdown futures
    /// if the policy is to exit.
    pub(super) fn report_restart(&self) {
        let policy = self.config.exhaustion_policy.value.name();
        let text = format!("memory exhausted: restart needed ({policy})");
        self.events.add(self.clock.since_epoch(), "level", "process", text);
        log!(error, policy, "restart needed");
        #[cfg(feature = "tokio")]
        if self.ends_exhausted() {
            self.ending.send_replace(true);
        }
    }

    /// Returns `true` if the policy for exhaustion ends the process.
    pub(super) fn ends_exhausted(&self) -> bool {
        let policy = self.config.exhaustion_policy.value;
        matches!(policy, ExhaustionPolicy::Exit { .. }) && self.state.needs_restart()
    }

    /// Returns the diagnostics; none in a forked child.
    pub(super) fn diagnostics(&self) -> Vec<Diagnostic> {
        self.here(|shared| lock(&shared.diagnostics).clone())
    }

    /// Returns the figures of a budget of the admission.
    pub(super) fn budget(&self, budget: Budget) -> BudgetSnapshot {
        let snapshot = BudgetSnapshot::of(&self.admission, budget, self.state.level(budget));
        let has_parts = budget == Budget::Host && snapshot.ceiling != ByteSize::MAX;
        let ceiling_parts = has_parts.then(|| self.state.ceiling_parts());
        BudgetSnapshot { ceiling_parts, ..snapshot }
    }

    /// Divides the physical memory of a snapshot among its holders.
    pub(super) fn breakdown(&self, snapshot: &MemorySnapshot) -> Breakdown {
        let routes = self.here(|shared| shared.admission.state().routes.read());
        let of_polls = self.here(|_| heap::in_progress());
        Breakdown::new(snapshot, routes.iter().map(|of| of.live).chain(of_polls).sum())
    }

    /// Returns all figures; in a forked child only those that need no lock.
    pub(super) fn snapshot(&self) -> MemorySnapshot {
        // The heap first: a purge may delay it, and would leave an old figure of the kernel next to
        // a new one of the heap.
        let heap = self.heap.as_ref().and_then(|heap| heap.snapshot().ok());
        let signal = self.signals.sample();
        let heap_arenas = self.here(|_| if heap.is_some() { heap_arenas() } else { Vec::new() });
        let sample = self.state.sample();
        MemorySnapshot {
            profile: self.config.profile.value,
            heap,
            heap_arenas,
            #[cfg(feature = "device")]
            devices: self.devices_snapshot(),
            signal,
            cpus: self.signals.cpus(),
            bound_arenas: self.bound_arenas,
            oom_kills: self.signals.oom_kills(),
            events: self.signals.events(),
            psi: self.signals.psi(),
            cgroup: self.signals.cgroup(),
            bounds: self.signals.bounds(),
            physical: self.physical(&signal),
            #[cfg(feature = "device")]
            unified: self.devices.is_unified(),
            #[cfg(not(feature = "device"))]
            unified: true,
            purgeable: sample.purgeable,
            unreleased: sample.unreleased,
            exhausted: self.state.is_exhausted(),
            saturation: self.state.saturation(),
            host: self.budget(Budget::Host),
            device: self.budget(Budget::Device),
            admission: self.admission.stats(),
            resources: self.here(|shared| shared.resources.stats()),
            reclaimers: self.resources.reclaimer_stats(),
            diagnostics: self.diagnostics(),
            now: self.clock.now(),
            since_epoch: self.clock.since_epoch(),
            entered: Level::ALL.map(|level| self.state.entered_total(level)),
        }
    }
}

lowtide_core::debug_as!(Shared, |shared|
    profile: shared.config.profile.value, level: shared.state.level(Budget::Host));

/// Returns the named arenas, as of the last refresh of jemalloc's statistics.
fn heap_arenas() -> Vec<(String, HostArenaStats)> {
    let mut arenas = HostArena::all_as_refreshed().unwrap_or_default();
    arenas.retain(|(name, _)| !name.is_empty());
    arenas
}

/// Returns `true` if a forked child finds this true. One that hangs is ended by the kernel.
#[cfg(all(test, target_os = "linux", not(lowtide_loom)))]
#[expect(unsafe_code, reason = "fork and waitpid are C calls")]
pub(crate) fn holds_in_child(is_true: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `is_true`, which waits for no other thread, and ends with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // Seconds after which the kernel ends the child.
        // SAFETY: sets a timer of this process and touches no memory.
        unsafe { libc::alarm(5) };
        let code = i32::from(!is_true());
        // SAFETY: ends the child at once, without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: `status` is a valid place for an int, and `child` is our own child.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    (waited, status) == (child, 0)
}

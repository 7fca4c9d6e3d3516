//! The worker's maintenance actions on heap, arenas and metrics.
//!
//! Runs only on `lowtide-worker`. A failed action becomes a diagnostic, never a panic.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::metrics::names as name;
use crate::metrics::process::ProcessReader;
use crate::metrics::record::{self, HostPressure, MetricsWriter, label};
use crate::sync::lock;
use lowtide_admission::{ClassStats, Job, Level, MaintenanceActions, SignalError, Trigger};
use lowtide_heap::{self as heap, HostArenaStats};

use super::breakdown::Breakdown;
use super::builder::is_usual;
#[cfg(feature = "device")]
use super::devices::Series;
use super::error::Diagnostic;
use super::events::Watch;
use super::shared::Shared;
use super::snapshot::MemorySnapshot;
use super::trend::RecentPeak;

/// The minimum time between calls of the application's hook, and between descriptions of the
/// metrics to the recorder, which may be installed late; a description costs a sixth of a
/// publication.
const HOOK_EVERY: Duration = Duration::from_secs(5);

/// The maximum number of named heap arenas with metrics series.
const HEAP_ARENAS_MAX: usize = 64;

/// A hook of the application, called on the worker after metrics were published, or after a flush
/// of thread caches was requested.
pub(super) type Hook = Box<dyn FnMut() + Send>;

pub(super) struct MaintenanceExecutor {
    shared: Arc<Shared>,
    hook: Option<Hook>,
    hook_at: Moment,
    /// The time of the next count of mappings.
    mappings_at: Moment,
    /// Wakes parked threads, so that they flush their caches.
    recall_hook: Option<Hook>,
    /// The names of dedicated heap arenas that were published.
    heap_arenas: Vec<String>,
    #[cfg(feature = "device")]
    devices: Series,
    /// The signals that were missing.
    missing: Vec<SignalError>,
    /// The largest number of physical bytes of late.
    peak: RecentPeak,
    process: ProcessReader,
    /// The state at the last publication.
    watch: Watch,
    /// `true` while exhaustion is reported.
    exhausted: bool,
    /// `true` while a needed restart is reported.
    needs_restart: bool,
}

impl MaintenanceActions for MaintenanceExecutor {
    fn purge(&mut self, trigger: Trigger) -> ByteSize {
        if let Some(hook) = &mut self.recall_hook {
            heap::request_tcache_flush();
            hook();
        }
        self.shared.purge(trigger).released()
    }

    fn run(&mut self, job: Job, now: Moment) -> bool {
        let shared = Arc::clone(&self.shared);
        match job {
            #[cfg(feature = "device")]
            Job::DecayDevice => shared.decay_devices(now),
            #[cfg(feature = "device")]
            Job::SleepDevice => return shared.sleep_next(now),
            #[cfg(feature = "device")]
            Job::SampleDevice => shared.sample_devices(now),
            Job::DecayHeap => {
                if let Err(error) = heap::decay_tick() {
                    shared.add_diagnostic(Diagnostic::warning("heap", error.to_string()));
                }
            }
            Job::AdminTask => return shared.run_admin_task(|| self.purge(Trigger::Manual)),
            Job::TendFit => shared.tend_fit(now),
            Job::ReportExhaustion => self.report_exhaustion(),
            Job::Publish => self.publish(now),
            _ => {}
        }
        false
    }
}

impl Drop for MaintenanceExecutor {
    /// Publishes what was counted since the last publication. The next `Memory` of this process
    /// continues these totals.
    fn drop(&mut self) {
        let claim = &self.shared.claim;
        let has_published = claim.is_attached && self.hook_at > Moment::ORIGIN;
        if has_published && claim.birth.is_here() && !std::thread::panicking() {
            let (to, now) = (self.shared.metrics().last(), self.shared.clock.now());
            self.publish_snapshot(to, &self.shared.snapshot(), now);
        }
    }
}

/// Returns the number of mappings of this process, an error if it cannot be read.
fn map_count() -> io::Result<u64> {
    let mut maps = BufReader::with_capacity(64 << 10, File::open("/proc/self/maps")?);
    let mut count = 0;
    // Ends: the kernel ends the text after the last mapping.
    while maps.skip_until(b'\n')? > 0 {
        count += 1;
    }
    Ok(count)
}

impl MaintenanceExecutor {
    /// Creates the actions of a `Memory` that has published nothing yet, with the application's
    /// hooks.
    pub(super) fn new(shared: &Arc<Shared>, hook: Option<Hook>, recall: Option<Hook>) -> Self {
        Self {
            shared: Arc::clone(shared),
            hook,
            hook_at: Moment::ORIGIN,
            mappings_at: Moment::ORIGIN,
            recall_hook: recall,
            heap_arenas: Vec::new(),
            #[cfg(feature = "device")]
            devices: Series::default(),
            missing: shared.signals.missing(),
            peak: RecentPeak::default(),
            process: ProcessReader::default(),
            watch: Watch::default(),
            exhausted: false,
            needs_restart: false,
        }
    }

    fn report_exhaustion(&mut self) {
        let exhausted = self.shared.state.is_exhausted();
        if std::mem::replace(&mut self.exhausted, exhausted) != exhausted {
            self.shared.report_exhaustion(exhausted);
        }
        let needs_restart = self.shared.state.needs_restart();
        if !std::mem::replace(&mut self.needs_restart, needs_restart) && needs_restart {
            self.shared.report_restart();
        }
    }

    fn publish(&mut self, now: Moment) {
        let upkeep = now >= self.hook_at;
        if upkeep {
            self.hook_at = now + HOOK_EVERY;
        }
        #[cfg(feature = "device")]
        self.shared.maintain_devices();
        let start = self.shared.clock.now();
        let snapshot = &Arc::new(self.shared.snapshot());
        self.watch.see(snapshot, &self.shared.events);
        for reclaimer in &snapshot.reclaimers {
            if let Some(message) = &reclaimer.panic {
                let start = format!("reclaimer {:?} panicked: ", reclaimer.name);
                let text = format!("{start}{message}; such a call releases nothing");
                self.shared.add_diagnostic_once(&start, Diagnostic::warning("resources", text));
            }
        }
        self.shared.history.add(snapshot.history_sample());
        self.shared.flight.publish(snapshot);
        // Call sites are compared at a quiet time, unless memory is short.
        if let Some(heap) = &snapshot.heap
            && lock(&self.shared.quiet_times).add(now, snapshot.since_epoch, heap.live)
            && snapshot.host.level == Level::None
            && let Some(profiles) = &self.shared.profiles
        {
            profiles.compare();
        }
        // The figures of a detached `Memory` would mix with those of the process.
        if self.shared.claim.is_attached {
            self.check_mappings(now);
            let to = self.shared.metrics();
            if upkeep {
                to.describe();
            }
            self.publish_snapshot(to, snapshot, now);
            to.put(name::SAMPLER_LAST_RUN, &[], snapshot.since_epoch);
            to.seconds(name::SAMPLER_SECONDS, &[], self.shared.clock.now() - start);
            if upkeep {
                #[cfg(feature = "prometheus")]
                crate::metrics::prometheus::run_upkeep();
                self.hook.iter_mut().for_each(|hook| hook());
            }
        }
    }

    /// Publishes all figures of a snapshot.
    fn publish_snapshot(&mut self, to: MetricsWriter, snapshot: &MemorySnapshot, now: Moment) {
        let version = self.shared.config.service_version.value.as_deref();
        let labels = [
            label("version", env!("CARGO_PKG_VERSION")),
            label("profile", snapshot.profile.name()),
            label("service_version", version.unwrap_or("unknown")),
        ];
        to.put(name::BUILD_INFO, &labels, 1);
        self.publish_host(to, snapshot, now);
        #[cfg(feature = "device")]
        self.devices.publish(to, &self.shared.devices.gone, &snapshot.devices);
        self.publish_kernel(to, snapshot);
        self.publish_requests(to, snapshot);
        for resource in &snapshot.resources {
            if resource.loads_refused_total > 0 {
                self.shared.note_misfit(resource);
            }
            let labels = [label("resource", &resource.name)];
            record::resource(resource, &mut to.to(&labels));
            let last_used = resource.last_used.map(|moment| snapshot.on_wall(moment));
            to.put(name::RESOURCE_LAST_USED, &labels, last_used);
        }
        for reclaimer in &snapshot.reclaimers {
            record::reclaimer(reclaimer, &mut to.to(&[label("reclaimer", &reclaimer.name)]));
        }
        let warnings = snapshot.diagnostics.iter().filter(|it| it.is_problem).count();
        to.put(name::DIAGNOSTICS, &[], warnings as u64);
        to.put(name::SAMPLER_TICKS, &[], self.shared.state.ticks_total());
        to.put(name::SAMPLER_LATENESS, &[], self.shared.state.take_lateness());
    }

    /// Publishes the heap, the process, and the limit with its parts.
    fn publish_host(&mut self, to: MetricsWriter, snapshot: &MemorySnapshot, now: Moment) {
        if let Some(heap) = &snapshot.heap {
            record::heap(heap, &mut to.to(&[]));
        }
        if to.has_detail() {
            self.publish_heap_arenas(to, &snapshot.heap_arenas);
        }
        let purges = &self.shared.purges;
        let by_trigger = Trigger::ALL.map(|trigger| (trigger.name(), purges.total(trigger)));
        to.put(name::HEAP_PURGES, &[], by_trigger);
        to.put(name::HEAP_PURGED, &[], purges.bytes());
        to.process_total(name::HEAP_SPILLS, &[], heap::spilled().1);
        if self.shared.config.process_metrics.value {
            to.process(snapshot.signal.rss, &self.process.read(to.has_detail()));
        }
        let peak = self.peak.add(now, self.shared.state.take_physical_peak());
        let pressure = HostPressure { signal: &snapshot.signal, state: &self.shared.state, peak };
        record::pressure(&pressure, &mut to.to(&[]));
    }

    /// Publishes the budgets and the requests.
    fn publish_requests(&self, to: MetricsWriter, snapshot: &MemorySnapshot) {
        let admission = &self.shared.admission;
        for (&budget, of) in record::BUDGETS.iter().zip([&snapshot.host, &snapshot.device]) {
            let of_budget = label("budget", budget.name());
            record::ledger(admission.ledger(budget), &mut to.to(std::slice::from_ref(&of_budget)));
            let is_used = |class: &&ClassStats| class.admitted_total + class.rejected_total > 0;
            for class in of.classes.iter().filter(is_used) {
                let labels = [of_budget.clone(), label("size_class", class.class)];
                record::class(class, &mut to.to(&labels));
            }
        }
        record::admission(&snapshot.admission, &mut to.to(&[]));
        #[cfg(feature = "service")]
        to.connections();
        let routes = admission.state().routes.read();
        for of in &routes {
            let labels = [label("method", of.method), label("route", &of.name)];
            record::route(of, &mut to.to(&labels));
        }
        if to.has_detail() {
            for of in admission.state().tenants.read() {
                record::tenant(&of, &mut to.to(&[label("tenant", &of.name)]));
            }
        }
        let requests = routes.iter().map(|route| route.live).chain(heap::in_progress()).sum();
        to.put(name::PRESSURE_PART, &[], Breakdown::new(snapshot, requests).by_label());
    }

    /// Keeps the mappings of new arenas few, and adds a diagnostic, once, if the process has nearly
    /// as many mappings as it may have. A count takes some 0.2 us for each, and counts at most a
    /// thousandth of the worker's time.
    fn check_mappings(&mut self, now: Moment) {
        if let Err(error) = heap::limit_mappings() {
            self.shared.add_diagnostic(Diagnostic::warning("heap", error.to_string()));
        }
        if now < self.mappings_at {
            return;
        }
        let start = self.shared.clock.now();
        let count = map_count().unwrap_or(0);
        let most = heap::mappings_max();
        if count > most / 5 * 4 {
            let start = "mappings: ";
            let text = format!(
                "{start}{count} of at most {most} (vm.max_map_count), at which allocations fail \
                 and a Rust program aborts; expected a larger vm.max_map_count (sysctl)"
            );
            self.shared.add_diagnostic_once(start, Diagnostic::warning("heap", text));
        }
        self.mappings_at = now + HOOK_EVERY.max((self.shared.clock.now() - start) * 1_000);
    }

    /// Publishes the named heap arenas, and zeros for those that no longer exist. A name is kept
    /// once it was published; beyond [`HEAP_ARENAS_MAX`] names, new ones are not published.
    fn publish_heap_arenas(&mut self, to: MetricsWriter, arenas: &[(String, HostArenaStats)]) {
        for (name, _) in arenas {
            if self.heap_arenas.len() < HEAP_ARENAS_MAX && !self.heap_arenas.contains(name) {
                self.heap_arenas.push(name.clone());
            }
        }
        for name in &self.heap_arenas {
            let stats = arenas.iter().find(|(other, _)| other == name).map(|(_, stats)| *stats);
            let labels = [label("heap_arena", name)];
            record::heap_arena(&stats.unwrap_or_default(), &mut to.to(&labels));
        }
    }

    /// Publishes the kernel's counts for the cgroup.
    fn publish_kernel(&mut self, to: MetricsWriter, snapshot: &MemorySnapshot) {
        if let Some(total) = snapshot.oom_kills {
            to.process_total(name::PRESSURE_OOM_KILLS, &[], total);
        }
        if let Some(events) = &snapshot.events {
            for (group, counts) in [("own", &events.own), ("above", &events.above)] {
                record::events(counts, &mut to.to(&[label("group", group)]));
            }
        }
        if let Some(psi) = snapshot.psi {
            record::psi(&psi, &mut to.to(&[]));
        }
        let missing = self.shared.signals.missing();
        for error in missing.iter().filter(|it| !is_usual(it) && !self.missing.contains(it)) {
            self.shared.add_diagnostic(Diagnostic::warning("signals", error.to_string()));
        }
        self.missing = missing;
        if snapshot.signal.limit_is_stale {
            let start = "cannot read a limit of the cgroup any more";
            let limit = snapshot.signal.limit;
            let text = format!(
                "{start}: the last value, {} ({}), stays in force; expected readable files in {:?}",
                limit.bytes,
                limit.source.name(),
                snapshot.cgroup.as_deref().unwrap_or_else(|| Path::new("")),
            );
            self.shared.add_diagnostic_once(start, Diagnostic::warning("signals", text));
        }
    }
}

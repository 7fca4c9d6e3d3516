//! Writes snapshots under the names of the table: one function for each part.
//!
//! Takes 50 to 300 ns per figure with a recorder, by labels and machine (`benches/render`), 4 ns
//! without one, and nothing for a metric of a tier that is not published. A recorder may allocate,
//! so these functions are never called from an allocator or from the control thread.

#[cfg(feature = "device")]
pub mod devices;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use metrics::{Key, SharedString};
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

use super::MetricsTier;
use super::names::{self as name, Kind, Metric, TABLE};
use super::process::ProcessStats;
use crate::bytes::ByteSize;
use crate::sync::lock;
use lowtide_admission::{Budget, Cost};

/// The budgets with metrics: the device's exists only in a build with device arenas.
pub const BUDGETS: &[Budget] =
    if cfg!(feature = "device") { &[Budget::Host, Budget::Device] } else { &[Budget::Host] };

/// Returns the part of a cost in one budget.
pub(crate) const fn part(cost: Cost, budget: Budget) -> ByteSize {
    match budget {
        Budget::Host => cost.host,
        Budget::Device => cost.device,
    }
}

/// The prefix of the standard metrics of a process.
const PROCESS: &str = "process_";

/// The totals of each `Memory` of this process that has ended, by series: as many as the recorder
/// keeps. Those of the next one continue them.
static ENDED: Mutex<BTreeMap<Key, u64>> = Mutex::new(BTreeMap::new());

/// Publishes the metrics of a tier.
#[derive(Clone, Copy, Debug)]
pub struct MetricsWriter {
    tier: MetricsTier,
    /// `true` if the standard metrics of the process are published.
    has_process: bool,
    /// `true` for the last publication of a `Memory`.
    is_last: bool,
}

/// The labels of a series.
type Labels<const N: usize> = [(&'static str, SharedString); N];

/// Creates a label with a value that is known at compile time.
const fn label(name: &'static str, value: &'static str) -> (&'static str, SharedString) {
    (name, SharedString::const_str(value))
}

impl MetricsWriter {
    /// Creates a writer of the metrics of this tier.
    #[must_use]
    pub const fn new(tier: MetricsTier, has_process: bool) -> Self {
        Self { tier, has_process, is_last: false }
    }

    /// Returns the writer of the last publication of a `Memory`, which keeps its totals.
    pub(crate) const fn last(self) -> Self {
        Self { is_last: true, ..self }
    }

    fn has(self, metric: &Metric) -> bool {
        metric.tier <= self.tier && (self.has_process || !metric.name.starts_with(PROCESS))
    }

    /// Returns `true` if the metrics of the tier `detail` are published.
    pub(crate) fn has_detail(self) -> bool {
        self.tier >= MetricsTier::Detail
    }

    fn gauge<const N: usize>(self, metric: Metric, labels: &Labels<N>, value: f64) {
        if self.has(&metric) {
            gauge!(metric.name, labels).set(value);
        }
    }

    fn bytes<const N: usize>(self, metric: Metric, labels: &Labels<N>, bytes: ByteSize) {
        self.gauge(metric, labels, bytes.as_f64());
    }

    /// Publishes a total of this `Memory`.
    fn counter<const N: usize>(self, metric: Metric, labels: &Labels<N>, total: u64) {
        if !self.has(&metric) {
            return;
        }
        let mut ended = lock(&ENDED);
        let mut sum = total;
        if self.is_last || !ended.is_empty() {
            let key = Key::from_parts(metric.name, labels);
            sum = sum.saturating_add(ended.get(&key).copied().unwrap_or(0));
            if self.is_last {
                ended.insert(key, sum);
            }
        }
        drop(ended);
        self.process_counter(metric, labels, sum);
    }

    /// Publishes a total that no `Memory` starts over: of the process, or of the kernel.
    fn process_counter<const N: usize>(self, metric: Metric, labels: &Labels<N>, total: u64) {
        if self.has(&metric) {
            counter!(metric.name, labels).absolute(total);
        }
    }

    fn seconds<const N: usize>(self, metric: Metric, labels: &Labels<N>, took: Duration) {
        if self.has(&metric) {
            histogram!(metric.name, labels).record(took.as_secs_f64());
        }
    }

    /// Describes type, unit and help of each metric to the recorder. Called again every few
    /// seconds, because a recorder may be installed at any time.
    pub fn describe(self) {
        for metric in TABLE.iter().filter(|metric| self.has(metric)) {
            match metric.kind {
                Kind::Gauge => describe_gauge!(metric.name, metric.unit, metric.help),
                Kind::Counter => describe_counter!(metric.name, metric.unit, metric.help),
                Kind::Histogram => describe_histogram!(metric.name, metric.unit, metric.help),
            }
        }
    }

    /// Publishes the versions and the profile.
    pub fn build_info(self, profile: &'static str, service_version: Option<&str>) {
        let service = service_version.map_or(SharedString::const_str("unknown"), shared);
        let labels = [
            label("version", env!("CARGO_PKG_VERSION")),
            label("profile", profile),
            ("service_version", service),
        ];
        self.gauge(name::BUILD_INFO, &labels, 1.0);
    }

    /// Publishes the standard metrics of the process.
    pub(crate) fn process(self, rss: Option<ByteSize>, stats: &ProcessStats) {
        if let Some(rss) = rss {
            self.bytes(name::PROCESS_RESIDENT, &[], rss);
        }
        if let Some(cpu) = stats.cpu {
            self.process_counter(name::PROCESS_CPU, &[], cpu.as_secs());
        }
        for (metric, value) in [
            (name::PROCESS_START, stats.start.map(|start| start.as_secs_f64())),
            (name::PROCESS_VIRTUAL, stats.address_space.map(ByteSize::as_f64)),
            (name::PROCESS_THREADS, stats.threads.map(count)),
            (name::PROCESS_OPEN_FDS, stats.open_fds.map(count)),
            (name::PROCESS_MAX_FDS, stats.max_fds.map(count)),
        ] {
            if let Some(value) = value {
                self.gauge(metric, &[], value);
            }
        }
    }

    /// Publishes the time at which figures were taken, since the Unix epoch, and the duration.
    pub fn sampler(self, since_epoch: Duration, took: Duration) {
        self.gauge(name::SAMPLER_LAST_RUN, &[], since_epoch.as_secs_f64());
        self.seconds(name::SAMPLER_SECONDS, &[], took);
    }

    /// Publishes the number of diagnostics.
    pub fn diagnostics(self, diagnostics: usize) {
        self.gauge(name::DIAGNOSTICS, &[], count(diagnostics as u64));
    }

    /// Publishes the control loop's own figures.
    pub fn ticks(self, total: u64, lateness: Duration) {
        self.counter(name::SAMPLER_TICKS, &[], total);
        self.gauge(name::SAMPLER_LATENESS, &[], lateness.as_secs_f64());
    }

    /// Publishes the process heap.
    pub fn heap(self, heap: &lowtide_heap::HeapSnapshot) {
        for (metric, bytes) in [
            (name::HEAP_LIVE, heap.live),
            (name::HEAP_ACTIVE, heap.active),
            (name::HEAP_RESIDENT, heap.resident),
            (name::HEAP_RETAINED, heap.retained()),
            (name::HEAP_DIRTY, heap.dirty),
            (name::HEAP_MUZZY, heap.muzzy),
            (name::HEAP_METADATA, heap.metadata),
            (name::HEAP_UNBACKED, heap.unbacked),
            (name::HEAP_THREAD_CACHES, heap.thread_caches),
        ] {
            self.bytes(metric, &[], bytes);
        }
    }

    /// Publishes a dedicated heap arena; zeros after it is dropped.
    pub fn heap_arena(self, name: &str, arena: &lowtide_heap::HostArenaStats) {
        let labels = [("heap_arena", shared(name))];
        self.bytes(name::HEAP_ARENA_LIVE, &labels, arena.live);
        self.bytes(name::HEAP_ARENA_RETAINED, &labels, arena.retained());
    }

    /// Publishes the parts of the host's limit.
    pub fn parts(self, parts: impl Iterator<Item = (&'static str, ByteSize)>) {
        parts.for_each(|(part, bytes)| {
            self.bytes(name::PRESSURE_PART, &[label("part", part)], bytes);
        });
    }

    /// Publishes the number of purges that a trigger has started.
    pub fn purges(self, trigger: &'static str, total: u64) {
        self.counter(name::HEAP_PURGES, &[label("trigger", trigger)], total);
    }

    /// Publishes the bytes that purges have released from a heap.
    pub fn purged(self, heap: &'static str, bytes: u64) {
        self.counter(name::HEAP_PURGED, &[label("heap", heap)], bytes);
    }

    /// Publishes the duration of one purge of a heap.
    pub fn purge_duration(self, heap: &'static str, took: Duration) {
        self.seconds(name::HEAP_PURGE_SECONDS, &[label("heap", heap)], took);
    }

    /// Publishes the host's pressure; `peak` is the largest number of physical bytes of late.
    pub fn pressure(
        self,
        signal: &lowtide_admission::Signal,
        state: &lowtide_admission::PressureState,
        peak: ByteSize,
    ) {
        use lowtide_admission::{Level, LimitSource};
        self.gauge(name::SATURATION, &[], state.saturation());
        self.gauge(name::PRESSURE_EXHAUSTED, &[], flag(state.is_exhausted()));
        self.gauge(name::PRESSURE_LEVEL, &[], f64::from(state.level(Budget::Host).as_u8()));
        if signal.limit.is_known() {
            self.bytes(name::PRESSURE_LIMIT, &[], signal.limit.bytes);
        }
        for source in LimitSource::ALL {
            let labels = [label("source", source.name())];
            self.gauge(name::PRESSURE_LIMIT_INFO, &labels, flag(signal.limit.source == source));
        }
        self.gauge(name::PRESSURE_LIMIT_STALE, &[], flag(signal.limit_is_stale));
        self.bytes(name::PRESSURE_PHYSICAL, &[], state.physical());
        self.bytes(name::PRESSURE_PHYSICAL_PEAK, &[], peak.max(state.physical()));
        self.bytes(name::PRESSURE_PURGEABLE, &[], state.purgeable());
        self.bytes(name::PRESSURE_REQUIRED, &[], state.required());
        if let Some(charged) = signal.charged {
            self.bytes(name::PRESSURE_CHARGED, &[], charged);
        }
        if state.limit() != ByteSize::MAX {
            for (part, bytes) in state.ceiling_parts().by_name() {
                self.bytes(name::ADMISSION_CEILING_PART, &[label("part", part)], bytes);
            }
        }
        for level in Level::ALL {
            let labels = [label("to", level.name())];
            self.counter(name::PRESSURE_TRANSITIONS, &labels, state.entered_total(level));
        }
    }

    /// Publishes the processes of the cgroup killed by the kernel.
    pub fn oom_kills(self, total: u64) {
        self.process_counter(name::PRESSURE_OOM_KILLS, &[], total);
    }

    /// Publishes the kernel's counts of the own cgroup (`own`), or of those above it (`above`),
    /// since the start.
    pub fn events(self, group: &'static str, counts: lowtide_admission::EventCounts) {
        for (event, total) in counts.by_name() {
            if let Some(total) = total {
                let labels = [label("group", group), label("event", event)];
                self.counter(name::PRESSURE_EVENTS, &labels, total);
            }
        }
    }

    /// Publishes the time that the own cgroup stalls for memory.
    pub fn psi(self, psi: lowtide_admission::Psi) {
        for (kind, stall) in psi.by_name() {
            let labels = [label("kind", kind)];
            self.gauge(name::PRESSURE_STALL, &labels, stall.avg10);
            self.gauge(name::PRESSURE_STALL_TOTAL, &labels, stall.total.as_secs_f64());
        }
    }

    /// Publishes one budget's ledger.
    pub fn ledger(self, ledger: &lowtide_admission::Ledger, budget: Budget) {
        let labels = [label("budget", budget.name())];
        self.bytes(name::ADMISSION_RESERVED, &labels, ledger.reserved_bytes());
        // Without a limit there is no allowance to show.
        if ledger.ceiling() != ByteSize::MAX {
            self.bytes(name::ADMISSION_CEILING, &labels, ledger.ceiling());
            self.bytes(name::ADMISSION_ALLOWANCE, &labels, ledger.allowance_bytes());
            let factor = ledger.correction_factor();
            self.gauge(name::ADMISSION_CORRECTION_FACTOR, &labels, factor);
        }
        self.bytes(name::ADMISSION_RESERVED_HEADROOM, &labels, ledger.reserved_headroom());
    }

    /// Publishes one budget's requests by size; classes without requests are omitted.
    pub fn classes(self, budget: Budget, classes: &[lowtide_admission::ClassStats]) {
        for class in classes {
            if class.admitted_total == 0 && class.rejected_total == 0 {
                continue;
            }
            for (outcome, requests, bytes) in [
                ("admitted", class.admitted_total, class.admitted_bytes_total),
                ("rejected", class.rejected_total, class.rejected_bytes_total),
            ] {
                let labels = [
                    label("budget", budget.name()),
                    label("size_class", class.class.name()),
                    label("outcome", outcome),
                ];
                self.counter(name::ADMISSION_REQUESTS, &labels, requests);
                self.counter(name::ADMISSION_BYTES, &labels, bytes);
            }
        }
    }

    /// Publishes the open connections, and those closed by reason.
    #[cfg(feature = "service")]
    pub(crate) fn connections(self, open: u64, closed: impl Iterator<Item = (&'static str, u64)>) {
        self.gauge(name::CONNECTIONS, &[], count(open));
        closed.for_each(|(reason, total)| {
            self.process_counter(name::CONNECTIONS_CLOSED, &[label("reason", reason)], total);
        });
    }

    /// Publishes the admitted and rejected requests.
    pub fn admission(self, stats: &lowtide_admission::AdmissionStats) {
        self.counter(name::ADMISSION_ADMITTED, &[], stats.admitted_total);
        self.counter(name::ADMISSION_OUTLIVED, &[], stats.outlived_bytes_total);
        self.gauge(name::ADMISSION_HELD, &[], count(stats.held()));
        self.gauge(name::ADMISSION_WAITING, &[], count(stats.waiting));
        self.counter(name::ADMISSION_WAITED, &[], stats.waited_total);
        self.gauge(name::ADMISSION_WAIT_TIME, &[], stats.waited_time_total.as_secs_f64());
        self.counter(name::ADMISSION_SUSPENDED, &[], stats.suspended_total);
        self.gauge(name::ADMISSION_OLDEST, &[], stats.oldest_permit.as_secs_f64());
        for reason in lowtide_admission::RejectReason::ALL {
            let labels = [label("reason", reason.name())];
            self.counter(name::ADMISSION_REJECTED, &labels, stats.rejected_total(reason));
        }
    }

    /// Publishes the memory of the requests of a route.
    pub fn route(self, usage: &lowtide_admission::RouteUsage) {
        let memory = &usage.memory;
        let labels = [label("method", usage.method), ("route", shared(&usage.route))];
        self.bytes(name::ADMISSION_ROUTE_LIVE, &labels, memory.live);
        for (metric, total) in [
            (name::ADMISSION_ROUTE_REQUESTS, memory.requests_total),
            (name::ADMISSION_ROUTE_PEAK, memory.peak_bytes_total),
            (name::ADMISSION_ROUTE_CLAIM, memory.claim_bytes_total),
        ] {
            self.counter(metric, &labels, total);
        }
    }

    /// Publishes the memory of the requests of a tenant.
    pub fn tenant(self, usage: &lowtide_admission::TenantUsage) {
        let labels = [("tenant", shared(&usage.tenant))];
        self.bytes(name::ADMISSION_TENANT_LIVE, &labels, usage.memory.live);
        self.bytes(name::ADMISSION_TENANT_PEAK, &labels, usage.memory.live_peak);
    }

    /// Publishes a reclaimer of the application.
    pub fn reclaimer(self, stats: &lowtide_admission::ReclaimerStats) {
        if !self.has_detail() {
            return;
        }
        let labels = [("reclaimer", shared(&stats.name))];
        self.counter(name::RECLAIMER_CALLS, &labels, stats.calls_total);
        self.counter(name::RECLAIMER_RELEASED, &labels, stats.released_total.get());
        self.gauge(name::RECLAIMER_SECONDS, &labels, stats.time_total.as_secs_f64());
        self.counter(name::RECLAIMER_PANICS, &labels, stats.panics_total);
    }

    /// Publishes a resource; `last_used` since the Unix epoch.
    pub fn resource(self, stats: &lowtide_admission::ResourceStats, last_used: Option<Duration>) {
        use lowtide_admission::UnloadReason;
        let labels = [("resource", shared(&stats.name))];
        let with = |name, value| {
            let [resource] = labels.clone();
            [resource, label(name, value)]
        };
        for (metric, value) in [
            (name::RESOURCE_LOADED, flag(stats.loaded)),
            (name::RESOURCE_LOADING, flag(stats.loading)),
            (name::RESOURCE_GUARDS, count(stats.guards as u64)),
            (name::RESOURCE_WAITING, count(stats.waiting as u64)),
            (name::RESOURCE_LOAD_SECONDS, stats.load_time.as_secs_f64()),
            (name::RESOURCE_UNLOAD_SECONDS, stats.unload_time.as_secs_f64()),
        ] {
            self.gauge(metric, &labels, value);
        }
        if let Some(last_used) = last_used {
            self.gauge(name::RESOURCE_LAST_USED, &labels, last_used.as_secs_f64());
        }
        for (outcome, total) in [
            ("ok", stats.loads_ok_total),
            ("failed", stats.loads_failed_total),
            ("refused", stats.loads_refused_total),
        ] {
            self.counter(name::RESOURCE_LOADS, &with("outcome", outcome), total);
        }
        for reason in UnloadReason::ALL {
            let labels = with("reason", reason.name());
            self.counter(name::RESOURCE_UNLOADS, &labels, stats.unloads.total(reason));
        }
        for &budget in BUDGETS {
            let labels = with("budget", budget.name());
            self.bytes(name::RESOURCE_COST, &labels, part(stats.cost, budget));
            if let Some(measured) = stats.measured {
                self.bytes(name::RESOURCE_MEASURED, &labels, part(measured, budget));
            }
            let recovered = part(stats.recovered_total, budget).get();
            self.counter(name::RESOURCE_RECOVERED, &labels, recovered);
        }
        self.counter(name::RESOURCE_UNLOAD_PANICS, &labels, stats.unload_panics_total);
    }
}

/// Shares a label's value between many series, which copies it once.
fn shared(value: &str) -> SharedString {
    SharedString::from_shared(std::sync::Arc::from(value))
}

/// Converts a count for a gauge.
fn count(count: u64) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

/// Converts a flag for a gauge.
fn flag(flag: bool) -> f64 {
    f64::from(u8::from(flag))
}

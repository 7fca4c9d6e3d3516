//! Reads the figures of the table from snapshots, by a function for each section of the table, and
//! publishes them. `/memory` shows those of heap, arenas, resources and requests.
//!
//! Takes 50 to 300 ns per figure with a recorder, by labels and machine (`benches/render`), 4 ns
//! without one, and nothing for a metric of a tier that is not published. A recorder may allocate,
//! so these functions are never called from an allocator or from the control thread.

use std::collections::BTreeMap;
use std::sync::Mutex;
#[cfg(feature = "service")]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Key, Label, SharedString};
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

use super::MetricsTier;
use super::names::{self as name, Metric, MetricKind, TABLE};
use super::process::ProcessStats;
use crate::bytes::ByteSize;
#[cfg(feature = "device")]
use crate::device::ArenaSnapshot;
use crate::sync::lock;
use lowtide_admission::{
    Admission, AdmissionStats, Budget, ClassStats, Cost, EventCounts, Ledger, Level, LimitSource,
    MemoryUsage, PressureState, Psi, ReclaimerStats, RejectReason, ResourceStats, Signal,
    UnloadReason,
};
use lowtide_heap::{HeapSnapshot, HostArenaStats};

/// The budgets with metrics: the device's exists only in a build with device arenas.
pub(crate) const BUDGETS: &[Budget] =
    if cfg!(feature = "device") { &[Budget::Host, Budget::Device] } else { &[Budget::Host] };

/// The prefix of the standard metrics of a process.
const PROCESS: &str = "process_";

/// The totals of each `Memory` of this process that has ended, by series: as many as the recorder
/// keeps. Those of the next one continue them.
static ENDED: Mutex<BTreeMap<Key, u64>> = Mutex::new(BTreeMap::new());

/// The open connections of the process. Servers that bound them count.
#[cfg(feature = "service")]
pub(crate) static OPEN: AtomicU64 = AtomicU64::new(0);
/// The connections that were closed, in the order of [`CloseReason::ALL`].
#[cfg(feature = "service")]
static CLOSED: [AtomicU64; CloseReason::ALL.len()] =
    [const { AtomicU64::new(0) }; CloseReason::ALL.len()];

#[cfg(feature = "service")]
lowtide_core::named_enum! {
    /// Why a connection is closed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum CloseReason {
        /// It got no place.
        Refused = "refused",
        /// It had made no progress for longest, and another needed its place.
        Displaced = "displaced",
        /// Its client took nothing of a response while memory was short.
        Stalled = "stalled",
        /// Its client took nothing of a response whose time limit had passed.
        Overdue = "overdue",
    }
}

#[cfg(feature = "service")]
impl CloseReason {
    /// Counts a connection.
    pub(crate) fn count(self) {
        if let Some(total) = CLOSED.get(self as usize) {
            total.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The host's pressure.
#[derive(Debug)]
pub(crate) struct HostPressure<'a> {
    pub(crate) signal: &'a Signal,
    pub(crate) state: &'a PressureState,
    /// The largest number of physical bytes of late.
    pub(crate) peak: ByteSize,
}

/// The memory of a device, with all its users.
#[cfg(feature = "device")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceSnapshot {
    /// The total memory.
    pub total: ByteSize,
    /// The free memory.
    pub free: ByteSize,
    /// The memory in use right after our context was created and before our first commit. It is an
    /// upper bound of the context's size, because it includes memory that other processes and other
    /// code of this process used at that moment. `None` if unknown.
    pub context_overhead: Option<ByteSize>,
    /// The memory that is neither free, nor committed by our arenas, nor in the context overhead.
    /// It is used by other processes and by other code of this process: allocations made directly
    /// through `cudarc`, by ONNX Runtime or by candle, and growth of the context. It is too small
    /// if a process that was counted in the context overhead has exited. `None` if the context
    /// overhead is unknown.
    pub unmanaged: Option<ByteSize>,
    /// `true` if less than the watermark is free, or was and has not recovered enough. Idle memory
    /// of our arenas is then released before its decay time.
    pub is_short: bool,
    /// The bytes released because of that, since the start.
    pub watermark_released_total: u64,
}

/// Publishes the metrics of a tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetricsWriter {
    tier: MetricsTier,
    /// `true` if the standard metrics of the process are published.
    has_process: bool,
    /// `true` for the last publication of a `Memory`.
    is_last: bool,
}

/// Creates a label. The value is copied once, and then shared between many series.
pub(crate) fn label(name: &'static str, value: &str) -> Label {
    Label::new(name, SharedString::from_shared(std::sync::Arc::from(value)))
}

impl MetricsWriter {
    /// Creates a writer of the metrics of this tier.
    pub(crate) const fn new(tier: MetricsTier, has_process: bool) -> Self {
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

    /// Publishes a gauge, or a total of this `Memory`.
    #[expect(clippy::cast_precision_loss, reason = "gauges are floating-point numbers")]
    pub(crate) fn put(self, metric: Metric, labels: &[Label], figure: impl Into<Figure>) {
        if !self.has(&metric) {
            return;
        }
        let value = match figure.into() {
            Figure::Absent => return,
            Figure::Each(values) => {
                let last = metric.labels.last().copied().unwrap_or_default();
                return values.into_iter().for_each(|(value, figure)| {
                    let own = Label::from_static_parts(last, value);
                    self.put(metric, &[labels, &[own]].concat(), figure);
                });
            }
            Figure::Count(total) if metric.kind == MetricKind::Counter => {
                return self.total(metric, labels, total);
            }
            Figure::Count(count) => count as f64,
            Figure::Real(real) => real,
            Figure::Flag(flag) => f64::from(u8::from(flag)),
        };
        gauge!(metric.name, labels.iter()).set(value);
    }

    /// Returns a function that publishes the figures of a snapshot with these labels.
    pub(crate) fn to(self, labels: &[Label]) -> impl FnMut(Metric, Figure) {
        move |metric, figure| self.put(metric, labels, figure)
    }

    /// Publishes a total of this `Memory`.
    fn total(self, metric: Metric, labels: &[Label], total: u64) {
        let mut ended = lock(&ENDED);
        let mut sum = total;
        if self.is_last || !ended.is_empty() {
            let key = Key::from_parts(metric.name, labels.iter());
            sum = sum.saturating_add(ended.get(&key).copied().unwrap_or(0));
            if self.is_last {
                ended.insert(key, sum);
            }
        }
        drop(ended);
        self.process_total(metric, labels, sum);
    }

    /// Publishes a total that no `Memory` starts over: of the process, or of the kernel.
    pub(crate) fn process_total(self, metric: Metric, labels: &[Label], total: u64) {
        if self.has(&metric) {
            counter!(metric.name, labels.iter()).absolute(total);
        }
    }

    pub(crate) fn seconds(self, metric: Metric, labels: &[Label], took: Duration) {
        if self.has(&metric) {
            histogram!(metric.name, labels.iter()).record(took.as_secs_f64());
        }
    }

    /// Describes type, unit and help of each metric to the recorder. Called again every few
    /// seconds, because a recorder may be installed at any time.
    pub(crate) fn describe(self) {
        for metric in TABLE.iter().filter(|metric| self.has(metric)) {
            match metric.kind {
                MetricKind::Gauge => describe_gauge!(metric.name, metric.unit(), metric.help),
                MetricKind::Counter => describe_counter!(metric.name, metric.unit(), metric.help),
                MetricKind::Histogram => {
                    describe_histogram!(metric.name, metric.unit(), metric.help)
                }
            }
        }
    }

    /// Publishes the standard metrics of the process.
    pub(crate) fn process(self, rss: Option<ByteSize>, stats: &ProcessStats) {
        self.put(name::PROCESS_RESIDENT, &[], rss);
        if let Some(cpu) = stats.cpu {
            self.process_total(name::PROCESS_CPU, &[], cpu.as_secs());
        }
        process(stats, &mut self.to(&[]));
    }

    /// Publishes the duration of one purge of a heap.
    pub(crate) fn purge_duration(self, heap: &'static str, took: Duration) {
        self.seconds(name::HEAP_PURGE_SECONDS, &[Label::from_static_parts("heap", heap)], took);
    }

    /// Publishes the open connections, and those closed by reason.
    #[cfg(feature = "service")]
    pub(crate) fn connections(self) {
        self.put(name::CONNECTIONS, &[], OPEN.load(Ordering::Relaxed));
        for (reason, total) in CloseReason::ALL.iter().zip(&CLOSED) {
            let labels = [label("reason", reason.name())];
            self.process_total(name::CONNECTIONS_CLOSED, &labels, total.load(Ordering::Relaxed));
        }
    }
}

/// Publishes the figures of a heap, of arenas and of an admission, for tests and benches.
#[doc(hidden)]
pub fn publish(
    heap: Option<&HeapSnapshot>,
    #[cfg(feature = "device")] arenas: &[ArenaSnapshot],
    of: &Admission,
) {
    let to = MetricsWriter::new(MetricsTier::Detail, true);
    heap.into_iter().for_each(|figures| self::heap(figures, &mut to.to(&[])));
    #[cfg(feature = "device")]
    for figures in arenas {
        let labels = [label("device", "0"), label("arena", &figures.name)];
        arena(figures, &mut to.to(&labels));
    }
    for &budget in BUDGETS {
        ledger(of.ledger(budget), &mut to.to(&[label("budget", budget.name())]));
    }
    admission(&of.stats(), &mut to.to(&[]));
}

/// The value of a metric.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Figure {
    /// Unknown, or [`ByteSize::MAX`], which means no limit.
    Absent,
    Count(u64),
    Real(f64),
    Flag(bool),
    /// A series for each value of the metric's last label.
    Each(Vec<(&'static str, Self)>),
}

macro_rules! figures {
    ($($kind:ty: |$value:ident| $figure:expr;)*) => {
        $(impl From<$kind> for Figure {
            fn from($value: $kind) -> Self {
                $figure
            }
        })*
    };
}

figures! {
    u64: |count| Self::Count(count);
    f64: |real| Self::Real(real);
    bool: |flag| Self::Flag(flag);
    Duration: |time| Self::Real(time.as_secs_f64());
    ByteSize: |size| if size == ByteSize::MAX { Self::Absent } else { Self::Count(size.get()) };
    Cost: |cost| {
        let budgets = [(Budget::Host, cost.host), (Budget::Device, cost.device)];
        let budgets = budgets.into_iter().take(BUDGETS.len());
        Self::Each(budgets.map(|(budget, bytes)| (budget.name(), bytes.into())).collect())
    };
}

impl<T: Into<Self>> From<Option<T>> for Figure {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Absent, Into::into)
    }
}

impl<T: Into<Self>, const N: usize> From<[(&'static str, T); N]> for Figure {
    fn from(values: [(&'static str, T); N]) -> Self {
        Self::Each(values.map(|(label, value)| (label, value.into())).into())
    }
}

/// Returns a figure that exists only with a limit.
fn limited<T>(ledger: &Ledger, figure: T) -> Option<T> {
    (ledger.ceiling() != ByteSize::MAX).then_some(figure)
}

/// Reads the value of a row, if it has one.
macro_rules! read {
    ($each:ident [] $($metric:tt)+) => {};
    ($each:ident [$value:expr] $($metric:tt)+) => {
        $each(metric!($($metric)+), Figure::from($value));
    };
}

macro_rules! readers {
    ($(@ $labels:tt $(#[$cfg:meta])? $source:ident: $type:ty;
        $($tier:ident $kind:ident $name:literal $([$($own:literal),*])? $(as $id:ident)?
            $(= $value:expr)?, $help:literal;)*
    )*) => {
        $(
            $(#[$cfg])?
            pub(crate) fn $source($source: &$type, each: &mut dyn FnMut(Metric, Figure)) {
                $(read!(each [$($value)?] $tier $kind $name $help $labels $([$($own),*])?);)*
            }
        )*
    };
}

rows!(readers);

//! A snapshot of all figures of a `Memory`: plain values for endpoints, metrics and tests.

use std::path::PathBuf;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::config::Profile;
use lowtide_admission::{
    Admission, AdmissionStats, Budget, CeilingParts, ClassStats, Cpus, Level, LimitBound,
    MemoryEvents, Psi, ReclaimerStats, ResourceStats, Signal,
};
use lowtide_heap::{HeapSnapshot, HostArenaStats};

#[cfg(feature = "device")]
use super::devices::DevicesSnapshot;
use super::error::Diagnostic;
use super::trend::HistorySample;

/// The figures of a [`Memory`](super::Memory) at one instant.
///
/// With the feature `serde` it implements `serde::Serialize`: sizes in bytes, a duration as `secs`
/// and `nanos`, states and reasons under their names in metrics. It fails only if the path of the
/// cgroup is not UTF-8.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct MemorySnapshot {
    /// The profile in force.
    pub profile: Profile,
    /// The process heap; `None` if jemalloc's statistics cannot be read.
    pub heap: Option<HeapSnapshot>,
    /// The named dedicated arenas of the heap, including those of resources.
    pub heap_arenas: Vec<(String, HostArenaStats)>,
    /// The device arenas, and the memory of the device.
    #[cfg(feature = "device")]
    pub devices: DevicesSnapshot,
    /// The kernel's signals, read now.
    pub signal: Signal,
    /// The CPUs that this process can keep busy, as of the start.
    pub cpus: Cpus,
    /// The number of heap arenas over which threads are spread, if they were started through
    /// [`on_thread_start`](super::on_thread_start); `None` if unknown.
    pub bound_arenas: Option<u32>,
    /// The processes of the cgroup that the kernel has OOM-killed, if reported.
    pub oom_kills: Option<u64>,
    /// The limits reached and processes killed since the start, in the own cgroup and above it;
    /// `None` without a cgroup.
    pub events: Option<MemoryEvents>,
    /// The time that the own cgroup stalls for memory, if reported. Advisory.
    pub psi: Option<Psi>,
    /// The directory of the memory cgroup.
    pub cgroup: Option<PathBuf>,
    /// The bounds of host memory, the one in force first.
    pub bounds: Vec<LimitBound>,
    /// The memory that counts against the host's limit: the kernel's figure ([`Signal::physical`]),
    /// and the memory committed by arenas on an integrated GPU, which the kernel does not count.
    pub physical: ByteSize,
    /// The part of `physical` that is unused and that the kernel does not take back, as of the last
    /// sample: see [`Purged::heap`](super::Purged::heap). Requests use it before new memory, so it
    /// counts neither for the pressure level nor as required.
    pub unreleased: ByteSize,
    /// `true` if host and device share one budget, the host's, because device memory is host
    /// memory. The device's budget is then empty and without a limit.
    pub unified: bool,
    /// The part of `physical` that a purge releases, as of the last sample.
    pub purgeable: ByteSize,
    /// `true` while memory outside requests leaves no room for requests
    /// (`lowtide_pressure_exhausted`).
    pub exhausted: bool,
    /// How near the service is to rejecting requests for lack of memory, 0 to 1, as a mean over
    /// about 15 s: `lowtide_saturation_ratio`
    /// ([definition](lowtide_admission::PressureState::saturation)).
    pub saturation: f64,
    /// The host's budget.
    pub host: BudgetSnapshot,
    /// The device's budget.
    pub device: BudgetSnapshot,
    /// The admitted and rejected requests.
    pub admission: AdmissionStats,
    /// The registered resources.
    pub resources: Vec<ResourceStats>,
    /// The reclaimers of the application, removed ones included.
    pub reclaimers: Vec<ReclaimerStats>,
    /// The diagnostics.
    pub diagnostics: Vec<Diagnostic>,
    /// The time of the snapshot.
    pub now: Moment,
    /// The same on the wall clock, since the Unix epoch.
    pub since_epoch: Duration,
    /// The number of times that the host has entered each level.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) entered: [u64; Level::ALL.len()],
}

impl MemorySnapshot {
    /// Returns the physical bytes less those that a purge releases or that stay unused.
    #[must_use]
    pub const fn required(&self) -> ByteSize {
        self.physical.saturating_sub(self.purgeable).saturating_sub(self.unreleased)
    }

    /// Returns the resident bytes that are not jemalloc's: stacks, mapped files, heaps of C code,
    /// and arenas in host memory. `None` if one of the two figures is unknown.
    #[must_use]
    pub fn other(&self) -> Option<ByteSize> {
        Some(self.signal.rss?.saturating_sub(self.heap.as_ref()?.resident))
    }

    /// Returns the limit of host memory; [`ByteSize::MAX`] without one.
    pub(super) const fn limit(&self) -> ByteSize {
        self.signal.limit.bytes
    }

    /// Returns the figures that the history keeps.
    pub(super) fn history_sample(&self) -> HistorySample {
        let heap = self.heap.unwrap_or_default();
        #[cfg(feature = "device")]
        let [device_live, device_retained] = [self.devices.live(), self.devices.retained()];
        #[cfg(not(feature = "device"))]
        let [device_live, device_retained] = [ByteSize::ZERO; 2];
        let (at, physical) = (self.since_epoch, self.physical);
        let (heap_live, heap_retained) = (heap.live, heap.retained());
        HistorySample { at, physical, heap_live, heap_retained, device_live, device_retained }
    }

    /// Returns a moment on the wall clock, since the Unix epoch.
    #[must_use]
    pub fn on_wall(&self, moment: Moment) -> Duration {
        self.since_epoch.saturating_sub(self.now - moment)
    }
}

/// The figures of one budget.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct BudgetSnapshot {
    /// The bytes of admitted requests and loaded resources, as estimated.
    pub reserved: ByteSize,
    /// The limit of `reserved` up to which requests are admitted now.
    pub allowance: ByteSize,
    /// The limit up to which admission fills memory; [`ByteSize::MAX`] without a limit.
    pub ceiling: ByteSize,
    /// What determines the ceiling; `None` for a device, whose ceiling is fixed, and without a
    /// limit.
    pub ceiling_parts: Option<CeilingParts>,
    /// The measured need per byte reserved by a request.
    pub correction_factor: f64,
    /// The pressure on the budget.
    pub level: Level,
    /// The bytes that each request of low or normal priority must find free, even a smaller one,
    /// while larger requests do not get their share; otherwise zero.
    pub reserved_headroom: ByteSize,
    /// The requests by size class.
    pub classes: [ClassStats; ClassStats::COUNT],
}

impl BudgetSnapshot {
    /// Creates the figures of a budget of this admission, without the parts of its ceiling.
    pub(super) fn of(admission: &Admission, budget: Budget, level: Level) -> Self {
        let ledger = admission.ledger(budget);
        Self {
            reserved: ledger.reserved_bytes(),
            allowance: ledger.allowance_bytes(),
            ceiling: ledger.ceiling(),
            ceiling_parts: None,
            correction_factor: ledger.correction_factor(),
            level,
            reserved_headroom: ledger.reserved_headroom(),
            classes: admission.classes(budget),
        }
    }
}

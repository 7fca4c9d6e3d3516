//! Every figure of a `Memory` at one instant: plain values for endpoints, metrics and tests.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::config::Profile;
use crate::control::{
    AdmissionStats, ClassStats, Cpus, Level, MemoryEvents, Psi, ResourceStats, Signal, SizeClass,
};
use crate::device::ArenaSnapshot;
use crate::device::driver::Backend;
use crate::host::{HeapSnapshot, HostArenaStats};

use super::error::Diagnostic;

/// The figures of a [`Memory`](super::Memory).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MemorySnapshot {
    /// The profile in force.
    pub profile: Profile,
    /// The process heap; `None` where jemalloc's statistics cannot be read.
    pub heap: Option<HeapSnapshot>,
    /// The dedicated arenas of the heap that have a name now, those of resources among them.
    pub heap_arenas: Vec<(String, HostArenaStats)>,
    /// The device arenas that were opened here.
    pub arenas: Vec<ArenaSnapshot>,
    /// Arenas that were replaced or left by their last user, and still have live blocks.
    pub draining: Vec<ArenaSnapshot>,
    /// The device as a whole, as the worker last found it, about a second ago; `None` if device
    /// memory is host memory, or the device says nothing.
    pub device_memory: Option<DeviceSnapshot>,
    /// Calls of the driver that failed and were to undo what an earlier call had done
    /// ([`Driver::rollback_failures_total`](crate::device::driver::Driver::stuck_total)).
    pub rollback_failures_total: u64,
    /// What the kernel says, read now.
    pub signal: Signal,
    /// The CPUs that this process can keep busy, as they were at the start.
    pub cpus: Cpus,
    /// Over how many of the heap's arenas its threads are spread, those that were started through
    /// [`on_thread_start`](super::on_thread_start); `None` where that cannot be known.
    pub bound_arenas: Option<u32>,
    /// Processes of the cgroup that the kernel has killed for memory, where it says so.
    pub oom_kills: Option<u64>,
    /// Limits reached and processes killed since the start, in the own cgroup and above it; `None`
    /// without a cgroup.
    pub events: Option<MemoryEvents>,
    /// How much time the own cgroup loses for memory, where it says so. Advisory.
    pub psi: Option<Psi>,
    /// The folder of the memory cgroup that is read.
    pub cgroup: Option<PathBuf>,
    /// What counts against the host's limit: what the kernel says ([`Signal::physical`]), and what
    /// arenas have committed on an integrated GPU, which the kernel counts nowhere.
    pub physical: ByteSize,
    /// Whether there is one budget for host and device, the host's, because device memory is host
    /// memory. The device's budget is empty and without a limit then.
    pub unified: bool,
    /// The part of it that a purge gives back, as of the last sample.
    pub purgeable: ByteSize,
    /// Whether memory that no request owns leaves no room for requests
    /// ([`PressureState::is_exhausted`](crate::control::PressureState::is_exhausted)).
    pub exhausted: bool,
    /// The host's budget.
    pub host: BudgetSnapshot,
    /// The device's budget.
    pub device: BudgetSnapshot,
    /// Requests admitted and turned away.
    pub admission: AdmissionStats,
    /// The resources that were registered here.
    pub resources: Vec<ResourceStats>,
    /// What did not go as asked.
    pub diagnostics: Vec<Diagnostic>,
    /// When it was taken.
    pub now: Moment,
    /// The same on the wall clock, since the Unix epoch.
    pub since_epoch: Duration,
}

impl MemorySnapshot {
    /// Physical bytes less those that a purge gives back.
    #[must_use]
    pub const fn required(&self) -> ByteSize {
        self.physical.saturating_sub(self.purgeable)
    }

    /// What is resident and not jemalloc's: stacks, mapped files, heaps of C code, and what arenas
    /// hold of the host's memory. `None` where one of the two figures is not known.
    #[must_use]
    pub fn other(&self) -> Option<ByteSize> {
        Some(self.signal.rss?.saturating_sub(self.heap.as_ref()?.resident))
    }

    /// What holds the host's memory.
    pub(super) fn holders(&self) -> Holders {
        let heap = self.heap.as_ref();
        let of_heap = |bytes: fn(&HeapSnapshot) -> ByteSize| heap.map_or(ByteSize::ZERO, bytes);
        let on_host = |arena: &&ArenaSnapshot| arena.backend == Backend::Host;
        let arenas = || self.arenas.iter().chain(&self.draining).filter(on_host);
        let loaded = || self.resources.iter().filter(|resource| resource.loaded);
        let held = |resource: &ResourceStats| {
            resource.measured.unwrap_or_default().host.max(resource.cost.host)
        };
        let committed: ByteSize = arenas().map(|arena| arena.committed).sum();
        let tracked = of_heap(|heap| heap.resident).saturating_add(committed);
        let (heap_live, heap_retained) =
            (of_heap(|heap| heap.live), of_heap(HeapSnapshot::retained));
        let untracked = self.physical.saturating_sub(tracked);
        let mut largest = vec![
            ("live heap".to_owned(), heap_live),
            ("retained heap".to_owned(), heap_retained),
            ("untracked memory".to_owned(), untracked),
        ];
        largest.extend(arenas().map(|arena| (format!("arena {:?}", arena.name), arena.committed)));
        largest.extend(loaded().map(|of| (format!("resource {:?}", of.name), held(of))));
        largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        largest.truncate(HOLDERS_MAX);
        Holders {
            heap_live,
            heap_retained,
            arenas: committed,
            resources: loaded().map(held).sum(),
            untracked,
            largest,
        }
    }

    /// When a moment was, on the wall clock, since the Unix epoch.
    #[must_use]
    pub fn on_wall(&self, moment: Moment) -> Duration {
        self.since_epoch.saturating_sub(self.now - moment)
    }
}

/// Holders that are named in an error.
const HOLDERS_MAX: usize = 5;

/// What holds the host's memory. What resources hold lies in the heap or in arenas too.
#[derive(Debug)]
pub(super) struct Holders {
    pub(super) heap_live: ByteSize,
    pub(super) heap_retained: ByteSize,
    /// What device arenas in host memory have committed.
    pub(super) arenas: ByteSize,
    pub(super) resources: ByteSize,
    /// What neither the heap nor an arena accounts for: heaps of C code, stacks, mapped files,
    /// other processes of the cgroup.
    pub(super) untracked: ByteSize,
    /// The largest of them.
    largest: Vec<(String, ByteSize)>,
}

/// The largest holders.
impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, (name, bytes)) in self.largest.iter().enumerate() {
            let comma = if nth > 0 { ", " } else { "" };
            write!(f, "{comma}{name} {bytes}")?;
        }
        Ok(())
    }
}

/// The memory of a device, all who use it together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceSnapshot {
    /// All of it.
    pub total: ByteSize,
    /// What nobody holds.
    pub free: ByteSize,
    /// What it held right after our context was made and before our first commit: an upper bound of
    /// what the context takes, because what neighbours and other code of this process held at that
    /// moment is in it. `None` where it is not known.
    pub context_overhead: Option<ByteSize>,
    /// What is neither free, nor committed by our arenas, nor in the floor; at least 0. Memory of
    /// other processes, and of other code in this one: what is allocated through `cudarc` itself,
    /// by ONNX Runtime or by candle, and what the context grew by. A neighbour of before that has
    /// left makes it too small. `None` where the floor is not known.
    pub unmanaged: Option<ByteSize>,
    /// Whether less than the watermark is free, or was and has not become enough again: idle memory
    /// of our arenas goes back before its decay time.
    pub is_short: bool,
    /// Bytes given back because of that, since the start.
    pub watermark_released_total: u64,
}

/// The figures of one budget.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BudgetSnapshot {
    /// Bytes of admitted requests and loaded resources, as they were estimated.
    pub reserved: ByteSize,
    /// Up to which amount of `reserved` requests are admitted now.
    pub allowance: ByteSize,
    /// Up to which amount memory is filled by admission; [`ByteSize::MAX`] without a limit.
    pub ceiling: ByteSize,
    /// What a byte booked by a request was found to need.
    pub correction_factor: f64,
    /// The pressure on it.
    pub level: Level,
    /// What each request has to leave room for, be it smaller itself, because larger ones are
    /// behind; none while all have their share.
    pub reserved_headroom: ByteSize,
    /// Its requests by size.
    pub classes: [ClassStats; SizeClass::COUNT],
}

//! The flight recorder: the last five minutes of a `Memory` in a file that survives SIGKILL, and
//! the reason why the last run ended.
//!
//! `builder` opens it, `running` ends it. `format` has the bytes, `last_exit` the conclusion, both
//! pure; `file` does the input and output.
//!
//! The worker hands over its figures when it publishes metrics ([`Flight::publish`]). The thread
//! `lowtide-flight` takes them, reads the kernel's signals itself, and writes the file. So neither
//! the control loop nor the worker waits for a file, and a worker that is busy does not stop the
//! recording. It looks at physical memory every [`LOOK_EVERY`], because a process may fill its limit
//! within a second, and writes what it saw if memory moved by a [`MOVED_PART`]th of the limit, and
//! every [`SAMPLE_EVERY`], from when it keeps a sample.
//!
//! Invariants: a recorder that cannot be started is a diagnostic, never an error of the start; the
//! control loop never waits for it; once it has started, it allocates nothing but names of tenants,
//! if requests with and without a tenant alternate; what it keeps is bounded by `format`.

mod file;
mod format;
mod last_exit;
#[cfg(all(test, not(lowtide_loom)))]
mod tests;

use std::collections::VecDeque;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Bell, Moment};
use crate::config::Config;
use crate::sync::{Mutex, lock};
use lowtide_admission::{
    Budget, RejectReason, RequestMemory, ResourceStats, SignalTracker, Signals,
};
use lowtide_core::file::KeptFile;
use lowtide_core::kernel::number;

use super::error::Diagnostic;
use super::shared::Shared;
use super::snapshot::MemorySnapshot;
use file::{FlightError, LockedFile};
use format::{EVENTS_MAX, HalfWriter, PERMITS_MAX, RESOURCES_MAX, RunIdentity, SAMPLES_MAX};
use last_exit::Now;

pub(super) use file::FlightFile;
pub(super) use format::RunEnd;
pub use format::{FlightResource, FlightSample};
pub use last_exit::{ExitCause, LastExit};

/// The time between two looks at physical memory. An estimate: a process that allocates as fast as
/// the kernel clears pages grows by some 100 MiB meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The time between two samples that are kept.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// A look is written too if memory moved by the limit divided by this.
const MOVED_PART: u64 = 64;

/// The part of the flight recorder that a `Memory` shares with its threads.
#[derive(Debug, Default)]
pub(super) struct Flight {
    /// The last run, if it was recorded.
    pub(super) last_exit: Option<LastExit>,
    /// The last publication of the worker; `None` before the first.
    published: Mutex<Option<Arc<MemorySnapshot>>>,
    /// The end of the run, as a [`RunEnd`].
    end: AtomicU8,
    is_ending: AtomicBool,
    /// Ends the thread's wait.
    pub(super) bell: Arc<Bell>,
}

impl Flight {
    /// Opens the recording at this path, and reads the last one. If it cannot be opened or
    /// allocated, nothing is recorded, and a diagnostic has the cause.
    pub(super) fn open(
        config: &Config,
        signals: &Signals,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> (Self, Option<FlightFile>) {
        let Some(path) = config.flight_recorder.value.as_deref() else {
            return (Self::default(), None);
        };
        let mut off = |error: FlightError| {
            diagnostics.push(Diagnostic::warning(ABOUT, format!("off: {error}")));
        };
        let Ok((file, contents)) = LockedFile::open(path).map_err(&mut off) else {
            return (Self::default(), None);
        };
        let now = Now {
            boot_id: boot_id(),
            cgroup: cgroup(signals),
            cgroup_kills: signals.oom_kills(),
            machine_kills: machine_kills(open_vmstat().as_ref()),
        };
        let last_exit = LastExit::of(contents, &now);
        (Self { last_exit, ..Self::default() }, file.prepare().map_err(off).ok())
    }

    /// Records that the service was asked to end.
    pub(super) fn set_ending(&self) {
        if !self.is_ending.swap(true, Ordering::Relaxed) {
            log!(info, "not ready any more: the service is to end");
        }
    }

    /// Returns `true` once the service was asked to end.
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// Records how the run ends, unless it has ended.
    pub(super) fn end(&self, end: RunEnd) {
        let (running, end) = (RunEnd::Running as u8, end as u8);
        // An earlier end stays.
        let _ = self.end.compare_exchange(running, end, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Replaces the last publication. Called by the worker.
    pub(super) fn publish(&self, new: &Arc<MemorySnapshot>) {
        let _before = lock(&self.published).replace(Arc::clone(new)); // dropped without the lock
    }
}

impl FlightResource {
    fn of(resource: &ResourceStats) -> Self {
        let measured = resource.measured.unwrap_or_default();
        Self {
            name: Arc::clone(&resource.name),
            loaded: resource.loaded,
            host: measured.host.max(resource.cost.host),
            device: measured.device.max(resource.cost.device),
        }
    }
}

/// The recorder of a running `Memory`, on its own thread.
pub(super) struct FlightRecorder {
    shared: Arc<Shared>,
    file: FlightFile,
    run: RunIdentity,
    tracker: SignalTracker,
    vmstat: Option<KeptFile>,
    writer: HalfWriter,
    samples: VecDeque<FlightSample>,
    /// Room for the permits, of which the first so many are those of the last sample.
    permits: Vec<RequestMemory>,
    permits_now: usize,
    resources: Vec<FlightResource>,
    started: Moment,
    /// The last look, and the last one that was written.
    looked: FlightSample,
    written: ByteSize,
    sample_at: Moment,
}

impl FlightRecorder {
    /// Allocates all that the recorder needs.
    pub(super) fn new(shared: &Arc<Shared>, file: FlightFile) -> Self {
        let run = RunIdentity {
            pid: std::process::id(),
            started_at: shared.clock.since_epoch(),
            boot_id: boot_id(),
            cgroup: cgroup(&shared.signals),
            version: shared.config.service_version.value.clone().unwrap_or_default(),
        };
        let started = shared.clock.now();
        Self {
            shared: Arc::clone(shared),
            file,
            run,
            tracker: SignalTracker::new(Arc::clone(&shared.signals)),
            vmstat: open_vmstat(),
            writer: HalfWriter::new(),
            samples: VecDeque::with_capacity(SAMPLES_MAX),
            permits: std::iter::repeat_with(RequestMemory::with_room).take(PERMITS_MAX).collect(),
            permits_now: 0,
            resources: Vec::with_capacity(RESOURCES_MAX),
            started,
            looked: FlightSample::default(),
            written: ByteSize::ZERO,
            sample_at: started,
        }
    }

    /// Records until `stop` is set and the bell is rung, and then the end.
    pub(super) fn run(mut self, stop: &AtomicBool) {
        let (clock, bell) = (Arc::clone(&self.shared.clock), Arc::clone(&self.shared.flight.bell));
        while !stop.load(Ordering::Acquire) {
            self.look();
            clock.wait_until(&bell, clock.now() + LOOK_EVERY);
        }
        self.looked = self.read();
        self.keep();
        self.write(None);
    }

    /// Looks at memory. Keeps a sample if one is due, and writes that, or memory that moved.
    fn look(&mut self) {
        let before = self.looked;
        self.looked = self.read();
        let over = self.looked.uptime.saturating_sub(before.uptime);
        if !before.uptime.is_zero() && !over.is_zero() {
            let grown = self.looked.physical.saturating_sub(before.physical);
            self.looked.growth = grown.scaled(1.0 / over.as_secs_f64());
        }
        let now = self.started + self.looked.uptime;
        let moved = self.looked.physical.get().abs_diff(self.written.get());
        let level_changed = self.looked.level != before.level;
        if now >= self.sample_at {
            self.sample_at = now + SAMPLE_EVERY;
            self.keep();
            self.write(None);
        } else if moved > self.looked.limit.get() / MOVED_PART || level_changed {
            self.write(Some(self.looked));
        }
    }

    /// Reads what may change between two looks.
    fn read(&mut self) -> FlightSample {
        let shared = &*self.shared;
        let now = shared.clock.now();
        let signal = self.tracker.sample(now);
        FlightSample {
            at: shared.clock.since_epoch(),
            uptime: now - self.started,
            physical: shared.physical(&signal),
            growth: ByteSize::ZERO,
            limit: signal.limit.bytes,
            level: shared.state.level(Budget::Host),
            exhausted: shared.state.is_exhausted(),
            ending: shared.flight.is_ending(),
            ..self.looked
        }
    }

    /// Reads the other figures: those of the last publication, and those of admission now.
    fn read_rest(&mut self) {
        let shared = &*self.shared;
        let published = lock(&shared.flight.published).clone();
        if let Some(snapshot) = published {
            let of = snapshot.history_sample();
            (self.looked.required, self.looked.other) = (snapshot.required(), snapshot.other());
            (self.looked.heap_live, self.looked.heap_retained) = (of.heap_live, of.heap_retained);
            self.looked.device_live = of.device_live;
            self.looked.device_retained = of.device_retained;
            self.resources.clear();
            let resources = snapshot.resources.iter().take(RESOURCES_MAX);
            self.resources.extend(resources.map(FlightResource::of));
        }
        let [host, device] = [Budget::Host, Budget::Device].map(|of| shared.admission.ledger(of));
        self.looked.reserved = host.reserved_bytes();
        self.looked.allowance = host.allowance_bytes();
        self.looked.ceiling = host.ceiling();
        self.looked.device_reserved = device.reserved_bytes();
        let stats = shared.admission.stats();
        self.looked.held = stats.held();
        self.looked.waiting = stats.waiting;
        self.looked.rejected_total =
            RejectReason::ALL.iter().map(|why| stats.rejected_total(*why)).sum();
        self.looked.oom_kills = shared.signals.oom_kills();
    }

    /// Adds the last look to the samples.
    fn keep(&mut self) {
        self.read_rest();
        if self.samples.len() == SAMPLES_MAX - 1 {
            self.samples.pop_front();
        }
        self.samples.push_back(self.looked);
        let shared = &*self.shared;
        self.permits_now =
            shared.admission.state().largest_reserved(&mut self.permits, shared.clock.now());
    }

    /// Writes everything, and a look after the last sample.
    fn write(&mut self, look: Option<FlightSample>) {
        self.written = self.looked.physical;
        let (shared, writer) = (&*self.shared, &mut self.writer);
        let end = RunEnd::ALL.get(usize::from(shared.flight.end.load(Ordering::Acquire)));
        let end = end.copied().unwrap_or_default();
        writer.begin(&self.run, end, machine_kills(self.vmstat.as_ref()));
        writer.list(SAMPLES_MAX, self.samples.iter().chain(&look));
        shared.events.last(EVENTS_MAX, |events| writer.list(EVENTS_MAX, events));
        writer.list(PERMITS_MAX, self.permits.iter().take(self.permits_now));
        writer.list(RESOURCES_MAX, self.resources.iter());
        if let Err(error) = self.file.write_half(writer.finish(self.file.next_half())) {
            let text = format!("{FAILED}: {error}");
            self.shared.add_diagnostic_once(FAILED, Diagnostic::warning(ABOUT, text));
        }
    }
}

/// The subject of diagnostics.
const ABOUT: &str = "flight_recorder";
/// The beginning of the diagnostic about a failed write.
const FAILED: &str = "recording is incomplete";

/// Opens the kernel's counts of this machine's memory; `None` on other systems.
fn open_vmstat() -> Option<KeptFile> {
    KeptFile::open(Path::new("/proc/vmstat")).ok()
}

/// Returns the count of processes that the kernel has OOM-killed on this machine since it booted;
/// `None` if it is unknown. It is not that of a cgroup, so it lasts when a container gets a new one.
/// Allocates nothing.
fn machine_kills(vmstat: Option<&KeptFile>) -> Option<u64> {
    let mut text = [0; VMSTAT_MAX];
    let length = vmstat?.read_at(&mut text, 0).ok()?;
    let mut lines = text.get(..length)?.split(|byte| *byte == b'\n');
    number(lines.find_map(|line| line.strip_prefix(b"oom_kill "))?)
}

/// The bytes of `/proc/vmstat` that are read: it has some 4 KiB.
const VMSTAT_MAX: usize = 8 << 10;

/// Returns the inode of the cgroup's folder; zero if it is unknown.
fn cgroup(signals: &Signals) -> u64 {
    let found = signals.cgroup().and_then(|folder| folder.metadata().ok());
    found.map_or(0, |found| found.ino())
}

/// Returns the kernel's boot id; zeros if it is unknown.
fn boot_id() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or_default().to_be_bytes()
}

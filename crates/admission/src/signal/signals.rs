//! The signals of this process, and the samples that are taken of them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_core::bytes::ByteSize;

use super::cgroup::Cgroup;
use super::cpu::Cpus;
use super::error::SignalError;
use super::events::MemoryEvents;
use super::file::{KeptFile, read_whole};
use super::limit::{Limit, LimitSource};
use super::psi::{self, Psi};
use super::sample::{Counted, Glance, Resident, Signal};
use super::statm::{self, SpaceLimits, Statm};

/// The signals of this process, read through open descriptors.
///
/// After `fork` the descriptors still refer to the parent.
#[derive(Debug)]
pub struct Signals {
    statm: Option<KeptFile>,
    status: Option<KeptFile>,
    page: ByteSize,
    cgroup: Option<Cgroup>,
    pressure: Option<KeptFile>,
    machine: Option<ByteSize>,
    given: Option<ByteSize>,
    /// [`u64::MAX`] for none.
    fit: AtomicU64,
    space: SpaceLimits,
    cpus: Cpus,
    missing: Arc<[SignalError]>,
}

impl Signals {
    /// Opens the available signals. Never fails: unavailable ones are listed in
    /// [`Signals::missing`].
    #[must_use]
    pub fn open() -> Self {
        if cfg!(target_os = "linux") {
            Self::open_at(Path::new("/"))
        } else {
            let system = std::env::consts::OS;
            Self::of_parts(None, None, None, vec![SignalError::Unsupported { system }])
        }
    }

    /// Like [`Signals::open`], with another root of the file tree: `root/proc`, and the mounts of
    /// `root/proc/self/mountinfo` under `root` as well.
    #[must_use]
    pub fn open_at(root: &Path) -> Self {
        let mut missing = Vec::new();
        let proc = root.join("proc");
        let statm = note(KeptFile::open(&proc.join("self/statm")), &mut missing);
        let machine = match read_whole(&proc.join("meminfo")) {
            Ok(text) => note(
                statm::kib_of(&text, b"MemTotal:").ok_or_else(|| SignalError::Malformed {
                    path: proc.join("meminfo"),
                    expected: "a line `MemTotal: <n> kB`",
                }),
                &mut missing,
            ),
            Err(error) => note(Err(error), &mut missing),
        };
        let cgroup = Cgroup::find(root, &mut missing);
        let pressure = psi::find(root, &mut missing);
        let status = note(KeptFile::open(&proc.join("self/status")), &mut missing);
        // A missing file means no limits, as on other systems.
        let space = read_whole(&proc.join("self/limits")).ok();
        let space = space.map(|text| SpaceLimits::of(&text)).unwrap_or_default();
        let page = read_whole(&proc.join("self/auxv")).ok();
        let page = page.and_then(|auxv| statm::page_of(&auxv));
        let signals = Self::of_parts(statm, machine, cgroup, missing);
        let cpus = Cpus::read(root);
        Self { status, pressure, page: page.unwrap_or(signals.page), space, cpus, ..signals }
    }

    /// Creates signals that read nothing: only the limit set by [`Signals::with_limit`] is known.
    #[must_use]
    pub fn none() -> Self {
        Self::of_parts(None, None, None, Vec::new())
    }

    fn of_parts(
        statm: Option<KeptFile>,
        machine: Option<ByteSize>,
        cgroup: Option<Cgroup>,
        missing: Vec<SignalError>,
    ) -> Self {
        let page = statm::PAGE_USUAL;
        Self {
            statm,
            status: None,
            page,
            cgroup,
            pressure: None,
            machine,
            given: None,
            fit: AtomicU64::new(u64::MAX),
            space: SpaceLimits::default(),
            cpus: Cpus::of_thread(),
            missing: missing.into(),
        }
    }

    /// Returns the CPUs that this process can keep busy, as of the open.
    #[must_use]
    pub const fn cpus(&self) -> Cpus {
        self.cpus
    }

    /// Sets a limit from configuration. It can lower the limit that was found but not raise it: the
    /// kernel kills, or refuses memory, at its own limit.
    #[must_use]
    pub fn with_limit(mut self, limit: ByteSize) -> Self {
        self.given = Some(limit);
        self
    }

    /// Lowers the limit of all later samples to these bytes, or ends that. It does not raise a
    /// limit. Unlike a limit from configuration it changes while the process runs: everything that
    /// follows the limit shrinks before the kernel's limit does.
    pub fn set_fit(&self, fit: Option<ByteSize>) {
        self.fit.store(fit.map_or(u64::MAX, ByteSize::get), Ordering::Relaxed);
    }

    pub(super) fn fit(&self) -> Option<ByteSize> {
        Some(self.fit.load(Ordering::Relaxed)).filter(|fit| *fit != u64::MAX).map(ByteSize::new)
    }

    /// Returns the machine's physical memory, read once; `None` if it could not be read.
    #[must_use]
    pub const fn machine(&self) -> Option<ByteSize> {
        self.machine
    }

    /// Returns the signals that are not available, for one report at the start.
    #[must_use]
    pub fn missing(&self) -> &[SignalError] {
        &self.missing
    }

    /// Takes a sample. Parts that cannot be read now are `None`; a limit that cannot be read now
    /// keeps its last value. Takes some 15 us; allocates nothing.
    #[must_use]
    pub fn sample(&self) -> Signal {
        self.read(Glance { resident: self.statm(), usage: self.usage() }).0
    }

    /// Reads the files that are not part of a glance.
    pub(super) fn read(&self, glance: Glance) -> (Signal, Counted) {
        let rss = glance.resident.map(|resident| resident.rss);
        let anonymous = glance.resident.map(|resident| resident.anon);
        let group = self.cgroup.as_ref().map(|group| group.sample(glance.usage));
        let group = group.unwrap_or_default();
        let found = group
            .limit
            .or_else(|| self.machine.map(|bytes| Limit { bytes, source: LimitSource::Machine }));
        let limit = match (found, self.given) {
            (Some(found), Some(given)) if given > found.bytes => found,
            (_, Some(given)) => Limit::given(given),
            (Some(found), None) => found,
            (None, None) => Limit::UNKNOWN,
        };
        let limit_without_fit = match glance.resident.and_then(|held| self.space.resident_max(held))
        {
            Some(bytes) if bytes < limit.bytes => {
                Limit { bytes, source: LimitSource::AddressSpace }
            }
            _ => limit,
        };
        // A machine's limit applies to this process, a cgroup's to all of the cgroup.
        let physical = match group.held {
            Some(held) if group.limit.is_some() || rss.is_none() => {
                held.max(anonymous.unwrap_or(ByteSize::ZERO))
            }
            _ => rss.unwrap_or(ByteSize::ZERO),
        };
        let counted = match group.limit {
            // A limit on addresses changes with each mapping.
            _ if group.is_stale || self.space != SpaceLimits::default() => Counted::Unknown,
            Some(limit) if group.held.is_some() => Counted::Cgroup(limit.bytes),
            Some(_) => Counted::Unknown,
            None => Counted::Process,
        };
        let (charged, limit_is_stale) = (group.charged, group.is_stale);
        let signal = Signal {
            rss,
            anonymous,
            physical,
            limit: limit_without_fit.fitted(self.fit()),
            limit_without_fit,
            usage: glance.usage.filter(|_| group.limit.is_some()),
            charged,
            limit_is_stale,
        };
        (signal, counted)
    }

    pub(super) fn statm(&self) -> Option<Statm> {
        self.statm.as_ref()?.read_line(|text| statm::resident_of(text, self.page)).flatten()
    }

    /// Returns the usage of the cgroup, including page cache.
    pub(super) fn usage(&self) -> Option<ByteSize> {
        self.cgroup.as_ref().and_then(Cgroup::usage)
    }

    /// Returns the number of processes of the cgroup that the kernel has OOM-killed since the
    /// cgroup was created. Not part of a sample, because it costs another read.
    #[must_use]
    pub fn oom_kills(&self) -> Option<u64> {
        self.cgroup.as_ref()?.oom_kills()
    }

    /// Returns the limits reached and processes killed since the open, in the process's own cgroup
    /// and in the ancestors that limit it; `None` without a cgroup. Costs at least one read for
    /// each level; for metrics, once per second is enough.
    #[must_use]
    pub fn events(&self) -> Option<MemoryEvents> {
        self.cgroup.as_ref().map(Cgroup::events)
    }

    /// Returns the time that the cgroup lost waiting for memory; `None` if unknown
    /// ([`SignalError::NoPsi`]). Advisory, for metrics. Takes 10 us (measured).
    #[must_use]
    pub fn psi(&self) -> Option<Psi> {
        self.pressure.as_ref()?.read(psi::psi_of).flatten()
    }

    /// Returns the folder of the memory cgroup that is read: the nearest one with memory
    /// accounting.
    #[must_use]
    pub fn cgroup(&self) -> Option<&Path> {
        self.cgroup.as_ref().map(Cgroup::folder)
    }

    /// Returns the resident set by kind. Costs more than a sample (25 us measured); for metrics.
    #[must_use]
    pub fn resident(&self) -> Option<Resident> {
        let status = self.status.as_ref()?;
        status
            .read(|text| {
                Some(Resident {
                    anon: statm::kib_of(text, b"RssAnon:")?,
                    file: statm::kib_of(text, b"RssFile:")?,
                    shmem: statm::kib_of(text, b"RssShmem:")?,
                })
            })
            .flatten()
    }
}

/// Returns the value, or `None` with an entry in the list.
fn note<T>(found: Result<T, SignalError>, missing: &mut Vec<SignalError>) -> Option<T> {
    match found {
        Ok(value) => Some(value),
        Err(error) => {
            missing.push(error);
            None
        }
    }
}

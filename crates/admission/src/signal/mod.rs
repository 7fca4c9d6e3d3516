//! Memory signals of the kernel: the use of this process and its cgroup, and the limit.
//!
//! Descriptors are opened once and read with `pread` into buffers on the stack. A sample costs some
//! 15 us (one read of `statm`, of `memory.stat` and of the usage, and of the limits of each level
//! of the cgroup) and allocates nothing. [`SignalTracker`] takes most samples with one or two
//! reads. It decides nothing and does not subtract purgeable memory, which only the heap knows.
//!
//! The limit is a minimum over the cgroup's ancestors, less the memory held by other members of
//! that ancestor, because the kernel kills for their bytes as well. Without a cgroup limit it is
//! the machine's memory. A limit of the process on addresses or data (`ulimit -v`, `ulimit -d`)
//! lowers it to the possible size of the resident set: beyond that an allocation fails, which
//! aborts a Rust program. On systems other than Linux there is nothing to read, and
//! [`Signals::missing`] reports that. The number of CPUs that the process can keep busy is read
//! once ([`Cpus`]).
//!
//! Invariant: `physical = max(held, anonymous resident)` in a cgroup with a limit, `rss` elsewhere;
//! `held = max(usage - inactive_file - active_file, anon + shmem)`.

mod cgroup;
mod cpu;
mod events;
mod file;
mod psi;
mod statm;
mod tracker;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use lowtide_core::bytes::ByteSize;

use cgroup::Cgroup;
use file::{KeptFile, read_whole};
use statm::{SpaceLimits, Statm};
use tracker::Counted;

pub use cpu::Cpus;
pub use events::{EventCounts, MemoryEvents};
pub use psi::{Psi, Stall};
pub use tracker::SignalTracker;

/// The source of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LimitSource {
    /// The hard limit of a cgroup (`memory.max`, `memory.limit_in_bytes`).
    Cgroup,
    /// The soft limit of a cgroup (`memory.high`), if it is lower than the hard limit.
    High,
    /// The machine's physical memory: no cgroup limits this process.
    Machine,
    /// The configuration.
    Override,
    /// A limit of the process on its addresses or its data (`RLIMIT_AS`, `RLIMIT_DATA`).
    AddressSpace,
    /// No limit is known, because nothing could be read.
    #[default]
    Unknown,
}

impl LimitSource {
    /// All sources.
    pub const ALL: [Self; 6] = [
        Self::Cgroup,
        Self::High,
        Self::Machine,
        Self::Override,
        Self::AddressSpace,
        Self::Unknown,
    ];

    /// Returns a phrase for messages, such as `the cgroup (memory.max)`.
    #[must_use]
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::Cgroup => "the cgroup (memory.max)",
            Self::High => "the cgroup (memory.high)",
            Self::Machine => "the machine",
            Self::Override => "the configuration",
            Self::AddressSpace => "the address space (ulimit)",
            Self::Unknown => "an unknown source",
        }
    }

    /// Returns the label in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cgroup => "cgroup",
            Self::High => "high",
            Self::Machine => "machine",
            Self::Override => "override",
            Self::AddressSpace => "address_space",
            Self::Unknown => "unknown",
        }
    }
}

/// The memory limit and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Limit {
    /// The largest allowed [`Signal::physical`]; [`ByteSize::MAX`] if unknown.
    pub bytes: ByteSize,
    /// The source of the limit.
    pub source: LimitSource,
}

impl Limit {
    /// No known limit.
    pub const UNKNOWN: Self = Self { bytes: ByteSize::MAX, source: LimitSource::Unknown };

    /// Creates a limit given by configuration.
    #[must_use]
    pub const fn given(bytes: ByteSize) -> Self {
        Self { bytes, source: LimitSource::Override }
    }

    /// Returns `true` if there is a limit.
    #[must_use]
    pub fn is_known(self) -> bool {
        self.source != LimitSource::Unknown && self.bytes != ByteSize::MAX
    }
}

impl Default for Limit {
    fn default() -> Self {
        Self::UNKNOWN
    }
}

/// One sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Signal {
    /// The process's resident set.
    pub rss: Option<ByteSize>,
    /// The part of `rss` that belongs to no file and no shared memory.
    pub anonymous: Option<ByteSize>,
    /// Bytes that count against the limit; zero if nothing could be read.
    pub physical: ByteSize,
    /// The limit.
    pub limit: Limit,
    /// Anonymous and shared memory of the cgroup, which the kernel cannot reclaim without swap.
    pub charged: Option<ByteSize>,
    /// `true` if a file on which the limit depends cannot be read or parsed now, so that `limit` is
    /// the last known value.
    pub limit_is_stale: bool,
}

/// Two files that change whenever this process or its cgroup may hold another amount of memory. A
/// limit, or the memory of other members of an ancestor, may change without them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Glance {
    resident: Option<Statm>,
    usage: Option<ByteSize>,
}

/// The resident set by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Anonymous pages.
    pub anon: ByteSize,
    /// Pages of files.
    pub file: ByteSize,
    /// Shared memory and tmpfs.
    pub shmem: ByteSize,
}

/// A signal that is not available.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SignalError {
    /// A file could not be read.
    #[error("cannot read {path}: {kind}", path = path.display())]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The operating system's error.
        kind: std::io::ErrorKind,
    },
    /// A file does not have the expected content.
    #[error("{path} is malformed: expected {expected}", path = path.display())]
    Malformed {
        /// The path of the file.
        path: PathBuf,
        /// The expected content.
        expected: &'static str,
    },
    /// No memory cgroup is visible: only the machine's memory limits this process.
    #[error("no memory cgroup is visible to this process")]
    NoCgroup,
    /// The process's cgroup lies outside the mount that is visible here, so the mount's root stands
    /// for it.
    #[error("cgroup {cgroup:?} is outside the mount {root:?}: reading the root of the mount")]
    Outside {
        /// The path of the process's cgroup.
        cgroup: String,
        /// The root of the mount.
        root: String,
    },
    /// The cgroup has more levels than are read.
    #[error(
        "the cgroup is more than {looked_at} levels deep: limits of further ancestors are ignored"
    )]
    Deep {
        /// The number of levels read.
        looked_at: usize,
    },
    /// The cgroup has no pressure information (PSI): the kernel lacks it (`CONFIG_PSI`, `psi=0`),
    /// version 2 is not mounted here, or this is the root, whose figures are the machine's.
    #[error(
        "memory pressure (PSI) of the cgroup is not available: {}",
        path.as_ref().map_or_else(
            || "no version 2 cgroup below the root is visible".to_owned(),
            |path| format!("cannot read {}", path.display()),
        )
    )]
    NoPsi {
        /// The path of the file, if there is a cgroup.
        path: Option<PathBuf>,
    },
    /// This operating system has no such signals.
    #[error("memory signals are not available on {system}: expected /proc and cgroups")]
    Unsupported {
        /// The operating system.
        system: &'static str,
    },
}

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
    fn read(&self, glance: Glance) -> (Signal, Counted) {
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
        let limit = match glance.resident.and_then(|held| self.space.resident_max(held)) {
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
        (Signal { rss, anonymous, physical, limit, charged, limit_is_stale }, counted)
    }

    fn statm(&self) -> Option<Statm> {
        self.statm.as_ref()?.read_line(|text| statm::resident_of(text, self.page)).flatten()
    }

    /// Returns the usage of the cgroup, including page cache.
    fn usage(&self) -> Option<ByteSize> {
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

//! What the kernel says about this process and the limit it lives under.
//!
//! Descriptors are opened once and read with `pread` into buffers on the stack: a sample costs a
//! few microseconds (one read of `statm`, and of `memory.stat`, usage and limit for each level of
//! the cgroup that has a limit) and allocates nothing. It decides nothing and subtracts nothing of
//! ours: what is purgeable is known by the heap.
//!
//! The limit is a minimum over the cgroup's ancestors, less what other members of that ancestor
//! hold, because a kill does not ask whose bytes they were. Without a limit it is the machine's
//! memory. A limit of the process on addresses or data (`ulimit -v`, `ulimit -d`) lowers it to what
//! the resident set may become: beyond that an allocation fails, which aborts a Rust program. On
//! systems other than Linux there is nothing to read, and [`Signals::missing`] says so.
//! Beside memory there is one thing more, read once: how many CPUs the process can keep busy
//! ([`Cpus`]).
//!
//! Invariant: `physical = max(held, anonymous resident)` in a cgroup with a limit, `rss` elsewhere;
//! `held = max(usage - inactive_file - active_file, anon + shmem)`.

mod cgroup;
mod cpu;
mod events;
mod file;
mod psi;
mod statm;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use crate::bytes::ByteSize;

use cgroup::Cgroup;
use file::{KeptFile, read_whole};
use statm::SpaceLimits;

pub use cpu::Cpus;
pub use events::{EventCounts, MemoryEvents};
pub use psi::{Psi, Stall};

/// Where a limit comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LimitSource {
    /// The hard limit of a cgroup (`memory.max`, `memory.limit_in_bytes`).
    Cgroup,
    /// The soft ceiling of a cgroup (`memory.high`), where it is lower than the hard limit.
    High,
    /// The machine's physical memory: no cgroup limits this process.
    Machine,
    /// Given by configuration.
    Override,
    /// A limit of the process on its addresses or its data (`RLIMIT_AS`, `RLIMIT_DATA`).
    AddressSpace,
    /// Nothing could be read: there is no limit that we know of.
    #[default]
    Unknown,
}

impl LimitSource {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Cgroup,
        Self::High,
        Self::Machine,
        Self::Override,
        Self::AddressSpace,
        Self::Unknown,
    ];

    /// Its label in metrics.
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

/// What must not be passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// How far [`Signal::physical`] may go; [`ByteSize::MAX`] where it is unknown.
    pub bytes: ByteSize,
    /// Where it comes from.
    pub source: LimitSource,
}

impl Limit {
    /// No limit is known.
    pub const UNKNOWN: Self = Self { bytes: ByteSize::MAX, source: LimitSource::Unknown };

    /// A limit given by configuration.
    #[must_use]
    pub const fn given(bytes: ByteSize) -> Self {
        Self { bytes, source: LimitSource::Override }
    }

    /// Whether there is a limit.
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

/// One reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signal {
    /// The process's resident set.
    pub rss: Option<ByteSize>,
    /// The part of it that belongs to no file and no shared memory.
    pub anonymous: Option<ByteSize>,
    /// What counts against the limit; zero where nothing could be read.
    pub physical: ByteSize,
    /// What must not be passed.
    pub limit: Limit,
    /// Anonymous and shared memory that the cgroup is charged with: what no reclaim of the kernel
    /// gives back without swap.
    pub charged: Option<ByteSize>,
    /// Whether a file on which the limit rests cannot be read or understood now, so that the limit
    /// is the last that could be.
    pub limit_is_stale: bool,
}

/// What shows that something moved; see [`Signals::glance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Glance {
    resident: Option<statm::Statm>,
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

/// A part of the signals that could not be had.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SignalError {
    /// A file could not be read.
    #[error("{path} cannot be read: {kind}", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        kind: std::io::ErrorKind,
    },
    /// A file does not say what it should.
    #[error("{path} does not hold {expected}", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was expected in it.
        expected: &'static str,
    },
    /// No memory cgroup is visible: only the machine's memory limits this process.
    #[error("no memory cgroup is visible to this process")]
    NoCgroup,
    /// The own cgroup lies outside what is mounted here, so that the mount's root stands for it.
    #[error("the cgroup {cgroup:?} is not under the mount {root:?}: the mount itself is read")]
    Outside {
        /// The path of the own cgroup.
        cgroup: String,
        /// The root of the mount.
        root: String,
    },
    /// The cgroup lies deeper than is looked at.
    #[error("the cgroup has more ancestors than {looked_at}: those above are not looked at")]
    Deep {
        /// How many levels are looked at.
        looked_at: usize,
    },
    /// The own cgroup shows no pressure (PSI): the kernel has none (`CONFIG_PSI`, `psi=0`), version
    /// 2 is not mounted here, or this is the root, whose figures are the machine's.
    #[error(
        "no memory pressure (PSI) of the own cgroup is known: {}",
        path.as_ref().map_or_else(
            || "no cgroup of version 2 below the root is visible".to_owned(),
            |path| format!("{} cannot be read", path.display()),
        )
    )]
    NoPsi {
        /// The file that would have it, where there is a cgroup.
        path: Option<PathBuf>,
    },
    /// This system has no such signals.
    #[error("memory signals are read from /proc and cgroups, which {system} does not have")]
    Unsupported {
        /// The operating system.
        system: &'static str,
    },
}

/// The signals of this process: kept descriptors, found once.
///
/// After `fork` the descriptors still speak of the parent.
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
    /// Finds what there is to read. Never fails: what cannot be read is in [`Signals::missing`].
    #[must_use]
    pub fn open() -> Self {
        if cfg!(target_os = "linux") {
            Self::open_at(Path::new("/"))
        } else {
            let system = std::env::consts::OS;
            Self::of_parts(None, None, None, vec![SignalError::Unsupported { system }])
        }
    }

    /// As [`Signals::open`], with another root of the file tree: `root/proc`, and what
    /// `root/proc/self/mountinfo` names, under `root` as well.
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
        // Where there is no such file nothing is limited: that is how it is on other systems.
        let space = read_whole(&proc.join("self/limits")).ok();
        let space = space.map(|text| SpaceLimits::of(&text)).unwrap_or_default();
        let page = read_whole(&proc.join("self/auxv")).ok();
        let page = page.and_then(|auxv| statm::page_of(&auxv));
        let signals = Self::of_parts(statm, machine, cgroup, missing);
        let cpus = Cpus::read(root);
        Self { status, pressure, page: page.unwrap_or(signals.page), space, cpus, ..signals }
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

    /// The CPUs that this process can keep busy, as they were at the open.
    #[must_use]
    pub const fn cpus(&self) -> Cpus {
        self.cpus
    }

    /// With a limit from configuration. It lowers what was found and never raises it: the kernel
    /// kills, or refuses memory, at its own limit whatever we believe.
    #[must_use]
    pub fn with_limit(mut self, limit: ByteSize) -> Self {
        self.given = Some(limit);
        self
    }

    /// The machine's physical memory, read once; `None` if it could not be read.
    #[must_use]
    pub const fn machine(&self) -> Option<ByteSize> {
        self.machine
    }

    /// What could not be had, for one report at start.
    #[must_use]
    pub fn missing(&self) -> &[SignalError] {
        &self.missing
    }

    /// One reading. Parts that cannot be read now are `None`; a limit that cannot be read now stays
    /// as it was last read. A few microseconds; allocates nothing.
    #[must_use]
    pub fn sample(&self) -> Signal {
        self.sample_after(self.glance())
    }

    /// The same after a glance of just now, whose two files are not read again.
    #[must_use]
    pub fn sample_after(&self, glance: Glance) -> Signal {
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
        // A machine's limit is compared with this process, a cgroup's with all that it holds.
        let physical = match group.held {
            Some(held) if group.limit.is_some() || rss.is_none() => {
                held.max(anonymous.unwrap_or(ByteSize::ZERO))
            }
            _ => rss.unwrap_or(ByteSize::ZERO),
        };
        let (charged, limit_is_stale) = (group.charged, group.is_stale);
        Signal { rss, anonymous, physical, limit, charged, limit_is_stale }
    }

    /// Whether anything may have moved since the reading before: two reads in place of a sample's
    /// four and more. Equal glances mean that this process and its cgroup hold what they held; a
    /// limit, or what others hold beside them, may have changed.
    #[must_use]
    pub fn glance(&self) -> Glance {
        let resident =
            |file: &KeptFile| file.read(|text| statm::resident_of(text, self.page)).flatten();
        Glance {
            resident: self.statm.as_ref().and_then(resident),
            usage: self.cgroup.as_ref().and_then(Cgroup::usage),
        }
    }

    /// Processes of the cgroup that the kernel has killed for memory, since it was made. One more
    /// read, so it is no part of a sample.
    #[must_use]
    pub fn oom_kills(&self) -> Option<u64> {
        self.cgroup.as_ref()?.oom_kills()
    }

    /// Limits reached and processes killed since this was opened, in the own cgroup and in the
    /// ancestors that limit it; `None` without a cgroup. A read for each level and more, so it is
    /// for metrics: once a second will do.
    #[must_use]
    pub fn events(&self) -> Option<MemoryEvents> {
        self.cgroup.as_ref().map(Cgroup::events)
    }

    /// How much time the own cgroup loses for memory; `None` where that is not known
    /// ([`SignalError::NoPsi`]). Advisory, and for metrics: 10 us measured.
    #[must_use]
    pub fn psi(&self) -> Option<Psi> {
        self.pressure.as_ref()?.read(psi::psi_of).flatten()
    }

    /// The folder of the memory cgroup that is read: the nearest one that is charged.
    #[must_use]
    pub fn cgroup(&self) -> Option<&Path> {
        self.cgroup.as_ref().map(Cgroup::folder)
    }

    /// The resident set by kind. Dearer than a sample (25 us measured): for metrics.
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

/// The value, or `None` and a line in the list.
fn note<T>(found: Result<T, SignalError>, missing: &mut Vec<SignalError>) -> Option<T> {
    match found {
        Ok(value) => Some(value),
        Err(error) => {
            missing.push(error);
            None
        }
    }
}

//! The signals of this process, and the samples that are taken of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lowtide_core::bytes::ByteSize;
use lowtide_core::kernel::{Statm, kib_of, page_size, resident_error};
use lowtide_core::sync::{Mutex, lock};

use super::cgroup::{Cgroup, CgroupReading};
use super::events::{self, MemoryEvents, Psi};
use super::file::{SignalError, SignalFile};
use super::limit::{Limit, LimitBound, LimitSource};
use super::machine::{self, Cpus, Machine, SpaceLimits};

/// The page size of x86-64 and of most aarch64 kernels, for file trees of other machines.
const PAGE_USUAL: ByteSize = ByteSize::kib(4);

/// The signals of this process, read through open descriptors.
///
/// After `fork` the descriptors still refer to the parent. By default it reads nothing.
#[derive(Debug, Default)]
pub struct Signals {
    root: PathBuf,
    statm: Option<SignalFile>,
    status: Option<SignalFile>,
    /// `/proc/self/limits` and `/proc/self/cgroup`, which are looked at again.
    limits: Option<SignalFile>,
    groups: Option<SignalFile>,
    page: ByteSize,
    /// By how much the kernel's count of resident memory may be wrong.
    error: ByteSize,
    machine: Machine,
    given: Option<ByteSize>,
    fit: Mutex<Option<ByteSize>>,
    cpus: Cpus,
    space: Mutex<SpaceLimits>,
    files: Mutex<Arc<CgroupFiles>>,
    /// What cannot be read outside the cgroup.
    missing: Vec<SignalError>,
}

/// The files of the cgroup in which the process is.
#[derive(Debug, Default)]
struct CgroupFiles {
    /// The text of `/proc/self/cgroup`.
    lines: Box<[u8]>,
    cgroup: Option<Cgroup>,
    pressure: Option<SignalFile>,
    missing: Arc<[SignalError]>,
}

impl CgroupFiles {
    /// Opens the files of the cgroup.
    fn open(root: &Path, lines: &[u8]) -> Self {
        let mut missing = Vec::new();
        let cgroup = Cgroup::find(root, lines, &mut missing);
        let pressure = events::find_psi(root, lines, &mut missing);
        Self { lines: lines.into(), cgroup, pressure, missing: missing.into() }
    }
}

/// What a sample compares with the bounds.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    group: CgroupReading,
    resident: Option<Statm>,
    /// The bytes that count against the limit.
    physical: ByteSize,
    /// `group` if they are those of the cgroup, `process` if they are anonymous and shared memory
    /// of this process.
    scope: &'static str,
}

/// A bound outside the cgroup: its limit, and what is compared with it.
type Outer = (LimitSource, &'static str, [ByteSize; 2], &'static str);

impl Signals {
    /// Opens the available signals. Never fails: unavailable ones are listed in
    /// [`Signals::missing`].
    #[must_use]
    pub fn open() -> Self {
        if cfg!(target_os = "linux") {
            Self::open_at(Path::new("/"))
        } else {
            let system = std::env::consts::OS;
            Self { missing: vec![SignalError::Unsupported { system }], ..Self::none() }
        }
    }

    /// Like [`Signals::open`], with another root of the file tree: `root/proc`, and the mounts of
    /// `root/proc/self/mountinfo` under `root` as well.
    #[must_use]
    pub fn open_at(root: &Path) -> Self {
        let mut missing = Vec::new();
        let proc = root.join("proc/self");
        // The cgroup first: its limit matters most if descriptors are few.
        let groups = SignalFile::open_noted(&proc.join("cgroup"), &mut missing);
        let open = |file: &SignalFile| file.read(|lines| CgroupFiles::open(root, lines));
        let files =
            groups.as_ref().map(|file| open(file).unwrap_or_else(|| CgroupFiles::open(root, &[])));
        let statm = SignalFile::open_noted(&proc.join("statm"), &mut missing);
        let machine = Machine::open(root, &mut missing);
        let status = SignalFile::open_noted(&proc.join("status"), &mut missing);
        // A missing file means no limits, as on other systems.
        let limits = SignalFile::open_if_any(&proc.join("limits"), &mut missing);
        let page = page_size().filter(|_| root == Path::new("/")).unwrap_or(PAGE_USUAL);
        let signals = Self {
            root: root.to_owned(),
            statm,
            status,
            limits,
            groups,
            page,
            error: resident_error(machine::online(root).unwrap_or(0).into(), page),
            machine,
            cpus: Cpus::read(root),
            files: Mutex::new(Arc::new(files.unwrap_or_default())),
            missing,
            ..Self::none()
        };
        signals.look_outside();
        signals
    }

    /// Creates signals that read nothing: only the limit set by [`Signals::with_limit`] is known.
    #[must_use]
    pub fn none() -> Self {
        Self { cpus: Cpus::of_thread(), ..Self::default() }
    }

    /// Reads again the bounds of the machine and of the process (`prlimit`), and looks if the
    /// process has come into another cgroup. Opens the files of a new cgroup, and again those that
    /// could not be read. Returns `true` if files were opened or limits of the process changed.
    ///
    /// Call it about once a second; [`SignalTracker`](super::SignalTracker) does. Takes some 20 us
    /// and allocates nothing if nothing has changed. A new cgroup takes some 200 us, and up to 100
    /// ms if it must be searched among thousands under a mount of another namespace.
    pub fn look(&self) -> bool {
        let has_other_limits = self.look_outside();
        let before = self.files();
        let passing = |of: &CgroupFiles| of.missing.iter().filter(|it| it.is_passing()).count();
        let is_whole = passing(&before) == 0;
        let open = |lines: &[u8]| {
            let is_same = *lines == *before.lines;
            let opened = (!is_same || !is_whole).then(|| CgroupFiles::open(&self.root, lines))?;
            (!is_same || passing(&opened) < passing(&before)).then_some(opened)
        };
        let opened = self.groups.as_ref().and_then(|file| file.read(open)).flatten();
        let has_opened = opened.is_some();
        if let Some(opened) = opened {
            *lock(&self.files) = Arc::new(opened);
        }
        has_opened || has_other_limits
    }

    /// Reads again what does not depend on the cgroup. Returns `true` if limits of the process have
    /// changed.
    fn look_outside(&self) -> bool {
        self.machine.look(self.statm().map(|held| held.anon).unwrap_or_default());
        let Some(space) = self.limits.as_ref().and_then(|file| file.read(SpaceLimits::of)) else {
            return false;
        };
        std::mem::replace(&mut *lock(&self.space), space) != space
    }

    fn files(&self) -> Arc<CgroupFiles> {
        Arc::clone(&lock(&self.files))
    }

    /// Returns the CPUs that this process can keep busy, as of the open.
    #[must_use]
    pub const fn cpus(&self) -> Cpus {
        self.cpus
    }

    /// Returns by how much the kernel's count of this process's resident memory may be wrong: each
    /// CPU keeps some changes to itself. The usage of a cgroup does not depend on it.
    #[must_use]
    pub const fn resident_error(&self) -> ByteSize {
        self.error
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
        *lock(&self.fit) = fit;
    }

    pub(super) fn fit(&self) -> Option<ByteSize> {
        *lock(&self.fit)
    }

    /// Returns the machine's physical memory, read once; `None` if it could not be read.
    #[must_use]
    pub const fn machine(&self) -> Option<ByteSize> {
        self.machine.total
    }

    /// Returns the signals that are not available, as of the last [look](Signals::look).
    #[must_use]
    pub fn missing(&self) -> Vec<SignalError> {
        self.files().missing.iter().chain(&self.missing).cloned().collect()
    }

    /// Takes a sample. Parts that cannot be read now are `None`; a limit that cannot be read now
    /// keeps its last value. Takes some 15 us, or 20 us if no cgroup limits this process; allocates
    /// nothing.
    #[must_use]
    pub fn sample(&self) -> Signal {
        self.read(Glance { resident: self.statm(), usage: self.usage() }).0
    }

    /// Returns all bounds of this process's memory, as of a sample now, the one in force first. For
    /// reports: allocates.
    #[must_use]
    pub fn bounds(&self) -> Vec<LimitBound> {
        let glance = Glance { resident: self.statm(), usage: self.usage() };
        let (files, used) = self.used(glance);
        let anonymous = glance.resident.map(|held| held.anon).unwrap_or_default();
        let mut bounds = files.cgroup.as_ref().map(|group| group.bounds(anonymous));
        let bounds = bounds.get_or_insert_default();
        let fit = self.fit();
        let fit = fit.map(|fit| (LimitSource::Fit, "fit", [fit, used.physical], used.scope));
        let outer = self.outer(&used).chain(fit);
        bounds.extend(outer.map(|(source, name, [limit, used], scope)| LimitBound {
            source,
            name: name.to_owned(),
            limit: Some(limit),
            used: Some(used),
            scope,
            freshness: "second",
        }));
        let room = |bound: &LimitBound| {
            let limit = bound.limit.unwrap_or(ByteSize::MAX).get();
            i128::from(limit) - i128::from(bound.used.unwrap_or_default().get())
        };
        bounds.sort_by_key(room);
        std::mem::take(bounds)
    }

    /// Returns what counts against the limit.
    fn used(&self, glance: Glance) -> (Arc<CgroupFiles>, Used) {
        let (files, resident) = (self.files(), glance.resident);
        let anonymous = resident.map(|resident| resident.anon).unwrap_or_default();
        let group = files.cgroup.as_ref();
        let group = group.map(|group| group.sample(glance.usage, anonymous)).unwrap_or_default();
        // A machine's limit applies to this process, a cgroup's to all of the cgroup.
        let usable = self.machine.bounds().usable.unwrap_or(ByteSize::MAX);
        let held = group.held.filter(|_| group.least.is_some_and(|least| least <= usable));
        let (physical, scope) = match held {
            // Memory that is charged to a cgroup in which the process was before.
            Some(held) => (held.max(anonymous.saturating_sub(self.error)), "group"),
            None => (self.own(resident).or(group.held).unwrap_or_default(), "process"),
        };
        (files, Used { group, resident, physical, scope })
    }

    /// Returns the anonymous and shared memory of this process, which the kernel cannot drop.
    fn own(&self, resident: Option<Statm>) -> Option<ByteSize> {
        match (resident, self.resident()) {
            (Some(held), Some(kinds)) => Some(held.anon.saturating_add(kinds.shmem).min(held.rss)),
            (None, Some(kinds)) => Some(kinds.anon.saturating_add(kinds.shmem)),
            (held, None) => held.map(|held| held.rss),
        }
    }

    /// Returns the bounds outside the cgroup.
    fn outer(&self, used: &Used) -> impl Iterator<Item = Outer> {
        let of_given =
            |given| (LimitSource::Override, "memory_limit", [given, used.physical], used.scope);
        let given = self.given.map(of_given);
        let anonymous = used.resident.map(|held| held.anon).unwrap_or_default();
        let own = if used.scope == "group" { anonymous } else { used.physical };
        let bounds = self.machine.bounds();
        let machine = bounds.usable.map(|usable| {
            let name = "MemTotal less huge pages";
            (LimitSource::Machine, name, [usable, own], "process")
        });
        // The room is that of the last look; what was allocated since then counts against it.
        let commit = bounds.commit(anonymous);
        let commit =
            commit.map(|promised| (LimitSource::Commit, "CommitLimit", promised, "machine"));
        let space = *lock(&self.space);
        let space = used.resident.into_iter().flat_map(move |held| space.each(held));
        let space = space.map(|(name, limit)| (LimitSource::AddressSpace, name, limit, "process"));
        given.into_iter().chain(machine).chain(commit).chain(space)
    }

    /// Reads the files that are not part of a glance.
    pub(super) fn read(&self, glance: Glance) -> (Signal, CountedBy) {
        let (_, used) = self.used(glance);
        let Used { group, physical, scope, .. } = used;
        let is_group = scope == "group";
        let leaf = if is_group { physical } else { group.held.unwrap_or(physical) };
        let of_group = group.limit.map(|limit| (limit.source, [limit.bytes, leaf]));
        let outer = self.outer(&used).map(|(source, _, limit, _)| (source, limit));
        let bounds = outer.chain(of_group).map(|(source, [limit, used])| {
            // What is left of the bound is left above the physical memory.
            let bytes = physical.saturating_add(limit).saturating_sub(used);
            Limit { bytes, source }
        });
        let limit_without_fit = bounds.min_by_key(|limit| limit.bytes).unwrap_or(Limit::UNKNOWN);
        let is_of_group =
            matches!(limit_without_fit.source, LimitSource::Cgroup | LimitSource::High);
        let counted = match group.limit {
            // A limit on addresses changes with each mapping.
            _ if group.is_stale || *lock(&self.space) != SpaceLimits::default() => {
                CountedBy::Unknown
            }
            Some(limit) if is_group => CountedBy::Cgroup(limit.bytes),
            Some(_) if is_of_group => CountedBy::Unknown,
            _ => CountedBy::Process,
        };
        let (charged, limit_is_stale) = (group.charged, group.is_stale);
        let signal = Signal {
            rss: glance.resident.map(|resident| resident.rss),
            anonymous: glance.resident.map(|resident| resident.anon),
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
        self.statm.as_ref()?.read_line(|text| Statm::parse(text, self.page)).flatten()
    }

    /// Returns the usage of the cgroup, including page cache.
    pub(super) fn usage(&self) -> Option<ByteSize> {
        self.files().cgroup.as_ref().and_then(Cgroup::usage)
    }

    /// Returns the number of processes of the cgroup that the kernel has OOM-killed since the
    /// cgroup was created. Not part of a sample, because it costs another read.
    #[must_use]
    pub fn oom_kills(&self) -> Option<u64> {
        self.files().cgroup.as_ref()?.oom_kills()
    }

    /// Returns the limits reached and processes killed since the open, in the process's own cgroup
    /// and in the ancestors that limit it; `None` without a cgroup. Starts over in another cgroup.
    /// Costs at least one read for each level; for metrics, once per second is enough.
    #[must_use]
    pub fn events(&self) -> Option<MemoryEvents> {
        self.files().cgroup.as_ref().map(Cgroup::events)
    }

    /// Returns the time that the cgroup lost waiting for memory; `None` if unknown
    /// ([`SignalError::NoPsi`]). Advisory, for metrics. Takes 10 us (measured).
    #[must_use]
    pub fn psi(&self) -> Option<Psi> {
        self.files().pressure.as_ref()?.read(events::psi_of).flatten()
    }

    /// Returns the folder of the memory cgroup that is read: the nearest one with memory
    /// accounting.
    #[must_use]
    pub fn cgroup(&self) -> Option<PathBuf> {
        self.files().cgroup.as_ref()?.folder().map(Path::to_owned)
    }

    /// Returns the resident set by kind. Costs more than a sample (25 us measured); for metrics.
    #[must_use]
    pub fn resident(&self) -> Option<Resident> {
        let read = |text: &[u8]| {
            let (anon, file) = (kib_of(text, b"RssAnon:")?, kib_of(text, b"RssFile:")?);
            Some(Resident { anon, file, shmem: kib_of(text, b"RssShmem:")? })
        };
        self.status.as_ref()?.read(read).flatten()
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
    /// Bytes that count against the limit: what the cgroup holds if its limit is at most the
    /// machine's memory, otherwise anonymous and shared memory of this process. Zero if nothing
    /// could be read.
    pub physical: ByteSize,
    /// The limit.
    pub limit: Limit,
    /// The limit as it would be without a [fit](super::Signals::set_fit).
    pub limit_without_fit: Limit,
    /// The usage of the cgroup, including page cache: the figure that Kubernetes compares with a
    /// new limit. `None` if no cgroup limits this process.
    pub usage: Option<ByteSize>,
    /// Anonymous and shared memory of the cgroup, which the kernel cannot reclaim without swap.
    pub charged: Option<ByteSize>,
    /// `true` if a file on which the limit depends cannot be read or parsed now, so that `limit` is
    /// the last known value.
    pub limit_is_stale: bool,
}

/// Two files that change whenever this process or its cgroup may hold another amount of memory. A
/// limit, or the memory of other members of an ancestor, may change without them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Glance {
    pub(super) resident: Option<Statm>,
    pub(super) usage: Option<ByteSize>,
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

/// How [`Signal::physical`] follows a glance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CountedBy {
    /// Anonymous and shared memory of the process.
    Process,
    /// The cgroup, with this limit.
    Cgroup(ByteSize),
    /// It or the limit may change with files outside a glance in a way that a glance does not show.
    Unknown,
}

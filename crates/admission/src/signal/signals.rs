//! The signals of this process, the samples that are taken of them, and a tracker that follows them
//! from one tick to the next.
//!
//! A full reading takes `memory.stat` and the limits of each level of the cgroup: six files and
//! some 15 us. The control loop samples up to a hundred times per second, so [`SignalTracker`]
//! reads two files in each sample, `statm` and the cgroup's usage, and the others only if they can
//! change a decision: if memory moved by more than [`Signal::tolerance`], if usage is that close to
//! the cgroup's limit, where the kernel replaces page cache by other memory, and after a bounded
//! time. Without a limit of a cgroup, `statm` is enough. Once a second it looks for another cgroup
//! and other limits of the process. It decides nothing.
//!
//! Invariants: with `usage` and `anonymous` the changes since the last full reading,
//! `physical = physical then + max(usage, anonymous)`; both are at most the tolerance. Without a
//! limit of a cgroup, `usage` is the resident set. The last full reading is at most [`MOVING_MAX`]
//! old, or [`STILL_MAX`] if nothing has changed.
//!
//! Growth of this process is in the next sample. So is growth of the rest of the cgroup, unless it
//! replaces page cache. The error until the next full reading: `physical` is too small by at most
//! `min(shrunk, others)`, with `shrunk` the page cache that was dropped and `others` the growth of
//! the rest of the cgroup; below the limit, page cache is dropped when files are deleted. It is too
//! large by at most `max(cached, released)`, with `cached` the growth of page cache and `released`
//! what the rest of the cgroup released.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;
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

    fn fit(&self) -> Option<ByteSize> {
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
    fn read(&self, glance: Glance) -> (Signal, CountedBy) {
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

    fn statm(&self) -> Option<Statm> {
        self.statm.as_ref()?.read_line(|text| Statm::parse(text, self.page)).flatten()
    }

    /// Returns the usage of the cgroup, including page cache.
    fn usage(&self) -> Option<ByteSize> {
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

/// How [`Signal::physical`] follows a glance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CountedBy {
    /// Anonymous and shared memory of the process.
    Process,
    /// The cgroup, with this limit.
    Cgroup(ByteSize),
    /// It or the limit may change with files outside a glance in a way that a glance does not show.
    Unknown,
}

/// The maximum age of a full reading while memory moves: limits that change, and memory of others
/// that replaces page cache, show only in the next one.
const MOVING_MAX: Duration = Duration::from_millis(100);
/// The same while nothing moves: two of three idle ticks of 250 ms then read one or two files.
const STILL_MAX: Duration = Duration::from_millis(750);
/// The time between two looks for another cgroup and other limits of the process.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The tolerance is the room under the limit divided by this. A guess: at most 1.6 % of what is
/// left, so it vanishes at the limit.
const TOLERANCE_PART: u64 = 64;

impl Signal {
    /// Returns the bytes by which memory may have moved without a full reading: a sixty-fourth of
    /// the room under the limit.
    #[must_use]
    pub const fn tolerance(&self) -> ByteSize {
        ByteSize::new(self.limit.bytes.saturating_sub(self.physical).get() / TOLERANCE_PART)
    }
}

/// Takes samples of [`Signals`] at a lower cost than [`Signals::sample`]. Owned by one thread.
#[derive(Debug)]
pub struct SignalTracker {
    signals: Arc<Signals>,
    last: Option<FullReading>,
    looked: Option<Moment>,
}

/// A full reading.
#[derive(Clone, Copy, Debug)]
struct FullReading {
    at: Moment,
    glance: Glance,
    signal: Signal,
    counted: CountedBy,
    /// Another one is a reason for the next full reading: the limit is another, and the tolerance.
    fit: Option<ByteSize>,
}

impl SignalTracker {
    /// Creates a tracker that has not sampled yet.
    #[must_use]
    pub const fn new(signals: Arc<Signals>) -> Self {
        Self { signals, last: None, looked: None }
    }

    /// Returns `true` while a [fit](Signals::set_fit) is in force.
    #[must_use]
    pub fn has_fit(&self) -> bool {
        self.signals.fit().is_some()
    }

    /// Takes a sample, and [looks](Signals::look) once a second. Allocates nothing unless the
    /// process has come into another cgroup, or files of its own cannot be read.
    pub fn sample(&mut self, now: Moment) -> Signal {
        let looked = *self.looked.get_or_insert(now);
        if now - looked >= LOOK_EVERY {
            self.looked = Some(now);
            if self.signals.look() {
                self.last = None;
            }
        }
        let needs_usage = self.last.is_none_or(|last| last.counted != CountedBy::Process);
        let resident = self.signals.statm();
        let usage = if needs_usage { self.signals.usage() } else { None };
        let glance = Glance { resident, usage };
        let fit = self.signals.fit();
        let last = self.last.filter(|last| last.fit == fit);
        if let Some(signal) = last.and_then(|last| last.at(glance, now)) {
            return signal;
        }
        let usage = if needs_usage { usage } else { self.signals.usage() };
        let (signal, counted) = self.signals.read(Glance { resident, usage });
        let usage = usage.filter(|_| counted != CountedBy::Process);
        let glance = Glance { resident, usage };
        self.last = Some(FullReading { at: now, glance, signal, counted, fit });
        signal
    }
}

impl FullReading {
    /// Returns the signal at a later glance, or `None` if it needs a full reading.
    fn at(&self, glance: Glance, now: Moment) -> Option<Signal> {
        let age = now - self.at;
        if glance == self.glance {
            return (age < STILL_MAX).then_some(self.signal);
        }
        if age >= MOVING_MAX {
            return None;
        }
        let (before, resident) = (self.glance.resident?, glance.resident?);
        let tolerance = self.signal.tolerance().get();
        // Both are far below 2^63, so the difference is exact.
        let change = |of: ByteSize, now: ByteSize| now.get().wrapping_sub(of.get()).cast_signed();
        let all = match self.counted {
            // Growth of mapped files counts until the next full reading: it may be shared memory.
            CountedBy::Process => change(before.rss, resident.rss),
            CountedBy::Cgroup(limit)
                if glance.usage?.get().saturating_add(tolerance) >= limit.get() =>
            {
                return None;
            }
            CountedBy::Cgroup(_) => change(self.glance.usage?, glance.usage?),
            CountedBy::Unknown => return None,
        };
        let anonymous = change(before.anon, resident.anon);
        if all.unsigned_abs().max(anonymous.unsigned_abs()) > tolerance {
            return None;
        }
        let physical = self.signal.physical.get().saturating_add_signed(all.max(anonymous));
        let physical = ByteSize::new(physical);
        let (rss, anonymous) = (Some(resident.rss), Some(resident.anon));
        let usage = self.signal.usage.and(glance.usage);
        Some(Signal { rss, anonymous, physical, usage, ..self.signal })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: ByteSize = ByteSize::mib(1024);

    /// The memory of a cgroup, in MiB.
    #[derive(Clone, Copy, Debug)]
    struct Held {
        own: u64,
        others: u64,
        cache: u64,
    }

    impl Held {
        fn glance(self) -> Glance {
            let (own, none) = (ByteSize::mib(self.own), ByteSize::ZERO);
            let resident = Statm { rss: own, anon: own, mapped: none, data: none };
            let usage = ByteSize::mib(self.own + self.others + self.cache);
            Glance { resident: Some(resident), usage: Some(usage) }
        }

        fn physical(self) -> u64 {
            self.own + self.others
        }

        fn reading(self) -> FullReading {
            let limit = Limit { bytes: LIMIT, source: LimitSource::Cgroup };
            let physical = ByteSize::mib(self.physical());
            let signal = Signal { physical, limit, ..Signal::default() };
            let (at, glance) = (Moment::ORIGIN, self.glance());
            FullReading { at, glance, signal, counted: CountedBy::Cgroup(LIMIT), fit: None }
        }
    }

    /// 256 MiB physical, so that 12 MiB may move without a full reading.
    const THEN: Held = Held { own: 128, others: 128, cache: 128 };

    fn physical(now: Held) -> Option<u64> {
        let signal = THEN.reading().at(now.glance(), Moment::ORIGIN)?;
        Some(signal.physical.get() >> 20)
    }

    #[test]
    fn the_error_is_what_replaced_page_cache_or_moved_outside_the_process() {
        let around = |mib: u64| (mib - 14..mib + 15).step_by(2);
        let (mut derived, mut full) = (0, 0);
        for own in around(THEN.own) {
            for others in around(THEN.others) {
                for cache in around(THEN.cache) {
                    let now = Held { own, others, cache };
                    let Some(found) = physical(now) else {
                        full += 1;
                        continue;
                    };
                    derived += 1;
                    let shrunk = THEN.cache.saturating_sub(cache);
                    let grown = others.saturating_sub(THEN.others);
                    let (cached, released) =
                        (cache.saturating_sub(THEN.cache), THEN.others.saturating_sub(others));
                    let real = now.physical();
                    assert!(found + shrunk.min(grown) >= real, "{now:?}: {found}");
                    assert!(found <= real + cached.max(released), "{now:?}: {found}");
                }
            }
        }
        assert!(derived > 1000 && full > 1000, "{derived} derived, {full} full readings");
    }

    #[test]
    fn growth_of_the_process_is_seen_although_page_cache_makes_room_for_it() {
        assert_eq!(physical(Held { own: 138, cache: 118, ..THEN }), Some(266));
        assert_eq!(physical(Held { own: 138, ..THEN }), Some(266));
        assert_eq!(physical(Held { others: 138, ..THEN }), Some(266));
        assert_eq!(physical(Held { own: 118, ..THEN }), Some(246), "it released memory");
        assert_eq!(physical(Held { cache: 118, ..THEN }), Some(256), "a file was deleted");
    }

    #[test]
    fn what_moves_by_more_than_the_tolerance_is_read_in_full() {
        for (own, cache) in [(141, 115), (128, 141), (128, 115), (115, 128)] {
            assert_eq!(physical(Held { own, cache, ..THEN }), None, "{own} {cache}");
        }
    }

    #[test]
    fn at_the_limit_of_the_cgroup_each_sample_is_a_full_reading() {
        let full = Held { cache: 760, ..THEN };
        let reading = full.reading();
        let at = |held: Held| reading.at(held.glance(), Moment::ORIGIN).is_some();
        assert!(at(full), "nothing has moved");
        // The kernel has given a page of cache to another process.
        assert!(!at(Held { others: 129, cache: 759, own: 129 }));
        assert!(!at(Held { cache: 759, ..full }));
        let below = Held { cache: 740, ..THEN };
        let reading = below.reading();
        let grown = Held { cache: 741, ..below };
        assert!(reading.at(grown.glance(), Moment::ORIGIN).is_some());
    }

    #[test]
    fn a_full_reading_ages() {
        let reading = THEN.reading();
        let at = |held: Held, millis| {
            let now = Moment::after_origin(Duration::from_millis(millis));
            reading.at(held.glance(), now).is_some()
        };
        let moved = Held { own: 129, ..THEN };
        assert!(at(moved, 99) && !at(moved, 100));
        assert!(at(THEN, 749) && !at(THEN, 750));
    }

    #[test]
    fn the_resident_set_needs_no_other_file() {
        let reading = FullReading { counted: CountedBy::Process, ..THEN.reading() };
        let glance = |own| Glance { usage: None, ..Held { own, ..THEN }.glance() };
        let signal = reading.at(glance(138), Moment::ORIGIN).expect("derived");
        assert_eq!(signal.physical, ByteSize::mib(266));
        assert!(reading.at(glance(900), Moment::ORIGIN).is_none(), "which kind of memory it is");
        let glance = glance(138);
        let unknown = FullReading { counted: CountedBy::Unknown, ..reading };
        assert!(unknown.at(glance, Moment::ORIGIN).is_none());
    }
}

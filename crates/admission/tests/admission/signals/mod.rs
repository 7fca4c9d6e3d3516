//! Signals over file trees as they are found in containers and on hosts: written ones here, those
//! that real kernels showed in `corpus`.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lowtide_admission::ByteSize;
use lowtide_admission::clock::Moment;
use lowtide_admission::{Limit, LimitSource, Signal, SignalError, SignalTracker, Signals};

#[cfg(all(target_os = "linux", not(lowtide_loom)))] // `procfs` is not built for models
mod corpus;
mod cpus;
mod field;
mod tree;

use tree::{GROUP, Group, MIB, NO_PSI, PSI, Tree, V1_MOUNTS, V2_MOUNT};

fn limit(mib: u64, source: LimitSource) -> Limit {
    Limit { bytes: ByteSize::mib(mib), source }
}

/// The values that [`GROUP`] reports under a hard limit of `mib` MiB.
fn sampled(mib: u64) -> Signal {
    Signal {
        rss: Some(ByteSize::mib(40)),
        anonymous: Some(ByteSize::mib(30)),
        physical: ByteSize::mib(100),
        limit: limit(mib, LimitSource::Cgroup),
        limit_without_fit: limit(mib, LimitSource::Cgroup),
        usage: Some(ByteSize::new(GROUP.usage)),
        charged: Some(ByteSize::mib(90)),
        limit_is_stale: false,
    }
}

#[test]
fn version_2_counts_what_is_held_against_the_hard_limit() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    let signals = tree.open();
    assert_eq!(signals.missing(), []);
    assert_eq!(signals.sample(), sampled(512));
    assert_eq!(signals.oom_kills(), Some(2));
    let resident = signals.resident().expect("read");
    assert_eq!(
        (resident.anon, resident.file, resident.shmem),
        (ByteSize::mib(30), ByteSize::mib(8), ByteSize::mib(2))
    );
}

#[test]
fn page_cache_at_the_limit_is_no_pressure_but_shared_memory_is() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    let cache = Group { usage: 512 * MIB, inactive_file: 500 * MIB, anon: MIB, shmem: 0, ..GROUP };
    tree.v2("app", cache);
    let signals = tree.open();
    // The process's own anonymous memory is the least that counts.
    assert_eq!(signals.sample().physical, ByteSize::mib(30));
    tree.v2("app", Group { shmem: 450 * MIB, ..cache });
    assert_eq!(signals.sample().physical, ByteSize::mib(451));
}

/// The bug: files that were read again and again counted as held, the level was critical, every
/// request was turned away, and since nothing charged memory any more the kernel never took them.
#[test]
fn page_cache_that_is_read_often_shed_every_request_for_ever() {
    for mounts in [("0::/app\n", V2_MOUNT), ("4:memory:/app\n1:cpu:/\n", V1_MOUNTS)] {
        let tree = Tree::new(mounts.0, mounts.1);
        let busy =
            Group { usage: 256 * MIB, inactive_file: 3 * MIB, active_file: 225 * MIB, ..GROUP };
        let busy = Group { anon: 26 * MIB, shmem: 0, limit: Some(256 * MIB), ..busy };
        if mounts.1 == V2_MOUNT {
            tree.v2("app", busy);
        } else {
            tree.v1("app", busy, 256 * MIB);
        }
        let sample = tree.open().sample();
        assert_eq!(sample.physical, ByteSize::mib(30), "{sample:?}");
    }
}

#[test]
fn a_limit_on_the_parent_binds_less_what_its_other_members_hold() {
    let tree = Tree::new("0::/pod/app\n", V2_MOUNT);
    tree.v2("pod/app", Group { limit: None, ..GROUP });
    tree.v2("pod", Group { limit: Some(200 * MIB), ..GROUP });
    let signals = tree.open();
    assert_eq!(signals.sample().limit, limit(200, LimitSource::Cgroup));
    // A neighbour of 60 MiB comes into the pod.
    let crowded = Group { usage: 360 * MIB, anon: 140 * MIB, limit: Some(200 * MIB), ..GROUP };
    tree.v2("pod", crowded);
    assert_eq!(signals.sample().limit, limit(140, LimitSource::Cgroup));
    assert_eq!(signals.sample().physical, ByteSize::mib(100));
    // A limit of the leaf's own, lower than that.
    tree.v2("pod/app", Group { limit: Some(120 * MIB), ..GROUP });
    assert_eq!(signals.sample().limit, limit(120, LimitSource::Cgroup));
}

#[test]
fn a_soft_ceiling_below_the_hard_limit_is_the_limit() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    let signals = tree.open();
    tree.write("sys/fs/cgroup/app/memory.high", "134217728\n");
    assert_eq!(signals.sample().limit, limit(128, LimitSource::High));
    tree.write("sys/fs/cgroup/app/memory.high", "max\n");
    assert_eq!(signals.sample().limit, limit(512, LimitSource::Cgroup));
}

fn at(millis: u64) -> Moment {
    Moment::after_origin(Duration::from_millis(millis))
}

#[test]
fn a_tracker_sees_growth_at_once_and_limits_within_a_tenth_of_a_second() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    let mut tracker = SignalTracker::new(Arc::new(tree.open()));
    assert_eq!(tracker.sample(at(0)), sampled(512));
    tree.write("sys/fs/cgroup/app/memory.max", "268435456\n");
    for mib in 1..=6 {
        let usage = (300 + mib) * MIB;
        tree.write("sys/fs/cgroup/app/memory.current", &format!("{usage}\n"));
        let sample = tracker.sample(at(mib));
        assert_eq!(sample.physical, ByteSize::mib(100 + mib));
        assert_eq!(sample.limit, limit(512, LimitSource::Cgroup), "as of the last full reading");
    }
    assert_eq!(tracker.sample(at(100)).limit, limit(256, LimitSource::Cgroup));
    // 7 MiB are more than a sixty-fourth of the 412 MiB that are left.
    let mut tracker = SignalTracker::new(Arc::new(tree.open()));
    let (physical, usage) = (ByteSize::mib(106), Some(ByteSize::mib(306)));
    assert_eq!(tracker.sample(at(0)), Signal { physical, usage, ..sampled(256) });
    tree.v2("app", Group { usage: 313 * MIB, active_file: 63 * MIB, ..GROUP });
    assert_eq!(tracker.sample(at(1)).physical, ByteSize::mib(100), "it was page cache");
}

#[test]
fn a_fit_lowers_the_limit_at_once_and_never_raises_it() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    let signals = Arc::new(tree.open());
    let mut tracker = SignalTracker::new(Arc::clone(&signals));
    let kernel = limit(512, LimitSource::Cgroup);
    assert_eq!(tracker.sample(at(0)).limit, kernel);
    for (millis, fit, expected) in [
        (1, Some(400), limit(400, LimitSource::Fit)),
        (2, Some(300), limit(300, LimitSource::Fit)),
        (3, Some(512), kernel),
        (4, Some(600), kernel),
        (5, None, kernel),
    ] {
        signals.set_fit(fit.map(ByteSize::mib));
        for sample in [tracker.sample(at(millis)), signals.sample()] {
            assert_eq!((sample.limit, sample.limit_without_fit), (expected, kernel), "{fit:?}");
        }
    }
    // The kernel's limit falls to it, and rises again.
    signals.set_fit(Some(ByteSize::mib(400)));
    for (mib, expected) in [
        (400, limit(400, LimitSource::Cgroup)),
        (600, limit(400, LimitSource::Fit)),
        (300, limit(300, LimitSource::Cgroup)),
    ] {
        tree.v2("app", Group { limit: Some(mib * MIB), ..GROUP });
        assert_eq!(signals.sample().limit, expected, "{mib} MiB");
    }
}

#[test]
fn a_fit_is_the_limit_where_none_is_known_and_below_one_that_was_configured() {
    let nothing = tempfile::tempdir().expect("a folder");
    let unknown = Signals::open_at(nothing.path());
    unknown.set_fit(Some(ByteSize::mib(7)));
    assert_eq!(unknown.sample().limit, limit(7, LimitSource::Fit));
    assert!(!unknown.sample().limit_without_fit.is_known());
    let given = unknown.with_limit(ByteSize::mib(9));
    assert_eq!(given.sample().limit, limit(7, LimitSource::Fit));
    given.set_fit(Some(ByteSize::mib(9)));
    assert_eq!(given.sample().limit, limit(9, LimitSource::Override));
}

#[test]
fn the_usage_is_that_of_a_cgroup_with_a_limit_and_has_page_cache() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    let sample = tree.open().sample();
    assert_eq!(sample.usage, Some(ByteSize::new(GROUP.usage)));
    assert!(sample.usage > Some(sample.physical), "with page cache");
    tree.v2("app", Group { limit: None, ..GROUP });
    assert_eq!(tree.open().sample().usage, None, "the usage of other processes");
}

#[test]
fn a_tracker_without_a_limit_of_a_cgroup_follows_the_resident_set() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", Group { limit: None, ..GROUP });
    let signals = Arc::new(tree.open());
    let mut tracker = SignalTracker::new(Arc::clone(&signals));
    assert_eq!(tracker.sample(at(0)), signals.sample());
    tree.write("proc/self/statm", "20000 12000 2560 5 0 123 0\n");
    assert_eq!(tracker.sample(at(10)), signals.sample());
    tree.write("sys/fs/cgroup/app/memory.max", "268435456\n");
    assert_eq!(tracker.sample(at(99)).limit.source, LimitSource::Machine);
    assert_eq!(tracker.sample(at(750)), signals.sample(), "it has a limit now");
    tree.write("sys/fs/cgroup/app/memory.current", "315621376\n");
    assert_eq!(tracker.sample(at(760)).physical, ByteSize::mib(101));
}

#[test]
fn a_tracker_reads_a_limit_that_is_stale_or_on_addresses_each_time() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    let signals = Arc::new(tree.open());
    tree.write("sys/fs/cgroup/app/memory.max", "garbage\n");
    let mut tracker = SignalTracker::new(Arc::clone(&signals));
    assert!(tracker.sample(at(0)).limit_is_stale);
    tree.v2("app", Group { usage: 301 * MIB, ..GROUP });
    assert_eq!(tracker.sample(at(1)), signals.sample());
    tree.write(
        "proc/self/limits",
        "Max address space         134217728            unlimited            bytes     \n",
    );
    let signals = Arc::new(tree.open());
    let mut tracker = SignalTracker::new(Arc::clone(&signals));
    for (millis, resident) in [(0, 10_240), (1, 11_000), (2, 12_000)] {
        tree.write("proc/self/statm", &format!("20000 {resident} 2560 5 0 123 0\n"));
        let sample = tracker.sample(at(millis));
        assert_eq!(sample.limit.source, LimitSource::AddressSpace);
        assert_eq!(sample, signals.sample());
    }
}

#[test]
fn a_limit_changed_at_run_time_is_seen_and_one_that_cannot_be_read_stays() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    let signals = tree.open();
    for (text, mib) in [("268435456\n", 256), ("", 256), ("garbage\n", 256), ("1073741824\n", 1024)]
    {
        tree.write("sys/fs/cgroup/app/memory.max", text);
        assert_eq!(signals.sample().limit, limit(mib, LimitSource::Cgroup), "{text:?}");
    }
    tree.write("sys/fs/cgroup/app/memory.max", "max\n");
    assert_eq!(signals.sample().limit, limit(32 << 10, LimitSource::Machine));
    assert_eq!(signals.sample().physical, ByteSize::mib(32), "against the machine it is its own");
}

/// The bug: a `memory.high` that could not be read was none, and the limit rose to the hard one.
#[test]
fn a_soft_ceiling_that_could_not_be_read_was_none() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    tree.write("sys/fs/cgroup/app/memory.high", "134217728\n");
    let signals = tree.open();
    for text in ["", "garbage\n", "\u{0}\u{1}"] {
        tree.write("sys/fs/cgroup/app/memory.high", text);
        let sample = signals.sample();
        assert_eq!(sample.limit, limit(128, LimitSource::High), "{text:?}");
        assert!(sample.limit_is_stale, "{text:?}");
    }
    tree.write("sys/fs/cgroup/app/memory.high", "67108864\n");
    let sample = signals.sample();
    assert_eq!((sample.limit, sample.limit_is_stale), (limit(64, LimitSource::High), false));
}

/// The bug: an ancestor's limit rose by what its other members hold, when a file with what they or
/// we hold broke; and on version 1 a limit that `memory.stat` alone shows was gone.
#[test]
fn a_broken_stat_raised_the_limit_of_an_ancestor() {
    let tree = Tree::new("0::/pod/app\n", V2_MOUNT);
    tree.v2("pod/app", Group { limit: None, ..GROUP });
    let crowded = Group { usage: 360 * MIB, anon: 140 * MIB, limit: Some(200 * MIB), ..GROUP };
    tree.v2("pod", crowded);
    let signals = tree.open();
    assert_eq!(signals.sample().limit, limit(140, LimitSource::Cgroup));
    for (file, text) in [
        ("pod/memory.stat", "anon 12\ninac"),
        ("pod/memory.current", "\u{fffd}"),
        ("pod/app/memory.stat", ""),
        ("pod/app/memory.current", "nothing"),
    ] {
        let path = format!("sys/fs/cgroup/{file}");
        let whole = fs::read_to_string(tree.root().join(&path)).expect("written above");
        tree.write(&path, text);
        let sample = signals.sample();
        assert_eq!(sample.limit, limit(140, LimitSource::Cgroup), "{file}");
        assert!(sample.limit_is_stale, "{file}");
        tree.write(&path, &whole);
        assert!(!signals.sample().limit_is_stale, "{file}");
    }

    let tree = Tree::new("4:memory:/docker/ab\n1:cpu:/\n", V1_MOUNTS);
    tree.v1("docker/ab", Group { limit: None, ..GROUP }, 256 * MIB);
    let signals = tree.open();
    assert_eq!(signals.sample().limit, limit(256, LimitSource::Cgroup));
    tree.write("sys/fs/cgroup/memory/docker/ab/memory.stat", "cache 1\nrss");
    let sample = signals.sample();
    assert_eq!((sample.limit, sample.limit_is_stale), (limit(256, LimitSource::Cgroup), true));
}

#[test]
fn a_limit_that_is_no_limit_at_the_open_is_said() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    tree.write("sys/fs/cgroup/app/memory.max", "a lot\n");
    let signals = tree.open();
    let missing = signals.missing();
    let [SignalError::Malformed { path, .. }] = &*missing else {
        panic!("{:?}", signals.missing());
    };
    assert!(path.ends_with("sys/fs/cgroup/app/memory.max"), "{path:?}");
    assert_eq!(signals.sample().limit.source, LimitSource::Machine);
    assert!(signals.sample().limit_is_stale);
}

#[test]
fn a_limit_below_what_is_held_and_one_above_again_are_seen_by_the_next_sample() {
    for v2 in [true, false] {
        let (lines, mounts) =
            if v2 { ("0::/app\n", V2_MOUNT) } else { ("4:memory:/app\n", V1_MOUNTS) };
        let tree = Tree::new(lines, mounts);
        let set = |mib: u64| {
            let group = Group { limit: Some(mib * MIB), ..GROUP };
            if v2 { tree.v2("app", group) } else { tree.v1("app", group, mib * MIB) }
        };
        set(512);
        let signals = tree.open();
        for mib in [512, 50, 1, 4096, 101] {
            set(mib);
            let sample = signals.sample();
            assert_eq!(sample.limit, limit(mib, LimitSource::Cgroup));
            let held = ByteSize::mib(if v2 { 100 } else { 90 });
            assert_eq!(sample.physical, held, "held, whatever the limit");
        }
    }
}

/// The bug: the covered mount was taken, since it comes first.
#[test]
fn a_mount_over_the_hierarchys_own_hid_where_the_cgroup_is() {
    let mounts =
        format!("{V2_MOUNT}52 41 0:38 /docker/ab /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    let tree = Tree::new("0::/docker/ab\n", &mounts);
    tree.v2("", GROUP);
    let signals = tree.open();
    assert_eq!(signals.missing(), []);
    assert_eq!(signals.psi().map(|psi| psi.some_total), Some(Duration::from_millis(7)));
    assert_eq!(signals.cgroup(), Some(tree.root().join("sys/fs/cgroup")));
}

#[test]
fn stalls_are_those_of_the_own_cgroup_and_never_the_machines() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    tree.write("sys/fs/cgroup/memory.pressure", PSI);
    tree.write("proc/pressure/memory", PSI);
    let signals = tree.open();
    let psi = signals.psi().expect("its own");
    assert!((psi.some_avg10 - 0.025).abs() < 1e-9 && (psi.full_avg10 - 0.0025).abs() < 1e-9);
    let before = signals.sample();
    let stalled = PSI.replace("2.50", "99.00").replace("0.25", "98.00");
    tree.write("sys/fs/cgroup/app/memory.pressure", &stalled);
    assert!(signals.psi().is_some_and(|psi| psi.full_avg10 > 0.9));
    assert_eq!(signals.sample(), before, "no sample has it, so nothing is shed for it");
    tree.write("sys/fs/cgroup/app/memory.pressure", "some avg10=");
    assert_eq!(signals.psi(), None);
    // In the root of the hierarchy the file is the machine's.
    let tree = Tree::new("0::/\n", V2_MOUNT);
    tree.write("sys/fs/cgroup/memory.pressure", PSI);
    let signals = tree.open();
    assert_eq!(signals.psi(), None);
    assert_eq!(signals.missing(), [SignalError::NoCgroup, NO_PSI]);
}

#[test]
fn a_group_whose_controller_is_off_is_charged_to_the_one_above() {
    let tree = Tree::new("0::/app/worker\n", V2_MOUNT);
    tree.v2("app", GROUP);
    tree.write("sys/fs/cgroup/app/worker/cgroup.procs", "1\n");
    assert_eq!(tree.open().sample().physical, ByteSize::mib(100));
    assert_eq!(tree.open().sample().limit, limit(512, LimitSource::Cgroup));
}

#[test]
fn version_1_takes_the_hierarchys_limit_and_its_totals() {
    let tree = Tree::new("4:memory:/docker/ab\n1:cpu:/\n", V1_MOUNTS);
    tree.v1("docker/ab", Group { limit: None, ..GROUP }, 256 * MIB);
    let signals = tree.open();
    let held = ByteSize::mib(90); // version 1 does not show what the kernel can reclaim of the rest
    assert_eq!(signals.sample(), Signal { physical: held, ..sampled(256) });
    assert_eq!(signals.oom_kills(), Some(4));
}

#[test]
fn version_1_in_a_container_is_read_below_the_root_of_its_mount() {
    let mounts = "35 31 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
    let tree = Tree::new("4:memory:/docker/ab\n", mounts);
    tree.v1("", GROUP, 512 * MIB);
    let signals = tree.open();
    assert_eq!(signals.missing(), [NO_PSI]);
    assert_eq!(signals.sample().limit, limit(512, LimitSource::Cgroup));
}

#[test]
fn a_limit_above_that_is_not_in_the_hierarchy_is_not_ours() {
    let tree = Tree::new("4:memory:/a/b\n", V1_MOUNTS);
    tree.v1("a", Group { limit: Some(64 * MIB), ..GROUP }, 64 * MIB);
    tree.v1("a/b", GROUP, 512 * MIB);
    assert_eq!(tree.open().sample().limit, limit(512, LimitSource::Cgroup));
}

#[test]
fn a_hybrid_host_is_version_1_though_the_other_line_exists() {
    let mounts = format!(
        "{V1_MOUNTS}41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n"
    );
    let tree = Tree::new("4:memory:/app\n0::/app\n", &mounts);
    tree.v1("app", GROUP, 512 * MIB);
    tree.write("sys/fs/cgroup/unified/app/cgroup.procs", "1\n");
    assert_eq!(tree.open().sample().limit, limit(512, LimitSource::Cgroup));
}

#[test]
fn a_version_2_line_without_a_memory_controller_is_no_cgroup() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.write("sys/fs/cgroup/app/cgroup.procs", "1\n");
    let signals = tree.open();
    assert_eq!(signals.missing(), [SignalError::NoCgroup, NO_PSI]);
    assert_eq!(signals.sample().limit, limit(32 << 10, LimitSource::Machine));
    assert_eq!(signals.sample().physical, ByteSize::mib(32));
}

#[test]
fn a_private_namespace_is_read_at_its_mount() {
    let tree = Tree::new("0::/\n", V2_MOUNT);
    tree.v2("", GROUP);
    assert_eq!(tree.open().sample().limit, limit(512, LimitSource::Cgroup));
    // Moved out of the namespace after it was made: the mount stands for it, and it is said.
    let tree = Tree::new("0::/../other\n", V2_MOUNT);
    tree.v2("", GROUP);
    let signals = tree.open();
    assert_eq!(signals.sample().limit, limit(512, LimitSource::Cgroup));
    let missing = signals.missing();
    assert!(matches!(&*missing, [SignalError::Outside { .. }, NO_PSI]), "{missing:?}");
}

#[test]
fn an_override_lowers_the_limit_and_never_raises_it() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    let with = |mib| tree.open().with_limit(ByteSize::mib(mib)).sample().limit;
    assert_eq!(with(100), limit(100, LimitSource::Override));
    assert_eq!(with(1000), limit(512, LimitSource::Cgroup));
    let nothing = tempfile::tempdir().expect("a folder");
    let alone = Signals::open_at(nothing.path()).with_limit(ByteSize::mib(7));
    assert_eq!(alone.sample().limit, limit(7, LimitSource::Override));
}

#[test]
fn nothing_to_read_is_reported_and_never_fails() {
    let nothing = tempfile::tempdir().expect("a folder");
    let signals = Signals::open_at(nothing.path());
    assert_eq!(signals.sample(), Signal::default());
    assert!(!signals.sample().limit.is_known());
    assert_eq!(signals.resident(), None);
    assert_eq!(signals.missing().len(), 4, "{:?}", signals.missing());
    for error in signals.missing() {
        assert!(matches!(error, SignalError::Unreadable { .. }), "{error}");
    }
}

#[test]
fn files_that_break_or_vanish_while_running_leave_their_part_out() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    let signals = tree.open();
    tree.write("sys/fs/cgroup/app/memory.stat", "anon 12\ninactive_fi");
    tree.write("sys/fs/cgroup/app/memory.events", "");
    let cut = signals.sample();
    // Without the cache's part the usage says nothing, and the cache must not shed.
    assert_eq!(cut.physical, ByteSize::mib(32), "the process's own");
    assert_eq!((cut.charged, signals.oom_kills()), (Some(ByteSize::new(12)), None));
    tree.write("sys/fs/cgroup/app/memory.current", "\u{fffd}\n");
    tree.write("proc/self/statm", "1 x\n");
    let broken = signals.sample();
    assert_eq!((broken.rss, broken.physical), (None, ByteSize::mib(32)), "by another file");
    assert_eq!(broken.limit, limit(512, LimitSource::Cgroup));
}

#[test]
fn this_machine_can_be_read() {
    let signals = Signals::open();
    let sample = signals.sample();
    println!("{sample:?} {:?} {:?}", signals.resident(), signals.missing());
    if cfg!(target_os = "linux") && Path::new("/proc/self/statm").exists() {
        assert!(sample.rss.is_some_and(|rss| rss > ByteSize::kib(100)));
        assert!(sample.limit.is_known());
    }
}

/// The bug: a limit on addresses or on data below that of the cgroup was not seen, and allocations
/// beyond it aborted the process.
#[test]
fn a_limit_on_addresses_or_data_was_not_seen() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    let sample = |address: &str, data: &str| {
        let text = format!(
            "Limit  Soft Limit  Hard Limit  Units\nMax data size  {data}  unlimited  bytes\n\
             Max address space  {address}  unlimited  bytes\n"
        );
        tree.write("proc/self/limits", &text);
        tree.open().sample().limit
    };
    assert_eq!(sample("unlimited", "unlimited"), limit(512, LimitSource::Cgroup));
    // 20,000 pages are mapped, of which 30 MiB are data: what is left may be added to the 100 MiB
    // that count.
    let address = (160 << 20) + 20_000 * 4096;
    assert_eq!(sample(&address.to_string(), "unlimited"), limit(260, LimitSource::AddressSpace));
    assert_eq!(sample("unlimited", "104857600"), limit(170, LimitSource::AddressSpace));
    assert_eq!(sample("4294967296", "unlimited"), limit(512, LimitSource::Cgroup));
    let given = tree.open().with_limit(ByteSize::mib(90)).sample().limit;
    assert_eq!(given, limit(90, LimitSource::Override));
}

//! Signals over file trees as they are found in containers and on hosts.

use std::fs;
use std::path::Path;

use lowtide::ByteSize;
use lowtide::control::{Cpus, Limit, LimitSource, Signal, SignalError, Signals};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const V1_NO_LIMIT: u64 = 9_223_372_036_854_771_712;
const V1_MOUNTS: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
    32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
    35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n";
const V2_MOUNT: &str =
    "41 31 0:38 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const PSI: &str = "some avg10=2.50 avg60=0.00 avg300=0.00 total=7000\n\
    full avg10=0.25 avg60=0.00 avg300=0.00 total=3000\n";
/// What version 1 alone has to say of PSI.
const NO_PSI: SignalError = SignalError::NoPsi { path: None };

/// A file tree with a process of 40 MiB (10 MiB of them files) on a machine of 32 GiB.
struct Tree(TempDir);

impl Tree {
    fn new(cgroup: &str, mounts: &str) -> Self {
        let tree = Self(tempfile::tempdir().expect("a folder"));
        tree.write("proc/self/statm", "20000 10240 2560 5 0 123 0\n");
        tree.write(
            "proc/self/status",
            "Name:\tx\nRssAnon:\t30720 kB\nRssFile:\t8192 kB\nRssShmem:\t2048 kB\n",
        );
        tree.write("proc/meminfo", "MemTotal:       33554432 kB\nMemFree:  1 kB\n");
        tree.write("proc/self/cgroup", cgroup);
        tree.write("proc/self/mountinfo", mounts);
        tree
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(path, text).expect("written");
    }

    fn v2(&self, folder: &str, group: Group) {
        let Group { usage, inactive_file, active_file, anon, shmem, limit } = group;
        let at = |file| format!("sys/fs/cgroup/{folder}/{file}");
        self.write(&at("memory.current"), &format!("{usage}\n"));
        self.write(
            &at("memory.stat"),
            &format!(
                "anon {anon}\nfile 1\nkernel 100\nshmem {shmem}\nfile_mapped 5\ninactive_anon 9\n\
                 active_anon 8\ninactive_file {inactive_file}\nactive_file {active_file}\n\
                 unevictable 0\n"
            ),
        );
        let limit = limit.map_or_else(|| "max".to_owned(), |limit| limit.to_string());
        self.write(&at("memory.max"), &format!("{limit}\n"));
        self.write(&at("memory.high"), "max\n");
        self.write(&at("memory.events"), "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n");
        self.write(&at("cgroup.type"), "domain\n");
        self.write(&at("memory.pressure"), PSI);
    }

    fn v1(&self, folder: &str, group: Group, hierarchical: u64) {
        let Group { usage, inactive_file, active_file, anon, shmem, limit } = group;
        let at = |file| format!("sys/fs/cgroup/memory/{folder}/{file}");
        self.write(&at("memory.usage_in_bytes"), &format!("{usage}\n"));
        self.write(
            &at("memory.stat"),
            &format!(
                "cache 1\nrss 2\nshmem 3\ninactive_file 4\n\
                 hierarchical_memory_limit {hierarchical}\n\
                 hierarchical_memsw_limit {V1_NO_LIMIT}\ntotal_cache 9\ntotal_rss {anon}\n\
                 total_shmem {shmem}\ntotal_inactive_file {inactive_file}\n\
                 total_active_file {active_file}\n"
            ),
        );
        let limit = limit.unwrap_or(V1_NO_LIMIT);
        self.write(&at("memory.limit_in_bytes"), &format!("{limit}\n"));
        self.write(&at("memory.oom_control"), "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n");
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn open(&self) -> Signals {
        Signals::open_at(self.root())
    }
}

#[derive(Clone, Copy)]
struct Group {
    usage: u64,
    inactive_file: u64,
    active_file: u64,
    anon: u64,
    shmem: u64,
    limit: Option<u64>,
}

/// 300 MiB charged, 200 of them page cache that goes by itself.
const GROUP: Group = Group {
    usage: 300 * MIB,
    inactive_file: 150 * MIB,
    active_file: 50 * MIB,
    anon: 80 * MIB,
    shmem: 10 * MIB,
    limit: Some(512 * MIB),
};

fn limit(mib: u64, source: LimitSource) -> Limit {
    Limit { bytes: ByteSize::mib(mib), source }
}

#[test]
fn version_2_counts_what_is_held_against_the_hard_limit() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    tree.v2("app", GROUP);
    let signals = tree.open();
    assert_eq!(signals.missing(), []);
    assert_eq!(
        signals.sample(),
        Signal {
            rss: Some(ByteSize::mib(40)),
            anonymous: Some(ByteSize::mib(30)),
            physical: ByteSize::mib(100),
            limit: limit(512, LimitSource::Cgroup),
            charged: Some(ByteSize::mib(90)),
            limit_is_stale: false,
        }
    );
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
    assert_eq!(signals.sample().physical, ByteSize::mib(40), "against the machine it is the rss");
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
    assert_eq!(
        signals.sample(),
        Signal {
            rss: Some(ByteSize::mib(40)),
            anonymous: Some(ByteSize::mib(30)),
            physical: ByteSize::mib(100),
            limit: limit(256, LimitSource::Cgroup),
            charged: Some(ByteSize::mib(90)),
            limit_is_stale: false,
        }
    );
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
    assert_eq!(signals.sample().physical, ByteSize::mib(40));
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
    assert!(matches!(missing, [SignalError::Outside { .. }, NO_PSI]), "{missing:?}");
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
    assert_eq!(signals.missing().len(), 5, "{:?}", signals.missing());
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
    assert_eq!(cut.physical, ByteSize::mib(40));
    assert_eq!((cut.charged, signals.oom_kills()), (Some(ByteSize::new(12)), None));
    tree.write("sys/fs/cgroup/app/memory.current", "\u{fffd}\n");
    tree.write("proc/self/statm", "1 x\n");
    let broken = signals.sample();
    assert_eq!((broken.rss, broken.physical), (None, ByteSize::ZERO));
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

/// A process that may run on `allowed` CPUs, in a cgroup of both versions' paths.
fn tree_of_cpus(allowed: &str, cgroup: &str, mounts: &str) -> Tree {
    let tree = Tree::new(cgroup, mounts);
    tree.write("proc/self/status", &format!("Name:\tx\nCpus_allowed_list:\t{allowed}\n"));
    tree
}

#[test]
fn a_quota_of_cpu_time_is_the_least_of_the_cgroup_and_its_ancestors() {
    let tree = tree_of_cpus("0-63", "0::/pod/app\n", V2_MOUNT);
    assert_eq!(tree.open().cpus(), Cpus { allowed: Some(64), quota_milli: None });
    tree.write("sys/fs/cgroup/pod/app/cpu.max", "max 100000\n");
    assert_eq!(tree.open().cpus().whole(), Some(64));
    tree.write("sys/fs/cgroup/pod/cpu.max", "200000 100000\n");
    let cpus = tree.open().cpus();
    assert_eq!((cpus.quota_milli, cpus.whole()), (Some(2_000), Some(2)), "a parent's quota");
    tree.write("sys/fs/cgroup/pod/app/cpu.max", "150000 100000\n");
    let cpus = tree.open().cpus();
    assert_eq!((cpus.quota_milli, cpus.whole()), (Some(1_500), Some(2)));
    for broken in ["", "max\n", "x 100000\n", "100000\n", "100000 0\n", "-1 100000\n"] {
        tree.write("sys/fs/cgroup/pod/app/cpu.max", broken);
        assert_eq!(tree.open().cpus().quota_milli, Some(2_000), "{broken:?}");
    }
}

#[test]
fn a_quota_of_version_1_is_found_at_its_own_controller_also_beside_version_2() {
    let mounts = format!(
        "{V1_MOUNTS}33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
         41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    .replace(
        "/sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n",
        "/x rw - cgroup c rw,pids\n",
    );
    let lines = "4:memory:/other\n3:cpu,cpuacct:/docker/ab\n0::/system.slice\n";
    let tree = tree_of_cpus("0-3,8", lines, &mounts);
    let folder = "sys/fs/cgroup/cpu,cpuacct/docker/ab";
    let quota = |quota: &str| {
        tree.write(&format!("{folder}/cpu.cfs_quota_us"), quota);
        tree.write(&format!("{folder}/cpu.cfs_period_us"), "50000\n");
        tree.open().cpus()
    };
    assert_eq!(quota("-1\n"), Cpus { allowed: Some(5), quota_milli: None });
    assert_eq!(quota("150000\n").whole(), Some(3));
    assert_eq!(quota("5000000\n").whole(), Some(5), "more than it may run on");
}

#[test]
fn where_nothing_is_said_of_cpus_the_machine_is_asked_or_nothing_is_known() {
    let tree = Tree::new("0::/app\n", V2_MOUNT);
    assert_eq!(tree.open().cpus(), Cpus::default());
    assert_eq!(tree.open().cpus().whole(), None);
    assert!(Signals::open().cpus().whole() >= Some(1), "this machine has one");
}

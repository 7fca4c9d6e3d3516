//! The number of CPUs that the process can keep busy: its affinity, and quotas of cgroups.

use lowtide_admission::{Cpus, Signals};

use super::tree::{Tree, V1_MOUNTS, V2_MOUNT};

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

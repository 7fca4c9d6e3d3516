//! A file tree as a process in a cgroup sees it, written by the test.

use std::fs;
use std::path::Path;

use lowtide_admission::{SignalError, Signals};
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;
const V1_NO_LIMIT: u64 = 9_223_372_036_854_771_712;
pub(crate) const V1_MOUNTS: &str = "\
    31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
    32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
    35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n";
pub(crate) const V2_MOUNT: &str =
    "41 31 0:38 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
pub(crate) const PSI: &str = "some avg10=2.50 avg60=0.00 avg300=0.00 total=7000\n\
    full avg10=0.25 avg60=0.00 avg300=0.00 total=3000\n";
/// The error for PSI on version 1 alone.
pub(crate) const NO_PSI: SignalError = SignalError::NoPsi { path: None };

/// A file tree with a process of 40 MiB (10 MiB of them files) on a machine of 32 GiB.
pub(crate) struct Tree(TempDir);

impl Tree {
    pub(crate) fn new(cgroup: &str, mounts: &str) -> Self {
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

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(path, text).expect("written");
    }

    pub(crate) fn v2(&self, folder: &str, group: Group) {
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

    pub(crate) fn v1(&self, folder: &str, group: Group, hierarchical: u64) {
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

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn open(&self) -> Signals {
        Signals::open_at(self.root())
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Group {
    pub(crate) usage: u64,
    pub(crate) inactive_file: u64,
    pub(crate) active_file: u64,
    pub(crate) anon: u64,
    pub(crate) shmem: u64,
    pub(crate) limit: Option<u64>,
}

/// 300 MiB charged, 200 of them page cache that goes by itself.
pub(crate) const GROUP: Group = Group {
    usage: 300 * MIB,
    inactive_file: 150 * MIB,
    active_file: 50 * MIB,
    anon: 80 * MIB,
    shmem: 10 * MIB,
    limit: Some(512 * MIB),
};

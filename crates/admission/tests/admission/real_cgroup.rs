//! Signals in a real memory cgroup of version 1, where this machine has one and the test is root.
//! Version 2 and all else a kernel can arrange is for `.ci/limits/run`.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use lowtide_admission::ByteSize;
use lowtide_admission::{LimitSource, SignalError, Signals};

/// Names the leaf to the process that is to live in it.
const LEAF: &str = "LEAF_OF_TEST";
const MIB: u64 = 1 << 20;

/// A cgroup with a limit and one without below it; removed at the end.
struct Groups {
    outer: PathBuf,
    leaf: PathBuf,
}

impl Groups {
    fn new(parent: &Path, test: &str) -> std::io::Result<Self> {
        let outer = parent.join(format!("lowtide-{test}-{}", std::process::id()));
        let leaf = outer.join("leaf");
        let groups = Self { outer, leaf };
        fs::create_dir_all(&groups.leaf)?;
        fs::write(groups.outer.join("memory.limit_in_bytes"), (300 * MIB).to_string())?;
        Ok(groups)
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        // What the kernel still keeps there is charged to the parent.
        for folder in [&self.leaf, &self.outer] {
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Runs this test again in a process of its own, through `command`, and there `inside` with its
/// leaf. Prints why it is skipped without a memory cgroup of version 1 or root.
#[expect(clippy::print_stdout, reason = "why it is skipped")]
fn in_a_cgroup(test: &str, command: &[&str], inside: fn(&Path)) {
    #[expect(clippy::disallowed_methods, reason = "how the test tells its own process of the leaf")]
    if let Some(leaf) = std::env::var_os(LEAF) {
        return inside(Path::new(&leaf));
    }
    let version_1 = |folder: &PathBuf| folder.join("memory.limit_in_bytes").exists();
    let Some(own) = Signals::open().cgroup().filter(version_1) else {
        println!("skipped: no memory cgroup of version 1");
        return;
    };
    let groups = match Groups::new(&own, test) {
        Ok(groups) => groups,
        Err(error) => {
            println!("skipped: no cgroup can be made in {own:?}: {error}");
            return;
        }
    };
    // The shell is in the leaf before the namespaces of `command` are made.
    let script = "echo 0 > \"$LEAF_OF_TEST/cgroup.procs\" && exec \"$@\"";
    let output = Command::new("sh")
        .args(["-c", script, "sh"])
        .args(command)
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", &format!("real_cgroup::{test}"), "--nocapture"])
        .env(LEAF, &groups.leaf)
        .output()
        .expect("runs");
    let [text, errors] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    if command.first() == Some(&"unshare") && errors.contains("unshare") {
        println!("skipped: {errors}");
        return;
    }
    assert!(output.status.success() && text.contains("running 1 test"), "{text}{errors}");
    println!("{text}");
}

fn enter(group: &Path) {
    fs::write(group.join("cgroup.procs"), "0").expect("moved");
}

fn set_limit(group: &Path, mib: u64) {
    fs::write(group.join("memory.limit_in_bytes"), (mib * MIB).to_string()).expect("written");
}

#[test]
fn a_limit_on_the_parent_is_found_followed_and_kept_when_the_cgroup_goes() {
    let test = "a_limit_on_the_parent_is_found_followed_and_kept_when_the_cgroup_goes";
    in_a_cgroup(test, &[], |leaf| {
        let outer = leaf.parent().expect("the one with the limit");
        let held = vec![1_u8; 32 << 20];
        let signals = Signals::open();
        assert_eq!(signals.cgroup().as_deref(), Some(leaf));
        // The outer group holds what the leaf holds, but for pages between two readings.
        let is = |mib: u64| {
            let sample = signals.sample();
            assert_eq!(sample.limit.source, LimitSource::Cgroup);
            let bytes = sample.limit.bytes;
            assert!(
                bytes <= ByteSize::mib(mib) && bytes > ByteSize::mib(mib - 4),
                "{bytes} for {mib} MiB"
            );
            sample
        };
        let sample = is(300);
        assert!(!sample.limit_is_stale);
        assert!(sample.physical >= ByteSize::of(held.len()), "{sample:?}");
        assert!(sample.physical < ByteSize::mib(128), "{sample:?}");
        set_limit(outer, 200);
        is(200);
        set_limit(outer, 250);
        is(250);
        let events = signals.events().expect("a cgroup");
        assert_eq!((events.own.oom_kill, events.above.oom_kill), (Some(0), Some(0)));
        // Out of it, and it goes: its files are open still and say nothing any more.
        enter(outer.parent().expect("where the test runs"));
        fs::remove_dir(leaf).expect("empty");
        let after = is(250);
        assert!(after.limit_is_stale, "{after:?}");
        assert!(after.physical >= ByteSize::of(held.len()), "{after:?}");
        // Until the next look finds where the process is now.
        assert!(signals.look());
        assert_eq!(signals.cgroup().as_deref(), outer.parent());
        assert!(held.iter().all(|&byte| byte == 1));
    });
}

/// Report: garden-runc#406, podman#14677 (H): smaller, larger, one below that is made at run time.
#[test]
fn a_process_that_is_moved_has_the_limit_of_its_new_group() {
    in_a_cgroup("a_process_that_is_moved_has_the_limit_of_its_new_group", &[], |leaf| {
        let outer = leaf.parent().expect("the one with the limit");
        let signals = Signals::open();
        for (folder, mib) in
            [(outer.to_owned(), 280), (leaf.to_owned(), 200), (leaf.join("init"), 150)]
        {
            fs::create_dir_all(&folder).expect("made");
            set_limit(&folder, mib);
            enter(&folder);
            signals.look();
            let limit = signals.sample().limit.bytes;
            assert!(limit <= ByteSize::mib(mib), "{limit} in {folder:?}");
            assert!(limit > ByteSize::mib(mib - 8), "{limit} in {folder:?}");
            assert_eq!(signals.cgroup(), Some(folder));
        }
        enter(outer);
        fs::remove_dir(leaf.join("init")).expect("empty");
    });
}

/// Report: openjdk/jdk#21808 (N): a cgroup namespace of its own, and the host's mount.
#[test]
fn the_limit_is_found_from_a_cgroup_namespace_with_the_mount_of_the_host() {
    let test = "the_limit_is_found_from_a_cgroup_namespace_with_the_mount_of_the_host";
    in_a_cgroup(test, &["unshare", "--cgroup", "--mount"], |leaf| {
        let signals = Signals::open();
        assert_eq!(signals.cgroup().as_deref(), Some(leaf));
        let limit = signals.sample().limit;
        assert!(
            limit.source == LimitSource::Cgroup && limit.bytes <= ByteSize::mib(300),
            "{limit:?}"
        );
    });
}

/// Report: ClickHouse#100898, cadvisor#3081, lxcfs#671 (B): names of files that do not exist fill
/// the group.
#[test]
fn what_the_kernel_remembers_of_files_is_not_held() {
    in_a_cgroup("what_the_kernel_remembers_of_files_is_not_held", &[], |leaf| {
        let signals = Signals::open();
        let usage = || signals.sample().usage.expect("of a group with a limit");
        let before = usage();
        let name = "x".repeat(200);
        // Ends: each is one more name, of some 400 bytes.
        for nth in 0..400_000_u32 {
            let _ = fs::metadata(leaf.with_file_name(format!("{nth}{name}")));
            if nth % 1_000 == 0 && usage() > before.saturating_add(ByteSize::mib(64)) {
                break;
            }
        }
        let (usage, sample) = (usage(), signals.sample());
        println!("{usage} in use, {} held", sample.physical);
        assert!(usage > before.saturating_add(ByteSize::mib(32)), "{usage} after {before}");
        assert!(sample.physical < ByteSize::mib(32), "{sample:?}");
    });
}

/// Report: borgbackupserver#485 (R): without `/proc/meminfo` the system is asked, and without
/// `/proc` that is named.
#[test]
fn a_hidden_proc_leaves_the_memory_of_the_machine() {
    const HIDDEN: &str = "HIDDEN_OF_TEST";
    #[expect(clippy::disallowed_methods, reason = "how the test tells its own process")]
    if std::env::var_os(HIDDEN).is_some() {
        let signals = Signals::open();
        println!("limit {:?} said {:?}", signals.sample().limit, signals.missing());
        let said = |error: &SignalError| error.to_string().contains("/proc");
        assert!(signals.missing().iter().any(said), "{:?}", signals.missing());
        assert!(signals.sample().limit.is_known());
        assert!(signals.machine().is_some());
        return;
    }
    let this = std::env::current_exe().expect("this program");
    for mount in ["mount -t proc -o subset=pid proc /proc", "mount -t tmpfs none /proc"] {
        let output = Command::new("unshare")
            .args([
                "--mount",
                "--pid",
                "--fork",
                "sh",
                "-c",
                &format!("{mount} && exec \"$@\""),
                "sh",
            ])
            .arg(&this)
            .args(["--exact", "real_cgroup::a_hidden_proc_leaves_the_memory_of_the_machine"])
            .arg("--nocapture")
            .env(HIDDEN, "1")
            .output();
        let Ok(output) = output else {
            println!("skipped: no unshare");
            return;
        };
        let [text, errors] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
        if !text.contains("running 1 test") {
            println!("skipped: {mount}: {errors}");
            continue;
        }
        assert!(output.status.success(), "{mount}: {text}{errors}");
        println!("{mount}: {text}");
    }
}

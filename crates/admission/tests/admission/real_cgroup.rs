//! Signals in a real memory cgroup of version 1, where this machine has one and the test is root.
//! Version 2 and all else a kernel can arrange is for `.ci/limits/run`.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use lowtide_admission::ByteSize;
use lowtide_admission::{LimitSource, Signals};

/// Names the leaf to the process that is to live in it.
const LEAF: &str = "LEAF_OF_TEST";
const MIB: u64 = 1 << 20;

/// A cgroup with a limit and one without below it; removed at the end.
struct Groups {
    outer: PathBuf,
    leaf: PathBuf,
}

impl Groups {
    fn new(parent: &Path) -> std::io::Result<Self> {
        let outer = parent.join(format!("lowtide-test-{}", std::process::id()));
        let leaf = outer.join("leaf");
        let groups = Self { outer, leaf };
        fs::create_dir_all(&groups.leaf)?;
        fs::write(groups.outer.join("memory.limit_in_bytes"), (300 * MIB).to_string())?;
        Ok(groups)
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for folder in [&self.leaf, &self.outer] {
            let _ = fs::remove_dir(folder);
        }
    }
}

#[test]
fn a_limit_on_the_parent_is_found_followed_and_kept_when_the_cgroup_goes() {
    #[expect(clippy::disallowed_methods, reason = "how the test tells its own process of the leaf")]
    let leaf = std::env::var_os(LEAF);
    if let Some(leaf) = leaf {
        return inside(Path::new(&leaf));
    }
    let signals = Signals::open();
    let version_1 = |folder: &&Path| folder.join("memory.limit_in_bytes").exists();
    let Some(own) = signals.cgroup().filter(version_1) else {
        println!("skipped: no memory cgroup of version 1");
        return;
    };
    let groups = match Groups::new(own) {
        Ok(groups) => groups,
        Err(error) => {
            println!("skipped: no cgroup can be made in {own:?}: {error}");
            return;
        }
    };
    let this = std::env::current_exe().expect("this program");
    let test = "real_cgroup::a_limit_on_the_parent_is_found_followed_and_kept_when_the_cgroup_goes";
    let output = Command::new(this)
        .args(["--exact", test, "--nocapture"])
        .env(LEAF, &groups.leaf)
        .output()
        .expect("runs");
    let [text, errors] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    assert!(output.status.success() && text.contains("running 1 test"), "{text}{errors}");
    println!("{text}");
}

fn inside(leaf: &Path) {
    let outer = leaf.parent().expect("the one with the limit");
    let enter = |group: &Path| fs::write(group.join("cgroup.procs"), "0").expect("moved");
    let limit = |mib: u64| {
        fs::write(outer.join("memory.limit_in_bytes"), (mib * MIB).to_string()).expect("written");
    };
    enter(leaf);
    let held = vec![1_u8; 32 << 20];
    let signals = Signals::open();
    assert_eq!(signals.cgroup(), Some(leaf));
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
    limit(200);
    is(200);
    limit(250);
    is(250);
    let events = signals.events().expect("a cgroup");
    assert_eq!((events.own.oom_kill, events.above.oom_kill), (Some(0), Some(0)));
    // Out of it, and it goes: its files are open still and say nothing any more.
    enter(outer.parent().expect("where the test runs"));
    fs::remove_dir(leaf).expect("empty");
    let after = is(250);
    assert!(after.limit_is_stale, "{after:?}");
    assert!(after.physical >= ByteSize::of(held.len()), "{after:?}");
    assert!(held.iter().all(|&byte| byte == 1));
}

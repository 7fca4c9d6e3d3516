//! The number of the process's mappings where the kernel does not overcommit, and near its maximum.
//!
//! Reported as jemalloc#1256, jemalloc#1328 and jemalloc#844. Each test runs again in a mount
//! namespace in which `vm.overcommit_memory` is 2.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "mappings of every other page are made by hand")]
#![expect(clippy::print_stdout, reason = "figures, and why a test is skipped")]

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use lowtide::clock::{Clock, ManualClock};
use lowtide::{ByteSize, Memory};
use test_fork::test;

use crate::start::{BALANCED, again};
use crate::support::advance_until;

/// The maximum number of mappings that the namespace shows.
const MAPPINGS_MAX: usize = 3_000;
/// Tells a test that it runs in the namespace.
const VARIABLE: &str = "TEST_IN_NAMESPACE";

/// Runs the calling test's closure in the namespace, or says why it cannot.
fn without_overcommit<F: FnOnce()>(name: &str, test: F) {
    #[expect(clippy::disallowed_methods, reason = "how this process is told where it is")]
    if std::env::var_os(VARIABLE).is_some() {
        BALANCED.run(test);
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("written");
        path
    };
    let mode = file("overcommit_memory", "2\n");
    let most = file("max_map_count", &format!("{MAPPINGS_MAX}\n"));
    let script = "mount --bind \"$0\" /proc/sys/vm/overcommit_memory || exit 99
        mount --bind \"$1\" /proc/sys/vm/max_map_count || exit 99
        shift; exec \"$@\"";
    let run = again(name);
    for namespace in [&["--mount"][..], &["--user", "--map-root-user", "--mount"]] {
        let mut command = Command::new("unshare");
        command.args(namespace).args(["sh", "-c", script]).args([&mode, &most]);
        command.arg(run.get_program()).args(run.get_args()).env(VARIABLE, "1");
        let Ok(output) = command.output() else { continue };
        let [text, errors] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
        print!("{text}");
        if text.contains("running 1 test") {
            assert!(output.status.success(), "{}: {errors}", output.status);
            return;
        }
    }
    println!("skipped: no mount namespace (root, or a user namespace, and `unshare`)");
}

fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").expect("own mappings").lines().count()
}

/// Blocks of 1,500 bytes.
fn blocks(bytes: ByteSize) -> Vec<Vec<u8>> {
    (0..bytes.get() / 1_500).map(|_| vec![1; 1_500]).collect()
}

#[test]
fn a_fragmented_heap_has_few_mappings_without_overcommit() {
    let name = "memory_mappings::a_fragmented_heap_has_few_mappings_without_overcommit";
    without_overcommit(name, || {
        let memory = Memory::start().expect("starts");
        let notes = memory.report().diagnostics();
        let names_remedy = |text: &str| text.contains("vm.overcommit_memory=1");
        assert!(notes.iter().any(|note| names_remedy(&note.text)), "{notes:?}");
        let mut kept = Vec::new();
        for round in 0..6 {
            let every = if round == 0 { 16 } else { 40 };
            kept.extend(blocks(ByteSize::mib(200)).into_iter().step_by(every));
            memory.heap().purge().expect("not forked").heap.expect("purges");
        }
        let count = mappings();
        println!("figure field.overcommit.mappings {count} mappings");
        assert!(count <= 500, "{count} with {} blocks", kept.len());
        let report = lowtide::heap::purge_now().expect("purges");
        assert_eq!(report.failure, None);
        // What has large ranges gives them back, and uses them again.
        drop(kept);
        memory.heap().purge().expect("not forked").heap.expect("purges");
        assert_eq!(blocks(ByteSize::mib(200)).iter().map(|block| block[1_499]).max(), Some(1));
        assert!(mappings() <= 500);
    });
}

/// The hooks of arena 0 were taken for jemalloc's own.
#[test]
fn hooks_of_the_application_stay() {
    use tikv_jemalloc_ctl::raw;
    /// `extent_hooks_t`: nine functions.
    type Table = [usize; 9];
    const HOOKS: &[u8] = b"arena.0.extent_hooks\0";
    without_overcommit("memory_mappings::hooks_of_the_application_stay", || {
        // SAFETY: the control has a pointer to a table.
        let own: *const Table = unsafe { raw::read(HOOKS) }.expect("a table");
        // SAFETY: jemalloc's table, which is constant.
        let table: *const Table = Box::leak(Box::new(unsafe { *own }));
        // SAFETY: a table of the same functions, which stays.
        unsafe { raw::write(HOOKS, table) }.expect("jemalloc takes it");
        let _memory = Memory::start().expect("starts");
        // SAFETY: as above.
        let found: *const Table = unsafe { raw::read(HOOKS) }.expect("a table");
        assert_eq!(found, table);
        // SAFETY: as above.
        let other: *const Table = unsafe { raw::read(b"arena.1.extent_hooks\0") }.expect("one");
        assert!(other != own && other != table, "another arena has other hooks");
    });
}

#[test]
fn a_number_of_mappings_near_the_maximum_is_a_warning_that_names_the_sysctl() {
    let name = "memory_mappings::\
                a_number_of_mappings_near_the_maximum_is_a_warning_that_names_the_sysctl";
    without_overcommit(name, || {
        let clock = Arc::new(ManualClock::new());
        let to = Arc::clone(&clock) as Arc<dyn Clock>;
        let memory = Memory::builder().clock(to).start().expect("starts");
        let is_said = || {
            let near = format!("of at most {MAPPINGS_MAX} (vm.max_map_count)");
            memory.report().diagnostics().iter().any(|note| note.text.contains(&near))
        };
        let step = Duration::from_millis(250);
        let begin = clock.now();
        advance_until(&clock, step, "time passes", || clock.now() - begin > 80 * step);
        assert!(!is_said(), "{} mappings", mappings());
        let (page, count) = (4096, MAPPINGS_MAX * 4 / 5);
        let (length, flags) = ((count + 2) * page, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, which nothing else uses.
        let begin =
            unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(begin, libc::MAP_FAILED);
        for nth in (0..count).step_by(2) {
            let at = begin.wrapping_byte_add(nth * page);
            // SAFETY: a page of the mapping above.
            assert_eq!(unsafe { libc::mprotect(at, page, libc::PROT_READ) }, 0);
        }
        advance_until(&clock, step, "it is said", is_said);
    });
}

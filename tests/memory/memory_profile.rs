//! The notes of `Memory` about the heap's configuration at its start: a profile that is asked for
//! at run time in a binary that carries another one, and the settings of the process.
//!
//! The tests run this program again with other variables; the test that then runs says on its
//! standard output which notes about the heap there are.
#![cfg(target_os = "linux")]

use std::time::Duration;

use lowtide::Memory;
use lowtide_heap::HeapProfile;
use test_fork::test;

use crate::support::run_again;

const INTERPOSED: bool = cfg!(feature = "interpose");
const READ: &str = if INTERPOSED { "MALLOC_CONF" } else { "_RJEM_MALLOC_CONF" };
const UNREAD: &str = if INTERPOSED { "_RJEM_MALLOC_CONF" } else { "MALLOC_CONF" };

/// Settings of the kernel and of the build.
const GIVEN: [&str; 2] = ["transparent_hugepage: ", "page: "];

/// The test for which this program's other tests run it again.
#[test]
fn the_notes_about_the_heap_are_said() {
    let memory = match Memory::start() {
        Ok(memory) => memory,
        Err(error) => return println!("\nrefused: {error}"),
    };
    let diagnostics = memory.report().diagnostics();
    assert!(memory.shutdown_blocking(Duration::from_secs(5)).is_clean());
    println!();
    for note in diagnostics.iter().filter(|note| note.about == "heap") {
        println!("note: {}", note.text);
    }
}

/// The notes in a process with these variables alone, but for what the kernel and the build
/// decide.
fn diagnostics(variables: &[(&str, &str)]) -> Vec<String> {
    lines("note: ", variables)
}

fn lines(start: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let output = run_again("memory_profile::the_notes_about_the_heap_are_said", variables);
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter_map(|line| line.strip_prefix(start));
    lines
        .filter(|line| GIVEN.iter().all(|given| !line.starts_with(given)))
        .map(str::to_owned)
        .collect()
}

#[test]
fn a_process_that_is_as_asked_has_no_note() {
    assert_eq!(diagnostics(&[]), [""; 0], "nobody asked for a profile");
    assert_eq!(
        diagnostics(&[("LOWTIDE_PROFILE", "balanced")]),
        [""; 0],
        "the profile that it carries"
    );
}

/// Bug: `LOWTIDE_PROFILE=low-memory` over a binary that carries `balanced` started with four arenas
/// and said nothing.
#[test]
fn what_a_profile_cannot_change_any_more_is_noted_with_the_variable_that_could() {
    let diagnostics = diagnostics(&[("LOWTIDE_PROFILE", "low-memory")]);
    assert_eq!(diagnostics.len(), 1, "{diagnostics:?}");
    let conf = HeapProfile::LowMemory.conf().to_str().expect("ASCII");
    for part in [
        "low-memory",
        "narenas: requested 2, effective 4",
        "thp: requested never, effective default",
    ] {
        assert!(diagnostics[0].contains(part), "{part:?} is missing in: {}", diagnostics[0]);
    }
    assert!(
        diagnostics[0].ends_with(&format!("; start the process with {READ}={conf}")),
        "{diagnostics:?}"
    );
}

/// Bug: throughput names no arena count, so that its string left the binary's in force.
#[test]
fn the_variable_and_string_that_a_note_names_are_what_mends_it() {
    for profile in ["low-memory", "throughput"] {
        let before = diagnostics(&[("LOWTIDE_PROFILE", profile)]);
        let part = before.iter().find(|note| note.contains("partly in force"));
        let part = part.unwrap_or_else(|| panic!("{profile}: {before:?}"));
        let (_, set) = part.split_once("start the process with ").expect("how to mend it");
        let (variable, value) = set.split_once('=').expect("a variable and its value");
        let mut after = diagnostics(&[("LOWTIDE_PROFILE", profile), (variable, value)]);
        // The binary has 2 background threads at most, and nothing later can raise that.
        let threads = "max_background_threads: requested 4, effective 2";
        after.retain(|note| !note.starts_with(threads));
        assert_eq!(after, [""; 0], "{profile} with {set}");
    }
}

#[test]
fn what_the_variable_says_and_we_move_is_noted() {
    let diagnostics = diagnostics(&[(READ, "dirty_decay_ms:0,background_thread:false")]);
    let moved = "dirty_decay_ms: requested 0, effective 1000";
    assert!(diagnostics.iter().any(|note| note == moved), "{diagnostics:?}");
    let threads = "background_thread: requested false, effective true";
    let supported = lowtide_heap::background_threads_supported();
    assert!(!supported || diagnostics.iter().any(|note| note == threads), "{diagnostics:?}");
}

#[test]
fn what_jemalloc_ignores_is_noted_whoever_asked() {
    let diagnostics = diagnostics(&[(READ, "narenas:many"), (UNREAD, "narenas:2")]);
    let unread =
        format!("{UNREAD} is set, which this build of jemalloc does not read: it reads {READ}");
    assert_eq!(diagnostics, ["narenas: requested many, effective 4", &unread]);
}

#[test]
fn a_profile_of_no_such_name_refuses_the_start() {
    let refused = lines("refused: ", &[("LOWTIDE_PROFILE", "low_memory")]);
    let expected = "LOWTIDE_PROFILE=\"low_memory\": expected low-memory, balanced or throughput";
    assert_eq!(refused, [expected]);
}

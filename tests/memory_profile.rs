//! A profile that is asked for at run time, in a binary that carries another one: what jemalloc
//! fixed before `main` stays, and that is said.
//!
//! One process, one `Memory` at a time: one test.
#![cfg(feature = "memory")]

use std::time::Duration;

use lowtide::Memory;
use lowtide::config::Profile;
use lowtide::host::{HeapProfile, effective};

#[global_allocator]
static HEAP: lowtide::host::Heap = lowtide::host::Heap;

lowtide::heap_profile!(balanced);

/// The notes about the heap with which a `Memory` of this profile starts.
fn heap_notes(profile: Option<Profile>) -> Vec<String> {
    let builder = Memory::builder();
    let builder = match profile {
        Some(profile) => builder.profile(profile),
        None => builder,
    };
    let memory = builder.start().expect("one runs at a time");
    let notes = memory.notes();
    assert!(memory.shutdown(Duration::from_secs(5)).is_clean());
    notes.into_iter().filter(|note| note.about == "heap").map(|note| note.text).collect()
}

/// Bug: `LOWTIDE_PROFILE=low-memory` over a binary that carries `balanced` started with four arenas
/// and large thread caches, and said nothing.
#[test]
fn what_a_profile_cannot_change_any_more_is_noted_with_the_variable_that_could() {
    if !effective().expect("jemalloc answers").differences_from(HeapProfile::Balanced).is_empty() {
        println!("skipped: the environment overrides what this binary carries");
        return;
    }
    let notes = heap_notes(Some(Profile::LowMemory));
    assert_eq!(notes.len(), 1, "{notes:?}");
    let conf = HeapProfile::LowMemory.conf().to_str().expect("ASCII");
    for part in [
        "low-memory",
        "narenas is 4 instead of 2",
        "tcache_max is",
        "thp is",
        &format!("_RJEM_MALLOC_CONF={conf}"),
    ] {
        assert!(notes[0].contains(part), "{part:?} is missing in: {}", notes[0]);
    }
    assert_eq!(heap_notes(Some(Profile::Balanced)), [""; 0], "the profile that it carries");
    assert_eq!(heap_notes(None), [""; 0], "nobody asked for a profile");
}

//! Dedicated arenas: what a scope allocates lies in them, all of it goes back, and none is
//! destroyed while anything could point into it.
//!
//! Invariant: a test ends with its arenas retired, but where it says that one is kept.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "a child is forked, and memory is asked for as allocators do")]

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;

use allocator_api2::alloc::Allocator as _;
use lowtide_heap::ByteSize;
use lowtide_heap::{ARENA_NAME_MAX, HostArena, HostError};
use test_fork::test;

/// A model in small: large blocks, small ones, and a map of strings.
fn model() -> (Vec<Vec<u8>>, BTreeMap<u32, String>) {
    let blocks = (0..64_usize).map(|nth| vec![1; 16 << (nth % 17)]).collect();
    let words = (0..10_000).map(|nth| (nth, format!("token {nth}"))).collect();
    (blocks, words)
}

fn active(arena: &HostArena) -> ByteSize {
    arena.stats().expect("statistics").active
}

#[test]
fn all_that_a_scope_allocates_goes_back() {
    let arena = HostArena::new("model").expect("an arena");
    let loaded = arena.scope(model).expect("bound");
    let stats = arena.stats().expect("statistics");
    assert!(stats.live > ByteSize::mib(6) && stats.live <= stats.active, "{stats:?}");
    drop(loaded);
    arena.purge().expect("purged");
    let stats = arena.stats().expect("statistics");
    assert_eq!((stats.active, stats.dirty, stats.muzzy), Default::default());
    arena.retire().expect("nothing points into it");
}

#[test]
fn nothing_lands_in_it_after_the_scope_and_nothing_of_before_within() {
    let arena = HostArena::new("edges").expect("an arena");
    let before: Vec<_> = (0..100).map(|nth| Box::new([nth; 100])).collect();
    drop(before); // into this thread's cache, out of the arena of before
    let within = arena.scope(|| (0..100).map(|nth| Box::new([nth; 100])).collect::<Vec<_>>());
    let within = within.expect("bound");
    assert!(arena.stats().expect("statistics").live >= ByteSize::new(100 * 400));
    // In a scope: out of this thread's cache it would go to whoever allocates next.
    arena.scope(|| drop(within)).expect("bound");
    let after: Vec<_> = (0..100).map(|nth| Box::new([nth; 100])).collect();
    lowtide_heap::flush_thread_cache().expect("flushed");
    assert_eq!(active(&arena), ByteSize::ZERO, "{} are out of it", after.len());
    arena.retire().expect("nothing points into it");
}

#[test]
fn a_survivor_refuses_until_it_is_gone_and_out_of_the_cache_of_who_freed_it() {
    let arena = HostArena::new("survivor").expect("an arena");
    let survivor = arena.scope(|| Box::new([7_u8; 100])).expect("bound");
    let refused = arena.retire().expect_err("it is live");
    assert!(matches!(refused.1, HostError::ArenaInUse { bytes } if bytes >= ByteSize::kib(4)));
    let (freed, is_freed) = mpsc::channel();
    let (end, is_ended) = mpsc::channel();
    let other = thread::spawn(move || {
        drop(black_box(Box::new([1_u8; 100]))); // so that it has a cache
        drop(survivor);
        freed.send(()).expect("heard");
        is_ended.recv().expect("told");
    });
    is_freed.recv().expect("told");
    let refused = refused.0.retire().expect_err("the other thread has it in its cache");
    end.send(()).expect("heard");
    other.join().expect("no panic");
    refused.0.retire().expect("its cache went with it");
}

#[test]
fn scopes_nest_and_a_panic_ends_one() {
    let outer = HostArena::new("outer").expect("an arena");
    let inner = HostArena::new("inner").expect("an arena");
    let (one, two, three) = outer
        .scope(|| {
            let one = vec![1_u8; 1 << 20];
            let two = inner.scope(|| vec![2_u8; 2 << 20]).expect("bound");
            let fell = catch_unwind(AssertUnwindSafe(|| {
                inner.scope(|| {
                    black_box(vec![3_u8; 1 << 20]);
                    std::panic::resume_unwind(Box::new("out of the scope"));
                })
            }));
            assert!(fell.is_err());
            (one, two, vec![3_u8; 4 << 20])
        })
        .expect("bound");
    assert!(active(&outer) >= ByteSize::mib(5) && active(&inner) >= ByteSize::mib(2));
    assert!(active(&inner) < ByteSize::mib(3), "what the panic left is freed");
    drop((one, two, three));
    inner.retire().expect("nothing points into it");
    outer.retire().expect("nothing points into it");
}

#[test]
fn names_are_checked_and_free_again_after_the_end() {
    let arena = HostArena::new("name").expect("an arena");
    assert_eq!(arena.name(), "name");
    let taken = HostArena::new("name").expect_err("taken");
    assert_eq!(taken, HostError::ArenaNameTaken { name: "name".to_owned() });
    drop(arena);
    HostArena::new("name").expect("free again").retire().expect("empty");
    let longest = "n".repeat(ARENA_NAME_MAX);
    HostArena::new(&longest).expect("as long as may be").retire().expect("empty");
    for wrong in ["", "a\0b", &"n".repeat(ARENA_NAME_MAX + 1)] {
        let error = HostArena::new(wrong).expect_err("no name");
        assert!(matches!(&error, HostError::ArenaName { name } if name == wrong), "{error}");
        assert!(error.to_string().contains("31"), "{error}");
    }
}

#[test]
fn one_that_cannot_be_retired_is_kept_for_the_next() {
    let arena = HostArena::new("kept").expect("an arena");
    let survivor = arena.scope(|| vec![1_u8; 1 << 20]).expect("bound");
    drop(arena);
    let next = HostArena::new("kept again").expect("an arena");
    // Unless another test took the kept one meanwhile, it has the survivor.
    let held = active(&next);
    drop(survivor);
    let kept = next.retire();
    assert!(kept.is_ok(), "{held} were in it: {kept:?}");
}

#[test]
fn two_hundred_models_come_and_go_and_leave_no_arena_behind() {
    let before =
        lowtide_heap::HeapProbe::new().expect("a probe").snapshot().expect("statistics").arenas;
    for _ in 0..200 {
        let arena = HostArena::new("cycles").expect("an arena");
        drop(arena.scope(model).expect("bound"));
        arena.retire().expect("nothing points into it");
    }
    let after =
        lowtide_heap::HeapProbe::new().expect("a probe").snapshot().expect("statistics").arenas;
    // Other tests have a few at the same time.
    assert!(after <= before + 16, "{before} arenas before, {after} after");
}

#[test]
fn its_decay_is_its_own() {
    let arena = HostArena::new("decay").expect("an arena");
    arena.set_decay(lowtide_heap::decay::DecayTime::Never).expect("set");
    drop(arena.scope(|| vec![1_u8; 8 << 20]).expect("bound"));
    arena.retire().expect("nothing points into it");
}

#[test]
fn a_child_of_a_fork_is_refused() {
    let arena = HostArena::new("forked").expect("an arena");
    // SAFETY: the child calls nothing but what is looked at here, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let scope = arena.scope(|| ()) == Err(HostError::Forked);
        let retire = matches!(arena.retire().map_err(|refused| refused.1), Err(HostError::Forked));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!(scope && retire))) };
    }
    let mut status = 0;
    // SAFETY: waits for the child, whose status goes to a local.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    arena.retire().expect("empty");
}

#[test]
fn large_buffers_are_had_of_it_on_any_thread_and_leave_nothing_behind() {
    let arena = HostArena::new("tensors").expect("an arena");
    let mut tensor = allocator_api2::vec::Vec::new_in(&arena);
    tensor.resize(1 << 20, 0.5_f32);
    tensor.resize(1 << 21, 1.5_f32); // moves
    assert!(tensor[..1 << 20].iter().all(|of| (of - 0.5).abs() < f32::EPSILON));
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut of_theirs = allocator_api2::vec::Vec::with_capacity_in(1 << 20, &arena);
            of_theirs.resize(1 << 20, 1_u8);
            of_theirs
        });
        let of_theirs = other.join().expect("no panic");
        assert!(arena.stats().expect("statistics").live >= ByteSize::mib(9));
        drop(of_theirs);
        // Freed by another, and in no cache of its.
        scope.spawn(move || drop(tensor)).join().expect("no panic");
    });
    // No more than its size, with its alignment, and zeros where they are asked for.
    let layout = Layout::from_size_align(100_000, 1 << 16).expect("a layout");
    let block = arena.allocate_zeroed(layout).expect("room");
    assert_eq!((block.len(), block.cast::<u8>().addr().get() % (1 << 16)), (100_000, 0));
    // SAFETY: the block is there, of so many bytes, which were set to zero.
    assert!(unsafe { block.as_ref() }.iter().all(|&byte| byte == 0));
    // SAFETY: it is one of the arena's, of this layout, and not used after.
    unsafe { arena.deallocate(block.cast(), layout) };
    let nothing = arena.allocate(Layout::new::<()>()).expect("nothing is always there");
    // SAFETY: as before.
    unsafe { arena.deallocate(nothing.cast(), Layout::new::<()>()) };
    let too_much = Layout::from_size_align(isize::MAX as usize, 1).expect("a layout");
    assert!(arena.allocate(too_much).is_err());
    // One that was forgotten keeps it.
    let forgotten = arena.allocate(layout).expect("room");
    let refused = arena.retire().expect_err("a block is there");
    // SAFETY: as before.
    unsafe { refused.0.deallocate(forgotten.cast(), layout) };
    refused.0.retire().expect("nothing is left");
}

//! Scopes of dedicated arenas past the thread's cache: which blocks lie in them, that the cache of
//! the thread is left as it is, and that lasting blocks keep no pages of others.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "a child is forked, and memory is allocated by layout")]

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, realloc};
use std::collections::BTreeMap;
use std::env;
use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;

use lowtide_heap::{
    Account, ByteSize, HeapProbe, HostArena, HostArenaStats, HostError, flush_thread_cache,
};
use test_fork::test;

use crate::start::{again, assert_passed};

fn stats(arena: &HostArena) -> HostArenaStats {
    arena.stats().expect("statistics")
}

fn blocks(count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|_| black_box(vec![1; 1000])).collect()
}

#[test]
fn blocks_of_a_scope_lie_in_the_arena_and_the_cache_of_the_thread_stays_as_it_is() {
    let arena = HostArena::new("uncached").expect("an arena");
    let cached = blocks(1)[0].as_ptr().addr(); // it is freed here
    let within = arena.scope_uncached(|| blocks(100)).expect("served");
    let after = vec![1_u8; 1000];
    assert_eq!(after.as_ptr().addr(), cached, "the cache was neither used nor flushed");
    assert!(stats(&arena).live >= ByteSize::new(100_000), "{:?}", stats(&arena));
    assert!(within.iter().all(|block| block.as_ptr().addr() != cached));
    let more = blocks(100);
    let live = stats(&arena).live;
    assert!(live < ByteSize::new(150_000), "{live} with {} blocks of after it", more.len());
    drop(within);
    flush_thread_cache().expect("flushed");
    arena.retire().expect("nothing points into it");
}

#[test]
fn each_kind_of_allocation_is_made_in_the_arena() {
    let arena = HostArena::new("kinds").expect("an arena");
    let live = || stats(&arena).live.get();
    let mib = Layout::from_size_align(1 << 20, 1).expect("a layout");
    let aligned = Layout::from_size_align(1 << 20, 1 << 16).expect("a layout");
    let small = Layout::from_size_align(24, 16).expect("a layout");
    let odd = Layout::from_size_align(4, 8).expect("a layout");
    let within = |layout| {
        // SAFETY: each layout has a size.
        arena.scope_uncached(|| unsafe { alloc(layout) }).expect("served")
    };
    let [large, far, near, tiny] = [mib, aligned, small, odd].map(within);
    assert!(live() >= 2 << 20);
    assert_eq!((far.addr() % (1 << 16), near.addr() % 16, tiny.addr() % 8), (0, 0, 0));
    // SAFETY: a live block of 24 bytes.
    unsafe { near.write_bytes(7, 24) };
    for (block, layout) in [(large, mib), (far, aligned), (near, small), (tiny, odd)] {
        // SAFETY: the block was allocated with this layout and is not used after.
        unsafe { dealloc(block, layout) };
    }
    flush_thread_cache().expect("flushed");
    // SAFETY: the layout has a size.
    let zeroed = arena.scope_uncached(|| unsafe { alloc_zeroed(small) }).expect("served");
    assert_eq!(zeroed, near, "the block that was written to");
    // SAFETY: a live block of 24 bytes, which were set to zero.
    assert_eq!(unsafe { std::slice::from_raw_parts(zeroed, 24) }, [0; 24]);
    // SAFETY: the block was allocated with this layout and is not used after.
    unsafe { dealloc(zeroed, small) };
    // SAFETY: the layout has a size.
    let ordinary = unsafe { alloc(small) };
    // SAFETY: a live block of 24 bytes.
    unsafe { ordinary.write_bytes(7, 24) };
    let before = live();
    // SAFETY: a live block of this layout; the size is not zero.
    let grown = arena.scope_uncached(|| unsafe { realloc(ordinary, small, 100_000) });
    let grown = grown.expect("served");
    assert!(live() >= before + 100_000, "it had to move");
    // SAFETY: 24 bytes of it were written.
    assert_eq!(unsafe { std::slice::from_raw_parts(grown, 24) }, [7; 24]);
    let layout = Layout::from_size_align(100_000, 16).expect("a layout");
    // SAFETY: the block has this layout since it was resized, and is not used after.
    unsafe { dealloc(grown, layout) };
    flush_thread_cache().expect("flushed");
    arena.retire().expect("nothing points into it");
}

/// The heap without the arenas, in pages with blocks.
fn active_of_others(arena: &HostArena) -> u64 {
    let all = HeapProbe::new().and_then(|probe| probe.snapshot()).expect("statistics").active;
    all.get() - stats(arena).active.get()
}

#[test]
fn ten_survivors_in_a_hundred_keep_no_pages_of_the_rest() {
    let arena = HostArena::new("survivors").expect("an arena");
    let mut passing = Vec::with_capacity(100_000);
    let mut lasting = BTreeMap::new();
    let before = active_of_others(&arena);
    for nth in 0..100_000_usize {
        let block = vec![1_u8; 16 << (nth % 6)];
        if nth % 10 == 0 {
            arena.scope_uncached(|| lasting.insert(nth, block.clone())).expect("served");
        }
        passing.push(block);
    }
    let peak = active_of_others(&arena) - before;
    passing.clear();
    flush_thread_cache().expect("flushed");
    let rest = active_of_others(&arena).saturating_sub(before);
    assert!(rest < peak / 50, "{rest} of {peak} bytes of pages are still in use");
    let HostArenaStats { live, active, .. } = stats(&arena);
    assert!(active.get() < live.get() * 11 / 10, "{live} live in {active} of pages");
    drop(lasting);
    flush_thread_cache().expect("flushed");
    arena.retire().expect("nothing points into it");
}

#[test]
fn any_thread_frees_its_blocks_and_it_is_retired_when_their_caches_are_empty() {
    let arena = HostArena::new("freed").expect("an arena");
    let [one, two, three] =
        std::array::from_fn(|_| arena.scope_uncached(|| blocks(100)).expect("served"));
    thread::scope(|scope| {
        scope.spawn(|| drop(one)); // its cache goes with it
        scope.spawn(|| arena.scope_uncached(|| drop(two)).expect("served"));
    });
    drop(three);
    let refused = arena.retire();
    // The retirement flushed the cache of this thread, which had the blocks.
    assert!(refused.is_ok(), "{refused:?}");
}

#[test]
fn a_survivor_keeps_it_from_being_retired() {
    let arena = HostArena::new("survivor").expect("an arena");
    let survivor = arena.scope_uncached(|| blocks(1)).expect("served");
    let refused = arena.retire().expect_err("it is live");
    assert!(matches!(refused.1, HostError::ArenaInUse { .. }), "{}", refused.1);
    drop(survivor);
    refused.0.retire().expect("nothing points into it");
}

#[test]
fn scopes_of_both_kinds_nest_and_a_panic_ends_one() {
    let outer = HostArena::new("outer").expect("an arena");
    let inner = HostArena::new("inner").expect("an arena");
    let megabytes = |count: usize| black_box(vec![1_u8; count << 20]);
    let kept = outer
        .scope_uncached(|| {
            let one = megabytes(1);
            let two = inner.scope_uncached(|| megabytes(2)).expect("served");
            let three = inner.scope(|| megabytes(4)).expect("bound");
            let fell = catch_unwind(AssertUnwindSafe(|| {
                inner.scope_uncached(|| std::panic::resume_unwind(Box::new("out of the scope")))
            }));
            assert!(fell.is_err());
            let fell = catch_unwind(AssertUnwindSafe(|| {
                inner.scope(|| std::panic::resume_unwind(Box::new("out of the scope")))
            }));
            assert!(fell.is_err());
            (one, two, three, megabytes(8))
        })
        .expect("served");
    let after = megabytes(16);
    let mib = |arena| stats(arena).live.get() >> 20;
    assert_eq!((mib(&outer), mib(&inner)), (9, 6));
    let bound = inner.scope(|| outer.scope_uncached(|| megabytes(32)).expect("served"));
    assert_eq!((mib(&outer), mib(&inner)), (41, 6));
    drop((kept, after, bound));
    inner.retire().expect("nothing points into it");
    outer.retire().expect("nothing points into it");
}

#[test]
fn a_thread_that_the_closure_starts_allocates_elsewhere() {
    let arena = HostArena::new("thread").expect("an arena");
    let theirs = arena.scope_uncached(|| {
        let other = thread::spawn(|| black_box(vec![1_u8; 4 << 20]));
        other.join().expect("no panic")
    });
    assert!(stats(&arena).live < ByteSize::mib(1), "of the thread's {}", theirs.iter().len());
    drop(theirs);
    arena.retire().expect("what the start of a thread allocated is freed");
}

#[test]
fn an_account_counts_the_bytes_of_a_scope() {
    let arena = HostArena::new("account").expect("an arena");
    let account = Arc::new(Account::new((), |_, _| ()));
    let kept = account.run(|| arena.scope_uncached(|| vec![1_u8; 1 << 20]).expect("served"));
    assert_eq!(account.memory().live, ByteSize::mib(1));
    account.run(|| drop(kept));
    assert_eq!(account.memory().live, ByteSize::ZERO);
    arena.retire().expect("nothing points into it");
}

#[test]
fn a_future_is_polled_in_the_arena_and_its_task_goes_on_outside() {
    let arena = Arc::new(HostArena::new("future").expect("an arena"));
    let mut polls = 0;
    let future = std::future::poll_fn(move |_| {
        polls += 1;
        let block = black_box(vec![1_u8; 1 << 20]);
        if polls == 3 { Poll::Ready(block) } else { Poll::Pending }
    });
    let mut context = Context::from_waker(Waker::noop());
    let mut future = pin!(arena.clone().scope_future(future));
    let outside: Vec<_> = (0..2)
        .map(|_| {
            assert!(future.as_mut().poll(&mut context).is_pending());
            black_box(vec![1_u8; 1 << 20])
        })
        .collect();
    let Poll::Ready(Ok(block)) = future.as_mut().poll(&mut context) else { panic!("not ready") };
    assert_eq!(stats(&arena).live.get() >> 20, 1, "{} are outside", outside.len());
    drop(block);
    assert!(stats(&arena).live < ByteSize::mib(1));
}

#[test]
fn a_child_of_a_fork_is_refused_and_ends_the_scope_in_which_it_began() {
    let arena = HostArena::new("forked").expect("an arena");
    let child = arena.scope_uncached(|| {
        // SAFETY: the child allocates, which jemalloc allows after a fork, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let within = blocks(100);
            let is_refused = arena.scope_uncached(|| ()) == Err(HostError::Forked);
            drop(within);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!is_refused)) };
        }
        child
    });
    let (child, mut status) = (child.expect("served"), 0);
    // SAFETY: waits for the child, whose status goes to a local.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    arena.retire().expect("empty");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "how this process is told that it is a child")]
fn where_arenas_go_with_cpus_it_is_served_all_the_same() {
    if env::var("LOWTIDE_TEST_TASK").is_err() {
        let test = "arenas_uncached::where_arenas_go_with_cpus_it_is_served_all_the_same";
        let mut command = again(test);
        command.env("LOWTIDE_TEST_TASK", "by cpu").env("_RJEM_MALLOC_CONF", "percpu_arena:percpu");
        assert_passed(&command.output().expect("it runs"));
        return;
    }
    let arena = HostArena::new("by cpu").expect("an arena");
    let within = arena.scope_uncached(|| vec![1_u8; 4 << 20]).expect("served");
    assert!(stats(&arena).live >= ByteSize::mib(4));
    drop(within);
    arena.retire().expect("empty");
}

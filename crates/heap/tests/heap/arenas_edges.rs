//! The edges of dedicated arenas: what the naive design does there, all orders in which blocks get
//! out of threads, and what happens when arenas run out. What ends a process runs in a child.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "the naive design is what this crate's is compared with")]

use std::ffi::CStr;
use std::hint::black_box;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::{env, ptr};

use lowtide_heap::decay::DecayTime;
use lowtide_heap::{HeapProbe, HostArena, HostError};
use test_fork::test;

use crate::process::raw_decay;
use crate::start::{again, assert_passed};

/// Says to a child what it is to do.
const TASK: &str = "LOWTIDE_TEST_TASK";

fn child(test: &str, task: &str) -> Command {
    let mut command = again(&format!("arenas_edges::{test}"));
    command.env(TASK, task);
    command
}

#[expect(clippy::disallowed_methods, reason = "how this process is told that it is a child")]
fn is_task(task: &str) -> bool {
    env::var(TASK).is_ok_and(|found| found == task)
}

/// jemalloc's control of that name, written.
fn write<T>(name: &CStr, mut value: T) {
    let size = size_of::<T>();
    // SAFETY: each caller gives the control's C type; jemalloc reads `size` bytes of a local.
    let code = unsafe {
        let value = (&raw mut value).cast();
        tikv_jemalloc_sys::mallctl(name.as_ptr(), ptr::null_mut(), ptr::null_mut(), value, size)
    };
    assert_eq!(code, 0, "{name:?}");
}

fn read_u32(name: &CStr) -> u32 {
    try_read_u32(name).unwrap_or_else(|code| panic!("{name:?}: {code}"))
}

fn try_read_u32(name: &CStr) -> Result<u32, i32> {
    let (mut value, mut size) = (0_u32, size_of::<u32>());
    // SAFETY: each caller names a control whose C type is `unsigned`, for which there is room.
    let code = unsafe {
        let value = (&raw mut value).cast();
        tikv_jemalloc_sys::mallctl(name.as_ptr(), value, &raw mut size, ptr::null_mut(), 0)
    };
    if code == 0 { Ok(value) } else { Err(code) }
}

/// As one would do it: bind, allocate, unbind, free, destroy, with no cache emptied.
fn destroy_naively() -> u8 {
    let arena = read_u32(c"arenas.create");
    let before = read_u32(c"thread.arena");
    write(c"thread.arena", arena);
    let blocks: Vec<Box<[u8; 1000]>> = (0..100).map(|_| Box::new([1; 1000])).collect();
    write(c"thread.arena", before);
    drop(blocks); // into this thread's cache
    let mut name = *b"arena.0000.destroy\0";
    let digits = format!("{arena:04}");
    name[6..10].copy_from_slice(digits.as_bytes());
    let name = CStr::from_bytes_with_nul(&name).expect("a name");
    // SAFETY: none: this is what the test is about, and why it runs in a child.
    let code = unsafe {
        let null = ptr::null_mut();
        tikv_jemalloc_sys::mallctl(name.as_ptr(), null, ptr::null_mut(), null, 0)
    };
    assert_eq!(code, 0, "jemalloc destroys it");
    // Out of the cache: memory that is gone.
    let again: Vec<Box<[u8; 1000]>> = (0..100).map(|_| black_box(Box::new([2; 1000]))).collect();
    again.iter().map(|block| block[500]).fold(0, u8::wrapping_add)
}

#[test]
fn where_a_naive_destroy_faults_retirement_refuses() {
    if is_task("naive") {
        black_box(destroy_naively());
        return;
    }
    let naive = child("where_a_naive_destroy_faults_retirement_refuses", "naive").output();
    let status = naive.expect("it runs").status;
    assert_eq!(status.signal(), Some(libc::SIGSEGV), "{status}");

    let arena = HostArena::new("careful").expect("an arena");
    let blocks = arena.scope(|| (0..100).map(|_| Box::new([1_u8; 1000])).collect::<Vec<_>>());
    let (ask, asked) = channel();
    let (tell, told) = channel();
    let other = thread::spawn(move || {
        drop(black_box(Box::new([0_u8; 1000]))); // so that it has a cache
        drop(blocks);
        tell.send(()).expect("heard");
        let () = asked.recv().expect("asked");
        // Out of the cache: memory that is there.
        let again: Vec<_> = (0..100).map(|_| black_box(Box::new([2_u8; 1000]))).collect();
        assert!(again.iter().all(|block| block[500] == 2));
    });
    told.recv().expect("freed");
    let refused = arena.retire().expect_err("they lie in the other thread's cache");
    assert!(matches!(refused.1, HostError::ArenaInUse { .. }), "{}", refused.1);
    ask.send(()).expect("heard");
    other.join().expect("no panic");
    refused.0.retire().expect("the cache went with the thread");
}

/// An act of a thread on its block.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Free,
    Flush,
    Exit,
}

/// The places that a block may be in.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Live,
    Cached,
    Back,
}

impl Place {
    fn after(self, step: Step) -> Self {
        match (self, step) {
            (Self::Live, Step::Free) => Self::Cached,
            (Self::Cached, Step::Flush | Step::Exit) => Self::Back,
            (place, _) => place,
        }
    }
}

/// A thread that does as it is told, and has a cache.
struct Hand {
    steps: Option<Sender<Step>>,
    done: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Hand {
    fn with(block: Box<[u8; 500]>) -> Self {
        let (steps, told) = channel::<Step>();
        let (tell, done) = channel();
        let thread = thread::spawn(move || {
            drop(black_box(Box::new([0_u8; 500])));
            let mut block = Some(block);
            // What it sends with is there before anything is asked of it.
            tell.send(()).expect("heard");
            for step in told {
                match step {
                    Step::Free => drop(block.take()),
                    Step::Flush => assert!(lowtide_heap::flush_thread_cache().is_ok()),
                    Step::Exit => break,
                }
                tell.send(()).expect("heard");
            }
            drop(block.take());
        });
        done.recv().expect("it runs");
        Self { steps: Some(steps), done, thread: Some(thread) }
    }

    fn take(&mut self, step: Step) {
        self.steps.as_ref().expect("it runs").send(step).expect("it hears");
        if step == Step::Exit {
            self.steps = None;
            self.thread.take().expect("it runs").join().expect("no panic");
        } else {
            self.done.recv().expect("done");
        }
    }
}

/// All orders of two lists, each of which keeps its own.
fn merges(one: &[Step], two: &[Step]) -> Vec<Vec<(usize, Step)>> {
    let (Some((first, rest)), Some((second, others))) = (one.split_first(), two.split_first())
    else {
        let one = one.iter().map(|&step| (0, step));
        return vec![one.chain(two.iter().map(|&step| (1, step))).collect()];
    };
    let with = |head: (usize, Step), tails: Vec<Vec<_>>| {
        tails.into_iter().map(move |tail| [vec![head], tail].concat())
    };
    with((0, *first), merges(rest, two)).chain(with((1, *second), merges(one, others))).collect()
}

#[test]
fn in_every_order_of_frees_flushes_and_exits_it_is_retired_when_nothing_is_held_and_never_before() {
    let ways = [
        &[Step::Free, Step::Flush, Step::Exit][..],
        &[Step::Flush, Step::Free, Step::Exit],
        &[Step::Free, Step::Exit],
    ];
    let mut orders = 0;
    for (one, two) in ways.iter().flat_map(|one| ways.iter().map(move |two| (one, two))) {
        for order in merges(one, two) {
            orders += 1;
            let mut arena = HostArena::new("orders").expect("an arena");
            let blocks = arena.scope(|| [1, 2].map(|mark| Box::new([mark; 500]))).expect("bound");
            let mut hands = blocks.map(Hand::with);
            let mut places = [Place::Live; 2];
            let mut is_retired = false;
            for (nth, &(hand, step)) in order.iter().enumerate() {
                hands[hand].take(step);
                places[hand] = places[hand].after(step);
                if is_retired {
                    continue;
                }
                let is_held = places.iter().any(|place| *place != Place::Back);
                match arena.retire() {
                    Ok(()) => {
                        assert!(!is_held, "{order:?}: after step {nth} {places:?}");
                        is_retired = true;
                        arena = HostArena::new("next").expect("an arena");
                    }
                    Err(refused) => {
                        assert!(is_held, "{order:?}: after step {nth} {places:?}: {}", refused.1);
                        arena = refused.0;
                    }
                }
            }
            assert!(is_retired, "{order:?}");
        }
    }
    // Of steps m and n there are (m + n)! / m! n! orders.
    assert_eq!(orders, 4 * 20 + 4 * 10 + 6);
}

#[test]
fn a_scope_that_does_not_end_keeps_its_arena() {
    let arena = Arc::new(HostArena::new("endless").expect("an arena"));
    let is_there = || HostArena::all().expect("statistics").iter().any(|(of, _)| of == "endless");
    let (end, is_ended) = channel::<()>();
    let (enter, is_entered) = channel();
    let other = thread::spawn({
        let arena = Arc::clone(&arena);
        move || {
            arena.scope(|| {
                enter.send(()).expect("heard");
                let _ = is_ended.recv();
            })
        }
    });
    is_entered.recv().expect("entered");
    assert!(Arc::into_inner(arena).is_none(), "whoever is in a scope has the arena");
    assert!(is_there());
    drop(end);
    other.join().expect("no panic").expect("bound");
    assert!(!is_there(), "its last owner gave it up");
}

#[test]
fn when_arenas_run_out_that_is_an_error_and_the_heap_goes_on() {
    let arenas = ["one", "two"].map(|name| HostArena::new(name).expect("an arena"));
    let mut others = 0;
    while try_read_u32(c"arenas.create").is_ok() {
        others += 1;
    }
    assert!(others > 4000, "{others} arenas");
    let error = HostArena::new("three").expect_err("none is left");
    assert_eq!(error, HostError::NoArenaIndex);
    let beside = black_box(vec![1_u8; 8 << 20]);
    let [one, two] = arenas;
    let within = one.scope(|| vec![1_u8; 8 << 20]).expect("bound");
    assert_eq!(beside, within);
    two.retire().expect("empty");
    let three = HostArena::new("three").expect("one is free again");
    drop(within);
    one.retire().expect("empty");
    three.retire().expect("empty");
}

/// Bug: the thread stayed in the arena for ever, with all that it allocated from then on, since
/// jemalloc lets none go back to the arena of a CPU; each load of a resource left one more arena.
#[test]
fn where_arenas_go_with_cpus_no_thread_is_bound_and_buffers_are_had_all_the_same() {
    if !is_task("by cpu") {
        let test = "where_arenas_go_with_cpus_no_thread_is_bound_and_buffers_are_had_all_the_same";
        let mut command = child(test, "by cpu");
        let output = command.env("_RJEM_MALLOC_CONF", "percpu_arena:percpu").output();
        assert_passed(&output.expect("it runs"));
        return;
    }
    let conf = lowtide_heap::effective().expect("statistics");
    if conf.get("percpu_arena") == Some("disabled") {
        return; // a kernel or a library that does not say which CPU it is
    }
    let arena = HostArena::new("by cpu").expect("an arena");
    let refused = arena.scope(|| unreachable!("refused before")).map(|()| "it ran");
    assert_eq!(refused, Err(HostError::ArenasByCpu { found: "percpu" }));
    let beside = black_box(vec![1_u8; 4 << 20]);
    assert!(arena.stats().expect("statistics").active.is_zero(), "the thread is not in it");
    let mut within = allocator_api2::vec::Vec::with_capacity_in(beside.len(), &arena);
    within.extend_from_slice(&beside);
    assert!(arena.stats().expect("statistics").live.get() >= 4 << 20);
    drop(within);
    arena.retire().expect("empty");
}

/// Bug: what was kept had the decay time that its last owner gave it, and so had its next owner.
#[test]
fn one_that_was_kept_decays_as_the_heap_does() {
    let never = || {
        let arenas = HeapProbe::new().and_then(|probe| probe.snapshot()).expect("known").arenas;
        (0..arenas).filter(|arena| raw_decay("dirty_decay_ms", *arena) == Some(-1)).count()
    };
    let arena = HostArena::new("never").expect("an arena");
    arena.set_decay(DecayTime::Never).expect("set");
    assert_eq!(never(), 1);
    drop(arena);
    assert_eq!(never(), 0);
    let next = HostArena::new("as the heap").expect("an arena");
    assert_eq!(never(), 0);
    next.retire().expect("empty");
}

/// Bug: what had stayed in one that was kept was shown as its next owner's, though another that was
/// kept held nothing.
#[test]
fn of_those_that_were_kept_the_emptiest_is_taken_first() {
    let arenas = ["one", "two", "three"].map(|name| HostArena::new(name).expect("an arena"));
    let within = |arena: &HostArena| arena.scope(|| black_box(vec![1_u8; 1 << 20]));
    let [first, second, third] = arenas.each_ref().map(|arena| within(arena).expect("a scope"));
    drop(arenas);
    drop(second);
    let next = HostArena::new("next").expect("an arena");
    assert!(next.stats().expect("statistics").active.get() < 1 << 20);
    drop((first, third));
    next.retire().expect("empty");
}

/// Bug: the child of a fork found the lock held that keeps arenas from being destroyed, by a thread
/// that was not there, and waited for ever.
#[test]
fn a_child_of_a_fork_never_waits_for_a_thread_that_was_among_the_arenas() {
    let (ends, turns) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                HostArena::new("busy").expect("an arena").retire().expect("empty");
                lowtide_heap::effective().expect("statistics");
                turns.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut statuses = Vec::new();
        for _ in 0..40 {
            let seen = turns.load(Ordering::Relaxed);
            while turns.load(Ordering::Relaxed) < seen + 2 {
                thread::yield_now();
            }
            // SAFETY: the child calls what is looked at here, and ends; where it hangs it is ended.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: as above.
                let _ = unsafe { libc::alarm(20) };
                let is_done = HostArena::new("child").is_ok() && lowtide_heap::decay_tick().is_ok();
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(!is_done)) };
            }
            let mut status = 0;
            // SAFETY: waits for the child, whose status goes to a local.
            let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
            statuses.push((waited == child, status));
            if status != 0 {
                break;
            }
        }
        ends.store(true, Ordering::Relaxed);
        assert!(statuses.iter().all(|status| *status == (true, 0)), "{statuses:?}");
    });
}

/// Bug: where another thread had made an arena since the figures were refreshed there were none of
/// any, and all of them read 0 in metrics.
#[test]
fn arenas_are_listed_while_others_are_made() {
    let lasting = HostArena::new("lasting").expect("an arena");
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                HostArena::new("passing").expect("an arena").retire().expect("empty");
            }
        });
        let is_listed = |_| Ok(HostArena::all()?.iter().any(|(of, _)| of == "lasting"));
        let listed: Result<Vec<bool>, HostError> = (0..2_000).map(is_listed).collect();
        ends.store(true, Ordering::Relaxed);
        assert!(listed.expect("figures of all").into_iter().all(|is_listed| is_listed));
    });
    lasting.retire().expect("empty");
}

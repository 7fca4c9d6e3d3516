//! Work that outgrows its claim while memory is short: what it allocates lies on disk, keeps its
//! bytes, and is told apart from memory. Each test has a process of its own, since a process has one
//! file.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "forks, limits and a block of one's own layout are C calls")]

use std::alloc::{Layout, alloc, dealloc, realloc};
use std::fs::File;
use std::hint::black_box;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use lowtide_heap::clock::{Clock, SystemClock};
use lowtide_heap::{self as heap, Account, ByteSize, HeapProbe, HostArena, HostError};
use test_fork::test;

const MIB: usize = 1 << 20;
const DISK: &str = env!("CARGO_TARGET_TMPDIR");
const MOST: ByteSize = ByteSize::gib(1);
const PATIENCE: Duration = Duration::from_secs(20);

fn account() -> Arc<Account<()>> {
    let account = Account::new((), |(), _| ());
    account.set_claim(ByteSize::mib(1));
    Arc::new(account)
}

/// Publishes a sample by which so much of 256 MiB is left.
fn leave(left: ByteSize) {
    let limit = ByteSize::mib(256);
    heap::publish_sample(heap::counted_growth(), limit, limit.saturating_sub(left), anonymous());
}

fn anonymous() -> ByteSize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: Vec<u64> = text.split(' ').take(3).map(|it| it.parse().expect("pages")).collect();
    ByteSize::new((pages[1] - pages[2]) * 4096)
}

/// Returns `true` once it holds, unless that takes too long.
fn soon(holds: impl Fn() -> bool) -> bool {
    let (clock, bell) = (SystemClock::new(), heap::clock::Bell::new());
    while !holds() && clock.now().since_origin() < PATIENCE {
        clock.wait_until(&bell, clock.now() + Duration::from_millis(1));
    }
    holds()
}

fn run_pager(stop: &AtomicBool) {
    heap::run_pager(stop, &SystemClock::new()).expect("a disk that works");
}

/// Tries to spill once. Returns `true` if it did.
fn spills() -> bool {
    let begun = times();
    account().run(|| drop(black_box(vec![1_u8; 8 * MIB])));
    times() > begun
}

/// Runs a test with a pager, in a process without memory.
fn short_of_memory(most: ByteSize, test: impl FnOnce()) {
    heap::watch_growth();
    heap::spill_into(Path::new(DISK), most).expect("a disk");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| run_pager(&stop));
        leave(ByteSize::ZERO);
        assert!(soon(spills), "nothing spills");
        let ended = catch_unwind(AssertUnwindSafe(test));
        stop.store(true, Ordering::Release);
        heap::pager_bell().ring();
        ended.unwrap_or_else(|panic| resume_unwind(panic));
    });
}

/// Small blocks, together of so many MiB, and a list of them that grows by moving.
fn lines(mib: usize) -> Vec<Vec<u8>> {
    let mut lines = Vec::new();
    for nth in 0..mib * 1024_usize {
        let mut line = vec![0; 1024];
        line[..8].copy_from_slice(&nth.to_ne_bytes());
        line[1023] = 7;
        lines.push(line);
    }
    lines
}

fn are_right(lines: &[Vec<u8>]) -> bool {
    let is_right =
        |(nth, line): (usize, &Vec<u8>)| line[..8] == nth.to_ne_bytes() && line[1023] == 7;
    lines.iter().enumerate().all(is_right)
}

fn times() -> u64 {
    heap::spilled().1
}

#[test]
fn what_spills_keeps_its_bytes_and_is_no_memory_of_the_request_or_the_heap() {
    short_of_memory(MOST, || {
        let (account, probe) = (account(), HeapProbe::new().expect("statistics"));
        let before = (anonymous(), probe.snapshot().expect("statistics"));
        let lines = account.run(|| lines(220));
        assert!(are_right(&lines));
        let (memory, after) = (account.memory(), probe.snapshot().expect("statistics"));
        let all = ByteSize::mib(200);
        assert!(memory.spilled > all && memory.live < ByteSize::mib(16), "{memory:?}");
        assert!(memory.peak < ByteSize::mib(16) && memory.allocated > all, "{memory:?}");
        let figures = |it: heap::HeapSnapshot| [it.live, it.active, it.resident, it.dirty];
        for (before, after) in figures(before.1).into_iter().zip(figures(after)) {
            assert!(after.saturating_sub(before) < ByteSize::mib(24), "{before}, {after}");
        }
        let active = probe.active().expect("statistics");
        assert!(active.get().abs_diff(after.active.get()) < 1 << 20, "{active}");
        assert!(anonymous().saturating_sub(before.0) < ByteSize::mib(32));
        assert!(heap::spilled().0 > all);
        let purged = heap::purge_now().expect("purged");
        assert!(purged.released() < ByteSize::mib(32), "{purged:?}");
        // It outlives its request, and another thread frees it.
        drop(account);
        thread::spawn(move || {
            assert!(are_right(&lines));
            drop(lines);
        })
        .join()
        .expect("no panic");
        let on_disk = || heap::spilled().0;
        assert!(soon(|| on_disk() < ByteSize::mib(32)), "{} stay", on_disk());
    });
}

#[test]
fn a_block_grows_onto_the_disk_on_it_and_off_it_again() {
    short_of_memory(MOST, || {
        let account = account();
        leave(ByteSize::mib(200));
        let mut block: Vec<u8> = Vec::with_capacity(6 * MIB);
        let fill = |block: &mut Vec<u8>, mib: usize| {
            while block.len() < mib * MIB {
                block.push((block.len() / 7).to_le_bytes()[0]);
            }
        };
        account.run(|| fill(&mut block, 5));
        let (live, begun) = (account.memory().live, times());
        leave(ByteSize::ZERO);
        account.run(|| {
            fill(&mut block, 6);
            assert_eq!(times(), begun);
            fill(&mut block, 40);
            assert_eq!(times(), begun + 1);
            fill(&mut block, 90);
            block.truncate(50 * MIB);
            block.shrink_to(60 * MIB);
        });
        assert_eq!(account.memory().live, ByteSize::ZERO, "{live} were there");
        assert!(account.memory().spilled >= ByteSize::mib(90), "{:?}", account.memory());
        leave(ByteSize::mib(256));
        account.run(|| fill(&mut block, 100));
        assert_eq!(times(), begun + 1);
        for (at, byte) in block.iter().enumerate() {
            assert_eq!(*byte, (at / 7).to_le_bytes()[0], "at {at}");
        }
    });
}

#[test]
fn blocks_of_each_layout_move_onto_the_disk() {
    short_of_memory(MOST, || {
        for (size, align) in [(24, 8), (100, 64), (5000, 16), (MIB, 4096), (9 * MIB, 8)] {
            let old = Layout::from_size_align(size, align).expect("a layout");
            // SAFETY: the layout has a size.
            let block = unsafe { alloc(old) };
            // SAFETY: so many bytes.
            unsafe { block.write_bytes(7, size) };
            let (account, begun) = (account(), times());
            let moved = account.run(|| {
                drop(black_box(vec![1_u8; 8 * MIB]));
                assert_eq!(times(), begun + 1);
                // SAFETY: the block has this layout, and is not used again.
                unsafe { realloc(block, old, 2 * size) }
            });
            assert_eq!(moved.addr() % align, 0);
            // SAFETY: the first bytes were moved.
            let bytes = unsafe { std::slice::from_raw_parts(moved, size) };
            assert!(bytes.iter().all(|byte| *byte == 7), "{old:?}");
            let new = Layout::from_size_align(2 * size, align).expect("a layout");
            // SAFETY: a live block of this layout.
            unsafe { dealloc(moved, new) };
        }
    });
}

#[test]
fn beyond_the_space_on_disk_memory_is_taken() {
    short_of_memory(ByteSize::mib(128), || {
        let before = anonymous();
        let (account, begun) = (account(), times());
        let (lines, block) = account.run(|| (lines(90), vec![3_u8; 40 * MIB]));
        assert_eq!(times(), begun + 1);
        assert!(are_right(&lines) && block.iter().all(|byte| *byte == 3));
        let (on_disk, _) = heap::spilled();
        assert!(on_disk <= ByteSize::mib(128) && on_disk > ByteSize::mib(60), "{on_disk}");
        assert!(anonymous().saturating_sub(before) > ByteSize::mib(30));
    });
}

#[test]
fn a_spill_ends_with_the_outermost_work_also_by_a_panic() {
    short_of_memory(MOST, || {
        let (outer, inner) = (account(), account());
        let begun = times();
        let block = || black_box(vec![1_u8; 8 * MIB]);
        let panics = || {
            outer.run(|| {
                let kept = inner.run(|| heap::unmeasured(block));
                assert_eq!(times(), begun, "nobody's work");
                let more = inner.run(block);
                let most = outer.run(|| vec![block(), block()]);
                drop((kept, more, most));
                resume_unwind(Box::new("bug"))
            })
        };
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert_eq!(times(), begun + 1, "one for all");
        assert_eq!([outer.memory().live, inner.memory().live], [ByteSize::ZERO; 2]);
        assert!(inner.memory().spilled >= ByteSize::mib(8), "{:?}", inner.memory());
        let (on_disk, memory) = (heap::spilled().0, anonymous());
        let kept = block();
        assert!(anonymous().saturating_sub(memory) >= ByteSize::mib(7), "it is on disk");
        assert!(heap::spilled().0 <= on_disk);
        drop(kept);
    });
}

#[test]
fn the_first_checkpoint_of_a_thread_may_begin_a_spill() {
    short_of_memory(MOST, || {
        let account = account();
        let work = || account.run(|| black_box(vec![1_u8; 8 * MIB]));
        let kept = thread::scope(|scope| scope.spawn(work).join().expect("no panic"));
        let memory = account.memory();
        assert!(memory.peak < ByteSize::mib(1), "{memory:?}");
        assert_eq!(memory.spilled, ByteSize::mib(8));
        drop(kept);
    });
}

#[test]
fn nothing_spills_once_the_limit_is_gone() {
    short_of_memory(MOST, || {
        heap::publish_sample(heap::counted_growth(), ByteSize::MAX, anonymous(), anonymous());
        assert!(!spills());
    });
}

#[test]
fn work_of_small_blocks_alone_spills() {
    short_of_memory(MOST, || {
        let begun = times();
        let account = account();
        // No list of them grows.
        let list =
            || (0..20 * 1024).fold(None, |next, _| Some(Box::new(Line { next, _text: [7; 1024] })));
        let list = account.run(list);
        assert_eq!(times(), begun + 1, "{:?}", account.memory());
        let mut rest = list;
        while let Some(mut line) = rest {
            rest = line.next.take();
        }
    });
}

struct Line {
    next: Option<Box<Self>>,
    _text: [u8; 1024],
}

#[test]
fn work_in_an_arena_and_work_without_a_claim_stay_in_memory() {
    short_of_memory(MOST, || {
        let (begun, block) = (times(), || black_box(vec![1_u8; 8 * MIB]));
        let unclaimed = Arc::new(Account::new((), |(), _| ()));
        drop((block(), unclaimed.run(block)));
        let arena = HostArena::new("model").expect("an arena");
        let within = || account().run(block);
        let blocks = (arena.scope(within).expect("bound"), arena.scope_uncached(within));
        assert_eq!(times(), begun);
        assert!(arena.stats().expect("statistics").live >= ByteSize::mib(16));
        drop(blocks);
        let small = account().run(|| {
            drop(block());
            assert_eq!(times(), begun + 1);
            arena.scope(|| vec![1_u8; 3 * MIB]).expect("bound")
        });
        assert!(arena.stats().expect("statistics").live >= ByteSize::mib(3));
        drop(small);
        heap::flush_thread_cache().expect("flushed");
        arena.retire().expect("nothing points into it");
    });
}

#[test]
fn a_child_has_what_was_spilled_and_changes_nothing_of_its_parent() {
    short_of_memory(MOST, || {
        let account = account();
        let (mut lines, child) = account.run(|| {
            let mut lines = lines(60);
            // SAFETY: the child allocates, which jemalloc allows after a fork, and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: ends the child if it hangs.
                let _ = unsafe { libc::alarm(20) };
                let is_right = are_right(&lines);
                lines.iter_mut().for_each(|line| line.fill(1));
                let more = self::lines(10);
                let is_right = is_right && are_right(&more) && lines[7][7] == 1;
                drop((lines, more));
                let is_purged = heap::purge_now().is_ok();
                // SAFETY: ends the child without the handlers of the parent.
                unsafe { libc::_exit(i32::from(!is_right || !is_purged)) };
            }
            (lines, child)
        });
        let mut status = 0;
        // SAFETY: a child, and a place for its status.
        let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((ended, status), (child, 0));
        assert!(are_right(&lines));
        lines.clear();
    });
}

#[test]
fn the_disk_is_free_again_although_the_application_has_closed_the_file() {
    short_of_memory(MOST, || {
        let account = account();
        let before = account.run(|| lines(60));
        // SAFETY: the descriptors are those of this module and of the test's harness.
        assert_eq!(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) }, 0);
        let after = account.run(|| lines(40));
        assert!(are_right(&before) && are_right(&after));
        drop((before, after));
        let on_disk = || heap::spilled().0;
        assert!(soon(|| on_disk() < ByteSize::mib(32)), "{} stay", on_disk());
    });
}

#[test]
fn a_pager_that_starts_before_the_last_one_has_ended_takes_over() {
    heap::watch_growth();
    heap::spill_into(Path::new(DISK), MOST).expect("a disk");
    leave(ByteSize::ZERO);
    let stops = [false, false].map(AtomicBool::new);
    let end = |nth: usize| {
        stops[nth].store(true, Ordering::Release);
        heap::pager_bell().ring();
    };
    thread::scope(|scope| {
        let first = scope.spawn(|| run_pager(&stops[0]));
        let has_begun = soon(spills);
        scope.spawn(|| run_pager(&stops[1]));
        let still = (0..20).all(|_| spills());
        end(0);
        let has_ended = soon(|| first.is_finished());
        let goes_on = soon(spills);
        (0..2).for_each(end);
        assert!(has_begun && still && has_ended && goes_on, "{has_ended}, {goes_on}");
    });
}

#[test]
fn a_folder_that_does_not_serve_is_refused() {
    let spill_into = |dir: &str| heap::spill_into(Path::new(dir), MOST);
    assert!(matches!(spill_into("/dev/shm"), Err(HostError::SpillInMemory { kind: "tmpfs", .. })));
    for dir in ["/nowhere", "/proc/self", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")] {
        assert!(matches!(spill_into(dir), Err(HostError::SpillFile { .. })), "{dir}");
    }
    let limit = libc::rlimit { rlim_cur: 64 << 20, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the limit of this process, which ends with this test.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    let error = spill_into(DISK).expect_err("64 MiB are too little");
    assert!(error.to_string().contains("room for 64.0 MiB "), "{error}");
}

#[test]
fn growth_within_work_rings_and_is_seen_at_once() {
    let (bell, clock) = (heap::watch_growth(), SystemClock::new());
    let rings = || clock.wait_until(&bell, clock.now());
    let account = account();
    let look = || heap::in_progress().map(|bytes| bytes.get() >> 20);
    leave(ByteSize::mib(32));
    rings();
    account.run(|| {
        let large = black_box(vec![1_u8; 3 * MIB]);
        assert_eq!((rings(), look()), (false, [0, 0]));
        let more = black_box(vec![1_u8; 6 * MIB]);
        assert_eq!((rings(), look()), (true, [1, 8]), "all that is there once it is allocated");
        leave(ByteSize::mib(32));
        drop(more);
        assert_eq!(look(), [1, 2]);
        let small = lines(10);
        assert!(rings(), "of small blocks");
        drop((large, small));
    });
    assert_eq!(look(), [0, 0]);
    heap::unwatch_growth();
    drop(black_box(vec![1_u8; 64 * MIB]));
    assert!(!rings());
}

/// What of memory no thread has counted: metadata of the heap and pages of its slabs. The kernel's
/// figure is wrong by some pages of each CPU.
const SLACK: u64 = 6 << 20;
/// The bytes of small blocks between two checkpoints.
const STEP: u64 = 1 << 20;
/// The largest block.
const BLOCK: u64 = 3 << 20;
const THREADS: u64 = 3;

/// Marsaglia's xorshift.
fn next(chance: &mut u64) -> u64 {
    *chance ^= *chance << 13;
    *chance ^= *chance >> 7;
    *chance ^= *chance << 17;
    *chance >> 16
}

/// Takes and frees blocks at random, within work and outside.
fn live_for(chance: &mut u64, work: &Arc<Account<()>>, blocks: &mut Vec<Vec<u8>>) {
    for _ in 0..next(chance) % 200 {
        let size = match next(chance) % 8 {
            0 => next(chance) % BLOCK,
            1..4 => next(chance) % (256 << 10),
            _ => next(chance) % 4096,
        };
        let size = usize::try_from(size).expect("small");
        let is_full = blocks.iter().map(Vec::len).sum::<usize>() > 48 * MIB;
        if is_full || next(chance) % 5 < 2 {
            let at = usize::try_from(next(chance)).expect("small") % blocks.len().max(1);
            drop((at < blocks.len()).then(|| blocks.swap_remove(at)));
        } else if next(chance) & 1 == 0 {
            blocks.push(vec![1; size]);
        } else {
            blocks.push(work.run(|| vec![1; size]));
        }
    }
}

#[test]
fn memory_has_grown_by_at_most_what_is_counted_and_what_threads_have_not_counted_yet() {
    let seed = SystemClock::new().since_epoch().subsec_nanos();
    println!("seed {seed}");
    heap::watch_growth();
    let turns = Barrier::new(1 + usize::try_from(THREADS).expect("small"));
    thread::scope(|scope| {
        for nth in 0..THREADS {
            let turns = &turns;
            scope.spawn(move || {
                let mut chance = u64::from(seed) << 8 | nth << 1 | 1;
                let (work, mut blocks) = (account(), Vec::with_capacity(100_000));
                for _ in 0..60 {
                    turns.wait();
                    live_for(&mut chance, &work, &mut blocks);
                    turns.wait();
                }
            });
        }
        let (mut grown_most, mut samples, mut wrong) = (0, Vec::new(), Vec::new());
        for turn in 0..60 {
            if turn % 4 == 0 {
                let _ = heap::purge_now();
            }
            samples.push((heap::counted_growth(), anonymous()));
            turns.wait();
            turns.wait();
            let (counted, anonymous) = (heap::counted_growth(), anonymous());
            for (counted_then, then) in &samples {
                let (grown, counted) = (anonymous.saturating_sub(*then), counted - counted_then);
                grown_most = grown_most.max(grown.get());
                let most = ByteSize::new(counted + THREADS * (STEP + BLOCK) + SLACK);
                if grown > most {
                    wrong.push((turn, grown, most));
                }
            }
        }
        assert!(wrong.is_empty(), "seed {seed}: {wrong:?}");
        assert!(grown_most > 2 * (THREADS * (STEP + BLOCK) + SLACK), "seed {seed}: {grown_most}");
    });
}

#[test]
fn many_threads_spill_at_once_until_the_file_is_full() {
    short_of_memory(ByteSize::mib(128), || {
        let begun = times();
        let work = || account().run(|| (lines(20), vec![3_u8; 16 * MIB]));
        let kept = thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(work));
            threads.map(|it| it.join().expect("no panic"))
        });
        assert_eq!(times(), begun + 4);
        assert!(heap::spilled().0 <= ByteSize::mib(128), "{}", heap::spilled().0);
        for (mut lines, block) in kept {
            assert!(are_right(&lines) && block.iter().all(|byte| *byte == 3));
            // Blocks of other threads' arenas, on disk and off it.
            lines.iter_mut().take(500).for_each(|line| line.resize(5000, 9));
            let is_grown = |line: &Vec<u8>| line[1024..].iter().all(|byte| *byte == 9);
            assert!(are_right(&lines) && lines.iter().take(500).all(is_grown));
        }
        let on_disk = || heap::spilled().0;
        assert!(soon(|| on_disk() < ByteSize::mib(32)), "{} stay", on_disk());
    });
}

#[test]
fn blocks_with_large_alignments_are_aligned_and_right() {
    short_of_memory(ByteSize::mib(512), || {
        account().run(|| {
            let begun = times();
            drop(black_box(vec![1_u8; 8 * MIB]));
            assert_eq!(times(), begun + 1);
            for align in [1 << 16, 1 << 21, 64 << 20, 1 << 30] {
                for size in [1, 5000, MIB, 20 * MIB] {
                    let layout = Layout::from_size_align(size, align).expect("a layout");
                    // SAFETY: the layout has a size.
                    let block = unsafe { std::alloc::alloc_zeroed(layout) };
                    assert!(!block.is_null() && block.addr().is_multiple_of(align), "{layout:?}");
                    // SAFETY: zeroed bytes of the block.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(block, size) };
                    assert!(bytes.iter().all(|byte| *byte == 0), "{layout:?}");
                    bytes.fill(7);
                    // SAFETY: the block has this layout, and is not used again.
                    unsafe { dealloc(block, layout) };
                }
            }
        });
    });
}

/// Also while the process starts others, which a fork does here because of the closure.
#[test]
fn processes_start_while_work_spills() {
    use std::os::unix::process::CommandExt as _;
    short_of_memory(MOST, || {
        let account = account();
        let allocate = || {
            drop(black_box(vec![1_u8; 9 * MIB]));
            Ok(())
        };
        let lines = account.run(|| {
            let mut kept = lines(20);
            for nth in 0..20 {
                let mut command = std::process::Command::new("/bin/true");
                if nth % 2 == 0 {
                    // SAFETY: it allocates, which jemalloc allows after a fork.
                    unsafe { command.pre_exec(allocate) };
                }
                assert!(command.status().is_ok_and(|status| status.success()));
                kept.extend(lines(1));
                kept.truncate(20 * 1024);
            }
            kept
        });
        assert!(are_right(&lines));
    });
}

#[test]
fn a_scope_within_work_that_spills_ends_in_a_child_too() {
    short_of_memory(MOST, || {
        let arena = HostArena::new("model").expect("an arena");
        let account = account();
        let child = account.run(|| {
            drop(black_box(vec![1_u8; 8 * MIB]));
            let in_scope = || {
                // SAFETY: the child allocates, which jemalloc allows after a fork, and ends.
                unsafe { libc::fork() }
            };
            let child = arena.scope_uncached(in_scope).expect("a scope");
            if child == 0 {
                let mut block = vec![1_u8; 3 * MIB];
                block.resize(30 * MIB, 2);
                drop(black_box(block));
                let [_, beyond] = heap::in_progress();
                // SAFETY: ends the child without the handlers of the parent.
                unsafe { libc::_exit(i32::from(beyond > ByteSize::mib(64))) };
            }
            child
        });
        let mut status = 0;
        // SAFETY: a child, and a place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    });
}

/// Runs this test again where these mounts are made in the folder `D`, unless `is_there`: then
/// returns `true`. Needs root; without it nothing is tested.
fn is_mounted(dir: &str, is_there: bool, mounts: &str) -> bool {
    if !is_there {
        std::fs::create_dir_all(dir).expect("a folder");
        let mut again = std::process::Command::new("unshare");
        let script = format!("{{ {mounts}; }} || exit 77; exec \"$0\" \"$@\"");
        again.args(["-m", "sh", "-c", &script]).arg(std::env::current_exe().expect("a path"));
        let status = again.args(std::env::args().skip(1)).env("D", dir).status();
        let no_mounts = |code| matches!(code, Some(1 | 77));
        if let Ok(status) = status
            && !no_mounts(status.code())
        {
            assert!(status.success(), "{status}");
        }
    }
    is_there
}

/// The bug: overlayfs tells its own type, and what lies in it may be memory.
#[test]
fn an_overlay_over_memory_is_refused() {
    const MOUNTS: &str = "mount -t tmpfs none $D && cd $D && mkdir l u w m &&
        mount -t overlay none -o lowerdir=l,upperdir=u,workdir=w m";
    let dir = format!("{DISK}/overlay");
    let overlay = format!("{dir}/m");
    if is_mounted(&dir, Path::new(&overlay).exists(), MOUNTS) {
        let error = heap::spill_into(Path::new(&overlay), MOST).expect_err("memory");
        assert!(error.to_string().contains(": overlayfs over tmpfs is memory; "), "{error}");
    }
}

/// On a disk in a file of a disk that gets full: only the kernel still writes then.
#[test]
fn a_write_by_the_kernel_that_fails_after_the_spill_ends_the_pager() {
    const MOUNTS: &str = "
        image() { truncate -s $1 $2 && mkfs.ext4 -q $2 && mount -o loop $2 $3; }
        mkdir -p $D/outer $D/inner && image 300m $D/img $D/outer && rm $D/img &&
        image 1g $D/outer/img $D/inner";
    let dir = format!("{DISK}/failing");
    let inner = format!("{dir}/inner");
    if !is_mounted(&dir, Path::new(&inner).join("lost+found").exists(), MOUNTS) {
        return;
    }
    heap::watch_growth();
    heap::spill_into(Path::new(&inner), MOST).expect("a disk");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let pager = scope.spawn(|| heap::run_pager(&stop, &SystemClock::new()));
        leave(ByteSize::ZERO);
        assert!(soon(spills), "nothing spills");
        let kept = account().run(|| lines(60));
        let mut fill = std::process::Command::new("fallocate");
        let full = fill.args(["-l", "9g", &format!("{dir}/outer/full")]).output();
        assert!(!full.expect("a program").status.success());
        // SAFETY: writes what is not written.
        unsafe { libc::sync() };
        let has_failed = soon(|| pager.is_finished());
        stop.store(true, Ordering::Release);
        heap::pager_bell().ring();
        assert!(has_failed, "{} are right", are_right(&kept));
        pager.join().expect("no panic").expect_err("a failed write");
    });
}

/// The bug: once the application had closed the file, the pager asked for errors of the file that
/// got its number, and the application did not learn of them.
#[test]
fn the_error_of_a_file_that_got_the_number_of_the_spilled_one_is_left_to_its_owner() {
    // Without a journal, only a write of data fails.
    const MOUNTS: &str = "
        mkdir -p $D/outer $D/inner && truncate -s 300m $D/img && mkfs.ext4 -q $D/img &&
        mount -o loop $D/img $D/outer && rm $D/img && truncate -s 1g $D/outer/img &&
        mkfs.ext4 -qO ^has_journal $D/outer/img && mount -o loop $D/outer/img $D/inner";
    let dir = format!("{DISK}/others");
    let inner = format!("{dir}/inner");
    if !is_mounted(&dir, Path::new(&inner).join("lost+found").exists(), MOUNTS) {
        return;
    }
    let own = File::create(format!("{inner}/own")).expect("a file");
    // SAFETY: an open file.
    assert_eq!(unsafe { libc::fallocate(own.as_raw_fd(), 0, 0, 64 << 20) }, 0);
    own.sync_all().expect("written");
    short_of_memory(MOST, || {
        let kept = account().run(|| lines(60));
        let numbers = std::fs::read_dir("/proc/self/fd").expect("own files").flatten();
        let is_spilled = |file: &PathBuf| {
            let name = std::fs::read_link(file).unwrap_or_default();
            name.starts_with(DISK) && name.to_string_lossy().ends_with(" (deleted)")
        };
        let number = numbers.map(|file| file.path()).find(is_spilled).expect("open");
        let number = number.file_name().and_then(|name| name.to_str()?.parse().ok());
        // SAFETY: the number of the spilled file gets another file, as this test is about.
        unsafe { libc::dup2(own.as_raw_fd(), number.expect("a number")) };
        let mut fill = std::process::Command::new("fallocate");
        let full = fill.args(["-l", "9g", &format!("{dir}/outer/full")]).output();
        assert!(!full.expect("a program").status.success());
        own.write_all_at(&vec![1; 48 * MIB], 0).expect("in memory");
        // SAFETY: writes what is not written.
        unsafe { libc::sync() };
        assert!((0..8).all(|_| spills()) && are_right(&kept));
    });
    own.sync_all().expect_err("the error is the owner's");
}

//! The process heap with `Heap` as global allocator: what is measured, set and given back.
//!
//! Figures allow for what the test harness itself allocates.
#![expect(unsafe_code, reason = "jemalloc and malloc are asked directly, past what is tested")]

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use lowtide_heap::ByteSize;
use lowtide_heap::clock::{Clock, SystemClock};
use lowtide_heap::decay::DecayTime;
use lowtide_heap::{self, HeapProbe, HeapProfile, HeapSettings, HostError, LibcHeap, Unsupported};
use test_fork::test;
use tikv_jemalloc_ctl::{raw, thread as jemalloc_thread};

const SLOP: ByteSize = ByteSize::mib(1);
const INTERPOSED: bool = cfg!(feature = "interpose");

/// Unused pages stay until they are purged: nothing happens by itself.
const STILL: HeapSettings = HeapSettings {
    dirty_decay: DecayTime::Never,
    muzzy_decay: DecayTime::AtOnce,
    background_threads: false,
    max_background_threads: None,
};

/// Runs a test with a heap that does nothing by itself, on a thread of its own.
fn alone(test: impl FnOnce() + Send) {
    let applied = lowtide_heap::apply(&STILL).expect("jemalloc takes settings");
    assert_eq!(applied, []);
    let ended = thread::scope(|scope| scope.spawn(test).join());
    if let Err(panic) = ended {
        resume_unwind(panic);
    }
}

fn burst(blocks: usize, bytes: usize) -> Vec<Vec<u8>> {
    (0..blocks).map(|_| vec![7; bytes]).collect()
}

fn difference(a: ByteSize, b: ByteSize) -> ByteSize {
    a.saturating_sub(b).saturating_add(b.saturating_sub(a))
}

pub(crate) fn raw_decay(control: &str, arena: u32) -> Option<isize> {
    let name = format!("arena.{arena}.{control}\0");
    // SAFETY: both decay times have type `ssize_t`.
    unsafe { raw::read(name.as_bytes()) }.ok()
}

#[test]
fn jemalloc_is_seen_to_be_the_global_allocator() {
    assert!(lowtide_heap::is_global());
    assert_eq!(lowtide_heap::serves_c(), INTERPOSED);
}

#[test]
fn live_rises_by_what_is_allocated_and_falls_when_it_is_dropped() {
    alone(|| {
        let probe = HeapProbe::new().unwrap();
        for (blocks, bytes) in [(1, 24 << 20), (512, 16 << 10), (100_000, 96)] {
            let before = probe.snapshot().unwrap();
            let held = burst(blocks, bytes);
            let during = probe.snapshot().unwrap();
            let list = ByteSize::of(held.capacity() * size_of::<Vec<u8>>());
            let asked = ByteSize::of(blocks * bytes).saturating_add(list);
            let rise = during.live.saturating_sub(before.live);
            let rounded = asked.scaled(1.25).saturating_add(SLOP);
            assert!(rise.saturating_add(SLOP) >= asked && rise <= rounded, "{rise} for {asked}");
            drop(held);
            let after = probe.snapshot().unwrap();
            assert!(difference(after.live, before.live) < SLOP, "{bytes}: {before:?}\n{after:?}");
        }
    });
}

#[test]
fn what_lies_in_a_thread_cache_is_not_live() {
    alone(|| {
        let probe = HeapProbe::new().unwrap();
        let _ = lowtide_heap::flush_thread_cache().unwrap();
        let flushed = probe.snapshot().unwrap();
        drop(burst(8, 20 << 10));
        let cached = probe.snapshot().unwrap();
        let least = ByteSize::of(4 * (20 << 10));
        assert!(cached.thread_caches.saturating_sub(flushed.thread_caches) >= least, "{cached:?}");
        assert!(
            difference(cached.live, flushed.live) < ByteSize::kib(64),
            "{flushed:?}\n{cached:?}"
        );
        let fell = |by: &dyn Fn()| {
            drop(burst(8, 20 << 10));
            let cached = probe.snapshot().unwrap();
            by();
            let flushed = probe.snapshot().unwrap();
            cached.thread_caches.saturating_sub(flushed.thread_caches)
        };
        assert!(fell(&|| assert!(lowtide_heap::flush_thread_cache().unwrap())) >= least);
        assert!(fell(&|| assert!(lowtide_heap::purge(&SystemClock::new()).is_ok())) >= least);
    });
}

#[test]
fn quantities_keep_their_identities() {
    alone(|| {
        let probe = HeapProbe::new().unwrap();
        let mut held = Vec::new();
        for round in 0..20_usize {
            held.extend(burst(100, 1 << (round % 20)));
            held.truncate(held.len() - held.len() / 3);
            let found = probe.snapshot().unwrap();
            assert!(found.live <= found.active, "{found:?}");
            assert!(found.active <= found.mapped, "{found:?}");
            assert!(found.purgeable() <= found.resident, "{found:?}");
            assert!(found.dirty.saturating_add(found.active) <= found.resident, "{found:?}");
            assert!(found.metadata < found.resident, "{found:?}");
            assert_eq!(found.retained(), found.resident.saturating_sub(found.live));
            let active = probe.active().unwrap();
            assert!(difference(active, found.active) <= SLOP, "{active}\n{found:?}");
        }
    });
}

#[test]
fn a_purge_gives_back_what_a_burst_left_and_a_second_one_finds_nothing() {
    alone(|| {
        let probe = HeapProbe::new().unwrap();
        let clock = SystemClock::new();
        let size = ByteSize::mib(64);
        lowtide_heap::purge(&clock).unwrap();
        let base = probe.snapshot().unwrap();
        let held = burst(1024, 64 << 10);
        let during = probe.snapshot().unwrap();
        assert!(during.resident.saturating_sub(base.resident) >= size, "{during:?}");
        drop(held);
        let before = probe.snapshot().unwrap();
        assert!(before.retained() >= size.scaled(0.95), "{before:?}");
        assert!(before.purgeable() >= size.scaled(0.95), "{before:?}");

        let first = lowtide_heap::purge(&clock).unwrap();
        let after = probe.snapshot().unwrap();
        assert!(first.jemalloc.unwrap() >= size.scaled(0.95), "{first:?}");
        assert_eq!(
            first.released(),
            first.jemalloc.unwrap().saturating_add(first.libc.unwrap_or_default())
        );
        assert!(after.retained() <= base.retained().saturating_add(ByteSize::mib(4)), "{after:?}");
        assert!(after.purgeable() < SLOP, "{after:?}");

        let second = lowtide_heap::purge(&clock).unwrap();
        assert!(second.jemalloc.unwrap() < SLOP, "{second:?}");
    });
}

#[test]
fn muzzy_pages_are_told_from_dirty_ones() {
    alone(|| {
        let probe = HeapProbe::new().unwrap();
        let size = ByteSize::mib(32);
        lowtide_heap::purge_now().unwrap();
        let dirty_decay = DecayTime::from_millis(1);
        let lazily = HeapSettings { dirty_decay, muzzy_decay: DecayTime::Never, ..STILL };
        lowtide_heap::apply(&lazily).unwrap();
        drop(burst(512, 64 << 10));
        let clock = SystemClock::new();
        let deadline = clock.now() + Duration::from_secs(30);
        while probe.snapshot().unwrap().dirty > SLOP {
            assert!(clock.now() < deadline, "{:?}", probe.snapshot());
            lowtide_heap::decay_tick().unwrap();
        }
        lowtide_heap::apply(&HeapSettings { muzzy_decay: DecayTime::Never, ..STILL }).unwrap();
        let muzzy = probe.snapshot().unwrap().muzzy;
        drop(burst(8, 1 << 20));
        let report = lowtide_heap::purge_now().unwrap();
        assert_eq!(
            report.jemalloc.unwrap(),
            report.dirty().saturating_add(report.muzzy),
            "{report:?}"
        );
        if muzzy.is_zero() {
            println!("skipped: this kernel gives nothing back lazily");
            return;
        }
        assert!(muzzy >= size.scaled(0.9), "{muzzy}");
        // Those that the second burst took again are dirty.
        assert!(report.muzzy >= muzzy.saturating_sub(ByteSize::mib(9)), "{report:?}");
        assert!(report.muzzy <= muzzy, "{report:?}");
        let nothing = lowtide_heap::purge_now().unwrap();
        assert!(nothing.muzzy < SLOP && nothing.dirty() < SLOP, "{nothing:?}");
    });
}

#[test]
fn a_snapshot_and_a_glance_allocate_nothing() {
    alone(|| {
        let probe = HeapProbe::new().unwrap();
        let count = jemalloc_thread::allocatedp::read().unwrap();
        let before = count.get();
        for _ in 0..10 {
            probe.snapshot().unwrap();
            probe.active().unwrap();
            lowtide_heap::decay_tick().unwrap();
            lowtide_heap::flush_thread_cache().unwrap();
        }
        assert_eq!(count.get(), before);
        let clock = SystemClock::new();
        assert!(lowtide_heap::is_global(), "asked once with an allocation, before it counts");
        lowtide_heap::purge(&clock).unwrap();
        let before = count.get();
        assert_eq!(lowtide_heap::check_release(), None);
        let (before, trial) = (count.get(), count.get() - before);
        lowtide_heap::purge(&clock).unwrap();
        assert_eq!(count.get() - before, trial, "a purge allocated more than one block");
        drop(vec![0_u8; 100]);
        assert!(count.get() > before, "the count does not count");
    });
}

#[test]
fn decay_times_reach_every_arena_that_exists_and_every_later_one() {
    alone(|| {
        let (done, wait) = mpsc::channel::<()>();
        let (ready, all_ready) = mpsc::channel();
        let wait = Arc::new(Mutex::new(wait));
        let threads: Vec<_> = (0..16)
            .map(|_| {
                let (ready, wait) = (ready.clone(), Arc::clone(&wait));
                thread::spawn(move || {
                    let held = vec![1_u8; 100_000];
                    ready.send(()).unwrap();
                    let _ = wait.lock().unwrap().recv();
                    held.len()
                })
            })
            .collect();
        assert_eq!(all_ready.iter().take(threads.len()).count(), threads.len());
        for dirty_ms in [777_u64, 1_234] {
            let settings = HeapSettings {
                dirty_decay: DecayTime::from_millis(dirty_ms),
                muzzy_decay: DecayTime::from_millis(55),
                ..STILL
            };
            let applied = lowtide_heap::apply(&settings).unwrap();
            assert_eq!(applied, []);
            assert_eq!(lowtide_heap::effective().unwrap().get("muzzy_decay_ms"), Some("55"));
            let count = HeapProbe::new().unwrap().snapshot().unwrap().arenas;
            let expected = isize::try_from(dirty_ms).unwrap();
            let found: Vec<_> =
                (0..count).filter_map(|arena| raw_decay("dirty_decay_ms", arena)).collect();
            assert!(found.len() >= 2 && found.iter().all(|&ms| ms == expected), "{found:?}");
            // SAFETY: creating an arena returns its index, an `unsigned`.
            let later: u32 = unsafe { raw::read(b"arenas.create\0") }.unwrap();
            assert_eq!(raw_decay("dirty_decay_ms", later), Some(expected));
            assert_eq!(raw_decay("muzzy_decay_ms", later), Some(55));
        }
        drop(done);
        for thread in threads {
            assert_eq!(thread.join().unwrap(), 100_000);
        }
    });
}

#[test]
fn odd_values_become_differences() {
    alone(|| {
        let get = |setting| lowtide_heap::effective().unwrap().get(setting).map(str::to_owned);
        let threads = get("max_background_threads");
        let odd = HeapSettings {
            dirty_decay: DecayTime::Within(Duration::from_nanos(1)),
            muzzy_decay: DecayTime::Within(Duration::MAX),
            background_threads: false,
            max_background_threads: Some(u32::MAX),
        };
        let applied = lowtide_heap::apply(&odd).unwrap();
        let settings: Vec<_> = applied.iter().map(|d| &*d.setting).collect();
        assert_eq!(settings, ["dirty_decay_ms", "muzzy_decay_ms", "max_background_threads"]);
        assert_eq!(get("dirty_decay_ms").as_deref(), Some("1"));
        assert!(applied.iter().all(|d| d.requested != d.effective));
        assert_eq!(get("max_background_threads"), threads);

        let none = HeapSettings { max_background_threads: Some(0), ..STILL };
        let applied = lowtide_heap::apply(&none).unwrap();
        assert_eq!(applied.len(), 1, "{:?}", applied);
        assert_eq!(applied[0].requested, "0");

        let at_once = HeapSettings { dirty_decay: DecayTime::AtOnce, ..STILL };
        for (settings, decay) in [(at_once, "0"), (STILL, "-1")] {
            assert_eq!(lowtide_heap::apply(&settings).unwrap(), []);
            assert_eq!(get("dirty_decay_ms").as_deref(), Some(decay));
        }
    });
}

#[test]
fn background_threads_run_when_asked_and_end_when_asked() {
    alone(|| {
        let probe = HeapProbe::new().unwrap();
        assert_eq!(probe.snapshot().unwrap().background_threads, 0);
        let applied = lowtide_heap::apply(&HeapProfile::LowMemory.settings()).unwrap();
        if lowtide_heap::background_threads_supported() {
            assert_eq!(applied, []);
            assert_eq!(probe.snapshot().unwrap().background_threads, 1);
        } else {
            let settings: Vec<_> = applied.iter().map(|d| &*d.setting).collect();
            assert_eq!(settings, ["max_background_threads", "background_thread"]);
        }
        assert_eq!(lowtide_heap::apply(&STILL).unwrap(), []);
        assert_eq!(probe.snapshot().unwrap().background_threads, 0);
    });
}

#[test]
fn decay_ticks_alone_let_idle_pages_go() {
    alone(|| {
        let probe = HeapProbe::new().unwrap();
        drop(burst(512, 64 << 10));
        assert!(probe.snapshot().unwrap().dirty >= ByteSize::mib(30));
        let soon = HeapSettings {
            dirty_decay: DecayTime::from_millis(1),
            muzzy_decay: DecayTime::AtOnce,
            ..STILL
        };
        lowtide_heap::apply(&soon).unwrap();
        let clock = SystemClock::new();
        let deadline = clock.now() + Duration::from_secs(30);
        while probe.snapshot().unwrap().purgeable() > SLOP {
            assert!(clock.now() < deadline, "{:?}", probe.snapshot());
            lowtide_heap::decay_tick().unwrap();
        }
    });
}

#[test]
fn memory_of_c_code_goes_back_or_the_reason_is_told() {
    alone(|| {
        let clock = SystemClock::new();
        lowtide_heap::purge(&clock).unwrap();
        let held = lowtide_heap::libc_heap();
        let mut blocks = Vec::with_capacity(512);
        for _ in 0..512 {
            // SAFETY: any size may be asked for; what comes back is checked, and written within.
            let block = unsafe { libc::malloc(64 << 10) };
            assert!(!block.is_null());
            // SAFETY: the block has 64 KiB.
            unsafe { libc::memset(block, 7, 64 << 10) };
            blocks.push(block);
        }
        let loaded = lowtide_heap::libc_heap();
        // The last block stays, so that glibc cannot simply give back the end of its heap.
        let last = blocks.pop().unwrap();
        for block in blocks {
            // SAFETY: from `malloc`, and freed once.
            unsafe { libc::free(block) };
        }
        let report = lowtide_heap::purge(&clock).unwrap();
        let (rise, heap) = match (held, loaded) {
            (Ok(before), Ok(after)) => (after.live.saturating_sub(before.live), after),
            _ => (ByteSize::ZERO, LibcHeap::default()),
        };
        let most = ByteSize::mib(28);
        match report.libc {
            Err(reason) => assert_ne!(reason, Unsupported::NoJemalloc),
            Ok(_) if INTERPOSED => assert!(report.jemalloc.unwrap() >= most, "{report:?}"),
            Ok(bytes) => {
                assert!(bytes >= most, "32 MiB were free: {heap:?} {report:?}");
                assert!(rise == ByteSize::ZERO || rise >= most, "{heap:?}");
            }
        }
        // SAFETY: from `malloc`, and freed once.
        unsafe { libc::free(last) };
    });
}

#[test]
fn a_probe_made_before_a_fork_says_so_in_the_child() {
    alone(|| {
        let probe = HeapProbe::new().unwrap();
        // SAFETY: the child calls only an atomic load and `_exit`, both async-signal-safe.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(probe.snapshot() != Err(HostError::Forked));
            // SAFETY: ends the child at once, without running the parent's exit handlers.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0, "fork failed");
        let mut status = 0;
        // SAFETY: `status` is a valid place for an int, and `child` is our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
        assert!(probe.snapshot().is_ok());
    });
}

/// The bug: a block that was never touched was reported as released.
#[test]
#[cfg(target_os = "linux")]
fn a_release_is_what_the_kernel_reports() {
    alone(|| {
        let untouched = Vec::<u8>::with_capacity(256 << 20);
        assert!(untouched.capacity() > 0);
        drop(untouched);
        let report = lowtide_heap::purge_now().unwrap();
        assert!(report.jemalloc.unwrap() < ByteSize::mib(16), "{report:?}");
        assert_eq!(report.failure, None);
        drop(burst(4_096, 16 << 10));
        let report = lowtide_heap::purge_now().unwrap();
        assert!(report.jemalloc.unwrap() > ByteSize::mib(56), "{report:?}");
        assert_eq!(report.failure, None);
    });
}

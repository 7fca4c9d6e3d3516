//! Callbacks on shortage: when they are called, what they may do, and how they go.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use lowtide_cuda_sim::{Call, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::{
    ArenaConfig, Bound, Buffer, CompactOptions, DeviceArena, DeviceError, Region, SleepOptions,
};

use super::{DYNAMIC, GRANULE, config, device, mib, on_device, on_host};
use crate::wait_until;

type Cache = Arc<Mutex<Vec<Buffer<u8>>>>;

fn cache(arena: &DeviceArena, sizes: &[usize]) -> Cache {
    let buffers = sizes.iter().map(|&size| mib(arena, size).expect("room"));
    Arc::new(Mutex::new(buffers.collect()))
}

/// Frees one buffer; whether there was one.
fn evict(cache: &Cache) -> bool {
    cache.try_lock().is_ok_and(|mut cache| cache.pop().is_some())
}

#[test]
fn callbacks_come_after_idle_memory_and_before_the_error_in_the_order_of_registration() {
    let arena = on_host(ByteSize::mib(16));
    let held = cache(&arena, &[6, 6]);
    let order = Arc::new(Mutex::new(Vec::new()));
    let register = |name: &'static str, gives: bool| {
        let (order, held) = (Arc::clone(&order), Arc::clone(&held));
        arena.on_shortage(move |shortage| {
            assert_eq!((shortage.arena, shortage.region), ("ladder", DYNAMIC));
            order.lock().expect("no panic").push((
                name,
                shortage.requested,
                (shortage.bound, shortage.over),
            ));
            gives && evict(&held)
        })
    };
    let first = register("first", false);
    let second = register("second", true);
    drop(mib(&arena, 4).expect("room")); // idle now
    let fits = mib(&arena, 3).expect("idle memory does");
    assert!(order.lock().expect("no panic").is_empty(), "nobody is asked before");
    drop(fits);
    let buffer = mib(&arena, 9).expect("the second gave 6 MiB");
    let (requested, over) = (ByteSize::mib(9), ByteSize::mib(6));
    let cause = (Bound::Limit, over);
    let asked = std::mem::take(&mut *order.lock().expect("no panic"));
    assert_eq!(asked, [("first", requested, cause), ("second", requested, cause)]);
    assert_eq!(arena.snapshot().shortage_callbacks_total, 2);
    drop((first, second));
    mib(&arena, 9).expect_err("nobody is asked any more");
    assert_eq!(arena.snapshot().shortage_callbacks_total, 2);
    let failures = arena.snapshot().alloc_failures().map(|(_, count)| count);
    assert_eq!(failures, [1, 0, 0, 0], "what a callback averted is no failure");
    drop(buffer);
    arena.validate();
}

#[test]
fn what_a_callback_frees_and_streams_still_use_is_waited_for() {
    let sim = device(|_| {});
    let arena = on_device(&sim, config(ByteSize::mib(8)));
    let held = cache(&arena, &[8]);
    let _evicts = arena.on_shortage(move |_| evict(&held));
    let buffer = mib(&arena, 8).expect("what was freed is pending, then idle");
    assert!(sim.calls(Call::Synchronize) > 0);
    drop(buffer);
    arena.validate();
    sim.assert_no_faults();
}

#[test]
fn a_callback_is_told_that_the_device_or_the_addresses_are_what_is_missing() {
    let sim = device(|options| options.capacity = ByteSize::mib(8));
    let arena = on_device(&sim, config(ByteSize::MAX));
    let short = ArenaConfig { reserve: ByteSize::mib(16), ..config(ByteSize::MAX) };
    let short = on_device(&device(|_| {}), short);
    for (arena, bound) in [(&arena, Bound::Driver), (&short, Bound::Addresses)] {
        let kept = mib(arena, 6).expect("room");
        let told = Arc::new(Mutex::new(None));
        let tell = Arc::clone(&told);
        let _callback = arena.on_shortage(move |shortage| {
            *tell.lock().expect("no panic") = Some(shortage.bound);
            false
        });
        let refused = mib(arena, 12).expect_err("6 of it are taken");
        assert!(refused.is_out_of_memory(), "{refused}");
        assert_eq!(*told.lock().expect("no panic"), Some(bound));
        drop(kept);
        arena.validate();
    }
}

#[test]
fn a_panic_is_counted_and_stops_neither_the_others_nor_the_allocation() {
    let arena = on_host(ByteSize::mib(8));
    let held = cache(&arena, &[6]);
    let _panics = arena.on_shortage(|_| panic!("a trial"));
    let _evicts = arena.on_shortage(move |_| evict(&held));
    let buffer = mib(&arena, 8).expect("the other gave way");
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.shortage_callbacks_total, snapshot.shortage_panics_total), (2, 1));
    drop(buffer);
    arena.validate();
}

/// A value in a callback that panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("a trial");
    }
}

#[test]
fn nothing_unwinds_out_of_the_end_of_a_callback() {
    let arena = on_host(ByteSize::mib(8));
    let bomb = Bomb;
    drop(arena.on_shortage(move |_| std::ptr::eq(&raw const bomb, std::ptr::null())));
    arena.validate();
}

#[test]
fn a_callback_allocates_frees_purges_and_compacts_and_none_is_called_by_that() {
    let arena = on_host(ByteSize::mib(16));
    let held = cache(&arena, &[6, 6]);
    let calls = Arc::new(AtomicUsize::new(0));
    let _busy = arena.on_shortage({
        let (arena, calls, held) = (arena.clone(), Arc::clone(&calls), Arc::clone(&held));
        move |_| {
            calls.fetch_add(1, SeqCst);
            let refused = mib(&arena, 14).expect_err("no recursion, and no room");
            assert!(matches!(refused, DeviceError::OutOfMemory { .. }), "{refused}");
            drop(mib(&arena, 1).expect("there is room for this"));
            let gave = evict(&held);
            arena.purge().expect("no error");
            arena.compact(CompactOptions::new(DYNAMIC), |_| {}).expect("no error");
            drop(arena.on_shortage(|_| true)); // registered in a run: not called in it
            gave
        }
    });
    let buffer = mib(&arena, 9).expect("room was made");
    assert_eq!(calls.load(SeqCst), 1);
    drop((buffer, held));
    arena.validate();
    // The callback has a handle of the arena: with the guard both go.
}

#[test]
fn a_resize_asks_as_well_and_so_does_a_request_for_what_lies_by_address() {
    let arena = on_host(ByteSize::mib(8));
    let held = cache(&arena, &[2, 2]);
    let _evicts = arena.on_shortage({
        let held = Arc::clone(&held);
        move |_| evict(&held)
    });
    let mut buffer: Buffer<u8> = arena.alloc(4 << 20, Region::Stable).expect("room");
    buffer.resize(6 << 20).expect("one gave way");
    let raw = arena.alloc_raw(GRANULE, GRANULE, Region::Stable).expect("the other did");
    assert!(held.lock().expect("no panic").is_empty());
    arena.free(raw.at).expect("live");
    drop(buffer);
    arena.validate();
}

#[test]
fn threads_that_are_short_at_once_wait_for_the_run_under_way_and_ask_only_if_it_was_not_enough() {
    let arena = on_host(ByteSize::mib(20));
    let held = cache(&arena, &[18]);
    let (inside, go) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let runs = Arc::new(AtomicUsize::new(0));
    let _evicts = arena.on_shortage({
        let (inside, go, runs) = (Arc::clone(&inside), Arc::clone(&go), Arc::clone(&runs));
        move |_| {
            let run = runs.fetch_add(1, SeqCst);
            inside.store(true, SeqCst);
            wait_until(|| go.load(SeqCst));
            if run > 0 {
                return false; // nothing is left to give
            }
            let everything = std::mem::take(&mut *held.lock().expect("no panic"));
            !everything.is_empty()
        }
    });
    let (granted, kept) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        let ask = || {
            if let Ok(buffer) = mib(&arena, 4) {
                granted.fetch_add(1, SeqCst);
                kept.lock().expect("no panic").push(buffer);
            }
        };
        scope.spawn(ask);
        wait_until(|| inside.load(SeqCst));
        for _ in 0..3 {
            scope.spawn(ask);
        }
        // A thread that frees, or that finds room, is not held up.
        drop(mib(&arena, 1).expect("room"));
        go.store(true, SeqCst);
    });
    assert_eq!((granted.load(SeqCst), runs.load(SeqCst)), (4, 1), "one run was enough for four");
    assert!(mib(&arena, 8).is_err());
    assert_eq!(runs.load(SeqCst), 2);
    arena.validate();
}

#[test]
fn after_a_guard_is_gone_no_call_begins_and_one_under_way_ends() {
    let arena = on_host(ByteSize::mib(4));
    let _full = mib(&arena, 4).expect("room");
    let (inside, go) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let ended = Arc::new(AtomicUsize::new(0));
    let slow = arena.on_shortage({
        let (inside, go, ended) = (Arc::clone(&inside), Arc::clone(&go), Arc::clone(&ended));
        move |_| {
            inside.store(true, SeqCst);
            wait_until(|| go.load(SeqCst));
            ended.fetch_add(1, SeqCst);
            false
        }
    });
    let after = Arc::new(AtomicUsize::new(0));
    let next = arena.on_shortage({
        let after = Arc::clone(&after);
        move |_| after.fetch_add(1, SeqCst) > 0
    });
    thread::scope(|scope| {
        scope.spawn(|| mib(&arena, 1).expect_err("full"));
        wait_until(|| inside.load(SeqCst));
        drop(slow); // waits for nothing
        drop(next); // its turn has not come
        assert_eq!(ended.load(SeqCst), 0);
        go.store(true, SeqCst);
    });
    assert_eq!((ended.load(SeqCst), after.load(SeqCst)), (1, 0));
    assert_eq!(arena.snapshot().shortage_callbacks_total, 1);
}

#[test]
fn guards_that_come_and_go_while_threads_are_short_are_never_called_once_gone() {
    let arena = on_host(ByteSize::mib(4));
    let _full = mib(&arena, 4).expect("room");
    let done = AtomicBool::new(false);
    let calls = Arc::new(AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(SeqCst) {
                    mib(&arena, 1).expect_err("full");
                }
            });
        }
        let mut turn = 0;
        while turn < 200 || calls.load(SeqCst) == 0 {
            let (begun, gone) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
            let guard = arena.on_shortage({
                let (begun, gone, calls) = (Arc::clone(&begun), Arc::clone(&gone), calls.clone());
                move |_| {
                    // Under way when the guard went, or before it did.
                    let late = gone.load(SeqCst);
                    begun.fetch_add(usize::from(!late), SeqCst);
                    calls.fetch_add(1, SeqCst);
                    false
                }
            });
            if turn % 3 == 0 {
                wait_until(|| begun.load(SeqCst) > 0);
            }
            drop(guard);
            gone.store(true, SeqCst);
            turn += 1;
        }
        done.store(true, SeqCst);
    });
    let called = arena.snapshot().shortage_callbacks_total;
    mib(&arena, 1).expect_err("full");
    assert_eq!(arena.snapshot().shortage_callbacks_total, called, "none is registered");
    arena.validate();
}

#[test]
fn callbacks_of_two_arenas_that_allocate_in_each_other_do_not_wait_in_a_circle() {
    let (one, two) = (on_host(ByteSize::mib(4)), on_host(ByteSize::mib(4)));
    let (_a, _b) = (mib(&one, 4).expect("room"), mib(&two, 4).expect("room"));
    let inside = Arc::new(AtomicUsize::new(0));
    let cross = |of: &DeviceArena, other: &DeviceArena| {
        let (other, inside) = (other.clone(), Arc::clone(&inside));
        of.on_shortage(move |_| {
            inside.fetch_add(1, SeqCst);
            // Both are within their own when each turns to the other's.
            wait_until(|| inside.load(SeqCst) >= 2);
            mib(&other, 1).is_ok()
        })
    };
    let _guards = (cross(&one, &two), cross(&two, &one));
    thread::scope(|scope| {
        scope.spawn(|| mib(&one, 1).expect_err("full"));
        scope.spawn(|| mib(&two, 1).expect_err("full"));
    });
    one.validate();
    two.validate();
}

#[test]
fn a_driver_that_loses_its_context_asks_nobody() {
    let sim = device(|_| {});
    let arena = on_device(&sim, config(ByteSize::mib(8)));
    let _callback = arena.on_shortage(|_| true);
    sim.poison(SimError::LaunchFailed);
    let refused = mib(&arena, 1).expect_err("lost");
    assert!(matches!(refused, DeviceError::Driver(_)), "{refused}");
    assert_eq!(arena.snapshot().shortage_callbacks_total, 0);
}

/// A run is of those that were registered when it began.
#[test]
fn a_callback_that_is_registered_in_a_run_is_asked_in_the_next() {
    let arena = on_host(ByteSize::mib(4));
    let held = mib(&arena, 4).expect("room");
    let (calls, late) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(None)));
    let first = arena.on_shortage({
        let (arena, calls, late) = (arena.clone(), Arc::clone(&calls), Arc::clone(&late));
        move |_| {
            let calls = Arc::clone(&calls);
            late.lock().expect("whole").get_or_insert_with(|| {
                arena.on_shortage(move |_| calls.fetch_add(1, SeqCst) > usize::MAX / 2)
            });
            false
        }
    });
    for expected in [0, 1] {
        assert!(mib(&arena, 2).is_err());
        assert_eq!(calls.load(SeqCst), expected);
    }
    drop((first, late.lock().expect("whole").take(), held));
}

/// Nobody knows how far it came: what it gave may do.
#[test]
fn what_a_callback_gave_before_it_panicked_is_used() {
    let arena = on_host(ByteSize::mib(4));
    let held = Mutex::new(Some(mib(&arena, 4).expect("room")));
    let callback = arena.on_shortage(move |_| {
        drop(held.lock().unwrap_or_else(PoisonError::into_inner).take());
        panic!("planted")
    });
    mib(&arena, 2).expect("it gave way");
    assert_eq!(arena.snapshot().shortage_panics_total, 1);
    drop(callback);
}

/// A thread that has asked callbacks may wait for another's wake afterwards, as any other.
#[test]
fn a_thread_whose_run_has_ended_is_within_no_callback() {
    let sim = device(|_| {});
    let arena = on_device(&sim, config(ByteSize::mib(8)));
    let kept = mib(&arena, 4).expect("room");
    let callback = arena.on_shortage(|_| false);
    assert!(mib(&arena, 8).is_err());
    arena.sleep(SleepOptions::default()).expect("asleep");
    let (tell, told) = mpsc::channel();
    sim.before(Call::Create, 0, move || {
        tell.send(()).expect("heard");
        // Who wants to enter waits by now, or comes when it is awake.
        (0..1000).for_each(|_| thread::yield_now());
    });
    let waking = {
        let arena = arena.clone();
        thread::spawn(move || arena.wake().map(drop))
    };
    told.recv().expect("it wakes");
    drop(arena.enter().expect("when it is awake"));
    waking.join().expect("no panic").expect("awake");
    drop((callback, kept));
}

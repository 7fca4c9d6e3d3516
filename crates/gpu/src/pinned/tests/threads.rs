//! Tests with held driver calls: the operations that are possible meanwhile, and those that wait.

use std::thread;

use super::*;

/// Releases the held driver calls if a test ends early, so that it fails and does not hang.
struct LetGo<'a>(&'a FaultInjectingDriver);

impl Drop for LetGo<'_> {
    fn drop(&mut self) {
        self.0.let_go();
    }
}

#[test]
fn no_call_is_made_under_the_lock_and_who_needs_no_memory_goes_on() {
    let (pool, driver) = open(ByteSize::MAX);
    let held = bytes(&pool, GRANULE).expect("room");
    let idle = mib(&pool, 4);
    drop(idle);
    driver.hold();
    thread::scope(|scope| {
        let _let_go = LetGo(&driver);
        let obtaining = scope.spawn(|| mib(&pool, 16));
        driver.wait_until_held(1);
        let giving = scope.spawn(|| pool.maintain());
        driver.wait_until_held(2);
        // Both calls are in progress; the lock is free, and arriving segments are counted.
        let glance = pool.glance();
        assert_eq!(glance.committed, ByteSize::mib(1 + 4 + 16), "the arriving segment counts");
        assert_eq!(glance.idle, ByteSize::mib(4), "it is still there");
        drop(bytes(&pool, GRANULE).expect("beside the one held"));
        let error = pool.close().expect_err("a block is live");
        assert!(matches!(error, DeviceError::LiveBlocks { count: 1, .. }), "{error}");
        driver.let_go();
        assert_eq!(giving.join().expect("ends"), Ok(ByteSize::mib(4)));
        drop(obtaining.join().expect("ends"));
    });
    drop(held);
    check(&pool, &driver);
}

#[test]
fn threads_that_start_at_once_wait_for_as_many_segments_as_they_need_and_share_them() {
    let (pool, driver) = open(ByteSize::MAX);
    let quarter = || bytes(&pool, ByteSize::kib(250)).expect("room");
    driver.hold();
    thread::scope(|scope| {
        let _let_go = LetGo(&driver);
        let first = scope.spawn(quarter);
        driver.wait_until_held(1);
        let others: Vec<_> = (0..5).map(|_| scope.spawn(quarter)).collect();
        driver.let_go();
        let all = others.into_iter().chain([first]).map(|thread| thread.join().expect("ends"));
        assert_eq!((all.collect::<Vec<_>>().len(), driver.calls()), (6, 2));
    });
    check(&pool, &driver);
}

#[test]
fn an_allocation_waits_for_what_another_thread_gives_back() {
    for _ in 0..20 {
        let (pool, driver) = open(ByteSize::mib(8));
        driver.set_host_limit(ByteSize::mib(6));
        drop(mib(&pool, 4));
        driver.hold();
        thread::scope(|scope| {
            let _let_go = LetGo(&driver);
            let giving = scope.spawn(|| pool.purge());
            driver.wait_until_held(1);
            // The limit allows it, but the host has no room until the purge has ended.
            let obtaining = scope.spawn(|| mib(&pool, 3));
            driver.wait_until_held(2);
            driver.let_go();
            assert_eq!(giving.join().expect("ends"), Ok(ByteSize::mib(4)));
            drop(obtaining.join().expect("ends"));
        });
        check(&pool, &driver);
    }
}

//! Granules under loom: a granule is committed or leaves while other threads need it.
//!
//! Invariant: each driver call of a granule is made by one thread, and threads that wait for the
//! call continue.

use super::*;

#[test]
fn one_granule_of_limit_serves_two_threads_one_at_a_time() {
    loom::model(|| {
        let (arena, driver) = open(1);
        let granule = usize::try_from(GRANULE).expect("small");
        let act = move |arena: &DeviceArena| {
            let _ = pass(arena, granule); // there may be room or not
        };
        both(arena, &driver, act, act);
    });
}

#[test]
fn a_granule_on_its_way_out_is_waited_for_and_committed_again() {
    loom::model(|| {
        let (arena, driver) = open(2);
        assert!(pass(&arena, 700));
        let purge = |arena: &DeviceArena| {
            arena.purge().expect("gives back");
        };
        both(arena, &driver, purge, |arena| assert!(pass(arena, 900)));
    });
}

#[test]
fn two_blocks_of_one_granule_arrive_by_one_commit() {
    loom::model(|| {
        let (arena, driver) = open(1);
        both(arena, &driver, |arena| assert!(pass(arena, 256)), |arena| assert!(pass(arena, 256)));
    });
}

#[test]
fn all_who_wait_for_a_granule_on_its_way_out_get_it() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let (arena, driver) = open(1);
        assert!(pass(&arena, 256));
        let others = [arena.clone(), arena.clone()].map(|arena| {
            loom::thread::spawn(move || {
                let _ = pass(&arena, 256); // there is room, or the other thread has it
            })
        });
        arena.purge().expect("gives back");
        for other in others {
            other.join().expect("no panic");
        }
        end(&arena, &driver);
    });
}

#[test]
fn idle_memory_of_one_region_serves_two_threads_in_the_other_and_refuses_neither() {
    loom::model(|| {
        let (arena, driver) = open_on(2, Model { remap: true, ..Model::default() });
        arena.set_thread_cache(ByteSize::ZERO);
        drop(arena.alloc::<u8>(1024, Region::Stable).expect("room"));
        let hold = |arena: &DeviceArena| arena.alloc::<u8>(512, Region::Dynamic).expect("room");
        let other = arena.clone();
        let thread = loom::thread::spawn(move || hold(&other));
        let mine = hold(&arena);
        drop((thread.join().expect("no panic"), mine));
        assert!(arena.snapshot().remaps_total > 0);
        end(&arena, &driver);
    });
}

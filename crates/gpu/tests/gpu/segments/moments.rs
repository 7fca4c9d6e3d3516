//! Acts of others during the call that obtains or releases a segment.
#![expect(unsafe_code, reason = "memory of others is adopted, which nobody touches")]

use std::sync::Mutex;
use std::thread;

use lowtide_gpu::driver::DeviceAddress;

use super::*;

/// Does something just before the arena's next call of this kind.
fn amid(bed: &Bed, call: Call, act: impl FnOnce(&DeviceArena) + Send + 'static) {
    let arena = bed.arena.clone();
    bed.sim.before(call, 0, move || act(&arena));
}

#[test]
fn two_that_need_a_segment_obtain_one_each() {
    let bed = Bed::plain();
    let other = Arc::new(Mutex::new(None));
    let theirs = Arc::clone(&other);
    amid(&bed, Call::Alloc, move |arena| {
        let got = arena.alloc::<u8>(2 * MIB, Region::Dynamic).expect("room");
        arena.validate();
        assert_eq!(arena.snapshot().committed, ByteSize::mib(4), "one is on its way");
        *theirs.lock().expect("nobody panicked") = Some(got);
    });
    let own = bed.dynamic(2).expect("room");
    assert_eq!(bed.figures(), [4, 4, 4]);
    drop((own, other.lock().expect("nobody panicked").take()));
    bed.end();
}

#[test]
fn the_limit_holds_beside_a_segment_that_is_on_its_way() {
    let bed = Bed::limited(4);
    amid(&bed, Call::Alloc, |arena| {
        arena.set_limit(ByteSize::mib(3));
        arena.validate();
        assert!(arena.purge().is_ok_and(|bytes| bytes.is_zero()), "it is not idle");
    });
    let own = bed.dynamic(4).expect("it was within the limit when it was asked for");
    assert_eq!(bed.figures(), [4, 4, 4]);
    drop(own);
    bed.end();
}

#[test]
fn a_close_in_the_midst_refuses_the_block_and_what_came_for_it_goes() {
    let bed = Bed::plain();
    amid(&bed, Call::Alloc, |arena| assert_eq!(arena.close(), Ok(())));
    assert!(matches!(bed.dynamic(4), Err(DeviceError::Closed { .. })));
    let Bed { arena, sim } = bed;
    assert_eq!(arena.snapshot().live, NONE);
    drop(arena);
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    sim.assert_no_faults();
}

#[test]
fn what_leaves_is_given_to_nobody() {
    let bed = Bed::plain();
    drop(bed.dynamic(4).expect("room"));
    bed.settle();
    let other = Arc::new(Mutex::new(None));
    let theirs = Arc::clone(&other);
    amid(&bed, Call::Free, move |arena| {
        arena.validate();
        let got = arena.alloc::<u8>(4 * MIB, Region::Dynamic).expect("another segment");
        *theirs.lock().expect("nobody panicked") = Some(got);
    });
    assert_eq!(bed.purge(), Ok(ByteSize::mib(4)));
    assert_eq!((bed.figures(), bed.sim.calls(Call::Alloc)), ([4, 4, 4], 2));
    drop(other.lock().expect("nobody panicked").take());
    bed.end();
}

/// The bug: addresses were looked for in a segment on its way out first. The driver had given them
/// again, and an address inside a live block was told to be in none, or a move was recorded there.
#[test]
fn an_address_that_came_back_was_looked_for_in_the_segment_that_left() {
    for (pool, region) in [false, true].into_iter().flat_map(|it| Region::ALL.map(|of| (it, of))) {
        let bed = Bed::open(pool, |_| {});
        let raw = |arena: &DeviceArena, region| {
            arena.alloc_raw(ByteSize::mib(4), ByteSize::kib(4), region).expect("room")
        };
        let before = raw(&bed, Region::Stable);
        bed.free(before.at).expect("live");
        bed.settle();
        amid(&bed, Call::PoolTrim, move |arena| {
            let block = raw(arena, region);
            assert_eq!(block.at, before.at, "the driver gives it again");
            let (at, size) = (block.at.checked_add(ByteSize::kib(4)).expect("inside"), block.size);
            let inside = DeviceError::InteriorAddress { at, block: block.at, size };
            assert_eq!(arena.free(at), Err(inside));
            arena.validate();
            assert_eq!(arena.free(block.at), Ok(block));
        });
        assert_eq!(bed.purge(), Ok(ByteSize::mib(4)));
        bed.end();
    }
}

/// The bug: memory of others was refused for the arena's own, where the driver had given them the
/// addresses of a segment that was on its way out.
#[test]
fn what_others_got_of_a_segment_that_left_could_not_be_adopted() {
    let bed = Bed::plain();
    drop(bed.dynamic(4).expect("room"));
    bed.settle();
    let sim = Arc::clone(&bed.sim);
    amid(&bed, Call::PoolTrim, move |arena| {
        let at = DeviceAddress::new(sim.raw().alloc(4 << 20).expect("room"));
        let release = move |at: DeviceAddress, _| sim.raw().free(at.get()).expect("live");
        // SAFETY: nobody reads or writes it, and the simulation looks at every address.
        let imported = unsafe { arena.import::<u8>(at, 4 * MIB, release) };
        imported.expect("theirs").release().expect("no call fails");
    });
    assert_eq!(bed.purge(), Ok(ByteSize::mib(4)));
    bed.end();
}

/// A block is not in the books while its segment is asked for: the arena may fall asleep then.
#[test]
fn an_arena_that_is_put_to_sleep_while_room_is_made_is_woken() {
    let bed = Bed::limited(4);
    drop(bed.stable(4).expect("room"));
    bed.settle();
    bed.sim.fail_nth(Some(Call::Alloc), 0, SimError::OutOfMemory);
    let slept = Arc::new(Mutex::new(None));
    let outcome = Arc::clone(&slept);
    let arena = bed.arena.clone();
    amid(&bed, Call::Free, move |_| {
        // In a thread of its own: it waits for the call that this is in the midst of.
        let sleeper = thread::spawn(move || arena.sleep(SleepOptions::default()).is_ok());
        *outcome.lock().expect("nobody panicked") = Some(sleeper);
    });
    let got = bed.dynamic(4);
    let sleeper = slept.lock().expect("nobody panicked").take().expect("it was asked for");
    let _either_way = sleeper.join().expect("it does not panic");
    assert!(got.is_ok(), "{got:?}");
    drop(got);
    bed.end();
}

#[test]
fn threads_at_the_limit_wait_for_each_other_and_lose_nothing() {
    for pool in [false, true] {
        let bed = Bed::open(pool, |config| config.limit = ByteSize::mib(24));
        thread::scope(|scope| {
            for thread in 0..4_usize {
                let bed = &bed;
                scope.spawn(move || {
                    for turn in 0..100_usize {
                        // Four times 6 MiB are within the limit, in segments of their own.
                        let mib = 1 + (turn * 7 + thread) % 6;
                        let region = Region::ALL[(turn + thread) % 2];
                        let got = bed.alloc::<u8>(mib * MIB, region);
                        if let Err(error) = &got {
                            assert!(error.is_out_of_memory(), "{error}");
                        }
                        drop(got);
                        if turn % 10 == thread {
                            bed.purge().expect("no call fails");
                        }
                    }
                });
            }
        });
        assert!(bed.snapshot().committed_peak <= ByteSize::mib(24));
        bed.end();
    }
}

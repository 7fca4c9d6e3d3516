//! Host memory for the contents of sleeping arenas: registered ahead, or a ring where the driver
//! refuses that.
//!
//! Invariant: a wake neither page-locks host memory nor frees it.
#![expect(unsafe_code, reason = "stores are destroyed here")]

use std::ffi::CStr;
use std::time::Duration;

use lowtide_fake_cuda::Guard;
use lowtide_gpu::driver::{Driver as _, DriverError};
use lowtide_gpu::{Region, SleepOptions, SleepState};

use super::support::{UNIT, check, end, start, write};
use lowtide::ByteSize;

const NOW: SleepOptions = SleepOptions {
    drain: Duration::ZERO,
    stable: lowtide_gpu::Contents::Keep,
    dynamic: lowtide_gpu::Contents::Keep,
};

/// Calls that page-lock host memory, or release it.
const LOCKING: [&CStr; 4] =
    [c"cuMemHostAlloc", c"cuMemFreeHost", c"cuMemHostRegister_v2", c"cuMemHostUnregister"];

fn counts(fake: &Guard) -> [u64; 4] {
    LOCKING.map(|name| fake.calls(name))
}

/// Returns the calls made since then.
fn since(fake: &Guard, before: [u64; 4]) -> [u64; 4] {
    let now = counts(fake);
    std::array::from_fn(|at| now[at] - before[at])
}

#[test]
fn stores_are_registered_ahead_and_stay_until_the_arena_is_looked_after() {
    let (fake, bed, arena, lane) = start();
    let mut kept = lane.alloc::<u8>(3 * UNIT, Region::Stable).expect("room");
    write(&bed.one, &mut kept, 7).expect("queued");
    let before = counts(&fake);
    arena.prepare_stores(NOW).expect("prepared");
    assert_eq!(since(&fake, before), [0, 0, 1, 0]);
    for _ in 0..2 {
        arena.sleep(NOW).expect("asleep");
        check(&bed.two, &kept, 7);
    }
    assert_eq!(since(&fake, before), [0, 0, 1, 0], "neither the sleeps nor the wakes");
    arena.set_stores_max(ByteSize::ZERO);
    assert_eq!(since(&fake, before), [0, 0, 1, 1]);
    drop(kept);
    end((fake, bed, arena, lane));
}

#[test]
fn where_the_driver_registers_nothing_contents_go_through_a_ring() {
    // What is refused, and by a limit that the ring does not fit either.
    for (code, limit) in [(1, u64::MAX), (2, u64::MAX), (304, u64::MAX), (800, u64::MAX), (2, 0)] {
        let (fake, bed, arena, lane) = start();
        let mut kept = lane.alloc::<u8>(3 * UNIT, Region::Stable).expect("room");
        write(&bed.one, &mut kept, 7).expect("queued");
        bed.driver.synchronize().expect("done");
        fake.lock_limit(0, limit);
        fake.fail(c"cuMemHostRegister_v2", 1, code);
        let before = counts(&fake);
        arena.prepare_stores(NOW).expect("prepared");
        let ring = if limit == 0 { 1 } else { 4 };
        assert_eq!(since(&fake, before), [ring, 0, 1, 0], "code {code}");
        for value in 1..=3 {
            write(&bed.one, &mut kept, value).expect("queued");
            arena.sleep(NOW).expect("asleep");
            assert_eq!(arena.state(), SleepState::Asleep);
            check(&bed.two, &kept, value);
        }
        assert_eq!(since(&fake, before), [ring, 0, 1, 0], "code {code}");
        arena.release_stores();
        let freed = if limit == 0 { 0 } else { 4 };
        assert_eq!(since(&fake, before), [ring, freed, 1, 0], "the ring goes with the store");
        drop(kept);
        end((fake, bed, arena, lane));
    }
}

#[test]
fn a_store_that_the_driver_does_not_unregister_stays() {
    let (fake, bed, arena, lane) = start();
    let size = ByteSize::of(2 * UNIT);
    let store = bed.driver.host_store_create(size).expect("memory");
    fake.fail(c"cuMemHostUnregister", 1, 1);
    for expected in [false, true] {
        // SAFETY: a store of the driver, without copies.
        let freed = unsafe { bed.driver.host_store_destroy(store) };
        assert_eq!(freed.is_ok(), expected, "{freed:?}");
    }
    // SAFETY: the driver does not know it any more, and says so.
    let refused = unsafe { bed.driver.host_store_destroy(store) };
    assert!(matches!(refused, Err(DriverError::Unsupported { .. })), "{refused:?}");
    end((fake, bed, arena, lane));
}

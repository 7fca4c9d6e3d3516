//! The states: what is kept, discarded and left, and what each call says in each state.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lowtide_cuda_sim::{Call, DriverCosts, Order, SimDriver, SimError, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::{
    CompactOptions, Contents, DeviceError, Region, SleepConfig, SleepOptions, SleepReport,
    SleepState,
};

use super::support::{Bed, MIB, at};
use crate::wait_until;

pub(crate) const NOW: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Keep, dynamic: Contents::Keep };

#[test]
fn what_is_kept_is_at_the_same_addresses_with_the_same_contents() {
    for order in [Order::Lazy, Order::Random { seed: 7 }] {
        let bed = Bed::new(order);
        let buffers: Vec<_> = (0..40_u64)
            .map(|nth| {
                let region = Region::ALL[usize::try_from(nth % 2).expect("small")];
                bed.marked(1 + (usize::try_from(nth).expect("small") * 77_777), region, nth)
            })
            .collect();
        let places = |bed: &Bed| -> Vec<_> {
            let lease = bed.arena.enter().expect("a lease");
            buffers.iter().map(|buffer| at(buffer, &lease)).collect()
        };
        let before = places(&bed);
        let live = bed.arena.snapshot().live;
        let slept = bed.arena.sleep(NOW).expect("asleep");
        assert_eq!(bed.arena.state(), SleepState::Asleep);
        let snapshot = bed.arena.snapshot();
        snapshot.validate();
        assert_eq!((snapshot.committed, snapshot.live), (ByteSize::ZERO, live));
        assert_eq!((snapshot.asleep, snapshot.retained()), (live, ByteSize::ZERO));
        assert_eq!(snapshot.offloaded, slept.copied);
        assert_eq!(bed.sim.leaks().handles, 0);
        assert_eq!(places(&bed), before, "the lease woke it");
        assert_eq!(bed.arena.state(), SleepState::Awake);
        assert_eq!(bed.sim.leaks().host_stores, 1, "the caller waits for no store");
        bed.arena.purge().expect("no error");
        assert_eq!(bed.sim.leaks().host_stores, 0, "given back");
        for (nth, buffer) in (0..).zip(&buffers) {
            bed.assert_marked(buffer, nth);
            assert!(!buffer.take_discarded());
        }
        let snapshot = bed.arena.snapshot();
        assert_eq!((snapshot.sleeps_total, snapshot.wakes_total), (1, 1));
        drop(buffers);
        bed.end();
    }
}

#[test]
fn each_region_and_each_buffer_is_kept_discarded_or_stays() {
    let bed = Bed::new(Order::Lazy);
    let weights = bed.marked(4 * MIB, Region::Stable, 1);
    let cache = bed.marked(4 * MIB, Region::Dynamic, 2);
    let mut kept = bed.marked(2 * MIB, Region::Dynamic, 3);
    kept.set_contents(Some(Contents::Keep)).expect("here");
    let mut registered = bed.marked(MIB, Region::Stable, 4);
    registered.set_contents(Some(Contents::Stay)).expect("here");
    let slept =
        bed.arena.sleep(SleepOptions { dynamic: Contents::Discard, ..NOW }).expect("asleep");
    assert_eq!(slept.memory, ByteSize::mib(10));
    assert_eq!(slept.copied, ByteSize::mib(6));
    assert_eq!(slept.stayed, ByteSize::mib(1));
    let snapshot = bed.arena.snapshot();
    snapshot.validate();
    assert_eq!((snapshot.asleep, snapshot.committed), (ByteSize::mib(10), ByteSize::mib(1)));
    let woken = bed.arena.wake().expect("awake");
    assert_eq!((woken.memory, woken.copied), (ByteSize::mib(10), ByteSize::mib(6)));
    for (buffer, mark) in [(&weights, 1), (&kept, 3), (&registered, 4)] {
        assert!(!buffer.take_discarded());
        bed.assert_marked(buffer, mark);
    }
    assert!(cache.take_discarded() && !cache.take_discarded(), "it is said once");
    drop((weights, cache, kept, registered));
    bed.end();
}

#[test]
fn a_granule_with_one_block_to_keep_is_kept_whole() {
    let bed = Bed::new(Order::Lazy);
    let mut small: Vec<_> =
        (0..64_u64).map(|nth| bed.marked(3_000, Region::Dynamic, nth)).collect();
    for buffer in small.iter_mut().step_by(40) {
        buffer.set_contents(Some(Contents::Keep)).expect("here");
    }
    bed.arena.sleep(SleepOptions { dynamic: Contents::Discard, ..NOW }).expect("asleep");
    bed.arena.wake().expect("awake");
    for (nth, buffer) in (0..).zip(&small) {
        if !buffer.take_discarded() {
            bed.assert_marked(buffer, nth);
        }
    }
    assert!(!small[40].take_discarded());
    drop(small);
    bed.end();
}

#[test]
fn what_is_freed_while_it_sleeps_does_not_come_back() {
    let bed = Bed::new(Order::Lazy);
    let mut buffers: Vec<_> =
        (0..16_u64).map(|nth| bed.marked(MIB, Region::Dynamic, nth)).collect();
    bed.arena.sleep(NOW).expect("asleep");
    let calls = bed.sim.calls_total();
    buffers.truncate(4);
    assert_eq!(bed.sim.calls_total(), calls, "bookkeeping");
    bed.arena.validate();
    assert_eq!(bed.arena.snapshot().asleep, ByteSize::mib(4));
    let woken = bed.arena.wake().expect("awake");
    assert_eq!((woken.memory, woken.copied), (ByteSize::mib(4), ByteSize::mib(4)));
    for (nth, buffer) in (0..).zip(&buffers) {
        bed.assert_marked(buffer, nth);
    }
    // With nothing left to wake for, the host's memory is given back by the next look.
    bed.arena.sleep(NOW).expect("asleep");
    buffers.clear();
    assert!(!bed.arena.snapshot().offloaded.is_zero());
    bed.arena.decay(bed.sim.clock().now()).expect("no error");
    assert_eq!(bed.arena.snapshot().offloaded, ByteSize::ZERO);
    assert_eq!(bed.arena.state(), SleepState::Awake);
    bed.end();
}

#[test]
fn each_use_of_memory_wakes_it() {
    let bed = Bed::new(Order::Lazy);
    let mut kept = bed.marked(MIB, Region::Dynamic, 9);
    let uses: [&mut dyn FnMut(&Bed); 4] = [
        &mut |bed| drop(bed.arena.alloc::<u8>(MIB, Region::Stable).expect("room")),
        &mut |bed| {
            let lane = bed.lane();
            drop(lane.alloc::<u8>(MIB, Region::Dynamic).expect("room"));
        },
        &mut |bed| {
            let raw = bed.arena.alloc_raw(ByteSize::mib(1), ByteSize::new(256), Region::Dynamic);
            bed.arena.free(raw.expect("room").at).expect("live");
        },
        &mut |_| kept.resize(2 * MIB).expect("room"),
    ];
    for act in uses {
        bed.arena.sleep(NOW).expect("asleep");
        act(&bed);
        assert_eq!(bed.arena.state(), SleepState::Awake);
        bed.arena.validate();
    }
    kept.resize(MIB).expect("smaller");
    bed.assert_marked(&kept, 9);
    drop(kept);
    bed.end();
}

#[test]
fn nothing_else_wakes_it() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    let mut scattered: Vec<_> =
        (0..12_u64).map(|mark| bed.marked(48 << 10, Region::Dynamic, mark)).collect();
    for nth in (0..12).step_by(2).rev() {
        drop(scattered.remove(nth));
    }
    bed.arena.sleep(NOW).expect("asleep");
    let calls = bed.sim.calls_total();
    let arena = &bed.arena;
    assert_eq!(arena.decay(bed.sim.clock().now()), Ok(ByteSize::ZERO));
    assert_eq!(arena.purge(), Ok(ByteSize::ZERO));
    assert_eq!(arena.trim(ByteSize::ZERO), Ok(ByteSize::ZERO));
    assert_eq!(arena.shrink(), Ok(ByteSize::ZERO));
    let done = arena.compact(CompactOptions::new(Region::Dynamic), |_| {}).expect("no error");
    assert_eq!((done.moves, done.is_busy), (0, true));
    arena.set_limit(ByteSize::mib(64));
    let _ = (arena.occupancy(64), arena.glance(), arena.snapshot(), kept.pin().expect("here"));
    assert_eq!((arena.state(), bed.sim.calls_total()), (SleepState::Asleep, calls));
    bed.assert_marked(&kept, 1);
    for (nth, block) in (0..).zip(&scattered) {
        bed.assert_marked(block, 2 * nth + 1);
    }
    drop((kept, scattered));
    bed.end();
}

#[test]
fn misuse_is_refused_and_nothing_is_lost() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    let refused = bed.arena.wake().expect_err("it is awake");
    let wanted = "is awake: a sleep expects it awake, a wake expects it asleep";
    assert_eq!(refused.to_string(), format!("arena \"sleeper\" {wanted}"));
    let lease = bed.arena.enter().expect("a lease");
    let nested = bed.arena.enter().expect("another");
    let refused = bed.arena.sleep(NOW).expect_err("leased");
    assert!(matches!(refused, DeviceError::Leased { leases: 2, .. }), "{refused}");
    assert_eq!(bed.arena.state(), SleepState::Awake);
    drop((lease, nested));
    bed.arena.sleep(NOW).expect("asleep");
    let refused = bed.arena.sleep(NOW).expect_err("asleep already");
    assert!(matches!(refused, DeviceError::State { state: SleepState::Asleep, .. }), "{refused}");
    assert!(matches!(bed.arena.close(), Err(DeviceError::LiveBlocks { count: 1, .. })));
    bed.arena.wake().expect("awake");
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.arena.sleep(NOW).expect("with nothing to keep");
    bed.arena.close().expect("nothing is live");
    assert!(matches!(bed.arena.sleep(NOW), Err(DeviceError::Closed { .. })));
    // It was refused for being awake.
    assert!(matches!(bed.arena.wake(), Err(DeviceError::Closed { .. })));
    bed.end();
}

/// A sleep that waits for leases this long, on a thread of its own.
fn draining(bed: &Bed, drain: Duration) -> JoinHandle<Result<SleepReport, DeviceError>> {
    let arena = bed.arena.clone();
    let sleeping = thread::spawn(move || arena.sleep(SleepOptions { drain, ..NOW }));
    wait_until(|| bed.arena.state() == SleepState::Draining);
    sleeping
}

#[test]
fn a_forgotten_lease_is_reported_when_the_deadline_has_passed() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    let clock = bed.sim.clock();
    let _forgotten = ManuallyDrop::new(bed.arena.enter().expect("a lease"));
    clock.advance(Duration::from_secs(60));
    let sleeping = draining(&bed, Duration::from_secs(5));
    assert!(!sleeping.is_finished());
    clock.advance(Duration::from_secs(5));
    let refused = sleeping.join().expect("no panic").expect_err("leased");
    let held_for = Duration::from_secs(65);
    let arena = "sleeper".to_owned();
    assert_eq!(refused, DeviceError::Leased { arena, leases: 1, held_for });
    assert_eq!(bed.arena.state(), SleepState::Awake);
    bed.assert_marked(&kept, 1);
    drop((kept, bed)); // the forgotten lease keeps the arena
}

#[test]
fn who_enters_while_it_drains_cancels_that() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    let lease = bed.arena.enter().expect("a lease");
    let sleeping = draining(&bed, Duration::from_secs(3600));
    let nested = bed.arena.enter().expect("at once, though it drains");
    assert_eq!(bed.arena.state(), SleepState::Awake);
    let refused = sleeping.join().expect("no panic").expect_err("cancelled");
    assert!(matches!(refused, DeviceError::SleepCancelled { .. }), "{refused}");
    drop((lease, nested));
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

#[test]
fn the_last_lease_lets_a_drain_go_on() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    let lease = bed.arena.enter().expect("a lease");
    let sleeping = draining(&bed, Duration::from_secs(3600));
    drop(lease);
    sleeping.join().expect("no panic").expect("asleep");
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

#[test]
fn a_lease_that_is_wanted_while_contents_are_copied_out_keeps_it_awake() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    let arena = bed.arena.clone();
    let (entering, entered) = std::sync::mpsc::channel();
    bed.sim.before(Call::Offload, 0, move || {
        let other = arena.clone();
        let thread = thread::spawn(move || other.enter().map(drop));
        entering.send(thread).expect("heard");
        // It waits now, or will: the way down is seen as draining either way.
        wait_until(|| arena.is_wanted());
    });
    let refused = bed.arena.sleep(NOW).expect_err("wanted");
    assert!(matches!(refused, DeviceError::SleepCancelled { .. }), "{refused}");
    entered.recv().expect("sent").join().expect("no panic").expect("a lease");
    assert_eq!(bed.sim.calls(Call::Unmap), 0);
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

#[test]
fn the_end_of_an_arena_leaves_host_memory_that_a_copy_may_read() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    bed.arena.sleep(NOW).expect("asleep");
    bed.sim.fail_always(Call::StreamSynchronize, Some(SimError::Unknown));
    assert!(bed.arena.wake().is_err());
    let Bed { sim, arena, .. } = bed;
    drop((kept, arena));
    sim.assert_no_faults();
    assert_eq!((sim.unsafe_unmaps(), sim.leaks().host_stores), (0, 1));
    sim.run_all();
    sim.assert_no_faults();
}

#[test]
fn a_wake_that_finds_too_little_memory_sleeps_on_and_can_be_tried_again() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(8 * MIB, Region::Dynamic, 1);
    bed.arena.sleep(NOW).expect("asleep");
    let capacity = SimOptions::default().capacity;
    bed.sim.set_neighbours(ByteSize::new(capacity.get() - (600 << 20) + (84 << 20)));
    let refused = bed.arena.enter().expect_err("too little");
    assert!(refused.is_out_of_memory(), "{refused}");
    assert_eq!(bed.arena.state(), SleepState::Asleep);
    assert_eq!(bed.sim.leaks().handles, 0, "all or nothing");
    bed.arena.validate();
    assert!(bed.arena.alloc::<u8>(1, Region::Dynamic).is_err(), "nor is there memory for others");
    assert_eq!(bed.arena.snapshot().wake_failures_total, 2);
    bed.sim.set_neighbours(ByteSize::ZERO);
    bed.assert_marked(&kept, 1);
    // A limit that was lowered meanwhile is such a shortage too.
    bed.arena.sleep(NOW).expect("asleep");
    bed.arena.set_limit(ByteSize::mib(4));
    assert!(bed.arena.wake().expect_err("over the limit").is_out_of_memory());
    bed.arena.set_limit(ByteSize::mib(8));
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

#[test]
fn a_wake_tries_again_for_as_long_as_its_patience() {
    let wake_timeout = Duration::from_secs(8);
    let bed = Bed::with(Order::Lazy, |config| {
        config.sleep = SleepConfig { wake_timeout, ..config.sleep };
    });
    let kept = bed.marked(8 * MIB, Region::Dynamic, 1);
    bed.arena.sleep(NOW).expect("asleep");
    bed.sim.set_capacity(ByteSize::mib(514));
    let clock = bed.sim.clock();
    for gives_way in [false, true] {
        let waking = {
            let arena = bed.arena.clone();
            thread::spawn(move || arena.wake())
        };
        let start = clock.now();
        while !waking.is_finished() {
            clock.advance(Duration::from_millis(10));
            thread::yield_now();
            if gives_way && clock.now() - start > Duration::from_secs(3) {
                bed.sim.set_capacity(ByteSize::gib(1));
            }
        }
        let woken = waking.join().expect("no panic");
        assert!(gives_way || clock.now() - start >= wake_timeout);
        assert_eq!(woken.is_ok(), gives_way, "{woken:?}");
    }
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

#[test]
fn many_who_enter_at_once_wake_it_once() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(8 * MIB, Region::Dynamic, 1);
    bed.arena.sleep(NOW).expect("asleep");
    let entering: Vec<_> = (0..8)
        .map(|_| {
            let arena = bed.arena.clone();
            thread::spawn(move || arena.enter().map(drop))
        })
        .collect();
    for thread in entering {
        thread.join().expect("no panic").expect("a lease");
    }
    assert_eq!(bed.arena.snapshot().wakes_total, 1);
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

#[test]
fn ten_thousand_blocks_sleep_in_calls_for_their_handles() {
    let options = SimOptions { costs: DriverCosts::zero(), ..SimOptions::default() };
    let bed = Bed::over(Arc::new(SimDriver::new(options)), |_| {});
    let buffers: Vec<_> = (0..10_000)
        .map(|nth| bed.arena.alloc::<u8>(4096 + nth, Region::Dynamic).expect("room"))
        .collect();
    let handles = bed.sim.leaks().handles as u64;
    let before = bed.sim.calls_total();
    bed.arena.sleep(NOW).expect("asleep");
    bed.arena.wake().expect("awake");
    let calls = bed.sim.calls_total() - before;
    println!("{calls} calls for {handles} handles and {} blocks", buffers.len());
    assert!(calls <= 6 * handles + 16, "{calls} calls for {handles} handles");
    drop(buffers);
    bed.end();
}

//! A fault at each driver call of sleep and of wake, with each kind of error: awake or asleep,
//! nothing lost but what was to be discarded, nothing left behind.

use std::time::Duration;

use lowtide_cuda_sim::{Call, Order, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::{Buffer, Contents, DeviceError, Region, SleepOptions, SleepState};

use super::support::{Bed, MIB};

const OPTIONS: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Keep, dynamic: Contents::Discard };

pub(crate) const PASSING: [SimError; 5] = [
    SimError::InvalidValue,
    SimError::OutOfMemory,
    SimError::NotSupported,
    SimError::Unknown,
    SimError::Code(304),
];

pub(crate) const LOST: [SimError; 3] =
    [SimError::EccUncorrectable, SimError::IllegalAddress, SimError::LaunchFailed];

/// Buffers of every kind, each with its mark, idle memory between them, and memory that is pending.
struct Scene {
    bed: Bed,
    kept: Vec<Buffer<u8>>,
    cache: Buffer<u8>,
    stays: Buffer<u8>,
}

impl Scene {
    fn new() -> Self {
        let bed = Bed::new(Order::Lazy);
        let kept = [1, 2, 3].map(|mark| bed.marked(MIB / 4, Region::Stable, mark)).into();
        let gap = bed.marked(MIB / 8, Region::Dynamic, 0);
        let cache = bed.marked(MIB / 4, Region::Dynamic, 4);
        let mut stays = bed.marked(MIB / 8, Region::Dynamic, 5);
        stays.set_contents(Some(Contents::Stay)).expect("here");
        let lane = bed.lane();
        let pending = lane.alloc::<u8>(MIB / 8, Region::Dynamic).expect("room");
        bed.mark(&pending, &lane.enter().expect("a lease"), 6);
        drop((gap, pending, lane));
        Self { bed, kept, cache, stays }
    }

    /// Asserts the invariants that hold between calls, and returns the state of the arena.
    fn state(&self) -> SleepState {
        self.bed.arena.validate();
        let (state, snapshot) = (self.bed.arena.state(), self.bed.arena.snapshot());
        snapshot.validate();
        match state {
            SleepState::Awake => assert_eq!(snapshot.asleep, ByteSize::ZERO),
            // Where the driver takes no memory back either, all of it may be there still.
            SleepState::Asleep => {}
            between => panic!("it rests {}", between.name()),
        }
        state
    }

    /// Nothing is lost, and nothing is left.
    fn end(self) {
        let Self { bed, kept, cache, stays } = self;
        bed.assert_all_marked(1, &kept);
        bed.assert_marked(&stays, 5);
        if !cache.take_discarded() {
            bed.assert_marked(&cache, 4);
        }
        drop((kept, cache, stays));
        bed.arena.purge().expect("no error");
        assert_eq!(bed.arena.snapshot().offloaded, ByteSize::ZERO);
        bed.end();
    }
}

#[test]
fn a_fault_at_any_call_of_sleep_leaves_it_awake_or_asleep_and_whole() {
    let (mut stayed_awake, mut fell_asleep) = (0, 0);
    for error in PASSING {
        for nth in 0.. {
            let scene = Scene::new();
            let calls = scene.bed.sim.calls_total();
            scene.bed.sim.fail_nth(None, nth, error);
            let slept = scene.bed.arena.sleep(OPTIONS);
            let is_past = scene.bed.sim.calls_total() - calls <= nth;
            scene.bed.sim.forget_failures();
            let state = scene.state();
            assert!(slept.is_err() || state == SleepState::Asleep, "{error:?} at {nth}: {slept:?}");
            if state == SleepState::Asleep {
                fell_asleep += 1;
                let stay = ByteSize::kib(128);
                assert_eq!(scene.bed.arena.snapshot().committed, stay, "{error:?} at {nth}");
            } else {
                stayed_awake += 1;
                assert_eq!(scene.bed.sim.leaks().host_stores, 0, "{error:?} at {nth}");
            }
            scene.end();
            if is_past {
                break;
            }
        }
    }
    println!("{stayed_awake} stayed awake, {fell_asleep} fell asleep all the same");
    assert!(stayed_awake >= 5 * 8, "a fault at each call");
}

#[test]
fn a_fault_at_any_call_of_wake_leaves_it_awake_or_asleep_and_whole() {
    let (mut slept_on, mut woke) = (0, 0);
    for error in PASSING {
        for nth in 0.. {
            let scene = Scene::new();
            scene.bed.arena.sleep(OPTIONS).expect("asleep");
            let calls = scene.bed.sim.calls_total();
            scene.bed.sim.fail_nth(None, nth, error);
            let woken = scene.bed.arena.wake();
            let is_past = scene.bed.sim.calls_total() - calls <= nth;
            scene.bed.sim.forget_failures();
            let state = scene.state();
            assert_eq!(woken.is_ok(), state == SleepState::Awake, "{error:?} at {nth}: {woken:?}");
            if woken.is_err() {
                slept_on += 1;
                let stay = ByteSize::kib(128);
                assert_eq!(scene.bed.arena.snapshot().committed, stay, "{error:?} at {nth}");
            } else {
                woke += 1;
            }
            scene.end();
            if is_past {
                break;
            }
        }
    }
    println!("{slept_on} slept on, {woke} woke all the same");
    assert!(slept_on >= 5 * 4, "a fault at each call");
}

#[test]
fn two_faults_and_whole_kinds_of_calls_that_fail_lose_nothing_either() {
    for seed in 0..lowtide_cuda_sim::sample(300) {
        let mut chance = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut draw = |bound: u64| {
            chance ^= chance << 13;
            chance ^= chance >> 7;
            chance ^= chance << 17;
            chance % bound
        };
        let scene = Scene::new();
        let sim = &scene.bed.sim;
        for _ in 0..2 {
            let error = PASSING[usize::try_from(draw(5)).expect("small")];
            if draw(4) == 0 {
                let kinds = [Call::Unmap, Call::Create, Call::Restore, Call::StreamSynchronize];
                let kind = kinds[usize::try_from(draw(4)).expect("small")];
                sim.fail_nth(Some(kind), draw(3), error);
                sim.fail_always(kind, Some(error));
            } else {
                sim.fail_nth(None, draw(160), error);
            }
        }
        let slept = scene.bed.arena.sleep(OPTIONS);
        let state = scene.state();
        let woken = (state == SleepState::Asleep).then(|| scene.bed.arena.wake());
        scene.state();
        scene.bed.sim.forget_failures();
        println!("seed {seed}: {slept:?} {woken:?}");
        let (is_asleep, arena) = (scene.state() == SleepState::Asleep, scene.bed.arena.clone());
        if is_asleep {
            arena.wake().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
        drop(arena);
        scene.end();
    }
}

#[test]
fn a_context_that_is_lost_at_any_call_is_an_error_and_no_more() {
    for error in LOST {
        for nth in 0.. {
            let Scene { bed, kept, cache, stays } = Scene::new();
            let calls = bed.sim.calls_total();
            bed.sim.fail_nth(None, nth, error);
            let slept = bed.arena.sleep(OPTIONS);
            let woken = slept.is_ok().then(|| bed.arena.wake());
            let is_past = bed.sim.calls_total() - calls <= nth;
            bed.arena.validate();
            let state = bed.arena.state();
            assert!(matches!(state, SleepState::Awake | SleepState::Asleep), "{}", state.name());
            if !is_past {
                // The last calls give stores back: they may be the first to hear of it.
                let told = slept.is_err() || woken.is_some_and(|woken| woken.is_err());
                assert!(told || bed.arena.snapshot().offloaded > ByteSize::ZERO, "at {nth}");
                assert!(bed.arena.sleep(OPTIONS).is_err() || bed.arena.wake().is_err());
            }
            drop((kept, cache, stays));
            let Bed { sim, arena, .. } = bed;
            drop(arena);
            assert_eq!(sim.unsafe_unmaps(), 0);
            if is_past {
                break;
            }
        }
    }
}

/// Copies that could not be waited for may be under way still: what they work on must not leave.
#[test]
fn memory_that_a_copy_may_work_on_stays_until_that_is_known_to_be_done() {
    for comes_back in [false, true] {
        let scene = Scene::new();
        let (arena, sim) = (&scene.bed.arena, &scene.bed.sim);
        if comes_back {
            arena.sleep(OPTIONS).expect("asleep");
            sim.fail_always(Call::StreamSynchronize, Some(SimError::Unknown));
            assert!(arena.wake().is_err());
        } else {
            // The second part does not leave, and the first cannot be filled again: the copies out
            // were waited for, those back cannot be.
            sim.fail_nth(Some(Call::Unmap), 1, SimError::Unknown);
            sim.fail_nth(Some(Call::StreamSynchronize), 1, SimError::Unknown);
            sim.fail_nth(Some(Call::StreamSynchronize), 2, SimError::Unknown);
            assert!(arena.sleep(OPTIONS).is_err());
        }
        assert_eq!(scene.state(), SleepState::Asleep);
        assert!(sim.unfinished() > 0 && !arena.snapshot().committed.is_zero());
        assert_eq!(sim.unsafe_unmaps(), 0);
        sim.forget_failures();
        arena.wake().expect("awake");
        scene.end();
    }
}

/// Contents to discard leave last: while another step may still fail, nothing is lost.
#[test]
fn nothing_is_discarded_where_what_is_kept_does_not_leave() {
    let options = SleepOptions { stable: Contents::Discard, dynamic: Contents::Keep, ..OPTIONS };
    let scene = Scene::new();
    scene.bed.sim.fail_nth(Some(Call::Unmap), 0, SimError::Unknown);
    assert!(scene.bed.arena.sleep(options).is_err());
    assert!(scene.kept.iter().all(|buffer| !buffer.take_discarded()));
    scene.end();
}

/// The same while the arena is awake: who needs that memory is told, and does not wait for ever.
#[test]
fn idle_memory_that_a_copy_may_work_on_is_given_back_when_that_is_known_to_be_done() {
    let bed = Bed::with(Order::Lazy, |config| config.limit = ByteSize::mib(4));
    let kept = bed.marked(MIB, Region::Stable, 1);
    let idle = bed.marked(2 * MIB, Region::Dynamic, 2);
    bed.sim.fail_always(Call::StreamSynchronize, Some(SimError::Unknown));
    let keeps = SleepOptions { dynamic: Contents::Keep, ..OPTIONS };
    assert!(bed.arena.sleep(keeps).is_err());
    assert_eq!(bed.arena.state(), SleepState::Awake);
    drop(idle);
    let refused = bed.arena.alloc::<u8>(3 * MIB, Region::Stable).expect_err("it is worked on");
    assert!(matches!(refused, DeviceError::Driver(_)), "{refused}");
    assert_eq!(bed.sim.unsafe_unmaps(), 0);
    bed.sim.forget_failures();
    let taken = bed.arena.alloc::<u8>(3 * MIB, Region::Stable).expect("room");
    bed.assert_marked(&kept, 1);
    drop((kept, taken));
    bed.end();
}

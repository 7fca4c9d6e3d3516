//! Each act of another, before each call of a sleep and of a wake, and a fault now and then: awake
//! or asleep, nothing lost, nothing left behind.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use lowtide_cuda_sim::{Call, Order, SimDriver};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::{
    Buffer, CompactOptions, Contents, DeviceArena, Lane, Region, SleepOptions, SleepState,
};

use super::faults::PASSING;
use super::support::{Bed, MIB};
use crate::wait_until;

const OPTIONS: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Keep, dynamic: Contents::Discard };

/// Calls that a sleep or a wake makes.
const CALLS: [Call; 13] = [
    Call::Unmap,
    Call::Create,
    Call::Offload,
    Call::Restore,
    Call::HostAlloc,
    Call::HostFree,
    Call::StreamCreate,
    Call::StreamSynchronize,
    Call::StreamIsCapturing,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventSynchronize,
    Call::Synchronize,
];

/// An act of another thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    FreeKept,
    FreeDiscarded,
    FreeStaying,
    FreeAll,
    FreeAndPurge,
    FreeAndDecay,
    EndLane,
    Raw,
    Lower,
    Compact,
    SleepToo,
    WakeToo,
    Enter,
    Allocate,
    Resize,
    Future,
    Close,
}

const ACTS: [Act; 17] = [
    Act::FreeKept,
    Act::FreeDiscarded,
    Act::FreeStaying,
    Act::FreeAll,
    Act::FreeAndPurge,
    Act::FreeAndDecay,
    Act::EndLane,
    Act::Raw,
    Act::Lower,
    Act::Compact,
    Act::SleepToo,
    Act::WakeToo,
    Act::Enter,
    Act::Allocate,
    Act::Resize,
    Act::Future,
    Act::Close,
];

/// The objects that the other thread may use.
struct Theirs {
    arena: DeviceArena,
    sim: Arc<SimDriver>,
    blocks: Vec<Buffer<u8>>,
    lane: Option<Lane>,
    threads: Vec<thread::JoinHandle<()>>,
}

fn of(theirs: &Mutex<Theirs>) -> std::sync::MutexGuard<'_, Theirs> {
    theirs.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Theirs {
    /// Something that may wait for the end of the way that is under way: begun, and not waited for.
    fn begin(&mut self, act: impl FnOnce(DeviceArena) + Send + 'static) {
        let arena = self.arena.clone();
        let thread = thread::spawn(move || act(arena));
        wait_until(|| thread.is_finished() || self.arena.is_wanted() || self.is_waking());
        self.threads.push(thread);
    }

    fn is_waking(&self) -> bool {
        self.arena.state() == SleepState::Waking
    }

    fn act(&mut self, act: Act) {
        let arena = self.arena.clone();
        match act {
            // Kept, kept, discarded, staying.
            Act::FreeKept => drop(self.blocks.remove(0)),
            Act::FreeDiscarded => drop(self.blocks.remove(2)),
            Act::FreeStaying => drop(self.blocks.remove(3)),
            Act::FreeAll => self.blocks.clear(),
            Act::FreeAndPurge => {
                self.blocks.clear();
                let _ = arena.purge();
            }
            Act::FreeAndDecay => {
                self.blocks.clear();
                let _ = arena.decay(self.sim.clock().now() + Duration::from_secs(3600));
            }
            // It waits for calls that are made with its stream, as this may be.
            Act::EndLane => {
                let lane = self.lane.take();
                self.threads.push(thread::spawn(move || drop(lane)));
            }
            Act::Raw => {
                self.begin(|arena| {
                    let raw = arena.alloc_raw(ByteSize::kib(70), ByteSize::new(1), Region::Stable);
                    if let Ok(raw) = raw {
                        arena.free(raw.at).expect("it is live");
                    }
                });
            }
            Act::Lower => arena.set_limit(ByteSize::kib(64)),
            Act::Compact => {
                let _ = arena.compact(CompactOptions::new(Region::Stable), |_| {});
            }
            Act::SleepToo => {
                let _ = arena.sleep(OPTIONS);
            }
            // It waits for what is under way, and cancels nothing.
            Act::WakeToo => self.threads.push(thread::spawn(move || drop(arena.wake()))),
            Act::Enter => self.begin(|arena| drop(arena.enter())),
            Act::Allocate => {
                self.begin(|arena| drop(arena.alloc::<u8>(MIB / 8, Region::Dynamic)));
            }
            Act::Resize => {
                let mut block = self.blocks.remove(1);
                self.begin(move |_| drop(block.resize(MIB)));
            }
            Act::Future => {
                let mut future = Box::pin(arena.enter_async());
                let waker = std::task::Waker::noop();
                let mut context = std::task::Context::from_waker(waker);
                let _ = Future::poll(future.as_mut(), &mut context);
            }
            Act::Close => {
                let _ = arena.close();
            }
        }
    }
}

/// Does it all; says how many acts came to pass.
fn play(
    seed: &str,
    (call, nth, act): (Call, u64, Act),
    in_wake: bool,
    fault: Option<(u64, usize)>,
) {
    let what = format!("{seed}{call:?} {nth} {act:?}, in the wake: {in_wake}, {fault:?}");
    let bed = Bed::new(Order::Lazy);
    let mut blocks: Vec<_> = [1, 2].map(|mark| bed.marked(MIB / 4, Region::Stable, mark)).into();
    let gap = bed.marked(MIB / 8, Region::Dynamic, 0);
    blocks.push(bed.marked(MIB / 4, Region::Dynamic, 3));
    let mut stays = bed.marked(MIB / 8, Region::Dynamic, 4);
    stays.set_contents(Some(Contents::Stay)).expect("here");
    blocks.push(stays);
    let lane = bed.lane();
    let pending = lane.alloc::<u8>(MIB / 8, Region::Dynamic).expect("room");
    bed.mark(&pending, &lane.enter().expect("a lease"), 6);
    drop((gap, pending));
    let theirs = Theirs {
        arena: bed.arena.clone(),
        sim: bed.sim.clone(),
        blocks,
        lane: Some(lane),
        threads: Vec::new(),
    };
    let theirs = Arc::new(Mutex::new(theirs));
    if in_wake {
        bed.arena.sleep(OPTIONS).unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    let other = Arc::downgrade(&theirs);
    bed.sim.before(call, nth, move || {
        if let Some(theirs) = other.upgrade() {
            of(&theirs).act(act);
        }
    });
    if let Some((nth, error)) = fault {
        bed.sim.fail_nth(None, nth, PASSING[error]);
    }
    let _ = if in_wake { bed.arena.wake().map(drop) } else { bed.arena.sleep(OPTIONS).map(drop) };
    let threads = std::mem::take(&mut of(&theirs).threads);
    for thread in threads {
        wait_until(|| thread.is_finished());
        thread.join().unwrap_or_else(|_| panic!("{what}"));
    }
    bed.sim.forget_failures();
    bed.arena.set_limit(ByteSize::MAX);
    wait_until(|| matches!(bed.arena.state(), SleepState::Awake | SleepState::Asleep));
    bed.arena.validate();
    // What did not come to pass never does.
    let theirs = Arc::into_inner(theirs).expect("nobody else has it").into_inner();
    let Theirs { blocks, lane, .. } = theirs.unwrap_or_else(PoisonError::into_inner);
    for block in &blocks {
        if !block.take_discarded() {
            // Which it is follows from its size and its region; all that is kept has a mark.
            let lease = bed.arena.enter().unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(block.address(&lease).is_ok(), "{what}");
        }
    }
    let whole = |act: Act| {
        !matches!(act, Act::FreeKept | Act::FreeDiscarded | Act::FreeStaying | Act::Resize)
    };
    if blocks.len() == 4 && whole(act) {
        for (mark, nth) in [(1, 0), (2, 1), (4, 3)] {
            bed.assert_marked(&blocks[nth], mark);
        }
    }
    drop((blocks, lane));
    bed.sim.run_all();
    let _ = bed.arena.purge();
    assert_eq!(bed.arena.snapshot().offloaded, ByteSize::ZERO, "{what}");
    assert!(bed.sim.faults().is_empty(), "{what}: {:?}", bed.sim.faults());
    bed.end();
}

#[test]
fn no_act_of_another_before_any_call_of_a_sleep_or_a_wake_breaks_it() {
    for in_wake in [false, true] {
        for call in CALLS {
            for nth in 0..2 {
                for act in ACTS {
                    println!("{call:?} {nth} {act:?}, in the wake: {in_wake}");
                    play("", (call, nth, act), in_wake, None);
                }
            }
        }
    }
}

#[test]
fn nor_does_an_act_together_with_a_fault() {
    for seed in 0..lowtide_cuda_sim::sample(200) {
        let mut chance = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut draw = |bound: usize| {
            chance ^= chance << 13;
            chance ^= chance >> 7;
            chance ^= chance << 17;
            usize::try_from(chance % bound as u64).expect("small")
        };
        let (call, nth) = (CALLS[draw(CALLS.len())], draw(4) as u64);
        let (act, in_wake) = (ACTS[draw(ACTS.len())], draw(2) == 0);
        let fault = (draw(60) as u64, draw(PASSING.len()));
        println!("seed {seed}");
        play(&format!("seed {seed}: "), (call, nth, act), in_wake, Some(fault));
    }
}

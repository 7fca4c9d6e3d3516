//! Random schedules of an arena beside streams: what they are, how one is run, what is looked at
//! when it has ended.
//!
//! A seed gives a schedule: the order in which the device works, granules, limits, failures, how
//! many workers there are, and whether they take turns in one thread (then the same seed gives the
//! same run, and what one does in the midst of another's driver call is planned) or run in threads
//! of their own. The acts stand in `acts`; a new one is a line of its table.
//!
//! It does not look for speed. A schedule that does not end in time counts as failed.
//!
//! Invariants: every check finds what its owner wrote; nothing is unmapped that work refers to; at
//! the end nothing is committed or left behind, but for what the device still worked on when the
//! arena was dropped.

mod acts;
mod budget;
mod meddle;
mod world;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use lowtide_cuda_sim::{Leaks, Order, SimDriver};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock as _, SystemClock};
use lowtide_gpu::{Contents, Region, SleepConfig, SleepOptions, SleepState};

use crate::chance::Chance;
use world::World;

/// Acts of each worker.
const ACTS: usize = 200;

/// After so long a schedule is taken for one that never ends. It takes milliseconds.
const DEADLINE: Duration = Duration::from_secs(120);
/// The longest time that a thread of the arena may take to drop its handle.
const LET_GO: Duration = Duration::from_secs(10);

/// The ways in which the arena ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It is closed.
    Closed,
    /// Its work is done and booked, and its last handle is dropped.
    Done,
    /// Its last handle is dropped while the device works: what that work is on stays.
    Working,
}

/// The kinds of memory that the device offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Addresses apart from memory.
    Virtual,
    /// Segments of plain memory.
    Plain,
    /// Segments of a pool.
    Pool,
}

/// One run.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "what may happen in it, each with its name")]
pub(crate) struct Schedule {
    pub(crate) seed: u64,
    memory: Memory,
    order: Order,
    pub(crate) workers: usize,
    /// The workers take turns in one thread.
    turns: bool,
    granule: ByteSize,
    /// The maximum size of a handle.
    handle_max: ByteSize,
    limit: ByteSize,
    reserve: ByteSize,
    capacity: ByteSize,
    /// Calls of the driver fail now and then.
    fails: bool,
    /// Streams capture graphs now and then.
    captures: bool,
    end: End,
    /// Sleeps may discard what is in the stable region, and in the dynamic one.
    discards: [bool; 2],
    /// Leases for work name its stream.
    names: bool,
    /// Contents go through a ring, of which this many KiB can be page-locked.
    ring: Option<u16>,
    /// The KiB that the host has room for, and that it refuses one booking in so many; where it is
    /// asked.
    host: Option<(u16, u8)>,
}

/// A fault, and the run in which it occurred.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) schedule: Box<Schedule>,
    pub(crate) what: String,
    pub(crate) unsafe_unmaps: u64,
}

/// The figures of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    pub(crate) acts: u64,
    pub(crate) sleeps: u64,
    /// Blocks that compactions moved.
    pub(crate) moves: u64,
    /// Bookings that the host's budget refused.
    pub(crate) refused: u64,
    pub(crate) driver_calls: u64,
    pub(crate) unsafe_unmaps: u64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Schedule { seed, order, workers, turns, .. } = *self.schedule;
        let how = if turns { "in turns" } else { "threads" };
        writeln!(f, "seed {seed}, {order:?}, {workers} {how}: {}", self.what)?;
        write!(f, "{:?}, {} unsafe unmaps", self.schedule, self.unsafe_unmaps)
    }
}

impl Schedule {
    /// The schedule of a seed.
    pub(crate) fn of(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let mut one_in = |of: usize| chance.below(of) == 0;
        let order = if one_in(2) { Order::Lazy } else { Order::Random { seed } };
        let turns = one_in(2);
        let granule = if one_in(2) { ByteSize::kib(4) } else { ByteSize::kib(16) };
        let fails = one_in(4);
        let captures = one_in(3);
        let workers = 2 + chance.below(2);
        // Below 64 granules small blocks stand among the large ones.
        let limit = ByteSize::new(granule.get() * pick(&mut chance, &[12, 24, 48, 96]));
        let reserve = *pick(&mut chance, &[ByteSize::kib(512), ByteSize::mib(4), ByteSize::gib(1)]);
        let capacity = if chance.below(4) == 0 { limit } else { ByteSize::gib(1) };
        let end = *pick(&mut chance, &[End::Closed, End::Closed, End::Done, End::Working]);
        let discards = [chance.below(3) == 0, chance.below(3) == 0];
        let names = chance.below(4) > 0;
        let room = *pick(&mut chance, &[64, 256, 4096]);
        let refuses = *pick(&mut chance, &[2, 3, 5]);
        let host = (chance.below(3) > 0).then_some((room, refuses));
        let handle_max = ByteSize::new(granule.get() * pick(&mut chance, &[0, 2, 8]));
        let ring = (chance.below(3) == 0).then(|| *pick(&mut chance, &[0, 5000, 10_000]));
        Self {
            seed,
            memory: Memory::Virtual,
            order,
            workers,
            turns,
            granule,
            handle_max,
            limit,
            reserve,
            capacity,
            fails,
            captures,
            end,
            discards,
            names,
            ring,
            host,
        }
    }

    /// The same on a device that has this memory to offer.
    pub(crate) fn over(self, memory: Memory) -> Self {
        Self { memory, ..self }
    }

    /// The same with a ring of page-locked buffers, and room on the host for all contents.
    pub(crate) fn through_ring(self) -> Self {
        Self { ring: Some(10_000), host: None, discards: [false; 2], ..self }
    }

    /// Returns `true` if a sleep may discard the contents of a region.
    fn discards(&self, region: Region) -> bool {
        self.discards[usize::from(region == Region::Dynamic)]
    }

    /// The most host memory that stays between sleeps.
    fn stores_max(&self) -> ByteSize {
        [ByteSize::ZERO, ByteSize::kib(128), ByteSize::MAX][(self.seed % 3) as usize]
    }

    /// When the arena falls asleep by itself.
    fn sleep(&self) -> SleepConfig {
        let contents =
            |region| if self.discards(region) { Contents::Discard } else { Contents::Keep };
        let options = SleepOptions {
            drain: Duration::ZERO,
            stable: contents(Region::Stable),
            dynamic: contents(Region::Dynamic),
        };
        // Nobody lets time go by for who waits.
        let (idle_after, wake_timeout) = (Some(Duration::from_secs(5)), Duration::ZERO);
        let stores_max = self.stores_max();
        SleepConfig { idle_after, wake_timeout, options, stores_max, ..SleepConfig::default() }
    }

    /// Runs it in a thread of its own.
    pub(crate) fn run(self) -> Result<Done, Failure> {
        let (tell, told) = mpsc::channel();
        let failed =
            |(what, unsafe_unmaps)| Failure { schedule: Box::new(self), what, unsafe_unmaps };
        let spawned = thread::Builder::new().name(format!("seed {}", self.seed)).spawn(move || {
            let run = catch_unwind(AssertUnwindSafe(|| self.play()));
            // Nobody listens any more where it took too long.
            let _ = tell.send(run.unwrap_or_else(|thrown| Err((said(&*thrown), 0))));
        });
        spawned.map_err(|error| failed((error.to_string(), 0)))?;
        match told.recv_timeout(DEADLINE) {
            Ok(outcome) => outcome.map_err(failed),
            Err(_) => Err(failed((format!("not done after {DEADLINE:?}: a deadlock"), 0))),
        }
    }

    /// Plays it to its end; with a failure, the unsafe unmaps that the simulation saw.
    fn play(self) -> Result<Done, (String, u64)> {
        let world = World::open(self).map_err(|error| (error, 0))?;
        if self.turns {
            let mut chance = Chance::new(!self.seed);
            for _ in 0..ACTS * self.workers {
                if !world.turn(chance.below(self.workers)) {
                    break;
                }
            }
        } else {
            thread::scope(|scope| {
                for nth in 0..self.workers {
                    let world = &world;
                    scope.spawn(move || {
                        let turns = || (0..ACTS).all(|_| world.turn(nth));
                        if let Err(thrown) = catch_unwind(AssertUnwindSafe(turns)) {
                            world.fault(said(&*thrown));
                        }
                    });
                }
            });
        }
        let acts = world.acts.load(Ordering::Relaxed);
        let snapshot = world.arena.snapshot();
        let (sleeps, moves) = (snapshot.sleeps_total, snapshot.moves_total);
        let refused = world.host.as_ref().map_or(0, |host| host.booked().refused);
        let sim = Arc::clone(&world.sim);
        let ended = self.finish(world, &sim);
        let unsafe_unmaps = sim.unsafe_unmaps();
        ended
            .map(|()| {
                let driver_calls = sim.calls_total();
                Done { acts, sleeps, moves, refused, driver_calls, unsafe_unmaps }
            })
            .map_err(|what| (what, unsafe_unmaps))
    }

    /// Ends it, and looks at what is left.
    fn finish(self, world: Arc<World>, sim: &SimDriver) -> Result<(), String> {
        world.over.store(true, Ordering::Relaxed);
        sim.forget_failures();
        world.arena.set_limit(ByteSize::MAX); // so that it can wake
        let mut faults = world.faults.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for worker in &world.workers {
            let mut worker = worker.lock().unwrap_or_else(PoisonError::into_inner);
            if faults.is_empty() {
                worker.end(&world).unwrap_or_else(|fault| faults.push(fault));
            }
            worker.clear();
        }
        world.post.lock().unwrap_or_else(PoisonError::into_inner).clear();
        world.arena.validate();
        if self.end == End::Done {
            sim.run_all();
        }
        let outcome = match self.end {
            End::Closed => world.arena.close(),
            End::Done => world.arena.purge().map(drop),
            End::Working => Ok(()),
        };
        outcome.unwrap_or_else(|error| faults.push(format!("at the end: {error}")));
        let snapshot = world.arena.snapshot();
        snapshot.validate();
        let all_back = self.end != End::Working;
        if faults.is_empty() && all_back && !snapshot.committed.is_zero() {
            faults.push(format!("{} are left committed: {snapshot:?}", snapshot.committed));
        }
        let host = world.host.clone();
        let is_awake = world.arena.state() == SleepState::Awake && snapshot.offloaded.is_zero();
        if let Some(host) = host.as_ref().filter(|_| is_awake) {
            faults.extend(soon(|| host.fault()));
        }
        // A thread that woke the arena may be the last to let go of it, and of the world.
        let World { arena, .. } = alone(world)?;
        drop(arena);
        sim.run_all();
        sim.validate();
        faults.extend(soon(|| {
            let leaks = sim.leaks();
            let left = if all_back { leaks } else { without_memory(leaks) };
            // A copy whose end nobody saw may still work on its store, and on the ring of the
            // stores.
            let may_work = !all_back && self.fails && left.host_stores > 0;
            let rest = if may_work {
                Leaks { host_stores: 0, host_blocks: 0, events: 0, ..left }
            } else {
                left
            };
            let is_back = rest.is_empty();
            (!is_back).then(|| format!("left behind: {leaks:?}"))
        }));
        faults.extend(host.and_then(|host| soon(|| host.fault())));
        if sim.faults_total() > 0 {
            faults.push(format!("{} breaches: {:?}", sim.faults_total(), sim.faults()));
        }
        if sim.differences() > 0 || sim.lost().is_some() {
            let (differ, lost) = (sim.differences(), sim.lost());
            faults.push(format!("{differ} checks found something else; context lost: {lost:?}"));
        }
        if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
    }
}

/// The world, once nobody else has it.
fn alone(mut world: Arc<World>) -> Result<World, String> {
    let clock = SystemClock::new();
    let deadline = clock.now() + LET_GO;
    loop {
        world = match Arc::try_unwrap(world) {
            Ok(alone) => return Ok(alone),
            Err(_) if clock.now() >= deadline => {
                return Err("somebody holds on to the world".to_owned());
            }
            Err(shared) => shared,
        };
        thread::yield_now();
    }
}

/// Returns the fault if it lasts longer than a thread of the arena may take.
fn soon(wrong: impl Fn() -> Option<String>) -> Option<String> {
    let clock = SystemClock::new();
    let deadline = clock.now() + LET_GO;
    loop {
        let fault = wrong()?;
        if clock.now() >= deadline {
            return Some(fault);
        }
        thread::yield_now();
    }
}

/// Returns the leaks other than memory.
fn without_memory(leaks: Leaks) -> Leaks {
    let (none, zero) = (0, ByteSize::ZERO);
    let segments = none;
    Leaks { reservations: none, reserved: zero, handles: none, committed: zero, segments, ..leaks }
}

fn pick<'a, T>(chance: &mut Chance, from: &'a [T]) -> &'a T {
    &from[chance.below(from.len())]
}

/// Returns the message of a panic.
fn said(thrown: &(dyn std::any::Any + Send)) -> String {
    let text = thrown.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| thrown.downcast_ref::<String>().cloned());
    format!("a panic: {}", text.unwrap_or_default())
}

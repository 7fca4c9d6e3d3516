//! State that the workers of a schedule share, and objects that each of them holds.
//!
//! A stream is destroyed when nobody has a lane of it, or a buffer of that lane, any more: what
//! holds a lane holds the stream's life beside it, and drops it last.
//!
//! Invariant: work is queued on a buffer only under a lease, or while the block is pinned.
#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use lowtide_cuda_sim::{DriverCosts, GraphHandle, Pattern, SimDriver, SimOptions, Ticket};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::{DeviceAddress, Driver as _, DriverError, StreamHandle};
use lowtide_gpu::{
    ArenaConfig, BlockPin, Buffer, DeviceArena, DeviceError, Exported, Lane, Lease, RawBlock,
};

use super::budget::{Account, Budget};
use super::{Memory, Schedule, acts, meddle};
use crate::chance::Chance;

/// The outcome of an act: nothing, or the fault.
pub(super) type Act = Result<(), String>;

/// Tries of a call that was told to fail.
const TRIES: usize = 16;

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`: what the arena answers where it would have to wait.
const CAPTURES: i64 = 900;

pub(super) struct World {
    pub(super) arena: DeviceArena,
    pub(super) sim: Arc<SimDriver>,
    pub(super) schedule: Schedule,
    pub(super) workers: Vec<Mutex<Worker>>,
    /// Buffers on their way from one worker to another.
    pub(super) post: Mutex<Vec<Held>>,
    pub(super) faults: Mutex<Vec<String>>,
    /// Held for writing while a stream captures beside other threads: who waits for the device
    /// then spoils the capture, and only the program knows when it begins.
    pub(super) quiet: RwLock<()>,
    /// Held for writing while the arena is put to sleep, and for reading by who acts in the midst
    /// of another's call and may have to wait for a lease: a sleep waits for that call perhaps.
    pub(super) drowsy: RwLock<()>,
    /// Streams that capture now.
    pub(super) capturing: AtomicUsize,
    pub(super) acts: AtomicU64,
    pub(super) over: AtomicBool,
    /// The account on which host memory is booked, if any.
    pub(super) host: Option<Arc<Account>>,
}

/// A stream of the program's, destroyed with its last holder.
pub(super) struct Life {
    stream: StreamHandle,
    sim: Arc<SimDriver>,
}

/// A lane, and what keeps its stream.
#[derive(Clone)]
pub(super) struct Track {
    pub(super) lane: Lane,
    life: Arc<Life>,
}

/// A buffer and what is in it. Fields are dropped in order: streams last.
pub(super) struct Held {
    pub(super) buffer: Buffer<u8>,
    pub(super) pin: Option<BlockPin>,
    /// Its bytes as written, from the first on.
    pub(super) mark: u64,
    pub(super) written: ByteSize,
    /// No sleep may discard its contents.
    pub(super) keeps: bool,
    /// A sleep has discarded them, and nothing was written since.
    pub(super) is_lost: Cell<bool>,
    /// Another stream reads it, and nobody waits for that but the arena.
    pub(super) is_shared: bool,
    /// The lane of its work.
    pub(super) home: Track,
    /// The other lanes on which it is used.
    pub(super) also: Vec<Track>,
}

/// The parts of a [`Held`] other than its buffer.
pub(super) struct Rest {
    pin: Option<BlockPin>,
    pub(super) mark: u64,
    pub(super) written: ByteSize,
    keeps: bool,
    pub(super) is_lost: Cell<bool>,
    pub(super) is_shared: bool,
    pub(super) home: Track,
    pub(super) also: Vec<Track>,
}

/// A buffer that is lent, and the stream of who has its address, of which the arena knows nothing.
pub(super) struct Away {
    pub(super) exported: Exported<u8>,
    pub(super) rest: Rest,
    pub(super) foreign: Life,
}

impl Held {
    pub(super) fn part(self) -> (Buffer<u8>, Rest) {
        let Self { buffer, pin, mark, written, keeps, is_lost, is_shared, home, also } = self;
        (buffer, Rest { pin, mark, written, keeps, is_lost, is_shared, home, also })
    }
}

impl Rest {
    pub(super) fn with(self, buffer: Buffer<u8>) -> Held {
        let Self { pin, mark, written, keeps, is_lost, is_shared, home, also } = self;
        Held { buffer, pin, mark, written, keeps, is_lost, is_shared, home, also }
    }
}

impl Away {
    /// Returns `true` if its contents were discarded before it was lent.
    pub(super) fn is_lost(&self) -> Result<bool, String> {
        if self.exported.buffer().take_discarded() {
            if self.rest.keeps {
                return Err("contents that were to be kept are lost".to_owned());
            }
            self.rest.is_lost.set(true);
        }
        Ok(self.rest.is_lost.get())
    }
}

/// A block by address.
pub(super) struct HeldRaw {
    pub(super) block: RawBlock,
    /// `None` where it is not known.
    pub(super) mark: Option<u64>,
    pub(super) home: Track,
}

/// A graph, or the capture of one, and the buffers whose addresses are in it.
pub(super) struct Recorded {
    pub(super) graph: Option<GraphHandle>,
    pub(super) buffers: Vec<Held>,
    pub(super) home: Track,
}

pub(super) struct Worker {
    pub(super) chance: Chance,
    number: u64,
    marks: u64,
    pub(super) tracks: Vec<Track>,
    pub(super) held: Vec<Held>,
    pub(super) away: Vec<Away>,
    pub(super) raws: Vec<HeldRaw>,
    /// With the streams that they name.
    pub(super) leases: Vec<(Lease, Vec<Track>)>,
    pub(super) recorded: Vec<Recorded>,
    /// Lanes of what was freed in the midst of a driver call: they are dropped later, because the
    /// end of a stream waits for such calls.
    pub(super) later: Vec<Track>,
}

impl World {
    pub(super) fn open(schedule: Schedule) -> Result<Arc<Self>, String> {
        let options = SimOptions {
            order: schedule.order,
            costs: DriverCosts::zero(),
            granularity: schedule.granule,
            handle_min: schedule.granule,
            capacity: schedule.capacity,
            context_overhead: ByteSize::ZERO,
            virtual_memory: schedule.memory == Memory::Virtual,
            pool: schedule.memory == Memory::Pool,
            ..SimOptions::default()
        };
        let sim = Arc::new(SimDriver::new(options));
        if let Some(kib) = schedule.ring {
            sim.set_store_lock_limit(ByteSize::ZERO);
            sim.set_lock_limit(ByteSize::kib(kib.into()));
        }
        let (limit, reserve, sleep) = (schedule.limit, schedule.reserve, schedule.sleep());
        let (handle_max, handles_min) = (schedule.handle_max, 0);
        let config = ArenaConfig {
            limit,
            reserve,
            sleep,
            handle_max,
            handles_min,
            ..ArenaConfig::new("schedule")
        };
        let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config);
        let arena = arena.map_err(|error| error.to_string())?;
        let account =
            |(kib, refuses): (u16, u8)| Account::new(ByteSize::kib(kib.into()), refuses.into());
        let host = schedule.host.map(account);
        if let Some(host) = &host {
            arena.set_host_budget(Arc::new(Budget(Arc::clone(host))));
        }
        let shared: Vec<_> = (0..2).map(|_| track(&arena, &sim)).collect::<Result<_, _>>()?;
        let worker = |number: usize| {
            let own = (0..2).map(|_| track(&arena, &sim));
            let tracks: Result<Vec<_>, String> =
                shared.iter().cloned().map(Ok).chain(own).collect();
            Ok(Mutex::new(Worker::new(schedule.seed, number as u64, tracks?)))
        };
        let workers = (0..schedule.workers).map(worker).collect::<Result<_, String>>()?;
        Ok(Arc::new(Self {
            arena,
            sim,
            schedule,
            workers,
            post: Mutex::default(),
            faults: Mutex::default(),
            quiet: RwLock::new(()),
            drowsy: RwLock::new(()),
            capturing: AtomicUsize::new(0),
            acts: AtomicU64::new(0),
            over: AtomicBool::new(false),
            host,
        }))
    }

    /// One act of a worker; whether to go on.
    pub(super) fn turn(self: &Arc<Self>, nth: usize) -> bool {
        let mut worker = self.workers[nth].lock().unwrap_or_else(PoisonError::into_inner);
        worker.later.clear();
        meddle::plan(self, &mut worker, nth);
        if self.schedule.fails {
            worker.plan_failure(&self.sim, self.schedule.memory);
        }
        let act = acts::choose(&mut worker.chance, acts::Amid::Nothing);
        let alone = act.captures && !self.schedule.turns;
        let poisoned = PoisonError::into_inner;
        let _quiet = alone.then(|| self.quiet.write().unwrap_or_else(poisoned));
        let _beside = (!alone).then(|| self.quiet.read().unwrap_or_else(PoisonError::into_inner));
        self.perform(act, &mut worker)
    }

    /// Performs an act; whether to go on.
    pub(super) fn perform(&self, act: &acts::Entry, worker: &mut Worker) -> bool {
        self.acts.fetch_add(1, Ordering::Relaxed);
        if let Err(fault) = (act.run)(self, worker) {
            self.fault(format!("{}: {fault}", act.name));
        }
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub(super) fn fault(&self, what: String) {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }

    /// A new stream and its lane.
    pub(super) fn track(&self) -> Result<Track, String> {
        track(&self.arena, &self.sim)
    }

    /// Another lane of the same stream.
    pub(super) fn second(&self, first: &Track) -> Result<Track, String> {
        // SAFETY: the simulation looks whether a stream is there.
        let lane = unsafe { self.arena.lane(first.stream()) }.map_err(|error| error.to_string())?;
        Ok(Track { lane, life: Arc::clone(&first.life) })
    }

    /// Accepts the errors that an act of the arena may return: no memory, planned failures, and,
    /// while a stream captures, an error because the arena cannot wait.
    pub(super) fn allowed(&self, error: DeviceError) -> Act {
        let captures = self.capturing.load(Ordering::Relaxed) > 0;
        let fine = match &error {
            DeviceError::OutOfMemory { .. } | DeviceError::OutOfAddresses { .. } => true,
            DeviceError::Capturing { .. } => captures,
            DeviceError::Exported { count, .. } => *count > 0,
            DeviceError::ContentsLost { .. } => self.schedule.fails,
            // There is no way back to an address that a live block had.
            DeviceError::Unsupported { .. } => self.schedule.memory != Memory::Virtual,
            DeviceError::HostBudget { .. } => self.schedule.host.is_some(),
            DeviceError::Driver(driver) => {
                let by_capture = captures && driver.code() == Some(CAPTURES);
                !driver.is_context_lost() && (self.schedule.fails || by_capture)
            }
            _ => false,
        };
        if fine { Ok(()) } else { Err(error.to_string()) }
    }

    /// A call of the program's own, again where it was told to fail.
    pub(super) fn insist<T>(
        &self,
        call: impl Fn(&SimDriver) -> Result<T, DriverError>,
    ) -> Result<T, String> {
        insist(&self.sim, call)
    }

    /// The arena's answer, or nothing where it may have refused.
    pub(super) fn take<T>(&self, answer: Result<T, DeviceError>) -> Result<Option<T>, String> {
        match answer {
            Ok(got) => Ok(Some(got)),
            Err(error) => self.allowed(error).map(|()| None),
        }
    }

    /// Lets a stream wait for what another was given, by an event of the program's own.
    pub(super) fn order(&self, before: &Track, after: &Track) -> Act {
        self.order_streams(before.stream(), after.stream())
    }

    /// The same, for streams of which the arena knows nothing.
    pub(super) fn order_streams(&self, before: StreamHandle, after: StreamHandle) -> Act {
        let event = self.insist(|sim| sim.event_create())?;
        self.insist(|sim| sim.event_record(event, before))?;
        self.insist(|sim| sim.stream_wait_event(after, event))?;
        self.insist(|sim| sim.event_destroy(event))
    }

    /// A stream of which the arena knows nothing.
    pub(super) fn stranger(&self) -> Result<Life, String> {
        let stream = self.insist(|sim| sim.stream_create())?;
        Ok(Life { stream, sim: Arc::clone(&self.sim) })
    }

    /// A lease for work on a stream; nothing, where the arena sleeps and cannot be woken.
    fn lease_on(&self, track: &Track) -> Result<Option<Lease>, String> {
        if !self.schedule.names {
            return self.take(self.arena.enter());
        }
        self.take(track.lane.enter())
    }

    /// Returns `true` if the contents of a buffer were discarded. A lease is held: nothing sleeps
    /// meanwhile.
    pub(super) fn is_lost(&self, held: &Held) -> Result<bool, String> {
        if held.buffer.take_discarded() {
            if held.keeps {
                return Err("contents that were to be kept are lost".to_owned());
            }
            held.is_lost.set(true);
        }
        Ok(held.is_lost.get())
    }

    /// Returns the address of a buffer, or `None` if its contents were lost.
    pub(super) fn place(
        &self,
        held: &Held,
        lease: &Lease,
    ) -> Result<Option<DeviceAddress>, String> {
        let at = self.take(held.buffer.address(lease))?;
        at.map(|at| at.ok_or_else(|| "a buffer without an address".to_owned())).transpose()
    }

    /// Queues a write of all of a buffer, on its own stream.
    pub(super) fn fill(&self, held: &mut Held, mark: u64) -> Act {
        let Some(lease) = self.lease_on(&held.home)? else { return Ok(()) };
        let Some(at) = self.place(held, &lease)? else { return Ok(()) };
        let _ = self.is_lost(held)?;
        held.is_lost.set(false);
        (held.mark, held.written) = (mark, held.buffer.bytes());
        let pattern = Pattern::new(mark);
        self.insist(|sim| sim.fill(held.home.stream(), at, held.written, pattern))
    }

    /// Queues a check of what is written in a buffer.
    pub(super) fn check(&self, held: &Held, on: &Track) -> Act {
        if held.written.is_zero() {
            return Ok(());
        }
        let Some(lease) = self.lease_on(on)? else { return Ok(()) };
        let Some(at) = self.place(held, &lease)? else { return Ok(()) };
        if self.is_lost(held)? {
            return Ok(());
        }
        let pattern = Pattern::new(held.mark);
        self.insist(|sim| sim.check(on.stream(), at, held.written, pattern)).map(|_: Ticket| ())
    }
}

fn track(arena: &DeviceArena, sim: &Arc<SimDriver>) -> Result<Track, String> {
    let stream = insist(sim, |sim| sim.stream_create())?;
    let life = Arc::new(Life { stream, sim: Arc::clone(sim) });
    // SAFETY: the simulation looks whether a stream is there.
    let lane = unsafe { arena.lane(stream) }.map_err(|error| error.to_string())?;
    Ok(Track { lane, life })
}

fn insist<T>(
    sim: &SimDriver,
    call: impl Fn(&SimDriver) -> Result<T, DriverError>,
) -> Result<T, String> {
    let mut answer = call(sim);
    for _ in 0..TRIES {
        if answer.is_ok() {
            break;
        }
        answer = call(sim);
    }
    answer.map_err(|error| format!("the program's own call: {error}"))
}

impl Track {
    pub(super) fn stream(&self) -> StreamHandle {
        self.lane.stream()
    }
}

impl Life {
    pub(super) const fn stream(&self) -> StreamHandle {
        self.stream
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = insist(&self.sim, |sim| sim.stream_destroy(self.stream));
    }
}

impl Worker {
    fn new(seed: u64, number: u64, tracks: Vec<Track>) -> Self {
        Self {
            chance: Chance::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number),
            number,
            marks: 0,
            tracks,
            held: Vec::new(),
            away: Vec::new(),
            raws: Vec::new(),
            leases: Vec::new(),
            recorded: Vec::new(),
            later: Vec::new(),
        }
    }

    /// A mark that no other write of the schedule has.
    pub(super) fn mark(&mut self) -> u64 {
        self.marks += 1;
        self.number << 32 | self.marks
    }

    pub(super) fn one_in(&mut self, of: usize) -> bool {
        self.chance.below(of) == 0
    }

    pub(super) fn some_track(&mut self) -> Track {
        self.tracks[self.chance.below(self.tracks.len())].clone()
    }

    /// One of the buffers that it has.
    pub(super) fn some_held(&mut self) -> Option<usize> {
        if self.held.is_empty() { None } else { Some(self.chance.below(self.held.len())) }
    }

    /// Ends what it holds as a program would: checks all of it a last time.
    pub(super) fn end(&mut self, world: &World) -> Act {
        for recorded in std::mem::take(&mut self.recorded) {
            acts::end_graph(world, self, recorded)?;
        }
        self.held.iter().try_for_each(|held| world.check(held, &held.home))?;
        for raw in self.raws.drain(..) {
            world.arena.free(raw.block.at).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Lets go of all that it holds.
    pub(super) fn clear(&mut self) {
        self.leases.clear();
        self.recorded.clear();
        self.away.clear();
        self.held.clear();
        self.raws.clear();
        self.later.clear();
        self.tracks.clear();
    }
}

//! Replays a recording on a separate arena, in one thread, and compares the outcomes.
//!
//! The arena has a clock that shows the recording's times, and a recorder whose hash is compared:
//! the code that recorded the outcomes also computes them. No block is read or written, and no work
//! is queued on any stream. If the replay could not allocate a block of the recording, later
//! operations on that block are skipped and counted.
//!
//! Invariant: the same recording on arenas with the same settings, over drivers that respond alike,
//! produces the same hash.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::api::arena::DeviceArena;
use crate::api::buffer::Buffer;
use crate::api::compact::BlockPin;
use crate::api::config::ArenaConfig;
use crate::api::lane::Lane;
use crate::api::lease::Lease;
use crate::driver::{DeviceAddress, Driver};
use crate::exec::lane::OwnStream;
use crate::observe::record::{
    After, Asked, BlockKind, Closing, Entry, Fallen, Log, Operation, OperationHash, Recorder,
    Sleepless,
};
use crate::state::event::Origin;
use crate::state::region::AllocRequest;
use crate::types::compact::{CompactOptions, StopReason};
use crate::types::error::DeviceError;
use crate::types::sleep::{Contents, HostBudget, SleepOptions, SleepState};
use crate::types::snapshot::ArenaSnapshot;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{ManualClock, Moment};
use lowtide_core::sync::atomic::{AtomicBool, Ordering};

/// The result of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Replayed {
    /// The hash of the replay's outcomes.
    pub hash: OperationHash,
    /// The last line of the recording, if there is one.
    pub closing: Option<Closing>,
    /// The first line of the recording with a different outcome in the replay. `None` if all were
    /// equal, if the recording has no outcomes (the log of another allocator), or if a supplied
    /// recorder stopped early.
    pub first_difference: Option<u64>,
    /// The number of operations replayed.
    pub operations: u64,
    /// The number of operations skipped, because their block or lane could not be created before.
    pub skipped: u64,
    /// The arena's figures at the end, while the remaining blocks are live.
    pub snapshot: ArenaSnapshot,
}

impl Replayed {
    /// Returns `true` if the hash equals that of the recording's last line; `None` if there is no
    /// such line.
    ///
    /// Expected for a recording of one thread ([`Closing::one_thread`]) that is replayed over a
    /// driver of the same kind with the same address space; `docs/RECORDING.md` has the details.
    #[must_use]
    pub fn matches(&self) -> Option<bool> {
        self.closing.map(|closing| closing.hash == self.hash)
    }
}

/// A replay in progress, which runs step by step, so that its arena can be inspected in between.
///
/// ```
/// # use std::sync::Arc;
/// use lowtide_gpu::HostDriver;
/// use lowtide_gpu::record::Log;
///
/// let text = "\
/// lowtide-recording version=1
/// 0 open backend=host asynchronous=no clock=0 limit=none reserve=4194304 decay=never growth=same \
/// name=a
/// 7 alloc id=1 kind=buffer region=dynamic bytes=2097152 align=4 lane=none
/// 9 free id=1 after=all
/// ";
/// let log = Log::parse(text)?;
/// let mut replay = log.start(Arc::new(HostDriver::new()), log.header().config())?;
/// let mut live = Vec::new();
/// while replay.step() {
///     live.push(replay.arena().snapshot().live.get());
/// }
/// assert_eq!(live, [2097152, 0]);
/// assert!(replay.finish().first_difference.is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Replay<'a> {
    log: &'a Log,
    next: usize,
    held: BTreeMap<u64, Held>,
    /// The numbers of raw blocks, by address.
    raw: BTreeMap<DeviceAddress, u64>,
    lanes: BTreeMap<u64, Lane>,
    streams: BTreeMap<u64, Weak<OwnStream>>,
    arena: DeviceArena,
    clock: ManualClock,
    budget: Arc<Budget>,
    recorder: Recorder,
    /// The recording's hash so far; `None` if outcomes are not recorded.
    expected: Option<OperationHash>,
    first_difference: Option<u64>,
    skipped: u64,
}

/// The host budget of the replay. It rejects when the budget of the recording did.
#[derive(Debug, Default)]
struct Budget {
    refuses: AtomicBool,
}

impl HostBudget for Budget {
    fn reserve(&self, _: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        if self.refuses.load(Ordering::Relaxed) {
            return Err("refused in the recording".to_owned());
        }
        Ok(Box::new(()))
    }
}

/// A block of the replay.
#[derive(Debug)]
enum Held {
    Buffer(Buffer<u8>, Vec<BlockPin>),
    Raw(DeviceAddress),
}

impl Log {
    /// Replays the whole recording on a new arena over this driver.
    /// [`header().config()`](crate::record::Header::config) opens an arena like the recorded one.
    ///
    /// A failed request is not an error here: it is an outcome, and part of the hash.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::open`].
    pub fn replay(
        &self,
        driver: Arc<dyn Driver>,
        config: ArenaConfig,
    ) -> Result<Replayed, DeviceError> {
        let mut replay = self.start(driver, config)?;
        while replay.step() {}
        Ok(replay.finish())
    }

    /// Opens the arena for a replay. A recorder in `config` records the replay.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::open`].
    pub fn start(
        &self,
        driver: Arc<dyn Driver>,
        mut config: ArenaConfig,
    ) -> Result<Replay<'_>, DeviceError> {
        let recorder = config.recorder.get_or_insert_with(Recorder::hash_only).clone();
        let clock = ManualClock::new();
        clock.advance(self.header().started);
        // No time passes while a wake waits for memory.
        config.sleep.wake_timeout = Duration::ZERO;
        let arena = DeviceArena::open(driver, Arc::new(clock.clone()), config)?;
        let budget = Arc::new(Budget::default());
        arena.set_host_budget(Arc::clone(&budget) as Arc<dyn HostBudget>);
        let mut replay = Replay {
            log: self,
            next: 0,
            held: BTreeMap::new(),
            raw: BTreeMap::new(),
            lanes: BTreeMap::new(),
            streams: BTreeMap::new(),
            arena,
            clock,
            budget,
            recorder,
            expected: None,
            first_difference: None,
            skipped: 0,
        };
        if self.header().layout.is_some() {
            let mut expected = OperationHash::EMPTY;
            expected.open(self.header());
            replay.expected = Some(expected);
            replay.compare(2);
        }
        Ok(replay)
    }
}

impl Replay<'_> {
    /// Replays the next operation. Returns `false` if none is left.
    pub fn step(&mut self) -> bool {
        let log = self.log;
        let Some(entry) = log.entries().get(self.next) else { return false };
        self.next += 1;
        let due = Moment::after_origin(log.header().started) + entry.at;
        self.clock.advance(due - self.now());
        self.skipped += u64::from(self.perform(entry).is_none());
        if let Some(expected) = &mut self.expected {
            expected.add(&entry.operation);
        }
        // A move is a part of the outcome of the compaction that follows.
        if !matches!(entry.operation, Operation::Move { .. }) {
            self.compare(entry.line);
        }
        true
    }

    /// Returns the arena of the replay.
    #[must_use]
    pub const fn arena(&self) -> &DeviceArena {
        &self.arena
    }

    /// Ends the replay, and its recording if there is one; frees all live blocks.
    #[must_use]
    pub fn finish(self) -> Replayed {
        let snapshot = self.arena.snapshot();
        let _ = self.recorder.finish(); // the recorder's owner asks for its error
        Replayed {
            hash: self.recorder.hash(),
            closing: self.log.closing(),
            first_difference: self.first_difference,
            operations: (self.next as u64).saturating_sub(self.skipped),
            skipped: self.skipped,
            snapshot,
        }
    }

    fn now(&self) -> Moment {
        lowtide_core::clock::Clock::now(&self.clock)
    }

    /// Compares the outcome of the operation with the recorded one.
    fn compare(&mut self, line: u64) {
        if self.recorder.error().is_some() {
            self.expected = None;
        }
        if self.expected.is_some_and(|expected| expected != self.recorder.hash()) {
            self.first_difference = Some(line);
            self.expected = None;
        }
    }

    /// Performs an operation. The arena's answer becomes part of the recorder's hash. Returns
    /// `None` if the operation needs a block or a lane that could not be created.
    fn perform(&mut self, entry: &Entry) -> Option<()> {
        let arena = &self.arena;
        match &entry.operation {
            Operation::Alloc { id, asked, .. } => self.alloc(*id, *asked)?,
            Operation::Refuse { asked, .. } => self.refuse(*asked)?,
            Operation::Free { id, after } => self.free(*id, *after)?,
            Operation::Resize { id, bytes, .. } => {
                let _ = self.buffer(*id)?.0.resize(bytes.as_usize().unwrap_or(usize::MAX));
            }
            Operation::Move { .. } => {}
            Operation::Use { id, lane } => {
                let lane = self.lanes.get(lane)?;
                match self.held.get_mut(id)? {
                    Held::Buffer(buffer, _) => buffer.add_lane(lane),
                    Held::Raw(at) => drop(arena.record_use(*at, lane)),
                }
            }
            Operation::Pin { id } => {
                let (buffer, pins) = self.buffer(*id)?;
                pins.extend(buffer.pin());
            }
            Operation::Unpin { id } => drop(self.buffer(*id)?.1.pop()),
            Operation::Lane { lane, stream } => self.lane(*lane, *stream)?,
            Operation::LaneEnd { lane } => drop(self.lanes.remove(lane)?),
            Operation::EndRun { lane, .. } => drop(self.lanes.get(lane)?.end_run()),
            Operation::Limit { limit } => arena.set_limit(*limit),
            Operation::DecayTime { time } => arena.set_decay(*time),
            Operation::Decay { now, .. } => drop(arena.decay(self.since_start(*now))),
            Operation::Trim { keep, .. } => drop(arena.trim(*keep)),
            Operation::Shrink { .. } => drop(arena.shrink()),
            Operation::Compact { options, stopped, moves, .. } => {
                self.compact(*options, *stopped == StopReason::Busy && *moves == 0);
            }
            Operation::Reset { .. } => {
                drop(arena.reset());
                self.raw.clear();
                self.held.retain(|_, held| matches!(held, Held::Buffer(..)));
            }
            Operation::Close { .. } => drop(arena.close()),
            Operation::Contents { id, contents } => {
                drop(self.buffer(*id)?.0.set_contents(*contents));
            }
            Operation::Sleep { stable, dynamic, outcome } => {
                self.sleep(*stable, *dynamic, *outcome);
            }
            Operation::Wake { .. } => drop(arena.wake()),
        }
        Some(())
    }

    /// Returns a live buffer and its pins.
    fn buffer(&mut self, id: u64) -> Option<(&mut Buffer<u8>, &mut Vec<BlockPin>)> {
        match self.held.get_mut(&id)? {
            Held::Buffer(buffer, pins) => Some((buffer, pins)),
            Held::Raw(_) => None,
        }
    }

    fn since_start(&self, now: Duration) -> Moment {
        Moment::after_origin(self.log.header().started) + now
    }

    fn alloc(&mut self, id: u64, asked: Asked) -> Option<()> {
        let lane = self.lane_of(asked)?;
        if let Ok(held) = take(&self.arena, asked, lane) {
            if let Held::Raw(at) = held {
                self.raw.insert(at, id);
            }
            self.held.insert(id, held);
        }
        Some(())
    }

    /// Repeats a failed request. If it succeeds, frees the block.
    fn refuse(&self, asked: Asked) -> Option<()> {
        let lane = self.lane_of(asked)?;
        if let Ok(Held::Raw(at)) = take(&self.arena, asked, lane) {
            drop(self.arena.free(at));
        }
        Some(())
    }

    /// Returns the lane for a block, if any; `None` if it is missing.
    fn lane_of(&self, asked: Asked) -> Option<Option<&Lane>> {
        asked.lane.map_or(Some(None), |lane| self.lanes.get(&lane).map(Some))
    }

    fn free(&mut self, id: u64, after: After) -> Option<()> {
        match self.held.remove(&id)? {
            Held::Buffer(mut buffer, pins) => {
                if after == After::All {
                    drop(buffer.resize(0)); // as if no lane had used the buffer
                }
                drop(buffer);
                drop(pins);
            }
            Held::Raw(at) => {
                self.raw.remove(&at);
                if after == After::All {
                    let _ = self.arena.record_unknown_use(at);
                }
                drop(self.arena.free(at));
            }
        }
        Some(())
    }

    fn lane(&mut self, number: u64, stream: u64) -> Option<()> {
        let own = match self.streams.get(&stream).and_then(Weak::upgrade) {
            Some(own) => own,
            None => OwnStream::new(self.arena.inner(), stream).ok()?,
        };
        self.streams.insert(stream, Arc::downgrade(&own));
        self.lanes.insert(number, self.arena.lane_on(&own).ok()?);
        Some(())
    }

    /// Takes a lease if the arena is awake and a lease should be held. Wakes no arena.
    fn lease_if(&self, is_held: bool) -> Option<Lease> {
        let is_held = is_held && self.arena.state() == SleepState::Awake;
        is_held.then(|| self.arena.enter().ok()).flatten()
    }

    /// Puts the arena to sleep, or not, as in the recording. If the arena stayed awake in the
    /// recording, it stays awake here, unless the driver was the reason.
    fn sleep(&self, stable: Contents, dynamic: Contents, outcome: Fallen) {
        let (why, state) = match outcome {
            Fallen::Asleep(_) => (None, SleepState::Asleep),
            Fallen::Failed { why, state } => (Some(why), state),
        };
        let is_leased = match why {
            None | Some(Sleepless::Budget | Sleepless::Driver) => false,
            Some(Sleepless::State) => state != SleepState::Asleep,
            Some(Sleepless::Leased | Sleepless::Cancelled | Sleepless::Capturing) => true,
        };
        let _lease = self.lease_if(is_leased);
        self.budget.refuses.store(why == Some(Sleepless::Budget), Ordering::Relaxed);
        let _ = self.arena.sleep(SleepOptions { drain: Duration::ZERO, stable, dynamic });
    }

    /// Compacts a region; with `busy`, while a lease is held.
    fn compact(&mut self, options: CompactOptions, busy: bool) {
        let _lease = self.lease_if(busy);
        let (raw, held) = (&mut self.raw, &mut self.held);
        let outcome = self.arena.compact(options, |moved| {
            if let Some(id) = raw.remove(&moved.from) {
                raw.insert(moved.to, id);
                held.insert(id, Held::Raw(moved.to));
            }
        });
        drop(outcome);
    }
}

impl Drop for Replay<'_> {
    /// Frees all blocks, and waits for all work of the device.
    fn drop(&mut self) {
        let _ = self.recorder.finish();
        self.held.clear();
        self.lanes.clear();
        let _ = self.arena.reset();
        let _ = self.arena.close();
    }
}

/// Allocates a block as requested.
fn take(arena: &DeviceArena, asked: Asked, lane: Option<&Lane>) -> Result<Held, DeviceError> {
    let (region, bytes, align) = (asked.region, asked.bytes, asked.align);
    let len = bytes.as_usize().unwrap_or(usize::MAX);
    let buffer = match asked.kind {
        BlockKind::Raw => {
            let block = match lane {
                Some(lane) => lane.alloc_raw(bytes, align, region)?,
                None => arena.alloc_raw(bytes, align, region)?,
            };
            return Ok(Held::Raw(block.at));
        }
        BlockKind::Reserve => arena.reserve::<u8>(len, region)?,
        BlockKind::Buffer => {
            let lane = lane.map(Lane::known);
            let origin = Origin { lane: lane.and_then(|lane| lane.number), ..Origin::BUFFER };
            arena.inner().layout::<u8>(len, region, origin)?;
            let wanted = AllocRequest::new(bytes, align).map(|wanted| wanted.by(origin));
            arena.alloc_as::<u8>(wanted, lane, len, region)?
        }
    };
    Ok(Held::Buffer(buffer, Vec::new()))
}

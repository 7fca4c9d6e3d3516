//! The calls from an arena to its recorder, made under the lock of the arena's state; a single
//! branch if there is no recorder.
//!
//! It changes nothing in the arena.
//!
//! Invariant: each function here is called while the lock is held under which the operation takes
//! effect, after everything that reads the clock for it.

use super::numbers::Numbers;
use super::operation::{
    After, Asked, BlockKind, Closed, Fallen, Header, Layout, Operation, Place, Resized, Sleepless,
    Why,
};
use super::recorder::Recorder;
use super::text::VERSION;
use crate::api::lane::LaneInner;
use crate::driver::Driver;
use crate::exec::executor::Locked;
use crate::exec::inner::ArenaInner;
use crate::state::arena::ArenaState;
use crate::state::failure::Cause;
use crate::state::ranges::BlockName;
use crate::state::region::{AllocRequest, Placement, Region};
use crate::types::compact::{CompactOptions, CompactReport};
use crate::types::config::ArenaConfig;
use crate::types::error::DeviceError;
use crate::types::sleep::{SleepOptions, SleepReport, SleepState, WakeReport};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, Moment};

/// The source of a request for a block, as a recording shows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    /// None for a resize, which is recorded as a whole.
    pub(crate) kind: Option<BlockKind>,
    /// The number of its lane; 0 for none.
    pub(crate) lane: u64,
}

impl Origin {
    pub(crate) const BUFFER: Self = Self { kind: Some(BlockKind::Buffer), lane: 0 };
    pub(crate) const RAW: Self = Self { kind: Some(BlockKind::Raw), lane: 0 };
    pub(crate) const RESERVE: Self = Self { kind: Some(BlockKind::Reserve), lane: 0 };
    pub(crate) const RESIZE: Self = Self { kind: None, lane: 0 };

    /// The request; `None` for a part of a resize.
    fn asked(self, region: Region, wanted: AllocRequest) -> Option<Asked> {
        Some(Asked {
            kind: self.kind?,
            region,
            bytes: ByteSize::new(wanted.requested),
            align: ByteSize::new(wanted.align),
            lane: (self.lane > 0).then_some(self.lane),
        })
    }
}

/// A refused request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Refused {
    Block(Region, AllocRequest),
    Resize(Region, BlockName, u64),
}

impl Refused {
    fn operation(self, numbers: &Numbers, why: Why) -> Option<Operation> {
        Some(match self {
            Self::Block(region, wanted) => {
                Operation::Refuse { asked: wanted.origin.asked(region, wanted)?, why: Some(why) }
            }
            Self::Resize(region, id, bytes) => Operation::Resize {
                id: numbers.of(region, id)?,
                bytes: ByteSize::new(bytes),
                outcome: Resized::Refused(why),
            },
        })
    }
}

const fn place(region: Region, placed: Placement) -> Place {
    let (offset, size) = (ByteSize::new(placed.span.offset), ByteSize::new(placed.span.size));
    Place { region, offset, size }
}

const fn why(cause: Cause) -> Option<Why> {
    match cause {
        Cause::Limit { .. } => Some(Why::Limit),
        Cause::Device => Some(Why::Device),
        Cause::Addresses => Some(Why::Addresses),
        Cause::Driver => Some(Why::Driver),
        Cause::Uncounted => None,
    }
}

/// The time for memory that goes idle, as a replay is to see it.
pub(crate) fn seen(recorder: Option<&Recorder>, clock: &dyn Clock) -> Moment {
    let now = clock.now();
    recorder.map_or(now, |recorder| recorder.see(now))
}

impl ArenaState {
    /// Records an operation, if there is a recorder.
    #[inline]
    pub(crate) fn tell(
        &self,
        clock: &dyn Clock,
        make: impl FnOnce(&mut Numbers) -> Option<Operation>,
    ) {
        if let Some(recorder) = &self.recorder {
            recorder.book(clock, make);
        }
    }

    /// Returns the bytes that a thread cache may keep: none if it would hide operations from the
    /// recorder.
    pub(crate) fn front_kept(&self, front: ByteSize) -> ByteSize {
        if self.recorder.is_some() { ByteSize::ZERO } else { self.history.front_kept(front) }
    }

    /// A block was handed out.
    pub(crate) fn tell_alloc(
        &self,
        clock: &dyn Clock,
        region: Region,
        wanted: AllocRequest,
        placed: Placement,
    ) {
        self.tell(clock, |numbers| {
            let asked = wanted.origin.asked(region, wanted)?;
            let id = numbers.give(region, placed.id, asked.kind == BlockKind::Raw);
            Some(Operation::Alloc { id, asked, place: Some(place(region, placed)) })
        });
    }

    /// Something was refused.
    pub(crate) fn tell_refusal(&self, clock: &dyn Clock, what: Refused, cause: Cause) {
        self.tell(clock, |numbers| what.operation(numbers, why(cause)?));
    }

    /// Records the refusal of a block that is larger than the arena can ever hold.
    pub(crate) fn tell_too_large(
        &self,
        clock: &dyn Clock,
        region: Region,
        bytes: u64,
        align: ByteSize,
        origin: Origin,
    ) {
        let wanted = AllocRequest { size: bytes, align: align.get(), requested: bytes, origin };
        self.tell(clock, |numbers| {
            Refused::Block(region, wanted).operation(numbers, Why::TooLarge)
        });
    }

    /// A block was freed.
    pub(crate) fn tell_free(&self, clock: &dyn Clock, region: Region, id: BlockName, after: After) {
        self.tell(clock, |numbers| Some(Operation::Free { id: numbers.take(region, id)?, after }));
    }

    /// Records a resize in place.
    pub(crate) fn tell_resize(&self, clock: &dyn Clock, region: Region, placed: Placement) {
        self.tell(clock, |numbers| {
            let id = numbers.of(region, placed.id)?;
            let outcome = Resized::InPlace(place(region, placed));
            Some(Operation::Resize { id, bytes: ByteSize::new(placed.requested), outcome })
        });
    }

    /// The arena fell asleep.
    pub(crate) fn tell_asleep(&self, clock: &dyn Clock, options: SleepOptions, slept: SleepReport) {
        self.tell_sleep(clock, options, Fallen::Asleep(slept));
    }

    /// The arena did not fall asleep, or not as it should, and is in this state now.
    pub(crate) fn tell_sleepless(
        &self,
        clock: &dyn Clock,
        options: SleepOptions,
        error: &DeviceError,
        state: SleepState,
    ) {
        let why = match error {
            // Replayed with a lease: a recording shows no loan.
            DeviceError::Leased { .. } | DeviceError::Exported { .. } => Sleepless::Leased,
            DeviceError::SleepCancelled { .. } => Sleepless::Cancelled,
            DeviceError::Capturing { .. } => Sleepless::Capturing,
            DeviceError::HostBudget { .. } | DeviceError::Callback { .. } => Sleepless::Budget,
            DeviceError::State { .. } => Sleepless::State,
            _ => Sleepless::Driver,
        };
        self.tell_sleep(clock, options, Fallen::Failed { why, state });
    }

    fn tell_sleep(&self, clock: &dyn Clock, options: SleepOptions, outcome: Fallen) {
        let SleepOptions { stable, dynamic, .. } = options;
        self.tell(clock, |_| Some(Operation::Sleep { stable, dynamic, outcome }));
    }

    /// Records the end of a wake; without figures if it failed.
    pub(crate) fn tell_wake(&self, clock: &dyn Clock, woken: Option<WakeReport>) {
        self.tell(clock, |_| Some(Operation::Wake { woken }));
    }

    /// Frees a block whose contents are in another one now, which takes its number.
    pub(crate) fn replace(
        &mut self,
        region: Region,
        old: Placement,
        new: Placement,
        clock: &dyn Clock,
    ) {
        let mut number = None;
        self.tell(clock, |numbers| {
            number = numbers.pass(region, old.id, new.id);
            None
        });
        self.release(region, old, clock);
        self.tell(clock, |_| {
            let outcome = Resized::Moved(place(region, new));
            Some(Operation::Resize { id: number?, bytes: ByteSize::new(new.requested), outcome })
        });
    }
}

impl ArenaInner {
    /// Passes recorded lines to the sink if enough of them wait. Called without holding a lock.
    #[inline]
    pub(crate) fn pass_on(&self) {
        if let Some(recorder) = &self.recorder {
            recorder.pass_on();
        }
    }

    /// Records an operation that does not change the arena's state, if there is a recorder.
    pub(crate) fn tell(&self, make: impl FnOnce(&mut Numbers) -> Option<Operation>) {
        if self.recorder.is_some() {
            self.lock().tell(&*self.clock, make);
            self.pass_on();
        }
    }

    /// Tells the recorder that a lane uses a block.
    pub(crate) fn tell_use(&self, region: Region, id: BlockName, lane: &LaneInner) {
        let lane = lane.number();
        if lane > 0 {
            self.tell(|numbers| Some(Operation::Use { id: numbers.of(region, id)?, lane }));
        }
    }

    /// Ends the recording of an arena that is gone.
    pub(crate) fn end_recording(&self, books: Locked<'_>) {
        drop(books);
        if let Some(recorder) = &self.recorder {
            recorder.gone();
        }
    }

    /// Tells the recorder how a close went.
    pub(crate) fn tell_closed(&self, outcome: &Result<(), DeviceError>) {
        let outcome = match outcome {
            Ok(()) => Closed::Done,
            Err(DeviceError::LiveBlocks { .. }) => Closed::LiveBlocks,
            Err(_) => Closed::Failed,
        };
        self.tell(|_| Some(Operation::Close { outcome }));
    }
}

impl Header {
    /// Of an arena that is being opened.
    pub(crate) fn of(
        config: &ArenaConfig,
        driver: &dyn Driver,
        clock: &dyn Clock,
        reserved: [ByteSize; 2],
    ) -> Self {
        let capabilities = driver.capabilities();
        let granularity = config.granule.unwrap_or(capabilities.granularity);
        Self {
            version: VERSION,
            name: config.name.clone(),
            backend: driver.backend(),
            asynchronous: capabilities.asynchronous,
            started: clock.now().since_origin(),
            limit: config.limit,
            reserve: config.reserve,
            decay: config.decay,
            growth: config.growth,
            layout: Some(Layout { granularity, reserved }),
        }
    }
}

impl Operation {
    /// A compaction that ended.
    pub(crate) const fn compact(options: CompactOptions, done: &CompactReport) -> Self {
        let CompactReport { stopped, moves, moved, skipped, .. } = *done;
        Self::Compact { options, stopped, moves, moved, skipped }
    }
}

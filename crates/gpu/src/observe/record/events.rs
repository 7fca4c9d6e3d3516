//! Converts events of the arena to operations of a recording.
//!
//! `lines` calls it, in the order of the events. Events that are a part of another operation's
//! outcome have no operation.

use super::numbers::Numbers;
use super::operation::{Asked, Closed, Fallen, GivenUp, Operation, Place, Resized, Sleepless, Why};
use crate::state::event::{
    ArenaEvent, BlockKind, FailedRequest, FreeCause, LaneNumber, Origin, ReleaseCause,
};
use crate::state::failure::Cause;
use crate::state::region::{AllocRequest, Placement};
use crate::types::compact::{CompactOptions, CompactReport};
use crate::types::error::DeviceError;
use crate::types::region::Region;
use crate::types::sleep::SleepOptions;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// Returns the operation of an event in a recording that started at this moment; `None` if the
/// event has none.
pub(super) fn operation(
    event: &ArenaEvent,
    numbers: &mut Numbers,
    started: Moment,
) -> Option<Operation> {
    Some(match *event {
        ArenaEvent::Allocated { region, request, placed } => {
            let asked = asked(region, request)?;
            let id = numbers.give(region, placed.id, asked.kind == BlockKind::Raw);
            Operation::Alloc { id, asked, place: Some(place(region, placed)) }
        }
        ArenaEvent::AllocFailed { request, cause, .. } => failed(request, why(cause)?, numbers)?,
        ArenaEvent::TooLarge { region, request } => {
            failed(FailedRequest::Alloc(region, request), Why::TooLarge, numbers)?
        }
        ArenaEvent::Freed { region, placed, cause } => freed(region, placed, cause, numbers)?,
        ArenaEvent::Resized { region, after, .. } => {
            let (id, bytes) = (numbers.of(region, after.id)?, ByteSize::new(after.requested));
            Operation::Resize { id, bytes, outcome: Resized::InPlace(place(region, after)) }
        }
        ArenaEvent::Moved { region, id, from, to, size } => {
            let id = numbers.of(region, id)?;
            Operation::Move { id, region, from: from.offset, to: to.offset, size }
        }
        ArenaEvent::Used { region, id, lane } => {
            Operation::Use { id: numbers.of(region, id)?, lane: lane.get() }
        }
        ArenaEvent::Pinned { region, id } => Operation::Pin { id: numbers.of(region, id)? },
        ArenaEvent::Unpinned { region, id } => Operation::Unpin { id: numbers.of(region, id)? },
        ArenaEvent::ContentsSet { region, id, contents } => {
            Operation::Contents { id: numbers.of(region, id)?, contents }
        }
        ArenaEvent::RawReset { blocks, bytes } => {
            numbers.forget_raw();
            Operation::Reset { blocks, bytes }
        }
        ArenaEvent::Released { cause, released, done } => {
            given_up(cause, GivenUp { released, done }, started)?
        }
        ArenaEvent::LaneOpened { lane, stream } => {
            Operation::Lane { lane: lane.get(), stream: numbers.enter(stream) }
        }
        ArenaEvent::LaneEnded { lane, stream } => {
            numbers.leave(stream);
            Operation::LaneEnd { lane: lane.get() }
        }
        ArenaEvent::RunEnded { lane, done } => Operation::EndRun { lane: lane.get(), done },
        ArenaEvent::LimitSet { limit } => Operation::Limit { limit },
        ArenaEvent::DecayTimeSet { time } => Operation::DecayTime { time },
        ArenaEvent::Compacted { options, report } => compacted(options, report),
        ArenaEvent::Asleep { options, report } => sleep(options, Fallen::Asleep(report)),
        ArenaEvent::SleepFailed { options, ref error, state } => {
            sleep(options, Fallen::Failed { why: sleepless(error), state })
        }
        ArenaEvent::Woke { report } => Operation::Wake { woken: Some(report) },
        ArenaEvent::WakeFailed => Operation::Wake { woken: None },
        ArenaEvent::CloseEnded { ref error } => {
            Operation::Close { outcome: closed(error.as_ref()) }
        }
        ArenaEvent::Committed { .. }
        | ArenaEvent::Decommitted { .. }
        | ArenaEvent::Remapped { .. }
        | ArenaEvent::Idle => return None,
    })
}

/// Returns the request; `None` for the new block of a resize, which is recorded as a whole.
fn asked(region: Region, request: AllocRequest) -> Option<Asked> {
    let Origin { kind, lane } = request.origin;
    Some(Asked {
        kind: kind?,
        region,
        bytes: ByteSize::new(request.requested),
        align: ByteSize::new(request.align),
        lane: lane.map(LaneNumber::get),
    })
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

fn failed(request: FailedRequest, why: Why, numbers: &Numbers) -> Option<Operation> {
    Some(match request {
        FailedRequest::Alloc(region, request) => {
            Operation::Refuse { asked: asked(region, request)?, why: Some(why) }
        }
        FailedRequest::Resize(region, id, bytes) => {
            let (id, bytes) = (numbers.of(region, id)?, ByteSize::new(bytes));
            Operation::Resize { id, bytes, outcome: Resized::Refused(why) }
        }
    })
}

fn freed(
    region: Region,
    placed: Placement,
    cause: FreeCause,
    numbers: &mut Numbers,
) -> Option<Operation> {
    match cause {
        FreeCause::Owner(after) => {
            Some(Operation::Free { id: numbers.take(region, placed.id)?, after })
        }
        FreeCause::Reset => {
            numbers.take(region, placed.id);
            None
        }
        FreeCause::MovedTo(new) => {
            let id = numbers.pass(region, placed.id, new.id)?;
            let (bytes, outcome) = (new.requested, Resized::Moved(place(region, new)));
            Some(Operation::Resize { id, bytes: ByteSize::new(bytes), outcome })
        }
    }
}

fn given_up(cause: ReleaseCause, outcome: GivenUp, started: Moment) -> Option<Operation> {
    match cause {
        ReleaseCause::Decay { now } => Some(Operation::Decay { now: now - started, outcome }),
        ReleaseCause::Trim { keep } => Some(Operation::Trim { keep, outcome }),
        ReleaseCause::Shrink => Some(Operation::Shrink { outcome }),
        ReleaseCause::Close => None,
    }
}

const fn compacted(options: CompactOptions, report: CompactReport) -> Operation {
    let CompactReport { stopped, moves, moved, skipped, .. } = report;
    Operation::Compact { options, stopped, moves, moved, skipped }
}

const fn sleep(options: SleepOptions, outcome: Fallen) -> Operation {
    let SleepOptions { stable, dynamic, .. } = options;
    Operation::Sleep { stable, dynamic, outcome }
}

const fn sleepless(error: &DeviceError) -> Sleepless {
    match error {
        // Replayed with a lease: a recording does not show exports.
        DeviceError::Leased { .. } | DeviceError::Exported { .. } => Sleepless::Leased,
        DeviceError::SleepCancelled { .. } => Sleepless::Cancelled,
        DeviceError::Capturing { .. } => Sleepless::Capturing,
        DeviceError::HostBudget { .. } | DeviceError::Callback { .. } => Sleepless::Budget,
        DeviceError::State { .. } => Sleepless::State,
        _ => Sleepless::Driver,
    }
}

const fn closed(error: Option<&DeviceError>) -> Closed {
    match error {
        None => Closed::Done,
        Some(DeviceError::LiveBlocks { .. }) => Closed::LiveBlocks,
        Some(_) => Closed::Failed,
    }
}

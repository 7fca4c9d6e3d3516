//! The state of an arena as plain values, without a driver, a lock or a thread.

pub(crate) mod aging;
pub(crate) mod arena;
pub(crate) mod compact;
pub(crate) mod failure;
pub(crate) mod growth;
pub(crate) mod moves;
pub(crate) mod outstanding;
pub(crate) mod pending;
pub(crate) mod raw;
pub(crate) mod region;
pub(crate) mod segment;
pub(crate) mod segment_list;
pub(crate) mod sleep;
pub(crate) mod streams;

pub(crate) use aging::Ages;
pub(crate) use arena::{ArenaState, CommitOptions};
pub(crate) use compact::plan::{Hold, OUTLOOK_PASSES};
pub(crate) use failure::{AllocFailure, Cause};
pub(crate) use outstanding::Release;
pub(crate) use pending::{Dependencies, StreamUses};
pub(crate) use raw::{RawUse, RawUser, Users};
pub(crate) use region::{
    AllocRequest, CacheCounts, LaneNumber, PlacedRun, Placement, RequestOrigin, Search,
};
pub(crate) use segment::{GranuleCall, Run, Runs, START, Segment};
pub(crate) use sleep::{OutgoingRun, Saved, SleepPhase, StoredCopy};
pub(crate) use streams::{Pick, StreamEvent, StreamKey, StreamTable, StreamUse, Wait};

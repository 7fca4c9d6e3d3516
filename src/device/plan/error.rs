//! What can be wrong with a problem or with a plan, with the buffer's name and the numbers.
//!
//! Raised where the fault is certain, and for the first one that is found. It formats text and
//! decides nothing.
//!
//! Invariant: every error about buffers names one of them.

use thiserror::Error;

use super::problem::Window;
use crate::bytes::ByteSize;

/// Why a problem cannot be posed, or cannot be solved by anyone.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanError {
    /// A problem has room for 2^32 - 1 buffers.
    #[error("{name}: there are {limit} buffers already, which is all a problem has numbers for")]
    TooMany {
        /// The buffer that was to be added.
        name: String,
        /// The most.
        limit: u32,
    },
    /// The end of a lifetime lies before its start.
    #[error("{name}: live from {first} until before {end}: expected an end at or after the start")]
    Inverted {
        /// The buffer.
        name: String,
        /// The first step.
        first: i64,
        /// The first step at which it is not live.
        end: i64,
    },
    /// An alignment of zero.
    #[error("{name}: an alignment of 0: expected 1 or more")]
    NoAlign {
        /// The buffer.
        name: String,
    },
    /// A gap lies outside its buffer's lifetime, is inverted, or lies over the gap before it.
    #[error("{name}: a gap from {first} until before {end}: expected one within {from} to {until}")]
    Gap {
        /// The buffer.
        name: String,
        /// The gap's first step.
        first: i64,
        /// The first step after it.
        end: i64,
        /// Where it may begin: at the buffer's start, or the end of the gap before.
        from: i64,
        /// Where it has to end at the latest.
        until: i64,
    },
    /// A window is inverted or reaches beyond its buffer.
    #[error("{name}: a window {window}: expected one within its {size} bytes")]
    Window {
        /// The buffer.
        name: String,
        /// The window.
        window: Window,
        /// The buffer's size in bytes.
        size: u64,
    },
    /// A fixed offset is not a multiple of the alignment that it has to have.
    #[error("{name}: fixed at {offset}: expected a multiple of {align}")]
    FixedMisaligned {
        /// The buffer.
        name: String,
        /// Its fixed offset in bytes.
        offset: u64,
        /// Its alignment, or that of what shares its memory.
        align: u64,
    },
    /// Two buffers that are live at once have fixed offsets which lie over each other.
    #[error("{name}: fixed at {offset} over {other}, which is live at step {step} as well")]
    FixedOverlap {
        /// One buffer.
        name: String,
        /// Its fixed offset in bytes.
        offset: u64,
        /// The other one.
        other: String,
        /// A step at which both are live.
        step: i64,
    },
    /// The sizes, rounded up to alignments, and the fixed offsets sum up to more than can be
    /// counted with.
    #[error("{name}: {size} with those before it: expected at most {limit} in all")]
    TooLarge {
        /// The buffer with which the sum went too far.
        name: String,
        /// Its own size.
        size: ByteSize,
        /// The most that all may have together.
        limit: ByteSize,
    },
    /// A number that is no buffer of this problem.
    #[error("buffer {number}: the problem has {count}")]
    Unknown {
        /// The number.
        number: u32,
        /// How many there are.
        count: usize,
    },
    /// A buffer was placed over a second one, or, in the end, over itself.
    #[error("{name}: over {over}: expected a buffer that shares nobody's memory so far")]
    SharedTwice {
        /// The buffer.
        name: String,
        /// What it was to lie over.
        over: String,
    },
    /// What is to share another buffer's memory reaches beyond it.
    #[error("{name}: {size} bytes at {at} of {over}, which has {room}")]
    BeyondOther {
        /// The buffer.
        name: String,
        /// Its size in bytes.
        size: u64,
        /// What it was to lie over.
        over: String,
        /// Where in it, in bytes.
        at: u64,
        /// That buffer's size.
        room: u64,
    },
    /// What shares another buffer's memory has gaps, or has to be elsewhere by its own alignment
    /// or fixed offset, or as memory of the caller's own.
    #[error("{name}: cannot lie at {at} of {over}: its gaps, alignment, offset or role forbid it")]
    CannotShare {
        /// The buffer.
        name: String,
        /// What it was to lie over.
        over: String,
        /// Where in it, in bytes.
        at: u64,
    },
    /// Memory of the caller's own is never overwritten.
    #[error("{name}: in the place of {over}, which is held by the caller")]
    ReuseOfExternal {
        /// The buffer.
        name: String,
        /// What it was to overwrite.
        over: String,
    },
    /// A buffer is overwritten in place while something of it is still used.
    #[error("{name}: begins at step {first} in the place of {over}, which is live until {end}")]
    ReuseBeforeLastUse {
        /// The buffer that overwrites.
        name: String,
        /// Its first step.
        first: i64,
        /// What is still live.
        over: String,
        /// The first step at which that is not live any more.
        end: i64,
    },
    /// Segments cannot have what a buffer needs: its offset is fixed, alignments have no common
    /// multiple that can be counted with, or segments have no bytes.
    #[error("{name}: a fixed offset or an alignment that segments of {limit} cannot have")]
    NoSegment {
        /// The buffer.
        name: String,
        /// The largest size of a segment.
        limit: ByteSize,
    },
    /// A value lies in a kind of memory about which nothing was said.
    #[error("{name}: in memory of kind {number}: expected one of the {count} that were named")]
    NoKind {
        /// The value.
        name: String,
        /// Its kind.
        number: u32,
        /// How many kinds there are.
        count: usize,
    },
    /// Two kinds of memory have the same name: what lies in one of them would lie over the other.
    #[error("memory {name}: named twice: expected one problem for each kind of memory")]
    KindTwice {
        /// The name of the kind.
        name: String,
    },
    /// What is wrong with the problem of one kind of memory.
    #[error("memory {kind}: {error}")]
    InKind {
        /// The name of the kind.
        kind: String,
        /// What is wrong.
        error: Box<Self>,
    },
    /// The plan that was made does not hold: an error of this crate, found before the plan left it.
    #[error("the plan that was made does not hold: {0}")]
    Refuted(Box<PlanFault>),
}

/// What is wrong with offsets, as [`Problem::verify`](super::Problem::verify) finds it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanFault {
    /// There are not as many offsets as buffers.
    #[error("{found} offsets for {expected} buffers")]
    Count {
        /// Offsets.
        found: usize,
        /// Buffers.
        expected: usize,
    },
    /// Two buffers lie over each other at a step.
    #[error("{name} at {offset} and {other} at {other_offset} are live at step {step} and overlap")]
    Overlap {
        /// One buffer, or the one whose memory it shares.
        name: String,
        /// Its offset in bytes.
        offset: u64,
        /// The other one.
        other: String,
        /// Its offset in bytes.
        other_offset: u64,
        /// The first step at which both are there.
        step: i64,
    },
    /// An offset that is no multiple of the buffer's alignment.
    #[error("{name} at {offset}: expected a multiple of {align}")]
    Misaligned {
        /// The buffer.
        name: String,
        /// Its offset in bytes.
        offset: u64,
        /// Its alignment.
        align: u64,
    },
    /// A buffer with a fixed offset lies elsewhere.
    #[error("{name} at {offset}: it is fixed at {fixed}")]
    Moved {
        /// The buffer.
        name: String,
        /// Where it lies.
        offset: u64,
        /// Where it has to be.
        fixed: u64,
    },
    /// A buffer that shares another one's memory lies elsewhere.
    #[error("{name} at {offset}: it shares memory of {over}, which is at {over_offset}")]
    Apart {
        /// The buffer.
        name: String,
        /// Where it lies.
        offset: u64,
        /// Whose memory it shares.
        over: String,
        /// Where that lies.
        over_offset: u64,
    },
    /// A buffer reaches beyond what is said to be enough.
    #[error("{name} ends at {end}, beyond {peak}")]
    BeyondPeak {
        /// The buffer.
        name: String,
        /// Where it ends.
        end: u64,
        /// What is said to be enough.
        peak: u64,
    },
    /// The problem itself cannot be solved.
    #[error(transparent)]
    Problem(#[from] PlanError),
}

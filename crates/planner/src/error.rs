//! Errors of problems and plans, with the buffer's name and the numbers.
//!
//! An error is raised as soon as it is certain, for the first fault found. This module formats text
//! and decides nothing.
//!
//! Invariant: every error about buffers names one of them.

use std::borrow::Cow;
use std::io;
use std::ops::Range;

use lowtide_core::bytes::ByteSize;
use thiserror::Error;

/// An error of a problem, of a file with one, or of a plan.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanError {
    /// A problem holds at most 2^32 - 1 buffers.
    #[error("cannot add {name}: the problem already has {limit} buffers, the maximum")]
    TooMany {
        /// The buffer that does not fit.
        name: String,
        /// The most buffers of a problem.
        limit: u32,
    },
    /// A lifetime ends before it starts.
    #[error("{name}: live from {first} until {end}: expected an end at or after the start")]
    Inverted {
        /// The buffer.
        name: String,
        /// The first step.
        first: i64,
        /// The first step at which the buffer is not live.
        end: i64,
    },
    /// An alignment is zero.
    #[error("{name}: invalid alignment 0: expected 1 or more")]
    NoAlign {
        /// The buffer.
        name: String,
    },
    /// A gap lies outside its buffer's lifetime, is inverted, or overlaps the gap before it.
    #[error("{name}: gap from {first} until {end}: expected a gap within {from} to {until}")]
    Gap {
        /// The buffer.
        name: String,
        /// The gap's first step.
        first: i64,
        /// The first step after it.
        end: i64,
        /// The earliest valid start: the buffer's start, or the end of the gap before.
        from: i64,
        /// The latest valid end.
        until: i64,
    },
    /// A window is inverted or extends beyond its buffer.
    #[error("{name}: window {window:?}: expected a window within its {size} bytes")]
    Window {
        /// The buffer.
        name: String,
        /// The window.
        window: Range<u64>,
        /// The buffer's size in bytes.
        size: u64,
    },
    /// The sum of the sizes, rounded up to alignments, and the fixed offsets exceeds the supported
    /// range.
    #[error("{name}: {size} exceeds the total size limit: expected at most {limit} in all")]
    TooLarge {
        /// The buffer at which the sum exceeded the limit.
        name: String,
        /// The size of that buffer.
        size: ByteSize,
        /// The most that all buffers may have together.
        limit: ByteSize,
    },
    /// A number does not belong to a buffer of this problem.
    #[error("unknown buffer {number}: the problem has {count} buffers")]
    Unknown {
        /// The number.
        number: u32,
        /// The number of buffers.
        count: usize,
    },
    /// A buffer was made to share the memory of two others, or of itself.
    #[error("{name}: cannot share memory of {over}: expected a buffer that shares no memory yet")]
    SharedTwice {
        /// The buffer.
        name: String,
        /// The buffer whose memory it should share.
        over: String,
    },
    /// A buffer extends beyond the buffer whose memory it shares.
    #[error("{name}: {size} bytes at offset {at} do not fit {over}, which has {room} bytes")]
    BeyondOther {
        /// The buffer.
        name: String,
        /// Its size in bytes.
        size: u64,
        /// The buffer whose memory it should share.
        over: String,
        /// The offset in that buffer, in bytes.
        at: u64,
        /// The size of that buffer.
        room: u64,
    },
    /// A buffer that shares memory has gaps, or its alignment, fixed offset or role conflicts with
    /// the place.
    #[error(
        "{name}: cannot share memory of {over} at offset {at}: its gaps, alignment, fixed \
        offset or role conflict"
    )]
    CannotShare {
        /// The buffer.
        name: String,
        /// The buffer whose memory it should share.
        over: String,
        /// The offset in that buffer, in bytes.
        at: u64,
    },
    /// A buffer would overwrite external memory, which is not allowed.
    #[error("{name}: cannot overwrite {over}, which is external memory")]
    ReuseOfExternal {
        /// The buffer.
        name: String,
        /// The external buffer.
        over: String,
    },
    /// A buffer would overwrite another one in place while that is still in use.
    #[error("{name}: cannot overwrite {over} at step {first}: it is live until {end}")]
    ReuseBeforeLastUse {
        /// The buffer that overwrites.
        name: String,
        /// Its first step.
        first: i64,
        /// The buffer that is still live.
        over: String,
        /// The first step at which that buffer is not live.
        end: i64,
    },
    /// Segments cannot hold a buffer: its offset is fixed, alignments have no common multiple in
    /// the supported range, or the segment size is zero.
    #[error("{name}: segments of {limit} cannot satisfy its fixed offset or alignment")]
    NoSegment {
        /// The buffer.
        name: String,
        /// The maximum size of a segment.
        limit: ByteSize,
    },
    /// A value lies in an unknown kind of memory.
    #[error("{name}: unknown memory kind {number}: expected a number below {count}")]
    NoKind {
        /// The value.
        name: String,
        /// The number of the kind.
        number: u32,
        /// The number of kinds.
        count: u32,
    },
    /// Two kinds of memory have the same name; their plans would overlap.
    #[error("duplicate memory kind {name}: expected one problem for each kind")]
    KindTwice {
        /// The name of the kind.
        name: String,
    },
    /// The problem of one kind of memory is invalid.
    #[error("memory kind {kind}: {error}")]
    InKind {
        /// The name of the kind.
        kind: String,
        /// The error.
        error: Box<Self>,
    },
    /// The number of offsets differs from the number of buffers.
    #[error("found {found} offsets: expected {expected}, one for each buffer")]
    OffsetCount {
        /// The number of offsets.
        found: usize,
        /// The number of buffers.
        expected: usize,
    },
    /// Two buffers overlap at a step, or their fixed offsets do.
    #[error("{name} at {offset} and {other} at {other_offset} overlap at step {step}")]
    Overlap {
        /// The first buffer, or the one whose memory it shares.
        name: String,
        /// Its offset in bytes.
        offset: u64,
        /// The other buffer.
        other: String,
        /// Its offset in bytes.
        other_offset: u64,
        /// The first step at which both are live.
        step: i64,
    },
    /// An offset, or a fixed one, is not a multiple of the required alignment.
    #[error("{name} at {offset}: expected a multiple of {align}")]
    Misaligned {
        /// The buffer.
        name: String,
        /// Its offset in bytes.
        offset: u64,
        /// The alignment of the buffer, or of a buffer that shares its memory.
        align: u64,
    },
    /// A buffer is not at its fixed offset.
    #[error("{name} at {offset}: expected its fixed offset {fixed}")]
    Moved {
        /// The buffer.
        name: String,
        /// Its offset.
        offset: u64,
        /// Its fixed offset.
        fixed: u64,
    },
    /// A buffer is not in the memory that it shares.
    #[error("{name} at {offset}: expected to share the memory of {over} at {over_offset}")]
    Apart {
        /// The buffer.
        name: String,
        /// Its offset.
        offset: u64,
        /// The buffer whose memory it shares.
        over: String,
        /// The offset of that buffer.
        over_offset: u64,
    },
    /// A buffer extends beyond the stated peak.
    #[error("{name} ends at {end}: expected an end within the peak of {peak}")]
    BeyondPeak {
        /// The buffer.
        name: String,
        /// The end of the buffer.
        end: u64,
        /// The stated peak.
        peak: u64,
    },
    /// A line of a file is invalid.
    #[error("line {line}: {error}")]
    AtLine {
        /// The line number, from 1.
        line: u64,
        /// The error in the line.
        #[source]
        error: Box<Self>,
    },
    /// The line cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(io::ErrorKind),
    /// The line is longer than 1 MiB.
    #[error("longer than {limit} bytes")]
    LineTooLong {
        /// The limit in bytes.
        limit: u64,
    },
    /// A header or a value is not valid.
    #[error("invalid {column} {found:?}: expected {expected}")]
    InvalidValue {
        /// Its column, or what of the line it is.
        column: &'static str,
        /// The text found.
        found: String,
        /// A description of valid values.
        expected: Cow<'static, str>,
    },
    /// There is a line after the empty line that ends the file.
    #[error("unexpected line after the empty line that ends the file")]
    AfterEnd,
    /// A request does not fit the rest of a [`Bump`](super::Bump) block.
    #[error("no room for {requested}: {left} of {capacity} are left")]
    BumpFull {
        /// The requested size.
        requested: ByteSize,
        /// The bytes left, at the requested alignment.
        left: ByteSize,
        /// The size of the block.
        capacity: ByteSize,
    },
    /// A plan does not serve a problem: lifetimes, alignments, gaps, roles, fixed offsets, the
    /// sharing of memory or the number of buffers differ.
    #[error("the problem differs from the planned one in more than sizes")]
    OtherShape,
    /// A plan does not serve a problem: a buffer is larger than planned.
    #[error("{name}: {size} is larger than the planned {planned}")]
    LargerThanPlanned {
        /// The buffer.
        name: String,
        /// Its size.
        size: ByteSize,
        /// The planned size.
        planned: ByteSize,
    },
    /// The new plan failed verification. This is a bug in this crate, caught before the plan is
    /// returned.
    #[error("the new plan failed verification: {0}")]
    Refuted(Box<Self>),
}

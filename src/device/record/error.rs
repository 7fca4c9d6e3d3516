//! What can go wrong with a recording: while it is written, and while it is read.
//!
//! Texts out of a file are cut to a few characters before they are repeated.
//!
//! Invariant: an error of a reader names the line, what was found there and what was expected.

use std::fmt;

use thiserror::Error;

use crate::bytes::ByteSize;

/// Characters of a file that an error repeats at most.
const FOUND_MAX: usize = 80;

/// Why a recorder stopped. The arena works on.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordError {
    /// The sink did not take what was written.
    #[error("the sink of a recording failed: {message}")]
    Sink {
        /// What it said.
        message: String,
    },
    /// The sink panicked.
    #[error("the sink of a recording panicked: {message}")]
    Panicked {
        /// What it said.
        message: String,
    },
    /// The recording is as long as it may be; what was written by then is whole.
    #[error("the recording has its most, {most}")]
    Full {
        /// The most that may be written.
        most: ByteSize,
    },
    /// More waits to be written than is kept: the sink used the arena without end.
    #[error("{waiting} of a recording wait to be written; the most is {most}")]
    Overrun {
        /// How much waits.
        waiting: ByteSize,
        /// The most that may.
        most: ByteSize,
    },
    /// The process is a fork of the one that made the recorder.
    #[error("the recorder was made before a fork")]
    Forked,
}

/// A recording that cannot be read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("line {line}: {fault}")]
#[non_exhaustive]
pub struct LogError {
    /// The line, from 1.
    pub line: u64,
    /// What is wrong with it.
    pub fault: LogFault,
}

/// What is wrong with a line of a recording.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogFault {
    /// Something else than what stands there.
    #[error("expected {expected}, found {found}")]
    Unexpected {
        /// What was expected.
        expected: &'static str,
        /// What was found.
        found: Found,
    },
    /// No number, or one that is too large.
    #[error("{field}: expected a number of at most {most}, found {found}")]
    Number {
        /// Which field.
        field: &'static str,
        /// The most that it may be.
        most: u64,
        /// What was found.
        found: Found,
    },
    /// A number that is too small.
    #[error("{field}: expected a number of at least {least}, found {found}")]
    TooSmall {
        /// Which field.
        field: &'static str,
        /// The least that it may be.
        least: u64,
        /// What was found.
        found: u64,
    },
    /// A recording of another version.
    #[error("expected a recording of version 1 to {known}, found version {found}")]
    Version {
        /// Its version.
        found: u64,
        /// The last one that can be read.
        known: u64,
    },
    /// The last line has no newline at its end: it is not whole.
    #[error("expected a newline at the end, found the end of the file after {found}")]
    Truncated {
        /// The line.
        found: Found,
    },
    /// A line that is too long.
    #[error("expected at most {most} bytes, found a longer line")]
    TooLong {
        /// The most bytes of a line.
        most: usize,
    },
    /// Bytes that are no text.
    #[error("expected UTF-8, found the byte 0x{byte:02x} after {valid} bytes")]
    NotUtf8 {
        /// The bytes before it.
        valid: usize,
        /// The byte.
        byte: u8,
    },
    /// A block that was freed before.
    #[error("expected a live block, found block {id}, which was freed in line {freed}")]
    FreedTwice {
        /// The number of the block.
        id: u64,
        /// The line in which it was freed.
        freed: u64,
    },
    /// A block that was never handed out.
    #[error("expected a block that was handed out, found block {id}")]
    UnknownBlock {
        /// The number of the block.
        id: u64,
    },
    /// A lane that was never made, or is gone.
    #[error("expected a lane that is there, found lane {lane}")]
    UnknownLane {
        /// The number of the lane.
        lane: u64,
    },
    /// An address that is not live, in the log of another allocator.
    #[error("expected an address that was handed out, found {pointer:#x}")]
    UnknownPointer {
        /// The address.
        pointer: u64,
    },
    /// An address that is live already, in the log of another allocator.
    #[error("expected a new address, found {pointer:#x}, which was handed out in line {line}")]
    LivePointer {
        /// The address.
        pointer: u64,
        /// The line in which it was handed out.
        line: u64,
    },
    /// A block freed with another size than it was asked for, in the log of another allocator.
    #[error("expected a size of {asked}, as {pointer:#x} was asked for with, found {found}")]
    OtherSize {
        /// The address of the block.
        pointer: u64,
        /// The size that was asked for.
        asked: u64,
        /// The size that stands there.
        found: u64,
    },
    /// The file could not be read.
    #[error("expected to read on, found an error: {message}")]
    Read {
        /// What the system said.
        message: String,
    },
}

impl LogFault {
    pub(super) fn unexpected(expected: &'static str, found: &str) -> Self {
        Self::Unexpected { expected, found: Found::new(found) }
    }

    /// In this line.
    pub(super) const fn at(self, line: u64) -> LogError {
        LogError { line, fault: self }
    }
}

/// A piece of a file, cut short where it is long.
#[derive(Clone, PartialEq, Eq)]
pub struct Found(String);

impl Found {
    pub(super) fn new(text: &str) -> Self {
        let mut short: String = text.chars().take(FOUND_MAX).collect();
        if short.len() < text.len() {
            short.push_str("...");
        }
        Self(short)
    }

    /// The piece.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("nothing") } else { write!(f, "{:?}", self.0) }
    }
}

impl fmt::Debug for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

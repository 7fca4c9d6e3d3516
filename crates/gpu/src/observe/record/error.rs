//! Errors of writing and reading recordings.
//!
//! Texts from a file are cut to a few characters before they are quoted.
//!
//! Invariant: an error of a reader names the line, the text found there and the expected one.

use std::fmt;

use thiserror::Error;

use lowtide_core::bytes::ByteSize;

/// The maximum number of characters of a file that an error quotes.
const FOUND_MAX: usize = 80;

/// The reason that a recorder stopped. The arena continues to work.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordError {
    /// The sink returned an error.
    #[error("the recording's sink failed: {message}")]
    Sink {
        /// The sink's error message.
        message: String,
    },
    /// The sink panicked.
    #[error("the recording's sink panicked: {message}")]
    Panicked {
        /// The panic message.
        message: String,
    },
    /// The recording reached its size limit; the lines written so far are complete.
    #[error("recording reached its size limit ({most})")]
    Full {
        /// The size limit.
        most: ByteSize,
    },
    /// Too many lines are waiting to be written, because the sink itself uses the arena without
    /// end.
    #[error("the recording's sink is too slow: {waiting} wait to be written, limit {most}")]
    Overrun {
        /// The bytes that are waiting.
        waiting: ByteSize,
        /// The limit of waiting bytes.
        most: ByteSize,
    },
    /// The process is a fork of the one that created the recorder.
    #[error("the recorder was created before a fork")]
    Forked,
}

/// An error of reading a recording.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("line {line}: {fault}")]
#[non_exhaustive]
pub struct LogError {
    /// The line number, from 1.
    pub line: u64,
    /// The error in the line.
    pub fault: LogFault,
}

/// An error in a line of a recording.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogFault {
    /// The text differs from the expected one.
    #[error("expected {expected}, found {found}")]
    Unexpected {
        /// The expected text.
        expected: &'static str,
        /// The text found.
        found: Found,
    },
    /// A field is not a number, or the number is too large.
    #[error("{field}: expected a number of at most {most}, found {found}")]
    Number {
        /// The name of the field.
        field: &'static str,
        /// The largest valid number.
        most: u64,
        /// The text found.
        found: Found,
    },
    /// A number is too small.
    #[error("{field}: expected a number of at least {least}, found {found}")]
    TooSmall {
        /// The name of the field.
        field: &'static str,
        /// The smallest valid number.
        least: u64,
        /// The number found.
        found: u64,
    },
    /// The recording has an unsupported version.
    #[error("expected a recording of version 1 to {known}, found version {found}")]
    Version {
        /// Its version.
        found: u64,
        /// The newest supported version.
        known: u64,
    },
    /// The last line is incomplete: it does not end with a newline.
    #[error("expected a newline at the end, found the end of the file after {found}")]
    Truncated {
        /// The text of the line.
        found: Found,
    },
    /// A line is too long.
    #[error("expected at most {most} bytes, found a longer line")]
    TooLong {
        /// The limit of a line, in bytes.
        most: usize,
    },
    /// A line is not valid UTF-8.
    #[error("expected UTF-8, found the byte 0x{byte:02x} after {valid} bytes")]
    NotUtf8 {
        /// The number of valid bytes before it.
        valid: usize,
        /// The invalid byte.
        byte: u8,
    },
    /// A block was already freed.
    #[error("expected a live block, found block {id}, which was freed in line {freed}")]
    FreedTwice {
        /// The number of the block.
        id: u64,
        /// The line in which it was freed.
        freed: u64,
    },
    /// A block was never allocated.
    #[error("expected an allocated block, found block {id}")]
    UnknownBlock {
        /// The number of the block.
        id: u64,
    },
    /// A lane was never created, or no longer exists.
    #[error("expected an existing lane, found lane {lane}")]
    UnknownLane {
        /// The number of the lane.
        lane: u64,
    },
    /// In the log of another allocator: an address is not live.
    #[error("expected a live address, found {pointer:#x}")]
    UnknownPointer {
        /// The address.
        pointer: u64,
    },
    /// In the log of another allocator: an address is already live.
    #[error("expected a new address, found {pointer:#x}, which was allocated in line {line}")]
    LivePointer {
        /// The address.
        pointer: u64,
        /// The line in which it was allocated.
        line: u64,
    },
    /// In the log of another allocator: a block was freed with a different size than requested.
    #[error("expected the requested size of {asked} for {pointer:#x}, found {found}")]
    OtherSize {
        /// The address of the block.
        pointer: u64,
        /// The requested size.
        asked: u64,
        /// The size found.
        found: u64,
    },
    /// The file cannot be read.
    #[error("cannot read the file: {message}")]
    Read {
        /// The system's error message.
        message: String,
    },
}

impl LogFault {
    pub(super) fn unexpected(expected: &'static str, found: &str) -> Self {
        Self::Unexpected { expected, found: Found::new(found) }
    }

    /// Returns the error of this fault in a line.
    pub(super) const fn at(self, line: u64) -> LogError {
        LogError { line, fault: self }
    }
}

/// A piece of a file, truncated if it is long.
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

    /// Returns the text.
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

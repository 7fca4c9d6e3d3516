//! A recording read from a file: its header, its operations, and its last line if there is one.
//!
//! The reader reads one bounded line at a time and stops at the first invalid one, because later
//! lines cannot be trusted. It opens no arena; `replay` does.
//!
//! Invariants: `log.to_string()` is the recorder's output, byte for byte; memory use depends on the
//! length of the input and not on any number in it.

use std::fmt;
use std::io::{BufRead, BufReader, Read};

use super::check::Check;
use super::error::{Found, LogError, LogFault};
use super::format::{self, LINE_MAX, Line};
use super::hash::OperationHash;
use super::operation::{Closing, Entry, Header};

/// A recording of one arena.
///
/// ```
/// use lowtide_gpu::record::{Log, LogFault};
///
/// let text = "\
/// lowtide-recording version=1
/// 0 open backend=host asynchronous=no clock=0 limit=none reserve=4194304 decay=never growth=same \
/// name=a
/// 7 alloc id=1 kind=buffer region=dynamic bytes=300 align=4 lane=none
/// 9 free id=1 after=all
/// 12 free id=1 after=all
/// ";
/// let wrong = Log::parse(text).unwrap_err();
/// assert_eq!((wrong.line, wrong.fault), (5, LogFault::FreedTwice { id: 1, freed: 4 }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    pub(super) header: Header,
    pub(super) entries: Vec<Entry>,
    pub(super) closing: Option<Closing>,
}

impl Log {
    /// Parses a recording from a text.
    ///
    /// # Errors
    /// [`LogError`] for the first invalid line. A truncated line is invalid; a missing last line is
    /// not.
    pub fn parse(text: &str) -> Result<Self, LogError> {
        Self::read(text.as_bytes())
    }

    /// Reads a recording from a file or another reader, with buffering. The time is proportional to
    /// its length, with O(log n) per line in the blocks that it names.
    ///
    /// # Errors
    /// The errors of [`Log::parse`], and [`LogFault::Read`].
    pub fn read(from: impl Read) -> Result<Self, LogError> {
        let mut lines = Lines::new(from);
        let Some(first) = lines.next()? else {
            return Err(LogFault::unexpected("lowtide-recording version=2", "").at(1));
        };
        let version = format::first(1, first)?;
        let Some(second) = lines.next()? else {
            return Err(LogFault::unexpected("the line of the operation `open`", "").at(2));
        };
        let header = format::header(2, second, version)?;
        let mut check = Check::new(&header);
        let mut log = Self { header, entries: Vec::new(), closing: None };
        loop {
            let line = lines.number + 1;
            let Some(text) = lines.next()? else { return Ok(log) };
            if log.closing.is_some() {
                return Err(LogFault::unexpected("no line after the end", text).at(line));
            }
            match format::line(line, text, version)? {
                Line::Operation(at, operation) => {
                    let checked = check.time(at);
                    let checked = checked.and_then(|()| check.operation(line, &operation));
                    checked.map_err(|fault| fault.at(line))?;
                    log.entries.push(Entry { line, at, operation });
                }
                Line::Closing(closing) => {
                    check.time(closing.at).map_err(|fault| fault.at(line))?;
                    log.closing = Some(closing);
                }
            }
        }
    }

    /// Returns the settings of the recorded arena.
    #[must_use]
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the operations, in the order in which they took effect.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the last line; `None` if the recording was not ended properly.
    #[must_use]
    pub const fn closing(&self) -> Option<Closing> {
        self.closing
    }

    /// Computes the hash of the recorded outcomes, which equals that of the last line unless the
    /// file was changed. O(operations).
    #[must_use]
    pub fn hash(&self) -> OperationHash {
        let mut hash = OperationHash::EMPTY;
        hash.open(&self.header);
        self.entries.iter().for_each(|entry| hash.add(&entry.operation));
        hash
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.header)?;
        self.entries.iter().try_for_each(|entry| writeln!(f, "{entry}"))?;
        self.closing.map_or(Ok(()), |closing| writeln!(f, "{closing}"))
    }
}

/// The lines of a file, one at a time.
pub(super) struct Lines<R> {
    from: BufReader<R>,
    line: Vec<u8>,
    /// The number of the last line that was read.
    pub(super) number: u64,
    /// `true` if the last line may lack its newline.
    is_lenient: bool,
}

impl<R: Read> Lines<R> {
    pub(super) fn new(from: R) -> Self {
        Self { from: BufReader::new(from), line: Vec::new(), number: 0, is_lenient: false }
    }

    /// Like `new`, but the last line may lack its newline.
    pub(super) fn lenient(from: R) -> Self {
        Self { is_lenient: true, ..Self::new(from) }
    }

    /// Returns the next line without its newline.
    pub(super) fn next(&mut self) -> Result<Option<&str>, LogError> {
        self.number += 1;
        let fault = |fault: LogFault| Err(fault.at(self.number));
        self.line.clear();
        let mut bounded = (&mut self.from).take(LINE_MAX as u64 + 1);
        if let Err(error) = bounded.read_until(b'\n', &mut self.line) {
            return fault(LogFault::Read { message: error.to_string() });
        }
        if self.line.is_empty() {
            return Ok(None);
        }
        let is_whole = self.line.pop_if(|last| *last == b'\n').is_some();
        if self.line.len() > LINE_MAX {
            return fault(LogFault::TooLong { most: LINE_MAX });
        }
        match std::str::from_utf8(&self.line) {
            Ok(text) if is_whole || self.is_lenient => Ok(Some(text)),
            Ok(text) => fault(LogFault::Truncated { found: Found::new(text) }),
            Err(error) => {
                let valid = error.valid_up_to();
                let byte = self.line.get(valid).copied().unwrap_or_default();
                fault(LogFault::NotUtf8 { valid, byte })
            }
        }
    }
}

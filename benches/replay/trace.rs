//! A recorded run: which blocks were allocated and freed, in order.
//!
//! It reads the recordings of an arena (`docs/RECORDING.md`), and files with the same lines of
//! `alloc`, `free` and `mark`; other events are skipped. The file may be compressed with gzip. It
//! reads files and replays nothing.
//!
//! Invariants: every block is allocated once and freed once, later; at the end nothing is live.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use serde::Deserialize;
use thiserror::Error;

/// The first bytes of a file that gzip wrote.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// The most bytes that a block may have: what no device has.
const BLOCK_MAX: u64 = 1 << 48;

/// An event of a block; blocks are numbered from 0 in the order of their allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Alloc { block: usize, bytes: u64 },
    Free { block: usize },
}

/// A whole trace.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    /// Its file's name without `.gz` and one more extension, blanks as dashes.
    pub(crate) name: String,
    pub(crate) events: Vec<Event>,
    /// The number of blocks that are allocated in it.
    pub(crate) blocks: usize,
    /// The most that is live at once: the sum of what was asked for.
    pub(crate) live_peak: u64,
    /// The most blocks that are live at once.
    pub(crate) blocks_peak: usize,
    /// The events before which a mark stands.
    #[allow(dead_code, reason = "another bench uses it")]
    pub(crate) marks: Vec<usize>,
}

/// The reason why a file is no trace.
#[derive(Debug, Error)]
pub(crate) enum TraceError {
    #[error("{path}: {error}", path = path.display())]
    Read { path: PathBuf, error: std::io::Error },
    #[error("{path}: line {line}: {what}", path = path.display())]
    Line { path: PathBuf, line: usize, what: String },
}

/// A line of a recording.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Line {
    Alloc {
        address: u64,
        bytes: u64,
    },
    Free {
        address: u64,
    },
    Resize {
        address: u64,
        bytes: u64,
    },
    Move {
        address: u64,
        to: u64,
    },
    Mark,
    #[serde(other)]
    Other,
}

impl Trace {
    /// Reads a file, plain or compressed.
    pub(crate) fn open(path: &Path) -> Result<Self, TraceError> {
        let failed = |error| TraceError::Read { path: path.to_owned(), error };
        let mut file = BufReader::new(File::open(path).map_err(failed)?);
        let gzip = file.fill_buf().map_err(failed)?.starts_with(&GZIP);
        let text: Box<dyn Read> =
            if gzip { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
        let mut reader = Reader::default();
        let mut lines = 0;
        let wrong = |line, what| TraceError::Line { path: path.to_owned(), line, what };
        for line in BufReader::new(text).lines() {
            lines += 1;
            let line = serde_json::from_str(&line.map_err(failed)?)
                .map_err(|error| wrong(lines, error.to_string()))?;
            reader.line(line).map_err(|what| wrong(lines, what))?;
        }
        let trace = reader.end(path);
        if trace.events.is_empty() {
            return Err(wrong(lines, "the file ends here: expected the event `alloc`".to_owned()));
        }
        Ok(trace)
    }
}

/// A trace so far.
#[derive(Debug, Default)]
struct Reader {
    trace: Trace,
    /// The number and the size of each live block, by its address.
    live: BTreeMap<u64, (usize, u64)>,
    live_bytes: u64,
}

impl Reader {
    /// Takes one line, or says what is wrong with it.
    fn line(&mut self, line: Line) -> Result<(), String> {
        match line {
            Line::Alloc { address, bytes } => self.alloc(address, bytes),
            Line::Free { address } => self.free(address),
            Line::Resize { address, bytes } => {
                self.free(address)?;
                self.alloc(address, bytes)
            }
            Line::Move { address, to } => {
                let block = self.take(address)?;
                self.live.insert(to, block);
                Ok(())
            }
            Line::Mark => {
                self.trace.marks.push(self.trace.events.len());
                Ok(())
            }
            Line::Other => Ok(()),
        }
    }

    fn alloc(&mut self, address: u64, bytes: u64) -> Result<(), String> {
        if bytes == 0 || bytes > BLOCK_MAX {
            return Err(format!("expected from 1 to {BLOCK_MAX} bytes, found {bytes}"));
        }
        let block = self.trace.blocks;
        if self.live.insert(address, (block, bytes)).is_some() {
            return Err(format!("expected a free address, found {address}, where a block is live"));
        }
        self.trace.blocks += 1;
        self.live_bytes += bytes;
        self.trace.live_peak = self.trace.live_peak.max(self.live_bytes);
        self.trace.blocks_peak = self.trace.blocks_peak.max(self.live.len());
        self.trace.events.push(Event::Alloc { block, bytes });
        Ok(())
    }

    fn free(&mut self, address: u64) -> Result<(), String> {
        let (block, bytes) = self.take(address)?;
        self.live_bytes -= bytes;
        self.trace.events.push(Event::Free { block });
        Ok(())
    }

    fn take(&mut self, address: u64) -> Result<(usize, u64), String> {
        let block = self.live.remove(&address);
        block.ok_or_else(|| format!("expected the address of a live block, found {address}"))
    }

    /// Frees what is live where the recording was cut short.
    fn end(self, path: &Path) -> Trace {
        let Self { mut trace, live, .. } = self;
        trace.events.extend(live.into_values().map(|(block, _)| Event::Free { block }));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.strip_suffix(".gz").unwrap_or(&name);
        let name = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
        Trace { name: name.split_whitespace().collect::<Vec<_>>().join("-"), ..trace }
    }
}

//! A recorded run: which blocks were allocated and freed, in order.
//!
//! Text, a line each: `a ID BYTES` allocates, `f ID` frees, `# TEXT` marks what begins there. The
//! file may be compressed with gzip. It reads files and replays nothing.
//!
//! Invariants: every id is allocated once and freed once, later; at the end nothing is live; no
//! more than `EVENTS_MAX` events and `TEXT_MAX` bytes of text are read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use thiserror::Error;

/// The first bytes of a file that gzip wrote.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// The most events of one trace.
const EVENTS_MAX: usize = 1 << 26;
/// The most bytes of one trace's text.
const TEXT_MAX: u64 = 1 << 31;
/// The most bytes that a block may have: what no device has.
const BLOCK_MAX: u64 = 1 << 48;
/// The longest line that an error quotes, in characters.
const QUOTE_MAX: usize = 40;

/// An event of a block; blocks are numbered from 0 in the order of their allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Alloc { block: usize, bytes: u64 },
    Free { block: usize },
}

/// A whole trace.
#[derive(Clone, Debug)]
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

impl Trace {
    /// Reads a file, plain or compressed.
    pub(crate) fn open(path: &Path) -> Result<Self, TraceError> {
        let failed = |error| TraceError::Read { path: path.to_owned(), error };
        let mut file = BufReader::new(File::open(path).map_err(failed)?);
        let gzip = file.fill_buf().map_err(failed)?.starts_with(&GZIP);
        let text: Box<dyn Read> =
            if gzip { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
        let name = name_of(path);
        Self::read(name, BufReader::new(text.take(TEXT_MAX))).map_err(|fault| match fault {
            Fault::Read(error) => failed(error),
            Fault::Line(line, what) => TraceError::Line { path: path.to_owned(), line, what },
        })
    }

    fn read(name: String, text: impl BufRead) -> Result<Self, Fault> {
        let mut reader = Reader::default();
        let mut lines = 0;
        for line in text.lines() {
            lines += 1;
            reader.line(&line.map_err(Fault::Read)?).map_err(|what| Fault::Line(lines, what))?;
        }
        if let Some((id, _)) = reader.live.first_key_value() {
            let what = format!("the trace ends here, and {id} is live: expected `f {id}` before");
            return Err(Fault::Line(lines, what));
        }
        if reader.events.is_empty() {
            return Err(Fault::Line(
                lines,
                "the trace ends here: expected `a ID BYTES`".to_owned(),
            ));
        }
        Ok(Self {
            name,
            events: reader.events,
            blocks: reader.sizes.len(),
            live_peak: reader.live_peak,
            blocks_peak: reader.blocks_peak,
            marks: reader.marks,
        })
    }
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    let name = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    name.split_whitespace().collect::<Vec<_>>().join("-")
}

/// A fault in a text.
#[derive(Debug)]
enum Fault {
    Read(std::io::Error),
    Line(usize, String),
}

/// A trace so far.
#[derive(Debug, Default)]
struct Reader {
    events: Vec<Event>,
    /// Size of each block.
    sizes: Vec<u64>,
    /// The block that each id ever was.
    ids: BTreeMap<u64, usize>,
    /// Those that are live.
    live: BTreeMap<u64, usize>,
    live_bytes: u64,
    live_peak: u64,
    blocks_peak: usize,
    marks: Vec<usize>,
}

impl Reader {
    /// Takes one line, or says what is wrong with it.
    fn line(&mut self, line: &str) -> Result<(), String> {
        if line.starts_with('#') {
            // One for each place is enough, however many lines there are.
            if self.marks.last() != Some(&self.events.len()) {
                self.marks.push(self.events.len());
            }
            return Ok(());
        }
        if line.trim().is_empty() {
            return Ok(());
        }
        if self.events.len() >= EVENTS_MAX {
            return Err(format!("more than {EVENTS_MAX} events"));
        }
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let event = match *words {
            ["a", id, bytes] => self.alloc(number(id)?, number(bytes)?)?,
            ["f", id] => self.free(number(id)?)?,
            _ => {
                let quoted: String = line.chars().take(QUOTE_MAX).collect();
                return Err(format!("expected `a ID BYTES`, `f ID` or `# TEXT`, found {quoted:?}"));
            }
        };
        self.events.push(event);
        Ok(())
    }

    fn alloc(&mut self, id: u64, bytes: u64) -> Result<Event, String> {
        if bytes == 0 || bytes > BLOCK_MAX {
            return Err(format!("expected from 1 to {BLOCK_MAX} bytes, found {bytes}"));
        }
        let block = self.sizes.len();
        if self.ids.insert(id, block).is_some() {
            return Err(format!("expected a new id, found {id}, which was allocated before"));
        }
        self.live.insert(id, block);
        self.sizes.push(bytes);
        // At most 2^26 blocks of 2^48 bytes would not fit; the peak is then of no device either.
        self.live_bytes = self.live_bytes.checked_add(bytes).ok_or("more than 2^64 bytes live")?;
        self.live_peak = self.live_peak.max(self.live_bytes);
        self.blocks_peak = self.blocks_peak.max(self.live.len());
        Ok(Event::Alloc { block, bytes })
    }

    fn free(&mut self, id: u64) -> Result<Event, String> {
        let Some(block) = self.live.remove(&id) else {
            let why = if self.ids.contains_key(&id) { "freed before" } else { "never allocated" };
            return Err(format!("expected the id of a live block, found {id}, which was {why}"));
        };
        self.live_bytes -= self.sizes[block];
        Ok(Event::Free { block })
    }
}

fn number(word: &str) -> Result<u64, String> {
    word.parse().map_err(|_| {
        let quoted: String = word.chars().take(QUOTE_MAX).collect();
        format!("expected a number, found {quoted:?}")
    })
}

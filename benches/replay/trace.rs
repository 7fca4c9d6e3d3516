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

/// The first bytes of a file that gzip wrote.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// The most bytes that a block may have: what no device has.
const BLOCK_MAX: u64 = 1 << 48;

/// The project's own traces.
pub fn own() -> [PathBuf; 5] {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
    ["bert-embed", "gpt2-generate", "llama-generate", "vit-images", "gpt2-train"]
        .map(|name| folder.join(format!("{name}.jsonl.gz")))
}

/// An event of a block; blocks are numbered from 0 in the order of their allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Alloc { block: usize, bytes: u64 },
    Free { block: usize },
}

/// A whole trace.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Its file's name without `.gz` and one more extension, blanks as dashes.
    pub name: String,
    pub events: Vec<Event>,
    /// The number of blocks that are allocated in it.
    pub blocks: usize,
    /// The most that is live at once: the sum of what was asked for.
    pub live_peak: u64,
    /// The events before which a mark stands.
    pub marks: Vec<usize>,
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
    ///
    /// # Errors
    /// The system's, or the line that is wrong and what was expected.
    pub fn open(path: &Path) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        let mut file = BufReader::new(File::open(path).map_err(failed)?);
        let is_gzip = file.fill_buf().map_err(failed)?.starts_with(&GZIP);
        let text: Box<dyn Read> =
            if is_gzip { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
        let (mut reader, mut number) = (Reader::default(), 0);
        let wrong = |line, what| Err(format!("{}: line {line}: {what}", path.display()));
        for line in BufReader::new(text).lines() {
            number += 1;
            let line = serde_json::from_str(&line.map_err(failed)?);
            if let Err(what) = line.map_err(|it| it.to_string()).and_then(|it| reader.line(it)) {
                return wrong(number, what);
            }
        }
        let Reader { mut trace, live, .. } = reader;
        if trace.events.is_empty() {
            return wrong(number, "the file ends here: expected the event `alloc`".to_owned());
        }
        // What is live where the recording was cut short.
        trace.events.extend(live.into_values().map(|(block, _)| Event::Free { block }));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.strip_suffix(".gz").unwrap_or(&name);
        let name = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
        Ok(Self { name: name.split_whitespace().collect::<Vec<_>>().join("-"), ..trace })
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
            Line::Alloc { address, bytes } => self.alloc(address, bytes)?,
            Line::Free { address } => self.free(address)?,
            Line::Resize { address, bytes } => {
                self.free(address)?;
                self.alloc(address, bytes)?;
            }
            Line::Move { address, to } => {
                let block = self.take(address)?;
                self.live.insert(to, block);
            }
            Line::Mark => self.trace.marks.push(self.trace.events.len()),
            Line::Other => {}
        }
        Ok(())
    }

    fn alloc(&mut self, address: u64, bytes: u64) -> Result<(), String> {
        if bytes == 0 || bytes > BLOCK_MAX {
            return Err(format!("expected from 1 to {BLOCK_MAX} bytes, found {bytes}"));
        }
        let (block, trace) = (self.trace.blocks, &mut self.trace);
        if self.live.insert(address, (block, bytes)).is_some() {
            return Err(format!("expected a free address, found {address}, where a block is live"));
        }
        trace.blocks += 1;
        self.live_bytes += bytes;
        trace.live_peak = trace.live_peak.max(self.live_bytes);
        trace.events.push(Event::Alloc { block, bytes });
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
}

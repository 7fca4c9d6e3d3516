//! Reads the log of RMM, the allocator of RAPIDS, as a recording.
//!
//! Its `logging_resource_adaptor` writes a line for each allocation and free:
//! `Thread,Time,Action,Pointer,Size,Stream`. Each stream becomes a lane, created when the stream is
//! first named; a block freed by another stream counts as used by that stream too. Threads are
//! ignored: the lines are in the order in which they were written. The addresses of RMM's blocks
//! are not kept.
//!
//! Invariant: `operations = lines read + lanes created + uses by other streams`.

use std::collections::BTreeMap;
use std::io::Read;
use std::time::Duration;

use super::error::{Found, LogError, LogFault};
use super::fields::BYTES_MAX;
use super::format::VERSION;
use super::log::{Lines, Log};
use super::operation::{After, Asked, BlockKind, Entry, Header, Operation};
use super::words::decimal;
use crate::driver::Backend;
use crate::state::region::Region;
use crate::types::config::{DECAY, Growth, RESERVE};
use lowtide_core::bytes::ByteSize;

/// The first line.
const HEAD: &str = "Thread,Time,Action,Pointer,Size,Stream";

/// RMM aligns to this many bytes (`CUDA_ALLOCATION_ALIGNMENT`).
const ALIGN: ByteSize = ByteSize::new(256);

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The time by which lines may be out of order at midnight. A guess.
const LATE: Duration = Duration::from_secs(60);

impl Log {
    /// Reads the log of RMM's `logging_resource_adaptor` as a recording of an arena with the
    /// default settings and without a limit. All blocks go to the dynamic region. The recording has
    /// no outcomes to compare a replay with. The last line may lack its newline.
    ///
    /// ```
    /// use lowtide_gpu::record::Log;
    ///
    /// let log = Log::from_rmm("\
    /// Thread,Time,Action,Pointer,Size,Stream
    /// 1,10:00:00.000100,allocate,0x7f0000000000,1024,0x0
    /// 1,10:00:00.000300,free,0x7f0000000000,1024,0x0
    /// ".as_bytes())?;
    /// assert_eq!(log.entries()[2].to_string(), "200000 free id=1 after=lanes");
    /// # Ok::<(), lowtide_gpu::record::LogError>(())
    /// ```
    ///
    /// # Errors
    /// [`LogError`] for the first invalid line.
    pub fn from_rmm(from: impl Read) -> Result<Self, LogError> {
        let mut lines = Lines::lenient(from);
        let head = lines.next()?.unwrap_or_default().trim_end_matches('\r');
        if head != HEAD {
            return Err(LogFault::unexpected(HEAD, head).at(1));
        }
        let mut import = Import::default();
        loop {
            let line = lines.number + 1;
            let Some(text) = lines.next()? else { break };
            let text = text.trim_end_matches('\r');
            import.line(line, text).map_err(|fault| fault.at(line))?;
        }
        let header = Header {
            version: VERSION,
            name: "rmm".to_owned(),
            backend: Backend::CudaPlain,
            asynchronous: true,
            started: Duration::ZERO,
            limit: ByteSize::MAX,
            reserve: RESERVE,
            decay: DECAY,
            growth: Growth::SameAsRequested,
            layout: None,
        };
        Ok(Self { header, entries: import.entries, closing: None })
    }
}

/// The state after the lines so far.
#[derive(Default)]
struct Import {
    entries: Vec<Entry>,
    /// The number and the time of the current line.
    line: u64,
    at: Duration,
    /// Live blocks by address.
    live: BTreeMap<u64, Live>,
    blocks: u64,
    /// The lane of each stream.
    lanes: BTreeMap<u64, u64>,
    /// The time of day of the first and the last line, and the days between.
    first: Option<Duration>,
    last: Duration,
    days: u32,
}

struct Live {
    id: u64,
    bytes: u64,
    lane: u64,
    line: u64,
}

impl Import {
    fn line(&mut self, line: u64, text: &str) -> Result<(), LogFault> {
        let fields: Vec<_> = text.split(',').collect();
        let [_thread, time, action, pointer, size, stream] = fields[..] else {
            return Err(LogFault::unexpected("six fields", text));
        };
        (self.line, self.at) = (line, self.time(time)?);
        let size = decimal("Size", size, BYTES_MAX)?;
        let lane = self.lane(hexadecimal("Stream", stream)?);
        let asked = Asked {
            kind: BlockKind::Buffer,
            region: Region::Dynamic,
            bytes: ByteSize::new(size),
            align: ALIGN,
            lane: Some(lane),
        };
        let name = action.to_ascii_lowercase().replace('_', " ");
        match name.as_str() {
            "allocate" => self.allocate(hexadecimal("Pointer", pointer)?, asked, lane),
            "free" => self.free(hexadecimal("Pointer", pointer)?, size, lane),
            // The line of a failed allocation has no pointer to read.
            "allocate failure" => {
                self.push(Operation::Refuse { asked, why: None });
                Ok(())
            }
            _ => Err(LogFault::unexpected("allocate, free or allocate failure", action)),
        }
    }

    fn push(&mut self, operation: Operation) {
        self.entries.push(Entry { line: self.line, at: self.at, operation });
    }

    fn allocate(&mut self, pointer: u64, asked: Asked, lane: u64) -> Result<(), LogFault> {
        let bytes = asked.bytes.get();
        if bytes == 0 {
            return Ok(()); // RMM allocates no memory for 0 bytes, and returns no address of its own
        }
        if let Some(live) = self.live.get(&pointer) {
            return Err(LogFault::LivePointer { pointer, line: live.line });
        }
        self.blocks += 1;
        let id = self.blocks;
        self.live.insert(pointer, Live { id, bytes, lane, line: self.line });
        self.push(Operation::Alloc { id, asked, place: None });
        Ok(())
    }

    fn free(&mut self, pointer: u64, size: u64, lane: u64) -> Result<(), LogFault> {
        if size == 0 {
            return Ok(());
        }
        let Some(live) = self.live.remove(&pointer) else {
            return Err(LogFault::UnknownPointer { pointer });
        };
        if live.bytes != size {
            return Err(LogFault::OtherSize { pointer, asked: live.bytes, found: size });
        }
        if live.lane != lane {
            self.push(Operation::Use { id: live.id, lane });
        }
        self.push(Operation::Free { id: live.id, after: After::Lanes });
        Ok(())
    }

    /// Returns the lane of a stream.
    fn lane(&mut self, stream: u64) -> u64 {
        if let Some(&lane) = self.lanes.get(&stream) {
            return lane;
        }
        let lane = self.lanes.len() as u64 + 1;
        self.lanes.insert(stream, lane);
        self.push(Operation::Lane { lane, stream: lane });
        lane
    }

    /// Returns the time since the first line for a time of day. Lines of several threads may be
    /// slightly out of order. A time that goes back is replaced by the last time. A time that goes
    /// back by more than half a day belongs to the next day. A time that goes forward by nearly a
    /// day (all but a minute) belongs to the day before.
    fn time(&mut self, text: &str) -> Result<Duration, LogFault> {
        let of_day = time_of_day(text)
            .ok_or_else(|| LogFault::unexpected("a time such as 23:59:59.999999", text))?;
        let first = *self.first.get_or_insert(of_day);
        let is_first = self.entries.is_empty();
        let of_day = if !is_first && of_day.saturating_sub(self.last) > DAY - LATE {
            self.last
        } else {
            of_day
        };
        if self.last.saturating_sub(of_day) > DAY / 2 {
            self.days = self.days.saturating_add(1);
            self.last = of_day;
        }
        self.last = self.last.max(of_day);
        let since = (DAY.saturating_mul(self.days) + self.last).saturating_sub(first);
        let before = self.entries.last().map_or(Duration::ZERO, |entry| entry.at);
        Ok(since.max(before))
    }
}

/// Parses hours, minutes and seconds, and up to nine digits of a second after a point or a colon.
fn time_of_day(text: &str) -> Option<Duration> {
    let number = |text: &str, most: u64| {
        let digits = (1..=9).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        let number = if digits { text.parse::<u64>().ok() } else { None };
        number.filter(|&number| number <= most)
    };
    let (hours, rest) = text.split_once(':')?;
    let (minutes, rest) = rest.split_once(':')?;
    let (seconds, part) = rest.split_once(['.', ':']).map_or((rest, None), |(s, p)| (s, Some(p)));
    let seconds = (number(hours, 23)? * 60 + number(minutes, 59)?) * 60 + number(seconds, 60)?;
    let nanos = match part {
        Some(part) => {
            let digits = u32::try_from(part.len()).ok()?;
            number(part, 999_999_999)? * 10_u64.pow(9 - digits)
        }
        None => 0,
    };
    Some(Duration::from_secs(seconds) + Duration::from_nanos(nanos))
}

/// Parses a hexadecimal number, with or without `0x`; `(nil)` is 0, as C's `printf` writes it.
fn hexadecimal(field: &'static str, text: &str) -> Result<u64, LogFault> {
    let bare = text.strip_prefix("0x").unwrap_or(text);
    let digits = !bare.is_empty() && bare.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = match text {
        "(nil)" => Some(0),
        _ if digits => u64::from_str_radix(bare, 16).ok(),
        _ => None,
    };
    number.ok_or_else(|| LogFault::Number { field, most: u64::MAX, found: Found::new(text) })
}

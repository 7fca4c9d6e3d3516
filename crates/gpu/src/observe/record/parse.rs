//! Parses one line of a recording. `text` writes lines.
//!
//! Every field is expected at its position, with its name: no field is skipped or guessed. The
//! parser keeps no state between lines; `check` does.
//!
//! Invariant: no text causes a panic, and the only allocations are a name and the texts of errors,
//! all bounded by the length of the line.

use std::time::Duration;

use super::error::{Found, LogError, LogFault};
use super::hash::OperationHash;
use super::operation::{
    After, Asked, BlockKind, Closed, Closing, Ended, Fallen, GivenUp, Header, Layout, Operation,
    Place, Resized, Sleepless, Why,
};
use super::text::{VERSION, contents as contents_name, yes};
use crate::driver::Backend;
use crate::state::region::Region;
use crate::types::compact::{CompactOptions, Goal, StopReason};
use crate::types::config::Growth;
use crate::types::sleep::{Contents, SleepReport, SleepState, WakeReport};
use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;

/// The maximum number of bytes that an arena reserves, and so of any place in it: 2^62.
pub(super) const BYTES_MAX: u64 = 1 << 62;

type Read<T> = Result<T, LogError>;

/// The contents of a line after the first two.
pub(super) enum Line {
    Operation(Duration, Operation),
    Closing(Closing),
}

/// The rest of a line.
struct Words<'a> {
    line: u64,
    rest: Option<&'a str>,
}

impl<'a> Words<'a> {
    const fn new(line: u64, text: &'a str) -> Self {
        Self { line, rest: Some(text) }
    }

    fn fault<T>(&self, fault: LogFault) -> Read<T> {
        Err(fault.at(self.line))
    }

    fn unexpected<T>(&self, expected: &'static str, found: &str) -> Read<T> {
        self.fault(LogFault::unexpected(expected, found))
    }

    /// Returns the next word. Words are separated by one space.
    fn word(&mut self, expected: &'static str) -> Read<&'a str> {
        let Some(rest) = self.rest else { return self.unexpected(expected, "") };
        let (word, rest) = match rest.split_once(' ') {
            Some((word, rest)) => (word, Some(rest)),
            None => (rest, None),
        };
        self.rest = rest;
        if word.is_empty() { self.unexpected(expected, "") } else { Ok(word) }
    }

    /// Returns the text after `key` in the next word, which must begin with `key`.
    fn value(&mut self, key: &'static str) -> Read<&'a str> {
        let word = self.word(key)?;
        match word.strip_prefix(key) {
            Some(value) => Ok(value),
            None => self.unexpected(key, word),
        }
    }

    fn number(&mut self, key: &'static str, most: u64) -> Read<u64> {
        let value = self.value(key)?;
        self.number_in(key, value, most)
    }

    fn bytes(&mut self, key: &'static str) -> Read<ByteSize> {
        self.number(key, BYTES_MAX).map(ByteSize::new)
    }

    fn time(&mut self, key: &'static str) -> Read<Duration> {
        self.number(key, u64::MAX).map(Duration::from_nanos)
    }

    /// Parses a decimal number of digits only.
    fn number_in(&self, field: &'static str, text: &str, most: u64) -> Read<u64> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = if digits { text.parse::<u64>().ok() } else { None };
        match number {
            Some(number) if number <= most => Ok(number),
            _ => self.fault(LogFault::Number { field, most, found: Found::new(text) }),
        }
    }

    /// Parses `none`, or a number of bytes.
    fn limit_in(&self, field: &'static str, text: &str) -> Read<ByteSize> {
        match text {
            "none" => Ok(ByteSize::MAX),
            _ => self.number_in(field, text, u64::MAX).map(ByteSize::new),
        }
    }

    fn limit(&mut self, key: &'static str) -> Read<ByteSize> {
        let value = self.value(key)?;
        self.limit_in(key, value)
    }

    /// Parses the name of one of these values.
    fn one_of<T: Copy>(
        &self,
        expected: &'static str,
        found: &str,
        all: &[T],
        name: impl Fn(T) -> &'static str,
    ) -> Read<T> {
        match all.iter().find(|&&one| name(one) == found) {
            Some(&one) => Ok(one),
            None => self.unexpected(expected, found),
        }
    }

    fn yes(&mut self, key: &'static str) -> Read<bool> {
        let value = self.value(key)?;
        self.one_of("yes or no", value, &[true, false], yes)
    }

    fn region(&mut self, key: &'static str) -> Read<Region> {
        let value = self.value(key)?;
        self.region_in(value)
    }

    fn region_in(&self, found: &str) -> Read<Region> {
        self.one_of("stable or dynamic", found, &Region::ALL, Region::name)
    }

    fn done(&mut self) -> Read<bool> {
        let word = self.word("done or failed")?;
        let name = |done| if done { "done" } else { "failed" };
        self.one_of("done or failed", word, &[true, false], name)
    }

    fn decay(&mut self, key: &'static str) -> Read<DecayTime> {
        Ok(match self.value(key)? {
            "at_once" => DecayTime::AtOnce,
            "never" => DecayTime::Never,
            nanos => {
                let nanos = self.number_in(key, nanos, u64::MAX)?;
                DecayTime::from_duration(Duration::from_nanos(nanos))
            }
        })
    }

    /// Returns `true` if an outcome follows.
    fn has_outcome(&mut self) -> Read<bool> {
        if self.rest.is_none() {
            return Ok(false);
        }
        self.outcome().map(|()| true)
    }

    /// Parses the mark before an outcome.
    fn outcome(&mut self) -> Read<()> {
        match self.word("->")? {
            "->" => Ok(()),
            other => self.unexpected("->", other),
        }
    }

    fn end(&self) -> Read<()> {
        match self.rest {
            None => Ok(()),
            Some(rest) => self.unexpected("the end of the line", rest),
        }
    }

    fn asked(&mut self) -> Read<Asked> {
        let kind = self.value("kind=")?;
        let kind = self.one_of("buffer, raw or reserve", kind, &BlockKind::ALL, BlockKind::name)?;
        let region = self.region("region=")?;
        let bytes = ByteSize::new(self.number("bytes=", u64::MAX)?);
        let align = self.number("align=", BYTES_MAX)?;
        if !align.is_power_of_two() {
            return self.unexpected("an alignment of a power of two", &align.to_string());
        }
        let align = ByteSize::new(align);
        let lane = match self.value("lane=")? {
            "none" => None,
            lane => Some(self.number_in("lane=", lane, u64::MAX)?),
        };
        Ok(Asked { kind, region, bytes, align, lane })
    }

    /// Parses a region and an offset in it.
    fn at(&mut self, key: &'static str) -> Read<(Region, ByteSize)> {
        let value = self.value(key)?;
        let Some((region, offset)) = value.split_once(':') else {
            return self.unexpected("a region, a colon and an offset", value);
        };
        let region = self.region_in(region)?;
        Ok((region, ByteSize::new(self.number_in(key, offset, BYTES_MAX)?)))
    }

    fn place(&mut self) -> Read<Place> {
        let (region, offset) = self.at("at=")?;
        Ok(Place { region, offset, size: self.bytes("size=")? })
    }

    fn why(&mut self) -> Read<Why> {
        let why = self.value("why=")?;
        let expected = "limit, device, addresses, too_large or driver";
        self.one_of(expected, why, &Why::ALL, Why::name)
    }

    fn given_up(&mut self) -> Read<GivenUp> {
        self.outcome()?;
        Ok(GivenUp { done: self.done()?, released: self.bytes("released=")? })
    }
}

/// Parses the first line: the version.
pub(super) fn first(line: u64, text: &str) -> Read<u64> {
    let mut words = Words::new(line, text);
    let mut found = words.value("lowtide-recording")?;
    if found.is_empty() {
        found = words.value("version=")?;
    }
    let version = words.number_in("version=", found, u64::MAX)?;
    if !(1..=VERSION).contains(&version) {
        return words.fault(LogFault::Version { found: version, known: VERSION });
    }
    words.end().map(|()| version)
}

/// Parses the second line: the header.
pub(super) fn header(line: u64, text: &str, version: u64) -> Read<Header> {
    let mut words = Words::new(line, text);
    let at = words.word("0")?;
    words.number_in("the time 0 of the first line", at, 0)?;
    let word = words.word("open")?;
    if word != "open" {
        return words.unexpected("open", word);
    }
    let backend = words.value("backend=")?;
    let backends = [
        Backend::Host,
        Backend::CudaVirtualMemory,
        Backend::CudaPool,
        Backend::CudaPlain,
        Backend::PinnedHost,
        Backend::Custom,
    ];
    let expected = "host, cuda_virtual_memory, cuda_pool, cuda_plain, pinned_host or custom";
    let backend = words.one_of(expected, backend, &backends, Backend::name)?;
    let asynchronous = words.yes("asynchronous=")?;
    let started = words.time("clock=")?;
    let (limit, reserve) = (words.limit("limit=")?, words.number("reserve=", u64::MAX)?);
    let decay = words.decay("decay=")?;
    let growth = growth(&mut words)?;
    let name = name(&mut words)?;
    let layout = if words.has_outcome()? { Some(layout(&mut words)?) } else { None };
    words.end()?;
    let reserve = ByteSize::new(reserve);
    Ok(Header {
        version,
        name,
        backend,
        asynchronous,
        started,
        limit,
        reserve,
        decay,
        growth,
        layout,
    })
}

fn growth(words: &mut Words<'_>) -> Read<Growth> {
    let value = words.value("growth=")?;
    if value == "same" {
        return Ok(Growth::SameAsRequested);
    }
    let expected = "same, or double: and three numbers";
    let mut parts = value.split(':');
    if parts.next() != Some("double") {
        return words.unexpected(expected, value);
    }
    let mut part = || match parts.next() {
        Some(part) => words.number_in("growth=", part, u64::MAX).map(ByteSize::new),
        None => words.unexpected(expected, value),
    };
    let (initial, after_shrink, cap) = (part()?, part()?, part()?);
    if parts.next().is_some() {
        return words.unexpected(expected, value);
    }
    Ok(Growth::NextPowerOfTwo { initial, after_shrink, cap })
}

/// Parses a name, with `%` and two hexadecimal digits for bytes that are not visible ASCII.
fn name(words: &mut Words<'_>) -> Read<String> {
    let value = words.value("name=")?;
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.bytes();
    while let Some(byte) = rest.next() {
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let byte = match byte {
            b'%' => match (digit(rest.next()), digit(rest.next())) {
                (Some(high), Some(low)) => u8::try_from(high * 16 + low).unwrap_or(0),
                _ => return words.unexpected("two hexadecimal digits after each %", value),
            },
            b'!'..=b'~' => byte,
            _ => return words.unexpected("a name of visible ASCII", value),
        };
        bytes.push(byte);
    }
    String::from_utf8(bytes).or_else(|_| words.unexpected("a name in UTF-8", value))
}

fn layout(words: &mut Words<'_>) -> Read<Layout> {
    let granularity = words.bytes("granularity=")?;
    if !granularity.get().is_power_of_two() {
        let found = granularity.get().to_string();
        return words.unexpected("a granularity of a power of two", &found);
    }
    let reserved = [words.bytes("stable=")?, words.bytes("dynamic=")?];
    Ok(Layout { granularity, reserved })
}

/// Parses a line after the first two.
pub(super) fn line(line: u64, text: &str, version: u64) -> Read<Line> {
    let mut words = Words::new(line, text);
    let at = words.word("a time")?;
    let at = Duration::from_nanos(words.number_in("the time", at, u64::MAX)?);
    let word = words.word("an operation")?;
    let read = match word {
        "end" => Line::Closing(closing(&mut words, at)?),
        "contents" | "sleep" | "wake" if version < 2 => {
            return words.unexpected("an operation of version 1", word);
        }
        _ => Line::Operation(at, operation(&mut words, word)?),
    };
    words.end()?;
    Ok(read)
}

fn closing(words: &mut Words<'_>, at: Duration) -> Read<Closing> {
    let operations = words.number("operations=", u64::MAX)?;
    let threads = words.value("threads=")?;
    let name = |one| if one { "one" } else { "many" };
    let one_thread = words.one_of("one or many", threads, &[true, false], name)?;
    let ended = words.value("ended=")?;
    let ended = words.one_of("gone, finished or full", ended, &Ended::ALL, Ended::name)?;
    words.outcome()?;
    let hash = words.value("hash=")?;
    let digits = hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = if digits { u64::from_str_radix(hash, 16).ok() } else { None };
    let Some(number) = number else {
        return words.unexpected("a hash of 16 hexadecimal digits", hash);
    };
    let hash = OperationHash::from_number(number);
    Ok(Closing { at, operations, one_thread, ended, hash })
}

fn operation(words: &mut Words<'_>, word: &str) -> Read<Operation> {
    let id = |words: &mut Words<'_>| words.number("id=", u64::MAX);
    let lane = |words: &mut Words<'_>| words.number("lane=", u64::MAX);
    Ok(match word {
        "alloc" => {
            let (id, asked) = (id(words)?, words.asked()?);
            let place = if words.has_outcome()? { Some(words.place()?) } else { None };
            Operation::Alloc { id, asked, place }
        }
        "refuse" => {
            let asked = words.asked()?;
            let why = if words.has_outcome()? { Some(words.why()?) } else { None };
            Operation::Refuse { asked, why }
        }
        "free" => {
            let (id, after) = (id(words)?, words.value("after=")?);
            let after = words.one_of("lanes or all", after, &After::ALL, After::name)?;
            Operation::Free { id, after }
        }
        "resize" => resize(words)?,
        "move" => moved(words)?,
        "use" => Operation::Use { id: id(words)?, lane: lane(words)? },
        "pin" => Operation::Pin { id: id(words)? },
        "unpin" => Operation::Unpin { id: id(words)? },
        "lane" => {
            Operation::Lane { lane: lane(words)?, stream: words.number("stream=", u64::MAX)? }
        }
        "lane_end" => Operation::LaneEnd { lane: lane(words)? },
        "end_run" => {
            let lane = lane(words)?;
            words.outcome()?;
            Operation::EndRun { lane, done: words.done()? }
        }
        "limit" => Operation::Limit { limit: words.limit("bytes=")? },
        "decay_time" => Operation::DecayTime { time: words.decay("time=")? },
        "decay" => Operation::Decay { now: words.time("now=")?, outcome: words.given_up()? },
        "trim" => {
            let keep = ByteSize::new(words.number("keep=", u64::MAX)?);
            Operation::Trim { keep, outcome: words.given_up()? }
        }
        "shrink" => Operation::Shrink { outcome: words.given_up()? },
        "compact" => compact(words)?,
        "reset" => reset(words)?,
        "close" => close(words)?,
        "contents" => contents(words)?,
        "sleep" => sleep(words)?,
        "wake" => wake(words)?,
        _ => return words.unexpected("an operation", word),
    })
}

fn resize(words: &mut Words<'_>) -> Read<Operation> {
    let id = words.number("id=", u64::MAX)?;
    let bytes = ByteSize::new(words.number("bytes=", u64::MAX)?);
    words.outcome()?;
    let is_refused = words.rest.is_some_and(|rest| rest.starts_with("why="));
    let outcome = if is_refused {
        Resized::Refused(words.why()?)
    } else {
        let place = words.place()?;
        if words.yes("moved=")? { Resized::Moved(place) } else { Resized::InPlace(place) }
    };
    Ok(Operation::Resize { id, bytes, outcome })
}

fn moved(words: &mut Words<'_>) -> Read<Operation> {
    let id = words.number("id=", u64::MAX)?;
    words.outcome()?;
    let (region, from) = words.at("from=")?;
    let (other, to) = words.at("to=")?;
    if other != region {
        return words.unexpected("a move within one region", other.name());
    }
    Ok(Operation::Move { id, region, from, to, size: words.bytes("size=")? })
}

fn compact(words: &mut Words<'_>) -> Read<Operation> {
    let region = words.region("region=")?;
    let goal = match words.value("goal=")? {
        "granules" => Goal::Granules,
        goal => match goal.strip_prefix("contiguous:") {
            Some(bytes) => Goal::Contiguous(words.limit_in("goal=", bytes)?),
            None => return words.unexpected("granules, or contiguous: and a number", goal),
        },
    };
    let (budget, moves_raw) = (words.limit("budget=")?, words.yes("raw=")?);
    let options = CompactOptions { region, goal, budget, moves_raw };
    words.outcome()?;
    let stopped = words.word("finished, busy or failed")?;
    let all = [StopReason::Finished, StopReason::Busy, StopReason::Failed];
    let stopped = words.one_of("finished, busy or failed", stopped, &all, StopReason::name)?;
    let moves = words.number("moves=", u64::MAX)?;
    let moved = ByteSize::new(words.number("moved=", u64::MAX)?);
    let skipped = words.number("skipped=", u64::MAX)?;
    Ok(Operation::Compact { options, stopped, moves, moved, skipped })
}

fn reset(words: &mut Words<'_>) -> Read<Operation> {
    words.outcome()?;
    let blocks = words.number("blocks=", u64::MAX)?;
    Ok(Operation::Reset { blocks, bytes: words.bytes("bytes=")? })
}

fn close(words: &mut Words<'_>) -> Read<Operation> {
    words.outcome()?;
    let expected = "done, live_blocks or failed";
    let found = words.word(expected)?;
    Ok(Operation::Close { outcome: words.one_of(expected, found, &Closed::ALL, Closed::name)? })
}

fn contents(words: &mut Words<'_>) -> Read<Operation> {
    let (id, what) = (words.number("id=", u64::MAX)?, words.value("what=")?);
    let all = [Some(Contents::Discard), Some(Contents::Keep), Some(Contents::Stay), None];
    let expected = "discard, keep, stay or usual";
    Ok(Operation::Contents { id, contents: words.one_of(expected, what, &all, contents_name)? })
}

fn sleep(words: &mut Words<'_>) -> Read<Operation> {
    let mut contents = |key| {
        let value = words.value(key)?;
        words.one_of("discard, keep or stay", value, &Contents::ALL, Contents::name)
    };
    let (stable, dynamic) = (contents("stable=")?, contents("dynamic=")?);
    words.outcome()?;
    let outcome = match words.word("slept or failed")? {
        "slept" => {
            let [released, offloaded] = [words.bytes("released=")?, words.bytes("offloaded=")?];
            Fallen::Asleep(SleepReport { released, offloaded, stayed: words.bytes("stayed=")? })
        }
        "failed" => {
            let (why, all) = (words.value("why=")?, &Sleepless::ALL);
            let expected = "leased, cancelled, capturing, budget, state or driver";
            let why = words.one_of(expected, why, all, Sleepless::name)?;
            let (state, all) = (words.value("state=")?, &SleepState::ALL);
            let expected = "awake, draining, asleep or waking";
            Fallen::Failed { why, state: words.one_of(expected, state, all, SleepState::name)? }
        }
        other => return words.unexpected("slept or failed", other),
    };
    Ok(Operation::Sleep { stable, dynamic, outcome })
}

fn wake(words: &mut Words<'_>) -> Read<Operation> {
    words.outcome()?;
    if !words.done()? {
        return Ok(Operation::Wake { woken: None });
    }
    let (committed, restored) = (words.bytes("committed=")?, words.bytes("restored=")?);
    Ok(Operation::Wake { woken: Some(WakeReport { committed, restored }) })
}

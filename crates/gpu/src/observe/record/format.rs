//! The lines of a recording, each written and read by one description.
//!
//! `fields` has the formats of values, and `check` relates lines to each other.
//! `docs/RECORDING.md` describes the format for users.
//!
//! Invariant: each written line is read as the same value, and no line is longer than [`LINE_MAX`].

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use super::error::LogFault;
use super::fields::{
    Format as _, any_size, awake, compaction, contents_or_usual, decay, done_or_failed, fallen,
    given_up, growth, hash, layout, limit_or_none, moved, named, nanos, number, one_or_many,
    placed, read_name, request, resized, size, time, write_name, yes_or_no,
};
use super::operation::{Closing, Entry, Header, Operation};
use super::words::{Read, Words};

/// The version that is written, and the newest that is read.
pub(crate) const VERSION: u64 = 2;

/// The maximum number of bytes of a line. Three times the longest line that is written: the header,
/// with a name of 256 bytes that are all escaped.
pub(super) const LINE_MAX: usize = 4096;

/// A value that a closure writes.
struct Written<F>(F);

impl<F: Fn(&mut Formatter<'_>) -> fmt::Result> Display for Written<F> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        (self.0)(f)
    }
}

/// Describes the line of each operation: its first word, the fields of the request, and after an
/// arrow those of the outcome, or in brackets an outcome that may be unknown.
macro_rules! operations {
    ($(
        $word:literal $name:ident {
            $($field:ident: $format:expr),*
        } $(-> { $($($out:ident)+: $out_format:expr),+ })? $([$known:ident: $known_format:expr])?
    )+) => {
        impl Operation {
            /// Returns the first word of the operation in its line.
            #[must_use]
            pub const fn word(&self) -> &'static str {
                match self {
                    $(Self::$name { .. } => $word,)+
                }
            }

            /// Returns the request, each field after a space.
            fn request(&self) -> impl Display {
                Written(move |f: &mut Formatter<'_>| {
                    match *self {
                        $(Self::$name { $($field,)* .. } => {
                            $($format.write($field, f)?;)*
                        })+
                    }
                    Ok(())
                })
            }

            /// Returns the outcome, each field after a space; empty if there is none or it is
            /// unknown.
            pub(super) fn outcome(&self) -> impl Display {
                Written(|f: &mut Formatter<'_>| self.write_outcome("", f))
            }

            /// Writes the outcome, if there is one and it is known, after the arrow.
            fn write_outcome(&self, arrow: &str, f: &mut Formatter<'_>) -> fmt::Result {
                match *self {
                    $(Self::$name { $($($($out,)+)+)? $($known,)? .. } => {
                        $(
                            f.write_str(arrow)?;
                            $($out_format.write(($($out),+), f)?;)+
                        )?
                        $(if let Some(known) = $known {
                            f.write_str(arrow)?;
                            $known_format.write(known, f)?;
                        })?
                    })+
                }
                Ok(())
            }
        }

        #[expect(unused_parens, reason = "a format of one value")]
        fn operation(words: &mut Words<'_>, word: &str) -> Read<Operation> {
            Ok(match word {
                $($word => {
                    $(let $field = $format.read(words)?;)*
                    $(
                        words.mark("->")?;
                        $(let ($($out),+) = $out_format.read(words)?;)+
                    )?
                    $(let $known = $known_format.read_outcome(words)?;)?
                    Operation::$name { $($field,)* $($($($out,)+)+)? $($known,)? }
                })+
                _ => return words.unexpected("an operation", word),
            })
        }
    };
}

operations! {
    "alloc" Alloc { id: number("id="), asked: request() } [place: placed()]
    "refuse" Refuse { asked: request() } [why: named("why=")]
    "free" Free { id: number("id="), after: named("after=") }
    "resize" Resize { id: number("id="), bytes: any_size("bytes=") } -> { outcome: resized() }
    "move" Move { id: number("id=") } -> { region from to size: moved() }
    "use" Use { id: number("id="), lane: number("lane=") }
    "pin" Pin { id: number("id=") }
    "unpin" Unpin { id: number("id=") }
    "lane" Lane { lane: number("lane="), stream: number("stream=") }
    "lane_end" LaneEnd { lane: number("lane=") }
    "end_run" EndRun { lane: number("lane=") } -> { done: done_or_failed() }
    "limit" Limit { limit: limit_or_none("bytes=") }
    "decay_time" DecayTime { time: decay("time=") }
    "decay" Decay { now: time("now=") } -> { outcome: given_up() }
    "trim" Trim { keep: any_size("keep=") } -> { outcome: given_up() }
    "shrink" Shrink {} -> { outcome: given_up() }
    "compact" Compact { options: compaction() } -> {
        stopped: named(""),
        moves: number("moves="),
        moved: any_size("moved="),
        skipped: number("skipped=")
    }
    "reset" Reset {} -> { blocks: number("blocks="), bytes: size("bytes=") }
    "close" Close {} -> { outcome: named("") }
    "contents" Contents { id: number("id="), contents: contents_or_usual("what=") }
    "sleep" Sleep { stable: named("stable="), dynamic: named("dynamic=") } -> {
        outcome: fallen()
    }
    "wake" Wake {} -> { woken: awake() }
}

impl Display for Operation {
    /// Writes the operation without its time and newline.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.word(), self.request())?;
        self.write_outcome(" ->", f)
    }
}

impl Header {
    /// Returns the outcome, after a space; empty if it is unknown.
    pub(super) fn outcome(&self) -> impl Display {
        Written(|f: &mut Formatter<'_>| self.layout.map_or(Ok(()), |of| layout().write(of, f)))
    }
}

impl Display for Header {
    /// Writes two lines, with their newlines.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "lowtide-recording version={}\n0 open", self.version)?;
        named("backend=").write(self.backend, f)?;
        yes_or_no("asynchronous=").write(self.asynchronous, f)?;
        time("clock=").write(self.started, f)?;
        limit_or_none("limit=").write(self.limit, f)?;
        any_size("reserve=").write(self.reserve, f)?;
        decay("decay=").write(self.decay, f)?;
        growth().write(self.growth, f)?;
        write_name(&self.name, f)?;
        if self.layout.is_some() {
            write!(f, " ->{}", self.outcome())?;
        }
        f.write_str("\n")
    }
}

/// Reads the first line: the version.
pub(super) fn first(line: u64, text: &str) -> Read<u64> {
    let mut words = Words::new(line, text);
    let mut found = words.value("lowtide-recording")?;
    if found.is_empty() {
        found = words.value("version=")?;
    }
    let version = words.number("version=", found, u64::MAX)?;
    if !(1..=VERSION).contains(&version) {
        return words.fault(LogFault::Version { found: version, known: VERSION });
    }
    words.end().map(|()| version)
}

/// Reads the second line: the header.
pub(super) fn header(line: u64, text: &str, version: u64) -> Read<Header> {
    let words = &mut Words::new(line, text);
    let at = words.word("0")?;
    words.number("the time 0 of the first line", at, 0)?;
    words.mark("open")?;
    let header = Header {
        version,
        backend: named("backend=").read(words)?,
        asynchronous: yes_or_no("asynchronous=").read(words)?,
        started: time("clock=").read(words)?,
        limit: limit_or_none("limit=").read(words)?,
        reserve: any_size("reserve=").read(words)?,
        decay: decay("decay=").read(words)?,
        growth: growth().read(words)?,
        name: read_name(words)?,
        layout: layout().read_outcome(words)?,
    };
    words.end().map(|()| header)
}

impl Display for Entry {
    /// Writes the line without its newline.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", nanos(self.at), self.operation)
    }
}

impl Display for Closing {
    /// Writes the line without its newline.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} end", nanos(self.at))?;
        number("operations=").write(self.operations, f)?;
        one_or_many("threads=").write(self.one_thread, f)?;
        named("ended=").write(self.ended, f)?;
        f.write_str(" ->")?;
        hash().write(self.hash, f)
    }
}

/// The contents of a line after the first two.
pub(super) enum Line {
    Operation(Duration, Operation),
    Closing(Closing),
}

/// Reads a line after the first two.
pub(super) fn line(line: u64, text: &str, version: u64) -> Read<Line> {
    let words = &mut Words::new(line, text);
    let at = words.word("a time")?;
    let at = Duration::from_nanos(words.number("the time", at, u64::MAX)?);
    let read = match words.word("an operation")? {
        "end" => Line::Closing(closing(words, at)?),
        word @ ("contents" | "sleep" | "wake") if version < 2 => {
            return words.unexpected("an operation of version 1", word);
        }
        word => Line::Operation(at, operation(words, word)?),
    };
    words.end().map(|()| read)
}

fn closing(words: &mut Words<'_>, at: Duration) -> Read<Closing> {
    let operations = number("operations=").read(words)?;
    let one_thread = one_or_many("threads=").read(words)?;
    let ended = named("ended=").read(words)?;
    words.mark("->")?;
    Ok(Closing { at, operations, one_thread, ended, hash: hash().read(words)? })
}

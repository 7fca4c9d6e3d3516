//! The formats of the values in a recording. Each writes a value and reads it again.
//!
//! `format` composes lines of them.
//!
//! Invariant: each written value is read as the same value; no text causes a panic, and the only
//! allocations are a name and the texts of errors, all bounded by the length of the line.

use std::fmt::{self, Formatter, Write as _};
use std::time::Duration;

use super::hash::OperationHash;
use super::names::Named;
use super::operation::{Asked, Fallen, GivenUp, Layout, Place, Resized};
use super::words::{Read, Words};
use crate::state::region::Region;
use crate::types::compact::{CompactOptions, Goal};
use crate::types::config::Growth;
use crate::types::sleep::{Contents, SleepReport, WakeReport};
use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;

/// The maximum number of bytes that an arena reserves, and so of any place in it: 2^62.
pub(super) const BYTES_MAX: u64 = 1 << 62;

/// The maximum number of bytes of a name that are written.
const NAME_MAX: usize = 256;

/// The format of a value in a line.
pub(super) trait Format<T> {
    /// Writes the value, each word after a space.
    fn write(&self, value: T, f: &mut Formatter<'_>) -> fmt::Result;

    /// Reads a value.
    fn read(&self, words: &mut Words<'_>) -> Read<T>;

    /// Reads a value if an outcome follows.
    fn read_outcome(&self, words: &mut Words<'_>) -> Read<Option<T>> {
        if words.has_outcome()? { self.read(words).map(Some) } else { Ok(None) }
    }
}

/// Values and their names.
pub(super) type Names<T> = &'static [(&'static str, T)];

/// A word that is a key and one of some names, or a number.
pub(super) struct Word<T: 'static> {
    key: &'static str,
    names: Names<T>,
    number: Number<T>,
}

/// A word that has no name.
enum Number<T> {
    /// Is a number of at most `most`.
    Is { most: u64, of: fn(u64) -> T, get: fn(T) -> u64 },
    /// Is an error, which lists the names.
    None(&'static str),
}

impl<T: Copy + PartialEq> Format<T> for Word<T> {
    fn write(&self, value: T, f: &mut Formatter<'_>) -> fmt::Result {
        let name = self.names.iter().find(|(_, named)| *named == value);
        match (name, &self.number) {
            (Some((name, _)), _) => write!(f, " {}{name}", self.key),
            (None, Number::Is { get, .. }) => write!(f, " {}{}", self.key, get(value)),
            (None, Number::None(_)) => Err(fmt::Error), // each value has a name
        }
    }

    fn read(&self, words: &mut Words<'_>) -> Read<T> {
        let text = match self.number {
            Number::None(expected) if self.key.is_empty() => words.word(expected)?,
            _ => words.value(self.key)?,
        };
        let value = self.names.iter().find(|(name, _)| *name == text);
        match (value, &self.number) {
            (Some(&(_, value)), _) => Ok(value),
            (None, Number::Is { most, of, .. }) => words.number(self.key, text, *most).map(of),
            (None, Number::None(expected)) => words.unexpected(expected, text),
        }
    }
}

/// One of these names.
const fn one_of<T>(key: &'static str, expected: &'static str, names: Names<T>) -> Word<T> {
    Word { key, names, number: Number::None(expected) }
}

/// One of these names, or a number of bytes.
const fn bytes_or(key: &'static str, names: Names<ByteSize>, most: u64) -> Word<ByteSize> {
    Word { key, names, number: Number::Is { most, of: ByteSize::new, get: ByteSize::get } }
}

/// A name of the value.
pub(super) const fn named<T: Named>(key: &'static str) -> Word<T> {
    one_of(key, T::EXPECTED, T::NAMES)
}

pub(super) const fn yes_or_no(key: &'static str) -> Word<bool> {
    one_of(key, "yes or no", &[("yes", true), ("no", false)])
}

pub(super) const fn done_or_failed() -> Word<bool> {
    one_of("", "done or failed", &[("done", true), ("failed", false)])
}

/// `true` for one.
pub(super) const fn one_or_many(key: &'static str) -> Word<bool> {
    one_of(key, "one or many", &[("one", true), ("many", false)])
}

/// The treatment of a buffer's contents, or `usual` for the one in the options of the sleep.
pub(super) const fn contents_or_usual(key: &'static str) -> Word<Option<Contents>> {
    const NAMES: Names<Option<Contents>> = &[
        ("discard", Some(Contents::Discard)),
        ("keep", Some(Contents::Keep)),
        ("stay", Some(Contents::Stay)),
        ("usual", None),
    ];
    one_of(key, "discard, keep, stay or usual", NAMES)
}

/// A number of at most 64 bits.
pub(super) const fn number(key: &'static str) -> Word<u64> {
    Word { key, names: &[], number: Number::Is { most: u64::MAX, of: |it| it, get: |it| it } }
}

/// Bytes of an arena.
pub(super) const fn size(key: &'static str) -> Word<ByteSize> {
    bytes_or(key, &[], BYTES_MAX)
}

/// Requested bytes, which may be more than an arena has.
pub(super) const fn any_size(key: &'static str) -> Word<ByteSize> {
    bytes_or(key, &[], u64::MAX)
}

/// A number of bytes, or `none` for the maximum.
pub(super) const fn limit_or_none(key: &'static str) -> Word<ByteSize> {
    bytes_or(key, &[("none", ByteSize::MAX)], u64::MAX)
}

/// A time in nanoseconds.
pub(super) const fn time(key: &'static str) -> Word<Duration> {
    let number = Number::Is { most: u64::MAX, of: Duration::from_nanos, get: nanos };
    Word { key, names: &[], number }
}

/// Returns the nanoseconds of a duration, at most 584 years.
pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

pub(super) const fn decay(key: &'static str) -> Word<DecayTime> {
    let number = Number::Is {
        most: u64::MAX,
        of: |time| DecayTime::from_duration(Duration::from_nanos(time)),
        get: |time| match time {
            DecayTime::Within(time) => nanos(time),
            DecayTime::AtOnce | DecayTime::Never => 0, // have names
        },
    };
    Word { key, names: &[("at_once", DecayTime::AtOnce), ("never", DecayTime::Never)], number }
}

/// The number of a lane, or `none`.
const fn lane_or_none(key: &'static str) -> Word<Option<u64>> {
    let number = Number::Is { most: u64::MAX, of: Some, get: Option::unwrap_or_default };
    Word { key, names: &[("none", None)], number }
}

/// A format that two functions define.
pub(super) struct Custom<T> {
    write: fn(T, &mut Formatter<'_>) -> fmt::Result,
    read: fn(&mut Words<'_>) -> Read<T>,
}

impl<T> Format<T> for Custom<T> {
    fn write(&self, value: T, f: &mut Formatter<'_>) -> fmt::Result {
        (self.write)(value, f)
    }

    fn read(&self, words: &mut Words<'_>) -> Read<T> {
        (self.read)(words)
    }
}

/// Bytes that are a power of two.
macro_rules! power_of_two {
    ($name:ident, $key:literal, $expected:literal) => {
        const fn $name() -> Custom<ByteSize> {
            Custom {
                write: |bytes, f| size($key).write(bytes, f),
                read: |words| match size($key).read(words)? {
                    bytes if bytes.get().is_power_of_two() => Ok(bytes),
                    other => words.unexpected($expected, &other.get().to_string()),
                },
            }
        }
    };
}

power_of_two!(alignment, "align=", "an alignment of a power of two");
power_of_two!(granularity, "granularity=", "a granularity of a power of two");

pub(super) const fn growth() -> Custom<Growth> {
    Custom {
        write: |growth, f| match growth {
            Growth::SameAsRequested => f.write_str(" growth=same"),
            Growth::NextPowerOfTwo { initial, after_shrink, cap } => {
                let [initial, after_shrink, cap] = [initial, after_shrink, cap].map(ByteSize::get);
                write!(f, " growth=double:{initial}:{after_shrink}:{cap}")
            }
        },
        read: |words| {
            let value = words.value("growth=")?;
            let bytes = |text| words.number("growth=", text, u64::MAX).map(ByteSize::new);
            match value.split(':').take(5).collect::<Vec<_>>()[..] {
                ["same"] => Ok(Growth::SameAsRequested),
                ["double", initial, after_shrink, cap] => Ok(Growth::NextPowerOfTwo {
                    initial: bytes(initial)?,
                    after_shrink: bytes(after_shrink)?,
                    cap: bytes(cap)?,
                }),
                _ => words.unexpected("same, or double: and three numbers", value),
            }
        },
    }
}

const fn goal() -> Custom<Goal> {
    Custom {
        write: |goal, f| match goal {
            Goal::Granules => f.write_str(" goal=granules"),
            Goal::Contiguous(bytes) => limit_or_none("goal=contiguous:").write(bytes, f),
        },
        read: |words| {
            let goal = words.value("goal=")?;
            match (goal, goal.strip_prefix("contiguous:")) {
                ("granules", _) => Ok(Goal::Granules),
                (_, Some("none")) => Ok(Goal::Contiguous(ByteSize::MAX)),
                (_, Some(bytes)) => {
                    let bytes = words.number("goal=", bytes, u64::MAX)?;
                    Ok(Goal::Contiguous(ByteSize::new(bytes)))
                }
                _ => words.unexpected("granules, or contiguous: and a number", goal),
            }
        },
    }
}

pub(super) const fn hash() -> Custom<OperationHash> {
    Custom {
        write: |hash, f| write!(f, " hash={hash}"),
        read: |words| {
            let text = words.value("hash=")?;
            let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            match u64::from_str_radix(text, 16) {
                Ok(number) if digits => Ok(OperationHash::from_number(number)),
                _ => words.unexpected("a hash of 16 hexadecimal digits", text),
            }
        },
    }
}

/// Writes a name in visible ASCII, and any other byte as `%` and two hexadecimal digits.
pub(super) fn write_name(name: &str, f: &mut Formatter<'_>) -> fmt::Result {
    let mut end = name.len().min(NAME_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    f.write_str(" name=")?;
    name[..end].bytes().try_for_each(|byte| match byte {
        b'%' => write!(f, "%25"),
        b'!'..=b'~' => f.write_char(char::from(byte)),
        _ => write!(f, "%{byte:02x}"),
    })
}

/// Reads what [`write_name`] writes.
pub(super) fn read_name(words: &mut Words<'_>) -> Read<String> {
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

/// The format of a region and an offset in it.
struct Offset(&'static str);

impl Format<(Region, ByteSize)> for Offset {
    fn write(&self, (region, at): (Region, ByteSize), f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, " {}{}:{}", self.0, region.name(), at.get())
    }

    fn read(&self, words: &mut Words<'_>) -> Read<(Region, ByteSize)> {
        let value = words.value(self.0)?;
        let Some((region, offset)) = value.split_once(':') else {
            return words.unexpected("a region, a colon and an offset", value);
        };
        let Some(region) = Region::ALL.into_iter().find(|of| of.name() == region) else {
            return words.unexpected(Region::EXPECTED, region);
        };
        Ok((region, ByteSize::new(words.number(self.0, offset, BYTES_MAX)?)))
    }
}

/// A region, the offset that a block left, its new offset, and its size.
pub(super) const fn moved() -> Custom<(Region, ByteSize, ByteSize, ByteSize)> {
    Custom {
        write: |(region, from, to, bytes), f| {
            Offset("from=").write((region, from), f)?;
            Offset("to=").write((region, to), f)?;
            size("size=").write(bytes, f)
        },
        read: |words| {
            let (region, from) = Offset("from=").read(words)?;
            let (other, to) = Offset("to=").read(words)?;
            if other != region {
                return words.unexpected("a move within one region", other.name());
            }
            Ok((region, from, to, size("size=").read(words)?))
        },
    }
}

/// The format of structs: those of their fields, one after the other.
macro_rules! structs {
    ($($name:ident: $type:ident { $($($field:ident)+: $format:expr),+ $(,)? })+) => { $(
        #[expect(unused_parens, reason = "a format of one field")]
        pub(super) const fn $name() -> Custom<$type> {
            Custom {
                write: |value, f| {
                    $($format.write(($(value.$field),+), f)?;)+
                    Ok(())
                },
                read: |words| {
                    $(let ($($field),+) = $format.read(words)?;)+
                    Ok($type { $($($field),+),+ })
                },
            }
        }
    )+ };
}

structs! {
    request: Asked {
        kind: named("kind="),
        region: named("region="),
        bytes: any_size("bytes="),
        align: alignment(),
        lane: lane_or_none("lane="),
    }
    placed: Place { region offset: Offset("at="), size: size("size=") }
    given_up: GivenUp { done: done_or_failed(), released: size("released=") }
    compaction: CompactOptions {
        region: named("region="),
        goal: goal(),
        budget: limit_or_none("budget="),
        moves_raw: yes_or_no("raw="),
    }
    slept: SleepReport {
        released: size("released="),
        offloaded: size("offloaded="),
        stayed: size("stayed="),
    }
    woken: WakeReport { committed: size("committed="), restored: size("restored=") }
    layout: Layout { granularity: granularity(), reserved: reserved() }
}

/// The address space of each region.
const fn reserved() -> Custom<[ByteSize; 2]> {
    Custom {
        write: |[stable, dynamic], f| {
            size("stable=").write(stable, f)?;
            size("dynamic=").write(dynamic, f)
        },
        read: |words| Ok([size("stable=").read(words)?, size("dynamic=").read(words)?]),
    }
}

pub(super) const fn resized() -> Custom<Resized> {
    Custom {
        write: |resized, f| {
            let (at, is_moved) = match resized {
                Resized::InPlace(at) => (at, false),
                Resized::Moved(at) => (at, true),
                Resized::Refused(why) => return named("why=").write(why, f),
            };
            placed().write(at, f)?;
            yes_or_no("moved=").write(is_moved, f)
        },
        read: |words| {
            if words.rest.is_some_and(|rest| rest.starts_with("why=")) {
                return named("why=").read(words).map(Resized::Refused);
            }
            let at = placed().read(words)?;
            let is_moved = yes_or_no("moved=").read(words)?;
            Ok(if is_moved { Resized::Moved(at) } else { Resized::InPlace(at) })
        },
    }
}

pub(super) const fn fallen() -> Custom<Fallen> {
    Custom {
        write: |fallen, f| match fallen {
            Fallen::Asleep(report) => {
                f.write_str(" slept")?;
                slept().write(report, f)
            }
            Fallen::Failed { why, state } => {
                f.write_str(" failed")?;
                named("why=").write(why, f)?;
                named("state=").write(state, f)
            }
        },
        read: |words| match words.word("slept or failed")? {
            "slept" => slept().read(words).map(Fallen::Asleep),
            "failed" => {
                let (why, state) = (named("why=").read(words)?, named("state=").read(words)?);
                Ok(Fallen::Failed { why, state })
            }
            other => words.unexpected("slept or failed", other),
        },
    }
}

/// The outcome of a wake; `None` if it failed.
pub(super) const fn awake() -> Custom<Option<WakeReport>> {
    Custom {
        write: |report, f| {
            done_or_failed().write(report.is_some(), f)?;
            report.map_or(Ok(()), |report| woken().write(report, f))
        },
        read: |words| match done_or_failed().read(words)? {
            true => woken().read(words).map(Some),
            false => Ok(None),
        },
    }
}

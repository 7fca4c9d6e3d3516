//! Writes recordings: the words and fields of each line. `docs/RECORDING.md` describes the same
//! format for users.
//!
//! This module only writes; `parse` reads.
//!
//! Invariant: `parse` reads each written line as the same value, and no line is longer than
//! [`LINE_MAX`].

use std::fmt::{self, Display, Write as _};

use super::operation::{
    After, Asked, BlockKind, Closed, Closing, Ended, Entry, Fallen, GivenUp, Header, Operation,
    Place, Resized, Sleepless, Why,
};
use crate::state::region::Region;
use crate::types::compact::{CompactOptions, Goal};
use crate::types::config::Growth;
use crate::types::sleep::{Contents, SleepReport, WakeReport};
use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;

/// The version that is written, and the newest that is read.
pub(crate) const VERSION: u64 = 2;

/// The first line, without the version number.
pub(super) const FIRST: &str = "lowtide-recording version=";

/// The maximum number of bytes of a line. Three times the longest line that is written: the header,
/// with a name of 256 bytes that are all escaped.
pub(super) const LINE_MAX: usize = 4096;

/// The number of bytes of a name that are written.
const NAME_MAX: usize = 256;

/// A value that a closure writes.
struct Written<F>(F);

impl<F: Fn(&mut fmt::Formatter<'_>) -> fmt::Result> Display for Written<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.0)(f)
    }
}

/// Returns the nanoseconds of a duration, at most 584 years.
pub(super) fn nanos(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl BlockKind {
    /// All kinds, in no particular order.
    pub(super) const ALL: [Self; 3] = [Self::Buffer, Self::Raw, Self::Reserve];

    /// Returns the name used in recordings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Buffer => "buffer",
            Self::Raw => "raw",
            Self::Reserve => "reserve",
        }
    }
}

impl Why {
    pub(super) const ALL: [Self; 5] =
        [Self::Limit, Self::Device, Self::Addresses, Self::TooLarge, Self::Driver];

    /// Returns the name used in recordings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Device => "device",
            Self::Addresses => "addresses",
            Self::TooLarge => "too_large",
            Self::Driver => "driver",
        }
    }
}

impl After {
    pub(super) const ALL: [Self; 2] = [Self::Lanes, Self::All];

    /// Returns the name used in recordings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lanes => "lanes",
            Self::All => "all",
        }
    }
}

impl Closed {
    pub(super) const ALL: [Self; 3] = [Self::Done, Self::LiveBlocks, Self::Failed];

    /// Returns the name used in recordings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::LiveBlocks => "live_blocks",
            Self::Failed => "failed",
        }
    }
}

impl Ended {
    pub(super) const ALL: [Self; 3] = [Self::Gone, Self::Finished, Self::Full];

    /// Returns the name used in recordings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Finished => "finished",
            Self::Full => "full",
        }
    }
}

impl Sleepless {
    pub(super) const ALL: [Self; 6] =
        [Self::Leased, Self::Cancelled, Self::Capturing, Self::Budget, Self::State, Self::Driver];

    /// Returns the name used in recordings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Leased => "leased",
            Self::Cancelled => "cancelled",
            Self::Capturing => "capturing",
            Self::Budget => "budget",
            Self::State => "state",
            Self::Driver => "driver",
        }
    }
}

/// Returns the name of the treatment of a buffer's contents in a recording.
pub(super) const fn contents(contents: Option<Contents>) -> &'static str {
    match contents {
        Some(contents) => contents.name(),
        None => "usual",
    }
}

/// Returns the word for a boolean in a recording.
pub(super) const fn yes(is_so: bool) -> &'static str {
    if is_so { "yes" } else { "no" }
}

const fn done(done: bool) -> &'static str {
    if done { "done" } else { "failed" }
}

/// Writes a number of bytes, or `none` for the maximum.
fn limit(limit: ByteSize) -> impl Display {
    Written(move |f: &mut fmt::Formatter<'_>| match limit {
        ByteSize::MAX => f.write_str("none"),
        _ => write!(f, "{}", limit.get()),
    })
}

fn decay(time: DecayTime) -> impl Display {
    Written(move |f: &mut fmt::Formatter<'_>| match time {
        DecayTime::AtOnce => f.write_str("at_once"),
        DecayTime::Never => f.write_str("never"),
        DecayTime::Within(time) => write!(f, "{}", nanos(time)),
    })
}

fn growth(growth: Growth) -> impl Display {
    Written(move |f: &mut fmt::Formatter<'_>| match growth {
        Growth::SameAsRequested => f.write_str("same"),
        Growth::NextPowerOfTwo { initial, after_shrink, cap } => {
            write!(f, "double:{}:{}:{}", initial.get(), after_shrink.get(), cap.get())
        }
    })
}

/// Writes a name in visible ASCII, and any other byte as `%` and two hexadecimal digits.
fn escaped(name: &str) -> impl Display {
    let mut end = name.len().min(NAME_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    Written(move |f: &mut fmt::Formatter<'_>| {
        name[..end].bytes().try_for_each(|byte| match byte {
            b'%' => write!(f, "%25"),
            b'!'..=b'~' => f.write_char(char::from(byte)),
            _ => write!(f, "%{byte:02x}"),
        })
    })
}

impl Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, region) = (self.kind.name(), self.region.name());
        let (bytes, align) = (self.bytes.get(), self.align.get());
        write!(f, " kind={kind} region={region} bytes={bytes} align={align} lane=")?;
        match self.lane {
            Some(lane) => write!(f, "{lane}"),
            None => f.write_str("none"),
        }
    }
}

fn at(region: Region, offset: ByteSize) -> impl Display {
    Written(move |f: &mut fmt::Formatter<'_>| write!(f, "{}:{}", region.name(), offset.get()))
}

impl Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " at={} size={}", at(self.region, self.offset), self.size.get())
    }
}

impl Display for GivenUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " {} released={}", done(self.done), self.released.get())
    }
}

impl Display for Fallen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asleep(SleepReport { released, offloaded, stayed }) => {
                let [released, offloaded, stayed] = [released, offloaded, stayed].map(|b| b.get());
                write!(f, " slept released={released} offloaded={offloaded} stayed={stayed}")
            }
            Self::Failed { why, state } => {
                write!(f, " failed why={} state={}", why.name(), state.name())
            }
        }
    }
}

impl Header {
    /// Returns the outcome, after a space; empty if it is unknown.
    pub(super) fn outcome(&self) -> impl Display {
        Written(move |f: &mut fmt::Formatter<'_>| {
            let Some(layout) = self.layout else { return Ok(()) };
            let ([stable, dynamic], granularity) = (layout.reserved, layout.granularity.get());
            let (stable, dynamic) = (stable.get(), dynamic.get());
            write!(f, " granularity={granularity} stable={stable} dynamic={dynamic}")
        })
    }
}

impl Display for Header {
    /// Writes two lines, with their newlines.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{FIRST}{}", self.version)?;
        let asynchronous = yes(self.asynchronous);
        let (backend, started) = (self.backend.name(), nanos(self.started));
        write!(f, "0 open backend={backend} asynchronous={asynchronous} clock={started}")?;
        write!(f, " limit={} reserve={}", limit(self.limit), self.reserve.get())?;
        write!(f, " decay={} growth={}", decay(self.decay), growth(self.growth))?;
        write!(f, " name={}", escaped(&self.name))?;
        if self.layout.is_some() {
            write!(f, " ->{}", self.outcome())?;
        }
        f.write_char('\n')
    }
}

impl Operation {
    /// Returns the first word of the operation in its line.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Alloc { .. } => "alloc",
            Self::Refuse { .. } => "refuse",
            Self::Free { .. } => "free",
            Self::Resize { .. } => "resize",
            Self::Move { .. } => "move",
            Self::Use { .. } => "use",
            Self::Pin { .. } => "pin",
            Self::Unpin { .. } => "unpin",
            Self::Lane { .. } => "lane",
            Self::LaneEnd { .. } => "lane_end",
            Self::EndRun { .. } => "end_run",
            Self::Limit { .. } => "limit",
            Self::DecayTime { .. } => "decay_time",
            Self::Decay { .. } => "decay",
            Self::Trim { .. } => "trim",
            Self::Shrink { .. } => "shrink",
            Self::Compact { .. } => "compact",
            Self::Reset { .. } => "reset",
            Self::Close { .. } => "close",
            Self::Contents { .. } => "contents",
            Self::Sleep { .. } => "sleep",
            Self::Wake { .. } => "wake",
        }
    }

    /// Returns the request, each field after a space.
    fn request(&self) -> impl Display {
        Written(move |f: &mut fmt::Formatter<'_>| match self {
            Self::Alloc { id, asked, .. } => write!(f, " id={id}{asked}"),
            Self::Refuse { asked, .. } => write!(f, "{asked}"),
            Self::Free { id, after } => write!(f, " id={id} after={}", after.name()),
            Self::Resize { id, bytes, .. } => write!(f, " id={id} bytes={}", bytes.get()),
            Self::Use { id, lane } => write!(f, " id={id} lane={lane}"),
            Self::Move { id, .. } | Self::Pin { id } | Self::Unpin { id } => {
                write!(f, " id={id}")
            }
            Self::Lane { lane, stream } => write!(f, " lane={lane} stream={stream}"),
            Self::LaneEnd { lane } | Self::EndRun { lane, .. } => write!(f, " lane={lane}"),
            Self::Limit { limit: to } => write!(f, " bytes={}", limit(*to)),
            Self::DecayTime { time } => write!(f, " time={}", decay(*time)),
            Self::Decay { now, .. } => write!(f, " now={}", nanos(*now)),
            Self::Trim { keep, .. } => write!(f, " keep={}", keep.get()),
            Self::Compact { options, .. } => write!(f, "{}", compaction(*options)),
            Self::Contents { id, contents: what } => {
                write!(f, " id={id} what={}", contents(*what))
            }
            Self::Sleep { stable, dynamic, .. } => {
                write!(f, " stable={} dynamic={}", stable.name(), dynamic.name())
            }
            Self::Shrink { .. } | Self::Reset { .. } | Self::Close { .. } | Self::Wake { .. } => {
                Ok(())
            }
        })
    }

    /// Returns the outcome, each field after a space; empty if there is none or it is unknown.
    pub(super) fn outcome(&self) -> impl Display {
        Written(move |f: &mut fmt::Formatter<'_>| match self {
            Self::Alloc { place: Some(place), .. } => write!(f, "{place}"),
            Self::Resize { outcome: Resized::InPlace(place), .. } => write!(f, "{place} moved=no"),
            Self::Resize { outcome: Resized::Moved(place), .. } => write!(f, "{place} moved=yes"),
            Self::Refuse { why: Some(why), .. }
            | Self::Resize { outcome: Resized::Refused(why), .. } => {
                write!(f, " why={}", why.name())
            }
            Self::Move { region, from, to, size, .. } => {
                let (from, to) = (at(*region, *from), at(*region, *to));
                write!(f, " from={from} to={to} size={}", size.get())
            }
            Self::EndRun { done: is_done, .. } => write!(f, " {}", done(*is_done)),
            Self::Decay { outcome, .. } | Self::Trim { outcome, .. } | Self::Shrink { outcome } => {
                write!(f, "{outcome}")
            }
            Self::Compact { stopped, moves, moved, skipped, .. } => {
                let (stopped, moved) = (stopped.name(), moved.get());
                write!(f, " {stopped} moves={moves} moved={moved} skipped={skipped}")
            }
            Self::Reset { blocks, bytes } => write!(f, " blocks={blocks} bytes={}", bytes.get()),
            Self::Close { outcome } => write!(f, " {}", outcome.name()),
            Self::Sleep { outcome, .. } => write!(f, "{outcome}"),
            Self::Wake { woken: Some(WakeReport { committed, restored }) } => {
                let (committed, restored) = (committed.get(), restored.get());
                write!(f, " done committed={committed} restored={restored}")
            }
            Self::Wake { woken: None } => f.write_str(" failed"),
            _ => Ok(()), // no outcome: see `has_outcome`
        })
    }

    /// Returns `true` if the operation's line has an outcome.
    const fn has_outcome(&self) -> bool {
        !matches!(
            self,
            Self::Alloc { place: None, .. }
                | Self::Refuse { why: None, .. }
                | Self::Free { .. }
                | Self::Use { .. }
                | Self::Pin { .. }
                | Self::Unpin { .. }
                | Self::Lane { .. }
                | Self::LaneEnd { .. }
                | Self::Limit { .. }
                | Self::DecayTime { .. }
                | Self::Contents { .. }
        )
    }
}

impl Display for Operation {
    /// Writes the operation without its time and newline.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.word(), self.request())?;
        if self.has_outcome() { write!(f, " ->{}", self.outcome()) } else { Ok(()) }
    }
}

fn compaction(options: CompactOptions) -> impl Display {
    Written(move |f: &mut fmt::Formatter<'_>| {
        write!(f, " region={}", options.region.name())?;
        match options.goal {
            Goal::Granules => f.write_str(" goal=granules")?,
            Goal::Contiguous(size) => write!(f, " goal=contiguous:{}", limit(size))?,
        }
        write!(f, " budget={} raw={}", limit(options.budget), yes(options.moves_raw))
    })
}

impl Display for Entry {
    /// Writes the line without its newline.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", nanos(self.at), self.operation)
    }
}

impl Display for Closing {
    /// Writes the line without its newline.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (at, operations, ended) = (nanos(self.at), self.operations, self.ended.name());
        let threads = if self.one_thread { "one" } else { "many" };
        write!(f, "{at} end operations={operations} threads={threads} ended={ended}")?;
        write!(f, " -> hash={}", self.hash)
    }
}

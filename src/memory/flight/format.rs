//! The bytes of a recording: written into a buffer that is allocated once, and read from a file
//! that may be torn, damaged or hostile.
//!
//! The file has a mark that names it, and two halves. Each has everything: the run, its samples,
//! events, permits and resources. They are written in turn, with a sequence number and a checksum,
//! so the older one stays whole while the newer one is written.
//!
//! Pure: no file, clock or thread. Invariants: a half fits in [`HALF_BYTES`] at the bounds below;
//! reading allocates no more than those bounds, whatever the bytes are, and never panics.

use std::sync::Arc;
use std::time::Duration;

use crate::bytes::{ByteSize, prefix};
use crate::memory::events::Event;
use lowtide_admission::{Level, RequestMemory, RequestPhase};

/// The size of the file: 512 KiB.
pub(super) const FILE_BYTES: usize = 512 << 10;
/// The beginning of the file, with the version of the format at its end.
pub(super) const MARK: &[u8; 17] = b"lowtide flight 4\n";
/// The part of the mark that all versions have.
const MARK_OF_ALL: &[u8; 15] = b"lowtide flight ";

/// The places of the two halves, and the size of each.
pub(super) const HALVES_AT: [usize; 2] = [4096, 4096 + HALF_BYTES];
pub(super) const HALF_BYTES: usize = (FILE_BYTES - 4096) / 2;

/// The samples kept: five minutes, one a second, and a later one.
pub(super) const SAMPLES_MAX: usize = 301;
/// The last events that are kept.
pub(super) const EVENTS_MAX: usize = 256;
/// The permits that are kept.
pub(super) const PERMITS_MAX: usize = 16;
/// The resources that are kept.
pub(super) const RESOURCES_MAX: usize = 32;
/// The length of a name, and of the text of an event, in bytes.
const NAME_MAX: usize = 64;
const TEXT_MAX: usize = 400;

/// Length, checksum, sequence number.
const HEADER: usize = 4 + 4 + 8;
/// The checksum is over the length and all that follows it.
const SUM_AT: usize = 4;
const TEXT_LENGTH: usize = 2;
const RUN_BYTES: usize = 4 + 8 + 16 + 8 + 8 + 1 + TEXT_LENGTH + NAME_MAX;
const SAMPLE_BYTES: usize = 19 * 8 + 3;
const EVENT_BYTES: usize = 4 * 8 + 3 * TEXT_LENGTH + 2 * NAME_MAX + TEXT_MAX;
const PERMIT_BYTES: usize = 6 * 8 + 3 + 3 * (TEXT_LENGTH + NAME_MAX);
const RESOURCE_BYTES: usize = TEXT_LENGTH + NAME_MAX + 1 + 16;
const COUNTS: usize = 4 * 2;

/// The most bytes that a half has.
const WRITTEN_MAX: usize = HEADER
    + RUN_BYTES
    + COUNTS
    + SAMPLES_MAX * SAMPLE_BYTES
    + EVENTS_MAX * EVENT_BYTES
    + PERMITS_MAX * PERMIT_BYTES
    + RESOURCES_MAX * RESOURCE_BYTES;
const _: () = assert!(WRITTEN_MAX <= HALF_BYTES);

/// An unknown amount.
const UNKNOWN: u64 = u64::MAX;

/// A value in a recording.
pub(super) trait Stored: Sized {
    fn put(&self, to: &mut HalfWriter);
    /// Returns `None` if the bytes are no such value.
    fn read(from: &mut Reader<'_>) -> Option<Self>;
}

/// Stores a struct as its fields in this order. With its definition, defines it too.
macro_rules! stored {
    (
        $(#[$meta:meta])*
        $vis:vis struct $of:ident {
            $($(#[$of_field:meta])* $field_vis:vis $field:ident: $kind:ty,)+
        }
    ) => {
        $(#[$meta])*
        $vis struct $of {
            $($(#[$of_field])* $field_vis $field: $kind,)+
        }

        stored!($of, $($field),+);
    };
    ($of:ident, $($field:ident),+) => {
        impl Stored for $of {
            fn put(&self, to: &mut HalfWriter) {
                $(self.$field.put(to);)+
            }

            fn read(from: &mut Reader<'_>) -> Option<Self> {
                Some(Self { $($field: Stored::read(from)?),+ })
            }
        }
    };
}
/// Stores a type as another one.
macro_rules! stored_as {
    ($($of:ty: $to:expr, $back:expr;)+) => {$(
        impl Stored for $of {
            fn put(&self, to: &mut HalfWriter) {
                let stored = $to;
                stored(self).put(to);
            }

            fn read(from: &mut Reader<'_>) -> Option<Self> {
                Stored::read(from).and_then($back)
            }
        }
    )+};
}

stored_as! {
    u8: |it: &Self| [*it], |[it]: [Self; 1]| Some(it);
    u16: |it: &Self| it.to_le_bytes(), |it| Some(Self::from_le_bytes(it));
    u32: |it: &Self| it.to_le_bytes(), |it| Some(Self::from_le_bytes(it));
    u64: |it: &Self| it.to_le_bytes(), |it| Some(Self::from_le_bytes(it));
    bool: |it: &Self| u8::from(*it), |it: u8| Some(it == 1);
    ByteSize: |it: &Self| it.get(), |it| Some(Self::new(it));
    Duration: |it: &Self| u64::try_from(it.as_nanos()).unwrap_or(u64::MAX),
        |it| Some(Self::from_nanos(it));
    Option<u64>: |it: &Self| it.unwrap_or(UNKNOWN), |it| Some((it != UNKNOWN).then_some(it));
    Option<ByteSize>: |it: &Self| it.map(ByteSize::get),
        |it: Option<u64>| Some(it.map(ByteSize::new));
    Level: |it: &Self| it.as_u8(), |it| Some(Self::from_u8(it));
    RequestPhase: |it: &Self| *it as u8, |it: u8| Self::ALL.get(usize::from(it)).copied();
    RunEnd: |it: &Self| *it as u8, |it: u8| Self::ALL.get(usize::from(it)).copied();
}

impl<const N: usize> Stored for [u8; N] {
    fn put(&self, to: &mut HalfWriter) {
        to.put(self);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        from.take(N)?.try_into().ok()
    }
}

impl Stored for String {
    fn put(&self, to: &mut HalfWriter) {
        to.put_text(self, NAME_MAX);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        from.text(NAME_MAX)
    }
}

impl Stored for Event {
    fn put(&self, to: &mut HalfWriter) {
        [self.at, self.since].iter().for_each(|time| time.put(to));
        [self.times, self.sum].iter().for_each(|count| count.put(to));
        to.put_text(&self.kind, NAME_MAX);
        to.put_text(&self.about, NAME_MAX);
        to.put_text(&self.text, TEXT_MAX);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        let (at, since) = (Duration::read(from)?, Duration::read(from)?);
        let (times, sum) = (u64::read(from)?, u64::read(from)?);
        let (kind, about) = (from.text(NAME_MAX)?.into(), from.text(NAME_MAX)?);
        Some(Self { at, since, kind, about, text: from.text(TEXT_MAX)?, times, sum })
    }
}

impl Stored for Option<String> {
    fn put(&self, to: &mut HalfWriter) {
        self.is_some().put(to);
        to.put_text(self.as_deref().unwrap_or_default(), NAME_MAX);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        let is_some = bool::read(from)?;
        Some(Some(from.text(NAME_MAX)?).filter(|_| is_some))
    }
}

impl Stored for Arc<str> {
    fn put(&self, to: &mut HalfWriter) {
        to.put_text(self, NAME_MAX);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        from.text(NAME_MAX).map(Self::from)
    }
}

stored! {
    /// The figures of a `Memory` at one instant of its last five minutes.
    ///
    /// `required`, `other`, and the figures of the heap and of device arenas are those of the last
    /// publication of metrics. The others were read at this instant.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize))]
    #[non_exhaustive]
    pub struct FlightSample {
        /// The time, since the Unix epoch.
        pub at: Duration,
        /// The time since the start of the `Memory`, which no step of the wall clock changes.
        pub uptime: Duration,
        /// The memory that counts against the host's limit.
        pub physical: ByteSize,
        /// The bytes by which that grew since the look before, for a second: it looks every 50 ms.
        pub growth: ByteSize,
        /// The host's limit; [`ByteSize::MAX`] if there is none.
        pub limit: ByteSize,
        /// The physical bytes less those that a purge releases.
        pub required: ByteSize,
        /// The live bytes of the heap; zero if they cannot be read.
        pub heap_live: ByteSize,
        /// The bytes that the heap retains.
        pub heap_retained: ByteSize,
        /// The resident bytes that are not jemalloc's; `None` if unknown.
        pub other: Option<ByteSize>,
        /// The live bytes of device arenas that are awake.
        pub device_live: ByteSize,
        /// The bytes that these arenas retain.
        pub device_retained: ByteSize,
        /// The bytes reserved in the device's budget.
        pub device_reserved: ByteSize,
        /// The bytes reserved in the host's budget.
        pub reserved: ByteSize,
        /// The limit of `reserved` up to which requests are admitted.
        pub allowance: ByteSize,
        /// The limit up to which admission fills memory; [`ByteSize::MAX`] without a limit.
        pub ceiling: ByteSize,
        /// The pressure on host memory.
        pub level: Level,
        /// The requests that hold a permit.
        pub held: u64,
        /// The requests that wait for room.
        pub waiting: u64,
        /// The requests rejected since the start.
        pub rejected_total: u64,
        /// The processes of the cgroup that the kernel has OOM-killed, if reported.
        pub oom_kills: Option<u64>,
        /// `true` while memory outside requests leaves no room for requests.
        pub exhausted: bool,
        /// `true` once the service was asked to end.
        pub ending: bool,
    }
}

stored! {
    /// A resource of a run that has ended.
    #[derive(Clone, Debug, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize))]
    #[non_exhaustive]
    pub struct FlightResource {
        /// The name.
        pub name: Arc<str>,
        /// `true` if it was loaded.
        pub loaded: bool,
        /// The bytes of host memory that it reserves, or as measured.
        pub host: ByteSize,
        /// The same on the device.
        pub device: ByteSize,
    }
}

lowtide_core::named_enum! {
    /// The end of a run, as the run itself recorded it.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(in crate::memory) enum RunEnd {
        /// It had not ended.
        #[default]
        Running = "running",
        /// By `Memory::shutdown`.
        ShutDown = "shut_down",
        /// The same, because memory was exhausted and the policy is to exit.
        Exhausted = "exhausted",
        /// The last handle was dropped.
        Dropped = "dropped",
        /// The last handle was dropped by a panic.
        Panicked = "panicked",
    }
}

stored! {
    /// The identity of a run.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    pub(super) struct RunIdentity {
        pub(super) pid: u32,
        /// The start, since the Unix epoch.
        pub(super) started_at: Duration,
        /// The kernel's boot id; zeros if unknown.
        pub(super) boot_id: [u8; 16],
        /// The inode of the cgroup's folder, which the kernel uses for no later cgroup; zero if
        /// unknown.
        pub(super) cgroup: u64,
        /// The version of the service, shortened to 64 bytes; empty if unknown.
        pub(super) version: String,
    }
}

/// What a recording contains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FlightRecording {
    pub(super) run: RunIdentity,
    pub(super) end: RunEnd,
    /// The processes of this machine that the kernel had OOM-killed since it booted, if known.
    pub(super) machine_kills: Option<u64>,
    /// The samples, oldest first.
    pub(super) samples: Vec<FlightSample>,
    /// The events, oldest first.
    pub(super) events: Vec<Event>,
    pub(super) permits: Vec<RequestMemory>,
    pub(super) resources: Vec<FlightResource>,
}

/// What a file contains.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FileContents {
    /// Nothing: the file is new, or the first run ended before it recorded anything.
    Nothing,
    /// Something else than a recording.
    Foreign,
    /// A recording in which no half is whole, or one of another version.
    Unreadable,
    /// A recording.
    Recording(Box<FlightRecording>),
}

stored! {
    RequestMemory, reserved, live, peak, claim, spilled, age, phase, is_cancelled, method, route, tenant
}

/// Writes halves into one buffer that never grows.
#[derive(Debug)]
pub(super) struct HalfWriter(Vec<u8>);

impl HalfWriter {
    pub(super) fn new() -> Self {
        Self(Vec::with_capacity(WRITTEN_MAX))
    }

    /// Begins a half.
    pub(super) fn begin(&mut self, run: &RunIdentity, end: RunEnd, machine_kills: Option<u64>) {
        self.0.clear();
        self.put(&[0; HEADER]);
        run.put(self);
        machine_kills.put(self);
        end.put(self);
    }

    /// Adds a list of at most so many entries.
    pub(super) fn list<'a, T: Stored + 'a>(
        &mut self,
        most: usize,
        entries: impl Iterator<Item = &'a T>,
    ) {
        let (at, mut count) = (self.0.len(), 0_u16);
        count.put(self);
        for entry in entries.take(most) {
            entry.put(self);
            count += 1;
        }
        self.put_at(at, &count.to_le_bytes());
    }

    /// Ends the half, and returns its bytes.
    pub(super) fn finish(&mut self, sequence: u64) -> &[u8] {
        let length = u32::try_from(self.0.len() - HEADER).unwrap_or(u32::MAX);
        self.put_at(0, &length.to_le_bytes());
        self.put_at(SUM_AT + 4, &sequence.to_le_bytes());
        let sum = checksum(&self.0);
        self.put_at(SUM_AT, &sum.to_le_bytes());
        &self.0
    }

    fn put(&mut self, bytes: &[u8]) {
        debug_assert!(self.0.len() + bytes.len() <= WRITTEN_MAX, "the bounds fit in a half");
        self.0.extend_from_slice(bytes);
    }

    fn put_at(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.0.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    fn put_text(&mut self, text: &str, most: usize) {
        let text = prefix(text, most);
        u16::try_from(text.len()).unwrap_or_default().put(self);
        self.put(text.as_bytes());
    }
}

/// Reads a file of any content.
pub(super) fn read(file: &[u8]) -> FileContents {
    if file.iter().all(|byte| *byte == 0) {
        return FileContents::Nothing;
    }
    if !file.starts_with(MARK_OF_ALL) {
        // A recording that was truncated while it was in use has no mark, but whole halves.
        let is_ours = HALVES_AT.into_iter().any(|at| half(file, at).is_some());
        return if is_ours { FileContents::Unreadable } else { FileContents::Foreign };
    }
    if !file.starts_with(MARK) {
        return FileContents::Unreadable;
    }
    let halves = HALVES_AT.map(|at| half(file, at));
    let newest = halves.into_iter().flatten().max_by_key(|(sequence, _)| *sequence);
    let Some((_, payload)) = newest else {
        let is_empty = HALVES_AT.iter().all(|at| {
            let half = file.get(*at..).unwrap_or_default();
            half.iter().take(HALF_BYTES).all(|byte| *byte == 0)
        });
        return if is_empty { FileContents::Nothing } else { FileContents::Unreadable };
    };
    let recording = recording(payload).map(Box::new);
    recording.map_or(FileContents::Unreadable, FileContents::Recording)
}

/// Returns the sequence number and the payload of a half whose checksum is right.
fn half(file: &[u8], at: usize) -> Option<(u64, &[u8])> {
    let place = file.get(at..)?;
    let mut reader = Reader(place.get(..HEADER)?);
    let length = usize::try_from(u32::read(&mut reader)?).ok()?;
    let (sum, sequence) = (u32::read(&mut reader)?, u64::read(&mut reader)?);
    let whole = HEADER.checked_add(length).filter(|whole| *whole <= HALF_BYTES)?;
    let whole = place.get(..whole)?;
    (checksum(whole) == sum).then_some((sequence, whole.get(HEADER..)?))
}

fn recording(payload: &[u8]) -> Option<FlightRecording> {
    let mut reader = Reader(payload);
    let run = RunIdentity::read(&mut reader)?;
    let machine_kills = Stored::read(&mut reader)?;
    let end = Stored::read(&mut reader)?;
    let samples = reader.list(SAMPLES_MAX, Stored::read)?;
    let mut events = reader.list(EVENTS_MAX, Event::read)?;
    events.sort_by_key(|event| event.at);
    let permits = reader.list(PERMITS_MAX, Stored::read)?;
    let resources = reader.list(RESOURCES_MAX, Stored::read)?;
    Some(FlightRecording { run, end, machine_kills, samples, events, permits, resources })
}

/// The bytes that are left to read.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn text(&mut self, most: usize) -> Option<String> {
        let length = usize::from(u16::read(self)?);
        let text = self.take(length).filter(|_| length <= most)?;
        let text = std::str::from_utf8(text).ok()?;
        // In JSON a control character takes six bytes.
        Some(text.chars().map(|one| if one.is_control() { ' ' } else { one }).collect())
    }

    fn list<T>(&mut self, most: usize, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = usize::from(u16::read(self)?);
        if count > most {
            return None;
        }
        (0..count).map(|_| read(self)).collect()
    }
}

/// The checksum of a block, without the place of the checksum itself.
pub(super) fn checksum(block: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(block.get(..SUM_AT).unwrap_or_default());
    hasher.update(block.get(SUM_AT + 4..).unwrap_or_default());
    hasher.finalize()
}

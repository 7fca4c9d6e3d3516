//! The bytes of a recording: written into a buffer that is allocated once, and read from a file
//! that may be torn, damaged or hostile.
//!
//! The file has a mark that names it, two places for a look, and two halves. A half has everything:
//! the run, its samples, events, permits and resources. A look is one later sample. Each is written
//! in turn to its two places, with a sequence number and a checksum, so the older one stays whole
//! while the newer one is written.
//!
//! Pure: no file, clock or thread. Invariants: a half fits in [`HALF_BYTES`] at the bounds below;
//! reading allocates no more than those bounds, whatever the bytes are, and never panics.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::bytes::{ByteSize, prefix};
use lowtide_admission::{Level, RequestMemory, RequestPhase};

/// The size of the file: 512 KiB.
pub(super) const FILE_BYTES: usize = 512 << 10;
/// The beginning of the file, with the version of the format at its end.
pub(super) const MARK: &[u8; 17] = b"lowtide flight 1\n";
/// The part of the mark that all versions have.
const MARK_OF_ALL: &[u8; 15] = b"lowtide flight ";

/// The places of the two looks, and the size of each.
pub(super) const LOOKS_AT: [usize; 2] = [1024, 2048];
const LOOK_BYTES: usize = 1024;
/// The places of the two halves, and the size of each.
pub(super) const HALVES_AT: [usize; 2] = [4096, 4096 + HALF_BYTES];
pub(super) const HALF_BYTES: usize = (FILE_BYTES - 4096) / 2;

/// The samples kept: five minutes, one a second.
pub(super) const SAMPLES_MAX: usize = 300;
/// The last events that are kept.
pub(super) const EVENTS_MAX: usize = 256;
/// The permits that are kept.
pub(super) const PERMITS_MAX: usize = 16;
/// The resources that are kept.
pub(super) const RESOURCES_MAX: usize = 32;
/// The length of a name, and of the text of an event, in bytes.
const NAME_MAX: usize = 64;
const TEXT_MAX: usize = 400;

/// Length, checksum, sequence number, run.
const HEADER: usize = 4 + 4 + 8 + 8;
/// The checksum is over the length and all that follows it.
const SUM_AT: usize = 4;
const TEXT_LENGTH: usize = 2;
const RUN_BYTES: usize = 4 + 8 + 16 + 8 + 8 + 1 + TEXT_LENGTH + NAME_MAX;
const SAMPLE_BYTES: usize = FlightSample::WORDS * 8;
const EVENT_BYTES: usize = 16 + 3 * TEXT_LENGTH + 2 * NAME_MAX + TEXT_MAX;
const PERMIT_BYTES: usize = 5 * 8 + 3 + 3 * (TEXT_LENGTH + NAME_MAX);
const RESOURCE_BYTES: usize = TEXT_LENGTH + NAME_MAX + 1 + 16;
const COUNTS: usize = 4 * 2;

const _: () = assert!(
    HEADER
        + RUN_BYTES
        + COUNTS
        + SAMPLES_MAX * SAMPLE_BYTES
        + EVENTS_MAX * EVENT_BYTES
        + PERMITS_MAX * PERMIT_BYTES
        + RESOURCES_MAX * RESOURCE_BYTES
        <= HALF_BYTES
        && HEADER + SAMPLE_BYTES <= LOOK_BYTES
);

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

/// An unknown amount.
const UNKNOWN: u64 = u64::MAX;

impl FlightSample {
    const WORDS: usize = 20;

    fn words(&self) -> [u64; Self::WORDS] {
        let flags = u64::from(self.level.as_u8())
            | u64::from(self.exhausted) << 8
            | u64::from(self.ending) << 9;
        [
            nanos(self.at),
            nanos(self.uptime),
            self.physical.get(),
            self.limit.get(),
            self.required.get(),
            self.heap_live.get(),
            self.heap_retained.get(),
            self.other.map_or(UNKNOWN, ByteSize::get),
            self.device_live.get(),
            self.device_retained.get(),
            self.device_reserved.get(),
            self.reserved.get(),
            self.allowance.get(),
            self.ceiling.get(),
            self.held,
            self.waiting,
            self.rejected_total,
            self.oom_kills.unwrap_or(UNKNOWN),
            flags,
            self.growth.get(),
        ]
    }

    fn of_words(words: [u64; Self::WORDS]) -> Self {
        let [at, uptime, physical, limit, required, live, retained, other, ..] = words;
        let [.., flags, growth] = words;
        let [_, _, _, _, _, _, _, _, device @ ..] = words;
        let [device_live, device_retained, device_reserved, reserved, allowance, ceiling, ..] =
            device;
        let [_, _, _, _, _, _, held, waiting, rejected_total, oom_kills, ..] = device;
        Self {
            at: Duration::from_nanos(at),
            uptime: Duration::from_nanos(uptime),
            physical: ByteSize::new(physical),
            growth: ByteSize::new(growth),
            limit: ByteSize::new(limit),
            required: ByteSize::new(required),
            heap_live: ByteSize::new(live),
            heap_retained: ByteSize::new(retained),
            other: (other != UNKNOWN).then_some(ByteSize::new(other)),
            device_live: ByteSize::new(device_live),
            device_retained: ByteSize::new(device_retained),
            device_reserved: ByteSize::new(device_reserved),
            reserved: ByteSize::new(reserved),
            allowance: ByteSize::new(allowance),
            ceiling: ByteSize::new(ceiling),
            level: Level::from_u8(u8::try_from(flags & 0xff).unwrap_or(u8::MAX)),
            held,
            waiting,
            rejected_total,
            oom_kills: (oom_kills != UNKNOWN).then_some(oom_kills),
            exhausted: flags >> 8 & 1 == 1,
            ending: flags >> 9 & 1 == 1,
        }
    }
}

/// An event of a run that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct FlightEvent {
    /// The time of its last occurrence, since the Unix epoch.
    pub at: Duration,
    /// The kind, as in [`Event`](crate::memory::Event).
    pub kind: String,
    /// The subject.
    pub about: String,
    /// The text of the last occurrence; amounts in it are sums over all occurrences.
    pub text: String,
    /// The number of consecutive occurrences.
    pub times: u64,
}

/// A resource of a run that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct FlightResource {
    /// The name.
    pub name: String,
    /// `true` if it was loaded.
    pub loaded: bool,
    /// The bytes of host memory that it reserves, or as measured.
    pub host: ByteSize,
    /// The same on the device.
    pub device: ByteSize,
}

/// A resource of this run, whose name is shared, so that copies allocate nothing.
#[derive(Clone, Debug)]
pub(super) struct PublishedResource {
    pub(super) name: Arc<str>,
    pub(super) loaded: bool,
    pub(super) host: ByteSize,
    pub(super) device: ByteSize,
}

/// The end of a run, as the run itself recorded it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::memory) enum RunEnd {
    /// It had not ended.
    #[default]
    Running,
    /// By `Memory::shutdown`.
    ShutDown,
    /// The same, because memory was exhausted and the policy is to exit.
    Exhausted,
    /// The last handle was dropped.
    Dropped,
    /// The last handle was dropped by a panic.
    Panicked,
}

impl RunEnd {
    pub(super) const ALL: [Self; 5] =
        [Self::Running, Self::ShutDown, Self::Exhausted, Self::Dropped, Self::Panicked];

    pub(super) const fn as_u8(self) -> u8 {
        self as u8
    }

    pub(super) fn from_u8(figure: u8) -> Option<Self> {
        Self::ALL.get(usize::from(figure)).copied()
    }
}

/// The identity of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
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

impl Run {
    /// Returns a number that the looks and halves of a run have in common.
    fn id(&self) -> u64 {
        nanos(self.started_at) ^ u64::from(self.pid).rotate_left(32)
    }
}

/// What a recording contains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Recording {
    pub(super) run: Run,
    pub(super) end: RunEnd,
    /// The processes of this machine that the kernel had OOM-killed since it booted, if known.
    pub(super) machine_kills: Option<u64>,
    /// The samples, oldest first.
    pub(super) samples: Vec<FlightSample>,
    /// The events, oldest first.
    pub(super) events: Vec<FlightEvent>,
    pub(super) permits: Vec<RequestMemory>,
    pub(super) resources: Vec<FlightResource>,
}

/// What a file contains.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// Nothing: the file is new, or the first run ended before it recorded anything.
    Nothing,
    /// Something else than a recording.
    Foreign,
    /// A recording in which no half is whole, or one of another version.
    Unreadable,
    /// A recording.
    Recording(Box<Recording>),
}

/// Writes halves and looks into one buffer that never grows.
#[derive(Debug)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self { bytes: Vec::with_capacity(HALF_BYTES) }
    }

    /// Begins a half.
    pub(super) fn begin(&mut self, run: &Run, end: RunEnd, machine_kills: Option<u64>) {
        self.bytes.clear();
        self.put(&[0; HEADER]);
        self.put(&run.pid.to_le_bytes());
        self.put_u64(nanos(run.started_at));
        self.put(&run.boot_id);
        self.put_u64(run.cgroup);
        self.put_u64(machine_kills.unwrap_or(UNKNOWN));
        self.put(&[end.as_u8()]);
        self.put_text(&run.version, NAME_MAX);
    }

    /// Adds the samples, oldest first.
    pub(super) fn samples(&mut self, samples: &VecDeque<FlightSample>) {
        self.list(SAMPLES_MAX, samples.iter(), |writer, sample| {
            sample.words().iter().for_each(|word| writer.put_u64(*word));
        });
    }

    /// Begins the events. [`Writer::event`] adds each, and [`Writer::end_list`] ends them.
    pub(super) fn begin_list(&mut self) -> usize {
        let at = self.bytes.len();
        self.put(&[0; 2]);
        at
    }

    pub(super) fn event(&mut self, at: Duration, times: u64, [kind, about, text]: [&str; 3]) {
        self.put_u64(nanos(at));
        self.put_u64(times);
        self.put_text(kind, NAME_MAX);
        self.put_text(about, NAME_MAX);
        self.put_text(text, TEXT_MAX);
    }

    /// Ends a list of so many entries.
    pub(super) fn end_list(&mut self, at: usize, count: usize) {
        let count = u16::try_from(count).unwrap_or(u16::MAX);
        if let Some(place) = self.bytes.get_mut(at..at + 2) {
            place.copy_from_slice(&count.to_le_bytes());
        }
    }

    pub(super) fn permits(&mut self, permits: &[RequestMemory]) {
        self.list(PERMITS_MAX, permits.iter(), |writer, permit| {
            let bytes = [permit.reserved, permit.live, permit.peak, permit.claim];
            bytes.iter().for_each(|bytes| writer.put_u64(bytes.get()));
            writer.put_u64(nanos(permit.age));
            let phase = PHASES.iter().position(|phase| *phase == permit.phase);
            let phase = phase.and_then(|phase| u8::try_from(phase).ok()).unwrap_or(u8::MAX);
            let has_tenant = permit.tenant.is_some();
            writer.put(&[phase, u8::from(permit.is_cancelled), u8::from(has_tenant)]);
            writer.put_text(&permit.method, NAME_MAX);
            writer.put_text(&permit.route, NAME_MAX);
            writer.put_text(permit.tenant.as_deref().unwrap_or_default(), NAME_MAX);
        });
    }

    pub(super) fn resources(&mut self, resources: &[PublishedResource]) {
        self.list(RESOURCES_MAX, resources.iter(), |writer, resource| {
            writer.put_text(&resource.name, NAME_MAX);
            writer.put(&[u8::from(resource.loaded)]);
            writer.put_u64(resource.host.get());
            writer.put_u64(resource.device.get());
        });
    }

    /// Ends the half, and returns its bytes.
    pub(super) fn finish(&mut self, run: &Run, sequence: u64) -> &[u8] {
        let length = u32::try_from(self.bytes.len() - HEADER).unwrap_or(u32::MAX);
        let header = [
            &length.to_le_bytes()[..],
            &[0; 4],
            &sequence.to_le_bytes()[..],
            &run.id().to_le_bytes()[..],
        ];
        let mut at = 0;
        for part in header {
            if let Some(place) = self.bytes.get_mut(at..at + part.len()) {
                place.copy_from_slice(part);
            }
            at += part.len();
        }
        let sum = checksum(&self.bytes);
        if let Some(place) = self.bytes.get_mut(SUM_AT..SUM_AT + 4) {
            place.copy_from_slice(&sum.to_le_bytes());
        }
        &self.bytes
    }

    /// Returns the bytes of a look.
    pub(super) fn look(&mut self, run: &Run, sequence: u64, sample: &FlightSample) -> &[u8] {
        self.bytes.clear();
        self.put(&[0; HEADER]);
        sample.words().iter().for_each(|word| self.put_u64(*word));
        self.finish(run, sequence)
    }

    fn list<T>(
        &mut self,
        most: usize,
        entries: impl Iterator<Item = T>,
        mut put: impl FnMut(&mut Self, T),
    ) {
        let (at, mut count) = (self.begin_list(), 0);
        for entry in entries.take(most) {
            put(self, entry);
            count += 1;
        }
        self.end_list(at, count);
    }

    fn put(&mut self, bytes: &[u8]) {
        debug_assert!(self.bytes.len() + bytes.len() <= HALF_BYTES, "the bounds fit in a half");
        self.bytes.extend_from_slice(bytes);
    }

    fn put_u64(&mut self, word: u64) {
        self.put(&word.to_le_bytes());
    }

    fn put_text(&mut self, text: &str, most: usize) {
        let text = prefix(text, most);
        self.put(&u16::try_from(text.len()).unwrap_or_default().to_le_bytes());
        self.put(text.as_bytes());
    }
}

/// The phases by their numbers in the file.
const PHASES: [RequestPhase; 4] = [
    RequestPhase::Receiving,
    RequestPhase::Suspended,
    RequestPhase::Working,
    RequestPhase::Answered,
];

/// Reads a file of any content.
pub(super) fn read(file: &[u8]) -> Contents {
    if file.iter().all(|byte| *byte == 0) {
        return Contents::Nothing;
    }
    if !file.starts_with(MARK_OF_ALL) {
        // A recording that was truncated while it was in use has no mark, but whole blocks.
        let has = |places: [usize; 2], most| {
            places.into_iter().any(|at| Block::read(file, at, most).is_some())
        };
        let is_ours = has(HALVES_AT, HALF_BYTES) || has(LOOKS_AT, LOOK_BYTES);
        return if is_ours { Contents::Unreadable } else { Contents::Foreign };
    }
    if !file.starts_with(MARK) {
        return Contents::Unreadable;
    }
    let halves = HALVES_AT.map(|at| Block::read(file, at, HALF_BYTES));
    let newest = halves.into_iter().flatten().max_by_key(|half| half.sequence);
    let Some(half) = newest else {
        let is_empty = HALVES_AT.iter().all(|at| {
            let half = file.get(*at..).unwrap_or_default();
            half.iter().take(HALF_BYTES).all(|byte| *byte == 0)
        });
        return if is_empty { Contents::Nothing } else { Contents::Unreadable };
    };
    let Some(mut recording) = half.recording() else { return Contents::Unreadable };
    let mut looks =
        LOOKS_AT.map(|at| Block::read(file, at, LOOK_BYTES).filter(|look| look.run == half.run));
    looks.sort_by_key(|look| look.as_ref().map(|look| look.sequence));
    for look in looks.iter().flatten() {
        let last = recording.samples.last().map_or(Duration::ZERO, |last| last.uptime);
        let mut reader = Reader(look.payload);
        if let Some(sample) = reader.sample().filter(|sample| sample.uptime > last) {
            recording.samples.push(sample);
        }
    }
    Contents::Recording(Box::new(recording))
}

/// A half or a look whose checksum is right.
#[derive(Clone, Copy, Debug)]
struct Block<'a> {
    sequence: u64,
    run: u64,
    payload: &'a [u8],
}

impl<'a> Block<'a> {
    fn read(file: &'a [u8], at: usize, most: usize) -> Option<Self> {
        let place = file.get(at..)?;
        let mut reader = Reader(place.get(..HEADER)?);
        let length = usize::try_from(reader.u32()?).ok()?;
        let sum = reader.u32()?;
        let (sequence, run) = (reader.u64()?, reader.u64()?);
        let whole = place.get(..HEADER.checked_add(length).filter(|whole| *whole <= most)?)?;
        (checksum(whole) == sum).then_some(Self { sequence, run, payload: whole.get(HEADER..)? })
    }

    fn recording(&self) -> Option<Recording> {
        let mut reader = Reader(self.payload);
        let pid = reader.u32()?;
        let started_at = reader.time()?;
        let (boot_id, cgroup) = (reader.take(16)?.try_into().ok()?, reader.u64()?);
        let machine_kills = reader.u64().map(|kills| (kills != UNKNOWN).then_some(kills))?;
        let end = RunEnd::from_u8(reader.u8()?)?;
        let version = reader.text(NAME_MAX)?;
        let samples = reader.list(SAMPLES_MAX, Reader::sample)?;
        let mut events = reader.list(EVENTS_MAX, Reader::event)?;
        events.sort_by_key(|event| event.at);
        let permits = reader.list(PERMITS_MAX, Reader::permit)?;
        let resources = reader.list(RESOURCES_MAX, Reader::resource)?;
        let run = Run { pid, started_at, boot_id, cgroup, version };
        Some(Recording { run, end, machine_kills, samples, events, permits, resources })
    }
}

/// The bytes that are left to read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2)?.try_into().ok().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    fn bytes(&mut self) -> Option<ByteSize> {
        self.u64().map(ByteSize::new)
    }

    fn time(&mut self) -> Option<Duration> {
        self.u64().map(Duration::from_nanos)
    }

    fn text(&mut self, most: usize) -> Option<String> {
        let length = usize::from(self.u16()?);
        let text = self.take(length).filter(|_| length <= most)?;
        let text = std::str::from_utf8(text).ok()?;
        // In JSON a control character takes six bytes.
        Some(text.chars().map(|one| if one.is_control() { ' ' } else { one }).collect())
    }

    fn list<T>(&mut self, most: usize, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = usize::from(self.u16()?);
        if count > most {
            return None;
        }
        (0..count).map(|_| read(self)).collect()
    }

    fn sample(&mut self) -> Option<FlightSample> {
        let mut words = [0; FlightSample::WORDS];
        for word in &mut words {
            *word = self.u64()?;
        }
        Some(FlightSample::of_words(words))
    }

    fn event(&mut self) -> Option<FlightEvent> {
        let (at, times) = (self.time()?, self.u64()?);
        let (kind, about) = (self.text(NAME_MAX)?, self.text(NAME_MAX)?);
        Some(FlightEvent { at, kind, about, text: self.text(TEXT_MAX)?, times })
    }

    fn permit(&mut self) -> Option<RequestMemory> {
        let (reserved, live) = (self.bytes()?, self.bytes()?);
        let (peak, claim, age) = (self.bytes()?, self.bytes()?, self.time()?);
        let phase = *PHASES.get(usize::from(self.u8()?))?;
        let (is_cancelled, has_tenant) = (self.u8()? == 1, self.u8()? == 1);
        let (method, route) = (self.text(NAME_MAX)?, self.text(NAME_MAX)?);
        let tenant = Some(self.text(NAME_MAX)?).filter(|_| has_tenant);
        Some(RequestMemory {
            method,
            route,
            tenant,
            phase,
            reserved,
            live,
            peak,
            claim,
            age,
            is_cancelled,
        })
    }

    fn resource(&mut self) -> Option<FlightResource> {
        let (name, loaded) = (self.text(NAME_MAX)?, self.u8()? == 1);
        Some(FlightResource { name, loaded, host: self.bytes()?, device: self.bytes()? })
    }
}

/// The checksum of a block, without the place of the checksum itself.
fn checksum(block: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(block.get(..SUM_AT).unwrap_or_default());
    hasher.update(block.get(SUM_AT + 4..).unwrap_or_default());
    hasher.finalize()
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

//! Heap profiles: jemalloc writes one as text to a file in memory, which is read back.
//!
//! Invariant: `bytes` of a stack is an estimate of its live bytes, not the sampled bytes.
#![expect(unsafe_code, reason = "creating a file in memory is a C call")]

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use lowtide_core::bytes::ByteSize;
use lowtide_core::file::OwnedFile;
use lowtide_core::kernel::file_size_limit;

use super::error::{HostError, PROFILE_TEXT_MAX};
use super::loaded::{ProfileMapping, executable, hexadecimal, read_build_ids};
use super::mallctl as ctl;
use super::profiler::{Profiler, profiler};

/// Live memory by call stack, with the mappings of the process that give addresses a meaning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocationProfile {
    /// The mean number of bytes allocated between two samples.
    pub interval: ByteSize,
    /// The stacks with live memory, in no order.
    pub stacks: Vec<AllocationStack>,
    /// The executable mappings of files, by address.
    pub mappings: Vec<ProfileMapping>,
}

/// The live memory that one call stack allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocationStack {
    /// The return addresses, the innermost function first. The first few are jemalloc's.
    pub addresses: Vec<u64>,
    /// The estimated number of live blocks.
    pub blocks: u64,
    /// The estimated live bytes.
    pub bytes: ByteSize,
}

impl AllocationProfile {
    /// Parses the text of a heap profile that jemalloc wrote.
    ///
    /// # Errors
    /// [`HostError::ProfileText`] if a line of stacks or figures is not as jemalloc writes it.
    pub fn parse(text: &str) -> Result<Self, HostError> {
        let wrong = |at: usize, expected| HostError::ProfileText { line: at + 1, expected };
        let mut lines = text.lines().enumerate();
        let first = lines.next().and_then(|(_, line)| line.strip_prefix("heap_v2/"));
        let interval = first.and_then(|text| text.trim().parse().ok()).map(ByteSize::new);
        let interval = interval.ok_or_else(|| wrong(0, "heap_v2/ and the interval"))?;
        let mut profile = Self { interval, ..Self::default() };
        let mut addresses = None;
        for (at, line) in lines.by_ref() {
            let line = line.trim();
            if line.starts_with("MAPPED_LIBRARIES:") {
                break;
            }
            if let Some(list) = line.strip_prefix('@') {
                let list = list.split_whitespace().map(hexadecimal).collect::<Option<Vec<_>>>();
                addresses = Some(list.ok_or_else(|| wrong(at, "@ and addresses"))?);
            } else if let Some(figures) = line.strip_prefix("t*:") {
                // Before the first stack this line has the sum of all.
                let Some(addresses) = addresses.take() else { continue };
                let figures = counted(figures);
                let (blocks, bytes) = figures.ok_or_else(|| wrong(at, "blocks: bytes"))?;
                profile.add(addresses, blocks, bytes);
            }
        }
        profile.mappings = executable(lines.map(|(_, line)| line));
        Ok(profile)
    }

    /// Adds a stack with its sampled blocks and bytes. A block of `size` is sampled with
    /// probability `1 - exp(-size / interval)`, by which the sums are divided, as `jeprof`
    /// does.
    fn add(&mut self, addresses: Vec<u64>, blocks: u64, bytes: u64) {
        if blocks == 0 || bytes == 0 {
            return;
        }
        let bytes = ByteSize::new(bytes);
        let mean = bytes.as_f64() / ByteSize::new(blocks).as_f64();
        let sampled = -(-mean / self.interval.as_f64().max(1.0)).exp_m1();
        let scale = if sampled > 0.0 { 1.0 / sampled } else { 1.0 };
        let blocks = ByteSize::new(blocks).scaled(scale).get();
        self.stacks.push(AllocationStack { addresses, blocks, bytes: bytes.scaled(scale) });
    }

    /// Returns the sum of all stacks: an estimate of the live bytes.
    #[must_use]
    pub fn total(&self) -> ByteSize {
        self.stacks.iter().map(|stack| stack.bytes).sum()
    }
}

/// Parses `blocks: bytes [0: 0]`.
fn counted(text: &str) -> Option<(u64, u64)> {
    let (blocks, rest) = text.split_once(':')?;
    Some((blocks.trim().parse().ok()?, rest.split_whitespace().next()?.parse().ok()?))
}

/// Writes the profile of the live heap to a new file, as text for `jeprof` and
/// [`AllocationProfile::parse`]. Only the owner may read it. Blocks this thread for some
/// milliseconds, and longer if the disk is slow; other threads wait for parts of the
/// milliseconds when they take a sample, but never for the disk.
///
/// # Errors
/// [`HostError`] if the profiler is not active, another profile is being taken, the file
/// exists, or it cannot be written. An incomplete file may remain.
pub fn write_profile(path: &Path) -> Result<(), HostError> {
    let text = dump()?;
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(path)?;
    io::copy(&mut text.file(), &mut file)?;
    Ok(())
}

/// Held while a profile is being taken.
static TAKING: Mutex<()> = Mutex::new(());

/// Writes the profile to a file in memory. jemalloc holds locks of the profiler while it
/// writes, for which any thread that allocates may wait, so it must not write to a disk.
fn dump() -> Result<OwnedFile, HostError> {
    match profiler() {
        Profiler::Active { .. } => {}
        Profiler::NotBuilt => return Err(HostError::NoProfiler),
        _ => return Err(HostError::ProfilerNotActive),
    }
    let Ok(_taking) = TAKING.try_lock() else { return Err(HostError::ProfileBusy) };
    let limit = file_size_limit();
    if limit < PROFILE_TEXT_MAX {
        return Err(HostError::FileSizeLimit { limit });
    }
    let file = memory_file().and_then(OwnedFile::new)?;
    let name = format!("/proc/self/fd/{}", file.file().as_raw_fd());
    if !Path::new(&name).exists() {
        let text = format!("{name} does not exist: expected a mounted /proc");
        return Err(io::Error::new(io::ErrorKind::NotFound, text).into());
    }
    let name = CString::new(name).map_err(io::Error::from)?;
    // jemalloc opens the file anew, so the position of this descriptor stays at its start.
    ctl::PROF_DUMP.write(&name)?;
    if file.file().metadata()?.len() > PROFILE_TEXT_MAX.get() {
        return Err(io::Error::from(io::ErrorKind::FileTooLarge).into());
    }
    Ok(file)
}

/// Returns the profile of the live heap. Needs no writable folder: it is written to a file in
/// memory. Costs as much as [`write_profile`], the memory of the text, and some milliseconds
/// for each MiB of it.
///
/// # Errors
/// [`HostError`] if the profiler is not active, or the profile cannot be written or read.
pub fn take_profile() -> Result<AllocationProfile, HostError> {
    let mut text = Vec::new();
    dump()?.file().read_to_end(&mut text)?;
    let mut profile = AllocationProfile::parse(&String::from_utf8_lossy(&text))?;
    read_build_ids(&mut profile.mappings);
    Ok(profile)
}

#[cfg(not(target_os = "linux"))]
fn memory_file() -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(target_os = "linux")]
fn memory_file() -> io::Result<File> {
    use std::os::fd::{FromRawFd, OwnedFd};

    // SAFETY: the name ends in NUL; the call has no other precondition.
    let file = unsafe { libc::memfd_create(c"lowtide-heap-profile".as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was created just now and belongs to no other object.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(file) }))
}

// Converts a heap profile to the format of `pprof`: a gzipped message `Profile` of
// `profile.proto` (github.com/google/pprof).
//
// Addresses and mappings only: `pprof` reads the names from the binary. The message has ten kinds
// of fields, which are written here. The crate `pprof_util` has them too, but makes one location
// of two addresses with the same offset in two libraries.
//
// Invariant: location and mapping numbers count from 1, and string 0 is empty.

/// The functions of the allocator, which `pprof` leaves out of each stack.
const ALLOCATOR: &str = "(_rjem_|je_|prof_|imalloc|malloc_default).*";

impl AllocationProfile {
    /// Returns the profile for `pprof`, gzipped, with the values `inuse_objects` and `inuse_space`.
    /// `since_epoch` is the time at which it was taken.
    #[must_use]
    pub fn to_pprof(&self, since_epoch: Duration) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        // Writing to memory does not fail.
        let _ = encoder.write_all(&self.message(since_epoch));
        encoder.finish().unwrap_or_default()
    }

    fn message(&self, since_epoch: Duration) -> Vec<u8> {
        let mut strings = vec![""];
        let mut string = |text| {
            strings.push(text);
            strings.len() as u64 - 1
        };
        let (space, bytes) = (string("inuse_space"), string("bytes"));
        let value_types = [(string("inuse_objects"), string("count")), (space, bytes)];
        let allocator = string(ALLOCATOR);
        let mut profile = Message::default();
        for (kind, unit) in value_types {
            profile.message(1, &value_type(kind, unit));
        }
        let mut locations = BTreeMap::new();
        for stack in &self.stacks {
            let mut sample = Message::default();
            let ids = stack.addresses.iter().map(|&address| {
                let next = locations.len() as u64 + 1;
                *locations.entry(address).or_insert(next)
            });
            sample.packed(1, ids);
            sample.packed(2, [stack.blocks, stack.bytes.get()].into_iter());
            profile.message(2, &sample);
        }
        for (mapping, id) in self.mappings.iter().zip(1..) {
            let mut message = Message::default();
            let path = string(&mapping.path);
            let fields = [id, mapping.start, mapping.end, mapping.offset, path];
            fields.into_iter().zip(1..).for_each(|(value, field)| message.number(field, value));
            if !mapping.build_id.is_empty() {
                message.number(6, string(&mapping.build_id));
            }
            profile.message(3, &message);
        }
        let mut locations: Vec<_> = locations.into_iter().collect();
        locations.sort_unstable_by_key(|&(_, id)| id);
        for (address, id) in locations {
            // A return address is behind the call.
            let call = address.saturating_sub(1);
            let mut mappings = self.mappings.iter().zip(1..);
            let mapping = mappings.find(|(of, _)| (of.start..of.end).contains(&call));
            let mut message = Message::default();
            message.number(1, id);
            message.number(2, mapping.map_or(0, |(_, id)| id));
            message.number(3, call);
            profile.message(4, &message);
        }
        strings.iter().for_each(|text| profile.bytes(6, text.as_bytes()));
        profile.number(7, allocator);
        profile.number(9, u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX));
        profile.message(11, &value_type(space, bytes));
        profile.number(12, self.interval.get());
        profile.number(14, space);
        profile.0
    }
}

fn value_type(kind: u64, unit: u64) -> Message {
    let mut message = Message::default();
    message.number(1, kind);
    message.number(2, unit);
    message
}

/// A message of protocol buffers.
#[derive(Default)]
struct Message(Vec<u8>);

/// Kinds of fields in a message.
const NUMBER: u64 = 0;
const BYTES: u64 = 2;

impl Message {
    /// A number in groups of seven bits, the lowest first.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value.to_le_bytes()[0] | 0x80);
            value >>= 7;
        }
        self.0.push(value.to_le_bytes()[0]);
    }

    /// A number field; 0 is the default, and is left out.
    fn number(&mut self, field: u64, value: u64) {
        if value != 0 {
            self.varint(field << 3 | NUMBER);
            self.varint(value);
        }
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | BYTES);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn message(&mut self, field: u64, message: &Self) {
        self.bytes(field, &message.0);
    }

    fn packed(&mut self, field: u64, values: impl Iterator<Item = u64>) {
        let mut packed = Self::default();
        values.for_each(|value| packed.varint(value));
        self.message(field, &packed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "heap_v2/8388608\n  t*: 3: 12582912 [0: 0]\n  t0: 3: 12582912 [0: 0]\n\
        @ 0x55b0 0x7f01\n  t*: 2: 4194304 [0: 0]\n  t0: 2: 4194304 [0: 0]\n\
        @ 0x55b4\n  t*: 1: 33554432 [0: 0]\n\
        @ 0x55b8\n  t*: 0: 0 [0: 0]\n\nMAPPED_LIBRARIES:\n\
        5000-6000 r-xp 00002000 fe:00 12 /opt/a service\n\
        6000-7000 rw-p 00000000 fe:00 12 /opt/a service\n\
        7f00-8000 r-xp 00000000 fe:00 13                   /lib/libc.so.6\n\
        9000-9100 r-xp 00000000 00:00 0                          [vdso]\n";

    #[test]
    fn a_profile_is_read_with_the_estimated_bytes_of_each_stack() {
        let profile = AllocationProfile::parse(TEXT).expect("as jemalloc writes it");
        assert_eq!(profile.interval, ByteSize::mib(8));
        // 2 MiB blocks are sampled with probability 1 - exp(-1/4) = 0.2212.
        let [small, large] = &*profile.stacks else { panic!("{:?}", profile.stacks) };
        assert_eq!(small.addresses, [0x55b0, 0x7f01]);
        assert_eq!((small.blocks, small.bytes.get() >> 10), (9, 18_517));
        // 32 MiB are sampled with probability 1 - exp(-4) = 0.98.
        assert_eq!((large.blocks, large.bytes.get() >> 10), (1, 33_379));
        assert_eq!(profile.total(), small.bytes.saturating_add(large.bytes));
        let mapped = profile.mappings.iter().map(|at| (at.start, at.offset, &*at.path));
        let expected = [(0x5000, 0x2000, "/opt/a service"), (0x7f00, 0, "/lib/libc.so.6")];
        assert!(mapped.eq(expected));
        assert!(profile.mappings.iter().all(|at| at.build_id.is_empty()), "of which process?");
    }

    #[test]
    fn other_text_is_refused_with_the_line_and_what_was_expected() {
        for (text, line) in [
            ("", 1),
            ("heap_v2/many\n", 1),
            ("heap_v2/8\n@ 0x1 xyz\n", 2),
            ("heap_v2/8\n@ 0x1\n t*: one: 8\n", 3),
            ("heap_v2/8\n@ 0x1\n t*: 1 8\n", 3),
        ] {
            let error = AllocationProfile::parse(text).expect_err("no profile");
            let is_it = matches!(error, HostError::ProfileText { line: at, .. } if at == line);
            assert!(is_it, "{text:?}: {error}");
        }
    }
}

#[cfg(test)]
mod pprof_tests {
    use super::*;

    /// A field of a message: its number, and a number or bytes.
    type Field = (u64, Result<u64, Vec<u8>>);

    fn varint(bytes: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let (byte, rest) = bytes.split_first().expect("a whole number");
            *bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                return value;
            }
        }
    }

    fn fields(mut bytes: &[u8]) -> Vec<Field> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let value = varint(&mut bytes);
            if key & 7 == NUMBER {
                found.push((key >> 3, Ok(value)));
            } else {
                let (text, rest) = bytes.split_at(usize::try_from(value).expect("short"));
                bytes = rest;
                found.push((key >> 3, Err(text.to_vec())));
            }
        }
        found
    }

    fn messages(found: &[Field], field: u64) -> Vec<Vec<u8>> {
        let of_field = found.iter().filter(|(number, _)| *number == field);
        of_field.map(|(_, value)| value.clone().expect_err("bytes")).collect()
    }

    const TEXT: &str = "heap_v2/1024\n@ 0x5011 0x8011\n t*: 1: 1048576 [0: 0]\n\
        @ 0x5021 0x8011\n t*: 2: 4194304 [0: 0]\nMAPPED_LIBRARIES:\n\
        5000-6000 r-xp 00001000 fe:00 12 /service\n8000-9000 r-xp 00001000 fe:00 13 /lib.so\n";

    /// Bug of `pprof_util` 0.8: 0x5011 and 0x8011 have the same offset in two files, and were one
    /// location.
    #[test]
    fn each_address_is_one_location_of_its_own_mapping() {
        let mut profile = AllocationProfile::parse(TEXT).expect("a profile");
        "00ab".clone_into(&mut profile.mappings[1].build_id);
        let found = fields(&profile.message(Duration::from_nanos(7)));
        let locations = messages(&found, 4);
        let read = |bytes: &Vec<u8>| {
            fields(bytes).into_iter().map(|(_, value)| value.expect("numbers")).collect::<Vec<_>>()
        };
        let locations: Vec<_> = locations.iter().map(read).collect();
        assert_eq!(locations, [[1, 1, 0x5010], [2, 2, 0x8010], [3, 1, 0x5020]]);
        let samples: Vec<_> = messages(&found, 2).iter().map(|sample| fields(sample)).collect();
        assert_eq!(samples[0][0], (1, Err(vec![1, 2])));
        assert_eq!(samples[1][0], (1, Err(vec![3, 2])));
        let (_, Err(values)) = &samples[1][1] else { panic!("packed values") };
        let mut values = &**values;
        assert_eq!((varint(&mut values), varint(&mut values)), (2, 4 << 20));
        let strings = messages(&found, 6);
        let strings: Vec<_> = strings.iter().map(|text| String::from_utf8_lossy(text)).collect();
        let expected = ["", "inuse_space", "bytes", "inuse_objects", "count", ALLOCATOR];
        assert_eq!(strings[..6], expected);
        assert_eq!(strings[6..], ["/service", "/lib.so", "00ab"]);
        let [service, library] = &*messages(&found, 3) else { panic!("two mappings") };
        assert!(!fields(service).iter().any(|(field, _)| *field == 6));
        assert_eq!(fields(library).last(), Some(&(6, Ok(8))));
        for numbers in [(9, Ok(7)), (12, Ok(1024)), (14, Ok(1))] {
            assert!(found.contains(&numbers), "{numbers:?}");
        }
    }

    #[test]
    fn the_message_is_gzipped() {
        let profile = AllocationProfile::parse(TEXT).expect("a profile");
        assert_eq!(profile.to_pprof(Duration::ZERO)[..3], [0x1f, 0x8b, 8]);
    }
}

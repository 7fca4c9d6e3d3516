//! Heap profiles: jemalloc writes one as text to a file in memory, which is read back.
//!
//! Invariant: `bytes` of a stack is an estimate of its live bytes, not the sampled bytes.
#![expect(unsafe_code, reason = "creating a file in memory is a C call")]

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use lowtide_core::bytes::ByteSize;
use lowtide_core::file::OwnedFile;

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
        let bytes = self.stacks.iter().map(|stack| stack.bytes);
        bytes.fold(ByteSize::ZERO, ByteSize::saturating_add)
    }
}

/// Parses `blocks: bytes [0: 0]`.
fn counted(text: &str) -> Option<(u64, u64)> {
    let (blocks, rest) = text.split_once(':')?;
    Some((blocks.trim().parse().ok()?, rest.split_whitespace().next()?.parse().ok()?))
}

fn check_active() -> Result<(), HostError> {
    match profiler() {
        Profiler::Active { .. } => Ok(()),
        Profiler::NotBuilt => Err(HostError::NoProfiler),
        _ => Err(HostError::ProfilerNotActive),
    }
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
    check_active()?;
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

/// Returns the largest size of a file that this process may write; the kernel sends SIGXFSZ
/// above it, also for files in memory.
fn file_size_limit() -> ByteSize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the result.
    let done = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    #[allow(clippy::useless_conversion, reason = "32 bits on some targets")]
    if done == 0 { ByteSize::new(u64::from(limit.rlim_cur)) } else { ByteSize::MAX }
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

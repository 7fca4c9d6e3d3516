//! jemalloc's heap profiler: its state, and the profiles that it writes.
//!
//! The profiler samples allocations from the start of the process, if the settings of
//! [`global_allocator!`](crate::global_allocator) or the environment enable it. It can be neither
//! built in nor enabled later. A profile holds the live memory by call stack: jemalloc writes it as
//! text to a file, which `jeprof` reads; [`AllocationProfile`] reads the text and converts it for
//! other tools (`pprof`). No name of a function is looked up here.
//!
//! Invariant: `bytes` of a stack is an estimate of its live bytes, not the sampled bytes.

use lowtide_core::bytes::ByteSize;

#[cfg(feature = "profiling")]
use super::error::HostError;
use super::mallctl as ctl;

/// The state of jemalloc's heap profiler in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Profiler {
    /// This build has no profiler (feature `profiling`).
    NotBuilt,
    /// The profiler was not enabled when the process started.
    Off,
    /// The profiler was enabled and takes no samples now.
    Paused,
    /// The profiler samples one allocation in each interval of allocated bytes, on average.
    Active {
        /// The mean number of bytes allocated between two samples.
        interval: ByteSize,
    },
}

impl Profiler {
    /// Returns the state as a word: `not_built`, `off`, `paused` or `active`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotBuilt => "not_built",
            Self::Off => "off",
            Self::Paused => "paused",
            Self::Active { .. } => "active",
        }
    }
}

/// Returns the state of the heap profiler. Costs three reads of controls, about 100 ns.
#[must_use]
pub fn profiler() -> Profiler {
    if !ctl::CONFIG_PROF.read().unwrap_or(false) {
        return Profiler::NotBuilt;
    }
    if !ctl::OPT_PROF.read().unwrap_or(false) {
        return Profiler::Off;
    }
    if !ctl::PROF_ACTIVE.read().unwrap_or(false) {
        return Profiler::Paused;
    }
    let shift = ctl::PROF_LG_SAMPLE.read().ok().and_then(|shift| u32::try_from(shift).ok());
    let interval = shift.and_then(|shift| 1_u64.checked_shl(shift)).unwrap_or(u64::MAX);
    Profiler::Active { interval: ByteSize::new(interval) }
}

/// Makes samples of the heap profiler cheaper, from now on: call stacks are walked by unwind rules
/// that are looked up once for each return address. Returns `false` if this is no Linux on x86-64;
/// the profiler then works as before, as it does for stacks with frames that have no simple rule
/// (signal handlers, code without unwind tables, stacks that a program switched to). A forked child
/// has the rules of its parent, and looks up no further ones.
///
/// A sample then takes some 10,000 instead of 30,000 instructions, at the cost of 16 KiB. Call it
/// once, at the start; starting a `Memory` of the crate `lowtide` does.
///
/// # Errors
/// [`HostError`] if the profiler was not enabled when the process started.
#[cfg(feature = "profiling")]
pub fn cache_unwind_rules() -> Result<bool, HostError> {
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    return super::unwind::install().map(|()| true);
    #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
    Ok(false)
}

#[cfg(feature = "profiling")]
pub use with_profiler::{
    AllocationProfile, AllocationStack, ProfileError, take_profile, write_profile,
};

#[cfg(feature = "profiling")]
mod with_profiler {
    #![expect(unsafe_code, reason = "creating a file in memory is a C call")]

    use std::error::Error;
    use std::ffi::CString;
    use std::fmt;
    use std::fs::File;
    use std::io::{self, Read};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;
    use std::sync::Mutex;

    use lowtide_core::file::OwnedFile;

    use super::super::error::HostError;
    use super::super::loaded::{ProfileMapping, executable, hexadecimal, read_build_ids};
    use super::super::mallctl as ctl;
    use super::{ByteSize, Profiler, profiler};

    /// The maximum size of a profile's text that is read. A profile has some 200 bytes for each
    /// call stack, and one line for each mapping of the process.
    const TEXT_MAX: u64 = 64 << 20;

    /// The reason that a heap profile could not be taken.
    #[derive(Debug)]
    #[non_exhaustive]
    pub enum ProfileError {
        /// The profiler is not active.
        NotActive(Profiler),
        /// Another profile is being taken.
        Busy,
        /// The process may write files only up to this size (`RLIMIT_FSIZE`), above which the
        /// kernel would end it.
        FileSizeLimit(ByteSize),
        /// jemalloc could not write the file.
        NotWritten(HostError),
        /// The file could not be created, read or renamed.
        File(io::Error),
        /// The text is not a heap profile of jemalloc.
        Text {
            /// The number of the line, from 1.
            line: usize,
            /// The expected content.
            expected: &'static str,
        },
    }

    impl fmt::Display for ProfileError {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            match self {
                Self::NotActive(Profiler::NotBuilt) => f.write_str(
                    "this build has no heap profiler: build with the feature `profiling`",
                ),
                Self::NotActive(_) => f.write_str(
                    "the heap profiler is not active: expected prof:true in jemalloc's settings \
                     when the process starts",
                ),
                Self::Busy => f.write_str("another heap profile is being taken: try again"),
                Self::FileSizeLimit(limit) => write!(
                    f,
                    "no heap profile: file size limit {limit} (ulimit -f), expected at least {}",
                    ByteSize::new(TEXT_MAX)
                ),
                Self::NotWritten(error) => write!(
                    f,
                    "cannot write the heap profile: expected a writable folder with free space \
                     ({error})"
                ),
                Self::File(error) => {
                    write!(f, "cannot access the file of the heap profile: {error}")
                }
                Self::Text { line, expected } => {
                    write!(f, "line {line} of the heap profile: expected {expected}")
                }
            }
        }
    }

    impl Error for ProfileError {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            match self {
                Self::NotWritten(error) => Some(error),
                Self::File(error) => Some(error),
                _ => None,
            }
        }
    }

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
        /// [`ProfileError::Text`] if a line of stacks or figures is not as jemalloc writes it.
        pub fn parse(text: &str) -> Result<Self, ProfileError> {
            let wrong = |at: usize, expected| ProfileError::Text { line: at + 1, expected };
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

    fn check_active() -> Result<(), ProfileError> {
        match profiler() {
            Profiler::Active { .. } => Ok(()),
            other => Err(ProfileError::NotActive(other)),
        }
    }

    /// Writes the profile of the live heap to a new file, as text for `jeprof` and
    /// [`AllocationProfile::parse`]. Only the owner may read it. Blocks this thread for some
    /// milliseconds, and longer if the disk is slow; other threads wait for parts of the
    /// milliseconds when they take a sample, but never for the disk.
    ///
    /// # Errors
    /// [`ProfileError`] if the profiler is not active, another profile is being taken, the file
    /// exists, or it cannot be written. An incomplete file may remain.
    pub fn write_profile(path: &Path) -> Result<(), ProfileError> {
        let text = dump()?;
        let mut options = File::options();
        options.write(true).create_new(true).mode(0o600);
        let mut file = options.open(path).map_err(ProfileError::File)?;
        io::copy(&mut text.file(), &mut file).map(drop).map_err(ProfileError::File)
    }

    /// Held while a profile is being taken.
    static TAKING: Mutex<()> = Mutex::new(());

    /// Writes the profile to a file in memory. jemalloc holds locks of the profiler while it
    /// writes, for which any thread that allocates may wait, so it must not write to a disk.
    fn dump() -> Result<OwnedFile, ProfileError> {
        check_active()?;
        let Ok(_taking) = TAKING.try_lock() else { return Err(ProfileError::Busy) };
        let limit = file_size_limit();
        if limit < TEXT_MAX {
            return Err(ProfileError::FileSizeLimit(ByteSize::new(limit)));
        }
        let file = memory_file().and_then(OwnedFile::new).map_err(ProfileError::File)?;
        let name = format!("/proc/self/fd/{}", file.file().as_raw_fd());
        if !Path::new(&name).exists() {
            let text = format!("{name} does not exist: expected a mounted /proc");
            return Err(ProfileError::File(io::Error::new(io::ErrorKind::NotFound, text)));
        }
        let name = CString::new(name).map_err(|error| ProfileError::File(error.into()))?;
        // jemalloc opens the file anew, so the position of this descriptor stays at its start.
        ctl::PROF_DUMP.write(&name).map_err(ProfileError::NotWritten)?;
        if file.file().metadata().map_err(ProfileError::File)?.len() > TEXT_MAX {
            return Err(ProfileError::File(io::ErrorKind::FileTooLarge.into()));
        }
        Ok(file)
    }

    /// Returns the largest size of a file that this process may write; the kernel sends SIGXFSZ
    /// above it, also for files in memory.
    fn file_size_limit() -> u64 {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` is a valid place for the result.
        let done = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
        #[allow(clippy::useless_conversion, reason = "32 bits on some targets")]
        if done == 0 { u64::from(limit.rlim_cur) } else { u64::MAX }
    }

    /// Returns the profile of the live heap. Needs no writable folder: it is written to a file in
    /// memory. Costs as much as [`write_profile`], the memory of the text, and some milliseconds
    /// for each MiB of it.
    ///
    /// # Errors
    /// [`ProfileError`] if the profiler is not active, or the profile cannot be written or read.
    pub fn take_profile() -> Result<AllocationProfile, ProfileError> {
        let mut text = Vec::new();
        dump()?.file().read_to_end(&mut text).map_err(ProfileError::File)?;
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
        let file =
            unsafe { libc::memfd_create(c"lowtide-heap-profile".as_ptr(), libc::MFD_CLOEXEC) };
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
                let is_it = matches!(error, ProfileError::Text { line: at, .. } if at == line);
                assert!(is_it, "{text:?}: {error}");
            }
        }
    }
}

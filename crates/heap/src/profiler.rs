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

//! The report on leaks: the trend of live memory, and the call sites that grow.
//!
//! The trend is of every process, the call sites are of one whose heap profiler is active
//! (`profiles`). These are the values; nothing is measured here.

use std::time::Duration;

use crate::bytes::ByteSize;
use lowtide_heap::Profiler;

use super::trend::LiveTrend;

/// The figures that tell if live memory leaks, and where.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LeakReport {
    /// Live memory at quiet times, and its growth.
    pub trend: LiveTrend,
    /// The state of the heap profiler.
    pub profiler: Profiler,
    /// The call sites whose live memory grew between two quiet times. `None` if the profiler is not
    /// active, or has seen only one quiet time.
    pub suspects: Option<LeakSuspects>,
}

/// The growth of live memory by call site between two quiet times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeakSuspects {
    /// The time of the earlier profile, since the Unix epoch. It is from the second quarter of the
    /// time since the start, or later.
    pub from: Duration,
    /// The time of the later profile, since the Unix epoch.
    pub to: Duration,
    /// The call sites that grew by a sampling interval or more, the largest growth first: at most
    /// 16.
    pub sites: Vec<LeakSuspect>,
}

/// A call site whose live memory grew. Its figures are estimates from samples: a growth of `n`
/// sampling intervals has a standard error of some `sqrt(n)` of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeakSuspect {
    /// The live bytes at the earlier time.
    pub then: ByteSize,
    /// The live bytes at the later time.
    pub now: ByteSize,
    /// The functions that led to the allocation, the innermost first, without those of the
    /// allocator and the standard library before the first other one: at most 8, each of at most
    /// 160 bytes. A function without a name is its file and the offset in it, as in
    /// `proxy+0x1f3a0`.
    pub frames: Vec<String>,
}

impl LeakSuspect {
    /// Returns the growth between the two times.
    #[must_use]
    pub const fn growth(&self) -> ByteSize {
        self.now.saturating_sub(self.then)
    }
}

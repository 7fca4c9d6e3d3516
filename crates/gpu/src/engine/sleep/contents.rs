//! Determines how a sleep treats each granule, from the settings of its live blocks.
//!
//! Pure arithmetic over spans and runs. A granule that several blocks touch gets the strongest of
//! their settings.
//!
//! Invariant: every committed granule is in exactly one part; a part is of one kind, and lies in
//! one half of its segment.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::driver::DeviceAddress;
use crate::state::region::Region;
use crate::state::segment::Run;
use lowtide_core::bytes::ByteSize;

/// The treatment of contents when the arena falls asleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Contents {
    /// Contents are lost: for caches, activations, and data that is loaded again from elsewhere.
    Discard,
    /// Contents are copied to host memory and back. If device memory is host memory, they stay in
    /// place.
    #[default]
    Keep,
    /// Contents and memory stay in place: for memory whose address others hold, such as buffers
    /// registered with NCCL.
    Stay,
}

impl Contents {
    /// All values, from the weakest to the strongest.
    pub const ALL: [Self; 3] = [Self::Discard, Self::Keep, Self::Stay];

    /// Returns its name in configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Discard => "discard",
            Self::Keep => "keep",
            Self::Stay => "stay",
        }
    }
}

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Contents {
    type Err = &'static str;

    /// Parses a name; the error lists the expected ones.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = Self::ALL.into_iter().find(|contents| contents.name() == text);
        named.ok_or("keep, discard or stay")
    }
}

/// Adjoining granules on their way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OutgoingRun {
    pub(super) region: Region,
    pub(super) run: Run,
    pub(super) at: DeviceAddress,
    pub(super) size: ByteSize,
    pub(super) contents: Contents,
}

/// Returns granules and the treatment of their blocks, from blocks in address order.
pub(super) fn wanted(
    blocks: impl Iterator<Item = (Range<usize>, Contents)>,
) -> Vec<(Range<usize>, Contents)> {
    let mut all: Vec<(Range<usize>, Contents)> = Vec::new();
    for (mut range, contents) in blocks {
        if let Some((last, theirs)) = all.last_mut()
            && last.end > range.start
        {
            // They share one granule: the last of theirs, the first of this.
            let most = contents.max(*theirs);
            if last.len() == 1 {
                *theirs = most;
            } else if most > *theirs {
                last.end -= 1;
                all.push((range.start..range.start + 1, most));
            }
            range.start += 1;
        }
        if !range.is_empty() {
            all.push((range, contents));
        }
    }
    // Granules without kept contents are like untouched ones.
    all.retain(|(_, contents)| *contents != Contents::Discard);
    all.dedup_by(|next, last| {
        let joins = last.0.end == next.0.start && last.1 == next.1;
        if joins {
            last.0.end = next.0.end;
        }
        joins
    });
    all
}

/// Cuts a run of committed granules into pieces of one kind each, of at most `granules_max`; what
/// no block touches has nothing to keep.
pub(super) fn cut(
    run: Range<usize>,
    wanted: &[(Range<usize>, Contents)],
    granules_max: usize,
    mut each: impl FnMut(Range<usize>, Contents),
) {
    let mut at = run.start;
    let mut nth = wanted.partition_point(|(range, _)| range.end <= at);
    while at < run.end {
        let here = wanted.get(nth).filter(|(range, _)| range.start <= at);
        let (end, contents) = match (here, wanted.get(nth)) {
            (Some((range, contents)), _) => (range.end, *contents),
            (None, Some((next, _))) => (next.start, Contents::Discard),
            (None, None) => (run.end, Contents::Discard),
        };
        nth += usize::from(here.is_some());
        let end = end.min(run.end);
        for start in (at..end).step_by(granules_max) {
            each(start..end.min(start + granules_max), contents);
        }
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Contents::{Discard, Keep, Stay};

    #[test]
    fn each_has_a_name_and_nothing_else_is_one() {
        for contents in Contents::ALL {
            assert_eq!(contents.to_string().parse(), Ok(contents));
        }
        for text in ["", "Keep", "offload", "keep "] {
            assert_eq!(text.parse::<Contents>(), Err("keep, discard or stay"), "{text:?}");
        }
    }

    #[test]
    fn a_granule_is_treated_as_the_block_that_wants_the_most() {
        let of = |blocks: &[(Range<usize>, Contents)]| wanted(blocks.iter().cloned());
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[(0..3, Keep), (3..5, Keep)]), [(0..5, Keep)]);
        assert_eq!(of(&[(0..3, Keep), (2..5, Discard)]), [(0..3, Keep)]);
        assert_eq!(
            of(&[(0..3, Discard), (2..5, Keep), (4..5, Stay), (4..6, Discard), (6..7, Keep)]),
            [(2..4, Keep), (4..5, Stay), (6..7, Keep)]
        );
        assert_eq!(of(&[(1..2, Discard), (1..2, Stay), (1..2, Keep)]), [(1..2, Stay)]);
    }

    #[test]
    fn runs_are_cut_where_the_kind_changes_and_where_they_are_too_long() {
        let of = |run: Range<usize>, max| {
            let wanted = [(2..4, Keep), (7..20, Stay)];
            let mut parts = Vec::new();
            cut(run, &wanted, max, |range, contents| parts.push((range, contents)));
            parts
        };
        assert_eq!(of(0..9, 100), [(0..2, Discard), (2..4, Keep), (4..7, Discard), (7..9, Stay)]);
        assert_eq!(of(3..4, 1), [(3..4, Keep)]);
        assert_eq!(of(8..13, 2), [(8..10, Stay), (10..12, Stay), (12..13, Stay)]);
        assert_eq!(of(30..32, 2), [(30..32, Discard)]);
        assert_eq!(of(5..5, 2), []);
    }
}

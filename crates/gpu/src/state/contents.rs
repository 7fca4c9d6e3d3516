//! Determines how a sleep treats each granule, from the settings of its live blocks.
//!
//! A granule that several blocks touch gets the strongest of their settings.
//!
//! Invariant: every committed granule is in exactly one part; a part has one treatment, and lies in
//! one half of its segment.

use std::ops::Range;

use crate::state::region::{PlacedRun, Region, RegionState};
use crate::state::region_index::BlockName;
use crate::state::segment::Run;
use crate::types::sleep::Contents;

/// Adjoining granules that are leaving for a sleep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutgoingRun {
    pub(crate) place: PlacedRun,
    pub(crate) contents: Contents,
}

impl RegionState {
    /// Marks committed granules as leaving, except those that stay. Contents are treated as `usual`
    /// unless their block has its own setting. In host memory, kept contents stay in place.
    pub(crate) fn begin_suspend(
        &mut self,
        region: Region,
        (usual, is_host): (Contents, bool),
        (granules_max, handles_max): (usize, usize),
    ) -> Vec<OutgoingRun> {
        let mut outgoing = Vec::new();
        for (run, contents) in self.contents_of_runs(usual, is_host) {
            let parts = parts(run.start, &contents, |granule| self.segment.handle_of(granule));
            for (range, contents) in parts.into_iter().filter(|part| part.1 != Contents::Stay) {
                let runs = self.segment.runs_of(range, granules_max, handles_max);
                outgoing.extend(runs.into_iter().map(|run| (run, contents)));
            }
        }
        let mark = |(run, contents)| {
            self.begin_part(run);
            OutgoingRun { place: self.placed_run(region, run), contents }
        };
        outgoing.into_iter().map(mark).collect()
    }

    /// Returns the number of granules whose contents a sleep now would copy.
    pub(crate) fn kept_granules(&self, (usual, is_host): (Contents, bool)) -> u64 {
        let runs = self.contents_of_runs(usual, is_host).into_iter();
        let all = runs.flat_map(|(_, contents)| contents);
        all.filter(|contents| *contents == Contents::Keep).count() as u64
    }

    /// Returns the runs of committed granules, with the treatment of each granule.
    fn contents_of_runs(
        &self,
        usual: Contents,
        is_host: bool,
    ) -> Vec<(Range<usize>, Vec<Contents>)> {
        let of = |name: BlockName| match self.pins.contents(name).unwrap_or(usual) {
            Contents::Keep if is_host => Contents::Stay,
            contents => contents,
        };
        let runs = self.segment.committed_runs().into_iter().map(Run::range);
        // Blocks whose contents are discarded are left out.
        let kept = self.live_blocks().filter_map(|(span, name)| {
            let contents = of(name);
            (contents != Contents::Discard).then(|| (self.segment.granules_of(span), contents))
        });
        strongest(runs, kept)
    }

    /// Records which blocks lose their contents with these granules. The owner of a block learns of
    /// one or several losses once.
    pub(crate) fn note_discarded(&mut self, mut lost: Vec<Range<usize>>) {
        if lost.is_empty() {
            return;
        }
        lost.sort_unstable_by_key(|range| range.start);
        let is_lost = |range: Range<usize>| {
            let nth = lost.partition_point(|lost| lost.end <= range.start);
            lost.get(nth).is_some_and(|lost| lost.start < range.end)
        };
        let blocks = self.live_blocks();
        let blocks = blocks.filter(|(span, _)| is_lost(self.segment.granules_of(*span)));
        let names: Vec<_> = blocks.map(|(_, name)| name).collect();
        // Buffers of older blocks are not cached when freed, because a cache would keep this entry.
        self.moves += 1;
        names.into_iter().for_each(|name| self.pins.discard(name));
    }
}

/// Returns runs of granules, which are in order, with the strongest treatment that a block wants
/// for each granule. Granules that no block touches have nothing to keep.
fn strongest(
    runs: impl Iterator<Item = Range<usize>>,
    blocks: impl Iterator<Item = (Range<usize>, Contents)>,
) -> Vec<(Range<usize>, Vec<Contents>)> {
    let nothing = |run: Range<usize>| (run.clone(), vec![Contents::Discard; run.len()]);
    let mut runs: Vec<_> = runs.map(nothing).collect();
    for (range, wanted) in blocks {
        let first = runs.partition_point(|(run, _)| run.end <= range.start);
        for (run, all) in runs[first..].iter_mut().take_while(|(run, _)| run.start < range.end) {
            let part = range.start.max(run.start) - run.start..range.end.min(run.end) - run.start;
            all[part].iter_mut().for_each(|contents| *contents = (*contents).max(wanted));
        }
    }
    runs
}

/// Cuts a run of granules into parts of whole handles with one treatment each. A handle gets the
/// strongest treatment of its granules.
fn parts(
    start: usize,
    contents: &[Contents],
    handle_of: impl Fn(usize) -> Range<usize>,
) -> Vec<(Range<usize>, Contents)> {
    let (mut parts, mut at): (Vec<(Range<usize>, Contents)>, _) = (Vec::new(), start);
    while let Some(&first) = contents.get(at - start) {
        let handle = at..handle_of(at).end;
        let granules = contents[at - start..].iter().take(handle.len());
        let most = granules.copied().max().unwrap_or(first);
        at = handle.end;
        match parts.last_mut().filter(|(_, contents)| *contents == most) {
            Some((range, _)) => range.end = at,
            None => parts.push((handle, most)),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use Contents::{Discard, Keep, Stay};

    #[test]
    fn a_granule_is_treated_as_the_block_that_wants_the_most() {
        let of = |blocks: &[(Range<usize>, Contents)]| {
            strongest([0..3, 4..8].into_iter(), blocks.iter().cloned())
        };
        let none = [Discard; 4];
        assert_eq!(of(&[]), [(0..3, none[..3].to_vec()), (4..8, none.to_vec())]);
        let all = of(&[(0..2, Discard), (1..5, Keep), (4..5, Stay), (4..6, Discard), (6..7, Keep)]);
        assert_eq!(all[0], (0..3, vec![Discard, Keep, Keep]));
        assert_eq!(all[1], (4..8, vec![Stay, Discard, Keep, Discard]));
        let all = of(&[(1..2, Stay), (1..2, Keep), (1..2, Discard), (3..4, Stay), (7..9, Keep)]);
        assert_eq!(all[0], (0..3, vec![Discard, Stay, Discard]));
        assert_eq!(all[1], (4..8, vec![Discard, Discard, Discard, Keep]));
    }

    #[test]
    fn runs_are_cut_where_the_treatment_changes_and_never_inside_a_handle() {
        let of = |run: Range<usize>, handle: usize| {
            let blocks = [(2..4, Keep), (7..20, Stay)].into_iter();
            let (run, contents) = strongest([run].into_iter(), blocks).remove(0);
            let handle_of = |at: usize| at / handle * handle..(at / handle + 1) * handle;
            parts(run.start, &contents, handle_of)
        };
        assert_eq!(of(0..9, 1), [(0..2, Discard), (2..4, Keep), (4..7, Discard), (7..9, Stay)]);
        assert_eq!(of(3..4, 1), [(3..4, Keep)]);
        assert_eq!(of(8..13, 1), [(8..13, Stay)]);
        assert_eq!(of(30..32, 1), [(30..32, Discard)]);
        assert_eq!(of(5..5, 1), []);
        assert_eq!(of(0..12, 3), [(0..6, Keep), (6..12, Stay)]);
        assert_eq!(of(0..12, 12), [(0..12, Stay)]);
    }
}

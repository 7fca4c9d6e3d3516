//! Determines how a sleep treats each granule, from the settings of its live blocks.
//!
//! Pure arithmetic over spans and runs. A granule that several blocks touch gets the strongest of
//! their settings.
//!
//! Invariant: every committed granule is in exactly one part; a part has one treatment, and lies in
//! one half of its segment.

use std::ops::Range;

use crate::state::region::{PlacedRun, Region, RegionState};
use crate::state::region_index::BlockName;
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
        let wanted = self.wanted_contents(usual, is_host);
        let mut outgoing = Vec::new();
        for committed in self.segment.committed_runs() {
            cut(
                committed.range(),
                &wanted,
                |granule| self.segment.handle_of(granule),
                |range, contents| {
                    if contents != Contents::Stay {
                        let runs = self.segment.runs_of(range, granules_max, handles_max);
                        outgoing.extend(runs.into_iter().map(|run| (run, contents)));
                    }
                },
            );
        }
        let mark = |(run, contents)| {
            self.begin_part(run);
            OutgoingRun { place: self.placed_run(region, run), contents }
        };
        outgoing.into_iter().map(mark).collect()
    }

    /// Returns the number of granules whose contents a sleep now would copy.
    pub(crate) fn kept_granules(&self, (usual, is_host): (Contents, bool)) -> u64 {
        let wanted = self.wanted_contents(usual, is_host).into_iter();
        let kept = wanted.filter(|(_, contents)| *contents == Contents::Keep);
        kept.map(|(range, _)| range.len() as u64).sum()
    }

    /// Returns the treatment of the granules of live blocks.
    fn wanted_contents(&self, usual: Contents, is_host: bool) -> Vec<(Range<usize>, Contents)> {
        let of = |name: BlockName| match self.pins.contents(name).unwrap_or(usual) {
            Contents::Keep if is_host => Contents::Stay,
            contents => contents,
        };
        let live = self.live_blocks();
        wanted(live.map(|(span, name)| (self.segment.granules_of(span), of(name))))
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

/// Returns granules and the treatment of their contents, from blocks in address order. Granules
/// whose contents are discarded are left out, like untouched ones.
fn wanted(blocks: impl Iterator<Item = (Range<usize>, Contents)>) -> Vec<(Range<usize>, Contents)> {
    let mut all = Vec::new();
    let kept = blocks.filter(|(_, contents)| *contents != Contents::Discard);
    kept.for_each(|(range, contents)| add(&mut all, range, contents));
    all
}

/// Adds the granules of the next block, joined with the last ones if those are treated alike.
fn add(all: &mut Vec<(Range<usize>, Contents)>, mut range: Range<usize>, contents: Contents) {
    while let Some((last, theirs)) = all.last_mut().filter(|(last, _)| last.end >= range.start) {
        if *theirs == contents {
            last.end = range.end;
            return;
        }
        if last.end == range.start {
            break;
        }
        // Both blocks share one granule: the last of the earlier block, the first of this one.
        if *theirs > contents {
            range.start += 1;
            break;
        }
        last.end -= 1;
        if last.start < last.end {
            break;
        }
        all.pop();
    }
    if !range.is_empty() {
        all.push((range, contents));
    }
}

/// Cuts a run of committed granules into pieces of whole handles with one treatment each. Granules
/// that no block touches have nothing to keep. A handle gets the strongest treatment of its
/// granules.
fn cut(
    run: Range<usize>,
    wanted: &[(Range<usize>, Contents)],
    handle_of: impl Fn(usize) -> Range<usize>,
    mut each: impl FnMut(Range<usize>, Contents),
) {
    let piece_at = |at: usize| {
        let nth = wanted.partition_point(|(range, _)| range.end <= at);
        let (end, contents) = match wanted.get(nth) {
            Some((range, contents)) if range.start <= at => (range.end, *contents),
            Some((next, _)) => (next.start, Contents::Discard),
            None => (run.end, Contents::Discard),
        };
        (end.min(run.end), contents)
    };
    let mut at = run.start;
    while at < run.end {
        let (end, contents) = piece_at(at);
        // The handle at the end of the piece, if it continues in the next one.
        let cut = (end < run.end).then(|| handle_of(end)).filter(|handle| handle.start < end);
        let Some(handle) = cut else {
            each(at..end, contents);
            at = end;
            continue;
        };
        if at < handle.start {
            each(at..handle.start, contents);
        }
        let (mut next, mut most) = (handle.start, contents);
        while next < handle.end {
            let (end, contents) = piece_at(next);
            (next, most) = (end, most.max(contents));
        }
        at = handle.end;
        each(handle, most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Contents::{Discard, Keep, Stay};

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
        // A block in one granule between two that are treated alike.
        assert_eq!(of(&[(0..2, Stay), (2..3, Keep), (2..5, Stay)]), [(0..5, Stay)]);
        assert_eq!(
            of(&[(0..3, Stay), (2..6, Keep), (5..7, Stay)]),
            [(0..3, Stay), (3..5, Keep), (5..7, Stay)]
        );
    }

    /// Random blocks, each a neighbour of the last or after a gap, against a look at each granule.
    #[test]
    fn the_treatments_of_random_blocks_are_those_of_each_granule() {
        let mut state = 0x2545_F491_4F6C_DD1D_u64;
        println!("seed {state:#x}");
        let mut chance = |bound: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state % bound).expect("small")
        };
        for _ in 0..2000 {
            let (mut blocks, mut most) = (Vec::new(), [None; 64]);
            let mut at = 0_usize; // in quarters of a granule
            while at < 200 {
                at += [0, 0, 0, 1, 4, 9][chance(6)];
                let end = at + 1 + [0, 1, 3, 9, 20][chance(5)];
                let contents = Contents::ALL[chance(3)];
                let range = at / 4..end.div_ceil(4);
                most[range.clone()].iter_mut().for_each(|most| *most = (*most).max(Some(contents)));
                blocks.push((range, contents));
                at = end;
            }
            let all = wanted(blocks.iter().cloned());
            let mut found = [None; 64];
            for (range, contents) in &all {
                assert!(!range.is_empty() && *contents != Discard);
                found[range.clone()].fill(Some(*contents));
            }
            let kept = most.map(|most| most.filter(|most| *most != Discard));
            assert_eq!(found, kept, "{blocks:?}");
            let apart = |pair: &[(Range<usize>, Contents)]| {
                let [(first, one), (next, other)] = pair else { return true };
                first.end < next.start || (first.end == next.start && one != other)
            };
            assert!(all.windows(2).all(apart), "in order and joined: {all:?}");
        }
    }

    #[test]
    fn runs_are_cut_where_the_treatment_changes_and_never_inside_a_handle() {
        let of = |run: Range<usize>, handle: usize| {
            let wanted = [(2..4, Keep), (7..20, Stay)];
            let mut parts = Vec::new();
            let handle_of = |at: usize| at / handle * handle..(at / handle + 1) * handle;
            cut(run, &wanted, handle_of, |range, contents| parts.push((range, contents)));
            parts
        };
        assert_eq!(of(0..9, 1), [(0..2, Discard), (2..4, Keep), (4..7, Discard), (7..9, Stay)]);
        assert_eq!(of(3..4, 1), [(3..4, Keep)]);
        assert_eq!(of(8..13, 1), [(8..13, Stay)]);
        assert_eq!(of(30..32, 1), [(30..32, Discard)]);
        assert_eq!(of(5..5, 1), []);
        assert_eq!(of(0..12, 3), [(0..3, Keep), (3..6, Keep), (6..9, Stay), (9..12, Stay)]);
        assert_eq!(of(0..12, 12), [(0..12, Stay)]);
    }
}

//! The granules of one end of a segment, as bitmaps counted from that end. Pure accounting.
//!
//! A granule is bare, committing, committed, leaving or arriving (memory of another granule is
//! being moved here, and still counts there). A granule is touched while a live block covers any
//! byte of it. Granules that a block covers wholly are bits. Only the two granules at the block's
//! edges, which may be shared with other blocks, have counts. The count of an untouched granule is
//! replaced by the time of its last use.
//!
//! Memory is committed in handles of one or more granules, which leave as a whole: an idle granule
//! in a handle that a block touches is stuck. A granule that is joined is in the handle of the
//! granule before it.
//!
//! Memory: 37 bytes for 8 granules, up to the farthest granule ever touched: 1/453,000 of 2 MiB.
//!
//! Invariants: `backed = committing + committed + leaving`, arriving is not backed;
//! `active = backed and touched`; `idle = backed - active >= stuck`; the granules of a handle have
//! the same backing; every granule that may leave is before `idle_end`.

use std::ops::Range;

use crate::state::aging::{Ages, Stamp};

/// 64 granules: bit `i` is granule `64 x word + i`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Word {
    /// A live block covers a part of the granule.
    touched: u64,
    /// The granule has memory, or is committing or leaving.
    backed: u64,
    /// A commit is in progress: the granule is backed, but has no memory yet. If not backed:
    /// arriving.
    committing: u64,
    /// A decommit is in progress: the granule is still backed.
    leaving: u64,
    /// The granule is backed by the handle of the granule before it.
    joined: u64,
}

impl Word {
    /// Returns the granules that blocks touch, backed or not.
    pub(crate) const fn touched(self) -> u64 {
        self.touched
    }

    /// Returns the granules that have memory, or are committing or leaving.
    pub(crate) const fn backed(self) -> u64 {
        self.backed
    }

    pub(crate) const fn committed(self) -> u64 {
        self.backed & !(self.committing | self.leaving)
    }

    const fn may_leave(self) -> u64 {
        self.committed() & !self.touched
    }

    /// Returns the granules that are not active. An arriving block may touch them.
    pub(crate) const fn inactive(self) -> u64 {
        !(self.touched & self.backed)
    }

    /// Returns the granules that have no memory and are not arriving.
    pub(crate) const fn bare(self) -> u64 {
        !(self.backed | self.committing)
    }
}

/// A driver call on granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GranuleCall {
    Commit,
    /// Memory of other granules, which still counts there, is being moved here.
    Arrive,
    Leave,
}

/// What granules lack to be committed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MissingGranules {
    /// The number of granules without lasting memory: bare or leaving.
    pub(crate) granules: u64,
    /// `true` if a driver call is in progress for one of the granules.
    pub(crate) is_moving: bool,
}

impl MissingGranules {
    /// Returns `true` if all granules are committed, and none is leaving.
    pub(crate) const fn is_nothing(self) -> bool {
        self.granules == 0 && !self.is_moving
    }
}

/// Memory by its state, in bytes or in granules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryCounts {
    /// Committed memory, including memory that is committing or leaving.
    pub(crate) backed: u64,
    /// Backed memory that a block touches, or that is being committed for a block.
    pub(crate) active: u64,
    /// Memory that is being committed, which the driver may refuse.
    pub(crate) committing: u64,
    pub(crate) leaving: u64,
    /// Idle memory that cannot leave, because a block touches its handle.
    pub(crate) stuck: u64,
}

impl MemoryCounts {
    /// Returns the sum of two counts, each so many times.
    pub(crate) const fn sum(one: Self, other: Self, times: u64) -> Self {
        Self {
            backed: (one.backed + other.backed) * times,
            active: (one.active + other.active) * times,
            committing: (one.committing + other.committing) * times,
            leaving: (one.leaving + other.leaving) * times,
            stuck: (one.stuck + other.stuck) * times,
        }
    }

    /// Returns the memory that no block touches.
    pub(crate) const fn idle(&self) -> u64 {
        self.backed - self.active
    }

    /// Returns the idle memory that may leave.
    pub(crate) const fn releasable(&self) -> u64 {
        self.idle() - self.stuck
    }
}

/// The handles at both ends of a range that lie only in part in it.
type CutHandles = [Option<Range<usize>>; 2];

/// The granules, from the end of the segment inward.
#[derive(Debug, Default)]
pub(crate) struct Granules {
    words: Vec<Word>,
    /// The number of blocks that cover a part of the granule, but not all of it. If no block
    /// touches the granule: the [`Stamp`] of its last use.
    partly: Vec<u32>,
    /// The numbers of granules.
    pub(crate) counts: MemoryCounts,
    /// The number of joined granules.
    joined: u64,
    idle_end: usize,
}

impl Granules {
    /// Returns the bytes of this metadata.
    pub(crate) const fn metadata(&self) -> usize {
        self.words.capacity() * size_of::<Word>() + self.partly.capacity() * size_of::<u32>()
    }

    /// Returns the number of granules with entries; later ones are bare and untouched.
    pub(crate) const fn known(&self) -> usize {
        self.partly.len()
    }

    /// Records a block that covers all of these granules.
    pub(crate) fn touch(&mut self, range: Range<usize>) {
        self.reach(range.end);
        self.partly[range.clone()].fill(0);
        let cut = self.begin_change(&range);
        for (at, mask) in masks(range) {
            let word = &mut self.words[at];
            debug_assert_eq!(word.touched & mask, 0, "a granule wholly covered is nobody else's");
            word.touched |= mask;
            self.counts.active += count(word.backed & mask);
        }
        self.end_change(cut.as_ref());
    }

    /// Records that a block which covered all of these granules is freed. Returns `true` if one
    /// became idle.
    pub(crate) fn untouch(&mut self, range: Range<usize>) -> bool {
        let (cut, mut idle) = (self.begin_change(&range), 0);
        for (at, mask) in masks(range.clone()) {
            let word = &mut self.words[at];
            debug_assert_eq!(word.touched & mask, mask, "it was touched");
            word.touched &= !mask;
            idle += count(word.backed & mask);
        }
        self.counts.active -= idle;
        self.idle_end = self.idle_end.max(range.end).max(self.end_change(cut.as_ref()));
        idle > 0
    }

    /// Records a block that covers a part of this granule.
    pub(crate) fn touch_part(&mut self, granule: usize) {
        if !self.is_touched(granule) {
            self.touch(granule..granule + 1);
        }
        self.partly[granule] += 1;
    }

    /// Records that a block which covered a part of this granule is freed. Returns `true` if the
    /// granule became idle.
    pub(crate) fn untouch_part(&mut self, granule: usize) -> bool {
        self.partly[granule] -= 1;
        self.partly[granule] == 0 && self.untouch(granule..granule + 1)
    }

    /// Records the last use of those granules that no block touches now.
    pub(crate) fn stamp(&mut self, range: Range<usize>, stamp: Stamp) {
        let known = self.known();
        for (at, mask) in masks(range.start.min(known)..range.end.min(known)) {
            let mut idle = mask & !self.words[at].touched;
            while idle != 0 {
                self.partly[at * 64 + idle.trailing_zeros() as usize] = stamp.0;
                idle &= idle - 1;
            }
        }
    }

    /// Returns the age of each granule that may leave: that of its handle, which is as old as its
    /// youngest granule. Takes a step for each of them, and for each 64 granules.
    pub(crate) fn idle_ages(&self, ages: Ages) -> impl Iterator<Item = u32> {
        let words = self.words.iter().enumerate().take(self.idle_end.div_ceil(64));
        let idle =
            words.flat_map(|(at, word)| bits(word.may_leave()).map(move |bit| at * 64 + bit));
        let age = move |granule: usize| ages.of(Stamp(self.partly[granule]));
        // The handle and the age of the granule before.
        let mut last = (0..0, None);
        idle.filter_map(move |granule| {
            if self.joined == 0 {
                return Some(age(granule));
            }
            if !last.0.contains(&granule) {
                let handle = self.handle_of(granule);
                let leaves = handle.clone().all(|granule| self.leaves(granule, None));
                last = (handle.clone(), handle.map(age).min().filter(|_| leaves));
            }
            last.1
        })
    }

    /// Returns `true` if a block covers any byte of the granule.
    pub(crate) fn is_touched(&self, granule: usize) -> bool {
        self.is(granule, Word::touched)
    }

    /// Returns the number of granules whose bits `of` returns.
    pub(crate) fn count(&self, range: Range<usize>, of: impl Fn(Word) -> u64) -> u64 {
        let bits = |at: usize| of(self.words.get(at).copied().unwrap_or_default());
        masks(range).map(|(at, mask)| count(bits(at) & mask)).sum()
    }

    /// Like [`Granules::missing`], for one granule.
    pub(crate) fn missing_one(&self, granule: usize) -> MissingGranules {
        let word = self.words.get(granule / 64).copied().unwrap_or_default();
        let bit = granule % 64;
        MissingGranules {
            granules: !(word.backed & !word.leaving) >> bit & 1,
            is_moving: (word.committing | word.leaving) >> bit & 1 == 1,
        }
    }

    /// Returns what these granules lack to be committed.
    pub(crate) fn missing(&self, range: Range<usize>) -> MissingGranules {
        let mut missing = MissingGranules::default();
        for (at, mask) in masks(range) {
            let word = self.words.get(at).copied().unwrap_or_default();
            missing.granules += count(mask & !(word.backed & !word.leaving));
            missing.is_moving |= (word.committing | word.leaving) & mask != 0;
        }
        missing
    }

    /// Marks the first bare granules whose bits `of` returns, at most this many, as committing, or as
    /// arriving; calls `each` with every run of them. Returns their number.
    pub(crate) fn begin(
        &mut self,
        range: Range<usize>,
        (call, granules_max): (GranuleCall, u64),
        of: impl Fn(Word) -> u64,
        mut each: impl FnMut(Range<usize>),
    ) -> u64 {
        if range.is_empty() {
            return 0; // no entries for granules beyond the other half
        }
        self.reach(range.end);
        let (mut run, mut left) = (None, granules_max);
        for (at, mask) in masks(range) {
            let word = &mut self.words[at];
            let mut bare = mask & word.bare() & of(*word);
            while count(bare) > left {
                bare &= !(1 << (u64::BITS - 1 - bare.leading_zeros())); // the last bare granule
            }
            left -= count(bare);
            word.committing |= bare;
            if call == GranuleCall::Commit {
                word.backed |= bare;
                self.counts.backed += count(bare);
                self.counts.committing += count(bare);
                self.counts.active += count(bare & word.touched);
            }
            extend(&mut run, at, bare, &mut each);
        }
        run.into_iter().for_each(each);
        granules_max - left
    }

    /// Calls `each` with every run of granules whose bits `of` returns.
    pub(crate) fn runs(
        &self,
        range: Range<usize>,
        of: impl Fn(Word) -> u64,
        mut each: impl FnMut(Range<usize>),
    ) {
        let mut run = None;
        for (at, mask) in masks(range.start..range.end.min(self.known())) {
            extend(&mut run, at, of(self.words[at]) & mask, &mut each);
        }
        run.into_iter().for_each(each);
    }

    /// Marks the innermost idle handles of one size before `end` as leaving: one, or as many
    /// adjoining ones as `leave` allows.
    ///
    /// The innermost handles are chosen because blocks are placed towards the end: granules far
    /// from it are needed least. Amortised, each word is visited once for each time that one of its
    /// granules became idle, or once per check with ages.
    pub(crate) fn begin_leave(&mut self, end: usize, leave: &Leave) -> Option<Range<usize>> {
        if leave.granules_max == 0 {
            return None;
        }
        let is_all = leave.is_all() && end >= self.idle_end;
        let Some(last) = self.idle_handle_before(end.min(self.idle_end), leave) else {
            if is_all {
                self.idle_end = 0;
            }
            return None;
        };
        let (mut first, handle) = (last.start, last.len());
        let granules_max = leave.granules_max.min(handle.saturating_mul(leave.handles_max));
        while last.end - first + handle <= granules_max && first >= handle {
            let next = self.handle_of(first - 1);
            if next.len() != handle || !self.handle_leaves(&next, leave) {
                break;
            }
            first = next.start;
        }
        let range = first..last.end;
        self.begin_part(range.clone());
        if is_all {
            self.idle_end = first;
        }
        Some(range)
    }

    /// Marks committed granules of whole handles as leaving, touched or not.
    pub(crate) fn begin_part(&mut self, range: Range<usize>) {
        debug_assert!(!self.is_joined(range.start) && !self.is_joined(range.end));
        for (at, mask) in masks(range.clone()) {
            let word = &mut self.words[at];
            assert_eq!(word.committed() & mask, mask, "not all of {range:?} was committed");
            word.leaving |= mask;
        }
        self.counts.leaving += range.len() as u64;
    }

    /// Records the result of a driver call. The granules of a call that is not done are as before it.
    pub(crate) fn end(&mut self, range: Range<usize>, call: GranuleCall, done: bool) {
        let (comes, is_bare) = match call {
            GranuleCall::Arrive => (done, false),
            GranuleCall::Commit => (false, !done),
            GranuleCall::Leave => (false, done),
        };
        if is_bare {
            self.part(range.clone());
        }
        for (at, mask) in masks(range.clone()) {
            let word = &mut self.words[at];
            let (marks, marked) = match call {
                GranuleCall::Commit => (&mut word.committing, word.backed),
                GranuleCall::Arrive => (&mut word.committing, !word.backed),
                GranuleCall::Leave => (&mut word.leaving, word.backed),
            };
            assert_eq!(*marks & marked & mask, mask, "{call:?}: not all of {range:?} was marked");
            *marks &= !mask;
            let (all, touched) = (count(mask), count(mask & word.touched));
            if comes {
                word.backed |= mask;
                self.counts.backed += all;
                self.counts.active += touched;
            } else if is_bare {
                word.backed &= !mask;
                self.counts.backed -= all;
                self.counts.active -= touched;
            }
            match call {
                GranuleCall::Commit => self.counts.committing -= all,
                GranuleCall::Leave => self.counts.leaving -= all,
                GranuleCall::Arrive => {}
            }
        }
        if !(call == GranuleCall::Leave && done) {
            self.idle_end = self.idle_end.max(range.end);
        }
    }

    /// Counts everything again. `expected` returns the effect of the live blocks on a granule.
    ///
    /// # Panics
    /// If a figure is wrong.
    pub(crate) fn validate(&self, expected: impl Fn(usize) -> (u32, bool)) {
        let total =
            |part: fn(&Word) -> u64| self.words.iter().map(|word| count(part(word))).sum::<u64>();
        assert_eq!(self.counts.backed, total(|word| word.backed));
        assert_eq!(self.counts.active, total(|word| word.backed & word.touched));
        assert_eq!(self.counts.committing, total(|word| word.committing & word.backed));
        assert_eq!(self.counts.leaving, total(|word| word.leaving));
        self.validate_handles();
        for (at, word) in self.words.iter().enumerate() {
            assert_eq!(word.committing & word.leaving, 0, "both ways at once in word {at}");
            assert_eq!(word.leaving & !word.backed, 0, "leaving and bare");
            for bit in 0..64 {
                let granule = at * 64 + bit;
                let touched = self.is_touched(granule);
                let partly = self.partly.get(granule).filter(|_| touched).copied().unwrap_or(0);
                assert_eq!((partly, touched), expected(granule), "granule {granule}");
                let leaves = self.leaves(granule, None);
                let is_looked_at = granule < self.idle_end || self.is_stuck(granule);
                assert!(!leaves || is_looked_at, "idle and never looked at: {granule}");
            }
        }
    }

    fn validate_handles(&self) {
        let (mut at, mut stuck) = (0, 0);
        while at < self.known() {
            let handle = self.handle_of(at);
            let same = |of: fn(Word) -> u64| {
                handle.clone().all(|granule| self.is(granule, of) == self.is(handle.start, of))
            };
            let is_one = same(|word| word.backed)
                && same(|word| word.committing)
                && same(|word| word.leaving);
            assert!(is_one, "the granules of the handle {handle:?} differ");
            at = handle.end;
            stuck += self.stuck_in(&[Some(handle), None]);
        }
        assert_eq!(self.counts.stuck, stuck, "stuck granules");
        let joined: u64 = self.words.iter().map(|word| count(word.joined)).sum();
        assert_eq!(self.joined, joined);
    }

    /// Returns `true` if the granule may leave and, with ages, has expired.
    fn leaves(&self, granule: usize, ages: Option<Ages>) -> bool {
        self.is(granule, Word::may_leave)
            && ages.is_none_or(|ages| ages.is_over(Stamp(self.partly[granule])))
    }

    /// Records that one handle backs these granules, which are being committed.
    pub(crate) fn join(&mut self, handle: Range<usize>) {
        for (at, mask) in masks(handle.start + 1..handle.end) {
            self.words[at].joined |= mask;
        }
        self.joined += handle.len() as u64 - 1;
        self.counts.stuck += self.stuck_in(&[Some(handle), None]);
    }

    /// Records that these whole handles back nothing any more.
    fn part(&mut self, range: Range<usize>) {
        if self.joined == 0 {
            return;
        }
        let mut at = range.start;
        while at < range.end {
            let handle = self.handle_of(at);
            at = handle.end;
            self.counts.stuck -= self.stuck_in(&[Some(handle), None]);
        }
        for (at, mask) in masks(range) {
            let word = &mut self.words[at];
            self.joined -= count(word.joined & mask);
            word.joined &= !mask;
        }
    }

    /// Begins to change which granules of a range are touched. Returns the handles that lie only in
    /// part in the range.
    #[inline]
    fn begin_change(&mut self, range: &Range<usize>) -> Option<CutHandles> {
        if self.joined == 0 {
            return None;
        }
        let cut = self.cut_handles(range);
        self.counts.stuck -= self.stuck_in(&cut);
        Some(cut)
    }

    /// Ends a change, with the handles from its beginning. Returns the end of the last of them: its
    /// other granules may leave as well from here on.
    #[inline]
    fn end_change(&mut self, cut: Option<&CutHandles>) -> usize {
        let Some(cut) = cut else { return 0 };
        self.counts.stuck += self.stuck_in(cut);
        cut.iter().flatten().map(|handle| handle.end).max().unwrap_or(0)
    }

    fn is_joined(&self, granule: usize) -> bool {
        self.is(granule, |word| word.joined)
    }

    /// Returns `true` if the bit of a granule is set in what `of` returns.
    fn is(&self, granule: usize, of: impl Fn(Word) -> u64) -> bool {
        self.words.get(granule / 64).is_some_and(|word| of(*word) >> (granule % 64) & 1 == 1)
    }

    /// Returns the granules of the handle of a granule; the granule alone if it is bare.
    pub(crate) fn handle_of(&self, granule: usize) -> Range<usize> {
        let mut range = granule..granule + 1;
        if self.joined == 0 {
            return range;
        }
        while self.is_joined(range.start) {
            range.start -= 1;
        }
        while self.is_joined(range.end) {
            range.end += 1;
        }
        range
    }

    /// Returns the handles that lie only in part in a range: at most one at each end.
    fn cut_handles(&self, range: &Range<usize>) -> CutHandles {
        let first = self.is_joined(range.start).then(|| self.handle_of(range.start));
        let is_new = first.as_ref().is_none_or(|first| first.end <= range.end);
        let last = (is_new && self.is_joined(range.end)).then(|| self.handle_of(range.end));
        [first, last]
    }

    /// Returns the number of granules of handles that are stuck.
    fn stuck_in(&self, handles: &CutHandles) -> u64 {
        let stuck = |handle: &Range<usize>| {
            let (mut touched, mut idle) = (false, 0);
            for (at, mask) in masks(handle.clone()) {
                let word = self.words[at];
                touched |= word.touched & mask != 0;
                idle += count(word.backed & !word.touched & mask);
            }
            idle * u64::from(touched)
        };
        handles.iter().flatten().map(stuck).sum()
    }

    /// Calls `each` with every committed handle that has stuck granules, and the number of these;
    /// with ages, only if all its idle granules have expired.
    pub(crate) fn stuck_handles(
        &self,
        ages: Option<Ages>,
        mut each: impl FnMut(Range<usize>, u64),
    ) {
        let mut at = 0;
        while self.counts.stuck > 0 && at < self.known() {
            let handle = self.handle_of(at);
            at = handle.end;
            let stuck = self.stuck_in(&[Some(handle.clone()), None]);
            let leaves = |granule| self.is_touched(granule) || self.leaves(granule, ages);
            if stuck > 0 && handle.clone().all(leaves) {
                each(handle, stuck);
            }
        }
    }

    fn is_stuck(&self, granule: usize) -> bool {
        let handle = self.handle_of(granule);
        handle.len() > 1 && masks(handle).any(|(at, mask)| self.words[at].touched & mask != 0)
    }

    /// Returns `true` if all granules of a handle may leave and, with ages, have expired.
    fn handle_leaves(&self, handle: &Range<usize>, leave: &Leave) -> bool {
        handle.len() <= leave.handle_max
            && handle.clone().all(|granule| self.leaves(granule, leave.ages))
    }

    /// Returns the last handle before `end` that may leave.
    fn idle_handle_before(&self, mut end: usize, leave: &Leave) -> Option<Range<usize>> {
        loop {
            let last = self.idle_before(end, leave.ages)?;
            let handle = self.handle_of(last);
            if handle.end <= end && self.handle_leaves(&handle, leave) {
                return Some(handle);
            }
            end = handle.start;
        }
    }

    /// Returns the last granule before `end` that may leave.
    fn idle_before(&self, end: usize, ages: Option<Ages>) -> Option<usize> {
        let mut idle = masks(0..end.min(self.known())).rev().flat_map(|(at, mask)| {
            bits(self.words[at].may_leave() & mask).rev().map(move |bit| at * 64 + bit)
        });
        idle.find(|&granule| self.leaves(granule, ages))
    }

    /// Creates entries for all granules before `end`.
    fn reach(&mut self, end: usize) {
        if self.partly.len() < end {
            self.partly.resize(end, 0);
            self.words.resize(end.div_ceil(64), Word::default());
        }
    }
}

/// The handles that may leave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leave {
    /// The maximum number of granules, except that one handle may be larger.
    pub(crate) granules_max: usize,
    /// The maximum number of handles.
    pub(crate) handles_max: usize,
    /// The maximum number of granules of a handle.
    pub(crate) handle_max: usize,
    /// If set, only expired granules leave.
    pub(crate) ages: Option<Ages>,
}

impl Leave {
    /// Returns `true` if all idle handles may leave.
    const fn is_all(&self) -> bool {
        self.ages.is_none() && self.handle_max == usize::MAX
    }
}

/// Adds the next word of a walk: joins its granules to the current run, or ends the run.
fn extend(
    run: &mut Option<Range<usize>>,
    at: usize,
    mut bits: u64,
    mut each: impl FnMut(Range<usize>),
) {
    while bits != 0 {
        let first = bits.trailing_zeros();
        let length = (bits >> first).trailing_ones();
        bits &= !(low(length) << first);
        let (start, length) = (at * 64 + first as usize, length as usize);
        match run {
            Some(run) if run.end == start => run.end += length,
            _ => run.replace(start..start + length).into_iter().for_each(&mut each),
        }
    }
}

/// Returns the number of set bits. Most words have at most one, which is found in 4 instructions;
/// counting more takes 17 without `popcnt`, which not every x86-64 processor has.
fn count(bits: u64) -> u64 {
    if bits & bits.wrapping_sub(1) == 0 {
        u64::from(bits != 0)
    } else {
        u64::from(bits.count_ones())
    }
}

/// Returns the set bits of a word, from the lowest.
fn bits(word: u64) -> impl DoubleEndedIterator<Item = usize> {
    let range =
        if word == 0 { 0..0 } else { word.trailing_zeros()..u64::BITS - word.leading_zeros() };
    range.filter(move |bit| word >> bit & 1 == 1).map(|bit| bit as usize)
}

/// Returns a word with this many lowest bits set, at most 64.
const fn low(bits: u32) -> u64 {
    if bits >= u64::BITS { u64::MAX } else { (1 << bits) - 1 }
}

/// Returns the words that hold these granules, and the bits of the granules in each.
fn masks(range: Range<usize>) -> impl DoubleEndedIterator<Item = (usize, u64)> {
    let Range { start, end } = range;
    let words = if start < end { start / 64..end.div_ceil(64) } else { 0..0 };
    let (first, last) = (start / 64, words.end.wrapping_sub(1));
    words.map(move |word| {
        let from = if word == first { u64::MAX << (start % 64) } else { u64::MAX };
        let to = if word == last { u64::MAX >> (end.wrapping_neg() % 64) } else { u64::MAX };
        (word, from & to)
    })
}

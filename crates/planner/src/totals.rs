//! A number for each section, with range updates and O(1) range maximum.
//!
//! Sections are grouped in blocks. Each block knows the maximum up to and from each section; over
//! blocks, the maximum of each run of 1, 2, 4, and so on is known. It knows nothing of items.
//!
//! Invariant: after every call the cached maxima agree with `values`.

/// The fewest sections of a block, as a power of two, and the most blocks.
const BLOCK_MIN: u32 = 6;
const BLOCKS_MAX: usize = 256;

/// The numbers.
#[derive(Clone, Debug)]
pub(super) struct NeedTotals {
    /// The number of sections in a block, as a power of two.
    shift: u32,
    values: Vec<u64>,
    /// The maximum of the block up to here, and from here on.
    before: Vec<u64>,
    after: Vec<u64>,
    /// `runs[k][b]`: the maximum of `2^k` blocks from `b` on.
    runs: Vec<Vec<u64>>,
}

impl NeedTotals {
    /// Zero for so many sections.
    pub(super) fn new(sections: u32) -> Self {
        let count = sections.max(1) as usize;
        let mut shift = BLOCK_MIN;
        while count.div_ceil(1 << shift) > BLOCKS_MAX {
            shift += 1;
        }
        let blocks = count.div_ceil(1 << shift);
        let lengths = (0..=blocks.ilog2()).map(|run| blocks + 1 - (1 << run));
        let runs = lengths.map(|length| vec![0; length]).collect();
        let zeros = || vec![0; count];
        Self { shift, values: zeros(), before: zeros(), after: zeros(), runs }
    }

    /// Sums the needs of spans. O(spans + sections).
    pub(super) fn of(sections: u32, spans: impl Iterator<Item = (u32, u32, u64)>) -> Self {
        let mut all = Self::new(sections);
        let mut ends = vec![0; all.values.len() + 1];
        for (from, to, size) in spans {
            all.values[from as usize] += size;
            ends[to as usize] += size;
        }
        let mut sum = 0;
        for (value, end) in all.values.iter_mut().zip(&ends) {
            sum += *value;
            sum -= end;
            *value = sum;
        }
        for block in 0..all.runs[0].len() {
            let start = block << all.shift;
            all.settle(start, (start + (1 << all.shift)).min(all.values.len()));
            all.runs[0][block] = all.after[start];
        }
        all.settle_runs(0, all.runs[0].len() - 1);
        all
    }

    pub(super) fn clear(&mut self) {
        for list in [&mut self.values, &mut self.before, &mut self.after] {
            list.fill(0);
        }
        self.runs.iter_mut().for_each(|run| run.fill(0));
    }

    /// Makes these the same as others of as many sections.
    pub(super) fn copy(&mut self, other: &Self) {
        self.values.copy_from_slice(&other.values);
        self.before.copy_from_slice(&other.before);
        self.after.copy_from_slice(&other.after);
        for (own, other) in self.runs.iter_mut().zip(&other.runs) {
            own.copy_from_slice(other);
        }
    }

    /// Takes from the sections of a span. O(sections of the span + blocks).
    pub(super) fn remove(&mut self, from: u32, to: u32, size: u64) {
        self.change(from, to, |total| total - size);
    }

    /// Makes all sections of a span the same. O(sections of the span + blocks).
    pub(super) fn set(&mut self, from: u32, to: u32, value: u64) {
        self.change(from, to, |_| value);
    }

    /// Changes the numbers of a span; the order of values must be preserved.
    fn change(&mut self, from: u32, to: u32, change: impl Fn(u64) -> u64) {
        let (from, to) = (from as usize, to as usize);
        if from >= to {
            return;
        }
        let (first, last) = (from >> self.shift, (to - 1) >> self.shift);
        for block in first..=last {
            let start = block << self.shift;
            let end = (start + (1 << self.shift)).min(self.values.len());
            let is_whole = from <= start && end <= to;
            let (low, high) = (from.max(start), to.min(end));
            self.values[low..high].iter_mut().for_each(|value| *value = change(*value));
            if is_whole {
                // The position of the maximum does not change.
                self.before[low..high].iter_mut().for_each(|value| *value = change(*value));
                self.after[low..high].iter_mut().for_each(|value| *value = change(*value));
            } else {
                self.settle(start, end);
            }
            self.runs[0][block] = self.after[start];
        }
        self.settle_runs(first, last);
    }

    /// Finds the largest of all runs that have a block of these.
    fn settle_runs(&mut self, first: usize, last: usize) {
        for run in 1..self.runs.len() {
            let (half, whole) = (1 << (run - 1), 1 << run);
            let (shorter, longer) = self.runs.split_at_mut(run);
            let (shorter, longer) = (&shorter[run - 1], &mut longer[0]);
            let end = (last + 1).min(longer.len());
            for at in (first + 1).saturating_sub(whole)..end {
                longer[at] = shorter[at].max(shorter[at + half]);
            }
        }
    }

    /// Finds the largest up to and from each section of a block.
    fn settle(&mut self, start: usize, end: usize) {
        let mut most = 0;
        for at in start..end {
            most = self.values[at].max(most);
            self.before[at] = most;
        }
        most = 0;
        for at in (start..end).rev() {
            most = self.values[at].max(most);
            self.after[at] = most;
        }
    }

    /// The largest of a span that is not empty. O(1), but for spans within a block: O(sections).
    pub(super) fn most(&self, from: u32, to: u32) -> u64 {
        let (from, last) = (from as usize, to as usize - 1);
        let (first_block, last_block) = (from >> self.shift, last >> self.shift);
        if first_block == last_block {
            return self.values[from..=last].iter().copied().fold(0, u64::max);
        }
        let most = self.after[from].max(self.before[last]);
        let between = last_block - first_block - 1;
        if between == 0 {
            return most;
        }
        let run = between.ilog2();
        let list = &self.runs[run as usize];
        most.max(list[first_block + 1]).max(list[last_block - (1 << run)])
    }
}

#[cfg(test)]
mod tests {
    use super::super::chance::Chance;
    use super::*;

    #[test]
    fn the_largest_of_a_span_is_that_of_a_list() {
        let mut chance = Chance::new(7);
        for sections in [1_u32, 2, 63, 64, 65, 200, 1000, 20_000] {
            let mut totals = NeedTotals::new(sections);
            let mut list = vec![0_u64; sections as usize];
            let mut spans = Vec::new();
            for _ in 0..300 {
                let draw = |chance: &mut Chance, end: u32| {
                    u32::try_from(chance.below(u64::from(end))).expect("below it")
                };
                let from = draw(&mut chance, sections);
                let to = from + 1 + draw(&mut chance, sections - from);
                let span = from as usize..to as usize;
                if chance.below(3) > 0 || spans.is_empty() {
                    let size = chance.below(100);
                    totals.change(from, to, |total| total + size);
                    list[span].iter_mut().for_each(|sum| *sum += size);
                    spans.push((from, to, size));
                } else {
                    let (from, to, size) = spans.swap_remove(0);
                    totals.remove(from, to, size);
                    list[from as usize..to as usize].iter_mut().for_each(|sum| *sum -= size);
                }
                let from = draw(&mut chance, sections);
                let to = from + 1 + draw(&mut chance, sections - from);
                let most = list[from as usize..to as usize].iter().max().copied();
                assert_eq!(Some(totals.most(from, to)), most, "{from}..{to} of {sections}");
            }
            let mut other = NeedTotals::of(sections, spans.iter().copied());
            assert_eq!(other.values, totals.values);
            assert_eq!((&other.before, &other.after), (&totals.before, &totals.after));
            assert_eq!(other.runs, totals.runs);
            other.copy(&totals);
            other.set(0, sections, 5_000);
            assert_eq!(other.most(0, sections), 5_000);
            totals.clear();
            assert_eq!(totals.most(0, sections), 0);
        }
    }
}

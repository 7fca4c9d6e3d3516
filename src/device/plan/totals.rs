//! Sums over sections: added to and taken from spans, asked for the largest of a span.
//!
//! A tree in which a node's sum is on top of those below it. It knows nothing of items.
//!
//! Invariant: `most[node] = own[node] + max(most of both children)`.

/// The sums.
#[derive(Clone, Debug)]
pub(super) struct Totals {
    /// Leaves of the tree: a power of two.
    leaves: u32,
    /// What all sections below a node have in common, and the largest sum below it.
    own: Vec<u64>,
    most: Vec<u64>,
}

impl Totals {
    /// Sums of zero for so many sections.
    pub(super) fn new(sections: u32) -> Self {
        let leaves = sections.next_power_of_two();
        let nodes = 2 * leaves as usize;
        Self { leaves, own: vec![0; nodes], most: vec![0; nodes] }
    }

    pub(super) fn clear(&mut self) {
        self.own.fill(0);
        self.most.fill(0);
    }

    /// Adds to the sections of a span. O(log sections).
    pub(super) fn add(&mut self, from: u32, to: u32, size: u64) {
        self.change(from, to, |sum| sum + size);
    }

    /// Takes away what was added to the sections of a span. O(log sections).
    pub(super) fn remove(&mut self, from: u32, to: u32, size: u64) {
        // What is common to a node's sections was added there: spans are the same as before.
        self.change(from, to, |sum| sum - size);
    }

    fn change(&mut self, from: u32, to: u32, change: impl Fn(u64) -> u64) {
        let (mut low, mut high) = (from + self.leaves, to + self.leaves);
        let (first, last) = (low as usize, high as usize - 1);
        while low < high {
            if low & 1 == 1 {
                self.change_node(low as usize, &change);
                low += 1;
            }
            if high & 1 == 1 {
                high -= 1;
                self.change_node(high as usize, &change);
            }
            (low, high) = (low / 2, high / 2);
        }
        self.settle(first);
        self.settle(last);
    }

    fn change_node(&mut self, node: usize, change: &impl Fn(u64) -> u64) {
        self.own[node] = change(self.own[node]);
        self.most[node] = change(self.most[node]);
    }

    /// Makes the nodes above a leaf hold what the invariant says.
    fn settle(&mut self, leaf: usize) {
        let mut node = leaf / 2;
        while node > 0 {
            self.most[node] = self.own[node] + self.most[2 * node].max(self.most[2 * node + 1]);
            node /= 2;
        }
    }

    /// The largest sum of a span that is not empty. O(log sections).
    pub(super) fn most(&self, from: u32, to: u32) -> u64 {
        let (mut low, mut high) = ((from + self.leaves) as usize, (to + self.leaves) as usize - 1);
        // The largest sums of what was passed on both sides, without what lies above.
        let (mut left, mut right) = (self.most[low], self.most[high]);
        while low / 2 != high / 2 {
            if low % 2 == 0 {
                left = left.max(self.most[low + 1]);
            }
            if high % 2 == 1 {
                right = right.max(self.most[high - 1]);
            }
            (low, high) = (low / 2, high / 2);
            left += self.own[low];
            right += self.own[high];
        }
        let mut most = left.max(right);
        while low > 1 {
            low /= 2;
            most += self.own[low];
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::super::chance::Chance;
    use super::*;

    #[test]
    fn the_largest_sum_of_a_span_is_that_of_a_list() {
        let mut chance = Chance::new(7);
        for sections in [1_u32, 2, 3, 8, 13] {
            let mut totals = Totals::new(sections);
            let mut list = vec![0_u64; sections as usize];
            let mut spans = Vec::new();
            for _ in 0..500 {
                let draw = |chance: &mut Chance, end: u32| {
                    u32::try_from(chance.below(u64::from(end))).expect("below it")
                };
                let from = draw(&mut chance, sections);
                let to = from + 1 + draw(&mut chance, sections - from);
                if chance.below(3) > 0 || spans.is_empty() {
                    let size = chance.below(100);
                    totals.add(from, to, size);
                    list[from as usize..to as usize].iter_mut().for_each(|sum| *sum += size);
                    spans.push((from, to, size));
                } else {
                    let (from, to, size) = spans.swap_remove(0);
                    totals.remove(from, to, size);
                    list[from as usize..to as usize].iter_mut().for_each(|sum| *sum -= size);
                }
                let most = list[from as usize..to as usize].iter().max().copied();
                assert_eq!(Some(totals.most(from, to)), most, "{from}..{to} of {sections}");
            }
        }
    }
}

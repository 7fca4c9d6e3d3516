//! Compares heap profiles of two quiet times: which call stacks hold more than before.
//!
//! A profile is reduced to its largest stacks. Two are kept in addition to the newest: the base, to
//! which it is compared, and one that becomes the base when the process is twice as old. So the
//! growth of the start, of caches and pools, is left behind.
//!
//! Invariant: at most three summaries of [`STACKS_MAX`] stacks are kept, some 100 KiB.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::memory::leaks::{LeakSuspect, LeakSuspects};
use lowtide_heap::{AllocationProfile, AllocationStack, ProfileMapping};

use super::names::frames;

/// The maximum number of stacks in a summary.
const STACKS_MAX: usize = 128;
/// The maximum number of addresses kept of a stack, the innermost first.
const ADDRESSES_MAX: usize = 32;
/// The maximum number of suspects.
const SUSPECTS_MAX: usize = 16;

/// The largest stacks of a profile.
#[derive(Debug, Default)]
struct Summary {
    taken: Moment,
    at: Duration,
    /// The largest first.
    stacks: Vec<AllocationStack>,
    /// `true` if the profile has further stacks.
    is_cut: bool,
}

impl Summary {
    fn of(profile: &AllocationProfile, taken: Moment, at: Duration) -> Self {
        let mut by_addresses: BTreeMap<&[u64], ByteSize> = BTreeMap::new();
        for stack in &profile.stacks {
            let addresses = &stack.addresses[..stack.addresses.len().min(ADDRESSES_MAX)];
            let bytes = by_addresses.entry(addresses).or_default();
            *bytes = bytes.saturating_add(stack.bytes);
        }
        let mut all: Vec<_> = by_addresses.into_iter().collect();
        all.sort_unstable_by_key(|&(addresses, bytes)| (std::cmp::Reverse(bytes), addresses));
        let is_cut = all.len() > STACKS_MAX;
        all.truncate(STACKS_MAX);
        let stacks = all.into_iter().map(|(addresses, bytes)| {
            let mut stack = AllocationStack::default();
            (stack.addresses, stack.bytes) = (addresses.to_vec(), bytes);
            stack
        });
        Self { taken, at, stacks: stacks.collect(), is_cut }
    }

    /// Returns the bytes of a stack; of one that was cut off, the most that it can have had.
    fn bytes_of(&self, addresses: &[u64]) -> ByteSize {
        let found = self.stacks.iter().find(|stack| stack.addresses == addresses);
        let least = || self.stacks.last().filter(|_| self.is_cut);
        found.or_else(least).map_or(ByteSize::ZERO, |stack| stack.bytes)
    }

    /// Returns the stacks that grew since an earlier summary by `least` or more, with their bytes
    /// then, the largest growth first.
    fn grown<'a>(&'a self, since: &Self, least: ByteSize) -> Vec<(&'a AllocationStack, ByteSize)> {
        let then = |stack: &'a AllocationStack| (stack, since.bytes_of(&stack.addresses));
        let growth =
            |&(stack, then): &(&AllocationStack, ByteSize)| stack.bytes.saturating_sub(then);
        let mut grown: Vec<_> = self.stacks.iter().map(then).collect();
        grown.retain(|pair| growth(pair) >= least);
        grown.sort_by_key(|pair| std::cmp::Reverse(growth(pair)));
        grown.truncate(SUSPECTS_MAX);
        grown
    }
}

/// The profiles of quiet times.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    start: Option<Moment>,
    base: Option<Summary>,
    /// The next base.
    middle: Option<Summary>,
}

impl Suspects {
    /// Adds the profile of a quiet time, and returns the growth since the base; `None` for the
    /// first profile. Looks up names for the stacks that grew.
    pub(super) fn add(
        &mut self,
        profile: &AllocationProfile,
        taken: Moment,
        at: Duration,
    ) -> Option<LeakSuspects> {
        let newest = Summary::of(profile, taken, at);
        let start = *self.start.get_or_insert(taken);
        let found = self.base.as_ref().map(|base| {
            let grown = newest.grown(base, profile.interval);
            LeakSuspects { from: base.at, to: at, sites: named(&grown, &profile.mappings) }
        });
        let Some(middle) = &self.middle else {
            if self.base.is_none() {
                self.base = Some(newest);
            } else {
                self.middle = Some(newest);
            }
            return found;
        };
        if taken - start >= (middle.taken - start) * 2 {
            self.base = self.middle.replace(newest);
        }
        found
    }
}

fn named(grown: &[(&AllocationStack, ByteSize)], mappings: &[ProfileMapping]) -> Vec<LeakSuspect> {
    let stacks: Vec<_> = grown.iter().map(|(stack, _)| &*stack.addresses).collect();
    let names = frames(&stacks, mappings);
    let mut suspects: Vec<LeakSuspect> = Vec::new();
    for (&(stack, then), frames) in grown.iter().zip(names) {
        // Stacks that differ only beyond the frames that are shown are one.
        match suspects.iter_mut().find(|suspect| suspect.frames == frames) {
            Some(same) => {
                same.then = same.then.saturating_add(then);
                same.now = same.now.saturating_add(stack.bytes);
            }
            None => suspects.push(LeakSuspect { then, now: stack.bytes, frames }),
        }
    }
    suspects.sort_by_key(|suspect| std::cmp::Reverse(suspect.growth()));
    suspects
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    fn profile(stacks: &[(u64, u64)]) -> AllocationProfile {
        let mut profile = AllocationProfile::default();
        profile.interval = ByteSize::mib(8);
        profile.stacks.extend(stacks.iter().map(|&(address, mib)| {
            let mut stack = AllocationStack::default();
            (stack.addresses, stack.bytes) = (vec![address, 1], ByteSize::mib(mib));
            stack
        }));
        profile
    }

    fn at(seconds: u64) -> (Moment, Duration) {
        let time = Duration::from_secs(seconds);
        (Moment::after_origin(time), time)
    }

    #[test]
    fn a_stack_that_grows_is_named_with_its_bytes_then_and_now() {
        let mut suspects = Suspects::default();
        let (taken, time) = at(10);
        assert_eq!(suspects.add(&profile(&[(7, 8), (9, 100)]), taken, time), None);
        let (taken, time) = at(20);
        let found = suspects.add(&profile(&[(7, 80), (9, 107), (11, 30)]), taken, time);
        let found = found.expect("two quiet times");
        assert_eq!((found.from.as_secs(), found.to.as_secs()), (10, 20));
        let mib = |site: &LeakSuspect| (site.then.get() >> 20, site.now.get() >> 20);
        let sites: Vec<_> = found.sites.iter().map(mib).collect();
        assert_eq!(sites, [(8, 80), (0, 30)], "a growth below one sample is noise");
    }

    #[test]
    fn the_growth_of_the_start_is_left_behind() {
        let mut suspects = Suspects::default();
        // The cache fills in the first 60 s; the leak goes on.
        let live = |second: u64| profile(&[(7, second.min(60) * 4), (9, second / 5)]);
        let mut found = None;
        for second in (10..=1000).step_by(10) {
            let (taken, time) = at(second);
            found = suspects.add(&live(second), taken, time);
        }
        let found = found.expect("many quiet times");
        let age = |time: Duration| (time.as_secs() - 10) * 100 / 990;
        assert!((25..=50).contains(&age(found.from)), "{found:?}");
        assert_eq!(found.sites.len(), 1, "{found:?}");
        assert_eq!(found.sites[0].now, ByteSize::mib(200));
    }

    #[test]
    fn summaries_are_bounded_and_what_was_cut_off_is_no_growth() {
        let many: Vec<_> = (0..10_000).map(|nth| (nth, 1 + nth % 50)).collect();
        let (taken, time) = at(0);
        let summary = Summary::of(&profile(&many), taken, time);
        assert_eq!((summary.stacks.len(), summary.is_cut), (STACKS_MAX, true));
        let later = Summary::of(&profile(&[(10_001, 50), (10_002, 70)]), taken, time);
        let grown = later.grown(&summary, ByteSize::mib(8));
        assert_eq!(grown.len(), 1);
        assert_eq!(grown[0].1, ByteSize::mib(50), "as much as the least that was kept");
    }
}

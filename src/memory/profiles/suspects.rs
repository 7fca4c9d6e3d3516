//! Compares heap profiles of two quiet times: which call stacks hold more than before.
//!
//! A profile is reduced to its largest stacks. Two are kept in addition to the newest: the base, to
//! which it is compared, and one that becomes the base when the process is twice as old. So the
//! growth of the start, of caches and pools, is left behind.
//!
//! The names of functions are read from the file of the binary, which takes up to some 100 ms and
//! some MiB. They are dropped afterwards.
//!
//! Invariant: every frame has a text of at most [`NAME_MAX`] bytes; at most three summaries of
//! [`STACKS_MAX`] stacks are kept, some 100 KiB.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::Path;
use std::time::Duration;

use crate::bytes::{ByteSize, prefix};
use crate::clock::Moment;
use crate::memory::trend::{Grown, LeakSuspect};
use lowtide_heap::{AllocationProfile, AllocationStack, ProfileMapping};

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

    /// Returns the stacks that grew since an earlier summary by `least` or more, with their bytes
    /// then, the largest growth first.
    fn grown<'a>(&'a self, since: &Self, least: ByteSize) -> Vec<(&'a AllocationStack, ByteSize)> {
        // Of a stack that was cut off, the most that it can have had.
        let then = |stack: &'a AllocationStack| {
            let found = since.stacks.iter().find(|of| of.addresses == stack.addresses);
            let least = || since.stacks.last().filter(|_| since.is_cut);
            (stack, found.or_else(least).map_or(ByteSize::ZERO, |of| of.bytes))
        };
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
    ) -> Option<Grown> {
        let newest = Summary::of(profile, taken, at);
        let start = *self.start.get_or_insert(taken);
        let found = self.base.as_ref().map(|base| {
            let grown = newest.grown(base, profile.interval);
            (base.at..at, named(&grown, &profile.mappings))
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

/// The maximum number of frames of a stack.
const FRAMES_MAX: usize = 8;
/// The maximum length of a frame, in bytes.
const NAME_MAX: usize = 160;

/// The beginnings of functions that allocate for others.
const ALLOCATORS: &[&str] = &[
    "_rjem",
    "__rg_",
    "__rdl_",
    "__rust_",
    "__rustc::",
    "_RNv",
    "je_",
    "prof_",
    "imalloc",
    "malloc",
    "calloc",
    "realloc",
    "aligned_alloc",
    "posix_memalign",
    "operator new",
    "alloc::",
    "core::",
    "std::",
    "hashbrown::",
    "bytes::",
    "lowtide_heap::",
    "tikv_jemallocator::",
];

/// Returns the frames of each stack, the innermost first, from the first function that is not part
/// of the allocator or the standard library.
pub(super) fn frames(stacks: &[&[u64]], mappings: &[ProfileMapping]) -> Vec<Vec<String>> {
    let mut known: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    let frames = stacks.iter().map(|addresses| {
        let all = addresses.iter().flat_map(|&address| {
            known.entry(address).or_insert_with(|| names(address, mappings)).clone()
        });
        trimmed(all)
    });
    let frames = frames.collect();
    if !known.is_empty() {
        backtrace::clear_symbol_cache();
    }
    frames
}

fn trimmed(all: impl Iterator<Item = String>) -> Vec<String> {
    let all: Vec<_> = all.collect();
    let first = all.iter().position(|name| !is_allocator(name)).unwrap_or(0);
    all.into_iter().skip(first).take(FRAMES_MAX).collect()
}

fn is_allocator(name: &str) -> bool {
    // Of `<T as alloc::slice::hack::ConvertVec>::to_vec` the trait.
    let inner = name.trim_start_matches('<');
    let of_trait = inner.split_once(" as ").filter(|_| name.starts_with('<')).map(|it| it.1);
    let is_one = |name: &str| ALLOCATORS.iter().any(|start| name.starts_with(start));
    is_one(inner) || of_trait.is_some_and(is_one)
}

/// Returns the names of the function that returns to this address, the innermost inlined function
/// first.
fn names(address: u64, mappings: &[ProfileMapping]) -> Vec<String> {
    // A return address is behind the call.
    let call = address.saturating_sub(1);
    let mut names = Vec::new();
    let place = usize::try_from(call).unwrap_or(0);
    backtrace::resolve(std::ptr::without_provenance_mut::<c_void>(place), |symbol| {
        let Some(name) = symbol.name() else { return };
        let file = symbol.filename().and_then(Path::file_name).map(|file| file.to_string_lossy());
        let mut text = format!("{name:#}");
        if let (Some(file), Some(line)) = (file, symbol.lineno()) {
            text = format!("{text} ({file}:{line})");
        }
        names.push(cut(text));
    });
    if names.is_empty() {
        let mapping = mappings.iter().find(|of| (of.start..of.end).contains(&call));
        names.push(cut(mapping.map_or_else(
            || format!("{call:#x}"),
            |of| {
                let file = Path::new(&of.path).file_name().unwrap_or_default().to_string_lossy();
                format!("{file}+{:#x}", call - of.start + of.offset)
            },
        )));
    }
    names
}

fn cut(mut text: String) -> String {
    text.truncate(prefix(&text, NAME_MAX).len());
    text
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
        let (times, sites) = found.expect("two quiet times");
        assert_eq!((times.start.as_secs(), times.end.as_secs()), (10, 20));
        let mib = |site: &LeakSuspect| (site.then.get() >> 20, site.now.get() >> 20);
        let sites: Vec<_> = sites.iter().map(mib).collect();
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
        let (times, sites) = found.expect("many quiet times");
        let age = |time: Duration| (time.as_secs() - 10) * 100 / 990;
        assert!((25..=50).contains(&age(times.start)), "{times:?}");
        assert_eq!(sites.len(), 1, "{sites:?}");
        assert_eq!(sites[0].now, ByteSize::mib(200));
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

    #[test]
    fn a_stack_begins_at_the_first_function_that_is_no_allocator() {
        let all = [
            "_rjem_je_prof_tctx_create",
            "__rust_alloc",
            "__rustc::__rust_alloc (profile.rs:161)",
            "<T as alloc::slice::hack::ConvertVec>::to_vec",
            "<alloc::vec::Vec<T> as core::clone::Clone>::clone",
            "service::cache::insert",
            "std::thread::spawn",
        ];
        let trimmed = trimmed(all.into_iter().map(str::to_owned));
        assert_eq!(trimmed, ["service::cache::insert", "std::thread::spawn"]);
    }

    #[test]
    fn a_function_without_a_name_is_its_file_and_offset() {
        let mut mapping = ProfileMapping::default();
        (mapping.start, mapping.end, mapping.offset) = (0x10, 0x20, 0x1000);
        mapping.path = "/opt/proxy".to_owned();
        assert_eq!(names(0x18, &[mapping]), ["proxy+0x1007"]);
        assert_eq!(names(0x18, &[]), ["0x17"]);
        assert_eq!(cut("ä".repeat(200)).len(), NAME_MAX);
    }

    #[test]
    fn a_function_of_this_binary_has_its_name() {
        let address = a_function_of_this_binary_has_its_name as fn() as usize as u64;
        let found = frames(&[&[address + 2]], &[]);
        let name = "a_function_of_this_binary_has_its_name";
        assert!(found[0].iter().any(|frame| frame.contains(name)), "{found:?}");
    }
}

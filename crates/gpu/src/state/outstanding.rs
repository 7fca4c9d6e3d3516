//! Exports, imported memory that is held or waits for its release, and memory that was freed but
//! that a graph may have captured. Pure accounting under the arena's lock.
//!
//! A value holds its imported range. After the value is dropped, the range waits for the end of its
//! uses. Then its release function is taken out, once, to be called without a lock. This module
//! calls nothing and knows no driver.
//!
//! Invariant: imported ranges do not overlap.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;

use crate::driver::DeviceAddress;
use crate::state::pending::StreamUses;
use crate::state::region::Placement;
use crate::state::streams::StreamUse;
use lowtide_core::bytes::ByteSize;

/// Releases imported memory to its owner.
pub(crate) type Release = Box<dyn FnOnce(DeviceAddress, ByteSize) + Send>;

/// The exports and imports of an arena, and what graphs may have captured.
#[derive(Default)]
pub(crate) struct Outstanding {
    /// The number of exports, and the bytes of their blocks.
    pub(crate) exported_count: u64,
    pub(crate) exported_bytes: u64,
    pub(crate) imported: Imports,
    pub(crate) captured: Captured,
}

/// Memory whose owner has freed it, and which graphs may use.
#[derive(Debug, Default)]
pub(crate) struct Captured {
    pub(crate) blocks: Vec<Placement>,
    /// Imported memory.
    pub(crate) imports: Vec<DeviceAddress>,
}

impl Captured {
    /// Returns the bytes of the blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.blocks.iter().map(|placed| placed.span.size).sum()
    }
}

/// An imported range.
pub(crate) struct ImportedRange {
    size: u64,
    release: Release,
    /// The uses that must complete before the release, once the value is dropped.
    after: Option<StreamUses>,
}

/// Imported memory that is not released yet.
#[derive(Default)]
pub(crate) struct Imports {
    pub(crate) entries: BTreeMap<u64, ImportedRange>,
}

impl Imports {
    /// Returns the number of ranges that are not released.
    pub(crate) fn count(&self) -> u64 {
        self.entries.len() as u64
    }

    /// Returns the bytes of all ranges.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.size).sum()
    }

    /// Returns `true` if a range, which does not wrap, overlaps an imported range.
    pub(crate) fn overlaps(&self, at: u64, size: u64) -> bool {
        let before = self.entries.range(..at.saturating_add(size)).next_back();
        before.is_some_and(|(&start, entry)| start.saturating_add(entry.size) > at)
    }

    /// Records a range that overlaps no other.
    pub(crate) fn import(&mut self, at: u64, size: u64, release: Release) {
        debug_assert!(!self.overlaps(at, size), "imported once");
        self.entries.insert(at, ImportedRange { size, release, after: None });
    }

    /// Records that a range is no longer held.
    pub(crate) fn let_go(&mut self, at: u64, after: StreamUses) {
        if let Some(entry) = self.entries.get_mut(&at) {
            entry.after.get_or_insert(after);
        }
    }

    /// Returns the number of ranges that wait for their release.
    pub(crate) fn waiting(&self) -> u64 {
        self.entries.values().filter(|entry| entry.after.is_some()).count() as u64
    }

    /// Takes out a range whose uses are all complete, to call its release function with it.
    pub(crate) fn take(
        &mut self,
        is_done: impl Fn(StreamUse) -> bool,
    ) -> Option<(DeviceAddress, ByteSize, Release)> {
        let is_due =
            |entry: &ImportedRange| entry.after.as_ref().is_some_and(|of| of.iter().all(&is_done));
        let (&at, _) = self.entries.iter().find(|(_, entry)| is_due(entry))?;
        self.remove(at)
    }

    /// Forgets a range, and its release function without a call or a drop.
    pub(crate) fn forget(&mut self, at: u64) {
        let _ = self.remove(at).map(ManuallyDrop::new);
    }

    /// Takes out the first range, regardless of its uses.
    pub(crate) fn take_any(&mut self) -> Option<(DeviceAddress, ByteSize, Release)> {
        let (&at, _) = self.entries.first_key_value()?;
        self.remove(at)
    }

    fn remove(&mut self, at: u64) -> Option<(DeviceAddress, ByteSize, Release)> {
        let ImportedRange { size, release, .. } = self.entries.remove(&at)?;
        Some((DeviceAddress::new(at), ByteSize::new(size), release))
    }

    /// Walks everything and checks the invariants.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub(crate) fn validate(&self) {
        let mut end = 0;
        for (&at, entry) in &self.entries {
            assert!(entry.size > 0 && at >= end, "imported ranges overlap at {at:#x}");
            end = at + entry.size;
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::state::streams::StreamKey;

    fn nothing() -> Release {
        Box::new(|_, _| {})
    }

    #[test]
    fn ranges_that_touch_do_not_overlap_and_those_that_share_a_byte_do() {
        let mut adoptions = Imports::default();
        adoptions.import(100, 50, nothing());
        adoptions.import(200, 1, nothing());
        for (at, size, overlaps) in [
            (50, 50, false),
            (50, 51, true),
            (149, 1, true),
            (150, 50, false),
            (150, 51, true),
            (0, u64::MAX, true),
            (201, u64::MAX - 201, false),
        ] {
            assert_eq!(adoptions.overlaps(at, size), overlaps, "{size} at {at}");
        }
        assert_eq!((adoptions.count(), adoptions.bytes(), adoptions.waiting()), (2, 51, 0));
        adoptions.validate();
    }

    #[test]
    fn a_range_is_taken_once_and_only_when_nobody_holds_it_and_its_uses_are_done() {
        let mut adoptions = Imports::default();
        adoptions.import(100, 50, nothing());
        adoptions.import(200, 10, nothing());
        assert!(adoptions.take(|_| true).is_none(), "both are held");
        let of = StreamUse { stream: StreamKey::CONTEXT, epoch: 3 };
        adoptions.let_go(200, StreamUses::of([of]));
        adoptions.let_go(200, StreamUses::default());
        assert!(adoptions.waiting() == 1 && adoptions.count() == 2);
        assert!(adoptions.take(|of| of.epoch < 3).is_none());
        let due = adoptions.take(|of| of.epoch <= 3).expect("done");
        assert_eq!((due.0, due.1), (DeviceAddress::new(200), ByteSize::new(10)));
        assert!(adoptions.take(|_| true).is_none() && !adoptions.waiting() > 0);
        assert_eq!(adoptions.take_any().map(|due| due.1), Some(ByteSize::new(50)));
        assert_eq!((adoptions.count(), adoptions.bytes()), (0, 0));
        adoptions.validate();
    }
}

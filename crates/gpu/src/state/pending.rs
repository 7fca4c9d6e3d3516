//! Spans that were freed while the device may still use them. Pure accounting over the addresses of
//! a region.
//!
//! When a block that a stream used is freed, it becomes free space in the index and gets an entry
//! here until its uses are known to be complete. An allocation of the space learns which uses it
//! must wait for. Streams are numbers here. This module orders nothing and calls no driver.
//!
//! Memory that a stream freed since its last event has one use, however many blocks it was: entries
//! that adjoin and have the same uses are joined, which loses nothing.
//!
//! Invariants: entries overlap neither each other nor a live block; every entry has a use that is
//! not known to be complete; `bytes = sum of the entries`.

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use crate::index::Span;
use crate::state::streams::{StreamKey, StreamUse};

/// Uses that must be complete: at most one per stream, in the order of streams. One takes no memory
/// of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamUses(SmallVec<[StreamUse; 1]>);

impl StreamUses {
    /// Creates the uses of a block.
    #[inline]
    pub(crate) fn of(uses: impl IntoIterator<Item = StreamUse>) -> Self {
        let mut all = Self::default();
        uses.into_iter().for_each(|of| all.add(of));
        all
    }

    /// Adds a use. Of two uses on one stream, the later stays.
    #[inline]
    pub(crate) fn add(&mut self, of: StreamUse) {
        match self.0.binary_search_by_key(&of.stream, |known| known.stream) {
            Ok(at) => self.0[at].epoch = self.0[at].epoch.max(of.epoch),
            Err(at) => self.0.insert(at, of),
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of uses.
    fn len(&self) -> usize {
        self.0.len()
    }

    /// Keeps the uses for which `holds` returns `true`.
    pub(crate) fn only(mut self, holds: impl Fn(StreamUse) -> bool) -> Self {
        self.0.retain(|of| holds(*of));
        self
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = StreamUse> {
        self.0.iter().copied()
    }

    /// Returns `true` if all uses are on this stream, which then need not wait.
    pub(crate) fn is_of(&self, stream: Option<StreamKey>) -> bool {
        self.iter().all(|of| Some(of.stream) == stream)
    }
}

#[derive(Debug)]
struct PendingSpan {
    size: u64,
    uses: StreamUses,
}

/// The pending parts of a span that was taken for a block, and the uses of each, which must complete
/// before the block's first use. They become pending again if the block is freed before that.
pub(crate) type Dependencies = Vec<(Span, StreamUses)>;

/// Two adjoining spans that became one entry, or one entry that became two.
pub(crate) type Border = (Span, Span);

/// The pending spans of one region.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    entries: BTreeMap<u64, PendingSpan>,
    /// Every use of every entry, with the offset of the entry.
    by_use: BTreeSet<(StreamUse, u64)>,
    /// The bytes of all entries.
    pub(crate) bytes: u64,
}

impl Pending {
    /// Returns the approximate bytes of this metadata.
    pub(crate) fn metadata(&self) -> usize {
        let uses = self.by_use.len() * (size_of::<StreamUse>() + size_of::<(StreamUse, u64)>());
        self.entries.len() * size_of::<(u64, PendingSpan)>() + uses
    }

    /// Records a freed span. If it may be `joined`, it becomes one entry with adjoining ones of the
    /// same uses, which complete together. Returns the borders that are gone.
    pub(crate) fn insert(
        &mut self,
        span: Span,
        uses: StreamUses,
        joined: bool,
    ) -> [Option<Border>; 2] {
        debug_assert!(!uses.is_empty() && self.is_clear(span), "freed once, and used");
        let (mut gone, mut whole) = ([None, None], span);
        let after = if joined { self.entries.get(&span.end()) } else { None };
        if let Some(after) = after.filter(|after| after.uses == uses) {
            let after = Span { offset: span.end(), size: after.size };
            self.remove(after.offset);
            gone[0] = Some((span, after));
            whole.size += after.size;
        }
        self.bytes += whole.size;
        let before = if joined { self.entries.range_mut(..span.offset).next_back() } else { None };
        if let Some((&offset, before)) = before
            && offset + before.size == span.offset
            && before.uses == uses
        {
            gone[1] = Some((Span { offset, size: before.size }, whole));
            before.size += whole.size;
            return gone;
        }
        self.by_use.extend(uses.iter().map(|of| (of, whole.offset)));
        self.entries.insert(whole.offset, PendingSpan { size: whole.size, uses });
        gone
    }

    /// Returns `true` if no part of a span is pending.
    pub(crate) fn is_clear(&self, span: Span) -> bool {
        self.over(span).next().is_none()
    }

    /// Returns `true` if a user on this stream, or on no stream, must wait before using a span.
    pub(crate) fn is_foreign(&self, span: Span, stream: Option<StreamKey>) -> bool {
        !self.entries.is_empty() && self.over(span).any(|(_, entry)| !entry.uses.is_of(stream))
    }

    /// Returns the first place of this size and alignment in a span for which a user on this stream
    /// need not wait.
    pub(crate) fn first_clear(
        &self,
        within: Span,
        (size, align): (u64, u64),
        stream: Option<StreamKey>,
    ) -> Option<Span> {
        let mut offset = within.offset.checked_next_multiple_of(align)?;
        loop {
            let place = Span { offset, size };
            if offset.checked_add(size)? > within.end() {
                return None;
            }
            let foreign = self.over(place).find(|(_, entry)| !entry.uses.is_of(stream));
            let Some((last, _)) = foreign else { return Some(place) };
            offset = last.end().checked_next_multiple_of(align)?;
        }
    }

    /// Takes a span out of the entries: from here on it belongs to a live block. Also returns the
    /// borders at which entries were cut, in the order of the cuts.
    pub(crate) fn take(&mut self, span: Span) -> (Dependencies, Vec<Border>) {
        let (mut claim, mut cuts) = (Dependencies::default(), Vec::new());
        loop {
            let over = self.over(span).next();
            let Some((was, uses)) = over.map(|(was, entry)| (was, entry.uses.clone())) else {
                return (claim, cuts);
            };
            let offset = was.offset.max(span.offset);
            let part = Span { offset, size: was.end().min(span.end()) - offset };
            let before = Span { size: part.offset - was.offset, ..was };
            let after = Span { offset: part.end(), size: was.end() - part.end() };
            if before.size == 0 {
                self.remove(was.offset);
                self.bytes += was.size;
            } else if let Some(entry) = self.entries.get_mut(&was.offset) {
                entry.size = before.size;
                cuts.push((before, Span { offset: part.offset, size: part.size + after.size }));
            }
            if after.size > 0 {
                self.by_use.extend(uses.iter().map(|of| (of, after.offset)));
                self.entries
                    .insert(after.offset, PendingSpan { size: after.size, uses: uses.clone() });
                cuts.push((part, after));
            }
            self.bytes -= part.size;
            claim.push((part, uses));
        }
    }

    /// Records that a stream has completed all uses up to an epoch. Entries without other uses are
    /// no longer pending. Returns their spans.
    pub(crate) fn complete(&mut self, stream: StreamKey, epoch: u64) -> Vec<Span> {
        let first = StreamUse { stream, epoch: 0 };
        let last = StreamUse { stream, epoch };
        let done: Vec<_> = self.by_use.range((first, 0)..=(last, u64::MAX)).copied().collect();
        let mut free = Vec::new();
        for (of, offset) in done {
            self.by_use.remove(&(of, offset));
            let Some(entry) = self.entries.get_mut(&offset) else { continue };
            entry.uses = std::mem::take(&mut entry.uses).only(|known| known != of);
            if entry.uses.is_empty() {
                let size = entry.size;
                self.entries.remove(&offset);
                self.bytes -= size;
                free.push(Span { offset, size });
            }
        }
        free
    }

    /// Returns `true` if an entry waits for a stream.
    pub(crate) fn has(&self, stream: StreamKey) -> bool {
        let first = (StreamUse { stream, epoch: 0 }, 0);
        self.by_use.range(first..).next().is_some_and(|(of, _)| of.stream == stream)
    }

    /// Returns the spans of all entries, in the order of addresses.
    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> {
        self.entries.iter().map(|(&offset, entry)| Span { offset, size: entry.size })
    }

    /// Returns the entries that overlap a span, in descending order.
    fn over(&self, span: Span) -> impl Iterator<Item = (Span, &PendingSpan)> {
        let before = self.entries.range(..span.end()).rev();
        let spans = before.map(|(&offset, entry)| (Span { offset, size: entry.size }, entry));
        spans.take_while(move |(of, _)| of.end() > span.offset)
    }

    fn remove(&mut self, offset: u64) -> StreamUses {
        let Some(PendingSpan { size, uses }) = self.entries.remove(&offset) else {
            return StreamUses::default();
        };
        self.bytes -= size;
        for of in uses.iter() {
            self.by_use.remove(&(of, offset));
        }
        uses
    }

    /// Walks everything and checks the invariants.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub(crate) fn validate(&self) {
        let (mut end, mut bytes, mut uses) = (0, 0, 0);
        for (&offset, entry) in &self.entries {
            assert!(entry.size > 0 && offset >= end, "entries overlap at {offset}");
            assert!(!entry.uses.is_empty(), "an entry that waits for nothing");
            for of in entry.uses.iter() {
                assert!(self.by_use.contains(&(of, offset)), "{of:?} is not found by its use");
            }
            uses += entry.uses.len();
            bytes += entry.size;
            end = offset + entry.size;
        }
        assert_eq!((bytes, uses), (self.bytes, self.by_use.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(stream: u64, epoch: u64) -> StreamUse {
        StreamUse { stream: StreamKey::new(stream), epoch }
    }

    fn span(offset: u64, end: u64) -> Span {
        Span { offset, size: end - offset }
    }

    #[test]
    fn who_takes_a_part_comes_after_its_uses_and_the_rest_stays_pending() {
        let mut pending = Pending::default();
        pending.insert(span(0, 10), StreamUses::of([on(1, 3)]), true);
        pending.insert(span(10, 20), StreamUses::of([on(1, 4), on(2, 1)]), true);
        pending.insert(span(30, 40), StreamUses::of([on(2, 9)]), true);
        let one = Some(StreamKey::new(1));
        assert!(!pending.is_foreign(span(0, 10), one) && !pending.is_foreign(span(20, 30), None));
        assert!(pending.is_foreign(span(0, 10), None) && pending.is_foreign(span(5, 11), one));
        let (claim, cuts) = pending.take(span(5, 12));
        let uses = StreamUses::of(claim.iter().flat_map(|(_, uses)| uses.iter()));
        assert_eq!(uses, StreamUses::of([on(2, 1), on(1, 3), on(1, 4)]));
        let parts: Vec<_> = claim.iter().map(|(part, _)| *part).collect();
        assert_eq!(parts, [span(10, 12), span(5, 10)]);
        assert_eq!(cuts, [(span(10, 12), span(12, 20)), (span(0, 5), span(5, 10))]);
        assert_eq!(pending.bytes, 23);
        pending.validate();
        assert!(pending.take(span(20, 30)).0.is_empty());
    }

    #[test]
    fn adjoining_entries_of_the_same_uses_are_one() {
        let mut pending = Pending::default();
        let insert = |pending: &mut Pending, at, epoch| {
            pending.insert(span(at, at + 10), StreamUses::of([on(1, epoch)]), true)
        };
        assert_eq!(insert(&mut pending, 0, 3), [None, None]);
        assert_eq!(insert(&mut pending, 20, 3), [None, None]);
        assert_eq!(insert(&mut pending, 30, 4), [None, None], "used later");
        let gone = [(span(10, 20), span(20, 30)), (span(0, 10), span(10, 30))];
        assert_eq!(insert(&mut pending, 10, 3), gone.map(Some));
        assert_eq!(pending.spans().collect::<Vec<_>>(), [span(0, 30), span(30, 40)]);
        pending.validate();
        let (_, cuts) = pending.take(span(10, 20));
        assert_eq!(cuts, [(span(0, 10), span(10, 30)), (span(10, 20), span(20, 30))]);
        assert_eq!(pending.bytes, 30);
        pending.validate();
        assert_eq!(pending.complete(StreamKey::new(1), 3), [span(0, 10), span(20, 30)]);
    }

    #[test]
    fn the_first_clear_place_is_after_what_others_use_and_may_be_ones_own() {
        let mut pending = Pending::default();
        pending.insert(span(0, 10), StreamUses::of([on(1, 3)]), true);
        pending.insert(span(20, 30), StreamUses::of([on(2, 1)]), true);
        let clear = |size, align, stream| {
            pending.first_clear(span(0, 64), (size, align), Some(StreamKey::new(stream)))
        };
        assert_eq!(clear(8, 8, 1), Some(span(0, 8)), "its own");
        assert_eq!(clear(16, 1, 1), Some(span(0, 16)));
        assert_eq!(clear(24, 8, 1), Some(span(32, 56)), "aligned, after the other's");
        assert_eq!(clear(8, 8, 3), Some(span(32, 40)));
        assert_eq!(clear(10, 1, 3), Some(span(10, 20)));
        assert_eq!(clear(33, 8, 3), None);
        assert_eq!(pending.first_clear(span(0, 64), (10, 1), None), Some(span(10, 20)));
    }

    #[test]
    fn an_entry_is_pending_until_its_last_use_is_complete() {
        let mut pending = Pending::default();
        pending.insert(span(0, 10), StreamUses::of([on(1, 1), on(2, 5)]), true);
        pending.insert(span(10, 20), StreamUses::of([on(1, 2)]), true);
        assert!(pending.has(StreamKey::new(2)) && !pending.has(StreamKey::new(3)));
        assert_eq!(pending.complete(StreamKey::new(1), 1), []);
        assert_eq!(pending.complete(StreamKey::new(2), 4), []);
        assert_eq!(pending.complete(StreamKey::new(1), 9), [span(10, 20)]);
        assert_eq!(pending.complete(StreamKey::new(2), 5), [span(0, 10)]);
        assert!(pending.bytes == 0 && !pending.has(StreamKey::new(2)));
        pending.validate();
    }
}

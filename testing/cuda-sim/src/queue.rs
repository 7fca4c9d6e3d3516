//! Streams as queues of work, and the dependencies between them.
//!
//! Pure order: it runs no work and knows no memory. A wait names a position in a stream that
//! existed when the wait was queued, so dependencies are always older than the work itself, and
//! there is no cycle.
//!
//! Invariant: `unfinished` is the sum of the queues' lengths; `busy` holds exactly the streams with
//! work; a destroyed stream is kept only while it has work.

use std::collections::VecDeque;

use super::slots::Slots;
use super::work::{Position, Work, mixed};

/// Chance that is the same for the same seed.
#[derive(Clone, Debug, Default)]
pub(super) struct Chance(u64);

impl Chance {
    pub(super) const fn new(seed: u64) -> Self {
        Self(mixed(seed))
    }

    /// A number below `end`, which is not 0.
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let drawn = u128::from(mixed(self.0)) * end as u128;
        // The upper half of a product with `end` is below it.
        usize::try_from(drawn >> 64).unwrap_or(0)
    }
}

#[derive(Debug, Default)]
struct Stream {
    work: VecDeque<Work>,
    done: u64,
    given_up: bool,
    /// Its index in `busy`, while it has work.
    busy_at: usize,
}

/// All streams.
#[derive(Debug, Default)]
pub(super) struct Queues {
    streams: Slots<Stream>,
    busy: Vec<u64>,
    unfinished: usize,
}

impl Queues {
    pub(super) fn create(&mut self) -> u64 {
        self.streams.insert(Stream::default())
    }

    /// Returns `true` if the stream accepts work.
    pub(super) fn is_live(&self, stream: u64) -> bool {
        self.streams.get(stream).is_some_and(|stream| !stream.given_up)
    }

    /// Gives a live stream up; it goes when its work is done.
    pub(super) fn give_up(&mut self, stream: u64) {
        let Some(given) = self.streams.get_mut(stream) else { return };
        if given.work.is_empty() {
            self.streams.remove(stream);
        } else {
            given.given_up = true;
        }
    }

    /// Adds work to a live stream.
    pub(super) fn push(&mut self, stream: u64, work: Work) {
        let Some(to) = self.streams.get_mut(stream) else { return };
        if to.work.is_empty() {
            to.busy_at = self.busy.len();
            self.busy.push(stream);
        }
        to.work.push_back(work);
        self.unfinished += 1;
    }

    /// The end of a stream as it is now.
    pub(super) fn end(&self, stream: u64) -> Position {
        let count = self.streams.get(stream).map_or(0, |it| it.done + it.work.len() as u64);
        Position { stream, count }
    }

    /// Returns the position up to which work is done.
    pub(super) fn done(&self, stream: u64) -> Position {
        // Of a stream that went with its last work the end is not known any more, and is last.
        let count = self.streams.get(stream).map_or(u64::MAX, |it| it.done);
        Position { stream, count }
    }

    pub(super) fn is_done(&self, position: Position) -> bool {
        // A stream that is gone has done all that it was given.
        self.streams.get(position.stream).is_none_or(|stream| stream.done >= position.count)
    }

    /// Returns a stream whose next work can run now and on which the position depends; `None` if
    /// the position is done. Cost: O(streams in the chain of waits).
    pub(super) fn next_towards(&self, position: Position) -> Option<u64> {
        let mut at = position;
        while let Some(stream) = self.streams.get(at.stream).filter(|it| it.done < at.count) {
            match stream.work.front() {
                Some(Work::Wait(before)) if !self.is_done(*before) => at = *before,
                Some(_) => return Some(at.stream),
                None => return None,
            }
        }
        None
    }

    /// As [`Queues::next_towards`], for the next work of the busy stream in this place.
    pub(super) fn next_of_busy(&self, at: usize) -> Option<u64> {
        let stream = *self.busy.get(at)?;
        let done = self.streams.get(stream)?.done;
        self.next_towards(Position { stream, count: done + 1 })
    }

    /// Returns the number of streams with work.
    pub(super) fn busy(&self) -> usize {
        self.busy.len()
    }

    /// Returns the next work of a stream.
    pub(super) fn next(&self, stream: u64) -> Option<&Work> {
        self.streams.get(stream)?.work.front()
    }

    /// Takes the next work off a stream, as done.
    pub(super) fn take(&mut self, stream: u64) -> Option<Work> {
        let from = self.streams.get_mut(stream)?;
        let work = from.work.pop_front()?;
        from.done += 1;
        self.unfinished -= 1;
        if from.work.is_empty() {
            let (at, gone) = (from.busy_at, from.given_up);
            self.busy.swap_remove(at);
            if let Some(moved) = self.busy.get(at).and_then(|moved| self.streams.get_mut(*moved)) {
                moved.busy_at = at;
            }
            if gone {
                self.streams.remove(stream);
            }
        }
        Some(work)
    }

    /// Drops all work undone: the context is lost.
    pub(super) fn clear(&mut self) {
        while let Some(stream) = self.busy.first().copied() {
            while self.take(stream).is_some() {}
        }
    }

    /// Returns the number of unfinished pieces of work.
    pub(super) fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// The first unfinished work for which `is_meant` holds, and its stream. Cost: O(unfinished).
    pub(super) fn find(&self, is_meant: impl Fn(&Work) -> bool) -> Option<(u64, Work)> {
        self.busy.iter().find_map(|number| {
            let work = self.streams.get(*number)?.work.iter().find(|work| is_meant(work))?;
            Some((*number, *work))
        })
    }

    /// Returns the number of live streams, without destroyed ones. Cost: O(streams).
    pub(super) fn live(&self) -> usize {
        self.streams.values().filter(|it| !it.given_up).count()
    }

    /// Checks the counters. Cost: O(streams).
    pub(super) fn validate(&self) {
        assert_eq!(self.streams.values().map(|it| it.work.len()).sum::<usize>(), self.unfinished);
        assert!(self.streams.values().all(|it| !it.given_up || !it.work.is_empty()));
        let busy = self.streams.values().filter(|it| !it.work.is_empty()).count();
        assert_eq!(busy, self.busy.len());
        for (at, number) in self.busy.iter().enumerate() {
            let stream = self.streams.get(*number).map(|it| (it.busy_at, it.work.is_empty()));
            assert_eq!(stream, Some((at, false)), "busy stream {number:#x}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: Work = Work::HostFunction(0);

    fn run_towards(queues: &mut Queues, position: Position) -> Vec<u64> {
        let mut order = Vec::new();
        while let Some(stream) = queues.next_towards(position) {
            queues.take(stream).expect("it has work");
            queues.validate();
            order.push(stream);
        }
        assert!(queues.is_done(position));
        order
    }

    #[test]
    fn only_what_a_position_depends_on_is_done_on_the_way_to_it() {
        let mut queues = Queues::default();
        let [a, b, c] = [(); 3].map(|()| queues.create());
        queues.push(a, MARK);
        let in_a = queues.end(a);
        queues.push(a, MARK); // no wait for this one
        queues.push(b, Work::Wait(in_a));
        let in_b = queues.end(b);
        queues.push(c, MARK);
        queues.push(c, Work::Wait(in_b));
        queues.push(c, MARK);
        let end = queues.end(c);
        assert_eq!(run_towards(&mut queues, end), [c, a, b, c, c]);
        assert_eq!((queues.unfinished(), queues.busy()), (1, 1));
        assert_eq!(queues.next_towards(in_b), None);
    }

    #[test]
    fn a_stream_given_up_does_its_work_and_is_then_gone_and_done() {
        let mut queues = Queues::default();
        let [a, b] = [(); 2].map(|()| queues.create());
        queues.push(a, MARK);
        let end = queues.end(a);
        queues.give_up(a);
        queues.validate();
        assert!(!queues.is_live(a) && !queues.is_done(end));
        queues.push(b, Work::Wait(end));
        assert_eq!(queues.live(), 1);
        let in_b = queues.end(b);
        assert_eq!(run_towards(&mut queues, in_b), [a, b]);
        assert!(queues.is_done(end));
        queues.give_up(b);
        queues.validate();
        assert_eq!((queues.live(), queues.streams.len()), (0, 0));
        let again = queues.create();
        assert!(queues.is_done(end), "a stream {again:#x} in the place of {a:#x} changes nothing");
    }

    #[test]
    fn a_lost_context_leaves_nothing_to_do() {
        let mut queues = Queues::default();
        let [a, b] = [(); 2].map(|()| queues.create());
        for _ in 0..3 {
            queues.push(a, MARK);
            let end = queues.end(a);
            queues.push(b, Work::Wait(end));
        }
        queues.give_up(a);
        queues.clear();
        queues.validate();
        assert_eq!((queues.unfinished(), queues.busy(), queues.live()), (0, 0, 1));
    }

    #[test]
    fn chance_stays_below_its_end_and_reaches_all_of_it() {
        let mut chance = Chance::new(3);
        let mut seen = [0; 5];
        (0..1000).for_each(|_| seen[chance.below(5)] += 1);
        assert!(seen.iter().all(|count| *count > 100), "{seen:?}");
    }
}

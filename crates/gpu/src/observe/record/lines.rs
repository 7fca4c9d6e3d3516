//! The lines that a recorder has written but not yet passed on, the numbers, and the hash so far.
//!
//! The lines have their own lock, under which no code of the arena is called. The recorder passes
//! the lines on to the sink.
//!
//! Invariants: lines are complete; the hash is that of the lines written; after the end no line is
//! written.

use std::fmt::Write as _;
use std::time::Duration;

use super::error::RecordError;
use super::events;
use super::format::LINE_MAX;
use super::hash::OperationHash;
use super::numbers::Numbers;
use super::operation::{Closing, Ended, Entry, Header};
use crate::state::event::{ArenaEvent, SequencedEvent};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// The maximum number of bytes that wait for the sink. Reached only if the sink itself uses the
/// arena, because a thread that finds [`WAIT_FROM`] waits for the sink.
pub(super) const WAITING_MAX: usize = 1 << 20;

/// The number of waiting bytes from which on they are passed on. A guess: one write for a thousand
/// operations.
pub(super) const DUE_FROM: usize = 64 << 10;

/// The number of waiting bytes from which on threads wait for a slow sink. A guess.
pub(super) const WAIT_FROM: usize = 256 << 10;

/// Bytes reserved for the last line of a recording of bounded length.
const LAST_LINE: usize = 160;

/// The progress of a recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RecordingState {
    /// No arena is open yet.
    #[default]
    Fresh,
    On,
    Over,
}

/// The waiting lines, and the known state.
#[derive(Debug, Default)]
pub(super) struct WaitingLines {
    state: RecordingState,
    /// The arena's name, once it is open.
    arena: Option<String>,
    /// The text that is waiting for the sink.
    waiting: String,
    /// `true` if only the hash is computed and no text is kept.
    is_bare: bool,
    /// The size limit of the recording.
    most: usize,
    written: usize,
    pub(super) hash: OperationHash,
    pub(super) operations: u64,
    numbers: Numbers,
    started: Moment,
    last: Duration,
    /// The moment at which memory became idle in the current operation. It is the time of the
    /// operation's line, so that memory becomes idle at the same moment in a replay.
    seen: Option<Moment>,
    /// The thread of the first operation, and `true` if there were others.
    thread: Option<usize>,
    many_threads: bool,
    pub(super) error: Option<RecordError>,
    /// `true` once the error was reported.
    is_said: bool,
}

impl WaitingLines {
    pub(super) fn new(is_bare: bool, most: usize) -> Self {
        Self { is_bare, most, ..Self::default() }
    }

    /// Begins the recording.
    ///
    /// # Errors
    /// The name of the arena for which the recording was begun before.
    pub(super) fn open(&mut self, header: &Header) -> Result<(), String> {
        if let Some(arena) = &self.arena {
            return Err(arena.clone());
        }
        self.arena = Some(header.name.clone());
        self.state = RecordingState::On;
        self.started = Moment::after_origin(header.started);
        if self.put(|text| write!(text, "{header}")) {
            self.hash.open(header);
        }
        Ok(())
    }

    pub(super) const fn arena(&self) -> Option<&String> {
        self.arena.as_ref()
    }

    /// Records the operation of an event, if it has one.
    pub(super) fn observe(&mut self, event: &SequencedEvent, thread: usize) {
        if self.state != RecordingState::On {
            return;
        }
        let SequencedEvent { at, event, .. } = event;
        if let ArenaEvent::Idle = event {
            self.seen = Some(*at);
        }
        let Some(operation) = events::operation(event, &mut self.numbers, self.started) else {
            return;
        };
        self.many_threads |= *self.thread.get_or_insert(thread) != thread;
        let at = self.seen.take().unwrap_or(*at);
        self.last = self.last.max(at - self.started);
        let entry = Entry { line: 0, at: self.last, operation };
        if self.put(|text| writeln!(text, "{entry}")) {
            self.hash.add(&entry.operation);
            self.operations += 1;
        }
    }

    /// Ends the recording with its last line.
    pub(super) fn end(&mut self, ended: Ended) {
        if self.state != RecordingState::On {
            return;
        }
        let closing = Closing {
            at: self.last,
            operations: self.operations,
            one_thread: !self.many_threads,
            ended,
            hash: self.hash,
        };
        self.over();
        if !self.is_bare {
            // Writing to a string cannot fail, and room for the line was reserved.
            let _ = writeln!(self.waiting, "{closing}");
        }
    }

    /// Stops the recording with this error.
    pub(super) fn stop(&mut self, error: RecordError) {
        self.over();
        self.waiting = String::new();
        self.error.get_or_insert(error);
    }

    fn over(&mut self) {
        self.state = RecordingState::Over;
        self.numbers = Numbers::default();
    }

    /// Writes lines if there is room for them. Returns `true` if there was.
    fn put(&mut self, write: impl FnOnce(&mut String) -> std::fmt::Result) -> bool {
        if self.is_bare {
            return true;
        }
        let before = self.waiting.len();
        // Writing to a string cannot fail.
        let _ = write(&mut self.waiting);
        let length = self.waiting.len() - before;
        debug_assert!(length <= LINE_MAX, "the line is longer than a reader accepts");
        if length > self.most.saturating_sub(self.written).saturating_sub(LAST_LINE) {
            self.waiting.truncate(before);
            let most = ByteSize::of(self.most);
            self.error.get_or_insert(RecordError::Full { most });
            if self.written > 0 {
                self.end(Ended::Full);
            } else {
                self.over();
            }
            return false;
        }
        self.written += length;
        if self.waiting.len() > WAITING_MAX {
            let (waiting, most) = (self.waiting.len(), WAITING_MAX);
            let [waiting, most] = [waiting, most].map(ByteSize::of);
            self.stop(RecordError::Overrun { waiting, most });
            return false;
        }
        true
    }

    /// Takes the waiting text, and leaves the empty buffer `spare` in its place.
    pub(super) const fn take(&mut self, spare: String) -> String {
        std::mem::replace(&mut self.waiting, spare)
    }

    /// Returns the number of waiting bytes; at least the threshold if no more will follow.
    pub(super) fn waiting(&self) -> usize {
        let is_last = self.is_over() && (self.error.is_some() && !self.is_said);
        if is_last { self.waiting.len().max(DUE_FROM) } else { self.waiting.len() }
    }

    /// Returns the reason that the recording stopped, once.
    pub(super) fn unsaid(&mut self) -> Option<RecordError> {
        let error = self.error.clone().filter(|_| !self.is_said);
        self.is_said |= error.is_some();
        error
    }

    /// Returns `true` if no more lines will be written.
    pub(super) fn is_over(&self) -> bool {
        self.state == RecordingState::Over
    }
}

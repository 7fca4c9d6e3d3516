//! Record and replay: what an arena did, as lines of text, and the same again on another arena.
//!
//! A [`Recorder`] is given to an arena when it is opened and writes its operations in the order in
//! which they were booked. A [`Log`] is such a recording, read and checked; [`Log::replay`] does
//! the same again and says whether the same came of it. `docs/RECORDING.md` has the format. It
//! records what was asked of the arena and where blocks went, never what is in them.
//!
//! Files: `operation` (values), `text` (written), `parse` and `check` (read), `hash`, `numbers`
//! (of blocks and lanes), `lines` (what waits), `recorder`, `hooks` (where the arena calls), `log`,
//! `replay`, `rmm` (the log of another allocator), `error`.
//!
//! Invariants: an arena is never disturbed by its recorder, but for the time that writing takes; a
//! recording that is read never panics, and nothing is allocated by a number that stands in it.

mod check;
mod error;
mod hash;
pub(super) mod hooks;
mod lines;
mod log;
mod numbers;
pub(super) mod operation;
mod parse;
mod recorder;
mod replay;
mod rmm;
mod text;

pub use error::{Found, LogError, LogFault, RecordError};
pub use hash::OperationHash;
pub use log::Log;
pub use operation::{
    After, Asked, BlockKind, Closed, Closing, Ended, Entry, Fallen, GivenUp, Header, Layout,
    Operation, Place, Resized, Sleepless, Why,
};
pub use recorder::Recorder;
pub use replay::{Replay, Replayed};

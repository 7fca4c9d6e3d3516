//! Record and replay: writes the operations of an arena as lines of text, and repeats them on
//! another arena.
//!
//! A [`Recorder`] is passed to an arena when it is opened and writes its operations in the order in
//! which they take effect. A [`Log`] is such a recording, read and checked; [`Log::replay`] repeats
//! it and compares the outcomes. `docs/RECORDING.md` describes the format. A recording holds the
//! requests and the places of blocks, never their contents.
//!
//! Files: `operation` (values), `text` (writing), `parse` and `check` (reading), `hash`, `numbers`
//! (of blocks and lanes), `lines` (pending output), `recorder`, `hooks` (calls from the arena),
//! `log`, `replay`, `rmm` (the log of another allocator), `error`.
//!
//! Invariants: a recorder never affects its arena, except for the time that writing takes; reading
//! a recording never panics, and no number in it determines the size of an allocation.

mod check;
mod error;
mod hash;
pub(crate) mod hooks;
mod lines;
mod log;
mod numbers;
pub(crate) mod operation;
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

//! Recordings: the operations of an arena as lines of text, in the order in which they take effect.
//!
//! A [`Recorder`] writes them, and a [`Log`] reads and checks them. [`replay`](crate::api::replay)
//! repeats them on another arena. `docs/RECORDING.md` describes the format.
//!
//! Files: `operation` (values), `format` (lines), `fields`, `names` and `words` (their parts),
//! `check` (reading), `hash`, `numbers` (of blocks and streams), `events` (the operations of the
//! arena's events), `lines` (pending output), `recorder`, `log`, `rmm` (the log of another
//! allocator), `error`.
//!
//! Invariants: a recorder never affects its arena, except for the time that writing takes; reading
//! a recording never panics, and no number in it determines the size of an allocation.

mod check;
mod error;
mod events;
mod fields;
mod format;
mod hash;
mod lines;
mod log;
mod names;
mod numbers;
mod operation;
mod recorder;
mod rmm;
mod words;

pub use error::{Found, LogError, LogFault, RecordError};
pub(crate) use format::VERSION;
pub use hash::OperationHash;
pub use log::Log;
pub use operation::{
    After, Asked, BlockKind, Closed, Closing, Ended, Entry, Fallen, GivenUp, Header, Layout,
    Operation, Place, Resized, Sleepless, Why,
};
pub use recorder::Recorder;
pub(crate) use recorder::Recording;

//! The flight recorder: the last five minutes of a `Memory` in a file that survives SIGKILL, and
//! the reason why the last run ended.
//!
//! `builder` opens it, `running` ends it. `format` has the bytes, `last_exit` the conclusion, both
//! pure; `file` does the input and output, and `recorder` is the thread.
//!
//! Invariants: a recorder that cannot be started is a diagnostic, never an error of the start; the
//! control loop never waits for it.

mod file;
#[cfg(all(test, not(lowtide_loom)))]
mod file_tests;
mod format;
mod last_exit;
mod recorder;
#[cfg(all(test, not(lowtide_loom)))]
mod tests;

pub(super) use file::FlightFile;
pub(super) use format::RunEnd;
pub use format::{FlightEvent, FlightResource, FlightSample};
pub use last_exit::{ExitCause, LastExit};
pub(super) use recorder::{Flight, Recorder};

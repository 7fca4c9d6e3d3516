//! The promises of the proxy example, each as a test: what passes through, what streams, what is
//! refused, what the model does, and how the program starts and ends.
//!
//! Most run the proxy inside this process, against raw sockets on both sides; what needs a process
//! of its own runs this binary again as the program (see `process`). Nothing sleeps: every wait is
//! for a condition and has a deadline.

mod embedding;
mod hostile;
mod lies;
mod limits;
mod passing;
mod process;
mod reserved;
mod streams;
mod support;
mod wire;

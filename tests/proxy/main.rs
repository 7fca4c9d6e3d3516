//! The promises of the proxy example, each as a test: what passes through, what streams, what is
//! refused, what the model does, and how the program starts and ends.
//!
//! Most run the proxy inside this process, against raw sockets on both sides; what needs a process
//! of its own runs this binary again as the program (see `process`). Nothing sleeps: every wait is
//! for a condition and has a deadline.

#[path = "../../examples/proxy/app.rs"]
#[allow(dead_code, reason = "other programs that start it read more of it")]
mod app;
#[path = "../../examples/proxy/cli.rs"]
mod cli;
#[path = "../../examples/proxy/embed.rs"]
mod embed;
#[path = "../../examples/proxy/forward.rs"]
mod forward;
#[path = "../../examples/proxy/model.rs"]
mod model;
#[path = "../../examples/proxy/upstream.rs"]
mod upstream;

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

#[global_allocator]
static HEAP: lowtide::host::Heap = lowtide::host::Heap;

lowtide::heap_profile!(balanced);

//! Memory signals of the kernel: the use of this process and its cgroup, and the limit.
//!
//! Descriptors are opened once and read with `pread` into buffers on the stack. A sample costs some
//! 15 us (one read of `statm`, of `memory.stat` and of the usage, and of the limits of each level
//! of the cgroup) and allocates nothing. [`SignalTracker`] takes most samples with one or two
//! reads. It decides nothing and does not subtract purgeable memory, which only the heap knows.
//!
//! The limit is the minimum over a list of bounds ([`Signals::bounds`]), each with what is compared
//! with it. The cgroup and its ancestors count what their other members hold as well, because the
//! kernel kills for their bytes. The machine's memory, the commit limit under strict overcommit,
//! and limits of the process on addresses or data (`ulimit -v`, `ulimit -d`) are bounds too: beyond
//! the latter an allocation fails, which aborts a Rust program. On systems other than Linux there
//! is nothing to read, and [`Signals::missing`] reports that. Another cgroup and other limits of
//! the process are noticed about once a second ([`Signals::look`]). The number of CPUs that the
//! process can keep busy is read once ([`Cpus`]).
//!
//! Invariant: `limit = physical + min over bounds of (limit of the bound - what it is compared
//! with)`; `physical = max(held, anonymous resident)` in a cgroup with a limit below the machine's
//! memory, `anonymous + shared resident` elsewhere.

mod cgroup;
mod events;
mod file;
mod limit;
mod machine;
mod mappings;
mod signals;

pub use events::{EventCounts, MemoryEvents, Psi};
pub use file::SignalError;
pub use limit::{Limit, LimitBound, LimitSource};
pub use machine::Cpus;
pub use mappings::Mappings;
pub use signals::{Resident, Signal, SignalTracker, Signals};

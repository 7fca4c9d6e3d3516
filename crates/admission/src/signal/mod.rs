//! Memory signals of the kernel: the use of this process and its cgroup, and the limit.
//!
//! Descriptors are opened once and read with `pread` into buffers on the stack. A sample costs some
//! 15 us (one read of `statm`, of `memory.stat` and of the usage, and of the limits of each level
//! of the cgroup) and allocates nothing. [`SignalTracker`] takes most samples with one or two
//! reads. It decides nothing and does not subtract purgeable memory, which only the heap knows.
//!
//! The limit is a minimum over the cgroup's ancestors, less the memory held by other members of
//! that ancestor, because the kernel kills for their bytes as well. Without a cgroup limit it is
//! the machine's memory. A limit of the process on addresses or data (`ulimit -v`, `ulimit -d`)
//! lowers it to the possible size of the resident set: beyond that an allocation fails, which
//! aborts a Rust program. On systems other than Linux there is nothing to read, and
//! [`Signals::missing`] reports that. The number of CPUs that the process can keep busy is read
//! once ([`Cpus`]).
//!
//! Invariant: `physical = max(held, anonymous resident)` in a cgroup with a limit, `rss` elsewhere;
//! `held = max(usage - inactive_file - active_file, anon + shmem)`.

mod cgroup;
mod cpu;
mod error;
mod events;
mod file;
mod limit;
mod mappings;
mod psi;
mod sample;
mod signals;
mod statm;
mod tracker;

pub use cpu::Cpus;
pub use error::SignalError;
pub use events::{EventCounts, MemoryEvents};
pub use limit::{Limit, LimitSource};
pub use mappings::Mappings;
pub use psi::{Psi, Stall};
pub use sample::{Resident, Signal};
pub use signals::Signals;
pub use tracker::SignalTracker;

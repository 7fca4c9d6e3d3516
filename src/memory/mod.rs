//! The running memory manager of a process.
//!
//! [`Memory`] builds heap settings, device arenas, admission and resources from one [`Config`],
//! connects policy to mechanism, owns the threads (`lowtide-control` decides, `lowtide-worker`
//! acts, and if they are on, `lowtide-flight` records and `lowtide-profiler` takes heap profiles),
//! and stops them. It contains no policy and no mechanism of its own. Heap, arenas and an
//! [`Admission`] with a fixed limit also work without it; but then nothing is timed or published.
//!
//! It runs until [`Memory::shutdown_blocking`], or until the last handle is dropped. Handles are
//! [`Memory`] and every [`Admission`] obtained from one, which every layer holds. The threads and
//! resources hold no such handle, so they do not keep it running.
//!
//! Invariants: at most one `Memory` runs in a process; `threads = 2` while it runs, one more with a
//! flight recorder and one more with an active heap profiler, and 0 after
//! [`Memory::shutdown_blocking`]; dropping it never blocks.
//!
//! [`Config`]: crate::config::Config
//! [`Admission`]: crate::admission::Admission

mod actions;
mod admin;
mod admin_worker;
mod breakdown;
mod builder;
#[cfg(feature = "device")]
mod devices;
mod error;
mod events;
mod fit;
mod flight;
mod heap;
mod manager;
mod own_arena;
mod profiles;
mod report;
mod resources;
mod running;
#[cfg(feature = "tokio")]
pub(crate) mod runtime;
mod sensor;
mod shared;
mod slow_value;
mod snapshot;
mod trend;
mod verdict;

pub use admin::{AdminCommand, AdminTask, AdminTaskState};
pub use admin_worker::MemoryAdmin;
pub use breakdown::{Breakdown, MemoryPart, PartKind};
pub use builder::Builder;
#[cfg(feature = "cuda")]
pub use devices::DeviceProcesses;
#[cfg(feature = "device")]
pub use devices::{
    ArenaReport, ArenaUse, DeviceSelector, DeviceSnapshot, DeviceStatus, DevicesSnapshot,
    MemoryDevices, Run, Shrunk, Slot, SlotSnapshot,
};
pub use error::{Diagnostic, MemoryError, Shutdown, StartError};
pub use events::Event;
pub use flight::{ExitCause, FlightResource, FlightSample, LastExit};
pub use heap::on_thread_start;
pub use manager::{Memory, WeakMemory};
#[cfg(feature = "service")]
pub(crate) use manager::{add_request_event, is_ending, published_state};
pub use report::{MemoryHeap, MemoryReport};
pub use resources::ResourceBuilder;
pub use shared::Purged;
#[cfg(all(test, target_os = "linux", not(lowtide_loom)))]
pub(crate) use shared::holds_in_child;
pub use snapshot::{BudgetSnapshot, MemorySnapshot};
pub use trend::{HistorySample, LeakReport, LeakSuspect};
pub use verdict::Verdict;

//! The simulation: a model of the CUDA driver, for tests only.
//!
//! It is an adversary that keeps CUDA's contract to the letter and promises nothing beyond it.
//! Work is queued and done late, an unmap waits for nothing, and what is unspecified is made so.
//! A program that is right by luck on a real device is wrong here, each time: in [`Order::Lazy`]
//! nothing is done until something waits for it, so that a forgotten wait is always seen.
//!
//! It is never a product: it is not chosen by any setting, it is behind the feature `simulation`,
//! and its memory is a model's. The host cannot reach that memory; kernels of the simulation write
//! and check it ([`SimDriver::fill`], [`SimDriver::check`]).
//!
//! What it does not model: graphs of more than one stream, peers, IPC, real speed. Work takes no
//! time of its own, copies excepted. Where the manual leaves open what happens, the stricter
//! reading is taken. Below the driver, [`raw`] has the calls of cuda.h one by one.
//!
//! ```
//! use lowtide::ByteSize;
//! use lowtide::device::driver::Driver as _;
//! use lowtide::device::driver::sim::{Outcome, Pattern, SimDriver, SimOptions};
//!
//! let sim = SimDriver::new(SimOptions::default());
//! let size = ByteSize::mib(2);
//! let at = sim.reserve(size)?;
//! sim.commit(at, size)?;
//! let (writer, reader) = (sim.stream_create()?, sim.stream_create()?);
//! sim.fill(writer, at, size, Pattern::new(7))?;
//! let written = sim.event_create()?;
//! sim.event_record(written, writer)?;
//! sim.stream_wait_event(reader, written)?; // without this the check finds something else
//! let found = sim.check(reader, at, size, Pattern::new(7))?;
//! sim.stream_synchronize(reader)?;
//! assert_eq!(sim.outcome(found), Outcome::Held);
//! sim.decommit(at, size)?;
//! sim.assert_no_faults();
//! # Ok::<(), lowtide::device::driver::DriverError>(())
//! ```
//!
//! Files, from the ground up: `sparse` (bytes), `slots` (numbers), `call` (calls and costs),
//! `options`, `memory` (address space, handles), `work` (what work does), `queue` (what comes
//! before what), `fault` (breaches, planned failures), `model` (the rules), then the calls by part:
//! `mapping`, `streams`, `graph`, `host`, `task`, `pools`, `segments`; `kernels`, `control` and
//! `hooks` for tests, `contract` for the arena, `raw` for a library with CUDA's names.
//!
//! Invariant: the same options and the same calls, in one thread, give the same log.

mod call;
mod contract;
mod control;
mod fault;
mod graph;
mod hooks;
mod host;
mod kernels;
mod mapping;
mod memory;
mod model;
mod options;
mod pools;
mod queue;
pub mod raw;
mod segments;
mod slots;
mod sparse;
mod streams;
mod task;
mod work;

use std::fmt;

pub use call::{Call, Cost, DriverCosts};
pub use control::Leaks;
pub use fault::{Fault, HandleKind, SimError, WorkKind};
pub use graph::{CaptureMode, GraphHandle};
pub use model::LogEntry;
pub use options::{Handles, Order, SimOptions};
pub use work::{Outcome, Pattern, Ticket};

use super::Capabilities;
use crate::bytes::ByteSize;
use crate::clock::ManualClock;
use crate::sync::{Mutex, MutexGuard, lock};
use hooks::Hooks;
use model::Model;

/// A simulated CUDA device with a driver of virtual memory. For tests only.
///
/// One lock guards all of it, so calls of several threads are done one after the other; the log is
/// then the same again only if the threads' calls come in the same order again.
///
/// What the [`Driver`](super::Driver) asks a key for, the type itself offers without one: no
/// reference leads into the memory of the model, so that nobody's slice is taken away. Host memory
/// of `host_alloc` is the exception, and keeps its key.
pub struct SimDriver {
    model: Mutex<Model>,
    hooks: Hooks,
    capabilities: Capabilities,
    clock: ManualClock,
    /// What the context takes of the device.
    floor: ByteSize,
}

impl SimDriver {
    /// A device with nothing reserved and nothing queued.
    ///
    /// # Panics
    /// If the options name no possible device; see the fields of [`SimOptions`].
    #[must_use]
    pub fn new(options: SimOptions) -> Self {
        let capabilities = Capabilities {
            virtual_memory: options.virtual_memory,
            host_access: false,
            host_backed: false,
            unified: options.unified,
            same_address_wake: options.virtual_memory,
            remap: options.virtual_memory && options.remap,
            asynchronous: true,
            page_locked: options.page_locked,
            granularity: options.unit(),
        };
        let clock = options.clock.clone();
        let floor = options.context_overhead.min(options.capacity);
        Self {
            model: Mutex::new(Model::new(options)),
            hooks: Hooks::default(),
            capabilities,
            clock,
            floor,
        }
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        lock(&self.model)
    }
}

impl fmt::Debug for SimDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let model = self.model();
        f.debug_struct("SimDriver")
            .field("order", &model.options.order)
            .field("committed", &model.memory.committed())
            .field("unfinished", &model.queues.unfinished())
            .field("faults", &model.faults.total)
            .field("lost", &model.lost)
            .finish_non_exhaustive()
    }
}

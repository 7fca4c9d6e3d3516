//! The simulation: a model of the CUDA driver, for tests only.
//!
//! It is an adversary that keeps CUDA's contract to the letter and promises nothing beyond it. Work
//! is queued and done late, an unmap does not wait, and unspecified contents are scrambled. A
//! program that works only by luck on a real device fails here every time: with [`Order::Lazy`] no
//! work is done until a call waits for it, so a forgotten wait always shows.
//!
//! No setting selects it in production: this package is not published, and its memory is a model.
//! The host cannot access that memory; kernels of the simulation write and check it
//! ([`SimDriver::fill`], [`SimDriver::check`]).
//!
//! It does not model graphs of more than one stream, peer access, IPC, or real speed. Work takes no
//! time, except copies. If the manual leaves a behaviour open, the stricter reading applies. Below
//! the driver, [`raw`] has the single calls of cuda.h.
//!
//! ```
//! use lowtide_core::ByteSize;
//! use lowtide_gpu_driver::Driver as _;
//! use lowtide_cuda_sim::{Outcome, Pattern, SimDriver, SimOptions};
//!
//! let sim = SimDriver::new(SimOptions::default());
//! let size = ByteSize::mib(2);
//! let at = sim.reserve(size)?;
//! sim.commit(at, size, size)?;
//! let (writer, reader) = (sim.stream_create()?, sim.stream_create()?);
//! sim.fill(writer, at, size, Pattern::new(7))?;
//! let written = sim.event_create()?;
//! sim.event_record(written, writer)?;
//! sim.stream_wait_event(reader, written)?; // without this the check finds something else
//! let found = sim.check(reader, at, size, Pattern::new(7))?;
//! sim.stream_synchronize(reader)?;
//! assert_eq!(sim.outcome(found), Outcome::Held);
//! sim.decommit(at, size, size)?;
//! sim.assert_no_faults();
//! # Ok::<(), lowtide_gpu_driver::DriverError>(())
//! ```
//!
//! Files, from the ground up: `sparse` (bytes), `slots` (numbers), `call` (calls and costs),
//! `options`, `memory` (address space, handles), `work` (kinds of work), `queue` (dependencies),
//! `fault` (breaches, planned failures), `model` (the rules), then the calls by part: `mapping`,
//! `streams`, `graph`, `host`, `task`, `pools`, `segments`; `kernels`, `control` and `hooks` for
//! tests, `contract` for the arena, `raw` for a library with CUDA's names.
//!
//! Invariant: the same options and the same calls, in one thread, produce the same log.

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
#[cfg(not(lowtide_loom))]
pub mod trial;
mod work;

use std::fmt;

pub use call::{Call, Cost, DriverCosts};
pub use control::Leaks;
pub use fault::{Fault, HandleKind, Planned, SimError, WorkKind};
pub use graph::{CaptureMode, GraphHandle};
pub use memory::Range;
pub use options::{Order, SimOptions};
pub use work::{Outcome, Pattern, Ticket};

use hooks::Hooks;
use lowtide_core::sync::{Mutex, MutexGuard, lock};
use lowtide_gpu_driver::Capabilities;
use lowtide_gpu_driver::staging::Staging;
use model::Model;

/// A simulated CUDA device with a virtual memory driver. For tests only.
///
/// One lock guards the whole device, so calls of several threads run one after the other; the log
/// is the same again only if the threads' calls come in the same order.
///
/// Calls that are unsafe in [`Driver`](lowtide_gpu_driver::Driver) are safe methods of the type
/// itself: no reference points into the memory of the model, so no slice can be invalidated. Host
/// memory of `host_alloc` is the exception.
pub struct SimDriver {
    model: Mutex<Model>,
    hooks: Hooks,
    capabilities: Capabilities,
    staging: Staging,
}

impl SimDriver {
    /// Creates a device with no reservations and no queued work.
    ///
    /// # Panics
    /// If the options are invalid; see the fields of [`SimOptions`].
    #[must_use]
    pub fn new(options: SimOptions) -> Self {
        let capabilities = Capabilities {
            virtual_memory: options.virtual_memory,
            host_access: false,
            host_backed: false,
            unified: options.unified,
            remap: options.virtual_memory && options.remap,
            asynchronous: true,
            page_locked: options.page_locked,
            handles: options.virtual_memory,
            granularity: options.handle_min,
        };
        let (model, hooks) = (Mutex::new(Model::new(options)), Hooks::default());
        Self { model, hooks, capabilities, staging: Staging::default() }
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
            .field("faults", &model.faults.len())
            .field("lost", &model.lost)
            .finish_non_exhaustive()
    }
}

/// Returns how many of so many random cases a test runs: a tenth, or all of them in
/// `.ci/run --soak`, which sets `lowtide_soak`.
#[must_use]
pub const fn sample(all: u64) -> u64 {
    if cfg!(lowtide_soak) { all } else { all.div_ceil(10) }
}

#[cfg(all(test, not(lowtide_loom)))]
#[expect(unsafe_code, reason = "the calls of the trait that take memory away are unsafe")]
mod tests {
    use lowtide_core::bytes::ByteSize;
    use lowtide_gpu_driver::{DeviceAddress, Driver, DriverError, HostMemory, HostStore};

    use super::*;

    /// The crate asks by the trait, tests by the type: both must be the same call.
    #[test]
    fn the_calls_of_the_trait_are_the_safe_methods() {
        let sim = SimDriver::new(SimOptions::default());
        let driver: &dyn Driver = &sim;
        let size = ByteSize::mib(4);
        macro_rules! call {
            ($call:expr) => {{
                // SAFETY: the model looks up addresses and handles; the host memory has no use.
                unsafe { $call }
            }};
        }
        let round = || -> Result<(), DriverError> {
            let at = driver.reserve(size)?;
            let part = ByteSize::mib(2);
            call!(driver.commit(at, size, part))?;
            let (stream, event) = (driver.stream_create()?, driver.event_create()?);
            let store = driver.host_store_create(size)?;
            let span = HostStore { at: store.at + part.get(), size: part };
            let second = DeviceAddress::new(at.get() + part.get());
            call!(driver.copy(at, second, part))?;
            call!(driver.copy_async(at, second, part, stream))?;
            call!(driver.offload(at, span, stream))?;
            call!(driver.restore(span, second, stream))?;
            call!(driver.event_record(event, stream))?;
            call!(driver.stream_wait_event(stream, event))?;
            assert!(!call!(driver.event_query(event))?);
            assert!(!call!(driver.is_capturing(stream))?);
            call!(driver.event_synchronize(event))?;
            call!(driver.stream_synchronize(stream))?;
            driver.synchronize()?;
            call!(driver.host_store_destroy(store))?;
            call!(driver.event_destroy(event))?;
            call!(driver.stream_destroy(stream))?;
            call!(driver.decommit(second, part, part))?;
            call!(driver.remap(at, second, part, part))?;
            call!(driver.decommit(second, part, part))?;
            call!(driver.unreserve(at, size))?;
            let host = driver.host_alloc(size, HostMemory::PageLocked)?;
            call!(driver.host_free(host, size, HostMemory::PageLocked))
        };
        assert_eq!(round(), Ok(()));
        assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
        assert_eq!(Call::ALL.iter().filter(|call| sim.calls(**call) > 0).count(), 24);
        sim.assert_no_faults();
    }
}

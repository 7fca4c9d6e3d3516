//! The handle of a memory manager.
//!
//! It asks the state that it shares with the two threads (`shared`), and ends these. What it does
//! with device arenas, resources, admin tasks and a runtime is in the modules of those.

use std::sync::{Arc, Weak};
use std::time::Duration;

#[cfg(feature = "service")]
use crate::clock::Moment;
use crate::config::Config;
#[cfg(feature = "service")]
use lowtide_admission::PressureState;
use lowtide_admission::{Admission, Budget, Level};

use super::error::{MemoryError, Shutdown};
use super::flight::RunEnd;
use super::running::RunningMemory;
use super::shared::Shared;
use super::snapshot::MemorySnapshot;

/// The memory manager of a service. A cheap handle; all clones refer to the same manager.
///
/// It runs while a handle exists: this one, a clone, or a handle from [`Memory::admission`], which
/// every layer holds. Dropping the last handle without [`Memory::shutdown_blocking`] ends the
/// threads, with a warning if requests run. It waits only for the flight recorder's thread, if
/// there is one, for up to 100 ms.
///
/// ```
/// use lowtide::{ByteSize, Memory};
/// use lowtide::admission::Cost;
///
/// let memory = Memory::builder().memory_limit(ByteSize::gib(1)).start()?;
/// let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(3)))?;
/// // ... the request's work ...
/// drop(permit);
/// println!("{}", memory.shutdown_blocking(std::time::Duration::from_secs(5)));
/// # Ok::<(), lowtide::BoxError>(())
/// ```
///
/// A handle that is dropped immediately manages nothing, so the compiler warns:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// lowtide::Memory::builder().start()?;
/// # Ok::<(), lowtide::BoxError>(())
/// ```
#[derive(Clone)]
#[must_use = "dropping the last handle ends the manager's threads"]
pub struct Memory(pub(super) Arc<MemoryInner>);

/// A handle to a [`Memory`] that does not keep it running.
#[derive(Clone, Debug)]
pub struct WeakMemory {
    shared: Weak<Shared>,
    running: Weak<RunningMemory>,
}

impl WeakMemory {
    /// Returns the `Memory` if another handle keeps it running. Allocates a few bytes.
    pub fn upgrade(&self) -> Option<Memory> {
        Some(Memory::of(self.shared.upgrade()?, self.running.upgrade()?))
    }
}

pub(super) struct MemoryInner {
    pub(super) shared: Arc<Shared>,
    running: Arc<RunningMemory>,
    /// Keeps `running` alive.
    admission: Admission,
}

/// Returns the `Memory` to which the admission belongs.
#[cfg(feature = "service")]
fn running(admission: &Admission) -> Option<&RunningMemory> {
    admission.kept()?.downcast_ref()
}

/// Adds an event about a running request, if the admission belongs to a `Memory`.
#[cfg(feature = "service")]
pub(crate) fn add_request_event(admission: &Admission, at: Duration, route: &str, text: String) {
    if let Some(running) = running(admission)
        && running.claim.birth.is_here()
    {
        running.events.add(at, "cancel", route, text);
    }
}

/// Returns what the control loop publishes, if the admission belongs to a `Memory`.
#[cfg(feature = "service")]
pub(crate) fn published_state(admission: &Admission) -> Option<Arc<PressureState>> {
    running(admission).map(|running| Arc::clone(&running.state))
}

/// Returns `true` if the admission belongs to a `Memory` that is about to end.
#[cfg(feature = "service")]
pub(crate) fn is_ending(admission: &Admission) -> bool {
    running(admission).is_some_and(|running| running.flight.is_ending())
}

impl Memory {
    pub(super) fn of(shared: Arc<Shared>, running: Arc<RunningMemory>) -> Self {
        let admission = shared.admission.keeping(running.clone());
        Self(Arc::new(MemoryInner { shared, running, admission }))
    }

    /// Returns a handle that does not keep the manager running, for loaders, clean-ups and hooks.
    /// If one of those holds a `Memory` or an [`Admission`] instead, the manager runs until
    /// [`Memory::shutdown_blocking`].
    #[must_use]
    pub fn downgrade(&self) -> WeakMemory {
        let MemoryInner { shared, running, .. } = &*self.0;
        WeakMemory { shared: Arc::downgrade(shared), running: Arc::downgrade(running) }
    }

    /// Returns the configuration in force, each value with its source.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.shared.config
    }

    /// Returns a handle to admission, on which requests reserve memory. It also keeps this `Memory`
    /// running: while a clone exists, for example in a layer, the threads run and keep the account
    /// current. Admission is closed after [`Memory::shutdown_blocking`].
    #[must_use]
    pub fn admission(&self) -> &Admission {
        &self.0.admission
    }

    /// Returns the pressure on host memory.
    #[must_use]
    pub fn level(&self) -> Level {
        self.0.shared.state.level(Budget::Host)
    }

    /// Returns `true` if the process should be restarted because memory that no request owns leaves
    /// no room for requests, by the [`exhaustion_policy`](super::Builder::exhaustion_policy).
    /// `/healthz` then answers 503. For liveness probes of your own; one atomic read.
    #[must_use]
    pub fn needs_restart(&self) -> bool {
        self.0.shared.state.needs_restart()
    }

    /// Returns all figures at one instant. Costs a refresh of jemalloc's statistics and a few reads
    /// of `/proc`: some tens of microseconds. In a forked child it contains no heap, arenas,
    /// resources or diagnostics.
    #[must_use]
    pub fn snapshot(&self) -> MemorySnapshot {
        self.0.shared.snapshot()
    }

    #[cfg(feature = "service")]
    pub(crate) fn clock(&self) -> Arc<dyn crate::clock::Clock> {
        Arc::clone(&self.0.shared.clock)
    }

    /// Returns a moment on the wall clock, since the Unix epoch.
    #[cfg(feature = "service")]
    pub(crate) fn on_wall(&self, moment: Moment) -> Duration {
        let clock = &self.0.shared.clock;
        clock.since_epoch().saturating_sub(clock.now() - moment)
    }

    /// Makes `/readyz` answer 503 from now on, while the service still serves. Call it between a
    /// signal to shut down and the close of the listener, so that load balancers choose another
    /// instance. Admission is not changed.
    pub fn set_ending(&self) {
        self.0.shared.flight.set_ending();
    }

    /// Returns `true` after [`Memory::set_ending`].
    #[cfg(feature = "service")]
    pub(crate) fn is_ending(&self) -> bool {
        self.0.shared.flight.is_ending()
    }

    /// Returns `true` if memory is exhausted and single requests are still admitted.
    #[cfg(feature = "service")]
    pub(crate) fn serves_one(&self) -> bool {
        self.0.shared.state.serves_one()
    }

    /// Shuts the manager down: admits nothing more, waits until resources are unused, unloads them,
    /// and joins the threads. Blocks until the deadline at most, plus one second if a job is
    /// running, and one second for each clean-up that is. Do not call it on a thread of an async
    /// runtime. A second call has nothing left to do; a concurrent call waits as well. The next
    /// `Memory` can start when both threads have ended; if called on one of them (from a hook), it
    /// waits only for the other.
    ///
    /// It closes no arena, and idle memory is not released any more. On a device, call
    /// `DeviceArena::close` afterwards, when the last buffer is dropped: it waits for the device,
    /// releases all memory and calls the release functions of imported memory. Dropping the last
    /// handle cannot do this while device work may be running.
    #[must_use = "the report lists outstanding work"]
    pub fn shutdown_blocking(&self, deadline: Duration) -> Shutdown {
        let shared = &self.0.shared;
        if !shared.birth.is_here() {
            return Shutdown { forked: true, ..Shutdown::default() };
        }
        shared.admission.close();
        let _ = shared.fail_fit("shutdown", MemoryError::Ended.to_string());
        #[cfg(feature = "device")]
        shared.devices.budgets().for_each(Admission::close);
        let end = shared.clock.now() + deadline;
        let mut report = Shutdown { exhausted: shared.ends_exhausted(), ..Shutdown::default() };
        let open = shared.resources.close(&*shared.clock, end);
        report.resources.extend(open.iter().map(ToString::to_string));
        shared.flight.end(if report.exhausted { RunEnd::Exhausted } else { RunEnd::ShutDown });
        self.0.running.end();
        self.0.running.join(&*shared.clock, end, &mut report);
        report.requests = shared.admission.stats().held();
        #[cfg(feature = "device")]
        shared.end_devices(&mut report);
        report
    }
}

lowtide_core::debug_as!(Memory, |memory| shared: memory.0.shared);

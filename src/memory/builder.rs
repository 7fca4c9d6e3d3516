//! Starts a `Memory`: from settings to two running threads. A failed start is rolled back.
//!
//! Invariant: a failed start leaves no thread, no claim and no changed setting except jemalloc's
//! decay times.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Bell, Clock, SystemClock};
use crate::config::{
    AdmissionMode, Config, ExhaustionPolicy, Profile, Settings, Source, env, setters,
};
#[cfg(feature = "device")]
use crate::config::{DeviceBackend, DeviceChoice};
use crate::decay::DecayTime;
#[cfg(feature = "device")]
use crate::device::{Contents, driver::Driver};
use crate::fork::Birth;
use crate::metrics::MetricsTier;
use crate::sync::{Mutex, lock};
use lowtide_admission::{
    self as admission, Admission, Budget, LimitSource, Maintenance, Resources, Signal, SignalError,
    SignalTracker, Signals, Trigger, Worker, run_control, run_worker,
};
use lowtide_heap as heap;

use super::actions::{Hook, MaintenanceExecutor};
use super::admin::AdminTasks;
#[cfg(feature = "device")]
use super::devices::{self, Devices, GivenDrivers};
use super::error::{Diagnostic, StartError};
use super::events::shown;
use super::fit::{LIMIT_MIN, held_at_start, held_by_process, least_limit};
use super::flight::{Flight, FlightFile, FlightRecorder, LastExit};
use super::heap::{SettledHeap, bound_arenas, on_thread_start, settle_heap};
use super::manager::{Memory, WeakMemory};
use super::own_arena::Loads;
use super::profiles::{self, Captures};
use super::running::{FLIGHT, ProcessClaim, RunningMemory, Started, THREADS, ThreadEndGuard};
use super::sensor::{MemorySensor, SensorState};
use super::shared::{Purges, Shared};
use super::slow_value::SlowValue;
use super::trend::MetricsHistory;

/// The stack size of the two threads. Both call little and touch a few KiB of it.
const STACK: ByteSize = ByteSize::kib(256);

/// The stack size of the profiler's thread, which reads symbols.
const PROFILER_STACK: ByteSize = ByteSize::kib(512);

/// The limit of a detached `Memory` that sets none.
const DETACHED_LIMIT: ByteSize = ByteSize::gib(1);

/// A builder for a [`Memory`].
///
/// Environment variables override the values set here, and those override the profile. Defaults
/// that differ by profile are listed for low-memory, balanced and throughput, in this order; see
/// [`Profile`].
#[derive(Default)]
#[must_use]
pub struct Builder {
    pub(super) code: Settings,
    ignores_environment: bool,
    is_detached: bool,
    clock: Option<Arc<dyn Clock>>,
    hook: Option<Hook>,
    recall_hook: Option<Hook>,
    stack: Option<ByteSize>,
    signals: Option<Signals>,
    #[cfg(feature = "device")]
    pub(super) drivers: GivenDrivers,
}

impl Builder {
    setters!();

    /// Ignores the `LOWTIDE_*` variables of the environment, which otherwise override settings made
    /// in code. For tests and tools with fixed settings.
    pub const fn without_environment(mut self) -> Self {
        self.ignores_environment = true;
        self
    }

    /// Detaches this `Memory` from the process, for tests of a service: any number can run in one
    /// process, next to each other and to one that is attached, each with its own limit and clock.
    ///
    /// It measures no memory of the process, so a request is admitted if the reservations fit below
    /// [`Builder::memory_limit`] (default: 1 GiB) times [`Builder::ceiling`], with a correction
    /// factor of 1 unless set. It reads no environment, changes no setting of jemalloc, and
    /// publishes no metrics. Layers, resources and endpoints work as usual.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use lowtide::admission::Cost;
    /// use lowtide::clock::ManualClock;
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let limit = ByteSize::mib(100);
    /// let clock = Arc::new(ManualClock::new()); // time stands still unless the test advances it
    /// let memory = || Memory::builder().detached().memory_limit(limit).clock(clock.clone());
    /// let (one, other) = (memory().start()?, memory().start()?);
    /// let held = one.admission().try_admit(Cost::host(ByteSize::mib(60)))?; // of 80 MiB
    /// assert!(one.admission().try_admit(Cost::host(ByteSize::mib(30))).is_err());
    /// assert!(other.admission().try_admit(Cost::host(ByteSize::mib(30))).is_ok());
    /// # drop(held);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    pub fn detached(mut self) -> Self {
        (self.is_detached, self.ignores_environment) = (true, true);
        self.code.memory_limit.get_or_insert(Some(DETACHED_LIMIT));
        self.code.correction_factor.get_or_insert(1.0);
        self
    }

    /// Sets the clock. Default: the machine's clock.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Installs a Prometheus recorder for this process, with the buckets of lowtide's histograms,
    /// and does its upkeep on the worker. `Endpoints` then answers `/metrics`, and
    /// [`metrics::prometheus::render`](crate::metrics::prometheus::render) returns the text. The
    /// recorder stays installed when this `Memory` ends, and serves the next one.
    ///
    /// # Errors
    /// [`StartError::Recorder`] if another recorder is installed. To use one of your own, set
    /// [`Builder::after_publish`] and `Endpoints::with_metrics`.
    #[cfg(feature = "prometheus")]
    pub fn prometheus(self) -> Result<Self, StartError> {
        let installed = crate::metrics::prometheus::install();
        installed.map_err(|error| StartError::Recorder { error: error.to_string() })?;
        Ok(self)
    }

    /// Sets a hook that the worker calls after it published metrics, at most once in five seconds.
    /// An exporter's upkeep belongs here.
    pub fn after_publish(mut self, hook: impl FnMut() + Send + 'static) -> Self {
        self.hook = Some(Box::new(hook));
        self
    }

    /// Sets a hook that the worker calls before it purges the heap, after it has requested a flush
    /// of the caches of cooperating threads ([`heap::request_tcache_flush`]). Use it to wake parked
    /// threads, which cannot flush while parked. It must not wait for them.
    ///
    /// ```
    /// # async fn start() -> Result<(), lowtide::BoxError> {
    /// let runtime = tokio::runtime::Handle::current();
    /// let memory = lowtide::Memory::builder().after_tcache_flush_request(move || {
    ///     // An empty task wakes a worker, which calls `on_thread_park` when it parks.
    ///     for _ in 0..runtime.metrics().num_workers() {
    ///         runtime.spawn(async {});
    ///     }
    /// });
    /// # memory.start()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn after_tcache_flush_request(mut self, hook: impl FnMut() + Send + 'static) -> Self {
        self.recall_hook = Some(Box::new(hook));
        self
    }

    /// Replaces the signals of this process, for tests.
    #[doc(hidden)]
    pub fn signals(mut self, signals: Signals) -> Self {
        self.signals = Some(signals);
        self
    }

    /// Sets the stack size of the threads, for tests.
    #[doc(hidden)]
    pub fn stack(mut self, size: ByteSize) -> Self {
        self.stack = Some(size);
        self
    }

    /// Starts the memory manager. Takes a few milliseconds at most. Reads the `LOWTIDE_*` variables
    /// of the environment, which override settings made in code; a variable with an empty value
    /// counts as unset.
    ///
    /// # Errors
    /// [`StartError`] if a variable is unknown or invalid, a `Memory` is already running, settings
    /// are invalid, the memory limit is below the memory in use, nothing can be spilled to the
    /// configured folder, `cuda` is configured without a usable device, or a thread cannot be
    /// started.
    pub fn start(self) -> Result<Memory, StartError> {
        let environment = if self.ignores_environment { Settings::default() } else { env::read()? };
        let config = Config::resolve(&self.code, &environment)?;
        let claim = if self.is_detached { ProcessClaim::new(false) } else { ProcessClaim::take()? };
        let stack = self.stack.unwrap_or(STACK);
        let parts = self.assemble(config, claim)?;
        let memory = launch(parts, stack)?;
        report(&memory);
        Ok(memory)
    }

    /// Starts a detached memory manager without threads, for tests. Each call of the returned
    /// function takes a sample, decides, and runs the jobs, so the order repeats. It returns
    /// `false` if jobs are left after [`JOBS_MAX`], which are more than one step can post, or if
    /// one has panicked.
    ///
    /// # Errors
    /// The same as for [`Builder::start`].
    #[doc(hidden)]
    pub fn start_stepped(self) -> Result<(Memory, impl FnMut() -> bool), StartError> {
        let builder = self.detached();
        let config = Config::resolve(&builder.code, &Settings::default())?;
        let parts = builder.assemble(config, ProcessClaim::new(false))?;
        let (shared, mut maintenance, mut worker, _) = parts;
        let memory = Memory::of(Arc::clone(&shared), Arc::new(running(&shared)));
        let (state, clock) = (Arc::clone(&shared.state), Arc::clone(&shared.clock));
        let step = move || {
            let _ = maintenance.tick(clock.now());
            let mut jobs = std::iter::from_fn(|| state.pop_job()).take(JOBS_MAX);
            jobs.by_ref().for_each(|job| worker.run(job, &*clock));
            !state.has_jobs() && worker.panics_total() == 0
        };
        Ok((memory, step))
    }

    fn unused_variables(&self) -> Option<Diagnostic> {
        let is_unused = !cfg!(feature = "device") && !self.ignores_environment;
        is_unused.then(|| variables_of_devices(&env::of_devices())).flatten()
    }

    /// Opens the signals, applies the settings of the heap unless it is detached, and checks the
    /// limit.
    fn settle_host(
        &mut self,
        config: &Config,
        clock: &dyn Clock,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Result<(Arc<Signals>, SettledHeap), StartError> {
        let (signals, heap) = if self.is_detached {
            (settle_limit(config, Signals::none(), diagnostics), SettledHeap::default())
        } else {
            let signals = open_signals(config, self.signals.take(), diagnostics);
            let heap = settle_heap(config, &signals, self.ignores_environment, diagnostics);
            (signals, heap)
        };
        check_limit(config, &signals, clock, diagnostics)?;
        if config.admission_mode.value == AdmissionMode::Observe {
            let text = "observe mode: every request is admitted, so nothing keeps the limit";
            diagnostics.push(Diagnostic::info("admission", text.to_owned()));
        }
        if let Some(dir) = config.spill_dir.value.as_deref().filter(|_| !self.is_detached) {
            let most = config.spill_max.value;
            let room = heap::spill_into(dir, most).map_err(StartError::Spill)?;
            if room < most {
                let text = format!("{most}, but there is room for {room} (ulimit -f, disk)");
                diagnostics.push(Diagnostic::warning("spill_max", text));
            }
        } else if config.spill_max.source != Source::Default && config.spill_dir.value.is_none() {
            let text = "a maximum without effect: expected a folder too (LOWTIDE_SPILL_DIR)";
            diagnostics.push(Diagnostic::warning("spill_max", text.to_owned()));
        }
        Ok((Arc::new(signals), heap))
    }

    /// Creates the parts and connects them. Releases the claim if that fails.
    fn assemble(
        mut self,
        config: Config,
        claim: Arc<ProcessClaim>,
    ) -> Result<AssembledParts, StartError> {
        let mut diagnostics = Vec::from_iter(self.unused_variables());
        #[cfg(feature = "device")]
        let devices = Devices::open(&config, std::mem::take(&mut self.drivers), &mut diagnostics)?;
        let clock = self.clock.take().unwrap_or_else(|| Arc::new(SystemClock::new()));
        let (signals, heap) = self.settle_host(&config, &*clock, &mut diagnostics)?;
        let (flight, recording) = Flight::open(&config, &signals, &mut diagnostics);
        let profiles = profiles::prepare(&config, self.is_detached, &mut diagnostics);
        let (admission, resources) = (Admission::new(), Resources::new());
        let sensor = MemorySensor {
            clock: Arc::clone(&clock),
            signals: SignalTracker::new(Arc::clone(&signals)),
            heap: heap.probe,
            #[cfg(feature = "device")]
            arenas: devices.sensor(&config),
            seen: SensorState::default(),
            captures: Captures::of(profiles.as_ref(), &config),
        };
        let joined: Arc<OnceLock<Arc<Shared>>> = Arc::default();
        #[cfg(feature = "device")]
        let (mut steps, has_own) = devices.settle_budgets(&admission, &joined, &mut diagnostics);
        #[cfg(not(feature = "device"))]
        let (mut steps, has_own) = (Vec::new(), false);
        steps.extend([Budget::Host, Budget::Device].map(|budget| resources.reclaimer(budget)));
        let mut maintenance = Maintenance::new(
            settings(&config, has_own, heap.decay_interval),
            Box::new(sensor),
            admission.clone(),
            resources.clone(),
            steps,
        )?;
        #[cfg(feature = "device")]
        devices.budgets().for_each(|budget| maintenance.add_device(budget.clone()));
        let shared = Arc::new(Shared {
            held_at_start: held_at_start(&signals, heap.probe),
            config,
            started_at: clock.since_epoch(),
            clock,
            birth: Birth::now(),
            admission,
            resources,
            state: maintenance.state(),
            #[cfg(feature = "device")]
            devices,
            heap: heap.probe,
            signals,
            bound_arenas: bound_arenas(),
            background_threads: heap.background_threads,
            diagnostics: Mutex::new(Vec::new()),
            purges: Purges::default(),
            claim,
            events: Arc::default(),
            flight: Arc::new(flight),
            history: MetricsHistory::default(),
            quiet_times: Mutex::default(),
            mappings: SlowValue::default(),
            profiles,
            admin_tasks: AdminTasks::default(),
            fit: Mutex::new(None),
            loads: Loads::default(),
            #[cfg(feature = "tokio")]
            ending: tokio::sync::watch::Sender::default(),
        });
        let _ = joined.set(Arc::clone(&shared));
        prepare_admission(&shared, self.is_detached);
        diagnostics.into_iter().for_each(|diagnostic| shared.add_diagnostic(diagnostic));
        let actions = MaintenanceExecutor::new(&shared, self.hook, self.recall_hook);
        let worker = maintenance.worker(Box::new(actions));
        // The first sample is taken here, so that the first request finds a measured allowance.
        let _ = maintenance.tick(shared.clock.now());
        Ok((shared, maintenance, worker, recording))
    }
}

/// Device arenas.
#[cfg(feature = "device")]
impl Builder {
    /// Sets the device on which arenas allocate. [`DeviceChoice::CudaAll`] opens every visible one.
    /// Default: the best that works.
    pub fn device(mut self, value: DeviceChoice) -> Self {
        self.code.devices = Some(vec![value]);
        self
    }

    /// Sets a driver for device arenas that the caller has opened, for example with options that
    /// have no setting, or a driver for tests. The configured device, also from the environment, is
    /// ignored then.
    ///
    /// ```no_run
    /// # #[cfg(feature = "cuda")] {
    /// use std::sync::Arc;
    /// use lowtide::device::driver::cuda::{CudaDriver, CudaOptions};
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let handle = Some(ByteSize::mib(16));
    /// let driver = CudaDriver::open(CudaOptions { handle, ..CudaOptions::default() })?;
    /// let memory = Memory::builder().driver(Arc::new(driver)).start()?;
    /// # }
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    pub fn driver(self, driver: Arc<dyn Driver>) -> Self {
        self.drivers([driver])
    }

    /// Like [`Builder::driver`], for several devices, the default one first: at most 16, each once.
    /// With an empty list the configured device is opened, as without this call;
    /// [`Builder::devices`] with an empty list opens none.
    ///
    /// With several host drivers a program for several devices runs without a GPU. Their memory
    /// counts in the host's budget, so [`Builder::device_limit`] limits their arenas, but not what
    /// [`MemoryDevices::reserve`](crate::memory::MemoryDevices::reserve) reserves.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use lowtide::device::HostDriver;
    /// use lowtide::device::driver::Driver;
    /// use lowtide::memory::DeviceSelector;
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let two = [HostDriver::new(), HostDriver::new()].map(|it| Arc::new(it) as Arc<dyn Driver>);
    /// let memory = Memory::builder().drivers(two).start()?;
    /// let second = DeviceSelector::Number(1);
    /// let (device, permit) = memory.devices().on(second).reserve(ByteSize::mib(8))?;
    /// let arena = memory.devices().on(device).open_arena("on the second")?;
    /// assert_eq!(memory.devices().all().len(), 2);
    /// # drop((arena, permit));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    pub fn drivers(mut self, drivers: impl IntoIterator<Item = Arc<dyn Driver>>) -> Self {
        self.drivers = drivers.into_iter().collect();
        self
    }

    /// Sets several CUDA devices, the default one first: at most 16, each once. Each has a budget,
    /// a watermark and series of its own; name one with a
    /// [`DeviceSelector`](crate::memory::DeviceSelector). The start fails if one cannot be opened.
    /// Every opened device holds a CUDA context: several hundred MiB of its memory. An empty list
    /// opens no device ([`DeviceChoice::None`]).
    ///
    /// ```no_run
    /// use lowtide::Memory;
    /// use lowtide::config::DeviceChoice;
    /// use lowtide::memory::DeviceSelector;
    ///
    /// let both = [DeviceChoice::CudaOrdinal(0), DeviceChoice::CudaOrdinal(1)];
    /// let memory = Memory::builder().devices(both).start()?;
    /// let arena = memory.devices().on(DeviceSelector::Ordinal(1)).open_arena("embedder")?;
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    pub fn devices(mut self, devices: impl IntoIterator<Item = DeviceChoice>) -> Self {
        let mut devices: Vec<_> = devices.into_iter().collect();
        if devices.is_empty() {
            devices.push(DeviceChoice::None);
        }
        self.code.devices = Some(devices);
        self
    }
}

/// The connected parts of a `Memory` that does not run yet, with the file of the flight recorder.
type AssembledParts = (Arc<Shared>, Maintenance, Worker, Option<FlightFile>);

/// The maximum number of jobs of a step: each arena may be put to sleep by one of its own.
const JOBS_MAX: usize = 1024;

impl Memory {
    /// Returns a builder with default settings.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Starts a `Memory` with default settings and the `LOWTIDE_*` variables of the environment.
    /// Short for `Memory::builder().start()`.
    ///
    /// # Errors
    /// The same as for [`Builder::start`].
    pub fn start() -> Result<Self, StartError> {
        Self::builder().start()
    }

    /// Returns the `Memory` that an earlier call of this function started, if it still runs, or
    /// starts one with default settings: for tests that share one. It ends with its last handle.
    ///
    /// # Errors
    /// The same as for [`Builder::start`].
    pub fn shared() -> Result<Self, StartError> {
        static SHARED: Mutex<Option<WeakMemory>> = Mutex::new(None);
        let mut shared = lock(&SHARED);
        let running = shared.as_ref().and_then(WeakMemory::upgrade);
        let runs =
            |memory: &Self| memory.0.shared.birth.is_here() && !memory.admission().is_closed();
        if let Some(memory) = running.filter(runs) {
            return Ok(memory);
        }
        let memory = Self::start()?;
        *shared = Some(memory.downgrade());
        Ok(memory)
    }
}

/// Returns a warning that names the variables of device arenas that are set, in a build that has
/// none.
fn variables_of_devices(names: &[&str]) -> Option<Diagnostic> {
    let text = format!(
        "{} set but without effect: this build of lowtide has no feature `device`; build with the \
         feature, or unset",
        names.join(", ")
    );
    (!names.is_empty()).then(|| Diagnostic::warning("configuration", text))
}

/// Opens the signals with the configured limit, and adds a diagnostic if some are missing.
fn open_signals(
    config: &Config,
    given: Option<Signals>,
    diagnostics: &mut Vec<Diagnostic>,
) -> Signals {
    let signals = settle_limit(config, given.unwrap_or_else(Signals::open), diagnostics);
    let missing = signals.missing();
    let (usual, faults): (Vec<_>, Vec<_>) = missing.iter().partition(|error| is_usual(error));
    diagnostics.extend(usual.iter().map(|error| Diagnostic::info("signals", error.to_string())));
    let causes = faults.into_iter().map(SignalError::to_string).collect::<Vec<_>>().join("; ");
    let signal = signals.sample();
    let error = signals.resident_error();
    if signal.usage.is_none() && error > signal.tolerance() {
        let text = format!(
            "no cgroup limits this process, and the kernel counts its resident memory with an \
             error of up to {error}, because each CPU keeps some changes to itself: expected a \
             cgroup with a limit, whose usage is exact"
        );
        diagnostics.push(Diagnostic::info("signals", text));
    }
    if !signal.limit.is_known() {
        let text = format!(
            "no memory limit found, so no request is rejected for memory; set \
             LOWTIDE_MEMORY_LIMIT ({causes})"
        );
        diagnostics.push(Diagnostic::warning("signals", text));
    } else if signal.physical.is_zero() {
        let text = format!(
            "cannot measure the memory of this process, so requests are admitted by their \
             estimates alone and no pressure level is set ({causes})"
        );
        diagnostics.push(Diagnostic::warning("signals", text));
    } else if !causes.is_empty() {
        diagnostics.push(Diagnostic::warning("signals", causes));
    }
    signals
}

/// Returns `true` for a signal that many systems lack.
pub(super) const fn is_usual(error: &SignalError) -> bool {
    matches!(error, SignalError::NoCgroup | SignalError::NoPsi { .. })
}

/// Sets the mode, and lets idle resources and reclaimers make room. The heap is purged before it is
/// used. A detached `Memory` measures nothing, and so asks no reclaimer.
fn prepare_admission(shared: &Arc<Shared>, is_detached: bool) {
    #[cfg(not(feature = "device"))]
    shared.admission.state().unify();
    shared.set_admission_mode(shared.config.admission_mode.value);
    let purged = Arc::downgrade(shared);
    shared.resources.evict_for(&shared.admission, Arc::clone(&shared.clock), move || {
        if let Some(shared) = purged.upgrade() {
            shared.purge(Trigger::Unload);
        }
    });
    if is_detached {
        shared.resources.disable_reclaimers();
    }
}

/// Returns `true` if work may spill to disk, so that a pager runs.
fn spills(shared: &Shared) -> bool {
    shared.claim.is_attached && shared.config.spill_dir.value.is_some()
}

/// Returns the value that ends the threads. No thread runs yet.
fn running(shared: &Shared) -> RunningMemory {
    let mut other_bells = vec![Arc::clone(&shared.flight.bell)];
    other_bells.extend(shared.profiles.iter().map(|profiles| Arc::clone(&profiles.bell)));
    other_bells.extend(spills(shared).then(heap::pager_bell));
    RunningMemory {
        stop: Arc::default(),
        bell: if shared.claim.is_attached { heap::watch_growth() } else { Bell::new() },
        other_bells,
        started: Mutex::new(Vec::with_capacity(THREADS + 3)),
        claim: Arc::clone(&shared.claim),
        admission: shared.admission.clone(),
        events: Arc::clone(&shared.events),
        flight: Arc::clone(&shared.flight),
        state: Arc::clone(&shared.state),
    }
}

/// Starts the two threads, and those of the profiler and the flight recorder. On failure the
/// running ones are signalled to end.
fn launch(parts: AssembledParts, stack: ByteSize) -> Result<Memory, StartError> {
    let (joined, mut maintenance, mut worker, recording) = parts;
    let running = Arc::new(running(&joined));
    let stop_flag = || Arc::clone(&running.stop);
    let (stop, bell) = (stop_flag(), Arc::clone(&running.bell));
    let (shared, clock) = (Arc::clone(&joined), Arc::clone(&joined.clock));
    // So that the claim is held until all are started.
    let _starts = ThreadEndGuard::of(&shared.claim);
    running.spawn("lowtide-worker", stack, move || run_worker(&mut worker, &*clock))?;
    running.spawn("lowtide-control", stack, move || {
        run_control(&mut maintenance, &*shared.clock, &bell, &stop);
        if shared.claim.is_attached {
            heap::unwatch_growth();
        }
        maintenance.leave();
        // No more decisions follow: the worker ends after its queue.
        shared.state.close();
    })?;
    if spills(&joined) {
        let (clock, stop) = (Arc::clone(&joined.clock), stop_flag());
        running.spawn("lowtide-pager", stack, move || {
            if let Err(error) = heap::run_pager(&stop, &*clock) {
                log!(error, %error, "cannot write spilled memory");
                std::process::abort(); // a block could read as something else
            }
        })?;
    }
    // Without one of these the `Memory` works too. The claim is held until it has ended, so that the
    // next `Memory` finds what it used unlocked.
    let started = |about, started: Result<(), StartError>| {
        if let Err(error) = started {
            joined.add_diagnostic(Diagnostic::warning(about, format!("off: {error}")));
        }
    };
    if let Some(file) = recording {
        let (recorder, stop) = (FlightRecorder::new(&joined, file), stop_flag());
        started("flight_recorder", running.spawn(FLIGHT, stack, move || recorder.run(&stop)));
    }
    if let Some(profiles) = joined.profiles.clone() {
        let (clock, stop) = (Arc::clone(&joined.clock), stop_flag());
        let folder = joined.config.heap_profile_dir.value.clone();
        let run = move || profiles::run(&profiles, folder.as_deref(), &*clock, &stop);
        started("profiler", running.spawn("lowtide-profiler", PROFILER_STACK, run));
    }
    Ok(Memory::of(joined, running))
}

impl RunningMemory {
    /// Starts one thread. On failure the caller drops this, which ends the running threads.
    fn spawn(
        &self,
        name: &'static str,
        stack: ByteSize,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), StartError> {
        let stack = stack.as_usize().unwrap_or(usize::MAX);
        let ends = ThreadEndGuard::of(&self.claim);
        let end = Arc::clone(&ends.end);
        let handle = thread::Builder::new()
            .name(name.to_owned())
            .stack_size(stack)
            .spawn(move || {
                let _ends = ends;
                on_thread_start();
                run();
            })
            .map_err(|error| StartError::Thread { name, error })?;
        let (id, handle) = (handle.thread().id(), Some(handle));
        lock(&self.started).push(Started { name, id, end, handle });
        Ok(())
    }
}

/// Sets the configured limit. Adds a diagnostic if it is above the limit found.
fn settle_limit(config: &Config, signals: Signals, diagnostics: &mut Vec<Diagnostic>) -> Signals {
    let Some(given) = config.memory_limit.value else { return signals };
    let found = signals.sample().limit;
    if found.is_known() && given > found.bytes {
        let text = format!(
            "memory limit {given} ({}) is above {}, the limit of {}, and has no \
             effect: {} is in force",
            config.memory_limit.source,
            found.bytes,
            found.source.phrase(),
            found.bytes
        );
        diagnostics.push(Diagnostic::warning("limit", text));
    }
    signals.with_limit(given)
}

/// Rejects a configured limit that would never admit a request because this process already uses as
/// much as the ceiling. For a cgroup's limit this is only a diagnostic: it may be raised, and other
/// processes may use the memory that counts against it.
fn check_limit(
    config: &Config,
    signals: &Signals,
    clock: &dyn Clock,
    diagnostics: &mut Vec<Diagnostic>,
) -> Result<(), StartError> {
    let is_full = |signal: &Signal| {
        let ceiling = signal.limit.bytes.scaled(config.ceiling.value);
        signal.limit.is_known() && (signal.physical >= ceiling || signal.limit.bytes < LIMIT_MIN)
    };
    if !is_full(&signals.sample()) {
        return Ok(());
    }
    // Memory freed during start-up may be released first; an error changes no figure.
    let purged = heap::purge(clock);
    let mut signal = signals.sample();
    let kept = purged.map_or(ByteSize::ZERO, |purged| purged.unreleased); // requests use it
    signal.physical = signal.physical.saturating_sub(kept);
    if !is_full(&signal) {
        return Ok(());
    }
    let limit = signal.limit.bytes;
    let held = held_by_process(&signal);
    let least = least_limit(held, config.ceiling.value);
    if signal.limit.source == LimitSource::Override && limit < least {
        let from = config.memory_limit.source;
        return Err(StartError::LimitTooSmall { limit, from, held, least });
    }
    let text = format!(
        "{} in use at start, and the limit is {limit}, set by {}: requests are rejected until less \
         is in use; expected a larger limit",
        signal.physical,
        signal.limit.source.phrase()
    );
    diagnostics.push(Diagnostic::warning("limit", text));
    Ok(())
}

/// The maximum time between queries of the device's free memory: the memory of other processes must
/// be seen even if metrics are rare.
const DEVICE_INTERVAL_MAX: Duration = Duration::from_secs(1);

fn settings(
    config: &Config,
    has_devices: bool,
    heap_decay_interval: Option<Duration>,
) -> admission::Settings {
    let published = config.metrics_interval.value;
    let defaults = admission::Settings::default();
    admission::Settings {
        ceiling: config.ceiling.value,
        ceiling_max: match config.ceiling.source {
            Source::Default => defaults.ceiling_max,
            _ => config.ceiling.value,
        },
        correction_factor: config.correction_factor.value,
        quiet: config.profile.value.purge_when_idle_for().unwrap_or(Duration::MAX),
        purge_interval: config.purge_interval.value,
        purge_growth: config.purge_growth(),
        publish_interval: Some(published),
        exhaustion_policy: config.exhaustion_policy.value,
        heap_decay_interval,
        device_interval: has_devices.then(|| published.min(DEVICE_INTERVAL_MAX)),
        ..defaults
    }
}

/// Logs the start, and why the previous run ended, once.
fn report(memory: &Memory) {
    let config = memory.config();
    let limit = shown(memory.0.shared.state.limit());
    let signals = &memory.0.shared.signals;
    let (cpus, limits) = (signals.cpus(), signals.bounds());
    let limits = limits.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    #[cfg(feature = "device")]
    let device = Some(devices::choice(&memory.0.shared.devices, config));
    #[cfg(not(feature = "device"))]
    let device = None::<&str>;
    log!(info, profile = %config.profile.value, limit, limits,
        device = device.map(tracing::field::display), heap_decay = %config.heap_decay.value,
        background_threads = memory.0.shared.background_threads, cpus = cpus.whole(),
        cpu_quota_milli = cpus.quota_milli, bound_arenas = memory.0.shared.bound_arenas,
        "memory manager started");
    let last = memory.report().last_exit();
    let Some(LastExit { cause, summary, pid, version, .. }) = last else { return };
    let (is_orderly, cause) = (cause.is_orderly(), cause.name());
    if is_orderly {
        log!(info, cause, pid, version, summary, "previous run ended normally");
    } else {
        log!(warn, cause, pid, version, summary, "previous run ended abnormally");
    }
}

lowtide_core::debug_as!(Builder, |it| code: it.code, ignores_environment: it.ignores_environment);

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn variables_of_device_arenas_are_named_in_a_build_without_them() {
        let names = ["LOWTIDE_DEVICE", "LOWTIDE_DEVICE_LIMIT"];
        let text = variables_of_devices(&names).map(|diagnostic| diagnostic.to_string());
        let expected = "configuration: LOWTIDE_DEVICE, LOWTIDE_DEVICE_LIMIT set but without \
                        effect: this build of lowtide has no feature `device`; build with the \
                        feature, or unset";
        assert_eq!(text.as_deref(), Some(expected));
        assert_eq!(variables_of_devices(&[]), None);
    }
}

//! Starting a `Memory`: from settings to two running threads, or back to where it was.
//!
//! Invariant: a failed start leaves no thread, no claim and no changed setting but jemalloc's decay
//! times behind.

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Bell, Clock, Moment, SystemClock};
use crate::config::{Config, DeviceBackend, DeviceChoice, Profile, Settings, env};
use crate::control::{
    self, Admission, Budget, Ladder, LimitSource, Maintenance, Resources, Signal, SignalError,
    Signals, Trigger, Worker, run_control, run_worker,
};
use crate::device::driver::Driver;
use crate::fork::Birth;
use crate::host::{self, ArenaBinding};
use crate::sync::{Mutex, lock};

use super::admin_tasks::AdminTasks;
use super::arenas::Arenas;
use super::device::DeviceWatch;
use super::driver::open_driver;
use super::error::{Diagnostic, StartError};
use super::events::Events;
use super::hands::{Hook, IdleGranules, MaintenanceExecutor};
use super::heap::settle_heap;
use super::history::MetricsHistory;
use super::own_arena::Loads;
use super::published::Gone;
use super::scopes::Scopes;
use super::sensor::{Counted, LibcIdle, MemorySensor};
use super::shared::{Purges, Shared};
use super::shrink::ShrinksAsked;
use super::{Claim, Ends, Memory, Running, Started, THREADS, Threads, threads};

/// Stack of a thread of ours. Both call little; what they touch of it is a few KiB.
const STACK: ByteSize = ByteSize::kib(256);

/// How a [`Memory`] is to be.
///
/// What the environment says wins over what is set here, and that over the profile. Defaults that
/// differ by profile are given for low-memory, balanced and throughput, in this order; see
/// [`Profile`].
#[derive(Default)]
pub struct Builder {
    code: Settings,
    /// The variables; `None` if they are not read.
    environment: Option<Settings>,
    /// What stands in jemalloc's variable that this build does not read.
    unread: Option<String>,
    clock: Option<Arc<dyn Clock>>,
    hook: Option<Hook>,
    recall_hook: Option<Hook>,
    stack: Option<ByteSize>,
    signals: Option<Signals>,
    driver: Option<Arc<dyn Driver>>,
}

macro_rules! setting {
    ($($(#[$doc:meta])* $name:ident: $kind:ty;)*) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $name(mut self, value: $kind) -> Self {
            self.code.$name = Some(value);
            self
        })*
    };
}

impl Builder {
    setting! {
        /// What the other settings start from; balanced by default.
        profile: Profile;
        /// Host memory that must not be passed; by default the cgroup's limit, or the machine's
        /// memory. It lowers that limit and never raises it.
        memory_limit: ByteSize;
        /// Part of the limit up to which requests are admitted, in (0, 1]; 0.80 by default.
        ceiling: f64;
        /// What a booked byte is taken to need until that is measured, in [1, 5]; 2 by default,
        /// which is safe for estimates of half the truth. With 1, where estimates are known to be
        /// right, nothing that fits is turned away in the first seconds.
        correction_factor: f64;
        /// Where device arenas live; the best that works by default.
        device: DeviceChoice;
        /// In which way CUDA memory is had; the first that works by default.
        device_backend: DeviceBackend;
        /// Device memory that each arena must not pass; none by default.
        device_limit: ByteSize;
        /// The part of the device's memory, in [0, 1), that is to stay free for its other users:
        /// .05 by default, 0 for none. Where less is free, idle memory of our arenas goes back
        /// before its decay time, as much as brings that to one and a half of this part; live
        /// memory never does.
        device_watermark: f64;
        /// How long idle device memory may stay: by default 1 s, 5 s or 30 s, by profile.
        device_decay: crate::decay::DecayTime;
        /// After how long without a lease a device arena falls asleep, `None` for never, which is
        /// the default: see [`DeviceArena::sleep`](crate::device::DeviceArena::sleep) for what
        /// that asks of its users.
        device_sleep_after: Option<Duration>;
        /// How long a device arena stays awake at least, once it was opened or woken; 0 by default.
        device_min_awake: Duration;
        /// What becomes of the stable region's contents then; kept by default.
        device_sleep_stable: crate::device::Contents;
        /// The same of the dynamic region's.
        device_sleep_dynamic: crate::device::Contents;
        /// How long jemalloc keeps dirty pages: by default 1 s, 1 s or 10 s, by profile.
        heap_decay: crate::decay::DecayTime;
        /// jemalloc's background threads at most, 0 for none: by default 1, 2 or 4, by profile.
        background_threads: u32;
        /// How often a busy service purges its heap, `None` for only under pressure: by default
        /// each 10 s, each 30 s or never, by profile.
        purge_interval: Option<Duration>;
        /// Idle time of resources without their own; [`Duration::MAX`](Duration::MAX)
        /// for never. By default 60 s, 300 s or 900 s, by profile.
        idle_unload: Duration;
        /// How often metrics are published; each second by default.
        metrics_interval: Duration;
    }

    /// Reads the `LOWTIDE_*` variables, which override what is set in code. Without this call the
    /// environment is not read, and none of them has an effect ([`Memory::start`] calls it).
    /// A variable with an empty value counts as unset.
    ///
    /// # Errors
    /// [`StartError::Config`] with every unknown variable and every bad value.
    pub fn with_environment(mut self) -> Result<Self, StartError> {
        self.environment = Some(env::read()?);
        let found = host::effective().ok();
        self.unread = found.and_then(|found| env::of_others(found.unread_variable()));
        Ok(self)
    }

    /// The clock that everything goes by; the machine's by default.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Called on the worker after metrics were published, every five seconds at most: the place
    /// for the upkeep that an exporter needs.
    #[must_use]
    pub fn after_publish(mut self, hook: impl FnMut() + Send + 'static) -> Self {
        self.hook = Some(Box::new(hook));
        self
    }

    /// Called on the worker when it is about to purge the heap and has called back the caches of
    /// threads that cooperate ([`host::request_tcache_flush`]): the place to wake threads that are
    /// parked, since those run nothing by themselves. It must not wait for them.
    ///
    /// ```
    /// # async fn start() -> Result<(), lowtide::BoxError> {
    /// let runtime = tokio::runtime::Handle::current();
    /// let memory = lowtide::Memory::builder().after_tcache_flush_request(move || {
    ///     // A task that does nothing wakes a worker, which calls `on_thread_park` when it parks.
    ///     for _ in 0..runtime.metrics().num_workers() {
    ///         runtime.spawn(async {});
    ///     }
    /// });
    /// # memory.start()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn after_tcache_flush_request(mut self, hook: impl FnMut() + Send + 'static) -> Self {
        self.recall_hook = Some(Box::new(hook));
        self
    }

    /// Other signals than those of this process, for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn signals(mut self, signals: Signals) -> Self {
        self.signals = Some(signals);
        self
    }

    /// The driver that device arenas lie on, opened by the caller: with options that no setting
    /// names, or one of a test. What the configuration says of the device is not looked at then,
    /// be it of the environment.
    ///
    /// ```no_run
    /// # #[cfg(feature = "cuda")] {
    /// use std::sync::Arc;
    /// use lowtide::device::driver::cuda::{CudaDriver, CudaOptions};
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let handle = Some(ByteSize::mib(16));
    /// let driver = CudaDriver::open(CudaOptions { handle, ..CudaOptions::default() })?;
    /// let memory = Memory::builder().with_environment()?.driver(Arc::new(driver)).start()?;
    /// # }
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    #[must_use]
    pub fn driver(mut self, driver: Arc<dyn Driver>) -> Self {
        self.driver = Some(driver);
        self
    }

    /// Another size of the threads' stacks, for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn stack(mut self, size: ByteSize) -> Self {
        self.stack = Some(size);
        self
    }

    /// Starts it: a few milliseconds at most. The environment is read only after
    /// [`Builder::with_environment`].
    ///
    /// # Errors
    /// [`StartError`]: one runs already, settings that cannot be used, a memory limit below what
    /// the process holds already, `cuda` without a usable device, a thread that cannot be started.
    pub fn start(self) -> Result<Memory, StartError> {
        let unread = Settings::default();
        let environment = self.environment.as_ref().unwrap_or(&unread);
        let config = Config::resolve(&self.code, environment)?;
        let claim = Claim::take().ok_or(StartError::AlreadyStarted)?;
        self.start_claimed(config, claim)
    }

    /// The claim is given back where it fails.
    fn start_claimed(self, config: Config, claim: Arc<Claim>) -> Result<Memory, StartError> {
        let mut diagnostics = unread_variables(self.environment.is_some());
        let driver = open_driver(&config, self.driver, &mut diagnostics)?;
        let signals = open_signals(&config, self.signals, &mut diagnostics);
        let heap = settle_heap(&config, &signals, self.unread, &mut diagnostics);
        let clock = self.clock.unwrap_or_else(|| Arc::new(SystemClock::new()));
        check_limit(&config, &signals, &*clock, &mut diagnostics)?;
        let (signals, arenas) = (Arc::new(signals), Arenas::default());
        let (admission, resources) = (Admission::new(), Resources::new());
        let counted = settle_budgets(driver.as_deref(), &admission, &mut diagnostics);
        let is_host = counted != Counted::OnDevice;
        let sensor = MemorySensor {
            clock: Arc::clone(&clock),
            signals: Arc::clone(&signals),
            heap: heap.probe,
            arenas: arenas.clone(),
            counted,
            device_limit: config.device_limit.value,
            last: None,
            refresh_at: Moment::ORIGIN,
            read: None,
            libc: LibcIdle::default(),
        };
        let joined = Arc::default();
        let ladder = ladder(&joined, &resources, is_host);
        let settings = settings(&config, is_host);
        let settings = control::Settings { heap_decay_interval: heap.decay_interval, ..settings };
        let mut maintenance = Maintenance::new(
            settings,
            Box::new(sensor),
            admission.clone(),
            resources.clone(),
            ladder,
        )?;
        let shared = Arc::new(Shared {
            device: DeviceWatch::new(config.device_watermark.value),
            config,
            clock,
            birth: Birth::now(),
            admission,
            resources,
            state: maintenance.state(),
            queue: maintenance.queue(),
            driver,
            heap: heap.probe,
            signals,
            bound_arenas: threads::arena_binding().map(ArenaBinding::arenas),
            diagnostics: Mutex::new(Vec::new()),
            purges: Purges::default(),
            claim,
            arenas,
            scopes: Scopes::default(),
            gone: Gone::default(),
            shrinks: ShrinksAsked::default(),
            events: Events::default(),
            history: MetricsHistory::default(),
            admin_tasks: AdminTasks::default(),
            loads: Loads::default(),
            #[cfg(feature = "cuda")]
            governors: super::governors::Governors::default(),
        });
        evict_when_short(&shared);
        diagnostics.into_iter().for_each(|diagnostic| shared.diagnostic(diagnostic));
        *lock(&joined) = Some(Arc::clone(&shared));
        let hands = MaintenanceExecutor::new(&shared, self.hook, self.recall_hook);
        let worker = maintenance.worker(Box::new(hands));
        // The first sample is taken here, so that the first request meets a true allowance.
        let first = maintenance.tick(shared.clock.now());
        shared.queue.push(first.jobs);
        let memory = launch(&shared, maintenance, worker, self.stack.unwrap_or(STACK))?;
        report(&memory, heap.background_threads);
        Ok(memory)
    }
}

/// Finds where the memory of arenas counts, and has admission use one budget if that is the host's.
fn settle_budgets(
    driver: Option<&dyn Driver>,
    admission: &Admission,
    diagnostics: &mut Vec<Diagnostic>,
) -> Counted {
    let counted = Counted::of(driver);
    if counted != Counted::OnDevice {
        admission.unify();
    }
    if counted == Counted::BesideKernel {
        let text = "the device has no memory of its own: what arenas commit counts against the \
                    host's memory limit, once, and no device budget applies";
        diagnostics.push(Diagnostic::info("device", text.to_owned()));
    }
    counted
}

/// A warning if variables are set and not read.
fn unread_variables(are_read: bool) -> Vec<Diagnostic> {
    let names = if are_read { Vec::new() } else { env::names() };
    let text = format!(
        "{} set but not read: call Builder::with_environment before Builder::start, or unset",
        names.join(", ")
    );
    Some(Diagnostic::warning("configuration", text))
        .filter(|_| !names.is_empty())
        .into_iter()
        .collect()
}

/// The signals, with the configured limit, and a note if some are missing.
fn open_signals(
    config: &Config,
    given: Option<Signals>,
    diagnostics: &mut Vec<Diagnostic>,
) -> Signals {
    let signals = settle_limit(config, given.unwrap_or_else(Signals::open), diagnostics);
    let is_usual =
        |error: &&SignalError| matches!(error, SignalError::NoCgroup | SignalError::NoPsi { .. });
    let (usual, faults): (Vec<_>, Vec<_>) = signals.missing().iter().partition(is_usual);
    diagnostics
        .extend(usual.into_iter().map(|error| Diagnostic::info("signals", error.to_string())));
    let causes = faults.into_iter().map(SignalError::to_string).collect::<Vec<_>>().join("; ");
    let signal = signals.sample();
    if !signal.limit.is_known() {
        let text = format!(
            "no memory limit is known, so no request is rejected for memory; set \
             LOWTIDE_MEMORY_LIMIT ({causes})"
        );
        diagnostics.push(Diagnostic::warning("signals", text));
    } else if signal.physical.is_zero() {
        let text = format!(
            "the memory of this process cannot be measured, so requests are admitted by their \
             estimates alone and no pressure level is set ({causes})"
        );
        diagnostics.push(Diagnostic::warning("signals", text));
    } else if !causes.is_empty() {
        diagnostics.push(Diagnostic::warning("signals", causes));
    }
    signals
}

/// Evicts idle resources for what does not fit. The heap is purged before the room is used.
fn evict_when_short(shared: &Arc<Shared>) {
    let purged = Arc::downgrade(shared);
    shared.resources.evict_for(&shared.admission, Arc::clone(&shared.clock), move || {
        if let Some(shared) = purged.upgrade() {
            shared.purge(Trigger::Unload);
        }
    });
}

/// Starts the two threads; on failure the one that runs is told to end.
fn launch(
    shared: &Arc<Shared>,
    mut maintenance: Maintenance,
    mut worker: Worker,
    stack: ByteSize,
) -> Result<Memory, StartError> {
    let threads = Threads {
        stop: Arc::default(),
        bell: Bell::new(),
        started: Mutex::new(Vec::with_capacity(THREADS)),
    };
    let (stop, bell) = (Arc::clone(&threads.stop), Arc::clone(&threads.bell));
    let running = Arc::new(Running {
        threads,
        queue: Arc::clone(&shared.queue),
        claim: Arc::clone(&shared.claim),
        admission: shared.admission.clone(),
    });
    let (joined, shared, clock) = (shared, Arc::clone(shared), Arc::clone(&shared.clock));
    let ends = || Ends { end: Arc::default(), claim: Arc::clone(&shared.claim) };
    let (ends_worker, ends_control) = (ends(), ends());
    running.threads.spawn("lowtide-worker", stack, ends_worker, move || {
        run_worker(&mut worker, &*clock);
    })?;
    running.threads.spawn("lowtide-control", stack, ends_control, move || {
        run_control(&mut maintenance, &*shared.clock, &bell, &stop);
        if !shared.admission.is_closed() {
            maintenance.leave(); // dropped, not shut down: resources may still be loaded
        }
        // Nobody decides any more: the worker ends after what waits.
        shared.queue.close();
    })?;
    Ok(Memory::of(Arc::clone(joined), running))
}

impl Threads {
    /// Starts one thread. On failure the caller drops `Running`, which ends those that run.
    fn spawn(
        &self,
        name: &'static str,
        stack: ByteSize,
        ends: Ends,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), StartError> {
        let stack = stack.as_usize().unwrap_or(usize::MAX);
        let end = Arc::clone(&ends.end);
        let handle = thread::Builder::new()
            .name(name.to_owned())
            .stack_size(stack)
            .spawn(move || {
                let _ends = ends;
                threads::on_thread_start();
                run();
            })
            .map_err(|error| StartError::Thread { name, error })?;
        let (id, handle) = (handle.thread().id(), Some(handle));
        lock(&self.started).push(Started { name, id, end, handle });
        Ok(())
    }
}

/// Sets the configured limit; one that raises nothing is noted.
fn settle_limit(config: &Config, signals: Signals, diagnostics: &mut Vec<Diagnostic>) -> Signals {
    let Some(given) = config.memory_limit.value else { return signals };
    let found = signals.sample().limit;
    if found.is_known() && given > found.bytes {
        let text = format!(
            "the memory limit of {given} ({}) is above {}, the limit of the {}, and raises \
             nothing: {} is in force",
            config.memory_limit.source,
            found.bytes,
            found.source.name(),
            found.bytes
        );
        diagnostics.push(Diagnostic::warning("limit", text));
    }
    signals.with_limit(given)
}

/// No limit below this is accepted: the two threads alone need half of it.
const LIMIT_MIN: ByteSize = ByteSize::mib(1);

/// Refuses a configured limit under which no request would ever be admitted, because this process
/// holds as much as the ceiling already. A limit of the cgroup is noted only: it may be raised, and
/// what counts against it may be held by other processes.
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
    // What the start of the program has freed may go first; an error changes no figure.
    let _ = host::purge(clock);
    let signal = signals.sample();
    if !is_full(&signal) {
        return Ok(());
    }
    let limit = signal.limit.bytes;
    // Neither pages of files that no limit counts, nor what other processes of the cgroup hold.
    let held = signal.rss.map_or(signal.physical, |rss| rss.min(signal.physical));
    let least = held.scaled(1.0 / config.ceiling.value).saturating_add(ByteSize::new(1));
    let least = least.next_multiple_of(LIMIT_MIN).unwrap_or(ByteSize::MAX);
    if signal.limit.source == LimitSource::Override && limit < least {
        let from = config.memory_limit.source;
        return Err(StartError::LimitTooSmall { limit, from, held, least });
    }
    let text = format!(
        "{} are held at start, and the limit is {limit} ({}): requests are rejected until less is \
         held; expected a larger limit",
        signal.physical,
        signal.limit.source.name()
    );
    diagnostics.push(Diagnostic::warning("limit", text));
    Ok(())
}

/// How often the device is asked for its free memory at least: a neighbour that takes it does not
/// wait for metrics.
const DEVICE_INTERVAL_MAX: Duration = Duration::from_secs(1);

/// By how much steps between samples are shortened at most. A guess: services that were started
/// together are out of step after some ten ticks.
const JITTER: f64 = 0.1;

fn settings(config: &Config, is_host: bool) -> control::Settings {
    let published = config.metrics_interval.value;
    let defaults = control::Settings::default();
    control::Settings {
        ceiling: config.ceiling.value,
        correction_factor: config.correction_factor.value,
        quiet: config.purge_when_idle_for.unwrap_or(Duration::MAX),
        purge_interval: config.purge_interval.value,
        purge_growth: config.purge_growth,
        publish_interval: Some(published),
        jitter: JITTER,
        device_interval: (!is_host).then(|| published.min(DEVICE_INTERVAL_MAX)),
        ..defaults
    }
}

/// Idle device memory first, then idle resources: each on the budget that it relieves.
fn ladder(
    joined: &Arc<Mutex<Option<Arc<Shared>>>>,
    resources: &Resources,
    is_host: bool,
) -> Ladder {
    let relieves = if is_host { Budget::Host } else { Budget::Device };
    let granules = IdleGranules { shared: Arc::clone(joined), relieves };
    let backends: Vec<Arc<dyn control::Reclaim>> = vec![
        Arc::new(granules),
        resources.reclaimer(Budget::Host),
        resources.reclaimer(Budget::Device),
    ];
    // Three rungs are fewer than any ladder's limit.
    Ladder::new(backends).unwrap_or_default()
}

/// Says once what runs.
fn report(memory: &Memory, background_threads: u32) {
    let config = memory.config();
    let limit = memory.0.shared.state.limit();
    let limit = if limit == ByteSize::MAX { "none".to_owned() } else { limit.to_string() };
    let cpus = memory.0.shared.signals.cpus();
    let at_start = host::effective();
    let at_start = at_start.map_or_else(|error| error.to_string(), |conf| conf.to_string());
    log!(
        info,
        target: "lowtide",
        profile = %config.profile.value,
        limit,
        device = %config.device.value,
        heap_decay = ?config.heap_decay.value,
        background_threads,
        cpus = cpus.whole(),
        cpu_quota_milli = cpus.quota_milli,
        bound_arenas = memory.0.shared.bound_arenas,
        heap_at_start = at_start,
        "memory is managed"
    );
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("code", &self.code)
            .field("environment", &self.environment)
            .finish_non_exhaustive()
    }
}

//! Dedicated arenas of a resource, so that its memory can be measured, and released completely when
//! it is unloaded.
//!
//! The heap arena contains allocations of the loader's own thread, but not those of threads that it
//! starts. If jemalloc does not serve this process, or no arena can be created, the resource is
//! loaded into the shared heap; requests are not rejected for that. The device arena belongs to the
//! caller that registered the resource; it is measured and purged here.
//!
//! Allocations of C and C++ code are in no such arena unless jemalloc serves that code too (feature
//! `interpose`). Without the feature it is measured by the change of the cgroup's charge, or of the
//! process's resident memory, less that of jemalloc's, around a load that runs alone: no other load
//! and no other request started, ran or ended meanwhile.
//!
//! Invariant: `arena exists => its resource is loaded`, with its value in the arena. A load that
//! timed out and still runs has its own arena, or none.

#[cfg(not(feature = "device"))]
pub(super) use std::convert::Infallible as OwnDevice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::bytes::{ByteSize, prefix};
use crate::sync::{Mutex, lock};
use lowtide_admission::{Budget, Cost, LimitSource, LoadScope, Trigger};
use lowtide_core::sync::background;
use lowtide_heap::{self as heap, ARENA_NAME_MAX, HostArena, HostArenaStats};

use super::error::Diagnostic;
use super::shared::Shared;
#[cfg(feature = "device")]
pub(super) use crate::device::DeviceArena as OwnDevice;

/// Growth below this around a load is not attributed to the load.
const CHANGE_MIN: ByteSize = ByteSize::mib(4);

pub(super) struct OwnArena {
    name: String,
    arena: Mutex<Option<HostArena>>,
    /// The growth of the process around the last load for which it was measured: that of a later
    /// load, which did not run alone, is no less.
    grown: Mutex<Option<ByteSize>>,
    /// A device arena that contains only the resource's memory.
    #[cfg_attr(not(feature = "device"), expect(dead_code, reason = "there is none"))]
    device: Option<OwnDevice>,
    /// Weak, because the registry holds the resource.
    shared: Weak<Shared>,
}

impl OwnArena {
    /// Creates it for the resource of this name. The arena's name is as much of that as fits.
    pub(super) fn of(
        name: &str,
        shared: &Arc<Shared>,
        device: Option<OwnDevice>,
    ) -> Arc<dyn LoadScope> {
        let name = prefix(name, ARENA_NAME_MAX).to_owned();
        let (arena, grown) = (Mutex::new(None), Mutex::new(None));
        Arc::new(Self { name, arena, grown, device, shared: Arc::downgrade(shared) })
    }

    /// Creates a heap arena of this name.
    fn arena(&self) -> Option<HostArena> {
        let arena = heap::is_global().then(|| HostArena::new(&self.name))?;
        arena.map_err(|error| self.report_shared_heap(&error)).ok()
    }

    /// Returns the bytes of pages in the arena.
    fn arena_active(&self) -> Option<ByteSize> {
        lock(&self.arena).as_ref().and_then(|arena| arena.stats().ok()).map(|stats| stats.active)
    }

    /// Measures a finished load by the growth of the process, and adds a diagnostic.
    fn settle_growth(&self, shared: &Shared, before: &Before) {
        let start = format!("{:?} ", self.name);
        let mut growth = before.growth(shared);
        let diagnostic = if before.is_alone(shared) {
            if growth > CHANGE_MIN {
                // Temporary memory of the load, such as the file, has been freed by now.
                let _ = shared.purge(Trigger::Load);
                growth = before.growth(shared);
            }
            if !before.is_alone(shared) {
                return;
            }
            let active = || self.arena_active().unwrap_or_default();
            let grown = (growth > CHANGE_MIN).then(|| growth.saturating_add(active()));
            *lock(&self.grown) = grown;
            let Some(grown) = grown else { return };
            let text = format!(
                "{start}uses memory of C or C++ code, which jemalloc does not manage in this \
                 build: measured as {grown} by the growth of the process; feature `interpose` \
                 measures it exactly"
            );
            Diagnostic::info("resources", text)
        } else if growth > CHANGE_MIN {
            let text = format!(
                "{start}may use memory of C or C++ code, which jemalloc does not manage in this \
                 build: the process grew by {growth} outside jemalloc during the load; not \
                 measured, because it was not loaded alone; expected feature `interpose`"
            );
            Diagnostic::warning("resources", text)
        } else {
            return;
        };
        shared.add_diagnostic_once(&start, diagnostic);
    }

    fn report_shared_heap(&self, error: &dyn std::error::Error) {
        if let Some(shared) = self.shared.upgrade() {
            let start = format!("{:?} is loaded into the shared heap: ", self.name);
            let text = format!("{start}{error}");
            shared.add_diagnostic_once(&start, Diagnostic::warning("resources", text));
        }
    }
}

/// The loads of resources with an `OwnArena`.
#[derive(Debug, Default)]
pub(super) struct Loads {
    begun: AtomicU64,
    /// Each load that runs has a handle.
    running: Arc<()>,
}

/// The state of the process before a load.
struct Before {
    /// The cgroup's charge or the resident memory, in bytes, without device arenas.
    held: i64,
    /// The resident memory of jemalloc.
    heap: ByteSize,
    counts: [u64; 4],
}

impl Before {
    /// Called after the start of the load has been counted.
    fn now(shared: &Shared) -> Self {
        Self { counts: counts(shared), held: held(shared), heap: heap_resident(shared) }
    }

    /// Returns the growth of the process outside jemalloc since then.
    fn growth(&self, shared: &Shared) -> ByteSize {
        let grown = held(shared).saturating_sub(self.held);
        // What jemalloc released may not have left the process yet, so that only growth counts.
        let heap = heap_resident(shared).saturating_sub(self.heap);
        ByteSize::new(u64::try_from(grown).unwrap_or(0)).saturating_sub(heap)
    }

    /// Returns `true` if only this load, and at most the request that waits for it, ran since.
    fn is_alone(&self, shared: &Shared) -> bool {
        let [_, running, admitted, finished] = self.counts;
        running == 1 && admitted <= finished + 1 && counts(shared) == self.counts
    }
}

/// Returns the loads that have begun and those that run, and the requests admitted and finished.
fn counts(shared: &Shared) -> [u64; 4] {
    let begun = shared.loads.begun.load(Ordering::SeqCst);
    // After `begun`: a load takes its handle before it is counted.
    let running = Arc::strong_count(&shared.loads.running) as u64 - 1;
    let stats = shared.admission.stats();
    [begun, running, stats.admitted_total, stats.finished_total]
}

/// Returns the cgroup's charge if the limit is the cgroup's; otherwise the process's anonymous
/// memory, because other processes would count. Without device arenas in host memory, which are
/// measured separately; negative if those are not touched yet.
fn held(shared: &Shared) -> i64 {
    let signal = shared.signals.sample();
    let source = signal.limit_without_fit.source;
    let is_cgroup = matches!(source, LimitSource::Cgroup | LimitSource::High);
    let charged = signal.charged.filter(|_| is_cgroup);
    let held = charged.or(signal.anonymous).unwrap_or_default();
    let held = held.get().cast_signed();
    #[cfg(feature = "device")]
    let held = held.saturating_sub(shared.committed_in_process().get().cast_signed());
    held
}

fn heap_resident(shared: &Shared) -> ByteSize {
    let heap = shared.heap.as_ref().and_then(|heap| heap.snapshot().ok());
    heap.unwrap_or_default().resident
}

impl LoadScope for OwnArena {
    fn load(&self, load: &mut dyn FnMut() -> bool) {
        let shared = self.shared.upgrade();
        if let Some(shared) = &shared {
            // Purges if the reserved loads do not fit together with memory that a purge would
            // release. Admission counts that memory as free, but a resource does not reuse pages of
            // the shared heap, and the control loop may sleep for longer than a load takes.
            let host = shared.admission.ledger(Budget::Host);
            let (physical, loading) = (shared.signals.sample().physical, host.loading());
            if !loading.is_zero() && physical.saturating_add(loading) > host.ceiling() {
                // As on the worker: a purge of arenas must not wait for the device.
                let _background = background();
                let _ = shared.purge(Trigger::Pressure);
            }
        }
        let Some(shared) = shared.filter(|_| !heap::serves_c()) else {
            self.load_within(load);
            return;
        };
        let _running = Arc::clone(&shared.loads.running);
        shared.loads.begun.fetch_add(1, Ordering::SeqCst);
        let before = Before::now(&shared);
        if self.load_within(load) {
            self.settle_growth(&shared, &before);
        }
    }

    fn unload(&self, unload: &mut dyn FnMut()) -> Option<Cost> {
        #[cfg(feature = "device")]
        let before = self.device.as_ref().map(|device| (device, device.snapshot().committed));
        let host = self.unload_from_heap(unload).max(*lock(&self.grown));
        unload(); // where it has not run
        #[cfg(feature = "device")]
        let device = before.map(|(device, before)| {
            // If the driver fails, idle memory decays later.
            let _ = device.purge();
            before.saturating_sub(device.snapshot().committed)
        });
        #[cfg(not(feature = "device"))]
        let device = None;
        self.cost(host, device)
    }

    fn held(&self) -> Option<Cost> {
        let grown = *lock(&self.grown);
        let host = self.arena_active().max(grown);
        #[cfg(feature = "device")]
        let device = self.device.as_ref().map(|device| device.snapshot().active);
        #[cfg(not(feature = "device"))]
        let device = None;
        self.cost(host, device)
    }
}

impl OwnArena {
    /// Loads in an arena, if there is one. Returns `true` if there is a value to keep.
    fn load_within(&self, load: &mut dyn FnMut() -> bool) -> bool {
        let Some(arena) = self.arena() else { return load() };
        let is_kept = arena.scope(&mut *load).unwrap_or_else(|error| {
            self.report_shared_heap(&error);
            load()
        });
        // Otherwise the arena is dropped, as after a panic of the loader, and kept for reuse. The
        // value of a later load may be in the arena that is here now.
        if is_kept {
            *lock(&self.arena) = Some(arena);
        }
        is_kept
    }

    /// Runs the clean-up. Returns the bytes that the heap arena released, if there is one.
    fn unload_from_heap(&self, unload: &mut dyn FnMut()) -> Option<ByteSize> {
        let arena = lock(&self.arena).take()?;
        let before = arena.stats().map(|stats| stats.active).unwrap_or_default();
        // In a scope, so that freed memory does not stay in this thread's cache.
        if arena.scope(&mut *unload).is_err() {
            unload();
        }
        let HostArenaStats { active, .. } = arena.stats().ok()?;
        if !active.is_zero() {
            let name = &self.name;
            log!(debug, name, %active, "heap arena not empty after unload");
        }
        // Dropped, and so purged and kept for the next load of any resource.
        Some(before.saturating_sub(active))
    }

    /// Combines both costs; that of the device arena counts in the host's budget if its memory
    /// does.
    fn cost(&self, host: Option<ByteSize>, device: Option<ByteSize>) -> Option<Cost> {
        host.or(device)?;
        let (host, device) = (host.unwrap_or_default(), device.unwrap_or_default());
        #[cfg(feature = "device")]
        if self.device.as_ref().is_some_and(|device| !device.capabilities().counts_as_host()) {
            return Some(Cost::host(host).and_device(device));
        }
        Some(Cost::host(host).and_host(device))
    }
}

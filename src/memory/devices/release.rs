//! What a `Memory` does with all arenas: their decay at each tick, what is due with each
//! publication, their sleep, the reclaim steps that release their idle memory, and their end.
//!
//! The control thread finds the arena that is due for sleep ([`DeviceArena::next_sleep`]), and the
//! worker prepares its host memory and puts it to sleep, one at a time. This does not relieve the
//! host: copied contents need host memory, which is reserved as resource memory in the host's
//! ledger before it is allocated. Using an arena wakes it. Its host memory stays for the next
//! sleep; the worker releases it when the host is under pressure, and at a decay what the arena
//! does not need.
//!
//! Invariant: `resource reservations of the host >= offloaded bytes of all arenas that were opened
//! here`, if a limit is known.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::driver::{Driver as _, DriverError};
use crate::device::{ArenaConfig, DeviceArena, HostBudget, SleepState};
use crate::memory::error::{Diagnostic, Shutdown};
use crate::memory::manager::Memory;
use crate::memory::shared::Shared;
use crate::memory::snapshot::BudgetSnapshot;
use lowtide_admission::{
    Admission, Budget, Cost, DeviceSample, Level, Permit, Reclaim, Rejected, Thresholds,
};

use super::arenas::{Listed, is_loss};
use super::device::{CountedIn, Device};
use super::report::{DeviceStatus, DevicesSnapshot};
use super::state::Devices;
#[cfg(feature = "cuda")]
use {super::MemoryDevices, crate::MemoryError, crate::device::driver::cuda::PoolGovernor};

impl Shared {
    /// Decays the arenas that are due, and completes what sessions have left.
    pub(in crate::memory) fn decay_devices(&self, now: Moment) {
        self.report_losses();
        for arena in self.working_arenas() {
            if arena.next_decay() > now {
                continue;
            }
            if let Err(error) = arena.decay(now)
                && !is_loss(&error)
            {
                let text = format!("arena {}: {error}", arena.name());
                self.add_diagnostic(Diagnostic::warning("device", text));
            }
        }
        self.shrink_asked();
        self.sweep();
    }

    /// Does what is due with each publication.
    pub(in crate::memory) fn maintain_devices(&self, now: Moment) {
        self.report_losses();
        self.maintain_pools();
        #[cfg(feature = "cuda")]
        self.decay_governors(now);
        #[cfg(not(feature = "cuda"))]
        let _ = now;
        self.sweep();
    }

    /// Ends the management of arenas after the threads have ended, and reports what is live.
    pub(in crate::memory) fn end_devices(&self, report: &mut Shutdown) {
        report.requests += self.devices.held();
        self.end_empty_sleeps();
        self.release_stores();
        let arenas = self.devices.list.iter().flat_map(|device| self.arenas_on(device));
        report.device_live = arenas.map(|arena| arena.glance().live).sum();
    }

    /// Returns the figures of arenas and device; none of arenas in a forked child.
    pub(in crate::memory) fn devices_snapshot(&self) -> DevicesSnapshot {
        let here = self.birth.is_here();
        let (arenas, draining) =
            if here { self.devices.arenas.parted() } else { Default::default() };
        let list = self.devices.list.iter().filter(|_| here);
        let devices: Vec<_> = list.map(|device| self.status(device)).collect();
        let snapshot = |listed: &Listed| listed.arena.snapshot();
        DevicesSnapshot {
            arenas: arenas.iter().map(snapshot).collect(),
            draining: draining.iter().map(snapshot).collect(),
            arena_devices: arenas.iter().chain(&draining).map(|it| it.device.number).collect(),
            memory: devices.first().and_then(|device| device.memory),
            rollback_failures_total: devices.iter().map(|it| it.rollback_failures_total).sum(),
            devices,
        }
    }

    /// Returns the figures of a device. Makes no driver call.
    pub(super) fn status(&self, device: &Device) -> DeviceStatus {
        let own = device.admission.as_ref().map(|admission| {
            // A further device has no level.
            BudgetSnapshot::of(admission, Budget::Device, Level::None)
        });
        let first = (device.number == 0 && device.counted == CountedIn::OnDevice)
            .then(|| self.budget(Budget::Device));
        DeviceStatus {
            number: device.number,
            name: device.name.to_string(),
            ordinal: device.driver.ordinal(),
            backend: device.driver.backend(),
            lost: device.lost().map(ToString::to_string),
            budget: own.or(first),
            memory: device.watch.snapshot(&*device.driver).filter(|_| !device.is_lost()),
            rollback_failures_total: device.driver.rollback_failures_total(),
        }
    }

    /// Returns the memory committed by arenas that the kernel does not count, although it is the
    /// host's.
    pub(in crate::memory) fn committed_beside_kernel(&self) -> ByteSize {
        let list = self.devices.list.iter().filter(|_| self.birth.is_here());
        let beside = list.filter(|device| device.counted == CountedIn::BesideKernel);
        beside.map(|device| self.committed_on(device)).sum()
    }

    /// Returns the memory committed by arenas in memory of this process.
    pub(in crate::memory) fn committed_in_process(&self) -> ByteSize {
        let listed = self.arenas().into_iter();
        let in_process = listed.filter(|it| it.device.driver.capabilities().host_backed);
        in_process.map(|it| it.arena.glance().committed).sum()
    }
}

impl Memory {
    /// Returns the names of the arenas, in the order of `MemoryDevices::occupancy`.
    #[cfg(feature = "service")]
    pub(crate) fn arena_names(&self) -> Vec<String> {
        self.0.shared.arenas().iter().map(|listed| listed.arena.name().to_owned()).collect()
    }
}

/// The host's ledger, for contents of sleeping arenas. It holds only the accounts, so that an arena
/// may outlive its `Memory`.
pub(in crate::memory) struct HostRoom {
    admission: Admission,
}

impl HostBudget for HostRoom {
    fn reserve(&self, bytes: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        match self.admission.try_reserve_resource(Cost::host(bytes)) {
            Ok(permit) => Ok(Box::new(permit)),
            Err(Rejected::Full { reserved, allowance, .. }) => {
                Err(format!("{reserved} reserved, allowance {allowance}"))
            }
            Err(rejected) => Err(rejected.to_string()),
        }
    }

    fn settle(&self, reserved: &mut (dyn Any + Send)) {
        if let Some(permit) = reserved.downcast_mut::<Permit>() {
            permit.settle();
        }
    }
}

impl fmt::Debug for HostRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRoom").finish_non_exhaustive()
    }
}

impl Shared {
    /// The default configuration of an arena.
    pub(in crate::memory) fn arena_config(&self, name: impl Into<String>) -> ArenaConfig {
        let mut sleep = self.config.device_sleep();
        sleep.stores_max = sleep.stores_max.min(self.stores_max());
        let decay = self.config.device_decay.value;
        ArenaConfig { decay, sleep, ..ArenaConfig::new(name) }
    }

    /// Returns the host memory that an arena may keep for its next sleep: a quarter of the limit,
    /// because requests cannot use it.
    fn stores_max(&self) -> ByteSize {
        let limit = self.state.limit();
        if limit == ByteSize::MAX { limit } else { ByteSize::new(limit.get() / 4) }
    }

    /// Makes an arena reserve host memory for its contents while it sleeps.
    pub(in crate::memory) fn book_contents_of(&self, arena: &DeviceArena) {
        arena.set_host_budget(Arc::new(HostRoom { admission: self.admission.clone() }));
    }

    /// Puts the arena to sleep that has been due longest. Returns `true` if more are due.
    pub(in crate::memory) fn sleep_next(&self, now: Moment) -> bool {
        // During a shutdown, arenas are not put to sleep.
        if self.admission.is_closed() || self.queue.is_closed() {
            return false;
        }
        let arenas = self.working_arenas().map(|arena| (arena.next_sleep(), arena));
        let mut due: Vec<_> = arenas.filter(|(due, _)| *due <= now).collect();
        due.sort_by_key(|(due, _)| *due);
        let more = due.len() > 1;
        if let Some((_, arena)) = due.into_iter().next()
            && let Err(error) = arena.sleep_if_idle(now)
            && !is_loss(&error)
        {
            self.note_awake(&arena, &error.to_string());
        }
        self.report_losses();
        more
    }

    /// Adds a diagnostic, once for each arena that did not go to sleep: it is tried again, each
    /// time with other figures.
    fn note_awake(&self, arena: &DeviceArena, error: &str) {
        let start = format!("idle sleep of {} failed: ", arena.name());
        let text = format!("{start}{error}");
        self.add_diagnostic_once(&start, Diagnostic::warning("device", text));
    }

    /// Releases the host memory of sleeping arenas that have no block left: nothing wakes them, and
    /// the worker has ended.
    pub(in crate::memory) fn end_empty_sleeps(&self) {
        for arena in self.working_arenas() {
            if arena.state() == SleepState::Asleep && arena.glance().live.is_zero() {
                self.purged(&arena);
            }
        }
    }
}

impl Devices {
    /// Makes admission use one budget if the memory of arenas is in the host's. Returns the reclaim
    /// steps of arenas, and `true` if some device has memory of its own.
    pub(in crate::memory) fn settle_budgets(
        &self,
        admission: &Admission,
        joined: &Arc<OnceLock<Arc<Shared>>>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> (Vec<Arc<dyn Reclaim>>, bool) {
        if !self.has_own_memory() {
            admission.state().unify();
        }
        if self.list.iter().any(|device| device.counted == CountedIn::BesideKernel) {
            let text = "the device has no memory of its own: memory committed by arenas counts \
                        against the host's memory limit, and there is no device budget";
            diagnostics.push(Diagnostic::info("device", text.to_owned()));
        }
        (self.reclaim_steps(joined), self.any_own_memory())
    }

    /// Returns the steps, for the budget in which arenas count. `joined` is set once the parts are
    /// connected.
    fn reclaim_steps(&self, joined: &Arc<OnceLock<Arc<Shared>>>) -> Vec<Arc<dyn Reclaim>> {
        let own = if self.has_own_memory() { Budget::Device } else { Budget::Host };
        let step = |name, relieves, release| -> Arc<dyn Reclaim> {
            Arc::new(ArenaStep { name, relieves, release, shared: Arc::clone(joined) })
        };
        vec![
            step("host memory for sleeping arenas", Budget::Host, Shared::release_stores),
            step("idle device memory", own, Shared::purge_arenas),
        ]
    }
}

/// Releases idle memory of arenas, or the host memory that they keep for their next sleep.
struct ArenaStep {
    name: &'static str,
    relieves: Budget,
    release: fn(&Shared) -> ByteSize,
    shared: Arc<OnceLock<Arc<Shared>>>,
}

impl Reclaim for ArenaStep {
    fn name(&self) -> &'static str {
        self.name
    }

    fn relieves(&self) -> Budget {
        self.relieves
    }

    fn cost_rank(&self) -> u8 {
        0
    }

    fn reclaim(&self, _: ByteSize) -> ByteSize {
        self.shared.get().map_or(ByteSize::ZERO, |shared| (self.release)(shared))
    }
}

impl Shared {
    /// Samples the memory of each device, and releases idle memory if little is free.
    pub(in crate::memory) fn sample_devices(&self, now: Moment) {
        for device in self.devices.list.iter().filter(|it| it.counted == CountedIn::OnDevice) {
            if device.is_lost() {
                device.watch.forget();
                continue;
            }
            self.sample_device(device, now);
            if device.admission.is_some() {
                self.keep_below_limit(device);
            }
        }
        self.report_losses();
    }

    fn sample_device(&self, device: &Device, now: Moment) {
        // Memory that is committed or released during the query counts as ours, not as unmanaged.
        let before = self.committed_on(device);
        let memory = match device.driver.device_memory() {
            Ok(Some(memory)) => memory,
            Ok(None) => return,
            Err(error) => return self.device_is_silent(device, &error),
        };
        let committed = before.max(self.committed_on(device));
        let look = DeviceSample { total: memory.total, free: memory.free, committed };
        let was_short = device.watch.is_short();
        let (wanted, low) = device.watch.add_sample(now, look);
        let (free, idle) = (look.free, self.idle_on(device));
        if !wanted.is_zero() {
            let given = self.give_idle_back(device, wanted);
            device.watch.add_released(given);
        }
        let name = &device.name;
        match (was_short, device.watch.is_short()) {
            (false, true) => log!(
                info,
                target: "lowtide",
                device = %name,
                %free,
                watermark = %low,
                %idle,
                "device memory low"
            ),
            (true, false) => {
                log!(info, target: "lowtide", device = %name, %free, "device memory recovered");
            }
            _ => {}
        }
    }

    /// Releases idle memory of a device if its arenas hold more of the limit than the lowest level
    /// allows.
    fn keep_below_limit(&self, device: &Device) {
        let limit = self.config.device_limit.value;
        let Thresholds { up: [up, ..], down: [down, ..], .. } = Thresholds::default();
        let committed = self.committed_on(device);
        if limit != ByteSize::MAX && committed > limit.scaled(up) {
            self.give_idle_back(device, committed.saturating_sub(limit.scaled(down)));
        }
    }

    /// Releases `wanted` idle bytes of a device's arenas, starting with those that have the most.
    /// Returns the released bytes, which may be more: memory leaves in whole handles.
    fn give_idle_back(&self, device: &Device, wanted: ByteSize) -> ByteSize {
        let mut arenas: Vec<_> =
            self.arenas_on(device).map(|arena| (arena.control_figures(), arena)).collect();
        arenas.sort_by_key(|(figures, _)| std::cmp::Reverse(figures.idle));
        let mut released = ByteSize::ZERO;
        for (figures, arena) in arenas {
            let part = figures.idle.min(wanted.saturating_sub(released));
            if part.is_zero() {
                break;
            }
            match arena.trim(figures.committed.saturating_sub(part)) {
                Ok(given) => released = released.saturating_add(given),
                Err(error) if is_loss(&error) => break,
                Err(error) => {
                    let text = format!("arena {}: trim failed: {error}", arena.name());
                    self.add_diagnostic(Diagnostic::warning("device", text));
                }
            }
        }
        released
    }

    /// Discards the last sample until the device answers again, which never happens after its
    /// context is lost.
    fn device_is_silent(&self, device: &Device, error: &DriverError) {
        device.watch.forget();
        let start = format!("device {}: cannot query the device's memory: ", device.name);
        self.add_diagnostic_once(&start, Diagnostic::warning("device", format!("{start}{error}")));
    }

    pub(super) fn committed_on(&self, device: &Device) -> ByteSize {
        self.arenas_on(device).map(|arena| arena.glance().committed).sum()
    }

    fn idle_on(&self, device: &Device) -> ByteSize {
        self.arenas_on(device).map(|arena| arena.control_figures().idle).sum()
    }
}

#[cfg(feature = "cuda")]
impl MemoryDevices<'_> {
    /// Calls [`PoolGovernor::decay`] of the governor on the worker, once in each metrics interval,
    /// while both exist. A failure becomes a diagnostic. Registering a governor twice has no
    /// effect.
    ///
    /// The pool keeps its own decay time: neither a purge of this `Memory` nor the watermark of the
    /// device shortens it; [`PoolGovernor::trim`] releases all idle memory. The worker never waits
    /// for the context, because that would invalidate a graph capture. Memory stays in the pool
    /// until the program has waited for its free to complete (for example with
    /// `cuStreamSynchronize`). [`PoolGovernor::decay`] waits itself if the program calls it.
    ///
    /// # Errors
    /// [`MemoryError::Forked`] in a forked child.
    pub fn govern(&self, governor: &Arc<PoolGovernor>) -> Result<(), MemoryError> {
        let shared = self.shared();
        shared.check_here()?;
        let new = Arc::downgrade(governor);
        let mut governors = crate::sync::lock(&shared.devices.governors);
        governors.retain(|one| one.strong_count() > 0 && !one.ptr_eq(&new));
        governors.push(new);
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl Shared {
    /// Releases the memory of governed pools that was unused for the decay time.
    pub(super) fn decay_governors(&self, now: Moment) {
        if self.check_here().is_err() {
            return;
        }
        let all = crate::sync::lock(&self.devices.governors).clone();
        for governor in all.iter().filter_map(std::sync::Weak::upgrade) {
            if let Err(error) = governor.decay(now) {
                // A lost device is asked for nothing more.
                if error.is_context_lost() {
                    let lost = Arc::downgrade(&governor);
                    crate::sync::lock(&self.devices.governors).retain(|one| !one.ptr_eq(&lost));
                }
                let text = format!("pool governor of {}: {error}", governor.device());
                self.add_diagnostic(Diagnostic::warning("device", text));
            }
        }
    }
}

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

use std::sync::{Arc, OnceLock};

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::SleepState;
use crate::device::driver::Driver as _;
#[cfg(feature = "cuda")]
use crate::device::driver::cuda::PoolGovernor;
#[cfg(feature = "cuda")]
use crate::memory::error::MemoryError;
use crate::memory::error::{Diagnostic, Shutdown};
use crate::memory::manager::Memory;
use crate::memory::shared::Shared;
use crate::memory::snapshot::BudgetSnapshot;
use crate::sync::lock;
use lowtide_admission::{Admission, Budget, Level, ReclaimStep, Thresholds};

use super::arenas::{ManagedArena, is_loss};
use super::device::{CountedIn, Device};
use super::state::Devices;
use super::values::{DeviceStatus, DevicesSnapshot};
use super::watermark::DeviceSample;
#[cfg(feature = "cuda")]
use super::{MemoryDevices, cuda::DeviceProcesses};

impl Shared {
    /// Decays the arenas that are due, and completes what sessions have left.
    pub(in crate::memory) fn decay_devices(&self, now: Moment) {
        self.report_losses();
        for arena in self.working_arenas() {
            if arena.next_decay() > now {
                continue;
            }
            if let Err(error) = arena.decay(now) {
                self.warn_unless_lost(format_args!("arena {}", arena.name()), &error);
            }
        }
        self.shrink_asked();
        self.sweep();
    }

    /// Does what is due with each publication.
    pub(in crate::memory) fn maintain_devices(&self) {
        self.report_losses();
        // Frees the blocks of completed copies, and releases the memory of pools above their
        // watermarks.
        for pool in self.pools() {
            if let Err(error) = pool.maintain() {
                self.warn_unless_lost(format_args!("pinned pool {}", pool.name()), &error);
            }
        }
        #[cfg(feature = "cuda")]
        self.decay_governors();
        self.sweep();
    }

    /// Ends the management of arenas after the threads have ended, and reports what is live.
    pub(in crate::memory) fn end_devices(&self, report: &mut Shutdown) {
        report.requests += self.devices.budgets().map(|budget| budget.stats().held()).sum::<u64>();
        // Sleeping arenas that have no block left are not woken by any, and the worker has ended.
        for arena in self.working_arenas() {
            if arena.state() == SleepState::Asleep && arena.glance().live.is_zero() {
                self.purged(&arena);
            }
        }
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
        let snapshot = |it: &Arc<ManagedArena>| it.arena.snapshot();
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
            lost: device.driver.lost().map(ToString::to_string),
            budget: own.or(first),
            memory: device.memory(),
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
        self.0.shared.arenas().iter().map(|it| it.arena.name().to_owned()).collect()
    }
}

impl Shared {
    /// Puts the arena to sleep that has been due longest. Returns `true` if more are due.
    pub(in crate::memory) fn sleep_next(&self, now: Moment) -> bool {
        // During a shutdown, arenas are not put to sleep.
        if self.admission.is_closed() || self.state.is_closed() {
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
            // Once for each arena: it is tried again, each time with other figures.
            let start = format!("idle sleep of {} failed: ", arena.name());
            let text = format!("{start}{error}");
            self.add_diagnostic_once(&start, Diagnostic::warning("device", text));
        }
        self.report_losses();
        more
    }
}

impl Devices {
    /// Makes admission use one budget if the memory of arenas is in the host's. Returns the reclaim
    /// steps of arenas, and `true` if some device has memory of its own. `joined` is set once the
    /// parts are connected.
    pub(in crate::memory) fn settle_budgets(
        &self,
        admission: &Admission,
        joined: &Arc<OnceLock<Arc<Shared>>>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> (Vec<ReclaimStep>, bool) {
        if !self.has_own_memory() {
            admission.state().unify();
        }
        if self.list.iter().any(|device| device.counted == CountedIn::BesideKernel) {
            let text = "the device has no memory of its own: memory committed by arenas counts \
                        against the host's memory limit, and there is no device budget";
            diagnostics.push(Diagnostic::info("device", text.to_owned()));
        }
        let own = if self.has_own_memory() { Budget::Device } else { Budget::Host };
        let step = |relieves, release: fn(&Shared) -> ByteSize| {
            let shared = Arc::clone(joined);
            let release = move |_| shared.get().map_or(ByteSize::ZERO, |shared| release(shared));
            ReclaimStep::new(relieves, Level::Elevated, release)
        };
        // Host memory for sleeping arenas, then idle memory of all.
        let steps =
            vec![step(Budget::Host, Shared::release_stores), step(own, Shared::purge_arenas)];
        (steps, self.has_own())
    }
}

impl Shared {
    /// Samples the memory of each device, and releases idle memory if little is free.
    pub(in crate::memory) fn sample_devices(&self, now: Moment) {
        for device in self.devices.list.iter().filter(|it| it.counted == CountedIn::OnDevice) {
            if device.is_lost() {
                lock(&device.watch).forget();
                continue;
            }
            self.sample_device(device, now);
            // Releases idle memory if its arenas hold more of the limit than the lowest level
            // allows.
            let Thresholds { up: [up, ..], down: [down, ..], .. } = Thresholds::default();
            let (limit, committed) = (self.config.device_limit.value, self.committed_on(device));
            let has_limit = device.admission.is_some() && limit != ByteSize::MAX;
            if has_limit && committed > limit.scaled(up) {
                self.give_idle_back(device, committed.saturating_sub(limit.scaled(down)));
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
            Err(error) => {
                lock(&device.watch).forget();
                let start = format!("device {}: cannot query the device's memory: ", device.name);
                let text = format!("{start}{error}");
                return self.add_diagnostic_once(&start, Diagnostic::warning("device", text));
            }
        };
        let committed = before.max(self.committed_on(device));
        let look = DeviceSample { total: memory.total, free: memory.free, committed };
        let mut watch = lock(&device.watch);
        let (was_short, wanted) = (watch.is_short(), watch.look(now, look));
        let (is_short, low) = (watch.is_short(), watch.low(look.total));
        drop(watch);
        let idle = self.arenas_on(device).map(|arena| arena.control_figures().0[1]);
        let (free, idle) = (look.free, idle.sum::<ByteSize>());
        if !wanted.is_zero() {
            let released = self.give_idle_back(device, wanted);
            lock(&device.watch).released_total += released.get();
        }
        let device = &device.name;
        if is_short && !was_short {
            log!(info, %device, %free, watermark = %low, %idle, "device memory low");
        } else if was_short && !is_short {
            log!(info, %device, %free, "device memory recovered");
        }
    }

    /// Releases `wanted` idle bytes of a device's arenas, starting with those that have the most.
    /// Returns the released bytes, which may be more: memory leaves in whole handles.
    fn give_idle_back(&self, device: &Device, wanted: ByteSize) -> ByteSize {
        let mut arenas: Vec<_> =
            self.arenas_on(device).map(|arena| (arena.control_figures().0, arena)).collect();
        arenas.sort_by_key(|([_, idle], _)| std::cmp::Reverse(*idle));
        let mut released = ByteSize::ZERO;
        for ([committed, idle], arena) in arenas {
            let part = idle.min(wanted.saturating_sub(released));
            if part.is_zero() {
                break;
            }
            match arena.trim(committed.saturating_sub(part)) {
                Ok(given) => released = released.saturating_add(given),
                Err(error) if is_loss(&error) => break,
                Err(error) => {
                    self.warn_unless_lost(
                        format_args!("arena {}: trim failed", arena.name()),
                        &error,
                    );
                }
            }
        }
        released
    }

    pub(super) fn committed_on(&self, device: &Device) -> ByteSize {
        self.arenas_on(device).map(|arena| arena.glance().committed).sum()
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
        let mut governors = lock(&shared.devices.governors);
        governors.retain(|one| one.strong_count() > 0 && !one.ptr_eq(&new));
        governors.push(new);
        Ok(())
    }

    /// Returns the processes that use each CUDA device of this `Memory`, as NVML lists them.
    /// Returns an empty list without CUDA devices, and in a forked child.
    ///
    /// NVML (`libnvidia-ml.so.1`) is loaded by the first call, and stays loaded. If it cannot be
    /// loaded, a diagnostic reports it once, and the lists contain the error. A list is kept for 5
    /// s, so calls in between cost little. Other calls start a thread for the query and wait for it
    /// for at most 50 ms; if NVML takes longer, they return the last list, or an error, and a later
    /// call returns the answer. It has not run on a real GPU.
    #[must_use]
    pub fn processes(&self) -> Vec<DeviceProcesses> {
        let shared = self.shared();
        if shared.check_here().is_err() {
            return Vec::new();
        }
        let devices = &shared.devices;
        let committed = |device: &Device| shared.committed_on(device);
        let (lists, failure) = devices.processes.read(&*shared.clock, &devices.list, committed);
        if let Some(error) = failure {
            let start = "the processes on the device are unknown: ";
            let text = format!("{start}{error}");
            shared.add_diagnostic_once(start, Diagnostic::info("device", text));
        }
        lists
    }
}

#[cfg(feature = "cuda")]
impl Shared {
    /// Releases the memory of governed pools that was unused for the decay time.
    pub(super) fn decay_governors(&self) {
        if self.check_here().is_err() {
            return;
        }
        let all = lock(&self.devices.governors).clone();
        for governor in all.iter().filter_map(std::sync::Weak::upgrade) {
            if let Err(error) = governor.decay(self.clock.now()) {
                // A lost device is asked for nothing more.
                if error.is_context_lost() {
                    let lost = Arc::downgrade(&governor);
                    lock(&self.devices.governors).retain(|one| !one.ptr_eq(&lost));
                }
                let text = format!("pool governor of {}: {error}", governor.device());
                self.add_diagnostic(Diagnostic::warning("device", text));
            }
        }
    }
}

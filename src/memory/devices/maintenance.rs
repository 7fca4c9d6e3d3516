//! What a `Memory` does with all arenas: their decay at each tick, what is due with each
//! publication, their figures, and their end.

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::DeviceArena;
use crate::device::driver::Driver;
use crate::memory::error::Diagnostic;
use crate::memory::manager::Memory;
use crate::memory::shared::Shared;
use crate::memory::shutdown::Shutdown;

use super::sensor::Counted;
use super::snapshot::DevicesSnapshot;

impl Shared {
    /// Decays the arenas that are due, and completes what sessions have left.
    pub(in crate::memory) fn decay_devices(&self, now: Moment) {
        for arena in self.arenas() {
            if arena.next_decay() > now {
                continue;
            }
            if let Err(error) = arena.decay(now) {
                let text = format!("arena {}: {error}", arena.name());
                self.add_diagnostic(Diagnostic::warning("device", text));
            }
        }
        self.shrink_asked();
        self.sweep();
    }

    /// Does what is due with each publication.
    pub(in crate::memory) fn maintain_devices(&self, now: Moment) {
        self.maintain_pools();
        #[cfg(feature = "cuda")]
        self.decay_governors(now);
        #[cfg(not(feature = "cuda"))]
        let _ = now;
        self.sweep();
    }

    /// Ends the management of arenas after the threads have ended, and reports what is live.
    pub(in crate::memory) fn end_devices(&self, report: &mut Shutdown) {
        self.end_empty_sleeps();
        self.release_stores();
        report.device_live = self.device_arenas().map(|arena| arena.glance().live).sum();
    }

    /// Returns the figures of arenas and device; none of arenas in a forked child.
    pub(in crate::memory) fn devices_snapshot(&self) -> DevicesSnapshot {
        let here = self.birth.is_here();
        let driver = self.devices.driver.as_deref().filter(|_| here);
        let (arenas, draining) =
            if here { self.devices.arenas.parted() } else { Default::default() };
        DevicesSnapshot {
            arenas: arenas.iter().map(DeviceArena::snapshot).collect(),
            draining: draining.iter().map(DeviceArena::snapshot).collect(),
            memory: driver.and_then(|driver| self.devices.watch.snapshot(driver)),
            rollback_failures_total: driver.map_or(0, Driver::rollback_failures_total),
        }
    }

    /// Returns the memory committed by arenas that the kernel does not count, although it is the
    /// host's.
    pub(in crate::memory) fn committed_beside_kernel(&self) -> ByteSize {
        let is_beside = self.devices.counted == Counted::BesideKernel && self.birth.is_here();
        if is_beside { self.device_committed() } else { ByteSize::ZERO }
    }

    /// Returns the memory committed by arenas in memory of this process.
    pub(in crate::memory) fn committed_in_process(&self) -> ByteSize {
        let driver = self.devices.driver.as_ref();
        let is_host = driver.is_some_and(|driver| driver.capabilities().host_backed);
        if !is_host {
            return ByteSize::ZERO;
        }
        self.arenas().iter().map(|arena| arena.glance().committed).sum()
    }
}

impl Shutdown {
    /// Describes the device memory that is still held.
    pub(in crate::memory) fn devices(&self) -> String {
        format!(", {} of device memory live", self.device_live)
    }
}

impl Memory {
    /// Returns the names of the arenas, in the order of [`Memory::occupancy`].
    #[cfg(feature = "service")]
    pub(crate) fn arena_names(&self) -> Vec<String> {
        self.0.shared.arenas().iter().map(|arena| arena.name().to_owned()).collect()
    }

    /// Returns the time on the manager's clock.
    #[cfg(feature = "service")]
    pub(crate) fn now(&self) -> Moment {
        self.0.shared.clock.now()
    }
}

//! The figures of device arenas and of the device: for snapshots, for metrics, and for the control
//! thread's samples.
//!
//! Metrics have one set of figures per device and name, even if several arenas have used the name:
//! a replaced arena drains while another has its name, and is then dropped. The series of a name
//! must not lose the bytes of a draining arena, its counters must not fall, and the last sizes of a
//! dropped arena must not stay. Sizes are therefore summed, totals continue, and the sizes of
//! dropped arenas are zero.
//!
//! The sensor runs on the control thread: no allocation, no driver call. The kernel counts memory
//! committed by an integrated GPU neither in the resident set nor against the cgroup (reported for
//! a GB10: weights of 77 GiB, a resident set of 1.8 GiB), although it is the machine's memory. It
//! is added there, and nowhere else. Memory of pinned pools is always the host's, and counted by
//! the kernel: as anonymous memory of the host driver, and as shared memory of CUDA. A lost device
//! counts as empty with a limit of zero, so nothing more is admitted for it. Its arenas are due for
//! neither decay nor sleep.
//!
//! Invariants: `sum of published committed = sum of committed`, of all arenas at one instant; the
//! sampled figures of a device are the sums over its own arenas.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::device::driver::Backend;
use crate::device::{ArenaSnapshot, SleepState};
use crate::memory::snapshot::BudgetSnapshot;
use crate::metrics::record::{self, DeviceBudget, MetricsWriter};
use crate::sync::{Mutex, lock};
use lowtide_admission::{DeviceFigures, Sample};

use super::arenas::Arenas;
use super::device::{CountedIn, Device};

/// The device arenas of a [`Memory`](crate::Memory), and its devices, at one instant.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DevicesSnapshot {
    /// The arenas of this `Memory` that serve, including those of pinned pools
    /// ([`Backend::PinnedHost`]).
    pub arenas: Vec<ArenaSnapshot>,
    /// Arenas that were replaced, or left by their last user, and still have live blocks.
    pub draining: Vec<ArenaSnapshot>,
    /// The number of the device of each arena: first of those that serve, then of those that
    /// drain.
    pub arena_devices: Vec<u32>,
    /// The devices, in the order of their numbers, the default one first.
    pub devices: Vec<DeviceStatus>,
    /// The default device as a whole, as last sampled by the worker, about a second ago; `None` if
    /// device memory is host memory, or the device reports nothing.
    pub memory: Option<DeviceSnapshot>,
    /// The number of failed driver calls that should have undone an earlier call
    /// ([`rollback_failures_total`](crate::device::driver::Driver::rollback_failures_total)), of
    /// all devices.
    pub rollback_failures_total: u64,
}

impl DevicesSnapshot {
    /// Creates the snapshot of one device with these arenas.
    #[cfg(test)]
    pub(super) fn of_one(
        name: &str,
        arenas: Vec<ArenaSnapshot>,
        draining: Vec<ArenaSnapshot>,
    ) -> Self {
        let device = DeviceStatus {
            number: 0,
            name: name.to_owned(),
            ordinal: None,
            backend: Backend::Host,
            lost: None,
            budget: None,
            memory: None,
            rollback_failures_total: 0,
        };
        let arena_devices = vec![0; arenas.len() + draining.len()];
        let (devices, memory) = (vec![device], None);
        Self { arenas, draining, arena_devices, devices, memory, rollback_failures_total: 0 }
    }

    /// Returns each arena with its device: first those that serve, then those that drain.
    pub fn placed(&self) -> impl Iterator<Item = (&DeviceStatus, &ArenaSnapshot)> {
        self.all().zip(&self.arena_devices).filter_map(|(arena, number)| {
            let device = self.devices.iter().find(|device| device.number == *number)?;
            Some((device, arena))
        })
    }

    fn all(&self) -> impl Iterator<Item = &ArenaSnapshot> {
        self.arenas.iter().chain(&self.draining)
    }

    /// Returns the names and committed bytes of arenas in host memory.
    pub(in crate::memory) fn on_host(&self) -> Vec<(String, ByteSize)> {
        let is_host = |backend| matches!(backend, Backend::Host | Backend::PinnedHost);
        let on_host = self.all().filter(|arena| is_host(arena.backend));
        on_host.map(|arena| (arena.name.clone(), arena.committed)).collect()
    }

    /// Returns the name of the first lost device, and the error.
    pub(in crate::memory) fn first_lost(&self) -> Option<(&str, &str)> {
        self.devices.iter().find_map(|device| Some((&*device.name, device.lost.as_deref()?)))
    }

    /// Returns the host memory that holds contents of sleeping arenas, or is kept for that.
    pub(in crate::memory) fn offloaded(&self) -> ByteSize {
        self.all().map(|arena| arena.offloaded).sum()
    }

    /// Returns the live bytes in device memory.
    pub(in crate::memory) fn live(&self) -> ByteSize {
        self.on_device().map(|arena| arena.live.saturating_sub(arena.asleep)).sum()
    }

    /// Returns the retained bytes of device memory.
    pub(in crate::memory) fn retained(&self) -> ByteSize {
        self.on_device().map(ArenaSnapshot::retained).sum()
    }

    fn on_device(&self) -> impl Iterator<Item = &ArenaSnapshot> {
        self.all().filter(|arena| arena.backend != Backend::PinnedHost)
    }
}

/// A device of a [`Memory`](crate::Memory) at one instant.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceStatus {
    /// Its place among the devices, from 0: the default device has 0.
    pub number: u32,
    /// Its name in metrics and errors: the UUID, or the number if the driver knows none.
    pub name: String,
    /// Its ordinal in CUDA, among the devices visible to the process.
    pub ordinal: Option<u32>,
    /// The way in which its memory is allocated.
    pub backend: Backend,
    /// The error by which its loss became known; `None` while it works. Until the process restarts,
    /// a lost device admits nothing, and every driver call for it fails with this error. A lease of
    /// an awake arena still succeeds, and the snapshots of its arenas keep their last state.
    pub lost: Option<String>,
    /// Its budget; `None` if its memory counts in the host's. Only the first device has a level.
    pub budget: Option<BudgetSnapshot>,
    /// The whole device as last sampled by the worker, about a second ago; `None` if its memory is
    /// host memory, or the device reports nothing.
    pub memory: Option<DeviceSnapshot>,
    /// The number of failed driver calls that should have undone an earlier call.
    pub rollback_failures_total: u64,
}

/// The memory of a device, with all its users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceSnapshot {
    /// The total memory.
    pub total: ByteSize,
    /// The free memory.
    pub free: ByteSize,
    /// The memory in use right after our context was created and before our first commit. It is an
    /// upper bound of the context's size, because it includes memory that other processes and other
    /// code of this process used at that moment. `None` if unknown.
    pub context_overhead: Option<ByteSize>,
    /// The memory that is neither free, nor committed by our arenas, nor in the context overhead.
    /// It is used by other processes and by other code of this process: allocations made directly
    /// through `cudarc`, by ONNX Runtime or by candle, and growth of the context. It is too small
    /// if a process that was counted in the context overhead has exited. `None` if the context
    /// overhead is unknown.
    pub unmanaged: Option<ByteSize>,
    /// `true` if less than the watermark is free, or was and has not recovered enough. Idle memory
    /// of our arenas is then released before its decay time.
    pub is_short: bool,
    /// The bytes released because of that, since the start.
    pub watermark_released_total: u64,
}

/// The maximum number of names of dropped arenas: as many as arenas can be open at once.
const NAMES_MAX: usize = 64;

/// The names of a device and an arena.
pub(super) type OnDevice = (String, String);

/// The counts of dropped arenas, by device and name.
#[derive(Debug, Default)]
pub(in crate::memory) struct Gone(Mutex<BTreeMap<OnDevice, ArenaSnapshot>>);

impl Gone {
    /// Keeps the counts of an arena, unless there are too many names.
    pub(in crate::memory) fn add(&self, device: &str, mut last: ArenaSnapshot) {
        for size in sizes(&mut last) {
            *size = ByteSize::ZERO;
        }
        (last.largest_free, last.leases) = (ByteSize::ZERO, 0);
        last.state = SleepState::default();
        let mut gone = lock(&self.0);
        let key = (device.to_owned(), last.name.clone());
        if let Some(sum) = gone.get_mut(&key) {
            add(sum, &last);
        } else if gone.len() < NAMES_MAX {
            gone.insert(key, last);
        }
    }

    /// Returns one snapshot for each device and name of serving, draining and dropped arenas.
    pub(super) fn published(&self, devices: &DevicesSnapshot) -> BTreeMap<OnDevice, ArenaSnapshot> {
        let mut sums = lock(&self.0).clone();
        let mut placed: Vec<_> = devices.placed().collect();
        // Serving arenas come last: limit, backend and state are theirs.
        let serving = devices.arenas.len().min(placed.len());
        placed.rotate_left(serving);
        for (device, arena) in placed {
            match sums.entry((device.name.clone(), arena.name.clone())) {
                Entry::Occupied(mut sum) => add(sum.get_mut(), arena),
                Entry::Vacant(place) => {
                    place.insert(arena.clone());
                }
            }
        }
        sums
    }
}

fn add(sum: &mut ArenaSnapshot, other: &ArenaSnapshot) {
    let mut more = other.clone();
    for (size, more) in sizes(sum).into_iter().zip(sizes(&mut more)) {
        *size = size.saturating_add(*more);
    }
    for (total, more) in totals(sum).into_iter().zip(totals(&mut more)) {
        *total = total.saturating_add(*more);
    }
    sum.live_peak = sum.live_peak.max(other.live_peak).max(sum.live);
    sum.committed_peak = sum.committed_peak.max(other.committed_peak).max(sum.committed);
    sum.largest_free = sum.largest_free.max(other.largest_free);
    sum.limit = other.limit;
    (sum.backend, sum.state) = (other.backend, other.state);
    sum.lock_wait_total = sum.lock_wait_total.saturating_add(other.lock_wait_total);
    sum.leases = sum.leases.saturating_add(other.leases);
}

/// Returns the sizes, which a dropped arena has no more.
const fn sizes(of: &mut ArenaSnapshot) -> [&mut ByteSize; 14] {
    [
        &mut of.live,
        &mut of.asleep,
        &mut of.offloaded,
        &mut of.requested,
        &mut of.active,
        &mut of.idle,
        &mut of.committed,
        &mut of.reserved,
        &mut of.holes,
        &mut of.exported,
        &mut of.pending,
        &mut of.cached,
        &mut of.metadata,
        &mut of.imported,
    ]
}

/// Returns the counters, which continue.
const fn totals(of: &mut ArenaSnapshot) -> [&mut u64; 24] {
    let failures = &mut of.alloc_failures_total;
    [
        &mut of.allocs_total,
        &mut of.frees_total,
        &mut of.sleeps_total,
        &mut of.wakes_total,
        &mut of.wake_failures_total,
        &mut of.release_panics_total,
        &mut of.parked_errors_total,
        &mut of.remaps_total,
        &mut of.remapped_bytes_total,
        &mut of.moves_total,
        &mut of.moved_bytes_total,
        &mut of.trimmed_bytes_total,
        &mut of.shrunk_bytes_total,
        &mut of.shortage_callbacks_total,
        &mut of.shortage_panics_total,
        &mut of.lock_contended_total,
        &mut of.commits_total,
        &mut of.decommits_total,
        &mut of.committed_bytes_total,
        &mut of.decommitted_bytes_total,
        &mut failures.limit,
        &mut failures.device,
        &mut failures.addresses,
        &mut failures.driver,
    ]
}

/// The maximum number of arenas and backends with series of their own, on all devices.
const BACKENDS_MAX: usize = 64;

/// The series that were published.
#[derive(Default)]
pub(in crate::memory) struct Series {
    /// The arenas that were published, with the names of device and arena, and the backend.
    backends: Vec<(String, String, Backend)>,
    /// The numbers of the devices whose memory was published the last time; at most all devices.
    known: Vec<u32>,
}

impl Series {
    pub(in crate::memory) fn publish(
        &mut self,
        to: MetricsWriter,
        gone: &Gone,
        devices: &DevicesSnapshot,
    ) {
        for ((device, _), arena) in &gone.published(devices) {
            to.arena(device, arena);
        }
        self.publish_backends(to, devices);
        devices.devices.iter().for_each(|device| self.publish_device(to, device));
    }

    /// Publishes the backend of each device arena. A published pair stays, with value 0 after the
    /// arena is closed; beyond [`BACKENDS_MAX`] pairs, new ones are not published.
    fn publish_backends(&mut self, to: MetricsWriter, devices: &DevicesSnapshot) {
        for (device, arena) in devices.placed() {
            let is_known = |(on, name, backend): &(String, String, Backend)| {
                *on == device.name && *name == arena.name && *backend == arena.backend
            };
            if self.backends.len() < BACKENDS_MAX && !self.backends.iter().any(is_known) {
                self.backends.push((device.name.clone(), arena.name.clone(), arena.backend));
            }
        }
        for (on, name, backend) in &self.backends {
            let is_open = devices.placed().any(|(device, arena)| {
                device.name == *on && arena.name == *name && arena.backend == *backend
            });
            to.arena_info(on, name, *backend, is_open);
        }
    }

    fn publish_device(&mut self, to: MetricsWriter, status: &DeviceStatus) {
        let figures = status.memory.map(|device| record::DeviceMemoryFigures {
            total: device.total,
            free: device.free,
            context_overhead: device.context_overhead,
            unmanaged: device.unmanaged,
            watermark_released_total: device.watermark_released_total,
        });
        let name = &status.name;
        to.device(name, status.lost.is_some(), status.rollback_failures_total, figures);
        if let Some(budget) = &status.budget {
            let (reserved, ceiling) = (budget.reserved, budget.ceiling);
            let budget = DeviceBudget { reserved, ceiling, allowance: budget.allowance };
            to.device_budget(name, budget);
        }
        let was_known = self.known.contains(&status.number);
        self.known.retain(|known| *known != status.number);
        if status.memory.is_some() {
            self.known.push(status.number);
        } else if was_known {
            to.device_unknown(name);
        }
    }
}

/// The arenas, as the control thread reads them.
pub(in crate::memory) struct ArenasSensor {
    arenas: Arenas,
    list: Vec<Arc<Device>>,
    /// The figures of the last sample, by the number of the device.
    figures: Vec<DeviceFigures>,
    limit: Option<ByteSize>,
}

impl ArenasSensor {
    /// `limit` is that of each device; [`ByteSize::MAX`] for none.
    pub(super) fn new(arenas: Arenas, list: &[Arc<Device>], limit: ByteSize) -> Self {
        let figures = vec![DeviceFigures::default(); list.len()];
        let limit = (limit != ByteSize::MAX).then_some(limit);
        Self { arenas, list: list.to_vec(), figures, limit }
    }

    /// Adds the arenas to a sample of kernel and heap.
    pub(in crate::memory) fn add_to(&mut self, sample: &mut Sample) {
        for (figures, device) in self.figures.iter_mut().zip(&self.list) {
            let limit = if device.is_lost() { Some(ByteSize::ZERO) } else { self.limit };
            *figures = DeviceFigures { limit, ..DeviceFigures::default() };
        }
        let by_device = &mut self.figures;
        self.arenas.each(|device, arena| {
            let figures = arena.control_figures();
            let (committed, idle) = (figures.committed, figures.idle);
            let is_pinned = arena.backend() == Backend::PinnedHost;
            if device.counted == CountedIn::BesideKernel && !is_pinned {
                sample.physical = sample.physical.saturating_add(committed);
            }
            if device.is_lost() {
                return;
            }
            sample.device_decay_due = sample.device_decay_due.min(figures.next_decay);
            sample.device_sleep_due = sample.device_sleep_due.min(figures.next_sleep);
            if device.counted == CountedIn::OnDevice && !is_pinned {
                if let Some(sum) = by_device.get_mut(device.number as usize) {
                    sum.committed = sum.committed.saturating_add(committed);
                    sum.idle = sum.idle.saturating_add(idle);
                }
                return;
            }
            sample.purgeable = sample.purgeable.saturating_add(idle);
            sample.decaying = sample.decaying.saturating_add(idle);
            if device.counted == CountedIn::ByKernel {
                let other = sample.untracked_anonymous.saturating_sub(committed);
                sample.untracked_anonymous = other;
            }
        });
        let is_own = |device: &Arc<Device>| device.counted == CountedIn::OnDevice;
        sample.device_sleep_takes_host = self.list.iter().any(is_own);
        if let Some(figures) =
            self.figures.first().filter(|_| self.list.first().is_some_and(is_own))
        {
            sample.device_committed = figures.committed;
            sample.device_idle = figures.idle;
            sample.device_limit = figures.limit;
        }
    }

    /// Returns the figures of the last sample of the `nth` device that has an account of its own.
    pub(in crate::memory) fn further_device(&self, nth: usize) -> DeviceFigures {
        let with_account =
            self.list.iter().zip(&self.figures).filter(|it| it.0.admission.is_some());
        with_account.map(|(_, figures)| *figures).nth(nth).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::clock::ManualClock;
    use crate::device::{ArenaConfig, DeviceArena, HostDriver, Region};

    fn arena(name: &str, limit: ByteSize) -> DeviceArena {
        let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
        let config = ArenaConfig { limit, reserve: ByteSize::mib(64), ..ArenaConfig::new(name) };
        DeviceArena::open(driver, clock, config).expect("opens")
    }

    /// Arenas of one device, as metrics see them.
    fn published(
        gone: &Gone,
        serving: &[&DeviceArena],
        draining: &[&DeviceArena],
    ) -> Vec<ArenaSnapshot> {
        let snapshots = |arenas: &[&DeviceArena]| arenas.iter().map(|it| it.snapshot()).collect();
        let devices = DevicesSnapshot::of_one("0", snapshots(serving), snapshots(draining));
        gone.published(&devices).into_values().collect()
    }

    #[test]
    fn a_name_keeps_the_bytes_of_what_drains_and_the_counts_of_what_is_gone() {
        let gone = Gone::default();
        let (old, new) = (arena("a", ByteSize::mib(8)), arena("a", ByteSize::mib(4)));
        let other = arena("b", ByteSize::MAX);
        let held = old.alloc::<u8>(3 << 20, Region::Dynamic).expect("room");
        let fresh = new.alloc::<u8>(1 << 20, Region::Dynamic).expect("room");
        assert!(new.alloc::<u8>(5 << 20, Region::Dynamic).is_err());
        let serving = [&new, &other];
        let [a, b] = &published(&gone, &serving, &[&old])[..] else { panic!("two") };
        assert_eq!((a.name.as_str(), b.name.as_str()), ("a", "b"));
        assert_eq!((a.live, a.committed), (ByteSize::mib(4), ByteSize::mib(6)));
        assert_eq!((a.limit, b.limit), (ByteSize::mib(4), ByteSize::MAX));
        assert_eq!((a.allocs_total, a.alloc_failures_total.total()), (2, 1));
        drop(held);
        gone.add("0", old.snapshot());
        let [a, _] = &published(&gone, &serving, &[])[..] else { panic!("two") };
        assert_eq!((a.live, a.committed), (ByteSize::mib(1), ByteSize::mib(2)));
        assert_eq!((a.allocs_total, a.frees_total), (2, 1));
        drop(fresh);
        gone.add("0", new.snapshot());
        let [a, _] = &published(&gone, &[&other], &[])[..] else { panic!("two") };
        assert!(a.live.is_zero() && a.committed.is_zero() && a.reserved.is_zero(), "{a:?}");
        assert_eq!((a.allocs_total, a.frees_total), (2, 2));
    }

    #[test]
    fn what_sleeps_with_an_arena_that_drains_is_not_taken_for_retained() {
        let gone = Gone::default();
        let (old, new) = (arena("a", ByteSize::MAX), arena("a", ByteSize::MAX));
        let held = old.alloc::<u8>(4 << 20, Region::Dynamic).expect("room");
        let fresh = new.alloc::<u8>(2 << 20, Region::Dynamic).expect("room");
        let discard = crate::device::Contents::Discard;
        let options = crate::device::SleepOptions { dynamic: discard, ..Default::default() };
        old.sleep(options).expect("asleep");
        let [a] = &published(&gone, &[&new], &[&old])[..] else { panic!("one") };
        assert_eq!((a.live, a.asleep), (ByteSize::mib(6), ByteSize::mib(4)));
        assert_eq!((a.committed, a.retained()), (ByteSize::mib(2), ByteSize::ZERO));
        assert_eq!((a.sleeps_total, a.wakes_total), (1, 0));
        gone.add("0", old.snapshot());
        let [a] = &published(&gone, &[&new], &[])[..] else { panic!("one") };
        assert_eq!((a.asleep, a.sleeps_total), (ByteSize::ZERO, 1));
        drop((held, fresh));
    }

    #[test]
    fn names_that_are_gone_are_bounded() {
        let gone = Gone::default();
        let mut last = arena("a", ByteSize::MAX).snapshot();
        for nth in 0..NAMES_MAX + 9 {
            last.name = nth.to_string();
            gone.add("0", last.clone());
        }
        assert_eq!(published(&gone, &[], &[]).len(), NAMES_MAX);
    }
}

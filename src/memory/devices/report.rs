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

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::driver::Backend;
use crate::device::{ArenaSnapshot, SleepState};
use crate::memory::snapshot::BudgetSnapshot;
use crate::metrics::record::{DeviceBudget, MetricsWriter};
use crate::sync::{Mutex, lock};
use lowtide_admission::{DeviceFigures, Sample};

use super::arenas::{Arenas, ManagedArena};
use super::device::{CountedIn, Device};
use super::values::{DeviceStatus, DevicesSnapshot};

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
        &mut of.alloc_failures_limit_total,
        &mut of.alloc_failures_device_total,
        &mut of.alloc_failures_addresses_total,
        &mut of.alloc_failures_driver_total,
    ]
}

/// The maximum number of arenas and backends with series of their own, on all devices.
const BACKENDS_MAX: usize = 64;

/// The series that were published.
#[derive(Default)]
pub(in crate::memory) struct Series {
    /// The arenas that were published: the names of the device, the arena and the backend.
    backends: BTreeSet<(String, String, &'static str)>,
    /// The numbers of the devices whose memory was published the last time; at most all devices.
    known: BTreeSet<u32>,
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
        let of = |(device, arena): (&DeviceStatus, &ArenaSnapshot)| {
            (device.name.clone(), arena.name.clone(), arena.backend.name())
        };
        let open: BTreeSet<_> = devices.placed().map(of).collect();
        for arena in &open {
            if self.backends.len() < BACKENDS_MAX {
                self.backends.insert(arena.clone());
            }
        }
        for arena in &self.backends {
            let (device, name, backend) = arena;
            to.arena_info(device, name, backend, open.contains(arena));
        }
    }

    fn publish_device(&mut self, to: MetricsWriter, status: &DeviceStatus) {
        let DeviceStatus { name, lost, rollback_failures_total, memory, budget, .. } = status;
        let of = |&BudgetSnapshot { reserved, ceiling, allowance, .. }: &_| DeviceBudget {
            reserved,
            ceiling,
            allowance,
        };
        let budget = budget.as_ref().map(of);
        to.device(name, lost.is_some(), *rollback_failures_total, memory.as_ref(), budget);
        if status.memory.is_some() {
            self.known.insert(status.number);
        } else if self.known.remove(&status.number) {
            to.device_unknown(&status.name);
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
        self.arenas.each(|ManagedArena { arena, device, .. }| {
            let ([committed, idle], [next_decay, next_sleep]) = arena.control_figures();
            let is_pinned = arena.backend() == Backend::PinnedHost;
            if device.counted == CountedIn::BesideKernel && !is_pinned {
                sample.physical = sample.physical.saturating_add(committed);
            }
            if device.is_lost() {
                return;
            }
            let earlier = |due: Option<Moment>, next| Some(due.map_or(next, |due| due.min(next)));
            sample.device_decay_due = earlier(sample.device_decay_due, next_decay);
            sample.device_sleep_due = earlier(sample.device_sleep_due, next_sleep);
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
            sample.device = *figures;
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
        assert_eq!((a.allocs_total, a.alloc_failures_limit_total), (2, 1));
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

//! The figures of device arenas and of the device: for snapshots, for metrics, and for the control
//! thread's samples.
//!
//! Metrics have one set of figures per device and name, even if several arenas have used the name:
//! a replaced arena drains while another has its name, and is then dropped. The series of a name
//! must not lose the bytes of a draining arena, its counters must not fall, and the last sizes of a
//! dropped arena must not stay. Sizes are therefore summed, totals continue, and the sizes of
//! dropped arenas are zero. The recorder keeps a series for ever, so only the first names have
//! their own; all further arenas of a device share those of the name `other`.
//!
//! The sensor runs on the control thread: no allocation, no driver call. The kernel counts memory
//! committed by an integrated GPU neither in the resident set nor against the cgroup (reported for
//! a GB10: weights of 77 GiB, a resident set of 1.8 GiB), although it is the machine's memory. It
//! is added there, and nowhere else. Memory of pinned pools is always the host's, and counted by
//! the kernel: as anonymous memory of the host driver, and as shared memory of CUDA. A lost device
//! counts as empty with a limit of zero, so nothing more is admitted for it. Its arenas are due for
//! neither decay nor sleep.
//!
//! Invariants: `sum of published committed = sum of committed`, of all arenas at one instant; at most
//! [`NAMES_MAX`] names are ever published, and one more for each device; the sampled figures of a
//! device are the sums over its own arenas.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::driver::Backend;
use crate::device::{ArenaSnapshot, SleepState};
use crate::metrics::names::{self as name, MetricKind};
use crate::metrics::record::{self, DeviceSnapshot, MetricsWriter, label};
use crate::sync::{Mutex, lock};
use lowtide_admission::{DeviceFigures, Sample};

use super::arenas::{Arenas, ManagedArena};
use super::device::{CountedIn, Device};
use super::values::{DeviceStatus, DevicesSnapshot};

/// The maximum number of names with series of their own: as many as arenas can be open at once.
const NAMES_MAX: usize = 64;
/// The name of all other arenas of a device.
const OTHER: &str = "other";

/// The names of a device and an arena.
pub(super) type OnDevice = (String, String);

/// The sums of the arenas of a name; `None` if none of its arenas is in the sum.
type Sums = BTreeMap<OnDevice, Option<ArenaSnapshot>>;

/// The names of arenas that were published or dropped, and the counts of the dropped ones.
#[derive(Debug, Default)]
pub(in crate::memory) struct Gone(Mutex<Sums>);

/// Adds an arena to the sum of its name, or to that of all other names.
fn add_to(sums: &mut Sums, device: &str, arena: &ArenaSnapshot) {
    let mut key = (device.to_owned(), arena.name.clone());
    if sums.len() >= NAMES_MAX && !sums.contains_key(&key) {
        OTHER.clone_into(&mut key.1);
    }
    match sums.entry(key).or_default() {
        Some(sum) => add(sum, arena),
        none => *none = Some(arena.clone()),
    }
}

impl Gone {
    /// Keeps the counts of an arena.
    pub(in crate::memory) fn add(&self, device: &str, mut last: ArenaSnapshot) {
        zero_sizes(&mut last);
        add_to(&mut lock(&self.0), device, &last);
    }

    /// Returns one snapshot for each device and name of serving, draining and dropped arenas.
    pub(super) fn published(&self, devices: &DevicesSnapshot) -> BTreeMap<OnDevice, ArenaSnapshot> {
        let mut gone = lock(&self.0);
        let mut sums = gone.clone();
        let mut placed: Vec<_> = devices.placed().collect();
        // Serving arenas come last: limit, backend and state are theirs.
        let serving = devices.arenas.len().min(placed.len());
        placed.rotate_left(serving);
        placed.into_iter().for_each(|(device, arena)| add_to(&mut sums, &device.name, arena));
        sums.keys().for_each(|name| _ = gone.entry(name.clone()).or_default());
        sums.into_iter().filter_map(|(name, sum)| Some((name, sum?))).collect()
    }
}

/// Defines how the figures of arenas are added: sizes, which a dropped arena has no more, and
/// counters, which continue.
macro_rules! sums {
    (sizes: $($size:ident)*; totals: $($total:ident)*) => {
        fn zero_sizes(of: &mut ArenaSnapshot) {
            $(of.$size = ByteSize::ZERO;)*
            (of.largest_free, of.leases, of.state) = (ByteSize::ZERO, 0, SleepState::default());
        }

        fn add(sum: &mut ArenaSnapshot, other: &ArenaSnapshot) {
            $(sum.$size = sum.$size.saturating_add(other.$size);)*
            $(sum.$total = sum.$total.saturating_add(other.$total);)*
            sum.live_peak = sum.live_peak.max(other.live_peak).max(sum.live);
            sum.committed_peak = sum.committed_peak.max(other.committed_peak).max(sum.committed);
            sum.largest_free = sum.largest_free.max(other.largest_free);
            sum.leases = sum.leases.saturating_add(other.leases);
            (sum.limit, sum.backend, sum.state) = (other.limit, other.backend, other.state);
        }
    };
}

sums! {
    sizes: live asleep offloaded requested active idle committed reserved holes exported pending
        cached metadata imported;
    totals: allocs_total frees_total sleeps_total wakes_total wake_failures_total
        release_panics_total parked_errors_total remaps_total remapped_bytes_total moves_total
        moved_bytes_total trimmed_bytes_total shrunk_bytes_total shortage_callbacks_total
        shortage_panics_total lock_contended_total lock_wait_total commits_total decommits_total
        committed_bytes_total decommitted_bytes_total alloc_failures_limit_total
        alloc_failures_device_total alloc_failures_addresses_total alloc_failures_driver_total
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
        for ((device, name), arena) in &gone.published(devices) {
            let labels = [label("device", device), label("arena", name)];
            record::arena(arena, &mut to.to(&labels));
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
            let (device, arena_name, backend) = arena;
            let labels = [label("device", device), label("arena", arena_name)];
            to.put(name::DEVICE_ARENA_INFO, &labels, [(*backend, open.contains(arena))]);
        }
    }

    fn publish_device(&mut self, to: MetricsWriter, status: &DeviceStatus) {
        let labels = [label("device", &status.name)];
        to.put(name::DEVICE_LOST, &labels, status.lost.is_some());
        to.put(name::DEVICE_ROLLBACK_FAILURES, &labels, status.rollback_failures_total);
        if let Some(memory) = &status.memory {
            record::device_memory(memory, &mut to.to(&labels));
        }
        if let Some(budget) = &status.budget {
            to.put(name::DEVICE_RESERVED, &labels, budget.reserved);
            to.put(name::DEVICE_CEILING, &labels, budget.ceiling);
            to.put(name::DEVICE_ALLOWANCE, &labels, budget.allowance);
        }
        if status.memory.is_some() {
            self.known.insert(status.number);
        } else if self.known.remove(&status.number) {
            // So that no old value stays.
            record::device_memory(&DeviceSnapshot::default(), &mut |metric, _| {
                if metric.kind == MetricKind::Gauge {
                    to.put(metric, &labels, f64::NAN);
                }
            });
        }
    }
}

/// The arenas, as the control thread reads them.
pub(in crate::memory) struct ArenasSensor {
    pub(super) arenas: Arenas,
    pub(super) list: Vec<Arc<Device>>,
    /// The figures of the last sample, by the number of the device.
    pub(super) figures: Vec<DeviceFigures>,
    pub(super) limit: Option<ByteSize>,
    /// `true` if a device, and the first one, has memory of its own.
    pub(super) has_own: bool,
    pub(super) is_first_own: bool,
}

impl ArenasSensor {
    /// Adds the arenas to a sample of kernel and heap.
    pub(in crate::memory) fn add_to(&mut self, sample: &mut Sample) {
        for (figures, device) in self.figures.iter_mut().zip(&self.list) {
            let limit = if device.is_lost() { Some(ByteSize::ZERO) } else { self.limit };
            *figures = DeviceFigures { limit, ..DeviceFigures::default() };
        }
        // The lock is held for short calls, so that the list is not copied.
        for managed in &*lock(&self.arenas.0) {
            let ManagedArena { arena, device, .. } = &**managed;
            let ([committed, idle], [next_decay, next_sleep]) = arena.control_figures();
            let is_pinned = arena.backend() == Backend::PinnedHost;
            if device.counted == CountedIn::BesideKernel && !is_pinned {
                sample.physical = sample.physical.saturating_add(committed);
            }
            if device.is_lost() {
                continue;
            }
            let earlier = |due: Option<Moment>, next| Some(due.map_or(next, |due| due.min(next)));
            sample.device_decay_due = earlier(sample.device_decay_due, next_decay);
            sample.device_sleep_due = earlier(sample.device_sleep_due, next_sleep);
            if device.counted == CountedIn::OnDevice && !is_pinned {
                if let Some(sum) = self.figures.get_mut(device.number as usize) {
                    sum.committed = sum.committed.saturating_add(committed);
                    sum.idle = sum.idle.saturating_add(idle);
                }
                continue;
            }
            sample.purgeable = sample.purgeable.saturating_add(idle);
            sample.decaying = sample.decaying.saturating_add(idle);
            if device.counted == CountedIn::ByKernel {
                let other = sample.untracked_anonymous.saturating_sub(committed);
                sample.untracked_anonymous = other;
            }
        }
        sample.device_sleep_takes_host = self.has_own;
        if self.is_first_own {
            sample.device = self.figures.first().copied().unwrap_or_default();
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

    /// The bug: each new name of an arena added some 40 series for ever, and the totals of a name
    /// beyond the bound were lost.
    #[test]
    fn ten_thousand_names_of_arenas_share_bounded_series_and_each_is_counted_once() {
        let gone = Gone::default();
        let mut last = arena("a", ByteSize::MAX).snapshot();
        last.allocs_total = 1;
        let mut names = BTreeSet::new();
        for nth in 0..10_000_u64 {
            last.name = nth.to_string();
            let devices = DevicesSnapshot::of_one("0", vec![last.clone()], Vec::new());
            let published = gone.published(&devices);
            assert_eq!(published.values().map(|of| of.allocs_total).sum::<u64>(), nth + 1);
            names.extend(published.into_keys());
            gone.add("0", last.clone());
        }
        assert_eq!(names.len(), NAMES_MAX + 1);
        let other = ("0".to_owned(), OTHER.to_owned());
        assert!(names.contains(&other), "{names:?}");
        let rest = &gone.published(&DevicesSnapshot::of_one("0", Vec::new(), Vec::new()))[&other];
        assert_eq!(rest.allocs_total, 10_000 - NAMES_MAX as u64);
    }
}

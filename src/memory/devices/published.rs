//! The arenas' figures for metrics: one set per device and name, even if several arenas have used
//! the name.
//!
//! A replaced arena drains while another has its name, and is then dropped. The series of a name
//! must not lose the bytes of a draining arena, its counters must not fall, and the last sizes of a
//! dropped arena must not stay. Sizes are therefore summed, totals continue, and the sizes of
//! dropped arenas are zero. Only published figures are handled here.
//!
//! Invariant: `sum of published committed = sum of committed`, of all arenas at one instant.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::bytes::ByteSize;
use crate::device::{ArenaSnapshot, SleepState};
use crate::sync::{Mutex, lock};

use super::snapshot::DevicesSnapshot;

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
        const NONE: ByteSize = ByteSize::ZERO;
        (last.live, last.requested, last.active, last.idle) = (NONE, NONE, NONE, NONE);
        (last.committed, last.reserved, last.holes) = (NONE, NONE, NONE);
        (last.largest_free, last.leases) = (NONE, 0);
        (last.asleep, last.offloaded) = (NONE, NONE);
        (last.exported, last.imported) = (NONE, NONE);
        (last.pending, last.cached, last.metadata) = (NONE, NONE, NONE);
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
    let sizes = [
        (&mut sum.live, other.live),
        (&mut sum.asleep, other.asleep),
        (&mut sum.offloaded, other.offloaded),
        (&mut sum.requested, other.requested),
        (&mut sum.active, other.active),
        (&mut sum.idle, other.idle),
        (&mut sum.committed, other.committed),
        (&mut sum.reserved, other.reserved),
        (&mut sum.holes, other.holes),
        (&mut sum.exported, other.exported),
        (&mut sum.pending, other.pending),
        (&mut sum.cached, other.cached),
        (&mut sum.metadata, other.metadata),
        (&mut sum.imported, other.imported),
    ];
    for (size, more) in sizes {
        *size = size.saturating_add(more);
    }
    sum.live_peak = sum.live_peak.max(other.live_peak).max(sum.live);
    sum.committed_peak = sum.committed_peak.max(other.committed_peak).max(sum.committed);
    sum.largest_free = sum.largest_free.max(other.largest_free);
    sum.limit = other.limit;
    (sum.backend, sum.state) = (other.backend, other.state);
    sum.lock_wait_total = sum.lock_wait_total.saturating_add(other.lock_wait_total);
    sum.leases = sum.leases.saturating_add(other.leases);
    let failures = &mut sum.alloc_failures_total;
    let totals = [
        (&mut sum.allocs_total, other.allocs_total),
        (&mut sum.frees_total, other.frees_total),
        (&mut sum.sleeps_total, other.sleeps_total),
        (&mut sum.wakes_total, other.wakes_total),
        (&mut sum.wake_failures_total, other.wake_failures_total),
        (&mut sum.release_panics_total, other.release_panics_total),
        (&mut sum.parked_errors_total, other.parked_errors_total),
        (&mut sum.remaps_total, other.remaps_total),
        (&mut sum.remapped_bytes_total, other.remapped_bytes_total),
        (&mut sum.moves_total, other.moves_total),
        (&mut sum.moved_bytes_total, other.moved_bytes_total),
        (&mut sum.trimmed_bytes_total, other.trimmed_bytes_total),
        (&mut sum.shrunk_bytes_total, other.shrunk_bytes_total),
        (&mut sum.shortage_callbacks_total, other.shortage_callbacks_total),
        (&mut sum.shortage_panics_total, other.shortage_panics_total),
        (&mut sum.lock_contended_total, other.lock_contended_total),
        (&mut sum.commits_total, other.commits_total),
        (&mut sum.decommits_total, other.decommits_total),
        (&mut sum.committed_bytes_total, other.committed_bytes_total),
        (&mut sum.decommitted_bytes_total, other.decommitted_bytes_total),
        (&mut failures.limit, other.alloc_failures_total.limit),
        (&mut failures.device, other.alloc_failures_total.device),
        (&mut failures.addresses, other.alloc_failures_total.addresses),
        (&mut failures.driver, other.alloc_failures_total.driver),
    ];
    for (total, more) in totals {
        *total = total.saturating_add(more);
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

//! The sensor: kernel signals, heap and arenas joined into one sample.
//!
//! Runs on the control thread: no allocation, no driver call, some ten to thirty microseconds.
//! jemalloc's statistics are refreshed no more often than their measured cost allows (0.3 % of a
//! core): about every 20 ms in a busy process with few threads, every quarter of a second in a
//! large one, and never while nothing moves. Between two refreshes what is purgeable follows from
//! figures that cost next to nothing, because a fresh physical size less a stale purgeable one is
//! wrong by all that was freed or given back since.
//!
//! The kernel counts what an integrated GPU commits neither in the resident set nor against the
//! cgroup (others saw it on a GB10: weights of 77 GiB, a resident set of 1.8 GiB), though it is the
//! machine's memory: it is added here, once, and nowhere else.
//!
//! Invariant: `purgeable = dirty + muzzy + idle of arenas in the host's budget`; between two
//! refreshes the heap's part is no more than at the last one and what active pages have become
//! fewer by.

use std::sync::Arc;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment};
use crate::control::{Glance, Sample, Sensor, Signal, Signals};
use crate::device::driver::Driver;
use crate::host::{self, HeapProbe, HeapSnapshot};

use super::arenas::Arenas;

/// The part of a core that refreshing jemalloc's statistics may take: one in so many.
const EPOCH_SHARE: u32 = 333;
/// Refreshed at least this often, whatever it costs.
const EPOCH_MAX: Duration = Duration::from_millis(250);
/// The kernel's signals are read at least this often while nothing of ours moves: two of three
/// idle ticks then cost two reads.
const SIGNAL_MAX: Duration = Duration::from_millis(750);
/// The C library's free blocks are counted no more often than this: each of its arenas is locked
/// meanwhile.
const LIBC_MIN: Duration = Duration::from_secs(1);

/// Where the memory of arenas counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// In the host's budget; the kernel's figures hold it already.
    ByKernel,
    /// In the host's budget, beside the kernel's figures.
    BesideKernel,
    /// In the device's budget.
    OnDevice,
}

impl Counted {
    pub(super) fn of(driver: Option<&dyn Driver>) -> Self {
        match driver.map(Driver::capabilities) {
            Some(can) if can.unified => Self::BesideKernel,
            Some(can) if !can.host_backed => Self::OnDevice,
            _ => Self::ByKernel,
        }
    }
}

pub(super) struct MemorySensor {
    pub(super) clock: Arc<dyn Clock>,
    pub(super) signals: Arc<Signals>,
    pub(super) heap: Option<HeapProbe>,
    pub(super) arenas: Arenas,
    /// Where the memory of arenas counts.
    pub(super) counted: Counted,
    pub(super) device_limit: ByteSize,
    /// The last refresh, and when the next one may be.
    pub(super) last: Option<Refresh>,
    pub(super) refresh_at: Moment,
    /// The last reading of the kernel's signals, and the glance before it.
    pub(super) read: Option<(Moment, Glance, Signal)>,
    pub(super) libc: LibcIdle,
}

/// The free blocks of the C library's heap as they were last counted.
#[derive(Debug, Default)]
pub(super) struct LibcIdle {
    bytes: ByteSize,
    /// When they may be counted again.
    next: Moment,
}

/// A refresh of jemalloc's statistics, and what was measured beside it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refresh {
    heap: HeapSnapshot,
    /// Active pages as a glance tells them, to compare with later ones.
    active: ByteSize,
    /// What counted against the limit.
    physical: ByteSize,
}

/// The heap at a sample.
struct HeapNow {
    /// At the last refresh.
    live: ByteSize,
    active: ByteSize,
    purgeable: ByteSize,
    cached: ByteSize,
}

impl Refresh {
    /// What is purgeable now. A page that is no longer active is purgeable, until it is given
    /// back and no longer physical; one that became active was purgeable, or is new and physical.
    fn purgeable_now(&self, active: ByteSize, physical: ByteSize) -> ByteSize {
        let then = self.heap.purgeable();
        let freed = then.saturating_add(self.active.saturating_sub(active));
        let gained = freed.saturating_add(physical.saturating_sub(self.physical));
        let lost = active.saturating_sub(self.active);
        let lost = lost.saturating_add(self.physical.saturating_sub(physical));
        // What grew beside the heap is physical too, and not purgeable.
        gained.saturating_sub(lost).min(freed)
    }
}

impl MemorySensor {
    /// The heap at the last refresh, and what is active and what purgeable of it now.
    fn heap(&mut self, now: Moment, physical: ByteSize) -> Option<HeapNow> {
        let probe = self.heap.as_ref()?;
        let active = probe.glance().ok()?.active;
        // Where nothing has moved a refresh would find the same, and it is half of what an idle
        // tick costs: 70 of 145 us with cold caches, measured by `benches/idle`.
        let stands = |last: &Refresh| last.active == active && last.physical == physical;
        let stands = self.last.as_ref().is_some_and(stands);
        if self.last.is_none() || (now >= self.refresh_at && !stands) {
            let start = self.clock.now();
            let refresh = |heap| Refresh { heap, active, physical };
            self.last = probe.snapshot().ok().map(refresh);
            let cost = self.clock.now() - start;
            self.refresh_at = now + (cost * EPOCH_SHARE).min(EPOCH_MAX);
        }
        let last = self.last.as_ref()?;
        let purgeable = last.purgeable_now(active, physical);
        let HeapSnapshot { live, thread_caches: cached, .. } = last.heap;
        Some(HeapNow { live, active, purgeable, cached })
    }
}

impl MemorySensor {
    /// The kernel's signals; those before where a glance finds that nothing has moved, for
    /// [`SIGNAL_MAX`] at most, because limits and neighbours show in no glance.
    fn signal(&mut self, now: Moment) -> Signal {
        let glance = self.signals.glance();
        match self.read {
            Some((then, before, signal)) if before == glance && now - then < SIGNAL_MAX => signal,
            _ => {
                let signal = self.signals.sample_after(glance);
                self.read = Some((now, glance, signal));
                signal
            }
        }
    }
}

impl Sensor for MemorySensor {
    fn sample(&mut self, now: Moment) -> Sample {
        let signal = self.signal(now);
        let heap = self.heap(now, signal.physical);
        let mut sample =
            Sample { physical: signal.physical, limit: signal.limit, ..Sample::default() };
        sample.anonymous = signal.anonymous.unwrap_or(ByteSize::ZERO);
        if let Some(heap) = heap {
            sample.heap_live = heap.live;
            sample.heap_active = heap.active;
            sample.purgeable = heap.purgeable;
            sample.cached = heap.cached;
            // By the active pages of now: stale ones would show a burst as growth.
            sample.untracked_anonymous = sample.anonymous.saturating_sub(heap.active);
        }
        let (mut committed, mut idle) = (ByteSize::ZERO, ByteSize::ZERO);
        self.arenas.each(|arena| {
            let glance = arena.glance();
            committed = committed.saturating_add(glance.committed);
            idle = idle.saturating_add(glance.idle);
            sample.device_decay_due = sample.device_decay_due.min(arena.next_decay());
            sample.device_sleep_due = sample.device_sleep_due.min(arena.next_sleep());
        });
        if self.counted == Counted::OnDevice {
            sample.device_sleep_takes_host = true;
            sample.device_committed = committed;
            sample.device_idle = idle;
            sample.device_limit = (self.device_limit != ByteSize::MAX).then_some(self.device_limit);
            return sample;
        }
        sample.purgeable = sample.purgeable.saturating_add(idle);
        sample.decaying = idle;
        if self.counted == Counted::ByKernel {
            sample.untracked_anonymous = sample.untracked_anonymous.saturating_sub(committed);
        } else {
            sample.physical = sample.physical.saturating_add(committed);
        }
        sample
    }

    fn libc_idle(&mut self, now: Moment) -> ByteSize {
        if now >= self.libc.next {
            let start = self.clock.now();
            // Unknown without glibc 2.33: then only growth asks for a purge of such memory.
            self.libc.bytes = host::libc_heap().map_or(ByteSize::ZERO, |heap| heap.idle);
            let cost = self.clock.now() - start;
            self.libc.next = now + (cost * EPOCH_SHARE).max(LIBC_MIN);
        }
        self.libc.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 MiB physical: 60 MiB active, 30 MiB purgeable.
    fn refresh() -> Refresh {
        let heap = HeapSnapshot { dirty: ByteSize::mib(30), ..HeapSnapshot::default() };
        Refresh { heap, active: ByteSize::mib(60), physical: ByteSize::mib(100) }
    }

    #[test]
    fn what_is_freed_or_given_back_between_two_refreshes_is_not_required() {
        for (case, active, physical, purgeable) in [
            ("nothing happened", 60, 100, 30),
            ("a request ended", 20, 100, 70),
            ("a request ended, and its pages decayed", 20, 60, 30),
            ("dirty pages decayed", 60, 80, 10),
            ("dirty pages were reused", 80, 100, 10),
            ("new pages were touched", 90, 130, 30),
            ("memory beside the heap grew", 60, 140, 30),
            ("more decayed than there was", 60, 20, 0),
        ] {
            let found = refresh().purgeable_now(ByteSize::mib(active), ByteSize::mib(physical));
            assert_eq!(found, ByteSize::mib(purgeable), "{case}");
        }
    }
}

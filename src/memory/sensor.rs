//! The sensor, which combines kernel signals, heap and device arenas into one sample.
//!
//! Runs on the control thread: no allocation unless a runtime is stuck (`runtime`), no driver call,
//! some five microseconds. The kernel's expensive files are read when they can change a decision
//! ([`SignalTracker`]). jemalloc's statistics are refreshed when memory has moved by more than
//! [`Signal::tolerance`], as often as their measured cost allows (0.3 % of a core), once a second
//! if it has moved by less, and never while nothing changes. Between two refreshes the purgeable
//! bytes are derived from figures that cost next to nothing, because a fresh physical size less a
//! stale purgeable size is wrong by all memory freed or released since then.
//!
//! Memory that the kernel does not take back is resident and unused. jemalloc reuses it before it
//! maps new memory, so it is neither physical nor purgeable here: otherwise a process with locked
//! memory would reject requests forever.
//!
//! Invariant: `purgeable = dirty + muzzy + idle of arenas in the host's budget`; between two
//! refreshes the heap's part is at most that of the last refresh plus the decrease of active pages.
//! It is too large by at most what active and physical bytes have both grown by: dirty pages were
//! reused while other memory grew.

use std::sync::Arc;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment};
use lowtide_admission::{Sample, Sensor, Signal, SignalTracker};
use lowtide_heap::{self as heap, HeapProbe, HeapSnapshot, LibcHeap};

#[cfg(feature = "device")]
use super::devices::ArenasSensor;
use super::profiles::Captures;

/// The share of a core for refreshing jemalloc's statistics: one in this number.
const EPOCH_SHARE: u32 = 333;
/// The maximum time between refreshes while memory moves far, regardless of cost.
const EPOCH_MAX: Duration = Duration::from_millis(250);
/// The time between refreshes while it moves little.
const EPOCH_STILL: Duration = Duration::from_secs(1);
/// The minimum time between counts of the C library's free blocks, which lock each of its arenas.
const LIBC_MIN: Duration = Duration::from_secs(1);

pub(super) struct MemorySensor {
    pub(super) clock: Arc<dyn Clock>,
    pub(super) signals: SignalTracker,
    pub(super) heap: Option<HeapProbe>,
    #[cfg(feature = "device")]
    pub(super) arenas: ArenasSensor,
    pub(super) seen: SensorState,
    /// Asks for heap profiles when memory grows; `None` if none are wanted.
    pub(super) captures: Option<Captures>,
}

/// What earlier samples have found.
#[derive(Debug, Default)]
pub(super) struct SensorState {
    /// The last refresh.
    refresh: Option<Refresh>,
    /// The last count of the C library's heap, and the earliest time of the next one.
    libc: LibcHeap,
    next_libc: Moment,
    /// The most bytes that a purge could not release: they stay resident if later ones can.
    unreleased_max: ByteSize,
    /// The bytes that work had on disk.
    on_disk: ByteSize,
}

/// A refresh of jemalloc's statistics, and measurements of the same moment.
#[derive(Clone, Copy, Debug)]
struct Refresh {
    heap: HeapSnapshot,
    at: Moment,
    /// The earliest time of the next one.
    next: Moment,
    /// The active pages, as in a glance, to compare with later ones.
    active: ByteSize,
    /// The memory that counted against the limit.
    physical: ByteSize,
}

impl Refresh {
    /// Returns `true` if another refresh is worth its cost.
    fn is_over(&self, now: Moment, active: ByteSize, signal: &Signal) -> bool {
        let moved = (active.get().abs_diff(self.active.get()))
            .max(signal.physical.get().abs_diff(self.physical.get()));
        // If nothing has changed, a refresh would find the same, and it is half of the cost of an
        // idle tick: 70 of 145 us with cold caches, measured by `benches/idle`.
        let is_far = moved > signal.tolerance().get();
        now >= self.next && moved > 0 && (is_far || now - self.at >= EPOCH_STILL)
    }

    /// Returns the purgeable bytes now. A page that is no longer active is purgeable until it is
    /// released and no longer physical; a page that became active was purgeable, or is new and
    /// physical.
    fn purgeable_now(&self, active: ByteSize, physical: ByteSize) -> ByteSize {
        let then = self.heap.purgeable();
        let freed = then.saturating_add(self.active.saturating_sub(active));
        let gained = freed.saturating_add(physical.saturating_sub(self.physical));
        let lost = active.saturating_sub(self.active);
        let lost = lost.saturating_add(self.physical.saturating_sub(physical));
        // Growth outside the heap is also physical, and not purgeable.
        gained.saturating_sub(lost).min(freed)
    }
}

impl MemorySensor {
    /// Adds the heap to a sample: as of the last refresh, with its active and purgeable bytes now.
    /// Adds nothing if its figures cannot be read.
    fn add_heap(&mut self, now: Moment, signal: &Signal, sample: &mut Sample) -> Option<()> {
        let probe = self.heap.as_ref()?;
        let active = probe.active().ok()?;
        let physical = signal.physical;
        if self.seen.refresh.as_ref().is_none_or(|last| last.is_over(now, active, signal)) {
            let start = self.clock.now();
            let heap = probe.snapshot();
            let cost = self.clock.now() - start;
            let next = now + (cost * EPOCH_SHARE).min(EPOCH_MAX);
            self.seen.refresh =
                heap.ok().map(|heap| Refresh { heap, at: now, next, active, physical });
        }
        let last = self.seen.refresh.as_ref()?;
        sample.heap_live = last.heap.live;
        sample.heap_active = active;
        sample.purgeable = last.purgeable_now(active, physical);
        sample.cached = last.heap.thread_caches;
        // By the current active pages: stale ones would show a burst as growth.
        sample.untracked_anonymous = sample.anonymous.saturating_sub(active);
        Some(())
    }

    /// Counts the C library's heap. Unknown without glibc 2.33: then only growth triggers a purge
    /// of its memory.
    fn libc(&mut self, now: Moment) -> LibcHeap {
        if now >= self.seen.next_libc {
            let start = self.clock.now();
            self.seen.libc = heap::libc_heap().unwrap_or_default();
            let cost = self.clock.now() - start;
            self.seen.next_libc = now + (cost * EPOCH_SHARE).max(LIBC_MIN);
        }
        self.seen.libc
    }

    /// Moves unused memory that the kernel does not take back out of the sample's physical bytes.
    fn leave_out_unreleased(&mut self, sample: &mut Sample, now: Moment) {
        let fails = heap::release_failure().is_some();
        // With each refresh, since it may read a file.
        if fails && self.seen.refresh.as_ref().is_none_or(|last| last.at == now) {
            self.seen.unreleased_max = self.seen.unreleased_max.max(heap::unreleased_max());
        }
        if self.seen.unreleased_max.is_zero() {
            return;
        }
        let held = self.libc(now).held;
        let Some(last) = &self.seen.refresh else { return };
        let (mut heap, active) = (last.heap, sample.heap_active);
        // Pages that became unused since the last refresh, or are used again.
        heap.unbacked = heap.unbacked.saturating_add(last.heap.active).saturating_sub(active);
        heap.active = active;
        let purgeable = sample.purgeable.saturating_sub(sample.decaying);
        if fails {
            sample.purgeable = sample.decaying;
        } else {
            // A purge releases these.
            (heap.dirty, heap.muzzy) = (ByteSize::ZERO, ByteSize::ZERO);
            heap.unbacked = heap.unbacked.saturating_sub(purgeable);
        }
        let other = sample.untracked_anonymous.saturating_sub(held);
        let unreleased = heap.unused_of(other.saturating_add(active)).min(sample.physical);
        let unreleased = unreleased.min(self.seen.unreleased_max);
        sample.unreleased = unreleased;
        sample.physical = sample.physical.saturating_sub(unreleased);
        sample.untracked_anonymous = sample.untracked_anonymous.saturating_sub(unreleased);
    }
}

impl Sensor for MemorySensor {
    fn sample(&mut self, now: Moment) -> Sample {
        #[cfg(feature = "tokio")]
        super::runtime::wake_runtime();
        let counted = heap::counted_growth();
        let signal = self.signals.sample(now);
        let mut sample =
            Sample { physical: signal.physical, limit: signal.limit, ..Sample::default() };
        sample.has_fit = self.signals.has_fit();
        [sample.in_progress, sample.outgrown] = heap::in_progress();
        let (on_disk, _) = heap::spilled();
        sample.spilled = on_disk.saturating_sub(std::mem::replace(&mut self.seen.on_disk, on_disk));
        sample.anonymous = signal.anonymous.unwrap_or(ByteSize::ZERO);
        if self.heap.is_some() {
            heap::publish_sample(counted, signal.limit.bytes, signal.physical, sample.anonymous);
        }
        let _ = self.add_heap(now, &signal, &mut sample);
        #[cfg(feature = "device")]
        self.arenas.add_to(&mut sample);
        self.leave_out_unreleased(&mut sample, now);
        if let Some(captures) = &mut self.captures {
            captures.see(now, sample.required(), sample.limit.bytes);
        }
        sample
    }

    #[cfg(feature = "device")]
    fn further_device(&self, nth: usize) -> lowtide_admission::DeviceFigures {
        self.arenas.further_device(nth)
    }

    fn libc_idle(&mut self, now: Moment) -> ByteSize {
        self.libc(now).idle
    }
}

#[cfg(test)]
mod tests {
    use lowtide_admission::Limit;

    use super::*;

    /// 100 MiB physical: 60 MiB active, 30 MiB purgeable.
    fn refresh() -> Refresh {
        let mut heap = HeapSnapshot::default();
        heap.dirty = ByteSize::mib(30);
        let (at, next) = (Moment::ORIGIN, Moment::ORIGIN + Duration::from_millis(10));
        Refresh { heap, at, next, active: ByteSize::mib(60), physical: ByteSize::mib(100) }
    }

    #[test]
    fn statistics_are_refreshed_when_memory_moved_far_or_long_ago() {
        // A tolerance of 14 MiB.
        let limit = Limit::given(ByteSize::mib(1000));
        for (case, millis, active, physical, is_over) in [
            ("nothing moved", 10_000, 60, 100, false),
            ("a little moved", 999, 70, 110, false),
            ("a little moved, long ago", 1000, 70, 110, true),
            ("much was allocated", 10, 80, 100, true),
            ("much was freed", 10, 40, 100, true),
            ("other memory grew", 10, 60, 120, true),
            ("the last refresh was expensive", 9, 80, 120, false),
        ] {
            let now = Moment::after_origin(Duration::from_millis(millis));
            let signal = Signal { physical: ByteSize::mib(physical), limit, ..Signal::default() };
            assert_eq!(refresh().is_over(now, ByteSize::mib(active), &signal), is_over, "{case}");
        }
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

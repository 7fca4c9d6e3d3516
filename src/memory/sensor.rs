//! The sensor: kernel signals, heap and arenas joined into one sample.
//!
//! Runs on the control thread: no allocation, no driver call, some ten to thirty microseconds.
//! jemalloc's statistics are refreshed no oftener than their measured cost allows (0.3 % of a
//! core), and between two refreshes the last figures stand: while memory moves fast that is at
//! every tick in a process with few threads, and every quarter of a second in a large one.
//!
//! Invariant: `purgeable = dirty + muzzy + idle of host-backed arenas`.

use std::sync::Arc;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment};
use crate::control::{Sample, Sensor, Signals};
use crate::host::{HeapProbe, HeapSnapshot};

use super::shared::Arenas;

/// The part of a core that refreshing jemalloc's statistics may take: one in so many.
const EPOCH_SHARE: u32 = 333;
/// Refreshed at least this often, whatever it costs.
const EPOCH_MAX: Duration = Duration::from_millis(250);

pub(super) struct MemorySensor {
    pub(super) clock: Arc<dyn Clock>,
    pub(super) signals: Arc<Signals>,
    pub(super) heap: Option<HeapProbe>,
    pub(super) arenas: Arenas,
    /// Whether arenas live in host memory and count there.
    pub(super) host_backed: bool,
    pub(super) device_limit: ByteSize,
    /// The last refresh, and when the next one may be.
    pub(super) last: Option<HeapSnapshot>,
    pub(super) refresh_at: Moment,
}

impl MemorySensor {
    fn heap(&mut self, now: Moment) -> Option<HeapSnapshot> {
        if self.last.is_none() || now >= self.refresh_at {
            let start = self.clock.now();
            self.last = self.heap.as_ref().and_then(|heap| heap.snapshot().ok());
            let cost = self.clock.now() - start;
            self.refresh_at = now + (cost * EPOCH_SHARE).min(EPOCH_MAX);
        }
        self.last
    }
}

impl Sensor for MemorySensor {
    fn sample(&mut self, now: Moment) -> Sample {
        let signal = self.signals.sample();
        let heap = self.heap(now);
        let mut sample =
            Sample { physical: signal.physical, limit: signal.limit, ..Sample::default() };
        if let Some(heap) = heap {
            sample.heap_live = heap.live;
            sample.heap_active = heap.active;
            sample.purgeable = heap.purgeable();
        }
        let (mut committed, mut idle) = (ByteSize::ZERO, ByteSize::ZERO);
        self.arenas.each(|arena| {
            let glance = arena.glance();
            committed = committed.saturating_add(glance.committed);
            idle = idle.saturating_add(glance.idle);
            sample.device_decay_due = sample.device_decay_due.min(arena.next_decay());
        });
        if self.host_backed {
            sample.purgeable = sample.purgeable.saturating_add(idle);
        } else {
            sample.device_committed = committed;
            sample.device_idle = idle;
            sample.device_limit = (self.device_limit != ByteSize::MAX).then_some(self.device_limit);
        }
        sample
    }
}

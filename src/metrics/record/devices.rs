//! Writes the snapshots of device arenas, and of the device, under the names of the table.

use super::{Labels, MetricsWriter, flag, label, shared};
use crate::bytes::ByteSize;
use crate::device::ArenaSnapshot;
use crate::device::driver::Backend;
use crate::metrics::names as name;

/// The memory of a device, with all its users.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "the published figures")]
pub struct Device {
    /// The total memory.
    pub total: ByteSize,
    /// The free memory.
    pub free: ByteSize,
    /// The memory in use when the context was created.
    pub context_overhead: Option<ByteSize>,
    /// The memory in use that is neither ours nor in the context overhead.
    pub unmanaged: Option<ByteSize>,
    /// Bytes released because little memory was free.
    pub watermark_released_total: u64,
}

/// The budget of a device.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "the published figures")]
pub struct DeviceBudget {
    /// The reserved bytes.
    pub reserved: ByteSize,
    /// The most bytes that may be held in total; [`ByteSize::MAX`] without a limit.
    pub ceiling: ByteSize,
    /// The most bytes that may be reserved now.
    pub allowance: ByteSize,
}

impl MetricsWriter {
    /// Publishes an arena of the device with this name.
    pub fn arena(self, device: &str, arena: &ArenaSnapshot) {
        let labels = [("device", shared(device)), ("arena", shared(&arena.name))];
        let limit = (arena.limit != ByteSize::MAX).then_some((name::DEVICE_LIMIT, arena.limit));
        let sizes = [
            (name::DEVICE_LIVE, arena.live),
            (name::DEVICE_ASLEEP, arena.asleep),
            (name::DEVICE_OFFLOADED, arena.offloaded),
            (name::DEVICE_REQUESTED, arena.requested),
            (name::DEVICE_IDLE, arena.idle),
            (name::DEVICE_COMMITTED, arena.committed),
            (name::DEVICE_RETAINED, arena.retained()),
            (name::DEVICE_HOLES, arena.holes),
            (name::DEVICE_LARGEST_FREE, arena.largest_free),
            (name::DEVICE_LIVE_PEAK, arena.live_peak),
            (name::DEVICE_COMMITTED_PEAK, arena.committed_peak),
            (name::DEVICE_PENDING, arena.pending),
            (name::DEVICE_CACHED, arena.cached),
            (name::DEVICE_METADATA, arena.metadata),
            (name::DEVICE_EXPORTED, arena.exported),
            (name::DEVICE_IMPORTED, arena.imported),
        ];
        for (metric, bytes) in sizes.into_iter().chain(limit) {
            self.bytes(metric, &labels, bytes);
        }
        self.gauge(name::DEVICE_LEASES, &labels, f64::from(arena.leases));
        self.gauge(name::DEVICE_STATE, &labels, f64::from(arena.state as u8));
        self.arena_totals(arena, &labels);
        let with = |name, value: &'static str| {
            let [device, arena] = labels.clone();
            [device, arena, label(name, value)]
        };
        for (cause, total) in
            [("trim", arena.trimmed_bytes_total), ("shrink", arena.shrunk_bytes_total)]
        {
            self.counter(name::DEVICE_RELEASED, &with("cause", cause), total);
        }
        for (reason, total) in arena.alloc_failures_total.by_reason() {
            self.counter(name::DEVICE_ALLOC_FAILURES, &with("reason", reason), total);
        }
    }

    fn arena_totals(self, arena: &ArenaSnapshot, labels: &Labels<2>) {
        self.gauge(name::DEVICE_LOCK_WAIT, labels, arena.lock_wait_total.as_secs_f64());
        for (metric, total) in [
            (name::DEVICE_SLEEPS, arena.sleeps_total),
            (name::DEVICE_WAKES, arena.wakes_total),
            (name::DEVICE_WAKE_FAILURES, arena.wake_failures_total),
            (name::DEVICE_ALLOCS, arena.allocs_total),
            (name::DEVICE_FREES, arena.frees_total),
            (name::DEVICE_COMMITS, arena.commits_total),
            (name::DEVICE_DECOMMITS, arena.decommits_total),
            (name::DEVICE_COMMITTED_TOTAL, arena.committed_bytes_total),
            (name::DEVICE_DECOMMITTED_TOTAL, arena.decommitted_bytes_total),
            (name::DEVICE_REMAPS, arena.remaps_total),
            (name::DEVICE_REMAPPED, arena.remapped_bytes_total),
            (name::DEVICE_MOVES, arena.moves_total),
            (name::DEVICE_MOVED, arena.moved_bytes_total),
            (name::DEVICE_SHORTAGE_CALLBACKS, arena.shortage_callbacks_total),
            (name::DEVICE_SHORTAGE_PANICS, arena.shortage_panics_total),
            (name::DEVICE_LOCK_CONTENDED, arena.lock_contended_total),
            (name::DEVICE_RELEASE_PANICS, arena.release_panics_total),
            (name::DEVICE_PARKED_ERRORS, arena.parked_errors_total),
        ] {
            self.counter(metric, labels, total);
        }
    }

    /// Publishes the backend of an arena, and whether the arena is open.
    pub fn arena_info(self, device: &str, arena: &str, backend: Backend, is_open: bool) {
        if !self.has_detail() {
            return;
        }
        let labels = [
            ("device", shared(device)),
            ("arena", shared(arena)),
            label("backend", backend.name()),
        ];
        self.gauge(name::DEVICE_ARENA_INFO, &labels, flag(is_open));
    }

    /// Publishes a device: its state, failed rollbacks, and its memory if known.
    pub fn device(
        self,
        name: &str,
        is_lost: bool,
        rollback_failures_total: u64,
        device: Option<Device>,
    ) {
        let labels = [("device", shared(name))];
        self.gauge(name::DEVICE_LOST, &labels, flag(is_lost));
        self.counter(name::DEVICE_ROLLBACK_FAILURES, &labels, rollback_failures_total);
        let Some(device) = device else { return };
        for (metric, bytes) in [
            (name::DEVICE_TOTAL, Some(device.total)),
            (name::DEVICE_FREE, Some(device.free)),
            (name::DEVICE_CONTEXT_OVERHEAD, device.context_overhead),
            (name::DEVICE_UNMANAGED, device.unmanaged),
        ] {
            if let Some(bytes) = bytes {
                self.bytes(metric, &labels, bytes);
            }
        }
        let released = device.watermark_released_total;
        self.counter(name::DEVICE_WATERMARK_RELEASED, &labels, released);
    }

    /// Publishes the budget of a device.
    pub fn device_budget(self, name: &str, budget: DeviceBudget) {
        let labels = [("device", shared(name))];
        self.bytes(name::DEVICE_BUDGET_RESERVED, &labels, budget.reserved);
        if budget.ceiling != ByteSize::MAX {
            self.bytes(name::DEVICE_BUDGET_CEILING, &labels, budget.ceiling);
            self.bytes(name::DEVICE_BUDGET_ALLOWANCE, &labels, budget.allowance);
        }
    }

    /// Publishes NaN after the device no longer reports its memory, so that no old value stays.
    pub fn device_unknown(self, name: &str) {
        let labels = [("device", shared(name))];
        for metric in [
            name::DEVICE_TOTAL,
            name::DEVICE_FREE,
            name::DEVICE_CONTEXT_OVERHEAD,
            name::DEVICE_UNMANAGED,
        ] {
            self.gauge(metric, &labels, f64::NAN);
        }
    }
}

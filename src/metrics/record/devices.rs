//! Writes the snapshots of device arenas, and of the device, under the names of the table.

use metrics::{SharedString, counter, gauge};

use super::shared;
use crate::bytes::ByteSize;
use crate::device::ArenaSnapshot;
use crate::device::driver::Backend;
use crate::metrics::names as name;

/// Publishes an arena of the device with this name.
pub fn arena(device: &str, arena: &ArenaSnapshot) {
    let labels = [("device", shared(device)), ("arena", shared(&arena.name))];
    let limit = (arena.limit != ByteSize::MAX).then_some((name::DEVICE_LIMIT, arena.limit));
    let sizes = [
        (name::DEVICE_LIVE, arena.live),
        (name::DEVICE_ASLEEP, arena.asleep),
        (name::DEVICE_OFFLOADED, arena.offloaded),
        (name::DEVICE_REQUESTED, arena.requested),
        (name::DEVICE_ACTIVE, arena.active),
        (name::DEVICE_IDLE, arena.idle),
        (name::DEVICE_COMMITTED, arena.committed),
        (name::DEVICE_RETAINED, arena.retained()),
        (name::DEVICE_RESERVED, arena.reserved),
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
        gauge!(metric.name, &labels).set(bytes.as_f64());
    }
    gauge!(name::DEVICE_LEASES.name, &labels).set(f64::from(arena.leases));
    gauge!(name::DEVICE_STATE.name, &labels).set(f64::from(arena.state as u8));
    arena_totals(arena, &labels);
    let with = |label, value: &'static str| {
        let [device, arena] = labels.clone();
        [device, arena, (label, SharedString::const_str(value))]
    };
    for (cause, total) in
        [("trim", arena.trimmed_bytes_total), ("shrink", arena.shrunk_bytes_total)]
    {
        counter!(name::DEVICE_RELEASED.name, &with("cause", cause)).absolute(total);
    }
    for (reason, total) in arena.alloc_failures_total.by_reason() {
        counter!(name::DEVICE_ALLOC_FAILURES.name, &with("reason", reason)).absolute(total);
    }
}

fn arena_totals(arena: &ArenaSnapshot, labels: &[(&'static str, SharedString); 2]) {
    gauge!(name::DEVICE_LOCK_WAIT.name, labels).set(arena.lock_wait_total.as_secs_f64());
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
        counter!(metric.name, labels).absolute(total);
    }
}

/// Publishes the backend of an arena, and whether the arena is open.
pub fn arena_info(device: &str, arena: &str, backend: Backend, is_open: bool) {
    let labels = [("device", device), ("arena", arena), ("backend", backend.name())]
        .map(|(label, value)| (label, value.to_owned()));
    gauge!(name::DEVICE_ARENA_INFO.name, &labels).set(f64::from(u8::from(is_open)));
}

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

/// Publishes a device: its state, failed rollbacks, and its memory if known.
pub fn device(name: &str, is_lost: bool, rollback_failures_total: u64, device: Option<Device>) {
    let label = [("device", shared(name))];
    gauge!(name::DEVICE_LOST.name, &label).set(f64::from(u8::from(is_lost)));
    counter!(name::DEVICE_ROLLBACK_FAILURES.name, &label).absolute(rollback_failures_total);
    let Some(device) = device else { return };
    for (metric, bytes) in [
        (name::DEVICE_TOTAL, Some(device.total)),
        (name::DEVICE_FREE, Some(device.free)),
        (name::DEVICE_CONTEXT_OVERHEAD, device.context_overhead),
        (name::DEVICE_UNMANAGED, device.unmanaged),
    ] {
        if let Some(bytes) = bytes {
            gauge!(metric.name, &label).set(bytes.as_f64());
        }
    }
    counter!(name::DEVICE_WATERMARK_RELEASED.name, &label)
        .absolute(device.watermark_released_total);
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

/// Publishes the budget of a device.
pub fn device_budget(name: &str, budget: DeviceBudget) {
    let label = [("device", shared(name))];
    gauge!(name::DEVICE_BUDGET_RESERVED.name, &label).set(budget.reserved.as_f64());
    if budget.ceiling != ByteSize::MAX {
        gauge!(name::DEVICE_BUDGET_CEILING.name, &label).set(budget.ceiling.as_f64());
        gauge!(name::DEVICE_BUDGET_ALLOWANCE.name, &label).set(budget.allowance.as_f64());
    }
}

/// Publishes NaN after the device no longer reports its memory, so that no old value stays.
pub fn device_unknown(name: &str) {
    let label = [("device", shared(name))];
    for metric in [
        name::DEVICE_TOTAL,
        name::DEVICE_FREE,
        name::DEVICE_CONTEXT_OVERHEAD,
        name::DEVICE_UNMANAGED,
    ] {
        gauge!(metric.name, &label).set(f64::NAN);
    }
}

//! Imported memory: records it, and releases it to its owner when no work uses it.
//!
//! Release functions are foreign code: they are called and dropped with the lock released.
//!
//! Invariant: a release function is taken out of the state once, after the uses of its memory are
//! complete; only the end of the arena takes functions earlier.

use std::mem::ManuallyDrop;

use super::context::OpContext;
use crate::driver::DeviceAddress;
use crate::state::{ArenaState, Release};
use crate::types::Region;
use lowtide_core::sync::caught;
use lowtide_core::{ByteSize, log};

/// Records an imported range, which does not wrap. If the range overlaps known memory, returns the
/// reason and the release function.
pub(crate) fn import(
    state: &mut ArenaState,
    at: DeviceAddress,
    size: ByteSize,
    release: Release,
) -> Result<(), (&'static str, Release)> {
    let is_own = |&region: &Region| state.region(region).segment.overlaps(at, size);
    if Region::ALL.iter().any(is_own) {
        return Err(("it overlaps the arena's own memory", release));
    }
    let imported = &mut state.outstanding.imported;
    if imported.overlaps(at.get(), size.get()) {
        return Err(("it overlaps imported memory that is not released", release));
    }
    imported.import(at.get(), size.get(), release);
    Ok(())
}

/// Records that an imported value was dropped: its memory is released when all work of this moment
/// is complete; if a graph may have captured it, after that of the moment when the graph is gone.
pub(crate) fn let_go(state: &mut ArenaState, at: DeviceAddress, is_captured: bool) {
    if is_captured {
        return state.outstanding.captured.imports.push(at);
    }
    let after = state.uses(&[]);
    state.outstanding.imported.let_go(at.get(), after);
}

/// Calls the release functions of values that are dropped and whose work is complete. Calls at most
/// as many as wait now, so that a function which imports and drops more does not keep this call
/// running.
pub(crate) async fn release_imports(cx: &OpContext<'_>) {
    for _ in 0..cx.with(|state| state.outstanding.imported.waiting()) {
        let due = cx.with(|state| {
            let streams = &state.streams;
            let due = state.outstanding.imported.take(|of| streams.is_done(of));
            state.totals.releases_total += u64::from(due.is_some());
            due
        });
        let Some((at, size, release)) = due else { break };
        let outcome = cx.outside(|| caught(|| release(at, size))).await;
        if let Err(message) = outcome {
            cx.with(|state| state.totals.release_panics_total += 1);
            cx.log(|arena| log!(warn, arena, %at, %size, message, "release function panicked"))
                .await;
        }
    }
}

/// Releases imported memory that the device no longer uses, at the end of the arena, and drops the
/// other release functions uncalled. Returns the number of those, and their bytes.
pub(crate) async fn end_imports(cx: &OpContext<'_>) -> (u64, ByteSize) {
    release_imports(cx).await;
    let mut left = (0, ByteSize::ZERO);
    while let Some(due) = cx.with(|state| state.outstanding.imported.take_any()) {
        let (_, size, release) = due;
        left = (left.0 + 1, left.1.saturating_add(size));
        // The function is foreign code, and nothing may unwind out of a drop.
        let _ = cx.outside(|| caught(|| drop(release))).await;
    }
    left
}

/// Forgets the release functions in a forked child, without a call or a drop: they belong to
/// another process.
pub(crate) fn forget_imports(state: &mut ArenaState) {
    let _ = ManuallyDrop::new(std::mem::take(&mut state.outstanding.imported));
}

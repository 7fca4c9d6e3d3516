//! Releases idle memory to the driver.
//!
//! This module decides how much to release and in which order, never when. The rule of decommit: a
//! granule leaves only when every use of it is complete. On a driver with synchronous work a freed
//! block has no uses left. On other drivers freed memory is pending, and so active, until its uses
//! are known to be complete (`completion`).
//!
//! Invariant: only granules that no block touches leave.

use super::context::OpContext;
use super::stores::complete_copies;
use crate::driver::DriverError;
use crate::state::aging::Ages;
use crate::state::region::Region;
use crate::state::segment::Cursor;
use lowtide_core::bytes::ByteSize;

/// The maximum number of driver calls in one pass over idle memory. A guess, to be measured per
/// driver.
pub(crate) const CALLS_MAX: usize = 32;

/// The result of a release.
#[derive(Debug, Default)]
pub(crate) struct ReleasedGranules {
    /// Granules released.
    pub(crate) granules: u64,
    /// The driver's error, if a call failed; the granules of that call and of later ones stay.
    pub(crate) error: Option<DriverError>,
    /// `true` if the call that failed was a trim: the memory has left the arena.
    pub(crate) is_of_trim: bool,
    /// `true` if the lock was released meanwhile: earlier counts may have changed.
    pub(crate) unlocked: bool,
}

/// Releases up to `granules` idle granules, in at most [`CALLS_MAX`] calls; with ages, only expired
/// ones. A segment leaves whole, and then the driver is trimmed so that it keeps no segment.
pub(crate) async fn release_granules(
    cx: &OpContext<'_>,
    granules: u64,
    ages: Option<Ages>,
) -> ReleasedGranules {
    let mut released = ReleasedGranules::default();
    if cx.with(|state| state.sleep.may_be_copied()) {
        // An operation that still queues copies waits for them itself before it ends. An operation
        // whose block lacks memory never meets such an operation.
        released.unlocked = cx.with(|state| !state.sleep.is_queueing);
        if released.unlocked {
            released.error = complete_copies(cx).await.err();
        }
        if cx.with(|state| state.sleep.may_be_copied()) {
            return released;
        }
    }
    let untrimmed = cx.with(|state| std::mem::take(&mut state.untrimmed));
    let mut cursors = [Cursor::START; Region::ALL.len()];
    for _ in 0..CALLS_MAX {
        let left = granules.saturating_sub(released.granules);
        let next = cx.with(|state| state.begin_leave(left, usize::MAX, &mut cursors, ages));
        let Some(leaving) = next else { break };
        released.unlocked = true;
        let outcome = cx.decommit(leaving).await;
        cx.with(|state| state.end_leave(leaving, outcome.is_ok()));
        if let Err(error) = outcome {
            released.error = Some(error);
            break;
        }
        released.granules += leaving.run.granules();
    }
    trim(cx, untrimmed, &mut released).await;
    released
}

/// Releases idle memory until at most `keep` bytes are committed, or nothing is idle. Returns the
/// granules released, and the driver's error.
pub(crate) async fn release_down_to(
    cx: &OpContext<'_>,
    keep: ByteSize,
) -> (u64, Option<DriverError>) {
    // Memory that the driver kept is trimmed as well, so at least one turn is made.
    let (granules, mut untrimmed) = cx.with(|state| {
        let stays = state.backed().saturating_sub(state.leaving());
        let excess = stays.saturating_sub(keep.get());
        (state.granules_for(excess.min(state.idle())), state.untrimmed)
    });
    let mut released = 0;
    // Each turn except the last releases at least one granule: at most `granules` turns.
    while released < granules || std::mem::take(&mut untrimmed) {
        untrimmed = false;
        let given = release_granules(cx, granules.saturating_sub(released), None).await;
        released += given.granules;
        // If none was released, another operation took the idle memory.
        if given.error.is_some() || given.granules == 0 {
            return (released, given.error);
        }
    }
    (released, None)
}

/// Trims the driver, so that it keeps no memory of released segments.
async fn trim(cx: &OpContext<'_>, untrimmed: bool, released: &mut ReleasedGranules) {
    let is_whole = cx.with(|state| state.is_whole());
    if !untrimmed && (!is_whole || released.granules == 0) {
        return;
    }
    released.unlocked = true;
    if let Err(error) = cx.outside(|| cx.driver.trim()).await {
        cx.with(|state| state.untrimmed = true);
        released.is_of_trim = released.error.is_none();
        released.error.get_or_insert(error);
    }
}

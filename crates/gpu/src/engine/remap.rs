//! Moves memory from idle granules to granules that need it, if the driver supports that.
//!
//! When the limit or the device rejects a commit, idle granules can supply the memory. If the
//! granules were released first, another process on the device could take their memory, and the
//! device would create new handles; a remap releases nothing. So no idle memory is lost to
//! fragmented addresses. The oldest idle granules go first: memory that was used or committed
//! recently is likely to be requested again.
//!
//! As for every driver call, the lock is released: source granules are marked as leaving, target
//! granules as arriving, and a thread that needs one of them waits for the result. The memory
//! counts at the source until it has arrived, so it is never counted twice. The module `alloc`
//! asks for a remap when memory is short. It releases and commits instead if a remap fails, if the
//! device's costs favour that, or if the idle handles have several granules: releasing such a
//! handle and committing again takes as many calls as a remap.
//!
//! Invariant: the sum of backed granules is the same before, during and after.
#![expect(unsafe_code, reason = "a remap takes memory away")]

use super::context::OpContext;
use super::release::CALLS_MAX;
use crate::driver::{DeviceAddress, DriverError};
use crate::index::Span;
use crate::state::aging::Ages;
use crate::state::arena::ArenaState;
use crate::state::region::{PlacedRun, Region};
use crate::state::segment::{Cursor, Run};
use lowtide_core::clock::Moment;
use lowtide_core::log;

/// The granules of one driver call: the source and the target of the memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    pub(super) from: PlacedRun,
    pub(super) region: Region,
    pub(super) to: Run,
}

/// Moves the memory of idle granules to bare ones of a placed span, at most this many. Returns the
/// granules moved, and the driver's error: the others must be committed in another way.
///
/// Holds the lock while it checks every idle granule. Makes at most [`CALLS_MAX`] driver calls,
/// plus one for each gap in the bare granules.
pub(super) async fn remap_idle(
    cx: &OpContext<'_>,
    region: Region,
    span: Span,
    granules: u64,
) -> (u64, Option<DriverError>) {
    let pairs = cx.with(|state| begin_remap(state, region, span, granules));
    let (moved, error) = remap(cx, pairs).await;
    if let Some(error) = &error {
        cx.log(|arena| log!(debug, arena, %error, "remap failed")).await;
    }
    (moved, error)
}

/// Moves the memory of marked pairs in order until a call fails, and records every result. Returns
/// the granules moved, and the driver's error.
pub(super) async fn remap(cx: &OpContext<'_>, pairs: Vec<Pair>) -> (u64, Option<DriverError>) {
    let (mut moved, mut failed) = (0, None);
    for pair in pairs {
        let (to, _) = cx.with(|state| state.region(pair.region).segment.place_of(pair.to));
        if failed.is_none() {
            let PlacedRun { at: from, size, handle, .. } = pair.from;
            // SAFETY: the source is marked as leaving and unused, the target as arriving.
            let call = || unsafe { cx.driver.remap(from, to, size, handle) };
            match cx.outside(call).await {
                Ok(()) => moved += pair.to.granules(),
                Err(error) => failed = Some(error),
            }
        }
        cx.with(|state| end_remap(state, pair, to, failed.is_none()));
    }
    (moved, failed)
}

/// Marks up to this many idle granules as leaving, the longest idle ones first, and as many bare
/// granules of a touched span as arriving.
fn begin_remap(state: &mut ArenaState, region: Region, span: Span, granules: u64) -> Vec<Pair> {
    if state.sleep.may_be_copied() {
        return Vec::new(); // a release waits for the copies first
    }
    if !state.costs.prefers_remap() {
        return Vec::new();
    }
    let granules = granules.min(state.region(region).segment.bare(span));
    let ages = state.aging.ages(state.events.clock.now());
    let Some(age) = age_of_oldest(state, granules, ages) else { return Vec::new() };
    let older = ages.waiting(age.saturating_add(1));
    let mut leaving = Vec::new();
    for ages in [older, ages.waiting(age)] {
        let mut cursors = [Cursor::START; Region::ALL.len()];
        while leaving.len() < CALLS_MAX {
            let left = granules - sum_of(&leaving);
            let next = state.begin_leave(left, 1, &mut cursors, Some(ages));
            let Some(next) = next else { break };
            leaving.push(next);
        }
    }
    let segment = &mut state.region_mut(region).segment;
    let runs = segment.begin_arrive(span, sum_of(&leaving));
    debug_assert_eq!(runs.iter().map(|run| run.granules()).sum::<u64>(), sum_of(&leaving));
    pairs(state, region, leaving, runs)
}

/// Returns pairs of leaving and arriving runs of the same length, cut to fit.
fn pairs(state: &ArenaState, region: Region, leaving: Vec<PlacedRun>, runs: Vec<Run>) -> Vec<Pair> {
    let mut pairs = Vec::with_capacity(leaving.len() + runs.len());
    let mut runs = runs.into_iter();
    let mut next = runs.next();
    for from in leaving {
        let mut rest = Some(from.run);
        while let (Some(run), Some(to)) = (rest, next) {
            let (run, more) = run.split(to.granules());
            let (to, more_to) = to.split(run.granules());
            rest = more;
            next = more_to.or_else(|| runs.next());
            let (at, size) = state.region(from.region).segment.place_of(run);
            let from = PlacedRun { run, at, size, ..from };
            pairs.push(Pair { from, region, to });
        }
    }
    pairs
}

/// Returns the greatest age that at least this many idle granules have or exceed; the lowest age if
/// there are fewer granules. Returns `None` if no granule may leave.
fn age_of_oldest(state: &ArenaState, granules: u64, ages: Ages) -> Option<u32> {
    let idle = Region::ALL.iter().flat_map(|&of| state.region(of).segment.idle_ages(ages));
    let mut idle: Vec<u32> = idle.collect();
    let nth = usize::try_from(granules).unwrap_or(usize::MAX).min(idle.len()).checked_sub(1)?;
    let (_, age, _) = idle.select_nth_unstable_by(nth, |a, b| b.cmp(a));
    Some(*age)
}

/// Records the result of a remap.
fn end_remap(
    state: &mut ArenaState,
    Pair { from, region, to }: Pair,
    at: DeviceAddress,
    done: bool,
) {
    state.region_mut(from.region).end_leave(from.run, done);
    state.region_mut(region).segment.end_arrive(to, done);
    state.results += 1;
    if done {
        state.totals.remaps_total += 1;
        state.totals.remapped_bytes_total += from.size.get();
        state.events.push("remap", |line| {
            line.bytes("size", from.size).address(from.at).number("to", at.get())
        });
    }
    if state.idle() == 0 {
        state.aging.due = Moment::NEVER;
    }
}

fn sum_of(leaving: &[PlacedRun]) -> u64 {
    leaving.iter().map(|part| part.run.granules()).sum()
}

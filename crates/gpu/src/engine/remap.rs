//! Moves memory from idle granules to granules that need it, if the driver can.
//!
//! A commit that the limit or the device refuses can use idle granules. If these were released
//! first, another process on the device could take their memory, and the device would create new
//! handles; a remap releases nothing. So idle memory is never lost to fragmented addresses. The
//! oldest idle granules go first: memory used or committed recently is likely to be requested
//! again.
//!
//! As for every driver call the lock is released: source granules are marked as leaving, target
//! granules as arriving, and a thread that needs one waits for its result. The memory counts at the
//! source until it has arrived, so that it is never counted twice. `commit` decides when to remap,
//! and falls back to release and commit.
//!
//! Invariant: the sum of backed granules is the same before, during and after.

use super::call::CallKind;
use super::port::Port;
use super::release::CALLS_MAX;
use crate::driver::DeviceAddress;
use crate::index::Span;
use crate::observe::visualize::Act;
use crate::state::aging::Ages;
use crate::state::arena::{ArenaState, Leaving};
use crate::state::region::Region;
use crate::state::segment::{Cursor, Run};
use lowtide_core::clock::Clock;
use lowtide_core::log;

/// Granules whose memory goes to others: one driver call.
#[derive(Clone, Copy, Debug)]
struct Pair {
    from: Leaving,
    region: Region,
    to: Run,
    at: DeviceAddress,
}

/// The result of a remap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remapped {
    pub(crate) granules: u64,
    /// `true` if the driver failed: the rest must be committed in another way.
    pub(crate) failed: bool,
}

/// Puts the memory of idle granules behind bare ones of a placed span, at most this many.
///
/// Holds the lock while it checks every idle granule. At most [`CALLS_MAX`] driver calls, and one
/// more for each gap in the bare granules.
pub(super) async fn remap_idle(
    port: &Port<'_>,
    region: Region,
    span: Span,
    granules: u64,
) -> Remapped {
    let pairs = port.with(|state| begin_remap(state, region, span, granules, port.clock));
    let mut remapped = Remapped { granules: 0, failed: false };
    for pair in pairs {
        if !remapped.failed {
            let Leaving { at, size, .. } = pair.from;
            let moved = port.does(CallKind::Remap { from: at, to: pair.at, size }).await;
            if let Err(error) = moved {
                log!(debug, arena = port.with(|state| state.name.clone()), %error, "remap failed");
                remapped.failed = true;
            } else {
                remapped.granules += pair.to.granules();
            }
        }
        port.with(|state| end_remap(state, pair, !remapped.failed, port.clock));
    }
    remapped
}

/// Marks up to so many idle granules as leaving, those first that have been idle longest, and
/// as many bare ones of a touched span as arriving.
fn begin_remap(
    state: &mut ArenaState,
    region: Region,
    span: Span,
    granules: u64,
    clock: &dyn Clock,
) -> Vec<Pair> {
    if state.sleep.may_be_copied() {
        return Vec::new(); // releasing it shows if that is over
    }
    let granules = granules.min(state.region(region).segment.bare(span));
    let ages = state.aging.ages(clock.now());
    let Some(age) = age_of_oldest(state, granules, ages) else { return Vec::new() };
    let older = ages.waiting(age.saturating_add(1));
    let mut leaving = Vec::new();
    for ages in [older, ages.waiting(age)] {
        let mut cursors = [Cursor::START; Region::ALL.len()];
        while leaving.len() < CALLS_MAX {
            let left = granules - sum_of(&leaving);
            let Some(next) = state.begin_leave(left, &mut cursors, Some(ages)) else { break };
            leaving.push(next);
        }
    }
    let segment = &mut state.region_mut(region).segment;
    let runs = segment.begin_arrive(span, sum_of(&leaving));
    debug_assert_eq!(runs.iter().map(|run| run.granules()).sum::<u64>(), sum_of(&leaving));
    pairs(state, region, leaving, runs)
}

/// Runs that leave and runs that memory comes to, as many granules of each, cut to fit.
fn pairs(state: &ArenaState, region: Region, leaving: Vec<Leaving>, runs: Vec<Run>) -> Vec<Pair> {
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
            let from = Leaving { run, at, size, ..from };
            let (at, _) = state.region(region).segment.place_of(to);
            pairs.push(Pair { from, region, to, at });
        }
    }
    pairs
}

/// Returns the age that this many idle granules, and no fewer, have or exceed; of all, if there
/// are fewer. `None` if none may leave.
fn age_of_oldest(state: &ArenaState, granules: u64, ages: Ages) -> Option<u32> {
    let idle = Region::ALL.iter().flat_map(|&of| state.region(of).segment.idle_ages(ages));
    let mut idle: Vec<u32> = idle.collect();
    let nth = usize::try_from(granules).unwrap_or(usize::MAX).min(idle.len()).checked_sub(1)?;
    let (_, age, _) = idle.select_nth_unstable_by(nth, |a, b| b.cmp(a));
    Some(*age)
}

/// Records the result of a remap.
fn end_remap(state: &mut ArenaState, pair: Pair, done: bool, clock: &dyn Clock) {
    let Pair { from, region, to, at } = pair;
    state.region_mut(from.region).end_leave(from.run, done);
    state.region_mut(region).segment.end_arrive(to, done);
    if done {
        state.totals.remaps += 1;
        state.totals.remapped_bytes += from.size.get();
        state.history.record(clock, Act::Decommit, from.at.get(), from.size);
        state.history.record(clock, Act::Commit, at.get(), from.size);
    }
    if state.idle() == 0 {
        state.aging.clear();
    }
}

fn sum_of(leaving: &[Leaving]) -> u64 {
    leaving.iter().map(|part| part.run.granules()).sum()
}

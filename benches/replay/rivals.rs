//! The peers on a trace: what they take from the device for what is live at most.
//!
//! A peer with a fixed pool gets the smallest pool in which the trace succeeds, found by halving;
//! an arena that grows gets all it asks for.
//!
//! Invariant: a trace succeeds in the pool that is found, and fails in one smaller by a step.

use super::peers::{Bfc, CuArena, Extend, Offset, Peer};
use super::trace::{Event, Trace};

/// Pools are told apart down to this many bytes: 64 KiB, under 0.04 % of any of our traces.
const STEP: u64 = 64 << 10;

/// The memory that one peer needs for a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub(crate) peer: &'static str,
    /// The most that was taken from the device at once; `None` where the trace does not fit at all.
    pub(crate) taken_peak: Option<u64>,
    /// Kept when everything was freed and the peer has given back what it gives back.
    #[allow(dead_code, reason = "the tests read it")]
    pub(crate) kept: Option<u64>,
}

/// All peers on one trace.
pub(crate) fn needs(trace: &Trace) -> [Need; 4] {
    let blocks_max = u32::try_from(2 * trace.blocks_peak + 2).unwrap_or(u32::MAX);
    let fixed = |peer, pool| Need { peer, taken_peak: pool, kept: pool };
    let grown = |peer, extend| {
        let (mut arena, mut peak) = (Bfc::new(extend, 1 << 62), 0);
        let is_whole = play(trace, &mut arena, |arena| peak = peak.max(arena.taken()));
        arena.shrink();
        Need { peer, taken_peak: is_whole.then_some(peak), kept: Some(arena.taken()) }
    };
    [
        fixed("cuarena", smallest_pool(trace, CuArena::new)),
        fixed("offset-allocator", smallest_pool(trace, |pool| Offset::new(pool, blocks_max))),
        grown("bfc-next-power-of-two", Extend::NextPowerOfTwo),
        grown("bfc-same-as-requested", Extend::SameAsRequested),
    ]
}

/// The smallest pool in which the trace succeeds, taken to succeed in all above it as well: doubled
/// until it does, 8 times at most, then halved.
fn smallest_pool<P: Peer>(trace: &Trace, pool: impl Fn(u64) -> P) -> Option<u64> {
    let fits = |steps: u64| play(trace, &mut pool(steps.saturating_mul(STEP)), |_| {});
    let least = trace.live_peak.div_ceil(STEP);
    let mut enough = (0..=8).map(|power| least << power).find(|&steps| fits(steps))?;
    let mut too_small = if enough == least { least - 1 } else { enough / 2 };
    while too_small + 1 < enough {
        let middle = too_small.midpoint(enough);
        *(if fits(middle) { &mut enough } else { &mut too_small }) = middle;
    }
    Some(enough * STEP)
}

/// Plays a whole trace: `false` where a block found no room. Calls `look` after each allocation.
fn play<P: Peer>(trace: &Trace, peer: &mut P, mut look: impl FnMut(&P)) -> bool {
    let mut blocks: Vec<Option<P::Handle>> = Vec::new();
    blocks.resize_with(trace.blocks, || None);
    for &event in &trace.events {
        match event {
            Event::Alloc { block, bytes } => {
                blocks[block] = peer.alloc(bytes);
                if blocks[block].is_none() {
                    return false;
                }
                look(peer);
            }
            Event::Free { block } => blocks[block].take().into_iter().for_each(|it| peer.free(it)),
        }
    }
    true
}

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

/// Segments of an arena without a limit.
const NO_LIMIT: u64 = 1 << 62;

/// The memory that one peer needs for a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub(crate) peer: &'static str,
    /// The most that was taken from the device at once; `None` where the trace does not fit at all.
    pub(crate) taken_peak: Option<u64>,
    /// Kept when everything was freed and the peer has given back what it gives back.
    pub(crate) kept: Option<u64>,
}

/// The bytes that the peers themselves were measured to take for the project's own traces, for each
/// byte that is live at most, in the order of [`needs`].
const MEASURED: [(&str, [f64; 4]); 5] = [
    ("bert-embed", [1.132, 1.167, 1.651, 1.421]),
    ("gpt2-generate", [1.001, 1.033, 2.524, 1.000]),
    ("llama-generate", [1.009, 1.016, 2.354, 1.054]),
    ("vit-images", [1.044, 1.039, 1.302, 1.095]),
    ("gpt2-train", [1.123, 1.211, 2.146, 1.207]),
];

/// The peers' measured need for a trace of the project's own name, or `None`.
pub(crate) fn measured(trace: &Trace) -> Option<[f64; 4]> {
    MEASURED.iter().find(|(name, _)| *name == trace.name).map(|&(_, ratios)| ratios)
}

/// All peers on one trace.
pub(crate) fn needs(trace: &Trace) -> [Need; 4] {
    let blocks_max = u32::try_from(2 * trace.blocks_peak + 2).unwrap_or(u32::MAX);
    let offset = smallest_pool(trace, |pool| Offset::new(pool, blocks_max));
    let cuarena = smallest_pool(trace, CuArena::new);
    [
        Need { peer: "cuarena", taken_peak: cuarena, kept: cuarena },
        Need { peer: "offset-allocator", taken_peak: offset, kept: offset },
        grown(trace, "bfc-next-power-of-two", Extend::NextPowerOfTwo),
        grown(trace, "bfc-same-as-requested", Extend::SameAsRequested),
    ]
}

fn grown(trace: &Trace, peer: &'static str, extend: Extend) -> Need {
    let mut arena = Bfc::new(extend, NO_LIMIT);
    let taken_peak = play(trace, &mut arena);
    arena.shrink();
    Need { peer, taken_peak, kept: Some(arena.taken()) }
}

/// The smallest pool in which the trace succeeds.
fn smallest_pool<P: Peer>(trace: &Trace, pool: impl Fn(u64) -> P) -> Option<u64> {
    let fits = |steps: u64| play(trace, &mut pool(steps.saturating_mul(STEP))).is_some();
    smallest(trace.live_peak.div_ceil(STEP), fits).map(|steps| steps.saturating_mul(STEP))
}

/// The smallest number from `at_least` on for which `fits` holds, taken to hold for all above it
/// as well: doubled until it holds, 8 times at most, then halved.
pub(crate) fn smallest(at_least: u64, mut fits: impl FnMut(u64) -> bool) -> Option<u64> {
    let mut too_small = at_least.saturating_sub(1);
    let most = (0..=8).map(|power| at_least.saturating_mul(1 << power));
    let mut enough = most.into_iter().find(|&size| {
        let found = fits(size);
        too_small = if found { too_small } else { size };
        found
    })?;
    while too_small + 1 < enough {
        let middle = too_small.midpoint(enough);
        if fits(middle) {
            enough = middle;
        } else {
            too_small = middle;
        }
    }
    Some(enough)
}

/// Plays a whole trace; the most that was taken, or `None` where a block found no room.
fn play<P: Peer>(trace: &Trace, peer: &mut P) -> Option<u64> {
    let mut blocks: Vec<Option<P::Handle>> = Vec::new();
    blocks.resize_with(trace.blocks, || None);
    let mut taken_peak = 0;
    for &event in &trace.events {
        match event {
            Event::Alloc { block, bytes } => {
                blocks[block] = Some(peer.alloc(bytes)?);
                taken_peak = taken_peak.max(peer.taken());
            }
            Event::Free { block } => {
                if let Some(handle) = blocks[block].take() {
                    peer.free(handle);
                }
            }
        }
    }
    debug_assert_eq!(peer.live(), 0, "a trace frees all");
    Some(taken_peak)
}

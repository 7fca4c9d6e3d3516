//! The model of ONNX Runtime's arena on a schedule: it knows no time, so what it keeps stays kept.
//!
//! Once as it is by default, and once with a shrink at the end of every burst, which it offers as
//! an option of each run.

use crate::peers::{Bfc, Extend, Peer};
use crate::schedule::{Burst, EVENT_APART};
use crate::trace::{Event, Trace};

/// Segments of an arena without a limit.
const NO_LIMIT: u64 = 1 << 62;

/// The allocators that are played.
pub(crate) const ALL: [(&str, Extend, bool); 4] = [
    ("bfc-model-next-power-of-two", Extend::NextPowerOfTwo, false),
    ("bfc-model-next-power-of-two-shrunk", Extend::NextPowerOfTwo, true),
    ("bfc-model-same-as-requested", Extend::SameAsRequested, false),
    ("bfc-model-same-as-requested-shrunk", Extend::SameAsRequested, true),
];

/// Retained bytes over virtual time, in byte seconds, and how often it took a segment from the
/// device.
pub(crate) fn play(trace: &Trace, bursts: &[Burst], extend: Extend, shrink: bool) -> (f64, u64) {
    let mut arena = Bfc::new(extend, NO_LIMIT);
    let mut blocks = vec![None; trace.blocks];
    let (mut retained, mut segments) = (0.0, 0);
    let kept = |arena: &Bfc| lowtide_gpu::ByteSize::new(arena.taken() - arena.live()).as_f64();
    for burst in bursts {
        for &event in &trace.events[burst.events.clone()] {
            match event {
                Event::Alloc { block, bytes } => {
                    let before = arena.taken();
                    blocks[block] = arena.alloc(bytes);
                    segments += u64::from(arena.taken() > before);
                }
                Event::Free { block } => {
                    blocks[block].take().into_iter().for_each(|at| arena.free(at))
                }
            }
            retained += kept(&arena) * EVENT_APART.as_secs_f64();
        }
        if shrink {
            arena.shrink();
        }
        retained += kept(&arena) * burst.gap.as_secs_f64();
    }
    (retained, segments)
}

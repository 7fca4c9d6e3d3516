//! Arbitrary acts on a block index and on its naive model: both must say and be the same.
//!
//! Six bytes are an act, as in the tests of the index, whose model this is.
//!
//!     cargo +nightly fuzz run index
//!
//! Invariant: none is broken, whatever the bytes.
#![no_main]

#[path = "../../crates/gpu/tests/gpu/index/model.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod model;

use libfuzzer_sys::fuzz_target;
use model::Pair;

/// The range: small enough to be full often.
const SPAN: u64 = 1 << 22;

fuzz_target!(|bytes: &[u8]| {
    let mut pair = Pair::new(SPAN, false);
    for act in bytes.chunks_exact(6).filter_map(model::read) {
        pair.play(act);
        pair.check();
    }
    pair.try_stale();
    pair.clear();
    pair.check();
});

//! Figures of an arena on a GPU, measured without one.

use super::benches::Bench;

pub(super) const BENCHES: &[Bench] = &[];

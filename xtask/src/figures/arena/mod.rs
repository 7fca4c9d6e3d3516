//! Figures of the arena's paths: their functions, their files and their instructions, and how many
//! random schedules run in a second.
//!
//! `paths` runs a program under callgrind, whose output `callgrind` reads. What a figure counts is
//! printed before it.

mod callgrind;
mod paths;
mod schedules;

use super::{Measure, count};

/// The folder of the package.
const FOLDER: &str = "crates/gpu/";

pub(super) const ARENA: &[Measure] = &[
    Measure { names: &["warm.functions", "warm.files"], run: paths::measure_warm },
    Measure { names: &["drop.functions", "drop.files"], run: paths::measure_drop },
    Measure {
        names: &[
            "warm_pair.instructions_ratio",
            "cold_alloc.instructions_ratio",
            "drop.instructions_ratio",
            "sleep.instructions_ratio",
            "wake.instructions_ratio",
        ],
        run: paths::measure_ratios,
    },
    Measure { names: &["schedules_per_s_ratio", "schedules.failed"], run: schedules::measure },
];

//! Figures of how the arena is built: cycles and directions of imports, places that lock its state,
//! the functions and instructions of its paths, and its size.
//!
//! Files: `modules` and `locks` read the source; `paths` runs a program under callgrind, whose
//! output `callgrind` reads. What a figure counts is printed before it. Tests are left out.

mod callgrind;
mod locks;
mod modules;
mod paths;
mod schedules;

use super::product::product;
use super::{Figure, Measure, count, figure};
use crate::tree::{self, Tree};

pub(crate) use modules::{check_cycles, check_layers};

/// The folder of the package.
const FOLDER: &str = "crates/gpu/";

pub(super) const ARENA: &[Measure] = &[
    Measure { names: &["cycle_files"], run: modules::measure_cycles },
    Measure { names: &["imports_up"], run: modules::measure_imports_up },
    Measure { names: &["lock_sites", "lock_files"], run: locks::measure },
    Measure { names: &["code_lines"], run: measure_lines },
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

/// Counts the lines of the package that are neither empty nor comments.
fn measure_lines() -> Result<Vec<Figure>, String> {
    let tree = Tree::read(&tree::root())?;
    let lines: usize = product(&tree, FOLDER)?.iter().map(|file| code_lines(&file.text)).sum();
    Ok(vec![figure("code_lines", count(lines), "lines", Some(12_000.0))])
}

fn code_lines(text: &str) -> usize {
    let lines = text.lines().map(str::trim_start);
    lines.filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_code_are_neither_empty_nor_comments() {
        let text = "//! A.\n\nfn f() { // why\n    /// B.\n    x();\n}\n";
        assert_eq!(code_lines(text), 3);
    }
}

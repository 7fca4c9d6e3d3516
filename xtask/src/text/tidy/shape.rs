//! The outer shape of a Rust file: its head and its columns.
//!
//! The length of functions is clippy's (`too_many_lines`), the rest of the layout rustfmt's.

use crate::tree::{Faults, Source};

const COLUMNS_MAX: usize = 100;

pub(crate) fn check(source: &Source, faults: &Faults) {
    if !source.text.starts_with("//!") {
        faults.add(source, 1, "a file begins with `//!`: what it is, in one sentence");
    }
    for (at, line) in source.text.lines().enumerate() {
        let columns = line.chars().count();
        if columns > COLUMNS_MAX && !line.contains("://") {
            let what = format!("{columns} columns: at most {COLUMNS_MAX}");
            faults.add(source, at + 1, &what);
        }
    }
}

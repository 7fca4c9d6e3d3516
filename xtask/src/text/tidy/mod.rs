//! Checks of the source text itself: direction of imports, heads and columns, orphaned files,
//! banned names, paths of the machine that built it, lints of separate workspaces.
//!
//! The rules are themselves put to the test: `planted` holds a fault for each of them, which must
//! be found, and clean texts, which must pass. It does not replace clippy, and parses no more than
//! tokens.

mod bans;
pub(crate) mod imports;
mod lints;
pub(crate) mod orphans;
#[cfg(test)]
mod planted;
mod shape;
pub(crate) mod tokens;

use std::collections::BTreeSet;

use crate::tree::{Faults, Tree};

/// Checks a tree.
pub(crate) fn check(tree: &Tree, faults: &Faults) {
    check_with(tree, imports::LAYERS, faults);
}

/// Checks a tree with these directions of imports.
fn check_with(tree: &Tree, layers: &[imports::Layers], faults: &Faults) {
    let library = tree.library();
    let names: BTreeSet<_> = library.iter().map(|source| source.name.as_str()).collect();
    imports::check(&tree.packages(), &library, layers, faults);
    orphans::check(&tree.files, faults);
    lints::check(tree, faults);
    for source in tree.files.iter().filter(|source| source.is_rust()) {
        shape::check(source, faults);
        bans::check(source, names.contains(source.name.as_str()), faults);
    }
    for source in &tree.files {
        bans::machine_paths(source, faults);
    }
}

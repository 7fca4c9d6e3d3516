//! The pages against the code: what stands in a fence compiles or names what exists.
//!
//! `blocks` has the fences, commands, names and links. Whether a sentence is true is for its
//! readers.

mod blocks;

use super::code::Code;
use crate::tree::{Faults, Source, Tree};

/// Checks all pages.
pub(super) fn check(tree: &Tree, code: &Code<'_>, faults: &Faults) {
    let pages = pages(tree);
    faults.expect(pages.len() >= 10, || format!("{} pages: expected more", pages.len()));
    blocks::check(tree, &pages, code, faults);
}

/// The pages that users, operators and contributors read.
fn pages(tree: &Tree) -> Vec<&Source> {
    let is_page = |source: &&Source| {
        let in_docs = source.is_under("docs") && source.name.matches('/').count() == 1;
        let is_page = in_docs && source.name.ends_with(".md");
        is_page || ["README.md", "CONTRIBUTING.md"].contains(&&*source.name)
    };
    tree.files.iter().filter(is_page).collect()
}

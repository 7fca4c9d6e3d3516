//! The pages against the code: what stands in a fence compiles or names what exists, and every
//! default and bound in prose is the constant's.
//!
//! `blocks` has the fences, commands, names and links; `amounts` finds the numbers of a page, and
//! `rows` says for each of them where it comes from. Whether a sentence is true beside its numbers
//! is for its readers.
//!
//! Invariant: on the pages of [`amounts::PAGES`] each amount with a unit, and on every page each
//! default, lies in a sentence of a row, or in one that is named as no constant's.

mod alert;
mod amounts;
mod blocks;
mod rows;

use super::code::Code;
use crate::tree::{Faults, Source, Tree};

/// Checks all pages.
pub(super) fn check(tree: &Tree, code: &Code<'_>, faults: &Faults) {
    let pages = pages(tree);
    faults.expect(pages.len() >= 10, || format!("{} pages: expected more", pages.len()));
    amounts::check(&pages, code, faults);
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

/// A page with one space where it has any white space, so that sentences are found across lines.
pub(super) fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

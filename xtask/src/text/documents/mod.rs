//! The pages against the code: what stands in a fence compiles or names what exists, and every
//! default and bound in prose is the constant's.
//!
//! `blocks` has the fences, commands, names and links; `amounts` finds the numbers of a page, and
//! `rows` says for each of them where it comes from, with `code` reading that out of the source.
//! Whether a sentence is true beside its numbers is for its readers.
//!
//! Invariant: on the pages of [`amounts::PAGES`] each amount with a unit, and on every page each
//! default, lies in a sentence of a row, or in one that is named as no constant's.
#![cfg(feature = "memory")]

mod amounts;
mod blocks;
mod code;
mod rows;

use std::fs;
use std::path::{Path, PathBuf};

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub(crate) fn text(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The pages that users and operators read, by their paths.
pub(crate) fn pages() -> Vec<String> {
    let inside = |folder: &str| {
        let entries = fs::read_dir(root().join(folder)).expect("a folder");
        let names = entries.map(|entry| entry.expect("an entry").path());
        names.filter(|path| path.extension().is_some_and(|end| end == "md")).collect::<Vec<_>>()
    };
    let mut found = inside("docs");
    found.push(PathBuf::from("README.md"));
    // A package has no page for contributors.
    found.extend(root().join("CONTRIBUTING.md").exists().then(|| "CONTRIBUTING.md".into()));
    let name = |path: PathBuf| {
        let path = path.strip_prefix(root()).map(Path::to_owned).unwrap_or(path);
        path.to_str().expect("a name in UTF-8").to_owned()
    };
    let mut names: Vec<_> = found.into_iter().map(name).collect();
    names.sort();
    assert!(names.len() >= 10, "the pages are not found any more: {names:?}");
    names
}

/// A page with one space where it has any white space, so that sentences are found across lines.
pub(crate) fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Fails with all of them.
pub(crate) fn none(faults: &[String]) {
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

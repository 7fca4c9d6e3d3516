//! `cargo xtask text`: the checks over text. They need no build of the crate.
//!
//! `imports`, `budgets`, `api` and `bans` look at the source, `dashboards` at the names in
//! dashboards, rules and deployment files, `links` at those between documents, `header` at the C
//! header. The table of metrics is compiled as it is.
//!
//! Invariant: every fault is printed, with its place.

mod api;
mod bans;
mod budgets;
mod dashboards;
mod header;
pub(crate) mod imports;
mod links;
/// The table of metrics, which the checks compare with everything that names one.
#[path = "../../../src/metrics/names.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is the library's")]
pub(crate) mod names;

use crate::code;
use crate::figures::field;
use crate::mutants;
use crate::tree::{self, Faults, Tree};

/// Runs all checks, and prints the faults.
pub(crate) fn run(write: bool) -> Result<(), String> {
    let root = tree::root();
    let mut tree = Tree::read(&root)?;
    if write {
        let codes = code::read(&tree)?;
        let mut files = api::files(&tree, &codes);
        files.extend([
            dashboards::write(&tree),
            header::write(&root)?,
            budgets::write(&tree, &codes),
        ]);
        for (name, text) in files {
            if tree.file(&name).is_none_or(|file| file.text != text) {
                std::fs::write(root.join(&name), text)
                    .map_err(|error| format!("{name}: {error}"))?;
                println!("wrote {name}");
            }
        }
        tree = Tree::read(&root)?;
    }
    let faults = check(&tree)?;
    for fault in &faults {
        println!("{fault}");
    }
    println!("text: {} files, {} faults", tree.files.len(), faults.len());
    if faults.is_empty() { Ok(()) } else { Err(format!("{} faults in texts", faults.len())) }
}

fn check(tree: &Tree) -> Result<Vec<String>, String> {
    let (faults, codes) = (Faults::default(), code::read(tree)?);
    let library = tree.library().len();
    faults.expect(library > 10, || format!("{library} files of the library: expected more"));
    let mut packages = tree.packages();
    packages.retain(|package| package.is_published);
    imports::check(&packages, &codes, &faults);
    budgets::check(tree, &codes, &faults);
    api::check(tree, &codes, &faults);
    bans::check(tree, &codes, &faults);
    mutants::check(tree, &faults);
    links::check(tree, &faults);
    dashboards::check(tree, &faults);
    header::check(tree, &faults);
    field::check(tree, &faults);
    Ok(faults.sorted())
}

//! `cargo xtask text`: the checks over text. They need no build of the crate.
//!
//! `tidy` looks at the source itself, `dashboards` at the names in dashboards, rules and deployment
//! files, `links` at those between documents, `header` at the C header. The table of metrics is
//! compiled as it is.
//!
//! Invariant: every fault is printed, with its place.

mod dashboards;
mod header;
mod links;
#[path = "../../../src/metrics/tier.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is the library's")]
pub(crate) mod metrics_tier;
/// The table of metrics, which the checks compare with everything that names one.
#[path = "../../../src/metrics/names.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is the library's")]
pub(crate) mod names;
pub(crate) mod tidy;

use self::metrics_tier::MetricsTier;
use crate::ci;
use crate::figures::arena::{check_cycles, check_layers};
use crate::figures::field;
use crate::mutants;
use crate::tree::{self, Faults, Tree};

/// Runs all checks, and prints the faults.
pub(crate) fn run(write: bool) -> Result<(), String> {
    let root = tree::root();
    let mut tree = Tree::read(&root)?;
    if write {
        for (name, text) in [dashboards::write(&tree), header::write(&root)?] {
            std::fs::write(root.join(name), text).map_err(|error| format!("{name}: {error}"))?;
            println!("wrote {name}");
        }
        tree = Tree::read(&root)?;
    }
    let faults = check(&tree);
    for fault in &faults {
        println!("{fault}");
    }
    println!("text: {} files, {} faults", tree.files.len(), faults.len());
    if faults.is_empty() { Ok(()) } else { Err(format!("{} faults in texts", faults.len())) }
}

fn check(tree: &Tree) -> Vec<String> {
    let faults = Faults::default();
    let library = tree.library().len();
    faults.expect(library > 10, || format!("{library} files of the library: expected more"));
    tidy::check(tree, &faults);
    check_layers(tree, &faults);
    check_cycles(tree, &faults);
    mutants::check(tree, &faults);
    links::check(tree, &faults);
    dashboards::check(tree, &faults);
    header::check(tree, &faults);
    field::check(tree, &faults);
    ci::check_workflow(tree, &faults);
    faults.sorted()
}

//! `cargo xtask text`: the checks over text. They need no build of the crate.
//!
//! `tidy` looks at the source itself, `documents` at the pages, `dashboards` at dashboards, rules
//! and the runbook, `deploying` at the files for Docker, Compose, Kubernetes and systemd, `header`
//! at the C header. Values are read from the source by `code`; the table of metrics is compiled as
//! it is.
//!
//! Invariant: every fault is printed, with its place.

pub(crate) mod code;
mod dashboards;
pub(crate) mod deploying;
mod documents;
mod header;
#[path = "../../../src/metrics/tier.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is the library's")]
pub(crate) mod metrics_tier;
/// The table of metrics, which the checks compare with everything that names one.
#[path = "../../../src/metrics/names.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is the library's")]
pub(crate) mod names;
pub(crate) mod tidy;

use yaml_rust2::YamlLoader;

use self::code::Code;
use self::metrics_tier::MetricsTier;
use crate::ci;
use crate::figures::arena::{check_cycles, check_layers};
use crate::figures::field;
use crate::mutants;
use crate::tree::{self, Faults, Tree};

/// Runs all checks, and prints the faults.
pub(crate) fn run(write: bool) -> Result<(), String> {
    let root = tree::root();
    if write {
        let name = dashboards::write(&root).map_err(|error| format!("cannot write: {error}"))?;
        println!("wrote {name}");
        println!("wrote {}", header::write(&root)?);
    }
    let tree = Tree::read(&root)?;
    let faults = check(&tree);
    for fault in &faults {
        println!("{fault}");
    }
    println!("text: {} files, {} faults", tree.files.len(), faults.len());
    if faults.is_empty() { Ok(()) } else { Err(format!("{} faults in texts", faults.len())) }
}

fn check(tree: &Tree) -> Vec<String> {
    let faults = Faults::default();
    let code = Code::new(tree, &faults);
    let library = tree.library().len();
    faults.expect(library > 10, || format!("{library} files of the library: expected more"));
    let is_yaml = |name: &str| name.ends_with(".yml") || name.ends_with(".yaml");
    for file in tree.files.iter().filter(|file| is_yaml(&file.name)) {
        if let Err(error) = YamlLoader::load_from_str(&file.text) {
            faults.say(format!("{}: {error}", file.name));
        }
    }
    tidy::check(tree, &faults);
    check_layers(tree, &faults);
    check_cycles(tree, &faults);
    mutants::check(tree, &faults);
    documents::check(tree, &code, &faults);
    dashboards::check(tree, &faults);
    deploying::check(tree, &code, &faults);
    header::check(tree, &faults);
    field::check(tree, &faults);
    ci::check_workflow(tree, &faults);
    faults.sorted()
}

/// The names of the `LOWTIDE_*` variables.
fn variables(code: &Code<'_>) -> Vec<String> {
    let all = code.constant("config::env::VARIABLES").list();
    all.iter().map(|variable| variable.field("name").text()).collect()
}

//! Finds Rust files that no target compiles.
//!
//! It starts with the files that Cargo builds (libraries, programs, examples, tests, benches, build
//! scripts, and every `path` in a manifest) and follows `mod name;`, `#[path]` and `include!`. Two
//! orphans that declare each other are still orphans.
//!
//! Invariant: `.rs` files = files reached.

use std::collections::{BTreeMap, BTreeSet};

use super::tokens::{Token, after_group, reads};
use crate::tree::{Faults, Source};

pub(crate) fn check(tree: &[Source], faults: &Faults) {
    let files: BTreeMap<_, _> =
        tree.iter().filter(|s| s.is_rust()).map(|s| (s.name.as_str(), s)).collect();
    let mut reached = BTreeSet::new();
    let mut open: Vec<_> = roots(tree).into_iter().map(|name| (name, true)).collect();
    while let Some((name, owns_folder)) = open.pop() {
        let Some(source) = files.get(name.as_str()) else {
            continue; // rustc says so where a declared file is missing
        };
        if reached.insert(name.clone()) {
            open.extend(declared(source, owns_folder));
        }
    }
    for (name, source) in files {
        if !reached.contains(name) {
            faults.add(source, 1, "no module declares this file, and no target builds it");
        }
    }
}

/// The files from which Cargo builds, of this package and of packages inside the repository.
fn roots(tree: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    let manifest = |source: &Source| source.name.strip_suffix("Cargo.toml").map(str::to_owned);
    let packages: BTreeSet<_> = tree.iter().filter_map(manifest).chain([String::new()]).collect();
    for source in tree {
        for package in &packages {
            let Some(inside) = source.name.strip_prefix(package.as_str()) else {
                continue;
            };
            if is_target(&inside.split('/').collect::<Vec<_>>()) {
                found.push(source.name.clone());
            }
        }
        if let Some(package) = manifest(source) {
            let written = source.text.split('"').filter(|text| text.ends_with(".rs"));
            found.extend(written.map(|path| joined(&package, path)));
        }
    }
    found
}

/// Returns `true` if Cargo finds a target at this path of a package without being told.
fn is_target(path: &[&str]) -> bool {
    match path {
        ["build.rs"] | ["src", "lib.rs" | "main.rs"] => true,
        ["src", "bin", file] | ["examples" | "tests" | "benches", file] => file.ends_with(".rs"),
        ["src", "bin", _, "main.rs"] | ["examples" | "tests" | "benches", _, "main.rs"] => true,
        _ => false,
    }
}

/// The files that a source declares, and whether each owns its folder as `mod.rs` does.
fn declared(source: &Source, owns_folder: bool) -> Vec<(String, bool)> {
    let code = source.code();
    let (folder, file) = source.name.rsplit_once('/').unwrap_or(("", &source.name));
    let beside = joined(folder, file.trim_end_matches(".rs"));
    let home = if owns_folder { folder.to_owned() } else { beside };
    let mut found = Vec::new();
    let mut attributes: Vec<&str> = Vec::new(); // values of `path` since the last item
    let mut modules: Vec<Option<&str>> = Vec::new(); // for each open brace, the module it opens
    let mut at = 0;
    while at < code.len() {
        let mut next = at + 1;
        if reads(&code, at, &["#", "["]) {
            next = after_group(&code, at + 1);
            attributes.extend(path_values(&code[at..next]));
        } else if code[at].is("mod") && reads(&code, at + 2, &[";"]) {
            let inner = modules.iter().flatten().fold(home.clone(), |at, name| joined(&at, name));
            let name = code[at + 1].name().unwrap_or_default();
            found.push((joined(&inner, &format!("{name}.rs")), false));
            found.push((joined(&inner, &format!("{name}/mod.rs")), true));
            let base = if modules.iter().flatten().next().is_some() { &inner } else { folder };
            found.extend(attributes.drain(..).map(|path| (joined(base, path), true)));
        } else if reads(&code, at, &["include", "!", "("]) {
            let path = code.get(at + 3).and_then(Token::content);
            found.extend(path.map(|path| (joined(folder, path), true)));
        } else if code[at].is("{") {
            let is_module = at >= 2 && code[at - 2].is("mod");
            modules.push(code[at.saturating_sub(1)].name().filter(|_| is_module));
            attributes.clear();
        } else if code[at].is("}") {
            modules.pop();
            attributes.clear();
        } else if code[at].is(";") {
            attributes.clear();
        }
        at = next;
    }
    found
}

/// The values of `path = "..."` in an attribute, those under `cfg_attr` too.
fn path_values<'a>(attribute: &[Token<'a>]) -> Vec<&'a str> {
    let values = attribute.windows(3).filter(|w| w[0].is("path") && w[1].is("="));
    values.filter_map(|w| w[2].content()).collect()
}

/// `path` as seen from `folder`, without `.` and `..`.
pub(crate) fn joined(folder: &str, path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(path.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

//! `cargo xtask quick`: the inner loop. Format, the checks over text, and clippy and tests of what
//! changed since the branch left `main`, the working tree included; all else is type-checked.
//!
//! Of the root package, whose tests take long, the library's tests run, and the test binaries that
//! changed. Examples in documentation are left to `cargo test`.
//!
//! Invariant: every step runs, and every failure is reported at the end.

use std::collections::{BTreeMap, BTreeSet};

use crate::run::{Run, cargo, children_cpu_seconds};
use crate::text;
use crate::tree::{self, Tree};

/// Runs the steps.
pub(crate) fn run(base: &str) -> Result<(), String> {
    let before = children_cpu_seconds()?;
    let changed = changed_files(base)?;
    let tree = Tree::read(&tree::root())?;
    let mut failed = Vec::new();
    failed.extend(cargo("fmt --all --check").run().err());
    failed.extend(text::run(false).err());
    for command in commands(&tree, &changed) {
        failed.extend(cargo(&command).run().err());
    }
    println!("quick: {:.0} CPU seconds", children_cpu_seconds()? - before);
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// The files that differ from where the branch left `base`, and those that Git does not know yet.
fn changed_files(base: &str) -> Result<Vec<String>, String> {
    let git = |words: &str| Run::new("git").words(words).output();
    let from = git(&format!("merge-base HEAD {base}"))
        .or_else(|_| git(&format!("merge-base HEAD origin/{base}")))
        .map_err(|_| format!("no branch {base:?}: name another one with --base"))?;
    let mut names = git(&format!("diff --name-only {}", from.trim()))?;
    names += &git("ls-files --others --exclude-standard")?;
    Ok(names.lines().map(str::to_owned).collect())
}

/// The commands of Cargo for these files.
fn commands(tree: &Tree, changed: &[String]) -> Vec<String> {
    let packages = tree.packages();
    // The targets that changed in each package.
    let mut targets = BTreeMap::<_, BTreeSet<String>>::new();
    for file in changed.iter().filter(|file| file.ends_with(".rs") || file.ends_with("Cargo.toml"))
    {
        let holds = |package: &&tree::Package| file.starts_with(&package.folder);
        let package = packages.iter().filter(holds).max_by_key(|package| package.folder.len());
        let Some(package) = package else { continue };
        let inside: Vec<_> = file[package.folder.len()..].split('/').collect();
        let target = match inside.as_slice() {
            _ if !package.folder.is_empty() => "--lib --bins --tests".to_owned(),
            ["tests", name, ..] => format!("--test {}", name.trim_end_matches(".rs")),
            ["examples", ..] => "--examples".to_owned(),
            _ => "--lib".to_owned(),
        };
        targets.entry(package.crate_name.replace('_', "-")).or_default().insert(target);
    }
    let mut commands = Vec::new();
    for (name, targets) in &targets {
        let targets: Vec<_> = targets.iter().map(String::as_str).collect();
        let targets = targets.join(" ");
        commands.push(format!("clippy --locked -p {name} {targets} -- -D warnings"));
        commands.push(format!("test --locked -p {name} {targets}"));
    }
    commands.extend((!targets.is_empty()).then(|| "check --locked --all-targets".to_owned()));
    commands
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Source;

    #[test]
    fn what_changed_is_linted_and_tested_and_the_rest_is_checked() {
        let manifest = |folder: &str, name: &str| Source {
            name: format!("{folder}Cargo.toml"),
            text: format!("[package]\nname = \"{name}\"\n"),
        };
        let files = vec![manifest("", "lowtide"), manifest("crates/gpu/", "lowtide-gpu")];
        let tree = Tree { files, binaries: Vec::new() };
        let of = |changed: &[&str]| {
            commands(&tree, &changed.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(
            of(&["crates/gpu/src/arena.rs", "docs/STYLE.md", "src/lib.rs", "tests/proxy/main.rs"]),
            [
                "clippy --locked -p lowtide --lib --test proxy -- -D warnings",
                "test --locked -p lowtide --lib --test proxy",
                "clippy --locked -p lowtide-gpu --lib --bins --tests -- -D warnings",
                "test --locked -p lowtide-gpu --lib --bins --tests",
                "check --locked --all-targets",
            ]
        );
        assert_eq!(of(&["README.md", "docs/STYLE.md"]), [""; 0]);
    }
}

//! `cargo xtask quick`: the inner loop. Format, the checks over text, and clippy and tests of what
//! changed since the branch left `main`, the working tree included.
//!
//! Packages that depend on a changed one are only type-checked. The root package's integration
//! tests run if they changed themselves; `cargo test` runs all of them. Examples in documentation
//! are left to `cargo test` too.
//!
//! Invariant: every step runs, and every failure is reported at the end.

use std::collections::{BTreeMap, BTreeSet};

use crate::packages::{Package, dependents, packages};
use crate::run::{Run, cargo, children_cpu_seconds};
use crate::text;

/// Runs the steps.
pub(crate) fn run(base: &str) -> Result<(), String> {
    let before = children_cpu_seconds()?;
    let changed = changed_files(base)?;
    let all = packages()?;
    let plan = Plan::new(&all, &changed);
    println!("{} files changed, in: {}", changed.len(), plan.changed().join(", "));
    let mut failed = Vec::new();
    failed.extend(cargo("fmt --all --check").run().err());
    failed.extend(text::run(false).err());
    for command in plan.commands(&all) {
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

/// The changes in a package.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    /// Its library or manifest.
    library: bool,
    /// Test targets.
    tests: BTreeSet<String>,
    /// Examples or benches.
    others: bool,
}

/// The packages with changed files.
#[derive(Debug)]
struct Plan(BTreeMap<String, Changes>);

impl Plan {
    fn new(all: &[Package], changed: &[String]) -> Self {
        let mut plan = BTreeMap::<String, Changes>::new();
        for file in changed {
            let holds = |package: &&Package| file.starts_with(&package.folder);
            let package = all.iter().filter(holds).max_by_key(|package| package.folder.len());
            let Some(package) = package else { continue };
            let inside: Vec<_> = file[package.folder.len()..].split('/').collect();
            let mut changes = Changes::default();
            match inside.as_slice() {
                ["src", ..] | ["build.rs" | "Cargo.toml"] => changes.library = true,
                ["tests", name, ..] => {
                    // A folder of data or of helpers is no target.
                    let is_target = name.ends_with(".rs") || inside.len() > 2;
                    if is_target && !["data", "support"].contains(name) {
                        changes.tests.insert(name.trim_end_matches(".rs").to_owned());
                    }
                }
                [.., file] if file.ends_with(".rs") => changes.others = true,
                _ => continue,
            }
            let known = plan.entry(package.name.clone()).or_default();
            known.library |= changes.library;
            known.others |= changes.others;
            known.tests.append(&mut changes.tests);
        }
        Self(plan)
    }

    fn changed(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    /// The arguments of Cargo, command by command.
    fn commands(&self, all: &[Package]) -> Vec<String> {
        let mut commands = Vec::new();
        let of = |names: &mut dyn Iterator<Item = &String>| {
            names.map(|name| format!("-p {name}")).collect::<Vec<_>>().join(" ")
        };
        if self.0.is_empty() {
            return commands;
        }
        let is_root = |name: &str| all.iter().any(|one| one.name == name && one.folder.is_empty());
        for (name, changes) in &self.0 {
            let mut targets = String::new();
            if !is_root(name) {
                targets += " --all-targets";
            } else if changes.library || !changes.tests.is_empty() {
                targets += " --lib";
            }
            if is_root(name) && changes.others {
                targets += " --examples";
            }
            if is_root(name) {
                changes.tests.iter().for_each(|test| targets += &format!(" --test {test}"));
            }
            commands.push(format!("clippy --locked -p {name}{targets} -- -D warnings"));
            // Benches are linted and not run: as tests they would measure.
            let tests = targets.replace(" --all-targets", " --lib --bins --tests");
            let tests = tests.replace(" --examples", "");
            if !tests.is_empty() {
                commands.push(format!("test --locked -p {name}{tests}"));
            }
        }
        let libraries = self.0.iter().filter(|(_, changes)| changes.library);
        let libraries: BTreeSet<_> = libraries.map(|(name, _)| name.clone()).collect();
        let mut others = dependents(all, &libraries);
        others.retain(|name| !self.0.contains_key(name));
        if !others.is_empty() {
            commands.push(format!("check --locked {}", of(&mut others.iter())));
        }
        commands
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, folder: &str, on: &[&str]) -> Package {
        Package {
            name: name.to_owned(),
            folder: folder.to_owned(),
            is_published: true,
            is_default: true,
            features: Vec::new(),
            documented: Vec::new(),
            version: String::new(),
            rust_version: String::new(),
            dependencies: on.iter().map(ToString::to_string).collect(),
            needs: Vec::new(),
        }
    }

    fn commands(changed: &[&str]) -> Vec<String> {
        let all = [
            package("lowtide", "", &["lowtide-gpu"]),
            package("lowtide-gpu", "crates/gpu/", &[]),
            package("lowtide-benches", "benches/", &["lowtide"]),
        ];
        let changed: Vec<_> = changed.iter().map(ToString::to_string).collect();
        Plan::new(&all, &changed).commands(&all)
    }

    #[test]
    fn an_edit_in_a_package_tests_it_and_checks_those_that_depend_on_it() {
        assert_eq!(
            commands(&["crates/gpu/src/arena.rs", "docs/STYLE.md"]),
            [
                "clippy --locked -p lowtide-gpu --all-targets -- -D warnings",
                "test --locked -p lowtide-gpu --lib --bins --tests",
                "check --locked -p lowtide -p lowtide-benches",
            ]
        );
    }

    #[test]
    fn an_edit_in_the_root_tests_its_library_and_the_tests_that_changed() {
        assert_eq!(
            commands(&["src/lib.rs", "tests/proxy/main.rs"]),
            [
                "clippy --locked -p lowtide --lib --test proxy -- -D warnings",
                "test --locked -p lowtide --lib --test proxy",
                "check --locked -p lowtide-benches",
            ]
        );
        assert_eq!(
            commands(&["examples/tide.rs"]),
            ["clippy --locked -p lowtide --examples -- -D warnings"]
        );
        assert_eq!(commands(&["README.md", "docs/STYLE.md"]), [""; 0]);
    }
}

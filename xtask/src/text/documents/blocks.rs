//! Checks the contents of the pages: fences, commands, files, variables, metrics, links.
//!
//! Rust is compiled by `cargo test --doc`, for the pages that `src/lib.rs` includes; here it is
//! seen that those are all. A name of something in this repository has to exist. What a shell
//! would do with a command is not tried.
//!
//! Invariant: fences of Rust = fences that are compiled.

use std::collections::{BTreeMap, BTreeSet};

use crate::text::code::{Code, Found};
use crate::text::header::HEADER;
use crate::text::names::TABLE;
use crate::text::tidy::orphans::joined;
use crate::text::variables;
use crate::tree::{Faults, Source, Tree};

/// The languages of fences. None of them leaves Rust uncompiled. A block with a global allocator is
/// a crate of its own. rustdoc cannot merge two of them, and would compile every block separately.
const LANGUAGES: &[&str] = &[
    "rust",
    "rust,no_run",
    "rust,standalone_crate",
    "rust,no_run,standalone_crate",
    "sh",
    "toml",
    "text",
    "python",
];

/// Variables that Kubernetes sets for a service called `lowtide`; the page says that they are left
/// alone.
const OF_KUBERNETES: &[&str] = &["LOWTIDE_SERVICE_HOST", "LOWTIDE_PORT", "LOWTIDE_PORT_8080_TCP"];

/// The inputs of the comparison.
struct Blocks<'a> {
    tree: &'a Tree,
    pages: &'a [&'a Source],
    faults: &'a Faults,
}

/// Checks what the pages show.
pub(super) fn check(tree: &Tree, pages: &[&Source], code: &Code<'_>, faults: &Faults) {
    let blocks = Blocks { tree, pages, faults };
    blocks.check_fences();
    blocks.check_readme();
    blocks.check_features();
    blocks.check_commands();
    blocks.check_files();
    blocks.check_names(code);
    blocks.check_links();
    blocks.check_tables();
    blocks.check_routes(code);
}

/// The line of a part of a text.
fn line(text: &str, part: &str) -> usize {
    let at = (part.as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
    text.get(..at).map_or(1, |before| before.matches('\n').count() + 1)
}

/// A fenced block: its language and its lines.
fn fences(page: &Source, faults: &Faults) -> Vec<(String, String)> {
    let (mut found, mut open): (Vec<(String, String)>, bool) = (Vec::new(), false);
    for line in page.text.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            open = !open;
            if open {
                found.push((language.to_owned(), String::new()));
            }
        } else if let Some((_, block)) = found.last_mut().filter(|_| open) {
            block.push_str(line);
            block.push('\n');
        }
    }
    faults.expect(!open, || format!("{}: a fence is not closed", page.name));
    found
}

/// A dependency: its version and its features.
type Dependency = (String, BTreeSet<String>);

/// The dependencies in a manifest, by name. A feature counts wherever the manifest has it: an entry
/// may take its version from the workspace and add features.
fn dependencies(manifest: &str) -> BTreeMap<String, Dependency> {
    let mut found = BTreeMap::<String, Dependency>::new();
    for line in manifest.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, rest)) = line.split_once(" = ") else { continue };
        let is_table = rest.starts_with('{');
        if rest.starts_with('[') {
            continue; // a feature of this name
        }
        let quoted = |text: &str| text.split('"').nth(1).map(str::to_owned);
        let version = match rest.split_once("version = ") {
            Some((_, version)) => quoted(version),
            None => quoted(rest).filter(|_| !is_table),
        };
        let features = rest.split_once("features = [").map_or("", |(_, list)| list);
        let features = features.split(']').next().unwrap_or_default().split('"');
        let (known, all) = found.entry(name.to_owned()).or_default();
        *known = version.unwrap_or_else(|| known.clone());
        all.extend(features.skip(1).step_by(2).map(str::to_owned));
    }
    found
}

/// The names under `[features]`, without `default`.
fn features_of(manifest: &str) -> Vec<String> {
    let section = manifest.split("[features]").nth(1).unwrap_or_default();
    let section = section.split("\n[").next().unwrap_or_default();
    let lines = section.lines().filter(|line| !line.starts_with('#'));
    let names = lines.filter_map(|line| Some(line.split_once(" = ")?.0.to_owned()));
    names.filter(|name| name != "default").collect()
}

/// The words after a flag, wherever it stands.
fn after<'a>(page: &'a str, flag: &'a str) -> impl Iterator<Item = &'a str> {
    let name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | ',');
    page.split(flag).skip(1).map(move |rest| {
        rest.split(|c: char| !name(c)).next().unwrap_or_default().trim_end_matches(',')
    })
}

/// Words of these letters that begin so.
fn words<'a>(text: &'a str, start: &'a str, letters: fn(&char) -> bool) -> Vec<&'a str> {
    let all = text.split(move |c: char| !letters(&c));
    all.filter(|word| word.starts_with(start) && word.len() > start.len()).collect()
}

/// Returns the name of a heading in a link: small letters, hyphens for spaces, no other marks.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|&c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

impl<'a> Blocks<'a> {
    fn fault(&self, page: &Source, part: &str, what: &str) {
        self.faults.add(page, line(&page.text, part), what);
    }

    fn manifest(&self) -> &'a str {
        self.tree.text("Cargo.toml", self.faults)
    }

    /// Every fence of Rust is compiled with the documentation.
    fn check_fences(&self) {
        let is_library = |file: &&Source| file.name.ends_with("src/lib.rs");
        let libraries: Vec<_> = self.tree.files.iter().filter(is_library).collect();
        for page in self.pages {
            let (fences, name) = (fences(page, self.faults), &page.name);
            for (language, _) in &fences {
                self.faults.expect(LANGUAGES.contains(&language.as_str()), || {
                    format!("{name}: a fence of {language:?}: expected {LANGUAGES:?}")
                });
            }
            let included = format!("../{name}\")]");
            let is_compiled = libraries.iter().any(|file| file.text.contains(&included));
            let has_rust = fences.iter().any(|(language, _)| language.starts_with("rust"));
            self.faults.expect(has_rust == is_compiled, || {
                format!("{name} has Rust: {has_rust}; a src/lib.rs includes it: {is_compiled}")
            });
        }
    }

    /// The dependencies that the README shows are those it is compiled with.
    fn check_readme(&self) {
        let manifest = self.manifest();
        let ours = dependencies(manifest);
        let Some(page) = self.pages.iter().find(|page| page.name == "README.md") else { return };
        let fences = fences(page, self.faults);
        let fence = fences.into_iter().find(|(language, _)| language == "toml");
        let shown = fence.map_or_else(BTreeMap::new, |(_, text)| dependencies(&text));
        let has_tokio = shown.contains_key("tokio");
        self.faults.expect(has_tokio, || format!("README.md shows no dependencies: {shown:?}"));
        let version = manifest.split("\nversion = \"").nth(1).unwrap_or_default();
        for (name, (shown, features)) in shown {
            if name == "lowtide" {
                let is_ours = version.starts_with(&shown);
                self.faults.expect(is_ours, || format!("README.md: lowtide {shown}: no such one"));
                for feature in features {
                    let exists = features_of(manifest).contains(&feature);
                    let what = || format!("README.md: lowtide has no feature {feature}");
                    self.faults.expect(exists, what);
                }
                continue;
            }
            let (version, known) = ours.get(&name).cloned().unwrap_or_default();
            let is_same = version == shown || version.starts_with(&format!("{shown}."));
            self.faults.expect(is_same, || {
                format!("README.md: {name} {shown} is not what the sample is compiled with")
            });
            for feature in features.difference(&known) {
                self.faults.say(format!("README.md: {name} has {feature} there alone"));
            }
        }
    }

    /// The table of features is the manifest's, and none is on by default.
    fn check_features(&self) {
        let manifest = self.manifest();
        let is_bare = manifest.lines().any(|line| line == "default = []");
        self.faults.expect(is_bare, || "Cargo.toml: a feature is on by default".to_owned());
        let library = self.tree.text("src/lib.rs", self.faults);
        let shown: BTreeSet<_> = library
            .lines()
            .filter_map(|line| line.strip_prefix("//! | `")?.split_once("` | "))
            .map(|(name, _)| name.to_owned())
            .collect();
        let known: BTreeSet<_> = features_of(manifest).into_iter().collect();
        for name in shown.symmetric_difference(&known) {
            self.faults.say(format!("src/lib.rs: the table and Cargo.toml differ: {name}"));
        }
    }

    /// Commands name targets and features that exist.
    fn check_commands(&self) {
        let own = features_of(self.manifest());
        let manifests = self.tree.files.iter().filter(|file| file.name.ends_with("Cargo.toml"));
        let every: BTreeSet<_> = manifests.flat_map(|file| features_of(&file.text)).collect();
        let packages = self.tree.packages();
        let folders: Vec<_> = packages.iter().map(|package| package.folder.as_str()).collect();
        let is_there = |folder: &str, name: &str| {
            folders.iter().any(|package| {
                let path = format!("{package}{folder}/{name}");
                // The last: in a package of examples.
                [format!("{path}.rs"), format!("{path}/main.rs"), format!("{package}{name}.rs")]
                    .iter()
                    .any(|path| self.tree.file(path).is_some())
            })
        };
        let mut count = 0;
        let flags = [("--bench ", "benches"), ("--example ", "examples"), ("--test ", "tests")];
        for page in self.pages {
            for (flag, folder) in flags {
                for name in after(&page.text, flag) {
                    count += 1;
                    if !is_there(folder, name) {
                        self.fault(page, name, &format!("{flag}{name}: no such file in {folder}"));
                    }
                }
            }
            for list in after(&page.text, "--features ") {
                let command = page.line(line(&page.text, list));
                let of_package = [" -p ", "--package ", "--manifest-path "]
                    .iter()
                    .any(|flag| command.contains(flag));
                for feature in list.split(',') {
                    let is_own = own.iter().any(|known| known == feature);
                    let exists = is_own || (of_package && every.contains(feature));
                    if !exists {
                        self.fault(page, list, &format!("--features {feature}: no such feature"));
                    }
                }
            }
        }
        self.faults.expect(count > 10, || format!("{count} commands on pages: expected more"));
    }

    /// Files that pages name are there.
    fn check_files(&self) {
        const FOLDERS: &[&str] = &[
            "src/",
            "crates/",
            "tests/",
            "testing/",
            "examples/",
            "benches/",
            "dashboards/",
            "deploy/",
            "docs/",
            "xtask/",
            ".ci/",
            ".github/",
        ];
        for page in self.pages {
            let is_part = |c: char| c.is_ascii_alphanumeric() || "_-./*<>{}".contains(c);
            for word in page.text.split(|c: char| !is_part(c)) {
                let path = word.trim_end_matches(['.', '/']);
                let is_ours = FOLDERS.iter().any(|folder| path.starts_with(folder));
                // A pattern names no file.
                if is_ours
                    && !path.contains(['*', '<', '{'])
                    && !self.tree.has(path)
                    && !self.tree.has(&format!("{path}.rs"))
                {
                    self.fault(page, word, &format!("{path}: no such file"));
                }
            }
        }
    }

    /// Variables and metrics that pages name exist.
    fn check_names(&self, code: &Code<'_>) {
        let capital = |c: &char| c.is_ascii_uppercase() || c.is_ascii_digit() || *c == '_';
        let small = |c: &char| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == '_';
        let settings =
            ["examples/proxy/cli.rs", "examples/proxy/model.rs", "examples/onnx/src/model.rs"];
        let proxy = settings.map(|file| self.tree.text(file, self.faults)).concat();
        let rules = self.tree.text("dashboards/lowtide.rules.yml", self.faults);
        let manifest = self.manifest().replace('-', "_");
        let crates: Vec<_> =
            self.tree.packages().into_iter().map(|package| package.crate_name).collect();
        let header = self.tree.text(HEADER, self.faults);
        let variables = variables(code);
        for page in self.pages {
            for name in words(&page.text, "LOWTIDE_", capital) {
                let known = variables.iter().any(|variable| variable == name)
                    || (page.name == "docs/DEPLOYING.md" && OF_KUBERNETES.contains(&name));
                if !known && !name.ends_with('_') {
                    self.fault(page, name, &format!("{name}: no such variable"));
                }
            }
            for name in words(&page.text, "PROXY_", capital) {
                if !name.ends_with('_') && !proxy.contains(&format!("\"{name}\"")) {
                    self.fault(page, name, &format!("{name}: no such variable of the proxy"));
                }
            }
            for name in words(&page.text, "lowtide_", small) {
                let series = ["_bucket", "_sum", "_count"];
                let metric = series.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
                let known = TABLE.iter().any(|one| one.name == name || one.name == metric)
                    || rules.contains(&format!(":{name}:"))
                    || manifest.contains(name)
                    || crates.iter().any(|known| known == name)
                    || header.contains(&format!("{name}("));
                if !known && !name.ends_with('_') {
                    self.fault(page, name, &format!("{name}: no such metric"));
                }
            }
        }
    }

    /// Links lead to files and headings that are there.
    fn check_links(&self) {
        let mut count = 0;
        for page in self.pages {
            for target in page.text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                if target.contains("://") {
                    continue;
                }
                count += 1;
                let (file, heading) = target.split_once('#').unwrap_or((target, ""));
                let folder = page.name.rsplit_once('/').map_or("", |(folder, _)| folder);
                let path =
                    if file.is_empty() { page.name.clone() } else { format!("{folder}/{file}") };
                let path = joined("", &path);
                let text = self.tree.file(&path).map_or("", |source| &source.text);
                let is_heading = |line: &str| {
                    line.starts_with('#') && anchor(line.trim_start_matches('#').trim()) == heading
                };
                if !self.tree.has(&path) {
                    self.fault(page, target, &format!("{target}: no such file"));
                } else if !heading.is_empty() && !text.lines().any(is_heading) {
                    self.fault(page, target, &format!("{target}: no such heading"));
                }
            }
        }
        self.faults.expect(count > 50, || format!("{count} links on pages: expected more"));
    }

    /// Modules and short names of metrics exist in the tables of a page that leaves folders and
    /// prefixes out, to keep its tables readable.
    fn check_tables(&self) {
        const PAGE: &str = "docs/LIFE_OF_AN_ALLOCATION.md";
        const PREFIXES: &[&str] =
            &["lowtide_heap", "lowtide_device_", "lowtide_pressure_", "lowtide_admission_"];
        let library = self.tree.library();
        let Some(page) = self.pages.iter().find(|page| page.name == PAGE) else { return };
        let mut count = 0;
        let rows = page.text.lines().filter(|line| line.starts_with("| ") && line.contains('`'));
        for row in rows {
            let cells: Vec<_> = row.trim_matches('|').split('|').collect();
            let quoted = |cell: usize| cells.get(cell).copied().unwrap_or_default().split('`');
            for module in quoted(1).skip(1).step_by(2) {
                count += 1;
                // A part's package may stand before its module: `heap/purge`.
                let path = module.trim_end_matches('/');
                let paths = [
                    Some(format!("/{path}")),
                    path.split_once('/')
                        .map(|(package, rest)| format!("crates/{package}/src/{rest}")),
                ];
                let exists = library.iter().any(|source| {
                    let name = format!("/{}", source.name);
                    paths.iter().flatten().any(|path| {
                        let is_file = name.ends_with(&format!("{path}.rs"));
                        is_file || name.contains(&format!("{path}/"))
                    })
                });
                if !exists {
                    self.fault(page, row, &format!("{module}: no such part"));
                }
            }
            for name in quoted(3).skip(1).step_by(2).filter(|name| !name.contains(':')) {
                count += 1;
                let is_known = |prefix: &&str| {
                    let long = format!("{prefix}{name}");
                    TABLE.iter().any(|one| one.name == name || one.name == long)
                };
                if !PREFIXES.iter().any(is_known) && !name.starts_with("lowtide_process") {
                    self.fault(page, row, &format!("{name}: no such metric"));
                }
            }
        }
        self.faults.expect(count > 40, || format!("{PAGE}: {count} names: expected more"));
    }

    /// Routes that pages name are answered.
    fn check_routes(&self, code: &Code<'_>) {
        let paths = code.constant("Endpoints::ADMIN_PATHS");
        let verbs: Vec<_> = paths.list().iter().map(Found::text).collect();
        for page in self.pages {
            let is_part = |c: char| c.is_ascii_alphabetic() || c == '/';
            for word in page.text.split(|c: char| !is_part(c)) {
                let is_verb = word.strip_prefix("/memory/").is_some_and(|verb| !verb.is_empty());
                if is_verb && !verbs.iter().any(|verb| verb == word) {
                    self.fault(page, word, &format!("{word}: no such verb"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree;

    /// The faults of a page with this text, in the repository as it is.
    fn faults_of(text: &str) -> Vec<String> {
        let (tree, faults) = (Tree::read(&tree::root()).expect("a repository"), Faults::default());
        let page = Source { name: "docs/NEW.md".to_owned(), text: text.to_owned() };
        let (pages, code) = ([&page], Code::new(&tree, &faults));
        let blocks = Blocks { tree: &tree, pages: &pages, faults: &faults };
        blocks.check_fences();
        blocks.check_commands();
        blocks.check_files();
        blocks.check_names(&code);
        blocks.check_links();
        blocks.check_routes(&code);
        let is_count = |fault: &String| fault.ends_with("expected more");
        faults.sorted().into_iter().filter(|fault| !is_count(fault)).collect()
    }

    #[test]
    fn each_name_of_something_that_is_not_there_is_a_fault_with_its_line() {
        for (text, expected) in [
            ("```rust\n1\n```", "docs/NEW.md has Rust: true"),
            ("```ruby\n1\n```", "a fence of \"ruby\""),
            ("```sh\n1", "a fence is not closed"),
            ("\ncargo bench --bench gone", "docs/NEW.md:2: --bench gone: no such file in benches"),
            ("cargo test --test gone", "--test gone: no such file"),
            ("cargo test --features service,gone", "--features gone: no such feature"),
            ("see `src/gone.rs`", "src/gone.rs: no such file"),
            ("LOWTIDE_GONE", "LOWTIDE_GONE: no such variable"),
            ("PROXY_GONE", "PROXY_GONE: no such variable of the proxy"),
            ("lowtide_gone_bytes", "lowtide_gone_bytes: no such metric"),
            ("[a](GONE.md)", "GONE.md: no such file"),
            ("[a](STYLE.md#gone)", "STYLE.md#gone: no such heading"),
            ("/memory/gone", "/memory/gone: no such verb"),
        ] {
            let faults = faults_of(text);
            assert!(faults.len() == 1 && faults[0].contains(expected), "{text:?}: {faults:?}");
        }
        let clean = "`src/lib.rs` LOWTIDE_PROFILE lowtide_heap_live_bytes lowtide_alloc \
                     [a](STYLE.md#tests) /memory/purge cargo test --features service";
        assert_eq!(faults_of(clean), [""; 0]);
    }
}

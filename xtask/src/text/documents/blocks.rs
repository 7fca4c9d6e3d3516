//! What the pages show: fences, commands, files, variables, metrics, links.
//!
//! Rust is compiled by `cargo test --doc`, for the pages that `src/lib.rs` includes; here it is
//! seen that those are all. Of the rest, what names something of this repository has to name what
//! is there. What a shell would do with a command is not tried.
//!
//! Invariant: fences of Rust = fences that are compiled.

use std::collections::BTreeSet;

use lowtide::config::env::VARIABLES;
use lowtide::metrics::names::TABLE;

use crate::{none, pages, root, text};

/// The languages of fences. None of them leaves Rust uncompiled.
const LANGUAGES: &[&str] = &["rust", "rust,no_run", "sh", "toml", "text"];

/// What Kubernetes sets for a service called `lowtide`; the page says that they are left alone.
const OF_KUBERNETES: &[&str] = &["LOWTIDE_SERVICE_HOST", "LOWTIDE_PORT", "LOWTIDE_PORT_8080_TCP"];

/// A fenced block: its language and its lines.
fn fences(page: &str) -> Vec<(String, String)> {
    let (mut found, mut open): (Vec<(String, String)>, bool) = (Vec::new(), false);
    for line in text(page).lines() {
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
    assert!(!open, "{page}: a fence is not closed");
    found
}

#[test]
fn every_fence_of_rust_is_compiled_with_the_documentation() {
    let library = text("src/lib.rs");
    let mut faults = Vec::new();
    for page in pages() {
        let fences = fences(&page);
        for (language, _) in &fences {
            if !LANGUAGES.contains(&language.as_str()) {
                faults.push(format!("{page}: a fence of {language:?}: expected {LANGUAGES:?}"));
            }
        }
        let is_compiled = library.contains(&format!("include_str!(\"../{page}\")"));
        let has_rust = fences.iter().any(|(language, _)| language.starts_with("rust"));
        if has_rust != is_compiled {
            faults.push(format!("{page} has Rust: {has_rust}; src/lib.rs includes: {is_compiled}"));
        }
    }
    none(&faults);
}

/// The value of `key` on a line of TOML, and the words of its list of features.
fn dependency(line: &str) -> Option<(String, String, Vec<String>)> {
    let (name, rest) = line.split_once(" = ")?;
    let version = rest.split_once("version = ").map_or(rest, |(_, version)| version);
    let version = version.split('"').nth(1)?.to_owned();
    let features = line.split_once("features = [").map_or("", |(_, list)| list);
    let features = features.split(']').next()?.split('"').skip(1).step_by(2);
    Some((name.to_owned(), version, features.map(str::to_owned).collect()))
}

#[test]
fn the_dependencies_that_the_readme_shows_are_those_it_is_compiled_with() {
    let manifest = text("Cargo.toml");
    let ours: Vec<_> = manifest.lines().filter_map(dependency).collect();
    let fence = fences("README.md").into_iter().find(|(language, _)| language == "toml");
    let shown: Vec<_> = fence.expect("a manifest").1.lines().filter_map(dependency).collect();
    assert!(shown.iter().any(|(name, ..)| name == "tokio"), "{shown:?}");
    for (name, version, features) in shown {
        if name == "lowtide" {
            assert!(env!("CARGO_PKG_VERSION").starts_with(&version), "{version}");
            for feature in features {
                assert!(features_of(&manifest).contains(&feature), "lowtide has no {feature}");
            }
            continue;
        }
        let same = |other: &&(String, String, Vec<String>)| {
            other.0 == name && (other.1 == version || other.1.starts_with(&format!("{version}.")))
        };
        let ours: Vec<_> = ours.iter().filter(same).collect();
        assert!(!ours.is_empty(), "{name} {version} is not what the sample is compiled with");
        for feature in features {
            let has = ours.iter().any(|(_, _, known)| known.contains(&feature));
            assert!(has, "{name} has {feature} in the README alone");
        }
    }
}

/// The names under `[features]`, without `default`.
fn features_of(manifest: &str) -> Vec<String> {
    let section = manifest.split("[features]").nth(1).expect("features");
    let section = section.split("\n[").next().unwrap_or_default();
    let lines = section.lines().filter(|line| !line.starts_with('#'));
    let names = lines.filter_map(|line| Some(line.split_once(" = ")?.0.to_owned()));
    names.filter(|name| name != "default").collect()
}

#[test]
fn the_table_of_features_is_the_manifests() {
    let manifest = text("Cargo.toml");
    // What `memory` needs is there by default as well.
    let by_default = |name: &str| {
        let list = |of: &str| {
            let line = manifest.lines().find(|line| line.starts_with(&format!("{of} = [")));
            line.unwrap_or_default().to_owned()
        };
        [list("default"), list("memory")].iter().any(|list| list.contains(&format!("\"{name}\"")))
    };
    let library = text("src/lib.rs");
    let rows: Vec<_> = library
        .lines()
        .filter_map(|line| line.strip_prefix("//! | `")?.split_once("` | "))
        .filter_map(|(name, rest)| Some((name, rest.split_once(" | ")?.0)))
        .filter(|(_, default)| ["yes", "no"].contains(default))
        .collect();
    let known = features_of(&manifest);
    let shown: BTreeSet<_> = rows.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(shown, known.into_iter().collect());
    for (name, default) in rows {
        assert_eq!(default == "yes", by_default(name), "{name}");
    }
}

/// The words after a flag, wherever it stands.
fn after<'a>(page: &'a str, flag: &'a str) -> impl Iterator<Item = &'a str> {
    let name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | ',');
    page.split(flag).skip(1).map(move |rest| {
        rest.split(|c: char| !name(c)).next().unwrap_or_default().trim_end_matches(',')
    })
}

#[test]
fn commands_name_targets_and_features_that_exist() {
    let manifest = text("Cargo.toml");
    let features = features_of(&manifest);
    let is_there = |path: String| root().join(path).exists();
    let (mut faults, mut count) = (Vec::new(), 0);
    for page in pages() {
        let text = text(&page);
        for (flag, folder) in [("--bench ", "benches"), ("--example ", "examples")] {
            for name in after(&text, flag) {
                count += 1;
                if !["rs", "/main.rs"].iter().any(|end| {
                    let dot = if *end == "rs" { "." } else { "" };
                    is_there(format!("{folder}/{name}{dot}{end}"))
                }) {
                    faults.push(format!("{page}: {flag}{name}: no such file in {folder}"));
                }
            }
        }
        for name in after(&text, "--test ") {
            if !is_there(format!("tests/{name}.rs")) && !is_there(format!("tests/{name}/main.rs")) {
                faults.push(format!("{page}: --test {name}: no such file in tests"));
            }
        }
        for list in after(&text, "--features ") {
            for feature in list.split(',').filter(|name| !features.iter().any(|f| f == name)) {
                faults.push(format!("{page}: --features {feature}: no such feature"));
            }
        }
    }
    assert!(count > 10, "the commands are not found any more: {count}");
    none(&faults);
}

#[test]
fn files_that_pages_name_are_there() {
    const FOLDERS: &[&str] =
        &["src/", "tests/", "examples/", "benches/", "dashboards/", "deploy/", "docs/", ".ci/"];
    let mut faults = Vec::new();
    for page in pages() {
        let text = text(&page);
        let is_part = |c: char| c.is_ascii_alphanumeric() || "_-./*<>{}".contains(c);
        for word in text.split(|c: char| !is_part(c)) {
            let word = word.trim_end_matches(['.', '/']);
            let is_ours = FOLDERS.iter().any(|folder| word.starts_with(folder));
            // A package has no scripts; patterns are nobody's name.
            let left_out = word.starts_with(".ci/") && !root().join(".ci/run").exists();
            if !is_ours || left_out || word.contains(['*', '<', '{']) {
                continue;
            }
            if !root().join(word).exists() && !root().join(format!("{word}.rs")).exists() {
                faults.push(format!("{page}: {word}: no such file"));
            }
        }
    }
    none(&faults);
}

/// Words of these letters that begin so.
fn words<'a>(text: &'a str, start: &'a str, letters: fn(&char) -> bool) -> Vec<&'a str> {
    let all = text.split(move |c: char| !letters(&c));
    all.filter(|word| word.starts_with(start) && word.len() > start.len()).collect()
}

#[test]
fn variables_and_metrics_that_pages_name_exist() {
    let capital = |c: &char| c.is_ascii_uppercase() || c.is_ascii_digit() || *c == '_';
    let small = |c: &char| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == '_';
    let proxy = text("examples/proxy/cli.rs");
    let rules = text("dashboards/lowtide.rules.yml");
    let manifest = text("Cargo.toml").replace('-', "_");
    let mut faults = Vec::new();
    for page in pages() {
        let text = text(&page);
        for name in words(&text, "LOWTIDE_", capital) {
            let known = VARIABLES.iter().any(|variable| variable.name == name)
                || (page == "docs/DEPLOYING.md" && OF_KUBERNETES.contains(&name));
            if !known && !name.ends_with('_') {
                faults.push(format!("{page}: {name}: no such variable"));
            }
        }
        for name in words(&text, "PROXY_", capital) {
            if !name.ends_with('_') && !proxy.contains(&format!("\"{name}\"")) {
                faults.push(format!("{page}: {name}: no such variable of the proxy"));
            }
        }
        for name in words(&text, "lowtide_", small) {
            let series = ["_bucket", "_sum", "_count"];
            let metric = series.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            let known = TABLE.iter().any(|one| one.name == name || one.name == metric)
                || rules.contains(&format!(":{name}:"))
                || manifest.contains(name);
            if !known && !name.ends_with('_') {
                faults.push(format!("{page}: {name}: no such metric"));
            }
        }
    }
    none(&faults);
}

/// What a heading is called in a link: small letters, hyphens for spaces, no other marks.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|&c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

#[test]
fn links_lead_to_files_and_headings_that_are_there() {
    let mut faults = Vec::new();
    let mut count = 0;
    for page in pages() {
        let text = text(&page);
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.contains("://") {
                continue;
            }
            count += 1;
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
            let path = if file.is_empty() { page.clone() } else { format!("{folder}/{file}") };
            let path = path.trim_start_matches('/');
            if !root().join(path).exists() {
                faults.push(format!("{page}: {target}: no such file"));
            } else if !heading.is_empty()
                && !crate::text(path).lines().any(|line| {
                    line.starts_with('#') && anchor(line.trim_start_matches('#').trim()) == heading
                })
            {
                faults.push(format!("{page}: {target}: no such heading"));
            }
        }
    }
    assert!(count > 50, "links are not found any more: {count}");
    none(&faults);
}

/// The page that follows an allocation leaves prefixes and folders out, for its tables to be read.
#[test]
fn modules_and_short_names_of_metrics_in_tables_exist() {
    const PAGE: &str = "docs/LIFE_OF_AN_ALLOCATION.md";
    const FOLDERS: &[&str] = &["", "device/", "control/", "service/", "host/", "memory/"];
    const PREFIXES: &[&str] =
        &["lowtide_heap", "lowtide_device_", "lowtide_pressure_", "lowtide_admission_"];
    let (mut faults, mut count) = (Vec::new(), 0);
    let text = text(PAGE);
    for row in text.lines().filter(|line| line.starts_with("| ") && line.contains('`')) {
        let cells: Vec<_> = row.trim_matches('|').split('|').collect();
        let quoted = |cell: usize| cells.get(cell).copied().unwrap_or_default().split('`').skip(1);
        for module in quoted(1).step_by(2) {
            count += 1;
            let is_there = |folder: &&str| {
                let path = root().join(format!("src/{folder}{module}"));
                path.exists() || path.with_extension("rs").exists()
            };
            if !FOLDERS.iter().any(is_there) {
                faults.push(format!("{PAGE}: {module}: no such part"));
            }
        }
        for name in quoted(3).step_by(2).filter(|name| !name.contains(':')) {
            count += 1;
            let known = |prefix: &&str| {
                TABLE.iter().any(|one| one.name == name || one.name == format!("{prefix}{name}"))
            };
            let known = PREFIXES.iter().any(known);
            if !known && !name.starts_with("lowtide_process") {
                faults.push(format!("{PAGE}: {name}: no such metric"));
            }
        }
    }
    assert!(count > 40, "the tables are not found any more: {count}");
    none(&faults);
}

#[cfg(feature = "service")]
#[test]
fn routes_that_pages_name_are_answered() {
    use lowtide::service::Endpoints;
    let mut faults = Vec::new();
    for page in pages() {
        let text = text(&page);
        let is_part = |c: char| c.is_ascii_alphabetic() || c == '/';
        for word in text.split(|c: char| !is_part(c)) {
            let verb = word.strip_prefix("/memory/").is_some_and(|verb| !verb.is_empty());
            if verb && !Endpoints::ADMIN_PATHS.contains(&word) {
                faults.push(format!("{page}: {word}: no such verb"));
            }
        }
    }
    none(&faults);
}

//! Imports between the files of a package: the direction between its parts, and cycles.
//!
//! A path counts for the file that defines what it names, so a re-export is followed; it makes no
//! edge of a cycle itself. Cargo keeps the direction between packages.
//!
//! Invariant: a part imports only parts that stand before it in its package's row of `LAYERS`.

use std::collections::{BTreeMap, BTreeSet};

use crate::code::{Codes, Token};
use crate::tree::{Faults, Package};

/// For folders of packages, the parts from the ground up. Those of one layer may import each other.
const LAYERS: &[(&str, &[&[&str]])] = &[
    ("", &[&["admission", "heap"], &["metrics"], &["config"], &["memory"], &["service"]]),
    ("crates/core/", &[&["bytes", "clock", "file", "fork", "sync"], &["decay", "kernel", "rate"]]),
    ("crates/admission/", &[&["pressure"], &["signal"]]),
    (
        "crates/gpu/",
        &[
            &["record", "types"],
            &["index"],
            &["state"],
            &["engine"],
            &["exec"],
            &["api", "pinned"],
            &["map"],
        ],
    ),
];

/// The maximum number of files in a cycle.
pub(crate) const CYCLE_MAX: usize = 5;

/// A path that is written in a module.
#[derive(Debug)]
struct Path {
    segments: Vec<String>,
    line: usize,
    /// The name by which a `use` makes it known.
    name: String,
    /// `true` if the `use` has a visibility of its own.
    is_export: bool,
}

/// An import of one module by another.
#[derive(Debug)]
struct Import<'a> {
    from: &'a str,
    to: &'a str,
    line: usize,
    is_export: bool,
}

/// The paths in the files of a package, by module: `a::b`, empty for the root.
#[derive(Debug, Default)]
struct Modules {
    paths: BTreeMap<String, Vec<Path>>,
    /// The modules that re-exports stand for, by their module and name.
    exports: BTreeMap<(String, String), String>,
}

/// Checks the directions and the cycles of all packages.
pub(super) fn check(packages: &[Package], codes: &Codes, faults: &Faults) {
    for package in packages {
        let modules = Modules::new(package, codes);
        let layers = LAYERS.iter().find(|(folder, _)| *folder == package.folder);
        let layers = layers.map_or(&[][..], |(_, layers)| layers);
        let layer = |module: &str| {
            let part = module.split("::").next().unwrap_or_default();
            layers.iter().position(|parts| parts.contains(&part))
        };
        for Import { from, to, line, .. } in modules.imports() {
            if layer(from) < layer(to) && layer(from).is_some() {
                let folder = &package.folder;
                faults
                    .say(format!("{folder}src: {from}, line {line}: imports {to}, which is above"));
            }
        }
    }
    for (folder, cycle) in cycles(packages, codes) {
        faults.expect(cycle.len() <= CYCLE_MAX, || {
            let (files, names) = (cycle.len(), cycle.join(" "));
            format!("{folder}src: a cycle of {files} files, expected at most {CYCLE_MAX}: {names}")
        });
    }
}

/// Returns the folder of each package whose files import each other, and its largest cycle.
pub(crate) fn cycles(packages: &[Package], codes: &Codes) -> Vec<(String, Vec<String>)> {
    let cycle = |package: &Package| {
        let modules = Modules::new(package, codes);
        let imports = modules.imports();
        let edges = imports.iter().filter(|import| !import.is_export);
        let cycle = largest_cycle(edges.map(|import| (import.from, import.to)));
        (package.folder.clone(), cycle.into_iter().map(str::to_owned).collect::<Vec<_>>())
    };
    packages.iter().map(cycle).filter(|(_, cycle)| !cycle.is_empty()).collect()
}

impl Modules {
    fn new(package: &Package, codes: &Codes) -> Self {
        let mut modules = Self::default();
        let folder = format!("{}src/", package.folder);
        for (name, code) in codes {
            let Some(inside) = name.strip_prefix(&folder) else { continue };
            let module = inside.trim_end_matches(".rs").trim_end_matches("/mod");
            let module = if module == "lib" { String::new() } else { module.replace('/', "::") };
            modules.paths.insert(module, paths(&code.tokens));
        }
        // A re-export of a re-export takes a round more.
        for _ in 0..5 {
            let mut exports = BTreeMap::new();
            for (module, path) in modules.all().filter(|(_, path)| path.is_export) {
                if let Some(to) = modules.resolve(module, path).filter(|to| *to != module) {
                    exports.insert((module.to_owned(), path.name.clone()), to.to_owned());
                }
            }
            modules.exports = exports;
        }
        modules
    }

    fn all(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.paths.iter().flat_map(|(module, paths)| paths.iter().map(move |one| (&**module, one)))
    }

    fn imports(&self) -> Vec<Import<'_>> {
        let import = |(from, path): (&'_ str, &'_ Path)| {
            let to = self.resolve(from, path).filter(|to| *to != from)?;
            let (from, _) = self.paths.get_key_value(from)?;
            Some(Import { from, to, line: path.line, is_export: path.is_export })
        };
        self.all().filter_map(import).collect()
    }

    /// Returns the module that defines what a path names; never the root.
    fn resolve(&self, module: &str, path: &Path) -> Option<&str> {
        let here = || module.split("::").filter(|part| !part.is_empty()).map(str::to_owned);
        let (first, rest) = path.segments.split_first()?;
        let mut target: Vec<String> = match first.as_str() {
            "crate" => Vec::new(),
            "self" => here().collect(),
            "super" => here().take(here().count().saturating_sub(1)).collect(),
            child => here().chain([child.to_owned()]).collect(),
        };
        if !["crate", "self", "super"].contains(&first.as_str()) {
            self.paths.get(&target.join("::"))?;
        }
        for segment in rest {
            if segment == "super" {
                target.pop();
            } else {
                target.push(segment.clone());
            }
        }
        let (length, found) = (0..=target.len()).rev().find_map(|length| {
            let known = self.paths.get_key_value(&target[..length].join("::"));
            known.map(|(known, _)| (length, known))
        })?;
        let name = target.get(length).cloned().unwrap_or_default();
        let defined = self.exports.get(&(found.clone(), name));
        defined.or(Some(found).filter(|found| !found.is_empty())).map(String::as_str)
    }
}

/// Returns what is imported by `use`, and the paths that begin with `crate` or `super`.
fn paths(tokens: &[Token]) -> Vec<Path> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let is_after = |text: &str| at > 0 && tokens[at - 1].text == text;
        let begin = found.len();
        at = match tokens[at].text.as_str() {
            // `use<'a>` names lifetimes.
            "use" if tokens.get(at + 1).is_some_and(|next| next.text != "<") => {
                let is_export = is_after("pub") || is_after(")");
                let end = branch(tokens, at + 1, &[], &mut found);
                found[begin..].iter_mut().for_each(|path| path.is_export = is_export);
                end
            }
            // A visibility names a module alone: `pub(in crate::a)`.
            "crate" | "super"
                if is_path(tokens, at) && !(is_after("in") && tokens[at - 2].text == "(") =>
            {
                plain(tokens, at, &mut found)
            }
            _ => at + 1,
        };
    }
    found
}

fn is_path(tokens: &[Token], at: usize) -> bool {
    tokens.get(at + 1).is_some_and(|next| next.text == "::")
}

fn plain(tokens: &[Token], at: usize, found: &mut Vec<Path>) -> usize {
    let (mut segments, line, mut at) = (vec![tokens[at].text.clone()], tokens[at].line, at + 1);
    while is_path(tokens, at - 1) && is_name(&tokens[at + 1].text) {
        segments.push(tokens[at + 1].text.clone());
        at += 2;
    }
    found.push(Path { segments, line, name: String::new(), is_export: false });
    at
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Reads one branch of a `use`, and returns the place after it.
fn branch(tokens: &[Token], at: usize, before: &[String], found: &mut Vec<Path>) -> usize {
    let (mut at, mut segments) = (at, before.to_vec());
    while let Some(Token { text, line }) = tokens.get(at) {
        match text.as_str() {
            "::" => {}
            "{" => {
                at += 1;
                while tokens.get(at).is_some_and(|token| token.text != "}") {
                    at = branch(tokens, at, &segments, found);
                    at += usize::from(tokens.get(at).is_some_and(|token| token.text == ","));
                }
                return at + 1;
            }
            "as" => {
                if let Some(path) = found.last_mut() {
                    path.name.clone_from(&tokens[at + 1].text);
                }
                return at + 2;
            }
            "," | "}" | ";" => return at,
            text => {
                if text != "self" || segments.is_empty() {
                    segments.push(text.to_owned());
                }
                if !is_path(tokens, at) {
                    let (name, line) = (segments.last().cloned().unwrap_or_default(), *line);
                    found.push(Path { segments: segments.clone(), line, name, is_export: false });
                }
            }
        }
        at += 1;
    }
    at
}

/// Returns the most nodes that all lead to each other, in order; none if no two do.
fn largest_cycle<N: Ord + Copy>(edges: impl Iterator<Item = (N, N)>) -> Vec<N> {
    let (mut after, mut before) = (BTreeMap::new(), BTreeMap::new());
    for (from, to) in edges {
        after.entry(from).or_insert_with(BTreeSet::new).insert(to);
        before.entry(to).or_insert_with(BTreeSet::new).insert(from);
    }
    let mut open: BTreeSet<_> = after.keys().copied().collect();
    let mut largest = Vec::new();
    while let Some(&start) = open.first() {
        let from = reached(&after, start);
        let cycle: Vec<_> = reached(&before, start).intersection(&from).copied().collect();
        cycle.iter().chain([&start]).for_each(|node| {
            open.remove(node);
        });
        if cycle.len() > largest.len().max(1) {
            largest = cycle;
        }
    }
    largest
}

/// Returns the nodes to which edges lead from one.
fn reached<N: Ord + Copy>(edges: &BTreeMap<N, BTreeSet<N>>, start: N) -> BTreeSet<N> {
    let (mut found, mut open) = (BTreeSet::new(), vec![start]);
    while let Some(node) = open.pop() {
        let next = edges.get(&node).into_iter().flatten().copied();
        open.extend(next.filter(|next| found.insert(*next)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code;
    use crate::tree::{Source, Tree};

    /// The packages and the code of these files of the arena's package.
    fn read(files: &[(&str, &str)]) -> (Vec<Package>, Codes) {
        let file = |(name, text): &(&str, &str)| Source {
            name: format!("crates/gpu/{name}"),
            text: (*text).to_owned(),
        };
        let manifest = ("Cargo.toml", "[package]\nname = \"one\"\n");
        let files = files.iter().chain([&manifest]).map(file).collect();
        let tree = Tree { files, binaries: Vec::new() };
        (tree.packages(), code::read(&tree).expect("Rust"))
    }

    fn cycle_of(files: &[(&str, &str)]) -> String {
        let (packages, codes) = read(files);
        cycles(&packages, &codes).first().map_or_else(String::new, |(_, cycle)| cycle.join(" "))
    }

    const ROOT: (&str, &str) = ("src/lib.rs", "mod a; mod b; mod c; mod d; pub use b::B;");

    #[test]
    fn a_cycle_is_found_through_uses_paths_and_re_exports() {
        let files = [
            ROOT,
            ("src/a.rs", "use super::{d, e::{f, B as C}};"), // B is of b
            ("src/e.rs", "pub use crate::b::B;"),
            ("src/b.rs", "fn f() { m!(crate::c::g()); }"),
            ("src/c.rs", "use crate::a::inner::X;"),
            ("src/a/inner.rs", "pub use crate::a::Y as X;"),
            ("src/d.rs", "use std::fmt; // not crate::a\npub(in crate::a) fn f() {}"),
        ];
        assert_eq!(cycle_of(&files), "a b c");
    }

    #[test]
    fn tests_make_no_cycle() {
        let files = [
            ROOT,
            ("src/a.rs", "use crate::b::B;"),
            ("src/b.rs", "pub struct B; #[cfg(test)]\nmod tests { use crate::a::A; }"),
        ];
        assert_eq!(cycle_of(&files), "");
    }

    #[test]
    fn the_largest_of_several_cycles_is_found() {
        let edges = [(1, 2), (2, 1), (2, 3), (3, 4), (4, 5), (5, 3), (5, 6), (6, 6)];
        assert_eq!(largest_cycle(edges.into_iter()), [3, 4, 5]);
        assert_eq!(largest_cycle([(1, 2), (2, 3)].into_iter()), [0; 0]);
    }

    #[test]
    fn an_import_of_a_part_above_is_found_however_it_is_written() {
        for (text, expected) in [
            ("use crate::engine::Alloc;", true),
            ("use crate::engine as other;", true),
            ("use {crate::engine::Alloc, std::fmt};", true),
            ("pub(crate) use super::super::engine::{self, Alloc};", true),
            ("fn f(_: crate::engine::Alloc) { g::<crate::engine::Drop>() }", true),
            ("macro_rules! m { () => { $crate::engine::f() } }", true),
            ("use crate::index::Span; use crate::types::Size;", false),
            ("//! [`crate::engine`]\nconst S: &str = \"crate::engine::f\";", false),
            ("#[cfg(test)]\nmod tests { use crate::engine::Alloc; }", false),
            ("use crate::Alloc;", true), // by the root's re-export
        ] {
            let files = [
                ("src/lib.rs", "mod engine; mod state; pub use engine::Alloc;"),
                ("src/engine/mod.rs", ""),
                ("src/state/mod.rs", ""),
                ("src/state/arena.rs", text),
            ];
            let ((packages, codes), faults) = (read(&files), Faults::default());
            check(&packages, &codes, &faults);
            let faults = faults.sorted();
            let are_right = faults.iter().all(|fault| fault.contains("imports engine, which is"));
            assert!(are_right && faults.len() == usize::from(expected), "{text}: {faults:?}");
        }
    }
}

//! Imports between the modules of a package: cycles, and imports of a higher layer.
//!
//! A module is a file. A path counts for the module that defines what it names, so a re-export is
//! followed. Paths are read by the check of imports of `cargo xtask text`.

use std::collections::{BTreeMap, BTreeSet};

use super::super::product::product;
use super::super::{Figure, count, figure};
use super::FOLDER;
use crate::text::tidy::imports::{Map, Path, paths};
use crate::tree::{self, Faults, Package, Source, Tree};

/// The layers of the arena's package from the bottom up, and their modules. A module is in the
/// layer of the longest prefix of its path that is listed. The crate root is above all of them.
const LAYERS: &[(&str, &[&str])] = &[
    ("types", &["types"]),
    ("record", &["record"]),
    ("index", &["index"]),
    ("state", &["state"]),
    ("engine", &["engine"]),
    ("exec", &["exec"]),
    ("observe", &["observe"]),
    ("api", &["api", "pinned"]),
];

type Module = Vec<String>;

/// A `use` in one module of something in another, or a path from `crate` or `super` to it.
#[derive(Debug)]
struct Import {
    from: Module,
    to: Module,
    /// `true` if a `use` offers what a module below defines.
    is_export: bool,
}

/// The modules of a package and the imports between them.
struct Imports {
    modules: BTreeSet<Module>,
    all: Vec<Import>,
}

impl Imports {
    /// Returns the modules of the largest cycle. Exports are followed, and make none.
    fn largest_cycle(&self) -> Vec<Module> {
        let edges = self.all.iter().filter(|import| !import.is_export);
        largest_cycle(edges.map(|import| (&import.from, &import.to)))
    }
}

/// Reads the imports between the modules of a package, tests left out.
fn imports(tree: &Tree, package: &Package) -> Result<Imports, String> {
    let (packages, sources) = (tree.packages(), product(tree, &package.folder)?);
    let sources: Vec<&Source> = sources.iter().collect();
    let map = Map::new(package, &packages, &sources);
    let modules: BTreeSet<Module> = sources.iter().map(|source| map.module_of(source)).collect();
    let mut all = Vec::new();
    for source in &sources {
        let from = map.module_of(source);
        let code = source.code();
        let is_outer = |segment: Option<&&str>| matches!(segment, Some(&("crate" | "super")));
        let is_import = |path: &Path<'_>| {
            let segments = &path.segments;
            // A visibility names a module alone: `pub(in super::super)`.
            path.name.is_some() || is_outer(segments.first()) && !is_outer(segments.last())
        };
        for path in paths(&code).into_iter().filter(is_import) {
            let chain = map.chain(&from, &path);
            let Some(target) = chain.last().filter(|target| !map.is_outside(target)) else {
                continue;
            };
            let lengths = (0..=target.len()).rev();
            let to = lengths.map(|length| &target[..length]).find(|to| modules.contains(*to));
            if let Some(to) = to.filter(|to| *to != from) {
                let (from, to) = (from.clone(), to.to_vec());
                all.push(Import {
                    from,
                    to,
                    is_export: path.public && !is_outer(path.segments.first()),
                });
            }
        }
    }
    Ok(Imports { modules, all })
}

/// The maximum number of files in an import cycle.
const CYCLE_MAX: usize = 8;

/// Finds the largest import cycle between the modules of one package.
pub(super) fn measure_cycles() -> Result<Vec<Figure>, String> {
    let cycles = cycles(&Tree::read(&tree::root())?)?;
    for (folder, cycle) in &cycles {
        println!("  {folder}src: {} files: {}", cycle.len(), names(cycle));
    }
    let largest = cycles.iter().map(|(_, cycle)| cycle.len()).max().unwrap_or(0);
    Ok(vec![figure("cycle_files", count(largest), "files", Some(count(CYCLE_MAX)))])
}

/// Checks that no import cycle has too many files.
pub(crate) fn check_cycles(tree: &Tree, faults: &Faults) {
    match cycles(tree) {
        Ok(all) => all.iter().filter(|(_, cycle)| cycle.len() > CYCLE_MAX).for_each(|found| {
            let (folder, cycle) = found;
            let (files, names) = (cycle.len(), names(cycle));
            faults.say(format!(
                "{folder}src: {files} files import each other in a cycle, expected at most \
                 {CYCLE_MAX}: {names}"
            ));
        }),
        Err(error) => faults.say(error),
    }
}

/// Returns the folder of each package whose modules import each other, and its largest cycle.
fn cycles(tree: &Tree) -> Result<Vec<(String, Vec<Module>)>, String> {
    let is_ours = |folder: &str| folder.is_empty() || folder.starts_with("crates/");
    let packages = tree.packages();
    let packages = packages.iter().filter(|package| is_ours(&package.folder));
    let cycle =
        |package: &Package| Ok((package.folder.clone(), imports(tree, package)?.largest_cycle()));
    let mut all: Vec<_> = packages.map(cycle).collect::<Result<_, String>>()?;
    all.retain(|(_, cycle)| !cycle.is_empty());
    Ok(all)
}

fn names(modules: &[Module]) -> String {
    let names: Vec<_> = modules.iter().map(name).collect();
    names.join(" ")
}

fn name(module: &Module) -> String {
    if module.is_empty() { "(root)".to_owned() } else { module.join("::") }
}

/// Returns the most nodes that all lead to each other, in order; none if no two do.
fn largest_cycle<'a, N: Ord + Clone + 'a>(edges: impl Iterator<Item = (&'a N, &'a N)>) -> Vec<N> {
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
            largest = cycle.into_iter().cloned().collect();
        }
    }
    largest
}

/// Returns the nodes to which edges lead from one.
fn reached<'a, N: Ord>(edges: &BTreeMap<&'a N, BTreeSet<&'a N>>, start: &'a N) -> BTreeSet<&'a N> {
    let (mut found, mut open) = (BTreeSet::new(), vec![start]);
    while let Some(node) = open.pop() {
        let next = edges.get(node).into_iter().flatten().copied();
        open.extend(next.filter(|next| found.insert(*next)));
    }
    found
}

/// Counts the pairs of modules of which the lower one imports the higher one.
pub(super) fn measure_imports_up() -> Result<Vec<Figure>, String> {
    let up = all_imports_up(&Tree::read(&tree::root())?)?;
    for text in &up {
        println!("  {text}");
    }
    Ok(vec![figure("imports_up", count(up.len()), "imports", Some(0.0))])
}

/// Checks that no module of the arena imports one of a higher layer.
pub(crate) fn check_layers(tree: &Tree, faults: &Faults) {
    match all_imports_up(tree) {
        Ok(up) => up.into_iter().for_each(|text| faults.say(format!("{FOLDER}: {text}"))),
        Err(error) => faults.say(error),
    }
}

/// Describes each import of a higher layer.
fn all_imports_up(tree: &Tree) -> Result<Vec<String>, String> {
    let packages = tree.packages();
    let package = packages.iter().find(|package| package.folder == FOLDER);
    let imports = imports(tree, package.ok_or("no package of arenas")?)?;
    let up = imports_up(&imports, LAYERS)?.into_iter();
    let pairs = up.flat_map(|(from, to)| to.into_iter().map(move |to| (from.clone(), to)));
    let text = |((here, from), (there, to)): (Placed, Placed)| {
        format!("{from} ({here}) imports {to} ({there})")
    };
    Ok(pairs.map(text).collect())
}

/// A layer and a module in it.
type Placed = (&'static str, String);

/// Returns the modules that import one of a higher layer, each with those that it imports.
fn imports_up(
    imports: &Imports,
    layers: &[(&'static str, &[&str])],
) -> Result<BTreeMap<Placed, BTreeSet<Placed>>, String> {
    imports.modules.iter().try_for_each(|module| layer(module, layers).map(drop))?;
    let mut found = BTreeMap::new();
    for Import { from, to, .. } in &imports.all {
        let (here, there) = (layer(from, layers)?, layer(to, layers)?);
        if there > here {
            let placed = |layer: usize, module| {
                let layer = layers.get(layer).map_or("above all", |(name, _)| *name);
                (layer, name(module))
            };
            let targets: &mut BTreeSet<_> = found.entry(placed(here, from)).or_default();
            targets.insert(placed(there, to));
        }
    }
    Ok(found)
}

/// Returns the number of a module's layer from the bottom.
fn layer(module: &Module, layers: &[(&str, &[&str])]) -> Result<usize, String> {
    if module.is_empty() {
        return Ok(layers.len());
    }
    let prefixes = (1..=module.len()).rev().map(|length| module[..length].join("::"));
    let of =
        |prefix: String| layers.iter().position(|(_, modules)| modules.contains(&prefix.as_str()));
    let unlisted = || format!("module {} has no layer: add it to LAYERS", name(module));
    prefixes.filter_map(of).next().ok_or_else(unlisted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imports_of(files: &[(&str, &str)]) -> Imports {
        let manifest = ("Cargo.toml", "[package]\nname = \"one\"\n");
        let file = |(name, text): &(&str, &str)| Source {
            name: (*name).to_owned(),
            text: (*text).to_owned(),
        };
        let files = files.iter().chain([&manifest]).map(file).collect();
        let tree = Tree { files, binaries: Vec::new() };
        imports(&tree, &tree.packages()[0]).expect("Rust")
    }

    fn cycle_of(files: &[(&str, &str)]) -> String {
        names(&imports_of(files).largest_cycle())
    }

    const ROOT: (&str, &str) = ("src/lib.rs", "mod a; mod b; mod c; mod d; pub use b::B;");

    #[test]
    fn a_cycle_is_found_through_uses_paths_and_re_exports() {
        let files = [
            ROOT,
            ("src/a.rs", "use super::{B, d};"), // B is of b
            ("src/b.rs", "fn f() { crate::c::g(); }"),
            ("src/c.rs", "use crate::a::inner::X;"),
            ("src/a/inner.rs", "pub use crate::a::Y as X;"),
            ("src/d.rs", "use std::fmt; // not crate::a"),
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
        assert_eq!(largest_cycle(edges.iter().map(|(from, to)| (from, to))), [3, 4, 5]);
        assert_eq!(largest_cycle([(1, 2), (2, 3)].iter().map(|(a, b)| (a, b))), [0; 0]);
    }

    #[test]
    fn an_import_of_a_higher_layer_is_found_once() {
        let layers: &[(_, &[&str])] = &[("low", &["a", "c::deep"]), ("high", &["b", "c"])];
        let files = [
            ROOT,
            ("src/a.rs", "use crate::b::{B, C}; use crate::c::deep::D; use crate::c;"),
            ("src/b.rs", "use crate::a::A; fn f() { super::g(); } pub(in super::super) fn g() {}"),
            ("src/c/mod.rs", "use crate::b::B;"),
            ("src/c/deep.rs", "use super::X;"),
        ];
        let found = imports_up(&imports_of(&files), layers).expect("all have layers");
        let placed = |layer, module: &str| (layer, module.to_owned());
        let (b, c, root) =
            (placed("high", "b"), placed("high", "c"), ("above all", "(root)".into()));
        let expected = [
            (placed("high", "b"), BTreeSet::from([root])),
            (placed("low", "a"), BTreeSet::from([b, c.clone()])),
            (placed("low", "c::deep"), BTreeSet::from([c])),
        ];
        assert_eq!(found, BTreeMap::from(expected));
    }

    #[test]
    fn a_module_without_a_layer_is_an_error() {
        let imports = imports_of(&[ROOT, ("src/a.rs", ""), ("src/d.rs", "")]);
        let error = imports_up(&imports, &[("low", &["a"])]).expect_err("d has none");
        assert!(error.contains("module d has no layer"), "{error}");
    }
}

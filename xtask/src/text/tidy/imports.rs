//! Which paths a source names, and whether it may: floors and walls.
//!
//! A path is found in every spelling (`crate::`, `super::super::`, `$crate::`, the crate's own
//! name, braces within braces), and followed through re-exports, so that a part is not reached by
//! another name. Each package is looked at by itself: Cargo keeps the direction between packages.
//! It does not see names that a foreign macro makes up.
//!
//! Invariant: for each path from a part to a part, `floor(named) < floor(naming)` or both are one.

use std::collections::{BTreeMap, BTreeSet};

use super::tokens::{Token, reads};
use crate::tree::{Faults, Package, Source};

/// The rules within one package.
pub(super) struct Layers {
    /// The package's folder, as in [`Package::folder`].
    pub(super) folder: &'static str,
    /// The parts from the ground up. A part may import itself and what stands on floors before its
    /// own. Parts on one floor do not know each other. Empty if no order is stated.
    pub(super) floors: &'static [&'static [&'static str]],
    /// Modules within a part, and what they must not name: a module, or another package.
    pub(super) walls: &'static [(&'static str, &'static str)],
}

/// Packages that are not listed have neither. In the root, parts that have become packages keep
/// their floor, for re-exports under their names.
pub(super) const LAYERS: &[Layers] = &[
    Layers {
        folder: "",
        floors: &[
            &["admission", "heap"], // what the packages below offer to users
            &["metrics"],
            &["config"],
            &["memory"],
            &["service"],
        ],
        walls: &[],
    },
    Layers {
        folder: "crates/core/",
        floors: &[
            &["buckets", "bytes", "clock", "file", "fork", "sync"],
            &["decay", "kernel", "log", "named", "rate"],
        ],
        walls: &[],
    },
    Layers {
        folder: "crates/gpu/",
        floors: &[],
        walls: &[("index", "lowtide_gpu_driver"), ("index", "arena")],
    },
    Layers { folder: "crates/admission/", floors: &[], walls: &[("pressure", "signal")] },
];

/// Longest chain of re-exports that is followed.
const STEPS_MAX: usize = 8;

/// One path as it is written.
#[derive(Debug)]
pub(crate) struct Path<'a> {
    pub(crate) segments: Vec<&'a str>,
    pub(crate) line: usize,
    /// The name under which a `use` makes it known, `*` for all that is in it; `None` elsewhere.
    pub(crate) name: Option<&'a str>,
    /// `true` if the `use` has a visibility of its own.
    pub(crate) public: bool,
    /// The inline modules around it.
    inner: Vec<&'a str>,
}

/// All paths of two segments and more, and all that is imported by `use`.
pub(crate) fn paths<'a>(code: &[Token<'a>]) -> Vec<Path<'a>> {
    let mut found = Vec::new();
    let mut modules: Vec<(&str, usize)> = Vec::new();
    let (mut at, mut depth) = (0, 0_usize);
    while at < code.len() {
        let from = found.len();
        let next = at + 1;
        if code[at].is("{") {
            depth += 1;
        } else if code[at].is("}") {
            depth = depth.saturating_sub(1);
            modules.retain(|(_, opened)| *opened < depth + 1);
        } else if let Some(name) = inline_module(code, at) {
            modules.push((name, depth + 1));
        }
        at = if code[at].is("use") {
            let public = at > 0 && (code[at - 1].is("pub") || code[at - 1].is(")"));
            let end = tree(code, next, true, &[], &mut found);
            found[from..].iter_mut().for_each(|path| path.public = public);
            end.max(next)
        } else if code[at].name().is_some() && reads(code, next, &["::"]) {
            tree(code, at, false, &[], &mut found).max(next)
        } else {
            next
        };
        let inner: Vec<_> = modules.iter().map(|(name, _)| *name).collect();
        found[from..].iter_mut().for_each(|path| path.inner.clone_from(&inner));
    }
    found
}

fn inline_module<'a>(code: &[Token<'a>], at: usize) -> Option<&'a str> {
    let opens = code[at].is("mod") && reads(code, at + 2, &["{"]);
    if opens { code[at + 1].name() } else { None }
}

/// Reads one branch of a `use` tree, or a plain path; returns the index after it.
fn tree<'a>(
    code: &[Token<'a>],
    mut at: usize,
    import: bool,
    before: &[&'a str],
    found: &mut Vec<Path<'a>>,
) -> usize {
    let mut segments = before.to_vec();
    let leaf = |segments: Vec<&'a str>, name, line| Path {
        segments,
        line,
        name,
        public: false,
        inner: Vec::new(),
    };
    while at < code.len() {
        let line = code[at].line;
        if code[at].is("::") {
            at += 1;
        } else if code[at].is("*") && import {
            found.push(leaf(segments, Some("*"), line));
            return at + 1;
        } else if code[at].is("{") && import {
            at += 1;
            while at < code.len() && !code[at].is("}") {
                let end = tree(code, at, import, &segments, found);
                at = if end == at || reads(code, end, &[","]) { end + 1 } else { end };
            }
            return at + 1;
        } else if let Some(name) = code[at].name() {
            if name != "self" || segments.is_empty() {
                segments.push(name);
            }
            at += 1;
            if reads(code, at, &["::"]) {
                continue;
            }
            let mut known = segments.last().copied();
            if import && reads(code, at, &["as"]) && at + 1 < code.len() {
                known = Some(code[at + 1].text);
                at += 2;
            }
            found.push(leaf(segments, known.filter(|_| import), line));
            return at;
        } else {
            break;
        }
    }
    if !import {
        // A path that ends before a turbofish or a macro's variable.
        let line = code[at.min(code.len()) - 1].line;
        found.push(leaf(segments, None, line));
    }
    at
}

/// The module that a source under the `src` of its package is.
fn module_of(inside: &str) -> Vec<String> {
    let inner = inside.trim_end_matches(".rs");
    let mut module: Vec<_> = inner.split('/').map(str::to_owned).collect();
    let last = module.last().map_or("", String::as_str);
    if last == "mod" || inner == "lib" {
        module.pop();
    }
    module
}

/// Checks floors and walls of each published package.
pub(super) fn check(packages: &[Package], library: &[&Source], all: &[Layers], faults: &Faults) {
    const NONE: Layers = Layers { folder: "", floors: &[], walls: &[] };
    for package in packages.iter().filter(|package| package.is_published) {
        let layers = all.iter().find(|layers| layers.folder == package.folder);
        let folder = format!("{}src/", package.folder);
        let inside = |source: &&Source| source.name.starts_with(&folder);
        let sources: Vec<_> = library.iter().copied().filter(inside).collect();
        check_package(package, packages, &sources, layers.unwrap_or(&NONE), faults);
    }
}

fn check_package(
    package: &Package,
    packages: &[Package],
    sources: &[&Source],
    layers: &Layers,
    faults: &Faults,
) {
    let map = Map::new(package, packages, sources);
    for source in sources {
        let module = map.module_of(source);
        let Some(part) = module.first() else {
            continue; // lib.rs stands above all floors
        };
        if !layers.floors.is_empty() && layers.floor(part).is_none() {
            faults.add(source, 1, &format!("{part} has no floor: add it to LAYERS"));
            continue;
        }
        for path in &paths(&source.code()) {
            for target in map.chain(&module, path) {
                if let Some(what) = layers.climbs(part, path, &target) {
                    faults.add(source, path.line, &what);
                }
                if let Some(what) = layers.breaks(&within(&module, path), path, &target) {
                    faults.add(source, path.line, &what);
                }
            }
        }
    }
    for (source, line, target) in map.wide {
        faults.add(source, line, &format!("re-exports all of {target}: name what is meant"));
    }
}

impl Layers {
    /// Returns the fault if a path leads from its part to one that is not below.
    fn climbs(&self, part: &str, path: &Path<'_>, target: &[String]) -> Option<String> {
        let Some(wanted) = target.first() else {
            let what = "imports the whole crate: name the part that is meant";
            return path.name.filter(|_| !self.floors.is_empty()).map(|_| what.to_owned());
        };
        match (self.floor(part), self.floor(wanted)) {
            _ if part == wanted => None,
            (Some(here), Some(there)) if there >= here => {
                Some(format!("{part} must not import {wanted}: wrong direction"))
            }
            _ => None, // downward, or an item of the crate root
        }
    }

    /// Returns the fault if a path leads through a wall.
    fn breaks(&self, module: &[String], path: &Path<'_>, target: &[String]) -> Option<String> {
        for (walled, forbidden) in self.walls {
            let (walled, parts) = (split(walled), split(forbidden));
            if !module.starts_with(&walled) {
                continue;
            }
            if target.starts_with(&parts) {
                return Some(format!("{} must not import {forbidden}", walled.join("::")));
            }
            if path.name.is_some() && parts.starts_with(target) && !target.is_empty() {
                let all = target.join("::");
                return Some(format!(
                    "imports all of {all}, and so {forbidden}: name what is meant"
                ));
            }
        }
        None
    }

    fn floor(&self, part: &str) -> Option<usize> {
        self.floors.iter().position(|parts| parts.contains(&part))
    }
}

fn split(path: &str) -> Vec<String> {
    path.split("::").map(str::to_owned).collect()
}

fn within(module: &[String], path: &Path<'_>) -> Vec<String> {
    module.iter().cloned().chain(path.inner.iter().map(|&name| name.to_owned())).collect()
}

/// The paths within the crate, and the items that they name.
pub(crate) struct Map<'a> {
    /// The folder of the package's sources.
    folder: String,
    /// The name of the crate.
    own: &'a str,
    /// The other crates of the workspace.
    others: Vec<&'a str>,
    modules: BTreeSet<Vec<String>>,
    /// The path of each `use` and what it stands for.
    names: BTreeMap<Vec<String>, Vec<String>>,
    /// Re-exports of whole modules, which cannot be followed.
    wide: Vec<(&'a Source, usize, String)>,
}

impl<'a> Map<'a> {
    pub(crate) fn new(
        package: &'a Package,
        packages: &'a [Package],
        sources: &[&'a Source],
    ) -> Self {
        let others = packages.iter().filter(|other| *other != package);
        let mut map = Self {
            folder: format!("{}src/", package.folder),
            own: &package.crate_name,
            others: others.map(|other| other.crate_name.as_str()).collect(),
            modules: BTreeSet::new(),
            names: BTreeMap::new(),
            wide: Vec::new(),
        };
        let read: Vec<_> = sources.iter().map(|s| (*s, map.module_of(s), s.code())).collect();
        for (_, module, code) in &read {
            map.modules.insert(module.clone());
            for path in &paths(code) {
                map.modules.insert(within(module, path));
            }
        }
        for (source, module, code) in &read {
            for path in &paths(code) {
                let (Some(name), Some(target)) = (path.name, map.absolute(module, path)) else {
                    continue;
                };
                let mut known = within(module, path);
                known.push(name.to_owned());
                if name != "*" {
                    if known != target {
                        map.names.insert(known, target);
                    }
                } else if path.public && map.modules.contains(&target) {
                    map.wide.push((source, path.line, target.join("::")));
                }
            }
        }
        map
    }

    pub(crate) fn module_of(&self, source: &Source) -> Vec<String> {
        module_of(source.name.strip_prefix(&self.folder).unwrap_or(&source.name))
    }

    /// The path from the crate's root, or from the name of another crate of the workspace; `None`
    /// for other crates.
    fn absolute(&self, module: &[String], path: &Path<'_>) -> Option<Vec<String>> {
        let here = within(module, path);
        let (first, rest) = path.segments.split_first()?;
        let mut target = match *first {
            "crate" => Vec::new(),
            own if own == self.own => Vec::new(),
            other if self.others.contains(&other) => vec![other.to_owned()],
            "self" => here,
            "super" => here.split_last().map_or_else(Vec::new, |(_, outer)| outer.to_vec()),
            child => {
                let mut inside = here;
                inside.push(child.to_owned());
                let known = self.modules.contains(&inside) || self.names.contains_key(&inside);
                return known.then(|| {
                    inside.extend(rest.iter().map(|&segment| segment.to_owned()));
                    inside
                });
            }
        };
        for &segment in rest {
            if segment == "super" {
                target.pop();
            } else {
                target.push(segment.to_owned());
            }
        }
        Some(target)
    }

    /// Returns `true` if a target lies in another crate of the workspace.
    pub(crate) fn is_outside(&self, target: &[String]) -> bool {
        target.first().is_some_and(|first| self.others.contains(&first.as_str()))
    }

    /// Returns the path's target, the target of that, and so on.
    pub(crate) fn chain(&self, module: &[String], path: &Path<'_>) -> Vec<Vec<String>> {
        let mut chain: Vec<_> = self.absolute(module, path).into_iter().collect();
        while let Some(last) = chain.last().filter(|_| chain.len() < STEPS_MAX) {
            let known = (1..=last.len()).rev().find_map(|length| {
                let target = self.names.get(&last[..length])?;
                Some(target.iter().chain(&last[length..]).cloned().collect::<Vec<_>>())
            });
            match known {
                Some(target) if !chain.contains(&target) => chain.push(target),
                _ => break,
            }
        }
        chain
    }
}

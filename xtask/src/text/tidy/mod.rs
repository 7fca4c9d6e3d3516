//! Checks of the source text itself: direction of imports, heads and columns, orphaned files,
//! banned names, paths of the machine that built it.
//!
//! One pass over the tree; every fault is printed before the test fails. The rules are checked in
//! turn: `planted.rs` holds a fault for each of them, which must be found, and clean texts, which
//! must pass. It does not replace clippy, and parses no more than tokens.

mod bans;
mod imports;
mod orphans;
mod planted;
mod shape;
mod tokens;

use std::fs;
use std::path::Path;

use tokens::Token;

/// A text file of the repository.
#[derive(Debug)]
pub(crate) struct Source {
    /// Its path from the root of the repository, with `/`.
    pub(crate) name: String,
    pub(crate) text: String,
}

impl Source {
    pub(crate) fn is_rust(&self) -> bool {
        self.name.ends_with(".rs")
    }

    pub(crate) fn is_under(&self, folder: &str) -> bool {
        self.name.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
    }

    /// Its code: all tokens but comments.
    pub(crate) fn code(&self) -> Vec<Token<'_>> {
        tokens::code(&tokens::tokens(&self.text))
    }

    /// The text of a line, counted from 1; empty where there is no such line.
    pub(crate) fn line(&self, line: usize) -> &str {
        line.checked_sub(1).and_then(|at| self.text.lines().nth(at)).unwrap_or_default()
    }

    /// What a comment says after `mark`, on this line or alone on the line above.
    pub(crate) fn remark(&self, line: usize, mark: &str) -> Option<&str> {
        let above = self.line(line.saturating_sub(1));
        let above = above.trim_start().starts_with("//").then_some(above);
        [Some(self.line(line)), above]
            .into_iter()
            .flatten()
            .find_map(|text| text.split_once(mark))
            .map(|(_, after)| after.trim_start_matches(':').trim())
    }
}

/// What was found, a line each.
#[derive(Debug, Default)]
pub(crate) struct Faults(Vec<String>);

impl Faults {
    pub(crate) fn add(&mut self, source: &Source, line: usize, what: &str) {
        self.0.push(format!("{}:{line}: {what}", source.name));
    }
}

/// All faults of a tree, sorted.
fn check(tree: &[Source]) -> Vec<String> {
    let mut faults = Faults::default();
    let rust: Vec<_> = tree.iter().filter(|source| source.is_rust()).collect();
    let library: Vec<_> = rust.iter().filter(|s| s.is_under("src")).copied().collect();
    imports::check(&library, &mut faults);
    orphans::check(tree, &mut faults);
    for source in rust {
        shape::check(source, &mut faults);
        bans::check(source, &mut faults);
    }
    for source in tree {
        bans::machine_paths(source, &mut faults);
    }
    faults.0.sort();
    faults.0.dedup();
    faults.0
}

/// Reads the text files under `folder`, but for what is built and what is git's.
fn read(root: &Path, folder: &Path, tree: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).expect("readable folder") {
        let entry = entry.expect("readable entry");
        let kind = entry.file_type().expect("known file type");
        let path = entry.path();
        if entry.file_name() == ".git" || entry.file_name() == "target" {
            continue;
        }
        if kind.is_dir() {
            read(root, &path, tree);
        } else if kind.is_file() {
            let name = path.strip_prefix(root).expect("under the root");
            let name = name.to_str().expect("file name in UTF-8").replace('\\', "/");
            let bytes = fs::read(&path).expect("readable file");
            // What is not UTF-8 is a picture or the like, and no source.
            if let Ok(text) = String::from_utf8(bytes) {
                tree.push(Source { name, text });
            }
        }
    }
}

#[test]
fn the_tree_is_tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut tree = Vec::new();
    read(root, root, &mut tree);
    assert!(tree.iter().any(|s| s.name == "src/lib.rs"), "no sources: the check itself is broken");
    let faults = check(&tree);
    assert!(faults.is_empty(), "{} untidy:\n{}", faults.len(), faults.join("\n"));
}

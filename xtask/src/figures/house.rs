//! Figures of how large the project is, and how much of it a reader has to learn.
//!
//! The product is what is published: `src` and `crates/*/src`, without code for tests.

use std::collections::{BTreeMap, BTreeSet};

use super::{Figure, count, figure};
use crate::code::{self, Code, Token};
use crate::text::imports;
use crate::tree::{self, Tree};

/// Counts all of it.
pub(super) fn measure() -> Result<Vec<Figure>, String> {
    let tree = Tree::read(&tree::root())?;
    let codes = code::read(&tree)?;
    let product: Vec<_> = codes.iter().filter(|(name, _)| is_product(name)).collect();
    let lines = |codes: &mut dyn Iterator<Item = &Code>| count(codes.map(|code| code.lines).sum());
    let types = Types::new(product.iter().map(|(_, code)| *code));
    println!("  names of several types: {}", types.shared().join(" "));
    println!("  errors: {}", types.errors().join(" "));
    let mut packages = tree.packages();
    packages.retain(|package| package.is_published);
    let cycles = imports::cycles(&packages, &codes);
    for (folder, cycle) in &cycles {
        println!("  {folder}src: a cycle of {} files: {}", cycle.len(), cycle.join(" "));
    }
    let cycle = cycles.iter().map(|(_, cycle)| cycle.len()).max().unwrap_or(0);
    let page = |name: &str| {
        let inside = name.strip_prefix("docs/").is_some_and(|name| !name.contains('/'));
        name == "README.md" || inside && name.ends_with(".md")
    };
    let pages = tree.files.iter().filter(|file| page(&file.name));
    let words = pages.map(|file| file.text.split_whitespace().count()).sum();
    Ok(vec![
        figure("product_lines", lines(&mut product.iter().map(|(_, code)| *code)), "lines"),
        figure("product_files", count(product.len()), "files"),
        figure("all_lines", lines(&mut codes.values()), "lines"),
        figure("public_types", count(types.public), "types"),
        figure("error_types", count(types.errors().len()), "types"),
        figure("shared_names", count(types.shared().len()), "names"),
        figure("cycle_files", count(cycle), "files"),
        figure("doc_words", count(words), "words"),
    ])
}

fn is_product(name: &str) -> bool {
    let inside = name.strip_prefix("crates/").and_then(|inside| inside.split_once('/'));
    inside.map_or(name, |(_, inside)| inside).starts_with("src/")
}

/// The types of the product.
#[derive(Default)]
struct Types {
    public: usize,
    /// How many types have each name.
    names: BTreeMap<String, usize>,
    /// Public types that derive or implement `Error`.
    derived: BTreeSet<String>,
    public_names: BTreeSet<String>,
    implemented: BTreeSet<String>,
}

impl Types {
    fn new<'a>(codes: impl Iterator<Item = &'a Code>) -> Self {
        let mut types = Self::default();
        codes.for_each(|code| types.add(&code.tokens));
        types
    }

    fn add(&mut self, tokens: &[Token]) {
        const BEFORE: [&str; 8] = ["", "}", ";", "]", "{", ")", "pub", "unsafe"];
        let text = |at: usize| tokens.get(at).map_or("", |token| token.text.as_str());
        let before = |at: usize, back: usize| at.checked_sub(back).map_or("", text);
        // Whether the attributes of the next item derive `Error`.
        let mut derives = false;
        for at in 0..tokens.len() {
            match text(at) {
                "derive" => {
                    let list = tokens[at..].iter().take_while(|token| token.text != "]");
                    derives |= list.into_iter().any(|token| token.text == "Error");
                }
                "Error" if text(at + 1) == "for" => {
                    self.implemented.insert(text(at + 2).to_owned());
                }
                kind @ ("struct" | "enum" | "union" | "trait" | "type")
                    if BEFORE.contains(&before(at, 1)) =>
                {
                    let is_unsafe = usize::from(before(at, 1) == "unsafe");
                    let is_public = before(at, 1 + is_unsafe) == "pub";
                    let name = text(at + 1).to_owned();
                    self.public += usize::from(is_public);
                    if is_public {
                        self.public_names.insert(name.clone());
                    }
                    if derives {
                        self.derived.insert(name.clone());
                    }
                    derives = false;
                    // Not those of traits.
                    if kind != "type" || is_public || before(at, 1) == ")" {
                        *self.names.entry(name).or_default() += 1;
                    }
                }
                _ => {}
            }
        }
    }

    /// The names that more than one type has.
    fn shared(&self) -> Vec<&str> {
        let shared = self.names.iter().filter(|(_, count)| **count > 1);
        shared.map(|(name, _)| name.as_str()).collect()
    }

    /// The public types that are errors.
    fn errors(&self) -> Vec<&str> {
        let errors = self.derived.union(&self.implemented);
        errors.filter(|name| self.public_names.contains(*name)).map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Source;

    #[test]
    fn types_names_and_errors_are_counted() {
        let one = "#[derive(Debug, Error)]\npub enum A { B }\n#[derive(Debug)]\npub struct C;\n\
                   struct D;\nimpl Error for C {}\nimpl Error for D {}\nimpl T for D { type X = u8; }";
        let two = "pub(crate) type D = u8; type E = u8; pub unsafe trait F { type X; }";
        let file = |name: &str, text: &str| Source { name: name.into(), text: text.into() };
        let files = vec![file("src/a.rs", one), file("src/b.rs", two), file("c.rs", "struct C;")];
        let codes = code::read(&Tree { files, binaries: Vec::new() }).expect("Rust");
        let types = Types::new(codes.iter().filter(|(name, _)| is_product(name)).map(|(_, c)| c));
        assert_eq!((types.public, types.shared(), types.errors()), (3, vec!["D"], vec!["A", "C"]));
        for (name, expected) in [("crates/a/src/x.rs", true), ("crates/a/build.rs", false)] {
            assert_eq!(is_product(name), expected, "{name}");
        }
    }
}

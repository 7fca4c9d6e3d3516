//! The Rust code of a package without its tests.

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{Attribute, File, ItemMod, Meta};

use crate::tree::{Source, Tree};

/// Returns the files under `src` of a package, without files that are built for tests alone. Inline
/// modules for tests are left out too: their lines are empty.
pub(super) fn product(tree: &Tree, folder: &str) -> Result<Vec<Source>, String> {
    let folder = format!("{folder}src/");
    let mut found = Vec::new();
    let mut tests = Vec::new();
    for source in tree.files.iter().filter(|source| source.is_rust()) {
        if source.name.starts_with(&folder) {
            let parsed = syn::parse_file(&source.text);
            let parsed = parsed.map_err(|error| format!("{}: {error}", source.name))?;
            let (text, files) = without_tests(source, &parsed);
            found.push(Source { name: source.name.clone(), text });
            tests.extend(files);
        }
    }
    let is_test = |name: &str| {
        let of = |module: &String| {
            let rest = name.strip_prefix(module.as_str());
            rest.is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
        };
        tests.iter().any(of)
    };
    found.retain(|source| !is_test(&source.name));
    if found.is_empty() { Err(format!("{folder}: no files")) } else { Ok(found) }
}

/// Returns the text without modules for tests, and the paths of those that are files, without
/// `.rs`.
fn without_tests(source: &Source, parsed: &File) -> (String, Vec<String>) {
    let mut tests = Tests::default();
    tests.visit_file(parsed);
    let is_test = |line: usize| tests.lines.iter().any(|&(from, to)| from <= line && line <= to);
    let lines =
        source.text.lines().zip(1..).map(|(text, line)| if is_test(line) { "" } else { text });
    let text: Vec<_> = lines.collect();
    let (folder, file) = source.name.rsplit_once('/').unwrap_or_default();
    let inside = match file {
        "lib.rs" | "main.rs" | "mod.rs" => folder.to_owned(),
        file => format!("{folder}/{}", file.trim_end_matches(".rs")),
    };
    let files = tests.modules.iter().map(|module| format!("{inside}/{module}")).collect();
    (text.join("\n"), files)
}

/// Returns `true` if the item is built for tests alone.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => requires_test(list.tokens.clone()),
        Meta::Path(path) => path.is_ident("test"),
        _ => false,
    })
}

fn requires_test(condition: TokenStream) -> bool {
    let mut negated = false;
    condition.into_iter().any(|token| match token {
        TokenTree::Ident(name) => {
            negated = name == "not";
            name == "test"
        }
        TokenTree::Group(group) => !std::mem::take(&mut negated) && requires_test(group.stream()),
        _ => false,
    })
}

/// The modules for tests in a file.
#[derive(Default)]
struct Tests {
    modules: Vec<String>,
    /// The first and the last line of each, attributes included.
    lines: Vec<(usize, usize)>,
}

impl<'ast> Visit<'ast> for Tests {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_test(&item.attrs) {
            return visit::visit_item_mod(self, item);
        }
        let span = item.span();
        self.lines.push((span.start().line, span.end().line));
        self.modules.push(item.ident.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_for_tests_are_left_out() {
        let file = |name: &str, text: &str| Source { name: name.into(), text: text.into() };
        let files = vec![
            file("a/src/lib.rs", "mod x;\n#[cfg(test)]\nmod y;\n#[cfg(not(test))]\nmod z {\n}\n"),
            file("a/src/x.rs", "fn f() {}\n\n#[cfg(all(test, unix))]\nmod tests {\n    x!();\n}"),
            file("a/src/y.rs", "fn g() {}"),
            file("a/src/y/more.rs", "fn h() {}"),
            file("a/tests/b.rs", "fn i() {}"),
        ];
        let found = product(&Tree { files, ..Tree::default() }, "a/").expect("Rust");
        let found: Vec<_> = found.iter().map(|one| (&*one.name, &*one.text)).collect();
        let expected = [
            ("a/src/lib.rs", "mod x;\n\n\n#[cfg(not(test))]\nmod z {\n}"),
            ("a/src/x.rs", "fn f() {}\n\n\n\n\n"),
        ];
        assert_eq!(found, expected);
    }
}

//! Rust source as tokens: without comments, and without what is built for tests alone.
//!
//! Code for tests is a file under a folder `tests` or with a name that ends so, a module under
//! `#[cfg(test)]` or for loom, and any item under `#[cfg(test)]` or `#[cfg(all(test, ...))]`.
//!
//! Invariant: a line counts if a token of code lies on it.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, Group, Spacing, TokenStream, TokenTree};

use crate::tree::{Source, Tree};

/// A token: a name, a literal, a bracket, `::`, `->`, `=>` or another mark.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub(crate) text: String,
    pub(crate) line: usize,
}

/// The code of a file.
#[derive(Debug)]
pub(crate) struct Code {
    pub(crate) tokens: Vec<Token>,
    /// The number of lines with code.
    pub(crate) lines: usize,
}

/// The code of each Rust file that is not for tests, by the file's name.
pub(crate) type Codes = BTreeMap<String, Code>;

/// Reads all of them.
pub(crate) fn read(tree: &Tree) -> Result<Codes, String> {
    let (mut codes, mut tests) = (Codes::new(), Vec::new());
    for source in tree.files.iter().filter(|source| source.is_rust()) {
        let stream: TokenStream =
            source.text.parse().map_err(|error| format!("{}: {error}", source.name))?;
        let mut reader = Reader::new(source);
        reader.stream(stream);
        tests.append(&mut reader.tests);
        let code = Code { tokens: reader.tokens, lines: reader.lines.len() };
        codes.insert(source.name.clone(), code);
        proc_macro2::extra::invalidate_current_thread_spans();
    }
    let is_of = |name: &str, module: &String| {
        let rest = name.strip_prefix(module.as_str());
        rest.is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    };
    codes.retain(|name, _| !is_test_file(name) && !tests.iter().any(|test| is_of(name, test)));
    Ok(codes)
}

fn is_test_file(name: &str) -> bool {
    let (stem, mut folders) = (name.trim_end_matches(".rs"), name.split('/'));
    folders.any(|part| ["tests", "unit_tests", "tests.rs", "unit_tests.rs"].contains(&part))
        || stem.ends_with("_test")
        || stem.ends_with("_tests")
}

/// Collects the code of one file.
struct Reader<'a> {
    source: Vec<&'a str>,
    /// The path without `.rs` below which modules of the file are.
    inside: String,
    tokens: Vec<Token>,
    lines: BTreeSet<usize>,
    /// The paths, without `.rs`, of modules for tests.
    tests: Vec<String>,
}

impl<'a> Reader<'a> {
    fn new(source: &'a Source) -> Self {
        let (folder, file) = source.name.rsplit_once('/').unwrap_or(("", &source.name));
        let inside = match file {
            "lib.rs" | "main.rs" | "mod.rs" => folder.to_owned(),
            _ => source.name.trim_end_matches(".rs").to_owned(),
        };
        let (source, tokens) = (source.text.lines().collect(), Vec::new());
        Self { source, inside, tokens, lines: BTreeSet::new(), tests: Vec::new() }
    }

    fn stream(&mut self, stream: TokenStream) {
        let trees: Vec<_> = stream.into_iter().collect();
        let mut at = 0;
        while at < trees.len() {
            if let Some((end, attribute)) = attribute(&trees, at) {
                if self.is_comment(&trees[at]) {
                    at = end;
                    continue;
                }
                if let Some(end) = self.after_test(&trees, end, &attribute) {
                    at = end;
                    continue;
                }
            }
            at = self.tree(&trees, at);
        }
    }

    /// Returns `true` if this is the beginning of an attribute that is written as a comment.
    fn is_comment(&self, tree: &TokenTree) -> bool {
        let begin = tree.span().start();
        let line = self.source.get(begin.line - 1).copied().unwrap_or_default();
        line.chars().nth(begin.column) != Some('#')
    }

    /// Returns the place after the item with this attribute if it is for tests alone.
    fn after_test(&mut self, trees: &[TokenTree], at: usize, attribute: &str) -> Option<usize> {
        let condition = attribute.strip_prefix("cfg(")?;
        let condition = condition.strip_prefix("all(").unwrap_or(condition);
        let is_test = condition.starts_with("test)") || condition.starts_with("test,");
        let mut at = at;
        while let Some((end, _)) = self::attribute(trees, at) {
            at = end;
        }
        let mut names = trees[at..].iter().skip_while(|tree| tree.to_string() != "mod").skip(1);
        let end = trees[at..].iter().position(|tree| match tree {
            TokenTree::Punct(mark) => mark.as_char() == ';',
            TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
            _ => false,
        });
        let end = end.map_or(trees.len(), |end| at + end + 1);
        let is_module = trees[at..end].iter().any(|tree| tree.to_string() == "mod");
        let is_file = is_module && matches!(trees[end - 1], TokenTree::Punct(_));
        let begins = ["any(test", "lowtide_loom"];
        let is_for_tests = is_test || begins.iter().any(|begin| condition.starts_with(begin));
        if let Some(name) = names.next().filter(|_| is_file && is_for_tests) {
            self.tests.push(format!("{}/{name}", self.inside));
        }
        is_test.then_some(end)
    }

    /// Adds one token, or all of a group, and returns the place after it.
    fn tree(&mut self, trees: &[TokenTree], at: usize) -> usize {
        let tree = &trees[at];
        let (begin, end) = (tree.span().start().line, tree.span().end().line);
        let two = |one: char, other: &str| {
            let is_joint = matches!(tree, TokenTree::Punct(mark)
                if mark.as_char() == one && mark.spacing() == Spacing::Joint);
            let next = trees.get(at + 1).map(ToString::to_string);
            next.filter(|next| is_joint && (other.is_empty() || next == other))
        };
        if let TokenTree::Group(group) = tree {
            self.group(group, begin, end);
            return at + 1;
        }
        let joined = [(':', ":"), ('-', ">"), ('=', ">"), ('\'', "")];
        let next = joined.iter().find_map(|(one, other)| two(*one, other));
        self.lines.extend(begin..=end);
        let length = if next.is_some() { 2 } else { 1 };
        let text = format!("{tree}{}", next.unwrap_or_default());
        self.tokens.push(Token { text, line: begin });
        at + length
    }

    fn group(&mut self, group: &Group, begin: usize, end: usize) {
        let (open, close) = match group.delimiter() {
            Delimiter::Parenthesis => ("(", ")"),
            Delimiter::Brace => ("{", "}"),
            Delimiter::Bracket => ("[", "]"),
            Delimiter::None => ("", ""),
        };
        self.lines.extend([begin, end]);
        self.tokens.push(Token { text: open.to_owned(), line: begin });
        self.stream(group.stream());
        self.tokens.push(Token { text: close.to_owned(), line: end });
    }
}

/// Returns the place after an attribute, and what is in its brackets without white space.
fn attribute(trees: &[TokenTree], at: usize) -> Option<(usize, String)> {
    let is = |at: usize, mark: char| matches!(trees.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == mark);
    let open = if is(at + 1, '!') { at + 2 } else { at + 1 };
    match trees.get(open) {
        Some(TokenTree::Group(group)) if is(at, '#') && group.delimiter() == Delimiter::Bracket => {
            let text = group.stream().to_string();
            Some((open + 1, text.split_whitespace().collect()))
        }
        _ => None,
    }
}

/// Returns the text of tokens, with a space where two words would become one.
pub(crate) fn joined(tokens: &[Token]) -> String {
    let mut text = String::new();
    for Token { text: token, .. } in tokens {
        let is_tight = |c: char| " ([<&.:!#'$".contains(c);
        let is_closing = ["(", ")", "[", "]", "<", ">", ",", ";", ":", "::", ".", "?", "!"];
        if !text.is_empty() && !text.ends_with(is_tight) && !is_closing.contains(&&**token) {
            text.push(' ');
        }
        text += token;
        if token == ":" {
            text.push(' ');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(files: &[(&str, &str)]) -> Codes {
        let file =
            |(name, text): &(&str, &str)| Source { name: (*name).into(), text: (*text).into() };
        let files = files.iter().map(file).collect();
        read(&Tree { files, binaries: Vec::new() }).expect("Rust")
    }

    #[test]
    fn comments_and_code_for_tests_are_left_out() {
        let text = "//! A.\n\n/* a\n * b */\n/// B.\nfn f<'a>() -> &'a str { // why\n    \"x\n\ny\"\n\
                    }\n#[cfg(test)]\n#[x]\nuse a::b;\n#[cfg(all(test, unix))]\nmod t {\n    x!();\n}\n\
                    #[cfg(not(test))]\nconst C: u8 = 1;\n";
        let all = codes(&[("src/lib.rs", text)]);
        let code = &all["src/lib.rs"];
        assert_eq!(code.lines, 7);
        let expected = "fn f<'a>() -> &'a str { \"x\n\ny\" } #[cfg(not(test))] const C: u8 = 1;";
        assert_eq!(joined(&code.tokens), expected);
    }

    #[test]
    fn files_of_modules_for_tests_are_left_out() {
        let root = "mod x;\n#[cfg(test)]\nmod y;\n#[cfg(all(lowtide_loom, test))]\nmod z;";
        let names = ["src/x.rs", "src/y.rs", "src/y/more.rs", "src/x_tests.rs", "tests/a.rs"];
        let mut files: Vec<_> = names.iter().map(|name| (*name, "fn f() {}")).collect();
        files.extend([("src/lib.rs", root), ("src/z/mod.rs", "")]);
        assert_eq!(codes(&files).into_keys().collect::<Vec<_>>(), ["src/lib.rs", "src/x.rs"]);
    }
}

//! The public API of each published package: a committed list of its `pub` items, one a line.
//!
//! The lint `unreachable_pub` keeps `pub` for what users reach, so that the source alone tells.
//! Traits that types implement are not in the list, nor what a macro makes.
//!
//! Invariant: a change of the API is a change of a file under `xtask/api`.

use crate::code::{Codes, Token, joined};
use crate::tree::{Faults, Tree};

/// Returns the file of each published package and its contents.
pub(super) fn files(tree: &Tree, codes: &Codes) -> Vec<(String, String)> {
    let packages = tree.packages().into_iter().filter(|package| package.is_published);
    let file = |package: crate::tree::Package| {
        let folder = format!("{}src/", package.folder);
        let inside = codes.iter().filter(|(name, _)| name.starts_with(&folder));
        let mut lines: Vec<_> = inside.flat_map(|(_, code)| items(&code.tokens)).collect();
        lines.sort();
        lines.dedup();
        let text = lines.join("\n") + "\n";
        (format!("xtask/api/{}.txt", package.crate_name.replace('_', "-")), text)
    };
    packages.map(file).collect()
}

/// Checks that the files are those of the source.
pub(super) fn check(tree: &Tree, codes: &Codes, faults: &Faults) {
    for (name, text) in files(tree, codes) {
        let known = tree.file(&name).map_or("", |file| &file.text);
        let change = |sign, one: &str, other: &str| {
            let new = |line: &&str| !other.lines().any(|known| known == *line);
            one.lines().filter(new).map(|line| format!("\n  {sign} {line}")).collect::<String>()
        };
        faults.expect(known == text, || {
            let changes = change('-', known, &text) + &change('+', &text, known);
            format!("{name}: the API has changed: run `cargo xtask text --write`{changes}")
        });
    }
}

/// Returns the public items, each after the header of the block that it is in.
fn items(tokens: &[Token]) -> Vec<String> {
    const BEFORE: [&str; 7] = ["", "}", ";", "{", ")", "pub", "unsafe"];
    let tokens = &without_attributes(tokens)[..];
    let mut found = Vec::new();
    // The headers of the open blocks, and of the next one.
    let (mut blocks, mut header) = (Vec::<String>::new(), String::new());
    for at in 0..tokens.len() {
        let before = at.checked_sub(1).map_or("", |before| &tokens[before].text);
        let block = blocks.last().map_or("", |block| block);
        // All of a public trait or enumeration is public.
        let is_open = block.starts_with("pub enum") && ["{", ","].contains(&before)
            || block.starts_with("pub")
                && block.contains("trait ")
                && ["{", "}", ";"].contains(&before);
        match tokens[at].text.as_str() {
            "{" => blocks.push(std::mem::take(&mut header)),
            "(" | "[" => blocks.push(String::new()),
            "}" | ")" | "]" => drop(blocks.pop()),
            ";" => header.clear(),
            text => {
                let next = tokens.get(at + 1).map_or("", |next| &next.text);
                let is_public = text == "pub" && next != "(";
                if is_public || is_open {
                    let item = item(&tokens[at..]);
                    found.push(if block.is_empty() { item } else { format!("{block}: {item}") });
                }
                if ["impl", "struct", "enum", "trait", "union"].contains(&text)
                    && BEFORE.contains(&before)
                {
                    let from = at
                        - tokens[..at]
                            .iter()
                            .rev()
                            .take_while(|token| token.text == "pub" || token.text == "unsafe")
                            .count();
                    header = joined(&tokens[from..at + end(&tokens[at..], &["{", ";"])]);
                }
            }
        }
    }
    found
}

fn without_attributes(tokens: &[Token]) -> Vec<Token> {
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        let open = at + 1 + usize::from(tokens.get(at + 1).is_some_and(|next| next.text == "!"));
        if tokens[at].text == "#" && tokens.get(open).is_some_and(|next| next.text == "[") {
            at = open + 2 + end(&tokens[open + 1..], &["]"]);
        } else {
            kept.push(tokens[at].clone());
            at += 1;
        }
    }
    kept
}

/// Returns the item at the beginning, up to its body.
fn item(tokens: &[Token]) -> String {
    let words = ["pub", "async", "unsafe", "extern", "const"];
    let at = tokens.iter().position(|token| !words.contains(&token.text.as_str())).unwrap_or(0);
    let length = match tokens[at].text.as_str() {
        "fn" | "struct" | "enum" | "trait" | "union" | "mod" => end(tokens, &["{", ";"]),
        "type" | "use" => end(tokens, &[";"]),
        _ if at > 0 && tokens[at - 1].text == "const" => end(tokens, &["=", ";"]),
        // A field or a variant.
        _ => field(tokens),
    };
    joined(&tokens[..length])
}

/// Returns the length up to one of these marks outside of brackets.
fn end(tokens: &[Token], marks: &[&str]) -> usize {
    let mut depth = 0_usize;
    let found = tokens.iter().position(|Token { text, .. }| {
        let is_end = depth == 0 && marks.contains(&text.as_str());
        match text.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        is_end
    });
    found.unwrap_or(tokens.len())
}

/// Returns the length up to a comma: one between angle brackets is of a type.
fn field(tokens: &[Token]) -> usize {
    let (mut from, mut angles) = (0, 0_usize);
    loop {
        let length = end(&tokens[from..], &[",", "}", ")", "<", ">", ";"]);
        match tokens.get(from + length).map_or("", |token| &token.text) {
            "<" => angles += 1,
            ">" => angles = angles.saturating_sub(1),
            "," if angles > 0 => {}
            _ => return from + length,
        }
        from += length + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code;
    use crate::tree::Source;

    #[test]
    fn public_items_are_listed_with_their_types() {
        let text = "pub use a::{B, C};\npub(crate) fn no() {}\n/// D.\npub struct S<T> {\n    \
                    pub map: BTreeMap<u8, T>,\n    own: u8,\n    pub last: u8,\n}\npub enum E { #[x] A(u8), B { c: u8 } }\npub trait T {\n    type X;\n    fn g(&self) {\n        h();\n    }\n}\n\
                    impl<T> S<T> {\n    pub const MAX: u8 = 1;\n    pub const fn f(&self, x: u8) -> \
                    Option<&u8> {\n        g(|| { 1 })\n    }\n    fn own() {}\n}\npub struct U(u8, \
                    pub u16);\npub fn after() {}\n";
        let sources = vec![
            Source { name: "src/lib.rs".into(), text: text.into() },
            Source { name: "Cargo.toml".into(), text: "[package]\nname = \"one\"\n".into() },
        ];
        let tree = Tree { files: sources, binaries: Vec::new() };
        let codes = code::read(&tree).expect("Rust");
        let [(name, text)] = &files(&tree, &codes)[..] else { panic!("one package") };
        assert_eq!(name, "xtask/api/one.txt");
        let expected = [
            "impl<T> S<T>: pub const MAX: u8",
            "impl<T> S<T>: pub const fn f(&self, x: u8) -> Option<&u8>",
            "pub enum E",
            "pub enum E: A(u8)",
            "pub enum E: B { c: u8 }",
            "pub fn after()",
            "pub struct S<T>",
            "pub struct S<T>: pub last: u8",
            "pub struct S<T>: pub map: BTreeMap<u8, T>",
            "pub struct U(u8, pub u16)",
            "pub trait T",
            "pub trait T: fn g(&self)",
            "pub trait T: type X",
            "pub u16",
            "pub use a::{ B, C }",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
        let faults = Faults::default();
        check(&tree, &codes, &faults);
        assert!(faults.sorted()[0].contains("\n  + pub fn after()"));
    }
}

//! What clippy cannot ban: ignored tests, events past `log!`, and paths of one machine.

use crate::code::Codes;
use crate::tree::{Faults, Source, Tree};

/// The only one that calls a subscriber.
const LOG: &str = "crates/core/src/macros.rs";
const LEVELS: [&str; 6] = ["trace", "debug", "info", "warn", "error", "event"];
/// Folders that only a build machine has, in pieces so that this file may be checked as well.
const MACHINE: [[&str; 2]; 3] = [["/wo", "rk/"], ["/ro", "ot/"], ["/ho", "me/"]];

/// Checks all files.
pub(super) fn check(tree: &Tree, codes: &Codes, faults: &Faults) {
    for source in tree.library().into_iter().filter(|source| source.name != LOG) {
        let tokens = codes.get(&source.name).map_or(&[][..], |code| &code.tokens);
        let is_event = |at: usize| {
            let text = |at: usize| tokens.get(at).map_or("", |token| &token.text);
            text(at) == "tracing" && LEVELS.contains(&text(at + 2)) && text(at + 3) == "!"
        };
        for at in (0..tokens.len()).filter(|at| is_event(*at)) {
            faults.add(source, tokens[at].line, "a subscriber may panic: write `log!`");
        }
    }
    for source in &tree.files {
        let ignored = ["#[", "/// ```"].map(|begin| format!("{begin}ignore"));
        for (line, at) in source.text.lines().zip(1..).filter(|_| source.is_rust()) {
            let is_ignored = ignored.iter().any(|begin| line.trim_start().starts_with(begin));
            faults.expect(!is_ignored, || format!("{}:{at}: it tests nothing", source.name));
        }
        machine_paths(source, faults);
    }
}

fn machine_paths(source: &Source, faults: &Faults) {
    for folder in MACHINE.map(|pieces| pieces.concat()) {
        for (at, _) in source.text.match_indices(&folder) {
            let before = source.text[..at].chars().next_back();
            let inside = |c: char| c.is_alphanumeric() || "_-./~$})]*".contains(c);
            if !before.is_some_and(inside) {
                let line = source.text[..at].matches('\n').count() + 1;
                faults.add(source, line, &format!("{folder}: a path of one machine"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code;

    #[test]
    fn what_is_banned_is_found_and_what_looks_alike_is_not() {
        let path = MACHINE[0].concat();
        for (text, expected) in [
            ("fn f() { ::tracing::warn!(\"a\") }", "1: a subscriber may panic"),
            ("#[test]\n#[ignore = \"slow\"]\nfn f() {}", "2: it tests nothing"),
            ("/// ```ignore\n/// f();\n/// ```\nfn f() {}", "1: it tests nothing"),
            (&format!("// see {path}x"), "1: /wo"),
            (&format!("// https://example.org{path}x, ..{path}x"), ""),
            ("use tracing::Subscriber; // tracing::warn!, #[ignore]", ""),
        ] {
            let source = |name: &str, text: &str| Source { name: name.into(), text: text.into() };
            let files =
                vec![source("Cargo.toml", "[package]\nname = \"a\"\n"), source("src/a.rs", text)];
            let (tree, faults) = (Tree { files, binaries: Vec::new() }, Faults::default());
            check(&tree, &code::read(&tree).expect("Rust"), &faults);
            let faults = faults.sorted();
            assert_eq!(faults.len(), usize::from(!expected.is_empty()), "{text}: {faults:?}");
            assert!(faults.iter().all(|fault| fault.contains(expected)), "{text}: {faults:?}");
        }
    }
}

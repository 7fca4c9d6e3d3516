//! The lines of code of each package, of which none may have more than its row of a table.
//!
//! `cargo xtask text --write` lowers the rows. Who needs more raises one, and says why.

use std::collections::BTreeMap;

use crate::code::Codes;
use crate::tree::{Faults, Tree};

const TABLE: &str = "xtask/budgets.tsv";

/// Returns the lines of code of each package, by its folder.
fn lines(tree: &Tree, codes: &Codes) -> BTreeMap<String, usize> {
    let packages = tree.packages();
    let mut found = BTreeMap::new();
    for (name, code) in codes {
        let folders = packages.iter().map(|package| &package.folder);
        if let Some(folder) =
            folders.filter(|folder| name.starts_with(*folder)).max_by_key(|folder| folder.len())
        {
            let folder = if folder.is_empty() { "." } else { folder.trim_end_matches('/') };
            *found.entry(folder.to_owned()).or_default() += code.lines;
        }
    }
    found
}

/// Returns the rows of the table: a package and its budget.
fn rows(text: &str) -> BTreeMap<&str, usize> {
    let rows = text.lines().filter_map(|line| line.split_once('\t'));
    rows.filter_map(|(folder, budget)| Some((folder, budget.parse().ok()?))).collect()
}

/// Checks each package.
pub(super) fn check(tree: &Tree, codes: &Codes, faults: &Faults) {
    let budgets = rows(tree.text(TABLE, faults));
    for (folder, lines) in lines(tree, codes) {
        let budget = budgets.get(folder.as_str()).copied().unwrap_or(0);
        faults.expect(lines <= budget, || {
            format!("{TABLE}: {folder} has {lines} lines of code: expected at most {budget}")
        });
    }
}

/// Returns the table with its rows lowered to what is there.
pub(super) fn write(tree: &Tree, codes: &Codes) -> (String, String) {
    let text = tree.file(TABLE).map_or("", |file| &file.text);
    let budgets = rows(text);
    let head = text.lines().filter(|line| line.starts_with('#')).map(str::to_owned);
    let row = |(folder, lines): (String, usize)| {
        let budget = budgets.get(folder.as_str()).map_or(lines, |budget| lines.min(*budget));
        format!("{folder}\t{budget}")
    };
    let rows: Vec<_> = head.chain(lines(tree, codes).into_iter().map(row)).collect();
    (TABLE.to_owned(), rows.join("\n") + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code;
    use crate::tree::Source;

    #[test]
    fn a_package_that_grows_is_found_and_its_row_only_falls() {
        let source = |name: &str, text: &str| Source { name: name.into(), text: text.into() };
        let tree = |rows: &str| {
            let manifest = "[package]\nname = \"a\"\n";
            let files = vec![
                source("Cargo.toml", manifest),
                source("crates/a/Cargo.toml", manifest),
                source("src/lib.rs", "mod a;\n\n// b\nmod b;\n"),
                source("crates/a/src/lib.rs", "fn f() {\n}\n#[cfg(test)]\nmod t {}\n"),
                source(TABLE, rows),
            ];
            Tree { files, binaries: Vec::new() }
        };
        for (rows, fault, written) in [
            (
                "# h\n.\t1\ncrates/a\t9\n",
                ". has 2 lines of code: expected at most 1",
                "# h\n.\t1\ncrates/a\t2\n",
            ),
            (
                ".\t2\ncrates/gone\t7\n",
                "crates/a has 2 lines of code: expected at most 0",
                ".\t2\ncrates/a\t2\n",
            ),
        ] {
            let (tree, faults) = (tree(rows), Faults::default());
            let codes = code::read(&tree).expect("Rust");
            check(&tree, &codes, &faults);
            assert_eq!(faults.sorted(), [format!("{TABLE}: {fault}")]);
            assert_eq!(write(&tree, &codes).1, written);
        }
    }
}

//! Published packages in a workspace of their own have the lints of the main one.
//!
//! A package inside inherits them. One outside repeats the tables, at the end of its manifest.
//! Packages that are not published may have others.

use crate::tree::{Faults, Source, Tree};

/// Checks every published manifest with tables of lints.
pub(super) fn check(tree: &Tree, faults: &Faults) {
    let Some(expected) = tree.file("Cargo.toml").and_then(|root| tables(root, "workspace.lints."))
    else {
        return;
    };
    for package in tree.packages().iter().filter(|package| package.is_published) {
        let name = format!("{}Cargo.toml", package.folder);
        let found = tree.file(&name).and_then(|manifest| tables(manifest, "lints."));
        faults.expect(found.as_ref().is_none_or(|found| *found == expected), || {
            format!("{name}: its lints are not those of Cargo.toml")
        });
    }
}

/// Returns the lines from the first table with this prefix to the end, without the prefix and
/// comments.
fn tables(manifest: &Source, prefix: &str) -> Option<Vec<String>> {
    let begin = manifest.text.find(&format!("\n[{prefix}"))?;
    let lines = manifest.text[begin..].trim().lines();
    let plain = |line: &str| {
        let line = line.split('#').next().unwrap_or_default().trim_end();
        line.replacen(&format!("[{prefix}"), "[", 1)
    };
    Some(lines.map(plain).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lint_that_differs_is_found() {
        let file = |name: &str, text: &str| Source { name: name.into(), text: text.into() };
        let root = "\n[workspace.lints.rust]\na = \"deny\"\n";
        let faults_of = |text| {
            let files = vec![file("Cargo.toml", root), file("crates/apart/Cargo.toml", text)];
            let (tree, faults) = (Tree { files, ..Tree::default() }, Faults::default());
            check(&tree, &faults);
            faults.sorted().len()
        };
        assert_eq!(faults_of("[package]\nname = \"apart\"\n\n[lints.rust]\na = \"deny\"\n"), 0);
        assert_eq!(
            faults_of("[package]\nname = \"apart\"\n\n[lints]\nworkspace = true\n"),
            0,
            "inherited"
        );
        assert_eq!(faults_of("[package]\nname = \"apart\"\n\n[lints.rust]\na = \"warn\"\n"), 1);
        assert_eq!(faults_of("[package]\nname = \"apart\"\n\n[lints.rust]\n"), 1);
    }
}

//! Links between documents: each leads to a file and a heading that are there.

use crate::tree::{Faults, Tree};

/// Checks all documents.
pub(super) fn check(tree: &Tree, faults: &Faults) {
    for page in tree.files.iter().filter(|file| file.name.ends_with(".md")) {
        let targets = page.text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.contains("://")) {
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let folder = page.name.rsplit_once('/').map_or("", |(folder, _)| folder);
            let path = if file.is_empty() { page.name.clone() } else { joined(folder, file) };
            let text = tree.file(&path).map_or("", |file| &file.text);
            let is_it = |line: &str| line.starts_with('#') && anchor(line) == heading;
            if !tree.has(&path) {
                faults.say(format!("{}: {target}: no such file", page.name));
            } else if !heading.is_empty() && !text.lines().any(is_it) {
                faults.say(format!("{}: {target}: no such heading", page.name));
            }
        }
    }
}

/// Returns the name of a heading in a link: small letters, hyphens for spaces, no other marks.
fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim();
    let kept = heading.chars().filter(|&c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

/// Returns `path` as seen from `folder`, without `.` and `..`.
fn joined(folder: &str, path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(path.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Source;

    #[test]
    fn a_link_that_leads_nowhere_is_found() {
        let file = |name: &str, text: &str| Source { name: name.into(), text: text.into() };
        let text = "# Here\n[a](../B.md#one-two) [b](#here) [c](https://x.y)\n\
                    [d](C.md) [e](../B.md#gone) [f](#gone)";
        let files = vec![file("docs/A.md", text), file("B.md", "## One: two")];
        let (tree, faults) = (Tree { files, binaries: Vec::new() }, Faults::default());
        check(&tree, &faults);
        let expected =
            ["#gone: no such heading", "../B.md#gone: no such heading", "C.md: no such file"];
        assert_eq!(faults.sorted(), expected.map(|what| format!("docs/A.md: {what}")));
    }
}

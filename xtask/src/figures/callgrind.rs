//! What callgrind writes: the functions that ran, and the instructions in all.

use std::collections::{BTreeMap, BTreeSet};

/// Returns the file and the name of each function of which something was counted.
///
/// A name is written once, after a number in parentheses, and later by its number alone. A function
/// is in the last file that was named before it.
pub(super) fn functions(text: &str) -> BTreeSet<(&str, &str)> {
    let (mut files, mut names) = (BTreeMap::new(), BTreeMap::new());
    let (mut found, mut file) = (BTreeSet::new(), "");
    for (key, value) in text.lines().filter_map(|line| line.split_once('=')) {
        match key {
            "fl" | "fi" | "fe" => file = named(&mut files, value),
            "cfi" | "cfl" => {
                named(&mut files, value);
            }
            "fn" => {
                found.insert((file, named(&mut names, value)));
            }
            "cfn" => {
                named(&mut names, value);
            }
            _ => {}
        }
    }
    found
}

/// Returns the name of `(7) name`, or the earlier one of `(7)`.
fn named<'a>(known: &mut BTreeMap<&'a str, &'a str>, value: &'a str) -> &'a str {
    let (number, name) = value.split_once(')').unwrap_or(("", value));
    let name = name.trim();
    if name.is_empty() {
        return known.get(number).copied().unwrap_or_default();
    }
    known.insert(number, name);
    name
}

/// Returns the instructions in all.
pub(super) fn instructions(text: &str) -> Option<f64> {
    let total = text.lines().find_map(|line| line.strip_prefix("totals: "));
    total.and_then(|total| total.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "version: 1\n\
        positions: line\n\
        events: Ir\n\
        summary: 30\n\
        \n\
        fl=(1) /a/one.rs\n\
        fn=(7) one::first\n\
        12 3\n\
        fi=(2) /rustc/option.rs\n\
        40 2\n\
        fe=(1)\n\
        cfi=(3) /a/two.rs\n\
        cfn=(9) two::{{closure}}\n\
        calls=2 8\n\
        13 20\n\
        fn=(8) <one::Of as Default>::default\n\
        +2 1\n\
        fl=(3)\n\
        fn=(9)\n\
        8 20\n\
        totals: 26\n";

    #[test]
    fn functions_are_named_with_their_files() {
        let expected = [
            ("/a/one.rs", "<one::Of as Default>::default"),
            ("/a/one.rs", "one::first"),
            ("/a/two.rs", "two::{{closure}}"),
        ];
        assert_eq!(functions(TEXT), BTreeSet::from(expected));
    }

    #[test]
    fn the_total_is_read() {
        assert_eq!(instructions(TEXT), Some(26.0));
        assert_eq!(instructions("events: Ir\n"), None);
    }
}

//! The amounts of a page, and whether each lies in a sentence that is held against the code.
//!
//! An amount is a number with a unit behind it. A sentence is found by its own words: a changed
//! constant is a fault for each sentence that gives it, and so is a number that no row has.
//!
//! Invariant: `amounts = amounts in rows + amounts in figures`, on each page.

use std::ops::Range;

use super::flat;
use super::rows::{self, Row};
use crate::text::code::Code;
use crate::tree::{Faults, Source};

/// Pages on which each amount is looked at. The others are measurements for the most part; of them
/// it is the defaults.
pub(super) const PAGES: &[&str] = &[
    "docs/OPERATING.md",
    "docs/DEPLOYING.md",
    "docs/ARENA_OPTIONS.md",
    "docs/GETTING_STARTED.md",
    "docs/LIFE_OF_AN_ALLOCATION.md",
];

/// Pages whose defaults are other people's, or words about defaults.
const NOT_LOOKED_AT: &[&str] = &[
    "CONTRIBUTING.md",
    "docs/ARCHITECTURE.md",
    "docs/BENCHMARKING.md",
    "docs/BENCHMARKS_APPENDIX.md",
    "docs/ENGINES.md",
    "docs/STYLE.md",
];

/// The test runs have figures of one day, which no constant holds.
const RUN: &str = "## Test runs";

const UNITS: &[&str] = &["us", "ms", "s", "min", "h", "%", "KiB", "MiB", "GiB", "KB", "MB", "GB"];

/// Returns the ranges of the amounts in a flat text.
fn amounts(text: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut at = 0;
    for word in text.split(' ') {
        let here = at..at + word.len();
        at = here.end + 1;
        let bare = word.trim_start_matches(['(', '[', '*', '~']);
        let is_number = bare.starts_with(|c: char| c.is_ascii_digit() || c == '.')
            && bare.ends_with(|c: char| c.is_ascii_digit())
            && bare.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | ',' | '/'));
        let unit = text.get(at..).unwrap_or_default().split(' ').next().unwrap_or_default();
        let unit = unit.trim_end_matches(|c: char| c.is_ascii_punctuation() && c != '%');
        // `16 KiB/s` is one of KiB.
        let unit = unit.split('/').next().unwrap_or_default();
        if is_number && UNITS.contains(&unit) {
            found.push(here);
        }
    }
    found
}

/// Returns the ranges of the word `default` in a text, except if it is jemalloc's, a name in code,
/// or the head of a table whose rows others test.
fn defaults(text: &str) -> Vec<Range<usize>> {
    const OTHERS: &[&str] =
        &["jemalloc's default", "jemalloc's `default", "::default", "| default", "_set_default"];
    let found = text.match_indices("default").filter(|(at, word)| {
        let before = &text[..at + word.len()];
        !OTHERS.iter().any(|others| before.ends_with(others))
    });
    found.map(|(at, word)| at..at + word.len()).collect()
}

fn spans(text: &str, sentence: &str) -> Vec<Range<usize>> {
    text.match_indices(sentence).map(|(at, found)| at..at + found.len()).collect()
}

fn around(text: &str, at: &Range<usize>) -> String {
    let mut from = at.start.saturating_sub(50);
    let mut to = (at.end + 50).min(text.len());
    while !text.is_char_boundary(from) {
        from -= 1;
    }
    while !text.is_char_boundary(to) {
        to += 1;
    }
    text[from..to].to_owned()
}

/// The line of a position in a flat text.
fn line_of(text: &str, flat: &str, at: usize) -> usize {
    let words = flat.get(..at).map_or(0, |before| before.matches(' ').count());
    let mut seen = 0;
    for (number, line) in text.lines().enumerate() {
        seen += line.split_whitespace().count();
        if seen > words {
            return number + 1;
        }
    }
    1
}

/// The line that has the most of a row's own words.
fn nearest(text: &str, flat: &str, says: &str) -> usize {
    let parts = says.split("{}").map(str::trim).filter(|part| !part.is_empty());
    let found = parts.filter_map(|part| Some((part.len(), flat.find(part)?))).max();
    found.map_or(1, |(_, at)| line_of(text, flat, at))
}

/// Checks one page: sentences that it lacks, amounts that no row has.
fn check_page(
    page: &str,
    text: &str,
    rows: &[Row],
    figures: &[(&str, &str, &str)],
    faults: &Faults,
) {
    let flat = flat(text);
    let mut held = Vec::new();
    for row in rows.iter().filter(|row| row.page == page) {
        let sentence = row.sentence(faults);
        let found = spans(&flat, &sentence);
        faults.expect(!found.is_empty(), || {
            let line = nearest(text, &flat, row.says);
            format!("{page}:{line}: does not say, as the code does: {sentence}")
        });
        held.extend(found);
    }
    for (_, figure, _) in figures.iter().filter(|(of, ..)| *of == page) {
        let found = spans(&flat, figure);
        faults.expect(!found.is_empty(), || format!("{page}: no longer has this figure: {figure}"));
        held.extend(found);
    }
    let shown = flat.split(RUN).next().unwrap_or_default();
    let mut looked_at = if PAGES.contains(&page) { amounts(shown) } else { Vec::new() };
    if !NOT_LOOKED_AT.contains(&page) {
        looked_at.extend(defaults(shown));
    }
    for at in looked_at {
        let is_held = held.iter().any(|span| span.start <= at.start && at.end <= span.end);
        faults.expect(is_held, || {
            let line = line_of(text, &flat, at.start);
            let around = around(&flat, &at);
            format!("{page}:{line}: no row says where this comes from: ...{around}...")
        });
    }
}

/// Checks that every amount and every default in prose is the code's.
pub(super) fn check(pages: &[&Source], code: &Code<'_>, faults: &Faults) {
    let rows = rows::all(code);
    for page in rows.iter().map(|row| row.page).chain(rows::FIGURES.iter().map(|one| one.0)) {
        let is_known = pages.iter().any(|known| known.name == page);
        faults.expect(is_known, || format!("{page}: no such page"));
    }
    for page in pages {
        check_page(&page.name, &page.text, &rows, rows::FIGURES, faults);
    }
}

#[test]
fn a_changed_constant_a_changed_sentence_and_a_new_number_are_faults() {
    let page = "docs/OPERATING.md";
    let row = |value: &str| Row { page, says: "kept for {}", values: vec![value.to_owned()] };
    let found = |text: &str, rows: &[Row], figures: &[_]| {
        let faults = Faults::default();
        check_page(page, text, rows, figures, &faults);
        faults.sorted()
    };
    let count = |text: &str, value: &str| found(text, &[row(value)], &[]).len();
    assert_eq!(count("It is kept\nfor 5 s.", "5 s"), 0);
    assert_eq!(count("It is kept for 5 s.", "6 s"), 2, "not said, and no row has 5 s");
    assert_eq!(count("It is kept for 5 s, for 7 ms.", "5 s"), 1);
    assert_eq!(count("It is kept for 5 s, or (10 %) more.", "5 s"), 1);
    assert_eq!(count("It is kept for 5 s, by default.", "5 s"), 1);
    assert_eq!(count("It is kept for 5 s.\n## Test runs\n7 ms", "5 s"), 0);
    let figures = [(page, "takes 7 ms", "measured"), (page, "gone", "measured")];
    let text = "It is kept for 5 s, takes 7 ms.";
    assert_eq!(found(text, &[row("5 s")], &figures).len(), 1, "one that is gone");
    let faults = found("One.\nIt is kept\nfor 5 s.", &[row("6 s")], &[]);
    assert!(
        faults.iter().all(|fault| fault.starts_with("docs/OPERATING.md:2: ")
            || fault.starts_with("docs/OPERATING.md:3: ")),
        "{faults:?}"
    );
}

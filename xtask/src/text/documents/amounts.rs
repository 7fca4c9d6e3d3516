//! The amounts of a page, and whether each lies in a sentence that is held against the code.
//!
//! An amount is a number with a unit behind it. A sentence is found by its own words: whoever
//! changes a constant is told which sentences speak of it, and whoever writes a new number is asked
//! where it comes from.
//!
//! Invariant: `amounts = amounts in rows + amounts in figures`, on each page.

use std::ops::Range;

use crate::rows::{self, Row};
use crate::{flat, none, pages, text};

/// Pages on which each amount is looked at. The others are measurements for the most part; of them
/// it is the defaults.
pub(crate) const PAGES: &[&str] = &[
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
    "docs/STYLE.md",
];

/// The test runs have figures of one day, which no constant holds.
const RUN: &str = "## Test runs";

const UNITS: &[&str] = &["us", "ms", "s", "min", "h", "%", "KiB", "MiB", "GiB", "KB", "MB", "GB"];

/// Where each amount of a flat text stands.
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

/// Where the word stands in a text, but where it is jemalloc's, a name in code, or the head of a
/// table whose rows others test.
fn defaults(text: &str) -> Vec<Range<usize>> {
    const OTHERS: &[&str] =
        &["jemalloc's default", "jemalloc's `default", "::default", "| default"];
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

/// What is wrong with one page: sentences that it has not, amounts that nobody speaks for.
fn faults(page: &str, text: &str, rows: &[Row], figures: &[(&str, &str, &str)]) -> Vec<String> {
    let text = flat(text);
    let mut faults = Vec::new();
    let mut held = Vec::new();
    for row in rows.iter().filter(|row| row.page == page) {
        let sentence = row.sentence();
        let found = spans(&text, &sentence);
        if found.is_empty() {
            faults.push(format!("{page} does not say, as the code does: {sentence}"));
        }
        held.extend(found);
    }
    for (_, figure, _) in figures.iter().filter(|(of, ..)| *of == page) {
        let found = spans(&text, figure);
        if found.is_empty() {
            faults.push(format!("{page} has this figure no more: {figure}"));
        }
        held.extend(found);
    }
    let shown = text.split(RUN).next().unwrap_or_default();
    let mut looked_at = if PAGES.contains(&page) { amounts(shown) } else { Vec::new() };
    if !NOT_LOOKED_AT.contains(&page) {
        looked_at.extend(defaults(shown));
    }
    for at in looked_at {
        if !held.iter().any(|span| span.start <= at.start && at.end <= span.end) {
            let around = around(&text, &at);
            faults.push(format!("{page}: no row says where this comes from: ...{around}..."));
        }
    }
    faults
}

#[test]
fn every_amount_and_every_default_in_prose_is_the_codes() {
    let (rows, mut all) = (rows::all(), Vec::new());
    let pages = pages();
    for page in rows.iter().map(|row| row.page).chain(rows::FIGURES.iter().map(|one| one.0)) {
        assert!(pages.iter().any(|known| known == page), "{page}: no such page");
    }
    for page in &pages {
        all.extend(faults(page, &text(page), &rows, rows::FIGURES));
    }
    none(&all);
}

#[test]
fn a_changed_constant_a_changed_sentence_and_a_new_number_are_faults() {
    let page = "docs/OPERATING.md";
    let row = |value: &str| Row { page, says: "kept for {}", values: vec![value.to_owned()] };
    let count = |text: &str, value: &str| faults(page, text, &[row(value)], &[]).len();
    assert_eq!(count("It is kept\nfor 5 s.", "5 s"), 0);
    assert_eq!(count("It is kept for 5 s.", "6 s"), 2, "not said, and nobody speaks for 5 s");
    assert_eq!(count("It is kept for 5 s, for 7 ms.", "5 s"), 1);
    assert_eq!(count("It is kept for 5 s, or (10 %) more.", "5 s"), 1);
    assert_eq!(count("It is kept for 5 s, by default.", "5 s"), 1);
    assert_eq!(count("It is kept for 5 s.\n## Test runs\n7 ms", "5 s"), 0);
    let figures = [(page, "takes 7 ms", "measured"), (page, "gone", "measured")];
    let text = "It is kept for 5 s, takes 7 ms.";
    assert_eq!(faults(page, text, &[row("5 s")], &figures).len(), 1, "one that is gone");
}

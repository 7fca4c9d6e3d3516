//! One thing, one word: refuses the words that `docs/GLOSSARY.md` replaces.
//!
//! Whole words of identifiers and of prose, in any case and any style of writing. Names that are
//! others' to choose pass: methods of the standard library where they are called, lints, the
//! settings of other software. `tidy: foreign word` excuses a line.
//!
//! Invariant: a word is refused wherever it is ours.

use crate::tokens::{Kind, Token, tokens};
use crate::{Faults, Source};

/// Runs of words that are not written, and what is written instead.
const WORDS: &[(&[&str], &str)] = &[
    (&["chunk"], "block (a span) or segment (what the driver gave)"), // tidy: foreign word
    (&["chunks"], "blocks or segments"),                              // tidy: foreign word
    (&["slab"], "segment; the other is jemalloc's"),                  // tidy: foreign word
    (&["slabs"], "segments; the other is jemalloc's"),                // tidy: foreign word
    (&["footprint"], "resident, committed or reserved: which"),       // tidy: foreign word
    (&["footprints"], "resident, committed or reserved: which"),      // tidy: foreign word
    (&["used", "bytes"], "live_bytes"),
    (&["in", "use"], "live"),
    (&["free", "memory"], "idle_bytes or headroom: say which"),
];

/// Units that are read both ways.
const UNITS: &[(&str, &str)] = &[("MB", "MiB"), ("GB", "GiB")];

/// Methods of the standard library; they pass where they are called.
const METHODS: &[&str] = &[
    "array_chunks",  // tidy: foreign word
    "as_chunks",     // tidy: foreign word
    "as_chunks_mut", // tidy: foreign word
    "as_rchunks",
    "chunk_by",         // tidy: foreign word
    "chunk_by_mut",     // tidy: foreign word
    "chunks",           // tidy: foreign word
    "chunks_exact",     // tidy: foreign word
    "chunks_exact_mut", // tidy: foreign word
    "chunks_mut",       // tidy: foreign word
    "utf8_chunks",      // tidy: foreign word
];

/// Settings and figures of other software, which keep their names everywhere.
const SETTINGS: &[&str] = &[
    "initial_chunk_size_bytes",        // tidy: foreign word
    "initial_growth_chunk_size_bytes", // tidy: foreign word
    "max_dead_bytes_per_chunk",        // tidy: foreign word
    "bytes_in_use",                    // tidy: foreign word
    "nonfull_slabs",                   // tidy: foreign word
    "slab_sizes",                      // tidy: foreign word
    "slab_size",                       // tidy: foreign word
    "slab_reclaimable",                // tidy: foreign word
    "slab_unreclaimable",              // tidy: foreign word
];

const EXCUSE: &str = "tidy: foreign word";

pub(crate) fn check(source: &Source, faults: &mut Faults) {
    if source.is_rust() {
        let all = tokens(&source.text);
        for at in 0..all.len() {
            check_token(source, &all, at, faults);
        }
    } else if is_read_by_people(&source.name) {
        for (at, line) in source.text.lines().enumerate() {
            if !line.contains(EXCUSE) {
                prose(line, &mut |what| faults.add(source, at + 1, what));
            }
        }
    }
}

fn is_read_by_people(name: &str) -> bool {
    let lists_the_words = ["docs/GLOSSARY.md", "docs/STYLE.md"].contains(&name);
    let document = name.starts_with("docs/") && name.ends_with(".md");
    name == "README.md" || name.starts_with("dashboards/") || (document && !lists_the_words)
}

fn check_token(source: &Source, all: &[Token<'_>], at: usize, faults: &mut Faults) {
    let token = &all[at];
    let mut report = |line: usize, what: &str| {
        let excused = [line, token.line].iter().any(|at| source.remark(*at, EXCUSE).is_some());
        if !excused {
            faults.add(source, line, what);
        }
    };
    match token.kind {
        Kind::Name => {
            let name = token.name().unwrap_or_default();
            let before = |back: usize, text| at >= back && all[at - back].is(text);
            let called = before(1, ".") || before(1, "::");
            let method = called && METHODS.contains(&name);
            let lint = before(1, "::") && before(2, "clippy");
            if !method && !lint {
                refused(name, &mut |what| report(token.line, what));
            }
        }
        Kind::Comment | Kind::Text => {
            for (below, line) in token.text.lines().enumerate() {
                prose(line, &mut |what| report(token.line + below, what));
            }
        }
        Kind::Mark | Kind::Number | Kind::Lifetime => {}
    }
}

/// Checks a line of a comment, a string or a document.
fn prose(line: &str, report: &mut dyn FnMut(&str)) {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let mut at = 0;
    while let Some(start) = line[at..].find(is_part) {
        let start = at + start;
        let end = line[start..].find(|c| !is_part(c)).map_or(line.len(), |length| start + length);
        let (before, word, after) = (&line[..start], &line[start..end], &line[end..]);
        let quoted = before.ends_with(['.', ':', '`']) || after.starts_with(['(', '`']);
        let method = METHODS.contains(&word) && (quoted || word.contains('_'));
        if !method && !before.ends_with("clippy::") {
            refused(word, report);
        }
        let alone =
            before.chars().next_back().is_none_or(|c| c.is_whitespace() || "(/".contains(c));
        if let Some((unit, instead)) = UNITS.iter().find(|(unit, _)| *unit == word && alone) {
            report(&format!("{unit}: write {instead}"));
        }
        at = end;
    }
}

/// Reports an identifier that holds a refused run of words.
fn refused(identifier: &str, report: &mut dyn FnMut(&str)) {
    if SETTINGS.contains(&identifier) {
        return;
    }
    let words = split(identifier);
    for (run, instead) in WORDS {
        if words.windows(run.len()).any(|part| part == *run) {
            report(&format!("{identifier}: write {instead}"));
        }
    }
}

/// The words of an identifier in any style, in lower case; an acronym is one word.
fn split(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let chars: Vec<char> = identifier.chars().collect();
    for (at, &c) in chars.iter().enumerate() {
        let before = at.checked_sub(1).map(|before| chars[before]);
        let lower = |c: Option<&char>| c.is_some_and(|c| c.is_lowercase());
        let after_lower = before.is_some_and(|b| b.is_lowercase() || b.is_ascii_digit());
        let acronym_ends = before.is_some_and(char::is_uppercase) && lower(chars.get(at + 1));
        if c == '_' || (c.is_uppercase() && (after_lower || acronym_ends)) {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| c != '_') {
            word.extend(c.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

#[test]
fn identifiers_fall_into_their_words() {
    for (identifier, words) in [
        ("peak_live_bytes", vec!["peak", "live", "bytes"]),
        ("liveBytes", vec!["live", "bytes"]),
        ("GPUArena2Blocks", vec!["gpu", "arena2", "blocks"]),
        ("MAX__HTTP", vec!["max", "http"]),
        ("_", vec![]),
    ] {
        assert_eq!(split(identifier), words, "{identifier}");
    }
}

//! The outer shape of a Rust file: its head, its length, its columns.
//!
//! The length of functions is clippy's (`too_many_lines`), the rest of the layout rustfmt's.
//!
//! Invariant: lines - lines of test modules <= `LINES_MAX`.

use crate::tokens::{Token, after_group, reads};
use crate::{Faults, Source};

const LINES_MAX: usize = 500;
const COLUMNS_MAX: usize = 100;

pub(crate) fn check(source: &Source, faults: &mut Faults) {
    if !source.text.starts_with("//!") {
        faults.add(source, 1, "a file begins with `//!`: what it is, in one sentence");
    }
    let lines = source.text.lines().count() - test_lines(&source.code());
    if lines > LINES_MAX {
        let what = format!("{lines} lines without tests: at most {LINES_MAX}");
        faults.add(source, lines, &what);
    }
    for (at, line) in source.text.lines().enumerate() {
        let columns = line.chars().count();
        if columns > COLUMNS_MAX && !line.contains("://") {
            let what = format!("{columns} columns: at most {COLUMNS_MAX}");
            faults.add(source, at + 1, &what);
        }
    }
}

/// The lines of the inline modules that are compiled for tests only.
fn test_lines(code: &[Token<'_>]) -> usize {
    let (mut at, mut sum) = (0, 0);
    while at < code.len() {
        let start = at;
        let mut tests = false;
        while reads(code, at, &["#", "["]) {
            let end = after_group(code, at + 1);
            tests |= is_test_only(&code[at..end]);
            at = end;
        }
        let open = if tests { module_opening(code, at) } else { None };
        if let Some(open) = open {
            at = after_group(code, open);
            sum += code[at - 1].line - code[start].line + 1;
        } else {
            at = at.max(start + 1);
        }
    }
    sum
}

/// The brace that opens the inline module declared at `at`, whatever its visibility.
fn module_opening(code: &[Token<'_>], at: usize) -> Option<usize> {
    let visible = if reads(code, at, &["pub"]) { at + 1 } else { at };
    let name = if reads(code, visible, &["("]) { after_group(code, visible) } else { visible };
    (reads(code, name, &["mod"]) && reads(code, name + 2, &["{"])).then_some(name + 2)
}

/// `#[cfg(test)]`, also among others, but not `not(test)`.
fn is_test_only(attribute: &[Token<'_>]) -> bool {
    let negated = |at: usize| at >= 2 && reads(attribute, at - 2, &["not", "("]);
    reads(attribute, 2, &["cfg"])
        && !attribute.iter().any(|token| token.is("any"))
        && (0..attribute.len()).any(|at| attribute[at].is("test") && !negated(at))
}

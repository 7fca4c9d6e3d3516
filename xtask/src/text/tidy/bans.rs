//! Names that are banned: hash tables, the environment, the machine's clock, sleeping, an async
//! runtime, ignored tests, unfinished code, and paths of a build machine.
//!
//! Clippy bans some of these by type; here they are banned by name, in every build and feature,
//! and where an attribute would silence clippy. Aliases made to get round it are not chased.
//!
//! Invariant: each name stands only in the file that wraps it.

use super::imports::{Path, paths};
use super::tokens::{Kind, Token, code, reads, tokens};
use crate::tree::{Faults, Source};

/// The only reader of the environment.
const ENVIRONMENT: &str = "src/config/env.rs";
/// The only reader of the machine's clock, in the package on the lowest layer.
const CLOCK: [&str; 2] = ["src/clock.rs", "crates/core/src/clock.rs"];
/// The only one that names an async runtime, for services that have it.
const RUNTIME: [&str; 4] = [
    "src/memory/ending.rs",
    "src/memory/runtime.rs",
    "src/service/connections/linger.rs",
    "src/service/connections/tcp.rs",
];
/// The only one that calls a subscriber.
const LOG: [&str; 2] = ["src/log.rs", "crates/core/src/log.rs"];

/// Checks a file; `is_library` if users get it.
pub(crate) fn check(source: &Source, is_library: bool, faults: &Faults) {
    let all = tokens(&source.text);
    let code = code(&all);
    let paths = paths(&code);
    for at in 0..code.len() {
        if let Some(what) = unfinished(&code, at) {
            faults.add(source, code[at].line, what);
        }
    }
    for comment in all.iter().filter(|token| token.kind == Kind::Comment) {
        let bare = comment.text.trim_start_matches(['/', '!', '*']).trim();
        if bare.strip_prefix("```").is_some_and(|info| info.contains("ignore")) {
            faults.add(source, comment.line, "an example that is not run");
        }
    }
    let is_test = source.is_under("tests") || source.name.contains("/tests/");
    if is_library || is_test {
        for path in paths.iter().filter(|p| p.segments.ends_with(&["thread", "sleep"])) {
            faults.add(source, path.line, "thread::sleep: wait on a Clock or for a condition");
        }
    }
    if is_library {
        library(source, &code, &paths, faults);
        events(source, &code, faults);
    }
}

/// Checks the rules that apply to the library alone.
fn library(source: &Source, code: &[Token<'_>], paths: &[Path<'_>], faults: &Faults) {
    for token in code {
        let name = token.name().unwrap_or_default();
        let what = match name {
            "Instant" | "SystemTime" if !CLOCK.contains(&&*source.name) => {
                "time is read through a Clock"
            }
            "getenv" | "secure_getenv" => "the environment is read in config::env only",
            "tokio" if !RUNTIME.contains(&&*source.name) => "the library names no async runtime",
            _ if name.ends_with("HashMap") || name.ends_with("HashSet") => {
                if source.remark(token.line, "tidy: fixed order").is_some_and(|r| !r.is_empty()) {
                    continue;
                }
                "order of iteration: use BTreeMap, or say why `tidy: fixed order` holds"
            }
            _ => continue,
        };
        faults.add(source, token.line, &format!("{name}: {what}"));
    }
    for path in paths.iter().filter(|p| p.segments.starts_with(&["std", "env"])) {
        // `std::env::consts` is fixed when the crate is built: nothing is read.
        let read = path.segments.get(2) != Some(&"consts");
        if read && source.name != ENVIRONMENT {
            faults.add(source, path.line, "std::env: the environment is read in config::env only");
        }
    }
}

fn events(source: &Source, code: &[Token<'_>], faults: &Faults) {
    const LEVELS: [&str; 6] = ["trace", "debug", "info", "warn", "error", "event"];
    for (at, token) in code.iter().enumerate() {
        let is_event = LEVELS.iter().any(|level| reads(code, at, &["tracing", "::", level, "!"]));
        if is_event && !LOG.contains(&&*source.name) {
            faults.add(source, token.line, "tracing: a subscriber may panic: write `log!`");
        }
    }
}

fn unfinished(code: &[Token<'_>], at: usize) -> Option<&'static str> {
    let token = &code[at];
    let within = |mark: &str| at > 0 && code[at - 1].is(mark);
    let next = |mark: &str| reads(code, at + 1, &[mark]);
    if token.is("ignore") && (within("[") || within(",")) && (next("]") || next("=") || next(")")) {
        let attribute = within("[") || code[..at].iter().rev().take(16).any(|t| t.is("cfg_attr"));
        return attribute.then_some("an ignored test tests nothing");
    }
    let unfinished = (token.is("todo") || token.is("unimplemented")) && next("!");
    unfinished.then_some("unfinished: return a typed error, or leave it out")
}

/// Folders that only a build machine has, in pieces so that this file may be checked as well.
const MACHINE: &[&[&str]] = &[&["/wo", "rk/"], &["/ro", "ot/"], &["/ho", "me/"]];

/// Checks any text for absolute paths of the machine on which it was made.
pub(crate) fn machine_paths(source: &Source, faults: &Faults) {
    for folder in MACHINE.iter().map(|pieces| pieces.concat()) {
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

//! Rust source cut into tokens: enough to tell code from comments and literals.
//!
//! It does not parse: no grammar, no macros, no types. What it must get right is where comments,
//! strings, characters and lifetimes begin and end, since every other rule stands on that.
//!
//! Invariant: the tokens in order, with the white space between them, are the text.

/// The kinds of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An identifier or keyword, `r#` included.
    Name,
    /// One punctuation character, or `::`.
    Mark,
    /// A string or character literal of any kind, quotes included.
    Text,
    /// A number.
    Number,
    /// A lifetime or loop label.
    Lifetime,
    /// A line or block comment, documentation included.
    Comment,
}

/// A piece of the source and the line on which it begins, from 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token<'a> {
    pub(crate) kind: Kind,
    pub(crate) text: &'a str,
    pub(crate) line: usize,
}

impl<'a> Token<'a> {
    /// Returns `true` if this is the given name or mark; never for text and comments.
    pub(crate) fn is(&self, text: &str) -> bool {
        matches!(self.kind, Kind::Name | Kind::Mark) && self.text == text
    }

    /// An identifier without its `r#`.
    pub(crate) fn name(&self) -> Option<&'a str> {
        let bare = self.text.strip_prefix("r#").unwrap_or(self.text);
        (self.kind == Kind::Name).then_some(bare)
    }

    /// Returns the text between the quotes of a string, escapes as written.
    pub(crate) fn content(&self) -> Option<&'a str> {
        let inside = self.text.trim_start_matches(['b', 'c', 'r']).trim_matches('#');
        let inside = inside.strip_prefix('"')?.strip_suffix('"')?;
        (self.kind == Kind::Text).then_some(inside)
    }
}

/// All tokens of a text. Never fails: what is unfinished ends with the text.
pub(crate) fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while let Some(head) = text[at..].chars().next() {
        let rest = &text[at..];
        let length = if head.is_whitespace() {
            head.len_utf8()
        } else {
            let (kind, length) = first(rest, head);
            found.push(Token { kind, text: &rest[..length], line });
            length
        };
        line += rest[..length].matches('\n').count();
        at += length;
    }
    found
}

/// The tokens without comments.
pub(crate) fn code<'a>(all: &[Token<'a>]) -> Vec<Token<'a>> {
    all.iter().filter(|token| token.kind != Kind::Comment).copied().collect()
}

/// Returns `true` if the tokens from `at` on read as `pattern`, one word or mark each.
pub(crate) fn reads(code: &[Token<'_>], at: usize, pattern: &[&str]) -> bool {
    code.len() >= at + pattern.len() && pattern.iter().zip(&code[at..]).all(|(p, t)| t.is(p))
}

/// The index after the bracket that closes the one at `open`, or the end of the code.
pub(crate) fn after_group(code: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, token) in code.iter().enumerate().skip(open) {
        if ["(", "[", "{"].iter().any(|bracket| token.is(bracket)) {
            depth += 1;
        } else if [")", "]", "}"].iter().any(|bracket| token.is(bracket)) {
            depth = depth.saturating_sub(1);
            if depth == 0 {
                return at + 1;
            }
        }
    }
    code.len()
}

/// The kind and length in bytes of the token with which `rest` begins.
fn first(rest: &str, head: char) -> (Kind, usize) {
    if rest.starts_with("//") {
        (Kind::Comment, rest.find('\n').unwrap_or(rest.len()))
    } else if rest.starts_with("/*") {
        (Kind::Comment, block_comment(rest))
    } else if let Some(length) = string(rest) {
        (Kind::Text, length)
    } else if let Some(tail) = rest.strip_prefix("b'") {
        (Kind::Text, 2 + character(tail).unwrap_or(0))
    } else if let Some(tail) = rest.strip_prefix('\'') {
        match character(tail) {
            Some(length) => (Kind::Text, 1 + length),
            None => (Kind::Lifetime, 1 + name_length(tail)),
        }
    } else if is_name_start(head) {
        (Kind::Name, name_length(rest))
    } else if head.is_ascii_digit() {
        (Kind::Number, number(rest))
    } else if rest.starts_with("::") {
        (Kind::Mark, 2)
    } else {
        (Kind::Mark, head.len_utf8())
    }
}

fn is_name_start(c: char) -> bool {
    c.is_alphabetic() || c == '_'
}

fn is_name_part(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn name_length(rest: &str) -> usize {
    let raw = rest.strip_prefix("r#").filter(|tail| tail.starts_with(is_name_start));
    let name = raw.unwrap_or(rest);
    (rest.len() - name.len()) + name.find(|c| !is_name_part(c)).unwrap_or(name.len())
}

/// Digits, suffix and fraction; the point of a range or of a method call is not part of it.
fn number(rest: &str) -> usize {
    let whole = rest.find(|c| !is_name_part(c)).unwrap_or(rest.len());
    match rest[whole..].strip_prefix('.') {
        Some(tail) if tail.starts_with(|c: char| c.is_ascii_digit()) => {
            whole + 1 + tail.find(|c| !is_name_part(c)).unwrap_or(tail.len())
        }
        _ => whole,
    }
}

/// The length of a comment that may hold others.
fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(found) = rest[at..].find(['/', '*']) {
        at += found;
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth = depth.saturating_sub(1);
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// The length of the string literal at the start, if there is one.
fn string(rest: &str) -> Option<usize> {
    let prefix = rest.find(|c| !"bcr".contains(c))?;
    if !["", "b", "c", "r", "br", "cr"].contains(&&rest[..prefix]) {
        return None;
    }
    let hashes = rest[prefix..].len() - rest[prefix..].trim_start_matches('#').len();
    let raw = rest[..prefix].ends_with('r');
    let open = prefix + hashes;
    if !rest[open..].starts_with('"') || (hashes > 0 && !raw) {
        return None;
    }
    let tail = &rest[open + 1..];
    let length = if raw {
        let end = format!("\"{}", "#".repeat(hashes));
        tail.find(&end).map_or(tail.len(), |at| at + end.len())
    } else {
        quoted(tail, '"').unwrap_or(tail.len())
    };
    Some(open + 1 + length)
}

/// The length of a character literal after its opening quote; `None` where a lifetime begins.
fn character(tail: &str) -> Option<usize> {
    if tail.starts_with('\\') {
        return quoted(tail, '\'');
    }
    let head = tail.chars().next()?;
    tail[head.len_utf8()..].starts_with('\'').then(|| head.len_utf8() + 1)
}

/// The length up to and with the closing quote, escapes skipped.
fn quoted(tail: &str, quote: char) -> Option<usize> {
    let mut chars = tail.char_indices();
    while let Some((at, c)) = chars.next() {
        if c == '\\' {
            chars.next();
        } else if c == quote {
            return Some(at + 1);
        }
    }
    None
}

#[test]
fn comments_and_literals_are_told_from_code() {
    let text = r####"
        // line: unsafe "not a string
        /* block /* nested */ still 'comment */
        let s = "a \" // no comment"; let r = r#"raw " \"#; let c = ['"', '\'', b'"', '\u{1F4A9}'];
        fn f<'a>(x: &'a str, r#type: u8) -> u8 { 'outer: loop { 1.5e3; 0..2; br##"# "##; } }
    "####;
    let all = tokens(text);
    let of = |kind| all.iter().filter(|t| t.kind == kind).map(|t| t.text).collect::<Vec<_>>();
    assert_eq!(of(Kind::Comment).len(), 2);
    assert_eq!(
        of(Kind::Text),
        [
            r#""a \" // no comment""#,
            r###"r#"raw " \"#"###,
            "'\"'",
            r"'\''",
            "b'\"'",
            r"'\u{1F4A9}'",
            r###"br##"# "##"###
        ]
    );
    assert_eq!(of(Kind::Lifetime), ["'a", "'a", "'outer"]);
    assert_eq!(of(Kind::Number), ["1.5e3", "0", "2"]);
    assert!(of(Kind::Name).contains(&"r#type"));
    assert_eq!(all.last().map(|t| t.line), Some(5));
}

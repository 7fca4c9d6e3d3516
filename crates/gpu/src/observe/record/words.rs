//! The words of one line of a recording, and the first line, which precedes all formats.
//!
//! Every field is expected at its position, with its name: no field is skipped or guessed.
//!
//! Invariant: no text causes a panic.

use super::error::{Found, LogError, LogFault};

pub(super) type Read<T> = Result<T, LogError>;

/// The rest of a line.
pub(super) struct Words<'a> {
    line: u64,
    pub(super) rest: Option<&'a str>,
}

impl<'a> Words<'a> {
    pub(super) const fn new(line: u64, text: &'a str) -> Self {
        Self { line, rest: Some(text) }
    }

    pub(super) fn fault<T>(&self, fault: LogFault) -> Read<T> {
        Err(fault.at(self.line))
    }

    pub(super) fn unexpected<T>(&self, expected: &'static str, found: &str) -> Read<T> {
        self.fault(LogFault::unexpected(expected, found))
    }

    /// Returns the next word. Words are separated by one space.
    pub(super) fn word(&mut self, expected: &'static str) -> Read<&'a str> {
        let Some(rest) = self.rest else { return self.unexpected(expected, "") };
        let (word, rest) = match rest.split_once(' ') {
            Some((word, rest)) => (word, Some(rest)),
            None => (rest, None),
        };
        self.rest = rest;
        if word.is_empty() { self.unexpected(expected, "") } else { Ok(word) }
    }

    /// Reads a word that is always the same.
    pub(super) fn mark(&mut self, mark: &'static str) -> Read<()> {
        match self.word(mark)? {
            word if word == mark => Ok(()),
            other => self.unexpected(mark, other),
        }
    }

    /// Returns the text after `key` in the next word, which must begin with `key`.
    pub(super) fn value(&mut self, key: &'static str) -> Read<&'a str> {
        let word = self.word(key)?;
        match word.strip_prefix(key) {
            Some(value) => Ok(value),
            None => self.unexpected(key, word),
        }
    }

    /// Parses a decimal number.
    pub(super) fn number(&self, field: &'static str, text: &str, most: u64) -> Read<u64> {
        decimal(field, text, most).or_else(|fault| self.fault(fault))
    }

    /// Returns `true` if an outcome follows.
    pub(super) fn has_outcome(&mut self) -> Read<bool> {
        if self.rest.is_none() {
            return Ok(false);
        }
        self.mark("->").map(|()| true)
    }

    pub(super) fn end(&self) -> Read<()> {
        match self.rest {
            None => Ok(()),
            Some(rest) => self.unexpected("the end of the line", rest),
        }
    }
}

/// Parses a decimal number of digits only.
pub(super) fn decimal(field: &'static str, text: &str, most: u64) -> Result<u64, LogFault> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = if digits { text.parse::<u64>().ok() } else { None };
    let fault = || LogFault::Number { field, most, found: Found::new(text) };
    number.filter(|&number| number <= most).ok_or_else(fault)
}

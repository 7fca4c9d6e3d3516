//! Writes JSON objects, a line each. This module knows no arena.
//!
//! Invariant: a finished line is one JSON object and one newline, whatever its texts contain.

use std::fmt::{self, Display, Write};

use crate::driver::DeviceAddress;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// A line that is being written: an object whose first key is the time. Allocates nothing while the
/// text has room.
pub(crate) struct Line<'a>(&'a mut String);

impl<'a> Line<'a> {
    /// Begins the line of an event.
    pub(crate) fn new(text: &'a mut String, at: Moment, event: &str) -> Self {
        // Writing to a string cannot fail, here and below.
        let nanos = at.since_origin().as_nanos();
        let _ = write!(text, "{{\"time_ns\":{nanos},\"event\":\"{event}\"");
        Self(text)
    }

    /// Adds a number; nothing for `None`.
    pub(crate) fn number(&mut self, key: &str, value: impl Into<Option<u64>>) -> &mut Self {
        if let Some(value) = value.into() {
            let _ = write!(self.0, ",\"{key}\":{value}");
        }
        self
    }

    /// Adds a number of bytes.
    pub(crate) fn bytes(&mut self, key: &str, value: ByteSize) -> &mut Self {
        self.number(key, value.get())
    }

    /// Adds the address of a block or of granules.
    pub(crate) fn address(&mut self, at: DeviceAddress) -> &mut Self {
        self.number("address", at.get())
    }

    /// Adds a limit; nothing for [`ByteSize::MAX`], which is none.
    pub(crate) fn limit(&mut self, key: &str, value: ByteSize) -> &mut Self {
        self.number(key, Some(value.get()).filter(|&limit| limit != u64::MAX))
    }

    /// Adds a boolean.
    pub(crate) fn flag(&mut self, key: &str, value: bool) -> &mut Self {
        let _ = write!(self.0, ",\"{key}\":{value}");
        self
    }

    /// Adds a text.
    pub(crate) fn text(&mut self, key: &str, value: impl Display) -> &mut Self {
        let _ = write!(self.0, ",\"{key}\":\"");
        let _ = write!(Escaped(self.0), "{value}");
        self.0.push('"');
        self
    }

    /// Ends the line.
    pub(crate) fn end(self) {
        self.0.push_str("}\n");
    }
}

/// Writes the inside of a JSON string.
struct Escaped<'a>(&'a mut String);

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for char in text.chars() {
            match char {
                '"' | '\\' => self.0.extend(['\\', char]),
                '\0'..' ' => write!(self.0, "\\u{:04x}", u32::from(char))?,
                _ => self.0.push(char),
            }
        }
        Ok(())
    }
}

//! The secret token for admin requests from other machines.
//!
//! It is compared in constant time, and never displayed.
//!
//! Invariant: neither `Debug` nor an error contains any of its bytes.

use std::fmt;
use std::hint::black_box;

use thiserror::Error;

/// A token of 32 to 256 printable ASCII characters, for example from `openssl rand -hex 32`.
///
/// ```
/// use lowtide::service::{AdminToken, TokenError};
///
/// assert!(AdminToken::new("0123456789abcdef0123456789abcdef").is_ok());
/// assert_eq!(AdminToken::new("hunter2").err(), Some(TokenError::TooShort { length: 7 }));
/// ```
#[derive(Clone)]
pub struct AdminToken(Box<str>);

/// The reason that a text is not a valid token. It does not contain the text.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenError {
    /// The token is short enough to be guessed.
    #[error("token of {length} bytes: expected {} or more", AdminToken::LENGTH_MIN)]
    TooShort {
        /// The length in bytes.
        length: usize,
    },
    /// The token is too long for a header.
    #[error("token of {length} bytes: expected {} or fewer", AdminToken::LENGTH_MAX)]
    TooLong {
        /// The length in bytes.
        length: usize,
    },
    /// A character that is not allowed in a header, or a space.
    #[error("byte {at} of the token is not a printable ASCII character")]
    Character {
        /// The index of the byte, from 0.
        at: usize,
    },
}

impl AdminToken {
    /// The minimum length in bytes: 128 bits of random hexadecimal digits.
    pub const LENGTH_MIN: usize = 32;
    /// The maximum length in bytes.
    pub const LENGTH_MAX: usize = 256;

    /// Creates a token from a text.
    ///
    /// # Errors
    /// [`TokenError`] if the text is too short, too long, or contains other characters than
    /// printable ASCII.
    pub fn new(text: &str) -> Result<Self, TokenError> {
        let length = text.len();
        if let Some(at) = text.bytes().position(|byte| !byte.is_ascii_graphic()) {
            return Err(TokenError::Character { at });
        }
        if length < Self::LENGTH_MIN {
            return Err(TokenError::TooShort { length });
        }
        if length > Self::LENGTH_MAX {
            return Err(TokenError::TooLong { length });
        }
        Ok(Self(text.into()))
    }

    /// Returns `true` if these bytes are the token. The time depends only on the length, which is
    /// not secret.
    pub(super) fn is(&self, given: &[u8]) -> bool {
        is_secret(self.0.as_bytes(), given)
    }
}

/// Returns `true` if these bytes are the secret. The time depends only on its length.
pub(in crate::service) fn is_secret(secret: &[u8], given: &[u8]) -> bool {
    let mut difference = u8::from(given.len() != secret.len());
    for (at, byte) in secret.iter().enumerate() {
        difference |= byte ^ given.get(at).copied().unwrap_or(0);
        difference = black_box(difference); // so that no early end is made of it
    }
    difference == 0
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken(..)")
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_bytes_are_the_token() {
        let text = "0123456789abcdef0123456789abcdef";
        let token = AdminToken::new(text).expect("long enough");
        assert!(token.is(text.as_bytes()));
        let longer = format!("{text}0");
        for wrong in ["", "0", &text[..31], &longer, "1123456789abcdef0123456789abcdef"] {
            assert!(!token.is(wrong.as_bytes()), "{wrong}");
        }
        for at in 0..text.len() {
            let mut other = text.as_bytes().to_vec();
            other[at] ^= 1;
            assert!(!token.is(&other), "byte {at}");
        }
        let zeros = "\0".repeat(32);
        assert!(!token.is(zeros.as_bytes()));
    }

    #[test]
    fn what_is_no_token_is_said_without_showing_it() {
        let secret = "correct horse battery staple and more";
        let error = AdminToken::new(secret).expect_err("spaces");
        assert_eq!(error, TokenError::Character { at: 7 });
        assert!(!error.to_string().contains("horse"));
        assert_eq!(
            AdminToken::new(&"a".repeat(31)).err(),
            Some(TokenError::TooShort { length: 31 })
        );
        assert_eq!(
            AdminToken::new(&"a".repeat(257)).err(),
            Some(TokenError::TooLong { length: 257 })
        );
        let token = AdminToken::new(&"s3cret".repeat(6)).expect("right");
        assert_eq!(format!("{token:?}"), "AdminToken(..)");
    }
}

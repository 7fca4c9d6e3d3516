//! Foundations of the lowtide crates: byte sizes, injected time, decay times, fork detection, files
//! that stay open, log events that cannot fail the caller, and synchronisation from std or loom.
//!
//! The other packages re-export [`ByteSize`], [`clock`] and [`decay`], so applications need no
//! dependency on this one. [`mod@file`], [`fork`], [`kernel`], [`rate`], [`sync`],
//! [`log!`] and [`named_enum!`] are for the lowtide packages only and may change in any release.
#![cfg_attr(docsrs, feature(doc_cfg))]

// First, so that its macros are known to all below.
#[macro_use]
mod macros;

pub mod bytes;
pub mod clock;
pub mod decay;
pub mod file;
pub mod fork;
pub mod kernel;
pub mod rate;
pub mod sync;

pub use bytes::ByteSize;

/// An error of any kind, as `Box<dyn Error>` that can cross threads.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

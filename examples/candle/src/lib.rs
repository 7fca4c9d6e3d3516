//! An embedding service with candle: text in, vectors out, and the model in memory only while it
//! is used.
//!
//! `bert` and `embedder` are the model, `api` is what clients see. `service` joins them with
//! lowtide; without the feature `lowtide` it is missing, which the bench uses to measure the same
//! service without.

pub mod api;
pub mod bert;
pub mod embedder;
#[cfg(feature = "lowtide")]
pub mod service;

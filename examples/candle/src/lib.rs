//! An embedding service with candle: text in, vectors out, and the model in memory only while it
//! is used.
//!
//! `embedder` is the model, and `api` is what clients see. `service` joins them with lowtide, and
//! `cuda` opens a GPU under a pool governor.

pub mod api;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod embedder;
pub mod service;

//! Settings and the configuration that they resolve to.
//!
//! [`Settings`] holds the values that were set in code or in the environment: each is validated,
//! and each may be unset. [`Config`] holds a value for every setting, with its [`Source`].
//! [`mod@env`] is the only reader of environment variables in the crate.
//!
//! This module starts nothing and applies nothing.
//!
//! Invariant: for every setting, `effective = environment, else code, else profile or default`.

pub mod arena;
pub mod env;
mod onnxruntime;
mod profile;
mod resolve;
mod settings;

pub use onnxruntime::{OrtPlace, OrtSetting};
pub use profile::Profile;
pub use resolve::{Config, Resolved, Source};
pub use settings::{ConfigError, DeviceBackend, DeviceChoice, Fault, Settings};

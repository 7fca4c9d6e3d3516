//! What was written, and what it means on this machine.
//!
//! Two steps, kept apart. [`Settings`] is what somebody wrote, in code or in the environment:
//! validated, but full of gaps. [`Config`] is what it means: every gap filled from the profile,
//! every value with its [`Source`]. `env` is the only reader of the environment in the crate.
//!
//! It starts nothing and applies nothing.
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

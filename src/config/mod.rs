//! Settings and the configuration that they resolve to.
//!
//! [`Settings`] holds the values that were set in code or in the environment: each is validated,
//! and each may be unset. [`Config`] holds a value for every setting, with its [`Source`].
//! `env` is the only reader of environment variables in the crate.
//!
//! Settings of device arenas, and ONNX Runtime's arena options, exist only with the feature
//! `device`. Without it their variables are known, and without effect.
//!
//! This module starts nothing and applies nothing.
//!
//! Invariant: for every setting, `effective = environment, else code, else profile or default`.

#[cfg(feature = "device")]
pub mod arena;
#[cfg_attr(not(feature = "device"), path = "no_device.rs")]
mod device;
#[doc(hidden)]
pub mod env;
mod error;
mod onnxruntime;
mod parse;
mod profile;
mod resolve;
mod resolved;
mod settings;

#[cfg(feature = "device")]
pub use device::{DeviceBackend, DeviceChoice, DeviceConfig, DeviceSettings};
pub use error::{ConfigError, Fault};
pub use lowtide_admission::ExhaustionPolicy;
pub use onnxruntime::{OrtPlace, OrtSetting};
pub use profile::Profile;
pub use resolve::Config;
pub use resolved::{Resolved, Source};
pub use settings::Settings;

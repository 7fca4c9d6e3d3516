//! Settings and the configuration that they resolve to.
//!
//! `settings` has the table: `Settings` holds the values that were set in code or in the
//! environment, and [`Config`] a value for every setting, with its [`Source`]. `env` is the only
//! reader of environment variables in the crate.
//!
//! Settings of device arenas, and ONNX Runtime's arena options, exist only with the feature
//! `device`. Without it their variables are known, and without effect.
//!
//! This module starts nothing and applies nothing.
//!
//! Invariant: for every setting, `effective = environment, else code, else profile or default`.

#[cfg(feature = "device")]
pub mod arena;
#[cfg(feature = "device")]
mod device;
#[doc(hidden)]
pub mod env;
mod error;
mod profile;
mod settings;
mod value;

#[cfg(feature = "device")]
pub use device::{DeviceBackend, DeviceChoice};
pub(crate) use error::debug_is_message;
pub use error::{ConfigError, Fault};
pub use lowtide_admission::{AdmissionMode, ExhaustionPolicy};
pub use profile::Profile;
pub(crate) use settings::Settings;
pub use settings::{Config, Resolved, Source};
pub(crate) use settings::{setter, setters};

//! Values of the public interface: configuration, errors, figures.

pub(crate) mod compact;
pub(crate) mod config;
pub(crate) mod costs;
pub(crate) mod error;
pub(crate) mod region;
pub(crate) mod shortage;
pub(crate) mod sleep;
pub(crate) mod snapshot;

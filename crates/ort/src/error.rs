//! The errors of the crate. None of them ends the service.

use std::fmt;
use std::path::PathBuf;

use lowtide::BoxError;
use lowtide::admission::{LoadFailure, ResourceError};
use thiserror::Error;

/// The oldest release of ONNX Runtime that is accepted: the first with `GetStats` and
/// `AllocOnStream` of an allocator.
pub(crate) const OLDEST_MINOR: u32 = ort::MINOR_VERSION;

/// The reason that ONNX Runtime cannot be opened or a session cannot be loaded.
///
/// [`OrtError::of`] finds the error of a load in that of an acquire.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OrtError {
    /// The shared library cannot be opened.
    #[error(
        "cannot open {}: {cause}: expected the shared library of ONNX Runtime 1.{OLDEST_MINOR} or \
         later",
        path.display()
    )]
    Library {
        /// The path.
        path: PathBuf,
        /// The reason.
        cause: String,
    },
    /// The shared library is too old.
    #[error(
        "{} is ONNX Runtime {found}: expected 1.{OLDEST_MINOR} or later",
        path.display()
    )]
    Version {
        /// The path.
        path: PathBuf,
        /// Its version.
        found: String,
    },
    /// ONNX Runtime was opened before: it has one environment for each process.
    #[error("cannot open {}: ONNX Runtime is already open in this process", path.display())]
    AlreadyOpen {
        /// The path of the second attempt.
        path: PathBuf,
    },
    /// The arena for the memory of runs cannot be opened.
    #[error("cannot open the arena of ONNX Runtime: {0}")]
    Arena(#[source] BoxError),
    /// The arena for the memory of runs is on a GPU.
    #[error("the arena is in device memory: expected one in host memory")]
    DeviceMemory,
    /// The arena for a CUDA device is in host memory.
    #[error("the arena {arena:?} is in host memory: expected one in CUDA memory")]
    HostMemory {
        /// The name of the arena.
        arena: String,
    },
    /// The device has an allocator: of an earlier call, or of a provider library.
    #[error(
        "CUDA device {device} has an allocator in ONNX Runtime: expected one arena for each \
         device, registered before a provider library"
    )]
    Registered {
        /// The number of the device.
        device: i32,
    },
    /// ONNX Runtime reports an error at the start.
    #[error("cannot {act}: {cause}")]
    Runtime {
        /// The attempted call.
        act: &'static str,
        /// ONNX Runtime's message.
        cause: String,
    },
    /// A setting was accepted and has no effect.
    #[error("ONNX Runtime {version} ignores {key}={value}: observed {observed}")]
    NotInForce {
        /// The name of the setting.
        key: &'static str,
        /// The value that was set.
        value: String,
        /// The behaviour that contradicts it.
        observed: String,
        /// The version of ONNX Runtime.
        version: String,
    },
    /// The file of a model cannot be read.
    #[error("cannot read the model {}: {cause}: expected an ONNX file", path.display())]
    ModelFile {
        /// The path.
        path: PathBuf,
        /// The reason.
        cause: std::io::Error,
    },
    /// A file with weights of the model is missing or too short.
    #[error(
        "cannot load the model {}: {cause}: expected its external data in {}",
        path.display(), path.parent().unwrap_or(path).display()
    )]
    ExternalData {
        /// The path of the model.
        path: PathBuf,
        /// ONNX Runtime's message.
        cause: String,
    },
    /// ONNX Runtime cannot load the model.
    #[error("cannot load the model {}: {cause}: expected an ONNX model", path.display())]
    Model {
        /// The path of the model.
        path: PathBuf,
        /// ONNX Runtime's message.
        cause: String,
    },
}

impl OrtError {
    /// Returns the error of the load that made an acquire fail.
    #[must_use]
    pub fn of(error: &ResourceError) -> Option<&Self> {
        let ResourceError::Load { failure: LoadFailure::Failed(source), .. } = error else {
            return None;
        };
        source.downcast_ref()
    }
}
/// Returns an error of ONNX Runtime at the start.
pub(crate) fn failed(act: &'static str) -> impl Fn(ort::Error) -> OrtError {
    move |error| OrtError::Runtime { act, cause: text(&error) }
}

/// Returns the message of an error, on one line. A builder's error holds the builder, which is not
/// `Send`.
pub(crate) fn text(error: &impl fmt::Display) -> String {
    let text = error.to_string();
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join(" ")
}

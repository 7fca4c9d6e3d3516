//! Why a driver did not do what it was asked.
//!
//! Invariant: an error with a number keeps the number.

use thiserror::Error;

use super::DeviceAddress;
use crate::bytes::ByteSize;

/// Why a driver did not do what it was asked.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DriverError {
    /// There is no more memory or address space of the kind asked for.
    #[error("{call}: no more memory or address space for {requested}")]
    OutOfMemory {
        /// The system's or the device's call.
        call: &'static str,
        /// What was asked for.
        requested: ByteSize,
    },
    /// The process may not lock that much memory. The limit counts all that it has locked, whoever
    /// locked it.
    #[error("{requested} cannot be page-locked: the process may lock {limit} in all (ulimit -l)")]
    LockLimit {
        /// What was asked for.
        requested: ByteSize,
        /// `RLIMIT_MEMLOCK`.
        limit: ByteSize,
    },
    /// This driver does not offer it.
    #[error("the driver does not offer {what}")]
    Unsupported {
        /// What is missing.
        what: &'static str,
    },
    /// The system or the device refused the call.
    #[error("{call} failed: {message} (code {code})")]
    Refused {
        /// The system's or the device's call.
        call: &'static str,
        /// `errno`, or the number of a CUDA result.
        code: i64,
        /// What that number means.
        message: String,
    },
    /// A copy between parts that overlap, or of no memory of this driver.
    #[error("a copy of {size} from {from} to {to}: the parts must be apart")]
    Overlap {
        /// Where the bytes are.
        from: DeviceAddress,
        /// Where they were to go.
        to: DeviceAddress,
        /// How many.
        size: ByteSize,
    },
    /// A range that is empty, or not made of whole granules.
    #[error("{size} at {at} is not a number of whole granules of {granularity}")]
    Misaligned {
        /// Where the range begins.
        at: DeviceAddress,
        /// How long it is.
        size: ByteSize,
        /// What both must be multiples of.
        granularity: ByteSize,
    },
}

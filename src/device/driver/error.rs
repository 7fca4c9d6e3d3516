//! Why a driver did not do what it was asked, and what the numbers of CUDA's results mean.
//!
//! It knows the results that this crate meets, by number, and calls nothing: a number newer than
//! the table is still an error with its number.
//!
//! Invariant: `DriverError::of_cuda(_, code, _).code()` is `code`, or `None` where the variant
//! stands for that one number.

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
    /// Work on the device touched an address with no memory behind it (CUDA result 700). Every
    /// call of the context fails from then on: its memory is lost, and the process must start anew
    /// or reset the device.
    #[error("{call}: work on the device touched an address with no memory behind it (code 700)")]
    IllegalAddress {
        /// The call that said so; the work itself was started earlier.
        call: &'static str,
    },
    /// A wait for all work of the device was not made, because background work does not make it:
    /// it would spoil every capture of a graph in the context.
    #[error(
        "{call} was not called: background work does not wait for the whole device; expected \
         memory that is used on lanes, or a call of the program such as `DeviceArena::purge`"
    )]
    Background {
        /// The device's call.
        call: &'static str,
    },
    /// The context is gone, or a fault has poisoned it: every call fails from now on.
    #[error("{call}: the context is lost: {message} (code {code})")]
    ContextLost {
        /// The device's call.
        call: &'static str,
        /// The number of a CUDA result.
        code: i64,
        /// What that number means.
        message: String,
    },
}

impl DriverError {
    /// The error for a result of the CUDA driver other than success: memory that has run out (2),
    /// what is not offered (801), an illegal address (700), a context that is lost, or a refusal.
    #[must_use]
    pub fn of_cuda(call: &'static str, code: u32, requested: ByteSize) -> Self {
        let message = || cuda_result_name(code).to_owned();
        match code {
            OUT_OF_MEMORY => Self::OutOfMemory { call, requested },
            NOT_SUPPORTED => Self::Unsupported { what: call },
            ILLEGAL_ADDRESS => Self::IllegalAddress { call },
            _ if is_sticky(code) => {
                Self::ContextLost { call, code: i64::from(code), message: message() }
            }
            _ => Self::Refused { call, code: i64::from(code), message: message() },
        }
    }

    /// Whether every later call of the context fails as well: nothing can be freed any more, and
    /// trying again helps nothing.
    #[must_use]
    pub const fn is_context_lost(&self) -> bool {
        matches!(self, Self::IllegalAddress { .. } | Self::ContextLost { .. })
    }

    /// Whether memory or address space has run out: less may be there, or more later.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }

    /// The number of the CUDA result, or `errno`, where there is one.
    #[must_use]
    pub fn code(&self) -> Option<i64> {
        match self {
            Self::Refused { code, .. } | Self::ContextLost { code, .. } => Some(*code),
            Self::IllegalAddress { .. } => Some(i64::from(ILLEGAL_ADDRESS)),
            _ => None,
        }
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`
const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_ILLEGAL_ADDRESS`
const ILLEGAL_ADDRESS: u32 = 700;
/// `CUDA_ERROR_NOT_SUPPORTED`
const NOT_SUPPORTED: u32 = 801;

/// Results of cuda.h: number, name, and whether the context is lost with it. cuda.h says of those
/// "the context cannot be used" or "leaves the process in an inconsistent state and any further
/// CUDA work will return the same error".
const RESULTS: &[(u32, &str, bool)] = &[
    (1, "CUDA_ERROR_INVALID_VALUE", false),
    (OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", false),
    (3, "CUDA_ERROR_NOT_INITIALIZED", false),
    (4, "CUDA_ERROR_DEINITIALIZED", true),
    (100, "CUDA_ERROR_NO_DEVICE", false),
    (101, "CUDA_ERROR_INVALID_DEVICE", false),
    (201, "CUDA_ERROR_INVALID_CONTEXT", false),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE", true),
    (220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", true),
    (226, "CUDA_ERROR_CONTAINED", true),
    (400, "CUDA_ERROR_INVALID_HANDLE", false),
    (401, "CUDA_ERROR_ILLEGAL_STATE", false),
    (600, "CUDA_ERROR_NOT_READY", false),
    (ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", true),
    (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", false),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT", true),
    (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", true),
    (710, "CUDA_ERROR_ASSERT", true),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR", true),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", true),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS", true),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", true),
    (718, "CUDA_ERROR_INVALID_PC", true),
    (719, "CUDA_ERROR_LAUNCH_FAILED", true),
    (800, "CUDA_ERROR_NOT_PERMITTED", false),
    (NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", false),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", false),
    (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", false),
    (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", false),
    (907, "CUDA_ERROR_CAPTURED_EVENT", false),
    (999, "CUDA_ERROR_UNKNOWN", false),
];

/// The name of a CUDA result in cuda.h, or "unnamed" where this table does not have it.
fn cuda_result_name(code: u32) -> &'static str {
    RESULTS.iter().find(|row| row.0 == code).map_or("unnamed", |row| row.1)
}

/// Whether a CUDA result means that the context is lost.
fn is_sticky(code: u32) -> bool {
    RESULTS.iter().any(|row| row.0 == code && row.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_result_becomes_the_variant_that_callers_tell_apart() {
        let of = |code| DriverError::of_cuda("cuMemMap", code, ByteSize::mib(2));
        let requested = ByteSize::mib(2);
        assert_eq!(of(2), DriverError::OutOfMemory { call: "cuMemMap", requested });
        assert_eq!(of(801), DriverError::Unsupported { what: "cuMemMap" });
        assert_eq!(of(700), DriverError::IllegalAddress { call: "cuMemMap" });
        assert_eq!(
            of(719).to_string(),
            "cuMemMap: the context is lost: CUDA_ERROR_LAUNCH_FAILED (code 719)"
        );
        assert_eq!(of(1).to_string(), "cuMemMap failed: CUDA_ERROR_INVALID_VALUE (code 1)");
        assert_eq!(of(4242).to_string(), "cuMemMap failed: unnamed (code 4242)");
    }

    #[test]
    fn an_error_says_whether_the_context_is_lost_and_keeps_its_number() {
        for (code, _, sticky) in RESULTS {
            let error = DriverError::of_cuda("cuCtxSynchronize", *code, ByteSize::ZERO);
            assert_eq!(error.is_context_lost(), *sticky, "{error}");
            let stands_for_it = [OUT_OF_MEMORY, NOT_SUPPORTED].contains(code);
            assert_eq!(error.code(), (!stands_for_it).then_some(i64::from(*code)), "{error}");
        }
    }

    #[test]
    fn the_table_is_in_order_of_the_numbers() {
        assert!(RESULTS.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}

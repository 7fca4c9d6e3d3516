//! Driver errors, and the meaning of CUDA result codes.
//!
//! This module knows which results mean that the context is lost, and makes no calls: a driver
//! looks up the names of codes itself, and an error without a name still has its code.
//!
//! Invariant: `DriverError::of_cuda(_, code, _).code()` is `code`, or `None` if the variant stands
//! for that one code.

use thiserror::Error;

use super::DeviceAddress;
use lowtide_core::bytes::ByteSize;

/// An error of a driver call.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DriverError {
    /// There is not enough memory or address space of the requested kind.
    #[error("{call}: out of memory or address space for {requested}")]
    OutOfMemory {
        /// The system or device call.
        call: &'static str,
        /// The requested size.
        requested: ByteSize,
    },
    /// The process may not lock that much memory. The limit applies to all memory that the process
    /// has locked.
    #[error("cannot page-lock {requested}: the process limit is {limit} in total (ulimit -l)")]
    LockLimit {
        /// The requested size.
        requested: ByteSize,
        /// The limit, `RLIMIT_MEMLOCK`.
        limit: ByteSize,
    },
    /// The driver does not support the feature.
    #[error("the driver does not support {what}")]
    Unsupported {
        /// The missing feature.
        what: &'static str,
    },
    /// The system or the device refused the call.
    #[error("{call} failed: {message} (code {code})")]
    Refused {
        /// The system or device call.
        call: &'static str,
        /// `errno`, or a CUDA result code.
        code: i64,
        /// The meaning of the code.
        message: String,
    },
    /// A copy between overlapping parts, or outside this driver's memory.
    #[error(
        "cannot copy {size} from {from} to {to}: the parts overlap or lie outside the driver's \
        memory"
    )]
    Overlap {
        /// The source address.
        from: DeviceAddress,
        /// The destination address.
        to: DeviceAddress,
        /// The number of bytes.
        size: ByteSize,
    },
    /// A range is empty, or not made of whole granules.
    #[error("invalid range of {size} at {at}: expected whole granules of {granularity}")]
    Misaligned {
        /// The start of the range.
        at: DeviceAddress,
        /// The size of the range.
        size: ByteSize,
        /// The unit of addresses and sizes.
        granularity: ByteSize,
    },
    /// Device work accessed an address without memory (CUDA result 700). Every later call
    /// in the context fails: its memory is lost, and the process must be restarted or the device
    /// reset.
    #[error(
        "{call}: device work accessed an address without memory: the context is lost, \
         restart the process (code 700)"
    )]
    IllegalAddress {
        /// The call that reported the error; the work itself was started earlier.
        call: &'static str,
    },
    /// Background work needed to wait for all work of the device and did not, because that wait
    /// would invalidate every graph capture in the context.
    #[error(
        "{call} was not called: background work does not wait for the whole device; use the memory \
         on lanes, or call a foreground method such as `DeviceArena::purge`"
    )]
    Background {
        /// The device call.
        call: &'static str,
    },
    /// The context was destroyed, or a device fault has made it unusable. Every later call fails.
    #[error("{call}: the CUDA context is lost: {message} (code {code})")]
    ContextLost {
        /// The device call.
        call: &'static str,
        /// The CUDA result code.
        code: i64,
        /// The meaning of the code.
        message: String,
    },
}

impl DriverError {
    /// Converts a CUDA result code other than success: out of memory (2, or what WSL answers
    /// instead), not supported (801), an illegal address (700), a lost context, or a refusal. For
    /// codes about the machine's setup
    /// (34, 46, 802, 803) the message contains advice for the operator.
    #[must_use]
    pub fn of_cuda(call: &'static str, code: u32, requested: ByteSize) -> Self {
        Self::of_cuda_named(call, code, requested, || None)
    }

    /// Like [`DriverError::of_cuda`], with the name that the driver has for the result.
    pub(super) fn of_cuda_named(
        call: &'static str,
        code: u32,
        requested: ByteSize,
        name: impl FnOnce() -> Option<String>,
    ) -> Self {
        let message = || {
            let name = name().unwrap_or_else(|| cuda_result_name(code).to_owned());
            described(code, name)
        };
        match code {
            OUT_OF_MEMORY => Self::OutOfMemory { call, requested },
            _ if SHORTAGE.contains(&code) && TAKING.contains(&call) => {
                Self::OutOfMemory { call, requested }
            }
            NOT_SUPPORTED => Self::Unsupported { what: call },
            ILLEGAL_ADDRESS => Self::IllegalAddress { call },
            _ if is_sticky(code) => {
                Self::ContextLost { call, code: i64::from(code), message: message() }
            }
            _ => Self::Refused { call, code: i64::from(code), message: message() },
        }
    }

    /// Returns `true` if every later call in the context fails as well. Nothing can be freed then,
    /// and a retry does not help.
    #[must_use]
    pub const fn is_context_lost(&self) -> bool {
        matches!(self, Self::IllegalAddress { .. } | Self::ContextLost { .. })
    }

    /// Returns `true` if memory or address space has run out. A smaller request or a later retry
    /// may succeed.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }

    /// Returns the CUDA result code or `errno`, if there is one.
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
/// `CUDA_ERROR_STUB_LIBRARY`
const STUB_LIBRARY: u32 = 34;
/// `CUDA_ERROR_ILLEGAL_ADDRESS`
const ILLEGAL_ADDRESS: u32 = 700;
/// `CUDA_ERROR_NOT_SUPPORTED`
const NOT_SUPPORTED: u32 = 801;

/// Results by which WSL answers a call that takes memory if there is none: `MAP_FAILED`,
/// `OPERATING_SYSTEM` and `NOT_READY`.
const SHORTAGE: [u32; 3] = [205, 304, 600];

/// The calls that take memory for a mapping.
const TAKING: [&str; 3] = ["cuMemCreate", "cuMemMap", "cuMemSetAccess"];

/// Results of cuda.h that mean that the context is lost: "the context cannot be used anymore",
/// "leaves the process in an inconsistent state and any further CUDA work will return the same
/// error", or the context no longer exists. In ascending order.
const STICKY: &[u32] = &[
    4,   // DEINITIALIZED
    214, // ECC_UNCORRECTABLE
    220, // NVLINK_UNCORRECTABLE
    226, // CONTAINED
    ILLEGAL_ADDRESS,
    702, // LAUNCH_TIMEOUT
    709, // CONTEXT_IS_DESTROYED
    710, // ASSERT
    714, // HARDWARE_STACK_ERROR
    715, // ILLEGAL_INSTRUCTION
    716, // MISALIGNED_ADDRESS
    717, // INVALID_ADDRESS_SPACE
    718, // INVALID_PC
    719, // LAUNCH_FAILED
    721, // TENSOR_MEMORY_LEAK
    810, // MPS_CLIENT_TERMINATED
    911, // EXTERNAL_DEVICE
];

/// The names in cuda.h of results for which the driver is not queried: those that the simulation
/// returns and those that this crate treats specially. In ascending order.
const NAMES: &[(u32, &str)] = &[
    (1, "CUDA_ERROR_INVALID_VALUE"),
    (OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"),
    (3, "CUDA_ERROR_NOT_INITIALIZED"),
    (4, "CUDA_ERROR_DEINITIALIZED"),
    (STUB_LIBRARY, "CUDA_ERROR_STUB_LIBRARY"),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    (100, "CUDA_ERROR_NO_DEVICE"),
    (101, "CUDA_ERROR_INVALID_DEVICE"),
    (201, "CUDA_ERROR_INVALID_CONTEXT"),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE"),
    (220, "CUDA_ERROR_NVLINK_UNCORRECTABLE"),
    (226, "CUDA_ERROR_CONTAINED"),
    (400, "CUDA_ERROR_INVALID_HANDLE"),
    (401, "CUDA_ERROR_ILLEGAL_STATE"),
    (600, "CUDA_ERROR_NOT_READY"),
    (ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT"),
    (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"),
    (710, "CUDA_ERROR_ASSERT"),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR"),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS"),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE"),
    (718, "CUDA_ERROR_INVALID_PC"),
    (719, "CUDA_ERROR_LAUNCH_FAILED"),
    (721, "CUDA_ERROR_TENSOR_MEMORY_LEAK"),
    (800, "CUDA_ERROR_NOT_PERMITTED"),
    (NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY"),
    (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    (810, "CUDA_ERROR_MPS_CLIENT_TERMINATED"),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
    (906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
    (907, "CUDA_ERROR_CAPTURED_EVENT"),
    (911, "CUDA_ERROR_EXTERNAL_DEVICE"),
    (999, "CUDA_ERROR_UNKNOWN"),
];

/// Returns the name of a CUDA result in cuda.h, or "unnamed" if this table does not have it.
fn cuda_result_name(code: u32) -> &'static str {
    NAMES.iter().find(|row| row.0 == code).map_or("unnamed", |row| row.1)
}

/// Returns `true` if a CUDA result means that the context is lost.
fn is_sticky(code: u32) -> bool {
    STICKY.binary_search(&code).is_ok()
}

/// Returns advice for the operator if a CUDA result is about the machine's setup.
pub(super) const fn advice(code: u32) -> Option<&'static str> {
    Some(match code {
        STUB_LIBRARY => {
            "a CUDA toolkit stub was loaded instead of the driver library: remove its folder from \
             the library path (LD_LIBRARY_PATH), and check that the driver's libcuda.so.1 is found"
        }
        46 => {
            "another process uses the device exclusively, or its compute mode forbids contexts: \
             see `nvidia-smi -q -d COMPUTE`"
        }
        802 => {
            "the system is not ready: on machines with NVSwitch, check that nvidia-fabricmanager \
             is running and matches the driver version"
        }
        803 => {
            "the driver library and the kernel module have different versions: reboot or reload \
             the module; in a container, mount the driver library of the host"
        }
        _ => return None,
    })
}

/// Returns a name with advice for the operator.
fn described(code: u32, name: String) -> String {
    advice(code).map_or_else(|| name.clone(), |advice| format!("{name}: {advice}"))
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
            "cuMemMap: the CUDA context is lost: CUDA_ERROR_LAUNCH_FAILED (code 719)"
        );
        assert_eq!(of(1).to_string(), "cuMemMap failed: CUDA_ERROR_INVALID_VALUE (code 1)");
        assert_eq!(of(4242).to_string(), "cuMemMap failed: unnamed (code 4242)");
    }

    /// Reported in WSL #41176.
    #[test]
    fn what_wsl_answers_for_want_of_memory_is_a_shortage_of_the_calls_that_take_some() {
        let of = |call, code| DriverError::of_cuda(call, code, ByteSize::mib(2));
        for code in SHORTAGE {
            for call in TAKING {
                assert!(of(call, code).is_out_of_memory(), "{call} {code}");
            }
            for call in ["cuEventQuery", "cuStreamQuery", "cuMemUnmap", "cuMemRelease"] {
                assert_eq!(of(call, code).code(), Some(i64::from(code)), "{call}");
            }
        }
    }

    #[test]
    fn an_error_says_whether_the_context_is_lost_and_keeps_its_number() {
        for (code, _) in NAMES {
            let error = DriverError::of_cuda("cuCtxSynchronize", *code, ByteSize::ZERO);
            assert_eq!(error.is_context_lost(), STICKY.contains(code), "{error}");
            let stands_for_it = [OUT_OF_MEMORY, NOT_SUPPORTED].contains(code);
            assert_eq!(error.code(), (!stands_for_it).then_some(i64::from(*code)), "{error}");
        }
    }

    #[test]
    fn the_tables_are_in_order_of_the_numbers() {
        assert!(NAMES.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(STICKY.windows(2).all(|pair| pair[0] < pair[1]));
    }

    /// Regression test: 721 and later codes counted as errors of one call, so calls were retried
    /// forever.
    #[test]
    fn results_that_end_the_context_by_the_header_are_known_as_such() {
        let lost = |code| DriverError::of_cuda("cuEventQuery", code, ByteSize::ZERO);
        for code in [4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719] {
            assert!(lost(code).is_context_lost(), "{code}");
        }
        for code in [721, 810, 911] {
            assert!(lost(code).is_context_lost(), "{code}");
        }
        for code in [1, 2, 34, 46, 100, 600, 701, 720, 801, 802, 803, 900, 901, 907, 909, 999] {
            assert!(!lost(code).is_context_lost(), "{code}");
        }
    }

    #[test]
    fn what_is_wrong_with_the_machine_says_what_an_operator_can_do() {
        for (code, part) in [
            (34, "LD_LIBRARY_PATH"),
            (46, "nvidia-smi"),
            (802, "nvidia-fabricmanager"),
            (803, "different versions"),
        ] {
            let error = DriverError::of_cuda("cuInit", code, ByteSize::ZERO);
            let (text, end) = (error.to_string(), format!("(code {code})"));
            assert!(text.contains(part) && text.ends_with(&end), "{text}");
        }
    }
}

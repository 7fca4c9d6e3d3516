//! Errors of drivers and of opening them, and the meaning of CUDA result codes.
//!
//! This module knows which results mean that the context is lost, and makes no calls: a driver
//! looks up the names of codes itself, and an error without a name still has its code. An error of
//! opening a device names the request and the available choices.
//!
//! Invariant: `DriverError::of_cuda(_, code, _).code()` is `code`, or `None` if the variant stands
//! for that one code.

use thiserror::Error;

use super::{Backend, DeviceAddress, DeviceUuid};
use lowtide_core::bytes::ByteSize;

/// The result of a driver call.
pub(crate) type DriverResult<T = ()> = Result<T, DriverError>;

/// An error of a driver: of a call, of opening a device, or of a value that names one.
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
        /// `errno`, or a result code of CUDA or NVML.
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
    /// The loader did not find the CUDA driver library, or could not load it.
    #[error("no CUDA driver library found (tried {} names): {error}", tried.len())]
    NoLibrary {
        /// The names that were tried, in order.
        tried: &'static [&'static str],
        /// The loader's message for the last name.
        error: String,
    },
    /// The loader did not find NVML, or could not load it.
    #[error(
        "cannot load NVML: {error}; expected {library} of the NVIDIA driver (in a container: \
         NVIDIA_DRIVER_CAPABILITIES with `utility`)"
    )]
    NoNvml {
        /// The library's name.
        library: &'static str,
        /// The loader's message.
        error: String,
    },
    /// A library lacks a function: it is not an NVIDIA driver's, or too old for a backend.
    #[error("the driver library lacks the function {function}")]
    NoFunction {
        /// The function's name.
        function: &'static str,
    },
    /// There is a driver, but no device, or none visible to this process.
    #[error("the CUDA driver is loaded, but no device is visible to this process")]
    NoDevice,
    /// No device has this ordinal.
    #[error(
        "no CUDA device {ordinal}: expected a number below {count}, the number of visible \
        devices"
    )]
    NoSuchDevice {
        /// The requested ordinal.
        ordinal: u32,
        /// The number of devices.
        count: u32,
    },
    /// No device has this UUID.
    #[error("no CUDA device {uuid}: visible devices are {}", list(.known))]
    NoSuchUuid {
        /// The requested UUID.
        uuid: DeviceUuid,
        /// The UUIDs of the visible devices.
        known: Vec<DeviceUuid>,
    },
    /// NVML has no device with this UUID, neither as a GPU nor as a MIG instance, or hides it from
    /// this process.
    #[error("NVML knows no device {uuid}: expected the UUID of a visible GPU or MIG instance")]
    UnknownToNvml {
        /// The UUID.
        uuid: DeviceUuid,
    },
    /// A text is not the UUID of a device.
    #[error("invalid device UUID {text:?}: expected GPU- or MIG- and 32 hexadecimal digits")]
    InvalidUuid {
        /// The text that was parsed.
        text: String,
    },
    /// No backend works on this device, or not the requested one.
    #[error("cannot allocate on CUDA device {device}: {}", causes(.skipped))]
    NoBackend {
        /// The device's ordinal.
        device: u32,
        /// The backends that were tried, in order, and the cause for each.
        skipped: Vec<(Backend, Self)>,
    },
    /// The options do not fit the backend.
    #[error("the options need {expected}")]
    WrongBackend {
        /// The expected backend, and the option that needs it.
        expected: &'static str,
    },
    /// The memory did not hold the data written to it.
    #[error("the memory did not hold the data written to it")]
    Contents,
    /// There are fewer addresses than the device's memory needs, and another backend may do
    /// without.
    #[error("cannot reserve {needed} of addresses for each of two regions")]
    Addresses {
        /// The addresses of a region: the device's memory and an eighth.
        needed: ByteSize,
    },
    /// The requested handle size is invalid.
    #[error("invalid handle size {requested}: expected a power of two of at least {granularity}")]
    HandleSize {
        /// The requested size.
        requested: ByteSize,
        /// The smallest size that the device supports.
        granularity: ByteSize,
    },
    /// The pool limit is smaller than one allocation unit.
    #[error("invalid pool limit {requested}: expected at least {unit}, the allocation unit")]
    PoolLimit {
        /// The requested limit.
        requested: ByteSize,
        /// The smallest unit that the pool allocates.
        unit: ByteSize,
    },
    /// The driver does not support pool limits.
    #[error(
        "a pool limit of {limit} needs a driver for CUDA 12.2 or newer: found one for CUDA \
         {}.{}",
        driver_version / 1000, driver_version % 1000 / 10
    )]
    NoPoolLimit {
        /// The requested limit.
        limit: ByteSize,
        /// The driver's CUDA version: 1000 x major + 10 x minor.
        driver_version: u32,
    },
    /// A device of `CudaOptions::peers` cannot access the memory.
    #[error(
        "CUDA device {peer} cannot access memory of CUDA device {device}: expected a peer of it"
    )]
    NoPeerAccess {
        /// The ordinal of the device with the memory.
        device: u32,
        /// The ordinal of the other device.
        peer: u32,
    },
    /// Network cards cannot access virtual memory of the device (`CudaOptions::rdma`).
    #[error("CUDA device {device} does not support GPUDirect RDMA with virtual memory")]
    NoRdma {
        /// The device's ordinal.
        device: u32,
    },
    /// The device already has a pool governor in this process.
    #[error("CUDA device {device} already has a pool governor in this process")]
    Governed {
        /// The device's ordinal.
        device: u32,
    },
    /// The device refused to create the pool of a governor, or to make it the current one.
    #[error("cannot replace the current pool of CUDA device {device}: {cause}")]
    CurrentPool {
        /// The device's ordinal.
        device: u32,
        /// The cause.
        #[source]
        cause: Box<Self>,
    },
    /// This process was forked from the one that opened the driver or the library.
    #[error("the driver was opened before a fork: expected the process that opened it")]
    Forked,
}

fn list(items: &[DeviceUuid]) -> String {
    let names: Vec<_> = items.iter().map(ToString::to_string).collect();
    names.join(", ")
}

fn causes(skipped: &[(Backend, DriverError)]) -> String {
    let causes: Vec<_> =
        skipped.iter().map(|(backend, cause)| format!("{backend}: {cause}")).collect();
    causes.join("; ")
}

impl DriverError {
    /// Converts a CUDA result code other than success: out of memory (2, or what WSL answers
    /// instead), no device (100), not supported (801), an illegal address (700), a lost context, or
    /// a refusal. For codes about the machine's setup (34, 46, 802, 803) the message contains
    /// advice for the operator.
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
            let name = name().unwrap_or_else(|| "unnamed".to_owned());
            advice(code).map_or_else(|| name.clone(), |advice| format!("{name}: {advice}"))
        };
        match code {
            OUT_OF_MEMORY => Self::OutOfMemory { call, requested },
            _ if SHORTAGE.contains(&code) && TAKING.contains(&call) => {
                Self::OutOfMemory { call, requested }
            }
            NO_DEVICE if FINDING.contains(&call) => Self::NoDevice,
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

    /// Returns the error with this size if memory has run out: that of the whole request, of which
    /// the call was a part.
    #[cfg(feature = "cuda")]
    pub(super) fn sized(self, requested: ByteSize) -> Self {
        let Self::OutOfMemory { call, .. } = self else { return self };
        Self::OutOfMemory { call, requested }
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
pub(super) const STUB_LIBRARY: u32 = 34;
/// `CUDA_ERROR_NO_DEVICE`
const NO_DEVICE: u32 = 100;
/// The calls whose result 100 means that there is no device; of an open one it is a refusal.
const FINDING: [&str; 2] = ["cuInit", "cuDeviceGetCount"];
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

/// Returns `true` if a CUDA result means that the context is lost.
fn is_sticky(code: u32) -> bool {
    STICKY.binary_search(&code).is_ok()
}

/// Returns advice for the operator if a CUDA result is about the machine's setup.
const fn advice(code: u32) -> Option<&'static str> {
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
        assert_eq!(of(719).to_string(), "cuMemMap: the CUDA context is lost: unnamed (code 719)");
        let name = || Some("CUDA_ERROR_INVALID_VALUE".to_owned());
        let named = DriverError::of_cuda_named("cuMemMap", 1, requested, name);
        assert_eq!(named.to_string(), "cuMemMap failed: CUDA_ERROR_INVALID_VALUE (code 1)");
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
        for code in 1..=999 {
            let error = DriverError::of_cuda("cuCtxSynchronize", code, ByteSize::ZERO);
            assert_eq!(error.is_context_lost(), STICKY.contains(&code), "{error}");
            let stands_for_it = [OUT_OF_MEMORY, NOT_SUPPORTED].contains(&code);
            assert_eq!(error.code(), (!stands_for_it).then_some(i64::from(code)), "{error}");
        }
    }

    #[test]
    fn the_table_is_in_order_of_the_numbers() {
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

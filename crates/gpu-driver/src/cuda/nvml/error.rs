//! Errors of NVML, with the names of its results in nvml.h.

use thiserror::Error;

use crate::DeviceUuid;

/// The reason that NVML does not answer.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum NvmlError {
    /// The loader did not find the library, or could not load it.
    #[error(
        "cannot load NVML: {error}; expected {library} of the NVIDIA driver (in a container: \
         NVIDIA_DRIVER_CAPABILITIES with `utility`)"
    )]
    NoLibrary {
        /// The library's name.
        library: &'static str,
        /// The loader's message.
        error: String,
    },
    /// The library lacks a function: it is not NVML, or one that is much too old.
    #[error("NVML lacks the function {function}: expected the library of an NVIDIA driver")]
    NoFunction {
        /// The function's name.
        function: &'static str,
    },
    /// NVML has no device with this UUID, neither as a GPU nor as a MIG instance, or hides it from
    /// this process.
    #[error("NVML knows no device {uuid}: expected the UUID of a visible GPU or MIG instance")]
    UnknownDevice {
        /// The UUID.
        uuid: DeviceUuid,
    },
    /// A call failed.
    #[error("{function} failed: {} (code {code}){}", result_name(*code), advice(*code))]
    Failed {
        /// The function's name.
        function: &'static str,
        /// NVML's result.
        code: u32,
    },
    /// This process was forked from the one that opened NVML.
    #[error("NVML was opened before a fork: expected the process that opened it")]
    Forked,
}

pub(super) const NO_PERMISSION: u32 = 4;
pub(super) const NOT_SUPPORTED: u32 = 3;
pub(super) const INVALID_ARGUMENT: u32 = 2;
pub(super) const NOT_FOUND: u32 = 6;
pub(super) const INSUFFICIENT_SIZE: u32 = 7;

/// Names of `nvmlReturn_t`, from 1 on, without their prefix `NVML_ERROR_`.
const NAMES: [&str; 29] = [
    "UNINITIALIZED",
    "INVALID_ARGUMENT",
    "NOT_SUPPORTED",
    "NO_PERMISSION",
    "ALREADY_INITIALIZED",
    "NOT_FOUND",
    "INSUFFICIENT_SIZE",
    "INSUFFICIENT_POWER",
    "DRIVER_NOT_LOADED",
    "TIMEOUT",
    "IRQ_ISSUE",
    "LIBRARY_NOT_FOUND",
    "FUNCTION_NOT_FOUND",
    "CORRUPTED_INFOROM",
    "GPU_IS_LOST",
    "RESET_REQUIRED",
    "OPERATING_SYSTEM",
    "LIB_RM_VERSION_MISMATCH",
    "IN_USE",
    "MEMORY",
    "NO_DATA",
    "VGPU_ECC_NOT_SUPPORTED",
    "INSUFFICIENT_RESOURCES",
    "FREQ_NOT_SUPPORTED",
    "ARGUMENT_VERSION_MISMATCH",
    "DEPRECATED",
    "NOT_READY",
    "GPU_NOT_FOUND",
    "INVALID_STATE",
];

fn result_name(code: u32) -> String {
    let nth = usize::try_from(code).ok().and_then(|code| code.checked_sub(1));
    let name = nth.and_then(|nth| NAMES.get(nth)).copied();
    let name = name.or_else(|| (code == 999).then_some("UNKNOWN"));
    name.map_or_else(|| "unnamed".to_owned(), |name| format!("NVML_ERROR_{name}"))
}

/// Returns advice for the operator, after a colon.
const fn advice(code: u32) -> &'static str {
    match code {
        NOT_SUPPORTED => ": this device or driver does not report it, such as a vGPU, or WSL",
        NO_PERMISSION => ": expected a user with access to the device's processes",
        9 => ": the kernel module is not loaded",
        12 => ": the library was found, but not the driver behind it",
        18 => {
            ": the driver library and the kernel module have different versions: reboot or reload \
             the module; in a container, mount the driver library of the host"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_named_as_in_the_header_with_what_an_operator_can_do() {
        let text = |code| NvmlError::Failed { function: "nvmlInit_v2", code }.to_string();
        assert_eq!(text(1), "nvmlInit_v2 failed: NVML_ERROR_UNINITIALIZED (code 1)");
        assert_eq!(text(29), "nvmlInit_v2 failed: NVML_ERROR_INVALID_STATE (code 29)");
        assert_eq!(text(999), "nvmlInit_v2 failed: NVML_ERROR_UNKNOWN (code 999)");
        for code in [0, 30, 4242, u32::MAX] {
            assert_eq!(text(code), format!("nvmlInit_v2 failed: unnamed (code {code})"));
        }
        assert!(text(18).contains("LIB_RM_VERSION_MISMATCH") && text(18).contains("reboot"));
        assert!(text(INSUFFICIENT_SIZE).contains("INSUFFICIENT_SIZE"));
        assert!(text(NOT_FOUND).contains("NOT_FOUND"));
        assert!(text(INVALID_ARGUMENT).contains("INVALID_ARGUMENT"));
    }
}

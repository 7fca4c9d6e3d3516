//! The functions of NVML that are used, and the structs that they fill.
//!
//! As in `table`, handles are integers, and nothing here makes a call.
#![expect(unsafe_code, reason = "symbols become functions of the types that nvml.h gives them")]

use std::ffi::{CStr, CString, c_char};

use crate::cuda::library::Library;
use crate::cuda::table::{Find, Missing, group};

group! {
    /// The functions without which there is no NVML.
    Base {
        init = "nvmlInit_v2"();
        shutdown = "nvmlShutdown"();
        by_uuid = "nvmlDeviceGetHandleByUUID"(*const c_char, *mut usize);
        compute = "nvmlDeviceGetComputeRunningProcesses_v3"(usize, *mut u32, *mut u64);
    }
}

group! {
    /// The memory in use without what the driver reserves: since driver 510.
    Memory2 {
        memory = "nvmlDeviceGetMemoryInfo_v2"(usize, *mut MemoryInfo2);
    }
}

group! {
    /// The memory in use, with what the driver reserves.
    Memory1 {
        memory = "nvmlDeviceGetMemoryInfo"(usize, *mut MemoryInfo1);
    }
}

group! {
    /// Processes that draw.
    Graphics {
        list = "nvmlDeviceGetGraphicsRunningProcesses_v3"(usize, *mut u32, *mut u64);
    }
}

group! {
    /// Clients of the multi-process service.
    Mps {
        list = "nvmlDeviceGetMPSComputeRunningProcesses_v3"(usize, *mut u32, *mut u64);
    }
}

group! {
    /// The name of a process.
    Name {
        name = "nvmlSystemGetProcessName"(u32, *mut c_char, u32);
    }
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct MemoryInfo1 {
    pub(super) total: u64,
    pub(super) free: u64,
    pub(super) used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct MemoryInfo2 {
    pub(super) version: u32,
    pub(super) total: u64,
    pub(super) reserved: u64,
    pub(super) free: u64,
    pub(super) used: u64,
}

/// `nvmlMemory_v2`: the size of the struct, and the version above it.
#[expect(clippy::cast_possible_truncation, reason = "the size is 40")]
pub(super) const MEMORY_VERSION: u32 = size_of::<MemoryInfo2>() as u32 | 2 << 24;

/// A function that lists processes.
pub(super) type List = unsafe extern "C" fn(usize, *mut u32, *mut u64) -> u32;

/// The functions that were found.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    pub(super) base: Base,
    pub(super) memory_2: Option<Memory2>,
    pub(super) memory_1: Option<Memory1>,
    pub(super) graphics: Option<Graphics>,
    pub(super) mps: Option<Mps>,
    pub(super) name: Option<Name>,
}

impl Functions {
    /// Returns the functions of a library, or the first that is missing.
    pub(super) fn find(library: Library, has: &dyn Fn(&str) -> bool) -> Result<Self, Missing> {
        let shown = |name: &CStr| library.symbol(name).filter(|_| name.to_str().is_ok_and(has));
        // Lists of processes had other versions before driver 510, of the same arguments.
        let find: Find<'_> = &|name| {
            let older = name.to_str().ok().and_then(|text| text.strip_suffix("_v3"));
            let older = older.map(|text| [format!("{text}_v2"), text.to_owned()]);
            let older = older.into_iter().flatten().filter_map(|text| CString::new(text).ok());
            shown(name).or_else(|| older.into_iter().find_map(|name| shown(&name)))
        };
        Ok(Self {
            base: Base::find(find)?,
            memory_2: Memory2::find(find).ok(),
            memory_1: Memory1::find(find).ok(),
            graphics: Graphics::find(find).ok(),
            mps: Mps::find(find).ok(),
            name: Name::find(find).ok(),
        })
    }
}

//! The CUDA driver library, loaded by plain `dlopen`, as a table of the measured calls.
//!
//! Every symbol is looked up by name at the start; a missing one is an error only of the calls that
//! need it. Result codes stay integers, so that a code newer than this file is a number and not
//! undefined behaviour. No call is wrapped here: `gpu.rs` does that.
//!
//! Invariant: `result of a call = Ok <=> the driver returned 0`.
#![expect(unsafe_code, reason = "opening a library and calling C functions by pointer")]
#![expect(clippy::too_many_arguments, reason = "cuLaunchKernel has eleven")]

use std::ffi::{CStr, c_char, c_void};

/// An error of a measurement.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Fault {
    #[error("cannot load the CUDA driver library: {error}")]
    NoLibrary { error: String },
    #[error("the driver library lacks the function {symbol}")]
    NoSymbol { symbol: &'static str },
    #[error("{call} failed with {code} ({name})")]
    Code { call: &'static str, code: u32, name: String },
    #[error("{what}: found {value}, expected {wanted}")]
    Wrong { what: &'static str, value: u64, wanted: u64 },
    #[error("the kernel did not start within {seconds} s")]
    NotBegun { seconds: u64 },
}

/// `CUmemLocation`: 8 bytes in every version of cuda.h from 11.0 to 13.5.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location {
    /// 1 = device.
    pub(crate) kind: u32,
    pub(crate) ordinal: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prop {
    /// 1 = pinned, the only kind.
    pub(crate) kind: u32,
    /// 0 = not to be shared with other processes.
    pub(crate) shareable: u32,
    pub(crate) location: Location,
    pub(crate) windows: usize,
    /// Compression, RDMA, usage and four reserved bytes, all off.
    pub(crate) flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) location: Location,
    /// 3 = read and write.
    pub(crate) flags: u32,
}

const _: () = assert!(size_of::<Location>() == 8 && align_of::<Location>() == 4);
const _: () = assert!(size_of::<Prop>() == 32 && align_of::<Prop>() == align_of::<usize>());
const _: () = assert!(size_of::<Access>() == 12 && align_of::<Access>() == 4);

/// An open library; never closed, because the driver runs threads of its own.
#[derive(Clone, Copy)]
pub(crate) struct Library {
    handle: *mut c_void,
    pub(crate) name: &'static str,
}

impl Library {
    /// Opens `libcuda.so.1`, else `libcuda.so`, by the loader's own search.
    pub(crate) fn open() -> Result<Self, Fault> {
        let mut error = String::new();
        for name in [c"libcuda.so.1", c"libcuda.so"] {
            // SAFETY: the name is a C string; a driver's initialisers have no demand on the
            // caller.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            if !handle.is_null() {
                return Ok(Self { handle, name: name.to_str().unwrap_or("libcuda") });
            }
            if !error.is_empty() {
                error.push_str("; ");
            }
            error.push_str(&loader_error());
        }
        Err(Fault::NoLibrary { error })
    }

    fn symbol(self, name: &'static str) -> *mut c_void {
        let Ok(name) = std::ffi::CString::new(name) else { return std::ptr::null_mut() };
        // SAFETY: the handle came from `dlopen` and is never closed; the name is a C string.
        unsafe { libc::dlsym(self.handle, name.as_ptr()) }
    }
}

fn loader_error() -> String {
    // SAFETY: `dlerror` has no precondition; its text is this thread's own.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no message from the loader".to_owned();
    }
    // SAFETY: `dlerror` returns a C string that lives until the next call of the dl family on
    // this thread, and it is copied before one.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

type GetErrorName = unsafe extern "C" fn(u32, &mut *const c_char) -> u32;

macro_rules! calls {
    ($( $symbol:literal $name:ident( $($arg:ident: $kind:ty),* ); )*) => {
        /// The calls, each there or not.
        pub(crate) struct Table {
            pub(crate) library: Library,
            error_name: Option<GetErrorName>,
            $( $name: Option<unsafe extern "C" fn($($kind),*) -> u32>, )*
        }

        impl Table {
            /// Looks up every call by name; missing ones are listed by [`Table::missing`].
            pub(crate) fn resolve(library: Library) -> Self {
                let name = library.symbol("cuGetErrorName");
                Self {
                    library,
                    // SAFETY: an optional function pointer is as large as a pointer and null is
                    // `None`; the type is that of cuda.h: CUresult cuGetErrorName(CUresult,
                    // const char **), CUresult being a 32-bit enum.
                    error_name: unsafe {
                        std::mem::transmute::<*mut c_void, Option<GetErrorName>>(name)
                    },
                    $( $name: {
                        type Call = unsafe extern "C" fn($($kind),*) -> u32;
                        let found = library.symbol($symbol);
                        // SAFETY: an optional function pointer is as large as a pointer and null is
                        // `None`; the type next to the symbol's name below is that of cuda.h,
                        // unchanged from 11.2 to 13.5: a reference stands for a pointer that must
                        // not be null, an integer for an enum, a handle or an address.
                        unsafe { std::mem::transmute::<*mut c_void, Option<Call>>(found) }
                    }, )*
                }
            }

            /// The names that this library does not have.
            pub(crate) fn missing(&self) -> Vec<&'static str> {
                let mut names = Vec::new();
                $( if self.$name.is_none() { names.push($symbol); } )*
                names
            }

            $(
                /// # Safety
                /// Handles and host addresses must be alive, as cuda.h demands of this call.
                #[inline]
                pub(crate) unsafe fn $name(&self, $($arg: $kind),*) -> Result<(), Fault> {
                    let Some(function) = self.$name else {
                        return Err(Fault::NoSymbol { symbol: $symbol });
                    };
                    // SAFETY: the symbol has this type (see `resolve`), its library is never
                    // closed, and the caller vouches for handles and host addresses.
                    let code = unsafe { function($($arg),*) };
                    if code == 0 { Ok(()) } else { Err(self.fault($symbol, code)) }
                }
            )*
        }
    };
}

calls! {
    "cuInit" init(flags: u32);
    "cuDriverGetVersion" driver_version(out: &mut i32);
    "cuDeviceGet" device(out: &mut i32, ordinal: i32);
    "cuDeviceGetName" device_name(out: &mut [c_char; 128], length: i32, device: i32);
    "cuDeviceGetAttribute" attribute(out: &mut i32, attribute: i32, device: i32);
    "cuDevicePrimaryCtxRetain" retain_context(out: &mut usize, device: i32);
    "cuDevicePrimaryCtxRelease_v2" release_context(device: i32);
    "cuCtxSetCurrent" set_current(context: usize);
    "cuMemGetInfo_v2" memory_info(idle: &mut usize, total: &mut usize);
    "cuMemGetAllocationGranularity" granularity(out: &mut usize, prop: &Prop, option: u32);
    "cuMemAddressReserve" reserve(out: &mut u64, bytes: usize, align: usize, hint: u64, flags: u64);
    "cuMemAddressFree" address_free(base: u64, bytes: usize);
    "cuMemCreate" create(out: &mut u64, bytes: usize, prop: &Prop, flags: u64);
    "cuMemRelease" release(handle: u64);
    "cuMemRetainAllocationHandle" retain(out: &mut u64, address: u64);
    "cuMemMap" map(base: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    "cuMemUnmap" unmap(base: u64, bytes: usize);
    "cuMemSetAccess" set_access(base: u64, bytes: usize, access: &Access, count: usize);
    "cuMemAlloc_v2" plain_alloc(out: &mut u64, bytes: usize);
    "cuMemFree_v2" plain_free(base: u64);
    "cuMemsetD8_v2" fill(base: u64, value: u8, bytes: usize);
    "cuMemcpyDtoH_v2" read(out: &mut [u8; 64], base: u64, bytes: usize);
    "cuMemAllocAsync" pool_alloc(out: &mut u64, bytes: usize, stream: usize);
    "cuMemFreeAsync" pool_free(base: u64, stream: usize);
    "cuDeviceGetDefaultMemPool" default_pool(out: &mut usize, device: i32);
    "cuMemPoolSetAttribute" set_pool_attribute(pool: usize, attribute: u32, value: &mut u64);
    "cuMemPoolGetAttribute" pool_attribute(pool: usize, attribute: u32, value: &mut u64);
    "cuMemPoolTrimTo" pool_trim(pool: usize, keep: usize);
    "cuMemHostAlloc" host_alloc(out: &mut usize, bytes: usize, flags: u32);
    "cuMemFreeHost" host_free(address: usize);
    "cuMemcpyHtoDAsync_v2" to_device(device: u64, host: usize, bytes: usize, stream: usize);
    "cuMemcpyDtoDAsync_v2" within(to: u64, from: u64, bytes: usize, stream: usize);
    "cuMemcpyDtoHAsync_v2" to_host(host: usize, device: u64, bytes: usize, stream: usize);
    "cuStreamCreate" stream_create(out: &mut usize, flags: u32);
    "cuStreamDestroy_v2" stream_destroy(stream: usize);
    "cuStreamSynchronize" stream_synchronize(stream: usize);
    "cuEventCreate" event_create(out: &mut usize, flags: u32);
    "cuEventDestroy_v2" event_destroy(event: usize);
    "cuEventRecord" event_record(event: usize, stream: usize);
    "cuEventQuery" event_query(event: usize);
    "cuEventElapsedTime" event_elapsed(out_ms: &mut f32, from: usize, to: usize);
    "cuModuleLoadData" module_load(out: &mut usize, image: *const c_char);
    "cuModuleUnload" module_unload(module: usize);
    "cuModuleGetFunction" module_function(out: &mut usize, module: usize, name: *const c_char);
    "cuLaunchKernel" launch(
        function: usize, grid_x: u32, grid_y: u32, grid_z: u32,
        block_x: u32, block_y: u32, block_z: u32, shared_bytes: u32,
        stream: usize, params: *const *const u64, extra: usize);
}

impl Table {
    fn fault(&self, call: &'static str, code: u32) -> Fault {
        let mut text: *const c_char = std::ptr::null();
        if let Some(error_name) = self.error_name {
            // SAFETY: the pointer to fill is a local's; any code may be asked for, an unknown
            // one sets null (cuda.h, cuGetErrorName).
            let _ = unsafe { error_name(code, &mut text) };
        }
        if text.is_null() {
            return Fault::Code { call, code, name: "no name".to_owned() };
        }
        // SAFETY: not null, and then the address of a null-terminated string (cuda.h) that
        // belongs to the library, which is never closed.
        let name = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        Fault::Code { call, code, name }
    }
}

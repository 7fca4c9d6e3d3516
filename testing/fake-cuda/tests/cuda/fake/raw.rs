//! cudarc's functions without a safe interface, as safe calls that return codes, for these tests.
//!
//! The simulation is behind them: a wrong address or handle is an error there, never undefined
//! behaviour. Host memory is passed as slices; each function states what must outlive the call.
//!
//! Invariant: `Err(code) => code != 0`.
#![expect(unsafe_code, reason = "calls C functions of a driver that is simulated")]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::Ptx;

pub(crate) type Answer<T = ()> = Result<T, u32>;

const PTX: &str = ".version 8.0\n.target sm_90\n.address_size 64\n";

/// Makes a call of the driver and turns its result into a code.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: pointers are to locals or slices that outlive the call; addresses and handles
        // are numbers to the simulation, which answers wrong ones with a code.
        match unsafe { sys::$name($($argument),*) } as u32 {
            0 => Ok(()),
            code => Err(code),
        }
    }};
}

pub(crate) fn context(device: usize) -> Arc<CudaContext> {
    CudaContext::new(device).expect("a simulated device")
}

pub(crate) fn function(context: &Arc<CudaContext>, name: &str) -> CudaFunction {
    let module = context.load_module(Ptx::from_src(PTX)).expect("a PTX text");
    module.load_function(name).expect("a kernel of this name")
}

/// Memory of the device with nothing in it, as cudarc allocates it.
pub(crate) fn bare(stream: &Arc<CudaStream>, count: usize) -> CudaSlice<u32> {
    try_bare(stream, count).expect("room")
}

pub(crate) fn try_bare(stream: &Arc<CudaStream>, count: usize) -> Answer<CudaSlice<u32>> {
    // SAFETY: any bytes are numbers.
    unsafe { stream.alloc(count) }.map_err(|error| error.0 as u32)
}

/// Launches `fill_u32` over a slice.
pub(crate) fn fill(stream: &Arc<CudaStream>, at: &mut CudaSlice<u32>, value: u32, count: u64) {
    let fill = function(stream.context(), "fill_u32");
    let mut launch = stream.launch_builder(&fill);
    launch.arg(at).arg(&value).arg(&count);
    // SAFETY: the arguments are those of the kernel; a count beyond the slice is what some tests
    // are about, and is an answer of the simulation.
    let _ = unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.expect("queued");
}

/// Launches a kernel with arguments of 8 bytes each, on a raw stream; nothing is tracked.
pub(crate) fn launch(of: &CudaFunction, arguments: &[u64], stream: sys::CUstream) -> Answer {
    let mut values = arguments.to_vec();
    let mut pointers: Vec<*mut c_void> =
        values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
    let raw = of.cu_function();
    let (at, extra) = (pointers.as_mut_ptr(), std::ptr::null_mut());
    call!(cuLaunchKernel(raw, 1, 1, 1, 1, 1, 1, 0, stream, at, extra))
}

/// Stops cudarc from ordering streams by events of its own.
pub(crate) fn untracked(context: &CudaContext) {
    // SAFETY: what it would order is what these tests are about; the driver is simulated.
    unsafe { context.disable_event_tracking() };
}

pub(crate) fn alloc(size: usize) -> Answer<u64> {
    let mut at = 0;
    call!(cuMemAlloc_v2(&raw mut at, size)).map(|()| at)
}

pub(crate) fn free(at: u64) -> Answer {
    call!(cuMemFree_v2(at))
}

pub(crate) fn alloc_async(size: usize, stream: sys::CUstream) -> Answer<u64> {
    let mut at = 0;
    call!(cuMemAllocAsync(&raw mut at, size, stream)).map(|()| at)
}

pub(crate) fn free_async(at: u64, stream: sys::CUstream) -> Answer {
    call!(cuMemFreeAsync(at, stream))
}

pub(crate) fn info() -> Answer<(usize, usize)> {
    let (mut free, mut all) = (0, 0);
    call!(cuMemGetInfo_v2(&raw mut free, &raw mut all)).map(|()| (free, all))
}

pub(crate) fn set(at: u64, value: u8, size: usize, stream: sys::CUstream) -> Answer {
    call!(cuMemsetD8Async(at, value, size, stream))
}

/// Reads bytes in the order of a stream, and waits.
pub(crate) fn peek(at: u64, size: usize, stream: sys::CUstream) -> Answer<Vec<u8>> {
    let mut bytes = vec![0_u8; size];
    call!(cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), at, size, stream))?;
    call!(cuStreamSynchronize(stream)).map(|()| bytes)
}

pub(crate) fn synchronize() -> Answer {
    call!(cuCtxSynchronize())
}

pub(crate) fn retain(device: i32) -> Answer<sys::CUcontext> {
    let mut context = std::ptr::null_mut();
    call!(cuDevicePrimaryCtxRetain(&raw mut context, device)).map(|()| context)
}

pub(crate) fn release(device: i32) -> Answer {
    call!(cuDevicePrimaryCtxRelease_v2(device))
}

pub(crate) fn set_current(context: sys::CUcontext) -> Answer {
    call!(cuCtxSetCurrent(context))
}

pub(crate) fn init() -> Answer {
    call!(cuInit(0))
}

pub(crate) fn stream_create() -> Answer<sys::CUstream> {
    let mut stream = std::ptr::null_mut();
    call!(cuStreamCreate(&raw mut stream, 1)).map(|()| stream)
}

pub(crate) fn stream_destroy(stream: sys::CUstream) -> Answer {
    call!(cuStreamDestroy_v2(stream))
}

pub(crate) fn stream_query(stream: sys::CUstream) -> Answer {
    call!(cuStreamQuery(stream))
}

pub(crate) fn load(text: &std::ffi::CStr) -> Answer<sys::CUmodule> {
    let mut module = std::ptr::null_mut();
    call!(cuModuleLoadData(&raw mut module, text.as_ptr().cast())).map(|()| module)
}

// Virtual memory.

fn location() -> [i32; 2] {
    [1, 0] // of a device, the first
}

pub(crate) fn granularity() -> Answer<usize> {
    let (properties, mut size) = (properties(), 0);
    let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let at = (&raw const properties).cast();
    call!(cuMemGetAllocationGranularity(&raw mut size, at, minimum)).map(|()| size)
}

/// `CUmemAllocationProp` in 32-bit words: pinned memory of the first device.
fn properties() -> [u64; 4] {
    let [kind, id] = location().map(i32::cast_unsigned).map(u64::from);
    [1, kind | id << 32, 0, 0]
}

pub(crate) fn reserve(size: usize) -> Answer<u64> {
    let mut at = 0;
    call!(cuMemAddressReserve(&raw mut at, size, 0, 0, 0)).map(|()| at)
}

pub(crate) fn unreserve(at: u64, size: usize) -> Answer {
    call!(cuMemAddressFree(at, size))
}

pub(crate) fn create(size: usize) -> Answer<u64> {
    let (properties, mut handle) = (properties(), 0);
    let at = (&raw const properties).cast();
    call!(cuMemCreate(&raw mut handle, size, at, 0)).map(|()| handle)
}

pub(crate) fn release_handle(handle: u64) -> Answer {
    call!(cuMemRelease(handle))
}

pub(crate) fn retain_handle(at: u64) -> Answer<u64> {
    let mut handle = 0;
    let at = std::ptr::without_provenance_mut(usize::try_from(at).expect("64 bits"));
    call!(cuMemRetainAllocationHandle(&raw mut handle, at)).map(|()| handle)
}

pub(crate) fn map(at: u64, size: usize, handle: u64) -> Answer {
    call!(cuMemMap(at, size, 0, handle, 0))
}

pub(crate) fn set_access(at: u64, size: usize) -> Answer {
    let access = [1_i32, 0, 3]; // the first device, reads and writes
    call!(cuMemSetAccess(at, size, (&raw const access).cast(), 1))
}

pub(crate) fn unmap(at: u64, size: usize) -> Answer {
    call!(cuMemUnmap(at, size))
}

// Pools.

pub(crate) fn default_pool() -> Answer<sys::CUmemoryPool> {
    let mut pool = std::ptr::null_mut();
    call!(cuDeviceGetDefaultMemPool(&raw mut pool, 0)).map(|()| pool)
}

pub(crate) fn use_pool(pool: sys::CUmemoryPool) -> Answer {
    call!(cuDeviceSetMemPool(0, pool))
}

/// A pool of the first device with at most so many bytes; 0 is without a limit.
pub(crate) fn pool_create(max: u64) -> Answer<sys::CUmemoryPool> {
    let [kind, id] = location().map(i32::cast_unsigned).map(u64::from);
    let properties: [u64; 11] = [1, kind | id << 32, 0, max, 0, 0, 0, 0, 0, 0, 0];
    let mut pool = std::ptr::null_mut();
    call!(cuMemPoolCreate(&raw mut pool, (&raw const properties).cast())).map(|()| pool)
}

pub(crate) fn pool_destroy(pool: sys::CUmemoryPool) -> Answer {
    call!(cuMemPoolDestroy(pool))
}

pub(crate) fn trim(pool: sys::CUmemoryPool, keep: usize) -> Answer {
    call!(cuMemPoolTrimTo(pool, keep))
}

pub(crate) fn threshold(pool: sys::CUmemoryPool, mut keep: u64) -> Answer {
    let which = Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    call!(cuMemPoolSetAttribute(pool, which, (&raw mut keep).cast()))
}

/// Bytes in use and bytes reserved by a pool.
pub(crate) fn pool_bytes(pool: sys::CUmemoryPool) -> Answer<(u64, u64)> {
    let (mut used, mut reserved) = (0_u64, 0_u64);
    let of_used = Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
    let of_reserved = Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
    call!(cuMemPoolGetAttribute(pool, of_used, (&raw mut used).cast()))?;
    call!(cuMemPoolGetAttribute(pool, of_reserved, (&raw mut reserved).cast()))?;
    Ok((used, reserved))
}

// Host memory.

/// Page-locked memory, freed when it is dropped.
#[derive(Debug)]
pub(crate) struct Pinned {
    at: NonNull<u8>,
    size: usize,
}

impl Pinned {
    pub(crate) fn new(size: usize) -> Answer<Self> {
        let mut at = std::ptr::null_mut();
        call!(cuMemHostAlloc(&raw mut at, size, 0))?;
        Ok(Self { at: NonNull::new(at.cast()).ok_or(0_u32)?, size })
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size and borrowed alone; the device touches it only inside
        // a call that this thread makes.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.size) }
    }

    pub(crate) fn copy_to(&self, to: u64, stream: sys::CUstream) -> Answer {
        call!(cuMemcpyHtoDAsync_v2(to, self.at.as_ptr().cast(), self.size, stream))
    }

    pub(crate) fn copy_from(&self, from: u64, stream: sys::CUstream) -> Answer {
        call!(cuMemcpyDtoHAsync_v2(self.at.as_ptr().cast(), from, self.size, stream))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = call!(cuMemFreeHost(self.at.as_ptr().cast()));
    }
}

/// Page-locks memory of the caller's, which stays where it is until [`unregister`].
pub(crate) fn register(memory: &mut [u8]) -> Answer {
    call!(cuMemHostRegister_v2(memory.as_mut_ptr().cast(), memory.len(), 0))
}

pub(crate) fn unregister(memory: &mut [u8]) -> Answer {
    call!(cuMemHostUnregister(memory.as_mut_ptr().cast()))
}

/// Copies into registered memory; nothing reads it before the stream is waited for.
pub(crate) fn copy_from(to: &mut [u8], from: u64, stream: sys::CUstream) -> Answer {
    call!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream))
}

/// `CUpointer_attribute`: the kind of memory at an address, 1 of the host, 2 of the device.
pub(crate) fn memory_type(at: u64) -> Answer<u32> {
    let mut kind = 0_u32;
    let which = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    call!(cuPointerGetAttribute((&raw mut kind).cast(), which, at)).map(|()| kind)
}

/// Managed memory of so many numbers, written by the host, filled by a kernel, and read again.
pub(crate) fn through_managed(stream: &Arc<CudaStream>, count: usize) -> Answer<Vec<u32>> {
    let mut at = 0;
    call!(cuMemAllocManaged(&raw mut at, count * 4, 1))?;
    let fill = function(stream.context(), "fill_u32");
    let raw = stream.cu_stream();
    let queued = launch(&fill, &[at, 7, count as u64 / 2], raw);
    let done = queued.and_then(|()| call!(cuStreamSynchronize(raw)));
    let place = std::ptr::with_exposed_provenance::<u32>(usize::try_from(at).expect("64 bits"));
    // SAFETY: managed memory is the host's as well: `count` numbers, no work on them unfinished.
    let found = unsafe { std::slice::from_raw_parts(place, count) }.to_vec();
    call!(cuMemFree_v2(at))?;
    done.map(|()| found)
}

/// Queues a function of the host that sets a flag, and says what CUDA answered to it.
pub(crate) fn host_function(
    stream: sys::CUstream,
    answer: &std::sync::atomic::AtomicU32,
) -> Answer {
    unsafe extern "C" fn ask(data: *mut c_void) {
        // SAFETY: `data` is the number given below, which outlives the wait for the stream.
        let answer = unsafe { &*data.cast::<std::sync::atomic::AtomicU32>() };
        let code = call!(cuInit(0)).err().unwrap_or(0);
        answer.store(code, std::sync::atomic::Ordering::SeqCst);
    }
    let data = std::ptr::from_ref(answer).cast_mut().cast();
    call!(cuLaunchHostFunc(stream, Some(ask), data))?;
    call!(cuStreamSynchronize(stream))
}

//! Owners of device objects: context, range, physical handle, stream, event, kernel.
//!
//! Each owner keeps the raw value private and destroys it once, so that the tables need no unsafe
//! code and a failed part leaves nothing behind. Errors on drop are ignored.
//!
//! Invariant: a raw handle or address passed to the driver is alive; an owner's `end` runs once.
#![expect(unsafe_code, reason = "calling the driver")]

use std::ffi::c_char;

use super::driver::{Access, Fault, Location, Prop, Table};

/// cuda.h, `CUdevice_attribute`.
pub(crate) const MULTIPROCESSORS: u32 = 16;
pub(crate) const VMM_SUPPORTED: u32 = 102;
pub(crate) const POOLS_SUPPORTED: u32 = 115;
/// cuda.h, `CUmemPool_attribute`.
const RELEASE_THRESHOLD: u32 = 4;
/// cuda.h, `CUresult`: the work is not done yet.
const NOT_READY: u32 = 600;
/// cuda.h, `CU_STREAM_NON_BLOCKING`: no order against the null stream.
const NON_BLOCKING: u32 = 1;

const KERNEL: &str = concat!(include_str!("touch.ptx"), "\0");

/// One device with its primary context, current on the thread that opened it.
pub(crate) struct Gpu<'t> {
    table: &'t Table,
    device: i32,
    prop: Prop,
    /// The smallest and the recommended unit of a handle, in bytes.
    pub(crate) granularity: (usize, usize),
}

/// Starts the driver and answers its version, such as 12080 for 12.8.
pub(crate) fn start(table: &Table) -> Result<i32, Fault> {
    // SAFETY: cuInit takes flags that must be 0; nothing else of the driver runs yet.
    unsafe { table.init(0) }?;
    let mut version = 0;
    // SAFETY: the reference outlives the call.
    unsafe { table.driver_version(&mut version) }?;
    Ok(version)
}

impl<'t> Gpu<'t> {
    /// Takes the device's primary context and makes it current on this thread.
    pub(crate) fn open(table: &'t Table, ordinal: i32) -> Result<Self, Fault> {
        let mut device = 0;
        // SAFETY: the reference outlives the call; any ordinal may be asked for.
        unsafe { table.device(&mut device, ordinal) }?;
        let location = Location { kind: 1, ordinal: device };
        let prop = Prop { kind: 1, shareable: 0, location, windows: 0, flags: [0; 8] };
        let mut context = 0;
        // SAFETY: the device is one that the driver just named.
        unsafe { table.retain_context(&mut context, device) }?;
        let mut gpu = Self { table, device, prop, granularity: (0, 0) };
        // SAFETY: the context was retained above and is released only by this owner's drop.
        unsafe { table.set_current(context) }?;
        gpu.granularity = (gpu.granule(0).unwrap_or(0), gpu.granule(1).unwrap_or(0));
        Ok(gpu)
    }

    /// Asks the granularity: option 0 for the smallest, 1 for the recommended.
    pub(crate) fn granule(&self, option: u32) -> Result<usize, Fault> {
        let mut bytes = 0;
        // SAFETY: both references outlive the call.
        unsafe { self.table.granularity(&mut bytes, &self.prop, option) }?;
        Ok(bytes)
    }

    pub(crate) fn name(&self) -> Result<String, Fault> {
        let mut text: [c_char; 128] = [0; 128];
        // SAFETY: the array has the length that is passed; the device is the driver's.
        unsafe { self.table.device_name(&mut text, 128, self.device) }?;
        let bytes = text.iter().take_while(|&&byte| byte != 0).map(|byte| byte.to_ne_bytes()[0]);
        Ok(String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned())
    }

    pub(crate) fn attribute(&self, attribute: u32) -> Result<i32, Fault> {
        let mut value = 0;
        // The number fits: attributes are below 200.
        let number = i32::try_from(attribute).unwrap_or(0);
        // SAFETY: the reference outlives the call; an unknown attribute is an error code.
        unsafe { self.table.attribute(&mut value, number, self.device) }?;
        Ok(value)
    }

    /// Returns the free and the total bytes of the device.
    pub(crate) fn memory(&self) -> Result<(usize, usize), Fault> {
        let (mut idle, mut total) = (0, 0);
        // SAFETY: both references outlive the call; the context is current.
        unsafe { self.table.memory_info(&mut idle, &mut total) }?;
        Ok((idle, total))
    }

    fn default_pool(&self) -> Result<usize, Fault> {
        let mut pool = 0;
        // SAFETY: the reference outlives the call; the device is the driver's.
        unsafe { self.table.default_pool(&mut pool, self.device) }?;
        Ok(pool)
    }

    /// Returns the bytes that the default pool keeps at a synchronisation.
    pub(crate) fn pool_threshold(&self) -> Result<u64, Fault> {
        let (pool, mut bytes) = (self.default_pool()?, 0);
        // SAFETY: the device's default pool is never destroyed; the attribute is 8 bytes.
        unsafe { self.table.pool_attribute(pool, RELEASE_THRESHOLD, &mut bytes) }?;
        Ok(bytes)
    }

    pub(crate) fn set_pool_threshold(&self, mut bytes: u64) -> Result<(), Fault> {
        let pool = self.default_pool()?;
        // SAFETY: the device's default pool is never destroyed; the attribute is 8 bytes.
        unsafe { self.table.set_pool_attribute(pool, RELEASE_THRESHOLD, &mut bytes) }
    }

    /// Gives the default pool's idle memory back to the device.
    pub(crate) fn trim_pool(&self) -> Result<(), Fault> {
        let pool = self.default_pool()?;
        // SAFETY: the device's default pool is never destroyed.
        unsafe { self.table.pool_trim(pool, 0) }
    }

    /// Writes and reads back 64 bytes at a device address.
    pub(crate) fn write_and_read(&self, base: u64) -> Result<(), Fault> {
        let mut read = [0; 64];
        // SAFETY: a device address that is not mapped is an error code and no host access.
        unsafe { self.table.fill(base, 0x5A, read.len()) }?;
        // SAFETY: the array has the length that is passed.
        unsafe { self.table.read(&mut read, base, 64) }?;
        match read.iter().find(|&&byte| byte != 0x5A) {
            None => Ok(()),
            Some(&byte) => {
                Err(Fault::Wrong { what: "a byte read back", value: u64::from(byte), wanted: 0x5A })
            }
        }
    }
}

impl Drop for Gpu<'_> {
    fn drop(&mut self) {
        // SAFETY: retained once by `open`; every other owner borrows this one and is gone.
        let _ = unsafe { self.table.release_context(self.device) };
    }
}

/// Physical device memory.
pub(crate) struct Physical<'g> {
    gpu: &'g Gpu<'g>,
    handle: Option<u64>,
}

impl<'g> Physical<'g> {
    pub(crate) fn create(gpu: &'g Gpu<'g>, bytes: usize) -> Result<Self, Fault> {
        let mut handle = 0;
        // SAFETY: both references outlive the call.
        unsafe { gpu.table.create(&mut handle, bytes, &gpu.prop, 0) }?;
        Ok(Self { gpu, handle: Some(handle) })
    }

    /// Gives the handle back; the memory stays while it is mapped.
    pub(crate) fn release(mut self) -> Result<(), Fault> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Fault> {
        let Some(handle) = self.handle.take() else { return Ok(()) };
        // SAFETY: `take` makes this the only release of a reference the driver gave.
        unsafe { self.gpu.table.release(handle) }
    }
}

impl Drop for Physical<'_> {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// A reserved range of device addresses, cut in pieces of one handle each.
pub(crate) struct Range<'g> {
    gpu: &'g Gpu<'g>,
    pub(crate) base: u64,
    piece: usize,
    mapped: Vec<bool>,
    reserved: bool,
}

impl<'g> Range<'g> {
    /// Reserves `count` pieces of `piece` bytes; multiples of the granularity.
    pub(crate) fn reserve(gpu: &'g Gpu<'g>, piece: usize, count: usize) -> Result<Self, Fault> {
        let mapped = vec![false; count];
        let mut base = 0;
        // SAFETY: the reference outlives the call.
        unsafe { gpu.table.reserve(&mut base, piece.saturating_mul(count), 0, 0, 0) }?;
        Ok(Self { gpu, base, piece, mapped, reserved: true })
    }

    fn at(&self, index: usize) -> u64 {
        self.base + (index * self.piece) as u64
    }

    fn access(&self) -> Access {
        Access { location: self.gpu.prop.location, flags: 3 }
    }

    pub(crate) fn map(&mut self, index: usize, physical: &Physical<'_>) -> Result<(), Fault> {
        let handle = physical.handle.unwrap_or(0);
        // SAFETY: the handle is alive while `physical` is; a refused address is an error code.
        unsafe { self.gpu.table.map(self.at(index), self.piece, 0, handle, 0) }?;
        self.mapped[index] = true;
        Ok(())
    }

    pub(crate) fn set_access(&self, index: usize) -> Result<(), Fault> {
        // SAFETY: the reference outlives the call and one description is passed.
        unsafe { self.gpu.table.set_access(self.at(index), self.piece, &self.access(), 1) }
    }

    /// Access to the whole range in one call.
    pub(crate) fn set_access_all(&self) -> Result<(), Fault> {
        let bytes = self.piece * self.mapped.len();
        // SAFETY: the reference outlives the call and one description is passed.
        unsafe { self.gpu.table.set_access(self.base, bytes, &self.access(), 1) }
    }

    /// The handle behind a piece, with a reference of its own.
    pub(crate) fn retain(&self, index: usize) -> Result<Physical<'g>, Fault> {
        let mut handle = 0;
        // SAFETY: the address is only looked up, never read.
        unsafe { self.gpu.table.retain(&mut handle, self.at(index)) }?;
        Ok(Physical { gpu: self.gpu, handle: Some(handle) })
    }

    pub(crate) fn unmap(&mut self, index: usize) -> Result<(), Fault> {
        // SAFETY: the range is this owner's and host code holds no reference into it; a kernel
        // that still used it would be a fault on the device and an error code here.
        unsafe { self.gpu.table.unmap(self.at(index), self.piece) }?;
        self.mapped[index] = false;
        Ok(())
    }

    /// Unmaps the whole range in one call.
    pub(crate) fn unmap_all(&mut self) -> Result<(), Fault> {
        // SAFETY: as in `unmap`.
        unsafe { self.gpu.table.unmap(self.base, self.piece * self.mapped.len()) }?;
        self.mapped.fill(false);
        Ok(())
    }

    /// Gives the addresses back; every piece must be unmapped.
    pub(crate) fn free(mut self) -> Result<(), Fault> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Fault> {
        if !std::mem::take(&mut self.reserved) {
            return Ok(());
        }
        let bytes = self.piece * self.mapped.len();
        // SAFETY: the base and length of one reservation, freed once.
        unsafe { self.gpu.table.address_free(self.base, bytes) }
    }
}

impl Drop for Range<'_> {
    fn drop(&mut self) {
        for index in 0..self.mapped.len() {
            if self.mapped[index] {
                let _ = self.unmap(index);
            }
        }
        let _ = self.end();
    }
}

/// Memory of cuMemAlloc.
pub(crate) struct Plain<'g> {
    gpu: &'g Gpu<'g>,
    base: Option<u64>,
}

impl<'g> Plain<'g> {
    pub(crate) fn allocate(gpu: &'g Gpu<'g>, bytes: usize) -> Result<Self, Fault> {
        let mut base = 0;
        // SAFETY: the reference outlives the call.
        unsafe { gpu.table.plain_alloc(&mut base, bytes) }?;
        Ok(Self { gpu, base: Some(base) })
    }

    pub(crate) fn free(mut self) -> Result<(), Fault> {
        self.end()
    }

    /// Copies the first bytes of another one here, and waits.
    pub(crate) fn copy_from(
        &self,
        from: &Self,
        bytes: usize,
        stream: &Stream<'_>,
    ) -> Result<(), Fault> {
        let (to, from) = (self.base.unwrap_or(0), from.base.unwrap_or(0));
        // SAFETY: both are alive until the wait below; a bad range is an error code.
        unsafe { self.gpu.table.within(to, from, bytes, stream.raw) }?;
        stream.synchronize()
    }

    fn end(&mut self) -> Result<(), Fault> {
        let Some(base) = self.base.take() else { return Ok(()) };
        // SAFETY: `take` makes this the only free of an address the driver gave.
        unsafe { self.gpu.table.plain_free(base) }
    }
}

impl Drop for Plain<'_> {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// A queue of device work, without order against others.
pub(crate) struct Stream<'g> {
    gpu: &'g Gpu<'g>,
    raw: usize,
}

impl<'g> Stream<'g> {
    pub(crate) fn new(gpu: &'g Gpu<'g>) -> Result<Self, Fault> {
        let mut raw = 0;
        // SAFETY: the reference outlives the call.
        unsafe { gpu.table.stream_create(&mut raw, NON_BLOCKING) }?;
        Ok(Self { gpu, raw })
    }

    /// Waits for all work on it.
    pub(crate) fn synchronize(&self) -> Result<(), Fault> {
        // SAFETY: the stream lives as long as its owner.
        unsafe { self.gpu.table.stream_synchronize(self.raw) }
    }

    /// Allocates from the default pool, in this stream's order.
    pub(crate) fn pool_alloc(&self, bytes: usize) -> Result<PoolMemory, Fault> {
        let mut base = 0;
        // SAFETY: the reference outlives the call, the stream its owner.
        unsafe { self.gpu.table.pool_alloc(&mut base, bytes, self.raw) }?;
        Ok(PoolMemory(base))
    }

    /// Frees what [`Stream::pool_alloc`] returned, in this stream's order.
    pub(crate) fn pool_free(&self, PoolMemory(base): PoolMemory) -> Result<(), Fault> {
        // SAFETY: the address was given by `pool_alloc` and, being consumed, is freed once.
        unsafe { self.gpu.table.pool_free(base, self.raw) }
    }
}

/// Memory of the default pool.
pub(crate) struct PoolMemory(u64);

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once; pending work goes on (cuda.h).
        let _ = unsafe { self.gpu.table.stream_destroy(self.raw) };
    }
}

/// A point in a stream's work, with its time.
pub(crate) struct Event<'g> {
    gpu: &'g Gpu<'g>,
    raw: usize,
}

impl<'g> Event<'g> {
    pub(crate) fn new(gpu: &'g Gpu<'g>) -> Result<Self, Fault> {
        let mut raw = 0;
        // SAFETY: the reference outlives the call; flags 0 = with timing.
        unsafe { gpu.table.event_create(&mut raw, 0) }?;
        Ok(Self { gpu, raw })
    }

    pub(crate) fn record(&self, stream: &Stream<'_>) -> Result<(), Fault> {
        // SAFETY: both live as long as their owners.
        unsafe { self.gpu.table.event_record(self.raw, stream.raw) }
    }

    pub(crate) fn is_done(&self) -> Result<bool, Fault> {
        // SAFETY: the event lives as long as its owner.
        match unsafe { self.gpu.table.event_query(self.raw) } {
            Ok(()) => Ok(true),
            Err(Fault::Code { code: NOT_READY, .. }) => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    /// Microseconds of device time since an earlier event; resolution about 0.5 us.
    pub(crate) fn us_since(&self, earlier: &Self) -> Result<f64, Fault> {
        let mut ms = 0.0;
        // SAFETY: both events live as long as their owners; the reference outlives the call.
        unsafe { self.gpu.table.event_elapsed(&mut ms, earlier.raw, self.raw) }?;
        Ok(f64::from(ms) * 1e3)
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { self.gpu.table.event_destroy(self.raw) };
    }
}

/// The kernel `touch`: reads and writes a buffer for a number of rounds.
pub(crate) struct Kernel<'g> {
    gpu: &'g Gpu<'g>,
    module: usize,
    function: usize,
    blocks: u32,
}

impl<'g> Kernel<'g> {
    /// Has the driver compile the text; one block for each multiprocessor.
    pub(crate) fn load(gpu: &'g Gpu<'g>) -> Result<Self, Fault> {
        let blocks = u32::try_from(gpu.attribute(MULTIPROCESSORS)?).unwrap_or(1).max(1);
        let mut kernel = Self { gpu, module: 0, function: 0, blocks };
        // SAFETY: the text ends with a null byte and is a constant.
        unsafe { gpu.table.module_load(&mut kernel.module, KERNEL.as_ptr().cast()) }?;
        let name = c"touch".as_ptr();
        // SAFETY: the module was loaded above; the name is a C string.
        unsafe { gpu.table.module_function(&mut kernel.function, kernel.module, name) }?;
        Ok(kernel)
    }

    /// Queues it. `buffer_bytes` is a power of two, at least 4, mapped at `base`.
    pub(crate) fn launch(
        &self,
        stream: &Stream<'_>,
        base: u64,
        buffer_bytes: u64,
        rounds: u64,
    ) -> Result<(), Fault> {
        let values = [base, buffer_bytes - 4, rounds];
        let params = values.each_ref().map(std::ptr::from_ref);
        let (function, blocks, table) = (self.function, self.blocks, self.gpu.table);
        let (params, raw) = (params.as_ptr(), stream.raw);
        // SAFETY: the function takes three 8-byte parameters (touch.ptx), which the driver copies
        // before it returns; module and stream are alive; 128 threads and no shared memory.
        unsafe { table.launch(function, blocks, 1, 1, 128, 1, 1, 0, raw, params, 0) }
    }
}

impl Drop for Kernel<'_> {
    fn drop(&mut self) {
        if self.module != 0 {
            // SAFETY: loaded by `load`, unloaded once; the driver waits for its last use.
            let _ = unsafe { self.gpu.table.module_unload(self.module) };
        }
    }
}

/// Page-locked host memory.
pub(crate) struct Pinned<'g> {
    gpu: &'g Gpu<'g>,
    address: usize,
    bytes: usize,
}

impl<'g> Pinned<'g> {
    pub(crate) fn allocate(gpu: &'g Gpu<'g>, bytes: usize) -> Result<Self, Fault> {
        let mut address = 0;
        // SAFETY: the reference outlives the call; flags 0 = cached, this context.
        unsafe { gpu.table.host_alloc(&mut address, bytes, 0) }?;
        Ok(Self { gpu, address, bytes })
    }

    /// Copies all of it to the device and waits.
    pub(crate) fn to_device(&self, to: &Plain<'_>, stream: &Stream<'_>) -> Result<(), Fault> {
        let base = to.base.unwrap_or(0);
        // SAFETY: the host memory is this owner's, of that length, and outlives the copy, for
        // which the next line waits; a bad device address is an error code.
        unsafe { self.gpu.table.to_device(base, self.address, self.bytes, stream.raw) }?;
        stream.synchronize()
    }

    /// Copies all of it from the device and waits.
    pub(crate) fn copy_back(&self, from: &Plain<'_>, stream: &Stream<'_>) -> Result<(), Fault> {
        let base = from.base.unwrap_or(0);
        // SAFETY: as in `to_device`; no Rust reference to the memory exists.
        unsafe { self.gpu.table.to_host(self.address, base, self.bytes, stream.raw) }?;
        stream.synchronize()
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // SAFETY: given by cuMemHostAlloc, freed once; copies have been waited for.
        let _ = unsafe { self.gpu.table.host_free(self.address) };
    }
}

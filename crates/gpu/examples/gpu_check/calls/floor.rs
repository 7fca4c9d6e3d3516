//! Table E: the device's capabilities, and the costs of its other memory.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
#![expect(unsafe_code, reason = "calling the driver")]

use std::time::Instant;

use cudarc::driver::{CudaStream, result, sys};

use super::super::cases::{Fault, Outcome};
use super::super::rig::{float, median, page_locked, plain, quantile};
use super::Effort;
use super::figures::Figures;
use super::gpu::{Gpu, Physical, Range};
use super::tables::room;

/// The device's reported capabilities, and a test of each.
pub(crate) fn capabilities(gpu: &Gpu, figures: &mut Figures<'_, '_>) -> Outcome {
    use sys::CUdevice_attribute as Attribute;
    figures.line("\ncapabilities: the attribute, and one real round trip of 64 bytes");
    let (smallest, recommended) = (gpu.granularity, gpu.granule(true)?);
    figures.line(&format!("  granularity: {smallest} smallest, {recommended} recommended"));
    figures.set("granularity_bytes", float(smallest), "bytes");
    let vmm = vmm_round_trip(gpu);
    let pool = || {
        let stream = gpu.context.new_stream()?;
        free(&stream, allocate(&stream, smallest.max(1 << 21))?)?;
        Ok::<_, Fault>(stream.synchronize()?)
    };
    let pool = pool();
    let virtual_memory = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    for (what, attribute, trip) in [
        ("virtual memory", virtual_memory, &vmm),
        ("memory pools", Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, &pool),
    ] {
        let attribute = gpu.context.attribute(attribute)?;
        let trip = trip.as_ref().map_or_else(ToString::to_string, |()| "done".to_owned());
        figures.line(&format!("  {what}: attribute {attribute}; round trip: {trip}"));
    }
    vmm.and(pool)
}

fn vmm_round_trip(gpu: &Gpu) -> Outcome {
    let unit = gpu.granule(false)?;
    let mut range = Range::reserve(gpu, unit, 1)?;
    let physical = Physical::create(gpu, unit)?;
    range.map(0, &physical)?;
    range.set_access(0)?;
    range.write_and_read()?;
    range.unmap(0)?;
    physical.release()?;
    range.free()
}

/// Allocates from the device's pool, in the stream's order.
fn allocate(stream: &CudaStream, bytes: usize) -> Result<u64, Fault> {
    // SAFETY: the stream is alive; the memory is never used.
    Ok(unsafe { result::malloc_async(stream.cu_stream(), bytes) }?)
}

/// Frees what [`allocate`] returned, once.
fn free(stream: &CudaStream, at: u64) -> Outcome {
    // SAFETY: allocated in the order of the same stream; freed by the caller once.
    Ok(unsafe { result::free_async(at, stream.cu_stream()) }?)
}

/// The largest range that can be reserved, by halving from 2^47 bytes.
pub(crate) fn address_space(gpu: &Gpu, figures: &mut Figures<'_, '_>) -> Outcome {
    let mut bytes = 1_usize << 47;
    loop {
        match Range::reserve(gpu, bytes, 1) {
            Ok(range) => {
                let power = bytes.ilog2();
                figures
                    .line(&format!("\ntable E: the largest range of addresses: 2^{power} bytes"));
                figures.set("reserve_largest_bytes", float(bytes), "bytes");
                return range.free();
            }
            Err(fault) if bytes <= gpu.granularity.max(1 << 21) => return Err(fault),
            Err(_) => bytes /= 2,
        }
    }
}

/// Page-locked memory: its allocation, and copies in both directions.
pub(crate) fn pinned(gpu: &Gpu, effort: Effort, figures: &mut Figures<'_, '_>) -> Outcome {
    let (copies, mut words) = if effort.quick { (5, 1 << 25) } else { (20, 1_usize << 27) };
    // Half of it if it is refused, down to 64 MiB.
    let (mut host, took) = loop {
        let start = Instant::now();
        match page_locked(&gpu.context, words) {
            Ok(host) => break (host, start.elapsed()),
            Err(fault) if words <= 1 << 23 => return Err(fault),
            Err(_) => words /= 2,
        }
    };
    let (bytes, mib) = (words * 8, float(words >> 17));
    let us_per_mib = took.as_secs_f64() * 1e6 / mib;
    figures.set("pinned_alloc_us_per_mib", us_per_mib, "us/MiB");
    let stream = gpu.context.new_stream()?;
    let (mut device, mut other) = (plain(&stream, words)?, plain(&stream, words)?);
    let mut seconds = [Vec::new(), Vec::new(), Vec::new()];
    let end = effort.until(3);
    for copy in 0..copies {
        if copy > 0 && Instant::now() > end {
            break;
        }
        let mut start = Instant::now();
        let mut note = |direction: usize| {
            stream.synchronize()?;
            seconds[direction].push(start.elapsed().as_secs_f64());
            start = Instant::now();
            Ok::<_, Fault>(())
        };
        stream.memcpy_htod(&host, &mut device)?;
        note(0)?;
        stream.memcpy_dtoh(&device, &mut host)?;
        note(1)?;
        stream.memcpy_dtod(&device, &mut other)?;
        note(2)?;
    }
    figures.heading(
        &format!("table E: copies of {mib} MiB of page-locked host memory, and within the device"),
        &["direction", "n", "GiB/s"],
    );
    for (name, seconds) in ["to_device", "to_host", "within"].into_iter().zip(&seconds) {
        let took = median(seconds).max(1e-9);
        figures.row(name, &[float(seconds.len()), mib / 1024.0 / took]);
        figures.set(&format!("{name}_bytes_per_s"), float(bytes) / took, "bytes/s");
        figures.set(&format!("{name}_us_per_mib"), took * 1e6 / mib, "us/MiB");
    }
    let start = Instant::now();
    drop(host);
    let us_per_mib = start.elapsed().as_secs_f64() * 1e6 / mib;
    figures.set("pinned_free_us_per_mib", us_per_mib, "us/MiB");
    Ok(())
}

/// The bytes that the default pool keeps at a synchronisation.
fn threshold(pool: sys::CUmemoryPool, set: Option<u64>) -> Result<u64, Fault> {
    let which = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut bytes = set.unwrap_or(0);
    let value = std::ptr::from_mut(&mut bytes).cast();
    let call = match set {
        Some(_) => result::mem_pool::set_attribute,
        None => result::mem_pool::get_attribute,
    };
    // SAFETY: the device's default pool is never destroyed; the attribute is 8 bytes.
    unsafe { call(pool, which, value) }?;
    Ok(bytes)
}

/// The default pool: allocate, free, synchronise, with the threshold at 0 and at its end.
pub(crate) fn pool(gpu: &Gpu, effort: Effort, figures: &mut Figures<'_, '_>) -> Outcome {
    // SAFETY: the device is the context's.
    let pool = unsafe { result::device::get_default_mem_pool(gpu.context.cu_device()) }?;
    let before = threshold(pool, None)?;
    let measured = pool_costs(gpu, pool, effort, figures);
    threshold(pool, Some(before))?;
    measured
}

fn pool_costs(
    gpu: &Gpu,
    pool: sys::CUmemoryPool,
    effort: Effort,
    figures: &mut Figures<'_, '_>,
) -> Outcome {
    let rounds = if effort.quick { 40 } else { 400 };
    figures.heading(
        &format!("table E: pool; cuMemAllocAsync, cuMemFreeAsync, synchronise; at most {rounds}"),
        &["threshold", "MiB", "n", "median us", "p99 us"],
    );
    let stream = gpu.context.new_stream()?;
    for (mib, (bytes, word)) in
        [2, 64, 1024].into_iter().flat_map(|mib| [(mib, (0, "0")), (mib, (u64::MAX, "max"))])
    {
        if (mib << 20) > room(gpu)? {
            figures.line(&format!("  {mib} MiB do not fit in memory"));
            continue;
        }
        threshold(pool, Some(bytes))?;
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        let end = effort.until(1);
        for round in 0..rounds {
            if round > 1 && Instant::now() > end {
                break;
            }
            let start = Instant::now();
            let at = allocate(&stream, mib << 20)?;
            let allocated = start.elapsed();
            free(&stream, at)?;
            let freed = start.elapsed();
            stream.synchronize()?;
            for (times, took) in
                times.iter_mut().zip([allocated, freed - allocated, start.elapsed()])
            {
                times.push(took.as_secs_f64() * 1e6);
            }
        }
        let [allocs, frees, costs] = times.each_ref().map(|times| median(times));
        // The cost of a call is taken from a pool that keeps its memory.
        if mib == 2 && bytes > 0 {
            figures.set("pool_alloc_us", allocs, "us");
            figures.set("pool_free_us", frees, "us");
        }
        let cells = [float(mib), float(times[2].len()), costs, quantile(&times[2], 99)];
        figures.row(word, &cells);
        figures.set(&format!("pool_{mib}mib_threshold_{word}_us"), costs, "us");
        // SAFETY: the device's default pool is never destroyed.
        unsafe { result::mem_pool::trim_to(pool, 0) }?;
    }
    Ok(())
}

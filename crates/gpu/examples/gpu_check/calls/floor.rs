//! Table E: the memory that a context uses before anything is allocated, and the device's
//! capabilities.
//!
//! Invariant: context's device bytes = total - free according to the driver, other processes
//! included.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::time::Instant;

use super::driver::Fault;
use super::figures::Figures;
use super::gpu::{Gpu, POOLS_SUPPORTED, Physical, Pinned, Plain, Range, Stream, VMM_SUPPORTED};
use super::measure::quantile;
use super::{Effort, float};

/// Resident host bytes: at the start, after the driver's start, after the context's creation.
pub(crate) struct Floor {
    pub(crate) rss_bytes_at_start: u64,
    pub(crate) rss_bytes_started: u64,
    pub(crate) rss_bytes: u64,
}

impl Floor {
    pub(crate) fn print(&self, gpu: &Gpu<'_>, figures: &mut Figures<'_, '_>) -> Result<(), Fault> {
        say!(figures, "\ntable E: context overhead; once, before any other allocation");
        let driver = self.rss_bytes_started.saturating_sub(self.rss_bytes_at_start);
        let both = self.rss_bytes.saturating_sub(self.rss_bytes_at_start);
        let bytes = |bytes: u64| float(usize::try_from(bytes).unwrap_or(usize::MAX));
        say!(figures, "  host: {} bytes at the start", self.rss_bytes_at_start);
        say!(
            figures,
            "  host: {driver} bytes more after the driver's start, {both} after the context's"
        );
        figures.set("context_host_bytes", bytes(both), "bytes");
        let (idle, total) = gpu.memory()?;
        say!(
            figures,
            "  device: {total} bytes, {} of them in use (other processes included)",
            total - idle
        );
        figures.set("context_device_bytes", float(total.saturating_sub(idle)), "bytes");
        Ok(())
    }
}

/// The device's reported capabilities, and a test of each.
pub(crate) fn capabilities(gpu: &Gpu<'_>, figures: &mut Figures<'_, '_>) -> Result<(), Fault> {
    say!(figures, "\ncapabilities: the attribute, and one real round trip of 64 bytes");
    say!(
        figures,
        "  granularity: {} smallest, {} recommended",
        gpu.granularity.0,
        gpu.granularity.1
    );
    figures.set("granularity_bytes", float(gpu.granularity.0), "bytes");
    let vmm = vmm_round_trip(gpu);
    say(figures, "virtual memory", gpu.attribute(VMM_SUPPORTED), &vmm);
    let pool = Stream::new(gpu).and_then(|stream| {
        stream.pool_free(stream.pool_alloc(gpu.granularity.0.max(1 << 21))?)?;
        stream.synchronize()
    });
    say(figures, "memory pools", gpu.attribute(POOLS_SUPPORTED), &pool);
    vmm.and(pool)
}

fn say(
    figures: &mut Figures<'_, '_>,
    what: &str,
    attribute: Result<i32, Fault>,
    trip: &Result<(), Fault>,
) {
    let attribute = attribute.map_or_else(|fault| fault.to_string(), |value| value.to_string());
    let trip = trip.as_ref().map_or_else(ToString::to_string, |()| "done".to_owned());
    say!(figures, "  {what}: attribute {attribute}; round trip: {trip}");
}

fn vmm_round_trip(gpu: &Gpu<'_>) -> Result<(), Fault> {
    let unit = gpu.granule(0)?;
    let mut range = Range::reserve(gpu, unit, 1)?;
    let physical = Physical::create(gpu, unit)?;
    range.map(0, &physical)?;
    range.set_access(0)?;
    gpu.write_and_read(range.base)?;
    range.unmap(0)?;
    physical.release()?;
    range.free()
}

/// The largest range that can be reserved, by halving from 2^47 bytes.
pub(crate) fn address_space(gpu: &Gpu<'_>, figures: &mut Figures<'_, '_>) -> Result<(), Fault> {
    say!(figures, "\ntable E: the largest range of addresses, halving from 2^47 bytes");
    let mut bytes = 1_usize << 47;
    loop {
        match Range::reserve(gpu, bytes, 1) {
            Ok(range) => {
                say!(figures, "  2^{} bytes", bytes.ilog2());
                figures.set("reserve_largest_bytes", float(bytes), "bytes");
                return range.free();
            }
            Err(fault) if bytes <= gpu.granularity.0.max(1 << 21) => return Err(fault),
            Err(_) => bytes /= 2,
        }
    }
}

/// Page-locked memory: its allocation, and copies in both directions.
pub(crate) fn pinned(
    gpu: &Gpu<'_>,
    effort: Effort,
    figures: &mut Figures<'_, '_>,
) -> Result<(), Fault> {
    let copies = if effort.quick { 5 } else { 20 };
    let mut bytes = if effort.quick { 1 << 28 } else { 1_usize << 30 };
    // Half of it if it is refused, down to 64 MiB.
    let (host, took) = loop {
        let start = Instant::now();
        match Pinned::allocate(gpu, bytes) {
            Ok(host) => break (host, start.elapsed()),
            Err(fault) if bytes <= 1 << 26 => return Err(fault),
            Err(_) => bytes /= 2,
        }
    };
    let mib = bytes >> 20;
    say!(
        figures,
        "\ntable E: page-locked host memory of {mib} MiB; at most {copies} copies each way"
    );
    say!(figures, "  allocation: {:.0} us", took.as_secs_f64() * 1e6);
    figures.set("pinned_alloc_us_per_mib", took.as_secs_f64() * 1e6 / float(mib), "us/MiB");
    let device = Plain::allocate(gpu, bytes)?;
    let stream = Stream::new(gpu)?;
    let other = Plain::allocate(gpu, bytes)?;
    let mut seconds = [Vec::new(), Vec::new(), Vec::new()];
    let end = effort.until(3);
    for copy in 0..copies {
        if copy > 0 && Instant::now() > end {
            break;
        }
        let mut time = |direction: usize, done: &dyn Fn() -> Result<(), Fault>| {
            let start = Instant::now();
            done()?;
            seconds[direction].push(start.elapsed().as_secs_f64());
            Ok(())
        };
        time(0, &|| host.to_device(&device, &stream))?;
        time(1, &|| host.copy_back(&device, &stream))?;
        time(2, &|| other.copy_from(&device, bytes, &stream))?;
    }
    for (name, seconds) in ["to_device", "to_host", "within"].into_iter().zip(&seconds) {
        let took = quantile(seconds, 0.5).max(1e-9);
        say!(figures, "  {name}: {:.2} GiB/s", float(bytes) / took / float(1 << 30));
        figures.set(format!("{name}_bytes_per_s"), float(bytes) / took, "bytes/s");
        figures.set(format!("{name}_us_per_mib"), took * 1e6 / float(mib), "us/MiB");
    }
    let start = Instant::now();
    drop(host);
    let took_us = start.elapsed().as_secs_f64() * 1e6;
    say!(figures, "  free: {took_us:.0} us");
    figures.set("pinned_free_us_per_mib", took_us / float(mib), "us/MiB");
    Ok(())
}

/// The default pool: allocate, free, synchronise, with the threshold at 0 and at its end.
pub(crate) fn pool(
    gpu: &Gpu<'_>,
    effort: Effort,
    figures: &mut Figures<'_, '_>,
) -> Result<(), Fault> {
    let rounds = if effort.quick { 40 } else { 400 };
    say!(
        figures,
        "\ntable E: pool; cuMemAllocAsync, cuMemFreeAsync, synchronise; at most {rounds}"
    );
    say!(
        figures,
        "  {:>5} {:>9} {:>6} {:>11} {:>11}",
        "MiB",
        "threshold",
        "n",
        "median us",
        "p99 us"
    );
    let stream = Stream::new(gpu)?;
    let before = gpu.pool_threshold()?;
    let mut measured = || -> Result<(), Fault> {
        for mib in [2_usize, 64, 1024] {
            if (mib << 20) > gpu.memory()?.0 / 10 * 9 {
                say!(figures, "  {mib:>5} does not fit in memory");
                continue;
            }
            for (threshold, word) in [(0, "0"), (u64::MAX, "max")] {
                gpu.set_pool_threshold(threshold)?;
                let (mut costs_us, mut allocs_us, mut frees_us) =
                    (Vec::new(), Vec::new(), Vec::new());
                let end = effort.until(1);
                for round in 0..rounds {
                    if round > 1 && Instant::now() > end {
                        break;
                    }
                    let start = Instant::now();
                    let base = stream.pool_alloc(mib << 20)?;
                    allocs_us.push(start.elapsed().as_secs_f64() * 1e6);
                    let freed = Instant::now();
                    stream.pool_free(base)?;
                    frees_us.push(freed.elapsed().as_secs_f64() * 1e6);
                    stream.synchronize()?;
                    costs_us.push(start.elapsed().as_secs_f64() * 1e6);
                }
                // The cost of a call is taken from a pool that keeps its memory.
                if mib == 2 && threshold > 0 {
                    figures.set("pool_alloc_us", quantile(&allocs_us, 0.5), "us");
                    figures.set("pool_free_us", quantile(&frees_us, 0.5), "us");
                }
                let (median, p99) = (quantile(&costs_us, 0.5), quantile(&costs_us, 0.99));
                let count = costs_us.len();
                say!(figures, "  {mib:>5} {word:>9} {count:>6} {median:>11.2} {p99:>11.2}");
                figures.set(format!("pool_{mib}mib_threshold_{word}_us"), median, "us");
                gpu.trim_pool()?;
            }
        }
        Ok(())
    };
    let result = measured();
    gpu.set_pool_threshold(before)?;
    result
}

//! The driver's single calls: their cost and stalls by handle size, and the simulation's
//! [`DriverCosts`] made of them.
//!
//! It measures, in this order: the memory that a context uses on device and host; host microseconds
//! per call (median), idle and beside a kernel, which a call that waits for it shows; the longest
//! device time between the events of another stream while the calls run; copies, page-locked memory
//! and the pool. It calls the driver through cudarc, without lowtide's driver.
//!
//! No new repetition begins after a table's time. A table that fails is a part that failed, with
//! the driver's code, and the next one continues. A name has one value; a later one replaces it.
//!
//! Invariants: `tables wanted = tables run + tables failed`; a table never holds more than nine
//! tenths of the idle device memory.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
#![expect(unsafe_code, reason = "calling the driver")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};
use lowtide_cuda_sim::{Call, Cost, DriverCosts};

mod gpu;
mod measure;

use gpu::Gpu;
use measure::{Load, Watch};

use super::cases::{Fault, Outcome};
use super::cli::Args;
use super::report::Report;
use super::rig::{float, median, page_locked, plain, quantile, resident};

/// The sizes of handles: powers of two, and PyTorch's default of 20 MiB.
const SIZES_MIB: [usize; 10] = [2, 4, 8, 16, 20, 32, 64, 128, 256, 1024];
/// The number of handles in the calls over a whole range.
const ALL_HANDLES: usize = 16;
/// Cycles for one row at most, whatever the time.
const CYCLES_MAX: usize = 400;

/// The amount of work: repetitions and time.
#[derive(Clone, Copy, Debug)]
struct Effort {
    quick: bool,
    /// The number of timed calls per row.
    samples: usize,
    /// The time for all tables together.
    total: Duration,
}

impl Effort {
    fn new(quick: bool) -> Self {
        let (samples, total_s) = if quick { (40, 45) } else { (400, 420) };
        Self { quick, samples, total: Duration::from_secs(total_s) }
    }

    /// The end of a table that may take so many hundredths of the whole.
    fn until(self, hundredths: u32) -> Instant {
        Instant::now() + self.total * hundredths / 100
    }
}

type Table = fn(&Gpu, Effort, &mut Report<'_>) -> Outcome;

/// The tables, in order; some need a kernel running on another stream.
const TABLES: [(&str, Table); 5] = [
    ("costs, idle", |gpu, effort, report| costs_by_size(gpu, effort, None, report)),
    ("costs, busy", |gpu, effort, report| {
        costs_by_size(gpu, effort, Some(&mut Load::new(gpu, 1, 5_000.0)?), report)
    }),
    ("stalls", stalls),
    ("page-locked memory", pinned),
    ("pool", pool),
];

/// Measures the calls. Nothing of the process may have used the device before.
pub(crate) fn calls(args: &Args, report: &mut Report<'_>) -> Outcome {
    let at_start = resident();
    let gpu = &Gpu::open(args.device)?;
    report.line(&format!("calls: {}", gpu.context.name()?));
    let (free, total) = gpu.context.mem_get_info()?;
    // Before any other allocation.
    let host = resident().saturating_sub(at_start).as_f64();
    set(report, "context_host_bytes", host, "bytes");
    set(report, "context_device_bytes", float(total.saturating_sub(free)), "bytes");
    set(report, "granularity_bytes", float(gpu.granularity), "bytes");
    for (name, table) in TABLES {
        if let Err(fault) = table(gpu, Effort::new(!args.thorough), report) {
            report.fail("calls", format!("table of {name}: {fault}"));
        }
    }
    write_costs(report);
    Ok(())
}

fn set(report: &mut Report<'_>, name: &str, value: f64, unit: &str) {
    report.figure(&format!("gpu.calls.{name}"), value, unit);
}

/// A handle's bytes: so many MiB, rounded up to the granularity.
fn piece(gpu: &Gpu, mib: usize) -> usize {
    (mib << 20).next_multiple_of(gpu.granularity)
}

/// Returns nine tenths of the free device memory.
fn room(gpu: &Gpu) -> Result<usize, Fault> {
    Ok(gpu.context.mem_get_info()?.0 / 10 * 9)
}

/// Measures the host time of each call: of one handle, and of 16 in one range, which replace it if
/// they fit.
fn costs_by_size(
    gpu: &Gpu,
    effort: Effort,
    mut load: Option<&mut Load>,
    report: &mut Report<'_>,
) -> Outcome {
    let suffix = if load.is_some() { "_busy_us" } else { "_us" };
    let end = effort.until(18);
    let sizes = SIZES_MIB.into_iter().flat_map(|mib| [(mib, 1), (mib, ALL_HANDLES)]);
    let mut left = SIZES_MIB.len() * 2;
    let mut first_fault = None;
    for (mib, count) in sizes {
        let slice = end.saturating_duration_since(Instant::now()) / u32_of(left);
        left -= 1;
        let size = (piece(gpu, mib), count);
        if size.0.saturating_mul(count) > room(gpu)? {
            report.line(&format!("{count} handles of {mib} MiB do not fit in memory"));
            continue;
        }
        let mut watch = Watch::new(load.as_deref_mut());
        if let Err(fault) = repeat(gpu, &mut watch, size, effort, Instant::now() + slice) {
            report.line(&format!("{count} handles of {mib} MiB: stopped: {fault}"));
            first_fault.get_or_insert(fault);
        }
        for (name, seen) in watch.made() {
            set(report, &format!("{name}_{mib}mib{suffix}"), median(&seen.costs_us), "us");
        }
    }
    first_fault.map_or(Ok(()), Err)
}

fn u32_of(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX).max(1)
}

/// Cycles until enough calls were timed (and each once-a-cycle call a few times) or the time is
/// over; at least two.
fn repeat(
    gpu: &Gpu,
    watch: &mut Watch<'_>,
    size: (usize, usize),
    effort: Effort,
    end: Instant,
) -> Outcome {
    for cycle in 0..CYCLES_MAX {
        let few = cycle < if effort.quick { 4 } else { 20 };
        let enough = !few && watch.count("create") >= effort.samples;
        if cycle >= 2 && (enough || Instant::now() > end) {
            break;
        }
        watch.cycle(gpu, size, size.1 > 1 && cycle % 2 == 1)?;
    }
    Ok(())
}

/// Measures the longest device time between events of another stream, a chain of 200 kernels with
/// an event after each, while calls are made: beyond that without a call.
fn stalls(gpu: &Gpu, effort: Effort, report: &mut Report<'_>) -> Outcome {
    let load = &mut Load::new(gpu, 200, 50.0)?;
    let longest = |gaps: &[f64]| quantile(gaps, 1_000);
    let mut quiet = Vec::new();
    for _ in 0..if effort.quick { 5 } else { 50 } {
        load.launch()?;
        load.finish(&mut quiet)?;
    }
    let quiet_us = longest(&quiet);
    set(report, "no_call_longest_us", quiet_us, "us");
    let end = effort.until(18);
    let sizes = [2, 20, 256];
    let mut longest_us = BTreeMap::new();
    for (index, mib) in sizes.into_iter().enumerate() {
        let size = (piece(gpu, mib), 16);
        if size.0 * size.1 > room(gpu)? {
            report.line(&format!("16 handles of {mib} MiB do not fit in memory"));
            continue;
        }
        let slice = end.saturating_duration_since(Instant::now()) / u32_of(sizes.len() - index);
        let mut watch = Watch::new(Some(&mut *load));
        repeat(gpu, &mut watch, size, effort, Instant::now() + slice)?;
        for (name, seen) in watch.made().filter(|(_, seen)| !seen.gaps_us.is_empty()) {
            let most = longest_us.entry(name).or_insert(0.0_f64);
            *most = longest(&seen.gaps_us).max(*most);
        }
    }
    for (name, longest) in longest_us {
        set(report, &format!("{name}_stall_us"), (longest - quiet_us).max(0.0), "us");
    }
    Ok(())
}

/// Measures page-locked memory: its allocation, and copies in both directions and within the
/// device.
fn pinned(gpu: &Gpu, effort: Effort, report: &mut Report<'_>) -> Outcome {
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
    let us_per_mib = |seconds: f64| seconds * 1e6 / float(words >> 17);
    set(report, "pinned_alloc_us_per_mib", us_per_mib(took.as_secs_f64()), "us/MiB");
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
    for (name, seconds) in ["to_device", "to_host", "within"].into_iter().zip(&seconds) {
        let took = median(seconds).max(1e-9);
        set(report, &format!("{name}_bytes_per_s"), float(words * 8) / took, "bytes/s");
        set(report, &format!("{name}_us_per_mib"), us_per_mib(took), "us/MiB");
    }
    let start = Instant::now();
    drop(host);
    let took = start.elapsed().as_secs_f64();
    set(report, "pinned_free_us_per_mib", us_per_mib(took), "us/MiB");
    Ok(())
}

/// Measures an allocation from the default pool and its free, while the pool keeps its memory.
fn pool(gpu: &Gpu, effort: Effort, report: &mut Report<'_>) -> Outcome {
    // SAFETY: the device is the context's.
    let pool = unsafe { result::device::get_default_mem_pool(gpu.context.cu_device()) }?;
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let (mut before, mut most) = (0_u64, u64::MAX);
    let value = std::ptr::from_mut(&mut before).cast();
    // SAFETY: the device's default pool is never destroyed; the attribute is 8 bytes.
    unsafe { result::mem_pool::get_attribute(pool, threshold, value) }?;
    // SAFETY: as above.
    unsafe { result::mem_pool::set_attribute(pool, threshold, (&raw mut most).cast()) }?;
    let costs = pool_costs(gpu, effort);
    // SAFETY: as above.
    unsafe { result::mem_pool::trim_to(pool, 0) }?;
    // SAFETY: as above.
    unsafe { result::mem_pool::set_attribute(pool, threshold, value) }?;
    let [alloc, free] = costs?;
    set(report, "pool_alloc_us", alloc, "us");
    set(report, "pool_free_us", free, "us");
    Ok(())
}

/// Median microseconds of an allocation of 2 MiB, and of its free.
fn pool_costs(gpu: &Gpu, effort: Effort) -> Result<[f64; 2], Fault> {
    let stream = gpu.context.new_stream()?;
    let mut times = [Vec::new(), Vec::new()];
    let end = effort.until(1);
    for round in 0..if effort.quick { 40 } else { 400 } {
        if round > 1 && Instant::now() > end {
            break;
        }
        let start = Instant::now();
        // SAFETY: the stream is alive; the memory is never used.
        let at = unsafe { result::malloc_async(stream.cu_stream(), 2 << 20) }?;
        let allocated = start.elapsed();
        // SAFETY: allocated in the order of the same stream; freed once.
        unsafe { result::free_async(at, stream.cu_stream()) }?;
        let freed = start.elapsed() - allocated;
        stream.synchronize()?;
        for (times, took) in times.iter_mut().zip([allocated, freed]) {
            times.push(took.as_secs_f64() * 1e6);
        }
    }
    Ok(times.map(|times| median(&times)))
}

/// The calls of the sweep: the name in figures, the name of the same call over a range of handles,
/// and the call in the simulation.
const SWEPT: [(&str, Option<&str>, Call); 8] = [
    ("reserve", None, Call::AddressReserve),
    ("create", None, Call::Create),
    ("map", None, Call::Map),
    ("set_access", Some("set_access_all"), Call::SetAccess),
    ("retain", None, Call::RetainHandle),
    ("unmap", Some("unmap_all"), Call::Unmap),
    ("release", None, Call::Release),
    ("address_free", None, Call::AddressFree),
];

/// The others, of which one figure is a cost: that of a MiB, or of a call.
const OTHERS: [(&str, Call); 7] = [
    ("pinned_alloc_us_per_mib", Call::HostAlloc),
    ("pinned_free_us_per_mib", Call::HostFree),
    ("to_device_us_per_mib", Call::Restore),
    ("to_host_us_per_mib", Call::Offload),
    ("within_us_per_mib", Call::CopyAsync),
    ("pool_alloc_us", Call::AllocAsync),
    ("pool_free_us", Call::FreeAsync),
];

/// Writes the costs of the calls as figures, and as the source text of a `DriverCosts`. A call that
/// was not measured keeps its guess.
fn write_costs(report: &mut Report<'_>) {
    let mut costs = DriverCosts::default();
    let value = |name: &str| Some(report.figures.get(&format!("gpu.calls.{name}"))?.0);
    let by_size = |call: &str| -> Vec<(f64, f64)> {
        let row = |mib: usize| Some((float(mib), value(&format!("{call}_{mib}mib_us"))?));
        SIZES_MIB.into_iter().filter_map(row).collect()
    };
    let mut measured = Vec::new();
    for (name, over_range, call) in SWEPT {
        let ranges = over_range.map(by_size).unwrap_or_default();
        measured.extend(cost(&by_size(name), &ranges).map(|cost| (call, cost)));
    }
    for (name, call) in OTHERS {
        let Some(ns) = value(name).map(nanoseconds) else { continue };
        let is_of_mib = name.ends_with("_per_mib");
        let of_mib = Cost { mib_ns: ns, ..costs.of(call) };
        let of_call = Cost { call_ns: ns, ..Cost::default() };
        measured.push((call, if is_of_mib { of_mib } else { of_call }));
    }
    report.line("costs for the simulation; calls that are not here keep their guesses");
    report.line("DriverCosts::default()");
    for (call, cost) in measured {
        costs = costs.with(call, cost);
        report.line(&format!("    .with(Call::{call:?}, {:?})", costs.of(call)));
        let Cost { call_ns, handle_ns, mib_ns } = cost;
        for (unit, ns) in [("call_ns", call_ns), ("handle_ns", handle_ns), ("mib_ns", mib_ns)] {
            report.figure(&format!("gpu.costs.{}.{unit}", call.name()), float(ns), "ns");
        }
    }
}

fn nanoseconds(us: f64) -> u64 {
    whole((us * 1e3).round())
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast from float holds at the ends; negative and NaN become 0"
)]
fn whole(value: f64) -> u64 {
    value as u64
}

/// The cost of a call from its microseconds by size: for one handle, and for [`ALL_HANDLES`] of
/// them in one call. A line is fitted by the median of all slopes, so a row that was disturbed does
/// not move it. `None` if nothing was measured.
fn cost(one: &[(f64, f64)], all: &[(f64, f64)]) -> Option<Cost> {
    if one.is_empty() {
        return None;
    }
    let pairs =
        one.iter().enumerate().flat_map(|(at, a)| one[at + 1..].iter().map(move |b| (a, b)));
    let slopes: Vec<f64> = pairs.map(|(a, b)| (b.1 - a.1) / (b.0 - a.0)).collect();
    let middle = |values: &[f64]| if values.is_empty() { 0.0 } else { median(values) };
    let mib_us = middle(&slopes).max(0.0);
    let rest: Vec<f64> = one.iter().map(|(mib, us)| us - mib * mib_us).collect();
    let both = all.iter().filter_map(|(mib, us)| {
        let (_, one_us) = one.iter().find(|(other, _)| other == mib)?;
        Some((us - one_us) / float(ALL_HANDLES - 1) - mib * mib_us)
    });
    let handle_us = middle(&both.collect::<Vec<_>>()).max(0.0);
    let call_us = (middle(&rest) - handle_us).max(0.0);
    let [call_ns, handle_ns, mib_ns] = [call_us, handle_us, mib_us].map(nanoseconds);
    Some(Cost { call_ns, handle_ns, mib_ns })
}

/// Unmaps memory that a kernel is using, and reports what becomes of it. This ends the context.
pub(crate) fn provoke(args: &Args, report: &mut Report<'_>) -> Outcome {
    let gpu = Gpu::open(args.device)?;
    let mut load = Load::new(&gpu, 1, 200_000.0)?;
    load.launch()?;
    let start = Instant::now();
    let unmapped = load.buffer.unmap(Some(0));
    let took = start.elapsed();
    report.line(&match (unmapped, load.finish(&mut Vec::new())) {
        (Err(fault), _) => format!("the unmap itself failed after {took:?}: {fault}"),
        (Ok(()), Ok(())) => format!("unmap took {took:?}; the kernel ended without a fault"),
        (Ok(()), Err(fault)) => format!("unmap took {took:?}; then {fault}"),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_cost_is_the_line_through_the_sizes_and_one_disturbed_row_does_not_move_it() {
        // Here, since a bench without a harness has no tests.
        use super::{ALL_HANDLES, Cost, SIZES_MIB, cost, float};

        // 20 us a call, 5 us a handle, 0.1 us a MiB.
        let us = |handles: f64, mib: f64| 20.0 + handles * 5.0 + handles * mib * 0.1;
        let sizes = SIZES_MIB.map(float);
        let mut one = sizes.map(|mib| (mib, us(1.0, mib)));
        let all = sizes.map(|mib| (mib, us(float(ALL_HANDLES), mib)));
        let wanted = Cost { call_ns: 20_000, handle_ns: 5_000, mib_ns: 100 };
        assert_eq!(cost(&one, &all), Some(wanted));
        one[3].1 = 900.0;
        assert_eq!(cost(&one, &all), Some(wanted));
        assert_eq!(cost(&[], &all), None);
        let alone = Cost { call_ns: 25_200, ..Cost::default() };
        assert_eq!(cost(&one[..1], &[]), Some(alone));
    }
}

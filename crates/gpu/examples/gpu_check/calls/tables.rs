//! Tables A to D: cost of a call, stall of another stream, waiting, growth with handles.
//!
//! Invariant: a table never holds more than nine tenths of the idle device memory.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::collections::BTreeMap;
use std::time::Instant;

use super::super::cases::{Fault, Outcome};
use super::super::rig::{float, median, quantile};
use super::figures::Figures;
use super::gpu::Gpu;
use super::measure::{Load, Watch};
use super::{Effort, rss_bytes};

/// The sizes of handles: powers of two, and PyTorch's default of 20 MiB.
pub(crate) const SIZES_MIB: [usize; 10] = [2, 4, 8, 16, 20, 32, 64, 128, 256, 1024];
/// The number of handles in the calls over a whole range whose cost is a figure.
pub(crate) const ALL_HANDLES: usize = 16;
const HANDLES: [usize; 3] = [1, ALL_HANDLES, 256];
/// Cycles for one row at most, whatever the time.
const CYCLES_MAX: usize = 400;

/// A handle's bytes: so many MiB, rounded up to the granularity.
fn piece(gpu: &Gpu, mib: usize) -> usize {
    (mib << 20).next_multiple_of(gpu.granularity)
}

/// Returns nine tenths of the free device memory.
pub(crate) fn room(gpu: &Gpu) -> Result<usize, Fault> {
    Ok(gpu.context.mem_get_info()?.0 / 10 * 9)
}

/// Table A.
pub(crate) fn costs(
    gpu: &Gpu,
    effort: Effort,
    mut load: Option<&mut Load>,
    figures: &mut Figures<'_, '_>,
) -> Outcome {
    let busy = load.as_ref().map(|load| load.kernel_us);
    let next_to =
        |us| format!("next to a kernel of {us:.0} us on another stream, restarted at its end");
    let beside = busy.map_or_else(|| "idle".to_owned(), next_to);
    figures.heading(
        &format!(
            "table A: host time of each call, {beside}\n  a row = the calls of 2 or more cycles, \
             at least {} calls; _all =\n  one call for the whole range; outlasted = calls that the \
             kernel did not outlive",
            effort.samples
        ),
        &["call", "MiB", "handles", "n", "median us", "p99 us", "outlasted"],
    );
    let end = effort.until(18);
    let mut left = SIZES_MIB.len() * HANDLES.len();
    let mut first_fault = None;
    for (mib, count) in SIZES_MIB.into_iter().flat_map(|mib| HANDLES.map(|count| (mib, count))) {
        let slice = end.saturating_duration_since(Instant::now()) / u32_of(left);
        left -= 1;
        let size = (piece(gpu, mib), count);
        if size.0.saturating_mul(count) > room(gpu)? {
            figures.line(&format!("  {count} handles of {mib} MiB do not fit in memory"));
            continue;
        }
        let mut watch = Watch::new(load.as_deref_mut());
        if let Err(fault) = repeat(gpu, &mut watch, size, effort, Instant::now() + slice) {
            figures.line(&format!("  {count} handles of {mib} MiB: stopped: {fault}"));
            first_fault.get_or_insert(fault);
        }
        for (name, seen) in watch.made() {
            let (costs, outlasted) =
                (&seen.costs_us, busy.map_or(f64::NAN, |_| float(seen.outlasted)));
            let (median, p99) = (median(costs), quantile(costs, 99));
            let sizes = [mib, count, costs.len()].map(float);
            figures.row(name, &[&sizes[..], &[median, p99, outlasted]].concat());
            // The cost of a handle is taken from rows of 16, and of 1 where 16 do not fit.
            if count <= ALL_HANDLES {
                let suffix = if busy.is_some() { "_busy_us" } else { "_us" };
                figures.set(&format!("{name}_{mib}mib{suffix}"), median, "us");
            }
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

/// Table B.
pub(crate) fn stalls(
    gpu: &Gpu,
    effort: Effort,
    load: &mut Load,
    figures: &mut Figures<'_, '_>,
) -> Outcome {
    let chains = if effort.quick { 5 } else { 50 };
    figures.heading(
        &format!(
            "table B: device time between events of another stream while calls are made\n  a chain \
             of 200 kernels of {:.1} us, an event after each; the first\n  row is {chains} chains \
             with no call; then 16 handles, at least 2 cycles",
            load.kernel_us
        ),
        &["call", "MiB", "calls", "events", "median us", "p99 us", "longest us"],
    );
    let row =
        |figures: &mut Figures<'_, '_>, name: &str, [mib, calls]: [usize; 2], gaps: &[f64]| {
            let times = [50, 99, 100].map(|share| quantile(gaps, share));
            figures.row(name, &[&[mib, calls, gaps.len()].map(float)[..], &times].concat());
            times[2]
        };
    let mut quiet = Vec::new();
    for _ in 0..chains {
        load.launch()?;
        load.finish(&mut quiet)?;
    }
    let quiet_us = row(figures, "none", [0, 0], &quiet);
    figures.set("no_call_longest_us", quiet_us, "us");
    let end = effort.until(18);
    let sizes = [2, 20, 256];
    let mut longest_us = BTreeMap::new();
    for (index, mib) in sizes.into_iter().enumerate() {
        let size = (piece(gpu, mib), 16);
        if size.0 * size.1 > room(gpu)? {
            figures.line(&format!("  16 handles of {mib} MiB do not fit in memory"));
            continue;
        }
        let slice = end.saturating_duration_since(Instant::now()) / u32_of(sizes.len() - index);
        let mut watch = Watch::new(Some(&mut *load));
        repeat(gpu, &mut watch, size, effort, Instant::now() + slice)?;
        for (name, seen) in watch.made().filter(|(_, seen)| !seen.gaps_us.is_empty()) {
            let found = row(figures, name, [mib, seen.costs_us.len()], &seen.gaps_us);
            let longest = longest_us.entry(name).or_insert(found);
            *longest = found.max(*longest);
        }
    }
    for (name, longest) in longest_us {
        figures.set(&format!("{name}_stall_us"), (longest - quiet_us).max(0.0), "us");
    }
    Ok(())
}

/// Table C.
pub(crate) fn waits(
    gpu: &Gpu,
    effort: Effort,
    load: &mut Load,
    figures: &mut Figures<'_, '_>,
) -> Outcome {
    let cycles = if effort.quick { 3 } else { 10 };
    figures.heading(
        &format!(
            "table C: does a call wait for a kernel that uses other memory?\n  a kernel of \
             {:.1} ms works on one range, the call is on another of 20 MiB;\n  {cycles} times; \
             plain_free (cuMemFree) is the control that should wait",
            load.kernel_us / 1e3
        ),
        &["call", "n", "median us", "left us", "waits"],
    );
    let mut watch = Watch::new(Some(load));
    let end = effort.until(10);
    for cycle in 0..cycles {
        if cycle > 0 && Instant::now() > end {
            break;
        }
        watch.cycle(gpu, (piece(gpu, 20), 1), false)?;
        watch.plain_free(piece(gpu, 20))?;
    }
    for (name, seen) in watch.made() {
        let count = seen.costs_us.len();
        let [cost, left] = [&seen.costs_us, &seen.remaining_us].map(|times| median(times));
        figures.row(name, &[float(count), cost, left, float(seen.outlasted)]);
        let waits = seen.outlasted * 2 > count;
        figures.set(&format!("{name}_waits"), f64::from(u8::from(waits)), "bool");
    }
    Ok(())
}

/// Table D.
pub(crate) fn many_handles(gpu: &Gpu, effort: Effort, figures: &mut Figures<'_, '_>) -> Outcome {
    let unit = gpu.granularity;
    figures.heading(
        &format!(
            "table D: many handles of {unit} bytes in one range; one cycle each, and one\n  more \
             with access and unmapping as one call (_all)"
        ),
        &["call", "n", "calls/s", "first us", "last us", "growth"],
    );
    let wanted: &[usize] = if effort.quick { &[10_000] } else { &[10_000, 50_000] };
    let mut handle_host_bytes = 0.0_f64;
    let end = effort.until(25);
    for &wanted in wanted {
        let mut count = wanted.min(room(gpu)? / unit);
        if count < wanted {
            figures.line(&format!("  of {wanted} handles {count} fit in memory"));
        }
        for all in [false, true] {
            if Instant::now() > end {
                figures.line(&format!("  no time left for {count} handles, all = {all}"));
                continue;
            }
            // If the driver refuses the number, try half of it, and so on, at most six times.
            for attempt in 0..=6 {
                let rss_before = rss_bytes();
                let mut watch = Watch::new(None);
                let result = watch.cycle(gpu, (unit, count), all);
                print_growth(&watch, count, result.is_ok(), figures);
                let Err(fault) = result else {
                    let grown = watch.mapped_rss.saturating_sub(rss_before);
                    let per_handle = float(grown) / float(count.max(1));
                    figures
                        .line(&format!("  {count} handles: {per_handle:.0} host bytes for each"));
                    // Later cycles find the host memory of earlier ones, so the most is kept.
                    handle_host_bytes = per_handle.max(handle_host_bytes);
                    figures.set("handle_host_bytes", handle_host_bytes, "bytes");
                    figures.set("handles", float(count), "count");
                    break;
                };
                figures.line(&format!("  {count} handles: {fault}"));
                if attempt == 6 || count < 2 {
                    return Err(fault);
                }
                count /= 2;
            }
        }
    }
    Ok(())
}

/// Prints the growth of each call's cost, which is a figure after a whole cycle.
fn print_growth(watch: &Watch<'_>, count: usize, is_whole: bool, figures: &mut Figures<'_, '_>) {
    for (name, seen) in watch.made() {
        let (rate, first, last) = seen.growth();
        let growth = last / first.max(1e-3);
        figures.row(name, &[float(seen.costs_us.len()), rate, first, last, growth]);
        if is_whole && seen.costs_us.len() == count {
            figures.set(&format!("{name}_growth_{count}"), growth, "ratio");
        }
    }
}

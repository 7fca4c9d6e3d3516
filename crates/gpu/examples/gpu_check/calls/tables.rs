//! Tables A to D: cost of a call, stall of another stream, waiting, growth with handles.
//!
//! Invariant: a table never holds more than nine tenths of the idle device memory.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::time::Instant;

use super::driver::Fault;
use super::figures::Figures;
use super::gpu::Gpu;
use super::measure::{Call, Load, Watch, quantile};
use super::{Effort, float, rss_bytes};

/// The sizes of handles: powers of two, and PyTorch's default of 20 MiB.
pub(crate) const SIZES_MIB: [usize; 10] = [2, 4, 8, 16, 20, 32, 64, 128, 256, 1024];
/// The number of handles in the calls over a whole range whose cost is a figure.
pub(crate) const ALL_HANDLES: usize = 16;
const HANDLES: [usize; 3] = [1, ALL_HANDLES, 256];
/// Cycles for one row at most, whatever the time.
const CYCLES_MAX: usize = 400;

/// A handle's bytes: so many MiB, rounded up to the granularity.
fn piece(gpu: &Gpu<'_>, mib: usize) -> usize {
    (mib << 20).next_multiple_of(gpu.granularity.0.max(1))
}

/// Returns nine tenths of the free device memory.
fn room(gpu: &Gpu<'_>) -> Result<usize, Fault> {
    Ok(gpu.memory()?.0 / 10 * 9)
}

/// Table A.
pub(crate) fn costs<'g>(
    gpu: &'g Gpu<'g>,
    effort: Effort,
    mut load: Option<&mut Load<'g>>,
    figures: &mut Figures<'_, '_>,
) -> Result<(), Fault> {
    let busy = load.as_ref().map(|load| load.kernel_us);
    let beside = match busy {
        None => "idle".to_owned(),
        Some(us) => {
            format!("next to a kernel of {us:.0} us on another stream, restarted at its end")
        }
    };
    say!(figures, "\ntable A: host time of each call, {beside}");
    say!(
        figures,
        "  a row = the calls of 2 or more cycles, at least {} calls; _all =",
        effort.samples
    );
    say!(
        figures,
        "  one call for the whole range; outlasted = calls that the kernel did not outlive"
    );
    say!(
        figures,
        "  {:<14} {:>5} {:>7} {:>6} {:>11} {:>11} {:>9}",
        "call",
        "MiB",
        "handles",
        "n",
        "median us",
        "p99 us",
        "outlasted"
    );
    let end = effort.until(18);
    let mut left = SIZES_MIB.len() * HANDLES.len();
    let mut first_fault = None;
    for mib in SIZES_MIB {
        for count in HANDLES {
            let slice = end.saturating_duration_since(Instant::now()) / u32_of(left);
            left -= 1;
            if piece(gpu, mib).saturating_mul(count) > room(gpu)? {
                say!(figures, "  {:<14} {mib:>5} {count:>7} does not fit in memory", "-");
                continue;
            }
            let mut watch = Watch::new(load.as_deref_mut());
            let size = (piece(gpu, mib), count);
            if let Err(fault) = repeat(gpu, &mut watch, size, effort, Instant::now() + slice) {
                say!(figures, "  {:<14} {mib:>5} {count:>7} stopped: {fault}", "-");
                first_fault.get_or_insert(fault);
            }
            print_costs(&watch, (mib, count), busy.is_some(), figures);
        }
    }
    first_fault.map_or(Ok(()), Err)
}

fn u32_of(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX).max(1)
}

/// Cycles until enough calls were timed (and each once-a-cycle call a few times) or the time is
/// over; at least two.
fn repeat<'g>(
    gpu: &'g Gpu<'g>,
    watch: &mut Watch<'_, 'g>,
    size: (usize, usize),
    effort: Effort,
    end: Instant,
) -> Result<(), Fault> {
    for cycle in 0..CYCLES_MAX {
        let few = cycle < if effort.quick { 4 } else { 20 };
        let enough = !few && watch.of(Call::Create).costs_us.len() >= effort.samples;
        if cycle >= 2 && (enough || Instant::now() > end) {
            break;
        }
        watch.cycle(gpu, size, size.1 > 1 && cycle % 2 == 1)?;
    }
    Ok(())
}

fn print_costs(
    watch: &Watch<'_, '_>,
    (mib, count): (usize, usize),
    busy: bool,
    figures: &mut Figures<'_, '_>,
) {
    for call in Call::EVERY {
        let seen = watch.of(call);
        if seen.costs_us.is_empty() {
            continue;
        }
        let (median, p99) = (quantile(&seen.costs_us, 0.5), quantile(&seen.costs_us, 0.99));
        say!(
            figures,
            "  {:<14} {mib:>5} {count:>7} {:>6} {median:>11.2} {p99:>11.2} {:>9}",
            call.name(),
            seen.costs_us.len(),
            if busy { seen.outlasted.to_string() } else { "-".to_owned() }
        );
        // The cost of a handle is taken from rows of 16, and of 1 where 16 do not fit.
        if count <= ALL_HANDLES {
            let suffix = if busy { "_busy_us" } else { "_us" };
            figures.set(format!("{}_{mib}mib{suffix}", call.name()), median, "us");
        }
    }
}

/// Table B.
pub(crate) fn stalls<'g>(
    gpu: &'g Gpu<'g>,
    effort: Effort,
    load: &mut Load<'g>,
    figures: &mut Figures<'_, '_>,
) -> Result<(), Fault> {
    let chains = if effort.quick { 5 } else { 50 };
    say!(figures, "\ntable B: device time between events of another stream while calls are made");
    say!(figures, "  a chain of 200 kernels of {:.1} us, an event after each; the", load.kernel_us);
    say!(
        figures,
        "  first row is {chains} chains with no call; then 16 handles, at least 2 cycles"
    );
    say!(
        figures,
        "  {:<14} {:>5} {:>6} {:>7} {:>10} {:>10} {:>11}",
        "call",
        "MiB",
        "calls",
        "events",
        "median us",
        "p99 us",
        "longest us"
    );
    let mut quiet = Vec::new();
    for _ in 0..chains {
        load.launch()?;
        load.finish(&mut quiet)?;
    }
    print_gaps(figures, "none", 0, 0, &quiet);
    let quiet_us = quantile(&quiet, 1.0);
    figures.set("no_call_longest_us", quiet_us, "us");
    let end = effort.until(18);
    let sizes = [2, 20, 256];
    let mut longest_us = [0.0_f64; Call::EVERY.len()];
    for (index, mib) in sizes.into_iter().enumerate() {
        let size = (piece(gpu, mib), 16);
        if size.0 * size.1 > room(gpu)? {
            say!(figures, "  {:<14} {mib:>5} does not fit in memory", "-");
            continue;
        }
        let slice = end.saturating_duration_since(Instant::now()) / u32_of(sizes.len() - index);
        let mut watch = Watch::new(Some(&mut *load));
        repeat(gpu, &mut watch, size, effort, Instant::now() + slice)?;
        for call in Call::EVERY {
            let seen = watch.of(call);
            if !seen.gaps_us.is_empty() {
                print_gaps(figures, call.name(), mib, seen.costs_us.len(), &seen.gaps_us);
                let longest = quantile(&seen.gaps_us, 1.0);
                longest_us[call as usize] = longest_us[call as usize].max(longest);
            }
        }
    }
    for call in Call::EVERY.into_iter().filter(|&call| longest_us[call as usize] > 0.0) {
        let stall_us = (longest_us[call as usize] - quiet_us).max(0.0);
        figures.set(format!("{}_stall_us", call.name()), stall_us, "us");
    }
    Ok(())
}

fn print_gaps(
    figures: &mut Figures<'_, '_>,
    name: &str,
    mib: usize,
    calls: usize,
    gaps_us: &[f64],
) {
    say!(
        figures,
        "  {name:<14} {mib:>5} {calls:>6} {:>7} {:>10.2} {:>10.2} {:>11.2}",
        gaps_us.len(),
        quantile(gaps_us, 0.5),
        quantile(gaps_us, 0.99),
        quantile(gaps_us, 1.0)
    );
}

/// Table C.
pub(crate) fn waits<'g>(
    gpu: &'g Gpu<'g>,
    effort: Effort,
    load: &mut Load<'g>,
    figures: &mut Figures<'_, '_>,
) -> Result<(), Fault> {
    let cycles = if effort.quick { 3 } else { 10 };
    say!(figures, "\ntable C: does a call wait for a kernel that uses other memory?");
    say!(
        figures,
        "  a kernel of {:.1} ms works on one range, the call is on another of 20 MiB;",
        load.kernel_us / 1e3
    );
    say!(figures, "  {cycles} times; plain_free (cuMemFree) is the control that should wait");
    say!(
        figures,
        "  {:<14} {:>3} {:>11} {:>15} {:>9}",
        "call",
        "n",
        "median us",
        "kernel left us",
        "waits"
    );
    let mut watch = Watch::new(Some(load));
    let end = effort.until(10);
    for cycle in 0..cycles {
        if cycle > 0 && Instant::now() > end {
            break;
        }
        watch.cycle(gpu, (piece(gpu, 20), 1), false)?;
        watch.plain_free(gpu, piece(gpu, 20))?;
    }
    for call in Call::EVERY {
        let seen = watch.of(call);
        let count = seen.costs_us.len();
        if count == 0 {
            continue;
        }
        let waits = seen.outlasted * 2 > count;
        say!(
            figures,
            "  {:<14} {count:>3} {:>11.2} {:>15.2} {:>9}",
            call.name(),
            quantile(&seen.costs_us, 0.5),
            quantile(&seen.remaining_us, 0.5),
            format!("{}/{count}", seen.outlasted)
        );
        figures.set(format!("{}_waits", call.name()), f64::from(u8::from(waits)), "bool");
    }
    Ok(())
}

/// Table D.
pub(crate) fn many_handles<'g>(
    gpu: &'g Gpu<'g>,
    effort: Effort,
    figures: &mut Figures<'_, '_>,
) -> Result<(), Fault> {
    let unit = gpu.granularity.0.max(1);
    say!(
        figures,
        "\ntable D: many handles of {unit} bytes in one range; one cycle each, and one more"
    );
    say!(figures, "  with access and unmapping as one call (_all)");
    say!(
        figures,
        "  {:<14} {:>7} {:>10} {:>15} {:>15} {:>7}",
        "call",
        "n",
        "calls/s",
        "first tenth us",
        "last tenth us",
        "growth"
    );
    let wanted: &[usize] = if effort.quick { &[10_000] } else { &[10_000, 50_000] };
    let mut handle_host_bytes = 0.0_f64;
    let end = effort.until(25);
    for &wanted in wanted {
        let mut count = wanted.min(room(gpu)? / unit);
        if count < wanted {
            say!(figures, "  of {wanted} handles {count} fit in memory");
        }
        for all in [false, true] {
            if Instant::now() > end {
                say!(figures, "  no time left for {count} handles, all = {all}");
                continue;
            }
            // If the driver refuses the number, try half of it, and so on, at most six times.
            for attempt in 0..=6 {
                let rss_before = rss_bytes();
                let mut watch = Watch::new(None);
                let result = watch.cycle(gpu, (unit, count), all);
                print_growth(&watch, all, figures);
                let Err(fault) = result else {
                    let grown = usize::try_from(watch.mapped_rss.saturating_sub(rss_before));
                    let per_handle = float(grown.unwrap_or(0)) / float(count.max(1));
                    say!(figures, "  {count} handles: {per_handle:.0} bytes of host memory each");
                    // Later cycles find the host memory of earlier ones, so the most is kept.
                    handle_host_bytes = per_handle.max(handle_host_bytes);
                    figures.set("handle_host_bytes", handle_host_bytes, "bytes");
                    figures.set("handles", float(count), "count");
                    set_growth(&watch, count, figures);
                    break;
                };
                say!(figures, "  {count} handles: {fault}");
                if attempt == 6 || count < 2 {
                    return Err(fault);
                }
                count /= 2;
            }
        }
    }
    Ok(())
}

/// Medians of the first and the last tenth of the calls.
fn tenths(costs_us: &[f64]) -> (f64, f64) {
    let tenth = (costs_us.len() / 10).max(1).min(costs_us.len());
    let last = &costs_us[costs_us.len() - tenth..];
    (quantile(&costs_us[..tenth], 0.5), quantile(last, 0.5))
}

fn print_growth(watch: &Watch<'_, '_>, all: bool, figures: &mut Figures<'_, '_>) {
    let both = [Call::Reserve, Call::Create, Call::Map, Call::Release, Call::AddressFree];
    let one =
        if all { [Call::SetAccessAll, Call::UnmapAll] } else { [Call::SetAccess, Call::Unmap] };
    for call in Call::EVERY.into_iter().filter(|call| both.contains(call) || one.contains(call)) {
        let costs = &watch.of(call).costs_us;
        if costs.is_empty() {
            continue;
        }
        let (first, last) = tenths(costs);
        let rate = float(costs.len()) * 1e6 / costs.iter().sum::<f64>().max(1e-3);
        say!(
            figures,
            "  {:<14} {:>7} {rate:>10.0} {first:>15.2} {last:>15.2} {:>7.2}",
            call.name(),
            costs.len(),
            last / first.max(1e-3)
        );
    }
}

fn set_growth(watch: &Watch<'_, '_>, count: usize, figures: &mut Figures<'_, '_>) {
    for call in [Call::Create, Call::Map, Call::SetAccess, Call::Unmap, Call::Release] {
        let costs = &watch.of(call).costs_us;
        if costs.len() > 1 {
            let (first, last) = tenths(costs);
            let name = format!("{}_growth_{count}", call.name());
            figures.set(name, last / first.max(1e-3), "ratio");
        }
    }
}

//! The driver's single calls: their cost and stalls, with one table per question, and a sweep over
//! handle sizes that fills [`DriverCosts`](lowtide_cuda_sim::DriverCosts).
//!
//! It measures, in this order: calls and host microseconds per call (median, 99th percentile),
//! device microseconds between the events of another stream while the calls run, if a call waits
//! for a running kernel, growth with 10,000 and 50,000 handles, and the memory that a context uses
//! on device and host. `tables.rs` says what each table shows. It calls the driver through cudarc,
//! without lowtide's driver.
//!
//! No new repetition begins after a table's time. A table that fails is a part that failed, with
//! the driver's code, and the next one continues.
//!
//! Invariant: `tables wanted = tables run + tables failed`.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::time::{Duration, Instant};

mod figures;
mod floor;
mod gpu;
mod measure;
mod tables;

use figures::Figures;
use gpu::Gpu;
use measure::Load;

use super::cases::Outcome;
use super::cli::Args;
use super::report::Report;
use super::rig::{float, resident};

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

/// Measures the calls. Nothing of the process may have used the device before.
pub(crate) fn calls(args: &Args, report: &mut Report<'_>) -> Outcome {
    let at_start = rss_bytes();
    let gpu = &Gpu::open(args.device)?;
    let figures = &mut Figures(report);
    figures.line(&format!("calls: {}", gpu.context.name()?));
    let (free, total) = gpu.context.mem_get_info()?;
    figures.line("\ntable E: memory of a context; once, before any other allocation");
    figures.set("context_host_bytes", float(rss_bytes().saturating_sub(at_start)), "bytes");
    figures.set("context_device_bytes", float(total.saturating_sub(free)), "bytes");

    let effort = Effort::new(!args.thorough);
    let load = |kernels, kernel_us| Load::new(gpu, kernels, kernel_us);
    let done = floor::capabilities(gpu, figures);
    figures.table("capabilities", done);
    let done = tables::costs(gpu, effort, None, figures);
    figures.table("A, idle", done);
    // The tables that need a kernel running on another stream.
    let done =
        load(1, 5_000.0).and_then(|mut load| tables::costs(gpu, effort, Some(&mut load), figures));
    figures.table("A, busy", done);
    let done = load(200, 50.0).and_then(|mut load| tables::stalls(gpu, effort, &mut load, figures));
    figures.table("B", done);
    let done =
        load(1, 100_000.0).and_then(|mut load| tables::waits(gpu, effort, &mut load, figures));
    figures.table("C", done);
    let done = tables::many_handles(gpu, effort, figures);
    figures.table("D", done);
    let done = floor::address_space(gpu, figures);
    figures.table("E, address space", done);
    let done = floor::pinned(gpu, effort, figures);
    figures.table("E, pinned memory", done);
    let done = floor::pool(gpu, effort, figures);
    figures.table("E, pool", done);
    figures.costs();
    Ok(())
}

/// Unmaps memory that a kernel is using, and reports what becomes of it. This ends the context.
pub(crate) fn provoke(args: &Args, report: &mut Report<'_>) -> Outcome {
    let gpu = Gpu::open(args.device)?;
    let mut load = Load::new(&gpu, 1, 200_000.0)?;
    load.launch()?;
    let start = Instant::now();
    let unmapped = load.buffer.unmap(0);
    let took = start.elapsed();
    report.line(&match (unmapped, load.finish(&mut Vec::new())) {
        (Err(fault), _) => format!("the unmap itself failed after {took:?}: {fault}"),
        (Ok(()), Ok(())) => format!("unmap took {took:?}; the kernel ended without a fault"),
        (Ok(()), Err(fault)) => format!("unmap took {took:?}; then {fault}"),
    });
    Ok(())
}

/// Returns the process's resident bytes, from the kernel; 0 if unknown.
fn rss_bytes() -> u64 {
    resident().map_or(0, |bytes| bytes.get())
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast from float holds at the ends; negative and NaN become 0"
)]
fn whole(value: f64) -> u64 {
    value as u64
}

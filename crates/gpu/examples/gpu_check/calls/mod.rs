//! The driver's single calls: their cost and stalls, with one table per question, and a sweep over
//! handle sizes that fills [`DriverCosts`](lowtide_cuda_sim::DriverCosts).
//!
//! It measures, in this order: calls and host microseconds per call (median, 99th percentile),
//! device microseconds between the events of another stream while the calls run, if a call waits
//! for a running kernel, growth with 10,000 and 50,000 handles, and the memory that a context uses
//! on device and host. `tables.rs` says what each table shows. It calls the driver
//! directly, without lowtide's driver or cudarc.
//!
//! No new repetition begins after a table's time. A table that fails is a part that failed, with
//! the driver's code, and the next one continues.
//!
//! Invariant: `tables wanted = tables run + tables failed`.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::time::{Duration, Instant};

/// Writes a line of a table.
macro_rules! say {
    ($figures:expr, $($text:tt)*) => {
        $figures.line(&format!($($text)*))
    };
}

mod driver;
mod figures;
mod floor;
mod gpu;
mod measure;
mod tables;

use driver::{Library, Table};
use figures::Figures;
use gpu::{Gpu, Kernel, Physical, Range};
use measure::{LOAD_BYTES, Load};

use super::cases::Outcome;
use super::cli::Args;
use super::report::Report;

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
    let rss_bytes_at_start = rss_bytes();
    let table = Table::resolve(Library::open()?);
    let version = gpu::start(&table)?;
    let rss_bytes_started = rss_bytes();
    let gpu = Gpu::open(&table, i32::try_from(args.device)?)?;
    let mut figures = Figures::new(report);
    say!(figures, "calls: {}, driver {version}, {}", gpu.name()?, table.library.name);
    for symbol in table.missing() {
        say!(figures, "  the driver library lacks the function {symbol}");
    }
    let floor = floor::Floor { rss_bytes_at_start, rss_bytes_started, rss_bytes: rss_bytes() };
    run(&gpu, Effort::new(!args.thorough), floor, &mut figures);
    figures.costs();
    Ok(())
}

/// Makes one table after the other.
fn run<'g>(gpu: &'g Gpu<'g>, effort: Effort, floor: floor::Floor, figures: &mut Figures<'_, '_>) {
    let done = floor.print(gpu, figures);
    figures.table("context overhead", done);
    let done = floor::capabilities(gpu, figures);
    figures.table("capabilities", done);
    let done = tables::costs(gpu, effort, None, figures);
    figures.table("A, idle", done);
    match Kernel::load(gpu).and_then(|kernel| Ok((kernel, buffer(gpu)?))) {
        Ok((kernel, buffer)) => beside_a_kernel(gpu, &kernel, &buffer, effort, figures),
        Err(fault) => figures.table("A busy, B and C: no kernel", Err(fault)),
    }
    let done = tables::many_handles(gpu, effort, figures);
    figures.table("D", done);
    let done = floor::address_space(gpu, figures);
    figures.table("E, address space", done);
    let done = floor::pinned(gpu, effort, figures);
    figures.table("E, pinned memory", done);
    let done = floor::pool(gpu, effort, figures);
    figures.table("E, pool", done);
}

/// The tables that need a kernel running on another stream.
fn beside_a_kernel<'g>(
    gpu: &'g Gpu<'g>,
    kernel: &'g Kernel<'g>,
    buffer: &Range<'g>,
    effort: Effort,
    figures: &mut Figures<'_, '_>,
) {
    let load = |chain| Load::new(gpu, kernel, buffer.base, chain);
    let done = load((1, 5_000.0))
        .and_then(|mut load| tables::costs(gpu, effort, Some(&mut load), figures));
    figures.table("A, busy", done);
    let done =
        load((200, 50.0)).and_then(|mut load| tables::stalls(gpu, effort, &mut load, figures));
    figures.table("B", done);
    let done =
        load((1, 100_000.0)).and_then(|mut load| tables::waits(gpu, effort, &mut load, figures));
    figures.table("C", done);
}

/// A mapped range for the kernel to work on.
fn buffer<'g>(gpu: &'g Gpu<'g>) -> Result<Range<'g>, driver::Fault> {
    let piece = LOAD_BYTES.next_multiple_of(gpu.granularity.0.max(1));
    let mut range = Range::reserve(gpu, piece, 1)?;
    range.map(0, &Physical::create(gpu, piece)?)?;
    range.set_access(0)?;
    Ok(range)
}

/// Unmaps memory that a kernel is using, and reports what becomes of it. This ends the context.
pub(crate) fn provoke(args: &Args, report: &mut Report<'_>) -> Outcome {
    let table = Table::resolve(Library::open()?);
    gpu::start(&table)?;
    let gpu = Gpu::open(&table, i32::try_from(args.device)?)?;
    let kernel = Kernel::load(&gpu)?;
    let mut buffer = buffer(&gpu)?;
    let mut load = Load::new(&gpu, &kernel, buffer.base, (1, 200_000.0))?;
    load.launch()?;
    let start = Instant::now();
    let unmapped = buffer.unmap(0);
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
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).and_then(|n| n.parse().ok());
    kib.map_or(0, |kib: u64| kib * 1024)
}

#[expect(clippy::cast_precision_loss, reason = "counts and bytes stay far below 2^53")]
fn float(count: usize) -> f64 {
    count as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast from float holds at the ends; negative and NaN become 0"
)]
fn whole(value: f64) -> u64 {
    value as u64
}

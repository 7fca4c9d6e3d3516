//! Measures the cost and the stalls of CUDA's virtual memory calls, with one table per question.
//!
//! `cargo run --release --example vmm_costs` on a machine with an NVIDIA driver; no toolkit is
//! needed. It measures, in this order: calls and host microseconds per call (median, 99th
//! percentile), device microseconds between the events of another stream while the calls run, if a
//! call waits for a running kernel, growth with 10,000 and 50,000 handles, and the memory that a
//! context uses on device and host. `docs/BENCHMARKS_APPENDIX.md` explains the tables.
//!
//! It has not run on a GPU yet: its logic was tested with a fake library only, which says nothing
//! about time.
//!
//! It ends by itself in under 8 minutes (`--quick`: 1 minute), as long as the driver responds: no
//! new repetition begins after a part's time. A part that fails is printed with the driver's code,
//! and the next one continues. Exit code 0: all parts ran; 1: some part failed; 2: skipped, with
//! the reason.
//!
//! Invariant: `parts printed = parts run + parts failed`.
#![expect(clippy::print_stdout, reason = "the tables are the product")]
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Parser;

#[path = "vmm_costs/driver.rs"]
mod driver;
#[path = "vmm_costs/figures.rs"]
mod figures;
#[path = "vmm_costs/floor.rs"]
mod floor;
#[path = "vmm_costs/gpu.rs"]
mod gpu;
#[path = "vmm_costs/measure.rs"]
mod measure;
#[path = "vmm_costs/tables.rs"]
mod tables;

use driver::{Fault, Library, Table};
use figures::Figures;
use gpu::{Gpu, Kernel, Physical, Range};
use measure::{LOAD_BYTES, Load};

/// Measures what CUDA's virtual-memory calls cost on this machine.
#[derive(Debug, Parser)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
struct Args {
    /// Run few repetitions and fewer sizes: under a minute.
    #[arg(long)]
    quick: bool,
    /// End with the figures as a Rust constant.
    #[arg(long)]
    rust: bool,
    /// Also unmap memory that a kernel is using, in a child process, and report the code.
    #[arg(long)]
    provoke_fault: bool,
    /// The device's ordinal.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// Run as the child of `--provoke-fault`.
    #[arg(long, hide = true)]
    fault_child: bool,
}

/// The amount of work: repetitions and time.
#[derive(Clone, Copy, Debug)]
struct Effort {
    quick: bool,
    /// The number of timed calls per row.
    samples: usize,
    /// The time for all parts together.
    total: Duration,
}

impl Effort {
    fn new(quick: bool) -> Self {
        let (samples, total_s) = if quick { (40, 45) } else { (400, 420) };
        Self { quick, samples, total: Duration::from_secs(total_s) }
    }

    /// The end of a part that may take so many hundredths of the whole.
    fn until(self, hundredths: u32) -> Instant {
        Instant::now() + self.total * hundredths / 100
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let rss_bytes_at_start = rss_bytes();
    let table = match Library::open() {
        Ok(library) => Table::resolve(library),
        Err(fault) => {
            println!("skipped: no CUDA driver");
            println!("reason: {fault}");
            return ExitCode::from(2);
        }
    };
    let opened = gpu::start(&table).and_then(|version| {
        let rss_bytes_started = rss_bytes();
        Ok((version, rss_bytes_started, Gpu::open(&table, args.device)?))
    });
    let (version, rss_bytes_started, gpu) = match opened {
        Ok(opened) => opened,
        Err(fault) => {
            println!("skipped: no usable CUDA device");
            println!("reason: {fault}");
            return ExitCode::from(2);
        }
    };
    if args.fault_child {
        return fault_child(&gpu);
    }
    let mut figures = Figures::new(gpu.name().unwrap_or_default(), version);
    println!("vmm_costs: {}, driver {}, {}", figures.device, version_text(version), {
        table.library.name
    });
    for symbol in table.missing() {
        println!("  the driver library lacks the function {symbol}");
    }
    let floor = floor::Floor { rss_bytes_at_start, rss_bytes_started, rss_bytes: rss_bytes() };
    let failed = run(&gpu, &args, floor, &mut figures);
    figures.print();
    if args.rust {
        figures.print_rust();
    }
    println!("parts that failed: {failed}");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the parts one after the other and counts those that failed.
fn run<'g>(gpu: &'g Gpu<'g>, args: &Args, floor: floor::Floor, figures: &mut Figures) -> u32 {
    let effort = Effort::new(args.quick);
    let mut failed = 0;
    let mut part = |title: &str, result: Result<(), Fault>| {
        if let Err(fault) = result {
            println!("FAILED {title}: {fault}");
            failed += 1;
        }
    };
    part("context overhead", floor.print(gpu, figures));
    part("capabilities", floor::capabilities(gpu, figures));
    part("table A, idle", tables::costs(gpu, effort, None, figures));
    match Kernel::load(gpu).and_then(|kernel| Ok((kernel, buffer(gpu)?))) {
        Ok((kernel, buffer)) => beside_a_kernel(gpu, &kernel, &buffer, effort, figures, &mut part),
        Err(fault) => part("tables A busy, B and C: no kernel", Err(fault)),
    }
    part("table D", tables::many_handles(gpu, effort, figures));
    part("table E, address space", floor::address_space(gpu, figures));
    part("table E, pinned memory", floor::pinned(gpu, effort, figures));
    part("table E, pool", floor::pool(gpu, effort, figures));
    if args.provoke_fault {
        provoke_fault(args.device);
    }
    failed
}

/// The parts that need a kernel running on another stream.
fn beside_a_kernel<'g>(
    gpu: &'g Gpu<'g>,
    kernel: &'g Kernel<'g>,
    buffer: &Range<'g>,
    effort: Effort,
    figures: &mut Figures,
    part: &mut impl FnMut(&str, Result<(), Fault>),
) {
    let base = buffer.base;
    let mut with = |title: &str, chain, run: &mut dyn FnMut(&mut Load<'g>) -> Result<(), Fault>| {
        part(title, Load::new(gpu, kernel, base, chain).and_then(|mut load| run(&mut load)));
    };
    with("table A, busy", (1, 5_000.0), &mut |load| {
        tables::costs(gpu, effort, Some(load), figures)
    });
    with("table B", (200, 50.0), &mut |load| tables::stalls(gpu, effort, load, figures));
    with("table C", (1, 100_000.0), &mut |load| tables::waits(gpu, effort, load, figures));
}

/// A mapped range for the kernel to work on.
fn buffer<'g>(gpu: &'g Gpu<'g>) -> Result<Range<'g>, Fault> {
    let piece = LOAD_BYTES.next_multiple_of(gpu.granularity.0.max(1));
    let mut range = Range::reserve(gpu, piece, 1)?;
    range.map(0, &Physical::create(gpu, piece)?)?;
    range.set_access(0)?;
    Ok(range)
}

/// Runs the child that unmaps memory under a kernel, and prints what became of it.
fn provoke_fault(device: i32) {
    println!("\nfault: a child process unmaps a range that its kernel is using; once");
    let child = std::env::current_exe().and_then(|program| {
        Command::new(program).arg("--fault-child").arg(format!("--device={device}")).output()
    });
    match child {
        Ok(output) => {
            print!("{}", String::from_utf8_lossy(&output.stdout));
            println!("  the child ended with {}", output.status);
        }
        Err(error) => println!("  cannot start a child process: {error}"),
    }
}

fn fault_child(gpu: &Gpu<'_>) -> ExitCode {
    let unmapped = || -> Result<(Duration, Result<(), Fault>), Fault> {
        let kernel = Kernel::load(gpu)?;
        let mut buffer = buffer(gpu)?;
        let mut load = Load::new(gpu, &kernel, buffer.base, (1, 200_000.0))?;
        load.launch()?;
        let start = Instant::now();
        buffer.unmap(0)?;
        let took = start.elapsed();
        Ok((took, load.finish(&mut Vec::new())))
    };
    match unmapped() {
        Ok((took, Ok(()))) => println!("  unmap took {took:?}; the kernel ended without a fault"),
        Ok((took, Err(fault))) => println!("  unmap took {took:?}; then {fault}"),
        Err(fault) => println!("  the unmap itself, or a call before it, failed: {fault}"),
    }
    ExitCode::SUCCESS
}

fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
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

//! Checks lowtide's guarantees on a machine with an NVIDIA GPU, and measures their costs.
//!
//! It is one program to copy to that machine, which needs the driver and no toolkit. It identifies
//! the device, runs the contract that an arena keeps over every driver, measures part by part, and
//! ends with a table of goals, which `docs/BENCHMARKS_APPENDIX.md` lists.
//!
//! It has not run on a GPU yet: its logic was tested with a fake driver library, which says nothing
//! about time.
//!
//! Each part runs in a process of its own with a deadline, and all of them within a budget. A part
//! that fails, aborts, hangs or loses the context leaves the results of the others. Results are
//! written as they are found, and the results file after each part.
//!
//! Exit code 0: all parts ran, or there is no device (`skipped`); 1: a case of the contract failed;
//! 2: a part did not run to its end.
//!
//! Invariant: a missed goal is printed and changes no exit code.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitCode};

use clap::Parser;
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::driver::{Backend, Driver, DriverError};

mod calls;
#[path = "../../tests/gpu/contract/cases.rs"]
mod cases;
mod cli;
pub(crate) mod cuarena;
#[path = "../../tests/gpu/contract/cuda.rs"]
mod cuda;
mod memory;
mod pairs;
mod process;
pub(crate) mod report;
mod rig;
mod sleep;
mod torture;

use cases::{CASES, Outcome};
pub(crate) use cli::Args;
use process::Plant;
use report::Report;
use rig::Rig;

/// Measures a part; `On` takes the opened device.
#[derive(Debug)]
enum Run {
    Bare(fn(&Args, &mut Report<'_>) -> Outcome),
    On(fn(&Rig<'_>, &mut Report<'_>) -> Outcome),
}

/// A part of the check.
#[derive(Debug)]
pub(crate) struct Check {
    /// The name on the command line and in results.
    pub(crate) name: &'static str,
    about: &'static str,
    /// The seconds after which it is killed by default. At the default sizes each needs a third of
    /// them or less, by the costs that other projects have measured.
    limit_s: u64,
    run: Run,
}

pub(crate) type Part = &'static Check;

const fn part(name: &'static str, about: &'static str, limit_s: u64, run: Run) -> Check {
    Check { name, about, limit_s, run }
}

/// The parts, in the order in which they run: the first always, the last only on request, as it
/// breaks the context.
static PARTS: &[Check] = &[
    part("device", "The device's name and properties; runs always", 60, Run::Bare(identified)),
    part("processes", "The processes on it, as NVML lists them", 60, Run::On(memory::processes)),
    part("contract", "The contract of an arena, on each backend", 120, Run::Bare(contract)),
    part("calls", "The driver's calls by handle size", 90, Run::Bare(calls::calls)),
    part("pair", "An allocation and its free, next to cudarc's", 60, Run::On(pairs::pair)),
    part("lanes", "The same from many threads", 60, Run::On(pairs::lanes)),
    part("cuarena", "The loops of cuArena's own benchmark", 60, Run::On(cuarena::cuarena)),
    part("decay", "A burst, and the release of its memory", 60, Run::On(pairs::decay)),
    part("sleep-keep", "Sleep and wake with contents kept", 240, Run::On(sleep::keep)),
    part("sleep-discard", "The same, contents discarded", 60, Run::On(sleep::discard)),
    part("fragmentation", "Random sizes at two thirds", 60, Run::On(memory::fragmentation)),
    part("remap", "Memory at other addresses, against a copy", 60, Run::On(memory::remap)),
    part("compact", "Live blocks compacted, against a copy", 60, Run::On(memory::compact)),
    part("governor", "cudarc's own, from a governed pool", 60, Run::On(pairs::governor)),
    part("torture", "Every word checked on eight lanes", 60, Run::On(torture::torture)),
    part(PROVOKE, "Unmaps under a kernel; on request", 60, Run::Bare(calls::provoke)),
];

const PROVOKE: &str = "provoke";

fn main() -> ExitCode {
    let args = Args::parse();
    let mut out = io::stdout();
    ExitCode::from(match args.child {
        Some(part) => child(&args, part, &mut Report::records(&mut out)),
        None if args.in_process => check(&args, &mut Report::new(&mut out)),
        None => check_apart(&args, &mut Report::new(&mut out), &itself),
    })
}

/// This program, with the same arguments, for one part.
fn itself(part: Part) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).args(["--child", part.name]);
    if part.name == "torture" {
        // By default streams share eight hardware queues, and one may wait for another's kernel.
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    }
    Ok(command)
}

/// Runs everything that is wanted, each part in a process of its own; returns the exit code.
pub(crate) fn check_apart(args: &Args, report: &mut Report<'_>, start: process::Start<'_>) -> u8 {
    process::supervise(args, report, start);
    report.finish(args)
}

/// Runs everything that is wanted in this process; returns the exit code.
pub(crate) fn check(args: &Args, report: &mut Report<'_>) -> u8 {
    for part in PARTS.iter().filter(|part| args.wants(part.name)) {
        report.line(&format!("part: {}", part.name));
        run(args, part, report);
        let is_unknown = part.name == PARTS[0].name && !report.failed.is_empty();
        if is_unknown || report.skipped.is_some() {
            break;
        }
    }
    report.finish(args)
}

/// Runs a part as a child process; returns the exit code.
pub(crate) fn child(args: &Args, part: Part, report: &mut Report<'_>) -> u8 {
    report.plant = args.plant.iter().find(|(_, of)| of.name == part.name).map(|(it, _)| *it);
    run(args, part, report);
    report.end();
    report.exit_code()
}

/// Runs a part in this process; if it fails or panics, the report contains the error.
fn run(args: &Args, part: Part, report: &mut Report<'_>) {
    let cause = failure(|| match part.run {
        _ if report.plant == Some(Plant::Lose) => torture::lose_context(&Rig::open(args)?),
        Run::Bare(measure) => measure(args, report),
        Run::On(measure) => measure(&Rig::open(args)?, report),
    });
    if let Some(cause) = cause {
        report.fail(part.name, cause);
    }
}

/// Returns the error of what fails or panics.
fn failure(act: impl FnOnce() -> Outcome) -> Option<String> {
    // A report is lines and lists: nothing of it is half done when a part panics.
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(outcome) => outcome.err().map(|fault| fault.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Some(format!("panicked: {}", text.unwrap_or("no message")))
        }
    }
}

/// Opens the device and prints its properties.
fn identified(args: &Args, report: &mut Report<'_>) -> Outcome {
    let devices = match CudaDriver::devices() {
        Ok(devices) => devices,
        Err(error) => {
            report.no_device(&error.to_string());
            return Ok(());
        }
    };
    let rig = Rig::open(args)?;
    let (device, (headroom, total)) = (rig.driver.device(), rig.memory()?);
    let version = rig.driver.driver_version();
    let capabilities = rig.driver.capabilities();
    for (name, value) in [
        ("devices", devices.len().to_string()),
        ("device", device.name.clone()),
        ("uuid", device.uuid.to_string()),
        ("driver_version", format!("{}.{}", version / 1000, version % 1000 / 10)),
        ("backend", rig.driver.backend().to_string()),
        ("granularity", capabilities.granularity.to_string()),
        ("remap", capabilities.remap.to_string()),
    ] {
        report.fact(name, &value);
    }
    let taken = total.saturating_sub(headroom);
    // The context's own memory, and that of other processes when it was created; then the growth
    // since.
    let floor = rig.driver.context_overhead().unwrap_or(taken);
    for (name, bytes) in [
        ("total", total),
        ("headroom", headroom),
        ("context_overhead", floor),
        ("unmanaged", taken.saturating_sub(floor)),
    ] {
        report.figure(&format!("gpu.memory.{name}_bytes"), bytes.as_f64(), "bytes");
    }
    Ok(())
}

/// Runs the contract, case by case, on each backend that the device supports.
fn contract(args: &Args, report: &mut Report<'_>) -> Outcome {
    for backend in [Backend::CudaVirtualMemory, Backend::CudaPool, Backend::CudaPlain] {
        let options = CudaOptions { backend: Some(backend), ..rig::options(args) };
        let device = match cuda::Cuda::open(options) {
            Ok(device) => device,
            Err(fault) => {
                if !matches!(fault.downcast_ref(), Some(DriverError::NoBackend { .. })) {
                    return Err(fault);
                }
                report.line(&format!("contract not run: {fault}"));
                continue;
            }
        };
        for &(name, case) in CASES {
            report.case(&format!("{backend}: {name}"), failure(|| case(&device)));
        }
    }
    Ok(())
}

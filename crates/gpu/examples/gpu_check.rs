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

#[path = "gpu_check/calls/mod.rs"]
mod calls;
#[path = "../tests/gpu/contract/cases.rs"]
mod cases;
#[path = "gpu_check/cli.rs"]
mod cli;
#[path = "gpu_check/cuarena.rs"]
mod cuarena;
#[path = "../tests/gpu/contract/cuda.rs"]
mod cuda;
#[path = "gpu_check/decay.rs"]
mod decay;
#[path = "gpu_check/governor.rs"]
mod governor;
#[path = "gpu_check/holes.rs"]
mod holes;
#[path = "gpu_check/pairs.rs"]
mod pairs;
#[path = "gpu_check/process.rs"]
mod process;
#[path = "gpu_check/processes.rs"]
mod processes;
#[path = "gpu_check/report.rs"]
pub(crate) mod report;
#[path = "gpu_check/rig.rs"]
mod rig;
#[path = "gpu_check/sleep.rs"]
mod sleep;
#[path = "gpu_check/torture/mod.rs"]
mod torture;

use cases::{CASES, Fault, Outcome};
pub(crate) use cli::{Args, Part};
use process::Plant;
use report::Report;
use rig::Rig;

type Measure = fn(&Rig<'_>, &mut Report<'_>) -> Outcome;

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
    command.args(std::env::args_os().skip(1)).args(["--child", part.name()]);
    if part == Part::Torture {
        // By default streams share eight hardware queues, and one may wait for another's kernel.
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    }
    Ok(command)
}

/// Runs everything that is wanted, each part in a process of its own; returns the exit code.
pub(crate) fn check_apart(args: &Args, report: &mut Report<'_>, start: process::Start<'_>) -> u8 {
    process::supervise(args, report, start);
    finish(args, report)
}

/// Runs everything that is wanted in this process; returns the exit code.
pub(crate) fn check(args: &Args, report: &mut Report<'_>) -> u8 {
    for part in Part::all().filter(|part| args.wants(*part)) {
        report.line(&format!("part: {}", part.name()));
        run(args, part, report);
        let is_unknown = part == Part::Device && !report.failed.is_empty();
        if is_unknown || report.skipped.is_some() {
            break;
        }
    }
    finish(args, report)
}

fn finish(args: &Args, report: &mut Report<'_>) -> u8 {
    if report.skipped.is_none() {
        report.goals();
    }
    if let Some(path) = &args.json {
        report.save(path);
    }
    report.exit_code()
}

/// Runs a part as a child process; returns the exit code.
pub(crate) fn child(args: &Args, part: Part, report: &mut Report<'_>) -> u8 {
    report.plant = args.plant.iter().find(|(_, of)| *of == part).map(|(plant, _)| *plant);
    run(args, part, report);
    report.end();
    report.exit_code()
}

/// Runs a part in this process; if it fails or panics, the report contains the error.
fn run(args: &Args, part: Part, report: &mut Report<'_>) {
    if let Some(cause) = failure(|| run_part(args, part, report)) {
        report.fail(part.name(), cause);
    }
}

fn run_part(args: &Args, part: Part, report: &mut Report<'_>) -> Outcome {
    let measure: Measure = match part {
        Part::Device => return identified(args, report),
        Part::Contract => return contract(args, report),
        Part::Calls => return calls::calls(args, report),
        Part::Provoke => return calls::provoke(args, report),
        Part::Processes => processes::processes,
        Part::Pair => pairs::pair,
        Part::Lanes => pairs::lanes,
        Part::Cuarena => cuarena::cuarena,
        Part::Decay => decay::decay,
        Part::SleepKeep => sleep::keep,
        Part::SleepDiscard => sleep::discard,
        Part::Fragmentation => holes::fragmentation,
        Part::Remap => holes::remap,
        Part::Compact => holes::compact,
        Part::Governor => governor::governor,
        Part::Torture => torture::torture,
    };
    let rig = Rig::open(args)?;
    if report.plant == Some(Plant::Lose) {
        torture::lose_context(&rig)?;
    }
    measure(&rig, report)
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
    let devices = CudaDriver::devices();
    if let Err(error) = &devices {
        report.no_device(&error.to_string());
        return Ok(());
    }
    report.fact("devices", &devices?.len().to_string());
    let rig = Rig::open(args)?;
    let (device, (headroom, total)) = (rig.driver.device(), rig.memory()?);
    let version = rig.driver.driver_version();
    let capabilities = rig.driver.capabilities();
    report.fact("device", &device.name);
    report.fact("uuid", &device.uuid.to_string());
    report.fact("driver_version", &format!("{}.{}", version / 1000, version % 1000 / 10));
    report.fact("backend", &rig.driver.backend().to_string());
    report.fact("granularity", &capabilities.granularity.to_string());
    report.fact("remap", &capabilities.remap.to_string());
    report.figure("gpu.memory.total_bytes", total.as_f64(), "bytes");
    report.figure("gpu.memory.headroom_bytes", headroom.as_f64(), "bytes");
    let taken = total.saturating_sub(headroom);
    // The context's own memory, and that of other processes when it was created; then the growth
    // since.
    let floor = rig.driver.context_overhead().unwrap_or(taken);
    report.figure("gpu.memory.context_overhead_bytes", floor.as_f64(), "bytes");
    report.figure("gpu.memory.unmanaged_bytes", taken.saturating_sub(floor).as_f64(), "bytes");
    Ok(())
}

/// Runs the contract, case by case, on each backend that the device supports.
fn contract(args: &Args, report: &mut Report<'_>) -> Outcome {
    for backend in [Backend::CudaVirtualMemory, Backend::CudaPool, Backend::CudaPlain] {
        let options = CudaOptions { backend: Some(backend), ..rig::options(args) };
        let device = match cuda::Cuda::open(options) {
            Ok(device) => device,
            Err(fault) if is_refused(&fault) => {
                report.line(&format!("contract not run: {fault}"));
                continue;
            }
            Err(fault) => return Err(fault),
        };
        for &(name, case) in CASES {
            report.case(&format!("{backend}: {name}"), failure(|| case(&device)));
        }
    }
    Ok(())
}

/// Returns `true` if the device does not support a backend.
fn is_refused(fault: &Fault) -> bool {
    matches!(fault.downcast_ref(), Some(DriverError::NoSuchBackend { .. }))
}

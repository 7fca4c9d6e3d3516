//! Checks lowtide's guarantees on a machine with an NVIDIA GPU, and measures their costs.
//!
//! It is one program to copy to that machine, which needs the driver and no toolkit. It identifies
//! the device, runs the contract that an arena keeps over every driver, measures part by part, and
//! ends with a table of goals. `docs/BENCHMARKS_APPENDIX.md` explains the figures. `vmm_costs`
//! measures the driver's single calls.
//!
//! It has not run on a GPU yet: its logic was tested with a fake driver library, which says nothing
//! about time.
//!
//! A part that fails prints its error, and the others continue. Exit code 0: all parts ran, or
//! there is no device (`skipped`); 1: a case of the contract failed; 2: a part could not run.
//!
//! Invariant: a missed goal is printed and changes no exit code.

use std::any::Any;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::Parser;
use lowtide_gpu::driver::cuda::{CudaError, CudaOptions, probe};
use lowtide_gpu::driver::{Backend, Driver};

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
#[path = "gpu_check/report.rs"]
pub(crate) mod report;
#[path = "gpu_check/rig.rs"]
mod rig;
#[path = "gpu_check/sleep.rs"]
mod sleep;

use cases::{CASES, Fault, Outcome};
pub(crate) use cli::{Args, Part};
use report::Report;
use rig::Rig;

type Measure = fn(&Rig<'_>, &mut Report<'_>) -> Outcome;

/// The parts that measure, in the order in which they run.
const MEASURES: &[(Part, &str, Measure)] = &[
    (Part::Pair, "pair", pairs::pair),
    (Part::Lanes, "lanes", pairs::lanes),
    (Part::Cuarena, "cuarena", cuarena::cuarena),
    (Part::Decay, "decay", decay::decay),
    (Part::SleepKeep, "sleep-keep", sleep::keep),
    (Part::SleepDiscard, "sleep-discard", sleep::discard),
    (Part::Fragmentation, "fragmentation", holes::fragmentation),
    (Part::Remap, "remap", holes::remap),
    (Part::Compact, "compact", holes::compact),
    (Part::Governor, "governor", governor::governor),
];

fn main() -> ExitCode {
    let args = Args::parse();
    let mut out = io::stdout();
    let mut report = Report::new(&mut out);
    ExitCode::from(check(&args, &mut report))
}

/// Runs everything that is wanted; returns the exit code.
pub(crate) fn check(args: &Args, report: &mut Report<'_>) -> u8 {
    let found = probe();
    if !found.is_usable() {
        report.line(&format!("skipped: no device ({found})"));
        return 0;
    }
    report.fact("driver", found.to_string());
    if let Some(rig) = guarded(report, "device", |report| identified(args, report)) {
        if args.wants(Part::Contract) {
            guarded(report, "contract", |report| contract(args, report));
        }
        for &(part, name, measure) in MEASURES {
            if args.wants(part) {
                report.line(&format!("part: {name}"));
                guarded(report, name, |report| measure(&rig, report));
            }
        }
    }
    report.goals();
    if let Some(path) = &args.json {
        let written = std::fs::File::create(path).and_then(|mut file| {
            serde_json::to_writer_pretty(&mut file, &report.json())?;
            writeln!(file)
        });
        if let Err(error) = written {
            report.fail("json", format!("{}: {error}", path.display()));
        }
    }
    report.exit_code()
}

/// Runs a part; if it fails or panics, the report contains the error.
fn guarded<T>(
    report: &mut Report<'_>,
    name: &'static str,
    act: impl FnOnce(&mut Report<'_>) -> Result<T, Fault>,
) -> Option<T> {
    // A report is lines and lists: nothing of it is half done when a part panics.
    let outcome = catch_unwind(AssertUnwindSafe(|| act(report)));
    let cause = match outcome {
        Ok(Ok(done)) => return Some(done),
        Ok(Err(fault)) => fault.to_string(),
        Err(panic) => panicked(&*panic),
    };
    report.fail(name, cause);
    None
}

fn panicked(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panicked: {}", text.unwrap_or("no message"))
}

/// Opens the device and prints its properties.
fn identified<'a>(args: &'a Args, report: &mut Report<'_>) -> Result<Rig<'a>, Fault> {
    let rig = Rig::open(args)?;
    let (device, (headroom, total)) = (rig.driver.device(), rig.memory()?);
    let version = rig.driver.driver_version();
    report.fact("device", device.name.clone());
    report.fact("uuid", device.uuid.to_string());
    report.fact("driver_version", format!("{}.{}", version / 1000, version % 1000 / 10));
    report.fact("backend", rig.driver.backend().to_string());
    report.fact("granularity", rig.driver.capabilities().granularity.to_string());
    report.fact("remap", rig.driver.capabilities().remap.to_string());
    report.figure("gpu.memory.total_bytes", total.as_f64(), "bytes");
    report.figure("gpu.memory.headroom_bytes", headroom.as_f64(), "bytes");
    let taken = total.saturating_sub(headroom);
    // The context's own memory, and that of other processes when it was created; then the growth
    // since.
    let floor = rig.driver.context_overhead().unwrap_or(taken);
    report.figure("gpu.memory.context_overhead_bytes", floor.as_f64(), "bytes");
    report.figure("gpu.memory.unmanaged_bytes", taken.saturating_sub(floor).as_f64(), "bytes");
    Ok(rig)
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
            let outcome = catch_unwind(AssertUnwindSafe(|| case(&device)));
            let fault = match outcome {
                Ok(Ok(())) => None,
                Ok(Err(fault)) => Some(fault.to_string()),
                Err(panic) => Some(panicked(&*panic)),
            };
            report.case(format!("{backend}: {name}"), fault);
        }
    }
    Ok(())
}

/// Returns `true` if the device does not support a backend.
fn is_refused(fault: &Fault) -> bool {
    matches!(fault.downcast_ref(), Some(CudaError::NoSuchBackend { .. }))
}

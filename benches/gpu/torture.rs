//! The program that checks a GPU, over the fake library: the time until its torture finds a missing
//! wait between lanes, whether killed parts leave the results of the others, and its size.
//!
//! This process starts itself for a part: [`child`].

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Parser as _;
use lowtide::BoxError;
use lowtide_fake_cuda::{Fake, Options};
use lowtide_gpu::clock::{Clock as _, SystemClock};

use crate::common::figures::Figures;

#[allow(dead_code, reason = "its start is not called here")]
#[path = "../../crates/gpu/examples/gpu_check.rs"]
mod program;

use program::report::{Ended, Report};
use program::{Args, check, check_apart};

/// The first argument of a child process.
const CHILD: &str = "--gpu-check";

/// Every tenth wait of a stream for an event is dropped.
const DROPPED: u64 = 10;

/// Runs of the torture, each with a seed of its own.
const SEEDS: u64 = 10;

/// Sizes that the fake, which moves byte by byte, handles quickly.
const SMALL: &[&str] = &[
    "gpu_check",
    "--handle=64KiB",
    "--repetitions=2",
    "--pair-size=64KiB",
    "--pairs=20",
    "--batches=4",
    "--compact-size=1MiB",
    "--compact-block=128KiB",
    "--torture-size=16MiB",
    "--torture-block=256KiB",
];

const fn device(order: u32, seed: u64) -> Options {
    Options {
        order,
        flags: 0,
        seed,
        capacity: 1 << 30,
        granularity: 64 << 10,
        address_space: 0,
        context_overhead: 16 << 20,
        devices: 1,
        driver_version: 12_080,
    }
}

/// Runs a part if this process was started for one.
pub(crate) fn child() -> Option<ExitCode> {
    if std::env::args().nth(1)? != CHILD {
        return None;
    }
    let args = Args::parse_from(std::env::args().skip(1));
    let _fake = Fake::start(device(2, 0));
    let mut out = std::io::stdout();
    let code = program::child(&args, args.child?, &mut Report::records(&mut out));
    Some(ExitCode::from(code))
}

/// Measures the torture, and the parts that end badly.
pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let mut worst = 0.0_f64;
    for seed in 1..=SEEDS {
        worst = worst.max(found_s(seed)?);
    }
    figures.at_most("gpu.torture.found_s", worst, "s", 5.0);
    Ok(())
}

/// Measures which results are left when others' parts end badly.
pub(crate) fn killed(figures: &mut Figures) -> Result<(), BoxError> {
    figures.at_least("gpu.killed_part.results_kept", results_kept()?, "of the others' parts", 1.0);
    Ok(())
}

/// The seconds until a run with this seed finds that waits are missing.
fn found_s(seed: u64) -> Result<f64, BoxError> {
    let fake = Fake::start(device(1, seed));
    fake.drop_waits(DROPPED);
    let run_seed = format!("--seed={seed}");
    let more = ["--only=torture", "--torture-seconds=60", &run_seed];
    let args = Args::try_parse_from(SMALL.iter().copied().chain(more))?;
    let mut text = Vec::new();
    let mut report = Report::new(&mut text);
    let clock = SystemClock::new();
    let start = clock.now();
    check(&args, &mut report);
    let took = (clock.now() - start).as_secs_f64();
    let wrong = report.figures.get("gpu.torture.wrong_words").map_or(0.0, |(words, _)| *words);
    let dropped = fake.dropped_waits();
    println!("seed {seed}: {wrong} wrong words found in {took:.3} s, {dropped} waits dropped");
    if wrong > 0.0 {
        Ok(took)
    } else {
        Err(format!("seed {seed}: not found; {}", String::from_utf8_lossy(&text)).into())
    }
}

/// The share of the other parts that ran and left a figure, while four ended badly.
fn results_kept() -> Result<f64, BoxError> {
    let more = [
        "--only=pair,lanes,decay,remap,compact,torture",
        "--plant=abort=pair,hang=lanes,panic=decay,lose=remap",
        "--deadline=lanes=5s",
        "--torture-steps=200",
    ];
    let all: Vec<&str> = SMALL.iter().copied().chain(more).collect();
    let args = Args::try_parse_from(&all)?;
    let mut text = Vec::new();
    let mut report = Report::new(&mut text);
    let start = |part: program::Part| {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(CHILD).args(&all[1..]).args(["--child", part.name()]);
        Ok(command)
    };
    check_apart(&args, &mut report, &start);
    let is_kept = |name: &str, figure: &str| {
        let ran = report.parts.iter().any(|(part, ended, _)| *part == name && *ended == Ended::Ran);
        ran && report.figures.contains_key(figure)
    };
    let others = [
        ("device", "gpu.memory.total_bytes"),
        ("compact", "gpu.compact.copy_rate_ratio"),
        ("torture", "gpu.torture.wrong_words"),
    ];
    let kept = others.iter().filter(|(name, figure)| is_kept(name, figure)).count();
    let ended: Vec<_> = report.parts.iter().map(|(name, ended, _)| (*name, ended)).collect();
    println!("parts: {ended:?}");
    let bad = ended.iter().filter(|(_, ended)| **ended != Ended::Ran).count();
    if bad != 4 {
        return Err(format!("4 parts should have ended badly: {ended:?}").into());
    }
    Ok(f64::from(u32::try_from(kept)?) / f64::from(u32::try_from(others.len())?))
}

/// Builds the program as it is copied to a machine with a GPU, and measures its file.
pub(crate) fn binary(figures: &mut Figures) -> Result<(), BoxError> {
    let program = std::env::current_exe()?;
    // <target>/<profile>/deps/<program>
    let target: PathBuf = program.ancestors().nth(3).ok_or("a program without a folder")?.into();
    let arguments = "build --locked --profile gpu-check -p lowtide-gpu --example gpu_check";
    let mut build = Command::new(env!("CARGO"));
    build.args(arguments.split(' ')).arg("--target-dir").arg(&target);
    if !build.status()?.success() {
        return Err(format!("cargo {arguments} failed").into());
    }
    let file = target.join("gpu-check/examples/gpu_check");
    let kib = u32::try_from(std::fs::metadata(file)?.len() / 1024)?;
    figures.at_most("gpu.check.binary_mib", f64::from(kib) / 1024.0, "MiB", 10.0);
    Ok(())
}

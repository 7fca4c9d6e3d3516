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

use crate::common::figures::{Figures, count};

#[allow(dead_code, reason = "its start is not called here")]
#[path = "../../crates/gpu/examples/gpu_check.rs"]
pub(crate) mod program;

use program::report::{Ended, Report};
use program::{Args, check, check_apart};

/// The first argument of a child process.
const CHILD: &str = "--gpu-check";

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

fn device(order: u32, seed: u64) -> Options {
    let (capacity, granularity) = (1 << 30, 64 << 10);
    Options { order, seed, capacity, granularity, devices: 1, ..Options::default() }
}

/// Runs a part if this process was started for one.
pub(crate) fn child() -> Option<ExitCode> {
    if std::env::args().nth(1)? != CHILD {
        return None;
    }
    let args = Args::parse_from(std::env::args().skip(1));
    let _fake = Fake::start(device(2, 0));
    let mut out = std::io::stdout();
    Some(ExitCode::from(program::child(&args, args.child?, &mut Report::records(&mut out))))
}

/// Measures the seconds until a run finds that every tenth wait of a stream for an event is
/// missing: the most of ten seeds.
pub(crate) fn torture(figures: &mut Figures) -> Result<(), BoxError> {
    let mut worst = 0.0_f64;
    for seed in 1..=10 {
        let fake = Fake::start(device(1, seed));
        fake.drop_waits(10);
        let run_seed = format!("--seed={seed}");
        let more = ["--only=torture", "--torture-seconds=60", &run_seed];
        let args = Args::try_parse_from(SMALL.iter().copied().chain(more))?;
        let (mut text, clock) = (Vec::new(), SystemClock::new());
        let mut report = Report::new(&mut text);
        let start = clock.now();
        check(&args, &mut report);
        worst = worst.max((clock.now() - start).as_secs_f64());
        if report.figures.get("gpu.torture.wrong_words").is_none_or(|(words, _)| *words == 0.0) {
            let text = String::from_utf8_lossy(&text);
            return Err(format!("seed {seed}: not found; {text}").into());
        }
    }
    figures.at_most("gpu.torture.found_s", worst, "s", 5.0);
    Ok(())
}

/// Measures the share of the other parts that ran and left a figure, while four ended badly.
pub(crate) fn killed(figures: &mut Figures) -> Result<(), BoxError> {
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
        command.arg(CHILD).args(&all[1..]).args(["--child", part.name]);
        Ok(command)
    };
    check_apart(&args, &mut report, &start);
    let others = [
        ("device", "gpu.memory.total_bytes"),
        ("compact", "gpu.compact.copy_rate_ratio"),
        ("torture", "gpu.torture.wrong_words"),
    ];
    let kept = others.iter().filter(|(name, figure)| {
        let ran = |(part, ended, _): &(&str, Ended, _)| part == name && *ended == Ended::Ran;
        report.parts.iter().any(ran) && report.figures.contains_key(*figure)
    });
    let kept = count(kept.count() as u64) / count(others.len() as u64);
    let bad = report.parts.iter().filter(|(_, ended, _)| *ended != Ended::Ran).count();
    if bad != 4 {
        return Err(format!("4 parts should have ended badly: {:?}", report.parts).into());
    }
    figures.at_least("gpu.killed_part.results_kept", kept, "of the others' parts", 1.0);
    Ok(())
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
    let mib = count(std::fs::metadata(file)?.len()) / f64::from(1 << 20);
    figures.at_most("gpu.check.binary_mib", mib, "MiB", 10.0);
    Ok(())
}

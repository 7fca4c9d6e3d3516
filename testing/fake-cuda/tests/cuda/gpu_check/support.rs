//! The program that checks a GPU, over the fake driver, with sizes that take seconds: in this
//! process, or with a process for each part, which is this program again ([`child`]).
//!
//! For the tests here, and for the bench that takes their time.

#[allow(dead_code, reason = "its start is not called here")]
#[path = "../../../../../crates/gpu/examples/gpu_check/main.rs"]
pub(crate) mod program;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::Command;

use clap::Parser as _;
use lowtide_fake_cuda::{Fake, Options};
use program::report::{Ended, Report};
use program::{Args, check, check_apart};

/// A granule of 64 KiB and work that is done at once, so that there are few bytes to move.
pub(crate) const SMALL: Options = Options {
    order: 2,
    flags: 0,
    seed: 0,
    capacity: 1 << 30,
    granularity: 64 << 10,
    address_space: 0,
    context_overhead: 16 << 20,
    devices: 1,
    driver_version: 12_080,
};

/// Sizes that the fake, which moves byte by byte, has done in seconds. Of the burst four blocks of
/// a pair's size may stay, in the lane's front.
const TINY: &[&str] = &[
    "gpu_check",
    "--handle=64KiB",
    "--repetitions=2",
    "--pair-size=64KiB",
    "--pairs=20",
    "--batches=4",
    "--cuarena-rounds=6",
    "--cuarena-part=1024",
    "--decay-size=16MiB",
    "--decay-time=100ms",
    "--sleep-size=1MiB",
    "--block=256KiB",
    "--cycles=3",
    "--fragmentation-size=8MiB",
    "--fragmentation-steps=500",
    "--remap-size=1MiB",
    "--remap-block=128KiB",
    "--compact-size=1MiB",
    "--compact-block=128KiB",
    "--torture-seconds=60",
    "--torture-steps=2000",
    "--torture-size=16MiB",
    "--torture-block=256KiB",
];

/// Work in random order, as the device does it: only then does a missing wait show.
pub(crate) fn random(seed: u64) -> Options {
    Options { order: 1, seed, ..SMALL }
}

pub(crate) fn args(more: &[&str]) -> Args {
    Args::try_parse_from(TINY.iter().chain(more)).expect("a command line")
}

/// The exit code, what was written, and the figures.
pub(crate) fn run(more: &[&str]) -> (u8, String, BTreeMap<String, f64>) {
    let mut out = Vec::new();
    let mut report = Report::new(&mut out);
    let code = check(&args(more), &mut report);
    let figures = report.figures.iter().map(|(name, (value, _))| (name.clone(), *value)).collect();
    let text = String::from_utf8(out).expect("text");
    (code, text, figures)
}

/// The variable with the arguments of a child process: this test binary, for one test.
const CHILD: &str = "LOWTIDE_GPU_CHECK_CHILD";

/// Runs a part and returns its exit code, if this process was started for one.
#[expect(clippy::disallowed_methods, reason = "a child process gets its arguments by a variable")]
pub(crate) fn child() -> Option<u8> {
    let given = std::env::var(CHILD).ok()?;
    let _fake = Fake::start(SMALL);
    let args = Args::try_parse_from(given.lines()).expect("a command line");
    // The harness of tests may have begun a line.
    let mut out = std::io::stdout();
    writeln!(out).expect("an open output");
    Some(program::child(&args, args.child.expect("a part"), &mut Report::records(&mut out)))
}

/// The test that is the program if it runs as a child process.
const PROGRAM: &str = "gpu_check::a_part_runs_in_a_process_of_its_own";

/// Runs the program with a process for each part; the exit code and what was written.
pub(crate) fn run_apart(more: &[&str]) -> (u8, String, Found) {
    run_seeing(None, more)
}

/// The same with the devices that a variable leaves visible.
pub(crate) fn run_seeing(visible: Option<&str>, more: &[&str]) -> (u8, String, Found) {
    let mut out = Vec::new();
    let mut report = Report::new(&mut out);
    let all: Vec<&str> = TINY.iter().chain(more).copied().collect();
    let start = |part: program::Part| {
        let arguments = [&all[..], &["--child", part.name]].concat().join("\n");
        let mut command = Command::new(std::env::current_exe()?);
        command.args([PROGRAM, "--exact", "--nocapture", "--test-threads=2"]);
        command.env(CHILD, arguments);
        command.envs(visible.map(|devices| ("CUDA_VISIBLE_DEVICES", devices)));
        Ok(command)
    };
    let code = check_apart(&args(more), &mut report, &start);
    let parts = report.parts.iter().map(|(name, ended, _)| (*name, ended.clone())).collect();
    let figures = report.figures.keys().cloned().collect();
    (code, String::from_utf8(out).expect("text"), Found { parts, figures })
}

pub(crate) struct Found {
    pub(crate) parts: BTreeMap<&'static str, Ended>,
    figures: Vec<String>,
}

impl Found {
    pub(crate) fn has(&self, figure: &str) -> bool {
        self.figures.iter().any(|it| it == figure)
    }
}

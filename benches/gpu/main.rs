//! Figures of an arena on a GPU that need no GPU: driver calls, bytes and their order over the
//! simulation, instructions, and ratios of times in one run.
//!
//! `--part NAME` measures one part; without it, all. A figure with a goal prints whether it holds.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or a part failed.
#![expect(clippy::print_stderr, reason = "a program that shows something")]

mod check;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod compact;
mod device_schedules;
mod handles;
mod lanes;
#[path = "../replay/player.rs"]
mod player;
#[path = "../replay/trace.rs"]
#[allow(dead_code, reason = "others use more of it")]
mod trace;

use std::process::ExitCode;
use std::thread;

use clap::Parser;
use lowtide::BoxError;

use crate::common::figures::Figures;

type Measure = fn(&mut Figures) -> Result<(), BoxError>;

/// The parts, in the order in which they run.
const PARTS: &[(&str, Measure)] = &[
    ("binary", check::binary),
    ("compact", compact::measure),
    ("devices", devices),
    ("killed", check::killed),
    ("leases", handles::leases),
    ("pairs", lanes::pairs),
    ("stores", handles::stores),
    ("torture", check::torture),
    ("trace", handles::traces),
    ("views", lanes::views),
    ("wake", handles::wake),
];

#[derive(Clone, Debug, Parser)]
#[command(about = "Figures of an arena on a GPU, over the simulation")]
struct Cli {
    /// Measures only this part; may be repeated.
    #[arg(long, value_name = "NAME", value_parser = part_names())]
    part: Vec<String>,
}

fn part_names() -> Vec<&'static str> {
    PARTS.iter().map(|(name, _)| *name).collect()
}

fn main() -> ExitCode {
    if let Some(code) = check::child() {
        return ExitCode::from(code);
    }
    common::main(|cli: Cli| {
        let is_wanted =
            |name: &str| cli.part.is_empty() || cli.part.iter().any(|part| part == name);
        let mut all_held = true;
        for (name, measure) in PARTS.iter().filter(|(name, _)| is_wanted(name)) {
            let mut figures = Figures::default();
            if let Err(error) = measure(&mut figures) {
                eprintln!("{name}: {error}");
                all_held = false;
            }
            all_held &= figures.print();
        }
        Ok(all_held)
    })
}

/// Counts faults in random schedules over two and eight devices of one `Memory`, of which one is
/// lost. Each schedule has devices of its own.
fn devices(figures: &mut Figures) -> Result<(), BoxError> {
    const SCHEDULES: u64 = 10_000;
    const THREADS_MAX: u64 = 8;
    let threads = thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let threads = threads.min(THREADS_MAX);
    let part = |devices, first| {
        let seeds = (first..SCHEDULES).step_by(usize::try_from(threads).unwrap_or(1));
        let found = seeds.map(move |seed| device_schedules::faults(seed, devices).0);
        found.inspect(|all| all.iter().for_each(|fault| eprintln!("{fault}"))).map(|it| it.len())
    };
    let all = thread::scope(|scope| {
        let running: Vec<_> = [2, 8]
            .into_iter()
            .flat_map(|devices| (0..threads).map(move |first| (devices, first)))
            .map(|(devices, first)| scope.spawn(move || part(devices, first).sum::<usize>()))
            .collect();
        running.into_iter().map(thread::ScopedJoinHandle::join).sum::<Result<usize, _>>()
    });
    let all = all.map_err(|_| "a thread panicked")?;
    figures.at_most("gpu.devices.faults", common::figures::count(all as u64), "faults", 0.0);
    Ok(())
}

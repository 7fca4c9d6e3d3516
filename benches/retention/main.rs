//! Retention: what allocators keep after a burst, and what giving it back costs.
//!
//! Each allocator is a process of its own, started here and watched from outside. The runs take
//! turns; a ratio is taken within a round, and the median of the rounds is told.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../common/figures.rs"]
#[allow(dead_code, unreachable_pub, reason = "other benches use more of it")]
mod figures;
#[path = "../common/process.rs"]
#[allow(dead_code, unreachable_pub, reason = "other benches use more of it")]
mod process;
#[path = "../common/start.rs"]
#[allow(dead_code, unreachable_pub, reason = "other benches use more of it")]
mod start;

use std::fs;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Parser;
use lowtide::BoxError;
use lowtide::heap::HeapProfile;

use crate::figures::{Figures, count};
use crate::process::{Process, kernel_value};

/// The parts of the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The burst of all allocators.
    Burst,
    /// The same of documents of which none is left.
    Documents,
    /// The burst of low-memory, with survivors in an arena of their own and without.
    Rest,
    /// Long bursts of balanced and of jemalloc's defaults, pair by pair, for the processor time.
    Pairs,
}

/// What allocators keep after a burst, and what giving it back costs.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// These parts alone.
    #[arg(long, value_delimiter = ',', default_value = "burst,documents")]
    parts: Vec<Part>,
    /// Small, short, and judged by no goal: that it runs at all.
    #[arg(long)]
    smoke: bool,
}

/// An allocator with its settings.
#[derive(Clone, Debug)]
struct Contestant {
    /// Its name in the figures.
    name: &'static str,
    program: &'static str,
    /// The variant that it runs.
    way: String,
    /// jemalloc's settings.
    conf: Option<String>,
}

/// The programs, of which Cargo knows where they lie.
const GLIBC: &str = env!("CARGO_BIN_EXE_retention-glibc");
const JEMALLOC: &str = env!("CARGO_BIN_EXE_retention-jemalloc");
const LOWTIDE: &str = env!("CARGO_BIN_EXE_retention-lowtide");

/// The variable from which jemalloc reads its settings.
const CONF: &str = "_RJEM_MALLOC_CONF";
/// The settings that most services take.
const THREE: &str = "background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0";
/// low-memory, with the requests that outlive a wave in an arena of their own.
const APART: &str = "low_memory_apart";
const LOW: &str = "low_memory";
const PLAIN: &str = "jemalloc_default";
/// Operations of a thread in each phase where processor time is all that counts: traffic of some 20
/// s. jemalloc's default decay is 10 s, so within a shorter time it gives back nothing and pays for
/// nothing.
const PAIR_OPERATIONS: u32 = 240_000;
const PAIRS: usize = 20;
const ROUNDS: usize = 3;

/// Figures divided, round by round: the part, who, the figure, over whom, and the most that the
/// median may be.
const RATIOS: &[(&str, &str, &str, &str, f64)] = &[
    ("retention", LOW, "resident_2s_mib", PLAIN, 0.18),
    ("retention", "balanced", "resident_2s_mib", PLAIN, 0.22),
    ("retention", LOW, "resident_10s_mib", "glibc_trim", 1.00),
    ("retention", "balanced", "resident_10s_mib", "glibc_trim", 1.15),
    ("retention", LOW, "resident_10s_mib", "balanced", 1.00),
    ("documents", LOW, "resident_10s_mib", "balanced", 1.00),
    ("retention", "balanced", "peak_mib", PLAIN, 1.05),
    ("retention", "balanced", "cpu_us", PLAIN, 1.10),
    ("pairs", "balanced", "cpu_us", PLAIN, 1.10),
    ("pairs", "balanced", "p50_us", PLAIN, 1.04),
    ("pairs", "balanced", "p95_us", PLAIN, 1.02),
    ("pairs", "balanced", "p99_us", PLAIN, f64::INFINITY),
];

fn main() -> ExitCode {
    start::main(|cli: Cli| measure(&cli))
}

/// Measures everything and prints it. Returns `true` if every goal held.
fn measure(cli: &Cli) -> Result<bool, BoxError> {
    let (mut figures, all) = (Figures::default(), contestants());
    let size = |small, large| if cli.smoke { small } else { large };
    let (rounds, looks): (_, &[u64]) =
        if cli.smoke { (1, &[0, 1, 2]) } else { (ROUNDS, &[0, 1, 2, 10]) };
    let (operations, held) = (size(2_000, 60_000), size(20, 200));
    let burst = Plan { prefix: "retention", kind: "burst", operations, held, looks };
    for part in &cli.parts {
        let (plan, rounds, names): (_, _, &[&str]) = match part {
            Part::Burst => (burst.clone(), rounds, &[]),
            Part::Documents => {
                let (operations, held) = (size(100, 2_000), size(5, 50));
                let plan = Plan { prefix: "documents", kind: "documents", operations, held, looks };
                (plan, rounds, &[])
            }
            Part::Rest => (burst.clone(), rounds, &[LOW, APART]),
            Part::Pairs => {
                let operations = size(2_000, PAIR_OPERATIONS);
                let plan = Plan { prefix: "pairs", operations, looks: &[0, 2], ..burst };
                (plan, if cli.smoke { 1 } else { PAIRS }, &[PLAIN, "balanced"])
            }
        };
        // Of documents none is left, so there is nothing to keep apart.
        let is_wanted = |one: &&Contestant| match *part {
            Part::Documents => one.name != APART,
            _ => names.is_empty() || names.contains(&one.name),
        };
        let contestants: Vec<_> = all.iter().filter(is_wanted).collect();
        run_rounds(&mut figures, &plan, &contestants, rounds)?;
    }
    if cli.smoke {
        figures.print();
        return Ok(true);
    }
    let mut ratio = |name: &str, one: &str, other: &str, most| {
        let [one, other] = [one, other].map(|name| figures.each(name).to_vec());
        for (one, other) in one.iter().zip(&other) {
            figures.at_most(name, one / other, "ratio", most);
        }
    };
    for (end, who, most) in [("", APART, 1.35), ("_mixed", LOW, f64::INFINITY)] {
        let [one, live] =
            ["resident_10s_mib", "live_mib"].map(|end| format!("retention.{who}.{end}"));
        ratio(&format!("measured.rest.resident_per_live{end}"), &one, &live, most);
    }
    for (part, who, end, whom, most) in RATIOS {
        let [one, other] = [who, whom].map(|name| format!("{part}.{name}.{end}"));
        ratio(&format!("{one}_over_{whom}"), &one, &other, *most);
    }
    Ok(figures.print())
}

/// All allocators.
fn contestants() -> Vec<Contestant> {
    let of = |name, program, way: &str, conf: Option<&str>| {
        let (way, conf) = (way.to_owned(), conf.map(str::to_owned));
        Contestant { name, program, way, conf }
    };
    let mut all = vec![
        of("glibc_trim", GLIBC, "", None),
        of(PLAIN, JEMALLOC, "", None),
        of("jemalloc_bg_1000_0", JEMALLOC, "", Some(THREE)),
    ];
    for profile in HeapProfile::ALL {
        let (name, set) = (profile.name(), profile.conf().to_string_lossy());
        let way = name.replace('_', "-");
        if profile == HeapProfile::LowMemory {
            all.push(of(APART, LOWTIDE, &format!("{way}/apart"), Some(&set)));
        }
        all.push(of(name, LOWTIDE, &way, Some(&set)));
    }
    all
}

// The burst of one allocator after the other, watched from outside.
//
// Processor time is that of the whole process from the beginning of the traffic until 2 s after
// its end: what an allocator leaves for later, or to threads of its own, is counted.
//
// Invariant: one process is measured at a time.

/// The look at which processor time is taken.
const CPU_LOOK: u64 = 2;
/// Ticks of `stat` in a second: `USER_HZ`, 100 on every Linux that Rust runs on.
const TICKS: f64 = 100.0;

/// The size of the burst, and the time for which it is watched.
#[derive(Clone, Debug)]
struct Plan {
    /// The prefix of the figures.
    prefix: &'static str,
    kind: &'static str,
    /// Operations of a thread in each phase, and the requests that it holds.
    operations: u32,
    held: u32,
    /// Seconds after the end of the traffic at which resident memory is read.
    looks: &'static [u64],
}

/// Runs all of them, in turn, so many times. Each goes first as often as the other.
fn run_rounds(
    figures: &mut Figures,
    plan: &Plan,
    contestants: &[&Contestant],
    rounds: usize,
) -> Result<(), BoxError> {
    for round in 1..=rounds {
        for nth in 0..contestants.len() {
            let at = if round % 2 == 0 { contestants.len() - 1 - nth } else { nth };
            let who = contestants[at];
            let found = run(who, plan).map_err(|error| format!("{}: {error}", who.name))?;
            println!("{} {round} of {rounds}: {:<18} {found:.2?}", plan.prefix, who.name);
            for (end, value) in found {
                let unit = if end.ends_with("_us") { "us" } else { "MiB" };
                figures.add(format!("{}.{}.{end}", plan.prefix, who.name), value, unit);
            }
        }
    }
    Ok(())
}

/// Starts one of them.
fn start(who: &Contestant, arguments: &[&str]) -> Result<Process, BoxError> {
    let mut command = Command::new(who.program);
    command.args(arguments).args((!who.way.is_empty()).then_some(&who.way));
    command.env_remove("MALLOC_CONF").env_remove(CONF);
    command.envs(who.conf.iter().map(|conf| (CONF, conf)));
    Process::start(command)
}

/// Reads the next line of a process, which begins with this word, and returns the rest of it.
fn expect(process: &mut Process, word: &str) -> Result<String, BoxError> {
    let line = process.line()?;
    let rest = line.strip_prefix(word);
    Ok(rest.ok_or_else(|| format!("it said {line:?}: expected {word:?}"))?.to_owned())
}

/// Runs one of them. Returns its values by the ends of their figures' names.
fn run(who: &Contestant, plan: &Plan) -> Result<Vec<(String, f64)>, BoxError> {
    let [operations, held] = [plan.operations, plan.held].map(|number| number.to_string());
    let mut process = start(who, &[plan.kind, "4", &operations, &held])?;
    expect(&mut process, "traffic")?;
    let home = format!("/proc/{}", process.child.id());
    // Those of all its threads, those that ended too.
    let seconds = || {
        let text = fs::read_to_string(format!("{home}/stat"))?;
        let (_, fields) = text.rsplit_once(')').ok_or("stat has no name")?;
        let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
        Ok::<_, BoxError>(ticks.sum::<Result<f64, _>>()? / TICKS)
    };
    let mib = |key| kernel_value(format!("{home}/status"), key).map(|kib| count(kib) / 1024.0);
    let begun = seconds()?;
    let said = expect(&mut process, "idle")?;
    let end = Instant::now();
    let numbers = said.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>()?;
    let [operations, live, p50, p95, p99] = numbers[..] else {
        return Err(format!("it said {said:?}: expected five numbers").into());
    };
    let mut found = vec![
        ("peak_mib".to_owned(), mib("VmHWM:")?),
        ("live_mib".to_owned(), live / 1_048_576.0),
        ("p50_us".to_owned(), p50 / 1e3),
        ("p95_us".to_owned(), p95 / 1e3),
        ("p99_us".to_owned(), p99 / 1e3),
    ];
    for look in plan.looks {
        let due = end + Duration::from_secs(*look);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        found.push((format!("resident_{look}s_mib"), mib("VmRSS:")?));
        if *look == CPU_LOOK {
            let each = (seconds()? - begun) * 1e6 / operations;
            found.push(("cpu_us".to_owned(), each));
        }
    }
    process.finish()?;
    Ok(found)
}

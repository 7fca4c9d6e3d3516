//! Retention: what allocators keep after a burst, and what giving it back costs.
//!
//! Each allocator is a process of its own, started here and watched from outside. The runs take
//! turns; a ratio is taken within a round, and the median of the rounds is told.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../common/callgrind.rs"]
#[allow(dead_code, unreachable_pub, reason = "other benches use more of it")]
mod callgrind;
#[path = "../common/figures.rs"]
#[allow(dead_code, unreachable_pub, reason = "other benches use more of it")]
mod figures;
#[path = "../common/process.rs"]
#[allow(dead_code, unreachable_pub, reason = "other benches use more of it")]
mod process;

use std::fs;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Parser;
use lowtide::BoxError;
use lowtide::heap::HeapProfile;

use crate::callgrind::callgrind;
use crate::figures::{Figures, count};
use crate::process::{Process, kernel_value};

/// The parts of the bench, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The instructions of an allocation and its release.
    Pair,
    /// The burst of all allocators.
    Burst,
    /// The same of documents of which none is left.
    Documents,
}

/// What allocators keep after a burst, and what giving it back costs.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// The number of runs of each.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Besides, so many pairs of balanced and jemalloc's default, for the processor time alone.
    #[arg(long, default_value_t = 0)]
    pairs: usize,
    /// These allocators alone.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// These parts alone.
    #[arg(long, value_delimiter = ',')]
    parts: Vec<Part>,
    /// Small, short, and judged by no goal: that it runs at all.
    #[arg(long)]
    smoke: bool,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true)]
    bench: bool,
}

/// An allocator with its settings.
#[derive(Clone, Debug)]
pub(crate) struct Contestant {
    /// Its name in the figures.
    pub(crate) name: String,
    pub(crate) program: &'static str,
    /// The variant that it runs.
    pub(crate) way: String,
    /// A variable of its environment.
    pub(crate) variable: Option<(&'static str, String)>,
}

/// The programs, of which Cargo knows where they lie.
const GLIBC: &str = env!("CARGO_BIN_EXE_retention-glibc");
const JEMALLOC: &str = env!("CARGO_BIN_EXE_retention-jemalloc");
const LOWTIDE: &str = env!("CARGO_BIN_EXE_retention-lowtide");
const PAIR: &str = env!("CARGO_BIN_EXE_retention-pair");
const MIMALLOC: Option<&str> = option_env!("CARGO_BIN_EXE_retention-mimalloc");

/// The variable from which jemalloc reads its settings.
pub(crate) const CONF: &str = "_RJEM_MALLOC_CONF";
/// The settings that most services take.
const THREE: &str = "background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0";
/// low-memory, with the requests that outlive a wave in an arena of their own.
const APART: &str = "low_memory_apart";
const LOW: &str = "low_memory";
const PLAIN: &str = "jemalloc_default";
const NO_GOAL: f64 = f64::INFINITY;
/// Operations of a thread in each phase where processor time is all that counts: traffic of some 20
/// s. jemalloc's default decay is 10 s, so within a shorter time it gives back nothing and pays for
/// nothing.
const PAIR_OPERATIONS: u32 = 240_000;
/// Pairs of calls whose instructions are counted.
const PAIRS: u32 = 50_000;

/// Figures of the burst divided, round by round: the name of the ratio, who, the figure, over whom,
/// that figure, and the most that the median may be.
const RATIOS: &[(&str, &str, &str, &str, &str, f64)] = &[
    ("measured.rest.resident_per_live", APART, "resident_10s_mib", APART, "live_mib", 1.35),
    ("measured.rest.resident_per_live_mixed", LOW, "resident_10s_mib", LOW, "live_mib", NO_GOAL),
    ("retention.balanced.cpu_per_op_ratio", "balanced", "cpu_us", PLAIN, "cpu_us", 1.10),
    ("retention.low_memory.cpu_per_op_ratio", LOW, "cpu_us", PLAIN, "cpu_us", NO_GOAL),
];

/// The same for two allocators: the part, who, the figure, over whom.
const OVER: &[(&str, &str, &str, &str, f64)] = &[
    ("retention", "low_memory", "resident_2s_mib", "jemalloc_default", 0.18),
    ("retention", "balanced", "resident_2s_mib", "jemalloc_default", 0.22),
    ("retention", "low_memory", "resident_10s_mib", "glibc_trim", 1.00),
    ("retention", "balanced", "resident_10s_mib", "glibc_trim", 1.15),
    ("retention", "low_memory", "resident_10s_mib", "balanced", 1.00),
    ("documents", "low_memory", "resident_10s_mib", "balanced", 1.00),
    ("retention", "balanced", "peak_mib", "jemalloc_default", 1.05),
    ("retention", "balanced", "cpu_us", "trim_100ms", 0.5),
];

/// The same for pairs of balanced and jemalloc's default.
const OF_PAIRS: [(&str, f64); 4] =
    [("cpu", 1.10), ("p50", 1.04), ("p95", 1.02), ("p99", f64::INFINITY)];

fn main() -> ExitCode {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("retention: a bench, not a test: run `cargo bench` with its manifest");
        return ExitCode::SUCCESS;
    }
    match measure(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("retention: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Measures everything and prints it. Returns `true` if every goal held.
fn measure(mut cli: Cli) -> Result<bool, BoxError> {
    let mut figures = Figures::default();
    if cli.smoke {
        let names = ["glibc_trim", "jemalloc_default", "low_memory", "balanced", APART];
        (cli.rounds, cli.only) = (1, names.map(str::to_owned).into());
    }
    let wanted = |part: Part| cli.parts.is_empty() || cli.parts.contains(&part);
    let size = |small, large| if cli.smoke { small } else { large };
    if wanted(Part::Pair) && !cli.smoke {
        pair(&mut figures);
    }
    let looks: &[u64] = if cli.smoke { &[0, 1, 2] } else { &[0, 1, 2, 10] };
    let (operations, held) = (size(2_000, 60_000), size(20, 200));
    let burst = Plan { prefix: "retention", kind: "burst", operations, held, looks };
    let mut contestants = chosen(&cli.only)?;
    if wanted(Part::Burst) {
        rounds(&mut figures, &burst, &contestants, cli.rounds)?;
    }
    if wanted(Part::Documents) {
        // Of documents none is left, so there is nothing to keep apart.
        contestants.retain(|one| one.name != APART);
        let (operations, held) = (size(100, 2_000), size(5, 50));
        let plan = Plan { prefix: "documents", kind: "documents", operations, held, looks };
        rounds(&mut figures, &plan, &contestants, cli.rounds)?;
    }
    let plan = Plan { prefix: "pairs", operations: PAIR_OPERATIONS, looks: &[0, 2], ..burst };
    let both = chosen(&["jemalloc_default", "balanced"].map(str::to_owned))?;
    rounds(&mut figures, &plan, &both, cli.pairs)?;
    if cli.smoke {
        figures.print();
        return Ok(true);
    }
    for (name, who, end, whom, other, most) in RATIOS {
        let [one, other] =
            [(who, end), (whom, other)].map(|(who, end)| format!("retention.{who}.{end}"));
        ratio(&mut figures, name, &one, &other, *most);
    }
    for (part, who, end, whom, most) in OVER {
        let [one, other] = [who, whom].map(|name| format!("{part}.{name}.{end}"));
        ratio(&mut figures, &format!("{one}_over_{whom}"), &one, &other, *most);
    }
    for (end, most) in OF_PAIRS {
        let [one, other] =
            ["balanced", "jemalloc_default"].map(|name| format!("pairs.{name}.{end}_us"));
        ratio(&mut figures, &format!("pairs.balanced.{end}_ratio"), &one, &other, most);
    }
    Ok(figures.print())
}

/// Adds the ratio of two figures that were measured.
fn ratio(figures: &mut Figures, name: &str, one: &str, other: &str, most: f64) {
    let [one, other] = [one, other].map(|name| figures.each(name).to_vec());
    for (one, other) in one.iter().zip(&other) {
        figures.at_most(name, one / other, "ratio", most);
    }
}

/// All allocators that were built, or those that the command line asks for.
fn chosen(only: &[String]) -> Result<Vec<Contestant>, BoxError> {
    let conf = |text: &str| Some((CONF, text.to_owned()));
    let of = |name: &str, program, way: &str, variable| {
        let (name, way) = (name.to_owned(), way.to_owned());
        Contestant { name, program, way, variable }
    };
    let mut all = vec![
        of("glibc_trim", GLIBC, "trim", None),
        of("trim_100ms", GLIBC, "trim_100ms", None),
        of("jemalloc_default", JEMALLOC, "", None),
        of("jemalloc_bg_1000_0", JEMALLOC, "", conf(THREE)),
    ];
    let no_delay = Some(("MIMALLOC_PURGE_DELAY", "0".to_owned()));
    all.extend(MIMALLOC.map(|program| of("mimalloc_purge_0", program, "", no_delay)));
    for profile in HeapProfile::ALL {
        let (name, set) = (profile.name(), conf(&profile.conf().to_string_lossy()));
        let way = name.replace('_', "-");
        if profile == HeapProfile::LowMemory {
            all.push(of(APART, LOWTIDE, &format!("{way}/apart"), set.clone()));
        }
        all.push(of(name, LOWTIDE, &way, set));
    }
    if let Some(name) = only.iter().find(|name| all.iter().all(|one| one.name != **name)) {
        let names: Vec<_> = all.iter().map(|one| one.name.as_str()).collect();
        return Err(format!("{name:?} is no allocator here: expected {}", names.join(", ")).into());
    }
    all.retain(|one| only.is_empty() || only.contains(&one.name));
    Ok(all)
}

/// Instructions of a pair of calls, counted by callgrind: of a loop three times as long less one,
/// less the same of an empty loop, so that what starting the process takes is in no figure.
fn pair(figures: &mut Figures) {
    let collected = |of: &str, times: u32| {
        let mut command = callgrind(PAIR);
        // Background threads would be counted as well.
        command.args([of, &times.to_string()]).env(CONF, "narenas:4");
        callgrind::instructions(&mut command)
    };
    let of = |of| Ok((collected(of, 3 * PAIRS)? - collected(of, PAIRS)?) / f64::from(2 * PAIRS));
    let all = ["heap", "plain", "nothing"].into_iter().map(of).collect::<Result<Vec<_>, String>>();
    match all.as_deref() {
        Ok([heap, plain, nothing]) => {
            figures.add("heap.pair.instructions", heap - nothing, "instructions");
            figures.add("heap.pair.plain_instructions", plain - nothing, "instructions");
            figures.at_most("heap.pair.more_instructions", heap - plain, "instructions", 4.0);
        }
        failed => println!("skipped: {failed:?}"),
    }
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
pub(crate) struct Plan {
    /// The prefix of the figures.
    pub(crate) prefix: &'static str,
    pub(crate) kind: &'static str,
    /// Operations of a thread in each phase, and the requests that it holds.
    pub(crate) operations: u32,
    pub(crate) held: u32,
    /// Seconds after the end of the traffic at which resident memory is read.
    pub(crate) looks: &'static [u64],
}

/// Runs all of them, in turn, so many times. Each goes first as often as the other.
pub(crate) fn rounds(
    figures: &mut Figures,
    plan: &Plan,
    contestants: &[Contestant],
    rounds: usize,
) -> Result<(), BoxError> {
    for round in 1..=rounds {
        for nth in 0..contestants.len() {
            let at = if round % 2 == 0 { contestants.len() - 1 - nth } else { nth };
            let who = &contestants[at];
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
    command.env_remove("MALLOC_CONF").env_remove(CONF).envs(who.variable.clone());
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
        ("p50_us".to_owned(), p50),
        ("p95_us".to_owned(), p95),
        ("p99_us".to_owned(), p99),
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

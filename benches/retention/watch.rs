//! The burst of one allocator after the other, watched from outside.
//!
//! Processor time is that of the whole process from the beginning of the traffic until 2 s after
//! its end: what an allocator leaves for later, or to threads of its own, is counted.
//!
//! Invariant: one process is measured at a time.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use lowtide::BoxError;

use crate::figures::{Figures, count};
use crate::process::{Process, kernel_value};
use crate::{CONF, Contestant};

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

/// The value of `name=value` in what it said.
fn field(said: &str, name: &str) -> Result<f64, BoxError> {
    let value = said.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Ok(value.ok_or_else(|| format!("it said {said:?}: no {name}"))?.parse()?)
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
    let mut found = vec![("peak_mib".to_owned(), mib("VmHWM:")?)];
    found.push(("live_mib".to_owned(), field(&said, "live")? / 1_048_576.0));
    for name in ["p50", "p95", "p99"] {
        found.push((format!("{name}_us"), field(&said, name)?));
    }
    for look in plan.looks {
        let due = end + Duration::from_secs(*look);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        found.push((format!("resident_{look}s_mib"), mib("VmRSS:")?));
        if *look == CPU_LOOK {
            let each = (seconds()? - begun) * 1e6 / field(&said, "operations")?;
            found.push(("cpu_us".to_owned(), each));
        }
    }
    process.finish()?;
    Ok(found)
}

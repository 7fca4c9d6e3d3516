//! The report: figures, goals, cases, and parts that could not run; as lines and as JSON.
//!
//! It measures nothing. A missed goal is printed and changes no exit code: on a machine with other
//! users it means little.
//!
//! A child process writes records, one a line, and the process that started it takes them into its
//! own report: what a child wrote is kept, however it ends.
//!
//! Invariant: exit code 1 <=> a case of the contract failed; else 2 <=> a part did not run to its
//! end.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::cli::Args;
use super::process::Plant;

/// The name under which a results file that cannot be written counts as a failed part.
const RESULTS: &str = "results file";

/// The goals, in the order of the parts: the figure, and the most (`<=`) or the least that it may be.
pub(crate) const GOALS: &[(&str, &str, f64)] = &[
    ("gpu.pair.median_ns", "<=", 60.0),
    ("gpu.pair.driver_calls", "<=", 0.0),
    ("gpu.pair.speedup_over_async", ">=", 4.0),
    ("gpu.pair.speedup_over_raw_async", ">=", 4.0),
    ("gpu.lanes16.throughput_ratio", ">=", 8.0),
    ("gpu.cuarena.b1.median_us", "<=", 0.06),
    ("gpu.cuarena.b1.p999_over_median", "<=", 10.0),
    ("gpu.cuarena.b2.median_us", "<=", 47.7),
    ("gpu.cuarena.b2.p999_over_median", "<=", 10.0),
    ("gpu.cuarena.b3.median_us", "<=", 0.06),
    ("gpu.cuarena.b3.p999_over_median", "<=", 10.0),
    ("gpu.cuarena.b4.median_us", "<=", 0.65),
    ("gpu.cuarena.b4.p999_over_median", "<=", 10.0),
    ("gpu.cuarena.b5.median_us", "<=", 0.05),
    ("gpu.cuarena.b5.p999_over_median", "<=", 10.0),
    ("gpu.cuarena.b6.median_us", "<=", 0.09),
    ("gpu.cuarena.b6.p999_over_median", "<=", 10.0),
    ("gpu.decay.returned_ratio", ">=", 0.95),
    ("gpu.decay.p99_ratio", "<=", 2.0),
    ("gpu.sleep_keep.freed_ratio", ">=", 0.99),
    ("gpu.sleep_keep.warm_sleep_ratio", ">=", 0.5),
    ("gpu.sleep_keep.warm_wake_ratio", ">=", 0.85),
    ("gpu.sleep_keep.copy_rate_ratio", ">=", 0.85),
    ("gpu.sleep_keep.cycles", ">=", 100.0),
    ("gpu.sleep_keep.bytes_changed", "<=", 0.0),
    ("gpu.sleep_discard.ratio", "<=", 1.15),
    ("gpu.fragmentation.failures", "<=", 0.0),
    ("gpu.fragmentation.remap_speedup", ">=", 5.0),
    ("gpu.compact.copy_rate_ratio", ">=", 0.85),
    ("gpu.governor.p50_speedup", ">=", 10.0),
    ("gpu.governor.idle_held_bytes", "<=", 0.0),
    ("gpu.torture.wrong_words", "<=", 0.0),
    ("gpu.torture.added_launch_p99_us", "<=", 1_000.0),
];

/// How a part ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Ran,
    /// It returned an error or panicked: see [`Report::failed`].
    Failed,
    /// It ran past its deadline, and was killed after this time.
    Killed(Duration),
    /// Its process ended by itself before the part did.
    Died(String),
    /// It did not begin.
    Skipped(&'static str),
}

impl Ended {
    /// Returns a word for it, and the details.
    fn text(&self) -> (&'static str, String) {
        match self {
            Self::Ran => ("ran", String::new()),
            Self::Failed => ("failed", String::new()),
            Self::Killed(limit) => ("killed", format!("deadline of {limit:?}")),
            Self::Died(how) => ("died", how.clone()),
            Self::Skipped(why) => ("skipped", (*why).to_owned()),
        }
    }
}

/// Everything that was found, written down as it is found.
#[derive(Default)]
pub(crate) struct Report<'a> {
    /// `None` once a line could not be written.
    out: Option<&'a mut dyn Write>,
    /// Writes a JSON object a line, for [`Report::take`] in another process; else text for people.
    as_records: bool,
    /// The planted fault, which the first figure or case triggers.
    pub(crate) plant: Option<Plant>,
    pub(crate) figures: BTreeMap<String, (f64, String)>,
    /// The cases of the contract, with the error of each failed one.
    cases: Vec<(String, Option<String>)>,
    /// Parts that could not run, and why.
    pub(crate) failed: Vec<(String, String)>,
    /// How each part ended, in order, and the time that it took.
    pub(crate) parts: Vec<(&'static str, Ended, Duration)>,
    facts: BTreeMap<String, String>,
    /// The reason that nothing was checked: there is no device.
    pub(crate) skipped: Option<String>,
    /// Set once the part of a child process has ended.
    pub(crate) ended: bool,
}

impl<'a> Report<'a> {
    /// Creates a report that writes lines for people.
    pub(crate) fn new(out: &'a mut dyn Write) -> Self {
        Self { out: Some(out), ..Self::default() }
    }

    /// Creates a report that writes a record a line, for the process that reads them.
    pub(crate) fn records(out: &'a mut dyn Write) -> Self {
        Self { as_records: true, ..Self::new(out) }
    }

    /// Takes a line of a child process: a record, or text that something else printed there.
    pub(crate) fn take(&mut self, line: &str) {
        match serde_json::from_str::<Value>(line) {
            Ok(record) if record["record"].is_string() => self.note(&record),
            _ => self.line(line),
        }
    }

    /// Notes and writes a record.
    fn note(&mut self, record: &Value) {
        let text = |key: &str| record[key].as_str().map(str::to_owned);
        let [name, value, why] = ["name", "value", "why"].map(|key| text(key).unwrap_or_default());
        let said = match record["record"].as_str().unwrap_or_default() {
            "fact" => {
                self.facts.insert(name.clone(), value.clone());
                format!("{name}: {value}")
            }
            "no device" => {
                let why = format!("no device ({why})");
                self.skipped = Some(why.clone());
                format!("skipped: {why}")
            }
            "figure" => {
                let (value, unit) = (record["value"].as_f64().unwrap_or(f64::NAN), why);
                self.figures.insert(name.clone(), (value, unit.clone()));
                format!("figure {name} {value:.4} {unit}")
            }
            "case" => {
                let fault = text("why");
                self.cases.push((name.clone(), fault.clone()));
                match fault {
                    None => format!("case held: {name}"),
                    Some(fault) => format!("case FAILED: {name}: {fault}"),
                }
            }
            "fail" => {
                self.failed.push((name.clone(), why.clone()));
                format!("part FAILED: {name}: {why}")
            }
            "ended" => return self.ended = true,
            _ => why,
        };
        self.write(if self.as_records { record.to_string() } else { said });
    }

    fn write(&mut self, line: String) {
        let Some(out) = &mut self.out else { return };
        if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
            self.out = None;
        }
    }

    /// Writes a line.
    pub(crate) fn line(&mut self, text: &str) {
        self.note(&json!({ "record": "line", "why": text }));
    }

    /// Notes what the device is.
    pub(crate) fn fact(&mut self, name: &str, value: &str) {
        self.note(&json!({ "record": "fact", "name": name, "value": value }));
    }

    /// Notes that there is no device to check.
    pub(crate) fn no_device(&mut self, why: &str) {
        self.note(&json!({ "record": "no device", "why": why }));
    }

    /// Notes a figure. One that is no number is a part's failure and no figure.
    pub(crate) fn figure(&mut self, name: &str, value: f64, unit: &str) {
        if value.is_finite() {
            self.note(&json!({ "record": "figure", "name": name, "value": value, "why": unit }));
        } else {
            self.line(&format!("{name}: not measured, too little time or memory"));
        }
        self.set_off();
    }

    /// Notes whether a case held.
    pub(crate) fn case(&mut self, name: &str, fault: Option<String>) {
        self.note(&json!({ "record": "case", "name": name, "why": fault }));
        self.set_off();
    }

    /// Notes that a part could not run.
    pub(crate) fn fail(&mut self, part: &str, cause: String) {
        self.note(&json!({ "record": "fail", "name": part, "why": cause }));
    }

    /// Notes that the part of a child process has ended, and tells the process that reads records.
    pub(crate) fn end(&mut self) {
        self.ended = true;
        if self.as_records {
            self.write(json!({ "record": "ended" }).to_string());
        }
    }

    /// Notes how a part ended.
    pub(crate) fn part(&mut self, name: &'static str, ended: Ended, took: Duration) {
        if !matches!(ended, Ended::Ran | Ended::Failed) {
            let (word, detail) = ended.text();
            self.line(&format!("part {word}: {name}: {detail}"));
        }
        self.parts.push((name, ended, took));
    }

    /// Sets off a planted fault, once.
    fn set_off(&mut self) {
        if let Some(plant) = self.plant.take() {
            plant.set_off();
        }
    }

    /// Replaces a file by everything found so far, on its disk when the call returns. The first
    /// failure is noted, and later calls do nothing.
    pub(crate) fn save(&mut self, path: &Path) {
        if self.failed.iter().any(|(part, _)| part == RESULTS) {
            return;
        }
        let mut beside = path.as_os_str().to_owned();
        beside.push(".new");
        let saved = File::create(&beside).and_then(|mut file| {
            serde_json::to_writer_pretty(&mut file, &self.json())?;
            writeln!(file)?;
            file.sync_all()?;
            fs::rename(&beside, path)
        });
        if let Err(error) = saved {
            let after = self.parts.last().map(|(name, ..)| format!(" after part {name}"));
            let after = after.unwrap_or_default();
            self.fail(RESULTS, format!("cannot write {}{after}: {error}", path.display()));
        }
    }

    /// The goals, each with the measured value and whether it holds.
    fn measured(&self) -> impl Iterator<Item = (&'static str, String, Option<(f64, bool)>)> {
        GOALS.iter().map(|&(name, order, bound)| {
            let value = self.figures.get(name).map(|&(value, _)| value);
            let holds = |value| if order == "<=" { value <= bound } else { value >= bound };
            (name, format!("{order} {bound}"), value.map(|value| (value, holds(value))))
        })
    }

    /// Ends the check: writes the table of goals and the results. Returns the exit code.
    pub(crate) fn finish(&mut self, args: &Args) -> u8 {
        if self.skipped.is_none() {
            self.goals();
        }
        if let Some(path) = &args.json {
            self.save(path);
        }
        self.exit_code()
    }

    /// Writes the table of goals.
    fn goals(&mut self) {
        let mut lines = vec![format!("\n{:<34} {:>8} {:>12}  holds", "goal", "wanted", "measured")];
        for (name, wanted, found) in self.measured() {
            let (measured, holds) = match found {
                None => ("-".to_owned(), "not measured"),
                Some((value, holds)) => (format!("{value:.3}"), if holds { "yes" } else { "NO" }),
            };
            lines.push(format!("{name:<34} {wanted:>8} {measured:>12}  {holds}"));
        }
        let wrong = self.cases.iter().filter(|(_, fault)| fault.is_some()).count();
        lines.push(format!("failed cases: {wrong} of {}", self.cases.len()));
        let mut failed: BTreeSet<&str> = self.failed.iter().map(|(part, _)| &**part).collect();
        for (name, ended, took) in &self.parts {
            if *ended != Ended::Ran {
                failed.insert(name);
            }
            let ((word, detail), s) = (ended.text(), took.as_secs_f64());
            lines.push(format!("part {name:<14} {word:<8} {s:>6.1} s  {detail}"));
        }
        lines.push(format!("parts that did not run to their end: {}", failed.len()));
        lines.iter().for_each(|line| self.line(line));
    }

    /// Everything, for programs.
    fn json(&self) -> Value {
        let figures = self
            .figures
            .iter()
            .map(|(name, (value, unit))| (name.clone(), json!({ "value": value, "unit": unit })));
        let goals = self.measured().map(|(name, goal, found)| {
            let (measured, holds) = found.unzip();
            json!({ "name": name, "goal": goal, "measured": measured, "holds": holds })
        });
        let cases = self
            .cases
            .iter()
            .map(|(name, fault)| json!({ "name": name, "held": fault.is_none(), "fault": fault }));
        let failed = self.failed.iter();
        let failed = failed.map(|(part, cause)| json!({ "part": part, "cause": cause }));
        let parts = self.parts.iter().map(|(part, ended, took)| {
            let (word, detail) = ended.text();
            json!({ "part": part, "ended": word, "detail": detail, "s": took.as_secs_f64() })
        });
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "skipped": self.skipped,
            "device": self.facts,
            "cases": cases.collect::<Value>(),
            "figures": figures.collect::<serde_json::Map<_, _>>(),
            "goals": goals.collect::<Value>(),
            "parts_failed": failed.collect::<Value>(),
            "parts": parts.collect::<Value>(),
        })
    }

    /// Returns the exit code of the program.
    pub(crate) fn exit_code(&self) -> u8 {
        let all_ran = self.parts.iter().all(|(_, ended, _)| *ended == Ended::Ran);
        if self.cases.iter().any(|(_, fault)| fault.is_some()) {
            1
        } else if self.failed.is_empty() && self.out.is_some() && all_ran {
            0
        } else {
            2
        }
    }
}

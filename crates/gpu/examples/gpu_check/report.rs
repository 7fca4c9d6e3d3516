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
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::process::Plant;

/// The name under which a results file that cannot be written counts as a failed part.
const RESULTS: &str = "results file";

/// The goal of a figure.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted {
    AtMost(f64),
    AtLeast(f64),
}

use Wanted::{AtLeast, AtMost};

impl Wanted {
    fn holds(self, value: f64) -> bool {
        match self {
            AtMost(most) => value <= most,
            AtLeast(least) => value >= least,
        }
    }

    fn text(self) -> String {
        match self {
            AtMost(most) => format!("<= {most}"),
            AtLeast(least) => format!(">= {least}"),
        }
    }
}

/// The goals, in the order of the parts.
pub(crate) const GOALS: &[(&str, Wanted)] = &[
    ("gpu.pair.median_ns", AtMost(60.0)),
    ("gpu.pair.driver_calls", AtMost(0.0)),
    ("gpu.pair.speedup_over_async", AtLeast(4.0)),
    ("gpu.pair.speedup_over_raw_async", AtLeast(4.0)),
    ("gpu.lanes16.throughput_ratio", AtLeast(8.0)),
    ("gpu.cuarena.b1.median_us", AtMost(0.06)),
    ("gpu.cuarena.b1.p999_over_median", AtMost(10.0)),
    ("gpu.cuarena.b2.median_us", AtMost(47.7)),
    ("gpu.cuarena.b2.p999_over_median", AtMost(10.0)),
    ("gpu.cuarena.b3.median_us", AtMost(0.06)),
    ("gpu.cuarena.b3.p999_over_median", AtMost(10.0)),
    ("gpu.cuarena.b4.median_us", AtMost(0.65)),
    ("gpu.cuarena.b4.p999_over_median", AtMost(10.0)),
    ("gpu.cuarena.b5.median_us", AtMost(0.05)),
    ("gpu.cuarena.b5.p999_over_median", AtMost(10.0)),
    ("gpu.cuarena.b6.median_us", AtMost(0.09)),
    ("gpu.cuarena.b6.p999_over_median", AtMost(10.0)),
    ("gpu.decay.returned_ratio", AtLeast(0.95)),
    ("gpu.decay.p99_ratio", AtMost(2.0)),
    ("gpu.sleep_keep.freed_ratio", AtLeast(0.99)),
    ("gpu.sleep_keep.warm_sleep_ratio", AtLeast(0.5)),
    ("gpu.sleep_keep.warm_wake_ratio", AtLeast(0.85)),
    ("gpu.sleep_keep.copy_rate_ratio", AtLeast(0.85)),
    ("gpu.sleep_keep.cycles", AtLeast(100.0)),
    ("gpu.sleep_keep.bytes_changed", AtMost(0.0)),
    ("gpu.sleep_discard.ratio", AtMost(1.15)),
    ("gpu.fragmentation.failures", AtMost(0.0)),
    ("gpu.fragmentation.remap_speedup", AtLeast(5.0)),
    ("gpu.compact.copy_rate_ratio", AtLeast(0.85)),
    ("gpu.governor.p50_speedup", AtLeast(10.0)),
    ("gpu.governor.idle_held_bytes", AtMost(0.0)),
    ("gpu.torture.wrong_words", AtMost(0.0)),
    ("gpu.torture.added_launch_p99_us", AtMost(1_000.0)),
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
    const fn word(&self) -> &'static str {
        match self {
            Self::Ran => "ran",
            Self::Failed => "failed",
            Self::Killed(_) => "killed",
            Self::Died(_) => "died",
            Self::Skipped(_) => "skipped",
        }
    }

    fn detail(&self) -> String {
        match self {
            Self::Ran | Self::Failed => String::new(),
            Self::Killed(limit) => format!("deadline of {limit:?}"),
            Self::Died(how) => how.clone(),
            Self::Skipped(why) => (*why).to_owned(),
        }
    }
}

/// The form in which a report is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Lines for people.
    Text,
    /// One JSON object a line, for [`Report::take`] in another process.
    Records,
}

/// Everything that was found, written down as it is found.
pub(crate) struct Report<'a> {
    out: &'a mut dyn Write,
    form: Form,
    /// The first write error; nothing is written after it.
    broken: Option<io::Error>,
    /// The planted fault, which the first figure or case triggers.
    pub(crate) plant: Option<Plant>,
    pub(crate) figures: BTreeMap<String, (f64, String)>,
    /// The cases of the contract, with the error of each failed one.
    pub(crate) cases: Vec<(String, Option<String>)>,
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
        Self::of(out, Form::Text)
    }

    /// Creates a report that writes a record a line, for the process that reads them.
    pub(crate) fn records(out: &'a mut dyn Write) -> Self {
        Self::of(out, Form::Records)
    }

    fn of(out: &'a mut dyn Write, form: Form) -> Self {
        Self {
            out,
            form,
            broken: None,
            plant: None,
            figures: BTreeMap::new(),
            cases: Vec::new(),
            failed: Vec::new(),
            parts: Vec::new(),
            facts: BTreeMap::new(),
            skipped: None,
            ended: false,
        }
    }

    fn write(&mut self, text: &str) {
        if self.broken.is_none() {
            let written = writeln!(self.out, "{text}").and_then(|()| self.out.flush());
            self.broken = written.err();
        }
    }

    fn put(&mut self, text: &str, record: &Value) {
        match self.form {
            Form::Text => self.write(text),
            Form::Records => self.write(&record.to_string()),
        }
    }

    /// Writes a line.
    pub(crate) fn line(&mut self, text: &str) {
        self.put(text, &json!({ "record": "line", "text": text }));
    }

    /// Notes what the device is.
    pub(crate) fn fact(&mut self, name: &str, value: String) {
        let record = json!({ "record": "fact", "name": name, "value": value });
        self.put(&format!("{name}: {value}"), &record);
        self.facts.insert(name.to_owned(), value);
    }

    /// Notes that there is no device to check.
    pub(crate) fn no_device(&mut self, why: &str) {
        let record = json!({ "record": "no device", "why": why });
        self.put(&format!("skipped: no device ({why})"), &record);
        self.skipped = Some(format!("no device ({why})"));
    }

    /// Notes a figure. One that is no number is a part's failure and no figure.
    pub(crate) fn figure(&mut self, name: &str, value: f64, unit: &str) {
        if value.is_finite() {
            let record = json!({ "record": "figure", "name": name, "value": value, "unit": unit });
            self.put(&format!("figure {name} {value:.4} {unit}"), &record);
            self.figures.insert(name.to_owned(), (value, unit.to_owned()));
        } else {
            self.line(&format!("{name}: not measured, too little time or memory"));
        }
        self.set_off();
    }

    /// Notes whether a case held.
    pub(crate) fn case(&mut self, name: String, fault: Option<String>) {
        let text = match &fault {
            None => format!("case held: {name}"),
            Some(fault) => format!("case FAILED: {name}: {fault}"),
        };
        self.put(&text, &json!({ "record": "case", "name": name, "fault": fault }));
        self.cases.push((name, fault));
        self.set_off();
    }

    /// Notes that a part could not run.
    pub(crate) fn fail(&mut self, part: &str, cause: String) {
        let record = json!({ "record": "fail", "part": part, "cause": cause });
        self.put(&format!("part FAILED: {part}: {cause}"), &record);
        self.failed.push((part.to_owned(), cause));
    }

    /// Notes that the part of a child process has ended.
    pub(crate) fn end(&mut self) {
        if self.form == Form::Records {
            self.write(&json!({ "record": "ended" }).to_string());
        }
        self.ended = true;
    }

    /// Notes how a part ended.
    pub(crate) fn part(&mut self, name: &'static str, ended: Ended, took: Duration) {
        if !matches!(ended, Ended::Ran | Ended::Failed) {
            self.line(&format!("part {}: {name}: {}", ended.word(), ended.detail()));
        }
        self.parts.push((name, ended, took));
    }

    /// Takes a line of a child process: a record, or text that something else printed there.
    pub(crate) fn take(&mut self, line: &str) {
        let record: Value = serde_json::from_str(line).unwrap_or_default();
        let text = |key: &str| record[key].as_str().map(str::to_owned);
        let name = text("name").unwrap_or_default();
        match (record["record"].as_str(), record["value"].as_f64()) {
            (Some("line"), _) => self.line(&text("text").unwrap_or_default()),
            (Some("fact"), _) => self.fact(&name, text("value").unwrap_or_default()),
            (Some("no device"), _) => self.no_device(&text("why").unwrap_or_default()),
            (Some("figure"), Some(value)) => {
                self.figure(&name, value, &text("unit").unwrap_or_default());
            }
            (Some("case"), _) => self.case(name, text("fault")),
            (Some("fail"), _) => {
                self.fail(&text("part").unwrap_or_default(), text("cause").unwrap_or_default());
            }
            (Some("ended"), _) => self.ended = true,
            _ => self.line(line),
        }
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

    /// Writes the table of goals.
    pub(crate) fn goals(&mut self) {
        self.line("");
        self.line(&format!("{:<34} {:>8} {:>12}  holds", "goal", "wanted", "measured"));
        for &(name, wanted) in GOALS {
            let found = self.figures.get(name).map(|&(value, _)| value);
            let measured = found.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
            let holds = found.map_or("not measured", |value| yes(wanted.holds(value)));
            self.line(&format!("{name:<34} {:>8} {measured:>12}  {holds}", wanted.text()));
        }
        let wrong = self.cases.iter().filter(|(_, fault)| fault.is_some()).count();
        let cases = self.cases.len();
        let unfinished = self.parts.iter().filter(|(_, ended, _)| *ended != Ended::Ran);
        let unfinished = unfinished.map(|(name, ..)| *name);
        let failed = self.failed.iter().map(|(part, _)| part.as_str());
        let failed = failed.chain(unfinished).collect::<BTreeSet<_>>().len();
        self.line(&format!("failed cases: {wrong} of {cases}"));
        for (name, ended, took) in self.parts.clone() {
            let (word, detail) = (ended.word(), ended.detail());
            self.line(&format!(
                "part {name:<14} {word:<8} {:>6.1} s  {detail}",
                took.as_secs_f64()
            ));
        }
        self.line(&format!("parts that did not run to their end: {failed}"));
    }

    /// Everything, for programs.
    pub(crate) fn json(&self) -> Value {
        let figures = self.figures.iter();
        let figures: BTreeMap<_, _> = figures
            .map(|(name, (value, unit))| (name, json!({ "value": value, "unit": unit })))
            .collect();
        let goals = GOALS.iter().map(|&(name, wanted)| {
            let measured = self.figures.get(name).map(|&(value, _)| value);
            let holds = measured.map(|value| wanted.holds(value));
            let goal = wanted.text();
            json!({ "name": name, "goal": goal, "measured": measured, "holds": holds })
        });
        let cases = self.cases.iter();
        let cases = cases
            .map(|(name, fault)| json!({ "name": name, "held": fault.is_none(), "fault": fault }));
        let failed = self.failed.iter();
        let failed = failed.map(|(part, cause)| json!({ "part": part, "cause": cause }));
        let parts = self.parts.iter().map(|(part, ended, took)| {
            let (word, detail) = (ended.word(), ended.detail());
            json!({ "part": part, "ended": word, "detail": detail, "s": took.as_secs_f64() })
        });
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "skipped": self.skipped,
            "device": self.facts,
            "cases": cases.collect::<Vec<_>>(),
            "figures": figures,
            "goals": goals.collect::<Vec<_>>(),
            "parts_failed": failed.collect::<Vec<_>>(),
            "parts": parts.collect::<Vec<_>>(),
        })
    }

    fn all_ran(&self) -> bool {
        self.parts.iter().all(|(_, ended, _)| *ended == Ended::Ran)
    }

    /// Returns the exit code of the program.
    pub(crate) fn exit_code(&self) -> u8 {
        if self.cases.iter().any(|(_, fault)| fault.is_some()) {
            1
        } else if self.failed.is_empty() && self.broken.is_none() && self.all_ran() {
            0
        } else {
            2
        }
    }
}

const fn yes(holds: bool) -> &'static str {
    if holds { "yes" } else { "NO" }
}

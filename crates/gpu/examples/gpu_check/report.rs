//! The report: figures, goals, cases, and parts that could not run; as lines and as JSON.
//!
//! It measures nothing. A missed goal is printed and changes no exit code: on a machine with other
//! users it means little.
//!
//! Invariant: exit code 1 <=> a case of the contract failed; else 2 <=> a part could not run.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{Value, json};

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
    ("gpu.sleep_keep.copy_rate_ratio", AtLeast(0.85)),
    ("gpu.sleep_keep.cycles", AtLeast(100.0)),
    ("gpu.sleep_keep.bytes_changed", AtMost(0.0)),
    ("gpu.sleep_discard.ratio", AtMost(1.15)),
    ("gpu.fragmentation.failures", AtMost(0.0)),
    ("gpu.fragmentation.remap_speedup", AtLeast(5.0)),
    ("gpu.compact.copy_rate_ratio", AtLeast(0.85)),
    ("gpu.governor.p50_speedup", AtLeast(10.0)),
    ("gpu.governor.idle_held_bytes", AtMost(0.0)),
];

/// Everything that was found, written down as it is found.
pub(crate) struct Report<'a> {
    out: &'a mut dyn Write,
    /// The first write error; nothing is written after it.
    broken: Option<io::Error>,
    pub(crate) figures: BTreeMap<String, (f64, &'static str)>,
    /// The cases of the contract, with the error of each failed one.
    pub(crate) cases: Vec<(String, Option<String>)>,
    /// Parts that could not run, and why.
    pub(crate) failed: Vec<(&'static str, String)>,
    facts: BTreeMap<&'static str, String>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(out: &'a mut dyn Write) -> Self {
        Self {
            out,
            broken: None,
            figures: BTreeMap::new(),
            cases: Vec::new(),
            failed: Vec::new(),
            facts: BTreeMap::new(),
        }
    }

    /// Writes a line.
    pub(crate) fn line(&mut self, text: &str) {
        if self.broken.is_none() {
            let written = writeln!(self.out, "{text}").and_then(|()| self.out.flush());
            self.broken = written.err();
        }
    }

    /// Notes what the device is.
    pub(crate) fn fact(&mut self, name: &'static str, value: String) {
        self.line(&format!("{name}: {value}"));
        self.facts.insert(name, value);
    }

    /// Notes a figure. One that is no number is a part's failure and no figure.
    pub(crate) fn figure(&mut self, name: &str, value: f64, unit: &'static str) {
        if value.is_finite() {
            self.line(&format!("figure {name} {value:.4} {unit}"));
            self.figures.insert(name.to_owned(), (value, unit));
        } else {
            self.line(&format!("{name}: not measured, too little time or memory"));
        }
    }

    /// Notes whether a case held.
    pub(crate) fn case(&mut self, name: String, fault: Option<String>) {
        match &fault {
            None => self.line(&format!("case held: {name}")),
            Some(fault) => self.line(&format!("case FAILED: {name}: {fault}")),
        }
        self.cases.push((name, fault));
    }

    /// Notes that a part could not run.
    pub(crate) fn fail(&mut self, part: &'static str, cause: String) {
        self.line(&format!("part FAILED: {part}: {cause}"));
        self.failed.push((part, cause));
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
        let (cases, failed) = (self.cases.len(), self.failed.len());
        self.line(&format!("failed cases: {wrong} of {cases}"));
        self.line(&format!("parts that could not run: {failed}"));
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
        json!({
            "device": self.facts,
            "cases": cases.collect::<Vec<_>>(),
            "figures": figures,
            "goals": goals.collect::<Vec<_>>(),
            "parts_failed": failed.collect::<Vec<_>>(),
        })
    }

    /// Returns the exit code of the program.
    pub(crate) fn exit_code(&self) -> u8 {
        if self.cases.iter().any(|(_, fault)| fault.is_some()) {
            1
        } else if self.failed.is_empty() && self.broken.is_none() {
            0
        } else {
            2
        }
    }
}

const fn yes(holds: bool) -> &'static str {
    if holds { "yes" } else { "NO" }
}

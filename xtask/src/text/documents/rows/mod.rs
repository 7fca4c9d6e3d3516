//! Connects sentences of the documents with values in the code, and lists numbers that no constant
//! has.
//!
//! A row has the words of a sentence with `{}` for each value. The files are one for each page;
//! `rest` has the small pages.
//!
//! Invariant: a row's values come from the code, never from the page.

mod deploying;
mod life;
mod operating;
mod rest;

use crate::text::code::{Code, Found};
use crate::text::words;
use crate::tree::Faults;

/// One sentence.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) page: &'static str,
    /// Its words.
    pub(crate) says: &'static str,
    /// The values in its gaps.
    pub(crate) values: Vec<String>,
}

impl Row {
    /// Returns the sentence as the page has to have it.
    pub(crate) fn sentence(&self, faults: &Faults) -> String {
        let gaps = self.says.matches("{}").count();
        let count = self.values.len();
        faults.expect(gaps == count, || format!("{:?}: {count} values for {gaps}", self.says));
        let mut values = self.values.iter();
        let mut parts = self.says.split("{}");
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |text, part| text + values.next().map_or("", |value| value) + part)
    }
}

/// Rows of one page.
fn rows<const N: usize>(page: &'static str, all: [(&'static str, Vec<String>); N]) -> Vec<Row> {
    all.into_iter().map(|(says, values)| Row { page, says, values }).collect()
}

/// The gaps of a row.
macro_rules! values {
    ($($value:expr),* $(,)?) => { vec![$(String::from($value)),*] };
}
use values;

pub(crate) fn all(code: &Code<'_>) -> Vec<Row> {
    let rows = [operating::rows, operating::alerts, deploying::rows, rest::rows, life::rows];
    rows.into_iter().flat_map(|rows| rows(code)).collect()
}

/// One of the correction factor's constants.
fn k(code: &Code<'_>, name: &str) -> f64 {
    code.constant(name).number()
}

/// A default of the control loop that no profile changes.
fn of_loop<'a>(code: &Code<'a>, name: &str) -> Found<'a> {
    code.default_with("active_tick").field(name)
}

/// `10 to 250 ms`.
fn ticks(code: &Code<'_>) -> String {
    let [active, idle] = ["active_tick", "idle_tick"].map(|name| of_loop(code, name).time());
    format!("{} to {} ms", active.as_millis(), idle.as_millis())
}

/// The upper and lower threshold of a pressure level.
fn band(code: &Code<'_>, level: &str) -> [f64; 2] {
    let at = ["Elevated", "High", "Critical"].iter().position(|name| *name == level);
    let bands = code.default_with("dwell").field("bands").list();
    let band = at.and_then(|at| bands.get(at));
    code.faults.expect(band.is_some(), || format!("{level} has no thresholds"));
    ["up", "down"].map(|side| band.map_or(0.0, |band| band.field(side).number()))
}

/// The string of a heap profile.
fn conf(code: &Code<'_>, profile: &str) -> String {
    code.of("HeapProfile", profile, "conf").text()
}

/// A setting of jemalloc in a profile's string, or jemalloc's own value.
fn jemalloc(code: &Code<'_>, profile: &str, name: &str) -> String {
    let conf = conf(code, profile);
    let mut pairs = conf.split(',').filter_map(|pair| pair.split_once(':'));
    if let Some((_, value)) = pairs.find(|(other, _)| *other == name) {
        return value.to_owned();
    }
    let knobs = code.constant("KNOBS").list();
    let own = knobs.iter().find(|knob| knob.field("name").text() == name);
    code.faults.expect(own.is_some(), || format!("jemalloc's {name} is in no table"));
    own.map_or_else(String::new, |knob| knob.field("default").text())
}

/// A method of a profile.
fn of_profile<'a>(code: &Code<'a>, profile: &str, method: &str) -> Found<'a> {
    code.of("Profile", profile, method)
}

fn seconds(found: &Found<'_>) -> String {
    words::time(found.time())
}

/// Adds a fault if the words of a page, which name no number, do not hold.
fn expect(code: &Code<'_>, holds: bool, what: &str) {
    code.faults.expect(holds, || format!("{what}: the code says otherwise"));
}

/// Returns `true` if two numbers are the same except for rounding.
fn same(one: f64, other: f64) -> bool {
    (one - other).abs() < 1e-6
}

/// Numbers that no constant of the crate holds: page, words, whose they are.
pub(crate) const FIGURES: &[(&str, &str, &str)] = &[
    ("docs/OPERATING.md", "some 0.3 MiB of metadata per thread", "measured"),
    ("docs/OPERATING.md", "being idle for 10 s, and their caches with them", "tokio's"),
    ("docs/OPERATING.md", "(2 MiB on most GPUs)", "what devices say"),
    ("docs/OPERATING.md", "(300 to 600 MiB are reported)", "other people's measurements"),
    ("docs/OPERATING.md", "by handle (2 MiB, or `CudaOptions::handle`)", "what devices say"),
    ("docs/OPERATING.md", "one sample in 8 MiB (2^23 bytes)", "the same line: 23"),
    ("docs/OPERATING.md", "grows by less than about 8 MiB.", "the interval: 2^23 bytes"),
    ("docs/OPERATING.md", "without a file: 0.3 ms in the proxy", "measured"),
    ("docs/OPERATING.md", "| | 64 B | 4 KiB | 64 KiB | resident |", "the bench's sizes"),
    ("docs/OPERATING.md", "| one sample in 4 MiB | +0.4 % | +7 % | +5 % | +0.8 MiB |", "measured"),
    (
        "docs/OPERATING.md",
        "\"with a limit of 256.0 MiB about 3.1 % of 12,400 requests of the last 5.0 h would have \
         been rejected; memory that no request owns (110.0 MiB) fits\"",
        "an example",
    ),
    (
        "docs/OPERATING.md",
        "\"cannot fit in 512.0 MiB within 30.0 s: 640.0 MiB in use, target 496.0 MiB: resource \
         \"embedder\" 300.0 MiB (guards: 2), running requests 120.0 MiB, untracked memory 220.0 \
         MiB\"",
        "an example",
    ),
    ("docs/OPERATING.md", "| one sample in 8 MiB | +0.7 % | +3 % | +5 % | +0.8 MiB |", "measured"),
    ("docs/OPERATING.md", "| one sample in 16 MiB | +0.4 % | +2 % | +4 % | +0.9 MiB |", "measured"),
    ("docs/OPERATING.md", "jemalloc's own interval of 512 KiB", "jemalloc's"),
    ("docs/OPERATING.md", "that grew by 5 to 600 MiB/s until the kernel killed", "measured"),
    ("docs/OPERATING.md", "killed.rs`; limit 192 MiB", "the bench's limit"),
    ("docs/OPERATING.md", "With one sample in 16 MiB, which costs less, 1 of 80", "measured"),
    ("docs/OPERATING.md", "with 8 MiB, none of 60 did", "measured"),
    ("docs/DEPLOYING.md", "(the default from 23.0 on)", "Docker's"),
    ("docs/DEPLOYING.md", "user and licences (14.4 MiB):", "measured"),
    ("docs/DEPLOYING.md", "keeps its symbol names (2.3 MiB on disk", "measured"),
    ("docs/DEPLOYING.md", "with one sample in 8 MiB ([cost]", "examples/proxy.rs: 2^23"),
    ("docs/DEPLOYING.md", "In two runs of 5 s", "measured"),
    ("docs/DEPLOYING.md", "took 33 and 47 % more CPU", "measured"),
    ("docs/DEPLOYING.md", "and `balanced` 20 and 34 %", "measured"),
    ("docs/DEPLOYING.md", "| 2 to 10 MiB, and `PROXY_WEIGHTS` once loaded |", "measured"),
    ("docs/DEPLOYING.md", "seccomp's default", "the runtime's"),
    ("docs/DEPLOYING.md", "runtime is every container's default,", "the runtime's"),
    ("docs/DEPLOYING.md", "300 to 600 MiB of the device that only", "other people's measurements"),
    ("docs/GETTING_STARTED.md", "1 MiB of the last kind needs 89 MiB.", "89 times, measured"),
    ("docs/GETTING_STARTED.md", "axum's extractors accept 2 MiB unless", "axum's"),
    ("docs/ARENA_OPTIONS.md", "1.1 GiB takes 1.1 GiB (in ONNX Runtime 2 GiB)", "an example"),
    ("docs/ARENA_OPTIONS.md", "-1 for the default, but 0 for that of `max_mem`", "ONNX Runtime's"),
    ("docs/ARENA_OPTIONS.md", "5. the default.", "of each key, in the table above"),
];

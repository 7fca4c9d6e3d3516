//! Which sentence of which page says what of the code, and which numbers are no constant's.
//!
//! A row has the words of a sentence with `{}` for each value. `operating`, `deploying` and `rest`
//! have them by page.
//!
//! Invariant: a row's values come from the code, never from the page.

mod deploying;
mod life;
mod operating;
mod rest;

use std::time::Duration;

use lowtide::config::{Config, Profile, Settings};
use lowtide::control;

use crate::code::constant;

/// One sentence.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) page: &'static str,
    /// Its words.
    pub(crate) says: &'static str,
    /// What stands in its gaps.
    pub(crate) values: Vec<String>,
}

impl Row {
    /// As the page has to have it.
    pub(crate) fn sentence(&self) -> String {
        let mut parts = self.says.split("{}");
        let mut text = parts.next().unwrap_or_default().to_owned();
        let mut values = self.values.iter();
        for part in parts {
            let value = values.next();
            text += value.unwrap_or_else(|| panic!("{:?} has more gaps than values", self.says));
            text += part;
        }
        assert!(values.next().is_none(), "{:?} has more values than gaps", self.says);
        text
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

pub(crate) fn all() -> Vec<Row> {
    [operating::rows(), operating::alerts(), deploying::rows(), rest::rows(), life::rows()]
        .into_iter()
        .flatten()
        .collect()
}

/// What the crate makes of a profile.
fn config(profile: Profile) -> Config {
    let code = Settings { profile: Some(profile), ..Settings::default() };
    Config::resolve(&code, &Settings::default()).expect("a profile is valid")
}

/// What the control loop goes by, where no profile says otherwise.
fn loop_settings() -> control::Settings {
    control::Settings::default()
}

/// One of the multiplier's constants.
fn k(name: &str) -> f64 {
    constant("src/control/correction.rs", name).number()
}

/// `10 to 250 ms`.
fn ticks() -> String {
    let control::Settings { active_tick, idle_tick, .. } = loop_settings();
    format!("{} to {} ms", active_tick.as_millis(), idle_tick.as_millis())
}

/// What stands for a setting of jemalloc in a profile's string, or jemalloc's own value.
fn jemalloc(profile: lowtide::host::HeapProfile, name: &str) -> String {
    let conf = profile.conf().to_str().expect("ASCII");
    let mut pairs = conf.split(',').filter_map(|pair| pair.split_once(':'));
    let own = || {
        let file = "src/host/knobs.rs";
        let knob = crate::code::between(file, &format!("name: \"{name}\",\n"), "},\n");
        let value = knob.split_once("default: Some(\"").map(|(_, rest)| rest.split('"').next());
        value.flatten().unwrap_or_else(|| panic!("{name} has no value in {file}")).to_owned()
    };
    pairs.find(|(other, _)| *other == name).map_or_else(own, |(_, value)| value.to_owned())
}

/// With a capital.
fn first_of_a_sentence(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

fn seconds(time: Option<Duration>) -> String {
    crate::code::time(time.expect("not never"))
}

/// Numbers that no constant of the crate holds: page, words, whose they are.
pub(crate) const FIGURES: &[(&str, &str, &str)] = &[
    ("docs/OPERATING.md", "some 0.3 MiB of metadata per thread", "measured"),
    ("docs/OPERATING.md", "being idle for 10 s, and their caches with them", "tokio's"),
    ("docs/OPERATING.md", "(2 MiB on most GPUs)", "what devices say"),
    ("docs/OPERATING.md", "(300 to 600 MiB are reported)", "other people's measurements"),
    ("docs/OPERATING.md", "by handle (2 MiB, or `CudaOptions::handle`)", "what devices say"),
    ("docs/OPERATING.md", "each time 1 GiB (2^30 bytes) has been", "the line above: 30"),
    (
        "docs/OPERATING.md",
        "By default one allocation is sampled per 512 KiB allocated",
        "jemalloc's",
    ),
    ("docs/DEPLOYING.md", "(the default from 23.0 on)", "Docker's"),
    ("docs/DEPLOYING.md", "user and licences (10.7 MiB):", "measured"),
    ("docs/DEPLOYING.md", "took 8 % more CPU than jemalloc's defaults over 5 s", "measured"),
    ("docs/DEPLOYING.md", "(`balanced`: 2 %)", "measured"),
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

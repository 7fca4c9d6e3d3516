//! Figures of an operator's questions: staged incidents, kills, the recorder, the profiler, alerts.

use super::benches::Bench;
use super::{Figure, Measure, alerts, at_least, benches, measure};
use crate::run::cargo;

/// The question who holds a GPU is staged by the tests of the fake driver.
const DEVICE: &str = "test --locked -p lowtide-fake-cuda --test cuda -- processes";

const STAGED: &[Measure] = &[Measure { names: &["answered", "logs.named"], run: measure_answered }];

const BENCHES: &[Bench] = &[
    Bench {
        arguments: "bench --locked --bench flight",
        figures: &[
            ("questions.killed.cause_told", None),
            ("questions.recorder.cpu_percent", None),
            ("questions.recorder.allocations", None),
            ("questions.recorder.memory_bytes", None),
        ],
    },
    Bench {
        arguments: "bench --locked -p lowtide-benches --features profiling \
                    --bench questions_killed_profile",
        figures: &[("questions.killed.profile_named", None)],
    },
    Bench {
        arguments: "bench --locked -p lowtide-benches --features profiling \
                    --bench questions_profiler",
        figures: &[
            ("questions.profiler.64B.instructions_ratio", None),
            ("questions.profiler.4KiB.instructions_ratio", None),
            ("questions.profiler.64KiB.instructions_ratio", None),
            ("questions.profiler.rss_bytes", None),
        ],
    },
];

/// Measures all of them. With `only`, those of benches and those measured here are told apart by
/// their full names.
pub(super) fn run(only: &[String]) -> Result<(), String> {
    let is_bench = |name: &str| {
        BENCHES.iter().flat_map(|bench| bench.figures).any(|(figure, _)| *figure == name)
    };
    let (of_benches, others): (Vec<_>, Vec<_>) =
        only.iter().cloned().partition(|one| is_bench(one));
    let is_alert = |name: &String| alerts::MEASURES.iter().any(|of| of.names.contains(&&**name));
    let (of_alerts, staged): (Vec<_>, Vec<_>) = others.into_iter().partition(is_alert);
    let mut failed = Vec::new();
    let mut note = |result: Result<(), String>| failed.extend(result.err());
    if only.is_empty() || !of_alerts.is_empty() {
        note(measure("questions", alerts::MEASURES, &of_alerts));
    }
    if only.is_empty() || !staged.is_empty() {
        note(measure("questions", STAGED, &staged));
    }
    if only.is_empty() || !of_benches.is_empty() {
        note(benches::measure(BENCHES, &of_benches));
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

fn measure_answered() -> Result<Vec<Figure>, String> {
    let bench = "bench --locked -p lowtide-benches --features profiling --bench questions";
    let (text, _) = cargo(bench).shown()?;
    let printed = |name: &str| {
        let begin = format!("figure {name} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&*begin));
        let value = line.and_then(|line| line.split(' ').next()?.parse::<f64>().ok());
        value.ok_or_else(|| format!("{name} was not printed"))
    };
    let device = if cargo(DEVICE).run().is_ok() { 1.0 } else { 0.0 };
    Ok(vec![
        at_least("answered", printed("questions.staged_answered")? + device, "questions", 8.0),
        at_least("logs.named", printed("questions.logs.named")?, "incidents", 6.0),
    ])
}

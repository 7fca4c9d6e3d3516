//! Figures of an operator's questions: staged incidents, kills, the recorder, the profiler, advice
//! on limits, alerts, the page.

use super::benches::Bench;
use super::{Figure, Measure, alerts, at_least, benches, figure, measure, printed};
use crate::ci::{Build, page_check};
use crate::run::cargo;

/// The question who holds a GPU is staged by the tests of the fake driver.
const DEVICE: &str = "test --locked -p lowtide-fake-cuda --test cuda -- processes";

/// What is measured here, besides the alerts.
const OWN: &[Measure] = &[
    Measure { names: &["answered", "logs.named"], run: measure_answered },
    Measure {
        names: &["page.bytes", "page.first_picture_ms", "page.violations"],
        run: measure_page,
    },
];

const BENCHES: &[Bench] = &[
    Bench {
        arguments: "bench --locked --bench flight",
        figures: &[
            ("questions.recorder.cpu_percent", None),
            ("questions.recorder.allocations", None),
            ("questions.recorder.memory_bytes", None),
        ],
    },
    Bench {
        arguments: "bench --locked -p lowtide-benches --features profiling \
                    --bench questions_killed",
        figures: &[
            ("questions.killed.cause_told", None),
            ("questions.killed.profile_named", None),
            ("questions.killed.false_alarms", None),
        ],
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
    Bench {
        arguments: "bench --locked --bench controller -- --seeds 0 --days 0",
        figures: &[
            ("questions.advice.smallest.predicted_percent", None),
            ("questions.advice.smallest.real_percent", None),
            ("questions.advice.half.predicted_percent", None),
            ("questions.advice.half.real_percent", None),
        ],
    },
];

/// Measures these figures, or all.
pub(super) fn run(only: &[String]) -> Result<(), String> {
    let own = [alerts::MEASURES, OWN].concat();
    let is_of_bench = |name: &String| {
        BENCHES.iter().flat_map(|bench| bench.figures).any(|(figure, _)| figure == name)
    };
    let (of_benches, of_own): (Vec<_>, Vec<_>) = only.iter().cloned().partition(is_of_bench);
    let mut results = Vec::new();
    if only.is_empty() || !of_own.is_empty() {
        results.push(measure("questions", &own, &of_own));
    }
    if only.is_empty() || !of_benches.is_empty() {
        results.push(benches::measure(BENCHES, &of_benches));
    }
    let failed: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

fn measure_answered() -> Result<Vec<Figure>, String> {
    let bench = "bench --locked -p lowtide-benches --features profiling --bench questions";
    let (text, _) = cargo(bench).shown()?;
    let (tests, passed) = cargo(DEVICE).shown()?;
    let device = if passed && passed_tests(&tests) > 0 { 1.0 } else { 0.0 };
    let staged = printed(&text, "questions.staged_answered")?;
    Ok(vec![
        at_least("answered", staged + device, "questions", 8.0),
        at_least("logs.named", printed(&text, "questions.logs.named")?, "incidents", 6.0),
    ])
}

/// Returns the number of tests that passed: a filter that matches none succeeds too.
pub(super) fn passed_tests(text: &str) -> u32 {
    let results = text.lines().filter_map(|line| line.strip_prefix("test result: ok. "));
    results.filter_map(|line| line.split(' ').next()?.parse::<u32>().ok()).sum()
}

/// The optimized proxy's page, in a real browser.
fn measure_page() -> Result<Vec<Figure>, String> {
    let check = page_check(Build::Release).map_err(|stop| stop.to_string())?;
    let (text, has_passed) = check.shown()?;
    if !has_passed {
        return Err("the check of the page failed".to_owned());
    }
    let measured = |name, unit, goal| Ok(figure(name, printed(&text, name)?, unit, Some(goal)));
    [
        ("page.bytes", "bytes", 60_000.0),
        ("page.first_picture_ms", "ms", 300.0),
        ("page.violations", "violations", 0.0),
    ]
    .map(|(name, unit, goal)| measured(name, unit, goal))
    .into_iter()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_matches_no_test_counts_as_no_answer() {
        let none = "running 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored";
        assert_eq!(passed_tests(none), 0);
        assert_eq!(passed_tests(&none.replace("0 passed", "3 passed")), 3);
        assert_eq!(passed_tests("test result: FAILED. 3 passed; 1 failed"), 0);
    }
}

//! Figures that a few lines measure.

use std::fs;

use serde_json::Value;

use super::field::passed;
use super::{Figure, count, figure, printed};
use crate::run::cargo;
use crate::text::names::{MetricsTier, TABLE};
use crate::tree::{self, Tree};

/// Counts the lines that a user writes, of the programs in the documents: those of a service, and
/// the statements by which a model is added to it.
pub(super) fn measure_lines() -> Result<Vec<Figure>, String> {
    let read = |name: &str| {
        let text = fs::read_to_string(tree::root().join(name));
        text.map_err(|error| format!("{name}: {error}"))
    };
    let (axum, page) = (read("README.md")?, read("docs/GETTING_STARTED.md")?);
    let tonic = read("examples/tonic/health_in_tonic.rs")?;
    let model = page.split_once("## A model").map_or("", |(_, text)| text);
    let is_statement = |line: &&str| {
        let starts = ["use ", "fn ", "async fn ", "}"];
        !starts.iter().any(|start| line.trim_start().starts_with(start))
    };
    let (axum, tonic) = (lines(block(&axum)).count(), lines(&tonic).count());
    let model = lines(block(model)).filter(is_statement).count();
    if axum.min(tonic).min(model) == 0 {
        return Err("a program is not where it was".to_owned());
    }
    Ok(vec![
        figure("axum_lines", count(axum), "lines"),
        figure("tonic_lines", count(tonic), "lines"),
        figure("model_lines", count(model), "lines"),
    ])
}

/// Returns the first block of Rust in a page.
fn block(page: &str) -> &str {
    let rest = page.split_once("```rust").map_or("", |(_, rest)| rest);
    let rest = rest.split_once('\n').map_or("", |(_, rest)| rest);
    rest.split("```").next().unwrap_or_default()
}

/// Returns the lines with code.
fn lines(program: &str) -> impl Iterator<Item = &str> {
    let is_code = |line: &&str| {
        let line = line.trim_start();
        !line.is_empty() && !line.starts_with("//") && !line.starts_with("#!")
    };
    program.lines().filter(is_code)
}

/// Runs random schedules of both kinds: those that step the engine's operations in one thread, and
/// those that drive a whole arena.
pub(super) fn measure_schedules() -> Result<Vec<Figure>, String> {
    const STEPPED: u32 = 20_000;
    const WHOLE: u32 = 400;
    let test = "test --locked --release --package lowtide-gpu --lib steps:: -- --nocapture";
    let stepped = cargo(test).env("LOWTIDE_STEPS", STEPPED.to_string()).shown()?;
    let whole = format!("bench --locked --bench schedules -- --count {WHOLE} --threads 1");
    let whole = cargo(&whole).shown()?;
    let failed = [&stepped, &whole].into_iter().filter(|(_, is_held)| !is_held).count();
    let stepped_rate = f64::from(STEPPED) / seconds(&stepped.0)?;
    let ratio = stepped_rate * seconds(&whole.0)? / f64::from(WHOLE);
    Ok(vec![
        figure("schedules_per_s_ratio", ratio, "ratio"),
        figure("schedules.failed", count(failed), "runs"),
    ])
}

/// Returns the seconds in the line `N schedules ... in SECONDS s`.
fn seconds(text: &str) -> Result<f64, String> {
    let line = text.lines().find(|line| line.contains(" schedules ") && line.contains(" in "));
    let after = line.and_then(|line| line.split_once(" in ")).map(|(_, after)| after);
    let number = after.and_then(|after| after.split_once(" s")).map(|(number, _)| number);
    number.and_then(|number| number.parse().ok()).ok_or_else(|| "no time was printed".to_owned())
}

/// Counts the metrics that are published by default.
pub(super) fn measure_metrics() -> Result<Vec<Figure>, String> {
    let basic = || TABLE.iter().filter(|metric| metric.tier == MetricsTier::Basic);
    let of_host = basic().filter(|metric| !metric.name.starts_with("lowtide_device"));
    Ok(vec![
        figure("metrics", count(basic().count()), "count"),
        figure("metrics_without_device", count(of_host.count()), "count"),
    ])
}

/// Counts the panels of all dashboards.
pub(super) fn measure_panels() -> Result<Vec<Figure>, String> {
    let tree = Tree::read(&tree::root())?;
    let mut panels = 0;
    for file in &tree.files {
        if file.name.starts_with("dashboards/") && file.name.ends_with(".json") {
            let board: Value = serde_json::from_str(&file.text)
                .map_err(|error| format!("{}: {error}", file.name))?;
            let all = board["panels"].as_array().map_or(&[][..], Vec::as_slice);
            panels += all.iter().filter(|panel| panel["type"] != "row").count();
        }
    }
    Ok(vec![figure("panels", count(panels), "count")])
}

/// Stages an operator's questions. Who holds a GPU is staged by the tests of the fake driver.
pub(super) fn measure_answered() -> Result<Vec<Figure>, String> {
    let bench =
        "bench --locked -p lowtide-benches --features profiling --bench questions -- answers";
    let (text, _) = cargo(bench).shown()?;
    let tests = cargo("test --locked -p lowtide-fake-cuda --test cuda -- processes").shown()?;
    let device = if tests.1 && !passed(&tests.0, false).is_empty() { 1.0 } else { 0.0 };
    Ok(vec![
        figure("answered", printed(&text, "questions.staged_answered")? + device, "questions"),
        figure("logs.named", printed(&text, "questions.logs.named")?, "incidents"),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_program_are_those_with_code() {
        let page =
            "Text.\n```rust,no_run\n// A comment.\n\nlet one = 1;\n    two(one); // why\n```\nx\n";
        let expected = ["let one = 1;", "    two(one); // why"];
        assert_eq!(lines(block(page)).collect::<Vec<_>>(), expected);
        assert_eq!(block("no program"), "");
    }

    #[test]
    fn the_seconds_of_a_run_are_read_from_its_line() {
        let text = "running 1 test\n20 schedules from seed 0 in 7.3 s: Totals { steps: 1 }\n";
        assert_eq!(seconds(text), Ok(7.3));
        assert!(seconds("test result: ok. finished in 7.24s").is_err());
    }
}

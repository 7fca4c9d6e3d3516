//! Cases from public reports: each row of a table names a test, which must pass. By request alone,
//! benches that look for what drifts with time.
//!
//! The tests are run one by one, so that what a test prints is known to be its own. Several tests
//! may print the same figure: the worst value counts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use serde_json::Value;

use super::questions::passed_tests;
use super::{Figure, at_least, choose, count, figure, print, printed};
use crate::ci::is_set;
use crate::packages::{Package, packages};
use crate::run::{Run, cargo};
use crate::tree::{Faults, Tree, root};

/// The rows, in columns that are separated by tabs.
const TABLE: &str = "tests/field/cases.tsv";

/// The number of figures that missed their goal in benches that once held them.
const FELL: &str = "fell";
/// The number of rows whose test did not pass.
const ROWS_WRONG: &str = "rows_wrong";

/// Figures that take more than half a minute each, which are measured by request alone: the bench
/// and its arguments, and the name under which it prints the figure.
const LONG: &[(&str, &str, &str)] = &[
    ("soak.drift", "dashboards -- --soak 20m", "soak.drift"),
    ("virtual_days", "controller -- --seeds 0 --advice 0 --days 90", "controller.days.held"),
];

/// The goals. Tests print all figures but the first four, with these units.
const GOALS: &[Figure] = &[
    goal(FELL, "figures", 0.0),
    goal(ROWS_WRONG, "rows", 0.0),
    goal("soak.drift", "series", 0.0),
    at_least("virtual_days", f64::NAN, "days", 90.0),
    at_least("unreleasable.served", f64::NAN, "requests", 40.0),
    goal("limits.wrong", "trees", 0.0),
    goal("overcommit.mappings", "mappings", 500.0),
    at_least("device.usable_gib", f64::NAN, "GiB", 23.0),
    at_least("device.usable_few_gib", f64::NAN, "GiB", 23.0),
    at_least("device.arenas", f64::NAN, "arenas", 500.0),
    goal("pattern.growing_batches", "ratio", 1.06),
    goal("pattern.two_models", "ratio", 1.10),
    goal("pattern.one_shot_streams", "ratio", 1.06),
    goal("pattern.host_ahead", "ratio", 1.01),
    goal("pattern.clean_ups", "ratio", 1.30),
    goal("stream.null", "tensors", 0.0),
    goal("exit.calls", "calls", 0.0),
    goal("lost.calls_per_minute", "calls", 10.0),
    at_least("double.served", f64::NAN, "requests", 192.0),
    goal("bodiless.reserved", "KiB", 64.0),
    goal("stall.cut", "uploads", 0.0),
];

/// A figure that is not measured yet, whose goal is the highest value that is accepted.
const fn goal(name: &'static str, unit: &'static str, goal: f64) -> Figure {
    figure(name, f64::NAN, unit, Some(goal))
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Row<'a> {
    id: &'a str,
    package: &'a str,
    /// `lib`, or the name of a test binary.
    target: &'a str,
    test: &'a str,
}

impl Row<'_> {
    fn of_line(line: &str) -> Result<Row<'_>, String> {
        let columns: Vec<_> = line.split('\t').collect();
        let [id, _source, _situation, _right, package, target, test] = *columns else {
            return Err(format!("{} columns: expected 7", columns.len()));
        };
        match columns.iter().position(|column| column.trim().is_empty()) {
            Some(at) => Err(format!("column {} is empty", at + 1)),
            None => Ok(Row { id, package, target, test }),
        }
    }
}

fn rows(text: &str) -> impl Iterator<Item = (usize, Result<Row<'_>, String>)> {
    let lines = text.lines().zip(1..).filter(|(line, _)| !line.starts_with('#'));
    lines.map(|(line, number)| (number, Row::of_line(line)))
}

/// Checks that each row is complete, stands once, and names a test binary that there is.
pub(crate) fn check(tree: &Tree, faults: &Faults) {
    let packages = tree.packages();
    let mut known = BTreeSet::new();
    for (number, row) in rows(tree.text(TABLE, faults)) {
        let fault = |why: String| faults.say(format!("{TABLE}:{number}: {why}"));
        let row = match row {
            Ok(row) => row,
            Err(why) => {
                fault(why);
                continue;
            }
        };
        let Row { id, package, target, test } = row;
        if !known.insert(row) {
            fault(format!("{id}: {test} stands twice"));
        }
        let name = package.replace('-', "_");
        let Some(package) = packages.iter().find(|package| package.crate_name == name) else {
            fault(format!("{id}: no package {package:?}"));
            continue;
        };
        let file = format!("{}tests/{target}", package.folder);
        let is_there = |end: &str| tree.has(&format!("{file}{end}"));
        if target != "lib" && !is_there(".rs") && !is_there("/main.rs") {
            fault(format!("{id}: no test binary {target:?}"));
        }
    }
}

/// Measures these figures, or all but the long ones.
pub(crate) fn run(only: &[String]) -> Result<(), String> {
    let names: Vec<_> = GOALS.iter().map(|goal| goal.name).collect();
    let mut chosen = choose("field", &names, only)?;
    let is_long = |name: &&str| LONG.iter().any(|(long, ..)| long == name);
    chosen.retain(|name| !only.is_empty() || !is_long(name));
    let mut failed = Vec::new();
    let mut values = BTreeMap::new();
    if chosen.contains(&FELL) {
        values.insert(FELL, fell()?);
    }
    for (name, bench, theirs) in LONG.iter().filter(|(name, ..)| chosen.contains(name)) {
        let (text, _) = cargo(&format!("bench --locked --bench {bench}")).shown()?;
        values.insert(name, printed(&text, theirs)?);
    }
    if chosen.iter().any(|name| *name != FELL && !is_long(name)) {
        run_rows(&mut values, &mut failed)?;
    }
    for goal in GOALS.iter().filter(|goal| chosen.contains(&goal.name)) {
        let name = goal.name;
        match values.get(name) {
            Some(value) if print("field", &Figure { value: *value, ..goal.clone() }) => {}
            Some(_) => failed.push(format!("{name} misses its goal")),
            None => failed.push(format!("{name} was not printed")),
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// Returns the number of counted goals that the benches miss.
fn fell() -> Result<f64, String> {
    let mut all = 0;
    for name in ["time -- --counted", "replay"] {
        let (text, is_held) = cargo(&format!("bench --locked --bench {name}")).shown()?;
        let missed = text.lines().filter(|line| line.starts_with("MISSED")).count();
        if missed == 0 && !is_held {
            return Err(format!("the bench {name} failed"));
        }
        all += missed;
    }
    Ok(count(all))
}

/// Runs the test of each row, says what is wrong with it, and collects the figures.
fn run_rows(
    values: &mut BTreeMap<&'static str, f64>,
    failed: &mut Vec<String>,
) -> Result<(), String> {
    let text = fs::read_to_string(root().join(TABLE)).map_err(|why| format!("{TABLE}: {why}"))?;
    let all =
        rows(&text).map(|(number, row)| row.map_err(|why| format!("{TABLE}:{number}: {why}")));
    let all = all.collect::<Result<Vec<_>, String>>()?;
    let packages = packages()?;
    let programs = build(&all, &packages)?;
    let mut wrong = 0;
    for row in &all {
        let (text, result) = match programs.get(&(row.package, row.target)) {
            Some(program) => run_test(row, program)?,
            None => (String::new(), Err("no such test binary".to_owned())),
        };
        if let Err(why) = result {
            print!("{text}");
            println!("wrong: {}: {}: {why}", row.id, row.test);
            wrong += 1;
        }
        for line in text.lines() {
            failed.extend(line.find("figure field.").and_then(|at| add(values, &line[at..]).err()));
        }
    }
    values.insert(ROWS_WRONG, count(wrong));
    Ok(())
}

/// Adds the figure of a line that a test printed.
fn add(values: &mut BTreeMap<&'static str, f64>, line: &str) -> Result<(), String> {
    let words: Vec<_> = line.split_whitespace().collect();
    let ["figure", name, value, unit] = *words else {
        return Err(format!("{line:?}: expected a name, a value and a unit"));
    };
    // A test of several cases may add the name of one: `field.NAME.CASE`.
    let after = |goal: &Figure| name.strip_prefix("field.")?.strip_prefix(goal.name);
    let is_it = |goal: &&Figure| after(goal).is_some_and(|s| s.is_empty() || s.starts_with('.'));
    let goal = GOALS.iter().find(is_it).ok_or_else(|| format!("{name} has no goal"))?;
    if unit != goal.unit {
        return Err(format!("{name} is in {unit}: expected {}", goal.unit));
    }
    let value: f64 = value.parse().map_err(|_| format!("{name}: {value:?} is no number"))?;
    let worst = if goal.floor.is_some() { f64::min } else { f64::max };
    values.entry(goal.name).and_modify(|known| *known = worst(*known, value)).or_insert(value);
    Ok(())
}

/// The program of a test target, and the folder of its package.
struct Program {
    path: String,
    folder: String,
}

/// Builds the tests: those of all default members in one command, with which they share features
/// and so what `cargo test` has built. Returns the program of each package and target.
fn build<'a>(
    rows: &[Row<'a>],
    packages: &[Package],
) -> Result<BTreeMap<(&'a str, &'a str), Program>, String> {
    let mut targets = BTreeMap::<_, BTreeSet<_>>::new();
    for Row { package, target, .. } in rows {
        let is_default = packages.iter().any(|one| one.name == *package && one.is_default);
        let of = if is_default { String::new() } else { format!("-p {package}") };
        let target = if *target == "lib" { "--lib" } else { &format!("--test {target}") };
        targets.entry(of).or_default().insert(target.to_owned());
    }
    let mut programs = BTreeMap::new();
    for (of, targets) in targets {
        let targets: Vec<_> = targets.into_iter().collect();
        let build = format!("test --locked --no-run {of} {}", targets.join(" "));
        let built = cargo(&build).words("--message-format json").output()?;
        for line in built.lines() {
            let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let folder = text(&message["manifest_path"]).trim_end_matches("Cargo.toml").to_owned();
            let is_test = message["target"]["kind"][0] == "test";
            let name = if is_test { text(&message["target"]["name"]) } else { "lib".to_owned() };
            let is_of = |row: &&Row<'_>| {
                let package = packages.iter().find(|package| package.name == row.package);
                let inside = package.map(|package| root().join(&package.folder).join(""));
                row.target == name && inside.is_some_and(|inside| inside == *folder)
            };
            if let (Some(program), Some(row)) =
                (message["executable"].as_str(), rows.iter().find(is_of))
            {
                let program = Program { path: program.to_owned(), folder };
                programs.insert((row.package, row.target), program);
            }
        }
    }
    Ok(programs)
}

/// Runs the test of a row. Returns what it printed, and whether it passed.
fn run_test(
    row: &Row<'_>,
    Program { path, folder }: &Program,
) -> Result<(String, Result<(), String>), String> {
    let run = Run::new(path).arg(row.test).words("--exact --nocapture");
    let run = run.folder(folder.as_ref()).env("CARGO_MANIFEST_DIR", folder);
    let (text, has_passed) = run.captured()?;
    let skipped = text.lines().find(|line| line.contains("skipped:"));
    let result = match skipped {
        _ if !has_passed => Err("it failed".to_owned()),
        _ if passed_tests(&text) == 0 => Err("there is no such test, or it is ignored".to_owned()),
        Some(line) if is_set("CI") => Err(line.to_owned()),
        Some(line) => {
            println!("{}: {line}", row.id);
            Ok(())
        }
        None => Ok(()),
    };
    Ok((text, result))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_seven_columns_of_which_none_is_empty() {
        let text =
            "# head\ng1\tx#1\ts\tr\tp\tlib\ta::b\ng2\tx#1\ts\tr\tp\tlib\ng3\t\ts\tr\tp\tt\tn\n";
        let row = Row { id: "g1", package: "p", target: "lib", test: "a::b" };
        let columns = Err("6 columns: expected 7".to_owned());
        let empty = Err("column 2 is empty".to_owned());
        assert_eq!(rows(text).collect::<Vec<_>>(), [(2, Ok(row)), (3, columns), (4, empty)]);
    }

    #[test]
    fn of_several_values_the_worst_counts() {
        let mut values = BTreeMap::new();
        for line in
            ["stream.null 3 tensors", "stream.null.one 1 tensors", "device.arenas 500 arenas"]
        {
            add(&mut values, &format!("figure field.{line}")).expect("a figure with a goal");
        }
        add(&mut values, "figure field.device.arenas 70 arenas").expect("a figure with a goal");
        let worst = BTreeMap::from([("device.arenas", 70.0), ("stream.null", 3.0)]);
        assert_eq!(values, worst);
        for wrong in ["gone 1 rows", "stream.null 1 bytes", "stream.null", "stream.null x tensors"]
        {
            assert!(add(&mut values, &format!("figure field.{wrong}")).is_err(), "{wrong}");
        }
        assert_eq!(values, worst);
    }
}

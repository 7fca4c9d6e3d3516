//! Cases from public reports: each row of a table names a test, which must pass.
//!
//! Several tests may print the same figure, also by the name of a case: the worst value counts.

use std::collections::{BTreeMap, BTreeSet};

use super::table::{Bound, GOALS};
use super::{Figure, count, figure, lines};
use crate::run::cargo;
use crate::tree::{Faults, Package, Tree, root};

/// The rows, in columns that are separated by tabs.
const TABLE: &str = "tests/field/cases.tsv";

/// The value and the unit of each figure.
type Values = BTreeMap<&'static str, (f64, String)>;

/// A row of the table.
struct Row<'a> {
    id: &'a str,
    package: &'a str,
    /// `lib`, or the name of a test binary, with options of Cargo.
    target: &'a str,
    test: &'a str,
}

/// Returns the rows with their lines; an incomplete one is an error.
fn rows(text: &str) -> impl Iterator<Item = (usize, Result<Row<'_>, String>)> {
    let lines = text.lines().zip(1..).filter(|(line, _)| !line.starts_with('#'));
    lines.map(|(line, number)| {
        let columns: Vec<_> = line.split('\t').filter(|column| !column.trim().is_empty()).collect();
        let row = match *columns {
            [id, _source, _situation, _right, package, target, test] => {
                Ok(Row { id, package, target, test })
            }
            _ => Err(format!("{} columns: expected 7", columns.len())),
        };
        (number, row)
    })
}

/// Checks that each row is complete and names a test that there is.
pub(crate) fn check(tree: &Tree, faults: &Faults) {
    let packages = tree.packages();
    for (number, row) in rows(tree.text(TABLE, faults)) {
        let found = row.and_then(|Row { id, package, target, test }| {
            let folder = folder(&packages, package);
            let folder = folder.ok_or_else(|| format!("{id}: no package {package:?}"))?;
            let name = target.split(' ').next().unwrap_or(target);
            let part = if name == "lib" { "src" } else { &format!("tests/{name}") };
            let target = format!("{folder}{part}");
            let function = format!("fn {}(", test.rsplit("::").next().unwrap_or(test));
            let is_there = tree.files.iter().any(|file| {
                let is_of_it = file.name == format!("{target}.rs") || file.is_under(&target);
                is_of_it && file.text.contains(&function)
            });
            if is_there { Ok(()) } else { Err(format!("{id}: no test {test} in {target}")) }
        });
        if let Err(why) = found {
            faults.say(format!("{TABLE}:{number}: {why}"));
        }
    }
}

fn folder<'a>(packages: &'a [Package], name: &str) -> Option<&'a str> {
    let name = name.replace('-', "_");
    packages.iter().find(|package| package.crate_name == name).map(|found| found.folder.as_str())
}

/// Counts the goals that a bench misses, which once held them.
pub(super) fn measure_fell() -> Result<Vec<Figure>, String> {
    let (text, is_held) = cargo("bench --locked --bench replay").shown()?;
    let missed = text.lines().filter(|line| line.starts_with("MISSED")).count();
    if missed == 0 && !is_held {
        return Err("the bench failed".to_owned());
    }
    Ok(vec![figure("fell", count(missed), "figures")])
}

/// Counts the rows whose test did not pass, with the figures that tests print.
pub(super) fn measure_rows() -> Result<Vec<Figure>, String> {
    let mut values = Values::new();
    run_rows(&mut values, |_| true)?;
    let of = |(name, (value, unit)): (&'static str, (f64, String))| {
        figure(name.trim_start_matches("field."), value, unit.leak())
    };
    Ok(values.into_iter().map(of).collect())
}

/// Counts the cases of services of which a row is wrong, or that have none.
pub(super) fn measure_cases() -> Result<Vec<Figure>, String> {
    let of_list = |(list, last)| (1..=last).map(move |number| format!("{list}{number}"));
    let cases: BTreeSet<_> = [("s", 12), ("n", 8)].into_iter().flat_map(of_list).collect();
    let ran = run_rows(&mut Values::new(), |id| cases.contains(id))?;
    let failed = cases.iter().filter(|case| ran.get(*case).is_none_or(|is_right| !is_right));
    Ok(vec![figure("cases_failed", count(failed.count()), "cases")])
}

/// Runs the tests of the chosen rows, those of a binary together, and collects the figures. Returns
/// which of their cases are right. Without `-p`, a run has the features and so the build of
/// `cargo test`.
fn run_rows(
    values: &mut Values,
    is_chosen: impl Fn(&str) -> bool,
) -> Result<BTreeMap<String, bool>, String> {
    let (tree, faults) = (Tree::read(&root())?, Faults::default());
    let (packages, text) = (tree.packages(), tree.text(TABLE, &faults));
    let members = tree.text("Cargo.toml", &faults).split("default-members = [").nth(1);
    let members = members.and_then(|rest| rest.split(']').next()).unwrap_or_default();
    let mut targets = BTreeMap::<_, Vec<_>>::new();
    for (number, row) in rows(text) {
        let row = row.map_err(|why| format!("{TABLE}:{number}: {why}"))?;
        let folder = folder(&packages, row.package).unwrap_or_default();
        let folder = if folder.is_empty() { "." } else { folder.trim_end_matches('/') };
        let of = if members.contains(&format!("{folder:?}")) { "" } else { row.package };
        if is_chosen(row.id) {
            targets.entry((of, row.target)).or_default().push(row);
        }
    }
    let (mut cases, mut wrong) = (BTreeMap::new(), 0);
    for ((of, target), rows) in targets {
        let tests: BTreeSet<_> = rows.iter().map(|row| row.test).collect();
        let target = if target == "lib" { "--lib" } else { &format!("--test {target}") };
        let of = if of.is_empty() { String::new() } else { format!("-p {of}") };
        let test = format!("test --locked {of} {target} -- --exact --nocapture --test-threads 1");
        let (text, _) = cargo(&test).words(&Vec::from_iter(tests).join(" ")).shown()?;
        let passed = passed(&text, std::env::var("CI").is_ok_and(|value| value == "true"));
        for row in rows {
            let is_right = passed.contains(row.test);
            if !is_right {
                println!("wrong: {}: {} in {of} {target}", row.id, row.test);
                wrong += 1;
            }
            *cases.entry(row.id.to_owned()).or_insert(true) &= is_right;
        }
        add(values, &text)?;
    }
    values.insert("rows_wrong", (count(wrong), "rows".to_owned()));
    Ok(cases)
}

/// Returns the tests that passed, of an output in which each test's own comes before its result. A
/// test that a run lacks or ignores has not passed, and nor has one that skips a part in CI.
pub(super) fn passed(text: &str, is_ci: bool) -> BTreeSet<&str> {
    let (mut passed, mut test, mut has_skipped) = (BTreeSet::new(), "", false);
    for line in text.lines() {
        if let Some((name, _)) = line.strip_prefix("test ").and_then(|it| it.split_once(" ... ")) {
            (test, has_skipped) = (name, false);
        }
        has_skipped |= line.contains("skipped:");
        if line.ends_with("ok") && !(has_skipped && is_ci) {
            passed.insert(test);
        }
    }
    passed
}

/// Adds the figures that tests printed.
fn add(values: &mut Values, text: &str) -> Result<(), String> {
    let lines_of_figures: Vec<_> =
        text.lines().filter_map(|line| Some(&line[line.find("figure field.")?..])).collect();
    for (name, value, unit) in lines(&lines_of_figures.join("\n")) {
        // A test of several cases may add the name of one: `field.NAME.CASE`.
        let is_it = |(goal, _): &&(&str, Bound)| {
            name.strip_prefix(goal).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let (name, bound) =
            GOALS.iter().find(is_it).ok_or_else(|| format!("{name} has no goal"))?;
        let worst = if matches!(bound, Bound::Least(_)) { f64::min } else { f64::max };
        let known = values.entry(name).or_insert((value, unit.to_owned()));
        known.0 = worst(known.0, value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Source;

    #[test]
    fn an_incomplete_row_and_a_test_that_is_not_there_are_found() {
        let source = |name: &str, text: &str| Source { name: name.into(), text: text.into() };
        let cases = "# head\ng1\tx#1\ts\tr\tp-q\tlib\ta::b\ng2\tx#1\ts\tr\tp-q\tlib\n\
                     g3\tx\ts\tr\tp-q\tt\tb\ng4\tx\ts\tr\tp\tt\tb\n";
        let files = vec![
            source("Cargo.toml", "[package]\nname = \"p-q\"\n"),
            source("src/a.rs", "fn b() {}"),
            source("tests/t.rs", "fn c() {}"),
            source(TABLE, cases),
        ];
        let faults = Faults::default();
        check(&Tree { files, binaries: Vec::new() }, &faults);
        let expected =
            ["3: 6 columns: expected 7", "4: g3: no test b in tests/t", "5: g4: no package \"p\""];
        assert_eq!(faults.sorted(), expected.map(|fault| format!("{TABLE}:{fault}")));
    }

    #[test]
    fn tests_that_passed_are_those_whose_output_ends_in_ok() {
        let text = "running 5 tests\ntest a::b ... ok\ntest a::c ... figure x 1 y\nok\ntest a::d \
                    ... FAILED\ntest a::e ... skipped: no root\nok\ntest a::f ... ignored\n\n\
                    test result: FAILED. 3 passed; 1 failed\n";
        assert_eq!(passed(text, false), BTreeSet::from(["a::b", "a::c", "a::e"]));
        assert_eq!(passed(text, true), BTreeSet::from(["a::b", "a::c"]));
        let none = "running 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored";
        assert!(passed(none, false).is_empty(), "a filter that matches no test");
    }

    #[test]
    fn of_several_values_the_worst_counts() {
        let mut values = Values::new();
        let text = "test x ... figure field.stream.null 3 tensors\nfigure field.stream.null.one 1 \
                    tensors\nfigure field.device.arenas 500 arenas\nfigure field.device.arenas 70 \
                    arenas\nfigure other 1 x\n";
        add(&mut values, text).expect("figures with goals");
        let worst = Values::from([
            ("field.device.arenas", (70.0, "arenas".to_owned())),
            ("field.stream.null", (3.0, "tensors".to_owned())),
        ]);
        assert_eq!(values, worst);
        assert!(add(&mut values, "figure field.gone 1 rows").is_err());
    }
}

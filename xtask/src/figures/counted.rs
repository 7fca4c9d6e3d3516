//! Counted figures: driver calls, bytes, instructions, failures. They do not depend on the speed of
//! the machine, so that each goal is a check, and tables of documents are compared with them.
//!
//! A line `<!-- figures: NAME | - | NAME -->` before a table names the figure of each column after
//! the first; `-` stands for none, and `{}` for the first cell of a row. Figures in bytes are shown
//! in MiB.

use std::{collections::BTreeMap, fs};

use super::lines;
use crate::run::cargo;
use crate::tree::root;

/// Arguments of Cargo. Each command takes less than half a minute, without what it builds.
const SHORT: &[&str] = &[
    "bench --locked --bench c",
    "bench --locked --bench control -- --parts heap",
    "bench --locked --bench gpu -- --part compact --part leases --part views --part wake",
    "bench --locked --bench idle -- --counted",
    "bench --locked --bench index -- --counted",
    "bench --locked --bench plan -- --counted --ci",
    "bench --locked --bench render -- --counted",
    "bench --locked --bench replay",
    "bench --locked --bench requests -- --counted",
    "bench --locked --bench requests -- --counted --reports",
    "bench --locked --bench room -- schedules --count 10000",
    "xtask figures questions --only metrics --only panels --only alerts.leak_256mib.headroom_used \
     --only alerts.retained.minutes --only alerts.shed.seconds --only alerts.false_alarms",
    "xtask figures workspace --only axum_lines",
];

/// Those that take longer.
const LONG: &[&str] = &[
    "bench --locked --bench idle -- --counted --recorder",
    "bench --locked --bench gpu -- --part devices --part trace",
    "bench --locked --bench room -- schedules",
    "bench --locked --bench room -- zipf",
    "xtask figures arena --only warm.functions --only drop.functions \
     --only warm_pair.instructions_ratio",
    "xtask figures field --only virtual_days",
    "xtask figures questions --only answered --only questions.killed.cause_told \
     --only questions.profiler.64B.instructions_ratio",
];

/// Figures that miss their goals, as the documents say, and the most that each may be.
const MISSED: &[(&str, f64)] = &[
    ("arena.drop.files", 14.0),
    ("arena.drop.functions", 67.0),
    ("arena.warm.files", 14.0),
    ("arena.warm.functions", 79.0),
    ("gpu.view.calls", 11.0),
    ("light.layer.instructions", 5_300.0),
    ("measured.layer.ratio", 1.081),
    ("measured.scope.peak.instructions", 390.0),
];

/// The documents whose tables are compared.
const DOCUMENTS: &[&str] = &["docs/BENCHMARKING.md", "docs/BENCHMARKS_APPENDIX.md"];

/// A printed value and its unit.
type Values = BTreeMap<String, (f64, String)>;

/// Measures the figures, also those that take long if it is said, and compares the documents with
/// them, or writes what differs.
pub(crate) fn run(with_long: bool, write: bool) -> Result<(), String> {
    let commands = || SHORT.iter().chain(if with_long { LONG } else { &[] });
    let words = commands().flat_map(|command| command.split_whitespace());
    let benches = words.clone().zip(words.skip(1)).filter(|(word, _)| *word == "--bench");
    let names: Vec<_> = benches.map(|(_, name)| format!("--bench {name}")).collect();
    cargo("bench --locked --no-run").words(&names.join(" ")).run()?;
    let (mut values, mut failed) = (Values::new(), Vec::new());
    for command in commands() {
        let (text, has_passed) = cargo(command).shown()?;
        read(&text, &mut values);
        if !has_passed && !misses_only_what_is_known(&text) {
            failed.push(format!("cargo {command}"));
        }
    }
    for name in DOCUMENTS {
        let wrong = |error: std::io::Error| format!("{name}: {error}");
        let text = fs::read_to_string(root().join(name)).map_err(wrong)?;
        let (new, faults) = filled(&text, &values);
        if write && new != text {
            fs::write(root().join(name), new).map_err(wrong)?;
            println!("wrote {name}");
        } else if !write {
            faults.iter().for_each(|fault| println!("{name}:{fault}"));
            failed.extend((!faults.is_empty()).then(|| format!("{name} states other figures")));
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// Adds the figures that a program printed, but times.
fn read(text: &str, values: &mut Values) {
    let is_time = |unit: &str| ["ns", "us", "ms", "s", "calls/s"].contains(&unit);
    let counted = lines(text).filter(|(.., unit)| !is_time(unit));
    values.extend(counted.map(|(name, value, unit)| (name.to_owned(), (value, unit.to_owned()))));
}

/// Returns `true` if a program missed goals, and only those that the documents say are missed.
fn misses_only_what_is_known(text: &str) -> bool {
    let mut values = Values::new();
    read(text, &mut values);
    let mut missed = text.lines().filter_map(|line| line.strip_prefix("MISSED")).peekable();
    let is_known = |line: &str| {
        let name = line.split_whitespace().next().unwrap_or_default();
        let most = MISSED.iter().find(|(known, _)| *known == name).map(|(_, most)| *most);
        most.zip(values.get(name)).is_some_and(|(most, (value, _))| *value <= most)
    };
    missed.peek().is_some() && missed.all(is_known)
}

/// With commas: `2,048`.
fn commas(count: u64) -> String {
    let digits = count.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}

/// Returns a value with the digits and the unit of a cell; `None` if the cell is no number.
fn as_stated((value, unit): &(f64, String), stated: &str) -> Option<String> {
    let number = stated.trim_end_matches(" MiB");
    number.replace(',', "").parse::<f64>().ok()?;
    let value = if unit == "bytes" { value / f64::from(1 << 20) } else { *value };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is a count")]
    let whole = || commas(value.round() as u64);
    let digits = number.split_once('.').map(|(_, digits)| digits.len());
    let measured = digits.map_or_else(whole, |digits| format!("{value:.digits$}"));
    Some(stated.replace(number, &measured))
}

/// Returns a document with the measured values in its tables, and the differences. A value that
/// was not measured stays, as does a cell that is no number.
fn filled(text: &str, values: &Values) -> (String, Vec<String>) {
    let (mut new, mut faults) = (String::new(), Vec::new());
    let mut columns: Vec<&str> = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let mark = line.strip_prefix("<!-- figures: ").and_then(|rest| rest.strip_suffix(" -->"));
        if let Some(mark) = mark {
            columns = mark.split(" | ").collect();
        } else if !line.starts_with('|') && !line.is_empty() {
            columns.clear();
        }
        let mut cells: Vec<String> = line.split('|').map(str::to_owned).collect();
        if !columns.is_empty() && cells.len() > 3 && mark.is_none() {
            let first = cells[1].trim();
            let quoted = first.strip_prefix('`').and_then(|rest| rest.split('`').next());
            let key = quoted.unwrap_or(first).to_owned();
            for (cell, column) in cells.iter_mut().skip(2).zip(&columns) {
                let name = column.replace("{}", &key);
                let stated = cell.trim().to_owned();
                let measured = values.get(&name).and_then(|value| as_stated(value, &stated));
                let Some(measured) = measured.filter(|measured| *measured != stated) else {
                    continue;
                };
                faults.push(format!("{number}: {name} is {measured}: {stated}"));
                *cell = format!(" {measured} ");
            }
        }
        new += &cells.join("|");
        new.push('\n');
    }
    (new, faults)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_compared_and_written_with_the_digits_that_they_have() {
        let text = "<!-- figures: - | {}.calls | {}.ratio | {}.kept -->\n\n\
                    | trace | live | calls | ratio | kept |\n|---|--:|--:|--:|--:|\n\
                    | `one`: a | 7 | 1,250 | 1.02 | 3 MiB |\n| two | 7 | 8 | 1.5 | 0 |\n\n\
                    End | 9 | 9 | 9\n";
        let printed = "figure one.calls 1300 calls\nfigure one.ratio 1.0204 ratio\n\
                       figure one.kept 3145728 bytes\nfigure End.calls 1 calls\n";
        let mut values = Values::new();
        read(printed, &mut values);
        let (new, faults) = filled(text, &values);
        assert_eq!(new, text.replace("1,250", "1,300"));
        assert_eq!(faults, ["5: one.calls is 1,300: 1,250"]);
        assert_eq!(filled(&new, &values), (new.clone(), Vec::new()));
    }

    #[test]
    fn a_known_miss_passes_until_it_gets_worse_or_another_joins_it() {
        let missed =
            |calls: u32| format!("figure gpu.view.calls {calls} calls\nMISSED  gpu.view.calls at");
        assert!(misses_only_what_is_known(&missed(11)));
        assert!(!misses_only_what_is_known(&missed(12)));
        assert!(!misses_only_what_is_known(&(missed(11) + "\nMISSED  gpu.other at most 1: 2")));
        assert!(!misses_only_what_is_known("an error"));
    }
}

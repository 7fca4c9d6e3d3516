//! `cargo xtask figures SUBJECT`: measures a subject and prints lines `figure NAME VALUE UNIT`.
//!
//! `table` has what measures each figure, and the goals of those that no program judges itself. The
//! command ends with status 1 if a goal does not hold, and measures the rest first.
//!
//! Invariant: each figure is printed by one row of the table.

mod alerts;
mod callgrind;
mod clone;
mod counted;
pub(crate) mod field;
mod footprint;
mod house;
mod paths;
mod small;
mod table;

use std::{collections::BTreeSet, ptr::eq};

use self::table::{Bound, GOALS, ROWS, Row, SUBJECTS, Source};
use crate::run::{Run, cargo};

/// A measured value.
struct Figure {
    name: &'static str,
    value: f64,
    unit: &'static str,
}

const fn figure(name: &'static str, value: f64, unit: &'static str) -> Figure {
    Figure { name, value, unit }
}

/// Returns a number of things as the value of a figure.
fn count(things: usize) -> f64 {
    u32::try_from(things).unwrap_or(u32::MAX).into()
}

/// The arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The subject.
    #[arg(required_unless_present = "list")]
    subject: Option<String>,
    /// Measures only what prints this figure; may be repeated. Not for `counted`.
    #[arg(long, value_name = "FIGURE")]
    only: Vec<String>,
    /// With `counted`: also what takes more than half a minute each.
    #[arg(long)]
    full: bool,
    /// With `counted`: writes the tables of the documents.
    #[arg(long)]
    write: bool,
    /// Lists the subjects.
    #[arg(long)]
    list: bool,
}

/// Measures a subject.
pub(crate) fn run(arguments: &Arguments) -> Result<(), String> {
    if arguments.list {
        SUBJECTS.iter().for_each(|(name, about)| println!("{name:<12} {about}"));
        return Ok(());
    }
    match arguments.subject.as_deref().unwrap_or_default() {
        "counted" => counted::run(arguments.full, arguments.write),
        subject if SUBJECTS.iter().any(|(name, _)| *name == subject) => {
            measure(ROWS.iter().filter(|row| row.subject == subject), subject, &arguments.only)
        }
        other => {
            let names: Vec<_> = SUBJECTS.iter().map(|(name, _)| *name).collect();
            Err(format!("unknown subject {other:?}: expected one of {}", names.join(", ")))
        }
    }
}

/// Measures what prints these figures, or all but those that take long.
fn measure<'a>(
    rows: impl DoubleEndedIterator<Item = &'a Row> + Clone,
    subject: &str,
    only: &[String],
) -> Result<(), String> {
    let full = |name: &String| {
        let without = name.strip_prefix(subject).and_then(|name| name.strip_prefix('.'));
        format!("{subject}.{}", without.unwrap_or(name))
    };
    let only: Vec<_> = only.iter().map(full).collect();
    if let Some(name) = only.iter().find(|name| !rows.clone().any(|row| row.has(name))) {
        let known: Vec<_> = rows.map(|row| row.figures).collect();
        return Err(format!("unknown figure {name:?}: expected one of {}", known.join(" ")));
    }
    let (mut printed, mut failed) = (BTreeSet::new(), Vec::new());
    // A row that names more of a figure follows the others that have it.
    let of = |name: &String| rows.clone().rfind(|row| row.has(name));
    for row in rows.clone() {
        if only.is_empty() && !row.is_long || only.iter().filter_map(of).any(|it| eq(it, row)) {
            failed.extend(row.measure(&mut printed).err());
        }
    }
    let missing = only.iter().filter(|name| !printed.contains(*name));
    failed.extend(missing.map(|name| format!("{name} was not printed")));
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

impl Row {
    /// Returns `true` if it prints this figure.
    fn has(&self, name: &str) -> bool {
        self.figures.split(' ').any(|prefix| name.starts_with(prefix))
    }

    /// Measures its figures, prints them, and judges those that have a goal in the table.
    fn measure(&self, printed: &mut BTreeSet<String>) -> Result<(), String> {
        let (text, has_passed) = match self.source {
            Source::Cargo(words) => cargo(words).shown()?,
            Source::Bench(words) => cargo("bench --locked --bench").words(words).shown()?,
            Source::Script(words) => {
                let (program, words) = words.split_once(' ').unwrap_or((words, ""));
                Run::new(program).words(words).shown()?
            }
            Source::Own(measure) => {
                let mut text = String::new();
                for Figure { name, value, unit } in measure()? {
                    let digits =
                        if unit == "ratio" { 3 } else { usize::from(value.fract() != 0.0) };
                    let line = format!("figure {}.{name} {value:.digits$} {unit}\n", self.subject);
                    print!("{line}");
                    text += &line;
                }
                (text, true)
            }
        };
        let mut missed = Vec::new();
        for (name, value, unit) in lines(&text) {
            let renamed = self.renamed.iter().find(|(theirs, _)| *theirs == name);
            let name = renamed.map_or(name, |(_, ours)| ours);
            if renamed.is_some() {
                println!("figure {name} {value} {unit}");
            }
            printed.insert(name.to_owned());
            if !judge(name, value) {
                missed.push(format!("{name} misses its goal"));
            }
        }
        if !has_passed {
            missed.push(format!("{:?} failed", self.source));
        }
        for figures in self.figures.split(' ') {
            if !printed.iter().any(|name| name.starts_with(figures)) {
                missed.push(format!("{figures} was not printed"));
            }
        }
        if missed.is_empty() { Ok(()) } else { Err(missed.join("; ")) }
    }
}

/// Returns the name, the value and the unit of each figure in what a program printed.
fn lines(text: &str) -> impl Iterator<Item = (&str, f64, &str)> {
    text.lines().filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        match *words {
            ["figure", name, value, unit, ..] => Some((name, value.parse().ok()?, unit)),
            _ => None,
        }
    })
}

/// Returns the value of a figure in what a program printed.
fn printed(text: &str, name: &str) -> Result<f64, String> {
    let found = lines(text).find(|(known, ..)| *known == name).map(|(_, value, _)| value);
    found.ok_or_else(|| format!("{name} was not printed"))
}

/// Prints whether the goal of a figure holds, if the table has one, and returns `false` if not.
fn judge(name: &str, value: f64) -> bool {
    let Some((_, bound)) = GOALS.iter().find(|(known, _)| *known == name) else { return true };
    let (holds, word, bound) = match *bound {
        Bound::Most(most) => (value <= most, "most", most),
        Bound::Least(least) => (value >= least, "least", least),
    };
    println!("{}  {name} at {word} {bound}: {value}", if holds { "held  " } else { "MISSED" });
    holds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran() -> Result<Vec<Figure>, String> {
        Err("it ran".to_owned())
    }

    #[test]
    fn a_figure_is_chosen_by_the_name_that_is_printed_and_without_its_subject() {
        let rows = [Row {
            subject: "room",
            figures: "room.a room.leak.",
            source: Source::Own(ran),
            renamed: &[],
            is_long: false,
        }];
        let of = |name: &str| measure(rows.iter(), "room", &[name.to_owned()]);
        let ran = Err("it ran; room.leak.seconds was not printed".to_owned());
        assert_eq!((of("room.leak.seconds"), of("leak.seconds")), (ran.clone(), ran));
        let unknown = "unknown figure \"room.gone\": expected one of room.a room.leak.";
        assert_eq!(of("room.gone"), Err(unknown.to_owned()));
    }

    #[test]
    fn every_row_and_every_goal_is_of_a_subject() {
        let has = |name: &str| SUBJECTS.iter().any(|(known, _)| name.starts_with(known));
        for row in ROWS {
            assert!(SUBJECTS.iter().any(|(name, _)| *name == row.subject), "{}", row.subject);
        }
        for (name, _) in GOALS {
            assert!(has(name) && ROWS.iter().any(|row| row.has(name)), "{name}");
        }
    }
}

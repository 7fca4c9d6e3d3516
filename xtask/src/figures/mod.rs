//! `cargo xtask figures NAME`: measures a subject and prints lines `figure NAME VALUE UNIT`.
//!
//! A figure with a goal prints whether it holds. The command ends with status 1 if a goal does not
//! hold, and measures the rest first.
//!
//! Invariant: each figure is printed by one function.

mod alerts;
mod api;
mod arena;
mod benches;
mod clone;
pub(crate) mod counted;
pub(crate) mod field;
mod fleet;
mod footprint;
mod gpu;
mod house;
mod measured;
mod questions;
mod room;

use crate::run::{Run, cargo};

/// A measured value.
#[derive(Clone)]
struct Figure {
    name: &'static str,
    value: f64,
    unit: &'static str,
    /// The highest value that is accepted.
    goal: Option<f64>,
    /// The lowest value that is accepted.
    floor: Option<f64>,
}

const fn figure(name: &'static str, value: f64, unit: &'static str, goal: Option<f64>) -> Figure {
    Figure { name, value, unit, goal, floor: None }
}

/// A figure whose goal is the lowest value that is accepted.
const fn at_least(name: &'static str, value: f64, unit: &'static str, floor: f64) -> Figure {
    Figure { name, value, unit, goal: None, floor: Some(floor) }
}

/// Returns a number of things as the value of a figure.
fn count(things: usize) -> f64 {
    u32::try_from(things).unwrap_or(u32::MAX).into()
}

/// A function that measures one or more figures of a subject.
#[derive(Clone, Copy)]
struct Measure {
    /// The names of the figures that it prints.
    names: &'static [&'static str],
    run: fn() -> Result<Vec<Figure>, String>,
}

/// The figures of the workspace.
const WORKSPACE: &[Measure] = &[
    Measure { names: &["public_types", "documented_items"], run: api::measure_public },
    Measure { names: &["axum_lines", "tonic_lines", "model_lines"], run: api::measure_lines },
    Measure { names: &["arrows", "arrows_up"], run: api::measure_arrows },
    Measure { names: &["demo_cpu_minutes"], run: clone::measure_demo },
    Measure {
        names: &["test_cpu_minutes", "test_build_cpu_minutes", "test_binaries"],
        run: clone::measure_tests,
    },
    Measure { names: &["quick_cpu_seconds"], run: clone::measure_quick },
    Measure { names: &["heap_build_cpu_seconds"], run: footprint::measure_heap },
    Measure { names: &["service_build_cpu_seconds"], run: footprint::measure_service },
];

/// The figures of the source and the documents.
const HOUSE: &[Measure] = &[Measure {
    names: &[
        "product_lines",
        "product_files",
        "all_lines",
        "public_types",
        "error_types",
        "shared_names",
        "cycle_files",
        "doc_words",
    ],
    run: house::measure,
}];

/// The arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The subject.
    #[arg(required_unless_present = "list")]
    subject: Option<String>,
    /// Measures this figure alone, by the name that is printed; may be repeated. Not for `counted`,
    /// `faults`, `engines` and `envoy`.
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

/// The subjects.
const SUBJECTS: &[(&str, &str)] = &[
    ("workspace", "what it costs to build, test and learn the workspace: some 20 minutes"),
    ("house", "how large the project is: lines, types, names, cycles, words; some seconds"),
    ("arena", "the arena's paths: functions, instructions, schedules; some minutes"),
    ("gpu", "an arena on a GPU, over the simulation: calls, bytes, order; some minutes"),
    ("faults", "faults that were found and fixed: what goes wrong now, with a real ONNX Runtime"),
    ("measured", "requests that are measured: errors, costs, overload; over an hour"),
    ("room", "requests that wait for room, evictions of models, leaks: some 75 minutes"),
    ("engines", "ONNX Runtime and candle in a service, and the C library: some 45 minutes"),
    (
        "questions",
        "an operator's questions, kills, alerts, the recorder and profiler: half an hour",
    ),
    ("fleet", "load reports, behind a real Envoy too; fits; the saturation: some 20 minutes"),
    ("counted", "figures that do not depend on the machine's speed, and the tables of documents"),
    ("field", "cases from public reports, and the benches `time` and `replay`: some minutes"),
    ("envoy", "thresholds on the heap, in Envoy, and lowtide: quick and slow bodies"),
];

/// Measures a subject.
pub(crate) fn run(arguments: &Arguments) -> Result<(), String> {
    let subject = arguments.subject.as_deref().unwrap_or_default();
    if arguments.list {
        SUBJECTS.iter().for_each(|(name, about)| println!("{name:<12} {about}"));
        return Ok(());
    }
    match subject {
        "house" => measure("house", HOUSE, &arguments.only),
        "workspace" => workspace(&arguments.only),
        "arena" => measure("arena", arena::ARENA, &arguments.only),
        "gpu" => benches::measure(gpu::BENCHES, &arguments.only),
        "faults" => {
            let faults = cargo("bench --locked --bench faults").run();
            let engines = Run::new(".ci/engines").run();
            faults.and(engines)
        }
        "measured" => benches::measure(measured::BENCHES, &arguments.only),
        "room" => benches::measure(room::BENCHES, &arguments.only),
        "engines" => {
            let onnx_runtime = Run::new(".ci/engines").arg("--figures").run();
            let candle = Run::new(".ci/candle").arg("--measure").run();
            let c = cargo("bench --locked --bench c").run();
            onnx_runtime.and(candle).and(c)
        }
        "questions" => questions::run(&arguments.only),
        "fleet" => measure("fleet", fleet::FLEET, &arguments.only),
        "counted" => counted::run(arguments.full, arguments.write),
        "field" => field::run(&arguments.only),
        "envoy" => Run::new(".ci/envoy").run(),
        other => {
            let names: Vec<_> = SUBJECTS.iter().map(|(name, _)| *name).collect();
            Err(format!("unknown subject {other:?}: expected one of {}", names.join(", ")))
        }
    }
}

fn workspace(only: &[String]) -> Result<(), String> {
    let result = measure("workspace", WORKSPACE, only);
    if only.is_empty() {
        println!("not measured here: the minutes of .ci/run, which its report has; instructions");
        println!("against an older commit, by callgrind over the benches index, replay and time");
    }
    result
}

/// Returns the chosen of these figures of a subject, or all. A name may begin with that of the
/// subject, as it is printed.
fn choose<'a>(subject: &str, all: &[&'a str], only: &[String]) -> Result<Vec<&'a str>, String> {
    let prefix = format!("{subject}.");
    let find = |name: &String| {
        let short = name.strip_prefix(&prefix).unwrap_or(name);
        let known = all.iter().find(|known| **known == short).copied();
        known.ok_or_else(|| format!("unknown figure {name:?}: expected one of {}", all.join(", ")))
    };
    if only.is_empty() { Ok(all.to_vec()) } else { only.iter().map(find).collect() }
}

/// Measures these figures of a subject, or all, and prints them.
fn measure(subject: &str, measures: &[Measure], only: &[String]) -> Result<(), String> {
    let all: Vec<_> = measures.iter().flat_map(|measure| measure.names).copied().collect();
    let chosen = choose(subject, &all, only)?;
    let mut failed = Vec::new();
    for measure in measures {
        if !measure.names.iter().any(|name| chosen.contains(name)) {
            continue;
        }
        match (measure.run)() {
            Ok(figures) => figures.iter().filter(|one| !print(subject, one)).for_each(|one| {
                failed.push(format!("{} misses its goal", one.name));
            }),
            Err(error) => failed.push(format!("{}: {error}", measure.names.join(", "))),
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// Returns the value of a figure in what a program printed.
fn printed(text: &str, name: &str) -> Result<f64, String> {
    let begin = format!("figure {name} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&*begin));
    let value = line.and_then(|line| line.split(' ').next()?.parse().ok());
    value.ok_or_else(|| format!("{name} was not printed"))
}

/// Prints a figure, and returns whether its goal holds.
fn print(subject: &str, figure: &Figure) -> bool {
    let Figure { name, value, unit, goal, floor } = figure;
    let digits = match *unit {
        "ratio" => 3,
        _ => usize::from(value.fract() != 0.0),
    };
    println!("figure {subject}.{name} {value:.digits$} {unit}");
    let holds = goal.is_none_or(|goal| *value <= goal) && floor.is_none_or(|floor| *value >= floor);
    for (word, bound) in [("most", goal), ("least", floor)] {
        if let Some(bound) = bound {
            let held = if holds { "held  " } else { "MISSED" };
            println!("{held}  {subject}.{name} at {word} {bound}: {value:.digits$}");
        }
    }
    holds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Result<Vec<Figure>, String> {
        Err("it ran".to_owned())
    }

    #[test]
    fn a_figure_is_chosen_by_the_name_that_is_printed_and_without_its_subject() {
        let measures = [Measure { names: &["leak.seconds"], run }];
        let of = |name: &str| measure("room", &measures, &[name.to_owned()]);
        let ran = Err("leak.seconds: it ran".to_owned());
        assert_eq!((of("room.leak.seconds"), of("leak.seconds")), (ran.clone(), ran));
        let unknown = "unknown figure \"room.gone\": expected one of leak.seconds";
        assert_eq!(of("room.gone"), Err(unknown.to_owned()));
    }
}

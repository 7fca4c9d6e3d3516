//! A service with a model: loaded, a burst of requests, idle, unloaded, some times over. Prints
//! the anonymous memory of the process at each point, and the medians of the cycles.
//!
//! The programs differ in who serves memory and in who loads and unloads. Both call [`run`], which
//! measures cycles, or obeys another program (`serve`).
//!
//! Invariant: the requests are the same in every program and in every run.
#![expect(clippy::disallowed_methods, reason = "it idles in real time")]

mod burst;
pub mod process;
mod serve;

use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use lowtide_ort::ort;
use lowtide_ort::ort::session::Session;

use crate::burst::Batch;
use crate::process::AnonymousPeak;

/// Any error ends the program.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The time after a burst at which idle memory is measured.
const IDLE: Duration = Duration::from_secs(3);
/// The time after the unload at which memory is measured.
const UNLOADED: Duration = Duration::from_secs(5);
const CYCLES: u64 = 3;

/// A program's arguments: `LIBRARY MODEL NAME [CYCLES [GOAL ...]]`.
#[derive(Clone, Debug)]
pub struct Arguments {
    /// The shared library of ONNX Runtime.
    pub library: PathBuf,
    /// The model, in ONNX format.
    pub model: PathBuf,
    /// The prefix of the figures, or `serve`.
    pub name: String,
    /// The number of cycles.
    pub cycles: u64,
    /// What must hold.
    pub goals: Vec<Goal>,
}

/// A bound of a figure: `idle_mib<=109`, `measured_ratio>=0.9`.
#[derive(Clone, Debug)]
pub struct Goal {
    /// The figure, without the prefix.
    figure: String,
    bound: f64,
    is_upper: bool,
}

impl std::str::FromStr for Goal {
    type Err = BoxError;

    fn from_str(text: &str) -> Result<Self, BoxError> {
        let (figure, bound, is_upper) = match text.split_once("<=") {
            Some((figure, bound)) => (figure, bound, true),
            None => {
                let (figure, bound) = text.split_once(">=").ok_or("expected FIGURE<=NUMBER")?;
                (figure, bound, false)
            }
        };
        Ok(Self { figure: figure.to_owned(), bound: bound.parse()?, is_upper })
    }
}

impl Arguments {
    /// Reads the command line.
    ///
    /// # Errors
    /// A missing argument, or a goal that is not a number.
    pub fn read() -> Result<Self, BoxError> {
        let mut arguments = std::env::args().skip(1);
        let mut next = |what| arguments.next().ok_or_else(|| format!("missing argument: {what}"));
        let library = next("the library of ONNX Runtime")?.into();
        let model = next("the model")?.into();
        let name = next("the name of the figures")?;
        let cycles = arguments.next().map_or(Ok(CYCLES), |cycles| cycles.parse())?;
        let goals = arguments.map(|goal| goal.parse()).collect::<Result<_, _>>()?;
        Ok(Self { library, model, name, cycles, goals })
    }
}

/// A service with one model.
pub trait Service {
    /// Loads the model.
    ///
    /// # Errors
    /// ONNX Runtime's.
    fn load(&mut self) -> Result<(), BoxError>;

    /// Calls `run` with the loaded session, for one request.
    ///
    /// # Errors
    /// Those of `run`, or that the model is not loaded.
    fn request(
        &mut self,
        run: &mut dyn FnMut(&mut Session) -> Result<(), BoxError>,
    ) -> Result<(), BoxError>;

    /// Unloads the model, and returns when it is unloaded.
    ///
    /// # Errors
    /// The model stays loaded.
    fn unload(&mut self) -> Result<(), BoxError>;

    /// Returns the bytes of the last load that were measured, and all that unloads recovered, in
    /// MiB.
    fn measured_and_recovered(&self) -> Option<(f64, f64)> {
        None
    }
}

/// MiB at the points of a cycle.
#[derive(Clone, Copy, Debug)]
struct Cycle {
    base: f64,
    /// Largest resident set during the load, files included.
    load_peak: f64,
    loaded: f64,
    /// Largest resident set during the burst, files included.
    resident_peak: f64,
    /// Largest anonymous memory during the burst.
    peak: f64,
    idle: f64,
    unloaded: f64,
    thousand_faults: f64,
    cpu_seconds: f64,
    /// Milliseconds of a request.
    p50: f64,
    p99: f64,
}

/// Runs the cycles and prints the figures, or obeys the standard input; whether the goals hold.
///
/// # Errors
/// Those of the service, or that the kernel's files cannot be read.
pub fn run(arguments: &Arguments, service: &mut dyn Service) -> Result<bool, BoxError> {
    if arguments.name == "serve" {
        serve::obey(service)?;
        return Ok(true);
    }
    let mut cycles = Vec::new();
    for seed in 1..=arguments.cycles {
        let cycle = cycle(service, seed)?;
        println!("{} {cycle:.1?}", arguments.name);
        cycles.push(cycle);
    }
    let mut figures = figures(&cycles);
    if let Some((measured, recovered)) = service.measured_and_recovered() {
        // The first load also leaves tables that ONNX Runtime reuses.
        let real = median(&cycles, |cycle| cycle.loaded - cycle.base);
        let unloads = u32::try_from(cycles.len()).map_or(f64::NAN, f64::from);
        figures.push(("measured_mib", measured, "MiB"));
        figures.push(("measured_ratio", measured / real, "times"));
        figures.push(("recovered_ratio", recovered / unloads / real, "times"));
    }
    for (figure, value, unit) in &figures {
        println!("figure {}.{figure} {value:.3} {unit}", arguments.name);
    }
    Ok(hold(&figures, &arguments.goals))
}

fn median(cycles: &[Cycle], of: impl Fn(&Cycle) -> f64) -> f64 {
    let mut values: Vec<_> = cycles.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

type Figure = (&'static str, f64, &'static str);

fn figures(cycles: &[Cycle]) -> Vec<Figure> {
    let of = |of: fn(&Cycle) -> f64| median(cycles, of);
    let mut figures = vec![
        ("base_mib", of(|cycle| cycle.base), "MiB"),
        ("load_peak_mib", of(|cycle| cycle.load_peak), "MiB"),
        ("loaded_mib", of(|cycle| cycle.loaded), "MiB"),
        ("peak_mib", of(|cycle| cycle.peak), "MiB"),
        ("resident_peak_mib", of(|cycle| cycle.resident_peak), "MiB"),
        ("thousand_faults", of(|cycle| cycle.thousand_faults), "thousands"),
        ("cpu_s", of(|cycle| cycle.cpu_seconds), "s"),
        ("p50_ms", of(|cycle| cycle.p50), "ms"),
        ("p99_ms", of(|cycle| cycle.p99), "ms"),
        ("idle_mib", of(|cycle| cycle.idle), "MiB"),
        ("unloaded_mib", of(|cycle| cycle.unloaded), "MiB"),
        ("unloaded_over_base_mib", of(|cycle| cycle.unloaded - cycle.base), "MiB"),
    ];
    // What ONNX Runtime keeps from its first session on, such as the schemas of its operators.
    let first = cycles.first().map_or(f64::NAN, |cycle| cycle.unloaded - cycle.base);
    figures.push(("first_unloaded_over_base_mib", first, "MiB"));
    // Of the later half, so that the first loads do not count.
    let later = cycles.get(cycles.len() / 2..).unwrap_or_default();
    if let [first, .., last] = later {
        let steps = u32::try_from(later.len() - 1).map_or(f64::NAN, f64::from);
        let kib = (last.unloaded - first.unloaded) * 1024.0 / steps;
        figures.push(("slope_kib", kib, "KiB/cycle"));
    }
    figures
}

/// Whether all goals hold; prints those that do not.
fn hold(figures: &[Figure], goals: &[Goal]) -> bool {
    let missed = goals.iter().filter(|goal| {
        let found = figures.iter().find(|(figure, ..)| *figure == goal.figure);
        let value = found.map_or(f64::NAN, |(_, value, _)| *value);
        let holds = if goal.is_upper { value <= goal.bound } else { value >= goal.bound };
        if !holds {
            println!("missed: {goal:?}");
        }
        !holds
    });
    missed.count() == 0
}

fn cycle(service: &mut dyn Service, seed: u64) -> Result<Cycle, BoxError> {
    let base = process::anonymous_mib()?;
    process::reset_peak()?;
    service.load()?;
    let loaded = process::anonymous_mib()?;
    let load_peak = process::peak_mib()?;
    process::reset_peak()?;
    let burst = burst(service, seed, true)?;
    let resident_peak = process::peak_mib()?;
    sleep(IDLE);
    let idle = process::anonymous_mib()?;
    service.unload()?;
    sleep(UNLOADED);
    Ok(Cycle {
        base,
        load_peak,
        loaded,
        resident_peak,
        peak: burst.peak,
        idle,
        unloaded: process::anonymous_mib()?,
        thousand_faults: burst.faults / 1e3,
        cpu_seconds: burst.cpu_seconds,
        p50: percentile(&burst.milliseconds, 0.5),
        p99: percentile(&burst.milliseconds, 0.99),
    })
}

/// What a burst took.
#[derive(Debug)]
struct Burst {
    /// MiB; zero if it was not watched.
    peak: f64,
    faults: f64,
    cpu_seconds: f64,
    /// Of each request, sorted.
    milliseconds: Vec<f64>,
}

/// Runs a burst. A thread that watches the memory takes CPU time, too.
fn burst(service: &mut dyn Service, seed: u64, is_watched: bool) -> Result<Burst, BoxError> {
    let batches: Vec<_> = burst::of(seed).collect();
    let mut milliseconds = Vec::with_capacity(batches.len());
    let peak = AnonymousPeak::default();
    let before = process::used()?;
    std::thread::scope(|scope| {
        let watch = is_watched.then(|| peak.start(scope));
        let requests = batches.iter().try_for_each(|batch| {
            let start = Instant::now();
            service.request(&mut |session| infer(session, batch))?;
            milliseconds.push(start.elapsed().as_secs_f64() * 1e3);
            Ok::<(), BoxError>(())
        });
        peak.end();
        drop(watch);
        requests
    })?;
    let after = process::used()?;
    milliseconds.sort_by(f64::total_cmp);
    Ok(Burst {
        peak: peak.end(),
        faults: after.faults - before.faults,
        cpu_seconds: after.cpu_seconds - before.cpu_seconds,
        milliseconds,
    })
}

/// Returns the value below which this part of the sorted values is.
#[must_use]
pub fn percentile(sorted: &[f64], part: f64) -> f64 {
    let len = u32::try_from(sorted.len()).unwrap_or(u32::MAX);
    let rank = (1..=len).find(|&rank| f64::from(rank) >= part * f64::from(len));
    let at = rank.and_then(|rank| usize::try_from(rank - 1).ok());
    at.and_then(|at| sorted.get(at)).copied().unwrap_or(f64::NAN)
}

/// Answers one request.
fn infer(session: &mut Session, batch: &Batch) -> Result<(), BoxError> {
    use ort::value::TensorRef;
    let shape = [batch.rows, batch.length];
    let outputs = session.run(ort::inputs![
        "input_ids" => TensorRef::from_array_view((shape, &*batch.ids))?,
        "attention_mask" => TensorRef::from_array_view((shape, &*batch.mask))?,
        "token_type_ids" => TensorRef::from_array_view((shape, &*batch.types))?,
    ])?;
    let (_, values) = outputs["sentence_embedding"].try_extract_tensor::<f32>()?;
    if values.iter().any(|value| !value.is_finite()) {
        return Err("the model answers with a value that is not finite".into());
    }
    Ok(())
}

/// Answers one request of one row of 16 tokens, with these words.
///
/// # Errors
/// ONNX Runtime's.
pub fn answer(session: &mut Session, seed: u64) -> Result<(), BoxError> {
    infer(session, &burst::one(seed))
}

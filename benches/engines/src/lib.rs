//! A service with a model: loaded, a burst of requests, idle, unloaded, some times over. Prints
//! the anonymous memory of the process at each point, and the medians of the cycles.
//!
//! The programs differ in who serves memory and in who loads and unloads. Both call [`run`], which
//! measures cycles, or obeys another program (`serve`).
//!
//! Invariant: the requests are the same in every program and in every run.
#![expect(clippy::disallowed_methods, reason = "it idles in real time")]

#[path = "../../common/figures.rs"]
#[allow(missing_docs, reason = "for the benches alone")]
pub mod figures;
mod process;

use std::io::{BufRead as _, Write as _, stdin, stdout};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use lowtide_ort::ort;
use lowtide_ort::ort::session::Session;

use crate::figures::{Figures, count};
use crate::process::{AnonymousPeak, Batch, anonymous_mib, peak_mib, reset_peak, used};

/// Any error ends the program.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The time after a burst at which idle memory is measured.
const IDLE: Duration = Duration::from_secs(3);
/// The time after the unload at which memory is measured.
const UNLOADED: Duration = Duration::from_secs(5);
const CYCLES: u64 = 3;

/// A program's arguments.
#[derive(Clone, Debug, clap::Parser)]
pub struct Arguments {
    /// The shared library of ONNX Runtime.
    pub library: PathBuf,
    /// The model, in ONNX format.
    pub model: PathBuf,
    /// The prefix of the figures, or `serve`.
    pub name: String,
    /// The number of cycles.
    #[arg(default_value_t = CYCLES)]
    pub cycles: u64,
    /// Bounds of figures, without the prefix: `idle_mib<=109`, `measured_ratio>=0.9`.
    pub goals: Vec<String>,
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

/// A figure, its value and its unit.
type Figure = (&'static str, f64, &'static str);

/// Runs the cycles and prints the medians of their figures, or obeys the standard input; whether
/// the goals hold.
///
/// # Errors
/// Those of the service, or that the kernel's files cannot be read.
pub fn run(arguments: &Arguments, service: &mut dyn Service) -> Result<bool, BoxError> {
    if arguments.name == "serve" {
        obey(service)?;
        return Ok(true);
    }
    let (name, mut figures) =
        (|figure: &str| format!("{}.{figure}", arguments.name), Figures::default());
    for seed in 1..=arguments.cycles {
        for (figure, value, unit) in cycle(service, seed)? {
            figures.add(name(figure), value, unit);
        }
    }
    // Of the later half, so that the first loads do not count.
    let unloaded = figures.each(&name("unloaded_mib"));
    let later = unloaded.get(unloaded.len() / 2..).unwrap_or_default();
    if let [first, .., last] = later {
        let slope = (last - first) * 1024.0 / count(later.len() as u64 - 1);
        figures.add(name("slope_kib"), slope, "KiB/cycle");
    }
    if let Some((measured, recovered)) = service.measured_and_recovered() {
        // The first load also leaves tables that ONNX Runtime reuses.
        let real = figures.of(&name("loaded_over_base_mib")).unwrap_or(f64::NAN);
        let recovered = recovered / count(arguments.cycles);
        figures.add(name("measured_ratio"), measured / real, "times");
        figures.add(name("recovered_ratio"), recovered / real, "times");
    }
    for goal in &arguments.goals {
        let bound = goal.split_once("<=").or_else(|| goal.split_once(">="));
        let (figure, bound) = bound.ok_or_else(|| format!("{goal}: expected FIGURE<=NUMBER"))?;
        let (figure, bound) = (name(figure), bound.parse()?);
        figures.of(&figure).ok_or_else(|| format!("no figure {figure}"))?;
        let is_most = goal.contains("<=");
        let bounds = if is_most { [f64::NEG_INFINITY, bound] } else { [bound, f64::INFINITY] };
        figures.set_bounds(&figure, bounds);
    }
    Ok(figures.print())
}

/// Runs bursts at the command of another program, so that two programs take turns. Each line of the
/// standard input is the seed of a burst. The answer is a line with the CPU time in seconds and the
/// milliseconds of each request.
fn obey(service: &mut dyn Service) -> Result<(), BoxError> {
    service.load()?;
    for line in stdin().lock().lines() {
        let found = burst(service, line?.trim().parse()?, false)?;
        let mut out = stdout().lock();
        write!(out, "{}", found.cpu_seconds)?;
        found.milliseconds.iter().try_for_each(|time| write!(out, " {time:.3}"))?;
        writeln!(out)?;
        out.flush()?;
    }
    Ok(())
}

/// Runs a cycle. The peaks but one are of the resident set, files included.
fn cycle(service: &mut dyn Service, seed: u64) -> Result<Vec<Figure>, BoxError> {
    let base = anonymous_mib()?;
    reset_peak()?;
    service.load()?;
    let (loaded, load_peak) = (anonymous_mib()?, peak_mib()?);
    reset_peak()?;
    let burst = burst(service, seed, true)?;
    let resident_peak = peak_mib()?;
    sleep(IDLE);
    let idle = anonymous_mib()?;
    service.unload()?;
    sleep(UNLOADED);
    let unloaded = anonymous_mib()?;
    Ok(vec![
        ("base_mib", base, "MiB"),
        ("load_peak_mib", load_peak, "MiB"),
        ("loaded_mib", loaded, "MiB"),
        ("loaded_over_base_mib", loaded - base, "MiB"),
        ("peak_mib", burst.peak, "MiB"),
        ("resident_peak_mib", resident_peak, "MiB"),
        ("thousand_faults", burst.faults / 1e3, "thousands"),
        ("idle_mib", idle, "MiB"),
        ("unloaded_mib", unloaded, "MiB"),
        ("unloaded_over_base_mib", unloaded - base, "MiB"),
    ])
}

/// What a burst took.
#[derive(Debug)]
struct Burst {
    /// MiB; zero if it was not watched.
    peak: f64,
    faults: f64,
    cpu_seconds: f64,
    /// Of each request.
    milliseconds: Vec<f64>,
}

/// Runs a burst. A thread that watches the memory takes CPU time, too.
fn burst(service: &mut dyn Service, seed: u64, is_watched: bool) -> Result<Burst, BoxError> {
    let batches: Vec<_> = process::batches(seed).collect();
    let mut milliseconds = Vec::with_capacity(batches.len());
    let peak = AnonymousPeak::default();
    let before = used()?;
    std::thread::scope(|scope| {
        if is_watched {
            peak.start(scope);
        }
        let requests = batches.iter().try_for_each(|batch| {
            let start = Instant::now();
            service.request(&mut |session| infer(session, batch))?;
            milliseconds.push(start.elapsed().as_secs_f64() * 1e3);
            Ok::<(), BoxError>(())
        });
        peak.end();
        requests
    })?;
    let after = used()?;
    Ok(Burst {
        peak: peak.end(),
        faults: after.faults - before.faults,
        cpu_seconds: after.cpu_seconds - before.cpu_seconds,
        milliseconds,
    })
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

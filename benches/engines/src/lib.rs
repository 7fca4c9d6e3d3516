//! A service with a model: loaded, a burst of requests, idle, unloaded, three times over. Prints
//! the anonymous memory of the process at each point, and the medians of the cycles.
//!
//! The programs differ in who serves memory and in who loads and unloads. Both call [`run`].
//!
//! Invariant: the requests are the same in every program and in every run.
#![expect(clippy::disallowed_methods, reason = "it idles in real time")]

mod burst;
mod process;

use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use ort::environment::Environment;
use ort::session::Session;

use crate::burst::Batch;

/// Any error ends the program.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The time after a burst at which idle memory is measured.
const IDLE: Duration = Duration::from_secs(3);
/// The time after the unload at which memory is measured.
const UNLOADED: Duration = Duration::from_millis(1_500);
const CYCLES: u64 = 3;

/// A program's arguments: `LIBRARY MODEL NAME [IDLE_MIB OVER_BASE_MIB]`.
#[derive(Clone, Debug)]
pub struct Arguments {
    /// The shared library of ONNX Runtime.
    pub library: PathBuf,
    /// The model, in ONNX format.
    pub model: PathBuf,
    /// The prefix of the figures.
    pub name: String,
    /// The goals: the most MiB when idle, and after the unload over before the load.
    pub goals: Option<(f64, f64)>,
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
        let goals = match (arguments.next(), arguments.next()) {
            (Some(idle), Some(over_base)) => Some((idle.parse()?, over_base.parse()?)),
            _ => None,
        };
        Ok(Self { library, model, name, goals })
    }

    /// Opens ONNX Runtime.
    ///
    /// # Errors
    /// The library cannot be opened, or is older than expected.
    pub fn environment(&self) -> Result<Environment, BoxError> {
        Ok(ort::init_from(&self.library)?.with_telemetry(false).build()?)
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
}

/// MiB at the points of a cycle.
#[derive(Clone, Copy, Debug)]
struct Cycle {
    base: f64,
    loaded: f64,
    /// Largest resident set during the burst, files included.
    peak: f64,
    idle: f64,
    unloaded: f64,
    thousand_faults: f64,
}

/// Runs the cycles and prints the figures; whether the goals hold.
///
/// # Errors
/// Those of the service, or that the kernel's files cannot be read.
pub fn run(arguments: &Arguments, service: &mut dyn Service) -> Result<bool, BoxError> {
    let mut cycles = Vec::new();
    for seed in 1..=CYCLES {
        let cycle = cycle(service, seed)?;
        println!("{} {cycle:.1?}", arguments.name);
        cycles.push(cycle);
    }
    let median = |of: fn(&Cycle) -> f64| {
        let mut values: Vec<_> = cycles.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    };
    let figure = |end: &str, value: f64, unit: &str| {
        println!("figure {}.{end} {value:.1} {unit}", arguments.name);
        value
    };
    figure("base_mib", median(|cycle| cycle.base), "MiB");
    figure("loaded_mib", median(|cycle| cycle.loaded), "MiB");
    figure("peak_mib", median(|cycle| cycle.peak), "MiB");
    figure("thousand_faults", median(|cycle| cycle.thousand_faults), "thousands");
    let idle = figure("idle_mib", median(|cycle| cycle.idle), "MiB");
    figure("unloaded_mib", median(|cycle| cycle.unloaded), "MiB");
    let over_base = median(|cycle| cycle.unloaded - cycle.base);
    let over_base = figure("unloaded_over_base_mib", over_base, "MiB");
    // What ONNX Runtime keeps from its first session on, such as the schemas of its operators.
    let first = cycles.first().map_or(f64::NAN, |cycle| cycle.unloaded - cycle.base);
    figure("first_unloaded_over_base_mib", first, "MiB");
    Ok(arguments.goals.is_none_or(|(most_idle, most_over)| {
        let held = idle <= most_idle && over_base <= most_over;
        let verdict = if held { "hold" } else { "are missed" };
        println!("the goals of {most_idle} and {most_over} MiB {verdict}");
        held
    }))
}

fn cycle(service: &mut dyn Service, seed: u64) -> Result<Cycle, BoxError> {
    let base = process::anonymous_mib()?;
    service.load()?;
    let loaded = process::anonymous_mib()?;
    process::reset_peak()?;
    let faults = process::faults()?;
    for batch in burst::of(seed) {
        service.request(&mut |session| infer(session, &batch))?;
    }
    let (peak, faults) = (process::peak_mib()?, process::faults()? - faults);
    sleep(IDLE);
    let idle = process::anonymous_mib()?;
    service.unload()?;
    sleep(UNLOADED);
    let unloaded = process::anonymous_mib()?;
    Ok(Cycle { base, loaded, peak, idle, unloaded, thousand_faults: faults / 1e3 })
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

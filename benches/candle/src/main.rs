//! `candle-measure LOWTIDE GLIBC JEMALLOC MODEL [PAIRS]` measures three programs with the model in
//! a folder: the memory of each through cycles of load, burst, idle and unload, and the CPU time of
//! a burst with lowtide relative to jemalloc's default. It also compares the answers with known
//! similarities. Prints lines `figure NAME VALUE UNIT`, and ends with 1 if a goal does not hold.
//!
//! Invariant: every program gets the same requests in the same order.
#![expect(clippy::disallowed_methods, reason = "it idles in real time")]

#[path = "../../common/figures.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod figures;
#[path = "../../engines/src/process.rs"]
#[allow(dead_code, unreachable_pub, reason = "the other bench uses more of it")]
mod process;
mod requests;
mod server;
mod similarities;

use std::path::Path;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

pub(crate) use plain::BoxError;

use self::figures::{Figures, quantile};
use self::requests::Words;
use self::server::{Program, Server};

const CYCLES: u64 = 3;
/// Pairs of bursts, unless the command line says otherwise.
const PAIRS: u64 = 12;
/// The time after a burst at which idle memory is measured.
const IDLE: Duration = Duration::from_secs(3);
/// The idle time of the model, in seconds: after the look at idle memory.
const IDLE_UNLOAD: u64 = 4;
/// The time after the idle look at which the unloaded process is measured.
const UNLOADED: Duration = Duration::from_secs(4);
/// An idle time that no pair of bursts reaches, in seconds.
const NEVER: u64 = 3_600;
/// jemalloc's settings that return memory soonest.
const SOON: &str = "background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0";

/// The goals.
const GOALS: [(&str, f64); 3] = [
    ("engines.candle.idle_mib", 98.0),
    ("engines.candle.unloaded_mib", 12.0),
    ("engines.candle.cpu_ratio", 1.03),
];

fn main() -> Result<ExitCode, BoxError> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [lowtide, glibc, jemalloc, model, pairs @ ..] = arguments.as_slice() else {
        return Err("expected LOWTIDE GLIBC JEMALLOC MODEL [PAIRS]".into());
    };
    let pairs = pairs.first().map_or(Ok(PAIRS), |pairs| pairs.parse())?;
    let model = Path::new(model);
    let plain = |path, jemalloc| Program { path: Path::new(path), is_lowtide: false, jemalloc };
    let lowtide = Program { path: Path::new(lowtide), is_lowtide: true, jemalloc: "" };
    let words = Words::read(model)?;

    let mut figures = Figures::default();
    let is_right = similarities::check(&mut Server::start(lowtide, model, NEVER)?)?;
    for (name, program) in [
        ("engines.candle", lowtide),
        ("peers.candle.glibc", plain(glibc, "")),
        ("peers.candle.jemalloc", plain(jemalloc, "")),
        ("peers.candle.jemalloc_1s", plain(jemalloc, SOON)),
    ] {
        let mut server = Server::start(program, model, IDLE_UNLOAD)?;
        for seed in 1..=CYCLES {
            for (figure, value, unit) in cycle(&mut server, &words, seed)? {
                figures.add(format!("{name}.{figure}"), value, unit);
            }
        }
    }
    for ratio in cpu_ratios(lowtide, plain(jemalloc, ""), model, &words, pairs)? {
        figures.add("engines.candle.cpu_ratio", ratio, "x");
    }
    figures.set_goals(&GOALS);
    Ok(if figures.print() && is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A figure, its value and its unit.
type Figure = (&'static str, f64, &'static str);

/// The peak is that of the resident set, files included, of load and burst.
fn cycle(server: &mut Server, words: &Words, seed: u64) -> Result<[Figure; 8], BoxError> {
    let base = server.kernel.anonymous_mib()?;
    server.kernel.reset_peak()?;
    embed(server, br#"{"texts":["tide"]}"#)?;
    let loaded = server.kernel.anonymous_mib()?;
    let faults = server.kernel.used()?.faults;
    let times = burst(server, words, seed)?;
    let (peak, faults) = (server.kernel.peak_mib()?, server.kernel.used()?.faults - faults);
    sleep(IDLE);
    let idle = server.kernel.anonymous_mib()?;
    sleep(UNLOADED);
    let unloaded = server.kernel.anonymous_mib()?;
    Ok([
        ("idle_mib", idle, "MiB"),
        ("unloaded_mib", unloaded, "MiB"),
        ("base_mib", base, "MiB"),
        ("loaded_mib", loaded, "MiB"),
        ("peak_mib", peak, "MiB"),
        ("thousand_faults", faults / 1e3, "thousands"),
        ("p50_ms", quantile(&times, 0.5), "ms"),
        ("p99_ms", quantile(&times, 0.99), "ms"),
    ])
}

/// Sends the requests of a burst one after the other, and returns their times in ms.
fn burst(server: &mut Server, words: &Words, seed: u64) -> Result<Vec<f64>, BoxError> {
    let timed = |body: Vec<u8>| {
        let start = Instant::now();
        embed(server, &body)?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    };
    words.burst(seed).into_iter().map(timed).collect()
}

fn embed(server: &mut Server, body: &[u8]) -> Result<Vec<u8>, BoxError> {
    let (status, answer) = server.post("/embed", body)?;
    if status == 200 {
        return Ok(answer);
    }
    Err(format!("answer {status}: {}", String::from_utf8_lossy(&answer)).into())
}

/// Returns the CPU times of a burst and of the idle time after it with lowtide, relative to
/// jemalloc's default, of each pair. Both run all the time, and take turns.
fn cpu_ratios(
    lowtide: Program<'_>,
    jemalloc: Program<'_>,
    model: &Path,
    words: &Words,
    pairs: u64,
) -> Result<Vec<f64>, BoxError> {
    let mut lowtide = Server::start(lowtide, model, NEVER)?;
    let mut jemalloc = Server::start(jemalloc, model, NEVER)?;
    for server in [&mut lowtide, &mut jemalloc] {
        burst(server, words, 0)?; // loads the model
    }
    let seconds = |server: &mut Server, seed| {
        let before = server.kernel.used()?.cpu_seconds;
        burst(server, words, seed)?;
        sleep(IDLE);
        Ok::<_, BoxError>(server.kernel.used()?.cpu_seconds - before)
    };
    let mut ratios = Vec::new();
    for seed in 1..=pairs {
        let (ours, theirs) = if seed % 2 == 0 {
            let ours = seconds(&mut lowtide, seed)?;
            (ours, seconds(&mut jemalloc, seed)?)
        } else {
            let theirs = seconds(&mut jemalloc, seed)?;
            (seconds(&mut lowtide, seed)?, theirs)
        };
        println!("pair {seed}: {ours:.2} s and {theirs:.2} s: {:.3}", ours / theirs);
        ratios.push(ours / theirs);
    }
    Ok(ratios)
}

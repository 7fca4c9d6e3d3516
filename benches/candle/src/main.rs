//! `candle-measure LOWTIDE GLIBC JEMALLOC MODEL [PAIRS]` measures three programs with the model in
//! a folder: the memory of each through cycles of load, burst, idle and unload, and the CPU time of
//! a burst with lowtide relative to jemalloc's default. It also compares the answers with known
//! similarities. Prints lines `figure NAME VALUE UNIT`, and ends with 1 if a goal does not hold.
//!
//! Invariant: every program gets the same requests in the same order.
#![expect(clippy::disallowed_methods, reason = "it idles in real time")]

#[path = "../../engines/src/process.rs"]
#[allow(dead_code, unreachable_pub, reason = "the other bench uses more of it")]
mod process;
mod requests;
mod server;
mod similarities;
mod statistics;

use std::path::Path;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

pub(crate) use plain::BoxError;

use self::requests::Words;
use self::server::{Program, Server};
use self::statistics::{interval, median};

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
const IDLE_MIB: f64 = 98.0;
const UNLOADED_MIB: f64 = 12.0;
const CPU_RATIO: f64 = 1.03;

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

    let is_right = similarities::check(&mut Server::start(lowtide, model, NEVER)?)?;
    let (idle, unloaded) = cycles("engines.candle", lowtide, model, &words)?;
    cycles("peers.candle.glibc", plain(glibc, ""), model, &words)?;
    cycles("peers.candle.jemalloc", plain(jemalloc, ""), model, &words)?;
    cycles("peers.candle.jemalloc_1s", plain(jemalloc, SOON), model, &words)?;
    let ratio = cpu_ratio(lowtide, plain(jemalloc, ""), model, &words, pairs)?;
    let goals = [
        ("idle_mib", idle, IDLE_MIB),
        ("unloaded_mib", unloaded, UNLOADED_MIB),
        ("cpu_ratio", ratio, CPU_RATIO),
    ];
    let mut holds = is_right;
    for (name, value, goal) in goals {
        let is_held = value <= goal;
        println!("goal of {name}: at most {goal}: {}", if is_held { "held" } else { "missed" });
        holds &= is_held;
    }
    Ok(if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A figure, its value and its unit.
type Figure = (&'static str, f64, &'static str);

/// Prints the medians of some cycles, and returns those of idle and of unloaded.
fn cycles(
    name: &str,
    program: Program<'_>,
    model: &Path,
    words: &Words,
) -> Result<(f64, f64), BoxError> {
    let mut server = Server::start(program, model, IDLE_UNLOAD)?;
    let cycles = (1..=CYCLES).map(|seed| cycle(&mut server, words, seed));
    let cycles = cycles.collect::<Result<Vec<_>, _>>()?;
    let medians = [0, 1, 2, 3, 4, 5, 6, 7].map(|at| {
        let (figure, _, unit) = cycles[0][at];
        let value = median(cycles.iter().map(|cycle| cycle[at].1));
        println!("figure {name}.{figure} {value:.1} {unit}");
        value
    });
    Ok((medians[0], medians[1]))
}

/// The peak is that of the resident set, files included, of load and burst.
fn cycle(server: &mut Server, words: &Words, seed: u64) -> Result<[Figure; 8], BoxError> {
    let base = server.kernel.anonymous_mib()?;
    server.kernel.reset_peak()?;
    embed(server, br#"{"texts":["tide"]}"#)?;
    let loaded = server.kernel.anonymous_mib()?;
    let faults = server.kernel.used()?.faults;
    let mut times = burst(server, words, seed)?;
    let (peak, faults) = (server.kernel.peak_mib()?, server.kernel.used()?.faults - faults);
    sleep(IDLE);
    let idle = server.kernel.anonymous_mib()?;
    sleep(UNLOADED);
    let unloaded = server.kernel.anonymous_mib()?;
    times.sort_by(f64::total_cmp);
    let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or(f64::NAN);
    Ok([
        ("idle_mib", idle, "MiB"),
        ("unloaded_mib", unloaded, "MiB"),
        ("base_mib", base, "MiB"),
        ("loaded_mib", loaded, "MiB"),
        ("peak_mib", peak, "MiB"),
        ("thousand_faults", faults / 1e3, "thousands"),
        ("p50_ms", at(50), "ms"),
        ("p99_ms", at(99), "ms"),
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

/// Prints the CPU time of a burst and of the idle time after it with lowtide, relative to
/// jemalloc's default, and returns the median of the pairs. Both run all the time, and take turns.
fn cpu_ratio(
    lowtide: Program<'_>,
    jemalloc: Program<'_>,
    model: &Path,
    words: &Words,
    pairs: u64,
) -> Result<f64, BoxError> {
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
    let ratio = median(ratios.iter().copied());
    println!("figure engines.candle.cpu_ratio {ratio:.3} x");
    if let Some((low, high)) = interval(&mut ratios) {
        println!("figure engines.candle.cpu_ratio_low {low:.3} x");
        println!("figure engines.candle.cpu_ratio_high {high:.3} x");
    }
    Ok(ratio)
}

//! `candle-measure LOWTIDE GLIBC JEMALLOC MODEL [PAIRS]` measures three programs with the model in
//! a folder: the memory of each through cycles of load, burst, idle and unload, and the CPU time of
//! a burst with lowtide relative to jemalloc's default. It also compares the answers with known
//! similarities. Prints lines `figure NAME VALUE UNIT`, and ends with 1 if a goal does not hold.
//!
//! Invariant: every program gets the same requests in the same order.
#![expect(clippy::disallowed_methods, reason = "it idles in real time")]

#[path = "../../common/figures.rs"]
#[allow(dead_code, unreachable_pub, reason = "other benches use more of it")]
mod figures;
#[path = "../../engines/src/process.rs"]
#[allow(dead_code, unreachable_pub, reason = "the other bench uses more of it")]
mod process;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use lowtide_candle::api::Answer;
use plain::BoxError;
use serde::Deserialize;
use serde_json::Value;

use crate::figures::{Figures, quantile};
use crate::process::Proc;

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
    let is_right = check(&mut Server::start(lowtide, model, NEVER)?)?;
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
    server.embed(br#"{"texts":["tide"]}"#)?;
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
        server.embed(&body)?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    };
    words.burst(seed).into_iter().map(timed).collect()
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

// The requests of a burst: the shapes of `benches/engines`, as texts of whole words.

/// Words that are one token each.
#[derive(Debug)]
struct Words(Vec<String>);

impl Words {
    /// Reads them from the folder of a model.
    fn read(model: &Path) -> Result<Self, BoxError> {
        let file: Value = serde_json::from_slice(&fs::read(model.join("tokenizer.json"))?)?;
        let vocabulary = file["model"]["vocab"].as_object().ok_or("no vocabulary")?;
        let is_word =
            |word: &&String| word.len() > 2 && word.bytes().all(|b| b.is_ascii_lowercase());
        let mut words: Vec<_> = vocabulary.keys().filter(is_word).cloned().collect();
        words.sort_unstable();
        if words.is_empty() { Err("the vocabulary has no words".into()) } else { Ok(Self(words)) }
    }

    /// The bodies of one burst.
    fn burst(&self, seed: u64) -> Vec<Vec<u8>> {
        process::batches(seed).map(|batch| self.body(&batch)).collect()
    }

    fn body(&self, batch: &process::Batch) -> Vec<u8> {
        // The tokenizer adds a start and an end to each row.
        let rows = batch.ids.chunks(batch.length).map(|row| &row[..row.len().saturating_sub(2)]);
        let word = |id: &i64| &*self.0[usize::try_from(*id).unwrap_or(0) % self.0.len()];
        let texts: Vec<_> =
            rows.map(|row| row.iter().map(word).collect::<Vec<_>>().join(" ")).collect();
        serde_json::json!({ "texts": texts }).to_string().into_bytes()
    }
}

// A server in a process of its own: its start, and requests to it.

/// How a server is started.
#[derive(Clone, Copy, Debug)]
struct Program<'a> {
    path: &'a Path,
    /// The idle time is a variable, not an argument.
    is_lowtide: bool,
    /// `_RJEM_MALLOC_CONF`.
    jemalloc: &'a str,
}

/// A running server, which is killed when it is dropped.
#[derive(Debug)]
struct Server {
    child: Child,
    kernel: Proc,
    stream: BufReader<TcpStream>,
}

impl Server {
    /// Starts it, and connects.
    fn start(program: Program<'_>, model: &Path, idle: u64) -> Result<Self, BoxError> {
        let mut command = Command::new(program.path);
        command.arg(model).arg("127.0.0.1:0").stdout(Stdio::piped());
        if program.is_lowtide {
            command.env("LOWTIDE_IDLE_UNLOAD", format!("{idle}s"));
        } else {
            command.arg(idle.to_string());
        }
        if !program.jemalloc.is_empty() {
            command.env("_RJEM_MALLOC_CONF", program.jemalloc);
        }
        let mut child = command.spawn()?;
        let mut line = String::new();
        let output = child.stdout.take().ok_or("no output of the server")?;
        BufReader::new(output).read_line(&mut line)?;
        let address = line.trim().strip_prefix("listening on http://");
        match address.map(TcpStream::connect) {
            Some(Ok(stream)) => {
                stream.set_nodelay(true)?;
                let kernel = Proc(child.id().to_string());
                Ok(Self { child, kernel, stream: BufReader::new(stream) })
            }
            other => {
                child.kill()?;
                Err(format!("{} does not serve: {other:?}", program.path.display()).into())
            }
        }
    }

    /// Sends a body of JSON, and returns the body of the answer, which must be a good one.
    fn embed(&mut self, body: &[u8]) -> Result<Vec<u8>, BoxError> {
        let length = body.len();
        let head = format!(
            "POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n"
        );
        self.stream.get_mut().write_all(&[head.as_bytes(), body].concat())?;
        let (mut status, mut line, mut length) = (String::new(), String::new(), 0);
        self.stream.read_line(&mut status)?;
        // An empty line, or the end of the connection, ends the head.
        while self.stream.read_line(&mut line)? > 2 {
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
            line.clear();
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        if status.starts_with("HTTP/1.1 200 ") {
            return Ok(body);
        }
        Err(format!("answer {}: {}", status.trim(), String::from_utf8_lossy(&body)).into())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// Compares the server's vectors with those that ONNX Runtime computes of the same weights
// (`similarities.json`, which `similarities.py` wrote).

/// The largest difference that is rounding.
const MOST: f64 = 2e-6;

#[derive(Deserialize)]
struct Expected {
    sentences: Vec<String>,
    /// The cosine similarity of each sentence with each.
    similarities: Vec<Vec<f64>>,
    /// The first numbers of each vector.
    first_numbers: Vec<Vec<f64>>,
}

/// Whether the server's answer is right. All sentences are in one request, so the shorter ones are
/// padded.
fn check(server: &mut Server) -> Result<bool, BoxError> {
    let expected: Expected = serde_json::from_str(include_str!("../similarities.json"))?;
    let body = serde_json::json!({ "texts": expected.sentences });
    let answer = server.embed(body.to_string().as_bytes())?;
    let Answer { vectors } = serde_json::from_slice(&answer)?;
    let most = largest_difference(&vectors, &expected)?;
    let is_right = most <= MOST;
    let verdict = if is_right { "agree" } else { "differ" };
    println!("candle and ONNX Runtime {verdict}: at most {most:.1e} apart");
    Ok(is_right)
}

fn largest_difference(vectors: &[Vec<f32>], expected: &Expected) -> Result<f64, BoxError> {
    let count = expected.sentences.len();
    if vectors.len() != count || vectors.iter().any(|vector| vector.len() != vectors[0].len()) {
        return Err(format!("{} vectors for {count} sentences", vectors.len()).into());
    }
    let product = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let by_pair = vectors.iter().zip(&expected.similarities).flat_map(|(vector, row)| {
        vectors.iter().zip(row).map(|(other, value)| product(vector, other) - value)
    });
    let by_number = vectors.iter().zip(&expected.first_numbers).flat_map(|(vector, first)| {
        vector.iter().zip(first).map(|(number, value)| f64::from(*number) - value)
    });
    // A difference that is no number is the largest.
    let worst = |most: f64, one: f64| if one.abs() <= most { most } else { one.abs() };
    Ok(by_pair.chain(by_number).fold(0.0, worst))
}

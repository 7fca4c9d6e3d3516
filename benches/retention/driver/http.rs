//! A service on tokio under three allocators, and what sends it requests.
//!
//! Connections send one request after the other: few of them, then many, then none for ten
//! seconds. Bodies are JSON, of which each power of two from 2 KiB to 128 KiB is as likely as
//! another.
//!
//! Invariant: every allocator gets the same requests on each connection.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use retention::chance::Chance;
use retention::histogram::Histogram;
use retention::{BoxError, count, mib};

use crate::contestants;
use crate::figures::Figures;
use crate::process::Running;

const FEW: usize = 8;
const MANY: usize = 96;
/// Requests of a connection.
const REQUESTS: usize = 40;
const LOOKS: [u64; 3] = [0, 2, 10];

/// All of it.
pub(crate) fn measure(figures: &mut Figures, rounds: usize) -> Result<(), BoxError> {
    let bodies: Vec<String> = (11..18).map(|power| body(1 << power)).collect();
    for round in 1..=rounds {
        for who in contestants::named(&["glibc", "jemalloc_default", "balanced"]) {
            let running = Running::start(&who, &["http"])?;
            let port: u16 = running.expect("port ")?.trim().parse()?;
            let begun = running.process.processor_seconds()?;
            let mut latency = Histogram::default();
            for connections in [FEW, MANY, FEW] {
                latency.merge(&load(port, connections, &bodies)?);
            }
            let end = Instant::now();
            let requests = count(((FEW + MANY + FEW) * REQUESTS) as u64);
            let mut add = |end: &str, value: f64, unit| {
                figures.add(&format!("http.{}.{end}", who.name), value, unit);
            };
            add("peak_mib", mib(running.process.peak()?), "MiB");
            for after in LOOKS {
                let due = end + Duration::from_secs(after);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                add(&format!("resident_{after}s_mib"), mib(running.process.resident()?), "MiB");
            }
            let seconds = running.process.processor_seconds()? - begun;
            add("cpu_per_request_us", seconds * 1e6 / requests, "us");
            add("p50_us", latency.percentile(0.5) / 1e3, "us");
            add("p99_us", latency.percentile(0.99) / 1e3, "us");
            running.end()?;
            println!("http {round} of {rounds}: {}", who.name);
        }
    }
    Ok(())
}

/// An array of objects, of about this length as text.
fn body(length: usize) -> String {
    let mut text = "[".to_owned();
    for id in 0.. {
        let name = "x".repeat(8 + id % 40);
        let one = format!(r#"{{"id":{id},"name":"{name}","tags":["a","bc","def"],"score":0.5}}"#);
        text.push_str(&one);
        if text.len() >= length {
            break;
        }
        text.push(',');
    }
    text.push(']');
    text
}

fn load(port: u16, connections: usize, bodies: &[String]) -> Result<Histogram, BoxError> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..connections)
            .map(|seed| scope.spawn(move || connection(port, seed as u64, bodies)))
            .collect();
        let mut all = Histogram::default();
        for thread in threads {
            all.merge(&thread.join().map_err(|_| "a connection panicked")??);
        }
        Ok(all)
    })
}

fn connection(port: u16, seed: u64, bodies: &[String]) -> Result<Histogram, BoxError> {
    let mut chance = Chance::new(seed);
    let mut latency = Histogram::default();
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    let mut answers = BufReader::new(stream.try_clone()?);
    for _ in 0..REQUESTS {
        let body = bodies.get(chance.below(bodies.len())).ok_or("no body")?;
        let start = Instant::now();
        write!(stream, "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len())?;
        stream.write_all(body.as_bytes())?;
        answer(&mut answers)?;
        latency.add(u64::try_from(start.elapsed().as_nanos())?);
    }
    Ok(latency)
}

/// Reads an answer away, which must be 200.
fn answer(from: &mut BufReader<TcpStream>) -> Result<(), BoxError> {
    let (mut line, mut length) = (String::new(), 0);
    from.read_line(&mut line)?;
    if !line.starts_with("HTTP/1.1 200") {
        return Err(format!("the service answered {line:?}").into());
    }
    loop {
        line.clear();
        from.read_line(&mut line)?;
        let text = line.trim_end();
        if text.is_empty() {
            break;
        }
        if let Some(("content-length", value)) = text.split_once(": ") {
            length = value.parse()?;
        }
    }
    let read = std::io::copy(&mut from.take(length), &mut std::io::sink())?;
    if read == length { Ok(()) } else { Err("the service broke off".into()) }
}

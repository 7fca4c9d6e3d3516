//! Requests: what the layer attributes to each, beside what they hold, and what that costs; and load
//! reports (`reports`).
//!
//! This process serves; the clients are a child, so that their memory does not count. In each case
//! some requests wait at the point where they hold most, and jemalloc's statistics show what they
//! hold together. Instructions are counted by callgrind, in processes of their own.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(clippy::cast_precision_loss, reason = "figures of a bench are far below 2^52")]

mod accuracy;
mod reports;

use std::ffi::OsString;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use common::callgrind::{Counted, per_step};
use common::figures::Figures;
use futures_util::FutureExt as _;
use http::Uri;
use http::request::Parts;
use http_body_util::BodyExt as _;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use lowtide::admission::Admission;
use lowtide::clock::ManualClock;
use lowtide::config::DeviceChoice;
use lowtide::heap::Account;
use lowtide::service::{ContentLength, MemoryLayer};
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::Cost;
use lowtide_admission::learning::{Kind, Needs, Room};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tower::Service as _;

use common::chance::Chance;

lowtide::global_allocator!(balanced);

/// What the layer attributes to requests, and what that costs.
#[derive(Debug, Parser)]
struct Cli {
    /// Judges no time, and leaves out what measures nothing else.
    #[arg(long)]
    counted: bool,
    /// Measures load reports in their place.
    #[arg(long)]
    reports: bool,
    /// Lets the gRPC client of this Python interpreter, which has the packages `grpcio` and
    /// `xds-protos`, read load reports.
    #[arg(long)]
    python: Option<OsString>,
    #[command(flatten)]
    role: Counted,
    /// Be the clients.
    #[arg(long, hide = true)]
    client: Option<String>,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| run(&cli))
}

/// Returns whether every goal held.
fn run(cli: &Cli) -> Result<bool, BoxError> {
    if let Some(counted) = &cli.role.be {
        return be(counted, cli.role.steps).map(|()| true);
    }
    if let Some(python) = &cli.python {
        return reports::read(python);
    }
    if cli.reports {
        return reports::measure(cli.counted);
    }
    if let Some(order) = &cli.client {
        return accuracy::be_clients(order).map(|()| true);
    }
    let mut figures = Figures::default();
    learned(&mut figures);
    if !cli.counted {
        accuracy::measure(&mut figures)?;
    }
    instructions(&mut figures)?;
    Ok(figures.print())
}

// How many requests a route takes to learn: until what it reserves stays within 10 % of the true
// mean of their needs.

/// Routes, each with its own random needs.
const ROUTES: u64 = 200;
/// Requests of a route.
const REQUESTS: usize = 400;
/// The accepted error.
const ERROR_MAX: f64 = 0.1;
/// Requests until the error is accepted, in nine of ten routes.
const GOAL: f64 = 30.0;

/// Returns the need of a request: around 10 MiB, most of them within 15 % of that.
fn need(chance: &mut Chance) -> f64 {
    let sum: f64 = (0..4).map(|_| chance.unit()).sum();
    10.0 * 1024.0 * 1024.0 * (0.7 + 0.15 * sum)
}

/// Measures it.
fn learned(figures: &mut Figures) {
    let truth = {
        let mut chance = Chance::new(7);
        (0..100_000).map(|_| need(&mut chance)).sum::<f64>() / 100_000.0
    };
    let mut after: Vec<_> = (1..=ROUTES).map(|seed| requests(seed, truth)).collect();
    after.sort_unstable();
    let most = after.get(after.len() * 90 / 100).copied().unwrap_or(REQUESTS);
    figures.at_most("measured.learned_after_requests", most as f64, "requests", GOAL);
}

/// Returns the number of requests after which the claim of a route stays near the truth.
fn requests(seed: u64, truth: f64) -> usize {
    let (needs, mut chance) = (Needs::default(), Chance::new(seed));
    let kind = Kind { route: 1, is_declared: true, has_many_routes: false };
    let request = needs.of(kind, ByteSize::mib(1), false);
    let mut wrong = 0;
    for nth in 1..=REQUESTS {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "of some MiB")]
        request.learn(ByteSize::new(need(&mut chance) as u64));
        let claim = request.claim(Room::UNLIMITED).as_f64();
        if (claim / truth - 1.0).abs() > ERROR_MAX {
            wrong = nth;
        }
    }
    wrong
}

// Instructions of the layer, counted by callgrind in processes of their own.
//
// A run of more polls or requests, less a run of fewer, less the same without the layer: so the
// start of a process and the work itself do not count.

/// Polls of the shorter run, and requests. Threads of the process add some 500,000 instructions.
const POLLS: u32 = 200_000;
const HELLOS: u32 = 10_000;

/// The process that is counted: work for an account that does nothing (`idle`), that allocates and
/// frees small blocks (`settled`), or more than 64 KiB (`peak`); and requests over HTTP/1, behind a
/// layer that measures or one that does not. Those that end in `bare` do the same for no account
/// and behind no layer. `admission` and its release, and `rejection`, are alone; `20000x1` is
/// requests of as many routes, each of one size.
fn be(counted: &str, steps: usize) -> Result<(), BoxError> {
    match counted {
        "hello" => return hello(Some(memory()?.0.admission()), steps),
        "hello-unmeasured" => {
            return hello(Some(&Admission::with_limit(ByteSize::gib(1))), steps);
        }
        "hello-bare" => return hello(None, steps),
        "request" => return request(),
        "admission" | "rejection" => return admissions(counted == "rejection", steps),
        keys if keys.contains('x') => return of_keys(keys, steps),
        work => {
            let (of, is_measured) =
                work.strip_suffix("-bare").map_or((work, true), |work| (work, false));
            let (blocks, bytes) = match of {
                "idle" => (0, 0),
                "settled" => (5, 64),
                _ => (5, 16 << 10),
            };
            let account = Arc::new(Account::new((), |_, _| ()));
            let step = || {
                (0..black_box(blocks))
                    .for_each(|_| drop(black_box(Vec::<u8>::with_capacity(bytes))));
            };
            for _ in 0..steps {
                if is_measured { account.run(step) } else { step() }
            }
            black_box(account);
        }
    }
    Ok(())
}

/// Without threads, whose ticks would be counted; it lives as long as the second value.
fn memory() -> Result<(Memory, impl FnMut() -> bool), BoxError> {
    let clock = Arc::new(ManualClock::new());
    Ok(Memory::builder().clock(clock).device(DeviceChoice::None).start_stepped()?)
}

/// Serves as many requests on one connection.
#[tokio::main(flavor = "current_thread")]
async fn hello(admission: Option<&Admission>, requests: usize) -> Result<(), BoxError> {
    let routes = axum::Router::new().route("/", axum::routing::get(async || "hello world"));
    let layer = |of: &Admission| MemoryLayer::new(of.clone(), ContentLength::default());
    let routes = match admission {
        Some(admission) => routes.layer(layer(admission)),
        None => routes,
    };
    let (mut client, server) = tokio::io::duplex(4096);
    let service = TowerToHyperService::new(routes);
    tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(server), service));
    let mut answer = [0; 4096];
    for _ in 0..requests {
        client.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await?;
        let mut read = 0;
        while !answer[..read].ends_with(b"hello world") {
            let more = client.read(&mut answer[read..]).await?;
            if more == 0 {
                return Err("the connection ended".into());
            }
            read += more;
        }
    }
    Ok(())
}

fn admissions(is_full: bool, steps: usize) -> Result<(), BoxError> {
    let admission = Admission::with_limit(ByteSize::gib(1));
    let most = is_full.then(|| admission.try_admit(Cost::host(ByteSize::gib(1))));
    for _ in 0..steps {
        black_box(&admission.try_admit(black_box(Cost::host(ByteSize::kib(64)))));
    }
    black_box(most);
    Ok(())
}

/// Sends requests of so many routes and sizes, each of which has a key of its own.
fn of_keys(keys: &str, steps: usize) -> Result<(), BoxError> {
    let (routes, sizes) = keys.split_once('x').ok_or("no sizes")?;
    let (routes, sizes): (usize, usize) = (routes.parse()?, sizes.parse()?);
    let estimate = |head: &Parts| {
        let size = head.uri.path().rsplit('/').next().and_then(|size| size.parse().ok());
        Cost::host(ByteSize::kib(16 << size.unwrap_or(0_u32)))
    };
    let (memory, _step) = memory()?;
    let layer = memory.layer().with_estimate(estimate);
    let mut service = axum::Router::new().fallback(async || "hello world").layer(layer);
    let uri = |key: usize| format!("/{}/{}", key / sizes, key % sizes).parse();
    let uris = (0..routes * sizes).map(uri).collect::<Result<Vec<Uri>, _>>()?;
    uris.iter().cycle().take(steps).try_for_each(|uri| ask(&mut service, uri))
}

/// Sends requests to a service, each from its head to the end of its answer, without a connection.
/// The last one is [`measured`].
fn request() -> Result<(), BoxError> {
    let (memory, _step) = memory()?;
    let routes = axum::Router::new().route("/", axum::routing::get(async || "hello world"));
    let mut service = routes.layer(memory.layer());
    for _ in 0..20 {
        ask(&mut service, &Uri::from_static("/"))?;
    }
    measured(&mut service)
}

/// One request: the functions that run in it are counted.
#[inline(never)]
fn measured(service: &mut axum::Router) -> Result<(), BoxError> {
    ask(service, &Uri::from_static("/"))
}

fn ask(service: &mut axum::Router, uri: &Uri) -> Result<(), BoxError> {
    let request = http::Request::get(uri.clone()).body(axum::body::Body::empty())?;
    let answer = service.call(request);
    let answer = answer.now_or_never().ok_or("it waits")??;
    let body = answer.into_body().collect().now_or_never().ok_or("it waits")??;
    if body.to_bytes() == "hello world" { Ok(()) } else { Err("another answer".into()) }
}

/// Counts everything, and adds the figures.
fn instructions(figures: &mut Figures) -> Result<(), BoxError> {
    let count = |counted: &str| {
        let is_request = counted.starts_with("hello") || counted.contains('x');
        let steps = if is_request { HELLOS } else { POLLS };
        // Otherwise jemalloc looks through a thread's cache after some time, not some bytes.
        per_step("experimental_tcache_gc:false", counted, steps)
    };
    let more = |of: &str| Ok::<_, BoxError>(count(of)? - count(&format!("{of}-bare"))?);
    let mut add = |name: &str, value, unit, most| {
        figures.at_most(format!("measured.{name}"), value, unit, most);
    };
    let settled = more("settled")?;
    let (bare, unmeasured, hello) =
        (count("hello-bare")?, count("hello-unmeasured")?, count("hello")?);
    add("scope.instructions", more("idle")?, "instructions", 60.0);
    add("scope.settled.instructions", settled, "instructions", 130.0);
    add("scope.peak.instructions", more("peak")? - settled, "instructions", 350.0);
    add("hello.admitted_ratio", unmeasured / bare, "x", f64::INFINITY);
    add("layer.ratio", hello / unmeasured, "x", 1.02);
    let mut add = |name: &str, value, unit, most| {
        figures.at_most(format!("light.{name}"), value, unit, most);
    };
    add("layer.instructions", hello - bare, "instructions", 3_500.0);
    let few = count("10x1")?;
    add("request.instructions", few, "instructions", f64::INFINITY);
    add("routes.ratio", count("20000x1")? / few, "x", 1.15);
    add("sizes.ratio", count("40x14")? / few, "x", 1.1);
    add("admission.instructions", count("admission")?, "instructions", 80.0);
    add("rejection.instructions", count("rejection")?, "instructions", 200.0);
    Ok(())
}

//! Instructions of the layer, counted by callgrind in processes of their own.
//!
//! A run of more polls or requests, less a run of fewer, less the same without the layer: so the
//! start of a process and the work itself do not count.

use std::hint::black_box;
use std::sync::Arc;

use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use lowtide::admission::Admission;
use lowtide::clock::ManualClock;
use lowtide::config::DeviceChoice;
use lowtide::heap::Account;
use lowtide::service::{ContentLength, MemoryLayer};
use lowtide::{BoxError, ByteSize, Memory};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::common::callgrind;
use crate::common::figures::Figures;

/// Polls of the shorter run, and requests. Threads of the process add some 500,000 instructions.
const POLLS: u32 = 200_000;
const REQUESTS: u32 = 10_000;

/// The process that is counted: work for an account that does nothing (`idle`), that allocates and
/// frees small blocks (`settled`), or more than 64 KiB (`peak`); and requests over HTTP/1, behind a
/// layer that measures or one that does not. Those that end in `bare` do the same for no account
/// and behind no layer.
pub(crate) fn be(counted: &str, steps: usize) -> Result<(), BoxError> {
    match counted {
        "hello" => return hello(Some(memory()?.admission()), steps),
        "hello-unmeasured" => {
            return hello(Some(&Admission::with_limit(ByteSize::gib(1))), steps);
        }
        "hello-bare" => return hello(None, steps),
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

fn memory() -> Result<Memory, BoxError> {
    // Time stands still, so that the threads of the `Memory` sleep.
    let clock = Arc::new(ManualClock::new());
    Ok(Memory::builder().clock(clock).device(DeviceChoice::None).start()?)
}

/// Serves as many requests on one connection.
#[tokio::main(flavor = "current_thread")]
async fn hello(admission: Option<&Admission>, requests: usize) -> Result<(), BoxError> {
    let routes = axum::Router::new().route("/", axum::routing::get(async || "hello world"));
    let routes = match admission {
        Some(admission) => {
            routes.layer(MemoryLayer::new(admission.clone(), ContentLength::default()))
        }
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

/// Counts everything, and adds the figures.
pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let count = |counted: &str| {
        let steps = if counted.starts_with("hello") { REQUESTS } else { POLLS };
        callgrind::per_step(&["--be", counted, "--steps"], steps)
    };
    let more = |of: &str| Ok::<_, BoxError>(count(of)? - count(&format!("{of}-bare"))?);
    let mut add = |name: &str, value, unit, most| {
        figures.at_most(format!("measured.{name}"), value, unit, most);
    };
    let settled = more("settled")?;
    let (bare, unmeasured) = (count("hello-bare")?, count("hello-unmeasured")?);
    add("scope.instructions", more("idle")?, "instructions", 60.0);
    add("scope.settled.instructions", settled, "instructions", 130.0);
    add("scope.peak.instructions", more("peak")? - settled, "instructions", 350.0);
    add("hello.instructions", bare, "instructions", f64::INFINITY);
    add("hello.admitted_ratio", unmeasured / bare, "x", f64::INFINITY);
    add("layer.ratio", count("hello")? / unmeasured, "x", 1.02);
    Ok(())
}

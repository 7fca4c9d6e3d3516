//! Instructions of the layer, counted by callgrind in processes of their own.
//!
//! A run of more polls or requests, less a run of fewer, less the same without the layer: so the
//! start of a process and the work itself do not count.

use std::convert::Infallible;
use std::future::Future;
use std::hint::black_box;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use clap::ValueEnum;
use http::{Request, Response};
use http_body_util::{Empty, Full};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use lowtide::admission::{Admission, Cost};
use lowtide::clock::ManualClock;
use lowtide::config::DeviceChoice;
use lowtide::heap::{Account, AccountOwner};
use lowtide::service::{ContentLength, MemoryLayer};
use lowtide::{BoxError, ByteSize, Memory};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tower::{Layer as _, Service as _};

use crate::common::callgrind;

/// Polls of the shorter run, and requests. Threads of the process add some 500,000 instructions.
const POLLS: u32 = 200_000;
const REQUESTS: u32 = 10_000;

/// A small block, and one of which five are allocated and freed to move more than 64 KiB.
const SMALL: usize = 64;
const LARGE: usize = 16 << 10;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Counted {
    /// Work for an account that does nothing.
    Idle,
    IdleBare,
    /// Work that allocates and frees small blocks.
    Settled,
    SettledBare,
    /// Work that allocates and frees more than 64 KiB.
    Peak,
    PeakBare,
    /// Polls of a handler that does nothing.
    Poll,
    PollBare,
    /// Requests over HTTP/1: behind a layer that measures, behind one that does not, and behind
    /// none.
    Hello,
    HelloUnmeasured,
    HelloBare,
}

/// A handler that waits.
struct Waits;

impl Future for Waits {
    type Output = Result<Response<Full<Bytes>>, Infallible>;

    #[inline(never)]
    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        black_box(Poll::Pending)
    }
}

struct NoOwner;

impl AccountOwner for NoOwner {}

/// The process that is counted.
pub(crate) fn be(counted: Counted, steps: usize) -> Result<(), BoxError> {
    match counted {
        Counted::Idle => work(0, true, steps),
        Counted::IdleBare => work(0, false, steps),
        Counted::Settled => work(SMALL, true, steps),
        Counted::SettledBare => work(SMALL, false, steps),
        Counted::Peak => work(LARGE, true, steps),
        Counted::PeakBare => work(LARGE, false, steps),
        Counted::Poll => {
            let layer = MemoryLayer::new(memory()?.admission().clone(), Cost::ZERO);
            let mut service = layer.layer(tower::service_fn(|_| Waits));
            poll(pin!(service.call(Request::new(Empty::<Bytes>::new()))), steps);
        }
        Counted::PollBare => poll(pin!(Waits), steps),
        Counted::Hello => return hello(Some(memory()?.admission()), steps),
        Counted::HelloUnmeasured => {
            return hello(Some(&Admission::with_limit(ByteSize::gib(1))), steps);
        }
        Counted::HelloBare => return hello(None, steps),
    }
    Ok(())
}

/// Allocates and frees blocks of so many bytes in each step, for an account or not.
fn work(bytes: usize, is_measured: bool, steps: usize) {
    let account = Arc::new(Account::new(NoOwner));
    let blocks = if bytes == 0 { 0 } else { 5 };
    let step = || {
        (0..black_box(blocks)).for_each(|_| drop(black_box(Vec::<u8>::with_capacity(bytes))));
    };
    for _ in 0..steps {
        if is_measured { account.run(step) } else { step() }
    }
    black_box(account);
}

fn memory() -> Result<Memory, BoxError> {
    // Time stands still, so that the threads of the `Memory` sleep.
    let clock = Arc::new(ManualClock::new());
    Ok(Memory::builder().clock(clock).device(DeviceChoice::None).start()?)
}

fn poll<F: Future>(mut future: Pin<&mut F>, times: usize) {
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..times {
        let _ = black_box(future.as_mut().poll(&mut cx).is_ready());
    }
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

/// Counts everything, prints it, and returns whether the goals held.
pub(crate) fn measure() -> Result<bool, BoxError> {
    let mut all = true;
    let mut print = |name: &str, value: f64, unit: &str, goal: f64| {
        let holds = value <= goal;
        all &= holds;
        println!("figure measured.{name} {value:.3} {unit}");
        let held = if holds { "held  " } else { "MISSED" };
        println!("{held}  measured.{name} at most {goal}: {value:.3}");
    };
    let of = |with: Counted, without: Counted| -> Result<f64, BoxError> {
        Ok(count(with)? - count(without)?)
    };
    print("scope.instructions", of(Counted::Idle, Counted::IdleBare)?, "instructions", 60.0);
    let settled = of(Counted::Settled, Counted::SettledBare)?;
    print("scope.settled.instructions", settled, "instructions", 130.0);
    let peak = of(Counted::Peak, Counted::PeakBare)? - settled;
    print("scope.peak.instructions", peak, "instructions", 350.0);
    let poll = of(Counted::Poll, Counted::PollBare)?;
    println!("figure measured.poll.instructions {poll:.0} instructions");
    let (bare, unmeasured) = (count(Counted::HelloBare)?, count(Counted::HelloUnmeasured)?);
    let measured = count(Counted::Hello)?;
    println!("figure measured.hello.instructions {bare:.0} instructions");
    println!("figure measured.hello.admitted_ratio {:.3} x", unmeasured / bare);
    print("layer.ratio", measured / unmeasured, "x", 1.02);
    Ok(all)
}

/// Returns the instructions of one poll or request.
fn count(counted: Counted) -> Result<f64, BoxError> {
    let steps = match counted {
        Counted::Hello | Counted::HelloUnmeasured | Counted::HelloBare => REQUESTS,
        _ => POLLS,
    };
    let counted = counted.to_possible_value().ok_or("no value is skipped")?;
    Ok(callgrind::per_step(&["--be", counted.get_name(), "--steps"], steps)?)
}

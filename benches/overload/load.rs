//! The load process: an open loop in a process of its own, outside the service's cgroup.
//!
//! A request is sent when its time has come, however many are under way, and its latency counts
//! from that time. How late the sending itself began is recorded, so that a sender that cannot
//! keep up shows. It judges nothing: what came of each request goes to standard output. It ends
//! early when its standard input does, which is how it is told that the service is dead.
//!
//! Invariant: each request of the offer has exactly one outcome.

use std::convert::Infallible;
use std::io::Read as _;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http_body_util::{BodyExt as _, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::Frame;
use hyper::header::CONTENT_LENGTH;
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use lowtide::BoxError;
use serde::{Deserialize, Serialize};

use crate::common::own;
use crate::common::process::Process;
use crate::hold::{COPIES_HEADER, HOLD_HEADER};
use crate::mix::HOLD;
use crate::schedule::{Arrival, GIANT, Offer, millis};

/// After the longest hold, answers are waited for this long.
const DRAIN: Duration = Duration::from_millis(1500);
/// Requests under way at once at most: sockets are not without end. What comes beyond fails.
const UNDER_WAY_MAX: usize = 4096;
/// Bytes that are sent in one piece at most: views of one copy, so that a request under way
/// weighs next to nothing on this side.
const PIECE: usize = 64 << 10;

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The orders of the load process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    /// The service.
    pub(crate) to: SocketAddr,
    /// The load that it is offered.
    pub(crate) offer: Offer,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Fate {
    /// Answered 2xx.
    Served,
    /// Answered 503.
    Shed,
    /// Anything else, and nothing.
    Failed,
}

/// One request, times in milliseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// Its class.
    pub(crate) class: usize,
    /// Bytes of its body.
    pub(crate) bytes: u64,
    /// The outcome of the request.
    pub(crate) fate: Fate,
    /// When it was to be sent, since the start.
    pub(crate) at: f64,
    /// The delay of the sending.
    pub(crate) late: f64,
    /// From that time to the end of the answer.
    pub(crate) took: f64,
    /// For which it was to hold its memory.
    pub(crate) hold: f64,
}

/// Offers a load from a process of its own, and looks until it is over. A look that returns `false`
/// ends the load. Returns the outcomes of the requests.
pub(crate) fn offer(
    to: SocketAddr,
    offer: Offer,
    mut look: impl FnMut() -> Result<bool, BoxError>,
) -> Result<Vec<Seen>, BoxError> {
    let mut command = own()?;
    command.arg("--generate").arg(serde_json::to_string(&Order { to, offer })?);
    let mut load = Process::start(command)?;
    let mut input = load.child.stdin.take();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| load.output().map_err(|error| error.to_string()));
        while !read.is_finished() {
            if !look()? {
                input = None;
            }
        }
        let text = read.join().map_err(|_| "the reader of the load process panicked")??;
        serde_json::from_str(&text).map_err(|error| format!("no tally: {error}").into())
    })
}

struct Shared {
    to: SocketAddr,
    client: Client<HttpConnector, Body>,
    piece: Bytes,
    body: Duration,
    is_chunked: bool,
    copies: u32,
    tally: Mutex<Vec<Seen>>,
    under_way: AtomicUsize,
    stopped: Arc<AtomicBool>,
}

/// Offers what the order says and prints the tally.
pub(crate) fn generate(order: &str) -> Result<(), BoxError> {
    let order: Order = serde_json::from_str(order)?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build()?;
    let stopped = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&stopped);
    // Ends with the standard input, or with the process.
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        stop.store(true, Ordering::Relaxed);
    });
    let shared = Arc::new(Shared {
        to: order.to,
        client: Client::builder(TokioExecutor::new()).build_http(),
        piece: Bytes::from(vec![b'x'; PIECE]),
        body: Duration::from_millis(order.offer.sending.body_millis),
        is_chunked: order.offer.sending.is_chunked,
        copies: order.offer.sending.copies,
        tally: Mutex::default(),
        under_way: AtomicUsize::new(0),
        stopped,
    });
    runtime.block_on(offered(&shared, &order.offer));
    // What is still under way has had its time.
    runtime.shutdown_timeout(Duration::from_millis(200));
    let tally = shared.tally.lock().unwrap_or_else(PoisonError::into_inner);
    serde_json::to_writer(std::io::stdout().lock(), &*tally)?;
    Ok(())
}

async fn offered(shared: &Arc<Shared>, offer: &Offer) {
    let arrivals = offer.arrivals();
    let start = Instant::now();
    for arrival in arrivals {
        let time = start + arrival.at;
        if shared.is_stopped() {
            shared.failed(arrival);
            continue;
        }
        tokio::time::sleep_until(time.into()).await;
        if shared.under_way.load(Ordering::Relaxed) >= UNDER_WAY_MAX {
            shared.failed(arrival);
            continue;
        }
        shared.under_way.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::clone(shared);
        tokio::spawn(async move {
            shared.one(arrival, time).await;
            shared.under_way.fetch_sub(1, Ordering::Relaxed);
        });
    }
    let end = start + offer.lasts() + shared.body + HOLD[1] + DRAIN;
    // Ends with the last answer, the service, or the time.
    while shared.under_way.load(Ordering::Relaxed) > 0
        && !shared.is_stopped()
        && Instant::now() < end
    {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

impl Shared {
    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    fn tell(&self, seen: Seen) {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
    }

    /// Notes a request that is not sent.
    fn failed(&self, arrival: Arrival) {
        self.tell(seen(arrival, Fate::Failed, Duration::ZERO, Duration::ZERO));
    }

    /// Sends one request, reads its answer to the end and writes down what came of it. One that is
    /// not over when the time is up is the parent's to miss: it counts as failed there.
    async fn one(&self, arrival: Arrival, time: Instant) {
        let late = time.elapsed();
        let fate = self.send(arrival).await.unwrap_or(Fate::Failed);
        self.tell(seen(arrival, fate, late, time.elapsed()));
    }

    async fn send(&self, arrival: Arrival) -> Result<Fate, BoxError> {
        let length = arrival.size.as_usize().unwrap_or(0);
        let pieces = (0..length.div_ceil(PIECE)).map(|at| {
            let piece = self.piece.slice(..PIECE.min(length - at * PIECE));
            Ok::<_, Infallible>(Frame::data(piece))
        });
        let pieces: Vec<_> = pieces.collect();
        let gap = self.body / u32::try_from(pieces.len()).unwrap_or(u32::MAX).max(1);
        let paced = stream::iter(pieces).then(move |piece| async move {
            if !gap.is_zero() {
                tokio::time::sleep(gap).await;
            }
            piece
        });
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(format!("http://{}/hold", self.to))
            .header(HOLD_HEADER, millis(arrival.hold));
        if !self.is_chunked {
            request = request.header(CONTENT_LENGTH, length);
        }
        let copies = if arrival.is_giant { GIANT } else { self.copies };
        if copies > 0 {
            request = request.header(COPIES_HEADER, copies);
        }
        let request = request.body(StreamBody::new(paced).boxed_unsync())?;
        let answer = self.client.request(request).await?;
        let status = answer.status();
        let mut body = answer.into_body();
        while let Some(frame) = body.frame().await {
            frame?;
        }
        Ok(match status {
            status if status.is_success() => Fate::Served,
            StatusCode::SERVICE_UNAVAILABLE => Fate::Shed,
            _ => Fate::Failed,
        })
    }
}

fn seen(arrival: Arrival, fate: Fate, late: Duration, took: Duration) -> Seen {
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    Seen {
        class: arrival.class,
        bytes: arrival.size.get(),
        fate,
        at: millis(arrival.at),
        late: millis(late),
        took: millis(took),
        hold: millis(arrival.hold),
    }
}

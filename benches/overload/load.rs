//! Load: open loop, at seeded Poisson times, with bodies of three sizes.
//!
//! A request is sent when its time has come, however many are under way, and its latency counts
//! from that time. How late the sending itself began is recorded, so that a sender that cannot
//! keep up shows. What was to be sent but was not answered in time counts as failed, all of it.
//!
//! Invariant: `ok + shed + failed = offered` in each class of size.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt as _, StreamBody, combinators::BoxBody};
use hyper::body::Frame;
use hyper::header::CONTENT_LENGTH;
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use lowtide::{BoxError, ByteSize};

use crate::corpus::Corpus;
use crate::model::Chance;

/// Sizes of bodies, and how many of a hundred requests have them.
pub(crate) const CLASSES: [(ByteSize, u64); 3] =
    [(ByteSize::kib(64), 70), (ByteSize::mib(1), 25), (ByteSize::mib(8), 5)];
/// After the last request's time, answers are waited for this long.
const DRAIN: Duration = Duration::from_millis(1500);
/// Requests under way at once at most: sockets are not without end. What comes beyond fails.
const UNDER_WAY_MAX: usize = 4096;

/// The mix in words.
pub(crate) fn mix() -> String {
    CLASSES.map(|(size, part)| format!("{size} {part} %")).join(", ")
}

type Body = BoxBody<Bytes, Infallible>;

/// What a request came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Ok,
    Shed,
    Failed,
}

/// What came back, of one run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// By class: offered, answered 2xx, answered 503.
    pub(crate) classes: [[u64; 3]; CLASSES.len()],
    /// Answers 2xx while load was offered, and the bytes of their requests.
    pub(crate) ok_in_time: u64,
    /// As said.
    pub(crate) ok_in_time_bytes: u64,
    /// Milliseconds from a request's time to the end of its answer 2xx, and of its answer 503.
    pub(crate) ok_millis: Vec<f64>,
    /// As said.
    pub(crate) shed_millis: Vec<f64>,
    /// Milliseconds from a request's time to the beginning of its sending.
    pub(crate) late_millis: Vec<f64>,
    /// Failures, by what they were.
    pub(crate) failures: BTreeMap<String, u64>,
}

impl Tally {
    /// The requests of all classes: offered, answered 2xx, answered 503.
    pub(crate) fn sums(&self) -> [u64; 3] {
        self.classes.iter().fold([0; 3], |[a, b, c], [x, y, z]| [a + x, b + y, c + z])
    }
}

/// What is to be offered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// Requests a second.
    pub(crate) rate: u32,
    /// How long.
    pub(crate) lasts: Duration,
    /// Of arrivals, sizes and texts.
    pub(crate) seed: u64,
}

struct Shared {
    to: SocketAddr,
    client: Client<HttpConnector, Body>,
    tally: Mutex<Tally>,
    under_way: AtomicUsize,
}

/// Offers it to the service; ends early once `dead` is set.
pub(crate) fn run(
    to: SocketAddr,
    corpus: &Corpus,
    offer: Offer,
    dead: &AtomicBool,
) -> Result<Tally, BoxError> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build()?;
    let shared = Arc::new(Shared {
        to,
        client: Client::builder(TokioExecutor::new()).build_http(),
        tally: Mutex::default(),
        under_way: AtomicUsize::new(0),
    });
    runtime.block_on(offered(&shared, corpus, offer, dead));
    // What is still under way has had its time.
    runtime.shutdown_timeout(Duration::from_secs(1));
    let tally = shared.tally.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(tally.clone())
}

async fn offered(shared: &Arc<Shared>, corpus: &Corpus, offer: Offer, dead: &AtomicBool) {
    let start = Instant::now();
    for (at, class, mut chance) in schedule(offer) {
        shared.with_tally(|tally| tally.classes[class][0] += 1);
        let time = start + at;
        if dead.load(Ordering::Relaxed) {
            shared.failed("not sent: the service was dead");
            continue;
        }
        tokio::time::sleep_until(time.into()).await;
        if shared.under_way.fetch_add(1, Ordering::Relaxed) >= UNDER_WAY_MAX {
            shared.under_way.fetch_sub(1, Ordering::Relaxed);
            shared.failed("not sent: too many under way");
            continue;
        }
        let size = CLASSES[class].0.as_usize().unwrap_or(0);
        let pieces = corpus.cut(size, &mut chance);
        let shared = Arc::clone(shared);
        let end = start + offer.lasts;
        tokio::spawn(async move {
            shared.one(pieces, class, time, end).await;
            shared.under_way.fetch_sub(1, Ordering::Relaxed);
        });
    }
    let end = start + offer.lasts + DRAIN;
    // Ends with the last answer, the service, or the time.
    while shared.under_way.load(Ordering::Relaxed) > 0
        && !dead.load(Ordering::Relaxed)
        && Instant::now() < end
    {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// When each request comes, its class, and the chance that cuts its text.
fn schedule(offer: Offer) -> impl Iterator<Item = (Duration, usize, Chance)> {
    let mut chance = Chance(offer.seed);
    let mut at = 0.0;
    std::iter::from_fn(move || {
        // The gap between two arrivals of a Poisson process (exponential).
        at -= (1.0 - unit(chance.bits())).ln() / f64::from(offer.rate);
        let draw = chance.bits() % 100;
        let mut sum = 0;
        let class = CLASSES.iter().position(|(_, part)| {
            sum += part;
            draw < sum
        });
        let text = Chance(chance.bits());
        let at = Duration::from_secs_f64(at);
        (at < offer.lasts).then(|| (at, class.unwrap_or(0), text))
    })
}

/// A number in [0, 1).
fn unit(bits: u64) -> f64 {
    f64::from(u32::try_from(bits >> 32).unwrap_or(0)) / (f64::from(u32::MAX) + 1.0)
}

impl Shared {
    fn with_tally(&self, change: impl FnOnce(&mut Tally)) {
        change(&mut self.tally.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn failed(&self, what: &str) {
        self.with_tally(|tally| *tally.failures.entry(what.to_owned()).or_default() += 1);
    }

    /// Sends one request, reads its answer to the end and counts it.
    async fn one(&self, pieces: Vec<Bytes>, class: usize, time: Instant, end: Instant) {
        let late = time.elapsed();
        let length: usize = pieces.iter().map(Bytes::len).sum();
        let fate = self.send(pieces, length).await;
        let (took, in_time) = (millis(time.elapsed()), Instant::now() < end);
        self.with_tally(|tally| {
            tally.late_millis.push(millis(late));
            match fate {
                Ok(Fate::Ok) => {
                    tally.classes[class][1] += 1;
                    tally.ok_millis.push(took);
                    if in_time {
                        tally.ok_in_time += 1;
                        tally.ok_in_time_bytes += length as u64;
                    }
                }
                Ok(Fate::Shed) => {
                    tally.classes[class][2] += 1;
                    tally.shed_millis.push(took);
                }
                Ok(Fate::Failed) => *tally.failures.entry("cut off".to_owned()).or_default() += 1,
                Err(what) => *tally.failures.entry(what).or_default() += 1,
            }
        });
    }

    async fn send(&self, pieces: Vec<Bytes>, length: usize) -> Result<Fate, String> {
        let frames = pieces.into_iter().map(|piece| Ok::<_, Infallible>(Frame::data(piece)));
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("http://{}/words", self.to))
            .header(CONTENT_LENGTH, length)
            .body(StreamBody::new(stream::iter(frames)).boxed())
            .map_err(|error| error.to_string())?;
        let answer = self.client.request(request).await.map_err(|error| error.to_string())?;
        let status = answer.status();
        let mut body = answer.into_body();
        while let Some(frame) = body.frame().await {
            if frame.is_err() {
                return Ok(Fate::Failed);
            }
        }
        match status {
            status if status.is_success() => Ok(Fate::Ok),
            StatusCode::SERVICE_UNAVAILABLE => Ok(Fate::Shed),
            status => Err(status.to_string()),
        }
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

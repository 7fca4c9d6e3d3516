//! The load: clients that send one request after another, some with large bodies, some with small.
//!
//! All clients of a size send the same bytes, so the load process itself needs little memory.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::header::CONTENT_TYPE;
use hyper::{Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use lowtide::ByteSize;

use crate::{BIG, BIG_CLIENTS, SMALL, SMALL_CLIENTS};

/// The wait of a client after a 503 or a failure.
const RETRY: Duration = Duration::from_millis(100);
/// An answer that takes longer counts as failed.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Results of the clients of one size.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// Requests answered with 200.
    pub(crate) served: u32,
    /// Requests answered with 503.
    pub(crate) rejected: u32,
    /// Requests with another answer or none.
    pub(crate) failed: u32,
    /// Seconds to the end of each answer with 200, sorted.
    seconds: Vec<f64>,
}

impl Tally {
    /// The 99th percentile of the time to serve a request, if one was served.
    pub(crate) fn p99_seconds(&self) -> Option<f64> {
        self.seconds.get((self.seconds.len() * 99).div_ceil(100).checked_sub(1)?).copied()
    }

    fn add(&mut self, other: Self) {
        self.served += other.served;
        self.rejected += other.rejected;
        self.failed += other.failed;
        self.seconds.extend(other.seconds);
        self.seconds.sort_unstable_by(f64::total_cmp);
    }
}

/// Results of one run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Load {
    pub(crate) big: Tally,
    pub(crate) small: Tally,
}

/// Sends requests for this long, or until `over`, and waits for the last answers.
pub(crate) async fn send(to: SocketAddr, lasts: Duration, over: &Arc<AtomicBool>) -> Load {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let end = Instant::now() + lasts;
    let start = |count, size| {
        let body = records(size);
        let one = |_| {
            let (client, body, over) = (client.clone(), body.clone(), Arc::clone(over));
            let goes_on = move || Instant::now() < end && !over.load(Ordering::Relaxed);
            tokio::spawn(run(client, to, body, goes_on))
        };
        (0..count).map(one).collect::<Vec<_>>()
    };
    let (big, small) = (start(BIG_CLIENTS, BIG), start(SMALL_CLIENTS, SMALL));
    Load { big: sum(big).await, small: sum(small).await }
}

async fn sum(clients: Vec<tokio::task::JoinHandle<Tally>>) -> Tally {
    let mut all = Tally::default();
    for client in clients {
        all.add(client.await.unwrap_or_default());
    }
    all
}

/// One client: sends its next request after the answer to the last one.
async fn run(
    client: Client<HttpConnector, Full<Bytes>>,
    to: SocketAddr,
    body: Bytes,
    goes_on: impl Fn() -> bool,
) -> Tally {
    let mut tally = Tally::default();
    while goes_on() {
        let start = Instant::now();
        let answer = tokio::time::timeout(TIMEOUT, ask(&client, to, body.clone())).await;
        match answer.ok().flatten() {
            Some(StatusCode::OK) => {
                tally.served += 1;
                tally.seconds.push(start.elapsed().as_secs_f64());
                continue;
            }
            Some(StatusCode::SERVICE_UNAVAILABLE) => tally.rejected += 1,
            _ => tally.failed += 1,
        }
        tokio::time::sleep(RETRY).await;
    }
    tally
}

async fn ask(
    client: &Client<HttpConnector, Full<Bytes>>,
    to: SocketAddr,
    body: Bytes,
) -> Option<StatusCode> {
    let request = Request::post(format!("http://{to}/"))
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(body));
    let answer = client.request(request.ok()?).await.ok()?;
    let status = answer.status();
    answer.into_body().collect().await.ok()?;
    Some(status)
}

/// A JSON array of records, about as long as this.
fn records(size: ByteSize) -> Bytes {
    let size = size.as_usize().unwrap_or(0);
    let mut text = String::from("[");
    for id in 0_u32.. {
        let record = serde_json::json!({
            "id": id,
            "name": format!("customer {id}"),
            "score": f64::from(id) / 8.0,
            "tags": ["new", "north"],
            "notes": "ordered twice and returned once, pays by invoice within thirty days, prefers \
                      delivery in the morning and asks for a call one hour before, last visit in \
                      spring, no complaints",
        });
        text += &record.to_string();
        if text.len() >= size {
            break;
        }
        text.push(',');
    }
    (text + "]").into()
}

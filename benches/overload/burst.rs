//! A burst: 400 small requests to `/embed` at once, and the same with six at a time.
//!
//! A client that keeps a queue of its own is what a service without one expects. The service's
//! queue should need about as long. Both runs use one service, one after the other; the model is
//! loaded before.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::{Request, StatusCode};
use lowtide::BoxError;

use crate::cell::Cell;
use crate::common::figures::{Figures, count};
use crate::common::http::{client, send};

/// The requests of a burst.
const REQUESTS: usize = 400;
/// The requests at once of the client that has a queue.
const AT_ONCE: usize = 6;
/// The texts of a request: enough that the work outweighs the new connections of a burst.
const TEXTS: usize = 32;
/// The longest time for all of them.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs both, and adds the figures. Returns `true` if the service survived.
pub(crate) fn run(base: &Cell, figures: &mut Figures) -> Result<bool, BoxError> {
    let cell = Cell { policy: "lowtide".to_owned(), waits_in_proxy: true, ..base.clone() };
    let (service, to) = cell.start()?;
    let runtime = tokio::runtime::Runtime::new()?;
    let both = async {
        embed_all(to, 1, 1).await; // loads the model
        let queued = embed_all(to, REQUESTS, AT_ONCE).await;
        (queued, embed_all(to, REQUESTS, REQUESTS).await)
    };
    let both = runtime.block_on(async { tokio::time::timeout(PATIENCE, both).await })?;
    let ((queued, queue_time), (served, time)) = both;
    let kills = service.end();
    println!("{queued} of {REQUESTS} with {AT_ONCE} at a time in {queue_time:.2} s");
    figures.at_least("room.burst400.served", count(served), "requests", 396.0);
    figures.at_most("room.burst400.over_queue_ratio", time / queue_time, "ratio", 1.5);
    figures.at_most("room.burst400.kills", count(kills), "kills", 0.0);
    Ok(kills == 0)
}

/// Sends so many requests, so many at once. Returns the number served, and the seconds.
async fn embed_all(to: SocketAddr, requests: usize, at_once: usize) -> (u64, f64) {
    let http = client();
    let text = "the sea draws back and returns ".repeat(20);
    let body = serde_json::json!({ "texts": vec![text; TEXTS] }).to_string();
    let start = Instant::now();
    let lines = (0..at_once).map(|line| {
        let (http, body) = (http.clone(), body.clone());
        async move {
            let mut served = 0;
            for _ in (line..requests).step_by(at_once) {
                let request = Request::post(format!("http://{to}/embed"));
                let request = request.header("content-type", "application/json");
                let answer = send(&http, request, body.clone()).await;
                served += u64::from(answer.is_ok_and(|(status, _)| status == StatusCode::OK));
            }
            served
        }
    });
    let served = join_all(lines).await.into_iter().sum();
    (served, start.elapsed().as_secs_f64())
}

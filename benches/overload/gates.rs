//! The policies that are not lowtide's, as they are found in the field.
//!
//! Each stands where lowtide's layer stands, before the text service, and answers 503. Limits on
//! requests under way are tower's own `ConcurrencyLimit` behind its `LoadShed`. The thresholds are
//! this bench's; the one that reads for each request opens and reads the file in each call, as
//! crates of the kind do.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::error_handling::HandleErrorLayer;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use lowtide::{BoxError, ByteSize};
use lowtide_admission::Signals;
use tower::ServiceBuilder;
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::load_shed::LoadShedLayer;

/// The part of the limit at which a sampled threshold sheds.
const SAMPLED: f64 = 0.85;
/// The part of the limit at which one that reads for each request sheds.
const FRESH: f64 = 0.70;
/// Bytes of a page of the machines that this runs on.
const PAGE: u64 = 4096;

/// So many requests under way at most.
pub(crate) fn concurrency(routes: Router, most: u32) -> Router {
    let full = |_: BoxError| async { StatusCode::SERVICE_UNAVAILABLE };
    routes.layer(
        ServiceBuilder::new()
            .layer(HandleErrorLayer::new(full))
            .layer(LoadShedLayer::new())
            .layer(GlobalConcurrencyLimitLayer::new(most as usize)),
    )
}

/// Sheds while the resident set, as last sampled, is above the threshold.
pub(crate) fn sampled(routes: Router, every: Duration) -> std::io::Result<Router> {
    let above = Arc::new(AtomicBool::new(false));
    let (signals, told) = (Signals::open(), Arc::clone(&above));
    // Ends with the process.
    std::thread::Builder::new().name("threshold".to_owned()).spawn(move || {
        loop {
            let signal = signals.sample();
            let mark = signal.limit.bytes.scaled(SAMPLED);
            told.store(signal.rss.is_some_and(|rss| rss > mark), Ordering::Relaxed);
            std::thread::sleep(every);
        }
    })?;
    Ok(behind(routes, move || above.load(Ordering::Relaxed)))
}

/// Sheds while the resident set, read in each call, is above the threshold.
pub(crate) fn fresh(routes: Router) -> Router {
    let mark = Signals::open().sample().limit.bytes.scaled(FRESH);
    behind(routes, move || resident().is_some_and(|rss| rss > mark))
}

fn resident() -> Option<ByteSize> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(ByteSize::new(pages * PAGE))
}

fn behind(routes: Router, above: impl Fn() -> bool + Clone + Send + Sync + 'static) -> Router {
    routes.layer(from_fn(move |request: Request, next: Next| {
        let shed = above();
        async move { if shed { refused() } else { next.run(request).await } }
    }))
}

fn refused() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "1")], "not enough memory\n").into_response()
}

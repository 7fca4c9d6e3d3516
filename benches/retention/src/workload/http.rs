//! A service on tokio and hyper that takes JSON and answers with JSON.
//!
//! `POST /` with an array of objects: parsed, held for a moment while the connection's neighbours
//! work, written out again. Two workers; a worker that parks rests.
//!
//! Invariant: it ends with its standard input, and holds nothing between requests but connections.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::Notify;

use crate::child::{say, wait_for_end};
use crate::{Allocator, BoxError};

/// The time for which a request waits for others, as for a model or a database.
const HELD: Duration = Duration::from_millis(5);
const WORKERS: usize = 2;

/// Serves until the standard input ends.
///
/// # Errors
/// Where no port is to be had.
pub fn serve(allocator: &dyn Allocator) -> Result<(), BoxError> {
    let _traffic = allocator.begin();
    std::thread::scope(|scope| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .enable_all()
            .build()?;
        let end = Arc::new(Notify::new());
        let input = scope.spawn({
            let end = Arc::clone(&end);
            move || {
                let _ = wait_for_end();
                end.notify_one();
            }
        });
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            say(&format!("port {}", listener.local_addr()?.port()))?;
            loop {
                tokio::select! {
                    () = end.notified() => return Ok::<(), BoxError>(()),
                    accepted = listener.accept() => {
                        let io = TokioIo::new(accepted?.0);
                        let service = service_fn(answer);
                        tokio::spawn(http1::Builder::new().serve_connection(io, service));
                    }
                }
            }
        })?;
        runtime.shutdown_background();
        let _ = input.join();
        Ok(())
    })
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let status = |code| {
        let mut response = Response::new(Full::default());
        *response.status_mut() = code;
        response
    };
    let Ok(body) = request.into_body().collect().await else {
        return Ok(status(hyper::StatusCode::BAD_REQUEST));
    };
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(&body.to_bytes()) else {
        return Ok(status(hyper::StatusCode::BAD_REQUEST));
    };
    tokio::time::sleep(HELD).await;
    let text = serde_json::to_vec(&value).unwrap_or_default();
    Ok(Response::new(Full::new(Bytes::from(text))))
}

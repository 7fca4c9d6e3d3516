//! An axum service with lowtide: admission by bytes, the four endpoints, and an orderly shutdown.
//!
//! `cargo run --example embedded_in_axum` starts the service on a free port and sends requests to
//! it (one that fits, one that never could, its readiness, its metrics), then shuts it down as
//! SIGTERM would. With `--serve` it serves on port 8080 until SIGTERM or Ctrl-C instead.
//!
//! It is the service of `docs/GETTING_STARTED.md` with a limit, an orderly shutdown and a client.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "what a client sees is the product")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::{Router, body::Body, extract::Request, routing::post};
use lowtide::metrics::prometheus::{self, PrometheusBuilder};
use lowtide::service::{ContentLength, Endpoints, MemoryLayer};
use lowtide::{BoxError, ByteSize, Memory};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};

#[global_allocator]
static HEAP: lowtide::host::Heap = lowtide::host::Heap;
lowtide::heap_profile!(balanced); // what jemalloc reads before `main`

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let serve = std::env::args().any(|argument| argument == "--serve");
    let recorder = prometheus::configure(PrometheusBuilder::new())?.install_recorder()?;
    let upkeep = recorder.clone();
    let memory = Memory::builder()
        .memory_limit(ByteSize::gib(1)) // or the cgroup's, where that is lower
        .with_environment()? // LOWTIDE_* variables win over what is said here
        .after_publish(move || upkeep.run_upkeep())
        .start()?;
    let endpoints = Endpoints::new(Some(memory.clone())).with_metrics(move || recorder.render());
    let routes = routes(&memory, endpoints);

    let listener = TcpListener::bind(("127.0.0.1", if serve { 8080 } else { 0 })).await?;
    let address = listener.local_addr()?;
    println!("listening on http://{address}");
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let end = async move {
        tokio::select! { _ = term.recv() => {} _ = int.recv() => {} _ = stopped => {} }
    };
    let server = axum::serve(listener, routes).with_graceful_shutdown(end);
    let server = tokio::spawn(server.into_future());
    if serve {
        server.await??;
    } else {
        let asked = ask_all(address).await;
        let _ = stop.send(());
        server.await??;
        asked?;
    }
    // Unloads, and joins the threads. It blocks, so not on a thread of the runtime.
    let end = tokio::task::spawn_blocking(move || memory.shutdown(Duration::from_secs(5))).await?;
    println!("shut down: {end}");
    if end.is_clean() { Ok(()) } else { Err("memory is still outstanding".into()) }
}

fn routes(memory: &Memory, endpoints: Endpoints) -> Router {
    // The need of a request: its body and the result, 2 MiB if its length is unknown.
    let estimate = ContentLength::new(ByteSize::mib(2)).factor(2.0).least(ByteSize::kib(16));
    let state = Arc::new(endpoints);
    let answer = |request: Request| async move {
        let found = state.answer_request(&request).ok_or(StatusCode::NOT_FOUND);
        found.map(|text| text.map(Body::from))
    };
    Router::new()
        .route("/shout", post(|text: String| async move { text.to_uppercase() }))
        .layer(MemoryLayer::new(memory.admission().clone(), estimate)) // 503 where it does not fit
        .fallback(answer) // after the layer, so outside admission: it answers under overload
}

/// Sends the client's requests, and checks the responses.
async fn ask_all(address: SocketAddr) -> Result<(), BoxError> {
    let text = "the tide goes out";
    println!("POST /shout, 17 bytes: {}", ask(address, "POST /shout", 17, text, "200").await?);
    // A length of 1 TiB can never fit, and is refused by the head of the request.
    println!("POST /shout, 1 TiB: {}", ask(address, "POST /shout", 1 << 40, "", "413").await?);
    println!("GET /readyz: {}", ask(address, "GET /readyz", 0, "", "200").await?);
    // Published each second, and for the first time soon after the start.
    for _ in 0..100 {
        let text = ask(address, "GET /metrics", 0, "", "200").await?;
        let limit = text.lines().find(|line| line.starts_with("lowtide_pressure_limit_bytes"));
        if let Some(limit) = limit {
            println!("GET /metrics: {} lines, among them {limit}", text.lines().count());
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Err("no limit is published".into())
}

/// One request by hand; the answer's body.
async fn ask(
    address: SocketAddr,
    what: &str,
    length: u64,
    body: &str,
    expected: &str,
) -> Result<String, BoxError> {
    let head = format!("{what} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
    let head = format!("{head}Content-Type: text/plain\r\nContent-Length: {length}\r\n\r\n");
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all((head + body).as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let status = answer.split(' ').nth(1).unwrap_or_default();
    if status != expected {
        return Err(format!("{what}: {status}, expected {expected}").into());
    }
    Ok(answer.split_once("\r\n\r\n").map(|(_, body)| body.trim()).unwrap_or_default().to_owned())
}

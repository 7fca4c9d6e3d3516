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
use std::time::Duration;

use axum::{Router, routing::post};
use lowtide::{BoxError, ByteSize, Memory};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

lowtide::global_allocator!(balanced); // what jemalloc reads before `main`

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let serve = std::env::args().any(|argument| argument == "--serve");
    let memory = Memory::builder()
        .memory_limit(ByteSize::gib(1)) // or the cgroup's, where that is lower
        .prometheus()?
        .start()?;
    let routes = Router::new()
        .route("/shout", post(|text: String| async move { text.to_uppercase() }))
        .layer(memory.layer()) // 503 where a request does not fit
        .merge(memory.routes()); // outside the layer: they answer under overload

    let listener = TcpListener::bind(("127.0.0.1", if serve { 8080 } else { 0 })).await?;
    let address = listener.local_addr()?;
    println!("listening on http://{address}");
    let server = axum::serve(listener, routes).with_graceful_shutdown(memory.terminated()?);
    let served = memory.serve(server, Duration::from_secs(10));
    if serve {
        return served.await;
    }
    tokio::select! { served = served => served?, asked = ask_all(address) => asked? }
    // Unloads resources, and joins the threads.
    let end = memory.shutdown(Duration::from_secs(5)).await;
    println!("shut down: {end}");
    Ok(end.into_result()?)
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

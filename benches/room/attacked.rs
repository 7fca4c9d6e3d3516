//! A service of HTTP/1 and HTTP/2 behind the memory layer, in a process of its own.
//!
//! `POST /work` collects its body and answers with its length. `GET /large` answers with 1 MiB that
//! lies in memory. It ends when it is killed.

use std::net::SocketAddr;
use std::pin::pin;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use lowtide::service::Connections;
use lowtide::{BoxError, ByteSize, Memory};
use tokio::net::TcpListener;

/// The bytes of a large response.
const LARGE: usize = 1 << 20;

/// The connections at once, if they fit.
const CONNECTIONS: usize = 4096;
/// The bytes of request bodies that a connection may buffer, and each stream of it.
const CONNECTION_WINDOW: u32 = 128 << 10;
const STREAM_WINDOW: u32 = 64 << 10;
/// The bytes of a frame at most.
const FRAME: u32 = 16 << 10;
/// The requests of a connection at once.
const STREAMS: u32 = 32;

/// Serves at this address.
pub(crate) fn serve(at: SocketAddr) -> Result<(), BoxError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .on_thread_start(lowtide::memory::on_thread_start)
        .on_thread_park(lowtide::heap::on_thread_park)
        .build()?;
    let memory = Memory::start()?;
    // Estimates of bodies count, as in a service whose handlers reject what exceeds them.
    let work = Router::new()
        .route("/work", post(async |body: String| body.len().to_string()))
        .layer(DefaultBodyLimit::disable())
        .layer(memory.layer().without_slow_start());
    let large =
        Router::new().route("/large", get(async || vec![b'.'; LARGE])).layer(memory.layer());
    let routes = work.merge(large);
    let connections = Connections::new(memory.admission(), CONNECTIONS)
        .with_estimate(ByteSize::new((CONNECTION_WINDOW + FRAME).into()));
    runtime.block_on(async {
        let mut listener = connections.listen(TcpListener::bind(at).await?);
        loop {
            let Ok((connection, stream, _)) = listener.accept().await else { continue };
            let service = TowerToHyperService::new(connection.service(routes.clone()));
            tokio::spawn(async move {
                let mut builder = auto::Builder::new(TokioExecutor::new());
                builder
                    .http2()
                    .initial_stream_window_size(STREAM_WINDOW)
                    .initial_connection_window_size(CONNECTION_WINDOW)
                    .max_frame_size(FRAME)
                    .max_concurrent_streams(STREAMS);
                let served = builder.serve_connection(TokioIo::new(stream), service);
                let mut served = pin!(served);
                tokio::select! {
                    _ = served.as_mut() => return,
                    () = connection.closed() => return,
                    () = connection.ending() => served.as_mut().graceful_shutdown(),
                }
                tokio::select! {
                    _ = served => {}
                    () = connection.closed() => {}
                }
            });
        }
    })
}

//! A service of HTTP/1 and HTTP/2 behind the memory layer, in a process of its own.
//!
//! `POST /work` collects its body and answers with its length. `GET /large` answers with 1 MiB that
//! lies in memory. It ends when it is killed.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use lowtide::{BoxError, Memory};
use tokio::net::TcpListener;

/// The bytes of a large response.
const LARGE: usize = 1 << 20;

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
    runtime.block_on(async {
        let listener = TcpListener::bind(at).await?;
        loop {
            let Ok((stream, _)) = listener.accept().await else { continue };
            let routes = routes.clone();
            tokio::spawn(async move {
                let builder = auto::Builder::new(TokioExecutor::new());
                let service = TowerToHyperService::new(routes);
                let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    })
}

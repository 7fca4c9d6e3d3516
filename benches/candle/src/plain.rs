//! The service of `examples/candle` without lowtide: the model is loaded by the first request and
//! dropped when it was idle, which is what a service without a memory manager does by hand.
//!
//! The programs differ in their allocator only.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{Response, StatusCode};
use axum::{Json, Router, routing::post};
use candle_core::Device;
use lowtide_candle::api::{self, Answer, BODY_MAX, Refusal, Request};
use lowtide_candle::embedder::Embedder;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::Instant;

/// Any error ends the program.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

const POLL: Duration = Duration::from_millis(100);

/// The model, if it is loaded, and its last use.
type Slot = Arc<Mutex<Option<(Arc<Embedder>, Instant)>>>;

#[derive(Clone, Debug)]
struct Service {
    folder: PathBuf,
    slot: Slot,
}

/// Serves the model of the first argument at the address of the second, and drops it after the
/// idle time of the third, in seconds.
///
/// # Errors
/// A missing argument, or an address that cannot be bound.
pub fn main() -> Result<(), BoxError> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [folder, address, idle] = arguments.as_slice() else {
        return Err("expected FOLDER ADDRESS IDLE_SECONDS".into());
    };
    let idle = Duration::from_secs(idle.parse()?);
    let service = Service { folder: folder.into(), slot: Slot::default() };
    // As in `examples/candle`.
    let mut runtime = Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).max_blocking_threads(2).enable_all().build()?;
    runtime.block_on(serve(service, address, idle))
}

async fn serve(service: Service, address: &str, idle: Duration) -> Result<(), BoxError> {
    let slot = Arc::clone(&service.slot);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(POLL).await;
            slot.lock().await.take_if(|(_, used)| used.elapsed() >= idle);
        }
    });
    let layer = DefaultBodyLimit::max(BODY_MAX);
    let routes = Router::new().route("/embed", post(embed)).with_state(service).layer(layer);
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, routes).await?)
}

async fn embed(
    State(service): State<Service>,
    request: Result<Json<Request>, JsonRejection>,
) -> Result<Json<Answer>, Response<Body>> {
    let texts = api::texts(request)?;
    let model = service.model().await.map_err(|error| Refusal {
        status: StatusCode::SERVICE_UNAVAILABLE,
        reason: "not_loaded",
        detail: error.to_string(),
    })?;
    Ok(api::answer(spawn_blocking(move || model.embed(&texts)).await)?)
}

impl Service {
    /// Returns the model, which the first of several calls loads.
    async fn model(&self) -> Result<Arc<Embedder>, BoxError> {
        let mut slot = self.slot.lock().await;
        let model = match slot.take() {
            Some((model, _)) => model,
            None => {
                let folder = self.folder.clone();
                Arc::new(spawn_blocking(move || Embedder::load(&folder, &Device::Cpu)).await??)
            }
        };
        *slot = Some((Arc::clone(&model), Instant::now()));
        Ok(model)
    }
}

//! The service, in a process of its own: models, and requests that hold memory for a while.
//!
//! `GET /work?kib=4096&ms=500&model=1` allocates so much, holds it for so long, and uses that
//! model meanwhile. It ends when its standard input does.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri};
use axum::routing::get;
use lowtide::admission::{Cost, Managed};
use lowtide::service::{Endpoints, MemoryLayer};
use lowtide::{BoxError, ByteSize, Memory};
use tokio::net::TcpListener;

/// The models, and what each holds.
pub(crate) const MODELS: usize = 4;
const WEIGHTS: ByteSize = ByteSize::mib(100);
/// The longest time that a request waits for room.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Serves. Prints its address.
pub(crate) fn serve() -> Result<(), BoxError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .on_thread_start(lowtide::memory::on_thread_start)
        .on_thread_park(lowtide::heap::on_thread_park)
        .build()?;
    let memory = Memory::builder().without_environment().start()?;
    let models = (0..MODELS).map(|nth| model(&memory, nth)).collect::<Result<Vec<_>, _>>()?;
    let estimate = |head: &Parts| Cost::host(ByteSize::kib(number(&head.uri, "kib").unwrap_or(0)));
    let layer = MemoryLayer::new(memory.admission().clone(), estimate).with_max_wait(MAX_WAIT);
    let endpoints = Endpoints::new(Some(memory)).with_local_admin().into_routes();
    let routes = Router::new()
        .route("/work", get(work))
        .with_state(Arc::<[_]>::from(models))
        .layer(layer)
        .merge(endpoints);
    let service = routes.into_make_service_with_connect_info::<SocketAddr>();
    let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
    let at = listener.local_addr()?;
    println!("{at}");
    runtime.spawn(async move { axum::serve(listener, service).await });
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

fn model(memory: &Memory, nth: usize) -> Result<Managed<Vec<u8>>, BoxError> {
    let load = || Ok(vec![1; WEIGHTS.as_usize().unwrap_or_default()]);
    let model = memory.managed(&format!("model-{nth}"), load).cost(Cost::host(WEIGHTS));
    Ok(model.register()?)
}

async fn work(State(models): State<Arc<[Managed<Vec<u8>>]>>, uri: Uri) -> StatusCode {
    let model = number(&uri, "model").and_then(|nth| models.get(usize::try_from(nth).ok()?));
    let guard = match model {
        Some(model) => match model.acquire().await {
            Ok(guard) => Some(guard),
            Err(_) => return StatusCode::SERVICE_UNAVAILABLE,
        },
        None => None,
    };
    let kib = number(&uri, "kib").and_then(|kib| usize::try_from(kib).ok());
    let held = vec![2_u8; kib.unwrap_or(0) << 10];
    tokio::time::sleep(Duration::from_millis(number(&uri, "ms").unwrap_or(0))).await;
    let sum = held.iter().step_by(4096).chain(guard.iter().flat_map(|guard| guard.first()));
    if sum.fold(0_u8, |sum, byte| sum ^ byte) > 3 {
        StatusCode::IM_A_TEAPOT
    } else {
        StatusCode::OK
    }
}

fn number(uri: &Uri, name: &str) -> Option<u64> {
    let pairs = uri.query()?.split('&').filter_map(|pair| pair.split_once('='));
    pairs.into_iter().find(|(key, _)| *key == name)?.1.parse().ok()
}

//! The service: `POST /embed` under lowtide's memory layer, the model as its resource, and the
//! operator endpoints.
//!
//! Invariant: a request that cannot be served gets an answer, and the service goes on.

use std::path::PathBuf;

use axum::body::Body;
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::Response;
use axum::{Json, Router, routing::post};
use candle_core::Device;
use lowtide::admission::Managed;
use lowtide::service::{ContentLength, scope_blocking, unavailable};
use lowtide::{BoxError, ByteSize, Cost, Memory};

use crate::api::{self, Answer, BODY_MAX, Request};
use crate::embedder::Embedder;

/// What the model is reserved with until it was loaded once: then lowtide knows its size.
const MODEL: ByteSize = ByteSize::mib(100);
/// Bytes that a request needs for each byte of its body, until lowtide has measured some: the
/// activations of eight texts of 240 words, whose attention grows with the square of their length.
const FACTOR: f64 = 14_336.0;
/// The least that a request needs.
const LEAST: ByteSize = ByteSize::mib(1);

/// Registers the model of `folder`, which the first request loads to the device, and returns the
/// routes.
///
/// # Errors
/// The cost of the model is above the ceiling of the limit.
pub fn router(memory: &Memory, folder: PathBuf, device: &Device) -> Result<Router, BoxError> {
    let (host, on_device) =
        if device.is_cpu() { (MODEL, ByteSize::ZERO) } else { (ByteSize::ZERO, MODEL) };
    let (loads, unloads) = (device.clone(), device.clone());
    let model = memory
        .managed("embedder", move || Embedder::load(&folder, &loads))
        .cost(Cost::host(host).and_device(on_device))
        .unload(move |model| {
            drop(model);
            // A pool of CUDA releases only memory whose free was waited for (`cuda`).
            let _ = unloads.synchronize();
        });
    let model = model.register()?;
    let estimate = ContentLength::new(LEAST).factor(FACTOR).least(LEAST);
    Ok(Router::new()
        .route("/embed", post(embed))
        .with_state(model)
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .layer(memory.layer().with_estimate(estimate))
        .merge(memory.routes()))
}

async fn embed(
    State(model): State<Managed<Embedder>>,
    request: Result<Json<Request>, JsonRejection>,
) -> Result<Json<Answer>, Response<Body>> {
    let texts = api::texts(request)?;
    let model = model.acquire().await.map_err(|error| unavailable(&error).map(Body::from))?;
    // In the scope, the memory of the inference is measured as this request's.
    let work = scope_blocking(move || model.embed(&texts));
    Ok(api::answer(tokio::task::spawn_blocking(work).await)?)
}

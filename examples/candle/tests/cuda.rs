//! candle's own CUDA backend under the pool governor, over the fake driver: allocations, copies and
//! frees are candle's, and kernels compute nothing. `.ci/candle --cuda` builds and runs it.

mod fake;
mod tiny;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, header::CONTENT_TYPE};
use candle_core::{DType, Device, Tensor};
use lowtide::config::DeviceChoice;
use lowtide::decay::DecayTime;
use lowtide::device::driver::cuda::PoolGovernor;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_candle::cuda;
use lowtide_candle::embedder::{Embedder, LoadError};
use lowtide_candle::service::router;
use tower::ServiceExt as _;

const MIB: usize = 1 << 20;
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);
const IDLE: Duration = Duration::from_millis(300);

/// A `Memory` whose worker decays the pool a hundred times a second, down to what is in use.
fn open(limit: Option<ByteSize>) -> Result<(Memory, Device, Arc<PoolGovernor>), BoxError> {
    let memory = Memory::builder().device(DeviceChoice::None).idle_unload(IDLE);
    let memory = memory.metrics_interval(Duration::from_millis(10)).start()?;
    let (device, governor) = cuda::open(&memory, limit, DecayTime::AtOnce)?;
    Ok((memory, device, governor))
}

fn used(governor: &PoolGovernor) -> Result<ByteSize, BoxError> {
    Ok(governor.report(ByteSize::ZERO)?.used)
}

fn reserved(governor: &PoolGovernor) -> Result<ByteSize, BoxError> {
    Ok(governor.report(ByteSize::ZERO)?.reserved)
}

fn zeros(mib: usize, device: &Device) -> candle_core::Result<Tensor> {
    Tensor::zeros(mib * MIB / 4, DType::F32, device)
}

async fn until(what: &str, holds: impl Fn() -> Result<bool, BoxError>) -> Result<(), BoxError> {
    let wait = async {
        while !holds()? {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    };
    tokio::time::timeout(PATIENCE, wait).await.map_err(|_| format!("did not happen: {what}"))?
}

/// Ends what holds device memory, and looks for faults and leaks.
fn end(memory: Memory, device: Device, governor: Arc<PoolGovernor>) {
    drop(device);
    assert!(memory.shutdown_blocking(PATIENCE).is_clean());
    drop((memory, governor));
    assert_eq!((fake::pools(), fake::faults()), (0, String::new()));
}

async fn a_limit_fails_candles_tensors_and_a_drop_makes_room() -> Result<(), BoxError> {
    fake::reset();
    let limit = ByteSize::mib(64);
    let (memory, device, governor) = open(Some(limit))?;
    let kept = zeros(48, &device)?;
    let error = zeros(32, &device).expect_err("80 MiB of 64");
    assert!(error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    let product = kept.affine(2.0, 0.0).expect_err("as much again, by a kernel");
    assert!(product.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{product}");
    assert_eq!(used(&governor)?, ByteSize::mib(48));
    assert!(reserved(&governor)? <= limit);
    drop(kept);
    device.synchronize()?;
    let other = zeros(64, &device)?;
    drop(other);
    device.synchronize()?;
    until("what was dropped is returned", || Ok(reserved(&governor)?.is_zero())).await?;
    end(memory, device, governor);
    Ok(())
}

async fn a_model_that_does_not_fit_is_a_typed_error_and_leaves_nothing() -> Result<(), BoxError> {
    fake::reset();
    let folder = tiny::model()?;
    let (memory, device, governor) = open(Some(ByteSize::mib(8)))?;
    let taken = zeros(8, &device)?;
    let error = Embedder::load(folder.path(), &device).map(drop).expect_err("no room");
    assert!(matches!(error, LoadError::Weights { .. }), "{error}");
    assert!(error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    assert_eq!(used(&governor)?, ByteSize::mib(8), "what was copied is freed");
    drop(taken);
    device.synchronize()?;
    drop(Embedder::load(folder.path(), &device)?);
    device.synchronize()?;
    until("the weights are returned", || Ok(reserved(&governor)?.is_zero())).await?;
    end(memory, device, governor);
    Ok(())
}

async fn post(routes: &Router) -> Result<u16, BoxError> {
    let request = Request::post("/embed").header(CONTENT_TYPE, "application/json");
    let body = Body::from(r#"{"texts": ["the tide goes out", "the"]}"#);
    Ok(routes.clone().oneshot(request.body(body)?).await?.status().as_u16())
}

/// The service, from the first request to the idle unload: its weights and activations come out of
/// the governed pool, and all of it is returned.
async fn an_idle_service_holds_no_device_memory() -> Result<(), BoxError> {
    fake::reset();
    let folder = tiny::model()?;
    let (memory, device, governor) = open(Some(ByteSize::mib(64)))?;
    let routes = router(&memory, folder.path().to_owned(), &device)?;
    for _ in 0..2 {
        assert_eq!(reserved(&governor)?, ByteSize::ZERO);
        let launches = fake::calls(c"cuLaunchKernel");
        for _ in 0..8 {
            // Nothing is computed: the vectors are what the memory held.
            assert!([200, 500].contains(&post(&routes).await?));
        }
        assert!(fake::calls(c"cuLaunchKernel") > launches + 8 * 20, "the kernels of the encoder");
        assert!(!used(&governor)?.is_zero(), "the weights");
        until("the model is unloaded and its memory returned", || {
            Ok(reserved(&governor)?.is_zero())
        })
        .await?;
        assert!(memory.snapshot().resources.iter().all(|resource| !resource.loaded));
    }
    drop(routes);
    end(memory, device, governor);
    Ok(())
}

/// One after the other: a process has one `Memory`, and one fake.
#[tokio::test]
async fn candle_keeps_to_the_governors_limit_and_returns_what_is_idle() -> Result<(), BoxError> {
    a_limit_fails_candles_tensors_and_a_drop_makes_room().await?;
    a_model_that_does_not_fit_is_a_typed_error_and_leaves_nothing().await?;
    an_idle_service_holds_no_device_memory().await
}

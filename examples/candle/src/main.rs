//! `embedder FOLDER [ADDRESS]` serves the model in FOLDER (`config.json`, `tokenizer.json`,
//! `model.safetensors`) until SIGTERM or Ctrl-C.
//!
//! It computes on the CPU or, built with the feature `cuda`, on the first GPU.
//! `docs/ENGINES.md` says where to get a model and what the service does with memory.

use std::path::PathBuf;
use std::time::Duration;

use lowtide::{BoxError, Memory};
use tokio::net::TcpListener;
use tokio::runtime::Builder;

lowtide::global_allocator!(balanced);

fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("missing argument: the folder of the model")?;
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:8080".to_owned());
    // candle uses all cores for one request: more at once would only hold more memory.
    let mut runtime = Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).max_blocking_threads(2).enable_all().build()?;
    runtime.block_on(serve(folder.into(), address))
}

async fn serve(folder: PathBuf, address: String) -> Result<(), BoxError> {
    let memory = Memory::builder().prometheus()?.start()?;
    #[cfg(not(feature = "cuda"))]
    let device = candle_core::Device::Cpu;
    #[cfg(feature = "cuda")]
    let decay = lowtide::decay::DecayTime::from_millis(5_000);
    #[cfg(feature = "cuda")]
    let (device, _governor) = lowtide_candle::cuda::open(&memory, None, decay)?;
    let routes = lowtide_candle::service::router(&memory, folder, &device)?;
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let server = axum::serve(listener, routes).with_graceful_shutdown(memory.terminated()?);
    memory.serve(server, Duration::from_secs(10)).await
}

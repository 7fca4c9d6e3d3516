//! The service under comparison: parses JSON bodies to `serde_json::Value` and counts the values.
//!
//! The handler is the same in each setup. The setups differ in jemalloc's settings, which the
//! parent process passes in a variable, and in the layer in front of the handler.

use std::net::Ipv4Addr;
use std::time::Duration;

use axum::extract::DefaultBodyLimit;
use axum::{Json, Router, routing::post};
use clap::ValueEnum as _;
use lowtide::heap::HeapProfile;
use lowtide::{BoxError, Memory};
use serde_json::Value;
use tokio::net::TcpListener;
use tower::limit::GlobalConcurrencyLimitLayer;

use crate::LIMIT;

/// The longest body that the service accepts.
const BODY_MAX: usize = 8 << 20;
/// Concurrent requests of [`Setup::Concurrency`].
const CONCURRENCY: usize = 8;
/// The duration of the handler's call to a database, which it simulates. The parsed value is in
/// memory until then.
const CALL: Duration = Duration::from_millis(20);

/// A way to keep the service below its memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Setup {
    /// jemalloc returns unused memory after one second. Every request is served.
    Jemalloc,
    /// The same, and a fixed number of requests run at once. The others wait.
    Concurrency,
    /// lowtide's heap profile and admission by bytes.
    Lowtide,
}

impl Setup {
    /// Its name in figures and arguments.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Its name in the table.
    pub(crate) fn title(self) -> String {
        match self {
            Self::Concurrency => format!("jemalloc, {CONCURRENCY} at once"),
            _ => self.name(),
        }
    }

    /// jemalloc's settings, which it reads before `main`.
    pub(crate) fn jemalloc_settings(self) -> String {
        match self {
            Self::Lowtide => HeapProfile::Balanced.conf().to_string_lossy().into_owned(),
            _ => "background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0".to_owned(),
        }
    }
}

/// Serves until standard input ends. Prints the address first.
pub(crate) fn serve(setup: Setup) -> Result<(), BoxError> {
    let routes =
        Router::new().route("/", post(count_values)).layer(DefaultBodyLimit::max(BODY_MAX));
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let routes = match setup {
        Setup::Jemalloc => routes,
        Setup::Concurrency => routes.layer(GlobalConcurrencyLimitLayer::new(CONCURRENCY)),
        Setup::Lowtide => {
            runtime
                .on_thread_start(lowtide::memory::on_thread_start)
                .on_thread_park(lowtide::heap::on_thread_park);
            let memory = Memory::builder().memory_limit(LIMIT).start()?;
            routes.layer(memory.layer())
        }
    };
    let runtime = runtime.enable_all().build()?;
    let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
    println!("{}", listener.local_addr()?);
    runtime.spawn(async move { axum::serve(listener, routes).await });
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

async fn count_values(Json(value): Json<Value>) -> String {
    tokio::time::sleep(CALL).await;
    count(&value).to_string()
}

fn count(value: &Value) -> usize {
    let inner = match value {
        Value::Array(values) => values.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    };
    inner + 1
}

//! A proxy inside this process: without memory for what only passes through, with it for what is
//! admitted, and the ways to fill its budget.
//!
//! Invariant: at most one managed proxy at a time, since a process has one `Memory`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Uri;
use lowtide::clock::ManualClock;
use lowtide::memory::{Builder, StartError};
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Budget, Cost, Permit};
use tokio::sync::{Mutex, MutexGuard};

use super::wire::{Message, PATIENCE, Upstream, Wire, until, within};
use crate::app::{self, Options, Running};
use crate::model::Settings;

/// Weights that are made in no time; large enough that few n-grams share a row.
pub(crate) const WEIGHTS: ByteSize = ByteSize::mib(2);

/// Held by each test that runs a managed proxy.
static STAGE: Mutex<()> = Mutex::const_new(());

/// Returns `true` if this process runs this test alone, so that the heap is its own. If not, starts
/// such a process and fails as it does.
#[expect(clippy::disallowed_methods, reason = "how this process knows that it is alone")]
pub(crate) fn alone(test: &str) -> bool {
    const ALONE: &str = "PROXY_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let output = std::process::Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", test, "--nocapture"])
        .env(ALONE, "1")
        .stdin(std::process::Stdio::null())
        .output()
        .expect("it runs");
    let [text, errors] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    assert!(output.status.success(), "{text}{errors}");
    assert!(text.contains("1 passed"), "it ran");
    false
}

/// Waits for one's turn with the process's memory.
pub(crate) async fn stage() -> MutexGuard<'static, ()> {
    STAGE.lock().await
}

/// A proxy that passes everything on to this upstream and manages nothing.
pub(crate) async fn plain(upstream: &Upstream) -> Running {
    to(upstream.uri("")).await
}

/// A proxy that passes everything on to this address and manages nothing.
pub(crate) async fn to(upstream: Uri) -> Running {
    unmanaged(Options { upstream: Some(upstream), ..Options::default() }).await
}

/// A proxy that manages nothing.
pub(crate) async fn unmanaged(options: Options) -> Running {
    let model = Settings { weights: WEIGHTS, ..options.model };
    let options = Options { model, ..options };
    app::start(options, None, || "metrics 1\n".to_owned()).await.expect("the proxy starts")
}

/// A proxy whose memory is managed and whose time the test owns.
#[derive(Debug)]
pub(crate) struct Managed {
    pub(crate) running: Option<Running>,
    pub(crate) at: SocketAddr,
    pub(crate) memory: Memory,
    pub(crate) clock: Arc<ManualClock>,
    _stage: MutexGuard<'static, ()>,
}

impl Managed {
    /// With a limit of 1 GiB and an upstream of its own.
    pub(crate) async fn new() -> Self {
        Self::with(Options::default(), |builder| builder).await
    }

    pub(crate) async fn with(options: Options, set: impl Fn(Builder) -> Builder) -> Self {
        let stage = stage().await;
        let clock = Arc::new(ManualClock::new());
        // No tick comes while the clock stands still, and so no deadline passes.
        let builder = || {
            let builder = Memory::builder().memory_limit(ByteSize::gib(1)).clock(clock.clone());
            builder.max_wait(Duration::ZERO)
        };
        let mut started = None;
        // That of a test that failed is dropped a little after its turn has ended.
        until("no other memory runs", || match set(builder()).start() {
            Err(StartError::AlreadyStarted) => false,
            memory => {
                started = Some(memory.expect("memory starts"));
                true
            }
        })
        .await;
        let memory = started.expect("it started");
        // The first samples are taken; no other comes while the clock stands still.
        assert!(clock.wait_for_waiters(2, PATIENCE), "both threads are idle");
        let model = Settings { weights: WEIGHTS, ..options.model };
        let options = Options { model, ..options };
        let running = app::start(options, Some(memory.clone()), || "metrics 1\n".to_owned())
            .await
            .expect("the proxy starts");
        Self { at: running.address, running: Some(running), memory, clock, _stage: stage }
    }

    pub(crate) fn running(&self) -> &Running {
        self.running.as_ref().expect("not ended yet")
    }

    /// Returns the bytes that requests have reserved; zero if all of them are done.
    pub(crate) fn reserved(&self) -> ByteSize {
        self.memory.admission().ledger(Budget::Host).reserved()
    }

    pub(crate) fn held(&self) -> u64 {
        self.memory.admission().stats().held()
    }

    /// Books all but `spare` and a little; requests fit again when what it gives is dropped.
    pub(crate) fn fill(&self, spare: ByteSize) -> Vec<Permit> {
        let admission = self.memory.admission();
        let _spare = admission.try_admit(Cost::host(spare)).expect("it is empty");
        let mut permits = Vec::new();
        let mut size = ByteSize::gib(1);
        while size >= ByteSize::kib(1) {
            match admission.try_admit(Cost::host(size)) {
                Ok(permit) => permits.push(permit),
                Err(_) => size = ByteSize::new(size.get() / 2),
            }
        }
        permits
    }

    /// Ends it in order, and says that nothing is left.
    pub(crate) async fn end(mut self) {
        until("no request is held", || self.held() == 0).await;
        let running = self.running.take().expect("not ended yet");
        assert!(running.stop(PATIENCE).await, "all connections end");
        let memory = self.memory.clone();
        // The clock stands still, so what is to be waited for is given no time.
        let ended = tokio::task::spawn_blocking(move || memory.shutdown_blocking(Duration::ZERO));
        let report = within("the memory ends", ended).await.expect("no panic");
        assert!(report.is_clean(), "{report}");
    }
}

/// Sends one request on a connection of its own, and reads the answer.
pub(crate) async fn ask(to: SocketAddr, request: impl AsRef<[u8]>) -> Message {
    let mut wire = Wire::connect(to).await;
    wire.send(request.as_ref()).await;
    let method = String::from_utf8_lossy(request.as_ref());
    wire.answer_to(method.split(' ').next().unwrap_or_default()).await
}

pub(crate) async fn get(to: SocketAddr, path: &str) -> Message {
    ask(to, format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).await
}

/// A POST with its length announced.
pub(crate) fn post(path: &str, kind: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Asks for embeddings of these texts.
pub(crate) async fn embed(to: SocketAddr, texts: &[&str]) -> Message {
    let body = serde_json::json!({ "texts": texts }).to_string();
    ask(to, post("/embed", "application/json", body)).await
}

//! The handlers, each of which waits where its request holds most.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, post};
use axum::{Json, Router};
use futures_util::stream;
use http::header::CONTENT_LENGTH;
use http_body_util::BodyExt as _;
use lowtide::ByteSize;
use lowtide::service::{RequestPermit, scope, scope_blocking};
use tokio::sync::{mpsc, oneshot, watch};

use crate::cases::MIB;

/// The pieces of a streamed answer.
const PIECE: usize = 256 << 10;

type Block = Vec<u8>;

/// What handlers and the measuring task share.
#[derive(Clone)]
pub(crate) struct Stage {
    inner: Arc<Inner>,
}

struct Inner {
    /// Requests that wait.
    waiting: AtomicUsize,
    /// `true` when they may go on.
    opened: watch::Sender<bool>,
    /// The permits of all requests.
    permits: Mutex<Vec<RequestPermit>>,
    /// What others hold.
    given: mpsc::UnboundedSender<Block>,
    cache: Mutex<VecDeque<Block>>,
    /// Another task allocates a block and sends it.
    producer: mpsc::UnboundedSender<oneshot::Sender<Block>>,
    constant: Bytes,
}

impl Stage {
    /// Returns a stage, and the tasks that take memory from requests and give it to them.
    pub(crate) fn new() -> Self {
        let (given, mut taken) = mpsc::unbounded_channel();
        let (producer, mut wanted) = mpsc::unbounded_channel::<oneshot::Sender<Block>>();
        tokio::spawn(async move {
            let mut held = Vec::new();
            while let Some(block) = taken.recv().await {
                held.push(block);
            }
        });
        tokio::spawn(async move {
            while let Some(to) = wanted.recv().await {
                let _ = to.send(filled(8 * MIB));
            }
        });
        let inner = Inner {
            waiting: AtomicUsize::new(0),
            opened: watch::Sender::new(false),
            permits: Mutex::default(),
            given,
            cache: Mutex::default(),
            producer,
            constant: Bytes::from(filled(20 * MIB)),
        };
        Self { inner: Arc::new(inner) }
    }

    pub(crate) fn waiting(&self) -> usize {
        self.inner.waiting.load(Ordering::Acquire)
    }

    pub(crate) fn open(&self) {
        self.inner.opened.send_replace(true);
    }

    pub(crate) fn permits(&self) -> Vec<RequestPermit> {
        self.inner.permits.lock().expect("no panic").clone()
    }

    /// Notes that a request holds most now.
    fn arrive(&self) {
        if let Some(permit) = RequestPermit::current() {
            self.inner.permits.lock().expect("no panic").push(permit);
        }
        self.inner.waiting.fetch_add(1, Ordering::Release);
    }

    async fn wait(&self) {
        self.arrive();
        let mut opened = self.inner.opened.subscribe();
        let _ = opened.wait_for(|opened| *opened).await;
    }
}

fn filled(bytes: usize) -> Block {
    black_box(vec![7; bytes])
}

pub(crate) fn routes(stage: Stage) -> Router {
    Router::new()
        .route("/hello", any(hello))
        .route("/drain", post(drain))
        .route("/collect", post(collect))
        .route("/prepared", post(prepared))
        .route("/growing", post(growing))
        .route("/frames", post(frames))
        .route("/json", post(json))
        .route("/pass", post(pass))
        .route("/pushes", any(pushes))
        .route("/transient", any(transient))
        .route("/churn", any(churn))
        .route("/blocking", any(blocking))
        .route("/tasks", any(tasks))
        .route("/given", any(given))
        .route("/taken", any(taken))
        .route("/cached", any(cached))
        .route("/answer", any(answer))
        .route("/answer_constant", any(answer_constant))
        .route("/stream", any(streamed))
        .route("/stream_small", any(streamed_small))
        .layer(DefaultBodyLimit::disable())
        .with_state(stage)
}

async fn hello(State(stage): State<Stage>) {
    stage.wait().await;
}

async fn next(body: &mut Body) -> Option<Bytes> {
    body.frame().await?.ok()?.into_data().ok()
}

async fn drain(State(stage): State<Stage>, mut body: Body) {
    while next(&mut body).await.is_some() {}
    stage.wait().await;
}

async fn collect(State(stage): State<Stage>, body: Body) {
    let whole = body.collect().await.map(|body| body.to_bytes());
    stage.wait().await;
    drop(whole);
}

async fn prepared(State(stage): State<Stage>, request: Request) {
    let length = request.headers()[CONTENT_LENGTH].to_str().expect("text");
    read(&stage, Vec::with_capacity(length.parse().expect("a number")), request).await;
}

async fn growing(State(stage): State<Stage>, request: Request) {
    read(&stage, Vec::new(), request).await;
}

async fn read(stage: &Stage, mut whole: Block, request: Request) {
    let mut body = request.into_body();
    while let Some(frame) = next(&mut body).await {
        whole.extend_from_slice(&frame);
    }
    drop(body);
    stage.wait().await;
    black_box(whole);
}

async fn frames(State(stage): State<Stage>, mut body: Body) {
    let mut kept = Vec::new();
    while let Some(frame) = next(&mut body).await {
        kept.push(frame);
    }
    stage.wait().await;
    drop(kept);
}

async fn json(State(stage): State<Stage>, Json(value): Json<serde_json::Value>) {
    stage.wait().await;
    drop(value);
}

/// Waits when the body has passed: before its end.
async fn pass(State(stage): State<Stage>, body: Body) -> Response {
    let pieces = stream::unfold((body, Some(stage)), |(mut body, mut stage)| async {
        match next(&mut body).await {
            Some(frame) => Some((Ok::<_, Infallible>(frame), (body, stage))),
            None => {
                stage.take()?.wait().await;
                Some((Ok(Bytes::new()), (body, None)))
            }
        }
    });
    Body::from_stream(pieces).into_response()
}

async fn pushes(State(stage): State<Stage>) {
    let mut bytes = Vec::new();
    (0..20 * MIB).for_each(|_| bytes.push(7_u8));
    stage.wait().await;
    black_box(bytes);
}

async fn transient(State(stage): State<Stage>) {
    drop(filled(20 * MIB));
    stage.wait().await;
}

async fn churn(State(stage): State<Stage>) {
    (0..20).for_each(|_| drop(filled(MIB)));
    stage.wait().await;
}

fn block() -> Block {
    drop(filled(6 * MIB));
    filled(10 * MIB)
}

async fn blocking(State(stage): State<Stage>) {
    let block = tokio::task::spawn_blocking(scope_blocking(block)).await;
    stage.wait().await;
    drop(block);
}

/// All four hold 3 MiB each at the same time.
async fn part(all: Arc<tokio::sync::Barrier>) -> Block {
    let (kept, more) = (filled(2 * MIB), filled(MIB));
    all.wait().await;
    drop(more);
    kept
}

async fn tasks(State(stage): State<Stage>) {
    let all = Arc::new(tokio::sync::Barrier::new(4));
    let parts = std::array::from_fn(|_| tokio::spawn(scope(part(Arc::clone(&all)))));
    hold(&stage, parts).await;
}

async fn hold(stage: &Stage, parts: [tokio::task::JoinHandle<Block>; 4]) {
    let mut held = Vec::new();
    for part in parts {
        held.push(part.await);
    }
    stage.wait().await;
    drop(held);
}

async fn given(State(stage): State<Stage>) {
    let _ = stage.inner.given.send(filled(8 * MIB));
    if let Some(permit) = RequestPermit::current() {
        permit.release(ByteSize::of(8 * MIB));
    }
    stage.wait().await;
}

async fn taken(State(stage): State<Stage>) {
    let (to, from) = oneshot::channel();
    let _ = stage.inner.producer.send(to);
    let block = from.await;
    if let Some(permit) = RequestPermit::current() {
        permit.adopt(ByteSize::of(8 * MIB));
    }
    stage.wait().await;
    drop(block);
}

async fn cached(State(stage): State<Stage>) {
    stage.inner.cache.lock().expect("no panic").push_back(filled(4 * MIB));
    stage.wait().await;
}

async fn answer(State(stage): State<Stage>) -> Bytes {
    let whole = Bytes::from(filled(20 * MIB));
    stage.arrive();
    whole
}

async fn answer_constant(State(stage): State<Stage>) -> Bytes {
    stage.arrive();
    stage.inner.constant.clone()
}

async fn streamed(State(stage): State<Stage>) -> Response {
    stream_of(&stage, PIECE)
}

async fn streamed_small(State(stage): State<Stage>) -> Response {
    stream_of(&stage, 4 << 10)
}

fn stream_of(stage: &Stage, piece: usize) -> Response {
    stage.arrive();
    let piece = move |_| Ok::<_, Infallible>(Bytes::from(filled(piece)));
    Body::from_stream(stream::iter((0..20 * MIB / PIECE).map(piece))).into_response()
}

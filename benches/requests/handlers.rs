//! The handler, which waits where its request holds most.

use std::any::Any;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use axum::{Router, extract::DefaultBodyLimit};
use futures_util::stream;
use http::header::CONTENT_LENGTH;
use http_body_util::BodyExt as _;
use lowtide::ByteSize;
use lowtide::service::{RequestPermit, scope, scope_blocking};
use lowtide_core::sync::lock;
use tokio::sync::{mpsc, oneshot, watch};

use crate::accuracy::MIB;

/// The pieces of a streamed answer.
const PIECE: usize = 256 << 10;

type Block = Vec<u8>;

/// What the handler and the measuring task share.
pub(crate) struct Stage {
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
    pub(crate) fn new() -> Arc<Self> {
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
        Arc::new(Self {
            waiting: AtomicUsize::new(0),
            opened: watch::Sender::new(false),
            permits: Mutex::default(),
            given,
            cache: Mutex::default(),
            producer,
            constant: Bytes::from(filled(20 * MIB)),
        })
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    pub(crate) fn open(&self) {
        self.opened.send_replace(true);
    }

    pub(crate) fn permits(&self) -> Vec<RequestPermit> {
        lock(&self.permits).clone()
    }

    /// Notes that a request holds most now.
    fn arrive(&self) {
        lock(&self.permits).extend(RequestPermit::current());
        self.waiting.fetch_add(1, Ordering::Release);
    }

    async fn wait(&self) {
        self.arrive();
        let _ = self.opened.subscribe().wait_for(|opened| *opened).await;
    }
}

fn filled(bytes: usize) -> Block {
    black_box(vec![7; bytes])
}

pub(crate) fn routes(stage: Arc<Stage>) -> Router {
    let routes = Router::new().route("/{name}", any(handle)).layer(DefaultBodyLimit::disable());
    routes.with_state(stage)
}

async fn next(body: &mut Body) -> Option<Bytes> {
    body.frame().await?.ok()?.into_data().ok()
}

async fn handle(
    State(stage): State<Arc<Stage>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let length =
        request.headers().get(CONTENT_LENGTH).and_then(|text| text.to_str().ok()?.parse().ok());
    let body = request.into_body();
    match &*name {
        "pass" => return pass(stage, body),
        "answer" => {
            let whole = Bytes::from(filled(20 * MIB));
            stage.arrive();
            return whole.into_response();
        }
        "answer_constant" => {
            stage.arrive();
            return stage.constant.clone().into_response();
        }
        "stream" => return stream_of(&stage, PIECE),
        "stream_small" => return stream_of(&stage, 4 << 10),
        _ => {}
    }
    let held = held(&stage, &name, body, length.unwrap_or(0)).await;
    stage.wait().await;
    drop(black_box(held));
    Response::default()
}

/// Does a handler's work, and returns what it holds.
async fn held(stage: &Stage, name: &str, mut body: Body, length: usize) -> Box<dyn Any + Send> {
    let permit = RequestPermit::current();
    match name {
        "drain" => while next(&mut body).await.is_some() {},
        "collect" => return Box::new(body.collect().await.map(|body| body.to_bytes())),
        "prepared" | "growing" => {
            let mut whole = Vec::with_capacity(if name == "prepared" { length } else { 0 });
            while let Some(frame) = next(&mut body).await {
                whole.extend_from_slice(&frame);
            }
            return Box::new(whole);
        }
        "frames" => {
            let mut kept = Vec::new();
            while let Some(frame) = next(&mut body).await {
                kept.push(frame);
            }
            return Box::new(kept);
        }
        "json" => {
            let whole = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            return Box::new(serde_json::from_slice::<serde_json::Value>(&whole));
        }
        "pushes" => {
            let mut bytes = Vec::new();
            (0..20 * MIB).for_each(|_| bytes.push(7_u8));
            return Box::new(bytes);
        }
        "transient" => drop(filled(20 * MIB)),
        "churn" => (0..20).for_each(|_| drop(filled(MIB))),
        "blocking" => {
            let block = || {
                drop(filled(6 * MIB));
                filled(10 * MIB)
            };
            return Box::new(tokio::task::spawn_blocking(scope_blocking(block)).await);
        }
        "tasks" => {
            // All four hold 3 MiB each at the same time.
            let all = Arc::new(tokio::sync::Barrier::new(4));
            let part = async |all: Arc<tokio::sync::Barrier>| {
                let (kept, more) = (filled(2 * MIB), filled(MIB));
                all.wait().await;
                drop(more);
                kept
            };
            let parts: [_; 4] =
                std::array::from_fn(|_| tokio::spawn(scope(part(Arc::clone(&all)))));
            return Box::new(futures_util::future::join_all(parts).await);
        }
        "given" => {
            let _ = stage.given.send(filled(8 * MIB));
            permit.inspect(|permit| permit.release(ByteSize::of(8 * MIB)));
        }
        "taken" => {
            let (to, from) = oneshot::channel();
            let _ = stage.producer.send(to);
            let block = from.await;
            permit.inspect(|permit| permit.adopt(ByteSize::of(8 * MIB)));
            return Box::new(block);
        }
        "cached" => lock(&stage.cache).push_back(filled(4 * MIB)),
        _ => {}
    }
    Box::new(())
}

/// Waits when the body has passed: before its end.
fn pass(stage: Arc<Stage>, body: Body) -> Response {
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

fn stream_of(stage: &Stage, piece: usize) -> Response {
    stage.arrive();
    let piece = move |_| Ok::<_, Infallible>(Bytes::from(filled(piece)));
    Body::from_stream(stream::iter((0..20 * MIB / PIECE).map(piece))).into_response()
}

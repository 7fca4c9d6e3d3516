//! The clients: a child process, so that its memory does not count.

use std::convert::Infallible;
use std::io::Read as _;
use std::net::SocketAddr;

use bytes::Bytes;
use futures_util::stream;
use http::Request;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use lowtide::BoxError;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::cases::Upload;

/// Bytes that are written at a time.
const PIECE: usize = 64 << 10;

/// The protocol of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Protocol {
    Http1,
    Http2,
}

/// What the process does, as JSON on its command line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    /// The server's address.
    pub(crate) server: SocketAddr,
    pub(crate) path: String,
    pub(crate) protocol: Protocol,
    pub(crate) requests: usize,
    pub(crate) upload: Upload,
    /// Answers are read when the standard input ends.
    pub(crate) reads_late: bool,
}

/// Sends all requests at once, each on a connection of its own, and reads the answers.
#[tokio::main(flavor = "current_thread")]
pub(crate) async fn be(order: Order) -> Result<(), BoxError> {
    let body = body(order.upload);
    let (ended, end) = watch::channel(false);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        ended.send_replace(true);
    });
    let all: Vec<_> = (0..order.requests)
        .map(|_| tokio::spawn(ask(order.clone(), body.clone(), end.clone())))
        .collect();
    for one in all {
        one.await??;
    }
    Ok(())
}

async fn ask(order: Order, body: Bytes, mut end: watch::Receiver<bool>) -> Result<(), BoxError> {
    let method = if body.is_empty() { "GET" } else { "POST" };
    let request = Request::builder()
        .method(method)
        .uri(format!("http://{}/{}", order.server, order.path))
        .header(CONTENT_LENGTH, body.len())
        .header(CONTENT_TYPE, "application/json");
    let pieces: Vec<_> = (0..body.len())
        .step_by(PIECE)
        .map(|at| body.slice(at..body.len().min(at + PIECE)))
        .map(|piece| Ok::<_, Infallible>(Frame::data(piece)))
        .collect();
    let request = request.body(StreamBody::new(stream::iter(pieces)))?;
    let io = TokioIo::new(TcpStream::connect(order.server).await?);
    let mut answer = match order.protocol {
        Protocol::Http1 => {
            let (mut sender, connection) = http1::handshake(io).await?;
            tokio::spawn(connection);
            sender.send_request(request).await?
        }
        Protocol::Http2 => {
            let (mut sender, connection) = http2::handshake(TokioExecutor::new(), io).await?;
            tokio::spawn(connection);
            sender.send_request(request).await?
        }
    };
    if order.reads_late {
        end.wait_for(|ended| *ended).await?;
    }
    if !answer.status().is_success() {
        return Err(format!("/{}: {}", order.path, answer.status()).into());
    }
    while let Some(frame) = answer.frame().await {
        drop(frame?);
    }
    Ok(())
}

/// Returns a body of about this length.
pub(crate) fn body(upload: Upload) -> Bytes {
    let bytes = match upload {
        Upload::Nothing => Vec::new(),
        Upload::Letters(bytes) => vec![b'x'; bytes],
        Upload::Json(bytes) => document(bytes),
    };
    Bytes::from(bytes)
}

/// Returns JSON: records of five fields.
fn document(bytes: usize) -> Vec<u8> {
    let mut text = String::from("[");
    for id in 0_u32.. {
        if text.len() >= bytes {
            break;
        }
        let record = serde_json::json!({
            "id": id,
            "name": format!("customer {id}"),
            "score": f64::from(id % 1000) / 8.0,
            "tags": ["red", "blue"],
            "active": id % 2 == 0,
        });
        if id > 0 {
            text.push(',');
        }
        text.push_str(&record.to_string());
    }
    text.push(']');
    text.into_bytes()
}

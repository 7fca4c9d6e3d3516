//! Real connections on which a request ends early: a client reads a rejection that is sent before
//! its request has arrived, and one that reads nothing loses its connection.
#![cfg(all(feature = "tokio", target_os = "linux"))]

use std::convert::Infallible;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use lowtide::ByteSize;
use lowtide::service::{ConnectionBody, Connections, DRAIN_MAX, MemoryLayer, RequestBody};
use lowtide_admission::{Admission, Cost, RejectReason, RequestPhase};
use test_fork::test as fork_test;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer, ServiceExt};

use crate::polled::poll;
use crate::service_waiting::Bed;
use crate::support::PATIENCE;

const CLAIM: ByteSize = ByteSize::mib(24);
const UPLOAD: usize = 8 << 20;
const TICK: Duration = Duration::from_millis(10);

async fn within<F: Future>(what: &str, future: F) -> F::Output {
    let waited = tokio::time::timeout(PATIENCE, future).await;
    waited.unwrap_or_else(|_| panic!("never: {what}"))
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let mut look = tokio::time::interval(Duration::from_millis(1));
    let waited = async {
        while !condition() {
            look.tick().await;
        }
    };
    within(what, waited).await;
}

const RATE: ByteSize = ByteSize::kib(16);

/// A server whose handler collects its body and answers with its length, or with much, and whose
/// connections linger.
struct Server {
    at: SocketAddr,
    open: Arc<AtomicUsize>,
}

impl Server {
    async fn new(admission: &Admission) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let at = listener.local_addr().expect("bound");
        let layer = MemoryLayer::new(admission.clone(), |_: &Parts| Cost::host(CLAIM));
        let handler = async |request: Request<RequestBody<ConnectionBody<Incoming>>>| {
            if request.uri().path() == "/much" {
                return Ok(Response::new(Full::new(Bytes::from(vec![b'x'; 8 * UPLOAD]))));
            }
            let bytes = request.into_body().collect().await.map_or(0, |body| body.to_bytes().len());
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(bytes.to_string()))))
        };
        let service = layer.without_slow_start().with_min_data_rate(RATE, Duration::from_secs(10));
        let service = service.layer(tower::service_fn(handler));
        let mut listener = Connections::new(admission, 64).listen(listener);
        let open = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&open);
        tokio::spawn(async move {
            while let Ok((connection, stream, _)) = listener.accept().await {
                let (service, open) = (connection.service(service.clone()), Arc::clone(&count));
                open.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(async move {
                    let service = service_fn(move |request| service.clone().oneshot(request));
                    let served =
                        http1::Builder::new().serve_connection(TokioIo::new(stream), service);
                    tokio::select! {
                        _ = served => {}
                        () = connection.closed() => {}
                    }
                    open.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        Self { at, open }
    }

    fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// A client that has sent this head.
    async fn asks(&self, more: &str, length: u64) -> TcpStream {
        let mut client = TcpStream::connect(self.at).await.expect("connects");
        let head = format!("POST / HTTP/1.1\r\nhost: x\r\n{more}content-length: {length}\r\n\r\n");
        client.write_all(head.as_bytes()).await.expect("sent");
        client
    }
}

/// Reads the answer to its end.
async fn answer(client: &mut TcpStream) -> String {
    let mut answer = String::new();
    let read = within("an answer", client.read_to_string(&mut answer)).await;
    read.expect("the connection is not reset");
    answer
}

fn is_whole_rejection(answer: &str) {
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(answer.contains("retry-after: ") && answer.ends_with("}\n"), "{answer}");
}

/// The bug: the connection was reset, and the client saw that instead of 503.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_sends_all_of_its_body_first_reads_an_early_rejection() {
    let admission = Admission::with_limit(ByteSize::mib(64));
    let server = Server::new(&admission).await;
    let full = admission.try_admit(Cost::host(ByteSize::mib(60))).expect("fits");
    for _ in 0..5 {
        // Rejected at once, before the body is read: but this client does not wait for an answer.
        let mut client = server.asks("expect: 100-continue\r\n", UPLOAD as u64).await;
        let sent = within("it is read", client.write_all(&vec![b'x'; UPLOAD])).await;
        sent.expect("the connection is not reset");
        is_whole_rejection(&answer(&mut client).await);
        drop(client);
        until("the connection ends", || server.open() == 0).await;
    }
    drop(full);
}

/// The bug: as above, for a request that was suspended and for which there was no room later.
#[fork_test]
fn a_client_reads_a_rejection_in_the_middle_of_its_body() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let bed = Bed::new();
        let server = Server::new(bed.memory.admission()).await;
        let mut client = server.asks("", UPLOAD as u64).await;
        let (begin, rest) = (vec![b'x'; 32 << 10], vec![b'x'; UPLOAD - (32 << 10)]);
        client.write_all(&begin).await.expect("sent");
        let phase = || bed.memory.report().oldest_requests().first().map(|request| request.phase);
        until("it receives", || phase() == Some(RequestPhase::Receiving)).await;
        let full = bed.fill();
        let layer = MemoryLayer::new(bed.memory.admission().clone(), |_: &Parts| Cost::host(CLAIM));
        let idle = tower::service_fn(async |_: Request<RequestBody<Empty<Bytes>>>| {
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        });
        let waits = layer.without_slow_start().layer(idle).oneshot(Request::new(Empty::new()));
        let mut waits = Box::pin(waits);
        assert!(poll(&mut waits).is_pending());
        until("it is suspended", || {
            bed.clock.advance(TICK);
            bed.stats().suspended_total == 1
        })
        .await;
        let no_room = bed.fill();
        let sends = tokio::spawn(async move {
            client.write_all(&rest).await.expect("the connection is not reset");
            client
        });
        until("its time is over", || {
            bed.clock.advance(TICK);
            sends.is_finished()
        })
        .await;
        let mut client = sends.await.expect("no panic");
        is_whole_rejection(&answer(&mut client).await);
        drop((client, full, no_room, waits));
        until("the connection ends", || server.open() == 0 && bed.stats().held() == 0).await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_lingers_for_a_bounded_time_and_number_of_bytes() {
    let admission = Admission::with_limit(ByteSize::mib(64));
    let server = Server::new(&admission).await;
    admission.close();
    let mut silent = server.asks("expect: 100-continue\r\n", UPLOAD as u64).await;
    let text = answer(&mut silent).await;
    assert!(text.starts_with("HTTP/1.1 503 "), "{text}");
    until("a silent client loses its connection", || server.open() == 0).await;
    let mut endless = server.asks("", u64::MAX / 2).await;
    let (piece, mut sent) = (vec![b'x'; 1 << 20], 0);
    let error = loop {
        match within("it is read or reset", endless.write(&piece)).await {
            Ok(bytes) => sent += bytes as u64,
            Err(error) => break error.kind(),
        }
        assert!(sent < 2 * DRAIN_MAX.get(), "it is read on");
    };
    assert!(matches!(error, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
    until("it is closed", || server.open() == 0).await;
}

/// The bug: a client that read nothing of its response kept the permit as long as it liked, since
/// hyper asks the body for more only when it has room.
#[fork_test]
fn a_client_that_reads_nothing_of_its_response_loses_its_connection() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let bed = Bed::new();
        let server = Server::new(bed.memory.admission()).await;
        let mut client = TcpStream::connect(server.at).await.expect("connects");
        client.write_all(b"GET /much HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("sent");
        let phase = || bed.memory.report().oldest_requests().first().map(|request| request.phase);
        until("it is answered", || phase() == Some(RequestPhase::Answered)).await;
        until("its connection is closed", || {
            bed.clock.advance(10 * TICK);
            server.open() == 0 && bed.stats().held() == 0
        })
        .await;
        assert_eq!(bed.stats().rejected_total(RejectReason::SlowClient), 1);
        let mut sink = Vec::new();
        let read = within("the end", client.read_to_end(&mut sink)).await;
        assert_eq!(read.expect_err("cut").kind(), ErrorKind::ConnectionReset);
    });
}

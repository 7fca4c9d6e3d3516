//! The tower layer over real connections, with hyper as server and as client.
#![cfg(feature = "service")]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use lowtide::ByteSize;
use lowtide::service::{MemoryLayer, RequestBody};
use lowtide_admission::{Admission, Budget, Cost};
use lowtide_core::sync::lock;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tower::{Layer, service_fn};

const PATIENCE: Duration = Duration::from_secs(120);
const UPLOAD: usize = 8 << 20;

/// Each request costs 10 MiB, and one fits.
fn admission() -> Admission {
    let admission = Admission::new();
    admission.ledger(Budget::Host).set_measured(ByteSize::ZERO, ByteSize::mib(38));
    admission
}

fn layer(admission: &Admission) -> MemoryLayer {
    MemoryLayer::new(admission.clone(), |_: &http::request::Parts| Cost::host(ByteSize::mib(10)))
}

/// A server whose handler answers when the gate lets it.
async fn serve(admission: &Admission, gate: &Arc<Semaphore>) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let (admission, gate) = (admission.clone(), Arc::clone(gate));
    let handler = move |request: Request<RequestBody<Incoming>>| {
        let gate = Arc::clone(&gate);
        async move {
            let _turn = gate.acquire().await.expect("never closed");
            let bytes = request.into_body().collect().await.map_or(0, |body| body.to_bytes().len());
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(bytes.to_string()))))
        }
    };
    let service = layer(&admission).layer(service_fn(handler));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = TowerToHyperService::new(service.clone());
            let connection = hyper::server::conn::http1::Builder::new();
            tokio::spawn(connection.serve_connection(TokioIo::new(stream), service));
        }
    });
    address
}

/// Writes a whole request and then reads what comes: as a client does that does not look for an
/// answer while it still sends.
async fn upload(address: SocketAddr, bytes: usize) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let head = format!(
        "POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {bytes}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(&vec![b'x'; bytes]).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let mut look = tokio::time::interval(Duration::from_millis(1));
    let waited = tokio::time::timeout(PATIENCE, async {
        while !condition() {
            look.tick().await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("never: {what}"));
}

fn reserved(admission: &Admission) -> ByteSize {
    admission.ledger(Budget::Host).reserved()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_rejection_reset_the_connection_and_the_client_saw_an_error_instead_of_503() {
    let (admission, gate) = (admission(), Arc::new(Semaphore::new(0)));
    let address = serve(&admission, &gate).await;
    let first = tokio::spawn(upload(address, 10));
    until("the first is admitted", || admission.stats().held() == 1).await;
    for _ in 0..5 {
        let answer = tokio::time::timeout(PATIENCE, upload(address, UPLOAD)).await;
        let answer = answer.expect("it hangs").expect("no broken connection");
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        assert!(
            answer.contains("retry-after: ") && answer.contains("than is free now"),
            "{answer}"
        );
    }
    assert_eq!(admission.stats().held(), 1, "the first still waits");
    gate.add_permits(1);
    let answer = first.await.expect("no panic").expect("answered");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    until("nothing is booked", || reserved(&admission).is_zero()).await;
    let answer = upload(address, UPLOAD).await.expect("answered");
    assert!(answer.ends_with(&UPLOAD.to_string()), "it fits again: {answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_connection_is_kept_for_the_next_request() {
    let (admission, gate) = (admission(), Arc::new(Semaphore::new(10)));
    let address = serve(&admission, &gate).await;
    let held = admission.try_admit(Cost::host(ByteSize::mib(15))).expect("fits");
    let stream = TcpStream::connect(address).await.expect("connects");
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("no error");
    tokio::spawn(connection);
    let request = || Request::post("/").body(Full::new(Bytes::from(vec![0; UPLOAD])));
    let refused = sender.send_request(request().expect("valid")).await.expect("answered");
    assert_eq!(refused.status(), 503);
    let text = refused.into_body().collect().await.expect("whole").to_bytes();
    assert!(text.starts_with(b"{"));
    drop(held);
    sender.ready().await.expect("the connection is kept");
    let admitted = sender.send_request(request().expect("valid")).await.expect("answered");
    assert_eq!(admitted.status(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_frees_what_its_request_booked() {
    let (admission, gate) = (admission(), Arc::new(Semaphore::new(0)));
    let address = serve(&admission, &gate).await;
    let client = tokio::spawn(upload(address, 10));
    until("it is admitted", || admission.stats().held() == 1).await;
    assert_eq!(reserved(&admission), ByteSize::mib(10));
    client.abort();
    until("its booking ends", || reserved(&admission).is_zero()).await;
}

/// Sends until an answer begins, then no more, and reads the answer to its end: as curl and nginx
/// do. Gives the answer and how much was sent.
async fn upload_until_answered(address: SocketAddr, more: &str) -> (String, usize) {
    let mut stream = TcpStream::connect(address).await.expect("connects");
    let head = format!("POST / HTTP/1.1\r\nhost: x\r\n{more}content-length: {UPLOAD}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("sent");
    let (mut read, mut write) = stream.split();
    let (mut answer, mut sent) = (Vec::new(), 0);
    let waits = !more.is_empty();
    let block = vec![b'x'; 64 << 10];
    while answer.is_empty() && (waits || sent < UPLOAD) {
        tokio::select! {
            biased;
            count = read.read_buf(&mut answer) => {
                assert_ne!(count.expect("no broken connection"), 0);
            }
            count = write.write(&block[..block.len().min(UPLOAD - sent)]), if !waits => {
                sent += count.expect("no broken connection");
            }
        }
    }
    loop {
        let text = String::from_utf8_lossy(&answer);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.expect("a length").parse().expect("a number");
            if body.len() >= length {
                return (text.into_owned(), sent);
            }
        }
        assert_ne!(
            read.read_buf(&mut answer).await.expect("no broken connection"),
            0,
            "{answer:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_sends_no_more_once_it_is_answered_waited_for_the_text_for_ever() {
    let (admission, gate) = (admission(), Arc::new(Semaphore::new(1)));
    let address = serve(&admission, &gate).await;
    admission.close();
    let answer = tokio::time::timeout(PATIENCE, upload_until_answered(address, "")).await;
    let (answer, sent) = answer.expect("it hangs");
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.ends_with("}\n"), "{answer}");
    assert_eq!(sent, UPLOAD, "it was not told to stop half-way");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_asks_before_it_sends_is_refused_at_once() {
    let (admission, gate) = (admission(), Arc::new(Semaphore::new(1)));
    let address = serve(&admission, &gate).await;
    admission.close();
    let asks = upload_until_answered(address, "expect: 100-continue\r\n");
    let (answer, sent) = tokio::time::timeout(PATIENCE, asks).await.expect("it hangs");
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.ends_with("}\n"), "{answer}");
    assert_eq!(sent, 0);
}

/// The bug: while one poll lasted, its worker watched for I/O no more, the other one slept, and
/// nobody was served.
#[cfg(feature = "tokio")]
#[test_fork::test]
fn a_long_poll_does_not_keep_others_from_being_served() {
    let memory = lowtide::Memory::builder().detached().start().expect("starts");
    serve_beside_a_long_poll(&memory, &runtime_of_two(&Arc::default()));
}

/// The bug: only the first runtime of a process was served, also once it had ended, and was kept for
/// ever.
#[cfg(feature = "tokio")]
#[test_fork::test]
fn a_runtime_that_ended_is_dropped_and_the_next_one_is_served() {
    let memory = lowtide::Memory::builder().detached().start().expect("starts");
    let used = Arc::default();
    for _ in 0..2 {
        serve_beside_a_long_poll(&memory, &runtime_of_two(&used));
    }
    crate::support::until("both are dropped", || Arc::strong_count(&used) == 1);
}

/// Returns a runtime with two workers that holds `used` while it is there.
#[cfg(feature = "tokio")]
fn runtime_of_two(used: &Arc<()>) -> tokio::runtime::Runtime {
    let used = Arc::clone(used);
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(2).enable_all().on_thread_start(move || drop(Arc::clone(&used)));
    runtime.build().expect("a runtime")
}

/// Sends a request while another one's poll lasts, which ends only once that is served.
#[cfg(feature = "tokio")]
fn serve_beside_a_long_poll(memory: &lowtide::Memory, runtime: &tokio::runtime::Runtime) {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpStream;

    let (begun, has_begun) = mpsc::channel();
    let (served, is_served) = mpsc::channel();
    let is_served = Arc::new(Mutex::new(is_served));
    let served_meanwhile = Arc::clone(&is_served);
    let long = async move || {
        begun.send(()).expect("awaited");
        lock(&served_meanwhile).recv_timeout(PATIENCE).expect("meanwhile");
    };
    let short = async move || served.send(()).expect("awaited");
    let address = runtime.block_on(async {
        let app = axum::Router::new()
            .route("/long", axum::routing::get(long))
            .route("/short", axum::routing::get(short))
            .layer(memory.layer());
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let address = listener.local_addr().expect("bound");
        tokio::spawn(axum::serve(listener, app).into_future());
        address
    });
    // One of a single worker, as of a command, has none to wake, and does not take its place.
    let single = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    single.block_on(async { drop(memory.layer()) });
    let connect = |()| TcpStream::connect(address).expect("connects");
    let mut clients = [(), ()].map(connect);
    let ask = |client: &mut TcpStream, path: &str| {
        client.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes())
    };
    let answered = |client: &mut TcpStream| {
        let lines = BufReader::new(client).lines().map(|line| line.expect("answered"));
        let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
        assert_eq!(head[0], "HTTP/1.1 200 OK");
    };
    for client in &mut clients {
        ask(client, "/short").expect("sent");
        lock(&is_served).recv_timeout(PATIENCE).expect("served");
        answered(client);
    }
    let metrics = runtime.metrics();
    while (0..2).any(|worker| metrics.worker_park_unpark_count(worker).is_multiple_of(2)) {
        std::thread::yield_now();
    }
    let [first, second] = &mut clients;
    ask(first, "/long").expect("sent");
    has_begun.recv_timeout(PATIENCE).expect("it begins");
    ask(second, "/short").expect("sent");
    answered(second);
    answered(first);
}

//! Connections over real sockets: who gets a place, and what becomes of those that lose theirs.
#![cfg(feature = "tokio")]

use std::io::ErrorKind;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use bytes::Bytes;
use lowtide::ByteSize;
use lowtide::clock::ManualClock;
use lowtide::service::{
    Connection, ConnectionApp, ConnectionListener, ConnectionStream, Connections,
};
use lowtide_admission::Admission;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::polled::poll;

const GRACE: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(120);

struct Server {
    listener: ConnectionListener,
    clock: ManualClock,
    at: std::net::SocketAddr,
}

impl Server {
    async fn new(most: usize) -> Self {
        let clock = ManualClock::new();
        let admission = Admission::with_limit(ByteSize::mib(64));
        let connections = Connections::new(&admission, most).clock(Arc::new(clock.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("bound");
        Self { listener: connections.listen(listener), clock, at }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.at).await.expect("a connection")
    }

    async fn accept(&mut self) -> (Connection, ConnectionStream) {
        let accepted = timeout(PATIENCE, self.listener.accept()).await;
        let (connection, stream, _) = accepted.expect("in time").expect("accepted");
        (connection, stream)
    }
}

/// Polls the shutdown of a stream once.
fn shut_down(stream: &mut ConnectionStream) -> Poll<()> {
    poll(&mut Box::pin(stream.shutdown())).map(|ended| ended.expect("shut down"))
}

async fn is_closed(connection: &Connection) -> bool {
    timeout(Duration::ZERO, connection.closed()).await.is_ok()
}

#[tokio::test]
async fn a_client_that_reads_nothing_loses_its_place_to_another_and_is_reset() {
    let mut server = Server::new(2).await;
    let (mut unread, mut honest) = (server.connect().await, server.connect().await);
    let (first, mut its_stream) = server.accept().await;
    let (second, mut stream) = server.accept().await;
    // The kernel takes a part of it and then no more.
    let piece = vec![0; 1 << 20];
    while timeout(Duration::from_millis(50), its_stream.write_all(&piece)).await.is_ok() {}
    server.clock.advance(GRACE / 2);
    honest.write_all(b"x").await.expect("sent");
    stream.read_u8().await.expect("read");
    server.clock.advance(GRACE / 2);
    let _another = server.connect().await;
    let _third = server.accept().await;
    assert_eq!((is_closed(&first).await, is_closed(&second).await), (true, false));
    drop((first, its_stream));
    let mut sink = vec![0; 1 << 20];
    let error = loop {
        match timeout(PATIENCE, unread.read(&mut sink)).await.expect("in time") {
            Ok(0) => panic!("an orderly end: the kernel kept what was not read"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_connection_without_a_place_waits_for_one_and_is_then_refused() {
    let mut server = Server::new(4).await;
    let (mut clients, mut open) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        clients.push(server.connect().await);
        open.push(server.accept().await);
    }
    let move_all = |open: &[(Connection, ConnectionStream)]| {
        open.iter().for_each(|(connection, _)| connection.progress());
    };
    let mut refused = server.connect().await;
    let early = timeout(Duration::from_millis(50), server.listener.accept()).await;
    assert!(early.is_err(), "all places are taken");
    server.clock.advance(GRACE / 2);
    move_all(&open);
    let mut waits = server.connect().await;
    assert!(timeout(Duration::from_millis(50), server.listener.accept()).await.is_err());
    // The first waited for as long as it may, and those in its way have moved meanwhile.
    server.clock.advance(GRACE / 2);
    move_all(&open);
    let mut byte = [0];
    tokio::select! {
        read = refused.read(&mut byte) => assert!(matches!(read, Ok(0) | Err(_)), "{read:?}"),
        _ = server.accept() => panic!("all places are taken"),
    }
    open.pop();
    let (_second, mut stream) = server.accept().await;
    waits.write_all(b"x").await.expect("sent");
    assert_eq!(stream.read_u8().await.expect("read"), b'x');
}

/// The bug: it waited from when the listener last looked, and was refused up to 100 ms early.
#[tokio::test]
async fn a_connection_that_arrived_between_two_looks_was_refused_early() {
    let mut server = Server::new(1).await;
    let _first = server.connect().await;
    let (open, _stream) = server.accept().await;
    let mut accepting = Box::pin(server.listener.accept());
    assert!(poll(&mut accepting).is_pending());
    server.clock.advance(GRACE / 2);
    open.progress();
    let _second = TcpStream::connect(server.at).await.expect("a connection");
    let early = timeout(Duration::from_millis(50), &mut accepting).await;
    assert!(early.is_err(), "the place is taken");
    drop(accepting);
    server.clock.advance(GRACE / 2);
    let early = timeout(Duration::from_millis(50), server.listener.accept()).await;
    assert!(early.is_err(), "the place is taken");
    server.clock.advance(GRACE / 2);
    drop(server.accept().await);
    assert!(is_closed(&open).await);
}

#[tokio::test]
async fn a_connection_lingers_only_if_something_was_not_read() {
    let mut server = Server::new(2).await;
    let (mut client, _idle) = (server.connect().await, server.connect().await);
    let (_unread, mut stream) = server.accept().await;
    let (_read, mut its_stream) = server.accept().await;
    assert_eq!(shut_down(&mut its_stream), Poll::Ready(()));
    client.write_all(b"x").await.expect("sent");
    stream.get_ref().readable().await.expect("it arrives");
    assert_eq!(shut_down(&mut stream), Poll::Pending);
    drop(client);
    timeout(PATIENCE, stream.shutdown()).await.expect("in time").expect("its client is gone");
}

/// axum's server drops no connection by itself: its stream ends with an error.
#[tokio::test]
async fn a_connection_that_axum_serves_ends_when_its_place_is_needed() {
    let server = Server::new(1).await;
    let body = Bytes::from(vec![0; 16 << 20]);
    let app = Router::new()
        .route("/large", get(async move || body.clone()))
        .route("/hello", get(async || "hello"));
    let serving =
        tokio::spawn(async { axum::serve(server.listener, ConnectionApp::new(app)).await });
    let connect = || TcpStream::connect(server.at);
    let mut unread = connect().await.expect("a connection");
    unread.write_all(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("sent");
    unread.read_u8().await.expect("the answer begins");
    let mut other = connect().await.expect("a connection");
    other.write_all(b"GET /hello HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("sent");
    let mut answer = [0; 15];
    let mut read = Box::pin(other.read_exact(&mut answer));
    let served = async {
        while timeout(Duration::from_millis(10), &mut read).await.is_err() {
            server.clock.advance(GRACE / 10);
        }
    };
    timeout(PATIENCE, served).await.expect("the other gets its place");
    drop(read);
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
    let mut sink = vec![0; 1 << 20];
    let error = loop {
        match timeout(PATIENCE, unread.read(&mut sink)).await.expect("in time") {
            Ok(0) => panic!("an orderly end"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    serving.abort();
}

//! Clients that take and do not give: announced bodies that never come, unfinished heads, idle
//! connections. Each is ended, and what it held is there for others again.
//!
//! The timeouts of these proxies are short, so that they pass within the test; no time is asserted.

use std::time::Duration;

use lowtide::ByteSize;
use lowtide::admission::Level;
use tokio::task::JoinHandle;

use super::support::{Managed, WEIGHTS, ask, embed, get, post, unmanaged};
use super::wire::{PATIENCE, Upstream, Wire, until, within};
use crate::app::serve::{Limits, OPERATORS, connections_within};
use crate::app::{self, Options};
use crate::model::Settings;

const SHORT: Duration = Duration::from_millis(100);

async fn proxy(limits: Limits) -> Managed {
    Managed::with(Options { limits, ..Options::default() }, |builder| builder).await
}

fn short_of_bodies() -> Limits {
    Limits { body_timeout: SHORT, ..Options::default().limits }
}

/// Lets the time of the proxy's memory pass, ten times as fast as that of clients, until dropped.
struct Passing(JoinHandle<()>);

impl Passing {
    fn of(proxy: &Managed) -> Self {
        let clock = proxy.clock.clone();
        let mut each = tokio::time::interval(Duration::from_millis(1));
        Self(tokio::spawn(async move {
            loop {
                each.tick().await;
                clock.advance(Duration::from_millis(10));
            }
        }))
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn announce(path: &str, bytes: u64) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: here\r\ncontent-length: {bytes}\r\n\r\n")
}

/// The bug: who announced bodies and sent none held the whole allowance for ever.
#[tokio::test(flavor = "multi_thread")]
async fn announced_bodies_that_never_came_held_the_allowance_for_ever() {
    let proxy = proxy(short_of_bodies()).await;
    let passing = Passing::of(&proxy);
    for (path, start) in [("/words", ""), ("/words", "a word"), ("/embed", ""), ("/embed", "{")] {
        let mut clients = Vec::new();
        for _ in 0..4 {
            let mut client = Wire::connect(proxy.at).await;
            client.send(announce(path, 4_000_000) + start).await;
            clients.push(client);
        }
        for mut client in clients {
            let answer = client.answer().await;
            assert_eq!(answer.status(), 408, "{path}: {}", answer.text());
            assert!(answer.text().contains("client too slow"), "{path}: {}", answer.text());
            assert!(client.is_closed().await, "{path}: what would come is no request");
        }
        until("nothing is held", || proxy.held() == 0).await;
    }
    drop(passing);
    assert_eq!(ask(proxy.at, post("/words", "text/plain", "a")).await.status(), 200);
    proxy.end().await;
}

/// The bug: the body of a refused request was waited for as long as that of an admitted one.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_waited_for_ever_for_a_body_that_never_came() {
    let proxy = proxy(short_of_bodies()).await;
    let _passing = Passing::of(&proxy);
    // At the door, and behind it by the text service.
    for spare in [ByteSize::ZERO, ByteSize::mib(4)] {
        let permits = proxy.fill(spare);
        for path in ["/words", "/words?again"] {
            let mut client = Wire::connect(proxy.at).await;
            client.send(announce(path, 4_000_000)).await;
            let status = client.answer().await.status();
            assert!([408, 503].contains(&status), "{path}: {status}");
            assert!(client.is_closed().await);
        }
        until("nothing is held", || proxy.held() == permits.len() as u64).await;
    }
    proxy.end().await;
}

/// A timeout between two pieces alone would be paid with a byte at a time. The bug: it was, where
/// the length was not announced: each piece, of one byte, earned the whole patience back.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_comes_byte_by_byte_runs_out_of_credit() {
    // Long beside the pause between two bytes: a busy machine is not to end it by itself.
    let limits = Limits { body_timeout: 100 * SHORT, ..Options::default().limits };
    let proxy = proxy(limits).await;
    let _passing = Passing::of(&proxy);
    let chunked = "POST /words HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n";
    let announced = announce("/words", 4_000_000);
    for (head, piece) in [(announced.as_str(), "x"), (chunked, "1\r\nx\r\n")] {
        let mut client = Wire::connect(proxy.at).await;
        client.send(head).await;
        let (mut reader, mut writer) = client.0.into_inner().into_split();
        let drip = tokio::spawn(async move {
            let mut drop = tokio::time::interval(SHORT / 10);
            while tokio::io::AsyncWriteExt::write_all(&mut writer, piece.as_bytes()).await.is_ok() {
                drop.tick().await;
            }
        });
        let mut answer = [0; 12];
        let read = tokio::io::AsyncReadExt::read_exact(&mut reader, &mut answer);
        within("an answer", read).await.expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 408", "{head}");
        drop(reader);
        within("it is told", drip).await.expect("no panic");
        until("nothing is held", || proxy.held() == 0).await;
    }
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_stops_is_cut_off_and_frees_what_it_booked() {
    let proxy = proxy(short_of_bodies()).await;
    let _passing = Passing::of(&proxy);
    let mut client = Wire::connect(proxy.at).await;
    client
        .send("POST /echo HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
        .await;
    let answer = client.answer().await;
    assert!(!answer.whole, "{answer:?}");
    until("nothing is held", || proxy.held() == 0).await;
    proxy.end().await;
}

/// The bug: heads that were never finished, and idle connections, stayed for ever.
#[tokio::test(flavor = "multi_thread")]
async fn unfinished_heads_and_idle_connections_stayed_for_ever() {
    let proxy = proxy(Limits { head_timeout: SHORT, ..Options::default().limits }).await;
    for start in ["", "GET", "GET / HTTP/1.1\r\nhost: here\r\nx-long: "] {
        let mut client = Wire::connect(proxy.at).await;
        client.send(start).await;
        assert!(client.is_closed().await, "{start:?}");
    }
    let mut kept = Wire::connect(proxy.at).await;
    kept.send("GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n").await;
    assert_eq!(kept.answer().await.status(), 200);
    assert!(kept.is_closed().await, "idle after a request");
    proxy.end().await;
}

/// The bug: connections that did nothing took all descriptors, and nobody was well any more.
#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_without_number_kept_operators_out() {
    let limits = Limits { head_timeout: SHORT, connections: 16, ..Options::default().limits };
    let proxy = proxy(limits).await;
    let mut idle = Vec::new();
    // Two of them wait for a place, and two more may.
    for _ in 0..18 {
        let mut client = Wire::connect(proxy.at).await;
        client.send("GET / HTTP/1.1\r\n").await;
        idle.push(client);
    }
    assert_eq!(get(proxy.at, "/healthz").await.text(), "ok\n");
    drop(idle);
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_connections_are_served_than_there_are_places() {
    let limits = Limits { head_timeout: 4 * PATIENCE, connections: 2, ..Options::default().limits };
    let proxy = proxy(limits).await;
    let ask = "GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n";
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut client = Wire::connect(proxy.at).await;
        client.send(ask).await;
        assert_eq!(client.answer().await.status(), 200);
        open.push(client);
    }
    let mut waits = Wire::connect(proxy.at).await;
    waits.send(ask).await;
    let early = tokio::time::timeout(SHORT, waits.0.get_mut().readable()).await;
    assert!(early.is_err(), "answered, and both places were taken");
    open.pop();
    assert_eq!(waits.answer().await.status(), 200);
    drop((open, waits));
    proxy.end().await;
}

/// The bug: clients that had all connections, and were busy, had operators wait as well, and who
/// goes by `/healthz` restarted a service that was well.
#[tokio::test(flavor = "multi_thread")]
async fn clients_with_all_the_connections_had_operators_wait() {
    let limits = Limits { head_timeout: 4 * PATIENCE, connections: 2, ..Options::default().limits };
    let operators = Some(([127, 0, 0, 1], 0).into());
    let options = Options { limits, operators, ..Options::default() };
    let proxy = Managed::with(options, |builder| builder).await;
    let (clients, operators) = (proxy.at, proxy.running().operators);
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut client = Wire::connect(clients).await;
        client.send("GET / HTTP/1.1\r\nhost: here\r\n\r\n").await;
        assert_eq!(client.answer().await.status(), 200);
        open.push(client);
    }
    for path in ["/healthz", "/readyz", "/memory", "/metrics"] {
        assert_eq!(get(operators, path).await.status(), 200, "{path}");
    }
    // Their own are bounded too, and take none of the clients'.
    drop(open);
    let mut open = Vec::new();
    for _ in 0..OPERATORS {
        let mut operator = Wire::connect(operators).await;
        operator.send("GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n").await;
        assert_eq!(operator.answer().await.status(), 200);
        open.push(operator);
    }
    let mut waits = Wire::connect(operators).await;
    waits.send("GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n").await;
    let early = tokio::time::timeout(SHORT, waits.0.get_mut().readable()).await;
    assert!(early.is_err(), "answered, and all places were taken");
    assert_eq!(get(clients, "/").await.status(), 200);
    drop((open, waits));
    proxy.end().await;
}

/// The bug: the port of the clients answered what is for operators, verbs among it.
#[tokio::test]
async fn clients_were_answered_what_only_operators_are_to_know() {
    let upstream = Upstream::new().await;
    let options = Options {
        upstream: Some(upstream.uri("")),
        operators: Some(([127, 0, 0, 1], 0).into()),
        admin: true,
        model: Settings { weights: WEIGHTS, ..Options::default().model },
        ..Options::default()
    };
    let proxy = app::start(options, None, String::new).await.expect("the proxy starts");
    for path in ["/healthz", "/readyz", "/memory", "/metrics", "/memory/purge"] {
        let serve = async {
            let mut wire = upstream.accept().await;
            let seen = wire.request().await;
            wire.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 4\r\n\r\nmine")
                .await;
            seen.first
        };
        let (seen, answer) = tokio::join!(serve, get(proxy.address, path));
        assert_eq!((seen, answer.text()), (format!("GET {path} HTTP/1.1"), "mine".to_owned()));
    }
    for path in ["/", "/elsewhere", "/memory/purg"] {
        let answer = get(proxy.operators, path).await;
        assert_eq!(answer.status(), 404, "{path} went on");
        // The bug: its body was empty.
        let (text, expected) = (answer.text(), format!("no {path}: expected /healthz, "));
        assert!(text.contains(&expected) && text.contains(" /memory/purge, "), "{text}");
    }
    let embed = post("/embed", "application/json", "{}");
    assert_eq!(ask(proxy.operators, embed).await.status(), 404);
    let verb = "POST /memory/purge HTTP/1.1\r\nhost: localhost\r\nlowtide-admin: 1\r\n\r\n";
    let answer = ask(proxy.operators, verb).await;
    assert_eq!(answer.status(), 503, "heard, and no memory is managed here: {answer:?}");
}

/// The bug: a request to an upstream that hung held its connection, and what it booked, for ever.
#[tokio::test]
async fn an_upstream_that_hung_held_the_client_for_ever() {
    let upstream = Upstream::new().await;
    let (to, response_timeout) = (Some(upstream.uri("")), SHORT);
    let proxy = unmanaged(Options { upstream: to, response_timeout, ..Options::default() }).await;
    // It reads the request or does not, and answers nothing.
    for body in [0, 64 << 20] {
        let mut client = Wire::connect(proxy.address).await;
        client.send(announce("/", body)).await;
        let (reader, mut writer) = client.0.into_inner().into_split();
        let pour = tokio::spawn(async move {
            let piece = [b'x'; 1 << 16];
            for _ in 0..body / 65_536 {
                if tokio::io::AsyncWriteExt::write_all(&mut writer, &piece).await.is_err() {
                    break;
                }
            }
            writer
        });
        let mut at = upstream.accept().await;
        at.head().await.expect("a request");
        let mut answer = String::new();
        let mut reader = tokio::io::BufReader::new(reader);
        let read = tokio::io::AsyncBufReadExt::read_line(&mut reader, &mut answer);
        within("an answer", read).await.expect("an answer");
        assert_eq!(answer, "HTTP/1.1 504 Gateway Timeout\r\n", "{body}");
        drop((reader, at));
        within("it is told", pour).await.expect("no panic");
    }
    // It stops within its answer.
    let mut client = Wire::connect(proxy.address).await;
    client.send("GET / HTTP/1.1\r\nhost: here\r\n\r\n").await;
    let mut at = upstream.accept().await;
    at.request().await;
    at.send("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nstart").await;
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.whole, answer.text().as_str()), (200, false, "start"));
    assert!(at.is_closed().await, "and is not waited for any more");
}

/// The bug: requests to an upstream that hung held all connections, and no other was served.
#[tokio::test(flavor = "multi_thread")]
async fn requests_to_an_upstream_that_hung_kept_all_other_clients_out() {
    let upstream = Upstream::new().await;
    let limits = Limits { connections: 4, ..Options::default().limits };
    let options = Options { upstream: Some(upstream.uri("")), limits, ..Options::default() };
    let proxy = Managed::with(options, |builder| builder).await;
    let mut hung = Vec::new();
    for _ in 0..4 {
        let mut client = Wire::connect(proxy.at).await;
        client.send("GET / HTTP/1.1\r\nhost: here\r\n\r\n").await;
        hung.push((client, upstream.accept().await));
    }
    assert_eq!(embed(proxy.at, &["a word"]).await.status(), 200);
    let (mut last, _upstream) = hung.pop().expect("four of them");
    assert!(last.is_closed().await, "its place was given to another");
    drop(hung);
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_at_level_high_is_the_last_of_its_connection() {
    let proxy = Managed::new().await;
    let mut client = Wire::connect(proxy.at).await;
    for (level, end) in [(Level::Elevated, None), (Level::High, Some("close".to_owned()))] {
        proxy.memory.admission().set_level(level);
        client.send("GET / HTTP/1.1\r\nhost: here\r\n\r\n").await;
        let answer = client.answer().await;
        assert_eq!((answer.status(), answer.header("connection")), (200, end), "{level}");
    }
    assert!(client.is_closed().await);
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_is_ended_when_memory_is_short() {
    let proxy = Managed::new().await;
    let mut client = Wire::connect(proxy.at).await;
    client.send("GET /bytes/1073741824 HTTP/1.1\r\nhost: here\r\n\r\n").await;
    until("its request is held", || proxy.held() > 0).await;
    proxy.memory.admission().set_level(Level::High);
    until("it is ended, and what it held is free", || proxy.held() == 0).await;
    proxy.end().await;
}

/// The clock of the upstream stands still while the client is waited for.
#[tokio::test]
async fn a_slow_client_is_no_silent_upstream() {
    let upstream = Upstream::new().await;
    let (to, response_timeout) = (Some(upstream.uri("")), SHORT);
    let proxy = unmanaged(Options { upstream: to, response_timeout, ..Options::default() }).await;
    let mut client = Wire::connect(proxy.address).await;
    client.send(announce("/", 10)).await;
    let mut at = upstream.accept().await;
    at.head().await.expect("a request");
    let mut pause = tokio::time::interval(2 * SHORT);
    pause.tick().await;
    for piece in ["start", " rest"] {
        pause.tick().await;
        client.send(piece).await;
        assert_eq!(at.bytes(5).await, piece.as_bytes());
    }
    at.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    assert_eq!(client.answer().await.text(), "ok");
}

#[test]
fn connections_are_no_more_than_there_are_descriptors_for() {
    let limits = |files: &str| {
        format!("Limit  Soft Limit  Hard Limit  Units\nMax open files  {files}  9  files\n")
    };
    assert_eq!(connections_within(&limits("128")), Some(24));
    assert_eq!(connections_within(&limits("1024")), Some(300));
    assert_eq!(connections_within(&limits("8")), Some(1), "one, however few");
    assert_eq!(connections_within(&limits("unlimited")), None);
    assert_eq!(connections_within(""), None);
    let here = std::fs::read_to_string("/proc/self/limits").expect("a kernel that tells");
    assert!(here.contains("Max open files"), "{here}");
}

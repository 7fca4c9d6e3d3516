//! Bodies stream: large ones pass without being held, a slow reader slows the writer down, and a
//! body that breaks off on one side is broken on the other.
#![expect(clippy::print_stdout, reason = "what was measured stands in the test's output")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lowtide::ByteSize;
use lowtide_heap::HeapProbe;
use tokio::io::AsyncReadExt as _;

use super::support::{Managed, alone, ask, embed, get, plain};
use super::wire::{Upstream, Wire, until, within};
use crate::app::Options;

const LARGE: usize = 64 << 20;
const PIECE: &[u8] = &[b'.'; 64 << 10];
/// The growth of the heap that is allowed while 64 MiB pass: buffers of a few connections.
const GROWTH_MAX: ByteSize = ByteSize::mib(8);

/// Follows the live bytes of the heap.
struct Heap {
    probe: HeapProbe,
    start: ByteSize,
    peak: ByteSize,
}

impl Heap {
    fn new() -> Self {
        let probe = HeapProbe::new().expect("jemalloc");
        let start = probe.snapshot().expect("figures").live;
        Self { probe, start, peak: start }
    }

    fn look(&mut self) {
        self.peak = self.peak.max(self.probe.snapshot().expect("figures").live);
    }

    fn assert_bounded(mut self) {
        self.look();
        let grown = self.peak.saturating_sub(self.start);
        println!("the heap grew by {grown}");
        assert!(grown < GROWTH_MAX, "the heap grew by {grown}");
    }
}

/// The framings of a body: the header, then each piece's beginning and end, and the body's end.
const FRAMINGS: [(&str, &str, &str, &str); 2] = [
    ("content-length: 67108864", "", "", ""),
    ("transfer-encoding: chunked", "10000\r\n", "\r\n", "0\r\n\r\n"),
];

/// The end of a body in pieces.
const END: &[u8] = b"0\r\n\r\n";

/// Sends 64 MiB.
async fn pour(wire: &mut Wire, (_, begin, end, last): (&str, &str, &str, &str)) {
    let piece = [begin.as_bytes(), PIECE, end.as_bytes()].concat();
    for _ in 0..LARGE / PIECE.len() {
        wire.send(&piece).await;
    }
    wire.send(last).await;
}

/// Reads to the end of 64 MiB without keeping them, looking at the heap on the way.
async fn drain(wire: &mut Wire, framing: (&str, &str, &str, &str), heap: &mut Heap) {
    let mut buffer = vec![0; PIECE.len()];
    let (mut dots, mut read, mut last, mut tail) = (0, 0, 0, Vec::new());
    while dots < LARGE {
        let size = within("more", wire.0.read(&mut buffer)).await.expect("more");
        assert!(size > 0, "ended after {dots} bytes");
        #[expect(clippy::naive_bytecount, reason = "a few MiB")]
        let found = buffer[..size].iter().filter(|byte| **byte == b'.').count();
        dots += found;
        read += size;
        tail.extend_from_slice(&buffer[size.saturating_sub(END.len())..size]);
        tail.drain(..tail.len().saturating_sub(END.len()));
        if read - last > 1 << 20 {
            last = read;
            heap.look();
        }
    }
    assert_eq!(dots, LARGE);
    if framing.0.starts_with("transfer") {
        while !tail.ends_with(END) {
            tail.push(within("the end", wire.0.read_u8()).await.expect("the end"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_mebibytes_pass_each_way_in_either_framing_without_being_held() {
    if !alone(
        "proxy::streams::sixty_four_mebibytes_pass_each_way_in_either_framing_without_being_held",
    ) {
        return;
    }
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    for framing in FRAMINGS {
        let mut heap = Heap::new();
        let header = framing.0;
        let (mut at, mut client) = (None, Wire::connect(proxy.address).await);
        let serve = async {
            let at = at.insert(upstream.accept().await);
            let head = at.head().await.expect("a request");
            let (name, value) = header.split_once(": ").expect("a header");
            assert_eq!(head.header(name).as_deref(), Some(value), "the framing is kept");
            drain(at, framing, &mut heap).await;
            at.send(format!("HTTP/1.1 200 OK\r\n{header}\r\n\r\n")).await;
            pour(at, framing).await;
            heap
        };
        let ask = async {
            client.send(format!("PUT / HTTP/1.1\r\nhost: here\r\n{header}\r\n\r\n")).await;
            pour(&mut client, framing).await;
            assert_eq!(client.head().await.expect("an answer").status(), 200);
            let mut heap = Heap::new();
            drain(&mut client, framing, &mut heap).await;
            heap
        };
        let (up, down) = tokio::join!(serve, ask);
        up.assert_bounded();
        down.assert_bounded();
    }
}

/// Writes until nothing more is taken for a while, and says how much was; the rest stays to do.
async fn push_until_stuck(wire: &mut Wire, most: usize) -> usize {
    let sent = AtomicUsize::new(0);
    let push = async {
        while sent.load(Ordering::Relaxed) < most {
            let size = tokio::io::AsyncWriteExt::write(wire.0.get_mut(), PIECE).await;
            sent.fetch_add(size.expect("open"), Ordering::Relaxed);
        }
    };
    // A pause by chance ends this early, which makes the bound easier and never harder to keep.
    let stuck = async {
        let mut look = tokio::time::interval(Duration::from_millis(100));
        let (mut last, mut same) = (0, 0);
        while same < 3 {
            look.tick().await;
            let now = sent.load(Ordering::Relaxed);
            same = if now == last && now > 0 { same + 1 } else { 0 };
            last = now;
        }
    };
    within("it is stuck or done", async {
        tokio::select! { () = push => {}, () = stuck => {} }
    })
    .await;
    let sent = sent.into_inner();
    println!("{} were taken that nobody read", ByteSize::of(sent));
    sent
}

#[tokio::test(flavor = "multi_thread")]
async fn a_side_that_does_not_read_stops_the_side_that_writes() {
    const HUGE: usize = 256 << 20;
    /// The kernel's buffers of four sockets at their largest, and the proxy's own.
    const AHEAD_MAX: usize = 64 << 20;
    if !alone("proxy::streams::a_side_that_does_not_read_stops_the_side_that_writes") {
        return;
    }
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let length = format!("content-length: {HUGE}\r\n\r\n");

    let mut heap = Heap::new();
    let mut client = Wire::connect(proxy.address).await;
    client.send(format!("PUT / HTTP/1.1\r\nhost: here\r\n{length}")).await;
    let mut at = upstream.accept().await;
    at.head().await.expect("a request");
    let sent = push_until_stuck(&mut client, HUGE).await;
    assert!(sent < AHEAD_MAX, "the client got rid of {sent} bytes that nobody read");
    heap.look();
    let mut rest = client.0.into_inner();
    let pour = tokio::spawn(async move {
        let mut sent = sent;
        while sent < HUGE {
            let size = PIECE.len().min(HUGE - sent);
            within("read", tokio::io::AsyncWriteExt::write_all(&mut rest, &PIECE[..size])).await?;
            sent += size;
        }
        Ok::<_, std::io::Error>(rest)
    });
    let mut buffer = vec![0; PIECE.len()];
    let mut read = 0;
    while read < HUGE {
        let size = within("more", at.0.read(&mut buffer)).await.expect("more");
        assert!(size > 0, "ended after {read} bytes");
        read += size;
    }
    let mut client = Wire::new(pour.await.expect("no panic").expect("all of it is taken"));
    heap.assert_bounded();

    let heap = Heap::new();
    at.send(format!("HTTP/1.1 200 OK\r\n{length}")).await;
    assert_eq!(client.head().await.expect("an answer").status(), 200);
    let sent = push_until_stuck(&mut at, HUGE).await;
    assert!(sent < AHEAD_MAX, "the upstream got rid of {sent} bytes that nobody read");
    heap.assert_bounded();
}

#[tokio::test]
async fn each_part_of_a_body_goes_on_before_the_next_is_there() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let pieces = "transfer-encoding: chunked\r\n\r\n";
    let mut client = Wire::connect(proxy.address).await;
    client.send(format!("POST / HTTP/1.1\r\nhost: here\r\n{pieces}")).await;
    let mut at = upstream.accept().await;
    at.head().await.expect("a request");
    at.send(format!("HTTP/1.1 200 OK\r\n{pieces}")).await;
    // The answer is there while the request is still being written: each waits for the other.
    assert_eq!(client.head().await.expect("an answer").status(), 200);
    for turn in 0..5 {
        let piece = format!("6\r\nturn {turn}\r\n");
        client.send(&piece).await;
        assert_eq!(at.bytes(piece.len()).await, piece.as_bytes());
        at.send(&piece).await;
        assert_eq!(client.bytes(piece.len()).await, piece.as_bytes());
    }
    client.send("0\r\n\r\n").await;
    assert_eq!(at.bytes(5).await, b"0\r\n\r\n");
    at.send("0\r\n\r\n").await;
    assert_eq!(client.bytes(5).await, b"0\r\n\r\n");
}

#[tokio::test]
async fn trailers_pass_both_ways() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let pieces = "trailer: x-sum\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n";
    let serve = async {
        let mut wire = upstream.accept().await;
        let seen = wire.request().await;
        wire.send(format!("HTTP/1.1 200 OK\r\n{pieces}x-sum: down\r\n\r\n")).await;
        seen
    };
    let request =
        format!("POST / HTTP/1.1\r\nhost: h\r\nte: trailers\r\n{pieces}x-sum: up\r\n\r\n");
    let (seen, answer) = tokio::join!(serve, ask(proxy.address, request));
    let sum = |value: &str| vec![("x-sum".to_owned(), value.to_owned())];
    assert_eq!((seen.text().as_str(), seen.trailers.clone()), ("ok", sum("up")));
    assert_eq!(seen.header("te").as_deref(), Some("trailers"), "or no upstream would send any");
    assert_eq!((answer.text().as_str(), answer.trailers.clone()), ("ok", sum("down")));
}

#[tokio::test]
async fn an_upstream_that_dies_within_a_body_cuts_the_clients_off_too() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    for start in
        ["content-length: 10\r\n\r\nshort", "transfer-encoding: chunked\r\n\r\n5\r\nshort\r\n"]
    {
        let serve = async {
            let mut wire = upstream.accept().await;
            wire.request().await;
            wire.send(format!("HTTP/1.1 200 OK\r\n{start}")).await;
        };
        let request = ask(proxy.address, "GET / HTTP/1.1\r\nhost: here\r\n\r\n");
        let ((), answer) = tokio::join!(serve, request);
        assert_eq!((answer.status(), answer.whole), (200, false), "{start}: a clean end");
    }
}

#[tokio::test]
async fn an_answer_that_comes_before_the_request_was_read_gets_through() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let mut client = Wire::connect(proxy.address).await;
    client.send("PUT / HTTP/1.1\r\nhost: here\r\ncontent-length: 1000000\r\n\r\nthe start").await;
    let mut at = upstream.accept().await;
    at.head().await.expect("a request");
    at.send("HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno").await;
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.text().as_str()), (403, "no"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_ends_the_request_upstream_and_frees_what_it_booked() {
    let upstream = Upstream::new().await;
    let options = Options { upstream: Some(upstream.uri("")), ..Options::default() };
    let proxy = Managed::with(options, |builder| builder).await;
    for answered in ["", "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nstart"] {
        let mut client = Wire::connect(proxy.at).await;
        client.send("GET / HTTP/1.1\r\nhost: here\r\n\r\n").await;
        let mut at = upstream.accept().await;
        at.request().await;
        assert_eq!(proxy.held(), 1);
        at.send(answered).await;
        if !answered.is_empty() {
            client.head().await.expect("an answer");
            assert_eq!(proxy.held(), 1, "until the last byte of the answer");
        }
        drop(client);
        assert!(at.is_closed().await, "after {answered:?}");
        until("nothing is held", || proxy.held() == 0).await;
        assert_eq!(proxy.reserved(), ByteSize::ZERO);
    }
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_text_service_streams_what_it_is_sent_and_what_it_is_asked_for() {
    let proxy = Managed::new().await;
    let answer = ask(proxy.at, "GET /bytes/100000 HTTP/1.1\r\nhost: here\r\n\r\n").await;
    assert_eq!((answer.body.len(), answer.whole), (100_000, true));
    let body = Arc::new("x".repeat(1 << 20));
    let answer = ask(proxy.at, super::support::post("/echo", "text/plain", body.as_bytes())).await;
    assert_eq!((answer.text(), answer.whole), (body.to_string(), true));
    let answer = ask(proxy.at, super::support::post("/words", "text/plain", "b a B")).await;
    assert_eq!((answer.status(), answer.text().as_str()), (200, "3 words\n2 b\n1 a\n"));
    proxy.end().await;
}

/// The upstream's report is of the upstream: a balancer would take it for the proxy's.
#[tokio::test]
async fn load_reports_of_the_upstream_are_dropped() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let reports = "Endpoint-Load-Metrics: TEXT eps:1\r\nendpoint-load-metrics-bin: CQ==\r\n";
    let pieces = "trailer: x-sum\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n";
    let serve = async {
        let mut wire = upstream.accept().await;
        wire.request().await;
        let head = format!("HTTP/1.1 200 OK\r\nx-own: 1\r\n{reports}");
        wire.send(format!("{head}{pieces}x-sum: down\r\n{reports}\r\n")).await;
    };
    let request = "GET / HTTP/1.1\r\nhost: h\r\nte: trailers\r\n\r\n";
    let ((), answer) = tokio::join!(serve, ask(proxy.address, request));
    assert_eq!((answer.text().as_str(), answer.header("x-own").as_deref()), ("ok", Some("1")));
    for name in ["endpoint-load-metrics", "endpoint-load-metrics-bin"] {
        assert_eq!(answer.header(name), None, "in the head");
    }
    assert_eq!(answer.trailers, [("x-sum".to_owned(), "down".to_owned())]);
}

#[tokio::test]
async fn with_the_option_answers_carry_the_load_report_of_the_proxy() {
    let upstream = Upstream::new().await;
    for load_reports in [true, false] {
        let options =
            Options { upstream: Some(upstream.uri("")), load_reports, ..Options::default() };
        let proxy = Managed::with(options, |builder| builder).await;
        let serve = async {
            let mut wire = upstream.accept().await;
            wire.request().await;
            let report = "endpoint-load-metrics: TEXT mem_utilization:0.125\r\n";
            wire.send(format!("HTTP/1.1 200 OK\r\n{report}content-length: 2\r\n\r\nok")).await;
        };
        let at = proxy.running().address;
        let ((), answer) = tokio::join!(serve, get(at, "/x"));
        let report = answer.header("endpoint-load-metrics");
        assert!(report.as_deref() != Some("TEXT mem_utilization:0.125"), "of the upstream");
        let is_report = |report: &String| report.starts_with("TEXT mem_utilization:");
        assert_eq!(report.map(|report| is_report(&report)), load_reports.then_some(true));
        // The small service of /embed is of the proxy as well.
        let answer = embed(at, &["a text"]).await;
        assert_eq!(answer.header("endpoint-load-metrics").is_some(), load_reports);
        let answer = get(at, "/healthz").await;
        assert_eq!(answer.header("endpoint-load-metrics"), None, "for operators");
        proxy.end().await;
    }
}

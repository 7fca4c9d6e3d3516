//! Framing that is broken, contradicts itself, or announces what does not come: what reaches the
//! upstream is one whole request, or one that is visibly cut off, or none.

use lowtide::ByteSize;

use super::support::{Managed, ask, plain};
use super::wire::{Upstream, Wire, until};

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

#[tokio::test]
async fn two_framings_become_one() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let length = "content-length: 5\r\n";
    let pieces = "transfer-encoding: chunked\r\n";
    for framing in [[length, pieces], [pieces, length]] {
        let framing = framing.concat();
        let serve = async {
            let mut wire = upstream.accept().await;
            let seen = wire.request().await;
            wire.send(format!(
                "HTTP/1.1 200 OK\r\nconnection: close\r\n{framing}\r\nb\r\nten and one\r\n0\r\n\r\n"
            ))
            .await;
            seen
        };
        let request = format!(
            "POST / HTTP/1.1\r\nhost: here\r\n{framing}\r\n9\r\nfive plus\r\n0\r\n\r\n\
             GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n"
        );
        let client = async {
            let mut wire = Wire::connect(proxy.address).await;
            wire.send(&request).await;
            wire.answer().await
        };
        let (seen, answer) = tokio::join!(serve, client);
        assert_eq!((seen.text().as_str(), seen.whole), ("five plus", true), "{framing}");
        assert_eq!(seen.header("content-length"), None, "{framing}");
        assert_eq!((answer.text().as_str(), answer.whole), ("ten and one", true), "{framing}");
        assert_eq!(answer.header("content-length"), None, "{framing}");
    }
}

#[tokio::test]
async fn what_can_be_read_two_ways_is_refused_and_never_forwarded() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    for framing in [
        "content-length: 4\r\ncontent-length: 5",
        "content-length: +4",
        "content-length: -1",
        "content-length: 4, 5",
        "content-length: four",
        "content-length: 18446744073709551616",
        "transfer-encoding: gzip",
        "transfer-encoding: chunked, gzip",
        "transfer-encoding : chunked",
        "content-length: 4\r\n folded: yes",
    ] {
        let request = format!("POST / HTTP/1.1\r\nhost: here\r\n{framing}\r\n\r\nbody");
        let mut wire = Wire::connect(proxy.address).await;
        wire.send(request).await;
        assert_eq!(wire.answer().await.status(), 400, "{framing}");
        assert!(wire.is_closed().await, "{framing}: the rest cannot be trusted");
    }
    let old = "POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n";
    assert_eq!(ask(proxy.address, old).await.status(), 400, "HTTP/1.0 knows no such coding");
    // The first request that the upstream sees is the good one.
    let serve = async {
        let mut wire = upstream.accept().await;
        assert_eq!(wire.request().await.first, "GET /good HTTP/1.1");
        wire.send(OK).await;
    };
    let good = ask(proxy.address, "GET /good HTTP/1.1\r\nhost: here\r\n\r\n");
    assert_eq!(tokio::join!(serve, good).1.status(), 200);
}

/// The bug: a request that named no host, or two, was answered 200.
#[tokio::test]
async fn a_request_without_a_host_or_with_two_was_forwarded() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    for hosts in
        ["", "host: a\r\nhost: b\r\n", "host: a\r\nhost: a\r\n", "host:\r\n", "host: :1\r\n"]
            .into_iter()
            .chain(["host: user@a\r\n", "host: a b\r\n", "host: a/b\r\n"])
    {
        for path in ["/", "/healthz"] {
            let mut wire = Wire::connect(proxy.address).await;
            wire.send(format!("GET {path} HTTP/1.1\r\n{hosts}\r\n")).await;
            let answer = wire.answer().await;
            assert_eq!(answer.status(), 400, "{hosts:?}: {answer:?}");
            assert_eq!(answer.header("connection").as_deref(), Some("close"), "{hosts:?}");
            assert!(wire.is_closed().await, "{hosts:?}");
        }
    }
    let two = "GET /healthz HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n";
    assert_eq!(ask(proxy.address, two).await.status(), 400);
    // It need not be there in HTTP/1.0.
    assert_eq!(ask(proxy.address, "GET /healthz HTTP/1.0\r\n\r\n").await.status(), 200);
    // The first request that the upstream sees is the good one.
    let serve = async {
        let mut wire = upstream.accept().await;
        assert_eq!(wire.request().await.first, "GET /good HTTP/1.1");
        wire.send(OK).await;
    };
    let good = ask(proxy.address, "GET /good HTTP/1.1\r\nhost: [::1]:80\r\n\r\n");
    assert_eq!(tokio::join!(serve, good).1.status(), 200);
}

/// The bug: it was answered 502, and logged as a failure of the upstream.
#[tokio::test]
async fn a_broken_body_was_the_upstreams_fault() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let mut client = Wire::connect(proxy.address).await;
    let head = "POST / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n";
    client.send(format!("{head}5\r\nshort\r\n")).await;
    let mut wire = upstream.accept().await;
    wire.head().await.expect("a head");
    client.send("no size\r\n").await;
    let answer = client.answer().await;
    assert_eq!(answer.status(), 400, "{answer:?}");
    assert!(answer.text().contains("ended early"), "{answer:?}");
    assert!(client.is_closed().await, "the rest cannot be trusted");
}

#[tokio::test]
async fn a_request_that_ends_early_is_cut_off_for_the_upstream_too() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    for (framing, sent) in [
        ("content-length: 10", "short"),
        ("transfer-encoding: chunked", "5\r\nshort\r\n"),
        ("transfer-encoding: chunked", "ff\r\nshort"),
        ("transfer-encoding: chunked", "5\r\nshort\r\nno size\r\n"),
    ] {
        let mut client = Wire::connect(proxy.address).await;
        client.send(format!("POST / HTTP/1.1\r\nhost: here\r\n{framing}\r\n\r\n{sent}")).await;
        let mut wire = upstream.accept().await;
        let head = wire.head().await.expect("a head");
        assert!(head.first.starts_with("POST"), "{head:?}");
        drop(client);
        let mut rest = Vec::new();
        let read = tokio::io::AsyncReadExt::read_to_end(&mut wire.0, &mut rest);
        let _ = super::wire::within("the proxy closes", read).await;
        let rest = String::from_utf8_lossy(&rest);
        assert!(!rest.ends_with("0\r\n\r\n"), "{framing}: a clean end: {rest:?}");
        assert!(rest.len() < 10 + 6, "{framing}: {rest:?}");
    }
}

#[tokio::test]
async fn what_follows_a_body_is_the_next_request_and_not_part_of_it() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let serve = async {
        let mut wire = upstream.accept().await;
        let seen = wire.request().await;
        wire.send(OK).await;
        seen
    };
    let client = async {
        let mut wire = Wire::connect(proxy.address).await;
        wire.send("POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\nbodyand more\r\n\r\n")
            .await;
        (wire.answer().await.status(), wire.answer().await.status(), wire.is_closed().await)
    };
    let (seen, client) = tokio::join!(serve, client);
    assert_eq!((seen.text().as_str(), client), ("body", (200, 400, true)));
}

#[tokio::test]
async fn a_body_that_stops_short_frees_what_it_booked() {
    let proxy = Managed::new().await;
    for path in ["/embed", "/words", "/elsewhere"] {
        let before = proxy.reserved();
        let mut client = Wire::connect(proxy.at).await;
        client
            .send(format!(
                "POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n\
                 content-length: 100000\r\n\r\n{{\"texts\""
            ))
            .await;
        until("it is booked", || proxy.held() > 0 || path == "/elsewhere").await;
        drop(client);
        until("nothing is booked", || proxy.reserved() == before && proxy.held() == 0).await;
    }
    proxy.end().await;
}

#[tokio::test]
async fn a_length_that_another_framing_overrides_is_not_believed_when_booking() {
    let proxy = Managed::new().await;
    for path in ["/embed", "/words"] {
        let before = proxy.reserved();
        let mut client = Wire::connect(proxy.at).await;
        let piece = "x".repeat(3 << 20);
        client
            .send(format!(
                "POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n\
                 content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{piece}",
                piece.len()
            ))
            .await;
        // More than either books for a short body; what has come is booked 3 and 10 times over.
        let grown = before.saturating_add(ByteSize::mib(9 + 7));
        until("what arrives is booked", || proxy.reserved() >= grown).await;
        drop(client);
        until("nothing is booked", || proxy.reserved() == before && proxy.held() == 0).await;
    }
    proxy.end().await;
}

//! Parts of a message that pass through: targets, methods, statuses and headers, against an
//! upstream whose answers are written here. Bodies are in `streams`, broken framing in `lies`.

use super::support::{ask, get, plain, to};
use super::wire::{Upstream, Wire, within};

const OK: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok";

/// Asks through the proxy, lets the upstream answer this, and gives what each side saw.
async fn exchange(
    upstream: &Upstream,
    proxy: std::net::SocketAddr,
    request: &str,
    answer: &str,
) -> (super::wire::Message, super::wire::Message) {
    let serve = async {
        let mut wire = upstream.accept().await;
        let seen = wire.request().await;
        wire.send(answer).await;
        seen
    };
    tokio::join!(serve, ask(proxy, request))
}

#[tokio::test]
async fn path_and_query_arrive_as_they_were_sent() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    for target in [
        "/",
        "/a%2Fb/../c//d?x=%20&y=a+b&&z=",
        "//twice",
        "/?",
        "/x?",
        "/%E2%98%83;p=1?q=http://x/",
    ] {
        let request = format!("GET {target} HTTP/1.1\r\nhost: here\r\n\r\n");
        let (seen, answer) = exchange(&upstream, proxy.address, &request, OK).await;
        assert_eq!(seen.first, format!("GET {target} HTTP/1.1"));
        assert_eq!((answer.status(), answer.text().as_str()), (200, "ok"));
    }
    let request = "GET http://elsewhere:1/a?b HTTP/1.1\r\nhost: elsewhere:1\r\n\r\n";
    let (seen, _) = exchange(&upstream, proxy.address, request, OK).await;
    assert_eq!(seen.first, "GET /a?b HTTP/1.1", "the client does not choose the upstream");
    assert_eq!(seen.header("host"), Some(upstream.address.to_string()));
    let below = to(upstream.uri("/base/")).await;
    let (seen, _) =
        exchange(&upstream, below.address, "GET /a?b HTTP/1.1\r\nhost: h\r\n\r\n", OK).await;
    assert_eq!(seen.first, "GET /base/a?b HTTP/1.1");
}

#[tokio::test]
async fn methods_and_statuses_pass() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE", "HEAD"] {
        let request = format!("{method} /x HTTP/1.1\r\nhost: here\r\n\r\n");
        let head = OK.strip_suffix("ok").expect("a body");
        let written = if method == "HEAD" { head } else { OK };
        let (seen, answer) = exchange(&upstream, proxy.address, &request, written).await;
        assert_eq!((seen.first, answer.status()), (format!("{method} /x HTTP/1.1"), 200));
        assert_eq!(answer.header("content-length").as_deref(), Some("2"), "{method}");
    }
    let request = "OPTIONS * HTTP/1.1\r\nhost: here\r\n\r\n";
    let (seen, answer) = exchange(&upstream, proxy.address, request, OK).await;
    assert_eq!((seen.first.as_str(), answer.status()), ("OPTIONS * HTTP/1.1", 200));
    for status in [201, 206, 301, 307, 404, 418, 429, 500, 503, 599] {
        let request = "GET / HTTP/1.1\r\nhost: here\r\n\r\n";
        let written = format!(
            "HTTP/1.1 {status} So\r\nlocation: http://elsewhere/\r\nx-own: 1\r\nx-own: 2\r\n\
             connection: close\r\ncontent-length: 2\r\n\r\nok"
        );
        let (_, answer) = exchange(&upstream, proxy.address, request, &written).await;
        assert_eq!((answer.status(), answer.text().as_str()), (status, "ok"));
        let location = answer.header("location");
        assert_eq!(location.as_deref(), Some("http://elsewhere/"), "passed, not followed");
        assert_eq!(answer.header("x-own").as_deref(), Some("1, 2"));
    }
}

#[tokio::test]
async fn answers_without_a_body_get_no_length_that_nobody_sent() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    for (method, status) in [("HEAD", 200), ("GET", 204), ("GET", 304)] {
        let request = format!("{method} / HTTP/1.1\r\nhost: here\r\n\r\n");
        for length in [None, Some("content-length: 123\r\n")] {
            if status == 204 && length.is_some() {
                continue; // must not be there at all (RFC 9110, 8.6)
            }
            let written = format!(
                "HTTP/1.1 {status} So\r\netag: \"1\"\r\n{}connection: close\r\n\r\n",
                length.unwrap_or_default()
            );
            let serve = async {
                let mut wire = upstream.accept().await;
                wire.request().await;
                wire.send(written).await;
            };
            let ask = async {
                let mut wire = Wire::connect(proxy.address).await;
                wire.send(&request).await;
                let answer = wire.answer_to(method).await;
                // The connection goes on: no stray body stands in it.
                wire.send("GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n").await;
                (answer, wire.answer().await)
            };
            let ((), (answer, next)) = tokio::join!(serve, ask);
            assert_eq!((answer.status(), next.text().as_str()), (status, "ok\n"));
            assert_eq!(answer.header("etag").as_deref(), Some("\"1\""));
            let got = answer.header("content-length");
            // It may be left out of a 304 (RFC 9110, 15.4.5), as the server library does.
            let expected = length.filter(|_| status != 304).map(|_| "123");
            assert_eq!(got.as_deref(), expected, "{method} {status}");
        }
    }
}

#[tokio::test]
async fn headers_of_one_connection_are_dropped_and_all_others_pass() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let request = "GET / HTTP/1.1\r\nhost: here\r\nconnection: keep-alive, X-Mine\r\n\
                   connection: x-other\r\nx-mine: 1\r\nx-other: 1\r\nkeep-alive: timeout=5\r\n\
                   proxy-connection: keep-alive\r\nproxy-authorization: Basic eA==\r\n\
                   te: gzip\r\nauthorization: Bearer t\r\nx-own: a\r\nx-own: b\r\n\
                   cookie: c=d\r\n\r\n";
    let answer = "HTTP/1.1 200 OK\r\nconnection: x-hidden, close\r\nx-hidden: 1\r\n\
                  keep-alive: timeout=5\r\nproxy-authenticate: Basic\r\nset-cookie: a=1\r\n\
                  set-cookie: b=2\r\ncontent-length: 0\r\n\r\n";
    let (seen, answer) = exchange(&upstream, proxy.address, request, answer).await;
    for name in [
        "connection",
        "x-mine",
        "x-other",
        "keep-alive",
        "proxy-connection",
        "proxy-authorization",
        "te",
    ] {
        assert_eq!(seen.header(name), None, "{name} went on to the upstream");
    }
    assert_eq!(seen.header("authorization").as_deref(), Some("Bearer t"));
    assert_eq!(seen.header("x-own").as_deref(), Some("a, b"));
    assert_eq!(seen.header("cookie").as_deref(), Some("c=d"));
    for name in ["connection", "x-hidden", "keep-alive", "proxy-authenticate"] {
        assert_eq!(answer.header(name), None, "{name} came back to the client");
    }
    assert_eq!(answer.header("set-cookie").as_deref(), Some("a=1, b=2"));
}

#[tokio::test]
async fn the_upstream_is_told_its_own_host_the_clients_host_and_who_asks() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    for before in [None, Some("192.0.2.1"), Some("192.0.2.1, 192.0.2.2")] {
        let forwarded = before.map(|from| format!("x-forwarded-for: {from}\r\n"));
        let request = format!(
            "GET / HTTP/1.1\r\nhost: shop.example\r\n{}\r\n",
            forwarded.unwrap_or_default()
        );
        let (seen, _) = exchange(&upstream, proxy.address, &request, OK).await;
        assert_eq!(seen.header("host"), Some(upstream.address.to_string()));
        assert_eq!(seen.header("x-forwarded-host").as_deref(), Some("shop.example"));
        let expected = before.map_or_else(String::new, |from| format!("{from}, ")) + "127.0.0.1";
        assert_eq!(seen.header("x-forwarded-for"), Some(expected));
        let lines = seen.headers.iter().filter(|(name, _)| name == "x-forwarded-for").count();
        assert_eq!(lines, 1, "some read the first line alone, which the client wrote");
    }
    // A client cannot have the address left out by naming the header in Connection.
    let request = "GET / HTTP/1.1\r\nhost: a\r\nconnection: x-forwarded-for\r\n\
                   x-forwarded-for: 192.0.2.9\r\n\r\n";
    let (seen, _) = exchange(&upstream, proxy.address, request, OK).await;
    assert_eq!(seen.header("x-forwarded-for").as_deref(), Some("127.0.0.1"));
}

/// The bug: what a client wrote there itself stayed, in place of the host that it had asked for.
#[tokio::test]
async fn a_client_could_forge_the_host_that_it_asked_for() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let forged = "x-forwarded-host: evil.example\r\nx-forwarded-host: worse.example\r\n";
    let request = format!("GET / HTTP/1.1\r\nhost: shop.example\r\n{forged}\r\n");
    let (seen, _) = exchange(&upstream, proxy.address, &request, OK).await;
    assert_eq!(seen.header("x-forwarded-host").as_deref(), Some("shop.example"));
    let request = format!("GET / HTTP/1.0\r\n{forged}\r\n");
    let (seen, _) = exchange(&upstream, proxy.address, &request, OK).await;
    assert_eq!(seen.header("x-forwarded-host"), None, "it named no host");
}

/// The bug: what a client wrote of its scheme and its address in the place of proxies went on.
#[tokio::test]
async fn a_client_could_forge_its_scheme_and_its_address() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let request = "GET / HTTP/1.1\r\nhost: shop.example\r\nx-forwarded-proto: https\r\n\
                   x-forwarded-port: 443\r\nx-forwarded-ssl: on\r\nx-forwarded-prefix: /admin\r\n\
                   x-real-ip: 192.0.2.9\r\nx-real-ip: 192.0.2.8\r\n\
                   forwarded: for=192.0.2.9;proto=https\r\nx-forwarding: mine\r\n\r\n";
    let (seen, _) = exchange(&upstream, proxy.address, request, OK).await;
    assert_eq!(seen.header("x-forwarded-proto").as_deref(), Some("http"));
    assert_eq!(seen.header("x-real-ip").as_deref(), Some("127.0.0.1"));
    for name in ["forwarded", "x-forwarded-port", "x-forwarded-ssl", "x-forwarded-prefix"] {
        assert_eq!(seen.header(name), None, "{name} went on to the upstream");
    }
    assert_eq!(seen.header("x-forwarding").as_deref(), Some("mine"), "no proxy's");
    // The host in the request's line goes before the header.
    let request = "GET http://shop.example/ HTTP/1.1\r\nhost: evil.example\r\n\r\n";
    let (seen, _) = exchange(&upstream, proxy.address, request, OK).await;
    assert_eq!(seen.header("x-forwarded-host").as_deref(), Some("shop.example"));
}

/// The bug: a body in pieces was dropped on its way where the method has none by custom.
#[tokio::test]
async fn the_body_of_a_get_in_pieces_was_dropped() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    for method in ["GET", "HEAD", "DELETE", "POST"] {
        for framing in ["transfer-encoding: chunked\r\n\r\n2\r\nbo\r\n2\r\ndy\r\n0\r\n\r\n", ""] {
            let rest = if framing.is_empty() { "content-length: 4\r\n\r\nbody" } else { framing };
            let request = format!("{method} / HTTP/1.1\r\nhost: here\r\n{rest}");
            let serve = async {
                let mut wire = upstream.accept().await;
                let seen = wire.request().await;
                let length = if method == "HEAD" { "" } else { "content-length: 0\r\n" };
                wire.send(format!("HTTP/1.1 200 OK\r\nconnection: close\r\n{length}\r\n")).await;
                seen
            };
            let (seen, answer) = tokio::join!(serve, ask(proxy.address, &request));
            assert_eq!((seen.text().as_str(), seen.whole), ("body", true), "{request:?}");
            assert_eq!(answer.status(), 200, "{request:?}");
        }
    }
    // And none is made up.
    let (seen, _) =
        exchange(&upstream, proxy.address, "GET / HTTP/1.1\r\nhost: here\r\n\r\n", OK).await;
    assert_eq!(seen.header("transfer-encoding"), None);
}

#[tokio::test]
async fn an_upgrade_is_not_passed_and_a_tunnel_is_refused() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let request = "GET /socket HTTP/1.1\r\nhost: here\r\nconnection: upgrade\r\n\
                   upgrade: websocket\r\n\r\n";
    let (seen, answer) = exchange(&upstream, proxy.address, request, OK).await;
    assert_eq!((seen.header("upgrade"), answer.status()), (None, 200), "answered as a plain GET");
    let switched = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n";
    let (_, answer) = exchange(&upstream, proxy.address, request, switched).await;
    assert_eq!(answer.status(), 502, "an upstream that switches unasked: {answer:?}");
    let answer = ask(proxy.address, "CONNECT elsewhere:1 HTTP/1.1\r\nhost: elsewhere:1\r\n\r\n");
    let answer = answer.await;
    assert_eq!(answer.status(), 501, "{answer:?}");
    assert!(answer.text().contains("CONNECT"), "{answer:?}");
}

#[tokio::test]
async fn older_http_is_spoken_on_either_side() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let pieces = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n\
                  2\r\nok\r\n0\r\n\r\n";
    let (seen, answer) =
        exchange(&upstream, proxy.address, "GET / HTTP/1.0\r\nhost: here\r\n\r\n", pieces).await;
    assert_eq!(seen.first, "GET / HTTP/1.1");
    assert_eq!((answer.text().as_str(), answer.whole), ("ok", true), "ends with the connection");
    assert_eq!(answer.header("transfer-encoding"), None);
    let serve = async {
        let mut wire = upstream.accept().await;
        wire.request().await;
        wire.send("HTTP/1.0 200 OK\r\n\r\nold").await;
    };
    let request = get(proxy.address, "/");
    let ((), answer) = tokio::join!(serve, request);
    assert_eq!((answer.first.as_str(), answer.text().as_str()), ("HTTP/1.1 200 OK", "old"));
    assert!(answer.whole);
}

#[tokio::test]
async fn a_client_that_asks_first_is_told_to_continue() {
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
        wire.send("PUT / HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n")
            .await;
        assert_eq!(wire.head().await.expect("an interim answer").status(), 100);
        wire.send("body").await;
        wire.answer().await
    };
    let (seen, answer) = tokio::join!(serve, client);
    assert_eq!((seen.text().as_str(), answer.status()), ("body", 200));
    assert_eq!(seen.header("expect"), None, "it has been answered");
}

#[tokio::test]
async fn a_connection_carries_one_request_after_another() {
    let upstream = Upstream::new().await;
    let proxy = plain(&upstream).await;
    let keep = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
    let serve = async {
        let mut wire = upstream.accept().await;
        for turn in 0..3 {
            assert_eq!(wire.request().await.first, format!("GET /{turn} HTTP/1.1"));
            wire.send(keep).await;
        }
    };
    let client = async {
        let mut wire = Wire::connect(proxy.address).await;
        for turn in 0..3 {
            wire.send(format!("GET /{turn} HTTP/1.1\r\nhost: here\r\n\r\n")).await;
            assert_eq!(wire.answer().await.text(), "ok");
        }
    };
    within("three requests", async { tokio::join!(serve, client) }).await;
}

#[tokio::test]
async fn a_dead_upstream_is_answered_502_with_the_reason_and_missed_no_longer_than_it_is() {
    let upstream = Upstream::new().await;
    let address = upstream.address;
    let proxy = plain(&upstream).await;
    drop(upstream);
    let answer = get(proxy.address, "/").await;
    assert_eq!(answer.status(), 502);
    assert!(answer.text().contains(&address.to_string()), "{}", answer.text());
    assert!(answer.text().contains("refused"), "{}", answer.text());
    assert_eq!(get(proxy.address, "/healthz").await.status(), 200);
    let silent = Upstream::new().await;
    let proxy = plain(&silent).await;
    let serve = async {
        let mut wire = silent.accept().await;
        wire.request().await;
    };
    let ((), answer) = tokio::join!(serve, get(proxy.address, "/"));
    assert_eq!(answer.status(), 502, "closed without an answer: {answer:?}");
    let serve = async {
        let mut wire = silent.accept().await;
        wire.request().await;
        wire.send("no HTTP at all\r\n\r\n").await;
    };
    let ((), answer) = tokio::join!(serve, get(proxy.address, "/"));
    assert_eq!(answer.status(), 502, "no HTTP: {answer:?}");
    let ((_, answer), _) = tokio::join!(
        exchange(&silent, proxy.address, "GET / HTTP/1.1\r\nhost: h\r\n\r\n", OK),
        async {}
    );
    assert_eq!(answer.status(), 200, "it is well again");
}

//! Over the limit: who is turned away, with what, and that the service recovers.
//!
//! The budget is filled by bookings of the test's own, so that nothing depends on the machine.

use std::sync::Arc;
use std::time::Duration;

use lowtide::clock::ManualClock;
use lowtide::{ByteSize, Memory};

use super::support::{Managed, ask, embed, get, post, stage};
use super::wire::{Message, PATIENCE, Wire, until};
use crate::app::{self, Options};

fn assert_turned_away(answer: &Message) {
    assert_eq!(answer.status(), 503, "{answer:?}");
    let wait: u64 = answer.header("retry-after").expect("Retry-After").parse().expect("seconds");
    assert!((1..60).contains(&wait), "Retry-After: {wait}");
    assert_eq!(answer.header("content-type").as_deref(), Some("application/problem+json"));
    assert!(answer.whole, "{answer:?}");
    assert_eq!(answer.json()["status"], 503);
    let detail = answer.json()["detail"].as_str().expect("a reason").to_owned();
    assert!(detail.contains("memory"), "the reason, without figures: {detail}");
    assert!(!detail.bytes().any(|byte| byte.is_ascii_digit()), "{detail}");
}

#[tokio::test(flavor = "multi_thread")]
async fn over_the_limit_is_503_with_a_time_to_come_again_and_then_it_recovers() {
    let proxy = Managed::new().await;
    let permits = proxy.fill(ByteSize::ZERO);
    for request in [
        post("/words", "text/plain", "a b"),
        post("/embed", "application/json", r#"{"texts": ["a"]}"#),
        b"GET / HTTP/1.1\r\nhost: here\r\n\r\n".to_vec(),
    ] {
        assert_turned_away(&ask(proxy.at, request).await);
    }
    drop(permits);
    assert_eq!(ask(proxy.at, post("/words", "text/plain", "a b")).await.status(), 200);
    assert_eq!(embed(proxy.at, &["a"]).await.status(), 200);
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_are_answered_when_nobody_else_is() {
    let proxy = Managed::new().await;
    let permits = proxy.fill(ByteSize::ZERO);
    assert_eq!(get(proxy.at, "/").await.status(), 503);
    assert_eq!(get(proxy.at, "/healthz").await.text(), "ok\n");
    assert_eq!(get(proxy.at, "/metrics").await.text(), "metrics 1\n");
    let ready = get(proxy.at, "/readyz").await;
    assert_eq!((ready.status(), ready.json()["ready"].as_bool()), (200, Some(true)));
    let memory = get(proxy.at, "/memory").await;
    assert_eq!(memory.header("content-type").as_deref(), Some("application/json"));
    let memory = memory.json();
    assert_eq!(memory["managed"], true);
    assert!(memory["host"]["budget"]["reserved_bytes"].as_u64() > Some(0), "{memory}");
    assert!(memory["requests"]["rejected"]["full"].as_u64() > Some(0), "{memory}");
    assert_eq!(memory["device"]["arenas"][0]["name"], "embedder");
    drop(permits);
    let refused = ask(proxy.at, post("/metrics", "text/plain", "x")).await;
    assert_eq!((refused.status(), refused.header("allow").as_deref()), (405, Some("GET, HEAD")));
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_on_a_taken_port_leaves_nothing_that_hinders_the_next() {
    let _stage = stage().await;
    let first = app::start(Options::default(), None, String::new).await.expect("it starts");
    let memory = Memory::builder().clock(Arc::new(ManualClock::new())).start().expect("memory");
    let taken = Options { listen: first.address, ..Options::default() };
    let failed = app::start(taken, Some(memory.clone()), String::new).await;
    let error = failed.map(|_| ()).expect_err("the port is taken").to_string();
    assert!(error.contains("cannot listen on"), "{error}");
    let next = app::start(Options::default(), Some(memory.clone()), String::new).await;
    assert!(next.expect("it starts").stop(PATIENCE).await);
    assert!(memory.shutdown_blocking(Duration::ZERO).is_clean());
    first.stop(PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_ends_when_admission_does() {
    let proxy = Managed::new().await;
    proxy.memory.admission().close();
    let ready = get(proxy.at, "/readyz").await;
    assert_eq!((ready.status(), ready.json()["ending"].as_bool()), (503, Some(true)));
    let answer = get(proxy.at, "/").await;
    assert_eq!((answer.status(), answer.json()["reason"].as_str()), (503, Some("shutting_down")));
    assert_eq!(get(proxy.at, "/healthz").await.status(), 200);
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_never_fit_is_413() {
    let proxy = Managed::new().await;
    let mut client = Wire::connect(proxy.at).await;
    client.send("POST /words HTTP/1.1\r\nhost: here\r\ncontent-length: 1000000000\r\n\r\n").await;
    let answer = client.head().await.expect("an answer before the body");
    assert_eq!((answer.status(), answer.header("retry-after")), (413, None));
    drop(client);
    proxy.end().await;
}

/// The bug: the 503 went out and the connection was closed on a client that was still sending, so
/// that the client saw a broken connection, and the proxy before the text service a failed request,
/// which it answered 502.
#[tokio::test(flavor = "multi_thread")]
async fn an_early_503_did_not_reach_clients_that_were_still_sending() {
    let proxy = Managed::new().await;
    // Turned away at the door, then behind it, by the text service: a body of 16 MiB needs more.
    for spare in [ByteSize::ZERO, ByteSize::mib(4)] {
        let permits = proxy.fill(spare);
        for _ in 0..4 {
            let body = vec![b'x'; 16 << 20];
            assert_turned_away(&ask(proxy.at, post("/words", "text/plain", body)).await);
        }
        drop(permits);
        until("nothing is held", || proxy.held() == 0).await;
    }
    proxy.end().await;
}

/// The bug: the text of a refusal waited for the rest of a body which a client that had asked
/// whether to send it, and was told no, would never send.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_asked_first_waited_for_ever_for_the_text_of_its_refusal() {
    let proxy = Managed::new().await;
    let permits = proxy.fill(ByteSize::ZERO);
    for path in ["/words", "/embed", "/"] {
        let mut client = Wire::connect(proxy.at).await;
        client
            .send(format!(
                "POST {path} HTTP/1.1\r\nhost: here\r\nexpect: 100-continue\r\n\
                 content-length: 1000000\r\n\r\n"
            ))
            .await;
        let answer = client.answer().await;
        assert_turned_away(&answer);
        // Whether the body still comes is unknown, so nothing after it can be read.
        assert!(client.is_closed().await);
    }
    drop(permits);
    proxy.end().await;
}

/// The bug: each body of unknown length was reserved in addition to a claim that had been learned
/// from the last one, so claims rose without end.
#[tokio::test]
async fn bodies_of_unknown_length_raise_no_claim_beyond_what_they_need() {
    let proxy = Managed::new().await;
    for path in ["/words", "/embed"] {
        let (before, mut claims) = (proxy.reserved(), Vec::new());
        for _ in 0..6 {
            let mut client = Wire::connect(proxy.at).await;
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n\
                 transfer-encoding: chunked\r\n\r\n"
            );
            client.send(head).await;
            let admitted = if path == "/words" { 2 } else { 1 };
            until("it is admitted", || proxy.held() == admitted).await;
            claims.push(proxy.reserved().saturating_sub(before));
            let text = format!("{{\"texts\": [\"{}\"]}}", "tide ".repeat(10_000));
            client.send(format!("{:x}\r\n{text}\r\n0\r\n\r\n", text.len())).await;
            assert_eq!(client.answer().await.status(), 200);
            drop(client);
            until("nothing is held", || proxy.held() == 0).await;
        }
        let [_, second, .., last] = &*claims else { panic!("six") };
        assert!(last.get() <= second.get() + second.get() / 8, "{path}: {claims:?}");
    }
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_unknown_length_is_booked_as_it_arrives_and_refused_when_it_does_not_fit() {
    let proxy = Managed::new().await;
    // Enough for either as long as no body has come, and not for the body: which is more than
    // sockets hold, so that the refusal reaches only who may send all of it.
    let permits = proxy.fill(ByteSize::mib(10));
    let piece = format!("100000\r\n{}\r\n", "x".repeat(1 << 20));
    let body = piece.repeat(24) + "0\r\n\r\n";
    let request = |path: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n\
             transfer-encoding: chunked\r\n\r\n{body}"
        )
    };
    for path in ["/words", "/embed"] {
        assert_turned_away(&ask(proxy.at, request(path)).await);
        until("nothing is held", || proxy.held() == permits.len() as u64).await;
    }
    drop(permits);
    assert_eq!(ask(proxy.at, request("/words")).await.status(), 200);
    proxy.end().await;
}

//! The embedding service: what it refuses and how, when the model is there, and what comes of it.

use std::time::Duration;

use lowtide::{ByteSize, Memory};

use super::support::{Managed, ask, embed, post, stage};
use super::wire::{Message, until};
use crate::app::{self, Options};
use crate::embed::{BODY_MAX, TEXT_MAX, TEXTS_MAX};
use crate::model::{Settings, WIDTH};

const JSON: &str = "application/json";

fn vectors(answer: &Message) -> Vec<Vec<f64>> {
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let answer = answer.json();
    assert_eq!(answer["width"], WIDTH);
    serde_json::from_value(answer["embeddings"].clone()).expect("vectors")
}

fn assert_refused(answer: &Message, status: u16, reason: &str) {
    let text = answer.text();
    assert_eq!(answer.status(), status, "{reason}: {text}");
    assert!(answer.whole, "{reason}");
    let kind = answer.header("content-type");
    assert_eq!(kind.as_deref(), Some("application/problem+json"), "{reason}");
    let problem = answer.json();
    assert_eq!(problem["status"], status);
    let detail = problem["detail"].as_str().expect("a reason");
    assert!(detail.contains(reason), "{detail:?} does not say {reason:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_is_refused_with_the_reason_and_harms_nobody() {
    let proxy = Managed::new().await;
    let many = serde_json::json!({ "texts": vec!["a"; TEXTS_MAX + 1] }).to_string();
    let long = serde_json::json!({ "texts": ["a".repeat(TEXT_MAX.as_usize().unwrap() + 1)] });
    let cases: &[(&[u8], u16, &str)] = &[
        (b"", 400, "EOF"),
        (b"hello", 400, "expected JSON such as"),
        (b"{\"texts\": [\"a\"]", 400, "EOF"),
        (b"{\"texts\": [\"a\"]} more", 400, "trailing"),
        (b"{\"texts\": [\"\xff\xfe\"]}", 400, "unicode"),
        (b"[\"a\"]", 422, "invalid type"),
        (b"{\"texts\": \"a\"}", 422, "invalid type"),
        (b"{\"texts\": [1]}", 422, "invalid type"),
        (b"{\"text\": [\"a\"]}", 422, "unknown field"),
        (b"{}", 422, "missing field"),
        (b"{\"texts\": []}", 422, "0 texts"),
        (many.as_bytes(), 422, "more than 64 texts"),
        (b"{\"texts\": [\"good\", \"\"]}", 422, "text 1 contains no words"),
        (b"{\"texts\": [\" ?! \"]}", 422, "text 0 contains no words"),
    ];
    for (body, status, reason) in cases {
        assert_refused(&ask(proxy.at, post("/embed", JSON, body)).await, *status, reason);
    }
    let long = ask(proxy.at, post("/embed", JSON, long.to_string())).await;
    assert_refused(&long, 422, "64.0 KiB");
    for kind in ["text/plain", "application/x-www-form-urlencoded", "application/jsonx"] {
        let answer = ask(proxy.at, post("/embed", kind, r#"{"texts": ["a"]}"#)).await;
        assert_refused(&answer, 415, "application/json");
    }
    let answer = ask(proxy.at, "GET /embed HTTP/1.1\r\nhost: here\r\n\r\n").await;
    assert_refused(&answer, 405, "POST");
    assert_eq!(answer.header("allow").as_deref(), Some("POST"));
    assert_eq!(
        proxy.running().model.resource.stats().loads_ok_total,
        0,
        "no bad request loads the model"
    );
    for kind in [JSON, "application/json; charset=utf-8", "Application/JSON"] {
        let answer = ask(proxy.at, post("/embed", kind, r#"{"texts": ["a"]}"#)).await;
        assert_eq!(vectors(&answer).len(), 1);
    }
    proxy.end().await;
}

/// The bug: the 413 went out and the connection was closed on a client that was still sending.
#[tokio::test(flavor = "multi_thread")]
async fn the_refusal_of_a_long_body_did_not_reach_who_was_still_sending_it() {
    let proxy = Managed::new().await;
    let long = "x".repeat(4 * BODY_MAX.as_usize().unwrap());
    for _ in 0..4 {
        assert_refused(&ask(proxy.at, post("/embed", JSON, &long)).await, 413, "4.0 MiB");
        let pieces = format!(
            "POST /embed HTTP/1.1\r\nhost: here\r\ncontent-type: {JSON}\r\n\
             transfer-encoding: chunked\r\n\r\n{:x}\r\n{long}\r\n0\r\n\r\n",
            long.len()
        );
        assert_refused(&ask(proxy.at, pieces).await, 413, "4.0 MiB");
    }
    assert_eq!(embed(proxy.at, &["a"]).await.status(), 200);
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_first_requests_load_the_model_once() {
    let proxy = Managed::new().await;
    let model = proxy.running().model.resource.clone();
    assert!(!model.stats().loaded);
    assert_eq!(proxy.running().model.arena.snapshot().committed, ByteSize::ZERO);
    let at = proxy.at;
    let ask = |_| tokio::spawn(async move { vectors(&embed(at, &["the same text"]).await) });
    let asked: Vec<_> = (0..16).map(ask).collect();
    let mut answers = Vec::new();
    for answer in asked {
        answers.push(answer.await.expect("an answer"));
    }
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "one model, one answer");
    assert_eq!(model.stats().loads_ok_total, 1);
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_model_is_unloaded_leaves_nothing_behind_and_comes_back_the_same() {
    let options = Options { idle_unload: Some(Duration::from_secs(60)), ..Options::default() };
    let proxy = Managed::with(options, |builder| builder).await;
    let (model, arena) =
        (proxy.running().model.resource.clone(), proxy.running().model.arena.clone());
    let first = vectors(&embed(proxy.at, &["ebb and flow"]).await);
    let weights = arena.snapshot();
    assert!(weights.live >= super::support::WEIGHTS, "{weights:?}");
    until("activations are given back", || arena.snapshot().leases == 0).await;
    proxy.clock.advance(Duration::from_secs(59));
    assert!(model.stats().loaded, "not idle for long enough");
    proxy.clock.advance(Duration::from_secs(2));
    until("it is unloaded", || !model.stats().loaded).await;
    until("nothing is live", || arena.snapshot().live == ByteSize::ZERO).await;
    until("nothing is committed", || {
        // The worker lets idle granules decay as time goes on.
        proxy.clock.advance(Duration::from_millis(100));
        arena.snapshot().committed == ByteSize::ZERO
    })
    .await;
    // After its memory: what it held is booked until that is gone.
    until("nothing is booked", || proxy.reserved() == ByteSize::ZERO).await;
    assert_eq!(vectors(&embed(proxy.at, &["ebb and flow"]).await), first);
    assert_eq!(model.stats().loads_ok_total, 2);
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_does_not_fit_the_device_is_503_with_the_reason_and_the_rest_goes_on() {
    let proxy =
        Managed::with(Options::default(), |builder| builder.device_limit(ByteSize::mib(1))).await;
    for _ in 0..2 {
        let answer = embed(proxy.at, &["a"]).await;
        assert_refused(&answer, 503, "cannot be loaded");
        assert!(!answer.text().contains("limit"), "{}", answer.text());
        assert!(answer.header("retry-after").is_some(), "{answer:?}");
    }
    assert!(proxy.running().model.resource.stats().loads_failed_total >= 1);
    let words = ask(proxy.at, post("/words", "text/plain", "a b")).await;
    assert_eq!(words.status(), 200);
    assert_eq!(
        proxy.running().model.arena.snapshot().live,
        ByteSize::ZERO,
        "nothing half loaded stays"
    );
    proxy.end().await;
}

/// The bug: it started, and each request for the model was told to come again.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_above_the_ceiling_of_the_configured_limit_ends_the_start() {
    let _stage = stage().await;
    let mut started = None;
    until("no other memory runs", || {
        started = Memory::builder().memory_limit(ByteSize::gib(1)).start().ok();
        started.is_some()
    })
    .await;
    let memory = started.expect("it started");
    let options =
        Options { model: Settings { weights: ByteSize::gib(64), seed: 1 }, ..Options::default() };
    let refused = app::start(options, Some(memory.clone()), String::new).await;
    let error = refused.map(drop).expect_err("64 GiB under 1 GiB").to_string();
    assert!(error.contains("64.0 GiB") && error.contains("819.2 MiB"), "both numbers: {error}");
    let ended =
        tokio::task::spawn_blocking(move || memory.shutdown_blocking(Duration::from_secs(5)));
    assert!(ended.await.expect("no panic").is_clean());
}

fn seeded(seed: u64) -> Options {
    Options { model: Settings { seed, ..Options::default().model }, ..Options::default() }
}

fn likeness(one: &[f64], other: &[f64]) -> f64 {
    one.iter().zip(other).map(|(one, other)| one * other).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn similar_texts_come_out_closer_than_dissimilar_ones() {
    let triples = [
        ("the tide goes out in the morning", "the tide went out this morning", "invoice 4711 due"),
        ("how do I reset my password", "password reset does not work", "cheese from the Alps"),
        ("memory of the process grows", "growing memory in a process", "Bach wrote two hundred"),
        ("Kubernetes pod was evicted", "evicted pods in kubernetes", "a walk along the shore"),
        ("Grüße aus Köln", "viele Grüße nach Köln", "train to Paris leaves at nine"),
    ];
    for seed in [1, 2, 99] {
        println!("seed {seed}");
        let proxy = Managed::with(seeded(seed), |builder| builder).await;
        for (text, like, unlike) in triples {
            let found = vectors(&embed(proxy.at, &[text, like, unlike]).await);
            for vector in &found {
                let length = likeness(vector, vector).sqrt();
                assert!((length - 1.0).abs() < 1e-5, "length {length}");
            }
            let (near, far) = (likeness(&found[0], &found[1]), likeness(&found[0], &found[2]));
            assert!(near > far + 0.1, "seed {seed}: {text:?}: {near} against {far}");
        }
        proxy.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_seed_and_the_text_alone_decide_the_vector() {
    let text = "ebb and flow";
    let mut by_seed = Vec::new();
    for seed in [7, 7, 8] {
        println!("seed {seed}");
        let proxy = Managed::with(seeded(seed), |builder| builder).await;
        let alone = vectors(&embed(proxy.at, &[text]).await);
        let among = vectors(&embed(proxy.at, &["other", text, "EBB, and flow!"]).await);
        assert_eq!(alone[0], among[1], "its neighbours do not matter");
        assert_eq!(alone[0], among[2], "nor do case and marks");
        by_seed.push(alone);
        proxy.end().await;
    }
    assert_eq!(by_seed[0], by_seed[1]);
    assert_ne!(by_seed[0], by_seed[2]);
}

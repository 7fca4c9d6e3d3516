//! The service with a tiny model of random weights: what clients get, what is loaded, and that it
//! goes on after each error. `.ci/candle` compares the vectors of the real model.

use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, header::CONTENT_TYPE};
use candle_core::Device;
use futures_util::stream;
use lowtide::clock::ManualClock;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_candle::api::{Answer, BODY_MAX, TEXTS_MAX};
use lowtide_candle::embedder::{EmbedError, Embedder, ROWS_MAX};
use lowtide_candle::service::router;
use serde_json::{Value, json};
use tower::ServiceExt as _;

mod tiny;

use tiny::{HIDDEN, POSITIONS, WORDS, model, shapes, write_weights};

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn distance(one: &[f32], other: &[f32]) -> f32 {
    one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
}

#[test]
fn a_vector_has_length_1_and_depends_on_its_text_alone() -> Result<(), BoxError> {
    let folder = model()?;
    let embedder = Embedder::load(folder.path(), &Device::Cpu)?;
    let all = texts(&["the tide goes out", "out", "", "goes the tide out", "unknown words", "the"]);
    let many: Vec<_> = all.iter().cycle().take(2 * ROWS_MAX + 3).cloned().collect();
    let together = embedder.embed(&many)?;
    assert_eq!(together.len(), many.len());
    for (text, vector) in many.iter().zip(&together) {
        let alone = embedder.embed(std::slice::from_ref(text))?.remove(0);
        assert!(distance(&alone, vector) < 1e-6, "{text:?}: {alone:?}, in a batch {vector:?}");
        let length: f32 = vector.iter().map(|number| number * number).sum();
        assert!((length - 1.0).abs() < 1e-5, "{text:?}: {length}");
    }
    assert!(distance(&together[0], &together[3]) > 1e-3, "the order of words counts");
    assert!(distance(&together[0], &together[1]) > 1e-3, "words count");
    assert!(embedder.embed(&[])?.is_empty());
    Ok(())
}

#[test]
fn a_text_that_is_too_long_is_refused_by_its_number() -> Result<(), BoxError> {
    let folder = model()?;
    let embedder = Embedder::load(folder.path(), &Device::Cpu)?;
    let longest = ["the"; POSITIONS - 2].join(" ");
    assert_eq!(embedder.embed(&texts(&[&longest]))?.len(), 1);
    let error =
        embedder.embed(&texts(&["the", &format!("{longest} tide")])).expect_err("13 tokens");
    let EmbedError::TooLong { index: 1, tokens: 13, most: POSITIONS } = error else {
        panic!("{error}");
    };
    assert_eq!(error.to_string(), "text 1 has 13 tokens: expected at most 12");
    Ok(())
}

/// Changes a file of a new model, and returns the error of its load.
fn error_of(change: impl Fn(&Path) -> Result<(), BoxError>) -> Result<String, BoxError> {
    let folder = model()?;
    change(folder.path())?;
    let error = Embedder::load(folder.path(), &Device::Cpu).map(drop).err();
    Ok(error.ok_or("it was loaded")?.to_string())
}

#[test]
fn a_model_that_is_missing_or_damaged_is_an_error_that_names_its_file() -> Result<(), BoxError> {
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let error = error_of(|folder| Ok(fs::remove_file(folder.join(name))?))?;
        assert!(error.contains(&format!("{name} cannot be read: ")), "{error}");
        let empty = error_of(|folder| Ok(fs::write(folder.join(name), "")?))?;
        assert!(empty.contains(name) && !empty.contains("cannot be read"), "{empty}");
    }
    let path = |folder: &Path| folder.join("model.safetensors");
    let cut = error_of(|folder| {
        let bytes = fs::read(path(folder))?;
        Ok(fs::write(path(folder), &bytes[..bytes.len() - 4])?)
    })?;
    let shape = error_of(|folder| {
        let mut shapes = shapes();
        shapes[0].1 = vec![WORDS.len() + 1, HIDDEN];
        write_weights(&path(folder), &shapes)
    })?;
    let tensor = error_of(|folder| write_weights(&path(folder), &shapes()[1..]))?;
    let huge_header = error_of(|folder| Ok(fs::write(path(folder), [0xff; 64])?))?;
    for error in [&cut, &shape, &tensor, &huge_header] {
        let expected = "model.safetensors does not have the weights of the configuration: ";
        assert!(error.contains(expected), "{error}");
    }
    assert!(tensor.contains("word_embeddings"), "{tensor}");
    let heads = error_of(|folder| {
        let config = fs::read_to_string(folder.join("config.json"))?;
        let config = config.replace("\"num_attention_heads\":2", "\"num_attention_heads\":3");
        Ok(fs::write(folder.join("config.json"), config)?)
    })?;
    assert_eq!(heads, "3 heads do not divide vectors of 8 numbers");
    Ok(())
}

fn memory() -> Result<(Memory, Arc<ManualClock>), BoxError> {
    let clock = Arc::new(ManualClock::new());
    let memory = Memory::builder().detached().memory_limit(ByteSize::gib(1));
    Ok((memory.clock(clock.clone()).start()?, clock))
}

/// The status and the body of the answer.
async fn post(routes: &Router, body: impl Into<Body>) -> Result<(u16, Value), BoxError> {
    let request = Request::post("/embed").header(CONTENT_TYPE, "application/json");
    let answer = routes.clone().oneshot(request.body(body.into())?).await?;
    let status = answer.status().as_u16();
    let body = to_bytes(answer.into_body(), 1 << 20).await?;
    Ok((status, serde_json::from_slice(&body)?))
}

fn loads(memory: &Memory) -> u64 {
    memory.snapshot().resources.iter().map(|resource| resource.loads_ok_total).sum()
}

#[tokio::test]
async fn bad_requests_are_refused_with_a_reason_and_good_ones_are_served() -> Result<(), BoxError> {
    let folder = model()?;
    let (memory, _clock) = memory()?;
    let routes = router(&memory, folder.path().to_owned(), &Device::Cpu)?;
    let body = |texts: &[&str]| json!({ "texts": texts }).to_string();
    let long = body(&[&["the"; POSITIONS].join(" ")]);
    let many = body(&["the"; TEXTS_MAX + 1]);
    // Of a known length, it is refused before it is read.
    let large = body(&[&"x".repeat(BODY_MAX)]);
    let unknown = Body::from_stream(stream::iter([Ok::<_, Infallible>(large.clone())]));
    let (found, answer) = post(&routes, unknown).await?;
    assert_eq!((found, &answer["reason"]), (413, &json!("unreadable_body")), "{answer}");
    for (body, status, reason) in [
        ("{", 400, "invalid_json"),
        ("", 400, "invalid_json"),
        (r#"{"texts": "the"}"#, 422, "wrong_fields"),
        (r#"{"texts": ["the", 1]}"#, 422, "wrong_fields"),
        (r#"{"texts": [], "more": 1}"#, 422, "wrong_fields"),
        (r#"{"texts": []}"#, 422, "number_of_texts"),
        (&*many, 422, "number_of_texts"),
        (&*long, 422, "text_too_long"),
        (&*large, 413, "too_large"),
    ] {
        let (found, answer) = post(&routes, body.to_owned()).await?;
        assert_eq!((found, &answer["reason"]), (status, &json!(reason)), "{answer}");
        let (found, answer) = post(&routes, r#"{"texts": ["the tide", "out"]}"#).await?;
        assert_eq!(found, 200, "after {reason}: {answer}");
        let Answer { vectors } = serde_json::from_value(answer)?;
        assert_eq!((vectors.len(), vectors[0].len()), (2, HIDDEN));
    }
    let plain = Request::post("/embed").body(Body::from(r#"{"texts": ["the"]}"#))?;
    assert_eq!(routes.clone().oneshot(plain).await?.status().as_u16(), 415);
    for path in ["/healthz", "/memory"] {
        let request = Request::get(path).body(Body::empty())?;
        assert_eq!(routes.clone().oneshot(request).await?.status().as_u16(), 200, "{path}");
    }
    assert_eq!(loads(&memory), 1, "one load for all");
    Ok(())
}

#[tokio::test]
async fn requests_at_once_load_the_model_once() -> Result<(), BoxError> {
    let folder = model()?;
    let (memory, _clock) = memory()?;
    let routes = router(&memory, folder.path().to_owned(), &Device::Cpu)?;
    assert_eq!(loads(&memory), 0, "not before the first request");
    let requests = (0..16).map(|_| {
        let routes = routes.clone();
        tokio::spawn(async move { post(&routes, r#"{"texts": ["tide"]}"#).await })
    });
    for request in requests.collect::<Vec<_>>() {
        assert_eq!(request.await??.0, 200);
    }
    assert_eq!(loads(&memory), 1);
    Ok(())
}

#[tokio::test]
async fn a_model_that_cannot_be_loaded_is_503_until_its_files_are_repaired() -> Result<(), BoxError>
{
    let folder = model()?;
    let (memory, clock) = memory()?;
    let path: PathBuf = folder.path().join("model.safetensors");
    let whole = fs::read(&path)?;
    fs::write(&path, &whole[..whole.len() / 2])?;
    let routes = router(&memory, folder.path().to_owned(), &Device::Cpu)?;
    let (status, answer) = post(&routes, r#"{"texts": ["tide"]}"#).await?;
    assert_eq!(status, 503, "{answer}");
    let detail = answer["detail"].as_str().unwrap_or_default();
    assert!(detail.contains("cannot be loaded") && !detail.contains("safetensors"), "{answer}");
    fs::write(&path, whole)?;
    clock.advance(Duration::from_secs(120)); // the pause after a failed load
    let (status, answer) = post(&routes, r#"{"texts": ["tide"]}"#).await?;
    assert_eq!(status, 200, "{answer}");
    Ok(())
}

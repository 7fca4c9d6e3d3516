//! The service with a tiny model of random weights: what clients get, what is loaded, and that it
//! goes on after each error. `.ci/candle` compares the vectors of the real model.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, header::CONTENT_TYPE};
use lowtide::clock::ManualClock;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_candle::api::{Answer, BODY_MAX, TEXTS_MAX};
use lowtide_candle::embedder::{EmbedError, Embedder, LoadError, ROWS_MAX};
use lowtide_candle::service::router;
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};
use serde_json::{Value, json};
use tempfile::TempDir;
use tower::ServiceExt as _;

const HIDDEN: usize = 8;
const INSIDE: usize = 16;
const POSITIONS: usize = 12;
const WORDS: [&str; 8] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "tide", "goes", "out"];

/// The names and shapes of the tensors.
fn shapes() -> Vec<(String, Vec<usize>)> {
    let norm = |name: &str| {
        [(format!("{name}.weight"), vec![HIDDEN]), (format!("{name}.bias"), vec![HIDDEN])]
    };
    let linear = |name: &str, input: usize, output: usize| {
        [(format!("{name}.weight"), vec![output, input]), (format!("{name}.bias"), vec![output])]
    };
    let table = |name: &str, rows: usize| (format!("embeddings.{name}.weight"), vec![rows, HIDDEN]);
    let mut all = vec![
        table("word_embeddings", WORDS.len()),
        table("position_embeddings", POSITIONS),
        table("token_type_embeddings", 2),
    ];
    all.extend(norm("embeddings.LayerNorm"));
    for layer in 0..2 {
        let name = |of: &str| format!("encoder.layer.{layer}.{of}");
        for of in ["attention.self.query", "attention.self.key", "attention.self.value"] {
            all.extend(linear(&name(of), HIDDEN, HIDDEN));
        }
        all.extend(linear(&name("attention.output.dense"), HIDDEN, HIDDEN));
        all.extend(norm(&name("attention.output.LayerNorm")));
        all.extend(linear(&name("intermediate.dense"), HIDDEN, INSIDE));
        all.extend(linear(&name("output.dense"), INSIDE, HIDDEN));
        all.extend(norm(&name("output.LayerNorm")));
    }
    all
}

/// Writes a model into a new folder.
fn model() -> Result<TempDir, BoxError> {
    let folder = TempDir::new()?;
    let config = json!({
        "hidden_size": HIDDEN, "intermediate_size": INSIDE, "num_attention_heads": 2,
        "num_hidden_layers": 2, "max_position_embeddings": POSITIONS, "type_vocab_size": 2,
        "vocab_size": WORDS.len(), "layer_norm_eps": 1e-12,
    });
    fs::write(folder.path().join("config.json"), config.to_string())?;
    let vocabulary: BTreeMap<_, _> = WORDS.iter().zip(0_u32..).collect();
    let special = |text: &str, id: u32| {
        json!({ "id": id, "content": text, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true })
    };
    let tokenizer = json!({
        "version": "1.0",
        // As in the real file: both would change the vectors or hide a text that is too long.
        "truncation": { "direction": "Right", "max_length": 4, "strategy": "LongestFirst",
                        "stride": 0 },
        "padding": { "strategy": { "Fixed": 9 }, "direction": "Right", "pad_to_multiple_of": null,
                     "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]" },
        "added_tokens": [special("[PAD]", 0), special("[UNK]", 1), special("[CLS]", 2),
                         special("[SEP]", 3)],
        "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                        "strip_accents": null, "lowercase": true },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": { "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "[CLS]", "type_id": 0 } },
                       { "Sequence": { "id": "A", "type_id": 0 } },
                       { "SpecialToken": { "id": "[SEP]", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } },
                     { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": {
                "[CLS]": { "id": "[CLS]", "ids": [2], "tokens": ["[CLS]"] },
                "[SEP]": { "id": "[SEP]", "ids": [3], "tokens": ["[SEP]"] } } },
        "decoder": null,
        "model": { "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": 100, "vocab": vocabulary },
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string())?;
    write_weights(&folder.path().join("model.safetensors"), &shapes())?;
    Ok(folder)
}

/// Writes values between -0.5 and 0.5 that only the position decides.
fn write_weights(path: &Path, shapes: &[(String, Vec<usize>)]) -> Result<(), BoxError> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (f32::from(u16::try_from(state >> 16).unwrap_or(0)) / 65_536.0 - 0.5).to_le_bytes()
    };
    let bytes: Vec<Vec<u8>> = shapes
        .iter()
        .map(|(_, shape)| (0..shape.iter().product()).flat_map(|_| next()).collect())
        .collect();
    let views = shapes.iter().zip(&bytes).map(|((name, shape), bytes)| {
        Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?))
    });
    let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    Ok(serialize_to_file(views, None, path)?)
}

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn distance(one: &[f32], other: &[f32]) -> f32 {
    one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
}

#[test]
fn a_vector_has_length_1_and_depends_on_its_text_alone() -> Result<(), BoxError> {
    let folder = model()?;
    let embedder = Embedder::load(folder.path())?;
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
    let embedder = Embedder::load(folder.path())?;
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
fn error_of(change: impl Fn(&Path) -> Result<(), BoxError>) -> Result<LoadError, BoxError> {
    let folder = model()?;
    change(folder.path())?;
    Ok(Embedder::load(folder.path()).map(drop).err().ok_or("it was loaded")?)
}

#[test]
fn a_model_that_is_missing_or_damaged_is_a_typed_error() -> Result<(), BoxError> {
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let error = error_of(|folder| Ok(fs::remove_file(folder.join(name))?))?;
        assert!(matches!(error, LoadError::Read { .. }), "{name}: {error}");
        assert!(error.to_string().contains(name), "{error}");
        let empty = error_of(|folder| Ok(fs::write(folder.join(name), "")?))?;
        assert!(!matches!(empty, LoadError::Read { .. }), "{name}: {empty}");
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
        assert!(matches!(error, LoadError::Weights { .. }), "{error}");
    }
    assert!(tensor.to_string().contains("word_embeddings"), "{tensor}");
    let heads = error_of(|folder| {
        let config = fs::read_to_string(folder.join("config.json"))?;
        let config = config.replace("\"num_attention_heads\":2", "\"num_attention_heads\":3");
        Ok(fs::write(folder.join("config.json"), config)?)
    })?;
    assert_eq!(heads.to_string(), "3 heads do not divide vectors of 8 numbers");
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
    let routes = router(&memory, folder.path().to_owned())?;
    let body = |texts: &[&str]| json!({ "texts": texts }).to_string();
    let long = body(&[&["the"; POSITIONS].join(" ")]);
    let many = body(&["the"; TEXTS_MAX + 1]);
    let large = body(&[&"x".repeat(BODY_MAX)]);
    for (body, status, reason) in [
        ("{", 400, "invalid_json"),
        ("", 400, "invalid_json"),
        (r#"{"texts": "the"}"#, 422, "wrong_fields"),
        (r#"{"texts": ["the", 1]}"#, 422, "wrong_fields"),
        (r#"{"texts": [], "more": 1}"#, 422, "wrong_fields"),
        (r#"{"texts": []}"#, 422, "number_of_texts"),
        (&*many, 422, "number_of_texts"),
        (&*long, 422, "text_too_long"),
        (&*large, 413, "unreadable_body"),
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
    let routes = router(&memory, folder.path().to_owned())?;
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
    let routes = router(&memory, folder.path().to_owned())?;
    let (status, answer) = post(&routes, r#"{"texts": ["tide"]}"#).await?;
    assert_eq!(status, 503, "{answer}");
    assert!(answer["detail"].as_str().is_some_and(|text| text.contains("model.safetensors")));
    fs::write(&path, whole)?;
    clock.advance(Duration::from_secs(120)); // the pause after a failed load
    let (status, answer) = post(&routes, r#"{"texts": ["tide"]}"#).await?;
    assert_eq!(status, 200, "{answer}");
    Ok(())
}

//! The service with all-MiniLM-L6-v2, which `PROXY_MODEL` names when the tests are built, and a
//! real ONNX Runtime (`ORT_DYLIB_PATH`). Without them they pass, and print `skipped:`. Each has a
//! process of its own, as ONNX Runtime has one environment for each.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::thread::park_timeout;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lowtide::clock::ManualClock;
use lowtide::config::DeviceChoice;
use lowtide::{BoxError, ByteSize, Memory};
use serde::Deserialize;
use serde_json::{Value, json};
use test_fork::test;

use crate::app::{self, Options, Running};
use crate::model::{Settings, TOKENS_MAX, host_activations};

/// The largest difference that rounding explains.
const ROUNDING: f64 = 2e-6;

fn settings() -> Option<Settings> {
    let paths = option_env!("PROXY_MODEL").zip(option_env!("ORT_DYLIB_PATH"));
    if paths.is_none() {
        println!("skipped: PROXY_MODEL and ORT_DYLIB_PATH were not set when the tests were built");
    }
    paths.map(|(model, library)| Settings { model: model.into(), library: library.into() })
}

/// A service with a clock that the test controls.
struct Service {
    running: Running,
    memory: Memory,
    clock: Arc<ManualClock>,
}

impl Service {
    async fn start(model: Settings) -> Result<Self, BoxError> {
        let clock = Arc::new(ManualClock::new());
        let memory = Memory::builder().detached().device(DeviceChoice::Host);
        let memory = memory.memory_limit(ByteSize::gib(1)).clock(clock.clone()).start()?;
        let options = Options { model, ..Options::default() };
        let running = app::start(options, Some(memory.clone()), String::new).await?;
        Ok(Self { running, memory, clock })
    }

    async fn embed(&self, texts: &[impl AsRef<str>]) -> Result<(u16, Value), BoxError> {
        embed(&self.running, texts).await
    }

    fn is_loaded(&self) -> bool {
        self.running.model.session.stats().loaded
    }
}

/// Returns the status and the body of the answer.
async fn embed(running: &Running, texts: &[impl AsRef<str>]) -> Result<(u16, Value), BoxError> {
    let texts: Vec<_> = texts.iter().map(AsRef::as_ref).collect();
    let body = json!({ "texts": texts }).to_string();
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let request = Request::post(format!("http://{}/embed", running.address));
    let request = request.header(CONTENT_TYPE, "application/json").body(body.into())?;
    let answer = client.request(request).await?;
    let status = answer.status().as_u16();
    Ok((status, serde_json::from_slice(&answer.into_body().collect().await?.to_bytes())?))
}

fn vectors(answer: &Value) -> Result<Vec<Vec<f64>>, BoxError> {
    Ok(serde_json::from_value(answer["embeddings"].clone())?)
}

fn block_on(test: impl Future<Output = Result<(), BoxError>>) -> Result<(), BoxError> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(test)
}

#[derive(Deserialize)]
struct Expected {
    sentences: Vec<String>,
    /// The cosine similarity of each sentence with each.
    similarities: Vec<Vec<f64>>,
    /// The first numbers of each vector.
    first_numbers: Vec<Vec<f64>>,
}

/// Compares the answers with those of ONNX Runtime in Python. All sentences are in one
/// request, so the shorter ones are padded.
async fn assert_right(running: &Running) -> Result<(), BoxError> {
    let expected = include_str!("../similarities.json");
    let expected: Expected = serde_json::from_str(expected)?;
    let (status, answer) = embed(running, &expected.sentences).await?;
    assert_eq!((status, &answer["width"]), (200, &json!(384)), "{answer}");
    let vectors = vectors(&answer)?;
    assert_eq!(vectors.len(), expected.sentences.len());
    for (at, vector) in vectors.iter().enumerate() {
        assert_eq!(vector.len(), 384);
        let similar =
            vectors.iter().map(|other| vector.iter().zip(other).map(|(a, b)| a * b).sum());
        let similar: Vec<f64> = similar.collect();
        let pairs = similar.iter().zip(&expected.similarities[at]);
        for (found, right) in pairs.chain(vector.iter().zip(&expected.first_numbers[at])) {
            assert!((found - right).abs() <= ROUNDING, "sentence {at}: {found}, expected {right}");
        }
    }
    Ok(())
}

#[test]
fn the_vectors_are_those_of_the_model() -> Result<(), BoxError> {
    let Some(settings) = settings() else { return Ok(()) };
    block_on(async {
        let service = Service::start(settings).await?;
        assert_right(&service.running).await?;
        let all: Vec<_> = (0..20).map(|number| format!("boat number {number}")).collect();
        let (_, together) = service.embed(&all).await?;
        let (_, alone) = service.embed(&all[19..]).await?;
        let pairs = [vectors(&together)?.swap_remove(19), vectors(&alone)?.swap_remove(0)];
        let distance = pairs[0].iter().zip(&pairs[1]).map(|(a, b)| (a - b).abs());
        assert!(distance.fold(0.0, f64::max) <= ROUNDING, "a vector depends on its text alone");
        Ok(())
    })
}

#[test]
fn an_idle_model_is_unloaded_and_comes_back_the_same() -> Result<(), BoxError> {
    let Some(settings) = settings() else { return Ok(()) };
    block_on(async {
        let service = Service::start(settings).await?;
        assert!(!service.is_loaded(), "not before the first request");
        assert_right(&service.running).await?;
        assert!(service.is_loaded());
        for _ in 0..500 {
            service.clock.advance(Duration::from_secs(60));
            if !service.is_loaded() {
                break;
            }
            park_timeout(Duration::from_millis(20));
        }
        assert!(!service.is_loaded(), "it is unloaded");
        assert_right(&service.running).await
    })
}

#[test]
fn a_request_holds_no_more_than_it_reserves() -> Result<(), BoxError> {
    let Some(settings) = settings() else { return Ok(()) };
    // Each mark is a token.
    let long = format!("a{}", "!".repeat(TOKENS_MAX - 3));
    let of = |count, text: &str| vec![text.to_owned(); count];
    let padded = [of(1, &long), of(7, "a")].concat();
    block_on(async {
        let service = Service::start(settings).await?;
        for texts in [of(1, &long), padded, of(8, &long), of(20, &long)] {
            let (status, answer) = service.embed(&texts).await?;
            assert_eq!(status, 200, "{answer}");
            let devices = service.memory.snapshot().devices;
            let arena = devices.arenas.iter().find(|arena| &*arena.name == "onnxruntime");
            let peak = arena.ok_or("no arena")?.committed_peak;
            let reserved = host_activations(json!({ "texts": texts }).to_string().len() as u64);
            println!("{} rows: {peak} of {reserved}", texts.len());
            assert!(peak <= reserved, "{texts:?}: took {peak}, reserved {reserved}");
        }
        Ok(())
    })
}

/// Encodes a field of a message of protocol buffers.
fn field(number: u8, value: &[u8]) -> Vec<u8> {
    let len = u8::try_from(value.len()).expect("a short message");
    [&[number << 3 | 2, len], value].concat()
}

/// An ONNX model that returns its input `x`, a tensor of floats, as `y`.
fn wrong_model() -> Vec<u8> {
    let value = |name: &[u8]| {
        let float = field(1, &[1 << 3, 1]);
        [field(1, name), field(2, &float)].concat()
    };
    let node = [field(1, b"x"), field(2, b"y"), field(4, b"Identity")].concat();
    let graph = [field(1, &node), field(2, b"g"), field(11, &value(b"x")), field(12, &value(b"y"))];
    let version = [1 << 3, 8];
    let opset = field(8, &[2 << 3, 17]);
    [&version[..], &field(7, &graph.concat()), &opset].concat()
}

#[test]
fn files_that_are_missing_or_wrong_are_named_and_the_service_goes_on() -> Result<(), BoxError> {
    let Some(Settings { model, library }) = settings() else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.onnx");
    block_on(async {
        let service = Service::start(Settings { model: path.clone(), library }).await?;
        let refused = async |status, reason: &str| {
            let (found, answer) = service.embed(&["tide"]).await?;
            let detail = answer["detail"].as_str().unwrap_or_default().to_owned();
            println!("{found}: {detail}");
            assert_eq!(found, status, "{answer}");
            let mut told = detail.clone();
            if status == 503 {
                assert!(
                    detail.contains("cannot be loaded") && !detail.contains(reason),
                    "{answer}"
                );
                let error = service.running.model.acquire().await.map(drop).expect_err("failed");
                told = error.to_string();
            }
            assert!(told.contains(reason) && told.contains("expected"), "{told}");
            service.clock.advance(Duration::from_secs(120)); // the pause after a failed load
            Ok::<_, BoxError>(())
        };
        let tokenizer = path.with_file_name("tokenizer.json");
        refused(503, &tokenizer.to_string_lossy()).await?; // missing
        fs::write(&tokenizer, "{}")?;
        refused(503, &tokenizer.to_string_lossy()).await?;
        fs::remove_file(&tokenizer)?;
        symlink(model.with_file_name("tokenizer.json"), &tokenizer)?;
        refused(503, &path.to_string_lossy()).await?; // missing
        fs::write(&path, "not a model")?;
        refused(503, &path.to_string_lossy()).await?;
        fs::write(&path, wrong_model())?;
        refused(500, "\"x\"").await?;
        assert!(service.is_loaded(), "the wrong model");
        Ok(())
    })
}

#[test]
fn without_the_library_the_start_fails_with_its_path() -> Result<(), BoxError> {
    block_on(async {
        let library = Path::new("/nonexistent/libonnxruntime.so").to_owned();
        let model = Settings { library, ..Options::default().model };
        let error = Service::start(model).await.map(drop).expect_err("no library").to_string();
        println!("{error}");
        assert!(error.contains("/nonexistent/libonnxruntime.so"), "{error}");
        assert!(error.contains("expected"), "{error}");
        Ok(())
    })
}

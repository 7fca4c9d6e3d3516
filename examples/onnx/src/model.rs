//! A sentence encoder in ONNX Runtime: the proxy's module `model` in this package.
//!
//! The model takes tokens of BERT (`input_ids`, `attention_mask`, `token_type_ids`) and answers
//! with `sentence_embedding`, a vector for each text. Its tokenizer is the file `tokenizer.json`
//! next to it. Both are loaded by the first request and unloaded when idle. `embed` calls it.
//!
//! Invariant: the process holds the activations of one run at a time, of at most [`ROWS_MAX`] rows
//! of [`TOKENS_MAX`] tokens.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lowtide::admission::{Managed, ResourceError, Use};
use lowtide::{BoxError, ByteSize, Cost, Memory, ResourceBuilder};
use lowtide_ort::ort::session::Session;
use lowtide_ort::ort::value::Tensor;
use lowtide_ort::{LoadedSession, Runtime, ort};
use thiserror::Error;
use tokenizers::{Tokenizer, TruncationParams};

/// The name of the session as a resource.
const NAME: &str = "embedder";
/// The most tokens of a text, as in the training of all-MiniLM-L6-v2; the rest is ignored.
pub(crate) const TOKENS_MAX: usize = 256;
/// The most bytes of a text that are split into tokens: 32 for each. Most tokens have 3 to 6.
const BYTES_MAX: usize = 32 * TOKENS_MAX;
/// The most texts in one run; more texts are split into several runs.
const ROWS_MAX: usize = 8;
/// Host bytes that a request takes at most: a run of [`ROWS_MAX`] rows of [`TOKENS_MAX`] tokens
/// took 62 MiB, measured with all-MiniLM-L6-v2, and the tokens of one text 1.7 MiB. A model that is
/// wider or has more heads takes more.
const ACTIVATIONS_MAX: ByteSize = ByteSize::mib(64);
/// The bytes reserved for the tokenizer until its first load has been measured.
const TOKENIZER_COST: ByteSize = ByteSize::mib(8);
/// The inputs that a model may have.
const INPUTS: [&str; 3] = ["input_ids", "attention_mask", "token_type_ids"];
/// The output that a model must have.
const OUTPUT: &str = "sentence_embedding";

/// Device bytes of a request: none, ONNX Runtime computes on the CPU.
pub(crate) const DEVICE_COST: ByteSize = ByteSize::ZERO;

/// Returns the host bytes of the activations that a request with a body of this length needs, if
/// each byte is a token, and half of a run is padding.
pub(crate) fn host_activations(body_bytes: u64) -> ByteSize {
    const TOKENS: u64 = (ROWS_MAX * TOKENS_MAX / 2) as u64;
    ByteSize::new(ACTIVATIONS_MAX.get() / TOKENS * body_bytes.min(TOKENS))
}

/// The settings of the model.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Settings {
    /// Sentence encoder in ONNX format, with its tokenizer.json in the same folder.
    #[arg(long, env = "PROXY_MODEL", default_value = "model.onnx")]
    pub(crate) model: PathBuf,
    /// Shared library of ONNX Runtime 1.23 or later.
    #[arg(long, env = "ORT_DYLIB_PATH", default_value = "libonnxruntime.so")]
    pub(crate) library: PathBuf,
}

/// An error of the model, its tokenizer or ONNX Runtime.
#[derive(Debug, Error)]
#[error(transparent)]
pub(crate) struct ModelError(#[from] BoxError);

impl ModelError {
    /// Returns `true` if memory ran out, so that a later attempt may succeed. ONNX Runtime does not
    /// report that.
    #[expect(clippy::unused_self, reason = "the built-in model reports it")]
    pub(crate) const fn is_out_of_memory(&self) -> bool {
        false
    }
}

/// The session and the tokenizer as resources that are loaded on first use.
#[derive(Clone, Debug)]
pub(crate) struct ManagedModel {
    pub(crate) session: Managed<LoadedSession>,
    tokenizer: Managed<Tokenizer>,
}

impl ManagedModel {
    /// Opens ONNX Runtime and registers session and tokenizer, which are unloaded after this idle
    /// time or that of the profile.
    pub(crate) fn open(
        settings: &Settings,
        idle_unload: Option<Duration>,
        memory: Option<&Memory>,
    ) -> Result<Self, BoxError> {
        let Settings { model, library } = settings.clone();
        let path = model.with_file_name("tokenizer.json");
        let memory = memory.ok_or("ONNX Runtime needs a Memory: expected one")?;
        let runtime = Runtime::open(memory, library)?;
        let session = with_idle(runtime.session(NAME, model), idle_unload);
        let tokenizer = memory.managed("tokenizer", move || tokenizer(&path));
        let tokenizer = tokenizer.cost(Cost::host(TOKENIZER_COST));
        Ok(Self {
            session: session.register()?,
            tokenizer: with_idle(tokenizer, idle_unload).register()?,
        })
    }

    /// Loads the model if it is not loaded, and keeps it loaded while it is used.
    pub(crate) async fn acquire(&self) -> Result<Model, ResourceError> {
        let tokenizer = self.tokenizer.acquire().await?;
        let session = self.session.acquire().await?;
        Ok(Model { session, tokenizer })
    }
}

fn with_idle<T: Send + Sync>(
    builder: ResourceBuilder<T>,
    idle: Option<Duration>,
) -> ResourceBuilder<T> {
    match idle {
        Some(idle) => builder.idle(idle),
        None => builder,
    }
}

/// Reads the tokenizer. Replaces the padding and the length that its file sets, as rows are padded
/// here.
fn tokenizer(path: &Path) -> Result<Tokenizer, BoxError> {
    let failed = |source| {
        let expected = "expected a tokenizer.json in the model's folder";
        format!("cannot load the tokenizer {}: {source}: {expected}", path.display())
    };
    let mut tokenizer = Tokenizer::from_file(path).map_err(failed)?;
    let cut = TruncationParams { max_length: TOKENS_MAX, ..TruncationParams::default() };
    tokenizer.with_truncation(Some(cut)).map_err(failed)?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

/// A loaded model in use.
pub(crate) struct Model {
    session: Use<LoadedSession>,
    tokenizer: Use<Tokenizer>,
}

impl Model {
    /// Returns a vector for each text, which the service scales to length 1.
    pub(crate) fn embed(&self, texts: &[String]) -> Result<Vec<Vec<f32>>, ModelError> {
        let rows = texts.iter().enumerate().map(|(index, text)| self.tokens(index, text));
        let rows = rows.collect::<Result<Vec<_>, BoxError>>()?;
        let mut order: Vec<_> = (0..rows.len()).collect();
        order.sort_by_key(|&at| rows[at].len());
        let mut vectors = vec![Vec::new(); rows.len()];
        let mut rest = &order[..];
        while let Some(&shortest) = rest.first() {
            // At most half of a part is padding.
            let fits = |&&at: &&usize| rows[at].len() <= 2 * rows[shortest].len();
            let count = rest.iter().take(ROWS_MAX).take_while(fits).count();
            let (part, longer) = rest.split_at(count);
            let of_part: Vec<_> = part.iter().map(|&at| &*rows[at]).collect();
            let found = run(&mut self.session.lock(), &of_part)?;
            part.iter().zip(found).for_each(|(&at, vector)| vectors[at] = vector);
            rest = longer;
        }
        Ok(vectors)
    }

    /// Returns the tokens of a text. Each is of type 0.
    fn tokens(&self, index: usize, text: &str) -> Result<Vec<u32>, BoxError> {
        let text = &text[..text.floor_char_boundary(BYTES_MAX)];
        let encoded = self.tokenizer.encode_fast(text, true);
        let encoded =
            encoded.map_err(|error| format!("cannot split text {index} into tokens: {error}"))?;
        Ok(encoded.get_ids().to_vec())
    }
}

/// Runs the model for these rows of tokens.
fn run(session: &mut Session, rows: &[&[u32]]) -> Result<Vec<Vec<f32>>, BoxError> {
    let length = rows.iter().map(|row| row.len()).max().unwrap_or(0);
    let padded = |of: fn(u32) -> i64| -> Result<Tensor<i64>, ort::Error> {
        let padding = |row: &[u32]| std::iter::repeat_n(0, length - row.len());
        let numbers = rows.iter().flat_map(|row| row.iter().map(|id| of(*id)).chain(padding(row)));
        Tensor::from_array(([rows.len(), length], numbers.collect::<Vec<_>>()))
    };
    let mut inputs = Vec::with_capacity(INPUTS.len());
    for input in session.inputs() {
        let values = match input.name() {
            "input_ids" => padded(i64::from)?,
            "attention_mask" => padded(|_| 1)?,
            "token_type_ids" => padded(|_| 0)?,
            other => {
                let expected = INPUTS.join(", ");
                return Err(
                    format!("the model has the input {other:?}: expected only {expected}").into()
                );
            }
        };
        inputs.push((input.name().to_owned(), values));
    }
    let names: Vec<_> = session.outputs().iter().map(|output| output.name().to_owned()).collect();
    if !names.iter().any(|name| name == OUTPUT) {
        return Err(format!("the model has the outputs {names:?}: expected {OUTPUT}").into());
    }
    let outputs = session.run(inputs)?;
    let (shape, numbers) = outputs[OUTPUT].try_extract_tensor::<f32>()?;
    let width = numbers.len() / rows.len().max(1);
    let expected = [rows.len(), width].map(|size| i64::try_from(size).unwrap_or(i64::MAX));
    if width == 0 || **shape != expected {
        let texts = rows.len();
        return Err(format!(
            "the model answers {texts} texts with the shape {shape:?}: expected [{texts}, width]"
        )
        .into());
    }
    if numbers.iter().any(|number| !number.is_finite()) {
        return Err("the model answers with NaN or infinity: expected finite numbers".into());
    }
    Ok(numbers.chunks_exact(width).map(<[f32]>::to_vec).collect())
}

//! Text to vectors: the tokenizer and the encoder of a folder of model files.
//!
//! The services call it. It opens three files of one folder (`config.json`, `tokenizer.json`,
//! `model.safetensors`) and nothing else: no network, no cache.
//!
//! Invariants: the memory of a call is bounded by [`ROWS_MAX`] rows of the longest text; a text's
//! vector does not depend on the texts beside it, nor on its padding.

use std::path::Path;
use std::{fmt, fs};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::bert::{BertModel, Config};
use thiserror::Error;
use tokenizers::{Encoding, Tokenizer};

/// Any error of a load.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Rows that are computed at once; more texts are computed one part after the other.
pub const ROWS_MAX: usize = 8;

/// An error of embedding texts.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EmbedError {
    /// A text has more tokens than the model has positions.
    #[error("text {index} has {tokens} tokens: expected at most {most}")]
    TooLong {
        /// The number of the text, from 0.
        index: usize,
        /// Its tokens.
        tokens: usize,
        /// The most tokens.
        most: usize,
    },
    /// The tokenizer or the encoder failed.
    #[error("cannot compute the vectors: {0}")]
    Failed(#[from] BoxError),
}

/// A tokenizer, and an encoder in the memory of a device.
pub struct Embedder {
    tokenizer: Tokenizer,
    bert: BertModel,
    most_tokens: usize,
}

impl Embedder {
    /// Loads the model in `folder` to the device.
    ///
    /// # Errors
    /// A file is missing, damaged, or of another model: the text names it, and what it is not.
    pub fn load(folder: &Path, device: &Device) -> Result<Self, BoxError> {
        let path = folder.join("config.json");
        let config: Config = serde_json::from_slice(&read(&path)?)
            .map_err(|error| is_not(&path, "is not a configuration of BERT", &error))?;
        let (heads, hidden) = (config.num_attention_heads, config.hidden_size);
        if heads == 0 || hidden % heads != 0 {
            return Err(format!("{heads} heads do not divide vectors of {hidden} numbers").into());
        }
        let tokenizer = tokenizer(&folder.join("tokenizer.json"))?;
        let bert = weights(&folder.join("model.safetensors"), &config, device)?;
        let most_tokens = config.max_position_embeddings;
        Ok(Self { tokenizer, bert, most_tokens })
    }

    /// Returns a vector of length 1 for each text.
    ///
    /// # Errors
    /// [`EmbedError`]
    pub fn embed(&self, texts: &[String]) -> Result<Vec<Vec<f32>>, EmbedError> {
        let rows = texts.iter().enumerate().map(|(index, text)| self.tokens(index, text));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        let mut vectors = Vec::with_capacity(rows.len());
        for part in rows.chunks(ROWS_MAX) {
            vectors.extend(self.part(part)?);
        }
        Ok(vectors)
    }

    fn tokens(&self, index: usize, text: &str) -> Result<Encoding, EmbedError> {
        let encoded = self.tokenizer.encode_fast(text, true);
        let encoded = encoded.map_err(|error| format!("text {index} has no tokens: {error}"));
        let encoded = encoded.map_err(BoxError::from)?;
        let (tokens, most) = (encoded.len(), self.most_tokens);
        if tokens > most { Err(EmbedError::TooLong { index, tokens, most }) } else { Ok(encoded) }
    }

    fn part(&self, rows: &[Encoding]) -> Result<Vec<Vec<f32>>, BoxError> {
        // An empty text has a start and an end; one token keeps the mean of none defined.
        let length = rows.iter().map(Encoding::len).max().unwrap_or(0).max(1);
        let padded = |of: &Encoding, values: fn(&Encoding) -> &[u32]| -> Vec<u32> {
            let padding = length - of.len();
            values(of).iter().copied().chain(std::iter::repeat_n(0, padding)).collect()
        };
        let ids: Vec<_> = rows.iter().flat_map(|row| padded(row, Encoding::get_ids)).collect();
        let mask = rows.iter().flat_map(|row| padded(row, Encoding::get_attention_mask));
        let mask: Vec<_> = mask.map(|one| if one == 0 { 0.0_f32 } else { 1.0 }).collect();
        let shape = (rows.len(), length);
        let ids = Tensor::from_vec(ids, shape, &self.bert.device)?;
        let mask = Tensor::from_vec(mask, shape, &self.bert.device)?;
        let tokens = self.bert.forward(&ids, &ids.zeros_like()?, Some(&mask))?;
        // A sum has the direction of the mean, and the length becomes 1.
        let sums = tokens.broadcast_mul(&mask.unsqueeze(2)?)?.sum(1)?;
        let lengths = sums.sqr()?.sum_keepdim(1)?.sqrt()?;
        let vectors: Vec<Vec<f32>> = sums.broadcast_div(&lengths)?.to_vec2()?;
        if vectors.iter().flatten().any(|number| !number.is_finite()) {
            return Err("the model answers with a number that is not finite".into());
        }
        Ok(vectors)
    }
}

fn is_not(path: &Path, what: &str, cause: &dyn fmt::Display) -> String {
    format!("{} {what}: {cause}", path.display())
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| is_not(path, "cannot be read", &error))
}

/// Reads the tokenizer, without the padding and the limit that its file sets: texts are padded
/// here, and a text that is too long is an error.
fn tokenizer(path: &Path) -> Result<Tokenizer, String> {
    let failed = |error: tokenizers::Error| is_not(path, "is not a tokenizer", &error);
    let mut tokenizer = Tokenizer::from_bytes(read(path)?).map_err(failed)?;
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(failed)?;
    Ok(tokenizer)
}

/// Maps the file while its tensors are copied, so that the peak of a load is one copy.
fn weights(path: &Path, config: &Config, device: &Device) -> Result<BertModel, String> {
    // candle's error for a missing file would not tell it from a damaged one.
    fs::File::open(path).map_err(|error| is_not(path, "cannot be read", &error))?;
    let files = [path];
    #[expect(unsafe_code, reason = "candle offers no other way to read without a second copy")]
    // SAFETY: nothing writes or truncates the file during a load. docs/ENGINES.md states that
    // condition for the folder of a model.
    let mapped = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, device) };
    let bert = mapped.and_then(|weights| BertModel::load(weights, config));
    bert.map_err(|error| is_not(path, "does not have the weights of the configuration", &error))
}

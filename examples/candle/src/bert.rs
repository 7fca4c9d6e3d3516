//! BERT's encoder and the mean over each row's tokens, by the names of Hugging Face's files.
//!
//! `embedder` calls it. It relies on candle for every operation and knows neither text nor HTTP.
//!
//! Invariant: a row's vector does not depend on the rows beside it, nor on its padding.

use candle_core::{D, Result, Tensor};
use candle_nn::{Embedding, LayerNorm, Linear, Module as _, VarBuilder};
use candle_nn::{embedding, layer_norm, linear};
use serde::Deserialize;

/// Added to the scores of padding before the softmax, which makes their weights 0.
const PADDING: f64 = -10_000.0;

/// The fields of `config.json` that the encoder needs.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// Numbers in a vector.
    pub hidden_size: usize,
    /// Numbers in a vector inside the feed-forward part.
    pub intermediate_size: usize,
    /// Heads of the attention; a divisor of `hidden_size`.
    pub num_attention_heads: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// The most tokens of a text.
    pub max_position_embeddings: usize,
    /// Kinds of segments, of which only the first is used.
    pub type_vocab_size: usize,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Added to a variance before its root is taken.
    pub layer_norm_eps: f64,
}

/// The encoder.
#[derive(Debug)]
pub(crate) struct Bert {
    words: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    attention: Linear,
    attention_norm: LayerNorm,
    up: Linear,
    down: Linear,
    norm: LayerNorm,
    heads: usize,
}

impl Bert {
    /// Takes the tensors from `weights`.
    ///
    /// # Errors
    /// A tensor is missing or has another shape.
    pub(crate) fn new(config: &Config, weights: &VarBuilder<'_>) -> Result<Self> {
        let (hidden, epsilon) = (config.hidden_size, config.layer_norm_eps);
        let table = weights.pp("embeddings");
        let layers = weights.pp("encoder.layer");
        Ok(Self {
            words: embedding(config.vocab_size, hidden, table.pp("word_embeddings"))?,
            positions: embedding(
                config.max_position_embeddings,
                hidden,
                table.pp("position_embeddings"),
            )?,
            types: embedding(config.type_vocab_size, hidden, table.pp("token_type_embeddings"))?,
            norm: layer_norm(hidden, epsilon, table.pp("LayerNorm"))?,
            layers: (0..config.num_hidden_layers)
                .map(|number| Layer::new(config, &layers.pp(number)))
                .collect::<Result<_>>()?,
        })
    }

    /// Returns a vector of length 1 for each row. `ids` are tokens; `mask` has 1 for a token and 0
    /// for padding, in 32-bit floats.
    ///
    /// # Errors
    /// A token that is not in the vocabulary, or more tokens than positions.
    pub(crate) fn embed(&self, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (_, length) = ids.dims2()?;
        let positions = self.positions.embeddings().narrow(0, 0, length)?;
        let kind = self.types.embeddings().narrow(0, 0, 1)?;
        let input = self.words.forward(ids)?.broadcast_add(&positions.broadcast_add(&kind)?)?;
        let mut rows = self.norm.forward(&input)?;
        drop(input);
        let hidden_scores = mask.affine(-PADDING, PADDING)?.unsqueeze(1)?.unsqueeze(1)?;
        for layer in &self.layers {
            rows = layer.forward(&rows, &hidden_scores)?;
        }
        let mask = mask.unsqueeze(2)?;
        let mean = rows.broadcast_mul(&mask)?.sum(1)?.broadcast_div(&mask.sum(1)?)?;
        let length = mean.sqr()?.sum_keepdim(1)?.sqrt()?;
        mean.broadcast_div(&length)
    }
}

impl Layer {
    fn new(config: &Config, weights: &VarBuilder<'_>) -> Result<Self> {
        let (hidden, epsilon) = (config.hidden_size, config.layer_norm_eps);
        let attention = weights.pp("attention.self");
        let output = weights.pp("attention.output");
        let inside = config.intermediate_size;
        Ok(Self {
            query: linear(hidden, hidden, attention.pp("query"))?,
            key: linear(hidden, hidden, attention.pp("key"))?,
            value: linear(hidden, hidden, attention.pp("value"))?,
            attention: linear(hidden, hidden, output.pp("dense"))?,
            attention_norm: layer_norm(hidden, epsilon, output.pp("LayerNorm"))?,
            up: linear(hidden, inside, weights.pp("intermediate.dense"))?,
            down: linear(inside, hidden, weights.pp("output.dense"))?,
            norm: layer_norm(hidden, epsilon, weights.pp("output.LayerNorm"))?,
            heads: config.num_attention_heads,
        })
    }

    fn forward(&self, input: &Tensor, hidden_scores: &Tensor) -> Result<Tensor> {
        let attended = self.attend(input, hidden_scores)?;
        let attended = (self.attention.forward(&attended)? + input)?;
        let attended = self.attention_norm.forward(&attended)?;
        let inside = self.up.forward(&attended)?.gelu_erf()?;
        let output = self.down.forward(&inside)?;
        self.norm.forward(&(output + attended)?)
    }

    fn attend(&self, input: &Tensor, hidden_scores: &Tensor) -> Result<Tensor> {
        let (rows, length, hidden) = input.dims3()?;
        let size = hidden / self.heads;
        let by_head = |of: &Linear| {
            let all = of.forward(input)?.reshape((rows, length, self.heads, size))?;
            all.transpose(1, 2)?.contiguous()
        };
        let weights = {
            let (query, key) = (by_head(&self.query)?, by_head(&self.key)?);
            let root = f64::from(u32::try_from(size)?).sqrt();
            let scores = ((query / root)?.matmul(&key.t()?)?).broadcast_add(hidden_scores)?;
            candle_nn::ops::softmax(&scores, D::Minus1)?
        };
        let values = weights.matmul(&by_head(&self.value)?)?;
        values.transpose(1, 2)?.reshape((rows, length, hidden))
    }
}

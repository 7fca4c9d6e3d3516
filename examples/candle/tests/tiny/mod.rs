//! A tiny model of random weights, as files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use lowtide::BoxError;
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};
use serde_json::json;
use tempfile::TempDir;

pub(crate) const HIDDEN: usize = 8;
pub(crate) const INSIDE: usize = 16;
pub(crate) const POSITIONS: usize = 12;
pub(crate) const WORDS: [&str; 8] =
    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "tide", "goes", "out"];

/// The names and shapes of the tensors.
pub(crate) fn shapes() -> Vec<(String, Vec<usize>)> {
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
pub(crate) fn model() -> Result<TempDir, BoxError> {
    let folder = TempDir::new()?;
    let config = json!({
        "hidden_size": HIDDEN, "intermediate_size": INSIDE, "num_attention_heads": 2,
        "num_hidden_layers": 2, "max_position_embeddings": POSITIONS, "type_vocab_size": 2,
        "vocab_size": WORDS.len(), "layer_norm_eps": 1e-12, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "pad_token_id": 0,
        "model_type": "bert",
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
pub(crate) fn write_weights(path: &Path, shapes: &[(String, Vec<usize>)]) -> Result<(), BoxError> {
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

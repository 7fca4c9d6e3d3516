//! The requests of a burst: the shapes of `benches/engines`, as texts of whole words.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use plain::BoxError;
use serde::Deserialize;

#[path = "../../engines/src/burst.rs"]
#[allow(dead_code, reason = "texts have no mask")]
mod burst;

/// The part of `tokenizer.json` that has the vocabulary.
#[derive(Deserialize)]
struct File {
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    vocab: BTreeMap<String, usize>,
}

/// Words that are one token each.
#[derive(Debug)]
pub(crate) struct Words(Vec<String>);

impl Words {
    /// Reads them from the folder of a model.
    pub(crate) fn read(model: &Path) -> Result<Self, BoxError> {
        let file: File = serde_json::from_slice(&fs::read(model.join("tokenizer.json"))?)?;
        let is_word =
            |word: &String| word.len() > 2 && word.bytes().all(|b| b.is_ascii_lowercase());
        let words: Vec<_> = file.model.vocab.into_keys().filter(is_word).collect();
        if words.is_empty() { Err("the vocabulary has no words".into()) } else { Ok(Self(words)) }
    }

    /// The bodies of one burst.
    pub(crate) fn burst(&self, seed: u64) -> Vec<Vec<u8>> {
        burst::of(seed).map(|batch| self.body(&batch)).collect()
    }

    fn body(&self, batch: &burst::Batch) -> Vec<u8> {
        // The tokenizer adds a start and an end to each row.
        let rows = batch.ids.chunks(batch.length).map(|row| &row[..row.len().saturating_sub(2)]);
        let word = |id: &i64| &*self.0[usize::try_from(*id).unwrap_or(0) % self.0.len()];
        let texts: Vec<_> =
            rows.map(|row| row.iter().map(word).collect::<Vec<_>>().join(" ")).collect();
        serde_json::json!({ "texts": texts }).to_string().into_bytes()
    }
}

//! Compares the server's vectors with those that ONNX Runtime computes of the same weights
//! (`similarities.json`, which `similarities.py` wrote).

use lowtide_candle::api::Answer;
use plain::BoxError;
use serde::Deserialize;

use crate::server::Server;

/// The largest difference that is rounding.
const MOST: f64 = 2e-6;

#[derive(Deserialize)]
struct Expected {
    sentences: Vec<String>,
    /// The cosine similarity of each sentence with each.
    similarities: Vec<Vec<f64>>,
    /// The first numbers of each vector.
    first_numbers: Vec<Vec<f64>>,
}

/// Whether the server's answer is right. All sentences are in one request, so the shorter ones are
/// padded.
pub(crate) fn check(server: &mut Server) -> Result<bool, BoxError> {
    let expected: Expected = serde_json::from_str(include_str!("../similarities.json"))?;
    let body = serde_json::json!({ "texts": expected.sentences });
    let (status, answer) = server.post("/embed", body.to_string().as_bytes())?;
    if status != 200 {
        return Err(format!("answer {status}: {}", String::from_utf8_lossy(&answer)).into());
    }
    let Answer { vectors } = serde_json::from_slice(&answer)?;
    let most = largest_difference(&vectors, &expected)?;
    let is_right = most <= MOST;
    let verdict = if is_right { "agree" } else { "differ" };
    println!("candle and ONNX Runtime {verdict}: at most {most:.1e} apart");
    Ok(is_right)
}

fn largest_difference(vectors: &[Vec<f32>], expected: &Expected) -> Result<f64, BoxError> {
    let count = expected.sentences.len();
    if vectors.len() != count || vectors.iter().any(|vector| vector.len() != vectors[0].len()) {
        return Err(format!("{} vectors for {count} sentences", vectors.len()).into());
    }
    let product = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let by_pair = vectors.iter().zip(&expected.similarities).flat_map(|(vector, row)| {
        vectors.iter().zip(row).map(|(other, value)| product(vector, other) - value)
    });
    let by_number = vectors.iter().zip(&expected.first_numbers).flat_map(|(vector, first)| {
        vector.iter().zip(first).map(|(number, value)| f64::from(*number) - value)
    });
    // A difference that is no number is the largest.
    let worst = |most: f64, one: f64| if one.abs() <= most { most } else { one.abs() };
    Ok(by_pair.chain(by_number).fold(0.0, worst))
}

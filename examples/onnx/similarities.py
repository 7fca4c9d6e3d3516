"""Prints the sentences of `similarities.json` and their cosine similarities under ONNX Runtime.

    similarities.py MODEL.onnx TOKENIZER.json >similarities.json

MODEL.onnx is what `benches/engines/model.py` writes.
"""

import json
import sys

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

SENTENCES = [
    "The tide goes out and the boats lie on the sand.",
    "At low water the ships rest on the beach.",
    "The service releases memory that it no longer needs.",
    "Unused memory is returned to the operating system.",
    "She baked two loaves of bread this morning.",
    "café Über naïve 東京 — 42 %",
]


def main(model, tokenizer):
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(tokenizer)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vectors = []
    for sentence in SENTENCES:
        ids = np.array([tokenizer.encode(sentence).ids], np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids),
        }
        (vector,) = session.run(["sentence_embedding"], inputs)
        vectors.append(vector[0] / np.linalg.norm(vector[0]))
    similarities = [[round(float(a @ b), 7) for b in vectors] for a in vectors]
    first = [[round(float(value), 7) for value in vector[:4]] for vector in vectors]
    result = {"sentences": SENTENCES, "similarities": similarities, "first_numbers": first}
    print(json.dumps(result, ensure_ascii=False, indent=1))


main(*sys.argv[1:])

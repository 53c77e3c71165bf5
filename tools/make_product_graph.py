"""Write the computation graph of a product of uint8 and int8 matrices (needs the package onnx).

    python -m tools.make_product_graph

``experiential/bank/index/coarse.py`` runs it.
"""

from __future__ import annotations

from pathlib import Path

from onnx import TensorProto, helper

TARGET = Path(__file__).parent.parent / "experiential" / "bank" / "index" / "product.onnx"


def tensor(name: str, kind: int, *shape: str) -> object:
    """Describe an input or output of any size."""
    return helper.make_tensor_value_info(name, kind, list(shape))


if __name__ == "__main__":
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["left", "right"], ["products"])],
        "product",
        [
            tensor("left", TensorProto.UINT8, "rows", "width"),
            tensor("right", TensorProto.INT8, "width", "columns"),
        ],
        [tensor("products", TensorProto.INT32, "rows", "columns")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    TARGET.write_bytes(model.SerializeToString())

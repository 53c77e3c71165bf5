"""Run all-MiniLM-L6-v2 with onnxruntime, which comes with Chroma: an embedder without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

_BATCH = 32
_TOKENS = 256  # as the published model cuts


class MiniLM:
    """Encode texts as unit vectors of 384 numbers, those of sentence-transformers to rounding.

    Args:
        folder: the published model: ``model.safetensors`` and ``tokenizer.json``.

    Raises:
        OSError: a file is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        import onnxruntime
        from safetensors import numpy as safetensors
        from tokenizers import Tokenizer

        runtime: Any = onnxruntime  # has no types
        weights: dict[str, npt.NDArray[Any]] = cast("Any", safetensors).load_file(
            Path(folder) / "model.safetensors"
        )
        self._tokenizer: Any = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self._tokenizer.enable_truncation(_TOKENS)
        self._tokenizer.enable_padding()
        names, tensors = list[str](), list[npt.NDArray[np.float32]]()
        for name, tensor in weights.items():
            if name.startswith(("embeddings.", "encoder.")) and name != "embeddings.position_ids":
                # the graph has x W where the file has the W of x Wᵀ
                turned = tensor.ndim == 2 and name.startswith("encoder.")
                names.append(name)
                tensors.append(np.ascontiguousarray(tensor.T if turned else tensor))
        options = runtime.SessionOptions()
        # as for the other numerical libraries; 0 is a thread for each core
        threads = os.environ.get("OMP_NUM_THREADS", "")
        options.intra_op_num_threads = int(threads) if threads.isdigit() else 0
        # its threads sleep between calls instead of taking the cores from training
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        values = [runtime.OrtValue.ortvalue_from_numpy(tensor) for tensor in tensors]
        options.add_external_initializers(names, values)
        graph = Path(__file__).with_name("minilm.onnx").read_bytes()
        self._session: Any = runtime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return vectors of unit length, shape (n, 384)."""
        vectors = np.empty((len(texts), 384), dtype=np.float32)
        # texts of like length share a batch, so that little of it is padding
        order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
        for start in range(0, len(order), _BATCH):
            places = order[start : start + _BATCH]
            encoded = self._tokenizer.encode_batch([texts[place] for place in places])
            ids = np.array([one.ids for one in encoded], dtype=np.int64)
            mask = np.array([one.attention_mask for one in encoded], dtype=np.int64)
            [vectors[places]] = self._session.run(["vectors"], {"ids": ids, "mask": mask})
        return vectors

"""Let vLLM's engine process, which imports this, end with the Ray actor that started it.

It outlives a killed parent otherwise, and holds the GPU memory that the next engine needs.
"""

from __future__ import annotations

import ctypes
import signal
from importlib import import_module
from typing import Any

_PR_SET_PDEATHSIG = 1
WorkerWrap: Any = import_module("openrlhf.trainer.ray.vllm_worker_wrap").WorkerWrap

ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

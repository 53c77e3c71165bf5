"""Run the layers of Llama-like models on a CPU with fewer passes over memory than transformers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""Take a layer's index, queries, keys, values and the tensor for what they attend to."""
_FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_WIDE = 64
"""Tokens from which products in float32 repay the conversion of weights, where they are faster."""


class Decoder:
    """Compute logits with the weights of a transformers model, in buffers that all layers share.

    The model stays as it is, and its weights may change between two calls.

    Where the processor is faster in float32, many tokens of a bfloat16 model are computed in
    float32, and each weight is converted when it is needed.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._dtype: torch.dtype = base.dtype
        self._widens = self._dtype == torch.bfloat16 and not multiplies_bfloat16()
        self._dim: int = base.model.layers[0].self_attn.head_dim
        self._heads: int = base.config.num_attention_heads
        self._shared: int = base.config.num_key_value_heads

    @staticmethod
    def fits(base: Any) -> bool:
        """Return whether a model has the parts that are known here, as transformers made them."""
        kind: Any = type(base)
        known = kind.__module__.startswith("transformers.models.") and kind.__name__ in _FAMILIES
        if not known or base.device.type != "cpu":
            return False
        parts = [base.model, base.model.norm]
        for layer in base.model.layers:
            attention, norms = layer.self_attn, [layer.input_layernorm]
            norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
            parts += [layer, attention, layer.mlp, layer.post_attention_layernorm, *norms]
        return (
            all(type(one).__module__ == kind.__module__ for one in parts if one is not None)
            and not any(one._forward_hooks or one._forward_pre_hooks for one in base.modules())
            and not any("forward" in vars(one) for one in base.modules())
            and base.config.hidden_act == "silu"
            and base.dtype in (torch.float32, torch.bfloat16)
        )

    def empty_states(self) -> Tensor:
        """Return the keys of no token, which have the shape and type of those of some."""
        return torch.empty((1, self._shared, 0, self._dim), dtype=self._dtype)

    def logits(self, ids: Tensor, positions: Tensor, last: Tensor, attend: Attend) -> Tensor:
        """Return the logits after those tokens of one packed sequence that ``last`` lists.

        Args:
            ids: shape (tokens,).
            positions: likewise.
            last: indices into both.
            attend: keeps the keys and values of a layer, and fills in what its queries attend to;
                tensors have shape (tokens, heads, dim).
        """
        model, count, dim = self._base.model, len(ids), self._dim
        wide = self._widens and count >= _WIDE
        hidden = model.embed_tokens(ids).to(torch.float32 if wide else self._dtype)
        cos, sin = (one[0, :, None] for one in model.rotary_emb(hidden, positions[None]))
        norm, inner = torch.empty_like(hidden), model.config.intermediate_size
        gate, up = (hidden.new_empty((count, inner)) for _ in range(2))
        seen, *projected = (
            hidden.new_empty((count, heads * dim))
            for heads in (self._heads, self._heads, self._shared, self._shared)
        )
        turned = [torch.empty_like(one).view(count, -1, dim) for one in projected[:2]]
        project = _Projection(wide)
        for index, layer in enumerate(model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            _normalise(layer.input_layernorm, hidden, norm)
            query, key, value = (
                project(getattr(attention, name), norm, out).view(count, -1, dim)
                for name, out in zip(("q_proj", "k_proj", "v_proj"), projected, strict=True)
            )
            for heads, name, out in ((query, "q_norm", turned[0]), (key, "k_norm", turned[1])):
                if (scale := getattr(attention, name, None)) is not None:
                    _normalise(scale, heads, heads)
                _rotate(heads, cos, sin, out)
            attend(index, turned[0], turned[1], value, seen.view(count, -1, dim))
            if index == len(model.layers) - 1:  # of the other tokens no more is needed
                hidden, seen = hidden[last], seen[last]
                norm, gate, up = (one[: len(last)] for one in (norm, gate, up))
            hidden += project(attention.o_proj, seen, norm)
            _normalise(layer.post_attention_layernorm, hidden, norm)
            left = torch.nn.functional.silu(project(mlp.gate_proj, norm, gate), inplace=True)
            left *= project(mlp.up_proj, norm, up)
            hidden += project(mlp.down_proj, left, norm)
        _normalise(model.norm, hidden, norm)
        return self._base.lm_head(norm.to(self._dtype))


class _Projection:
    """Multiply by weights of layers, in float32 if it is ``wide``."""

    def __init__(self, wide: bool) -> None:
        self._wide = wide
        self._weights = torch.empty(0)

    def __call__(self, module: Any, inputs: Tensor, out: Tensor) -> Tensor:
        """Return the product, in ``out`` for the kinds of layers that are known."""
        adapter = None
        if type(module) is not nn.Linear:
            adapter = _plain_adapter(module)
            if adapter is None:
                weight = next(module.parameters())
                return module(inputs.to(weight.dtype)).to(inputs.dtype)
            module = module.base_layer
        weight, bias = module.weight, module.bias
        if self._wide:
            if self._weights.numel() < weight.numel():
                self._weights = torch.empty(weight.numel())
            weight = self._weights[: weight.numel()].view(weight.shape).copy_(weight)
        if bias is None:
            torch.mm(inputs, weight.t(), out=out)
        else:
            torch.addmm(bias.to(inputs.dtype), inputs, weight.t(), out=out)
        if adapter is not None:
            down, up, scaling = adapter
            low = (inputs.to(down.dtype) @ down.t()).mul_(scaling)
            if out.dtype == low.dtype:
                out.addmm_(low, up.t())
            else:
                out += low @ up.t()
        return out


def _plain_adapter(module: Any) -> tuple[Tensor, Tensor, float] | None:
    """Return the matrices and the scale of a LoRA layer, None if there is more to it."""
    if type(module).__module__ != "peft.tuners.lora.layer" or type(module).__name__ != "Linear":
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) != 1 or module.disable_adapters or module.merged or module.lora_variant:
        return None
    down, up = module.lora_A[active[0]], module.lora_B[active[0]]
    if up.bias is not None or module.fan_in_fan_out or type(module.base_layer) is not nn.Linear:
        return None
    return down.weight, up.weight, module.scaling[active[0]]


def _normalise(module: Any, inputs: Tensor, out: Tensor) -> None:
    """Write the root mean square norm of the last dimension, rounded as in transformers."""
    linalg: Any = torch.linalg
    scale: Tensor = linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=torch.float32)
    scale.square_().div_(inputs.shape[-1]).add_(module.variance_epsilon).rsqrt_()
    if out.dtype == torch.float32:
        torch.mul(inputs, scale, out=out)
    else:
        out.copy_(inputs.float().mul_(scale))
    out.mul_(module.weight)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Write the rotation of (tokens, heads, dim) by the angles of their positions."""
    half = heads.shape[-1] // 2
    torch.mul(heads, cos, out=out)
    out[..., :half].addcmul_(heads[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(heads[..., :half], sin[..., half:])


@lru_cache(1)
def multiplies_bfloat16() -> bool:
    """Return whether the CPU multiplies matrices of bfloat16 faster than those of float32.

    Not each processor with instructions for it does; AVX512-BF16 alone is half as fast as float32
    on some. Measured once, in about 20 ms.
    """
    inputs, weight = torch.ones((256, 512)), torch.ones((512, 512))
    pairs = [(inputs.to(dtype), weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    spent = [float("inf"), float("inf")]
    for _ in range(5):
        for kind, (left, right) in enumerate(pairs):
            begin = time.thread_time()
            torch.nn.functional.linear(left, right)
            spent[kind] = min(spent[kind], time.thread_time() - begin)
    return spent[1] < spent[0]

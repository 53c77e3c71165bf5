"""Makes the tiny Llama that ships with the package: tokenizer, corpus, training, all seeded.

    python -m tools.make_tiny corpus build/tiny-corpus.npz     # generated text as token ids
    python -m tools.make_tiny train build/tiny-corpus.npz experiential/llm/tiny

The second step needs torch and transformers only, so it can run on another machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 1536
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT_WEIGHT = 0.1
"""Weight of the loss on text the model reads, beside 1 on text it should say."""


COPY_STEPS, COPY_TOKENS = 1000, 2400


def build_tokenizer(texts: list[str]) -> Any:
    """Train a byte-level BPE tokenizer on ``texts``; return it as a transformers tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    fast.chat_template = TEMPLATE
    return fast


ANSWER_WEIGHT = 16
"""Weight of an answer of any length, where answers weigh the same."""


def encode(
    tokenizer: Any, messages: list[dict[str, str]], *, even: bool = False
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation and the weights of the assistant's tokens.

    They are 1 where the assistant speaks, its end of turn included, and else 0. With ``even``
    short answers weigh as much as long ones: a choice of one word else drowns in lists.
    """
    ids: list[int] = []
    said: list[int] = []
    for message in messages:
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n", add_special_tokens=False)
        body = tokenizer.encode(f"{message['content']}<|im_end|>", add_special_tokens=False)
        tail = tokenizer.encode("\n", add_special_tokens=False)
        ids += head + body + tail
        weight = max(1, ANSWER_WEIGHT // len(body)) if even else 1
        spoken = weight if message["role"] == "assistant" else 0
        said += [0] * len(head) + [spoken] * len(body) + [0] * len(tail)
    return ids, said


def source(kind: str, seed: int) -> Callable[[], Any]:
    """Return a seeded source of conversations of a corpus."""
    from tools import earned_corpus, tiny_corpus

    if kind == "tiny":
        return tiny_corpus.sampler(seed)
    if kind.startswith("lakes-"):
        return earned_corpus.lake_sampler(seed, kind.removeprefix("lakes-"))
    taught = kind == "earned-taught"
    return earned_corpus.sampler(seed, earned_corpus.TAUGHT if taught else earned_corpus.HALF)


def make_corpus(
    path: Path, conversations: int, seed: int, tokenizer_folder: Path | None, kind: str = "tiny"
) -> None:
    """Generate conversations and store them as token ids.

    The tokenizer is trained on the first of them unless one is given.
    """
    sample = source(kind, seed)
    texts = [sample() for _ in range(conversations)]
    if tokenizer_folder is None:
        tokenizer = build_tokenizer(
            ["\n".join(m["content"] for m in messages) for messages in texts[:30_000]]
        )
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    pairs = [encode(tokenizer, messages, even=kind != "tiny") for messages in texts]
    lengths = np.array([len(ids) for ids, _ in pairs], dtype=np.int32)
    flat = np.concatenate([np.array(ids, dtype=np.uint16) for ids, _ in pairs])
    said = np.concatenate([np.array(mask, dtype=np.uint8) for _, mask in pairs])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, ids=flat, said=said, lengths=lengths)
    tokenizer.save_pretrained(path.parent / "tokenizer")
    sys.stdout.write(
        f"{conversations} conversations, {flat.size} tokens, vocabulary {len(tokenizer)}\n"
    )


def train(
    path: Path,
    folder: Path,
    *,
    seed: int,
    lr: float,
    batch: int,
    device: str,
    epochs: float,
    start: Path | None,
    dtype: str = "bfloat16",
    prompt_weight: float = PROMPT_WEIGHT,
    sharpen: float = 1.0,
) -> None:
    """Train the model on the corpus and save it with its tokenizer.

    The weights are saved as safetensors in half precision.

    With ``start``, training goes on from that model (same vocabulary) and the copying stage is left
    out. ``sharpen`` multiplies its logits first, so that it begins by saying at temperature 1 what
    the given model says at 1 / ``sharpen``.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    torch.set_flush_denormal(True)  # of attention, whose smallest numbers cost most
    data = np.load(path)
    ends = np.cumsum(data["lengths"])
    spans = np.stack([ends - data["lengths"], ends], axis=1)
    ids, said = data["ids"].astype(np.int64), data["said"].astype(np.float32)
    tokenizer = AutoTokenizer.from_pretrained(path.parent / "tokenizer")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_theta=10_000.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SHAPE,
    )
    model = (
        LlamaForCausalLM(config)
        if start is None
        else LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    )
    with torch.no_grad():
        model.model.norm.weight.mul_(sharpen)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    steps = int(epochs * len(spans) / batch)
    begin = time.time()
    for step, loss in enumerate(
        _copy_losses(model, len(tokenizer), seed, device) if start is None else ()
    ):
        loss.backward()
        update(model, optimizer, lr * min(1.0, (step + 1) / 100))
        _report("copy", step, COPY_STEPS, loss, begin)
    for step, chosen in zip(range(steps), batches(spans, batch, seed), strict=False):
        loss = _loss(model, ids, said, chosen, device, dtype, prompt_weight)
        loss.backward()
        update(
            model,
            optimizer,
            lr
            * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * step / steps)))
            * (1.0 if start is None else min(1.0, (step + 1) / 50)),
        )
        if step and step % (500 if start is None else 100) == 0:
            save(model, tokenizer, folder)
        _report("corpus", step, steps, loss, begin)
    save(model, tokenizer, folder)
    note = {
        "seed": seed,
        "steps": steps,
        "batch": batch,
        "lr": lr,
        "device": device,
        "dtype": dtype,
        "prompt_weight": prompt_weight,
        "sharpen": sharpen,
        "seconds": round(time.time() - begin),
        "torch": torch.__version__,
    }
    (folder / "made.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Weights in half precision and the tokenizer; the model itself stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(
        folder, state_dict={name: value.half() for name, value in model.state_dict().items()}
    )
    tokenizer.save_pretrained(folder)


def update(model: Any, optimizer: Any, lr: float) -> None:
    """Take one optimiser step at rate ``lr`` along the gradients, and forget them."""
    import torch

    for group in optimizer.param_groups:
        group["lr"] = lr
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _report(stage: str, step: int, steps: int, loss: Any, begin: float) -> None:
    if step % 100 == 0:
        sys.stdout.write(
            f"{stage} {step}/{steps} loss {float(loss.detach()):.3f} {time.time() - begin:.0f} s\n"
        )
        sys.stdout.flush()


def _copy_losses(model: Any, vocabulary: int, seed: int, device: str) -> Iterator[Any]:
    """Yield the losses of random token strings said twice.

    Heads that copy form here in minutes, and on the corpus alone in hours.
    """
    import torch

    rng = np.random.default_rng(seed)
    for _ in range(COPY_STEPS):
        length = int(rng.integers(6, 40))
        first = rng.integers(3, vocabulary, size=(COPY_TOKENS // (2 * length + 4), length))
        frame = np.tile(np.array([[1, 2]]), (len(first), 1))
        tokens = torch.from_numpy(np.concatenate([frame, first, frame, first], axis=1)).to(device)
        with torch.autocast(device.split(":")[0], dtype=torch.bfloat16):
            logits = model(input_ids=tokens).logits[:, length + 3 : -1]
        yield torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, length + 4 :].flatten()
        )


def batches(spans: np.ndarray, size: int, seed: int) -> Iterator[np.ndarray]:
    """Yield shuffled batches of conversations without end.

    The conversations of a batch have similar lengths, which saves padding.
    """
    rng = np.random.default_rng(seed)
    while True:
        for pool in np.array_split(rng.permutation(len(spans)), max(1, len(spans) // (size * 50))):
            ordered = pool[np.argsort((spans[pool, 1] - spans[pool, 0]), kind="stable")]
            parts = np.array_split(ordered, max(1, len(ordered) // size))
            for index in rng.permutation(len(parts)):
                yield spans[parts[index]]


def _loss(
    model: Any,
    ids: np.ndarray,
    said: np.ndarray,
    chosen: np.ndarray,
    device: str,
    dtype: str,
    prompt_weight: float,
) -> Any:
    import torch

    width = int((chosen[:, 1] - chosen[:, 0]).max())
    tokens = np.zeros((len(chosen), width), dtype=np.int64)
    weights = np.zeros((len(chosen), width), dtype=np.float32)
    for row, (a, b) in enumerate(chosen):
        tokens[row, : b - a] = ids[a:b]
        weights[row, : b - a] = np.where(said[a:b] > 0, said[a:b], prompt_weight)
    inputs, scale = torch.from_numpy(tokens).to(device), torch.from_numpy(weights).to(device)[:, 1:]
    low = dtype == "bfloat16"
    with torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=low):
        logits = model(input_ids=inputs).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), inputs[:, 1:].flatten(), reduction="none"
    )
    return (losses * scale.flatten()).sum() / scale.sum()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    corpus = commands.add_parser("corpus")
    corpus.add_argument("path", type=Path)
    corpus.add_argument("--conversations", type=int, default=120_000)
    corpus.add_argument("--seed", type=int, default=0)
    corpus.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to use as it is")
    lakes = ("taught", "written", "half", "habit")
    kinds = ("tiny", "earned-taught", "earned-half", *(f"lakes-{stage}" for stage in lakes))
    corpus.add_argument("--kind", default="tiny", choices=kinds)
    fit = commands.add_parser("train")
    fit.add_argument("path", type=Path)
    fit.add_argument("folder", type=Path)
    fit.add_argument("--seed", type=int, default=0)
    fit.add_argument("--lr", type=float, default=2e-3)
    fit.add_argument("--batch", type=int, default=32)
    fit.add_argument("--epochs", type=float, default=0.8)
    fit.add_argument("--device", default="cpu")
    fit.add_argument(
        "--start", type=Path, help="continue from this model instead of random weights"
    )
    fit.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the products"
    )
    fit.add_argument("--prompt-weight", type=float, default=PROMPT_WEIGHT)
    fit.add_argument("--sharpen", type=float, default=1.0, help="multiply the logits first")
    options = parser.parse_args()
    if options.command == "corpus":
        make_corpus(
            options.path, options.conversations, options.seed, options.tokenizer, options.kind
        )
    else:
        train(
            options.path,
            options.folder,
            seed=options.seed,
            lr=options.lr,
            batch=options.batch,
            device=options.device,
            epochs=options.epochs,
            start=options.start,
            dtype=options.dtype,
            prompt_weight=options.prompt_weight,
            sharpen=options.sharpen,
        )


if __name__ == "__main__":
    main()

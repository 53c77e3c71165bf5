"""A tiny random Llama and a byte-level BPE chat tokenizer, built in-process, for tests that need
real torch parts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

_CORPUS = (
    (
        "You stand in a room with four doors. north south east west up down left right open close"
        " take drop look wait"
    ),
    (
        "The key is under the mat. Turn the dial to three and pull the lever. You won. You lost."
        " Try again, please."
    ),
    (
        '<answer>[{"op": "add", "text": "When the box is red, press the blue button."}, {"op":'
        ' "return"}]</answer>'
    ),
    (
        "<search_and_ask>which door is safe?</search_and_ask> system user assistant tool experience"
        " advice goal task"
    ),
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content']"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def tiny_tokenizer(vocab: int = 384) -> Any:
    """A byte-level BPE tokenizer with a ChatML template; any text round-trips; eos is
    ``<|im_end|>``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[2], padding_side="left"
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def tiny_random_llama(
    vocab: int = 384, layers: int = 2, hidden: int = 64, *, heads: int = 4, seed: int = 0
) -> Any:
    """A randomly initialised Llama in float32 and eval mode; equal for equal arguments."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.eval()


@lru_cache(maxsize=8)
def _shared_tokenizer(vocab: int) -> Any:
    return tiny_tokenizer(vocab)


def tiny_random_model(
    vocab: int = 384, layers: int = 2, hidden: int = 64, *, seed: int = 0
) -> tuple[Any, Any]:
    """``(model, tokenizer)`` that fit together: a fresh model, and a tokenizer shared by the whole
    test run.
    """
    return tiny_random_llama(vocab, layers, hidden, seed=seed), _shared_tokenizer(vocab)

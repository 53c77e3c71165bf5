"""Measure on Vault the baselines that need no trained extractor.

    python -m benchmarks.vault_baselines [--only prompt template transcript] [--seeds 1]

* ``chance``: two different levers of fourteen, tried blindly (exact).
* ``shipped``: no training; the untrained actor under the shipped prompt, with the template below as
  extractor.
* ``prompt``: no training; the untrained actor under another sentence of its own pre-training
  corpus, "Do what the note says.", with the template as extractor.
* ``prompt-zero-shot``: no training; that prompt, and the same untrained model as extractor under
  "Name the live lever.", another sentence of that corpus.
* ``template``: a regular expression writes "Pull X in W." in place of an extractor; the actor is
  trained as in ``static-online``, with 2,048 episodes.
* ``transcript``: the raw transcript of an episode is its entry; 3,072 episodes.

All are evaluated as the study evaluates ``on``: four visits, entries written between them. Of 120
evaluation worlds the first 40 are the study's; its settings were chosen on those.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.study.setups import ALL
from experiential.agents.actor import ActorAgent
from experiential.agents.functions import FunctionExtractor
from experiential.bank.bank import ExperienceBank
from experiential.config import Experiment
from experiential.evaluation.intervals import RATE, clustered_mean
from experiential.evaluation.visits import VisitEvaluator, later
from experiential.llm.base import LLM, SamplingParams
from experiential.llm.transformers import TransformersLLM
from experiential.recipe import load_experiment
from experiential.training.trainer import Trainer
from experiential.types import (
    Add,
    Distillation,
    Experience,
    ParsedOperations,
    Trajectory,
)

RESULTS = Path("benchmarks/results/vault_baselines.json")
WORLDS = 120
EVALUATION = (
    f"env.eval={{split: eval, worlds: {WORLDS}}}",
    f"eval.worlds={WORLDS}",
    "eval.visits=4",
    "eval.before=false",
    "eval.arms=[off, on]",
)
STEPS = {"template": 32, "transcript": 48}
"""Training steps of 64 episodes."""
Outcomes = dict[str, Any]
"""Success by arm, shape (worlds, visits) each."""


class ZeroShot(FunctionExtractor):
    """Ask the untrained model for the live lever."""

    def __init__(self, llm: LLM, prompts: Any) -> None:
        self._llm, self._prompts = llm, prompts

    async def adistill(self, trajectory: Trajectory, shown: Sequence[Experience]) -> Distillation:
        """Return the model's first word as the lever."""
        user = self._prompts.distill_messages(trajectory, [], 1)[1]
        prompt = [{"role": "system", "content": "Name the live lever."}, user]
        sampling = SamplingParams(temperature=0.0, max_tokens=12)
        answer = (await self._llm.generate(prompt, sampling)).text  # type: ignore[arg-type]
        words = re.findall(r"[a-z]+", answer.partition(":")[2] or answer)
        text = f"Pull {words[0]} in {world_of(trajectory)}." if words else ""
        operations = (Add(text=text),) if text else ()
        return Distillation(parsed=ParsedOperations(operations=operations))


def live_lever(trajectory: Trajectory) -> str | None:
    """Return the lever that the clerk's note or a success named."""
    if trajectory.success:
        return trajectory.turns[-1].action.split()[-1]
    found = (
        re.search(r"(\w+) was live", trajectory.turns[-1].feedback) if trajectory.turns else None
    )
    return found[1] if found else None


def world_of(trajectory: Trajectory) -> str:
    """Return the name of the vault."""
    return trajectory.task.removeprefix("Open the vault of ").rstrip(".")


def named(trajectory: Trajectory) -> str:
    """Return an entry with the lever that the clerk or a success named; empty for none."""
    lever = live_lever(trajectory)
    return f"Pull {lever} in {world_of(trajectory)}." if lever else ""


def record(trajectory: Trajectory) -> str:
    """Return actions and answers in order, as an extractor's prompt has them."""
    return "\n".join(f"> {turn.action}\n{turn.feedback}" for turn in trajectory.turns)


def template(llm: LLM, **options: Any) -> FunctionExtractor:
    """Build the regular expression as an extractor (``extractor.agent``)."""
    return FunctionExtractor(named)


def transcript(llm: LLM, **options: Any) -> FunctionExtractor:
    """Build the transcript as an extractor (``extractor.agent``)."""
    return FunctionExtractor(record)


def untrained(kind: str, seed: int, scratch: Path) -> Outcomes:
    """Evaluate the untrained actor under another prompt."""
    experiment = load_experiment("static-online", [*ALL, *EVALUATION, f"eval.seed={10_000 + seed}"])
    llm = TransformersLLM("tiny")

    def make_actor() -> ActorAgent:
        actor = ActorAgent(llm, prompts="brief", temperature=experiment.eval.temperature)
        if kind != "shipped":
            texts = {**actor.prompts.texts, "actor_system": "Do what the note says.".format}
            texts["actor_choice"] = texts["actor_system"]
            actor.prompts = dataclasses.replace(actor.prompts, texts=texts)
        return actor

    extractor = ZeroShot(llm, make_actor().prompts) if "zero-shot" in kind else template(llm)
    try:
        return asyncio.run(_play(experiment, make_actor, extractor, scratch))
    finally:
        llm.close()


async def _play(experiment: Experiment, make_actor: Any, extractor: Any, scratch: Path) -> Outcomes:
    evaluator = VisitEvaluator(experiment, make_actor, extractor)
    with ExperienceBank(scratch / "bank", embedder=experiment.bank.embedder) as bank:
        off = await evaluator.play("off", 0)
        on = await evaluator.play("on", 0, bank, scratch / "on")
    return {"off": off.outcomes, "on": on.outcomes}


def trained(kind: str, seed: int, scratch: Path) -> Outcomes:
    """Train the actor over the entries of a fixed extractor, then evaluate."""
    chosen = [*ALL, *EVALUATION, f"seed={seed}", f"run.steps={STEPS[kind]}"]
    chosen += [f"extractor.agent=benchmarks.vault_baselines:{kind}"]
    summary = Trainer(load_experiment("static-online", chosen), scratch / "run").run()
    return {event["arm"]: event["outcomes"] for event in summary["evaluations"]}


def measure(kind: str, seed: int) -> dict[str, Any]:
    """Return later-visit success of both arms, on all worlds and on those outside the study."""
    begin = time.process_time()
    with TemporaryDirectory() as folder:
        play = trained if kind in STEPS else untrained
        played = play(kind, seed, Path(folder))
    row: dict[str, Any] = {
        "baseline": kind,
        "seed": seed,
        "training_episodes": 64 * STEPS.get(kind, 0),
    }
    for arm, outcomes in played.items():
        rates = later(outcomes)
        for name, part in (
            ("", rates),
            ("_study_worlds", rates[:40]),
            ("_other_worlds", rates[40:]),
        ):
            interval = clustered_mean(part[None], bounds=RATE)
            row[f"{arm}{name}"] = [
                round(x, 3) for x in (interval.mean, interval.low, interval.high)
            ]
    return row | {"cpu_seconds": round(time.process_time() - begin, 1)}


def main() -> None:
    """Measure, print and keep."""
    kinds = ("shipped", "prompt", "prompt-zero-shot", "template", "transcript")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = json.loads(options.results.read_text())["rows"] if options.results.exists() else []
    for seed in range(options.seeds):
        for kind in options.only:
            rows = [row for row in rows if (row["baseline"], row["seed"]) != (kind, seed)]
            rows.append(measure(kind, seed))
            print(json.dumps(rows[-1]), flush=True)
            report = {"chance": round(2 / 14, 4), "worlds": WORLDS, "rows": rows}
            options.results.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

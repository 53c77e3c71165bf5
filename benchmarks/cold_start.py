"""Play episodes by a script as chats, and give a model a cold start on them."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiential.agents.actor import ActorAgent
from experiential.agents.prompts import experience_block, prompt_set
from experiential.config import Experiment
from experiential.llm.models import resolve_model
from experiential.llm.scripted import ScriptedLLM
from experiential.recipe import load_experiment
from experiential.training.roles import prompt_set_name
from experiential.training.trainer import Trainer
from experiential.types import Experience, Trajectory, Turn

Chat = dict[str, Any]
"""One demonstration: ``{"messages": [{"role": ..., "content": ...}, ...]}``."""
Script = Callable[[Mapping[str, Any]], str]
"""Give the next action, by the info before it."""


def played(
    env: Any,
    world: int,
    note: str,
    script: Callable[[str], Script],
    experiment: Experiment,
    rng: random.Random,
) -> tuple[Chat, Trajectory]:
    """Play one episode with a note, or an empty one; return it as a chat and as a trajectory.

    ``script`` is given the first observation.
    """
    said: list[str] = []
    llm = ScriptedLLM(lambda messages: said[-1])
    options = experiment.actor.options
    agent = ActorAgent(
        llm,
        prompts=prompt_set_name(experiment.model),
        instruction=options.instruction,
        advice=options.advice,
        constrain=True,
    )
    observation, info = env.reset(seed=rng.randrange(2**31), options={"world": world})
    act = script(observation)
    info |= {"experience_prompt": experience_block([note])} if note else {}
    chat: list[dict[str, str]] = []
    turns: list[Turn] = []
    done, reward = False, 0.0
    while not done:
        said.append(act(info))
        action = agent.act(observation, info)
        asked = [dict(message) for message in llm.calls[-1]]
        chat = [*asked, {"role": "assistant", "content": action}]
        following, reward, terminated, truncated, info = env.step(action)
        # As a rollout records it.
        turns.append(Turn(observation=observation, action=action, feedback=following))
        observation, done = following, terminated or truncated
    trajectory = Trajectory(
        task=info["task"], turns=tuple(turns), success=info["success"], reward=reward
    )
    return {"messages": chat}, trajectory


def distilled(
    trajectory: Trajectory,
    known: Mapping[str, str],
    seen: Mapping[str, str],
    say: Callable[[Mapping[str, str]], str],
    experiment: Experiment,
) -> Chat:
    """Return the chat in which an extractor adds what was seen in a play to what was known.

    Where nothing was known, no entry is shown; where nothing is new, the answer adds nothing.
    ``say`` makes the text of an entry.
    """
    entry, operation = say(known) if known else "", dict[str, Any](op="return")
    if seen.keys() - known.keys():
        text = say({**known, **seen})
        operation = (
            {"op": "update", "entry": 1, "text": text} if entry else {"op": "add", "text": text}
        )
    answer = json.dumps({"operations": [operation]}, separators=(",", ":"))
    prompts = prompt_set(prompt_set_name(experiment.model))
    shown = [Experience(text=entry)] if entry else []
    asked = prompts.distill_messages(trajectory, shown, experiment.extractor.max_operations)
    return {"messages": [*asked, {"role": "assistant", "content": answer}]}


def wins(actor: ActorAgent, env: Any, world: int, note: str, seed: int) -> bool:
    """Play one episode by a model with a note, or an empty one; return whether it is won."""
    observation, info = env.reset(seed=seed, options={"world": world})
    info |= {"experience_prompt": experience_block([note])} if note else {}
    actor.reset(seed=seed)
    done = False
    while not done:
        action = actor.act(observation, info)
        observation, _, terminated, truncated, info = env.step(action)
        done = terminated or truncated
    return bool(info["success"])


def write(chats: Iterable[Chat], file: Path) -> int:
    """Write demonstrations, one a line; return how many these are."""
    lines = [json.dumps(chat) + "\n" for chat in chats]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def train(
    chats: Iterable[Chat],
    settings: Sequence[str],
    model: str,
    seed: int,
    folder: Path,
    batch_size: int = 4,
) -> None:
    """Train a LoRA adapter of a model on demonstrations and save the model, adapter merged."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        file, run = Path(scratch) / "demonstrations.jsonl", Path(scratch) / "run"
        print(f"{write(chats, file)} chats", flush=True)
        experiment = load_experiment(
            "grpo+small",
            [
                *settings, f"model.name={model}", f"seed={seed}", "run.steps=0", "model.threads=1",
                "eval.before=false", "eval.after=false",
                f"methods.cold_start={{demonstrations: {file}, batch_size: {batch_size}}}",
            ],
        )  # fmt: skip
        Trainer(experiment, run, observer=_tell).run()
        base = AutoModelForCausalLM.from_pretrained(resolve_model(model))
        trained: Any = PeftModel.from_pretrained(base, run / "actor")
        merged = Path(scratch) / "merged"  # the model may lie in the very folder
        trained.merge_and_unload().half().save_pretrained(merged)
        AutoTokenizer.from_pretrained(run / "actor").save_pretrained(merged)
        shutil.copytree(merged, folder, dirs_exist_ok=True)


def _tell(event: Mapping[str, Any]) -> None:
    if event["event"] == "cold_start":
        shown = {key: event[key] for key in ("updates", "first_loss", "loss", "seconds")}
        print(json.dumps(shown), flush=True)

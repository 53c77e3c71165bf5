"""Write demonstrations for a cold start: chats of a scripted policy that asks the bank.

    python -m benchmarks.demonstrations OUT.jsonl [--recipe evolver] [--count 300] [--ask 0.8]
        [--follow 0.8] [--distil 0.5] [key=value ...]

Each line holds the chat that an actor of this recipe would have had, and whether the episode
succeeded. On Vault the worlds are those of the ``corpus`` split, which neither training nor
evaluation uses, and notes about half of them are in the bank; the policy asks, pulls the lever that
a note names, and guesses without one. In any other environment that knows its best action
(``oracle_action``) the policy takes it, after asking; the bank is then empty. ``--ask`` and
``--follow`` say how often it does so: below 1, something is left to learn. After a share
``--distil`` of the episodes of Vault a second chat shows how the same weights distil it: a
principle that names the lever.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import experiential  # noqa: F401  (registers the environments)
from experiential.agents.actor import ActorAgent
from experiential.agents.prompts import prompt_set
from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.manager import ExperienceManager
from experiential.config import Experiment
from experiential.envs.vault import VaultEnv
from experiential.llm.scripted import ScriptedLLM
from experiential.recipe import load_experiment
from experiential.rollout import make_env
from experiential.training.roles import prompt_set_name
from experiential.wrappers import SearchAndAskWrapper

NOTES = (
    "{world}: pull {lever}.",
    "In {world} the {lever} lever is live.",
    "{world}: the {lever} lever opens it.",
    "Pull {lever} in {world}.",
)
"""The sentences in which the tiny model was taught to write lessons."""
_GOAL = "Open the vault of "


class Scripted:
    """Act in one episode: ask first, follow a note, else take the best action or guess.

    Args:
        env: wrapped.
        rng: of every choice.
        ask: share of the episodes in which it asks.
        follow: share of the decisions in which it does what a note says.
    """

    def __init__(
        self, env: SearchAndAskWrapper, rng: random.Random, ask: float, follow: float
    ) -> None:
        self._env, self._rng, self._ask, self._follow = env, rng, ask, follow
        self._begun = False
        self._tried: set[str] = set()

    def act(self, observation: str, info: dict[str, Any]) -> str:
        """Return the next action."""
        offered = [
            action for action in info["admissible"] if self._env.query_of(action) is not None
        ]
        first, self._begun = not self._begun, True
        if offered and first and self._rng.random() < self._ask:
            return offered[0]
        if not isinstance(self._env.unwrapped, VaultEnv):
            return self._env.unwrapped.oracle_action()  # pyright: ignore[reportAttributeAccessIssue]  (checked by the caller)
        levers = [
            action
            for action in info["admissible"]
            if action not in offered and action not in self._tried
        ]
        noted = (
            "search_and_ask" in info and info["task"].removeprefix(_GOAL).rstrip(".") in observation
        )
        named = [
            action for action in levers if noted and action.removeprefix("pull ") in observation
        ]
        lever = (
            named[0] if named and self._rng.random() < self._follow else self._rng.choice(levers)
        )
        self._tried.add(lever)
        return lever


def fill(bank: FolderBank, env: VaultEnv, rng: random.Random) -> None:
    """Write notes about half of the worlds."""
    for world in rng.sample(env.worlds, len(env.worlds) // 2):
        _, info = env.reset(seed=world, options={"world": world})
        lever = env.oracle_action().removeprefix("pull ")
        text = rng.choice(NOTES).format(world=env.names[world], lever=lever)
        bank.add(text, task=info["task"], kind=rng.choice(("guiding", "cautionary")))


def demonstrations(
    experiment: Experiment, count: int, ask: float, follow: float, seed: int, distil: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Yield chats with their outcome, of ``count`` episodes.

    A share ``distil`` of them is followed by the chat of its distillation.
    """
    rng = random.Random(seed)
    vault = experiment.env.id == "experiential/Vault-v0"
    inner = make_env(
        experiment.env, {"split": "corpus", "worlds": 300} if vault else experiment.env.train
    )
    if not vault and not hasattr(inner.unwrapped, "oracle_action"):
        raise SystemExit(f"Expected an environment with oracle_action(), got {experiment.env.id}")
    options = experiment.bank.model_dump(exclude={"path", "namespace", "embedder", "store"})
    with (
        tempfile.TemporaryDirectory() as folder,
        ExperienceBank(folder, embedder=experiment.bank.embedder) as bank,
    ):
        if vault:
            fill(bank, inner.unwrapped, rng)  # type: ignore[arg-type]
        with ExperienceManager(bank, **options) as manager:
            calls = max(1, experiment.actor.search_experience)
            env = SearchAndAskWrapper(
                inner,
                bank=manager,
                max_calls=calls,
                tag="search_experience",
                refine=False,
                offer=True,
            )
            for episode in range(count):
                yield played(env, Scripted(env, rng, ask, follow), experiment, seed=seed + episode)
                if vault and rng.random() < distil:
                    yield distilled(env, experiment, rng)


def played(
    env: SearchAndAskWrapper, policy: Scripted, experiment: Experiment, *, seed: int
) -> dict[str, Any]:
    """Play one episode and return it as a chat."""
    said: list[str] = []
    llm = ScriptedLLM(lambda messages: said[-1])
    agent = ActorAgent(
        llm,
        prompts=prompt_set_name(experiment.model),
        instruction=experiment.actor.options.instruction,
        constrain=True,
    )
    chat: list[dict[str, str]] = []
    observation, info = env.reset(seed=seed, options={"guided": True})
    done = False
    while not done:
        said.append(policy.act(observation, info))
        action = agent.act(observation, info)
        chat = [dict(message) for message in llm.calls[-1]] + [
            {"role": "assistant", "content": action}
        ]
        observation, _, terminated, truncated, info = env.step(action)
        done = terminated or truncated
    return {"messages": chat, "success": info["success"]}


def distilled(
    env: SearchAndAskWrapper, experiment: Experiment, rng: random.Random
) -> dict[str, Any]:
    """Return the last episode of a vault, and the principle that it teaches, as a chat."""
    trajectory, prompts = env.last_trajectory, prompt_set(prompt_set_name(experiment.model))
    assert trajectory is not None and isinstance(env.unwrapped, VaultEnv)
    world, lever = (
        trajectory.task.removeprefix(_GOAL).rstrip("."),
        env.unwrapped.oracle_action().removeprefix("pull "),
    )
    principle: dict[str, Any] = {
        "op": "add",
        "text": rng.choice(NOTES).format(world=world, lever=lever),
    }
    if prompts.structured:
        principle["triples"] = [[world, "has the live lever", lever]]
    answer = f"<answer>{json.dumps([principle], separators=(',', ':'))}</answer>"
    asked = prompts.principle_messages(trajectory, experiment.extractor.max_operations)
    return {
        "messages": [*asked, {"role": "assistant", "content": answer}],
        "success": trajectory.success,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", default="evolver")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--ask", type=float, default=0.8)
    parser.add_argument("--follow", type=float, default=0.8)
    parser.add_argument("--distil", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    experiment = load_experiment(options.recipe, options.overrides)
    rows = list(
        demonstrations(
            experiment, options.count, options.ask, options.follow, options.seed, options.distil
        )
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    print(
        f"{len(rows)} demonstrations, {sum(row['success'] for row in rows)} of them successful:"
        f" {options.out}"
    )


if __name__ == "__main__":
    main()

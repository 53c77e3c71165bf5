"""Look at the environment before training, and warn of settings that cannot do what they say."""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np

from experiential.agents.prompts import prompt_set
from experiential.bank.manager_like import NoBank
from experiential.bank.protocol import Bank
from experiential.config import Experiment
from experiential.envs.agents import random_agent
from experiential.envs.make import resolve_env
from experiential.errors import EnvError
from experiential.rollout import AwaitedEnv, Task, environment_errors, make_env
from experiential.training.roles import prompt_set_name
from experiential.wrappers.experience import ExperienceWrapper

TINY_KNOWS = ("experiential/Vault-v0", "experiential/FrozenLake-v0", "experiential/Sokoban-v0")
"""Environments whose games the tiny model was made for."""
LONGEST = 5.0
"""Seconds after which no further task is looked at."""


@dataclass(frozen=True)
class Look:
    """Hold what was seen of an environment.

    Attributes:
        tasks: what each episode asked: its ``info["task"]``; empty where that is missing.
        instances: ``info["instance"]`` of each; empty where that is missing.
        failure: why the environment could not be played to an end; None if it could.
    """

    tasks: tuple[str, ...]
    instances: tuple[str, ...]
    failure: str | None = None


def look_at(experiment: Experiment, tasks: Sequence[Task]) -> Look:
    """Play the first task at random, and reset to the others for at most `LONGEST` seconds.

    No model is asked. The environment is made for this, and the global random states of Python
    and NumPy are as before afterwards, so that the run is what it would have been.
    """
    settings, begin = experiment.env, time.monotonic()
    asked, instances, failure = list[str](), list[str](), None
    with _same_random_states():
        try:
            with environment_errors():
                made = make_env(settings, settings.train)
            inner = AwaitedEnv(made, settings.reward_range)
            with closing(ExperienceWrapper(inner, NoBank(), inject="none")) as env:
                env.log.needs_outcome = True
                for task in tasks:
                    if asked and time.monotonic() - begin > LONGEST:
                        break
                    observation, info = env.reset(seed=task.seed, options=dict(task.options))
                    asked.append(str(info.get("task") or ""))
                    instances.append(str(info.get("instance") or ""))
                    agent, done = random_agent(env), len(asked) > 1
                    while not done:
                        action = agent(observation, info)
                        observation, _, terminated, truncated, info = env.step(action)
                        done = terminated or truncated
        except EnvError as error:
            failure = str(error)
    return Look(tuple(asked), tuple(instances), failure)


def find_warnings(
    experiment: Experiment, look: Look, *, listed: bool, bank: Bank | None
) -> Iterator[str]:
    """Yield what is likely to make a run useless, with the settings concerned.

    Args:
        experiment: of the run.
        look: what was seen of the training environment.
        listed: the environment lists its worlds, which come again.
        bank: with what it starts from; None: no bank.
    """
    actor, env_id = experiment.actor, resolve_env(experiment.env.id).id
    if look.failure is not None:
        yield f"the environment failed an episode of random play: {look.failure}"
    served = experiment.model.server is not None
    if experiment.model.name == "tiny" and not served and env_id not in TINY_KNOWS:
        games = ", ".join(name.removeprefix("experiential/") for name in TINY_KNOWS)
        yield (
            f"the model tiny was made for {games} alone and writes lessons about vaults: on"
            f" {env_id} it only shows that the run works; set model.name, or take a model profile"
        )
    prompts = prompt_set(prompt_set_name(experiment.model))
    if actor.options.system is not None:
        prompts = prompts.with_system(actor.options.system)
    told = actor.options.instruction
    if told and told not in prompts.actor_system(told):
        yield (
            f"actor.options.instruction is dropped: the prompt set {prompts.name!r} or"
            " actor.options.system leaves no place for it; set model.prompts=full"
        )
    if bank is None:
        return
    if actor.guided == "none" and experiment.methods.reflection is None:
        yield "no training episode sees the bank: actor.guided=none"
    elif 0 < experiment.run.steps <= actor.warmup_steps:
        yield (
            f"no training episode sees the bank: actor.warmup_steps={actor.warmup_steps} of"
            f" run.steps={experiment.run.steps}"
        )
    if len(look.instances) > 2 and look.instances[0] and len(set(look.instances)) == 1:
        yield (
            f"advice is never shown: every episode has info['instance']={look.instances[0]!r}, and"
            " entries made from the instance being played are hidden; name the instance by the"
            " seed, or leave the key out"
        )
    asked = list(dict.fromkeys(filter(None, look.tasks)))
    if look.tasks and not asked:
        yield (
            "info has no 'task': the whole first observation becomes the query and the task of"
            " new entries; state the task in info['task']"
        )
    floor = experiment.bank.retrieval.floor
    hybrid = experiment.bank.options.get("retrieval", {}).get("hybrid", 0.0)
    if not asked or hybrid:  # words can reach the floor, too
        return
    if len(bank):
        nearest = max((hit.score for row in bank.search(asked, k=1) for hit in row), default=-1.0)
        if nearest < floor:
            yield (
                f"the {len(bank)} entries of bank.path={experiment.bank.path} are about something"
                f" else: for {_count(asked)} the nearest has a similarity of {nearest:.2f}, below"
                f" bank.retrieval.floor={floor}"
            )
    if len(asked) == len(look.tasks) > 1 and not listed:
        vectors = np.asarray(bank.embedder(asked), dtype=np.float64)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        nearest = float((vectors @ vectors.T - 2 * np.eye(len(asked))).max())
        if nearest < floor:
            yield (
                f"advice may never be shown: of {_count(asked)} no two are more similar than"
                f" {nearest:.2f}, below bank.retrieval.floor={floor}, so that an entry about one"
                " is not found for another; lower the floor"
            )


def _count(tasks: Sequence[str]) -> str:
    return f"{len(tasks)} task{'s' * (len(tasks) > 1)} of the environment"


@contextmanager
def _same_random_states() -> Generator[None]:
    """Leave the global random states of Python and NumPy as they were."""
    drawn, array = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(drawn)
        np.random.set_state(array)

"""One list of everything that an environment does otherwise than the text environments of this package promise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from experiential.envs.text_space import UnicodeText
from experiential.sync import attempted

KEYS: dict[str, type] = {
    "task": str,
    "task_id": str,
    "instance": str,
    "success": bool,
    "invalid": bool,
}
"""What every ``info`` holds."""
OPTIONAL: dict[str, type] = {"admissible": list, "feedback": str}
HOSTILE = (
    "",
    " ",
    "I would rather not.",
    "\ud800 lone",
    "\0\x1b[31m",
    "<action>",
    "<action></action>",
    "x" * 10_000_000,
)
"""Texts that are no action anywhere; an environment for free text may take some of them."""


def check_text_env(env: gym.Env[Any, Any], *, seed: int = 0, steps: int = 120) -> list[str]:
    """Every convention of text environments that ``env`` breaks, as sentences; an empty list when it keeps them all.

    Looked at: spaces and observations are text; ``info`` has ``task``, ``task_id``, ``instance``,
    ``success`` and ``invalid`` of the right types; the same seed gives the same episode; admissible
    actions are valid and not empty; texts that are no action raise nothing, and where they are
    refused they use a turn, give no reward and say what is legal; rewards are finite numbers; the
    end is told once, and a step after it raises; ``success`` is told only at the end; the oracle,
    where there is one, gives text that is valid. Nothing stops the check: what raises is one entry
    of the list.

    The environment is reset and stepped, and not closed.

    >>> from experiential.envs.vault import VaultEnv
    >>> check_text_env(VaultEnv())
    []
    >>> check_text_env(gym.make("CartPole-v1"))[0]
    'observation_space: expected a space of text, got Box'

    Args:
        env: any environment, wrapped or not.
        seed: of the episodes that are played.
        steps: most steps played in each of them.
    """
    faults: list[str] = []
    for part in (_spaces, _resets, _plays, _refusals, _oracle):
        found = attempted(lambda part=part: list(part(env, seed, steps)))
        faults += (
            [f"{part.__name__.strip('_')}: raised {_raised(found)}"]
            if isinstance(found, Exception)
            else found
        )
    return list(dict.fromkeys(faults))


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _spaces(env: gym.Env[Any, Any], seed: int, steps: int) -> Iterator[str]:
    for name in ("observation_space", "action_space"):
        space = getattr(env, name)
        if not isinstance(space, UnicodeText | gym.spaces.Text):
            yield f"{name}: expected a space of text, got {type(space).__name__}"
        elif " " not in space:
            yield f"{name}: expected a space that holds blanks, such as UnicodeText, got {space}"


def _resets(env: gym.Env[Any, Any], seed: int, steps: int) -> Iterator[str]:
    first, second = env.reset(seed=seed), env.reset(seed=seed)
    yield from _seen(env, "reset", first[0])
    yield from _told("reset", first[1], ended=False)
    if not _same(first[0], second[0]):
        yield f"reset: expected the same observation for seed {seed} twice, got two"
    yield from (
        f"reset: expected info[{key!r}] to be the same for seed {seed} twice, got"
        f" {first[1].get(key)!r} and {second[1].get(key)!r}"
        for key in (*KEYS, *OPTIONAL)
        if not _same(first[1].get(key), second[1].get(key))
    )
    if first[1].get("invalid") is True:
        yield "reset: expected info['invalid'] to be False, got True"


def _plays(env: gym.Env[Any, Any], seed: int, steps: int) -> Iterator[str]:
    """Two episodes by the first, second, ... admissible action, compared."""
    first = [*_episode(env, seed, steps)]
    second = [*_episode(env, seed, steps)]
    for step in first:
        yield from _stepped(env, step)
    if [step[:4] for step in map(_plain, first)] != [step[:4] for step in map(_plain, second)]:
        yield f"step: expected the same episode for seed {seed} and the same actions, got another"
    if any(step[4].get("invalid") and "admissible" in step[4] for step in first):
        yield "step: expected admissible actions to be valid, got info['invalid']"
    if first and (first[-1][2] or first[-1][3]):
        yield from _past_the_end(env, first[-1])


def _episode(env: gym.Env[Any, Any], seed: int, steps: int) -> Iterator[tuple[Any, ...]]:
    _, info = env.reset(seed=seed)
    env.action_space.seed(seed)
    for turn in range(steps):
        known = info.get("admissible")
        step = env.step(known[turn % len(known)] if known else env.action_space.sample())
        info = step[4]
        yield step
        if step[2] or step[3]:
            return


def _past_the_end(env: gym.Env[Any, Any], last: tuple[Any, ...]) -> Iterator[str]:
    known = last[4].get("admissible")
    after = attempted(lambda: env.step(known[0] if known else env.action_space.sample()))
    if not isinstance(after, Exception):
        yield (
            "step: expected gymnasium.error.ResetNeeded after the end of an episode, got another"
            " step"
        )


def _refusals(env: gym.Env[Any, Any], seed: int, steps: int) -> Iterator[str]:
    for text in HOSTILE:
        env.reset(seed=seed)
        step = attempted(lambda text=text: env.step(text))
        shown = ascii(text[:12]) + ("..." if len(text) > 12 else "")
        if isinstance(step, Exception):
            yield f"step({shown}): expected an invalid turn, it raised {_raised(step)}"
            continue
        yield from _stepped(env, step)
        if not step[4].get("invalid"):
            continue
        if float(step[1]) > 0 or step[4].get("success"):
            yield (
                f"step({shown}): expected no reward and no success for an invalid action, got"
                f" {step[1]}"
            )
        if not (step[2] or step[3]) and "feedback" in step[4] and not step[4]["feedback"]:
            yield f"step({shown}): expected info['feedback'] to say what is legal, got nothing"
    yield from _endless(env, seed, steps)


def _endless(env: gym.Env[Any, Any], seed: int, steps: int) -> Iterator[str]:
    """Where valid actions run into a limit of turns, invalid ones must run into it too."""
    played = [*_episode(env, seed, steps)]
    if not played or not played[-1][3]:
        return
    env.reset(seed=seed)
    for _ in played:
        step = env.step(HOSTILE[2])
        if step[2] or step[3] or not step[4].get("invalid"):
            return
    yield (
        f"step: expected invalid actions to use turns, got {len(played)} of them without an end,"
        " which valid ones reach"
    )


def _oracle(env: gym.Env[Any, Any], seed: int, steps: int) -> Iterator[str]:
    if not hasattr(env.unwrapped, "oracle_action"):
        return
    env.reset(seed=seed)
    known: Any = env.unwrapped
    action: Any = attempted(lambda: known.oracle_action())
    if isinstance(action, ValueError | TypeError):
        return  # it says that it has none here
    if not isinstance(action, str):
        yield (
            "oracle_action: expected text, got"
            f" {_raised(action) if isinstance(action, Exception) else type(action).__name__}"
        )
    elif env.step(action)[4].get("invalid"):
        yield f"oracle_action: expected a valid action, got {action[:80]!r}"


def _stepped(env: gym.Env[Any, Any], step: tuple[Any, ...]) -> Iterator[str]:
    observation, reward, terminated, truncated, info = step
    yield from _seen(env, "step", observation)
    yield from _told("step", info, ended=bool(terminated or truncated))
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        yield f"step: expected a finite reward, got {reward!r}"
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool):
            yield f"step: expected {name} to be a bool, got {flag!r}"


def _seen(env: gym.Env[Any, Any], where: str, observation: Any) -> Iterator[str]:
    if not isinstance(observation, str):
        yield f"{where}: expected text as observation, got {type(observation).__name__}"
    elif observation not in env.observation_space:
        yield (
            f"{where}: expected an observation in {env.observation_space}, got {len(observation)}"
            " characters"
        )


def _told(where: str, info: dict[str, Any], *, ended: bool) -> Iterator[str]:
    for key, kind in (KEYS | OPTIONAL).items():
        if key not in info and key in OPTIONAL:
            continue
        if key not in info:
            yield f"{where}: expected info[{key!r}] ({kind.__name__}), it is missing"
        elif type(info[key]) is not kind:
            yield (
                f"{where}: expected info[{key!r}] to be {kind.__name__}, got"
                f" {type(info[key]).__name__}"
            )
    if not ended and info.get("success") is True:
        yield f"{where}: expected info['success'] only at the end of an episode, got it before"
    if not ended and info.get("admissible") == []:
        yield (
            f"{where}: expected info['admissible'] to name an action or to be absent, got an empty"
            " list"
        )
    if info.get("task") == "":
        yield f"{where}: expected info['task'] to say what is asked, got an empty text"


def _plain(step: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(map(repr, step))


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)

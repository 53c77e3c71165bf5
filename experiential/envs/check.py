"""Check that an environment keeps everything that wrappers, training and suites rely on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any, cast

import gymnasium as gym

from experiential.envs.text_env import UnicodeText
from experiential.llm.request import check_pattern
from experiential.sync import attempted

KEYS: dict[str, tuple[type, str]] = {
    "task": (str, "say what is asked; the bank is searched with it"),
    "task_id": (str, "name the task, the same whatever the seed"),
    "instance": (str, "name this very game; its own experience is kept from it in evaluation"),
    "success": (bool, "say whether the episode is won"),
    "invalid": (bool, "say whether the text was no action; False after a reset"),
}
"""Type and meaning of the keys that every ``info`` has."""
OPTIONAL: dict[str, tuple[type, str]] = {
    "admissible": (list, "list the actions that are acceptable now, or leave the key out"),
    "admissible_pattern": (str, "match, beside the actions listed, those with free words"),
    "feedback": (str, "comment on the action, or leave the key out"),
}
HOSTILE = (
    "", " ", "I would rather not.", "\ud800 lone", "\0\x1b[31m", "<action>", "<action></action>",
    "x" * 10_000_000,
)  # fmt: skip
"""Texts that are not an action anywhere; an environment for free text may accept some of them."""
Env = gym.Env[Any, Any]
Step = tuple[Any, ...]


def check_text_env(env: Env, *, seed: int = 0, steps: int = 120) -> list[str]:
    """Return what to mend in an environment, one sentence each; an empty list if it is usable.

    An environment without faults works with every wrapper, in training and in suites; what that
    takes is listed in `docs/envs/index.md`. Nothing stops the check: an exception is a fault, too.
    ``steps`` limits each episode. The environment, wrapped or not, is closed at the end.

    >>> from experiential.envs.vault import VaultEnv
    >>> check_text_env(VaultEnv())
    []
    >>> print(check_text_env(gym.make("CartPole-v1"))[0])
    observation_space: expected a space of text, got Box; wrap the environment in TextObservation
    """
    faults: list[str] = []
    for part in (_spaces, _resets, _options, _plays, _refusals, _oracle, _closes):
        found = attempted(list[str], part(env, seed, steps))
        if isinstance(found, Exception):
            faults.append(f"{part.__name__.strip('_')}: raised {_shown(found)}; it must not raise")
        else:
            faults += found
    return list(dict.fromkeys(faults))


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _spaces(env: Env, seed: int, steps: int) -> Iterator[str]:
    for name in ("observation_space", "action_space"):
        space = getattr(env, name)
        if not isinstance(space, UnicodeText | gym.spaces.Text):
            yield (
                f"{name}: expected a space of text, got {type(space).__name__}; wrap the"
                " environment in TextObservation"
            )
        elif " " not in space:
            yield f"{name}: expected a space that holds blanks, got {space}; use UnicodeText()"


def _resets(env: Env, seed: int, steps: int) -> Iterator[str]:
    (observation, info), (again, other) = env.reset(seed=seed), env.reset(seed=seed)
    yield from _told(env, "reset", (observation, 0.0, False, False, info))
    same, cure = f"to be the same for seed {seed} twice, got", "draw from self.np_random only"
    if repr(observation) != repr(again):
        yield f"reset: expected the same observation for seed {seed} twice, got two; {cure}"
    for key in (*KEYS, *OPTIONAL):
        one, two = info.get(key), other.get(key)
        if repr(one) != repr(two):
            yield f"reset: expected info[{key!r}] {same} {one!r} and {two!r}; {cure}"
    if info.get("invalid") is True:
        yield "reset: expected info['invalid'] to be False, got True; a reset plays no action"
    env.reset()


def _options(env: Env, seed: int, steps: int) -> Iterator[str]:
    """Check the options of a reset; training names the world, or passes an empty mapping."""
    options: dict[str, Any] = {}
    worlds: Any = getattr(env.unwrapped, "worlds", None)
    if worlds is not None:
        if list(worlds) != list(range(len(worlds))) or not len(worlds):
            yield (
                f"worlds: expected the numbers from 0 on, got {str(worlds)[:80]}; list what"
                " reset(options={'world': i}) accepts, or name the attribute otherwise"
            )
            return
        options = {"world": len(worlds) - 1}
    given = deepcopy(options)
    _, info = env.reset(seed=seed, options=given)
    _, other = env.reset(seed=seed + 1, options=given)
    if given != options:
        yield f"reset: expected options to stay {options}, got {given}; copy before changing them"
    if worlds is not None and info.get("task_id") != other.get("task_id"):
        yield (
            f"reset: expected one info['task_id'] for world {options['world']} whatever the seed,"
            f" got {info.get('task_id')!r} and {other.get('task_id')!r}; let the world decide it"
        )


def _plays(env: Env, seed: int, steps: int) -> Iterator[str]:
    """Play the same episode twice by the first, second, ... admissible action, and compare."""
    first, infos, written = _episode(env, seed, steps)
    for step in first:
        yield from _told(env, "step", step)
    acted = list(zip(infos, first, strict=False))  # the info that each action was chosen by
    if len({"admissible" in info for info, _ in acted}) > 1:
        yield (
            "step: expected info['admissible'] in every info of a running episode or in none, got"
            " it in some; list the actions at each step, or never"
        )
    if any("admissible" in info and step[4].get("invalid") for info, step in acted):
        yield (
            "step: expected admissible actions to be valid, got info['invalid']; list only actions"
            " that step() accepts"
        )
    if first and (first[-1][2] or first[-1][3]):
        listed = infos[-1].get("admissible")
        after = attempted(lambda: env.step(listed[0] if listed else env.action_space.sample()))
        if not isinstance(after, Exception):
            yield (
                "step: expected gymnasium.error.ResetNeeded after the end of an episode, got"
                " another step; raise it"
            )
    with ThreadPoolExecutor(1) as pool:  # rollouts play each episode in whatever thread is free
        again = attempted(lambda: pool.submit(_episode, env, seed, steps).result())
    if isinstance(again, Exception):
        yield (
            f"step: expected to play in another thread too, it raised {_shown(again)}; keep nothing"
            " that belongs to one thread"
        )
    elif [repr(step[:4]) for step in first] != [repr(step[:4]) for step in again[0]]:
        yield (
            f"step: expected the same episode for seed {seed} and the same actions, got another;"
            " draw from self.np_random only"
        )
    if [repr(info) for info in infos] != written:
        yield (
            "step: expected the info of earlier steps to stay as it was, got it changed; make a"
            " new info, and new lists in it, at each step"
        )


def _episode(env: Env, seed: int, steps: int) -> tuple[list[Step], list[dict[str, Any]], list[str]]:
    """Play an episode; return its steps, its infos, and the infos as they were when returned."""
    _, info = env.reset(seed=seed)
    env.action_space.seed(seed)
    played: list[Step] = []
    infos, written = [info], [repr(info)]
    while len(played) < steps and not (played and (played[-1][2] or played[-1][3])):
        known = infos[-1].get("admissible")
        step = env.step(known[len(played) % len(known)] if known else env.action_space.sample())
        played.append(step)
        infos.append(step[4])
        written.append(repr(step[4]))
    return played, infos, written


def _refusals(env: Env, seed: int, steps: int) -> Iterator[str]:
    for text in HOSTILE:
        env.reset(seed=seed)
        step = attempted(env.step, text)
        call = f"step({ascii(text[:12])}{'...' if len(text) > 12 else ''})"
        if isinstance(step, Exception):
            yield (
                f"{call}: expected an invalid turn, it raised {_shown(step)}; set info['invalid']"
                " and let the episode go on"
            )
            continue
        yield from _told(env, "step", step)
        if not step[4].get("invalid"):
            continue
        if float(step[1]) > 0 or step[4].get("success"):
            yield (
                f"{call}: expected no reward and no success for an invalid action, got {step[1]};"
                " give 0 or less"
            )
        if not (step[2] or step[3]) and "feedback" in step[4] and not step[4]["feedback"]:
            yield f"{call}: expected info['feedback'] to say what is legal, got nothing; say it"
    # An agent that never names an action must come to an end too: invalid turns count.
    played, _, _ = _episode(env, seed, steps)
    if not played or not played[-1][3]:
        return
    env.reset(seed=seed)
    for _ in played:
        step = env.step(HOSTILE[2])
        if step[2] or step[3] or not step[4].get("invalid"):
            return
    yield (
        f"step: expected invalid actions to use turns, got {len(played)} of them without an end,"
        " which valid ones reach; count them"
    )


def _oracle(env: Env, seed: int, steps: int) -> Iterator[str]:
    if not hasattr(env.unwrapped, "oracle_action"):
        return
    env.reset(seed=seed)
    known: Any = env.unwrapped
    action: Any = attempted(known.oracle_action)
    if isinstance(action, ValueError | TypeError):
        return  # the environment says that it has no oracle for this game
    if not isinstance(action, str):
        got = _shown(action) if isinstance(action, Exception) else type(action).__name__
        yield f"oracle_action: expected text, got {got}; return an action, or raise ValueError"
    elif env.step(action)[4].get("invalid"):
        yield f"oracle_action: expected a valid action, got {action[:80]!r}; return one"


def _closes(env: Env, seed: int, steps: int) -> Iterator[str]:
    env.close()
    again = attempted(env.close)
    if isinstance(again, Exception):
        yield f"close: expected a second close to do nothing, it raised {_shown(again)}; allow it"


def _told(env: Env, where: str, step: Step) -> Iterator[str]:
    observation, reward, terminated, truncated, info = step
    ended = bool(terminated or truncated)
    if not isinstance(observation, str):
        yield (
            f"{where}: expected text as observation, got {type(observation).__name__}; wrap the"
            " environment in TextObservation"
        )
    elif observation not in env.observation_space:
        yield (
            f"{where}: expected an observation in {env.observation_space}, got {len(observation)}"
            " characters; widen the space or shorten the text"
        )
    for key, (kind, meaning) in (KEYS | OPTIONAL).items():
        expected, value = f"expected info[{key!r}]", info.get(key)
        if key not in info and key in KEYS:
            yield f"{where}: {expected} ({kind.__name__}), it is missing; {meaning}"
        elif key in info and type(value) is not kind and (kind, type(value)) != (list, tuple):
            got = type(value).__name__
            yield f"{where}: {expected} to be {kind.__name__}, got {got}; {meaning}"
    if not ended and info.get("success") is True:
        yield (
            f"{where}: expected info['success'] only at the end of an episode, got it before; end"
            " the episode, or set it to False"
        )
    pattern = info.get("admissible_pattern")
    if isinstance(pattern, str):
        expected = f"{where}: expected info['admissible_pattern'] to be a regular expression"
        if isinstance(fault := attempted(check_pattern, pattern), Exception):
            yield (
                f"{expected} without look-around and back-references, got {pattern[:80]!r}"
                f" ({str(fault)[:200]}); mend it, or leave the key out"
            )
        if "admissible" not in info:
            yield f"{expected} beside info['admissible'], which is missing; list an action"
    listed = info.get("admissible")
    if isinstance(listed, list | tuple):
        actions = cast("list[Any]", listed)
        if not actions and not ended:
            yield (
                f"{where}: expected info['admissible'] to name an action or to be absent, got an"
                " empty list; leave the key out if actions cannot be listed"
            )
        wrong = next((one for one in actions if one == "" or one not in env.action_space), None)
        if wrong is not None:
            yield (
                f"{where}: expected info['admissible'] to hold text of the action space, got"
                f" {str(wrong)[:80]!r} ({type(wrong).__name__}); list the texts that step() takes"
            )
    if info.get("task") == "":
        yield (
            f"{where}: expected info['task'] to say what is asked, got an empty text; the bank is"
            " searched with it"
        )
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        yield f"{where}: expected a finite reward, got {reward!r}; return a float"
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool):
            yield f"{where}: expected {name} to be a bool, got {flag!r}; return bool({name})"

"""Make a text environment of any Gymnasium environment."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from experiential.bank.episode import finite
from experiential.bank.outcome import (
    KEYS,
    OutcomeJudge,
    Score,
    Success,
    check_success,
    concluded,
    judged,
    said_in,
)
from experiential.envs.action_text import tagged_action
from experiential.envs.text_env import UnicodeText
from experiential.types import Trajectory, Turn

Array = np.ndarray[Any, Any]
Render = Callable[[Any, dict[str, Any]], str]
_HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m([^\x1b]+)\x1b\[0?m")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MAX_NUMBERS = 1024
_MISSIONS = ("mission", "goal", "instruction")  # keys of observations that say what is asked


class TextObservation(gym.Wrapper[str, str, Any, Any], RecordConstructorArgs):
    r"""Turn observations into text and text into actions.

    Observations are shown by ``render`` if given, else by the environment's own ``ansi`` rendering
    when it was made with that render mode (highlighted characters come in brackets), else as
    readable numbers, rows and ``key: value`` lines. An action is the last ``<action>…</action>`` of
    the text, or its last line, whatever the case. ``info["task"]`` and ``info["admissible"]`` say
    what is asked and what is legal; ``task_id``, ``instance``, ``success``, ``invalid`` and
    ``feedback`` are as in the environments of this package. ``success`` is the environment's own,
    its ``is_success`` or ``won``, or what the argument says; where nothing says it, the key is left
    out. ``score`` at the end is what the argument gives. By default ``instance`` is the
    environment's id and seed.

    Caveat: an unknown action does not step the environment, but it uses a turn: the same
    observation comes back with a line that names the legal actions, reward 0 and
    ``info["invalid"]``. After ``max_turns`` turns the episode is truncated.

    No vector version: wrap each environment inside the vector environment. ``AsyncVectorEnv`` needs
    ``shared_memory=False``: its shared memory has no layout for text, and refuses this wrapper's
    space.

    >>> lake = gym.make("FrozenLake-v1", is_slippery=False)
    >>> env = TextObservation(lake, actions=["left", "down", "right", "up"])
    >>> env.reset(seed=0)[0]
    '0'
    >>> env.step("Let me see. <action>Right</action>")[0]
    '1'
    >>> observation, reward, _, _, info = env.step("fly")
    >>> print(observation, reward, info["invalid"], sep="\n")
    1
    'fly' is not a legal action. Legal actions: left, down, right, up.
    0.0
    True

    Args:
        env: any environment; its observations and info arrays are copied at once.
        render: ``(observation, info) -> str``.
        actions: None (numbers of a ``Discrete`` space, or text as it is when actions are text), a
            list of names for a ``Discrete`` space, or a mapping from names to actions.
        instruction: the task in words, or a function of the first observation and info. When empty
            it is the environment's own ``info["task"]``, the text under ``mission``, ``goal`` or
            ``instruction`` of an observation that is a dict, or the environment's id.
        success: the return from which on an episode is a success, a function of its ``Trajectory``
            that returns True, False or None (unknown), or a ``Judge``, for whom the last step
            waits; give it to the wrapper that records the episode, and a manager asks it meanwhile.
        score: how good an episode was: a function of its ``Trajectory``. The wrapper that records
            the episode takes it from ``info["score"]``; by default the score is the return.
        max_turns: turns, invalid ones included, after which an episode is truncated; None takes the
            limit of the environment's specification, if it has one.

    Raises:
        TypeError: the action space needs ``actions``.
        ValueError: the names do not fit the action space, or ``max_turns`` is not positive.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        render: Render | None = None,
        actions: Sequence[str] | Mapping[str, Any] | None = None,
        instruction: str | Callable[[Any, dict[str, Any]], str] = "",
        *,
        success: Success | None = None,
        score: Score | None = None,
        max_turns: int | None = None,
    ) -> None:
        options: dict[str, Any] = {"render": render, "actions": actions, "max_turns": max_turns}
        options |= {"instruction": instruction, "success": success, "score": score}
        RecordConstructorArgs.__init__(self, _disable_deepcopy=True, **options)
        cast("Any", gym.Wrapper).__init__(self, env)
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"Expected max_turns to be positive, got {max_turns}")
        check_success(success, score)
        if success == "better":
            raise ValueError(
                "Expected success to be a return, a function or a Judge, got 'better', which a bank"
                " says; give it to the wrapper that records the episode"
            )
        self._render, self._instruction = render, instruction
        self._success, self._score = success, score
        self._actions = action_table(env.action_space, actions)
        self._lookup = {" ".join(name.casefold().split()): name for name in self._actions or ()}
        if self._actions is not None and len(self._lookup) < len(self._actions):
            raise ValueError(
                f"Expected action names that differ by more than case, got {list(self._actions)}"
            )
        self._max_turns = max_turns or (env.spec.max_episode_steps if env.spec else None)
        self._turns, self._text, self._task = 0, "", ""
        self._play: list[Turn] = []  # for a rule that reads the episode
        self._id = self.env.spec.id if self.env.spec else type(self.env.unwrapped).__name__
        self._seed, self._episodes, self._return = secrets.token_hex(4), 0, 0.0
        self._over = True
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText(samples=tuple(self._actions or ()))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._turns, self._play, self._return, self._over = 0, [], 0.0, False
        self._episodes = self._episodes + 1 if seed is None else 0
        self._seed = self._seed if seed is None else str(seed)
        self._task = self._task_of(observation, info)
        self._text = self._describe(observation, info)
        return self._text, self._annotated(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the action that the text names; an unknown one only uses a turn.

        Raises:
            gymnasium.error.ResetNeeded: the episode is over or was never begun.
        """
        if self._over:
            raise gym.error.ResetNeeded(
                "Expected reset() before this step: the episode is over or was never begun"
            )
        said = spoken_action(action)
        folded = " ".join(said.casefold().split())
        self._turns += 1
        late = self._max_turns is not None and self._turns >= self._max_turns
        named = self._lookup.get(folded) or self._lookup.get(folded.strip("`'\"*.,;:!?()[] "))
        if self._actions is None:
            chosen: Any = said
        elif named:
            chosen = self._actions[named]
        else:
            legal = ", ".join(self._actions)
            complaint = f"{said[:80]!r} is not a legal action. Legal actions: {legal}."
            self._over, shown = late, f"{self._text}\n{complaint}"
            self._note(said, 0.0, self._text, shown, invalid=True)
            info = self._annotated({"feedback": complaint, "invalid": True}, ended=late)
            return shown, 0.0, False, late, info
        observation, reward, terminated, truncated, info = self.env.step(chosen)
        before, self._text = self._text, self._describe(observation, info)
        self._note(said, float(reward), before, self._text)
        truncated = bool(truncated or (late and not terminated))
        self._return += float(reward)
        self._over = bool(terminated) or truncated
        info = self._annotated(info, ended=self._over)
        return self._text, float(reward), bool(terminated), truncated, info

    def _note(
        self, action: str, reward: float, seen: str, result: str, *, invalid: bool = False
    ) -> None:
        """Keep one turn, if a rule is to read the episode."""
        if self._score or not (self._success is None or isinstance(self._success, int | float)):
            turn = Turn(observation=seen, action=action, reward=reward, feedback=result)
            self._play.append(turn.model_copy(update={"invalid": invalid}))

    def _describe(self, observation: Any, info: dict[str, Any]) -> str:
        if self._render is not None:
            return self._render(snapshot(observation), snapshot(info))
        if self.env.render_mode == "ansi":
            return plain_text(str(cast("Any", self.env).render()))
        return describe(observation)

    def _task_of(self, observation: Any, info: dict[str, Any]) -> str:
        if callable(self._instruction):
            return str(self._instruction(observation, info))
        named = self._instruction or info.get("task")
        if not named and isinstance(observation, Mapping):
            said = (cast("Mapping[str, Any]", observation).get(key) for key in _MISSIONS)
            named = next((text for text in said if isinstance(text, str) and text), None)
        return str(named or self._id)

    def _annotated(self, info: dict[str, Any], *, ended: bool = False) -> dict[str, Any]:
        again = f"+{self._episodes}" if self._episodes else ""
        known = {"task_id": self._id, "instance": f"{self._id}#{self._seed}{again}", "feedback": ""}
        copied: dict[str, Any] = known | snapshot(info)
        copied["task"] = self._task
        rule, said = self._success, None
        run = Trajectory(
            task=self._task,
            task_id=str(copied["task_id"]),
            instance=str(copied["instance"]),
            turns=tuple(self._play),
            reward=self._return,
        )
        if self._score is not None and ended:
            copied["score"] = finite(self._score(run), "score(trajectory)")
            run = run.model_copy(update={"score": copied["score"]})
        if rule is not None and ended:
            is_judge = isinstance(rule, OutcomeJudge)
            run = judged(run, rule) if is_judge else concluded(run, copied, rule)
            copied = {key: value for key, value in copied.items() if key not in KEYS}
            said = run.success  # the rule comes first, also where it cannot tell
        elif isinstance(rule, int | float):
            said = False
        elif rule is None:
            said = said_in(copied)
        if said is not None:
            copied["success"] = said
        copied["invalid"] = bool(copied.get("invalid", False))
        if self._actions is not None:
            copied["admissible"] = list(self._actions)
        return copied


def action_table(
    space: spaces.Space[Any], actions: Sequence[str] | Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the action that each name stands for; None if any text is an action."""
    if isinstance(actions, Mapping):
        wrong = [name for name, action in actions.items() if action not in space]
        if wrong or not actions:
            raise ValueError(f"Expected actions of {space}, got others for the names {wrong}")
        return {str(name): action for name, action in actions.items()}
    if isinstance(space, spaces.Discrete):
        numbers = range(int(space.start), int(space.start) + int(space.n))
        names = [str(number) for number in numbers] if actions is None else list(actions)
        if len(names) != len(numbers):
            raise ValueError(f"Expected {len(numbers)} action names for {space}, got {len(names)}")
        return dict(zip(names, numbers, strict=True))
    if actions is None and isinstance(space, spaces.Text | UnicodeText):
        return None
    raise TypeError(
        "Expected a Discrete action space or actions as a mapping from names to actions, got"
        f" {space} and {actions!r}"
    )


def spoken_action(text: str) -> str:
    """Return the last ``<action>…</action>`` of a text, or its last line that is not blank."""
    if (tagged := tagged_action(text)) is not None:
        return tagged.strip()
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def plain_text(frame: str) -> str:
    """Return terminal output without escape codes; a highlighted run is put in brackets."""
    return _ESCAPES.sub("", _HIGHLIGHT.sub(r"[\1]", frame)).strip("\n")


def describe(value: Any) -> str:
    """Return readable text for an observation of any Gymnasium space.

    >>> print(describe({"position": np.array([0.5, 2.0]), "key": True}))
    position: 0.5, 2
    key: yes
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    entries: list[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping):
        entries = list(cast("Mapping[Any, Any]", value).items())
    elif isinstance(value, tuple | list):
        entries = list(enumerate(cast("Sequence[Any]", value), start=1))
    if entries is not None:
        lines: list[str] = []
        for name, item in entries:
            text = describe(item)
            if "\n" in text:
                lines += [f"{name}:", *(f"  {line}" for line in text.splitlines())]
            else:
                lines.append(f"{name}: {text}")
        return "\n".join(lines)
    if not isinstance(value, np.ndarray):
        return _scalar(value)
    array = cast("Array", value)
    if array.ndim == 0:
        return describe(array.item())
    if array.size == 0:
        return "empty"
    if array.size > _MAX_NUMBERS or array.ndim > 2:
        low, high = _scalar(array.min()), _scalar(array.max())
        return f"array of shape {array.shape}, {array.dtype}, from {low} to {high}"
    if array.ndim == 2:
        return "\n".join(" ".join(map(_scalar, row)) for row in array)
    return ", ".join(map(_scalar, array))


def snapshot(value: Any) -> Any:
    """Copy nested containers and arrays, which the environment may overwrite."""
    if isinstance(value, np.ndarray):
        return cast("Array", value).copy()
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in cast("dict[Any, Any]", value).items()}
    return type(value)(snapshot(item) for item in value) if type(value) in (list, tuple) else value


def _scalar(value: Any) -> str:
    if not isinstance(value, int | float | np.number):
        return str(value)
    plain: Any = cast("Any", value).item() if isinstance(value, np.number) else value
    return str(plain) if isinstance(plain, int) else f"{plain:.4g}"

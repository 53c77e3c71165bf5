"""Show or hide the environment's comment on each move."""

from __future__ import annotations

import re
from typing import Any, Literal

import gymnasium as gym

from experiential.envs.text_env import UnicodeText
from experiential.wrappers.experience import TextWrapper, require_choice

Shown = Literal["shown", "hidden", "reflector"]


class FeedbackWrapper(TextWrapper):
    """Show ``info["feedback"]`` in every observation that follows an action, or in none.

    Experiential RL reflects on textual feedback that its baseline never sees. With one such wrapper
    around both, either everybody reads it (``shown``) or nobody does (``hidden``). ``reflector`` is
    what the paper's code did: the agent's observations lack it, and ``info["withheld"]`` has it for
    a reflector. That comparison is not fair to a baseline, which learns from less; the mode is
    there to repeat it.

    ``shown`` appends the text unless the observation has it. The other two cut it where it stands
    as whole lines. The first observation of an episode is part of the task and stays.

    Caveat: an environment that writes its comments into the observation and not into
    ``info["feedback"]`` shows them always. The info itself still has ``feedback``; an agent that
    reads it knows the comment. Put this wrapper inside ``ExperienceWrapper`` and
    ``ReflectionWrapper``, so that both record what the agent saw.

    No vector version: use this wrapper on each environment inside a vector environment.

    >>> from experiential.envs.vault import VaultEnv
    >>> env = FeedbackWrapper(VaultEnv(), "hidden")
    >>> observation, info = env.reset(seed=1)
    >>> print(env.step("pull nothing")[0])
    Tries left: 1. Reply: pull <lever>.

    Args:
        env: a text environment.
        feedback: ``shown``, ``hidden`` or ``reflector``.

    Raises:
        TypeError: the environment does not give text.
        ValueError: ``feedback`` is none of these.
    """

    def __init__(self, env: gym.Env[str, str], feedback: Shown = "shown") -> None:
        super().__init__(env, feedback=feedback)
        require_choice("feedback", feedback, Shown)
        self.feedback = feedback
        self.observation_space = UnicodeText()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act, and show or hide the comment on the action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        comment = str(info.get("feedback") or "")
        if self.feedback == "reflector" and comment:
            info = {**info, "withheld": comment}
        show = with_comment if self.feedback == "shown" else without_comment
        return show(observation, comment), float(reward), terminated, truncated, info


def with_comment(observation: str, comment: str) -> str:
    r"""Return the observation with the comment behind it, unless it is there.

    >>> with_comment("A B", "It clicks."), with_comment("It clicks.\nA B", "It clicks.")
    ('A B\n\nIt clicks.', 'It clicks.\nA B')
    """
    if not comment or re.search(rf"(?m)^{re.escape(comment)}$", observation):
        return observation
    return f"{observation}\n\n{comment}" if observation else comment


def without_comment(observation: str, comment: str) -> str:
    r"""Return the observation without the comment, if that stands as whole lines.

    >>> without_comment("A B\n\nIt clicks.", "It clicks.")
    'A B'
    >>> without_comment("It clicks. Not.", "It clicks.")
    'It clicks. Not.'
    """
    found = re.search(rf"(?m)^{re.escape(comment)}$", observation) if comment else None
    if found is None:
        return observation
    before = observation[: found.start()].rstrip("\n")
    after = observation[found.end() :].lstrip("\n")
    return f"{before}\n{after}" if before and after else before or after

"""Let the agent itself ask the experience bank during an episode."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import gymnasium as gym

from experiential.agents.prompts import principle_text
from experiential.bank.ask_tool import AskTool, query_in
from experiential.bank.episode import EpisodeOptions
from experiential.bank.messages import json_fields
from experiential.bank.outcome import Score, Success, check_success
from experiential.envs.text_env import UnicodeText
from experiential.wrappers.experience import (
    BankOrManager,
    BankWrapper,
    EpisodeLog,
    ExperienceWrapper,
    TaskOf,
    connect,
    layers,
    present,
    take_settings,
    with_task,
)

PATIENCE = 8
"""Refused calls in a row that truncate an episode, so that an agent that only calls still ends."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_CONTEXT = ("task", "task_id", "instance", "admissible", "admissible_pattern")


class SearchAndAskWrapper(BankWrapper):
    """Answer ``<search_and_ask>question</search_and_ask>`` from the bank instead of a step.

    The info of the reset of a guided episode offers the call in ``info["tools"]``, so that an
    `ActorAgent` with a hosted model makes it as a tool call.

    The last tag of an action counts, whatever its case; a tool call as JSON text or mapping does
    too: ``{"name": "search_and_ask", "arguments": {"query": "…"}}``. The observation becomes the
    best entry, refined for the question, escaped inside ``<search_result>``; the reward is 0.
    ``info["search_and_ask"]`` holds ``query``, ``calls_left``, ``hit`` and ``turn`` (environment
    steps and calls so far). After ``max_calls`` answered calls the reply says that none are
    left. In a ``FREE`` episode the reply is a fixed "not available" and the bank is not touched.
    Each answer is a use of its entry and of its refinement, added to the episode's trajectory.

    With ``refine=False`` it is EvolveR's ``search_experience`` action (give
    ``tag="search_experience"``): the reply holds the ``k`` best principles as they are, each with
    its kind, its score and its triples, no model is asked, each of them is a use, and
    ``info["experience"]`` lists the hits.

    Caveat: put it outside ``ExperienceWrapper``, whose manager and episode it shares. Calls do not
    count for a ``TimeLimit`` inside; they are bounded by ``max_calls``, and an episode with 8
    refused calls in a row is truncated.

    No vector version: a call must not step its environment, and a vector environment steps all. Use
    this wrapper on each environment inside ``SyncVectorEnv``; they may share one manager.

    >>> import tempfile
    >>> from experiential.bank.bank import ExperienceBank
    >>> from experiential.envs.vault import VaultEnv
    >>> with ExperienceBank(tempfile.mkdtemp(), embedder="hashing") as bank:
    ...     env = SearchAndAskWrapper(VaultEnv(), bank=bank)
    ...     _ = env.reset(seed=1)
    ...     _, _, terminated, _, info = env.step("<search_and_ask>which lever?</search_and_ask>")
    ...     env.close()
    >>> terminated, info["search_and_ask"]["calls_left"], info["search_and_ask"]["hit"]
    (False, 1, None)

    Args:
        env: a text environment, usually an ``ExperienceWrapper``.
        max_calls: answered calls per episode.
        tag: name of the tag and of the tool.
        bank: a bank or manager, when there is no ``ExperienceWrapper`` below; this wrapper then
            submits the episodes itself.
        repeat_observation: append the observation that the agent had before to each answer.
        refine: let the extractor fit the best entry to the question; False shows entries as they
            are.
        k: entries shown with ``refine=False``; None takes the manager's ``retrieval.k``.
        offer: while calls are left in a guided episode, add a call with the task as its question to
            ``info["admissible"]``, where the environment names admissible actions, so that an actor
            that may only choose can choose to ask.
        exclude_same_instance, success, score, task: as for ``ExperienceWrapper``, which decides
            where there is one.

    Raises:
        TypeError: the environment does not give text, or ``bank`` is neither bank nor manager.
        ValueError: ``max_calls``, ``k`` or ``tag`` is unusable, or there is not exactly one bank to
            ask.
    """

    def __init__(
        self,
        env: gym.Env[str, str],
        *,
        max_calls: int = 2,
        tag: str = "search_and_ask",
        bank: BankOrManager | None = None,
        repeat_observation: bool = False,
        refine: bool = True,
        k: int | None = None,
        offer: bool = False,
        exclude_same_instance: bool = False,
        success: Success | None = None,
        score: Score | None = None,
        task: TaskOf | None = None,
    ) -> None:
        check_success(success, score, task)
        options: dict[str, Any] = {"refine": refine, "k": k, "offer": offer}
        options |= {"exclude_same_instance": exclude_same_instance}
        options |= {"success": success, "score": score, "task": task}
        options["repeat_observation"] = repeat_observation
        super().__init__(env, max_calls=max_calls, tag=tag, bank=bank, **options)
        show = None if refine else principle_text
        self._tool = AskTool(None, name=tag, max_calls=max_calls, show=show, k=k)
        if k is not None and k < 1:
            raise ValueError(f"Expected k to be None or positive, got {k}")
        if not _NAME.fullmatch(tag):
            raise ValueError(
                f"Expected tag to be a name of letters, digits, '_' and '-', got {tag!r}"
            )
        self.max_calls, self.tag, self._repeat = max_calls, tag, repeat_observation
        self._refines, self._offers, self._task_of = refine, offer, task
        below = next((one.log for one in layers(env) if isinstance(one, ExperienceWrapper)), None)
        self._records = below is None  # else the wrapper below does
        if below is not None and bank is None:
            self.log = below
        elif below is None and bank is not None:
            manager, self._owned = connect(bank, None)
            each: EpisodeOptions = {"success": success, "score": score}
            each["exclude_same_instance"] = exclude_same_instance
            self.log = EpisodeLog(manager, each, env.spec)
        else:
            got = "neither" if bank is None else "both"
            raise ValueError(
                f"Expected either an ExperienceWrapper below or bank=, got {got}; give exactly one"
            )
        name = re.escape(tag)
        self._pattern = re.compile(rf"<{name}>(.*?)</{name}>", re.DOTALL | re.IGNORECASE)
        self._refused = self._turns = 0
        self._observation, self._last = "", dict[str, Any]()
        self.observation_space = UnicodeText()
        text = isinstance(env.action_space, UnicodeText)  # it holds calls, and keeps its samples
        self.action_space = env.action_space if text else UnicodeText()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode with all calls left; consume the options of ``ExperienceWrapper``."""
        self._refused = self._turns = 0
        if self._records:
            settings, rest = take_settings(options, None)
            self.log.abandon()
            observation, info = self.env.reset(seed=seed, options=rest)
            info = with_task(self._task_of, observation, info)
            self.log.begin(observation, info, seed, settings)
        else:
            observation, info = self.env.reset(seed=seed, options=options)
        self._tool.calls = 0
        return observation, self._with_tool(self._seen(observation, info))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a call, or step the environment with any other action."""
        query = self.query_of(action)
        self._turns += 1
        if query is not None:
            return self._answer(query, action)
        self._refused = 0
        observation, reward, terminated, truncated, info = self.env.step(action)
        reward = float(reward)
        if self._records:
            extra = self.log.step(action, reward, observation, terminated, truncated, info)
            info = {**info, **extra}
        if "tools" in info:  # the environment offers others from now on
            info = self._with_tool(info)
        return observation, reward, terminated, truncated, self._seen(observation, info)

    def tool_schema(self) -> dict[str, Any]:
        """Return the call as an OpenAI tool, for models that call tools instead of writing tags."""
        return self._tool.schema

    def query_of(self, action: Any) -> str | None:
        """Return the question in an action, or None when the action is not a call."""
        if isinstance(action, str):
            if "<" in action and (found := self._pattern.findall(action)):
                return str(found[-1]).strip()
            if self.tag not in action or "{" not in action:
                return None
        fields = json_fields(action)
        call = fields.get("function", fields)
        call = json_fields("" if isinstance(call, str) else call)
        if call.get("name") != self.tag:
            return None
        return query_in(call.get("arguments"))

    def call(self, query: str) -> str:
        """Return the action that asks ``query``."""
        return f"<{self.tag}>{query}</{self.tag}>"

    def _with_tool(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return an info that offers the call beside the environment's own tools, if guided."""
        if self.log.episode is None or not self.log.episode.guided:
            return info
        return {**info, "tools": [*info.get("tools", ()), self.tool_schema()]}

    def _seen(self, observation: str, info: dict[str, Any]) -> dict[str, Any]:
        """Keep the observation and info, as a call gives no new ones; return info to show."""
        self._tool.episode = self.log.episode  # a wrapper between may have begun another
        self._observation = observation
        self._last = dict(info)
        return self._with_call(info)

    def _with_call(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return an info that offers the call among the admissible actions, if it is answered."""
        episode = self.log.episode if self._offers and self._tool.calls_left else None
        if episode is None or "admissible" not in info:
            return info
        return {**info, "admissible": [*info["admissible"], self.call(episode.task)]}

    def _answer(self, query: str, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        episode = self.log.episode
        if episode is None:
            raise gym.error.ResetNeeded("Expected reset() before this step: no episode is running")
        tagged = isinstance(action, str) and "<" in action
        form = f"between <{self.tag}> and </{self.tag}>" if tagged else 'as {"query": "…"}'
        episode.spend("actor", getattr(action, "usage", None))
        reply = self._tool.reply(query, form)
        self._refused = self._refused + 1 if reply.is_refused else 0
        truncated = self._refused >= PATIENCE
        # an agent that only asks has not solved the task, unless the environment said otherwise
        ending = self.log.finish({"success": False} | self._last) if truncated else {}
        observation = reply.block
        if self._repeat:
            observation += f"\n\n{self._observation}"
        _, found = present(observation, "none", reply.hits, reply.error)
        hit = found["experience"][0] if reply.hits else None
        if self._refines:  # the refined text is shown, not the entry
            found["experience"] = []
        call = {
            "query": query,
            "calls_left": self._tool.calls_left,
            "hit": hit,
            "turn": self._turns,
        }
        kept = {key: value for key, value in self._last.items() if key in _CONTEXT}
        # a copy, so that who changes this info changes no later one
        context = deepcopy(self._with_call(kept))
        info = context | found | ending | {"search_and_ask": call}
        return observation, 0.0, False, truncated, info

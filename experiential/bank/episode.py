"""Run an episode of any agent: advice at its start, a record of what it did, an outcome at its end.

`Episode` is the one class that holds a running episode; the Gymnasium wrappers and the trainer's
rollout are users of it. `AskTool` lets the model itself ask the bank meanwhile.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self, SupportsIndex, TypedDict, cast

from experiential.bank.ask_tool import AskTool
from experiential.bank.manager_like import AsyncManagerLike, ManagerLike
from experiential.bank.messages import read_message
from experiential.bank.outcome import (
    Score,
    Success,
    as_outcome,
    check_success,
    concluded,
    said_score,
)
from experiential.bank.search.where import Filter, Where
from experiential.bank.text import checked_text, experience_block
from experiential.errors import BackendError, BankError
from experiential.sync import attempted, awaited
from experiential.types import (
    Answer,
    Condition,
    Hit,
    How,
    Trajectory,
    Turn,
    Usage,
    Use,
    new_id,
    whole,
)

FAILURES = (BackendError, BankError, TimeoutError)
"""Errors of a bank or its manager at run time; an episode goes on without advice."""

_LOGGER = logging.getLogger(__name__)


class EpisodeOptions(TypedDict, total=False):
    """List the options of an `Episode`, which describes them."""

    k: int | None
    guided: bool | None
    instance: str | None
    task_id: str
    seed: int | None
    group: str
    policy_version: int
    success: Success | None
    score: Score | None
    where: Filter | None
    exclude_same_instance: bool
    max_calls: int
    distil: bool


class Episode:
    """Hold a running episode: advise it, record its turns, credit what it used, end and submit it.

    Make one with ``manager.episode(task)`` or ``bank.episode(task)`` and use it in a ``with`` or
    ``async with`` block. Entering retrieves by the task. Leaving submits the record durably, for
    distillation in the background; inside ``async with`` nothing blocks the event loop, and
    ``finish`` only notes the outcome. An exception in the block makes the episode a technical
    failure: recorded with its words, evidence for nothing, and raised again. Without a block, call
    ``start`` and ``finish`` (``astart`` and ``afinish``).

    A bank that fails at run time never stops the agent: ``advice`` is then empty, ``error`` names
    the failure, and the log has it when the episode is over.

    >>> import tempfile
    >>> from experiential.bank.bank import ExperienceBank
    >>> bank = ExperienceBank(tempfile.mkdtemp(), embedder="hashing")
    >>> entry = bank.add("The red door needs the brass key.", task="open the red door")
    >>> with bank.episode("open the red door") as ep:
    ...     print(ep.advice, end="")
    ...     ep.extend([
    ...         {"role": "system", "content": f"You open doors. {ep.advice}"},
    ...         {"role": "user", "content": "Here is the red door."},
    ...         {"role": "assistant", "content": "I take the brass key."},
    ...     ])
    ...     ended = ep.finish(success=True)
    <experience>
    1. The red door needs the brass key.
    </experience>
    >>> ended.turns[0].action, bank.outcomes(entry.id, 1), bank.queue.waiting() == [ep.id]
    ('I take the brass key.', [1], True)
    >>> bank.close()

    Args:
        manager: what searches and takes the record; ``manager.episode`` passes itself.
        task: what is asked, in words: the query of retrieval, and the task of entries.
        k: entries shown at the start; None takes the manager's ``retrieval.k``.
        guided: whether the episode may see the bank; None lets the manager decide (a share of
            episodes plays free, as the baseline of evidence).
        instance: name of what is played, such as a question's number; by default task and seed
            where there is a seed. Entries made from it can be hidden.
        task_id: name of the task, stable over instances and wordings.
        seed: of the instance.
        group: shared by episodes that started alike.
        policy_version: optimiser steps that the agent's weights have seen.
        success: the rule for an outcome that ``finish`` does not state: a function of the
            trajectory that returns True, False or None (unknown), or the score, else the return,
            from which on it counts, a ``Judge``, whom the manager asks in the background, or
            ``better``: a score above the mean of the earlier episodes of this task in the bank.
        score: a function of the trajectory that gives the score ``finish`` does not state; without
            it the score is ``info["score"]`` of an environment's last step, else the sum of rewards
            of turns that came with rewards.
        where: show only entries whose kind, task and metadata are so (see ``Where``).
        exclude_same_instance: hide entries that were made from this very instance, as an
            evaluation must.
        max_calls: answers that ``tool`` gives.
        distil: whether lessons are made of the episode; without, it is recorded all the same.
        reward_threshold: the return from which on an environment counts as solved.
        return_is_score: whether the return is the score where nothing else says it.

    Attributes:
        id: of the trajectory to come.
        task, guided: as above, ``guided`` as decided.
        hits: entries retrieved last.
        turns: the turns so far.
        uses: retrievals that reached the agent so far.
        answers: blocks that ``tool`` answered with; ``extend`` leaves them out as it does advice.
        usage: tokens and cost so far by role: ``extractor`` where it refines answers, ``actor`` as
            ``spend`` was told.
        error: why the bank failed in this episode, the first time; None if it did not.
        trajectory: the record, once the episode is over.

    Raises:
        ValueError, TypeError: an argument is not as described.
    """

    def __init__(
        self,
        manager: ManagerLike,
        task: str,
        *,
        k: int | None = None,
        guided: bool | None = None,
        instance: str | None = None,
        task_id: str = "",
        seed: int | None = None,
        group: str = "",
        policy_version: int = 0,
        success: Success | None = None,
        score: Score | None = None,
        where: Filter | None = None,
        exclude_same_instance: bool = False,
        max_calls: int = 2,
        distil: bool = True,
        reward_threshold: float | None = None,
        return_is_score: bool = True,
    ) -> None:
        given: dict[str, object] = {"k": k, "guided": guided}
        if k is not None and (type(given["k"]) is not int or k < 1):
            raise ValueError(f"Expected k to be a positive whole number or None, got {k!r}")
        if given["guided"] not in (None, True, False):
            raise TypeError(f"Expected guided to be True, False or None, got {guided!r}")
        counts: dict[str, object] = {"max_calls": max_calls, "policy_version": policy_version}
        counts |= {} if seed is None else {"seed": seed}
        for name, number in counts.items():
            if isinstance(number, bool) or not isinstance(number, SupportsIndex):
                raise TypeError(f"Expected {name} to be a whole number, got {number!r}")
        if max_calls < 1:
            raise ValueError(f"Expected max_calls to be positive, got {max_calls}")
        check_success(success, score)
        text_of(task_id, "task_id")
        text_of(group, "group")
        self.id, self.manager = new_id(), manager
        self.task = whole(task)
        self.task_id, self.seed, self.group = task_id, seed, group
        self.policy_version = policy_version
        named = f"{task_id or task}#{seed}" if seed is not None else ""
        self.instance = str(instance or named)
        self.error: str | None = None
        drawn = attempted(manager.plays_free, task) if guided is None else not guided
        self.guided = isinstance(drawn, Exception) or not drawn
        if isinstance(drawn, Exception):
            self.fail(drawn)
        self.condition = Condition.GUIDED if self.guided else Condition.FREE
        self.query = task  # of a retrieval now: the task, then with the observation
        self.hits: list[Hit] = []
        self.turns: list[Turn] = []
        self.uses: list[Use] = []
        self.answers: list[str] = []
        self.usage: dict[str, Usage] = {}
        self.reward = 0.0
        self.trajectory: Trajectory | None = None
        self._max_calls, self._distil = max_calls, distil
        self._k, self._where, self._hides = k, Where.of(where or None), exclude_same_instance
        self._success: Success | None = success
        self._score, self._threshold = score, reward_threshold
        self._observed: list[str] = []  # since the last action
        self._messages: list[Any] = []  # those given to extend()
        self._calls: set[str] = set()  # ids of calls to the tool among them
        self._is_started = self._is_async = self._is_submitted = False
        self._return_is_score = return_is_score
        self._is_rewarded = False  # whether a turn came with a reward, be it 0

    # Before the first action

    def start(self) -> Self:
        """Retrieve for the task; ``with`` calls this."""
        if self._starts():
            self.advise("episode_start")
        return self

    async def astart(self) -> Self:
        """Retrieve for the task without blocking the event loop; ``async with`` calls this."""
        if self._starts():
            found = await awaited(self.manager.asearch(self.query, k=self._k, **self.scope()))
            self.advised(found, "episode_start")
        return self

    def _starts(self) -> bool:
        if self.trajectory is not None:
            raise self._over()
        if self._is_started:
            raise RuntimeError(
                f"Expected to start episode {self.id} once, got a second start; make another one"
            )
        self._is_started = True
        return self.guided

    def _over(self) -> RuntimeError:
        return RuntimeError(
            f"Expected a running episode, got {self.id}, which is over; make another one with"
            " manager.episode(task)"
        )

    __enter__ = start

    async def __aenter__(self) -> Self:
        self._is_async = True
        return await self.astart()

    @property
    def advice(self) -> str:
        """Return the hits as a fenced block that can forge nothing; empty without any."""
        return experience_block(self.hits)

    # Retrieval

    def scope(self) -> dict[str, Any]:
        """Return the options of a search that say what this episode may not find."""
        scope: dict[str, Any] = {"exclude_instance": (self._hides and self.instance) or None}
        return scope if self._where is None else {**scope, "where": self._where}

    def advise(self, how: How) -> str | None:
        """Retrieve for ``query`` into ``hits``; return the reason if the bank failed."""
        found = attempted(self.manager.search, self.query, k=self._k, **self.scope())
        return self.advised(found, how)

    def advised(self, found: list[Hit] | Exception, how: How) -> str | None:
        """Take what was found for ``query`` and reaches the agent now, as ``advise`` does."""
        self.hits = [] if isinstance(found, Exception) else found
        self.use(self.hits, how)
        return self.fail(found) if isinstance(found, Exception) else None

    def use(self, hits: Sequence[Hit], how: How) -> None:
        """Credit each of these hits as a use."""
        self.uses.extend(hit.use(how, episode=self.id, turn=len(self.turns)) for hit in hits)

    def fail(self, error: Exception) -> str:
        """Note a failure of the bank and return its reason; raise any other error."""
        if not isinstance(error, FAILURES):
            raise error
        self.error = self.error or reason(error)
        return reason(error)

    # Questions

    @cached_property
    def tool(self) -> AskTool:
        """Return search_and_ask of this episode: a tool schema and the function behind it."""
        return AskTool(self, max_calls=self._max_calls)

    def ask(self, query: str) -> Answer:
        """Return the best entry, refined for a question, and credit it as used.

        The answer has no text in a free episode, or where nothing fits. There is no limit: this is
        for the program around the agent; give the agent itself ``tool``.
        """
        if not self._may_ask(query):
            return Answer()
        found = attempted(self.manager.ask, query, **self.scope())
        return self.credit(found) or Answer()

    async def aask(self, query: str) -> Answer:
        """Do as ``ask`` without blocking the event loop."""
        if not self._may_ask(query):
            return Answer()
        manager = cast("AsyncManagerLike", self.manager)
        found = await awaited(manager.aask(query, **self.scope()))
        return self.credit(found) or Answer()

    def _may_ask(self, query: str) -> bool:
        if self.trajectory is not None:
            raise self._over()
        return bool(checked_text(query, "query")) and self.guided

    def credit(self, answer: Answer | Exception) -> Answer | None:
        """Credit an answer as used and return it; None if the bank failed instead."""
        if isinstance(answer, Exception):
            self.fail(answer)
            return None
        if answer.generation is not None:
            self.spend("extractor", answer.generation.usage)
        if answer.use is not None:
            where = {"how": "search_and_ask", "episode": self.id, "turn": len(self.turns)}
            self.uses.append(answer.use.model_copy(update=where))
        return answer

    # Turns

    def record(self, observation: str, action: str, reward: float = 0.0) -> None:
        """Add one turn: what the agent saw, what it did then, and the reward of that.

        The observation is also the result of the turn before.
        """
        if self.trajectory is not None:
            raise self._over()
        seen, done = text_of(observation, "observation"), text_of(action, "action")
        gained = finite(reward, "reward")
        self._observed.append(seen)
        self._is_rewarded = True
        self._act(done, gained)

    def extend(self, messages: Sequence[Any]) -> None:
        """Add the turns of OpenAI chat messages: dicts, or objects of an SDK (``model_dump``).

        Each assistant message is an action: its text, and its tool calls as JSON. What precedes it
        since the last action is the observation. Left out are the advice block, and calls of
        ``tool`` with their answers: the bank's own words are credited as uses, not observed.

        Pass every message once, in order, in as many calls as you like. A list that grows may be
        passed again and again: messages at its start that were recorded before, the same objects,
        are not recorded twice.
        """
        if self.trajectory is not None:
            raise self._over()
        if not isinstance(cast("object", messages), list | tuple):
            raise TypeError(
                f"Expected a list of chat messages, got {type(messages).__name__}; pass [message]"
            )
        given, seen = list(messages), self._messages
        if len(given) >= len(seen) and all(map(lambda a, b: a is b, given, seen)):
            given = given[len(seen) :]
        read = [read_message(message) for message in given]  # all of them or, on an error, none
        self._messages += given
        for message in read:
            if message.answers and message.answers in self._calls:
                continue
            text = message.text
            for block in filter(None, (self.advice.strip(), *self.answers)):
                text = text.replace(block, "")
            text = text.strip()
            own = [call for call in message.calls if call.name == self.tool.name]
            # some servers give the ids of an earlier reply again
            self._calls -= {call.id for call in message.calls}
            self._calls |= {call.id for call in own}
            if not message.is_action:
                self._observed += [text] if text else []
            elif len(own) < len(message.calls) or not own:
                said = [call.action() for call in message.calls if call not in own]
                self._act("\n".join([text, *said] if text else said), 0.0)

    def step(self, action: Any, reward: float, observation: str, info: Mapping[str, Any]) -> None:
        """Add the turn of one Gymnasium step; ``info["withheld"]`` is what only a reflector reads.

        What the agent saw before it is the observation of the last step, or of ``observe``.
        """
        if (usage := getattr(action, "usage", None)) is not None:
            self.spend("actor", usage)
        turn = Turn(
            observation="\n\n".join(self._observed),
            action=str(action),
            reward=reward,
            feedback=observation,
            invalid=bool(info.get("invalid", False)),
            withheld=str(info.get("withheld") or ""),
        )
        self.turns.append(turn)
        self._observed = [observation]
        self.query = f"{self.task}\n{observation}"
        self.reward += reward
        self._is_rewarded = True

    def spend(self, role: str, usage: Any) -> None:
        """Count what a reply took: a `Usage`, a table, or ``response.usage`` of OpenAI's client.

        The record keeps tokens and cost by role. What a reply does not report stays unknown: None
        is taken and adds nothing.

        Raises:
            TypeError: ``usage`` is none of these.
        """
        if usage is None:
            return
        told: Any = usage.model_dump() if hasattr(usage, "model_dump") else usage
        if not isinstance(told, Mapping):
            raise TypeError(f"Expected usage as a table of numbers, got {type(usage).__name__}")
        told = cast("Mapping[str, Any]", told)
        known = Usage(**{name: told.get(name) for name in Usage.model_fields})
        self.usage[role] = known + self.usage.get(role, Usage())

    def observe(self, observation: str) -> None:
        """Note what the agent sees before its next action."""
        self._observed.append(observation)

    def _act(self, action: str, reward: float) -> None:
        observation = self._result()
        self.turns.append(Turn(observation=observation, action=action, reward=reward))
        self.reward += reward

    def _result(self) -> str:
        """Return what was observed since the last action; it is the feedback of the turn before."""
        observation = "\n\n".join(self._observed)
        self._observed.clear()
        if self.turns and observation and observation != self.turns[-1].feedback:
            self.turns[-1] = self.turns[-1].model_copy(update={"feedback": whole(observation)})
        return observation

    # The end

    def finish(
        self, success: bool | None = None, score: float | None = None, feedback: str | None = None
    ) -> Trajectory:
        """End the episode, submit it unless ``async with`` will, and return its record.

        Args:
            success: the outcome; None leaves it to the rule ``success`` of the episode, else it is
                unknown, and counts neither for nor against an entry.
            score: how good it was, on a scale of yours; None leaves it to the rule ``score``.
            feedback: words about the play for the extractor, behind the last turn.

        Raises:
            RuntimeError: the episode is over.
            TypeError, ValueError: an argument is not as described; the episode goes on.
        """
        ended = self.end(success=success, score=score, feedback=feedback)
        if not self._is_async:
            self.submit()
        return ended

    async def afinish(
        self, success: bool | None = None, score: float | None = None, feedback: str | None = None
    ) -> Trajectory:
        """End and submit the episode without blocking the event loop."""
        ended = self.end(success=success, score=score, feedback=feedback)
        await self.asubmit()
        return ended

    def end(
        self,
        info: Mapping[str, Any] | None = None,
        *,
        success: bool | None = None,
        score: float | None = None,
        feedback: str | None = None,
        error: str | None = None,
    ) -> Trajectory:
        """End the episode as ``finish`` does and return its record, unsubmitted.

        The last ``info`` of an environment may say whether it was a success. An ``error`` makes it
        a technical failure, without outcome and score.
        """
        if self.trajectory is not None:
            raise self._over()
        said = None if success is None else as_outcome(success, "success to be")
        graded = None if score is None else finite(score, "score")
        words = text_of(feedback, "feedback") if feedback else ""
        self._result()
        turns = [*self.turns]
        if words:
            last = turns.pop() if turns else Turn(observation="", action="")
            words = f"{last.feedback}\n\n{words}" if last.feedback else words
            turns.append(last.model_copy(update={"feedback": whole(words)}))
        ended = Trajectory(
            id=self.id,
            task=self.task,
            task_id=self.task_id,
            instance=self.instance,
            group=self.group,
            turns=tuple(turns),
            reward=self.reward,
            score=graded,
            seed=self.seed,
            condition=self.condition,
            uses=tuple(self.uses),
            policy_version=self.policy_version,
            usage=self.usage,
            error=error,
        )
        if error is None:
            if graded is None and self._score is not None:
                graded = finite(self._score(ended), "score(trajectory)")
            elif graded is None and self._return_is_score:
                graded = said_score(info or {})
                if graded is None and self._is_rewarded:
                    graded = self.reward
            ended = ended.model_copy(update={"score": graded, "success": said})
            if said is None:
                ended = concluded(ended, info or {}, self._success, self._threshold)
        self.trajectory = ended
        return ended

    def settle(
        self, info: Mapping[str, Any] | None = None, *, error: str | None = None
    ) -> Trajectory:
        """End the episode as ``end`` does; a rule that raises makes it a technical failure."""
        try:
            return self.end(info, error=error)
        except Exception as broken:  # a rule of the caller: the play is kept
            self.end(error=reason(broken))
            raise

    def submit(self) -> str | None:
        """Hand the ended episode to the manager, once; return the reason if the bank failed."""
        if self.trajectory is None or self._is_submitted:
            return None
        self._is_submitted = True
        return self._handed(attempted(self.manager.submit, self.trajectory, **self._handing()))

    async def asubmit(self) -> str | None:
        """Do as ``submit`` without blocking the event loop."""
        if self.trajectory is None or self._is_submitted:
            return None
        self._is_submitted = True
        manager = cast("AsyncManagerLike", self.manager)
        return self._handed(await awaited(manager.asubmit(self.trajectory, **self._handing())))

    def _handing(self) -> dict[str, Any]:
        """Return the options of ``submit`` that this episode needs."""
        assert self.trajectory is not None
        judge = {"judge": self._success} if self.trajectory.rubric else {}
        return judge | ({} if self._distil else {"distil": False})

    def _handed(self, outcome: object) -> str | None:
        failure = self.fail(outcome) if isinstance(outcome, Exception) else None
        if self.error is not None:
            lost = "was not recorded" if failure else "went on without its bank"
            _LOGGER.warning("Episode %s %s: %s", self.id, lost, failure or self.error)
        return failure

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        try:
            self._close(error)
        finally:
            self.submit()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        try:
            self._close(error)
        finally:
            await self.asubmit()

    def _close(self, error: BaseException | None) -> None:
        """End an episode that ``finish`` did not, at the end of its block."""
        if self.trajectory is None:
            self.settle(error=None if error is None else reason(error))


def reason(error: BaseException) -> str:
    """Return one line that names a failure."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def text_of(value: object, name: str) -> str:
    """Return text as it is; TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(
            f"Expected {name} to be text, got {type(value).__name__}; describe it in words"
        )
    return value


def finite(value: Any, name: str) -> float:
    """Return a number as float; TypeError or ValueError for what is no finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"Expected {name} to be a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"Expected {name} to be a finite number, got {value!r}")
    return number

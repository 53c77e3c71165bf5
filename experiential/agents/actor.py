"""Play a text environment with a language model, keeping every token for training."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from experiential.agents.dialogue import ChatTemplate, Dialogue, MessageDialogue, SpanKind
from experiential.agents.prompts import derived_seed, prompt_set
from experiential.bank.text import escape_control
from experiential.config import Advice
from experiential.llm.base import LLM, SamplingParams
from experiential.sync import run_sync
from experiential.types import Action, FinishReason, Generation, Message, Usage, new_id

T = TypeVar("T")
P = ParamSpec("P")
Self = TypeVar("Self")
CALLS = ("search_and_ask", "search_experience", "search_knowledge", "answer")
"""Tags that reach the environment and its wrappers unchanged."""
STOP = ("</action>", "</search_and_ask>", "</search_experience>", "</search_knowledge>")
"""Strings that end a response; four, since services take no more. An answer needs none."""

_OPEN = re.compile(rf"<(action|{'|'.join(CALLS)})>", re.IGNORECASE)


def blocking(
    method: Callable[Concatenate[Self, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Self, P], T]:
    """Return the synchronous twin of an agent's coroutine method, a subclass's included."""

    @wraps(method)
    def call(self: Self, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_sync(getattr(self, method.__name__)(*args, **kwargs))

    call.__name__ = method.__name__.removeprefix("a")
    call.__qualname__ = method.__qualname__.removesuffix(method.__name__) + call.__name__
    return call


class ActorAgent:
    """Act in a text environment with a language model.

    Caveat: one agent plays one episode at a time; call ``reset`` before each. No vector version:
    use one agent per environment.

    >>> from experiential.llm.scripted import ScriptedLLM
    >>> said = ["A key? <action>look under mat</action>", "<action>open door</action>"]
    >>> agent = ActorAgent(ScriptedLLM(said))
    >>> agent.act("A locked door and a mat.")
    'look under mat'
    >>> agent.act("You find a key.")
    'open door'
    >>> len(agent.generations)
    2

    Args:
        llm: the backend; when it shows its tokenizer, the conversation is kept as token ids.
        prompts: ``full`` for instruct models, ``brief`` for the bundled tiny model.
        instruction: description of the environment for the agent; trusted text.
        system: system message in place of that of ``prompts``, which then has no instruction.
        temperature: sampling temperature; 0 is greedy.
        top_p: nucleus sampling.
        max_tokens: tokens per response.
        constrain: choose among ``info["admissible"]`` where the environment names the admissible
            actions; an action that matches ``info["admissible_pattern"]`` can be written too.
        history: past turns shown beside the first observation and the current one; None shows all.
        keep_first: False drops the first observation with the turns that ``history`` leaves out,
            for environments whose every observation is complete.
        advice: where ``info["experience_prompt"]`` goes: into the ``system`` message, or behind the
            first ``observation``, so that all that start from it share the prompt before the
            advice. Advice stays in the system message where the first observation does not stay in
            the prompt.
        seed: makes every request repeatable; it is mixed with the turn.
        priority: of the requests, lower runs first.
        tools: how the model calls what ``info["tools"]`` offers, at the reset or last: ``native``,
            as tool calls of the protocol, whose answers go back as tool messages; ``tag``, in text.
            None: native where the backend supports it, as hosted models are trained for it.

    Raises:
        ValueError: the prompt set or the place of advice does not exist, ``history`` is
            negative, or the backend has no native tools.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        prompts: str = "full",
        instruction: str = "",
        system: str | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 256,
        constrain: bool = False,
        history: int | None = None,
        keep_first: bool = True,
        advice: Advice = "system",
        seed: int | None = None,
        priority: int = 0,
        tools: Literal["native", "tag"] | None = None,
    ) -> None:
        if tools not in (None, "tag", "native") or (tools == "native" and not llm.supports_tools):
            raise ValueError(
                "Expected tools to be 'tag', None, or 'native' with a backend that supports it, got"
                f" {tools!r} with {llm.name!r}"
            )
        if advice not in ("system", "observation"):
            raise ValueError(f"Expected advice to be 'system' or 'observation', got {advice!r}")
        self.llm = llm
        given = prompt_set(prompts)
        self.prompts = given if system is None else given.with_system(system)
        self.instruction = instruction
        self.constrain = constrain
        self.history = history
        self.keep_first = keep_first
        self.advice = advice
        self.seed = seed
        self._native = tools != "tag"
        draw: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "priority": priority}
        self._sampling = SamplingParams(max_tokens=max_tokens, stop=STOP, **draw)
        self.reset()

    def reset(self, *, seed: int | None = None) -> None:
        """Begin an episode; ``seed`` replaces the agent's seed when given."""
        self.seed = self.seed if seed is None else seed
        tokenizer = self.llm.tokenizer
        shown: dict[str, Any] = {"history": self.history, "keep_first": self.keep_first}
        self.dialogue = (
            MessageDialogue(**shown) if tokenizer is None else Dialogue(tokenizer, **shown)
        )
        self.generations: list[Generation] = []
        self._session = new_id()
        self._experience: str | None = None
        self._tools: tuple[dict[str, Any], ...] = ()
        self._further: list[
            Generation
        ] = []  # calls of the last reply, to be made in the next turns

    @property
    def usage(self) -> Usage | None:
        """Return what this episode's replies took; None if the backend does not say."""
        told = [one.usage for one in self.generations if one.usage is not None]
        return sum(told[1:], told[0]) if told else None

    async def aact(self, observation: str, info: Mapping[str, Any] | None = None) -> str:
        """Return the action for ``observation``; of ``info`` use admissible and experience_prompt.

        Raises:
            BackendError: the backend failed; the turn may be asked for again.
        """
        info = info or {}
        seed = None if self.seed is None else derived_seed(self.seed, len(self.generations))
        if self._native and info.get("tools"):  # of the reset, or of a turn that offers others
            self._tools = tuple(info["tools"])
        sampling: dict[str, Any] = {"seed": seed, "tools": self._tools, "session": self._session}
        choices = tuple(map(str, info.get("admissible") or ())) if self.constrain else ()
        if choices:
            pattern = info.get("admissible_pattern")
            sampling |= {"choices": choices, "pattern": pattern, "stop": (), "tools": ()}
        params = self._sampling.model_copy(update=sampling)
        advice = self._observe(observation, info.get("experience_prompt"), bool(choices))
        if self._further:
            generation = self._further.pop(0)
        else:
            try:
                generation = await self.llm.generate(self.dialogue.prompt(), params)
            except BaseException:  # the turn can be asked for again
                self.dialogue.withdraw()
                raise
            # Calls made at once are carried out one a turn, as if asked for one after the other.
            if further := generation.tool_calls[1:]:
                shared = {"text": "", "usage": None, "response_ids": (), "logprobs": ()}
                self._further = [
                    generation.model_copy(update={**shared, "id": new_id(), "tool_calls": (call,)})
                    for call in further
                ]
                update = {"tool_calls": generation.tool_calls[:1]}
                generation = generation.model_copy(update=update)
        self.dialogue.append(generation)
        self.generations.append(generation)
        self._experience = advice
        if generation.tool_calls:
            action = generation.tool_calls[0].action()
        elif choices and params.permits(generation.text):
            action = generation.text
        else:
            action = extract_action(generation.text)
        if generation.usage is not None:  # so that wrappers can report it
            action = Action(action)
            action.usage = generation.usage
        return action

    act = blocking(aact)

    def replay(
        self,
        observations: Sequence[str],
        generations: Sequence[Generation],
        *,
        advice: str | None = None,
    ) -> list[Generation]:
        """Return an episode's responses after the prompts that other advice, or none, would give.

        Nothing is sampled: only the prompts of the responses change. The agent is then at the end
        of that episode.

        Args:
            observations: the observation that each response answered.
            generations: the responses, one for each observation.
            advice: the experience block shown from the start.

        Raises:
            ValueError: the lengths differ, or the backend does not show its tokenizer.
        """
        self.reset()
        if not isinstance(self.dialogue, Dialogue):
            raise ValueError(
                "Expected a backend that shows its tokenizer, to replay an episode as token ids,"
                " got one that does not"
            )
        for observation, generation in zip(observations, generations, strict=True):
            constraint = generation.json_schema  # of choices among which text is open
            chosen = generation.finish_reason is FinishReason.CHOICE or constraint is not None
            shown = self._observe(observation, advice, chosen)
            prompt = {"prompt_ids": tuple(self.dialogue.prompt())}
            replayed = generation.model_copy(update=prompt)
            self.dialogue.append(replayed)
            self.generations.append(replayed)
            self._experience = shown
        return self.generations

    def opening(
        self, observation: str, advice: str | None = None
    ) -> tuple[list[int], list[SpanKind]]:
        """Return the first prompt of an episode as token ids, and the kind of each token.

        Raises:
            ValueError: the backend does not show its tokenizer.
        """
        if self.llm.tokenizer is None:
            raise ValueError(
                "Expected a backend that shows its tokenizer, to make a prompt of token ids, got"
                " one that does not"
            )
        system = self.prompts.actor_system(self.instruction, advice)
        user: Message = {"role": "user", "content": escape_control(observation)}
        return ChatTemplate(self.llm.tokenizer).opening(system, user)

    def _observe(self, observation: str, advice: str | None, constrained: bool) -> str | None:
        """Add the observation, and advice that is new; return the advice in force.

        Advice that comes after the first turn stands before its observation.
        """
        content = escape_control(observation)
        new = advice if advice and advice != self._experience else None
        first_stays = self.history is None or self.keep_first
        last = self.advice == "observation" and first_stays
        if not self.generations:
            above = None if last else new
            system = self.prompts.actor_system(self.instruction, above, constrained=constrained)
            self.dialogue.add({"role": "system", "content": system})
        if new and last:
            content = f"{content}\n{new}"
        elif new and self.generations:
            content = f"{new}{content}"
        if self.generations and (calls := self.generations[-1].tool_calls):
            self.dialogue.add({"role": "tool", "content": content, "tool_call_id": calls[0].id})
        else:
            self.dialogue.add({"role": "user", "content": content})
        return advice or self._experience


def extract_action(text: str) -> str:
    r"""Return the action in a response: its last ``<action>`` or call, else its last line.

    A tag of ``CALLS`` is returned whole, for the wrapper that reads it.

    >>> extract_action("Hm. <Action> go north </Action>"), extract_action("I think so.\ngo north")
    ('go north', 'go north')
    """
    thought = text.lower().rfind("</think>")
    answer = text[thought + len("</think>") :] if thought >= 0 else text
    openings = list(_OPEN.finditer(answer))
    if not openings:
        return next((line.strip() for line in reversed(answer.splitlines()) if line.strip()), "")
    opening = openings[-1]
    closing = re.compile(f"</{opening[1]}>", re.IGNORECASE).search(answer, opening.end())
    if opening[1].lower() not in CALLS:
        return answer[opening.end() : closing.start() if closing else len(answer)].strip()
    if closing:
        return answer[opening.start() : closing.end()]
    return f"{answer[opening.start() :]}</{opening[1].lower()}>"

"""Connect agents, games and trainers of other packages: transcripts, environments both ways.

None of these packages is a dependency; each is imported when it is used. Frameworks that already
speak OpenAI messages need no adapter: ``ep.extend(messages)`` takes those of the OpenAI client,
``ep.extend(convert_to_openai_messages(state["messages"]))`` those of LangGraph. `docs/agents.md`
has a runnable example of each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Unpack, get_args
from uuid import uuid4

import gymnasium as gym

from experiential.agents.actor import extract_action
from experiential.agents.prompts import prompt_set
from experiential.bank.episode import EpisodeOptions
from experiential.bank.manager import ExperienceManager
from experiential.bank.protocol import Bank
from experiential.envs import ENVS, random_agent
from experiential.envs.arguments import one_of, positive
from experiential.envs.make import make
from experiential.envs.split import Split
from experiential.envs.text_env import Info, Step, TextEnv
from experiential.errors import ConfigError

FULL_SCORE = 0.999
"""The return from which on a game counts as won; GEM and TextArena give 1 for a full score."""
LONGEST_ACTION = 10_000
"""Characters of an action that TextArena is given, since it shows all actions again and again."""


def from_smolagents(agent: Any) -> list[dict[str, Any]]:
    """Return the memory of a smolagents agent as OpenAI messages, its system prompt left out."""
    models = import_module("smolagents.models")
    sent = models.get_clean_message_list(
        agent.write_memory_to_messages(),
        role_conversions=models.tool_role_conversions,
        flatten_messages_as_text=True,
    )
    return [{**one, "role": one["role"].value} for one in sent if one["role"].value != "system"]


def from_openai_agents(result: Any) -> list[dict[str, Any]]:
    """Return a run of the OpenAI Agents SDK (``RunResult``) as OpenAI messages."""
    converter = import_module("agents.models.chatcmpl_converter").Converter
    return converter.items_to_messages(result.to_input_list())


def from_pydantic_ai(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return messages of pydantic-ai (``result.all_messages()``) as OpenAI messages.

    Left out are system prompts, reasoning and pictures.
    """
    found: list[dict[str, Any]] = []
    for part in (part for message in messages for part in message.parts):
        if part.part_kind in ("user-prompt", "text"):
            said = [part.content] if isinstance(part.content, str) else part.content
            text = "\n".join(one for one in said if isinstance(one, str))
            role = "assistant" if part.part_kind == "text" else "user"
            found.append({"role": role, "content": text})
        elif part.part_kind == "tool-call":
            call = {"name": part.tool_name, "arguments": part.args_as_json_str()}
            named = {"id": part.tool_call_id, "type": "function", "function": call}
            found.append({"role": "assistant", "content": None, "tool_calls": [named]})
        elif part.part_kind == "tool-return":
            said = part.model_response_str()
            found.append({"role": "tool", "tool_call_id": part.tool_call_id, "content": said})
        elif part.part_kind in ("retry-prompt", "retry-feedback"):
            found.append({"role": "user", "content": part.model_response()})
    return found


class _Game(TextEnv):
    """Play a game that another package makes by its name; a subclass starts it and plays a turn."""

    _package: tuple[str, str]  # the module, and what pip calls it

    def __init__(
        self,
        game: str,
        *,
        split: Split = "train",
        worlds: int = 10_000,
        render_mode: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(worlds, render_mode=render_mode)
        one_of("split", split, get_args(Split))
        self._game, self._arguments = game, arguments
        self._first = 2**31 if split == "eval" else 0
        self._begin(0)  # names a missing package and a second player at once

    @property
    def task(self) -> str:
        """Return the instructions of the game."""
        return self._task

    def _begin(self, world: int) -> tuple[str, Info]:
        seed = self._first + world
        # made anew: TextArena's observation wrapper keeps the text of earlier games over a reset
        self._env = _made(*self._package, self._game, self._arguments)
        self._name, self._total = f"{self._game}#{seed}", 0.0
        self._task, seen = self._start(seed)
        return seen, self._report(self._name)

    @abstractmethod
    def _start(self, seed: int) -> tuple[str, str]:
        """Start a game; return its instructions and what is seen first."""


class GemEnv(_Game):
    """Play a game of GEM (package ``gem-llm``) as a Gymnasium environment of text.

    A world is a seed of the game, which decides its hidden state. A game is won where its return
    reaches GEM's full score of 1, as ``info["success"]`` says at the end. Caveat: GEM draws from
    Python's global random numbers, so two games at a time are not repeatable.

    Args:
        game: a name of ``gem.print_envs()``, such as ``game:Mastermind-v0-easy``.
        split: ``"eval"`` plays other seeds than ``"train"``.
        worlds: how many seeds there are.
        render_mode: ``ansi`` (the last observation) or None.
        **arguments: those of the game.

    Raises:
        ConfigError: GEM is not installed, or has no such game.
    """

    _package = "gem", "gem-llm"

    def _start(self, seed: int) -> tuple[str, str]:
        task, info = self._env.reset(seed)
        return task, _with_state(task, info)

    def _turn(self, action: str) -> Step:
        said, reward, terminated, truncated, info = self._env.step(action)
        self._total += float(reward)
        over = bool(terminated or truncated)
        report = self._report(self._name, said, success=over and self._total >= FULL_SCORE)
        shown = said if over else _with_state(said, info)
        return shown, float(reward), bool(terminated), bool(truncated), report


class TextArenaEnv(_Game):
    """Play a game of TextArena for one player as a Gymnasium environment of text.

    A world is a seed of the game. The reward comes at the end and is TextArena's score, 1 for a
    game that is won, as ``info["success"]`` says then. Caveat: TextArena draws from Python's global
    random numbers, so two games at a time are not repeatable.

    Args:
        game: a registered name, such as ``GuessTheNumber-v0``.
        split: ``"eval"`` plays other seeds than ``"train"``.
        worlds: how many seeds there are.
        render_mode: ``ansi`` (the last observation) or None.
        **arguments: those of the game.

    Raises:
        ConfigError: TextArena is not installed, has no such game, or it needs several players.
    """

    _package = "textarena", "textarena"

    def _start(self, seed: int) -> tuple[str, str]:
        try:
            self._env.reset(num_players=1, seed=seed)
        except AssertionError as error:
            got = f"{self._game}: {error}"
            raise ConfigError(f"Expected a game for one player, got {got}") from None
        task = str(self._env.get_observation()[1])
        return task, task

    def _turn(self, action: str) -> Step:
        if not self._env.step(action[:LONGEST_ACTION])[0]:
            seen = str(self._env.get_observation()[1])
            return seen, 0.0, False, False, self._report(self._name, seen)
        rewards, ended = self._env.close()
        reward, said = float(rewards[0]), str(ended[0].get("reason") or "The game is over.")
        # 2048 gives its full score to some boards on which the tile was never reached, too
        lost = said.startswith(("No moves left", "Invalid Move"))
        won = reward >= FULL_SCORE and not lost
        return said, reward, True, False, self._report(self._name, said, success=won)


def _with_state(said: str, info: Mapping[str, Any]) -> str:
    """Return what GEM says of a turn, with the state of the game that it gives apart."""
    return "\n".join(filter(None, (said, str(info.get("suffix") or ""))))


def _made(module: str, package: str, game: str, arguments: Mapping[str, Any]) -> Any:
    """Make a game by a package's own registry."""
    try:
        return import_module(module).make(game, **arguments)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Expected the package {error.name!r} for the game {game!r}, which is not installed;"
            f" run: pip install {package}"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"Expected a game of {module} and its arguments, got {game!r}: {error}"
        ) from error


def trl_environment(
    make_env: Callable[[], gym.Env[str, str]],
    manager: ExperienceManager | Bank,
    **options: Unpack[EpisodeOptions],
) -> type:
    """Return an ``environment_factory`` for TRL's ``GRPOTrainer`` from any text environment.

    The model acts by the tool ``act``; the first observation, with advice before it, ends its
    prompt. Each rollout is an episode: TRL gets its return as the reward, and the bank its record,
    also where the model stopped before the end. Columns ``seed`` and ``options`` of the data set,
    where it has them, go to ``reset``.

    Args:
        make_env: makes one environment; TRL keeps one for each rollout of a batch.
        manager: gives the episodes.
        options: of each `Episode`, such as ``k`` and ``success``.
    """

    class TextEnvironment:
        def __init__(self) -> None:
            self._env = make_env()

        def reset(self, **row: Any) -> str:
            seed = row.get("seed")
            self._seen, self._info = self._env.reset(seed=seed, options=row.get("options"))
            task = str(self._info.get("task") or self._seen)
            given: EpisodeOptions = {"task_id": str(self._info.get("task_id") or ""), "seed": seed}
            self._episode = manager.episode(task, **{**given, **options}).start()
            self._over = False
            return f"{self._episode.advice}{self._seen}"

        def act(self, action: str) -> str:
            """Act in the environment.

            Args:
                action: The action, in the words that the environment understands.

            Returns:
                What is observed then.
            """
            if self._over:
                return "The episode is over."
            seen, reward, terminated, truncated, self._info = self._env.step(action)
            self._episode.record(self._seen, action, float(reward))
            self._seen, self._over = seen, terminated or truncated
            return seen

        def get_reward(self) -> float:
            if not self._episode.turns:
                self._episode.record(self._seen, "")  # the model did not act
            self._episode.end(self._info, feedback=self._seen)
            self._episode.submit()
            return self._episode.reward

    return TextEnvironment


def register_with_gem() -> None:
    """Register every environment of this package with GEM, for ``gem.make(id, **arguments)``.

    Arguments are those of `gem_env`. Caveat: a GEM ``AsyncVectorEnv`` that spawns its processes
    must register in each of them.
    """
    known = import_module("gem.envs.registration").ENV_REGISTRY
    for name in ENVS:
        if name not in known:
            import_module("gem").register(name, "experiential.adapters:gem_env", name=name)


def gem_env(name: str, *, seed: int | None = None, instruction: str = "", **arguments: Any) -> Any:
    """Return a text environment as a ``gem.Env`` (package ``gem-llm``).

    Its actions are whole replies of a model: the last ``<action>`` counts, else the last line, as
    the first observation says.

    Args:
        name: for `experiential.envs.make.resolve_env`, such as ``experiential/Vault-v0``.
        seed: of the first reset that names none.
        instruction: said to the model about the environment, before the format of an action.
        **arguments: those of the environment, such as ``split``.
    """

    class TextGame(import_module("gem").Env):
        def __init__(self) -> None:
            self._env = make(name, **arguments)
            self._seed = seed
            self._random = random_agent(self._env, seed or 0)

        def reset(
            self, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, Info]:
            """Begin an episode; ``options={"world": i}`` picks its world."""
            seed, self._seed = self._seed if seed is None else seed, None
            self._seen, self._info = self._env.reset(seed=seed, options=options)
            return f"{prompt_set('full').actor_system(instruction)}\n\n{self._seen}", self._info

        def step(self, action: str) -> Step:
            """Play the action of a reply."""
            played = self._env.step(extract_action(action))
            self._seen, reward, terminated, truncated, self._info = played
            return self._seen, float(reward), terminated, truncated, self._info

        def sample_random_action(self) -> str:
            """Return a reply with a random action."""
            return f"<action>{self._random(self._seen, self._info)}</action>"

        def spawn(self, same_state: bool = False, **changed: Any) -> Any:
            """Return another environment of the same or changed arguments, not yet reset."""
            if same_state:
                raise NotImplementedError("Expected same_state=False: a running game has no copy")
            given: dict[str, Any] = {"instruction": instruction, **arguments, **changed}
            return gem_env(name, **given)

        def close(self) -> None:
            """Close the environment."""
            self._env.close()

    return TextGame()


def openenv_app(name: str, *, sessions: int = 64, instruction: str = "", **arguments: Any) -> Any:
    """Return a FastAPI application that serves a text environment as OpenEnv does.

    Needs the package ``openenv``; run it with uvicorn. Each session of a client plays in an
    environment of its own, which its WebSocket keeps. An action is ``{"text": ...}``, a whole reply
    of a model: the last ``<action>`` counts, else the last line, as the first observation says. An
    observation has text, reward, done, and of the info task, task_id, success, invalid, feedback
    and admissible. ``reset`` takes ``seed`` and ``world``.

    Args:
        name: for `experiential.envs.make.resolve_env`, such as ``experiential/Vault-v0``.
        sessions: how many may play at a time; OpenEnv refuses the next.
        instruction: said to the model about the environment, before the format of an action.
        **arguments: those of the environment, such as ``split``.

    Raises:
        ConfigError: there is no such environment, or OpenEnv is not installed.
        MissingExtraError: a package that the environment needs is not installed.
    """
    positive(sessions=sessions)
    make(name, **arguments).close()  # names a wrong argument now and not to each client
    try:
        server = import_module("openenv.core.env_server")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Expected the package openenv to serve {name}, got no {error.name!r}; run: pip install"
            " openenv"
        ) from error

    class TextAction(server.Action):
        text: str

    class TextSeen(server.Observation):
        text: str
        task: str = ""
        task_id: str = ""
        success: bool = False
        invalid: bool = False
        feedback: str = ""
        admissible: list[str] | None = None

    class TextEnvironment(server.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()  # pyright: ignore[reportUnknownMemberType]
            self._env, self._state = make(name, **arguments), server.State()

        def reset(
            self,
            seed: int | None = None,
            episode_id: str | None = None,
            world: int | None = None,
            **_: Any,
        ) -> TextSeen:
            options = None if world is None else {"world": world}
            seen, info = self._env.reset(seed=seed, options=options)
            self._state = server.State(episode_id=episode_id or str(uuid4()))
            return self._seen(f"{prompt_set('full').actor_system(instruction)}\n\n{seen}", info)

        def step(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextSeen:
            played = self._env.step(extract_action(action.text))
            seen, reward, terminated, truncated, info = played
            self._state.step_count += 1
            return self._seen(seen, info, reward=float(reward), done=terminated or truncated)

        def _seen(self, text: str, info: Info, **more: Any) -> TextSeen:
            told = {key: info[key] for key in TextSeen.model_fields if key in info}
            return TextSeen(**{**told, "text": text, **more})

        @property
        def state(self) -> Any:
            return self._state

        def close(self) -> None:
            self._env.close()

    return server.create_app(
        TextEnvironment, TextAction, TextSeen, env_name=name, max_concurrent_envs=sessions
    )

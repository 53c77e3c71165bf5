"""Define suites: the environments of the papers as these set them, alone and mixed.

A suite is chosen by name: a built-in one, the entry point of group ``experiential.suites`` of an
installed package, or ``module:attribute``. The latter two stand for a `Suite` or for a callable
without arguments that returns one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from experiential.envs.make import make
from experiential.envs.readiness import readiness
from experiential.envs.text_env import TextEnv
from experiential.errors import ConfigError
from experiential.plugins import did_you_mean, resolve
from experiential.types import Record

COMPLEMENTARY = "Complementary RL"
ERL = "Experiential RL"
DATA_FOLDER = "EXPERIENTIAL_DATA"
"""Variable that names one folder with the real data of all environments."""
DATA_PLACES = {
    "ALFWORLD_DATA": "alfworld",
    "WEBSHOP_DATA": "webshop",
    "HOTPOTQA_DATA": "hotpotqa/*.json",
    "SWE_TASKS": "swe/*.jsonl",
    "ERL_DATA": "erl",
}
"""Variable of an environment to its place below that folder; of a pattern the first file counts."""


@dataclass(frozen=True)
class SuiteTask:
    """Describe one environment of a suite."""

    name: str
    id: str
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of ``gymnasium.make`` beside the split."""
    turns: int = 30
    """Turns after which an episode is truncated."""
    failure: float = 0.0
    """Reward counted for a technical failure: the least that the environment gives."""
    split: str = "eval"
    """Split that is played unless another one is asked for."""
    worlds: int | None = None
    """Worlds of an official set: all are played by default, and another number is refused."""

    def arguments(self, split: str | None = None) -> dict[str, Any]:
        """Return the arguments of ``gymnasium.make``, with another split if one is given."""
        return {**self.kwargs, "split": split or self.split}


class TaskFacts(Record):
    """Say what is played under the name of a task; every result shows it."""

    name: str
    id: str
    data: str
    """``real``, ``made`` (invented in the place of real data), ``generated`` (the environment is a
    generator), ``bundled``, or ``foreign`` (of another package).
    """
    split: str
    worlds: int | None
    """None where the environment lists none."""
    digest: str
    """Of the worlds; empty where the environment has no method ``digest``."""
    protocol: str
    """Turns and arguments."""

    def line(self) -> str:
        """Return the facts as a line of text."""
        split = self.split + (f" of {self.worlds} worlds" if self.worlds else "")
        data = "MADE" if self.data == "made" else self.data
        return f"{self.name}: {data} data, {split}, digest {self.digest or '-'}; {self.protocol}"


@dataclass(frozen=True)
class Suite:
    """Group tasks that are evaluated together; their mean counts each task alike."""

    name: str
    tasks: tuple[SuiteTask, ...]
    source: str
    """Paper and section that set it so."""

    def missing(self) -> dict[str, list[str]]:
        """Return the commands without which a suite is not played, by environment id.

        Among them are those that get data: made data is played only where a task asks for it.
        """
        needed: dict[str, list[str]] = {}
        for task in self.tasks:
            entry, named = readiness(task.id), str(task.kwargs.get("data", ""))
            wanting = entry.fallback == "made" and "data" not in task.kwargs
            data = [entry.data_step] if wanting and not entry.has_data() else []
            if named.startswith("$") and not Path(os.path.expandvars(named)).exists():
                variable, _, place = named[1:].partition("/")
                source = "experiential bench suites names its source"
                inside = f"with {place} in it; " if place else ""
                data = [f"export {variable}=FOLDER ({inside}{source})"]
            needed[task.id] = list(dict.fromkeys([*entry.missing(), *data]))
        return {name: steps for name, steps in needed.items() if steps}

    def with_made_data(self) -> Suite:
        """Return the suite with invented worlds in the place of all real data."""

        def made(task: SuiteTask) -> SuiteTask:
            if readiness(task.id).fallback != "made":
                return task
            kwargs = {**task.kwargs, "data": "made"}
            kwargs.pop("goals", None)  # people asked for nothing in the invented shop
            return replace(task, kwargs=kwargs, split="eval", worlds=None)

        return replace(
            self, name=f"{self.name}-made", tasks=tuple(made(task) for task in self.tasks)
        )

    def with_split(self, split: str) -> Suite:
        """Return the suite with all tasks on another split."""
        tasks = (replace(task, split=split, worlds=None) for task in self.tasks)
        return replace(self, tasks=tuple(tasks), source=f"{self.source}; here SPLIT {split}")

    def ready(self) -> tuple[TaskFacts, ...]:
        """Return what would be played; nothing is played before all of it is there.

        Raises:
            ConfigError: a package or data is missing, cannot be used, or is not the official set.
        """
        if missing := self.missing():
            steps = [f"{name}: run {' && '.join(steps)}" for name, steps in missing.items()]
            made = "; or play invented data with --made"
            raise ConfigError(
                f"Expected all environments of suite {self.name} to be ready, got some that are"
                f" not: {'; '.join(steps)}{'' if self.with_made_data().missing() else made}"
            )
        return tuple(facts_of(task) for task in self.tasks)


_ROOM, _MAZE, _KEYROOM = (
    SuiteTask(f"minihack-{preset}", "experiential/MiniHack-v0", {"preset": preset, "max_steps": 30})
    for preset in ("room", "maze", "keyroom")
)
_SOKOBAN_ERL, _SOKOBAN_COMPLEMENTARY = (
    SuiteTask(f"sokoban-{preset}", "experiential/Sokoban-v0", {"preset": preset}, turns)
    for preset, turns in (("erl", 8), ("complementary", 30))
)
_HOTPOTQA = SuiteTask("hotpotqa", "experiential/HotpotQA-v0", {"preset": "erl", "choices": True}, 5)
_DIALECTS = {"preset": "dialects"}
_FROZENLAKE = SuiteTask("frozenlake", "experiential/FrozenLake-v0", {"preset": "erl"}, 8)


_ALFWORLD, _ALFWORLD_MIXED = (  # the reward of Complementary RL: 1 for success, else -1
    SuiteTask(
        "alfworld",
        "experiential/ALFWorld-v0",
        {"turns": turns, "failure": -1.0},
        turns,
        -1.0,
        split="valid_unseen",
        worlds=134,
    )
    for turns in (40, 30)
)
_WEBSHOP, _WEBSHOP_MIXED = (  # the paper's reward: 1 for success, else 0
    SuiteTask(
        "webshop",
        "experiential/WebShop-v0",
        {"preset": "complementary", "turns": turns},
        turns,
        split="test",
        worlds=500,
    )
    for turns in (15, 30)
)
_OFFICIAL = (
    *(
        Suite(
            f"alfworld-{name}",
            (
                SuiteTask(
                    f"alfworld-{name}",
                    "experiential/ALFWorld-v0",
                    turns=50,
                    split=f"valid_{name.removeprefix('valid-')}",
                    worlds=count,
                ),
            ),
            f"ALFWorld, its {count} games of valid_{name.removeprefix('valid-')}; 50 turns, reward"
            " 1 and 0",
        )
        for name, count in (("unseen", 134), ("seen", 140), ("valid-train", 200))
    ),
    *(
        Suite(
            f"{name.lower()}-published",
            (
                SuiteTask(
                    f"{name.lower()}-published",
                    f"experiential/{name}-v0",
                    {"preset": "erl", "data": f"$ERL_DATA/{name.lower()}"},
                    turns=8,
                    worlds=100,
                ),
            ),
            f"{ERL}, the 100 test layouts of its published data set, {name.lower()}/test.parquet in"
            " rllm_data/datasets of github.com/microsoft/experiential_rl",
        )
        for name in ("FrozenLake", "Sokoban")
    ),
    Suite(
        "webshop-test",
        (SuiteTask("webshop-test", "experiential/WebShop-v0", turns=15, split="test", worlds=500),),
        "WebShop, its goals 0 to 499; its reward, 15 turns as in ReAct",
    ),
    Suite(
        "webshop-human",
        (
            SuiteTask(
                "webshop-human",
                "experiential/WebShop-v0",
                {"goals": "human"},
                turns=15,
                split="test",
                worlds=500,
            ),
        ),
        "WebShop, goals 0 to 499 of the 12,087 that people wrote, over its whole catalogue; its"
        " reward, 15 turns as in ReAct",
    ),
    Suite(
        "hotpotqa-validation",
        (
            SuiteTask(
                "hotpotqa-validation",
                "experiential/HotpotQA-v0",
                {"choices": True},
                turns=6,
                split="all",
                worlds=7405,
            ),
        ),
        "HotpotQA, the 7,405 questions of hotpot_dev_distractor_v1.json; exact match, 6 turns",
    ),
)
_CROSSEP_EMB = Suite(
    "crossep-emb",
    tuple(
        SuiteTask(
            kind,
            "experiential/ALFWorld-v0",
            {"task_types": [kind], "turns": 20},
            turns=20,
            split="valid_train",
            worlds=count,
        )
        for kind, count in (
            ("pick_and_place_simple", 46),
            ("pick_two_obj_and_place", 45),
            ("pick_clean_then_place_in_recep", 37),
            ("pick_cool_then_place_in_recep", 28),
            ("pick_heat_then_place_in_recep", 25),
            ("look_at_obj_in_light", 19),
        )
    ),
    "EvoMemBench (arXiv 2605.18421), CrossEp-Emb: 200 games in six types, 20 turns; its protocol is"
    " bench stream --transfer",
)
_BFCL = tuple(
    Suite(
        name,
        tuple(
            SuiteTask(
                api,
                "experiential/BFCL-v0",
                {"category": category, "api": api}
                | ({"data": "$BFCL_DATA"} if category == "ours" else {}),
                turns=200,  # BFCL's own limit is 20 replies with calls in each of the user's turns
                split="all",
                worlds=50,
            )
            for api in ("gorilla_fs", "vehicle_control", "trading_bot", "travel_api")
        ),
        source,
    )
    for name, category, source in (
        *(
            (
                f"bfcl-{category.replace('_', '-')}",
                category,
                f"BFCL, multi_turn_{category}: {words}",
            )
            for category, words in (
                ("base", "200 dialogues over four APIs"),
                ("miss_func", "200 dialogues, functions are held back until a later turn"),
                ("miss_param", "200 dialogues, requests lack something until the next turn"),
                ("long_context", "200 dialogues, the APIs return much"),
            )
        ),
        (
            "crossep-tool",
            "ours",
            "EvoMemBench (arXiv 2605.18421), CrossEp-Tool: 200 dialogues of its own over four APIs,"
            " BFCL_DATA=bfcl_eval of its repository; its protocol is bench stream --transfer",
        ),
    )
)
_SUITES = (
    Suite("room", (_ROOM,), f"{COMPLEMENTARY}, C.1 (Room-Ultimate-5x5) and C.2 (30 turns)"),
    Suite(
        "alfworld",
        (_ALFWORLD,),
        f"{COMPLEMENTARY}, C.1 (134 held-out games, reward 1 and -1) and C.2 (40 turns)",
    ),
    Suite(
        "webshop",
        (_WEBSHOP,),
        f"{COMPLEMENTARY}, C.1 (1,000 products, reward 1 and 0); test goals and turns are WebShop's"
        " and ReAct's",
    ),
    Suite("hotpotqa", (_HOTPOTQA,), f"{ERL}, B.3 (reward, 5 turns); a quarter of the file"),
    Suite(
        "sokoban",
        (_SOKOBAN_ERL, _SOKOBAN_COMPLEMENTARY),
        f"{ERL}, B.2, and {COMPLEMENTARY}, C.1 (6 by 6, two boxes)",
    ),
    Suite("frozenlake", (_FROZENLAKE,), f"{ERL}, B.1"),
    Suite(
        "three-task",
        (_ROOM, _WEBSHOP_MIXED, _ALFWORLD_MIXED),
        f"{COMPLEMENTARY}, C.3 (3-Tasks) and C.2 (30 turns)",
    ),
    Suite(
        "six-task",
        (_ROOM, _MAZE, _KEYROOM, _SOKOBAN_COMPLEMENTARY, _WEBSHOP_MIXED, _ALFWORLD_MIXED),
        f"{COMPLEMENTARY}, C.3 (6-Tasks) and C.2 (30 turns)",
    ),
    *_OFFICIAL,
    _CROSSEP_EMB,
    *_BFCL,
    Suite(
        "vault",
        (SuiteTask("vault", "experiential/Vault-v0", {"worlds": 12}, turns=2),),
        "docs/envs/vault.md: 12 worlds in which only memory helps, for bench stream --visits",
    ),
    Suite(
        "lasting",
        (
            SuiteTask("vault-no-note", "experiential/Vault-v0", {"note": False}, turns=2),
            SuiteTask("vault-law", "experiential/Vault-v0", {"law": "first"}, turns=2),
            *(
                SuiteTask(f"{name.lower()}-dialects", f"experiential/{name}-v0", _DIALECTS, 8)
                for name in ("FrozenLake", "Sokoban")
            ),
        ),
        "docs/envs: worlds in which knowledge must be accumulated, inferred or carried over; for"
        " bench stream --visits",
    ),
)
SUITES = {suite.name: suite for suite in _SUITES}
"""The built-in suites by name."""


def find_suite(name: str, tasks: Sequence[str] | None = None) -> Suite:
    """Return the suite of a name, with only some of its tasks where these are named."""
    found = cast("Any", resolve("suites", name, SUITES))
    suite = found() if callable(found) else found
    if not isinstance(suite, Suite):
        raise ConfigError(
            f"Expected {name} to be a Suite or a callable that returns one, got"
            f" {type(suite).__name__}"
        )
    if tasks is None:
        return suite
    known = {task.name: task for task in suite.tasks}
    for task in tasks:
        if task not in known:
            raise ConfigError(
                f"Expected tasks of suite {name} among {', '.join(known)}, got"
                f" {task!r}{did_you_mean(task, known)}"
            )
    return replace(suite, tasks=tuple(task for name, task in known.items() if name in tasks))


def facts_of(task: SuiteTask) -> TaskFacts:
    """Return what is played of a task; its environment is made for it, and closed.

    Raises:
        ConfigError: it cannot be made, or its worlds are not those of the official set.
    """
    try:
        env = make(task.id, **task.arguments())
    except ConfigError:
        raise
    except Exception as error:  # an environment of another package may raise anything
        raise ConfigError(
            f"Expected to make {task.id} with {task.arguments()}, got {type(error).__name__}:"
            f" {error}"
        ) from error
    try:
        core: Any = env.unwrapped
        listed = getattr(core, "worlds", None)
        worlds = None if listed is None else len(listed)
        if task.worlds not in (None, worlds):
            raise ConfigError(
                f"Expected the {task.worlds} worlds of split {task.split} for task {task.name}, got"
                f" {worlds}; name the official data, or play another split with --split"
            )
        entry, digest = readiness(task.id), core.digest() if isinstance(core, TextEnv) else ""
    finally:
        env.close()
    data = entry.fallback
    if task.kwargs.get("data", "made") != "made" or (
        "data" not in task.kwargs and entry.has_data()
    ):
        data = "real"
    more = [f"{key}={value}" for key, value in task.kwargs.items() if key not in ("data", "turns")]
    return TaskFacts(
        name=task.name,
        id=task.id,
        data=data,
        split=task.split,
        worlds=worlds,
        digest=digest,
        protocol=", ".join([f"{task.turns} turns", *more]),
    )


def find_data() -> None:
    """Set each environment's variable for real data from the folder that `DATA_FOLDER` names.

    A variable that is set already stays. Nothing happens without that folder.
    """
    folder = os.environ.get(DATA_FOLDER)
    for variable, place in DATA_PLACES.items() if folder else ():
        found = sorted(Path(folder or "").expanduser().glob(place))
        if found and not os.environ.get(variable):
            os.environ[variable] = str(found[0].resolve())

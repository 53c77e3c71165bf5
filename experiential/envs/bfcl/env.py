"""Serve a user over several turns by calls of simulated APIs (BFCL multi-turn)."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from typing import Any, Literal, cast

from experiential.bank.text import escape
from experiential.envs.arguments import one_of, positive
from experiential.envs.bfcl.calls import LONGEST, Call, read_calls
from experiential.envs.bfcl.limits import Budget, check_digits
from experiential.envs.bfcl.source import Dialogue, source
from experiential.envs.split import split_of
from experiential.envs.text_env import Info, Step, TextEnv
from experiential.errors import ConfigError

Split = Literal["train", "eval", "all"]

APIS = {
    "gorilla_fs": "GorillaFileSystem", "vehicle_control": "VehicleControlAPI",
    "trading_bot": "TradingBot", "travel_api": "TravelAPI",
}  # fmt: skip
"""EvoMemBench's names of the four APIs; a dialogue involves exactly one of them."""
CATEGORIES = ("base", "long_context", "miss_func", "miss_param", "ours")
"""BFCL's categories, and EvoMemBench's own dialogues, which it calls ours."""
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_LEGAL = (
    "Reply with calls, [name(key=value), ...], as often as needed. A reply without a call ends your"
    " turn, and the user speaks again."
)


class BFCLEnv(TextEnv):
    """Serve a user, turn by turn, by calls of simulated APIs: files, a car, trading, travel.

    An action is one or more calls as text, in Python's form or in JSON (`read_calls`). Real tool
    calls of a hosted model arrive in the latter, since ``info["tools"]`` of the reset offers the
    functions. The observation is what the calls return. An action without a call ends the agent's
    turn; then the user makes the next request. After the last request BFCL's own checks decide: in
    each turn the state of every API must equal the one that the reference calls lead to, and the
    agent's calls so far must have returned all that the reference calls return. Reward is 1.0 if
    every turn passes, else 0.0. More than ``steps`` replies with calls in one turn truncate.

    A call that fails uses a step, and the API's complaint is the observation.

    Caveat: the APIs run in this process. Only their public functions are called, with literals as
    arguments, and the calls of a reply may run a bounded number of lines of Python together.

    `docs/envs/bfcl.md` lists the arguments.

    Raises:
        ConfigError: an argument is outside its range, or BFCL's files are missing or wrong.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        category: str = "base",
        api: str | None = None,
        data: str | None = None,
        steps: int = 20,
        functions: bool = True,
        render_mode: str | None = None,
    ) -> None:
        one_of("split", split, ("train", "eval", "all"))
        one_of("category", category, CATEGORIES)
        one_of("api", api, (None, *APIS))
        positive(steps=steps)
        self._data = data = data and os.path.expandvars(data)
        self.dialogues: tuple[Dialogue, ...] = tuple(
            one
            for one in source(data).dialogues(category)
            if split in ("all", split_of(f"bfcl {one.number}"))
            and (api is None or APIS[api] in one.apis)
        )
        if not self.dialogues:
            raise ConfigError(
                f"Expected dialogues of category {category}, split {split} and API {api}, got none"
            )
        super().__init__(len(self.dialogues), longest_action=LONGEST, render_mode=render_mode)
        self.split, self.steps, self.functions = split, steps, functions
        self._long = category == "long_context"

    @property
    def task(self) -> str:
        """Return the first request of the user."""
        return self._dialogue.requests[0]

    def _begin(self, world: int) -> tuple[str, Info]:
        self._dialogue = self.dialogues[world]
        self._turns: list[list[list[Call]]] = [[]]
        """The calls of each turn, by reply."""
        self._start()
        known = source(self._data)
        self._described = [row for api in self._dialogue.apis for row in known.descriptions(api)]
        held = [name for names in self._dialogue.held.values() for name in names]
        listed, tools = self._offered(row for row in self._described if row["name"] not in held)
        request = f"{listed}{_LEGAL}\n\nUser: {escape(self.task)}"
        return request, self._info("") | {"tools": tools}

    def _offered(self, rows: Iterable[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """Return descriptions of functions as text, empty without ``functions``, and as tools."""
        rows = list(rows)
        lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        listed = f"Functions:\n{lines}\n\n" if self.functions else ""
        return listed, [_tool(row) for row in rows]

    def _contents(self) -> Iterable[str]:
        """Yield the dialogues with the calls that answer them."""
        yield from (one.model_dump_json(exclude_defaults=True) for one in self.dialogues)

    def _turn(self, action: str) -> Step:
        calls = read_calls(action)
        if calls:
            self._turns[-1].append(calls)
            results, faults = self._agent.run(calls)
            self._results[-1].append(results)
            shown = "\n".join(escape(result) for result in results)
            late = len(self._turns[-1]) > self.steps
            feedback = "\n".join(faults) + (f"\nNo steps are left: {self.steps}." if late else "")
            info = self._info(escape(feedback.strip()), invalid=bool(faults))
            return shown, 0.0, False, late, info
        self._judge()
        if len(self._turns) < len(self._dialogue.requests):
            self._open_turn()
            turn, listed, more = len(self._turns) - 1, "", dict[str, Any]()
            if names := self._dialogue.held.get(turn):
                listed, _ = self._offered(row for row in self._described if row["name"] in names)
                more["tools"] = [_tool(row) for row in self._described]
            request = f"{listed}User: {escape(self._dialogue.requests[turn])}"
            return request, 0.0, False, False, self._info("") | more
        success = not self._failure
        feedback = self._failure or "Every turn passes the checks."
        return feedback, float(success), True, False, self._info(feedback, success=success)

    def oracle_action(self) -> str:
        """Return the reference calls of this turn, then an answer that ends it."""
        turn = len(self._turns) - 1
        wanted = self._dialogue.answers[turn]
        return "Done." if self._turns[-1] or not wanted else f"[{', '.join(wanted)}]"

    def __getstate__(self) -> dict[str, Any]:
        # The APIs are objects of a package that may not be importable where this is loaded.
        return {**vars(self), "_agent": None, "_reference": None, "_results": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._over:
            return
        turns = self._turns
        self._start()
        for number, replies in enumerate(turns):
            if number:
                self._judge()
                self._results.append([])
            self._turns = turns[: number + 1]
            self._results[-1] = [self._agent.run(calls)[0] for calls in replies]

    def _start(self) -> None:
        self._agent = _Apis(self._data, self._dialogue, self._long)
        self._reference = _Apis(self._data, self._dialogue, self._long)
        self._results: list[list[list[str]]] = [[]]
        self._failure = ""

    def _open_turn(self) -> None:
        self._turns.append([])
        self._results.append([])

    def _judge(self) -> None:
        """Compare the turn that ends with the reference; keep the first failure."""
        turn = len(self._turns) - 1
        wanted = [call for text in self._dialogue.answers[turn] for call in read_calls(text)]
        returned, _ = self._reference.run(wanted)
        if not wanted or self._failure:
            return
        check = source(self._data).checker
        if not self._turns[-1]:
            self._failure = f"Turn {turn + 1} fails: it needs calls, and none was made."
            return
        states = self._agent.instances, self._reference.instances
        try:
            same = Budget().run(check.state_checker, *states)["valid"]
        except (TimeoutError, RecursionError):  # such as of a folder that was moved into itself
            same = False
        so_far = [one for replies in self._results for results in replies for one in results]
        if not same:
            self._failure = f"Turn {turn + 1} fails: the state is not what was asked for."
        elif not check.response_checker(so_far, returned, turn)["valid"]:
            self._failure = f"Turn {turn + 1} fails: what was asked for was not looked up."

    def _info(self, feedback: str, *, success: bool = False, invalid: bool = False) -> Info:
        return self._report(f"bfcl-{self._dialogue.id}", feedback, success=success, invalid=invalid)


class _Apis:
    """Hold the APIs of a dialogue in their initial state, and call their functions."""

    def __init__(self, data: str | None, dialogue: Dialogue, long: bool) -> None:
        known = source(data)
        self.instances: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        for name in dialogue.apis:
            instance = self.instances[name] = known.api(name)
            if not known.stateless(name):
                scenario = deepcopy(dialogue.scenario.get(name, {}))
                instance._load_scenario(scenario, long_context=long)
            methods = inspect.getmembers(instance, predicate=inspect.ismethod)
            self._functions |= {key: one for key, one in methods if not key.startswith("_")}

    def run(self, calls: list[Call]) -> tuple[list[str], list[str]]:
        """Return the result of each call as BFCL writes it, and the messages of those that failed.

        A function that returns an error has been called; one that is unknown, or is given wrong
        arguments, has failed.
        """
        results: list[str] = []
        faults: list[str] = []
        budget = Budget()
        for call in calls:
            try:
                if call.name not in self._functions:
                    raise NameError(f"name {call.name!r} is not defined")
                if call.fault:
                    raise TypeError(f"{call.name}: {call.fault}")
                function = self._functions[call.name]
                check_digits(function, *call.positional, **call.named)
                result = _written(budget.run(function, *call.positional, **call.named))
            except Exception as error:  # whatever a simulated function raises is its answer
                result = f"Error during execution: {error}"
                faults.append(result)
            results.append(result)
        return results, faults


def _written(result: Any) -> str:
    """Return a result as BFCL's checker compares it."""
    if isinstance(result, dict):
        with suppress(TypeError, ValueError):
            return json.dumps(result)
    return str(cast("Any", result))


def _tool(row: dict[str, Any]) -> dict[str, Any]:
    """Return a function's description as an OpenAI tool."""
    return {"type": "function", "function": {**row, "parameters": _schema(row["parameters"])}}


def _schema(value: Any) -> Any:
    """Return BFCL's schema in JSON Schema's names of types."""
    if isinstance(value, list):
        return [_schema(one) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    renamed = {key: _schema(one) for key, one in cast("dict[str, Any]", value).items()}
    kind = renamed.get("type")
    return renamed | ({"type": _JSON_TYPES.get(kind, kind)} if isinstance(kind, str) else {})

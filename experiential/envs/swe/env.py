"""Mend a bug in a real project with a shell, an editor and hidden tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import gymnasium as gym

from experiential.bank.text import escape
from experiential.cache import cache_folder
from experiential.envs.arguments import one_of, positive
from experiential.envs.split import split_of
from experiential.envs.swe.call import LONGEST, TOOLS, Call, read_call
from experiential.envs.swe.editor import BadCallError, Editor, RefusedError
from experiential.envs.swe.predictions import Prediction
from experiential.envs.swe.repository import GitError
from experiential.envs.swe.sandbox import Isolation, Limits, isolated, shortened
from experiential.envs.swe.task import BUNDLED, Task, load_tasks
from experiential.envs.swe.workspace import Workshop, Workspace
from experiential.envs.text_env import Info, Step, TextEnv
from experiential.errors import ConfigError

Split = Literal["train", "eval", "all"]

_FORM = "<function=NAME><parameter=KEY>VALUE</parameter></function>"
_RULES = """\
You are at the root of the repository. Find the cause, change the source, and submit; hidden tests \
then decide. Each reply calls one tool:
<function=execute_bash><parameter=command>COMMAND</parameter></function>
  A new bash each time, at the root of the repository.{network}
<function=str_replace_editor><parameter=command>view</parameter><parameter=path>PATH</parameter>\
</function>
  Commands: view (view_range such as [1, 40]), create (file_text), str_replace (old_str, new_str), \
insert (insert_line, new_str), undo.
<function=submit></function>
  Ends the episode."""
_LEGAL = f"Reply with one call, {_FORM}, where NAME is one of {', '.join(TOOLS)}."


class SWEEnv(TextEnv):
    """Mend a bug in a real project with a shell, an editor and hidden tests.

    Each step is one tool call as text (see `experiential.envs.swe.call.read_call`); the last call
    in an action counts. An action without a legal one uses up a turn, and the reply names the legal
    calls. The files are a throw-away copy in the cache folder, with a virtual environment for each
    task, made at the first reset of the task; the environment's page describes how far commands are
    isolated from the machine. The right change and the hidden tests are never shown.

    Caveat: making a task ready needs pip and the package index once. POSIX only, and bash and git
    must be installed.

    `docs/envs/swe.md` lists the arguments.

    Raises:
        ConfigError: an argument is outside its range, or the file of tasks cannot be used.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        tasks: str | None = None,
        sources: str | None = None,
        cache: str | None = None,
        turns: int = 40,
        seconds: float = 60.0,
        test_seconds: float = 600.0,
        memory: int = 4096,
        output: int = 8000,
        isolation: Isolation = "auto",
        render_mode: str | None = None,
    ) -> None:
        one_of("split", split, ("train", "eval", "all"))
        one_of("isolation", isolation, ("auto", "required", "off"))
        positive(
            turns=turns, seconds=seconds, test_seconds=test_seconds, memory=memory, output=output
        )
        if missing := [name for name in ("bash", "git") if shutil.which(name) is None]:
            raise ConfigError(
                f"Expected the programs bash and git, got no {' and no '.join(missing)}; install"
                " them with the system's packages"
            )
        file = Path(tasks or os.environ.get("SWE_TASKS") or BUNDLED).expanduser().resolve()
        known = load_tasks(file)
        chosen = [t for t in known if split in ("all", t.split or split_of(t.instance_id))]
        self.tasks = tuple(chosen)
        if not self.tasks:
            raise ConfigError(
                f"Expected a file with tasks of split {split}, got none in {file}; use split='all'"
                " for a small file"
            )
        folder = Path(sources).expanduser().resolve() if sources else None
        kept = Path(cache) if cache else cache_folder("swe")
        self._shop = Workshop(kept.expanduser().resolve(), file, folder, isolated(isolation))
        super().__init__(len(self.tasks), longest_action=LONGEST, render_mode=render_mode)
        self.split, self.turns = split, turns
        self._limits, self._test_limits = Limits(seconds, memory), Limits(test_seconds, memory)
        self._output = output
        self._space: Workspace | None = None
        self._patch = ""

    @property
    def task(self) -> str:
        """Return the problem as its reporter stated it."""
        return self._task.problem_statement

    def _begin(self, world: int) -> tuple[str, Info]:
        self.close()
        self._task: Task = self.tasks[world]
        self._space = self._shop.open(self._task)
        self._editor = Editor(self._space.repo, self._space.place.root / "repo")
        self._left, self._patch = self.turns, ""
        rules = _RULES.format(network=" There is no network." if self._shop.isolated else "")
        asked = f"Repository: {self._task.repo}\n{escape(self.task.strip())}"
        return f"{asked}\n\n{rules}\nTurns left: {self._left}.", self._info("")

    def _turn(self, action: str) -> Step:
        """Call a tool."""
        space, call = self._open(), read_call(action)
        self._left -= 1
        if call is not None and call.tool == "submit":
            try:
                passed = space.passed(self._test_limits)
                success = all(
                    # SWE-bench cuts names at their first blank
                    name in passed or any(one.startswith(f"{name} ") for one in passed)
                    for name in (*self._task.FAIL_TO_PASS, *self._task.PASS_TO_PASS)
                )
                feedback = "The hidden tests pass." if success else "The hidden tests do not pass."
            except GitError:
                success = False
                feedback = "What was submitted cannot be read as a change of the repository."
            self._patch = space.patch()
            self.close()
            return feedback, float(success), True, False, self._info(feedback, success=success)
        feedback, invalid = "", False
        try:
            shown = escape(shortened(self._called(call, space), self._output))
        except BadCallError as error:
            invalid, shown = True, f"{error} {_LEGAL}"
            feedback = shown
        except RefusedError as error:
            shown = feedback = escape(str(error))
        over = self._left == 0
        if over:
            self._patch = space.patch()
            self.close()
        tail = "No turns are left." if over else f"Turns left: {self._left}."
        return f"{shown}\n{tail}", 0.0, False, over, self._info(feedback, invalid=invalid)

    def _contents(self) -> Iterable[str]:
        for task in self.tasks:
            yield from (task.instance_id, task.base_commit, task.patch, task.test_patch)

    def close(self) -> None:
        """Remove the work folder."""
        if self._space is not None:
            self._space.close()
        self._space, self._over = None, True

    def oracle_action(self) -> str:
        """Apply the right change with git, then submit.

        Raises:
            gymnasium.error.ResetNeeded: the episode is over or was never begun.
        """
        if self._left == 1 or self._open().solved():
            return "<function=submit></function>"
        patch = self._task.patch.rstrip("\n")
        command = f"git apply - <<'END_OF_PATCH'\n{patch}\nEND_OF_PATCH"
        return f"<function=execute_bash>\n<parameter=command>\n{command}\n</parameter>\n</function>"

    def prediction(self, model: str) -> Prediction:
        """Return the change of this episode in the form that SWE-bench's harness reads."""
        patch = self._patch if self._space is None else self._space.patch()
        name = self._task.instance_id
        return {"instance_id": name, "model_name_or_path": model, "model_patch": patch}

    def _open(self) -> Workspace:
        if self._space is None:
            raise gym.error.ResetNeeded(
                "Expected reset() before this: the episode is over or was never begun"
            )
        return self._space

    def _called(self, call: Call | None, space: Workspace) -> str:
        """Run a call; return the text to show."""
        if call is None:
            raise BadCallError("That is no call of a tool.")
        if call.tool == "str_replace_editor":
            return self._editor.run(call)
        if call.tool != "execute_bash":
            raise BadCallError(f"There is no tool {call.tool[:40]!r}.")
        command = call.text("command") or call.text("cmd")
        if command is None or not command.strip():
            raise BadCallError("Expected the parameter command with execute_bash.")
        result = space.place.run(command, self._limits)
        ending = f"[exit status {result.status}]"
        if result.timed_out:
            ending = f"[stopped after {self._limits.seconds:g} seconds]"
        return f"{shortened(result.text.rstrip(), self._output - 100)}\n{ending}".lstrip("\n")

    def _info(self, feedback: str, *, success: bool = False, invalid: bool = False) -> Info:
        known = self._report(self._task.instance_id, feedback, success=success, invalid=invalid)
        return known | {"model_patch": self._patch} if self._space is None else known

"""Run git on an untrusted work tree without reading its ``.git`` or the user's configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from experiential.errors import ExperientialError

_SECONDS = 120
_IGNORED = (
    "__pycache__/ *.pyc .pytest_cache/ .hypothesis/ .mypy_cache/ .ruff_cache/ *.egg-info/ .coverage"
).split()
_PLAIN = {
    "core.hooksPath": os.devnull,
    "core.attributesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.quotePath": "false",
    "core.autocrlf": "false",
    "diff.noprefix": "false",
    "diff.mnemonicPrefix": "false",
    "gc.auto": "0",
    "user.name": "experiential",
    "user.email": "experiential@example.org",
    "commit.gpgsign": "false",
}


class GitError(ExperientialError):
    """Report that git failed: the work tree or the patch is not in order."""


def git(
    *words: str, cwd: Path, text: str = "", store: Path | None = None, own: Path | None = None
) -> str:
    """Run git and return its output; GitError where it fails or takes too long.

    Args:
        words: of the command.
        cwd: where it runs.
        text: its standard input.
        store: the repository's data, where ``cwd`` is the work tree; by default the ``.git`` in it.
        own: folder for an index and new objects; by default they are the store's.
    """
    settings = [word for name, value in _PLAIN.items() for word in ("-c", f"{name}={value}")]
    placed = [f"--git-dir={store}", f"--work-tree={cwd}"] if store else []
    date = "2000-01-01T00:00:00Z"
    env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "HOME": str(cwd)}
    env |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
    env |= {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    if store and own:  # git writes beside the store, not into it
        (own / "objects").mkdir(exist_ok=True)
        env |= {
            "GIT_INDEX_FILE": str(own / "index"),
            "GIT_OBJECT_DIRECTORY": str(own / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(store / "objects"),
        }
    verb = next(word for word in words if not word.startswith("-"))
    try:
        done = subprocess.run(
            ["git", *settings, *placed, *words],
            cwd=cwd,
            env=env,
            input=text.encode("utf-8", "surrogateescape"),
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"Expected git {verb} to run, got: {error}") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise GitError(f"Expected git {verb} to succeed, got: {said[-600:]}")
    return done.stdout.decode("utf-8", "surrogateescape")


def commit_all(folder: Path) -> None:
    """Make ``folder`` a repository of one commit that holds all of it."""
    git("init", "--quiet", "--initial-branch=main", cwd=folder)
    (folder / ".git" / "info").mkdir(exist_ok=True)
    git("add", "--all", "--force", cwd=folder)
    git("commit", "--quiet", "--allow-empty", "--message=base", cwd=folder)
    (folder / ".git" / "info" / "exclude").write_text("".join(f"{name}\n" for name in _IGNORED))


def apply(folder: Path, patch: str, *, undo: bool = False) -> None:
    """Apply a diff to the files of ``folder``, or undo it; GitError where it does not fit."""
    if patch.strip():
        words = ["apply", "--whitespace=nowarn", *(["--reverse"] if undo else []), "-"]
        text = patch if patch.endswith("\n") else f"{patch}\n"
        # A store that does not exist keeps git from looking for a repository here or above.
        git(*words, cwd=folder, text=text, store=folder.parent / ".nowhere")

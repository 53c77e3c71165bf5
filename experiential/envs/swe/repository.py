"""Run git on an untrusted work tree without reading its ``.git`` or the user's configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiential.envs.swe.sandbox import assure_folder
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
    """Run git and return its output.

    Args:
        words: of the command.
        cwd: where it runs.
        text: its standard input.
        store: the repository's data, where ``cwd`` is the work tree; by default the ``.git`` in it.
        own: folder for an index and new objects; by default they are the store's.

    Raises:
        GitError: it failed, or took too long.
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
    """Apply a diff to the files of ``folder``, or undo it.

    Raises:
        GitError: it does not fit.
    """
    if patch.strip():
        words = ["apply", "--whitespace=nowarn", *(["--reverse"] if undo else []), "-"]
        text = patch if patch.endswith("\n") else f"{patch}\n"
        # A store that does not exist keeps git from looking for a repository here or above.
        git(*words, cwd=folder, text=text, store=folder.parent / ".nowhere")


class WorkTree:
    """Read files that began as the one commit of a repository stored elsewhere, or raise GitError.

    Repositories that were made inside ``folder`` since then are undone before it is read; their
    files stay.

    Args:
        folder: the files.
        store: the repository's data; it is not written to.
        own: folder for an index and new objects.
    """

    def __init__(self, folder: Path, store: Path, own: Path) -> None:
        self.folder, self._own = folder, own
        self._git = partial(git, "--literal-pathspecs", cwd=folder, store=store, own=own)

    def changes(self) -> tuple[str, tuple[str, ...]]:
        """Return the difference to the commit as a git diff, and the files that differ."""
        self._look()
        plain = "--cached --no-renames --no-ext-diff --no-textconv --no-color".split()
        words = ("diff", *plain, "HEAD")
        names = self._git(*words, "--name-only", "-z")
        return self._git(*words, "--binary"), tuple(name for name in names.split("\0") if name)

    def write(self, target: Path, without: Sequence[str]) -> None:
        """Write the files into the new folder ``target``, those in ``without`` as committed."""
        self._look()
        if without:
            from_input = ("--pathspec-from-file=-", "--pathspec-file-nul")
            self._git("reset", "--quiet", *from_input, "HEAD", text="\0".join(without))
        self._git("checkout-index", "--all", f"--prefix={target}/")

    def _look(self) -> None:
        """Read all files into a new index."""
        assure_folder(self.folder)
        self._own.mkdir(exist_ok=True)
        # of repositories made inside, git is to read the files and no settings
        for inside, folders, files in os.walk(self.folder):
            found = Path(inside) / ".git"
            if ".git" in folders:
                folders.remove(".git")
            if Path(inside) == self.folder:
                continue
            if found.is_symlink() or ".git" in files:
                found.unlink()
            elif found.is_dir():
                shutil.rmtree(found, ignore_errors=True)
        (self._own / "index").unlink(missing_ok=True)
        self._git("read-tree", "HEAD")
        self._git("add", "--all")

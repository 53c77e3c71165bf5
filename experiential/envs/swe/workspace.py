"""Prepare tasks once, and make a throw-away work folder for each episode."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import weakref
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiential.envs.swe.repository import GitError, apply, commit_all, git
from experiential.envs.swe.sandbox import Limits, Place, Result, assure_folder
from experiential.envs.swe.task import Task, touched
from experiential.errors import ConfigError

_ALWAYS_KEPT = ("conftest.py", "pytest.ini", "sitecustomize.py", "usercustomize.py")
_ENDINGS = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar", ".zip")
_PIP_SECONDS = 600
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workshop:
    """Prepare tasks in a folder."""

    cache: Path  # archives, base trees, virtual environments, work folders of running episodes
    tasks_file: Path  # the file that the tasks stand in; hidden from commands
    sources: Path | None  # folder of archives, hidden too
    isolated: bool  # commands run behind namespaces

    def prepare(self, task: Task) -> Path:
        """Make the missing base tree and virtual environment of ``task``; return the base's folder.

        That takes up to minutes, so each part is logged as a warning, which is shown by default.
        ConfigError where a source or package cannot be had, or the patches do not fit the source.
        """
        base, venv = self.cache / "bases" / task.key, self.cache / "venvs" / task.key
        if not (base.is_dir() and (venv / ".ready").is_file()):
            self.cache.mkdir(parents=True, exist_ok=True)
            begun = time.monotonic()
            _LOG.warning("%s: making the task ready, once, in %s", task.instance_id, self.cache)
            with (self.cache / "lock").open("w") as file:  # one process makes what is missing
                fcntl.flock(file, fcntl.LOCK_EX)
                if not base.is_dir():
                    _LOG.warning("%s: getting its source", task.instance_id)
                    self._make_base(task, base)
                if not (venv / ".ready").is_file():
                    _LOG.warning(
                        "%s: making its virtual environment and installing %d packages",
                        task.instance_id,
                        len(task.requirements),
                    )
                    shutil.rmtree(venv, ignore_errors=True)
                    command = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
                    made = subprocess.run(command, capture_output=True, text=True, check=False)
                    if made.returncode:
                        said = made.stderr.strip()[-600:]
                        raise ConfigError(f"Expected `python -m venv` to succeed: {said}")
                    if task.requirements:
                        python = str(venv / "bin" / "python")
                        pip("--python", python, "install", "--quiet", *task.requirements)
                    (venv / ".ready").touch()
            _LOG.warning("%s: ready after %.0f s", task.instance_id, time.monotonic() - begun)
        return base

    def open(self, task: Task) -> Workspace:
        """Return a fresh work folder for an episode of ``task``."""
        base = self.prepare(task)
        (self.cache / "work").mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self.cache / "work"))
        (folder / "box" / "tmp").mkdir(parents=True)
        shutil.copytree(base / "repo", folder / "box" / "repo", symlinks=True)
        return Workspace(self, task, base, folder)

    def place(self, task: Task, folder: Path) -> Place:
        """Return the place where commands of ``task`` run, its virtual environment first."""
        box, venv = self.cache / "testbed", self.cache / "venvs" / task.key
        box.mkdir(exist_ok=True)
        roots = [f"{{root}}/repo/{one}".removesuffix("/.") for one in task.pythonpath]
        variables = {
            "PATH": f"{venv / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "VIRTUAL_ENV": str(venv),
            "PYTHONPATH": ":".join(roots),
        }
        # what may hold answers: sources, patches, other tasks, installed packages
        private = [self.cache / name for name in ("archives", "bases", "work")]
        private += [other for other in (self.cache / "venvs").iterdir() if other != venv]
        private += [self.tasks_file, *archives_in(self.tasks_file.parent)]
        base = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
        above = [Path(sysconfig.get_path("purelib")), Path(base)]
        if self.sources:
            private += archives_in(self.sources)
            above.append(self.sources)
        private += [path for path in above if not self.cache.is_relative_to(path)]
        private.append(Path.home() / ".cache" / "pip")
        return Place(folder, box, tuple(private), variables, self.isolated)

    def _make_base(self, task: Task, base: Path) -> None:
        base.parent.mkdir(parents=True, exist_ok=True)
        archive = archive_of(task, self.sources, self.tasks_file, self.cache / "archives")
        patches = (task.patch, task.test_patch)
        with tempfile.TemporaryDirectory(dir=base.parent) as fresh:
            unpacked, repo = Path(fresh, "unpacked"), Path(fresh, "made", "repo")
            unpacked.mkdir()
            try:
                if archive.name.endswith(".zip"):
                    with zipfile.ZipFile(archive) as packed:
                        packed.extractall(unpacked)
                else:
                    with tarfile.open(archive) as packed:
                        packed.extractall(unpacked, filter="data")
            except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
                raise ConfigError(
                    f"Expected a source archive ({', '.join(_ENDINGS)}), got {archive}: {error}"
                ) from error
            inside = list(unpacked.iterdir())
            top = inside[0] if len(inside) == 1 and inside[0].is_dir() else unpacked
            shutil.copytree(top, repo, symlinks=True, ignore=shutil.ignore_patterns(".git"))
            try:  # bring the bug back in a mended archive, and check that both patches fit
                for patch in patches:
                    apply(repo, patch, undo=task.solved)
                if not task.solved:
                    for patch in patches:
                        apply(repo, patch, undo=True)
            except GitError as error:
                expected = f"Expected patch and test_patch of {task.instance_id} to fit its source"
                raise ConfigError(f"{expected}: {error}") from error
            commit_all(repo)
            shutil.copytree(repo / ".git", repo.parent / "git")
            repo.parent.replace(base)


class Workspace:
    """Hold the throw-away work folder of an episode until ``close``.

    Reading it raises GitError where the files are not in order. Repositories that were made inside
    ``repo`` are undone before it is read; their files stay.

    Args:
        shop: made it.
        task: the task of the episode.
        base: the base tree and its repository of one commit, which is not written to.
        folder: the work folder: ``box`` in it is what commands see.

    Attributes:
        repo: the folder that the agent works on.
        place: where its commands run.
        close: removes the folder, once.
    """

    def __init__(self, shop: Workshop, task: Task, base: Path, folder: Path) -> None:
        self._shop, self._task, self._folder = shop, task, folder
        self.repo = folder / "box" / "repo"
        self.place = shop.place(task, folder / "box")
        self._found = folder / "found"  # an index and new objects
        self._git = partial(
            git, "--literal-pathspecs", cwd=self.repo, store=base / "git", own=self._found
        )
        self.close = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def patch(self) -> str:
        """Return the change so far as a git diff; empty if the files cannot be read."""
        try:
            return self._changes()[0]
        except GitError:
            return ""

    def solved(self) -> bool:
        """Return whether the right change is in the files: whether it can be undone."""
        trial = self._folder / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        try:
            self._write(trial, ())
            apply(trial, self._task.patch, undo=True)
        except GitError:
            return False
        return True

    def passed(self, limits: Limits) -> frozenset[str]:
        """Return the names of the deciding tests that pass on a fresh copy of the files.

        Files of tests are put back to what they were, then ``test_patch`` is applied, so that what
        was done to them does not count.
        """
        task, copy = self._task, self._shop.place(self._task, self._folder / "judged")
        shutil.rmtree(copy.folder, ignore_errors=True)
        copy.folder.mkdir()
        # changes of tests, of their neighbours and of unasked plug-ins are undone
        files = (*touched(task.test_patch), *task.test_files)
        folders = tuple(f"{folder}/" for file in files if (folder := os.path.dirname(file)))
        above = {str(parent) for file in files for parent in Path(file).parents}
        protected: list[str] = []
        for name in self._changes()[1]:
            kept = os.path.basename(name) in _ALWAYS_KEPT or name in above or name in files
            if (kept or name.startswith(folders)) and name not in touched(task.patch):
                protected.append(name)
        self._write(copy.folder / "repo", protected)
        apply(copy.folder / "repo", task.test_patch)
        result = copy.run(shlex.join([*task.test_command, *task.test_files]), limits)
        return frozenset() if result.timed_out else _passed(result)

    def _changes(self) -> tuple[str, tuple[str, ...]]:
        """Return the difference to the commit as a git diff, and the files that differ."""
        self._look()
        plain = "--cached --no-renames --no-ext-diff --no-textconv --no-color".split()
        words = ("diff", *plain, "HEAD")
        names = self._git(*words, "--name-only", "-z")
        return self._git(*words, "--binary"), tuple(name for name in names.split("\0") if name)

    def _write(self, target: Path, without: Sequence[str]) -> None:
        """Write the files into the new folder ``target``, those in ``without`` as committed."""
        self._look()
        if without:
            from_input = ("--pathspec-from-file=-", "--pathspec-file-nul")
            self._git("reset", "--quiet", *from_input, "HEAD", text="\0".join(without))
        self._git("checkout-index", "--all", f"--prefix={target}/")

    def _look(self) -> None:
        """Read all files into a new index."""
        assure_folder(self.repo)
        self._found.mkdir(exist_ok=True)
        # of repositories made inside, git is to read the files and no settings
        for inside, folders, files in os.walk(self.repo):
            found = Path(inside) / ".git"
            if ".git" in folders:
                folders.remove(".git")
            if Path(inside) == self.repo:
                continue
            if found.is_symlink() or ".git" in files:
                found.unlink()
            elif found.is_dir():
                shutil.rmtree(found, ignore_errors=True)
        (self._found / "index").unlink(missing_ok=True)
        self._git("read-tree", "HEAD")
        self._git("add", "--all")


def _passed(result: Result) -> frozenset[str]:
    """Return the names after PASSED in pytest's short summary, but those of failures."""
    lines = result.text.rpartition("short test summary info")[2].splitlines()
    passed = {line[len("PASSED ") :].strip() for line in lines if line.startswith("PASSED ")}
    failed = {
        line.partition(" ")[2].partition(" - ")[0]
        for line in lines
        if line.startswith(("FAILED ", "ERROR "))
    }
    return frozenset(passed - failed)


def pip(*words: str) -> None:
    """Run pip of this interpreter."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PIP_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"Expected `pip {' '.join(words)}` to end within {_PIP_SECONDS} seconds"
        ) from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise ConfigError(
            f"Expected `pip {' '.join(words)}` to succeed (it needs the package index once):"
            f" {said[-600:]}"
        )


def archive_of(task: Task, sources: Path | None, tasks_file: Path, kept: Path) -> Path:
    """Return the archive that holds the source of ``task``.

    It lies in ``sources`` or beside ``tasks_file``, or pip fetches it into ``kept``. ConfigError
    where it is missing, cannot be fetched, or has another digest than the task names.
    """
    if task.source.startswith("pip:"):
        requirement = task.source.removeprefix("pip:")
        folder = kept / requirement.replace("==", "-")
        if not folder.is_dir():
            kept.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept) as fresh:
                words = "download --quiet --no-binary :all: --no-deps --dest".split()
                pip(*words, f"{fresh}/got", requirement)
                Path(fresh, "got").replace(folder)
        archive = archives_in(folder)[0]
    else:
        folders = [folder for folder in (sources, tasks_file.parent) if folder is not None]
        stems = (task.instance_id, f"{task.repo.replace('/', '__')}-{task.base_commit}")
        names = [task.source] if task.source else [f"{s}{end}" for s in stems for end in _ENDINGS]
        paths = (folder / name for folder in folders for name in names)
        archive = next((path for path in paths if path.is_file()), None)
        if archive is None:
            wanted = task.source or f"{stems[0]}.tar.gz or {stems[1]}.tar.gz"
            places = " or ".join(str(folder) for folder in folders)
            raise ConfigError(
                f"Expected the source of {task.instance_id} as {wanted} in {places}, got no such"
                f" file; make it with: git archive --prefix=src/ -o {stems[0]}.tar.gz"
                f" {task.base_commit or 'COMMIT'}"
            )
    if task.sha256 and (got := hashlib.sha256(archive.read_bytes()).hexdigest()) != task.sha256:
        raise ConfigError(
            f"Expected {archive} with the SHA-256 {task.sha256} for {task.instance_id}, got {got};"
            " remove it to fetch it again"
        )
    return archive


def archives_in(folder: Path) -> list[Path]:
    """Return the archives in a folder."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in paths if path.name.endswith(_ENDINGS))

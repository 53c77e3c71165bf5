"""Find source archives of tasks in a folder, or fetch them from the package index by pip."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from experiential.envs.swe.task import Task
from experiential.errors import ConfigError

_ENDINGS = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar", ".zip")
_PIP_SECONDS = 600


def pip(*words: str) -> None:
    """Run pip of this interpreter.

    Raises:
        ConfigError: it failed; the message has its last lines.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_PIP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"Expected `pip {' '.join(words)}` to end within {_PIP_SECONDS} seconds"
        ) from error
    if done.returncode:
        raise ConfigError(
            f"Expected `pip {' '.join(words)}` to succeed (it needs the package index once):"
            f" {done.stderr.strip()[-600:]}"
        )


def archive_of(task: Task, sources: Path | None, tasks_file: Path, kept: Path) -> Path:
    """Return the archive that holds the source of ``task``.

    Args:
        task: whose source.
        sources: folder of archives.
        tasks_file: the file that the task stands in; archives may lie beside it.
        kept: folder for archives that pip fetches.

    Raises:
        ConfigError: it is missing, cannot be fetched, or has another digest than the task names.
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
        found = next((path for path in paths if path.is_file()), None)
        if found is None:
            wanted = task.source or f"{stems[0]}.tar.gz or {stems[1]}.tar.gz"
            places = " or ".join(str(folder) for folder in folders)
            raise ConfigError(
                f"Expected the source of {task.instance_id} as {wanted} in {places}, got no such"
                f" file; make it with: git archive --prefix=src/ -o {stems[0]}.tar.gz"
                f" {task.base_commit or 'COMMIT'}"
            )
        archive = found
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


def unpack(archive: Path, target: Path) -> None:
    """Unpack an archive into the new folder ``target``, without its one top folder.

    Raises:
        ConfigError: it is no archive, or a file in it would lie elsewhere.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as fresh:
        try:
            if archive.name.endswith(".zip"):
                with zipfile.ZipFile(archive) as packed:
                    packed.extractall(fresh)
            else:
                with tarfile.open(archive) as packed:
                    packed.extractall(fresh, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
            raise ConfigError(
                f"Expected a source archive ({', '.join(_ENDINGS)}), got {archive}: {error}"
            ) from error
        inside = list(Path(fresh).iterdir())
        top = inside[0] if len(inside) == 1 and inside[0].is_dir() else Path(fresh)
        shutil.copytree(top, target, symlinks=True, ignore=shutil.ignore_patterns(".git"))

"""Run commands with limits on time, memory and files, behind namespaces where possible."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from experiential.errors import ConfigError

Isolation = Literal["auto", "required", "off"]

_ENTER = Path(__file__).with_name("enter.sh")
_UNSHARE = ("unshare", "-r", "-m", "-n", "-p", "-i", "-f", "--kill-child", "--mount-proc")
_FILE_MIB = 256  # largest file that a command may write, its output included
_READ = 1_000_000  # bytes of an output that are read, of its beginning and of its end


@dataclass(frozen=True)
class Limits:
    """Limit one command."""

    seconds: float = 60.0  # of wall time, and of processor time in one process
    memory: int = 4096  # MiB of address space, for each process


class Result(NamedTuple):
    """Hold the output of a command, its exit status, and whether its time ran out."""

    text: str
    status: int
    timed_out: bool


@dataclass(frozen=True)
class Place:
    """Run commands in a throw-away folder."""

    folder: Path  # commands may write to ``repo`` and ``tmp`` in it, and nowhere else
    box: Path  # an empty folder at which namespaces show ``folder``, the same in every episode
    private: tuple[Path, ...]  # files and folders that are hidden behind namespaces
    variables: Mapping[str, str]  # ``{root}`` in them stands for the folder as commands see it
    isolated: bool  # run behind namespaces; see `isolated`

    @property
    def root(self) -> Path:
        """Return ``folder`` as a command sees it."""
        return self.box if self.isolated else self.folder

    def run(self, command: str, limits: Limits) -> Result:
        """Run ``command`` with bash in ``repo``; at the end kill all processes that it started.

        What the command reads from its standard input is empty. Behind namespaces there is no
        network, nothing but ``folder`` can be written, and a process that left its group dies too.
        """
        for name in ("repo", "tmp"):
            assure_folder(self.folder / name)
        root = str(self.root)
        env = {"PATH": os.defpath + ":/usr/sbin:/sbin", "PAGER": "cat", "GIT_PAGER": "cat"}
        env |= {"HOME": f"{root}/tmp", "TMPDIR": f"{root}/tmp", "LANG": "C.UTF-8"}
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        env |= {name: value.replace("{root}", root) for name, value in self.variables.items()}
        private = "\n".join(str(path) for path in self.private)
        layers = "namespaces" if self.isolated else "limits"
        numbers = (limits.memory * 1024, _FILE_MIB * 2048, max(1, round(limits.seconds) + 1))
        words = [*_UNSHARE] if self.isolated else []
        words += ["sh", str(_ENTER), layers, str(self.folder), str(self.box), private, ""]
        words += [*map(str, numbers), "bash"]
        with tempfile.TemporaryFile() as script, tempfile.TemporaryFile() as output:
            script.write(command.encode("utf-8", "replace").replace(b"\0", b""))
            script.flush()
            script.seek(0)
            child = subprocess.Popen(
                [*words, f"/dev/fd/{script.fileno()}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(script.fileno(),),
                env=env,
                start_new_session=True,
            )
            status, timed_out = -1, False
            try:
                status = child.wait(limits.seconds)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            said, size = output.fileno(), os.fstat(output.fileno()).st_size
            head, gap, tail = os.pread(said, _READ, 0), b"", os.pread(said, _READ, _READ)
            if size > 2 * _READ:
                gap = f"\n[... {size - 2 * _READ} bytes left out ...]\n".encode()
                tail = os.pread(said, _READ, size - _READ)
        return Result((head + gap + tail).decode("utf-8", "replace"), status, timed_out)


def assure_folder(path: Path) -> None:
    """Make ``path`` a folder, where a command put a link or a file in its place or removed it."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)


def isolated(wanted: Isolation) -> bool:
    """Return whether commands run behind namespaces: if available, unless ``wanted`` is ``off``.

    Raises:
        ConfigError: they are required, and this platform does not give them.
    """
    if wanted == "off":
        return False
    reason = _refusal()
    if reason and wanted == "required":
        raise ConfigError(
            f"Expected a platform with namespaces for isolation='required', got: {reason};"
            " isolation='auto' does without"
        )
    return not reason


@lru_cache(maxsize=1)
def _refusal() -> str:
    """Return why namespaces are not available, by trying one; empty if they are."""
    missing = [name for name in ("unshare", "setpriv", "mount") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    with tempfile.TemporaryDirectory() as folder:
        box = Path(folder) / "box"
        box.mkdir()
        place = Place(Path(folder) / "work", box, (), {}, True)
        trial = "touch here && ! touch /nowhere 2>/dev/null && echo works"
        result = place.run(trial, Limits(20))
    said = " ".join(result.text.split())
    return "" if said == "works" else said[:300] or f"exit status {result.status}"


def shortened(text: str, budget: int) -> str:
    r"""Return ``text`` cut in the middle to ``budget`` characters.

    >>> shortened("0123456789" * 10, 20)
    '0123456789\n[... 80 characters left out ...]\n0123456789'
    """
    if len(text) <= budget:
        return text
    half = budget // 2
    left_out = f"[... {len(text) - 2 * half} characters left out ...]"
    return f"{text[:half]}\n{left_out}\n{text[len(text) - half :]}"

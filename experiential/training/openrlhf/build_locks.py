"""Find locks that a killed process left in the folders where DeepSpeed compiles its operators.

torch marks a build by a file ``lock``, which its owner holds open and removes at the end. A killed
owner leaves the file, and whoever needs the operator then waits for its removal without end.
"""

from __future__ import annotations

import glob
import os
import time
from contextlib import suppress
from pathlib import Path

OPERATORS = ("fused_adam", "cpu_adam", "deepspeed_shm_comm")
"""What ranks compile at their first use; the last is for ranks without GPUs."""
LONGEST_S = 1800.0
"""Age from which a lock on a shared file system is taken for left behind; a guess."""
_SHARED = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse", "afs", "pvfs")


def clear_build_locks() -> tuple[list[str], list[str]]:
    """Remove locks whose owner is dead; return those removed, and those in doubt.

    A lock is without an owner if no process of this node holds it open. On a file system that
    other nodes may share, or in another user's folder, this proves nothing: such a lock is in doubt
    once it is older than `LONGEST_S`, and stays.
    """
    removed, doubtful = list[str](), list[str]()
    for file in _locks():
        with suppress(FileNotFoundError):  # released meanwhile
            found = file.stat()
            if _held(found):
                continue
            if found.st_uid == os.geteuid() and not _shared(file):
                file.unlink()
                removed.append(str(file))
            elif time.time() - found.st_mtime > LONGEST_S:
                doubtful.append(str(file))
    return removed, doubtful


def _locks() -> list[Path]:
    """Return the locks of DeepSpeed's operators, where torch builds them."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:  # one folder for each version of Python and CUDA
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folders = glob.glob(f"{glob.escape(cache)}/torch_extensions/py*")
    else:
        folders = [root]
    files = (Path(folder) / name / "lock" for folder in folders for name in OPERATORS)
    return [file for file in files if file.is_file()]


def _held(lock: os.stat_result) -> bool:
    """Return whether a process of this node has the file open."""
    for opened in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or is another user's
            if os.path.samestat(os.stat(opened), lock):
                return True
    return False


def _shared(file: Path) -> bool:
    """Return whether other nodes may see the file, by the kind of its file system."""
    place, kind = file.resolve(), ""
    longest = -1
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        for line in mounts:
            _, mounted, name, *_ = line.split()
            where = mounted.encode().decode("unicode_escape")  # a blank is written \040
            if place.is_relative_to(where) and len(where) >= longest:
                longest, kind = len(where), name
    return kind.startswith(_SHARED)

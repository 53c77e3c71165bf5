"""Print the shape of the package: its size, its grain, its prose and its imports.

    python -m tools.shape            # a second
    python -m tools.shape --trace    # and what one training step passes through; a minute

The figures describe. A figure that gets better while a newcomer needs more files to follow one call
is a loss.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "experiential"
VERBS = frozenset(Path(__file__).with_name("verbs.txt").read_text("utf-8").split())
LONGEST_LINE = 100
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


def summaries(trees: dict[Path, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every docstring of a module, class or function."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'lineno', 1)}", text


def opens_with_a_verb(docstring: str) -> bool:
    """Tell a docstring that opens with a verb of ``verbs.txt`` in the imperative."""
    return re.split(r"\W", docstring, maxsplit=1)[0].lower() in VERBS


def used_once(trees: dict[Path, ast.Module], texts: dict[Path, str]) -> list[str]:
    """Return the private functions whose name occurs once apart from their definition."""
    words = Counter(w for text in texts.values() for w in re.findall(r"\b_[A-Za-z]\w*\b", text))
    return [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
        and re.match(r"_[^_]", node.name)
        and words[node.name] == 2  # the definition and one use
    ]


def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the modules that each module imports, inside functions and for type checkers too.

    The package's own ``__init__`` imports its public names on first use and is left out.
    """
    modules = {
        ".".join((root.name, *path.relative_to(root).with_suffix("").parts)): path
        for path in root.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found.add(inner if inner in modules else node.module)
        graph[name] = (found & modules.keys()) - {name, root.name}
    return graph


def import_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reach = {name: set(targets) for name, targets in graph.items()}
    for middle in graph:  # Warshall's transitive closure
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    circles = {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in graph
        if name in reach[name]
    }
    return sorted(sorted(circle) for circle in circles)


def main() -> None:
    """Print the figures, each with the places that are furthest from it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="trace a training step as well")
    parser.add_argument("--places", type=int, default=3, help="places shown of each kind")
    options = parser.parse_args()
    from experiential.recipe import settings_reference

    texts = {path: path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: text.splitlines() for path, text in texts.items()}
    total = sum(map(len, lines.values()))
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, Function)]
    lengths = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)
    once = used_once(trees, texts)
    long = [
        f"{path}:{number}"
        for path, rows in lines.items()
        for number, row in enumerate(rows, 1)
        if len(row) > LONGEST_LINE
    ]
    documented = list(summaries(trees))
    verbless = [f"{at} {text.split()[0]}" for at, text in documented if not opens_with_a_verb(text)]
    circles = import_circles(import_graph())
    comments = sum(row.lstrip().startswith("#") for rows in lines.values() for row in rows)
    per_thousand = 1000 * len(functions) / total
    figures: list[tuple[str, str, list[str]]] = [
        ("lines", f"{total:,} in {len(texts)} files, {comments} of them comments", []),
        ("functions", f"{len(functions):,}, {per_thousand:.0f} per 1,000 lines", []),
        (
            "function lines",
            f"median {statistics.median(lengths):.0f}, p90 {lengths[int(0.9 * len(lengths))]}",
            [],
        ),
        ("private helpers used once", f"{100 * len(once) / len(functions):.1f} %", once),
        (f"lines over {LONGEST_LINE} columns", str(len(long)), long),
        (
            "docstrings that open with a verb",
            f"{100 - 100 * len(verbless) / len(documented):.1f} % of {len(documented):,}",
            verbless,
        ),
        ("circles of imports", str(len(circles)), [" ".join(circle) for circle in circles]),
        ("settings", str(len(list(settings_reference()))), []),
    ]
    for name, figure, places in figures:
        print(f"{name:34} {figure}")
        for place in places[: options.places]:
            print(f"{'':34}   {place.replace(f'{ROOT.parent}/', '')}")
    if options.trace:
        from tools.trace import CALLS

        for name, call in CALLS.items():
            trace = call()
            counts = f"{len(trace.codes)} functions in {len(trace.files())} files"
            print(f"{name:34} {counts}, {len(trace.threads)} threads")


if __name__ == "__main__":
    main()

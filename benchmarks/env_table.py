"""Lay out the results of `python -m benchmarks.envs` in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HEAD = (
    "row",
    "steps/s (processor)",
    "steps/s (wall)",
    "reset ms: median",
    "95th",
    "growth, MiB per 1,000",
    "tokens",
    "oracle: success",
    "oracle: reward",
    "random: success",
    "random: reward",
)


def markdown(found: Mapping[str, Any]) -> str:
    """Lay out all rows as tables.

    They are: rows measured, MiniHack beside the raw game, failures of the oracle, rows not ready.
    """
    rows: Mapping[str, Any] = found["rows"]
    parts = [
        _facts(found["machine"]),
        _measured(rows),
        _raw(rows),
        _failures(rows),
        _not_ready(rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Made by `python -m benchmarks.envs` on {machine['cores']} cores ({machine['platform']}),"
        f" Python {machine['python']}; {versions}. What each column is: docs/benchmarks.md."
        " Brackets are 95 % intervals."
    )


def _measured(rows: Mapping[str, Any]) -> str:
    lines = [[name, *_cells(row)] for name, row in rows.items() if row.get("parts")]
    return table(_HEAD, lines) if lines else ""


def _cells(row: Mapping[str, Any]) -> list[str]:
    parts = row["parts"]
    play, memory, oracle = parts.get("play", {}), parts.get("memory", {}), parts.get("oracle", {})
    speed, reset = play.get("steps_per_second", {}), play.get("reset_ms", {})
    counted: Mapping[str, Any] = play.get("tokens", {})
    return [
        _number(speed.get("cpu")),
        _number(speed.get("wall")),
        _number(reset.get("wall_median")),
        _number(reset.get("wall_p95")),
        _number(memory.get("growth_mib_per_1000"), zero="0.0"),
        f"{_number(counted.get('mean'))} {counted.get('tokenizer', '')}".strip(),
        *_outcomes(oracle),
        *_outcomes(play.get("random", {})),
    ]


def _outcomes(found: Mapping[str, Any]) -> list[str]:
    if "success" not in found:
        return ["–", "–"]
    success, reward = found["success"], found["reward"]
    share = (
        f"{_percent(success['mean'])} % [{_percent(success['low'])}, {_percent(success['high'])}]"
        f" of {found['episodes']:,}"
    )
    return [share, f"{reward['mean']:.3f} [{reward['low']:.3f}, {reward['high']:.3f}]"]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0")


def _number(value: float | None, zero: str = "0") -> str:
    if value is None:
        return "–"
    if abs(value) < 0.05:
        return zero if not value or zero == "0.0" else f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _raw(rows: Mapping[str, Any]) -> str:
    lines = [
        [
            name,
            *(_number(raw[part][clock]) for clock in ("cpu", "wall") for part in ("words", "raw")),
            f"{raw['ratio']['cpu']:.2f}",
        ]
        for name, row in rows.items()
        if (raw := row.get("parts", {}).get("raw"))
    ]
    head = (
        "MiniHack",
        "words, steps/s (processor)",
        "raw",
        "words, steps/s (wall)",
        "raw",
        "words over raw (processor)",
    )
    return table(head, lines) if lines else ""


def _failures(rows: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for name, row in rows.items():
        oracle = row.get("parts", {}).get("oracle", {})
        if oracle.get("failed"):
            shown = "; ".join(
                f"{one['task_id'] or one['world']}: {one['reason']}"
                for one in oracle["failures"][:5]
            )
            lines.append(
                f"* {name}: {oracle['failed']} of {oracle['episodes']}, among them {shown}"
            )
    return "Episodes that the oracle did not win:\n\n" + "\n".join(lines) if lines else ""


def _not_ready(rows: Mapping[str, Any]) -> str:
    lines = [f"* {name}: {row['reason']}" for name, row in rows.items() if row.get("reason")]
    return "Rows that were not measured, or not whole:\n\n" + "\n".join(lines) if lines else ""


def table(head: tuple[str, ...], lines: list[list[str]]) -> str:
    """Return a Markdown table."""
    rule = "|".join("---" for _ in head)
    return "\n".join(
        [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in lines)]
    )

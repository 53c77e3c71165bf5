"""Give the help of each command examples, which a test reads as the command itself would."""

from __future__ import annotations

import typer

EXAMPLES: dict[str, tuple[str, ...]] = {
    "experiential-train": (
        "experiential-train --recipe complementary --output runs/first",
        "experiential-train --recipe grpo+small+frozen-lake run.steps=100 --dry-run",
        "experiential-train --resume --output runs/first",
    ),
    "experiential episodes": (
        "experiential episodes runs/first --outcome failure --limit 20",
        "experiential episodes runs/first 845c6743",
    ),
    "experiential eval": (
        "experiential eval runs/first --arms off,frozen,on",
        "experiential eval runs/first runs/second eval.worlds=20 --output runs/evaluation",
    ),
    "experiential serve": (
        "experiential serve bank",
        "experiential serve bank --port 8765",
    ),
    "experiential distil": ("experiential distil bank --model gpt-5-mini",),
    "experiential mcp": ("experiential mcp bank",),
    "experiential init": ("experiential init my-env",),
    "experiential ui": ("experiential ui runs/first", "experiential ui bank --port 8080"),
    "experiential export": (
        "experiential export runs/first --to agent",
        "experiential export runs/first --to agent --merge",
    ),
    "experiential play": ("experiential play runs/first --episodes 2 --seed 7",),
    "experiential report": ("experiential report runs/first",),
    "experiential settings": ("experiential settings --json",),
    "experiential recipes": ("experiential recipes --json",),
    "experiential doctor": ("experiential doctor",),
    "experiential bank ls": ("experiential bank ls bank --limit 20",),
    "experiential bank show": ("experiential bank show bank b18c8f88",),
    "experiential bank search": ('experiential bank search bank "a hot mug" --k 3',),
    "experiential bank why": ("experiential bank why bank 747c9380",),
    "experiential bank history": ("experiential bank history bank",),
    "experiential bank diff": ("experiential bank diff bank 12 40",),
    "experiential bank rollback": ("experiential bank rollback bank 12",),
    "experiential bank merge": (
        "experiential bank merge bank --dry-run",
        "experiential bank merge bank --model smollm2",
    ),
    "experiential bank prune": ("experiential bank prune bank --dry-run",),
    "experiential bank export": ("experiential bank export bank entries.jsonl",),
    "experiential bank import": ("experiential bank import bank entries.jsonl",),
    "experiential bench run": (
        "experiential bench run --suite frozenlake --agent random",
        "experiential bench run --suite lasting --model smollm2 --arms off,on",
    ),
    "experiential bench stream": ("experiential bench stream --suite lasting --model smollm2",),
    "experiential envs show": ("experiential envs show experiential/Vault-v0",),
    "experiential envs check": ("experiential envs check experiential/Vault-v0",),
}
"""Complete command lines by the words of their command."""


def add_examples(app: typer.Typer, program: str) -> None:
    """Put the examples below the help of an application's commands, and of those below them."""
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        words = program if program in EXAMPLES else f"{program} {name}"
        if lines := EXAMPLES.get(words):
            command.epilog = "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance, f"{program} {group.name}")

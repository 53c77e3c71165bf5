"""Write the model cards of an export, with the figures of its run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from experiential.cli.card import card_lines
from experiential.cli.report import Event, before_and_after, headline, rate
from experiential.config import Experiment
from experiential.evaluation.page import show_percent
from experiential.export import Role, is_adapter, model_settings

if TYPE_CHECKING:
    from experiential.evaluation.card import Card

CARD_FILE = "README.md"
_ABOUT = {
    "actor": "acts in the environment",
    "extractor": "distils finished episodes into lessons for the bank",
}
_MISSING = "no evaluation was made in this run"
_USE = """## Use

With the prompts, the placement of advice and the sampling of training:

```python
import experiential as xp

with xp.load_agent("{folder}") as agent:
    print(agent.play(seed=0).success)
```

`experiential play {folder}` shows episodes with the advice marked. {plain}
"""
_PLAIN = """With transformers alone:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}/actor")
tokenizer = AutoTokenizer.from_pretrained("{folder}/actor")
```
"""
_SERVE = """With vLLM: `vllm serve {folder}/actor --served-model-name actor`.
"""
_ADAPTER = """`actor/` is a LoRA adapter over `{base}`, a model that comes with the package; for
transformers alone or for vLLM, export the run with `--merge`.
"""


def write_cards(
    export: Path, experiment: Experiment, step: int, events: Sequence[Event], card: Card | None
) -> None:
    """Write a card for the export, and a short one beside each model in it.

    Args:
        export: the folder.
        experiment: settings of the export.
        step: training steps taken.
        events: of the run's metrics.
        card: of `experiential eval`, if there is one.
    """
    roles: list[Role] = [role for role in ("actor", "extractor") if (export / role).is_dir()]
    for role in roles:
        said = f"\n# {experiment.recipe}: {role}\n\nThis model {_ABOUT[role]}"
        said += f" `{experiment.env.id}`" if role == "actor" else ""
        trained = f"; {step} steps with the recipe `{experiment.recipe}` of experiential.\n"
        text = f"{_front_matter(export, experiment, role)}{said}{trained}"
        (export / role / CARD_FILE).write_text(text, "utf-8")
    parts = [
        _front_matter(export, experiment, "actor"),
        f"# {experiment.recipe} on {experiment.env.id}\n",
        *_contents(export, experiment, roles),
        *_figures(experiment, step, events),
    ]
    if card is not None:
        parts += ["## Evaluation\n", "Made by `experiential eval`; intervals are 95 %.\n"]
        parts += [*(f"* {line}" for line in card_lines(card)), ""]
    parts.append(_usage(export, experiment))
    (export / CARD_FILE).write_text("\n".join(parts), "utf-8")


def base_of(export: Path, experiment: Experiment, role: Role) -> str:
    """Return the name of the model that a role was trained from."""
    from experiential.llm.models import ADAPTER

    file = export / role / ADAPTER
    if is_adapter(export / role):
        return str(yaml.safe_load(file.read_text("utf-8"))["base_model_name_or_path"])
    return model_settings(experiment, role).name


def _front_matter(export: Path, experiment: Experiment, role: Role) -> str:
    fields = {
        "base_model": base_of(export, experiment, role),
        "library_name": "peft" if is_adapter(export / role) else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["experiential", "reinforcement-learning", "agent", role],
    }
    licence = "# license: to be chosen by you; it has to suit that of the base model\n"
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}{licence}---\n"


def _contents(export: Path, experiment: Experiment, roles: Iterable[Role]) -> list[str]:
    lines = ["| Folder | What it is |", "|---|---|"]
    for role in roles:
        kind = "LoRA adapter over" if is_adapter(export / role) else "weights, trained from"
        base = base_of(export, experiment, role)
        lines.append(f"| `{role}/` | {_ABOUT[role]}: {kind} `{base}` |")
    if (export / "bank").is_dir():
        lines.append(
            "| `bank/` | the experience bank, with its history: every lesson, and the episodes"
            " behind it |"
        )
    lines.append("| `config.yaml`, `export.json` | settings of the run, and its last step |")
    return [*lines, ""]


def _figures(experiment: Experiment, step: int, events: Sequence[Event]) -> list[str]:
    played = sum(event["episodes"] for event in events if event["event"] == "step")
    lines = ["## Training\n"]
    lines.append(f"{step} steps, {played:,} episodes, seed {experiment.seed}.\n")
    columns = before_and_after(events)
    if not columns:
        return [*lines, f"Held-out success: {_MISSING}.\n"]
    lines.append("Success in held-out worlds by visit, with 95 % Wilson intervals:\n")
    titles = [title.replace("\n", ", ") for title, _ in columns]
    lines += [f"| Visit | {' | '.join(titles)} |", f"|---|{'---|' * len(columns)}"]
    most = max(len(event["visits"]) for _, event in columns)
    rows = [(str(index + 1), slice(index, index + 1)) for index in range(most)]
    for name, visits in (*rows, *([("later (2+)", slice(1, None))] if most > 1 else [])):
        cells = (show_percent(rate(event, visits)) for _, event in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, "", *headline(events), ""]


def _usage(export: Path, experiment: Experiment) -> str:
    folder, actor = export.resolve().name, export / "actor"
    base = base_of(export, experiment, "actor")
    if not actor.is_dir():
        plain = f"The actor is `{base}` as it is; this run trained no weights of it.\n"
    elif is_adapter(actor) and base.partition("-")[0] in ("tiny", "smollm2"):
        plain = _ADAPTER.format(base=base)
    else:
        plain = _PLAIN.format(folder=folder)
        plain += "" if is_adapter(actor) else _SERVE.format(folder=folder)
    return _USE.format(folder=folder, plain=plain)

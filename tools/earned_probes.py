"""Measure what a model of `tools.earned_corpus` can do, part by part, before any reinforcement.

    python -m tools.earned_probes FOLDER [--samples 200] [--games lake] [--temperature 0.3]
        [--system "Do what the note says."] [--run RUN]

Vaults and lakes are those of the split dev, and so are the names and layouts: the model never saw
them. A share is the mean probability of a right answer among the admissible ones, as the actor
draws them; of lessons it is the share of sampled answers that are right to the letter.

``--run`` names a run on FrozenLake in dialects. The model then also distils plays of that run. The
report has right and wrong pairs a lesson, and the success of the run's advised episodes by how many
pairs of the entry shown were right and wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from experiential.agents.operations import CONSOLIDATION, DISTILLATION, parse_operations
from experiential.agents.prompts import experience_block
from experiential.bank.bank import ExperienceBank
from experiential.bank.protocol import Bank
from experiential.envs.dialect import DIRECTIONS
from experiential.envs.frozen_lake import FrozenLakeEnv
from experiential.envs.grid import MOVES
from experiential.envs.vault import VaultEnv
from experiential.evaluation.episode_log import EPISODES_FILE, EpisodeLog, shown_text
from tools import earned_corpus
from tools.earned_corpus import BRIEF, LAKE, BlindVaultTasks, DialectTasks, legend, live, ruled_out

GAMES = ("vault", "lake")


class Model:
    """Ask a model greedily, by draws, or for the probabilities of one-token answers."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoTokenizer, LlamaForCausalLM

        torch.manual_seed(0)  # of the sampled answers
        self._torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def _ids(self, messages: Sequence[Any], said: str = "") -> list[int]:
        text = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer.encode(text + said, add_special_tokens=False)

    def shares(self, messages: Sequence[Any], said: str, words: Sequence[str]) -> dict[str, float]:
        """Return the probabilities of the first tokens of ``words`` among each other."""
        first = [self.tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
        with self._torch.no_grad():
            logits = self.model(input_ids=self._torch.tensor([self._ids(messages, said)])).logits
        found = self._torch.softmax(logits[0, -1, first].double(), 0).tolist()
        return dict(zip(words, found, strict=True))

    def write(
        self, messages: Sequence[Any], *, sample: bool = True, temperature: float = 1.0
    ) -> str:
        """Return an answer, the likeliest or a sampled one."""
        return self.go_on(self._ids(messages), sample=sample, temperature=temperature)

    def go_on(self, prompt: Sequence[int], *, sample: bool = True, temperature: float = 1.0) -> str:
        """Return an answer to the tokens of a prompt."""
        ids = self._torch.tensor([list(prompt)])
        with self._torch.no_grad():
            out = self.model.generate(
                input_ids=ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=80,
                do_sample=sample, temperature=temperature if sample else None, top_k=0, top_p=None,
                pad_token_id=0,
            )  # fmt: skip
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def texts(answer: str) -> list[str]:
    """Return the texts that an answer writes."""
    parsed = parse_operations(answer, kinds=(*DISTILLATION, *CONSOLIDATION))
    return [getattr(one, "text", "") for one in parsed.operations]


def pairs_of(text: str) -> set[str]:
    """Return the pairs of direction and word that a lesson tells."""
    return set(re.findall(r"[NSWE](?:Up|Down|Left|Right)", text))


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return round(sum(values) / max(1, len(values)), 3)


def vault(model: Model, count: int, system: str | None, seed: int = 5) -> dict[str, float]:
    """Return the mass on levers ruled out, on a lever named, and on one just pulled in vain."""
    rng, env = random.Random(seed), VaultEnv("dev", worlds=120, note=False)
    found: dict[str, list[float]] = {}
    for number in range(count):
        observation, info = env.reset(seed=number, options={"world": number % 120})
        shown, name = [action[5:] for action in info["admissible"]], env.names[number % 120]
        right = env.oracle_action()[5:]
        dead = [lever for lever in rng.sample(shown, 14) if lever != right]

        def ask(
            note: str | None, *turns: str, shown: list[str] = shown, first: str = observation
        ) -> dict[str, float]:
            block = experience_block([note]) if note else None
            base = f"{system}\n{block}" if block else system
            text = base if system else BRIEF.actor_system("", block)
            messages: list[dict[str, str]] = [{"role": "system", "content": text or ""}]
            for place, said in enumerate((first, *turns)):
                messages.append({"role": ("user", "assistant")[place % 2], "content": said})
            shares = model.shares(messages, "pull", [f" {lever}" for lever in shown])
            return {word[1:]: share for word, share in shares.items()}

        for size in (2, 6, 10):
            shares = ask(ruled_out(name, dead[:size]))
            chance = (14 - size) / 14
            free = sum(share for lever, share in shares.items() if lever not in dead[:size])
            found.setdefault(f"avoids {size} (chance {chance:.2f})", []).append(free)
        target = rng.choice(shown)
        found.setdefault("follows (chance 0.07)", []).append(ask(live(name, target))[target])
        wrong = dead[0]
        after = f"The {wrong} lever clicks.\nTries left: 1. Reply: pull <lever>."
        again = ask(None, f"pull {wrong}", after)[wrong]
        found.setdefault("pulls again (chance 0.07)", []).append(again)
    return {name: mean(values) for name, values in found.items()}


def lake(model: Model, count: int, system: str | None, seed: int = 5) -> dict[str, float]:
    """Return the mass on shortest moves: with the legend, with a wrong one, with none."""
    rng = random.Random(seed)
    env = FrozenLakeEnv("dev", **LAKE)  # type: ignore[arg-type]
    found: dict[str, list[float]] = {}
    for number in range(count):
        observation, _ = env.reset(seed=number)
        known = dict(zip(DIRECTIONS, env.dialect.directions, strict=True))
        here = env.agent
        best: set[str] = set()
        length = len(env.plan() or ())
        for direction, (down, right) in MOVES.items():
            cell = (here[0] + down, here[1] + right)
            if env.lake.inside(cell) and cell not in env.lake.holes:
                way = env.lake.path(cell)
                if cell == env.lake.goal or (way is not None and len(way) < length):
                    best.add(direction)
        other = dict(zip(rng.sample(DIRECTIONS, 4), rng.sample(DIRECTIONS, 4), strict=True))
        notes = {"legend": known, "legend of another": other, "none": {}}
        for title, told in notes.items():
            block = experience_block([legend(env.dialect.name, told)]) if told else None
            text = (
                (f"{system}\n{block}" if block else system)
                if system
                else BRIEF.actor_system("", block)
            )
            messages = [{"role": "system", "content": text},
                        {"role": "user", "content": observation}]  # fmt: skip
            shares = model.shares(messages, "", DIRECTIONS)
            right_share = sum(shares[word] for word in DIRECTIONS if known[word] in best)
            found.setdefault(f"shortest move, {title}", []).append(right_share)
        found.setdefault("shortest move, chance", []).append(len(best) / 4)
    return {name: mean(values) for name, values in found.items()}


def lessons(
    model: Model,
    count: int,
    games: Sequence[str] = GAMES,
    temperature: float = 1.0,
    seed: int = 5,
) -> dict[str, float]:
    """Return the shares of lessons right to the letter, greedy and sampled, by kind."""
    found: dict[str, list[float]] = {}
    sure = {**earned_corpus.TAUGHT, "lesson": 1.0, "join": 1.0}
    rng = random.Random(seed)
    blind, dialect = BlindVaultTasks(rng, sure, "dev"), DialectTasks(rng, sure, "dev")
    makers: list[tuple[str, Callable[[], Any]]] = [
        ("vault", blind.distill), ("merge", blind.merge), ("lake", dialect.distill),
    ]  # fmt: skip
    for name, make in makers:
        if ("lake" if name == "lake" else "vault") not in games:
            continue
        for _ in range(count):
            *question, wanted = make()
            text = wanted["content"]
            kind = name
            if name == "vault":
                kind += ", found" if "Pull" in text else ", list"
                kind += " extended" if '"update"' in text and ": not" in text else ""
            for how in (False, True):
                said = model.write(question, sample=how, temperature=temperature)
                got, want = texts(said), texts(text)
                title = f"{kind}, {'sampled' if how else 'greedy'}"
                found.setdefault(title, []).append(float(got == want))
                if name == "lake" and want:
                    pairs, told = pairs_of(want[0]), pairs_of(" ".join(got))
                    found.setdefault(f"{title}, tells pairs", []).append(float(bool(told)))
                    if told:
                        found.setdefault(f"{title}, pairs told that are right", []).append(
                            len(told & pairs) / len(told)
                        )
    return {name: mean(values) for name, values in sorted(found.items())}


def meanings() -> dict[str, set[str]]:
    """Return the true pairs of each dialect of the split train, by task."""
    env = FrozenLakeEnv("train", **LAKE, dialects=120)  # type: ignore[arg-type]
    found: dict[str, set[str]] = {}
    for world in env.worlds:
        _, info = env.reset(seed=0, options={"world": world})
        known = dict(zip(DIRECTIONS, env.dialect.directions, strict=True))
        found[info["task"]] = pairs_of(legend(env.dialect.name, known))
    return found


def distilled(model: Model, bank: Bank, count: int, temperature: float) -> dict[str, float]:
    """Return right and wrong pairs a lesson, written of the plays that new entries came from."""
    truth = meanings()
    firsts = [one for entry in bank.entries() if (one := bank.version(entry.id, 1)) is not None]
    random.Random(5).shuffle(firsts)
    asked = (
        (truth[one.task], made)
        for one in firsts
        if one.task in truth
        and (made := bank.generation(one.provenance.generation or "")) is not None
    )
    found: dict[str, list[float]] = {"pairs right": [], "pairs wrong": []}
    for pairs, made in islice(asked, count):
        told = pairs_of(" ".join(texts(model.go_on(made.prompt_ids, temperature=temperature))))
        found["pairs right"].append(len(told & pairs))
        found["pairs wrong"].append(len(told - pairs))
    return {name: mean(values) for name, values in found.items()}


def advised(run: Path, bank: Bank) -> dict[str, dict[str, float]]:
    """Return the success of advised episodes, by the right and wrong pairs that they were shown."""
    truth, won = meanings(), dict[str, list[float]]()
    for summary in EpisodeLog(run / EPISODES_FILE).summaries():
        played = bank.trajectory(summary.id)
        if played is None or not played.uses or played.task not in truth:
            continue
        told, pairs = pairs_of(shown_text(bank, played.uses[0]) or ""), truth[played.task]
        kind = f"{len(told & pairs)} right, {len(told - pairs)} wrong"
        won.setdefault(kind, []).append(bool(played.success))
    often = sorted(won.items(), key=lambda item: -len(item[1]))[:8]
    return {kind: {"success": mean(some), "episodes": len(some)} for kind, some in often}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--system", help="system message of the actor in place of the shipped one")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampled lessons")
    parser.add_argument("--games", nargs="+", choices=GAMES, default=GAMES)
    parser.add_argument("--run", type=Path, help="of a run on FrozenLake in dialects")
    options = parser.parse_args()
    model = Model(options.folder)
    play = {"vault": vault, "lake": lake}
    report = {game: play[game](model, options.samples, options.system) for game in options.games}
    report["lessons"] = lessons(model, options.samples // 2, options.games, options.temperature)
    if options.run is not None:
        with ExperienceBank(options.run / "bank", read_only=True) as bank:
            written = distilled(model, bank, options.samples, options.temperature)
            report["plays"] = {"lessons": written, "advised": advised(options.run, bank)}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The corpus of the model that must earn its memory: half skilled whatever it is told, and apart
from everything that evaluation uses.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from pathlib import Path

from benchmarks.earned_rules import lake_lesson, vault_lesson
from experiential.agents.operations import CONSOLIDATION, DISTILLATION, parse_operations
from experiential.bank.bank import ExperienceBank
from experiential.envs.names import world_names
from experiential.llm.models import load_tokenizer
from experiential.types import Trajectory, Turn, Use
from tools.earned_corpus import (
    HABIT,
    HALF,
    LAKE_STAGES,
    TAUGHT,
    VAGUE,
    BlindVaultTasks,
    DialectTasks,
    lake_sampler,
    live,
    ruled_out,
    sampler,
)
from tools.earned_probes import advised, meanings
from tools.tiny_corpus import Sample

SAMPLES = [make() for make in [sampler(3)] for _ in range(1500)]
LAKES = [make() for stage in LAKE_STAGES for make in [lake_sampler(3, stage)] for _ in range(150)]
TEXT = ["\n".join(m["content"] for m in sample) for sample in SAMPLES + LAKES]
SURE = dict.fromkeys(TAUGHT, 1.0)


def texts(answer: str) -> list[str]:
    parsed = parse_operations(answer, kinds=(*DISTILLATION, *CONSOLIDATION))
    return [getattr(one, "text", "") for one in parsed.operations]


def record(question: Sample) -> Trajectory:
    """Read back the episode that a question of the corpus shows."""
    lines = question[1]["content"].split("Play:\n")[1].split("\nOutcome: ")
    before, *steps = re.split(r"(?:^|\n)> ", lines[0])
    turns: list[Turn] = []
    for step in steps:
        action, _, after = step.partition("\n")
        turns.append(Turn(observation=before, action=action, feedback=after))
        before = after
    task = question[1]["content"].splitlines()[0].removeprefix("Task: ")
    return Trajectory(task=task, turns=tuple(turns), success=lines[1] == "success")


def shown(question: Sample) -> str:
    found = re.search(r"Used:\n1\. (.*)\n", question[1]["content"])
    return found[1] if found else ""


def test_equal_seeds_give_equal_text() -> None:
    for make in (sampler, lake_sampler):
        first, second = make(3), make(3)
        assert [first() for _ in range(20)] == [second() for _ in range(20)]


def test_no_world_of_training_development_or_evaluation_is_named() -> None:
    names = {name for split in ("train", "dev", "eval") for name in world_names(split)}  # type: ignore[arg-type]
    found = {m for text in TEXT for m in re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", text)}
    assert not found & names
    assert len(found & set(world_names("corpus"))) > 150


def test_every_answer_is_the_assistants_and_encodes_with_the_shipped_tokenizer() -> None:
    tokenizer = load_tokenizer("tiny")
    for sample in SAMPLES[:200]:
        assert sample[-1]["role"] == "assistant"
        text = sample[-1]["content"]
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_pulls_avoid_the_levers_listed_in_the_stated_share_alone() -> None:
    """The pull is drawn among all levers in the other samples, so that it then avoids by chance."""
    for skill, share in ((SURE, 1.0), (HALF, HALF["avoid"])):
        tasks = BlindVaultTasks(random.Random(1), skill)
        avoided = expected = 0.0
        for _ in range(1500):
            system, first, pull, *_ = [message["content"] for message in tasks.act()]
            if (listed := re.search(r": not (.*)\.\n", system)) is None:
                continue
            dead = listed[1].split()
            assert set(dead) < set(re.findall(r"\w+", first.split("Levers: ")[1]))
            avoided += pull[5:] not in dead
            expected += share + (1 - share) * (1 - len(dead) / 14)
        assert abs(avoided - expected) < 80


def test_a_sure_lesson_is_what_the_rules_of_the_games_say() -> None:
    vaults, lakes = (make(random.Random(2), SURE) for make in (BlindVaultTasks, DialectTasks))
    kinds: defaultdict[str, int] = defaultdict(int)
    for _ in range(300):
        *question, answer = vaults.distill()
        known = shown(question)
        assert texts(answer["content"]) == [vault_lesson(record(question), known)]
        kinds[f"{': not' in known} {': not' in answer['content']}"] += 1
        *question, answer = lakes.distill()
        wanted = lake_lesson(record(question), shown(question))
        if wanted:  # of an episode without a move that went anywhere no lesson can be right
            assert texts(answer["content"]) == [wanted]
            kinds["lake"] += 1
    assert min(kinds.values()) > 20
    assert set(kinds) == {"True True", "True False", "False True", "False False", "lake"}


def test_lessons_are_right_in_about_the_stated_share() -> None:
    tasks, right = BlindVaultTasks(random.Random(4), HALF), 0
    for _ in range(600):
        *question, answer = tasks.distill()
        right += texts(answer["content"]) == [vault_lesson(record(question), shown(question))]
    # a list of this visit alone, or a claim after a success, is right by chance
    assert HALF["lesson"] - 0.05 < right / 600 < HALF["lesson"] + 0.15


def test_a_habit_hides_lessons_that_are_right_in_the_stated_share() -> None:
    tasks, told, wanted = DialectTasks(random.Random(8), HABIT), 0, 0
    for _ in range(600):
        *question, answer = tasks.distill()
        episode, known = record(question), shown(question)
        (text,) = texts(answer["content"]) or [""]
        assert ('"update"' in answer["content"]) == bool(known and text)
        if not lake_lesson(episode, known):
            continue
        wanted += 1
        if text not in VAGUE:
            assert text == lake_lesson(episode, known)
            told += 1
    assert abs(told / wanted - (1 - HABIT["vague"])) < 0.05


def test_no_system_message_has_skilled_answers_in_more_than_about_half_of_its_samples() -> None:
    """The helping questions of the corpus, too, whose right answers can be told from the text."""
    made = DialectTasks(random.Random(5), HALF)
    named = right = 0
    for _ in range(400):
        system, *turns = [message["content"] for message in made.words()]
        words = dict(re.findall(r"([NSWE])(Up|Down|Left|Right)", system))
        named += sum(
            words[asked] == said for asked, said in zip(turns[::2], turns[1::2], strict=True)
        )
    assert abs(named / 1600 - (HALF["walk"] + (1 - HALF["walk"]) / 4)) < 0.05
    left = BlindVaultTasks(random.Random(6), HALF)
    for _ in range(400):
        question, answer = (message["content"] for message in left.left()[1:])
        listed, levers = re.findall(r"(?:not|Levers:) (.*)\.", question)
        wanted = [lever for lever in levers.split() if lever not in listed.split()]
        right += answer.rstrip(".").split() == wanted
    assert abs(right / 400 - HALF["avoid"]) < 0.1


def test_lists_are_joined_without_repeats_and_a_lever_found_wins() -> None:
    tasks, joined = BlindVaultTasks(random.Random(7), SURE), 0
    for _ in range(200):
        *question, answer = tasks.merge()
        notes = re.findall(r"\d\. (.*)", question[1]["content"])
        (text,) = texts(answer["content"])
        found = [note for note in notes if note.startswith("Pull")]
        if found:
            assert text == found[0]
            continue
        lists = [re.findall(r"\w+", note.split(": not ")[1]) for note in notes]
        world = notes[0].split(":")[0]
        assert text == ruled_out(world, list(dict.fromkeys(lists[0] + lists[1])))
        assert text != live(world, lists[0][0])
        joined += 1
    assert joined > 100


def test_advised_episodes_are_counted_by_right_and_wrong_pairs_of_what_they_were_shown(
    tmp_path: Path,
) -> None:
    task, pairs = next(iter(meanings().items()))
    right = sorted(pairs)[:2]
    swapped = [right[0][0] + right[1][1:], right[1][0] + right[0][1:]]  # each other's direction
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        rows = list[dict[str, object]]()
        for told, won in ((right, True), (right, False), (swapped, False), (None, True)):
            entry = bank.add(f"A dialect:{','.join(told)}.", task=task) if told else None
            used = [Use(experience_id=entry.id, experience_version=1)] if entry else []
            played = Trajectory(task=task, success=won, uses=tuple(used))
            bank.record(played)
            rows.append({
                "id": played.id, "task": task, "success": won, "condition": "guided", "turns": 0,
                "error": None, "transcript": [],
            })  # fmt: skip
        line = {"event": "episodes", "step": 1, "rows": rows}
        (tmp_path / "episodes.jsonl").write_text(json.dumps(line) + "\n")
        assert advised(tmp_path, bank) == {
            "2 right, 0 wrong": {"success": 0.5, "episodes": 2},
            "0 right, 2 wrong": {"success": 0.0, "episodes": 1},
        }

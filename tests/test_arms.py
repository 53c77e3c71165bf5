"""What each arm of an evaluation shows, on a real bank: nothing, the bank, other tasks' experience,
or text that says nothing.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.agents.prompts import experience_block, principle_text
from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.manager import ExperienceManager
from experiential.config import Arm, EnvSettings, Experiment
from experiential.evaluation.arms import (
    PLACEBO,
    WORDS,
    Placebo,
    Shuffled,
    filler,
    opened_arm,
    token_count,
    worlds,
)
from experiential.evaluation.card import arm_report
from experiential.evaluation.cell import Cell
from experiential.evaluation.players import Player
from experiential.evaluation.visits import Meters, VisitEvaluator
from experiential.llm.metered import Meter, Metered, Spent
from experiential.llm.rounds import Rounds
from experiential.llm.scripted import ScriptedLLM
from experiential.recipe import dump_experiment, load_experiment
from experiential.types import Add, Distillation, ParsedOperations, Trajectory, Update
from experiential.wrappers.experience import ExperienceWrapper
from tests.llm_tiny import tiny_tokenizer

OPTIONS: dict[str, Any] = {"seed": 7, "retrieval": {"floor": 0.0}}
ARMS: tuple[Arm, ...] = ("off", "on", "frozen", "shuffled", "placebo")


def write(bank: FolderBank, world: str, visit: int, text: str) -> str:
    """An entry distilled from one visit to a world; gives its id."""
    trajectory = Trajectory(
        task=f"Open the vault of {world}.", task_id=world, instance=f"{world}#{visit}"
    )
    bank.record(trajectory)
    return bank.apply(
        Distillation(parsed=ParsedOperations(operations=(Add(text=text),))),
        trajectory=trajectory,
        shown=[],
    )[0].id


@pytest.fixture
def bank(tmp_path: Path) -> Any:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as made:
        for world in ("Iron Mill", "Calm River", "Late Otter"):
            for visit in range(3):
                write(made, world, visit, f"Pull lever {visit} in {world}.")
        made.add("Levers are pulled once.")  # of no task at all
        yield made


def digest(folder: Path) -> dict[str, str]:
    """Digests of all files but the one in which SQLite keeps who is reading at the moment."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    ]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


class TestShuffled:
    """Experience of other tasks."""

    @pytest.mark.parametrize("world", ["Iron Mill", "Calm River", "Late Otter", "Never Seen"])
    def test_never_of_the_task_that_is_played_and_as_many_as_were_found(
        self, bank: FolderBank, world: str
    ) -> None:
        with ExperienceManager(bank, **OPTIONS) as manager:
            shuffled = Shuffled(manager, 7)
            for visit in range(10):
                task, instance = f"Open the vault of {world}.", f"{world}#{visit}"
                hits = shuffled.search(task, k=2, exclude_instance=instance)
                assert len(hits) == 2 and hits[0].experience.id != hits[1].experience.id
                for hit in hits:
                    found = worlds(bank, hit.experience)
                    assert found and world not in found and hit.experience.task != task

    def test_the_same_seed_shows_the_same_and_another_seed_something_else(
        self, bank: FolderBank
    ) -> None:
        def shown(seed: int) -> list[str]:
            with ExperienceManager(bank, **OPTIONS) as manager:
                shuffled = Shuffled(manager, seed)
                found = [
                    shuffled.search(
                        "Open the vault of Iron Mill.", k=1, exclude_instance=f"Iron Mill#{v}"
                    )
                    for v in range(8)
                ]
                return [hits[0].experience.text for hits in found]

        assert shown(1) == shown(1) != shown(2)

    def test_nothing_is_shown_where_the_bank_has_nothing_to_say(self, bank: FolderBank) -> None:
        with ExperienceManager(bank, seed=7, retrieval={"floor": 0.99}) as manager:
            assert Shuffled(manager, 7).search("Bake a cake.", exclude_instance="cake#1") == []

    def test_an_entry_that_was_rewritten_from_this_task_belongs_to_it_too(
        self, bank: FolderBank
    ) -> None:
        entry = next(e for e in bank.entries() if e.task == "Open the vault of Calm River.")
        here = Trajectory(
            task="Open the vault of Iron Mill.", task_id="Iron Mill", instance="Iron Mill#9"
        )
        bank.record(here)
        update = Distillation(
            parsed=ParsedOperations(
                operations=(Update(entry=1, text="Pull the jade lever of Iron Mill."),)
            )
        )
        changed = bank.apply(update, trajectory=here, shown=[entry])[0]
        assert changed.id == entry.id and worlds(bank, changed) == {"Calm River", "Iron Mill"}
        with ExperienceManager(bank, **OPTIONS) as manager:
            hits = [
                Shuffled(manager, s).search("x", k=3, exclude_instance="Iron Mill#1")
                for s in range(20)
            ]
        assert entry.id not in {hit.experience.id for row in hits for hit in row}

    def test_without_instances_the_text_of_the_task_decides(self, tmp_path: Path) -> None:
        with (
            ExperienceBank(tmp_path / "plain", embedder="hashing") as plain,
            ExperienceManager(plain, **OPTIONS) as manager,
        ):
            plain.add("one", task="bake")
            other = plain.add("two", task="sew")
            assert [hit.experience.id for hit in Shuffled(manager, 0).search("bake", k=2)] == [
                other.id
            ]

    def test_the_use_recorded_is_that_of_the_entry_shown(self, bank: FolderBank) -> None:
        import gymnasium as gym

        with ExperienceManager(bank, **OPTIONS) as manager:
            vault: Any = gym.make("experiential/Vault-v0", disable_env_checker=True)
            env = ExperienceWrapper(vault, Shuffled(manager, 0))
            _, info = env.reset(seed=3)
            shown = info["experience"][0]["id"]
            env.step(vault.unwrapped.oracle_action())
            assert env.last_trajectory is not None
            assert [use.experience_id for use in env.last_trajectory.uses] == [shown]
            kept = bank.get(shown)
            assert kept is not None and kept.statistics.uses == 1
            assert sum(entry.statistics.uses for entry in bank.entries()) == 1
            env.close()

    def test_ask_refines_an_entry_of_another_task(self, bank: FolderBank) -> None:
        extractor = ExtractorAgent(ScriptedLLM(lambda messages: messages[-1]["content"]))
        with ExperienceManager(bank, extractor, **OPTIONS) as manager:
            answer = Shuffled(manager, 0).ask(
                "Which lever?", exclude_instance="Iron Mill#0", episode="e", turn=2
            )
        assert (
            answer.hit is not None
            and answer.use is not None
            and answer.generation is not None
            and answer.text is not None
        )
        assert "Iron Mill" not in worlds(bank, answer.hit.experience)
        assert answer.hit.experience.text in answer.text
        assert (answer.use.experience_id, answer.use.how, answer.use.turn) == (
            answer.hit.experience.id,
            "search_and_ask",
            2,
        )


class TestPlacebo:
    """As many tokens, and nothing in them."""

    @pytest.mark.parametrize(
        "text",
        [
            "Pull the jade lever.",
            "Go!",
            "First the door,\nthen the <key>; never 17 times.",
            "x" * 40,
        ],
    )
    def test_as_many_tokens_as_the_actor_would_have_read(self, text: str) -> None:
        tokenizer = tiny_tokenizer()
        count = token_count(tokenizer)
        made = filler(count(text), count, "s")
        lengths = [
            len(tokenizer.encode(experience_block([one]), add_special_tokens=False))
            for one in (text, made)
        ]
        assert lengths[0] == lengths[1]
        assert {word.strip(".") for word in made.split()} <= {*WORDS, ""}

    def test_words_where_there_are_no_tokens(self) -> None:
        for length in (1, 2, 17, 300):
            assert len(filler(length, token_count(None)).split()) == length

    def test_a_principle_is_replaced_with_its_triples_by_as_many_tokens(
        self, tmp_path: Path
    ) -> None:
        tokenizer = tiny_tokenizer()
        with (
            ExperienceBank(tmp_path / "p", embedder="hashing") as kept,
            ExperienceManager(kept, **OPTIONS) as manager,
        ):
            kept.add(
                "Look under the mat.",
                kind="guiding",
                task="find the key",
                metadata={"triples": [["mat", "hides", "key"]]},
            )
            (real,) = manager.search("find the key")
            (hit,) = Placebo(manager, 0, tokenizer, principle_text).search("find the key")
        shown = [principle_text(one.experience) for one in (real, hit)]
        assert (
            shown[1].startswith("Guiding principle, score 0.50: ")
            and "mat" not in shown[1]
            and "(" not in shown[1]
        )
        assert (
            len(
                {
                    len(tokenizer.encode(experience_block([text]), add_special_tokens=False))
                    for text in shown
                }
            )
            == 1
        )

    def test_hits_and_answers_say_nothing_and_no_use_is_recorded(self, bank: FolderBank) -> None:
        extractor = ExtractorAgent(ScriptedLLM(["Pull the second lever."]))
        with ExperienceManager(bank, extractor, **OPTIONS) as manager:
            placebo = Placebo(manager, 7, tiny_tokenizer())
            task = "Open the vault of Iron Mill."
            real = manager.search(task, exclude_instance="Iron Mill#9")
            hits = placebo.search(task, exclude_instance="Iron Mill#9")
            again = placebo.search(task, exclude_instance="Iron Mill#9")
            answer = placebo.ask("Which lever?", exclude_instance="Iron Mill#9")
            assert len(hits) == len(real) == 1 and hits[0].experience.id == PLACEBO
            assert hits[0].experience.text == again[0].experience.text
            said = f"{hits[0].experience.text} {answer.text}".lower()
            assert (
                "lever" not in said
                and "mill" not in said
                and answer.hit is None
                and answer.use is None
            )
            played = Trajectory(
                task=task,
                instance="Iron Mill#9",
                success=True,
                uses=(hits[0].use("episode_start"),),
            )
            manager.extractor = None
            placebo.submit(played)
            stored = bank.trajectory(played.id)
            assert stored is not None and stored.uses == ()


class TestOpened:
    """Which bank stands behind an arm."""

    @pytest.mark.parametrize("arm", ARMS)
    def test_the_training_bank_does_not_change_by_one_byte(
        self, bank: FolderBank, tmp_path: Path, arm: Arm
    ) -> None:
        bank.save_counters()
        bank.flush_index()
        before = digest(tmp_path / "bank")
        with opened_arm(arm, bank, tmp_path / arm, None, OPTIONS) as opened:
            assert opened.entries == (0 if arm == "off" else 10)
            found = opened.shown.search(
                "Open the vault of Iron Mill.", exclude_instance="Iron Mill#9"
            )
            assert bool(found) == (arm != "off")
            opened.shown.submit(Trajectory(task="Open the vault of Iron Mill."))
        assert digest(tmp_path / "bank") == before

    def test_a_frozen_bank_is_written_by_nothing(self, bank: FolderBank, tmp_path: Path) -> None:
        extractor = ExtractorAgent(
            ScriptedLLM(['<answer>[{"op": "add", "text": "More."}]</answer>'])
        )
        with opened_arm("frozen", bank, tmp_path / "frozen", extractor, OPTIONS) as opened:
            assert opened.manager is not None and opened.manager.bank.read_only
            before = digest(tmp_path / "frozen")
            opened.shown.search("Open the vault of Iron Mill.")
            assert opened.shown.submit(Trajectory(task="t", success=True)) is None
            assert opened.shown.ask("Which lever?").text
            opened.manager.drain()
            assert len(opened.manager.bank) == 10
        assert digest(tmp_path / "frozen") == before

    def test_what_is_submitted_is_distilled_after_the_visit_and_not_before(
        self, bank: FolderBank, tmp_path: Path
    ) -> None:
        import asyncio

        extractor = ExtractorAgent(
            ScriptedLLM(['<answer>[{"op": "add", "text": "More."}]</answer>'])
        )
        with opened_arm("on", bank, tmp_path / "on", extractor, OPTIONS) as opened:
            assert opened.manager is not None

            async def visit() -> None:
                async with opened.visit():
                    opened.shown.submit(Trajectory(task="t", success=True))
                    # a round trip through the manager, in which a distillation could have started
                    opened.shown.search("t")
                    assert opened.manager is not None and len(opened.manager.bank) == 10

            asyncio.run(visit())
            assert len(opened.manager.bank) == 11

    def test_an_arm_with_a_bank_needs_one(self, tmp_path: Path) -> None:
        with (
            pytest.raises(ValueError, match="only 'off' and baselines"),
            opened_arm("on", None, tmp_path, None, OPTIONS),
        ):
            pass


class TestEvaluator:
    """All five arms on the same worlds and seeds."""

    def evaluator(self, actor: Any, meters: Meters) -> VisitEvaluator:
        settings = Experiment(
            env=EnvSettings(eval={"split": "eval", "worlds": 4}),
            eval={"worlds": 4, "visits": 2, "seed": 5},
        ).model_copy(
            update={"bank": load_experiment("complementary", ["bank.retrieval.floor=0"]).bank}
        )
        lesson = ScriptedLLM(['<answer>[{"op": "add", "text": "Pull the jade lever."}]</answer>'])
        return VisitEvaluator(
            settings,
            lambda: ActorAgent(Metered(actor, meters.actor), constrain=False),
            ExtractorAgent(Metered(lesson, meters.extractor)),
            meters=meters,
        )

    async def test_arms_are_paired_and_show_what_their_names_say(
        self, bank: FolderBank, tmp_path: Path
    ) -> None:
        seen: dict[str, list[str]] = {}
        arm: Arm = "off"

        def act(messages: Any) -> str:
            text = "\n".join(message["content"] for message in messages)
            seen.setdefault(arm, []).append(text)
            return "<action>pull jade</action>"

        meters = Meters()
        evaluator = self.evaluator(ScriptedLLM(act), meters)
        before = digest(tmp_path / "bank")
        found: dict[str, Any] = {}
        for arm in ARMS:
            found[arm] = await evaluator.play(arm, 3, bank, tmp_path / f"scratch-{arm}")
        assert digest(tmp_path / "bank") == before

        def block(text: str) -> str:
            return text.partition("<experience>\n1. ")[2].partition("</experience>")[0]

        def without_block(text: str) -> str:
            return (
                text.replace(f"<experience>\n1. {block(text)}</experience>\n", "")
                if block(text)
                else text
            )

        assert not any(map(block, seen["off"]))
        assert all(block(text) for name in ARMS[1:] for text in seen[name])
        assert all(
            "ever" in block(text) for name in ("on", "frozen", "shuffled") for text in seen[name]
        )
        assert not any("ever" in block(text) for text in seen["placebo"])
        assert (
            len(
                {
                    tuple(sorted(map(without_block, seen[name])))
                    for name in ("on", "frozen", "shuffled", "placebo")
                }
            )
            == 1
        ), "same worlds and seeds"
        assert {arm: found[arm].outcomes for arm in ARMS} == {
            arm: found["off"].outcomes for arm in ARMS
        }, "the actor ignores advice"
        assert found["on"].entries == 10 and found["off"].entries == 0
        for name in ARMS:
            cost = found[name].cost
            assert cost.actor.requests == len(seen[name]) and cost.seconds > 0
            assert cost.extractor.requests == (8 if name in ("on", "shuffled", "placebo") else 0)
        assert found["frozen"].event()["cost"]["actor"]["requests"] == len(seen["frozen"])


class TestBaselines:
    """Arms that any actor can play, without a trained bank."""

    drain = False
    recorded: list[dict[str, Any]]

    @pytest.fixture(autouse=True)
    def nothing_recorded(self) -> None:
        self.recorded = []

    def evaluator(self, make_actor: Any, **options: Any) -> VisitEvaluator:
        settings = load_experiment(
            "grpo",
            [
                "env.eval={split: eval, worlds: 3}",
                "eval.worlds=3",
                "eval.visits=3",
                f"env.kwargs={options}",
                f"run.drain={str(self.drain).lower()}",
            ],
        )
        return VisitEvaluator(settings, make_actor, None, record=self.recorded.append)

    @pytest.mark.parametrize(
        ("arm", "shown", "opening"),
        [
            ("history-1", [0, 1, 1], "Task: Open"),
            ("history-3", [0, 1, 2], "Task: Open"),
            ("template", [0, 1, 1], "Open"),
        ],
    )
    async def test_a_function_writes_down_the_last_visits_to_the_same_world(
        self, tmp_path: Path, arm: Arm, shown: list[int], opening: str
    ) -> None:
        seen: list[tuple[str, list[str]]] = []  # name of the vault, entries

        def act(messages: Any) -> str:
            system, first = messages[0]["content"], messages[1]["content"]
            name = first.partition("vault of ")[2].partition(".")[0]
            block = system.partition("<experience>")[2].partition("</experience>")[0]
            if len(messages) == 2:
                seen.append((name, re.split(r"^[0-9]\. ", block, flags=re.MULTILINE)[1:]))
            return "<action>pull nothing</action>"

        llm = ScriptedLLM(act)
        evaluator = self.evaluator(lambda: ActorAgent(llm, prompts="brief"))
        played = await evaluator.play(arm, 0, None, tmp_path / "arm")
        assert [len(entries) for _, entries in seen] == [n for n in shown for _ in range(3)]
        for name, entries in seen:
            assert all(entry.startswith(f"{opening} the vault of {name}.") for entry in entries)
            assert all("pull nothing" in entry and "was live" in entry for entry in entries)
        assert played.entries == 0 and played.errors == 0

    async def test_a_function_writes_in_the_order_of_the_queue_in_a_repeatable_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = {"seed": 0, "merge_every": 0, "queue_size": 9}
        options["rounds"] = Rounds(ScriptedLLM(["unasked"]))
        with opened_arm("history-1", None, tmp_path / "arm", None, options) as opened:
            assert opened.manager is not None
            bank = opened.manager.bank
            read = bank.trajectory

            def slowly(id: str) -> Trajectory | None:
                time.sleep(0.2 if id == "t0" else 0.0)
                return read(id)

            monkeypatch.setattr(bank, "trajectory", slowly)
            async with opened.visit():
                for i in range(3):
                    opened.manager.submit(Trajectory(id=f"t{i}", task=f"door {i}"))
            written = sorted(bank.entries(), key=lambda one: one.provenance.commit or 0)
            assert [one.task for one in written] == ["door 0", "door 1", "door 2"]

    @pytest.mark.parametrize("drain", [False, True])
    async def test_random_play_is_drawn_by_the_seeds_and_asks_no_actor(self, drain: bool) -> None:
        def make_actor() -> ActorAgent:
            raise AssertionError("an actor was made")

        self.drain = drain
        first = await self.evaluator(make_actor).play("random", 0)
        again = await self.evaluator(make_actor).play("random", 0)
        assert first.outcomes == again.outcomes
        assert first.errors == 0
        assert first.event()["chance"] == pytest.approx(2 / 14)
        rows = self.recorded[0]["rows"]
        assert len(rows) == 9 and all(len(row["transcript"]) == row["turns"] > 0 for row in rows)

    async def test_best_of_n_counts_a_task_as_solved_by_any_of_its_attempts(self) -> None:
        attempt: Counter[str] = Counter()
        lock = threading.Lock()

        def act(observation: str, info: Any) -> str:
            with lock:  # the attempts of a task see the same, and play at once
                attempt[observation] += 1
                return info["admissible"][attempt[observation] - 1]

        make_actor: Any = lambda: Player(act)  # noqa: E731
        played = await self.evaluator(make_actor, levers=2, tries=1).play("best-of-2", 0)
        assert played.outcomes == ((True,) * 3,) * 3
        assert set(attempt.values()) == {2} and len(attempt) == 9
        texts = ("run", "recipe", "environment", "checkpoint", "settings", "family", "version")
        facts: dict[str, Any] = {**dict.fromkeys(texts, ""), "seed": 0, "step": 0}
        cells = [Cell(**facts, arm="best-of-2", outcomes=("01", "00"))]
        assert arm_report("best-of-2", cells).episodes == 8


class TestMeter:
    """Counting what is generated."""

    async def test_requests_tokens_and_the_time_in_which_any_was_open(self) -> None:
        meter = Meter()
        llm = Metered(ScriptedLLM(["a", "b"]), meter)
        assert meter.spent() == Spent()
        await llm.generate([{"role": "user", "content": "?"}])
        once = meter.spent()
        await llm.generate([{"role": "user", "content": "?"}])
        twice = meter.spent()
        assert (once.requests, twice.requests, (twice - once).requests) == (1, 2, 1)
        assert twice.seconds > once.seconds > 0 and meter.spent() == twice
        assert once + (twice - once) == twice.model_copy(
            update={"seconds": pytest.approx(twice.seconds)}
        )

    def test_seconds_of_requests_at_one_time_count_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = iter([10.0, 14.0, 20.0, 21.5])
        monkeypatch.setattr("experiential.llm.metered.time.perf_counter", lambda: next(now))
        meter = Meter()
        meter.begin()  # at 10
        meter.begin()
        meter.end(None)
        meter.end(None)  # at 14: four seconds, not eight
        meter.begin()  # at 20
        assert meter.spent().seconds == pytest.approx(5.5)


def test_arms_named_on_and_off_survive_yaml() -> None:
    experiment = load_experiment("complementary", ["eval.arms=[off, on, placebo]"])
    assert experiment.eval.arms == ("off", "on", "placebo")
    for one in ("on", "off", "placebo"):
        assert load_experiment("complementary", [f"eval.arms={one}"]).eval.arms == (one,)
    assert "'off'" in dump_experiment(experiment)

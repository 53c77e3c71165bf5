"""The bank's one writer as a Ray actor: what it acknowledged outlives it, and its clients go on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.protocol import Bank
from experiential.bank.text import TEXT_LIMIT
from experiential.config import BankSettings, ClusterSettings
from experiential.errors import BankError, BankLockedError
from experiential.training.metrics import read_events
from experiential.training.openrlhf.bank_actor import ActorBank, BankActor
from experiential.training.trainer import Trainer
from experiential.types import Trajectory, Turn

pytest.importorskip("ray", reason="Ray is not installed; `make test-cluster` runs these tests")
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

SETTINGS = BankSettings(embedder="hashing")


def cluster(**values: Any) -> ClusterSettings:
    return ClusterSettings(**{"start_timeout": 120.0, "call_timeout": 120.0} | values)


@pytest.fixture
def actor(ray_cluster: Any, tmp_path: Path) -> Iterator[BankActor]:
    with BankActor(tmp_path / "bank", SETTINGS, cluster()) as made:
        yield made


@pytest.fixture
def bank(actor: BankActor) -> Iterator[ActorBank]:
    with actor.bank() as client:
        assert isinstance(client, ActorBank)
        yield client


def texts(bank: Bank) -> list[str]:
    return [entry.text for entry in bank.entries()]


def trajectory(id: str) -> Trajectory:
    return Trajectory(
        id=id,
        task="leave the house",
        turns=(Turn(observation="A door.", action="pull"),),
        reward=1.0,
        success=True,
    )


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.05)


def kill(ray: Any, actor: BankActor) -> None:
    """Kill the actor, and wait until that is noticed."""
    known = len(actor.supervisor.failures)
    ray.kill(actor.supervisor.current.handle)
    wait_until(lambda: len(actor.supervisor.failures) > known)


def test_what_was_acknowledged_is_there_after_a_kill_and_the_client_goes_on(
    ray_cluster: Any, actor: BankActor, bank: ActorBank
) -> None:
    written = [bank.add(f"Door {i} needs key {i}.").id for i in range(20)]
    url = actor.url
    kill(ray_cluster, actor)
    assert [entry.id for entry in bank.entries()] == written
    assert bank.search("which key opens door 7?", k=20)[0].experience.id in written
    later = bank.add("The cellar is flooded.")
    assert bank.get(later.id) == later
    assert (actor.url, len(bank)) == (url, 21)
    assert [
        failure.startswith("bank actor on ") and "died: " in failure
        for failure in actor.supervisor.failures
    ] == [True]


def test_writers_at_work_lose_and_repeat_nothing_when_the_actor_is_killed(
    ray_cluster: Any, actor: BankActor, bank: ActorBank
) -> None:
    acknowledged: list[str] = []
    under_way = threading.Event()

    def write(writer: int) -> None:
        for i in range(40):
            text = f"Writer {writer} saw thing {i}."
            bank.add(text)
            acknowledged.append(text)
            if len(acknowledged) >= 20:
                under_way.set()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    assert under_way.wait(120)
    kill(ray_cluster, actor)
    for thread in threads:
        thread.join(240)
    assert len(acknowledged) == 160
    assert sorted(texts(bank)) == sorted(acknowledged)


def test_a_fork_is_a_bank_with_the_same_entries_and_the_queue_where_asked(
    bank: ActorBank, tmp_path: Path
) -> None:
    entries = bank.add_many(["The red door needs the brass key.", "The cellar is flooded."])
    bank.submit(trajectory("t1"))
    with (
        bank.fork(tmp_path / "with", keep_queue=True) as copy,
        bank.fork(tmp_path / "without") as bare,
    ):
        assert list(copy.entries()) == list(bare.entries()) == list(bank.entries()) == list(entries)
        assert (copy.head, copy.embedder.id) == (bank.head, bank.embedder.id)
        assert (copy.queue.waiting(), bare.queue.waiting()) == (["t1"], [])
        copy.add("Only here.")
    assert "Only here." not in texts(bank)
    with pytest.raises(BankError, match="without a bank, got"):
        bank.fork(tmp_path / "with")


def test_a_fork_after_a_restart_has_everything(
    ray_cluster: Any, actor: BankActor, bank: ActorBank, tmp_path: Path
) -> None:
    bank.add("The red door needs the brass key.")
    kill(ray_cluster, actor)
    with bank.fork(tmp_path / "copy") as copy:
        assert texts(copy) == ["The red door needs the brass key."]


def test_a_fork_begins_again_when_the_actor_dies_in_it(
    actor: BankActor, bank: ActorBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill leaves half a copy."""
    bank.add("The red door needs the brass key.")
    ask, killed = actor.supervisor.ask, list[int]()

    async def dying(begun: Any, method: str, *arguments: Any) -> Any:
        if not killed:
            killed.append(begun.result[2])
            (tmp_path / "copy").mkdir()
            (tmp_path / "copy" / "half").touch()
            os.kill(killed[0], signal.SIGKILL)
        return await ask(begun, method, *arguments)

    monkeypatch.setattr(actor.supervisor, "ask", dying)
    with bank.fork(tmp_path / "copy") as copy:
        assert texts(copy) == ["The red door needs the brass key."]
    assert killed and not (tmp_path / "copy" / "half").exists()


def test_only_the_token_opens_it(actor: BankActor) -> None:
    with pytest.raises(BankError, match="token"):
        ExperienceBank(actor.url)


def test_closing_gives_the_folder_back_whole(ray_cluster: Any, tmp_path: Path) -> None:
    with BankActor(tmp_path, SETTINGS, cluster()) as actor:
        with actor.bank() as bank:
            bank.add("The red door needs the brass key.")
            bank.note_retrievals([next(bank.entries()).id])
        with pytest.raises(BankLockedError):
            ExperienceBank(tmp_path)
    with ExperienceBank(tmp_path) as folder:
        assert texts(folder) == ["The red door needs the brass key."]
        assert next(folder.entries()).statistics.retrievals == 1


def test_a_folder_that_somebody_writes_is_refused(ray_cluster: Any, tmp_path: Path) -> None:
    with (
        ExperienceBank(tmp_path, embedder="hashing"),
        pytest.raises(BankLockedError, match="Expected to be the only writer"),
    ):
        BankActor(tmp_path, SETTINGS, cluster())


def test_after_the_last_restart_the_reasons_are_told(ray_cluster: Any, tmp_path: Path) -> None:
    with BankActor(tmp_path, SETTINGS, cluster(restarts=0)) as actor:
        bank = actor.bank()
        kill(ray_cluster, actor)
        assert not actor.supervisor.alive
        with pytest.raises(BankError, match="got one that is not: bank actor on .* died: "):
            len(bank)
        bank.close()


def test_an_actor_that_answers_nothing_is_started_again(ray_cluster: Any, tmp_path: Path) -> None:
    with BankActor(tmp_path, SETTINGS, cluster(call_timeout=5.0)) as actor, actor.bank() as bank:
        bank.add("The red door needs the brass key.")
        os.kill(json.loads((tmp_path / "writer.lock").read_text())["pid"], signal.SIGSTOP)
        with pytest.raises(BankError, match="within 5.0 s, got none"):
            bank.add("The cellar is flooded.")
        wait_until(lambda: len(actor.supervisor.failures) > 0)
        bank.add("The attic is dark.")
        assert {"The red door needs the brass key.", "The attic is dark."} <= set(texts(bank))
        assert (
            len(actor.supervisor.failures) == 1
            and "did not answer within 5 s" in actor.supervisor.failures[0]
        )


def test_the_length_of_texts_is_the_one_of_the_settings_after_a_restart_too(
    ray_cluster: Any, tmp_path: Path
) -> None:
    settings = BankSettings(embedder="hashing", options={"text_limit": 30})
    with BankActor(tmp_path, settings, cluster()) as actor, actor.bank() as bank:
        for _ in range(2):
            bank.add("Short enough.")
            with pytest.raises(ValueError, match="30"):
                bank.add("Much too long for a bank that takes thirty characters.")
            kill(ray_cluster, actor)
        with pytest.raises(BankError, match="limit of texts"):
            ExperienceManager(bank, text_limit=31)


def test_a_manager_works_on_it(bank: ActorBank) -> None:
    entry = bank.add("The red door needs the brass key.")
    with ExperienceManager(bank, text_limit=TEXT_LIMIT) as manager:
        assert [hit.experience.id for hit in manager.search("which key opens the red door?")] == [
            entry.id
        ]
        manager.submit(trajectory("t1"))
    assert bank.trajectory("t1") is not None


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for event in read_events(folder / "episodes.jsonl") for row in event["rows"]]


def run(folder: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
    from tests.test_trainer import experiment, policies  # they need torch

    runtimes = policies()
    fixed = ("run.drain=true", "run.checkpoint_every=2", "actor.search_and_ask=1")
    summary = Trainer(
        experiment("complementary", *fixed, *overrides), folder, resume=resume, runtimes=runtimes
    ).run()
    for policy in runtimes:
        policy.close()
    return summary


def test_a_run_with_env_workers_and_a_bank_actor_plays_the_same_tasks_and_fills_its_bank(
    ray_cluster: Any, tmp_path: Path
) -> None:
    here, there, cluster_settings = (
        tmp_path / "here",
        tmp_path / "there",
        ("cluster.env_workers=2", "cluster.remote_bank=true"),
    )
    run(here, "run.steps=3")
    assert run(there, "run.steps=3", "runtime=openrlhf", *cluster_settings)["steps"] == 3
    asked = ("group", "condition", "seed", "task_id", "instance", "error")
    assert [[row[key] for key in asked] for row in rows(there)] == [
        [row[key] for key in asked] for row in rows(here)
    ]
    untaught = [
        [
            {name: value for name, value in row.items() if name != "id"}  # drawn at random
            for row in rows(folder)
            if row["condition"] == "free" and row["group"].startswith("0.")
        ]
        for folder in (here, there)
    ]
    assert untaught[0] == untaught[1] != []
    assert {row["error"] for row in rows(there)} == {None}
    assert sum(row["uses"] for row in rows(there)) > 0
    with ExperienceBank(there / "bank", read_only=True) as bank:
        assert len(bank) > 0
        with ExperienceBank(
            there / "checkpoints" / "step-000003" / "bank", read_only=True
        ) as saved:
            assert list(saved.entries()) == list(bank.entries())
    assert (
        run(there, "run.steps=4", "runtime=openrlhf", *cluster_settings, resume=True)["steps"] == 4
    )
    assert len(rows(there)) == len(rows(here)) * 4 // 3

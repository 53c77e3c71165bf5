"""Banks and managers in child processes, pickled or forked: nothing is lost, nothing hangs."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gymnasium.vector import AsyncVectorEnv

import experiential as xp
from experiential.bank import processes
from experiential.bank.folder import FolderBank
from experiential.bank.http.client import RemoteBank
from experiential.bank.manager import ManagerHandle
from experiential.errors import BankError, ReadOnlyBankError
from tests.wrapper_worlds import CorridorEnv

CONTEXTS = ("fork", "spawn", "forkserver")
LESSON = "Walk on, the corridor is short."
TASK = "Cross the corridor."


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[FolderBank]:
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        assert isinstance(bank, FolderBank)
        yield bank


def wrapped(target: Any, **options: Any) -> xp.ExperienceWrapper:
    return xp.ExperienceWrapper(CorridorEnv(length=1), target, **options)


def played(envs: AsyncVectorEnv, episodes: int) -> set[str]:
    """The ids of at least so many finished episodes, none of which met an error."""
    ended: set[str] = set()
    envs.reset(seed=0)
    while len(ended) < episodes:
        *_, info = envs.step(["go"] * envs.num_envs)
        assert "experience_error" not in info, info["experience_error"]
        ended |= {id for id in info.get("trajectory_id", ()) if id}
    return ended


def recorded(bank: FolderBank) -> set[str]:
    return {entry.ref or "" for entry in bank.history() if entry.cause == "record"}


def run(context: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a child process, or the error that it raises there."""
    results: Any = multiprocessing.get_context(context).SimpleQueue()
    process = multiprocessing.get_context(context).Process(
        target=_child, args=(work, arguments, results)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    result = results.get()
    if isinstance(result, Exception):
        raise result
    return result


def _child(work: Callable[..., Any], arguments: Any, results: Any) -> None:
    try:
        results.put(work(*arguments))
    except Exception as error:  # noqa: BLE001  (raised in the test)
        results.put(error)


# Inside AsyncVectorEnv


@pytest.mark.parametrize(
    ("context", "kind"), [("fork", "bank"), ("fork", "manager"), ("spawn", "bank")]
)
def test_every_episode_of_a_vector_environment_is_recorded_and_hits_reach_it(
    context: str, kind: str, bank: FolderBank
) -> None:
    entry = bank.add(LESSON, task=TASK)
    with xp.ExperienceManager(bank) as manager:
        target = manager if kind == "manager" else bank
        envs = AsyncVectorEnv([partial(wrapped, target)] * 2, shared_memory=False, context=context)
        shown, info = envs.reset(seed=0)
        assert all(LESSON in text for text in shown)
        assert all(hits[0]["id"] == entry.id for hits in info["experience"])
        ended = played(envs, 40)
        envs.close()
    assert ended == recorded(bank) and len(ended) == 40
    counted = bank.read(entry).statistics
    guided = [one for id in ended if (one := bank.trajectory(id)) is not None and one.uses]
    assert counted.uses == counted.successes == len(guided) > 20  # the others played free
    assert counted.retrievals >= len(guided)


@pytest.mark.parametrize(
    "context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)], ids=str
)
def test_eight_workers_record_a_thousand_episodes(context: str, bank: FolderBank) -> None:
    envs = AsyncVectorEnv([partial(wrapped, bank)] * 8, shared_memory=False, context=context)
    ended = played(envs, 1000)
    envs.close()
    assert len(ended) == 1000 and ended == recorded(bank)


@pytest.mark.parametrize(("context", "kind"), [("fork", "bank"), ("spawn", "manager")])
def test_the_parent_distils_what_its_children_play(
    context: str, kind: str, bank: FolderBank
) -> None:
    extractor = xp.ExtractorAgent(xp.ScriptedLLM(['<answer>[{"op": "return"}]</answer>']))
    with xp.ExperienceManager(bank, extractor) as manager:
        target = manager if kind == "manager" else bank
        envs = AsyncVectorEnv([partial(wrapped, target)] * 2, shared_memory=False, context=context)
        ended = played(envs, 10)
        envs.close()
        manager.drain(30)
        assert manager.stats()["distilled"] == len(ended)
    assert {bank.queue.state(id) for id in ended} == {"done"}


def test_wrappers_that_the_parent_made_work_in_a_fork(bank: FolderBank) -> None:
    bank.add(LESSON, task=TASK)
    with xp.ExperienceManager(bank) as manager:
        made = [wrapped(manager), wrapped(bank)]
        envs = AsyncVectorEnv(
            [lambda env=env: env for env in made], shared_memory=False, context="fork"
        )
        shown, _ = envs.reset()
        assert all(LESSON in text for text in shown)
        assert played(envs, 10) == recorded(bank)
        envs.close()


# Handles


def _describe(bank: Any) -> tuple[str, list[str], str]:
    return type(bank).__name__, [entry.text for entry in bank], bank.add("of the child").id


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_bank_is_a_handle_in_a_child_process(context: str, bank: FolderBank) -> None:
    bank.add("of the parent")
    kind, texts, id = run(context, _describe, bank)
    assert kind == RemoteBank.__name__ and texts == ["of the parent"]
    assert bank.get(id) is not None and type(bank) is FolderBank
    bank.add("and it still writes")


def _nested(bank: Any) -> Any:
    return run("fork", _describe, bank), run("spawn", _describe, bank)


def test_a_child_of_a_child_uses_the_same_bank(bank: FolderBank) -> None:
    for _, _, id in run("fork", _nested, bank):
        assert bank.get(id) is not None


def _ask(manager: Any) -> Any:
    async def asked() -> Any:
        return await manager.aask(TASK), await manager.asearch([TASK])

    with manager:
        answer, rows = asyncio.run(asked())
        return type(manager), answer.text, [hit.experience.id for hit in rows[0]], manager.stats()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_parents_extractor_answers_questions_of_a_child(context: str, bank: FolderBank) -> None:
    entry = bank.add(LESSON, task=TASK)
    extractor = xp.ExtractorAgent(xp.ScriptedLLM(["<answer>One step.</answer>"]))
    with xp.ExperienceManager(bank, extractor) as manager:
        expected = manager.ask(TASK).text
        kind, text, ids, stats = run(context, _ask, manager)
        assert (kind, text, ids) == (ManagerHandle, expected, [entry.id])
        assert stats["searches"] == manager.stats()["searches"] == 3
        assert not manager.closed  # closing a handle leaves it open


def test_a_read_only_bank_travels_too(bank: FolderBank) -> None:
    bank.add("of the parent")
    with xp.ExperienceBank(bank.path, read_only=True) as reader:
        bank.add("after it was opened")
        for context in ("fork", "spawn"):
            assert run(context, len, reader) == 1
            with pytest.raises(ReadOnlyBankError, match="open it without"):
                run(context, _describe, reader)


def _wrong(bank: Any, call: str, *arguments: Any) -> Any:
    return getattr(bank, call)(*arguments)


@pytest.mark.parametrize(
    "call",
    [
        ("add", " "),
        ("update", "nobody", "x"),
        (
            "search",
            "x",
        ),
    ],
)
def test_errors_are_those_of_the_parent(call: tuple[Any, ...], bank: FolderBank) -> None:
    expected: Any = None
    try:
        _wrong(bank, *call)
    except Exception as error:  # noqa: BLE001
        expected = error
    if expected is None:
        assert run("fork", _wrong, bank, *call) == []
    else:
        with pytest.raises(type(expected)) as found:
            run("fork", _wrong, bank, *call)
        assert str(found.value) == str(expected)


def test_a_copy_in_the_same_process_is_the_bank_itself(bank: FolderBank) -> None:
    assert pickle.loads(pickle.dumps(bank)) is bank
    assert copy.deepcopy({"bank": bank})["bank"] is bank
    with xp.ExperienceManager(bank) as manager:
        assert copy.copy(manager) is manager
    for closed in (manager, bank):
        closed.close()
        with pytest.raises(BankError, match="got a closed one"):
            pickle.dumps(closed)


def _embedded(embedder: Any, folder: Path) -> str:
    with xp.ExperienceBank(folder, embedder=embedder) as own:
        own.add_many(["bread is baked in the oven", "a boat needs wind"])
        return own.search("how do I sail?")[0].experience.text


def _searched(bank: Any, query: str) -> list[float]:
    return [hit.score for hit in bank.search(query, k=2)]


def test_the_model_of_the_embedder_works_after_a_fork(tmp_path: Path) -> None:
    with xp.ExperienceBank(tmp_path / "parent") as bank:
        assert isinstance(bank, FolderBank)
        bank.add_many(["bread is baked in the oven", "a boat needs wind"])
        expected = _searched(bank, "a text that the cache does not know")
        assert run("fork", _searched, bank, "a text that the cache does not know") == expected
        run("fork", _searched, bank, "another that the parent embeds for it")
        own = run("fork", _embedded, bank.embedder.wrapped, tmp_path / "child")
        assert own == "a boat needs wind"


def test_a_process_that_cannot_be_served_never_touches_the_parents_files(
    bank: FolderBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    (long := tmp_path / ("x" * 120)).mkdir()
    monkeypatch.setattr(processes, "_server", None)
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(BankError, match="set TMPDIR to a short path"):
        pickle.dumps(bank)
    with pytest.raises(AttributeError):
        run("fork", _describe, bank)
    assert "The forked process cannot use ExperienceBank" in caplog.text
    bank.add("and it still writes")


# Ends


def _after(signalled: Any, bank: Any) -> str:
    signalled.wait(30)
    try:
        bank.add("late")
    except BankError as error:
        return str(error)
    return "added"


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_bank_that_the_parent_closed_says_so_in_the_child(context: str, tmp_path: Path) -> None:
    bank = xp.ExperienceBank(tmp_path / "bank", embedder="hashing")
    signalled = multiprocessing.get_context(context).Event()
    results: Any = multiprocessing.get_context(context).SimpleQueue()
    process = multiprocessing.get_context(context).Process(
        target=_child, args=(_after, (signalled, bank), results)
    )
    process.start()
    bank.close()
    signalled.set()
    assert "got a closed one" in results.get()
    process.join(30)
    assert process.exitcode == 0


def test_a_killed_child_leaves_the_bank_whole(bank: FolderBank) -> None:
    envs = AsyncVectorEnv([partial(wrapped, bank)] * 2, shared_memory=False, context="fork")
    ended = played(envs, 6)
    victim: Any = envs.processes[0]
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(30)
    envs.close(terminate=True)
    assert ended <= recorded(bank)
    bank.add("and it still writes")


def _slow(messages: Any) -> str:
    time.sleep(60)
    return "<answer>late</answer>"


def _parent(folder: str) -> None:
    """A process with a bank and two children, one of which waits for a slow answer."""
    bank = xp.ExperienceBank(folder, embedder="hashing")
    bank.add(LESSON, task=TASK)
    manager = xp.ExperienceManager(bank, xp.ExtractorAgent(xp.ScriptedLLM(_slow)))
    for work in (_waits, _stays):
        child = os.fork()
        if child == 0:
            work(manager, Path(folder))
            os._exit(0)
        time.sleep(1.0)  # the second fork has the connection of the first child, and must drop it
    (Path(folder) / "ready").touch()
    time.sleep(60)


def _waits(manager: Any, folder: Path) -> None:
    try:
        said = manager.ask(TASK).text
    except BankError as error:
        said = str(error)
    (folder / "waits").write_text(said)


def _stays(manager: Any, folder: Path) -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.05)
    try:
        said = manager.bank.add("late").id
    except BankError as error:
        said = str(error)
    (folder / "stays").write_text(said)


def _content(file: Path) -> str:
    until = time.monotonic() + 30
    while not (file.exists() and (file.name == "ready" or file.read_text())):
        assert time.monotonic() < until, f"nothing in {file}"
        time.sleep(0.02)
    return file.read_text()


def test_children_that_outlive_a_killed_parent_get_an_error_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "bank"
    parent = multiprocessing.get_context("spawn").Process(target=_parent, args=(str(folder),))
    parent.start()
    _content(folder / "ready")
    os.kill(parent.pid or 0, signal.SIGKILL)
    for words in (_content(folder / "waits"), _content(folder / "stays")):
        assert f"Expected an answer of process {parent.pid}, which opened this bank" in words
    with xp.ExperienceBank(folder) as bank:  # and nobody holds the folder
        assert len(bank) == 1

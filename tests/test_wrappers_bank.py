"""The wrappers over the real bank, manager and extractor."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.envs.vault import VaultEnv
from experiential.llm.scripted import ScriptedLLM
from experiential.types import Condition, Message, Trajectory
from experiential.wrappers import ExperienceVectorWrapper, ExperienceWrapper, SearchAndAskWrapper
from tests.wrapper_worlds import CorridorEnv

LESSON = '<answer>[{"op": "add", "text": "Cross the corridor: say go twice."}]</answer>'


@pytest.fixture
def corridor() -> Any:
    gym.register("MyText-v0", entry_point=CorridorEnv, max_episode_steps=20)
    yield "MyText-v0"
    del gym.registry["MyText-v0"]


def digest(folder: Path) -> dict[str, str]:
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(folder.rglob("*"))
        if f.is_file()
    }


def test_the_three_lines_teach_a_second_episode_what_the_first_found(
    corridor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import experiential as xp

    monkeypatch.chdir(tmp_path)
    llm = xp.ScriptedLLM([LESSON])

    bank = xp.ExperienceBank("bank")
    env = xp.ExperienceWrapper(gym.make("MyText-v0"), bank, extractor=xp.ExtractorAgent(llm))
    env = xp.SearchAndAskWrapper(env, max_calls=2)

    observation, info = env.reset(seed=1)
    assert info["experience"] == [] and observation == "Cell 0 of a green corridor."
    for action in ("stay", "go", "go"):
        *_, info = env.step(action)
    assert info["trajectory_id"]
    env.get_wrapper_attr("manager").drain(timeout=60)
    observation, info = env.reset(seed=2)
    assert (
        "say go twice" in observation
        and info["experience"][0]["text"] == "Cross the corridor: say go twice."
    )
    env.close()
    assert len(bank) == 1
    bank.close()


def test_an_answer_is_refined_and_both_entry_and_refinement_are_credited(tmp_path: Path) -> None:
    llm = ScriptedLLM(
        lambda messages: (
            "<answer>Two times go is enough.</answer>" if "corridor?" in str(messages) else LESSON
        )
    )
    with (
        ExperienceBank(tmp_path, embedder="hashing") as bank,
        ExperienceManager(bank, ExtractorAgent(llm)) as manager,
    ):
        entry = bank.add("Cross the corridor: say go twice.", task="Cross the corridor.")
        env = SearchAndAskWrapper(CorridorEnv(), bank=manager)
        env.reset(seed=1)
        observation, *_, info = env.step(
            "<search_and_ask>How do I cross the corridor?</search_and_ask>"
        )
        assert (
            "Two times go is enough." in observation
            and info["search_and_ask"]["hit"]["id"] == entry.id
        )
        env.step("go")
        env.step("go")
        assert env.last_trajectory is not None
        (use,) = env.last_trajectory.uses
        assert (use.experience_id, use.how) == (entry.id, "search_and_ask") and use.refinement
        manager.drain(timeout=60)
        statistics = bank.get(entry.id).statistics
        assert (statistics.uses, statistics.successes) == (1, 1)


def test_closing_the_wrapper_that_built_the_manager_waits_for_its_distillations(
    tmp_path: Path,
) -> None:
    async def slow(messages: list[Message]) -> str:
        await asyncio.sleep(0.3)
        return LESSON

    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        extractor = ExtractorAgent(ScriptedLLM(slow))
        env = ExperienceWrapper(CorridorEnv(), bank, extractor=extractor)
        envs = ExperienceVectorWrapper(SyncVectorEnv([CorridorEnv] * 2), bank, extractor=extractor)
        env.reset(seed=1)
        env.step("go")
        env.step("go")
        envs.reset(seed=2)
        envs.step(["go"] * 2)
        envs.step(["go"] * 2)
        env.close()
        envs.close()
        assert bank.queue.waiting() == [] and len(bank) >= 1


def test_entries_made_from_the_instance_being_played_are_hidden_unless_allowed(
    tmp_path: Path,
) -> None:
    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        manager = ExperienceManager(bank, ExtractorAgent(ScriptedLLM([LESSON])))
        env = ExperienceWrapper(CorridorEnv(), manager, exclude_same_instance=True)
        env.reset(seed=1, options={"guided": False})
        env.step("go")
        env.step("go")
        manager.drain(timeout=60)
        found = {seed: len(env.reset(seed=seed)[1]["experience"]) for seed in (1, 2)}
        assert found == {1: 0, 2: 1}
        allowed = ExperienceWrapper(CorridorEnv(), manager)
        assert len(allowed.reset(seed=1)[1]["experience"]) == 1
        envs = ExperienceVectorWrapper(
            SyncVectorEnv([CorridorEnv] * 2), manager, exclude_same_instance=True
        )
        assert [len(hits) for hits in envs.reset(seed=1)[1]["experience"]] == [0, 1]
        manager.close()


def test_an_evaluation_over_a_read_only_bank_changes_no_byte(tmp_path: Path) -> None:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.add("Cross the corridor: say go.", task="Cross the corridor.")
    before = digest(tmp_path)
    with ExperienceBank(tmp_path / "bank", embedder="hashing", read_only=True) as bank:
        env = SearchAndAskWrapper(ExperienceWrapper(CorridorEnv(), bank))
        assert "say go" in env.reset(seed=1)[0]
        for action in ("<search_and_ask>cross the corridor</search_and_ask>", "go", "go"):
            _, _, terminated, _, info = env.step(action)
        assert terminated and info["trajectory_id"]
        env.close()
    assert digest(tmp_path) == before


def read_only_corridor(folder: str) -> gym.Env[Any, Any]:
    """What each process of an AsyncVectorEnv builds: its own bank, opened for reading."""
    return ExperienceWrapper(
        CorridorEnv(), ExperienceBank(folder, embedder="hashing", read_only=True)
    )


def test_processes_may_each_read_the_bank_while_none_writes(tmp_path: Path) -> None:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.add("Cross the corridor: say go.", task="Cross the corridor.")
    makers = [lambda: read_only_corridor(str(tmp_path / "bank"))] * 2
    envs = AsyncVectorEnv(makers, shared_memory=False, context="spawn")
    observations, _ = envs.reset(seed=1)
    assert all("say go" in text for text in observations)
    envs.close()


def test_a_world_that_needs_memory_is_solved_with_it(tmp_path: Path) -> None:
    world = VaultEnv(tries=1)

    def distilled(messages: Any) -> str:
        lever = messages[-1]["content"].split(" was live")[0].split()[-1]
        return (
            f'<answer>[{{"op": "add", "text": "Open the vault of {world.names[0]}: pull the {lever}'
            ' lever."}]</answer>'
        )

    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        manager = ExperienceManager(bank, ExtractorAgent(ScriptedLLM(distilled)))
        env = ExperienceWrapper(world, manager)
        env.reset(seed=1, options={"world": 0})
        env.step("pull nothing")
        manager.drain(timeout=60)
        _, info = env.reset(seed=2, options={"world": 0})
        lever = info["experience"][0]["text"].split(" lever")[0].split()[-1]
        _, _, terminated, _, info = env.step(f"pull {lever}")
        assert terminated and info["success"]
        manager.drain(timeout=60)
        manager.close()


@pytest.mark.parametrize("inject", ["observation", "system"])
def test_an_actor_reads_the_experience_and_asks_for_more(inject: Any, tmp_path: Path) -> None:
    llm = ScriptedLLM(
        [
            "<search_and_ask>how to cross the corridor?</search_and_ask>",
            "<action>go</action>",
            "<action>go</action>",
        ]
    )
    with ExperienceBank(tmp_path, embedder="hashing") as bank, ExperienceManager(bank) as manager:
        bank.add("Cross the corridor: say go twice.", task="Cross the corridor.")
        env = SearchAndAskWrapper(ExperienceWrapper(CorridorEnv(), manager, inject=inject))
        agent, done = ActorAgent(llm), False
        observation, info = env.reset(seed=1)
        while not done:
            observation, _, done, _, info = env.step(agent.act(observation, info))
        assert [str(messages).count("say go twice") for messages in llm.calls] == [1, 2, 2]
        place = {"system": 0, "observation": 1}[inject]
        assert (
            "<experience>\n1. Cross the corridor: say go twice." in llm.calls[0][place]["content"]
        )
        assert env.last_trajectory is not None and [
            use.how for use in env.last_trajectory.uses
        ] == ["episode_start", "search_and_ask"]


def test_a_manager_built_by_the_wrapper_is_closed_with_it_and_the_bank_is_not(
    tmp_path: Path,
) -> None:
    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        for env in (
            ExperienceWrapper(CorridorEnv(), bank),
            SearchAndAskWrapper(CorridorEnv(), bank=bank),
        ):
            env.reset()
            env.close()
            env.close()
        envs = ExperienceVectorWrapper(SyncVectorEnv([CorridorEnv] * 2), bank)
        envs.reset()
        envs.close()
        assert bank.add("Still open.").text == "Still open."


def test_every_trajectory_of_both_conditions_is_forwarded_for_distillation(tmp_path: Path) -> None:
    seen: list[Trajectory] = []

    class Listening(ExtractorAgent):
        async def adistill(self, trajectory: Trajectory, *args: Any, **kwargs: Any) -> Any:
            seen.append(trajectory)
            return await super().adistill(trajectory, *args, **kwargs)

    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        manager = ExperienceManager(
            bank, Listening(ScriptedLLM(['<answer>[{"op": "return"}]</answer>']))
        )
        env = ExperienceWrapper(CorridorEnv(), manager)
        for guided in (True, False):
            env.reset(options={"guided": guided})
            env.step("fall")
        manager.drain(timeout=60)
        manager.close()
    assert {t.condition for t in seen} == {Condition.GUIDED, Condition.FREE} and len(seen) == 2

"""`cluster.share_gpus` without Ray: the calls that engines and ranks get, in order, from stand-ins
that refuse what a GPU would.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import enumerate as threads
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from experiential.config import ClusterSettings, Experiment, PolicyClusterSettings
from experiential.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    EnvError,
    LostProcessError,
)
from experiential.llm import vllm
from experiential.llm.base import SamplingParams
from experiential.recipe import load_experiment
from experiential.training.openrlhf import parts, versions
from experiential.training.openrlhf import runtime as runtimes
from experiential.training.openrlhf.learner import RankStats
from experiential.training.openrlhf.rank_state import INDEX
from experiential.training.openrlhf.reservation import Reservation, reserve
from experiential.training.openrlhf.runtime import OpenRLHFRuntime, build_runtimes
from experiential.training.openrlhf.supervisor import LostActorError
from experiential.training.runtime import LossSettings, Sample

pytestmark = pytest.mark.timeout(60)
GPUS = 2
PARAMETERS = 7_000_000_000
SAMPLE = Sample(tokens=(5, 6, 7), positions=(2,), logprobs=(-1.0,), advantages=(1.0,))


class RayError(Exception):
    """Stands for Ray's."""


class RayActorError(RayError):
    """Stands for Ray's."""


class GetTimeoutError(RayError):
    """Stands for Ray's."""


class RayTaskError(RayError):
    """Stands for Ray's."""


@dataclass
class Gpus:
    """The GPUs that all share: what stands in for engines and ranks notes its calls here, and asks
    whether they are possible.
    """

    calls: list[str] = field(default_factory=list[str])
    engines: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """What of each engine is awake: weights, kv_cache."""
    ranks: dict[str, bool] = field(default_factory=dict[str, bool])
    """Whether the states of each rank are on the GPU."""
    starting: dict[str, Future[Any]] = field(default_factory=dict[str, "Future[Any]"])
    """Ranks that have begun to start; they are done when that is waited for."""
    dead: set[str] = field(default_factory=set[str])
    held: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    hold: bool = False
    """Keep what is begun until it is let go."""
    apart: bool = False
    """Everybody has a GPU; anything is possible."""
    seconds: float = 0.0
    """That anything takes which is not held."""
    dies: list[str] = field(default_factory=list[str])
    """Who dies while weights are sent, which then fails."""
    stuck: set[str] = field(default_factory=set[str])
    """Ranks that stay in a broadcast which another rank gave up."""
    elsewhere: set[str] = field(default_factory=set[str])
    """Ranks whose files the trainer cannot see."""

    def awake(self) -> set[str]:
        """Who takes memory for more than sleeping: engines of a role, ranks of a role."""
        names = [name for name, what in self.engines.items() if what] + [
            name for name, there in self.ranks.items() if there
        ]
        return {name.rsplit(" ", 1)[0] for name in names}

    def take(self) -> list[str]:
        """The calls since the last time, those to several of a kind in one line."""
        found, seen = [], ""
        for call in self.calls:
            who, _, what = call.partition(": ")
            line = f"{who.rsplit(' ', 1)[0]}s: {what}"
            if line != seen:
                found.append(line)
            seen = line
        self.calls.clear()
        return found


class Actor:
    """In place of a Ray handle: a method's ``remote`` notes the call and gives what the subclass's
    method of that name does.
    """

    def __init__(self, name: str, gpus: Gpus) -> None:
        self.name, self.gpus = name, gpus

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            answer = self._call(method, arguments)
            return SimpleNamespace(future=lambda: self.awaited(answer))

        return SimpleNamespace(remote=remote)

    def awaited(self, answer: Future[Any]) -> Future[Any]:
        return answer

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            if self.name in self.gpus.dead:
                raise RayActorError("The actor is dead.")
            getattr(self, f"on_{method}")(answer, *arguments)
        except (RayError, AssertionError) as error:
            answer.set_exception(error)
        return answer

    def note(self, answer: Future[Any], what: str, result: Any = None) -> None:
        self.gpus.calls.append(f"{self.name}: {what}")
        answer.set_result(result)

    def work(self, answer: Future[Any], what: str, result: Any = None) -> None:
        """Alone on the GPUs, from beginning to end."""
        mine = self.gpus.awake() if self.gpus.apart else {self.name.rsplit(" ", 1)[0]}
        assert self.gpus.awake() == mine, (
            f"{self.name} is asked to {what} beside {self.gpus.awake()}"
        )

        def end() -> None:
            if self.gpus.awake() == mine:
                self.note(answer, what, result)
            else:
                answer.set_exception(
                    AssertionError(
                        f"{self.gpus.awake()} came while {self.name} was asked to {what}"
                    )
                )

        if self.gpus.hold:
            self.gpus.held.append(end)
        elif self.gpus.seconds:
            asyncio.get_running_loop().call_later(self.gpus.seconds, end)
        else:
            end()


class Engine(Actor):
    """A vLLM engine: half awake it cannot be put to sleep, and a request that runs when it is put
    to sleep would be broken off.
    """

    running = 0

    @property
    def parts(self) -> set[str]:
        return self.gpus.engines[self.name]

    def on_get_num_unfinished_requests(self, answer: Future[Any]) -> None:
        answer.set_result(self.running)

    def on_sleep(self, answer: Future[Any]) -> None:
        assert self.parts == {
            "weights",
            "kv_cache",
        }, "vLLM takes an engine that is half awake for asleep"
        assert not self.running, "a request is broken off"
        self.parts.clear()
        self.note(answer, "sleep")

    def on_wake_up(self, answer: Future[Any], tags: list[str]) -> None:
        assert self.gpus.awake() <= {self.name.rsplit(" ", 1)[0]}, (
            f"no room beside {self.gpus.awake()}"
        )
        self.parts.update(tags)
        self.note(answer, f"wake {' and '.join(tags)}")

    def on_pause_generation(self, answer: Future[Any]) -> None:
        self.note(answer, "pause")

    def on_resume_generation(self, answer: Future[Any]) -> None:
        self.note(answer, "resume")

    def on_reset_prefix_cache(self, answer: Future[Any]) -> None:
        assert "kv_cache" in self.parts
        self.note(answer, "reset")

    def on_generate(self, answer: Future[Any], ids: list[int], params: Any) -> None:
        assert self.gpus.apart or self.parts == {"weights", "kv_cache"}
        token = (params["allowed"] or [7])[0]
        drawn = SimpleNamespace(
            token_ids=[token],
            logprobs=[{token: SimpleNamespace(logprob=-0.5)}],
            text="x",
            finish_reason="stop",
        )
        self.running += 1
        answer.add_done_callback(lambda _: self.count_down())
        self.work(answer, "generate", SimpleNamespace(outputs=[drawn]))

    def count_down(self) -> None:
        self.running -= 1


class Rank(Actor):
    """A DeepSpeed rank: computes only with its states on the GPU, sends weights only to engines
    that have room for them.
    """

    @property
    def role(self) -> str:
        return self.name.split(" ")[0]

    def on_start(self, answer: Future[Any], *_: Any) -> None:
        assert not self.gpus.awake(), "started beside somebody who is awake"
        self.gpus.starting[self.name] = answer

    def awaited(self, answer: Future[Any]) -> Future[Any]:
        if self.gpus.starting.get(self.name) is answer:
            del self.gpus.starting[self.name]
            self.note(answer, "start", (PARAMETERS, True))
        return answer

    def on___ray_ready__(self, answer: Future[Any]) -> None:
        if self.name not in self.gpus.stuck:
            answer.set_result(True)

    def on_reload_states(self, answer: Future[Any]) -> None:
        assert self.gpus.awake() <= {f"{self.role} rank"}, f"no room beside {self.gpus.awake()}"
        self.gpus.ranks[self.name] = True
        self.note(answer, "reload")

    def on_offload_states(self, answer: Future[Any]) -> None:
        self.gpus.ranks[self.name] = False
        self.note(answer, "offload")

    def on_broadcast_to_vllm(self, answer: Future[Any]) -> None:
        engines = [parts for name, parts in self.gpus.engines.items() if name.startswith(self.role)]
        assert self.gpus.awake() == ({f"{self.role} engine"} if engines else set[str]()), (
            self.gpus.awake()
        )
        assert all(parts == {"weights"} for parts in engines)
        if self.gpus.dies:
            self.gpus.dead.update(self.gpus.dies)
            self.gpus.dies.clear()
            raise RayTaskError("Connection closed by peer")
        self.note(answer, "broadcast")

    def on_reconnect(self, answer: Future[Any], engines: list[Engine]) -> None:
        self.note(answer, f"reconnect {' and '.join(engine.name for engine in engines)}")

    def _compute(self, answer: Future[Any], what: str, result: Any = None) -> None:
        assert self.gpus.apart or self.gpus.ranks[self.name], (
            "its states are in the machine's memory"
        )
        self.work(answer, what, result)

    def on_learn(self, answer: Future[Any], *_: Any) -> None:
        self._compute(answer, "learn", RankStats())

    def on_score(self, answer: Future[Any], samples: list[Sample], _: Any) -> None:
        self._compute(answer, "score", [(-1.0,)] * len(samples))

    def on_save_state(self, answer: Future[Any], folder: str) -> None:
        assert Path(folder).is_absolute(), "its working directory is another"
        if self.name not in self.gpus.elsewhere:
            (Path(folder) / f"of {self.name}").touch()
        self._compute(answer, "save", {"places": {self.name: f"of {self.name}"}, "steps": 3})

    def on_load_state(self, answer: Future[Any], _: str) -> None:
        self._compute(answer, "load")

    def on_export(self, answer: Future[Any], _: str) -> None:
        self._compute(answer, "export")


class Group:
    """In place of OpenRLHF's ``RayActorGroup``."""

    def __init__(self, role: str, group: str | None, gpus: Gpus) -> None:
        assert group == "the group"
        self._actor_handlers = [Rank(f"{role} rank {i}", gpus) for i in range(GPUS)]
        gpus.ranks.update({rank.name: False for rank in self._actor_handlers})


def experiment(*overrides: str) -> Experiment:
    """Two tiny policies on two shared GPUs."""
    sizes = [
        f"cluster.{role}.{size}"
        for role in ("actor", "extractor")
        for size in (f"gpus_per_node={GPUS}", f"engines={GPUS}", "gpu_memory=0.5")
    ]
    return load_experiment(
        "complementary",
        ["model.dtype=bfloat16", "runtime=openrlhf", "cluster.share_gpus=true", *sizes, *overrides],
    )


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What is used of Ray where nothing runs on it."""
    stub: Any = ModuleType("ray")
    stub.exceptions = SimpleNamespace(
        RayError=RayError,
        RayActorError=RayActorError,
        RayTaskError=RayTaskError,
        GetTimeoutError=GetTimeoutError,
    )
    stub.killed = []
    stub.kill = lambda actor: stub.killed.append(actor.name)
    monkeypatch.setitem(sys.modules, "ray", stub)
    return stub


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, ray: Any) -> Gpus:
    """Stand-ins in place of all that would start a process."""
    gpus = Gpus()

    def start_engines(
        model: Any, settings: PolicyClusterSettings, group: str, *, name: str, **_: Any
    ) -> list[Engine]:
        assert group == "the group" and not gpus.awake() and not gpus.starting, (
            "started beside somebody who takes memory"
        )
        engines = [Engine(f"{name} engine {i}", gpus) for i in range(settings.engines)]
        gpus.engines.update({engine.name: set() for engine in engines})
        gpus.calls += [f"{engine.name}: start" for engine in engines]
        return engines

    roles = iter(["actor", "extractor"])
    ended: list[str] = ray.killed
    monkeypatch.setattr(versions, "check_versions", lambda: None)
    monkeypatch.setattr(runtimes, "check_nodes", lambda *_: None)
    monkeypatch.setattr(runtimes, "check_weights", lambda _: None)
    monkeypatch.setattr(
        runtimes, "join", lambda cluster, needed: gpus.calls.append(f"ray 0: join {needed}")
    )

    def start_group(bundles: Sequence[int], user: str, *, one_node: bool) -> Reservation:
        gpus.calls.append(f"group 0: start {bundles}{' on one node' if one_node else ''}")
        return Reservation("the group", user)

    groups: Any = ModuleType("ray.util.placement_group")
    groups.remove_placement_group = ended.append
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", groups)
    monkeypatch.setattr(runtimes, "reserve", start_group)
    monkeypatch.setattr(parts, "start_sleeping_engines", start_engines)
    monkeypatch.setattr(
        parts, "start_ranks", lambda _, group, *__, **___: Group(next(roles), group, gpus)
    )
    monkeypatch.setattr(parts, "strategy", lambda *_, **__: "the strategy")
    monkeypatch.setattr(
        vllm, "sampling_params", lambda *_, allowed_token_ids=None: {"allowed": allowed_token_ids}
    )
    return gpus


@pytest.fixture
def policies(gpus: Gpus) -> Iterator[tuple[OpenRLHFRuntime, OpenRLHFRuntime]]:
    found = build_runtimes(experiment())
    yield found
    for runtime in found:
        runtime.close()


async def generate(runtime: OpenRLHFRuntime) -> None:
    assert (await runtime.generate([5, 6], SamplingParams(max_tokens=4))).response_ids == (7,)


async def rounds(gpus: Gpus, held: int) -> None:
    """Until so many requests are held back."""
    while len(gpus.held) < held:
        await asyncio.sleep(0.001)


def test_one_policy_starts_after_the_other_its_engines_before_its_ranks(
    policies: object, gpus: Gpus
) -> None:
    assert gpus.take() == [
        "rays: join 2",
        "groups: start [1, 1] on one node",
        "actor engines: start",
        "actor ranks: start",
        "extractor engines: start",
        "extractor ranks: start",
    ]
    assert not gpus.awake()


async def test_an_update_in_full(
    policies: tuple[OpenRLHFRuntime, OpenRLHFRuntime], gpus: Gpus
) -> None:
    actor, _ = policies
    gpus.take()
    await generate(actor)
    await actor.train([SAMPLE], LossSettings())
    assert await actor.sync() == 1
    generation = await actor.generate([5, 6], SamplingParams(max_tokens=4))
    assert generation.policy_version == 1
    assert gpus.take() == [
        "actor engines: wake weights and kv_cache",
        "actor engines: reset",
        "actor engines: generate",
        "actor engines: sleep",
        "actor ranks: reload",
        "actor ranks: learn",
        "actor ranks: offload",
        "actor engines: wake weights",
        "actor ranks: broadcast",
        "actor engines: wake kv_cache",
        "actor engines: reset",
        "actor engines: generate",
    ]


async def test_engines_and_ranks_of_both_policies_take_turns(
    policies: tuple[OpenRLHFRuntime, OpenRLHFRuntime], gpus: Gpus
) -> None:
    actor, extractor = policies
    gpus.take()
    await generate(actor)
    await generate(extractor)
    await extractor.train([SAMPLE], LossSettings())
    await actor.score([SAMPLE])
    await generate(actor)
    assert gpus.take() == [
        "actor engines: wake weights and kv_cache",
        "actor engines: reset",
        "actor engines: generate",
        "actor engines: sleep",
        "extractor engines: wake weights and kv_cache",
        "extractor engines: reset",
        "extractor engines: generate",
        "extractor engines: sleep",
        "extractor ranks: reload",
        "extractor ranks: learn",
        "extractor ranks: offload",
        "actor ranks: reload",
        "actor ranks: score",
        "actor ranks: offload",
        "actor engines: wake weights and kv_cache",
        "actor engines: reset",
        "actor engines: generate",
    ]


@pytest.mark.parametrize("what", ["save", "export", "load"])
async def test_states_are_on_the_gpu_while_they_are_saved_read_and_exported(
    policies: tuple[OpenRLHFRuntime, OpenRLHFRuntime], gpus: Gpus, tmp_path: Path, what: str
) -> None:
    actor, _ = policies
    (tmp_path / INDEX).write_text('{"version": 5}')
    await generate(actor)
    gpus.take()
    await getattr(actor, what)(tmp_path)
    then = [
        "actor ranks: offload",
        "actor engines: wake weights",
        "actor ranks: broadcast",
        "actor engines: wake kv_cache",
    ]
    expected = [
        "actor engines: sleep",
        "actor ranks: reload",
        f"actor ranks: {what}",
        *(then if what == "load" else ()),
    ]
    assert gpus.take()[:7] == expected
    assert actor.version == (5 if what == "load" else 0)


async def test_the_time_out_of_a_state_grows_with_its_size(
    policies: tuple[OpenRLHFRuntime, OpenRLHFRuntime],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12 bytes of 7e9 parameters take 1,680 s at 50 MB/s; the updates keep their 900 s."""
    asked: list[float] = []
    answers = runtimes.answers

    def noted(references: Any, who: Any, seconds: float) -> Any:
        asked.append(seconds)
        return answers(references, who, seconds)

    actor, _ = policies
    monkeypatch.setattr(runtimes, "answers", noted)
    await actor.save(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["places"] == {name: f"of {name}" for name in ("actor rank 0", "actor rank 1")}
    assert index["steps"] == 3 and index["version"] == 0 and index["name"] == "actor"
    await actor.load(tmp_path)
    await actor.export(tmp_path)
    await actor.train([SAMPLE], LossSettings())
    assert [seconds for seconds in asked if seconds != 900] == [2580] * 3 and 900 in asked


async def test_a_state_of_which_the_trainer_sees_only_a_part_is_no_checkpoint(
    policies: tuple[OpenRLHFRuntime, OpenRLHFRuntime],
    gpus: Gpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank writes on another node, to a folder that is not shared."""
    monkeypatch.setattr(runtimes, "APPEARS_S", 0.01)
    monkeypatch.chdir(tmp_path)
    gpus.elsewhere.add("actor rank 1")
    with pytest.raises(CheckpointError, match=f"wrote in {tmp_path}, found no of actor rank 1"):
        await policies[0].save(Path("."))
    assert not (tmp_path / INDEX).exists()
    gpus.elsewhere.clear()
    await policies[0].save(Path("."))
    assert (tmp_path / INDEX).exists()


async def test_training_waits_until_requests_have_ended_and_new_requests_until_it_is_over(
    policies: tuple[OpenRLHFRuntime, OpenRLHFRuntime], gpus: Gpus
) -> None:
    actor, extractor = policies
    gpus.take()
    gpus.hold = True
    running = [asyncio.create_task(generate(actor)) for _ in range(3)]
    await rounds(gpus, 3)
    training = asyncio.create_task(extractor.train([SAMPLE], LossSettings()))
    await asyncio.sleep(0.02)
    assert gpus.take() == ["actor engines: wake weights and kv_cache", "actor engines: reset"]
    gpus.hold = False
    for end in gpus.held:
        end()
    await asyncio.gather(*running, training)
    await generate(actor)
    assert gpus.take()[:4] == [
        "actor engines: generate",
        "actor engines: sleep",
        "extractor ranks: reload",
        "extractor ranks: learn",
    ]


async def test_a_response_of_several_requests_is_one_turn(
    policies: tuple[OpenRLHFRuntime, OpenRLHFRuntime], gpus: Gpus
) -> None:
    """Restricted to choices, an engine is asked for a token at each branch: nobody else comes
    between them.
    """
    actor, extractor = policies
    gpus.take()
    choices = SamplingParams(choices=("open the red box", "open the blue box", "wait"))
    found, _ = await asyncio.gather(
        actor.generate([5, 6], choices), extractor.train([SAMPLE], LossSettings())
    )
    assert choices.choices and found.text in choices.choices
    assert len([line for line in gpus.take() if "sleep" in line or "offload" in line]) == 1


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_both_policies_ask_for_at_once_all_is_done_and_nothing_is_refused(
    policies: tuple[OpenRLHFRuntime, OpenRLHFRuntime], gpus: Gpus, seed: int
) -> None:
    """The stand-ins raise where two would be awake at once."""
    chance = random.Random(seed)
    gpus.seconds = 0.0005

    async def work(runtime: OpenRLHFRuntime) -> int:
        done = 0
        for _ in range(12):
            await chance.choice(
                [
                    lambda: generate(runtime),
                    lambda: runtime.train([SAMPLE], LossSettings()),
                    runtime.sync,
                    lambda: runtime.score([SAMPLE]),
                ]
            )()
            done += 1
        return done

    assert (
        await asyncio.gather(*(work(runtime) for runtime in (*policies, *policies, *policies)))
        == [12] * 6
    )
    assert len(gpus.awake()) == 1


async def test_what_is_given_up_lets_the_others_go_on(
    policies: tuple[OpenRLHFRuntime, OpenRLHFRuntime], gpus: Gpus
) -> None:
    actor, extractor = policies
    gpus.hold = True
    running = asyncio.create_task(generate(actor))
    await rounds(gpus, 1)
    training = asyncio.create_task(extractor.train([SAMPLE], LossSettings()))
    await asyncio.sleep(0.01)
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    gpus.hold = False
    gpus.held[0]()
    await running
    await extractor.train([SAMPLE], LossSettings())
    assert extractor.version == 1, "the one that was given up did not begin"


async def test_a_dead_engine_is_named_and_not_started_again(
    policies: tuple[OpenRLHFRuntime, OpenRLHFRuntime], gpus: Gpus
) -> None:
    actor, extractor = policies
    gpus.hold = True
    running = asyncio.create_task(generate(actor))
    await rounds(gpus, 1)
    gpus.dead.add("actor engine 1")
    with pytest.raises(
        BackendError,
        match=(
            r"actor engine 1 to be alive.*not started again alone \(cluster.share_gpus\); resume"
            r" the run"
        ),
    ):
        await generate(actor)
    gpus.hold = False
    gpus.held[0]()
    await running
    with pytest.raises(BackendError, match="actor engine 1 to be alive"):
        await actor.sync()
    with pytest.raises(LostActorError, match="actor engine 1 to be alive"):
        await extractor.train([SAMPLE], LossSettings())
    assert actor.restarts == 0


async def test_a_dead_rank_is_named_and_the_engines_are_left_whole(
    policies: tuple[OpenRLHFRuntime, OpenRLHFRuntime], gpus: Gpus
) -> None:
    actor, extractor = policies
    gpus.dead.add("actor rank 1")
    with pytest.raises(LostActorError, match="actor rank 1"):
        await actor.sync()
    await generate(extractor)
    with pytest.raises(LostActorError, match="actor rank 1"):
        await actor.train([SAMPLE], LossSettings())


def test_the_group_is_freed_when_the_second_policy_is_closed(gpus: Gpus, ray: Any) -> None:
    actor, extractor = build_runtimes(experiment())
    extractor.close()
    assert ray.killed == [
        "extractor engine 0",
        "extractor engine 1",
        "extractor rank 0",
        "extractor rank 1",
    ]
    actor.close()
    assert ray.killed[4:] == [
        "actor engine 0",
        "actor engine 1",
        "actor rank 0",
        "actor rank 1",
        "the group",
    ]


def test_all_that_was_started_is_ended_when_the_second_policy_does_not_start(
    gpus: Gpus, ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threads())
    started = iter([Group("actor", "the group", gpus)])

    def start_ranks(settings: PolicyClusterSettings, *_: Any, **__: Any) -> Group:
        for found in started:
            return found
        raise BackendError("Expected a rank, got none")

    monkeypatch.setattr(parts, "start_ranks", start_ranks)
    with pytest.raises(BackendError, match="Expected a rank"):
        build_runtimes(experiment())
    assert ray.killed == [
        "extractor engine 0",
        "extractor engine 1",
        "actor engine 0",
        "actor engine 1",
        "actor rank 0",
        "actor rank 1",
        "the group",
    ]
    assert set(threads()) <= before


def test_policies_and_their_thread_are_ended_when_the_environment_workers_do_not_start(
    gpus: Gpus, ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def workers(settings: ClusterSettings) -> None:
        raise EnvError("Expected a worker, got none")

    before = set(threads())
    monkeypatch.setattr(runtimes, "EnvWorkers", workers)
    with pytest.raises(EnvError, match="Expected a worker"):
        runtimes.ClusterRuntime(experiment("cluster.env_workers=1"))
    assert len(ray.killed) == 9 and ray.killed[-1] == "the group"
    assert set(threads()) <= before


async def test_without_sharing_no_call_is_added(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are held while weights are sent; nobody sleeps and nobody waits for a turn."""
    gpus.apart = True
    numbers = itertools.count()
    start = lambda *_, **__: parts.watch_engine(Engine(f"engine {next(numbers)}", gpus))  # noqa: E731
    monkeypatch.setattr(parts, "start_engine", start)
    actor, extractor = build_runtimes(experiment("cluster.share_gpus=false"))
    assert gpus.take() == [
        "rays: join 8",
        "groups: start [2, 1, 1, 2, 1, 1]",
        "actor ranks: start",
        "extractor ranks: start",
    ]
    await actor.train([SAMPLE], LossSettings())
    await actor.sync()
    await generate(actor)
    assert gpus.take() == [
        "actor ranks: learn",
        "engines: pause",
        "actor ranks: broadcast",
        "engines: resume",
        "engines: generate",
    ]
    for runtime in (actor, extractor):
        runtime.close()


@pytest.fixture
def apart(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenRLHFRuntime]:
    """An actor whose two engines have GPUs of their own, numbered as they start."""
    gpus.apart = True
    numbers = itertools.count()
    start = lambda *_, **__: parts.watch_engine(Engine(f"engine {next(numbers)}", gpus))  # noqa: E731
    monkeypatch.setattr(parts, "start_engine", start)
    policies = build_runtimes(experiment("cluster.share_gpus=false"))
    gpus.take()
    yield policies[0]
    for runtime in policies:
        runtime.close()


async def test_weights_are_sent_again_without_the_engine_that_dies_meanwhile(
    apart: OpenRLHFRuntime, gpus: Gpus
) -> None:
    gpus.dies.append("engine 0")
    await apart.sync()
    calls = gpus.calls.copy()
    sent = calls.index("actor rank 0: broadcast")
    assert "actor rank 0: reconnect engine 1" in calls[:sent]
    assert "engine 1: resume" in calls[sent:]
    async with asyncio.timeout(30):  # the new engine serves before the other one goes on
        while gpus.calls[-1] != "engine 1: resume" or not all(
            engine.serving for engine in apart._engines.engines
        ):
            await asyncio.sleep(0.001)
    assert "actor rank 0: reconnect engine 4 and engine 1" in gpus.calls
    assert apart.restarts == 1


async def test_a_rank_that_stays_in_a_broadcast_which_another_gave_up_is_lost(
    apart: OpenRLHFRuntime, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "_FREED_S", 0.05)
    gpus.dies.append("engine 0")
    gpus.stuck.add("actor rank 0")
    with pytest.raises(LostProcessError, match="actor rank 0 .* waits for ranks that gave up"):
        await apart.sync()
    tried = ["engines: pause", "actor ranks: broadcast", "engines: pause", "engines: resume"]
    assert gpus.take()[:4] == tried, "then a new engine joins, beside the test"


async def test_a_rank_that_fails_without_a_lost_engine_ends_the_sync(
    apart: OpenRLHFRuntime, gpus: Gpus
) -> None:
    gpus.dies.append("nobody")
    with pytest.raises(BackendError, match="Connection closed"):
        await apart.sync()
    assert gpus.take()[-1] == "engines: resume", "they go on"


# What Ray and OpenRLHF are asked for


class Cluster(ModuleType):
    """Ray with nodes and no processes; all GPUs are free after ``until`` looks."""

    def __init__(self, *gpus: int, free: int | None = None, until: float = math.inf) -> None:
        super().__init__("ray")
        self.asked, self.until = 0, until
        self.exceptions = SimpleNamespace(
            RayError=RayError, RayActorError=RayActorError, RayTaskError=RayTaskError
        )
        self.gpus, self.free = gpus, sum(gpus) if free is None else free

    def is_initialized(self) -> bool:
        return True

    def available_resources(self) -> dict[str, float]:
        self.asked += 1
        free = sum(self.gpus) if self.asked > self.until else self.free
        return {"GPU": float(free), "CPU": 64.0}

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": float(sum(self.gpus)), "CPU": 64.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": i < len(self.gpus), "Resources": {"GPU": n} if n else {}}
            for i, n in enumerate((*self.gpus, 99))
        ]


def joined(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, settings: ClusterSettings, gpus: int
) -> None:
    monkeypatch.setitem(sys.modules, "ray", cluster)
    monkeypatch.setattr(runtimes, "PLACED_S", 1.0)
    runtimes.join(settings, gpus)


def test_as_many_free_gpus_are_asked_for_as_the_placement_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart, shared = ClusterSettings(), ClusterSettings(share_gpus=True)
    joined(monkeypatch, Cluster(2), shared, 2)
    joined(monkeypatch, Cluster(2, 2), apart, 4)
    wide = ClusterSettings(actor=PolicyClusterSettings(gpus_per_node=3))
    with pytest.raises(
        ConfigError, match=r"the 3 GPUs of ranks of a node \(cluster.actor.gpus_per_node\), the"
    ):
        joined(monkeypatch, Cluster(2, 2, 2), wide, 6)
    with pytest.raises(ConfigError, match="with 4 free GPUs, got 2"):
        joined(monkeypatch, Cluster(4, free=2), apart, 4)
    with pytest.raises(
        ConfigError,
        match=r"one node with the 4 GPUs that are shared \(cluster.share_gpus\), the largest has 3",
    ):
        joined(monkeypatch, Cluster(0, 3, 2), shared, 4)


def test_gpus_that_a_killed_run_still_holds_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(4, free=1, until=2)
    joined(monkeypatch, cluster, ClusterSettings(), 4)
    assert cluster.asked == 3


class Groups(ModuleType):
    """Ray's placement groups, of which none or all find a place."""

    def __init__(self, *, fit: bool) -> None:
        super().__init__("ray.util.placement_group")
        self.fit, self.made, self.removed = fit, [], []

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.made.append((bundles, strategy))
        return SimpleNamespace(wait=lambda seconds: self.fit)

    def remove_placement_group(self, group: object) -> None:
        self.removed.append(group)


def test_the_last_user_that_leaves_frees_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: Any = Groups(fit=True)
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", groups)
    reservation = reserve([1] * 3, "actor", one_node=True)
    assert groups.made == [([{"GPU": 1, "CPU": 1}] * 3, "STRICT_PACK")]
    reservation.users.add("extractor")
    for user in ("actor", "actor"):
        reservation.leave(user)
    assert not groups.removed
    for _ in range(2):
        reservation.leave("extractor")
    assert groups.removed == [reservation.group]


def test_a_group_that_finds_no_place_is_refused_and_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: Any = Groups(fit=False)
    state: Any = ModuleType("ray._private.state")
    state.available_resources_per_node = lambda: {"a": {"GPU": 7.0}, "b": {"CPU": 2.0}}
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", groups)
    monkeypatch.setitem(sys.modules, "ray._private.state", state)
    with pytest.raises(
        BackendError, match="groups of 8, 1 GPUs, each on one node .*, got nodes with 7, 0 free"
    ):
        reserve([1, 8], "actor")
    assert groups.made == [([{"GPU": 1, "CPU": 1}, {"GPU": 8, "CPU": 8}], "PACK")]
    assert len(groups.removed) == 1


def sleeping_engines(
    monkeypatch: pytest.MonkeyPatch, ray: Any, get: Callable[..., Any]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The engines that are started, and what each of them was started with."""
    asked: list[dict[str, Any]] = []

    class RolloutRayActor:
        @classmethod
        def options(cls, **options: Any) -> Any:
            asked.append(options)
            return SimpleNamespace(remote=cls.start)

        @staticmethod
        def start(**options: Any) -> Any:
            asked[-1] |= {"engine": options}
            return SimpleNamespace(sleep=SimpleNamespace(remote=lambda: "asleep"))

    scheduling: Any = ModuleType("ray.util.scheduling_strategies")
    scheduling.PlacementGroupSchedulingStrategy = dict
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", scheduling)
    monkeypatch.setattr(parts, "_engine_actor", lambda: RolloutRayActor)
    ray.get = get
    settings = PolicyClusterSettings(engines=2, tensor_parallel=2, gpu_memory=0.4)
    started = parts.start_sleeping_engines(
        "model", settings, "the group", seed=3, name="actor", seconds=20.0
    )
    return started, asked


def test_engines_start_in_the_shared_group_and_sleep(
    monkeypatch: pytest.MonkeyPatch, ray: Any
) -> None:
    waited: list[Any] = []
    started, asked = sleeping_engines(monkeypatch, ray, lambda *of, **by: waited.append((of, by)))
    assert len(started) == 2 and waited == [((["asleep", "asleep"],), {"timeout": 20.0})]
    engines = [one["engine"] for one in asked]
    assert [engine["seed"] for engine in engines] == [3, 4]
    assert [engine["bundle_indices"] for engine in engines] == [[0, 1], [2, 3]]
    places = [one["scheduling_strategy"] for one in asked]
    assert [place["placement_group_bundle_index"] for place in places] == [0, 2]
    assert {place["placement_group"] for place in places} == {"the group"}
    assert all(engine["enable_sleep_mode"] and engine["num_gpus"] == 0.2 for engine in engines)
    assert all(one["num_gpus"] == 0 for one in asked), "its workers reserve the GPUs"


def test_engines_that_do_not_start_are_named_and_waited_for_no_longer_than_is_set(
    monkeypatch: pytest.MonkeyPatch, ray: Any
) -> None:
    def fails(error: Exception) -> Callable[..., Any]:
        def get(*_: Any, **__: Any) -> None:
            raise error

        return get

    died = RayActorError(
        "The actor died in its creation task.\n  some traceback\nValueError: Free memory on"
        " device cuda:0 is less than desired"
    )
    with pytest.raises(
        BackendError,
        match=r"engines of the actor to start and fall asleep, got: ValueError: Free memory.*;"
        " another process holds memory of this GPU",
    ):
        sleeping_engines(monkeypatch, ray, fails(died))
    with pytest.raises(BackendError, match="engines of the actor to start within 20 s"):
        sleeping_engines(monkeypatch, ray, fails(GetTimeoutError("slow")))
    with pytest.raises(TypeError, match="unexpected"):
        sleeping_engines(monkeypatch, ray, fails(TypeError("unexpected option")))


def test_ranks_get_a_fifth_of_each_bundle_and_know_that_they_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    module: Any = ModuleType("openrlhf.trainer.ray.launcher")
    module.RayActorGroup = lambda *rest, **options: asked.append((rest, options))
    monkeypatch.setitem(sys.modules, "openrlhf.trainer.ray.launcher", module)
    monkeypatch.setattr(parts, "_rank_actor", lambda: "the class")
    settings = PolicyClusterSettings(gpus_per_node=4)
    utils: Any = ModuleType("openrlhf.utils")
    utils.get_strategy = lambda arguments: arguments
    monkeypatch.setitem(sys.modules, "openrlhf.utils", utils)
    parts.start_ranks(settings, "the group", 0, shared=True, name="actor", seconds=1.0)
    assert asked == [((1, 4, "the class"), {"pg": "the group", "num_gpus_per_actor": 0.2})]
    alone, turns = (
        parts.strategy(settings, experiment().actor.optim, seed=0, sleeps=sleeps)
        for sleeps in (False, True)
    )
    assert turns.ds.enable_sleep and turns.train.colocate_all and not turns.train.async_enable, (
        "weights go through CUDA IPC"
    )
    assert not alone.ds.enable_sleep and not alone.train.colocate_all

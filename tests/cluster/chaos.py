"""Kill processes of cluster runs at random moments, and look whether the runs end as others do.

    tests/cluster/run PYTHON -m tests.cluster.chaos [--kills 50] [--seed 1] [--runs 5]
        [--kinds "engine core,rank"] [--real] [--results FILE] [settings]

Each run is `experiential-train` on a Ray of two nodes of this machine: two ranks and two engines
of the actor, one of each of the extractor, an env worker and the bank in actors. What stands for
vLLM and DeepSpeed is small (`tests.cluster.light`); all else is real. A kill is SIGKILL to one
process of a kind that is drawn, at a moment that is drawn within the two steps after the last kill
was survived. When the command ends otherwise than with 0, it is started again with ``--resume``, as
a batch system or a shell loop does, and so is a node that was killed. With ``--real``, engines and
ranks are vLLM and DeepSpeed, and take minutes to start.

Runs without kills are made first; they say what noise is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from experiential.bank.folder import FolderBank
from experiential.errors import BankError
from experiential.training.metrics import read_events
from tests.cluster.kills import engine_cores

KINDS = (
    "engine core", "engine actor", "rank", "env worker", "bank", "driver", "raylet", "gcs",
)  # fmt: skip
POLICY = ("max_length=1024", "attention=sdpa", "micro_batch_size=8", "batch_size=64")
SETTINGS = (
    "model.name=tiny", "model.dtype=bfloat16", "bank.embedder=hashing", "env.train={split: train,"
    " worlds: 4}", "actor.groups=2", "actor.group_size=8", "extractor.batch_size=8",
    "run.minutes=null", "run.checkpoint_every=2", "eval.before=false", "eval.after=false",
    "cluster.env_workers=1", "cluster.remote_bank=true", "cluster.restarts=20",
    "cluster.start_timeout=600", "cluster.call_timeout=120", "cluster.actor.engines=2",
    "cluster.actor.gpus_per_node=2", "cluster.extractor.engines=1",
    "cluster.extractor.gpus_per_node=1",
    *(f"cluster.{role}.{setting}" for role in ("actor", "extractor") for setting in POLICY),
)  # fmt: skip

REAL = (
    "cluster.start_timeout=1200", "cluster.call_timeout=240",
    *(f"cluster.{role}.{setting}" for role in ("actor", "extractor")
      for setting in ("gpu_memory=0.2", "vllm.enforce_eager=true")),
)  # fmt: skip


class Nodes:
    """Two Ray nodes of this machine, with six pretended GPUs; whichever died is started again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._cluster = folder, None
        os.environ |= {
            "RAY_gcs_rpc_server_reconnect_timeout_s": "15",  # not 60
            "RAY_worker_niceness": "0",  # not 15, which starves beside other work
        }

    def heal(self) -> str:
        """Start what is dead; return the address."""
        from ray.cluster_utils import Cluster

        cluster: Any = self._cluster
        if cluster is not None and not self._lives(cluster.head_node):
            self.close()
            cluster = None
        node: dict[str, Any] = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
        node |= {"no_monitor": True, "include_log_monitor": False}
        if cluster is None:
            head = node | {"num_cpus": 12, "num_gpus": 5, "temp_dir": str(self._folder)}
            cluster = self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for other in [*cluster.worker_nodes]:
            if not self._lives(other):
                with suppress(Exception):
                    cluster.remove_node(other, allow_graceful=False)
        if not cluster.worker_nodes:
            cluster.add_node(num_cpus=4, num_gpus=1, **node)
        return cluster.address

    @staticmethod
    def _lives(node: Any) -> bool:
        return not list(node.dead_processes())

    def pids(self, kind: str) -> list[int]:
        """Process ids of a kind that Ray started itself: gcs_server of the head, or raylet."""
        cluster: Any = self._cluster
        nodes = [cluster.head_node, *cluster.worker_nodes]
        found = [p for node in nodes for p in node.all_processes.get(kind, ())]
        return [p.process.pid for p in found if p.process.poll() is None]

    @property
    def is_whole(self) -> bool:
        """Tell whether the GCS lives, and the raylets of both nodes."""
        return bool(self.pids("gcs_server")) and len(self.pids("raylet")) == 2

    def close(self) -> None:
        """End both."""
        if self._cluster is not None:
            with suppress(Exception):
                self._cluster.shutdown()
            self._cluster = None


class Chaos:
    """One run in its folder, and its processes.

    Attributes:
        kills: what was killed when, and what happened then.
        begun: when the command was started last.
        wrong: what is not as it should be.
    """

    def __init__(
        self,
        nodes: Nodes,
        folder: Path,
        seed: int,
        steps: int,
        settings: Sequence[str] = (),
        *,
        real: bool = False,
    ) -> None:
        self.nodes, self.folder, self.seed, self.steps = nodes, folder, seed, steps
        self.settings = [*SETTINGS, *(REAL if real else ()), *settings]
        self._module = "experiential.cli.train" if real else "tests.cluster.light"
        self.kills: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.codes: list[int] = []
        self.begun = 0.0
        self._checked: set[str] = set()
        self._driver: subprocess.Popen[str] | None = None
        self._log = folder.with_suffix(".log")

    def start(self) -> None:
        """Start the command, or start it again with --resume."""
        address, self.begun = self.nodes.heal(), time.time()
        what = [f"cluster.address={address}"]
        if (self.folder / "config.yaml").is_file():
            what = ["--resume", *what]
        else:
            what = ["--recipe", "complementary", "--runtime", "openrlhf", *self.settings, *what]
            what += [f"run.steps={self.steps}", f"seed={self.seed}"]
        command = [sys.executable, "-m", self._module, "--plain"]
        with self._log.open("a") as log:
            log.write(f"--- start {len(self.codes) + 1}\n")
            log.flush()
            self._driver = subprocess.Popen(
                [*command, "--output", str(self.folder), *what], stdout=log, stderr=log, text=True
            )

    def events(self) -> list[dict[str, Any]]:
        with suppress(OSError):
            return read_events(self.folder / "metrics.jsonl")
        return []

    def step(self) -> int:
        """Return the last step done, less what a restart dropped."""
        return max((e["step"] for e in self.events() if e["event"] == "step"), default=0)

    def went_back(self) -> int:
        text = self._log.read_text() if self._log.is_file() else ""
        return text.count("; the run goes on from")

    def targets(self, kind: str) -> list[int]:
        """Return the ids of the processes of a kind that live now."""
        if kind == "driver":
            return [] if self._driver is None else [self._driver.pid]
        if kind == "gcs":
            return self.nodes.pids("gcs_server")
        if kind == "raylet":
            return self.nodes.pids("raylet")
        title = {
            "engine core": "::Rollout", "engine actor": "::Rollout", "rank": "::PolicyRank",
            "env worker": "::EnvHost", "bank": "::BankHost",
        }[kind]  # fmt: skip
        found = list[int]()
        for raylet in self.nodes.pids("raylet"):
            with suppress(psutil.Error):
                for worker in psutil.Process(raylet).children():
                    with suppress(psutil.Error):
                        if title in " ".join(worker.cmdline()):
                            meant = engine_cores(worker) if kind == "engine core" else [worker]
                            found += [process.pid for process in meant]
        return found

    def tend(self) -> int | None:
        """Start again what ended; return 0 once the run is done."""
        assert self._driver is not None
        code = self._driver.poll()
        if code is None:
            self.check()
            with suppress(Exception):
                if len(self.nodes.pids("raylet")) < 2 and self.nodes.pids("gcs_server"):
                    self.nodes.heal()  # a node that comes back, as that of a batch system
            return None
        self.codes.append(code)
        if code != 0:
            self.start()
            return None
        return 0

    def check(self) -> None:
        """Look at each committed checkpoint once."""
        for path in sorted((self.folder / "checkpoints").glob("step-*")):
            key = version(path)
            if key is None or key in self._checked:
                continue
            try:
                wrong = flaws(path)
            except (OSError, BankError) as error:
                wrong = [f"{path.name} cannot be read: {error}"]
            if version(path) == key:  # else replaced or removed meanwhile; the next is looked at
                self._checked.add(key)
                self.wrong += wrong

    @property
    def checkpoints(self) -> int:
        return len(self._checked)

    def close(self) -> None:
        if self._driver is not None and self._driver.poll() is None:
            self._driver.kill()
            self._driver.wait()


def version(path: Path) -> str | None:
    """Return what tells a committed checkpoint from others of its step; None if it is none."""
    with suppress(OSError):
        return f"{path.name} {(path / 'manifest.json').stat().st_mtime_ns}"
    return None


def flaws(path: Path) -> list[str]:
    """Return what a committed checkpoint lacks."""
    from safetensors import safe_open

    found = list[str]()
    manifest = json.loads((path / "manifest.json").read_text())
    for role in ("actor", "extractor"):
        index = path / role / "state.json"
        if not index.is_file():
            found.append(f"{path.name} has no {role}")
            continue
        places = json.loads(index.read_text())["places"]
        held = set[str]()
        for file in set(places.values()):
            with safe_open(path / role / file, framework="np") as opened:
                held |= {*opened.keys()}
        if held != set(places):
            found.append(f"{path.name} lacks tensors of the {role}")
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(path / "bank", Path(copy) / "bank")
        with FolderBank(Path(copy) / "bank", embedder="hashing", read_only=True) as bank:
            if bank.head != manifest["bank_commit"]:
                found.append(f"{path.name} has commit {bank.head}, not {manifest['bank_commit']}")
    return found


def play(
    chaos: Chaos, plan: Sequence[str], rng: random.Random, patience: float, say: Any = print
) -> dict[str, Any]:
    """Run to the end with one kill of each kind of ``plan``; return what happened.

    A run without a new step for ``patience`` seconds is taken for one that never goes on.
    """
    begun = time.time()
    chaos.start()
    left, survived, last, moved = [*plan], True, 0, time.time()
    due: float | None = None
    pending: dict[str, Any] = {}
    while (code := chaos.tend()) is None:
        time.sleep(0.5 if due is None else max(0.0, min(0.5, due - time.time())))
        now, step = time.time(), chaos.step()
        if step != last:
            last, moved = step, now
        elif now - moved > patience:
            chaos.wrong.append(
                f"no step for {patience:g} s after {pending.get('kind', 'its start')}"
            )
            break
        if pending and not survived:
            times = [e["time"] for e in chaos.events() if e["event"] == "step"]
            since = max(pending["time"], chaos.begun)
            noticed = chaos.nodes.is_whole and (  # by Ray, and by the run, which no rank can leave
                pending["kind"] != "rank"
                or chaos.went_back() > pending["back"]
                or len(chaos.codes) > pending["starts"]
            )
            if noticed and times and times[-1] > since:
                survived = True
                pending["seconds"] = round(times[-1] - pending["time"], 1)
                say(
                    f"{pending['kind']} killed after step {pending['step']}, next step after"
                    f" {pending['seconds']:g} s",
                    flush=True,
                )
        if survived and left and due is None and step >= 1:
            durations = [e["step_s"] for e in chaos.events() if e["event"] == "step"][-4:]
            due = now + rng.uniform(0.0, 2.0 * statistics.median(durations))
        if due is not None and now >= due and survived:
            targets = chaos.targets(left[0])
            if targets:
                conclude(chaos, pending)
                kind, due, survived = left.pop(0), None, False
                pending = {"kind": kind, "time": time.time(), "step": step}
                pending |= {"starts": len(chaos.codes), "back": chaos.went_back()}
                chaos.kills.append(pending)
                target = rng.choice(sorted(targets))
                if kind == "raylet":
                    pending["node"] = "head" if target == targets[0] else "other"
                with suppress(ProcessLookupError):
                    os.kill(target, signal.SIGKILL)
    conclude(chaos, pending)
    chaos.check()
    chaos.close()
    steps = {e["step"]: e for e in chaos.events() if e["event"] == "step"}
    if sorted(steps) != [*range(1, chaos.steps + 1)]:
        chaos.wrong.append(f"steps are {sorted(steps)}")
    tail = [steps[n] for n in sorted(steps)[-8:]]
    rewards = [e["reward"] for e in tail if e["reward"] is not None]  # None: no episode ended
    return {
        "seed": chaos.seed,
        "code": code,
        "minutes": (time.time() - begun) / 60,
        "kills": chaos.kills,
        "not_killed": left,
        "exit_codes": chaos.codes,
        "checkpoints": chaos.checkpoints,
        "wrong": chaos.wrong,
        "reward": statistics.mean(rewards) if rewards else None,
        "entries": tail[-1]["entries"] if tail else None,
        "actor_version": tail[-1]["actor_version"] if tail else None,
        "extractor_updates": tail[-1]["extractor_updates"] if tail else None,
        "errors": sum(e["errors"] for e in steps.values()),
    }


def conclude(chaos: Chaos, kill: dict[str, Any]) -> None:
    """Note how the run survived a kill, once the next one is due: a death may be noticed late."""
    if kill:
        codes = chaos.codes[kill.pop("starts") :]
        back = chaos.went_back() - kill.pop("back")
        went = "went back to its checkpoint" if back else "went on"
        kill["outcome"] = "command started again" if any(codes) else went
        kill["exit_codes"] = codes
        del kill["time"]


def draw_plan(kills: int, kinds: Sequence[str], rng: random.Random) -> list[str]:
    """Return as many kinds, each about as often, in random order."""
    plan = [kinds[i % len(kinds)] for i in range(kills)]
    rng.shuffle(plan)
    return plan


def summary(calm: list[dict[str, Any]], wild: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts, and final rewards beside the noise of runs without kills."""
    table: dict[str, Counter[str]] = {}
    for kill in (kill for run in wild for kill in run["kills"]):
        table.setdefault(kill["kind"], Counter())[kill["outcome"]] += 1
    rewards = [
        [run["reward"] for run in runs if run["reward"] is not None] for runs in (calm, wild)
    ]
    return {
        "kills": sum(len(run["kills"]) for run in wild),
        "runs_that_did_not_end": sum(run["code"] != 0 for run in wild),
        "checkpoints": sum(run["checkpoints"] for run in wild),
        "wrong": [text for run in wild for text in run["wrong"]],
        "outcomes": {kind: dict(found) for kind, found in sorted(table.items())},
        "reward_without_kills": rewards[0],
        "reward_with_kills": rewards[1],
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5, help="runs that share the kills")
    parser.add_argument("--calm", type=int, default=None, help="runs without kills; default: runs")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for a step")
    parser.add_argument("--real", action="store_true", help="vLLM and DeepSpeed, not stand-ins")
    parser.add_argument("settings", nargs="*", help="of the runs, after those of SETTINGS")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # closes what was started
    rng = random.Random(options.seed)
    plan = draw_plan(options.kills, options.kinds.split(","), rng)
    shares = [plan[i :: options.runs] for i in range(options.runs)]
    count = options.runs if options.calm is None else options.calm
    calm: list[dict[str, Any]] = []
    wild: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = Nodes(folder / "ray")
        stack.callback(nodes.close)
        for number, share in enumerate([[]] * count + shares):
            runs, seed = (calm, number) if number < count else (wild, number - count)
            one = Chaos(
                nodes,
                folder / f"run-{number}",
                seed,
                options.steps,
                options.settings,
                real=options.real,
            )
            stack.callback(one.close)
            runs.append(play(one, share, rng, options.patience))
            print(json.dumps(runs[-1] | {"kills": len(runs[-1]["kills"])}), flush=True)
            if options.results is not None:
                found = summary(calm, wild) | {"steps": options.steps, "seed": options.seed}
                found |= {"calm": calm, "wild": wild}
                options.results.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(summary(calm, wild), indent=1))


if __name__ == "__main__":
    main()

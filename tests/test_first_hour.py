"""What goes wrong in the first hour on a cluster, from facts and logs: cause and remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from experiential.cli.errors import complain
from experiential.config import ClusterSettings, PolicyClusterSettings
from experiential.errors import BackendError, ConfigError
from experiential.llm.models import resolve_model
from experiential.training.openrlhf import runtime, supervisor
from experiential.training.openrlhf.causes import (
    LOG_LINES,
    excerpt,
    find_cause,
    remedy,
    shorten,
)
from experiential.training.openrlhf.machine import GpuUse, gpu_uses
from experiential.training.openrlhf.nodes import Facts, check_weights, faults, look_around
from experiential.training.openrlhf.supervisor import FailedCallError, LostActorError, explain


class RayError(Exception):
    """Stands for Ray's, which knows the actor."""

    actor_id = "a1"


NONCE, MODEL, OUTPUT = "0123abcd", "/models/seven", Path("/runs/first")
FILES = (("config.json", 600), ("model.safetensors", 10**9))
GOOD = Facts(
    node="node two (10.0.0.2)",
    nonce=NONCE,
    models={MODEL: FILES},
    shm_gb=64.0,
    gpus=(GpuUse("0", 0.5, 85.5), GpuUse("1", 0.0, 85.5)),
    ray_gpus=2.0,
    torch_cuda="12.8",
    nvcc="12.4",
    tools=frozenset({"c++", "ninja"}),
    built=frozenset(),
    interfaces=("lo", "eth0", "ib0"),
    sockets={"NCCL_SOCKET_IFNAME": "ib"},
)
OFFLOADED = PolicyClusterSettings(offload_optimizer=True)


def found(facts: Facts, cluster: ClusterSettings | None = None) -> list[str]:
    return list(faults(facts, cluster or ClusterSettings(), OUTPUT, NONCE, {MODEL: FILES}))


def test_a_node_that_lacks_nothing_has_no_fault() -> None:
    assert found(GOOD) == []


@pytest.mark.parametrize(
    ("changes", "cause", "fix"),
    [
        ({"nonce": "No such file or directory"}, "to see the files that the trainer", "--output"),
        ({"nonce": ""}, "got: an empty file", "--output"),
        ({"models": {MODEL: ()}}, f"{MODEL} on node two (10.0.0.2), found none", "copy it there"),
        ({"models": {MODEL: FILES[:1]}}, "got another model.safetensors", "copy it there again"),
        ({"shm_gb": 0.067}, "shared memory on node two (10.0.0.2)", "--shm-size=16g"),
        ({"nvcc": ""}, "nvcc on node two (10.0.0.2)", "toolkit of CUDA 12.8"),
        ({"tools": frozenset({"c++"})}, "ninja on the PATH", "activate the environment"),
        ({"gpus": (GpuUse("0", 40.0, 85.5), GOOD.gpus[1])}, "GPU 0 has 40.0 of 85.5", "end the"),
        ({"sockets": {"NCCL_SOCKET_IFNAME": "ens5"}}, "lo, eth0, ib0, got ens5", "unset it"),
        ({"locks": ("/x/fused_adam/lock",)}, "found /x/fused_adam/lock", "rm /x/fused_adam/lock"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_fault_is_named_with_its_fix(changes: dict[str, Any], cause: str, fix: str) -> None:
    [said] = found(replace(GOOD, **changes))
    assert said.startswith("Expected ") and "node two (10.0.0.2)" in said and "\n" not in said
    assert cause in said and fix in said


def test_a_gpu_that_another_job_of_this_ray_holds_is_no_fault() -> None:
    gpus = (GpuUse("0", 40.0, 85.5), GpuUse("1", 0.0, 85.5))
    assert found(replace(GOOD, gpus=gpus, ray_gpus=1.0)) == []


def test_operators_that_were_compiled_at_installation_need_no_compiler() -> None:
    bare = replace(GOOD, nvcc="", tools=frozenset(), built=frozenset({"fused_adam"}))
    assert found(bare) == []
    offloaded = ClusterSettings(actor=OFFLOADED, extractor=OFFLOADED)
    assert "DeepSpeed compiles cpu_adam there" in found(bare, offloaded)[0]


def test_cpu_adam_goes_without_nvcc_but_not_with_another_version() -> None:
    offloaded = ClusterSettings(actor=OFFLOADED, extractor=OFFLOADED)
    assert found(replace(GOOD, nvcc=""), offloaded) == []
    assert found(replace(GOOD, nvcc="11.8")) == []
    [said] = found(replace(GOOD, nvcc="11.8"), offloaded)
    assert said.startswith("Expected nvcc of CUDA 12.8 on node two (10.0.0.2)")
    assert "got 11.8; set CUDA_HOME" in said


def test_a_node_without_gpus_needs_no_cuda() -> None:
    bare = replace(GOOD, gpus=(), torch_cuda="", nvcc="", shm_gb=0.06, ray_gpus=3.0)
    assert found(bare) == []


def test_a_process_sees_its_own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nonce").write_text(NONCE)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    facts = look_around("here", str(tmp_path / "nonce"), [str(tmp_path), "/nowhere"], 0.0)
    assert facts.nonce == NONCE and facts.models["/nowhere"] == ()
    assert facts.models[str(tmp_path)] == (("config.json", 2), ("nonce", 8))
    assert "lo" in facts.interfaces and facts.sockets == {"GLOO_SOCKET_IFNAME": "nosuch0"}


def test_the_use_of_gpus_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0, 1000, 81559\\n1, [N/A], 81559\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    [gpu] = gpu_uses()
    assert (gpu.number, round(gpu.used_gb, 3), round(gpu.gb, 1)) == ("0", 1.049, 85.5)


def test_a_misnamed_tensor_is_found_before_anything_starts(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = resolve_model("tiny")
    assert isinstance(source, Path)
    check_weights(source)
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    right, wrong = (f"model.layers.0.mlp.{name}.weight" for name in ("up_proj", "upp_proj"))
    weights[wrong] = weights.pop(right)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{right} in .*; the folder holds {wrong}"):
        check_weights(folder)


def test_a_mixture_of_experts_on_the_hub_is_found_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers

    configs = {"some/moe": transformers.MixtralConfig(), "some/dense": transformers.LlamaConfig()}

    class AutoConfig:
        @staticmethod
        def from_pretrained(name: str, **_: Any) -> Any:
            return configs[name]

    monkeypatch.setattr(transformers, "AutoConfig", AutoConfig)
    check_weights("some/dense")
    check_weights("some/unknown")
    with pytest.raises(ConfigError, match="a dense model .* got some/moe with 8 experts"):
        check_weights("some/moe")


def test_ray_of_another_address_is_not_joined_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    stub: Any = ModuleType("ray")
    stub.is_initialized = lambda: False
    monkeypatch.setitem(sys.modules, "ray", stub)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    with pytest.raises(ConfigError, match=r"got 10\.0\.0\.9:6379; set cluster\.address=auto"):
        runtime.join(ClusterSettings(), 2)


LOG = """\
(EngineCore pid=71) INFO 11-23 22:00:00 [core.py:90] Initializing a V1 LLM engine
(EngineCore pid=71) ERROR 11-23 22:00:09 [core.py:700] Traceback (most recent call last):
(EngineCore pid=71) ERROR 11-23 22:00:09 [core.py:700]   File "weight_utils.py", line 7, in load
(EngineCore pid=71) ERROR 11-23 22:00:09 [core.py:700] ValueError: There is no module or parameter \
named 'model.layers.0.mlp.upp_proj' in LlamaForCausalLM
Traceback (most recent call last):
  File "core_client.py", line 3, in start
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
""".splitlines()


class TestCauses:
    def test_the_root_of_a_log_is_its_cause(self) -> None:
        cause = find_cause(LOG)
        assert cause.startswith("ValueError: There is no module or parameter named 'model.layers.0")
        assert "save_pretrained" in remedy(cause)
        assert find_cause(["nothing", "ErrorLog: none", "0 errors"]) == ""

    def test_of_a_traceback_the_last_line_is_kept(self) -> None:
        frames = "\n".join(f'  File "{"long/" * 20}{i}.py", line {i}, in f' for i in range(20))
        said = shorten(
            RuntimeError(f"ray::Engine.__init__() (pid=3)\n{frames}\nValueError: no room")
        )
        assert said == "ValueError: no room"

    def test_a_long_message_loses_its_middle(self) -> None:
        said = shorten("a" * 1000 + " the cause")
        assert len(said) < 310 and said.endswith(" the cause")

    @pytest.mark.parametrize(
        ("text", "advice"),
        [
            ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "max_length"),
            (
                "ValueError: Free memory on device cuda:0 (40/79 GiB) on startup is less than"
                " desired GPU memory utilization (0.85, 67 GiB)",
                "another process holds",
            ),
            ("ValueError: No available memory for the cache blocks.", "raise cluster.*.gpu_memory"),
            ("MissingCUDAException: CUDA_HOME does not exist", "set CUDA_HOME"),
            ("NCCL WARN Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
            ("DistNetworkError: EADDRINUSE, port: 29500", "another process took the port"),
            ("OSError: [Errno 28] No space left on device: '/dev/shm/nccl-x'", "--shm-size"),
            ("torch.distributed.DistBackendError: NCCL error: internal error", "NCCL_DEBUG=INFO"),
            ("KeyError: 'x'", ""),
        ],
    )
    def test_known_failures_have_a_remedy(self, text: str, advice: str) -> None:
        assert advice in remedy(text) and bool(advice) == bool(remedy(text))

    def test_a_dead_actor_is_explained_by_its_log(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervisor, "log_of", lambda actor: (f"10.0.0.2:/{actor}.err", LOG))
        error = LostActorError("actor engine 0", "died: RuntimeError: Engine core failed")
        error.__cause__ = RayError()
        explain(error)
        said = str(error)
        assert said.startswith("Expected actor engine 0 to be alive, but it died: RuntimeError")
        assert "; cause: ValueError: There is no module or parameter named" in said
        assert said.endswith("save the model again with transformers' save_pretrained")
        assert error.__notes__ == ["from the log 10.0.0.2:/a1.err", *(f"  {one}" for one in LOG)]

    def test_the_lines_that_lead_to_the_cause_are_shown_and_the_last(self) -> None:
        log = [*(f"line {i}" for i in range(50)), "ValueError: no room", *map(str, range(100))]
        shown = excerpt(log, find_cause(log))
        assert len(shown) == LOG_LINES and shown[0] == "line 36"
        assert shown[14:] == ["ValueError: no room", "...", "96", "97", "98", "99"]
        assert excerpt(log, "") == log[-LOG_LINES:] and excerpt(log[:51], log[50]) == log[31:51]

    def test_a_living_actor_is_not_explained_by_what_its_log_held_before(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(supervisor, "log_of", lambda _: ("", ["ValueError: long ago", "fine"]))
        error = FailedCallError("actor rank 0", RuntimeError("CUDA out of memory. Tried 2 GiB"))
        error.__cause__ = RayError()
        explain(error)
        assert "long ago" not in str(error) and "micro_batch_size or max_length" in str(error)

    def test_the_log_is_printed_below_the_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        error = BackendError("Expected an engine,\ngot none")
        error.add_note("last lines of 10.0.0.2:/tmp/ray/worker-1.err")
        error.add_note("  ValueError: no room")
        assert complain(error, 1) == 1
        assert capsys.readouterr().err.splitlines() == [
            "error: Expected an engine, got none",
            "last lines of 10.0.0.2:/tmp/ray/worker-1.err",
            "  ValueError: no room",
        ]


SLURM = Path(__file__).parent.parent / "examples" / "cluster" / "slurm.sh"


def submit(tmp_path: Path, restarts: int = 0, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run the script with stand-ins for the programs of SLURM, Ray and this package."""
    programs = {
        "scontrol": '[ "$1" = requeue ] && echo "$*" >&2 || { echo one; echo two; }',
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "hostname": "echo 10.0.0.1",
        "ray": "[ $1 = status ] || exec /bin/sleep 20",
        "python": "cat >/dev/null",
        "experiential-train": 'echo "train $*"',
        "sleep": "exec /bin/sleep 0.2",
        **programs,
    }
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    env = {"VENV": str(folder.parent), "OUTPUT": str(tmp_path / "run"), "SLURM_JOB_NODELIST": "x"}
    env |= {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restarts)}
    path = os.environ["PATH"]
    return subprocess.run(
        ["bash", SLURM, "run.steps=3"],
        env=env | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class TestSlurm:
    def test_a_job_that_is_requeued_resumes_whatever_was_saved(self, tmp_path: Path) -> None:
        """`--resume` before the first checkpoint is tested in tests/test_cli_interrupt.py."""
        first = submit(tmp_path)
        assert first.returncode == 0, first.stderr
        assert f"train --recipe complementary-7b --output {tmp_path / 'run'}" in first.stdout
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.yaml").touch()
        again = submit(tmp_path)
        assert f"train --resume --output {tmp_path / 'run'} --plain" in again.stdout
        assert "cluster.address=10.0.0.1:6379" in again.stdout and "run.steps=3" in again.stdout

    @pytest.mark.parametrize(
        ("code", "restarts", "requeued"),
        [(1, 0, True), (137, 9, True), (1, 10, False), (2, 0, False), (0, 0, False)],
    )
    def test_a_job_whose_run_was_lost_goes_back_into_the_queue(
        self, tmp_path: Path, code: int, restarts: int, requeued: bool
    ) -> None:
        job = submit(tmp_path, restarts, **{"experiential-train": f"exit {code}"})
        assert job.returncode == code
        assert ("requeue 17" in job.stderr) == requeued, job.stderr

    def test_a_taken_port_ends_the_job_at_once(self, tmp_path: Path) -> None:
        taken = "[ $1 = status ] && exit 0; echo 'Address already in use' >&2; exit 1"
        job = submit(tmp_path, ray=taken)
        assert job.returncode == 1 and "train" not in job.stdout
        assert "Expected Ray to start at 10.0.0.1:6379, got an end; set PORT" in job.stderr

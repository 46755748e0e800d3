"""The examples for torchtitan, DeepSpeed and Ray Train, run with the libraries on CPU ranks where installed."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import tracekit
from tests.integration import recordings

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
pytestmark = pytest.mark.accuracy  # libraries that no extra of ours installs, and minutes


def run_example(name: str, *arguments: object, launcher: tuple[str, ...] = TORCHRUN) -> None:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])  # where the hook finds tracekit
    ours = {"PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = os.environ | ours
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_the_hook_of_torchtitan_checks_each_iteration(tmp_path: Path) -> None:
    needs("torchtitan")
    run_example("torchtitan_profiler", "--out", tmp_path, "--steps", 20)
    for iteration in (10, 20):
        folder = tmp_path / "profiling" / "traces" / f"iteration_{iteration}"
        run = tracekit.load(folder)
        assert list(run.ranks) == [0, 1]
        assert run.table("breakdown")["step"].unique().sort().to_list() == list(range(iteration - 4, iteration))


def test_the_loop_of_deepspeed_leaves_its_steps(tmp_path: Path) -> None:
    needs("deepspeed")
    run_example("deepspeed_loop", "--out", tmp_path, "--steps", 16)
    assert recordings.steps(tracekit.load(tmp_path)) == {rank: [10, 11, 12, 13, 14] for rank in (0, 1)}
    assert [line["step"] for line in recordings.metrics(tmp_path)] == list(range(16))


def test_workers_of_ray_leave_one_run(tmp_path: Path) -> None:
    needs("ray")
    run_example("ray_train", "--out", tmp_path / "run", "--steps", 16, launcher=())
    assert recordings.steps(tracekit.load(tmp_path / "run")) == {rank: [10, 11, 12, 13, 14] for rank in (0, 1)}

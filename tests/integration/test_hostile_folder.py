"""Commands in a folder that has Python packages of the names that tracekit imports: none of them runs."""

import ast
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.integration import recorded
from tests.integration.test_ci_action import ACTION
from tests.support import cli_runner, composite_action, kineto_files, ports
from tests.support.python_path import PYTHON_PATH
from tests.support.selection import others_in_accuracy

SHADOWED = (
    "tracekit", "dashboard", "instrumented_trainers", "streamlit", "polars", "duckdb", "torch", "distributed",
    "runpy", "json", "multiprocessing", "tokenize", "pip", "sitecustomize",
)  # fmt: skip
EXECUTED = "from pathlib import Path\nPath(__file__).parents[1].joinpath('EXECUTED').touch()\n"
# Calls what starts a process after a recording; the folder is that of the process.
AFTER_RECORDING = """
from pathlib import Path
from tracekit.capture import uploader
from tracekit.capture.launcher import exit_report
exit_report.print_check(Path("rank0.json"))
exit_report.print_hang(Path("dumps"))
upload = uploader.RunUpload("memory://nowhere/run", Path("staging").resolve())
upload.begin(0, leads=True)
upload.finish({"TRACEKIT_UPLOAD_WAIT_S": "20"})
"""
CRASHING_RULE = """
from dataclasses import dataclass
from typing import ClassVar
from tracekit.rules.rule import Rule

@dataclass(frozen=True)
class Crashes(Rule):
    '''Crashes.'''
    code: ClassVar[str] = "CRASH001"

    def check(self, run):
        raise ZeroDivisionError
"""
TRAINING = """
import torch
import helper

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(8):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(helper.ANSWER)
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Return a folder with one trace and with a package of each name in SHADOWED."""
    folder = tmp_path / "hostile"
    for name in SHADOWED:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(EXECUTED)
        (folder / name / "__main__.py").write_text(EXECUTED)
    kineto_files.write(folder / "rank0.json", kineto_files.trace(0, steps=3))
    (folder / "dumps").mkdir()
    return folder


def has_executed(folder: Path) -> bool:
    return (folder / "EXECUTED").exists()


def installed_command(folder: Path) -> list[str]:
    """Return the command of a script as pip installs it: its own folder, not the current one, is on the path."""
    script = folder.parent / "bin" / "tracekit"
    script.parent.mkdir(exist_ok=True)
    script.write_text("from tracekit.cli import main\n\nif __name__ == '__main__':\n    main()\n")
    return [sys.executable, str(script)]


def in_folder(folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in the folder, as the installed `tracekit` runs it."""
    return subprocess.run(
        [*installed_command(folder), *words],
        cwd=folder,
        env=cli_runner.environment(**{"PYTHONPATH": PYTHON_PATH} | variables),
        capture_output=True,
        text=True,
        timeout=cli_runner.TIMEOUT_S,
        check=False,
    )


def test_the_folder_is_hostile(hostile: Path):
    subprocess.run([sys.executable, "-m", "tracekit"], cwd=hostile, env=cli_runner.environment(), check=False)
    assert has_executed(hostile)


VERIFIED = Path(__file__).parent / "scripts" / "verified_trainings.py"
COMMANDS = {
    "check": "check rank0.json --fail-on never",
    "check by processes": "check rank0.json --fail-on never --executor processes",
    "check by Dask": "check rank0.json --fail-on never --executor dask --cluster local:1",
    "query": "query rank0.json 'SELECT count(*) FROM ops'",
    "export": "export rank0.json --format html --view kernels --output page.html",
    "tune": "tune rank0.json",
    "verify-training": f"verify-training {VERIFIED}:right --strategy ddp --steps 1",
}


@pytest.mark.parametrize("name", others_in_accuracy(COMMANDS, ["check by Dask", "export", "verify-training"]))
def test_no_command_imports_from_the_current_folder(hostile: Path, name: str):
    done = in_folder(hostile, *shlex.split(COMMANDS[name]))
    assert done.returncode == 0, done.stderr
    assert not has_executed(hostile)


def test_a_crash_imports_nothing_from_the_current_folder(hostile: Path, tmp_path: Path):
    metadata = tmp_path / "plugin" / "crashing-1.0.dist-info"
    metadata.mkdir(parents=True)
    (tmp_path / "plugin" / "crashing.py").write_text(CRASHING_RULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: crashing\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tracekit.rules]\ncrashing = crashing:Crashes\n")
    path = f"{PYTHON_PATH}{os.pathsep}{tmp_path / 'plugin'}"
    done = in_folder(hostile, "check", "rank0.json", PYTHONPATH=path, TMPDIR=str(tmp_path), TRACEKIT_CRASH_REPORT="100")
    assert done.returncode == 3
    assert "on which the command fails" in done.stderr  # the process that looks for a small run has run
    assert not has_executed(hostile)


def test_the_dashboard_imports_nothing_from_the_current_folder(hostile: Path):
    words = ["dashboard", ".", "--port", str(ports.free_port()), "--no-browser"]
    server = subprocess.Popen(
        [*installed_command(hostile), *words],
        cwd=hostile,
        env=cli_runner.environment(PYTHONPATH=PYTHON_PATH),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert is_served(f"http://localhost:{words[3]}/_stcore/health")
        assert not has_executed(hostile)
    finally:
        server.terminate()
        server.wait()


def is_served(address: str) -> bool:
    deadline = time.monotonic() + cli_runner.TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address) as answer:
                return bool(answer.read() == b"ok")
        except OSError:
            time.sleep(0.1)
    return False


def test_what_the_recorder_starts_imports_nothing_from_the_current_folder(hostile: Path):
    command = [sys.executable, "-P", "-c", AFTER_RECORDING]
    environment = cli_runner.environment(PYTHONPATH=PYTHON_PATH)
    done = subprocess.run(command, cwd=hostile, env=environment, capture_output=True, text=True, check=False)
    assert "rank0.json  1 rank" in done.stderr  # of `check`
    assert "dumps: " in done.stderr  # of `hang`
    assert not has_executed(hostile)


@pytest.mark.parametrize(
    "program", [("train.py",), pytest.param(("-m", "train"), marks=pytest.mark.accuracy)], ids=" ".join
)
def test_a_recorded_training_imports_from_its_own_folder(tmp_path: Path, program: tuple[str, ...]):
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "helper.py").write_text("ANSWER = 42\n")
    words = recorded.command("--steps", "2:4", "--out", "run", "--", sys.executable, *program)
    done = recorded.do(words, tmp_path)
    assert (done.code, done.out) == (0, "42\n"), done.err
    assert (tmp_path / "run" / "rank00000.pt.trace.json.gz").exists()


def test_the_action_imports_nothing_from_the_checkout(hostile: Path, tmp_path: Path):
    done = composite_action.run(
        ACTION,
        {"run": "rank0.json", "python": sys.executable, "fail-on": "never", "comment": "false"},
        cwd=hostile,
        temp=tmp_path / "temp",
        environment=cli_runner.environment(PYTHONPATH=PYTHON_PATH),
    )
    assert done.outputs["verdict"] == "passed", done.log
    assert not has_executed(hostile)


ROOMS = ("tracekit", "dashboard", "instrumented_trainers")
# Places that may name the interpreter or a start method: the module of commands itself, the user's own training script,
# and the users of multiprocessing, which start their processes within `python_child.safe_path()`.
STARTERS = {
    "tracekit/conventions/python_child.py",
    "tracekit/capture/launcher/launch.py",
    "tracekit/executors/processes.py",
    "instrumented_trainers/launch.py",
    "instrumented_trainers/verification/processes.py",
}


def test_one_module_builds_the_commands_of_our_own_processes():
    paths = [path for room in ROOMS for path in cli_runner.ROOT.joinpath(room).rglob("*.py")]
    names = {str(path.relative_to(cli_runner.ROOT)) for path in paths if starts_python(ast.parse(path.read_text()))}
    assert names == STARTERS


def starts_python(tree: ast.Module) -> bool:
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return bool(attributes & {"executable", "get_context"})

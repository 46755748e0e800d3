"""A bug of tracekit leaves a file to report it with: where it is, and a small scrubbed run that shows it."""

import json
import os
import zipfile
from pathlib import Path

import pytest

from tests.support import kineto_files
from tests.support.cli_runner import ROOT, in_a_process, only_line
from tracekit.cli import crash_report, reproduction

LIMIT = {"TRACEKIT_CRASH_REPORT": "200"}
SECRET_HOST, SECRET_USER = "kronos-node7", "ferdinand"
# A rule from outside, as another distribution would install it.
CRASHING_RULE = """
from dataclasses import dataclass
from typing import ClassVar
from tracekit.rules.rule import Rule

@dataclass(frozen=True)
class CrashesOnAnOp(Rule):
    '''Crashes.'''
    code: ClassVar[str] = "CRASH001"

    def check(self, run):
        for trace in run.traces():
            if "aten::mm" in trace.ops["name"].to_list():
                raise ZeroDivisionError(f"{trace.path} by zero")
        yield from ()
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    metadata = tmp_path / "plugin" / "crashing-1.0.dist-info"
    metadata.mkdir(parents=True)
    (tmp_path / "plugin" / "crashing.py").write_text(CRASHING_RULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: crashing\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tracekit.rules]\ncrashing = crashing:CrashesOnAnOp\n")
    return tmp_path / "plugin"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks with a manifest; the op on which the rule crashes is in rank 1, among 200 slices."""
    folder = tmp_path / SECRET_USER / "run"
    for rank in (0, 1):
        trace = kineto_files.trace(rank, steps=3)
        frame = f"/home/{SECRET_USER}/train.py(3): step"
        trace["traceEvents"] += [
            kineto_files.slice_("python_function", frame, 100 + i, 5, tid=3, **{"Python id": i}) for i in range(200)
        ]
        if rank:
            trace["traceEvents"].insert(90, kineto_files.slice_("cpu_op", "aten::mm", 150, 20, tid=1))
        kineto_files.write(folder / f"rank0000{rank}.pt.trace.json", trace)
    (folder / "run.json").write_text(json.dumps({"schema": "tracekit.run/1", "world_size": 2, "host": SECRET_HOST}))
    return folder


def check(run: Path, plugin: Path, *words: str, **variables: str) -> "tuple[int, str]":
    path = f"{ROOT}{os.pathsep}{plugin}"
    done = in_a_process("check", run, *words, PYTHONPATH=path, TMPDIR=str(plugin), **variables)
    return done.returncode, only_line(done)


def test_a_crash_leaves_a_small_scrubbed_run_on_which_the_command_crashes(run: Path, plugin: Path, tmp_path: Path):
    words = ("--set", "COMM001.max_exposed_ratio=0.4", "--out", str(tmp_path / "report"))
    code, line = check(run, plugin, *words, **LIMIT)
    assert code == 3
    assert "please report it with the file" in line
    assert "the traceback and 1 file with 1 event on which the command fails, without names and paths" in line
    (path,) = plugin.glob("tracekit-crash-*")
    assert str(path) in line
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "sent")
        everything = b"".join(archive.read(name) for name in archive.namelist())
    for secret in (SECRET_HOST, SECRET_USER, str(tmp_path)):
        assert secret.encode() not in everything
    report = json.loads((tmp_path / "sent" / "report.json").read_text())
    assert report["error"] == "ZeroDivisionError"
    assert report["message"] == "PATH/rank00001.pt.trace.json by zero"
    assert report["traceback"][-1] == "crashing.py:14 in check"
    assert report["command"][:2] == ["check", "PATH"]
    (trace,) = (tmp_path / "sent" / "run").iterdir()
    assert [event["name"] for event in json.loads(trace.read_text())["traceEvents"]] == ["aten::mm"]
    assert check(tmp_path / "sent" / "run", plugin, TRACEKIT_CRASH_REPORT="0")[0] == 3
    assert not (tmp_path / "report").exists()


def test_without_time_for_a_run_the_traceback_is_left(run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TRACEKIT_CRASH_REPORT", "0.01")
    monkeypatch.setattr(crash_report.tempfile, "tempdir", str(tmp_path))
    report = crash_report.write(ZeroDivisionError(f"in {run}/rank0.json"), ["check", str(run)])
    assert report is not None
    assert report.content == "the traceback, without names and paths"
    with zipfile.ZipFile(report.path) as archive:
        assert archive.namelist() == ["report.json"]
        assert json.loads(archive.read("report.json"))["message"] == "in PATH/rank0.json"


def test_a_folder_with_the_name_of_the_command_is_no_path(run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TRACEKIT_CRASH_REPORT", "0.01")
    monkeypatch.setattr(crash_report.tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for folder in ("check", SECRET_USER):
        (tmp_path / folder).mkdir(exist_ok=True)
    report = crash_report.write(ZeroDivisionError("cannot check"), ["--debug", "check", SECRET_USER])
    assert report is not None
    with zipfile.ZipFile(report.path) as archive:
        content = json.loads(archive.read("report.json"))
    assert content["command"] == ["--debug", "check", "PATH"]
    assert content["message"] == "cannot check"


def test_a_message_with_other_paths_and_addresses_is_scrubbed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(crash_report.tempfile, "tempdir", str(tmp_path))
    error = ValueError(f"cannot open '/home/{SECRET_USER}/data/a.json' for {SECRET_USER}@example.org at 10.1.2.3")
    report = crash_report.write(error, ["history", "add"])
    assert report is not None
    with zipfile.ZipFile(report.path) as archive:
        message = json.loads(archive.read("report.json"))["message"]
    assert message.startswith("cannot open '<path1>/a.json' for <")
    assert SECRET_USER not in message
    assert "10.1.2.3" not in message


def test_without_a_file_the_message_names_the_variable(run: Path, plugin: Path):
    code, line = check(run, plugin, TRACEKIT_CRASH_REPORT="0")
    assert code == 3
    assert line.endswith("please report it with the output of TRACEKIT_DEBUG=1")
    assert list(plugin.glob("tracekit-crash-*")) == []


def test_a_command_is_repeated_without_the_files_that_it_writes(run: Path):
    words = ["--debug", "check", "--history", "h.duckdb", str(run), "-o", "x", "--also", "json=y", "--format", "json"]
    assert reproduction.repeated_command(words) == reproduction.RepeatedCommand(("check", "--format", "json"), run, ())
    sql = ["query", str(run), "SELECT 1", "--out", "x"]
    assert reproduction.repeated_command(sql) == reproduction.RepeatedCommand(("query",), run, ("SELECT 1",))


@pytest.mark.parametrize("words", [["record", "--", "check.py"], ["check", "/missing"], ["history", "add", "."], []])
def test_other_commands_are_not_repeated(words: list[str]):
    assert reproduction.repeated_command(words) is None

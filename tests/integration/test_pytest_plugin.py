"""The pytest plugin as a project's tests use it: real pytest processes, real small loops."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.python_path import PYTHON_PATH
from tests.support.selection import others_in_accuracy
from tracekit.errors import ConfigError
from tracekit.model import environment
from tracekit.testing import marks, plugin, summary
from tracekit.testing.recording import TraceRun

ROOT = Path(__file__).parents[2]
# Installed, the plugin comes by its entry point; in a bare checkout it has to be named.
INSTALLED = any(point.value == plugin.__name__ for point in importlib.metadata.entry_points(group="pytest11"))
NAMED = () if INSTALLED else ("-p", plugin.__name__)
LOOP = """
    import time
    import unittest

    import pytest
    import torch


    def train(steps=10, wait_s=0.0):
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.randn(32, 64)).pow(2).mean().backward()
            time.sleep(wait_s)
            optimizer.step()
            optimizer.zero_grad()
"""
TESTS = """
    @pytest.mark.trace_budget(step_time="10s", exposed_communication_ratio=0.2, steps="3:8")
    def test_within_budget():
        train()


    @pytest.mark.trace_budget(step_time="5ms", peak_allocated="1GiB")
    def test_broken():
        train(wait_s=0.02)


    @pytest.mark.trace_budget(step_time="10s")
    def test_short():
        train(steps=5)


    @pytest.mark.trace_budget(step_time="1ns")
    def test_raises():
        train(steps=4)
        raise KeyError("its own")


    @pytest.mark.trace_budget(tokens_per_second=1)
    def test_unmeasured():
        train()


    @pytest.mark.trace_budget(step_time="1ns")
    def test_skipped():
        train(steps=4)
        pytest.skip("halfway")


    def test_own_assertions(trace_run):
        train()
        assert trace_run.steps_done == 10
        assert trace_run.run.trace(0).steps["step"].to_list() == [3, 4, 5, 6, 7]


    def test_steps_named_by_the_test(trace_run):
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trace_run.record("1:3") as recording:
            for step in range(4):
                model(torch.randn(32, 64)).sum().backward()
                with recording.span("optimizer"):
                    for _ in range(1 if step == 0 else 3):
                        optimizer.step()
                recording.step({"loss": 1.0})
        trace = recording.run.trace(0)
        assert trace.steps["step"].to_list() == [1, 2]
        assert (trace.ops["name"] == "Optimizer.step#SGD.step").sum() == 6
        assert "optimizer" in trace.ops["phase"].to_list()


    def test_two_optimizers(trace_run):
        models = [torch.nn.Linear(8, 8), torch.nn.Linear(2, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for _ in range(9):
            for model, optimizer in zip(models, optimizers):
                model(torch.randn(4, model.in_features)).sum().backward()
                optimizer.step()
        assert 9 <= trace_run.steps_done <= 10
        assert trace_run.run.trace(0).steps.height == 5


    def test_no_step_is_named_when_the_run_is_requested(trace_run):
        with pytest.raises(Exception, match="steps 3:8 were to be recorded, but the test made none of them"):
            trace_run.run


    @pytest.mark.trace_budget(step_time="10s", steps="1:4")
    class TestClass:
        @pytest.mark.parametrize("steps", [5, 2])
        def test_parametrized(self, steps):
            train(steps)

    class TestOfUnittest(unittest.TestCase):
        @pytest.mark.trace_budget(step_time="1ns", steps="1:4")
        def test_method(self):
            train(5)


    def test_plain():
        from torch.optim import optimizer

        assert not optimizer._global_optimizer_post_hooks
"""


def run_pytest(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    path = os.pathsep.join(filter(None, (PYTHON_PATH, os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *NAMED, *words],
        cwd=folder,
        env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def written(folder: Path, name: str, *parts: str) -> Path:
    (folder / name).write_text("\n\n".join(textwrap.dedent(part) for part in parts))
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All tests above, run once; what pytest says, each test's outcome, and the folder of the runs that stay."""
    folder = written(tmp_path_factory.mktemp("project"), "test_train.py", LOOP, TESTS)
    said = run_pytest(folder, "--trace-dir", "traces", "--junitxml", "results.xml")
    cases = ElementTree.parse(folder / "results.xml").iter("testcase")
    outcomes = {case.get("name"): next((child.tag for child in case), "passed") for case in cases}
    return said, outcomes, folder


def test_a_broken_budget_fails_its_test_and_nothing_else_does(done):
    said, outcomes, _ = done
    assert said.returncode == 1, said.stdout
    assert {name for name, outcome in outcomes.items() if outcome == "failure"} == {
        "test_broken", "test_short", "test_raises", "test_unmeasured", "test_parametrized[2]", "test_method",
    }  # fmt: skip
    assert outcomes["test_skipped"] == "skipped"
    assert len(outcomes) == 14


def test_the_message_says_what_was_measured_against_what_and_what_costs_most(done):
    said, _, folder = done
    message = said.stdout.partition("test_broken ___")[2].partition("\n____")[0]
    assert "trace budget broken, by steps 3–7\n" in message
    assert re.search(r"\n  step_time: 2\d\.?\d* ms, at most 5 ms is allowed\.|\n  step_time: \d+\.?\d* ms", message)
    assert "peak_allocated" not in message
    assert "what costs most:\n" in message
    (run,) = re.findall(r"the run: tracekit check (.+)", message)
    assert (folder / run / "run.json").is_file()


def test_a_loop_that_is_too_short_says_so_and_a_test_that_raises_fails_by_itself(done):
    said, _, _ = done
    assert "steps 3:8 were to be recorded, but the test made 5: trace_run.step() ends a step" in said.stdout
    assert "tokens_per_second: not measured: no log records the tokens of a step" in said.stdout
    assert "KeyError: 'its own'" in said.stdout
    assert "test_raises" not in said.stdout.partition("recorded trainings")[2].partition("short test summary")[0]


def test_the_summary_has_a_line_per_judged_test(done):
    said, _, _ = done
    table = said.stdout.partition("recorded trainings")[2].partition("short test summary")[0]
    lines = {line.split()[0]: line for line in table.splitlines()[1:-1]}
    assert set(lines) == {
        "test", "test_train.py::test_within_budget", "test_train.py::test_broken", "test_train.py::test_short",
        "test_train.py::test_unmeasured",
        "test_train.py::TestClass::test_parametrized[5]", "test_train.py::TestClass::test_parametrized[2]",
        "test_train.py::TestOfUnittest::test_method",
    }  # fmt: skip
    assert re.search(r"\d ms|\d µs|\d s", lines["test_train.py::test_within_budget"])
    assert "KiB" in lines["test_train.py::test_within_budget"]
    assert "broken: step_time" in lines["test_train.py::test_broken"]
    assert max(map(len, table.splitlines())) <= 160


def test_runs_of_failed_tests_stay_and_the_profiler_says_nothing(done):
    said, _, folder = done
    traces = {path.name.rpartition("-")[0] for path in (folder / "traces").iterdir()}
    assert traces == {
        "test_train.py-test_broken", "test_train.py-test_short", "test_train.py-test_raises",
        "test_train.py-test_unmeasured",
        "test_train.py-TestClass-test_parametrized-2", "test_train.py-TestOfUnittest-test_method",
    }  # fmt: skip
    assert "USDT" not in said.stdout + said.stderr
    manifest = next((folder / "traces").glob("*test_broken*/run.json"))
    assert json.loads(manifest.read_text())["recorded_by"] == "pytest"


@pytest.mark.parametrize("workers", others_in_accuracy([1, 2], [1]))
def test_under_xdist_each_test_is_recorded_and_the_summary_is_whole(tmp_path, workers):
    pytest.importorskip("xdist")
    tests = """
        @pytest.mark.parametrize("number", range(2))
        @pytest.mark.trace_budget(step_time="10s", steps="1:3")
        def test_it(number):
            train(4)
    """
    folder = written(tmp_path, "test_train.py", LOOP, tests)
    said = run_pytest(folder, "-n", str(workers), "--trace-keep", "all", "--trace-dir", str(folder / "traces"))
    assert said.returncode == 0, said.stdout
    assert all(f"test_it[{number}]" in said.stdout.partition("recorded trainings")[2] for number in range(2))
    assert len(list((folder / "traces").glob("*/rank00000.pt.trace.json.gz"))) == 2


def test_ranks_that_the_test_starts_are_recorded_where_it_says_so(tmp_path):
    ranks = """
        import os, sys
        import torch
        import torch.distributed as dist

        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=rank, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
        dist.barrier()
        dist.destroy_process_group()
    """
    tests = """
        import subprocess, sys

        import pytest


        @pytest.mark.trace_budget(step_time="60s")
        def test_ranks(trace_run):
            with trace_run.ranks("2:4"):
                started = [subprocess.Popen([sys.executable, "ranks.py", str(rank)]) for rank in (0, 1)]
                assert [each.wait(120) for each in started] == [0, 0]
            assert trace_run.run.ranks == (0, 1)
            assert trace_run.run.trace(1).collectives.height
    """
    folder = written(written(tmp_path, "ranks.py", ranks), "test_train.py", tests)  # it needs no torch itself
    said = run_pytest(folder)
    assert said.returncode == 0, said.stdout
    assert "met" in said.stdout
    assert not list(folder.glob("pytest-traces-*"))  # what passed leaves nothing


@pytest.mark.accuracy  # the same budgets are broken above
def test_the_example_of_the_guide_says_what_the_guide_says(tmp_path):
    guide = (ROOT / "docs" / "pytest.md").read_text(encoding="utf-8")
    example = guide.partition("```python\n")[2].partition("```")[0]
    said = run_pytest(written(tmp_path, "test_training.py", example))
    assert "1 failed, 2 passed" in said.stdout
    printed, quoted = (re.sub(r"[\d.]+ (ms|s)|\d+ \S?s|/\S+", "…", text) for text in (said.stdout, guide))
    message = "trace budget broken, by steps 3–7\n      step_time: …, at most … is allowed.\n      allocations: "
    assert message in quoted
    assert message.replace("\n    ", "\n") in printed
    # A busy machine may add a finding to the line, in a column of its own.
    assert re.search(r"::test_a_step_is_fast_and_small .* met(  .*)?\n", printed)


def test_the_devices_of_the_settings_nearest_to_the_test_count_in_its_run(tmp_path):
    shutil.copytree(ROOT / "sample_traces" / "faults" / "healthy-ddp", tmp_path / "run")
    (tmp_path / "tracekit.toml").write_text('[devices."CPU"]\npeak_fp32_tflops = 2.0\nmemory_gb_per_s = 100\n')
    recorded = TraceRun(tmp_path / "run", steps=(0, 0), settings_from=tmp_path)
    (stated,) = recorded.run.trace(0).header[environment.DEVICE_OVERRIDES]
    assert (stated.name, stated.peaks["fp32"], stated.memory_bytes_per_s) == ("CPU", 2e12, 1e11)


def test_an_invalid_mark_is_a_collection_error_that_lists_valid_names(tmp_path):
    tests = """
        @pytest.mark.trace_budget(step_tme="50ms")
        def test_metric(): ...
    """
    folder = written(tmp_path, "test_train.py", "import pytest", tests)
    said = run_pytest(folder, "-q")
    assert said.returncode == 2
    assert "test_metric: @pytest.mark.trace_budget: step_tme is not a metric: did you mean step_time?" in said.stdout
    assert "exposed_communication_ratio" in said.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step_time": "50 parsecs"}, "step_time: expected text of a number and a unit"),
        ({"step_time": 50}, "step_time: expected text"),
        ({"exposed_communication_ratio": 1.5}, "expected a share from 0 to 1"),
        ({"steps": "8:3"}, "is empty"),
        ({"steps": 5}, 'steps: expected text such as "3:8"'),
        ({"fail_on": "fatal"}, "is no severity"),
        ({"nonsense": 1}, "there are step_time, .*steps, fail_on"),
    ],
)
def test_an_invalid_mark_is_an_error(given, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        marks.parse_marks([((), given)])


def test_a_mark_needs_names_and_the_nearest_wins():
    with pytest.raises(ConfigError, match="has no name"):
        marks.parse_marks([(("50ms",), {})])
    options = marks.parse_marks([((), {"steps": "1:4", "step_time": "1s"}), ((), {"step_time": "2s", "strict": True})])
    assert (options.steps, options.budgets.budgets[0].limit, options.budgets.is_strict) == ((1, 4), 2e9, True)


def test_the_entry_point_is_the_plugin_and_it_imports_nothing_heavy():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"tracekit": plugin.__name__}
    script = (
        f"import sys, pytest; before = set(sys.modules); import {plugin.__name__}\n"
        "print(sorted(name for name in set(sys.modules) - before if name.count('.') == 0 or 'tracekit' in name))"
    )
    listed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert eval(listed.stdout) == [
        "tracekit",
        "tracekit.conventions",
        "tracekit.testing",
        "tracekit.testing.plugin",
    ]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_summary_fits_and_names_show_their_end(width):
    row = {
        "test": "tests/a/test_with_a_long_name.py::TestSome::test_that_goes_on_and_on[parameter]",
        "step_time_ns": 12.4e6,
        "exposed_communication_ratio": 0.25,
        "peak_allocated_bytes": 3 << 30,
        "allocations": 12345.0,
        "finding": "COMM001 exposed-communication",
        "outcome": "broken: step_time, exposed_communication_ratio",
        "failed": True,
    }
    header, line = summary.lines([row], width)
    assert max(map(len, (header, line))) <= width
    assert "[parameter]" in line
    assert "12.4 ms    25.0%  3 GiB       12,345" in line
    assert ("COMM001" in line) == (width == 200)

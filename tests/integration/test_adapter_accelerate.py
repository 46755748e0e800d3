"""The example of a loop with Accelerate, started as any script."""

import importlib.util
from pathlib import Path

import pytest

import tracekit
from tests.integration import framework_scripts, recordings
from tracekit import conventions

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed: pip install accelerate"
)


def test_the_example_leaves_a_run_that_can_be_checked(tmp_path: Path) -> None:
    framework_scripts.run_example("accelerate_loop", "--out", str(tmp_path), "--steps", "16", ranks=1)
    run = tracekit.load(tmp_path)
    assert recordings.steps(run) == {0: [10, 11, 12, 13, 14]}
    assert all(spans["backward"] == spans["data"] == 2 for spans in recordings.spans(run).values())
    lines = recordings.metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(16))
    assert lines[-1][conventions.LOSS_METRIC] < lines[0][conventions.LOSS_METRIC]
    assert tracekit.check(run).findings is not None

"""Rules on the host name the function that stalls, where Python stacks were recorded."""

from pathlib import Path

import numpy as np
import pytest

from tests.support import drawn_hosts, drawn_traces
from tracekit.analysis.host import call_trees
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.host import DataStall, LateLaunch

OTHERS = Path(__file__).parents[3].parent / "shared" / "traces"
PICTURE = "step 00000000000000000000\ncompute  aaaaaaaa........bbbb"


def trace(*doing):
    return drawn_hosts.trace(PICTURE, {"a": 0, "b": 16}, tuple((name, "python", *span) for name, *span in doing))


def test_the_function_that_runs_during_the_gap_is_named(wording):
    run = drawn_traces.run(trace(("train.py(12): log", 7, 15), ("torch/nn/modules/module.py(9): call", 15, 16)))
    (found,) = check(run, [LateLaunch()]).findings
    wording(found.message)


def test_without_stacks_no_function_is_named():
    (found,) = check(drawn_traces.run(trace()), [LateLaunch()]).findings
    assert " is at " not in found.message


def test_a_function_that_has_ended_is_not_named():
    drawn = trace(("train.py(12): log", 1, 3), ("<built-in method sleep>", 5, 6), ("data.py(3): load", 9, 12))
    at_ns = np.array([0, 2, 4, 10, 13]) * drawn_hosts.UNIT_NS
    named = call_trees.locations_at(drawn, at_ns).to_list()
    assert named == [None, "train.py(12): log", None, "data.py(3): load", None]


def test_a_recorded_run_names_the_slow_transform(wording):
    folder = OTHERS / "tracelens_h100_memory_stacks"
    if not folder.is_dir():
        pytest.skip("needs ../shared/traces/tracelens_h100_memory_stacks, which is not part of the project")
    (found,) = check(load(folder), [DataStall()]).findings
    wording(found.message)

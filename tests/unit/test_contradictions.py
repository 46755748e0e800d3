"""The fuzzer's check of reports finds what no report may state, and nothing in a true one."""

import copy
import json

import pytest

from tests.fuzz import contradictions
from tests.support import cli_runner


@pytest.fixture(scope="module")
def report():
    return json.loads(cli_runner.tracekit("check", "--sample", "--format", "json").stdout)


def test_a_true_report_contradicts_itself_nowhere(report):
    assert contradictions.of_report(report) == ""


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("summary", "idle_ns", -1),
        ("summary", "compute_ns", 1 << 60),
        ("summary", "overlapped_ns", 1),
        ("findings", "impact", 1.5),
        ("findings", "cost_ns", -1),
        ("findings", "ranks", [0, 77]),
        ("findings", "message", "A step takes -5.3 ms."),
        ("findings", "message", "A step takes nan ms."),
        ("findings", "message", "The bandwidth is 1.2e+19 GB/s."),
        ("findings", "message", "See step None."),
    ],
)
def test_a_changed_report_contradicts_itself(report, part, name, value):
    changed = copy.deepcopy(report)
    next(row for row in changed[part] if not str(row.get("code")).startswith("DATA"))[name] = value
    assert contradictions.of_report(changed)

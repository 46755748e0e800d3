"""HOST001 names the program's annotation in which the host pauses, where no stacks were recorded."""

import json
from pathlib import Path

import pytest

import tracekit
from tests.support.kineto_files import slice_
from tracekit.analysis.host import launch_delay
from tracekit.rules import engine
from tracekit.rules.rule import Finding

STEP_US, STEPS, WAIT_US = 10_000.0, 5, 6_000.0


def host001(folder: Path, *spans: tuple[str, float, float], cat: str = "user_annotation") -> Finding:
    """The finding on steps that wait for 6 ms after their first op, with spans (name, start, duration in µs)."""
    events = []
    for step in range(STEPS):
        at_us = step * STEP_US
        events.append(slice_("user_annotation", f"ProfilerStep#{step}", at_us, STEP_US, tid=1))
        events += [slice_(cat, name, at_us + start_us, dur_us, tid=1) for name, start_us, dur_us in spans]
        events.append(slice_("cpu_op", "aten::mm", at_us + 100, 1_000, tid=1))
        events.append(slice_("cpu_op", "aten::relu", at_us + 1_200 + WAIT_US, 2_500, tid=1))
    (folder / "rank0.json").write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    run = tracekit.load(folder)
    (finding,) = (finding for finding in engine.check(run).findings if finding.code == "HOST001")
    return finding


@pytest.mark.parametrize(
    ("spans", "is_named"),
    [
        ([("wait for rollouts", 1_150, 6_030)], True),
        ([("wait for rollouts", 1_150, 6_030), ("train", 50, 9_900)], True),  # the innermost one
        ([("train", 50, 9_900)], False),  # a span of the whole step
        ([("wait for rollouts", 8_000, 1_000)], False),  # elsewhere
        ([("Optimizer.zero_grad#SGD.zero_grad", 1_150, 6_030)], False),  # PyTorch's own
    ],
)
def test_an_annotation_around_a_pause_says_what_the_host_does(
    tmp_path: Path, spans: list[tuple[str, float, float]], is_named: bool
) -> None:
    finding = host001(tmp_path, *spans)
    assert ('"wait for rollouts"' in finding.claim) is is_named
    assert ('"wait for rollouts"' in finding.message) is is_named
    assert '"train"' not in finding.message


def test_the_name_of_an_annotation_is_bounded(tmp_path: Path) -> None:
    finding = host001(tmp_path, ("\x1b]0;" + "w" * 100_000, 1_150, 6_030))
    assert len(finding.sentence) < 1_000
    assert "\x1b" not in finding.sentence


def test_a_function_of_the_program_comes_before_an_annotation(tmp_path: Path) -> None:
    folder = tmp_path / "stacks"
    folder.mkdir()
    host001(folder, ("train.py(20): wait", 1_150, 6_030), cat="python_function")
    run = tracekit.load(folder)
    places = run.table(launch_delay.host_gaps)["stack"].drop_nulls().unique().to_list()
    assert places == ["train.py(20): wait"]

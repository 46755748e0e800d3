"""The change of a step between runs is split exactly into extra, larger, slower and late calls, and collectives."""

from pathlib import Path

import pytest

import tracekit
from tests.support import drawn_traces, operator_traces
from tests.support.operator_traces import Call
from tracekit.analysis.compute.excess_time import EXTRA, LARGER, LATE, SLOWER
from tracekit.model.run import Run
from tracekit.regression import comparison
from tracekit.regression.call_changes import COLLECTIVES, REST, CallChanges
from tracekit.regression.comparison import Comparison
from tracekit.report import call_changes

SAMPLES = Path(__file__).parents[3] / "sample_traces"
STEPS = 6


def step(
    *, mm_ns: int = 40_000, shapes: str = "[[8, 8]]", reduce_ns: int = 5_000, extra: tuple[Call, ...] = ()
) -> list[Call]:
    return [
        ("forward", [("aten::mm", mm_ns, shapes), *extra]),
        ("backward", [("aten::relu", 10_000, shapes)]),
        ("c10d::allreduce_", reduce_ns),
    ]


def run(calls: list[Call], name: str, *, idle_ns: int = 1_000) -> Run:
    return drawn_traces.run(operator_traces.trace(*[calls] * STEPS, idle_ns=idle_ns), path=name)


def changes(before: Run, after: Run) -> tuple[Comparison, CallChanges]:
    compared = comparison.compare_runs(before, after, allow_different=True)
    split = compared.call_changes
    assert split is not None
    assert compared.step is not None
    change_ns = round(compared.step.candidate) - round(compared.step.reference)
    assert sum(split.kinds.values()) == change_ns
    assert int(split.rows["excess_ns"].sum()) + split.rest_ns == change_ns
    return compared, split


@pytest.mark.parametrize(
    ("after", "idle_ns", "kind", "operator", "change_ns"),
    [
        (step(extra=(("spin::wait", 9_000),)), 1_000, EXTRA, "spin::wait", 9_000),
        (step(mm_ns=60_000, shapes="[[8, 12]]"), 1_000, LARGER, "aten::mm", 20_000),
        (step(mm_ns=60_000), 1_000, SLOWER, "aten::mm", 20_000),
        (step(), 21_000, LATE, "aten::mm", 20_000),
        (step(reduce_ns=25_000), 1_000, COLLECTIVES, "c10d::allreduce_", 20_000),
    ],
    ids=[EXTRA, LARGER, SLOWER, LATE, COLLECTIVES],
)
def test_the_planted_kind_has_the_whole_change(
    after: list[Call], idle_ns: int, kind: str, operator: str, change_ns: int
) -> None:
    for sign, before_run, after_run in (
        (1, run(step(), "a"), run(after, "b", idle_ns=idle_ns)),
        (-1, run(after, "a", idle_ns=idle_ns), run(step(), "b")),
    ):
        _, split = changes(before_run, after_run)
        assert split.kinds[kind] == sign * change_ns
        assert abs(split.kinds[REST]) <= 2
        first = split.rows.row(0, named=True)
        assert (first["kind"], first["operator"]) == (kind, operator)
        if kind == EXTRA:
            assert (first["count"], first["count_change"], first["is_new"]) == (1, sign, sign > 0)


def test_what_only_the_slow_rank_runs_is_named_with_its_count() -> None:
    recorded = tracekit.load(str(SAMPLES / "gpu" / "slow-rank"))
    compared, split = changes(recorded.of_ranks([0]), recorded.of_ranks([1]))
    extra = split.rows.filter(kind=EXTRA).row(0, named=True)
    assert "spin_kernel" in extra["kernel"]
    assert (extra["count"], round(extra["excess_ns"] / 1e6)) == (1, 22)
    assert "spin_kernel" in str(call_changes.values(split))
    cells = call_changes.cells(compared)
    assert cells is not None
    assert any("spin_kernel" in row[2] and row[4] == "1" for row in cells.rows)


@pytest.mark.parametrize(("before", "after"), [("ci/green", "ci/red"), ("demo-fsdp2", "demo-yafsdp")])
def test_the_kinds_of_recordings_add_up_to_the_change_of_the_step(before: str, after: str) -> None:
    compared, split = changes(*(tracekit.load(str(SAMPLES / name)) for name in (before, after)))
    assert call_changes.sentence(compared)
    assert split.kinds[REST] == pytest.approx(compared.contributions[-1].change_ns, abs=1_000)

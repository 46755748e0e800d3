"""Time of each unit, work by name and FLOPs of a step, against brute force and by hand."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import drawn_traces
from tracekit.analysis.compute import flops as arithmetic
from tracekit.analysis.compute import step_charges
from tracekit.model import schema
from tracekit.model.trace import Trace
from tracekit.regression.samples import samples

UNITS, STEPS, LENGTH = ("", "layers.0", "layers.1"), (0, 1), 60
Activity = tuple[str, str, int, int, int]
ACTIVITIES = st.lists(
    st.tuples(
        st.sampled_from(("compute", "communication")),
        st.sampled_from(UNITS),
        st.sampled_from(STEPS),
        st.integers(0, LENGTH - 1),
        st.integers(1, 20),
    ),
    max_size=12,
)


def trace(activities: list[Activity]) -> Trace:
    """Return a trace of activities, each on a lane of its own: kind, unit, step, start and duration."""
    rows = [
        {"id": n, "launch_id": n, "lane": n, "name": "a", "kind": kind, "unit": unit, "step": step,
         "start_ns": start, "dur_ns": dur}
        for n, (kind, unit, step, start, dur) in enumerate(activities)
    ]  # fmt: skip
    lanes = [{"lane": row["lane"], "device": 0, "stream": row["lane"], "role": row["kind"]} for row in rows]
    steps = [{"step": step, "start_ns": 0, "end_ns": LENGTH, "device": 0} for step in STEPS]
    return Trace(
        rank=0,
        window=0,
        path="drawn",
        lanes=schema.LANES.conform(pl.DataFrame(lanes)),
        steps=schema.STEPS.conform(pl.DataFrame(steps)),
        activities=schema.ACTIVITIES.conform(pl.DataFrame(rows)),
    )


def masked(activities: list[Activity], kind: str, unit: str | None = None, step: int | None = None) -> np.ndarray:
    """Return which nanoseconds any such activity covers."""
    mask = np.zeros(LENGTH + 20, bool)
    for of_kind, of_unit, of_step, start, dur in activities:
        if of_kind == kind and unit in (None, of_unit) and step in (None, of_step):
            mask[start : start + dur] = True
    return mask


@given(ACTIVITIES)
@settings(max_examples=60, deadline=None)
def test_unit_times_equal_a_mask_per_nanosecond(activities: list[Activity]) -> None:
    found = {(u, s, m): v for u, s, m, v in step_charges.unit_samples(trace(activities)).iter_rows()}
    computing = masked(activities, "compute")
    expected = {}
    for unit in UNITS:
        for step in STEPS:
            own = masked(activities, "compute", unit, step)
            moved = masked(activities, "communication", unit, step)
            kinds = {kind for kind, of_unit, of_step, _, _ in activities if (of_unit, of_step) == (unit, step)}
            if "compute" in kinds:
                expected[unit, step, "compute_ns"] = float(own.sum())
            if "communication" in kinds:
                expected[unit, step, "exposed_communication_ns"] = float((moved & ~computing).sum())
    assert found == expected


def test_typical_work_is_the_median_over_all_steps() -> None:
    # Of four steps, a runs in all, b in three and c in one.
    run = drawn_traces.trace("""
        step     000111222333
        compute  aabaababcaaa
    """)
    found = {name: amount for _, _, name, amount in step_charges.work(run).iter_rows()}
    assert found == {"a": 2.0, "b": 1.0}


def test_bytes_sent_and_allocated_are_separate_by_step_and_save() -> None:
    calls = pl.DataFrame({"activity_id": [0, 1], "op": ["all_reduce", "all_gather"], "sent_bytes": [64, 1000]})
    events = pl.DataFrame({"at_ns": [1, 2, 9], "device": [0] * 3, "delta_bytes": [10, -10, 30], "step": [0, 0, 1]})
    run = drawn_traces.trace("step 0011\ncomm xxyy", collectives=calls, allocations=events,
                      columns={"y": {"phase": "checkpoint"}})  # fmt: skip
    table = samples(run)
    by_metric = {metric: dict(rows.select("step", "value").iter_rows()) for (metric,), rows in table.group_by("metric")}
    assert by_metric["sent_bytes"] == {0: 64.0}
    assert by_metric["allocated_bytes"] == {0: 10.0, 1: 30.0}
    assert by_metric["peak_allocated_bytes"] == {0: 10.0, 1: 30.0}


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten::mm", "[[2, 3], [3, 5]]", 60.0),
        ("aten::bmm", "[[7, 2, 3], [7, 3, 5]]", 420.0),
        ("aten::addmm", "[[5], [2, 3], [3, 5], [], []]", 60.0),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "[[2, 4, 8, 16], [2, 2, 8, 16], [2, 2, 8, 16]]", 32768.0),
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            "[[2, 4, 8, 16], [2, 4, 8, 16], [2, 2, 8, 16], [2, 2, 8, 16]]",
            81920.0,
        ),
        ("aten::mm", "[[], []]", None),
        ("aten::mm", "not shapes", None),
        ("aten::add", "[[2, 3], [2, 3]]", None),
    ],
)
def test_flops_are_computed_from_shapes(name: str, shapes: str, flops: float | None) -> None:
    ops = pl.DataFrame([{"id": 0, "lane": 0, "name": name, "kind": "cpu_op", "start_ns": 0, "dur_ns": 1, "step": 0,
                         "shapes": shapes}])  # fmt: skip
    counted = arithmetic.flops(drawn_traces.trace("step 0\ncompute a", ops=ops))["flops"].to_list()
    assert counted == ([] if flops is None else [flops])

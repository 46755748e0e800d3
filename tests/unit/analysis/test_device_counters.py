"""Counters of GPUs in the metrics log become a table; values that no GPU can have become null."""

import json
from pathlib import Path

import polars as pl
import pytest

from tests.support import drawn_traces, rule_examples
from tracekit.analysis.compute import device_counters
from tracekit.conventions import device_metrics
from tracekit.ingest.readers.logs import MetricsLogs
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.model.trace import Trace


def logged(tmp_path: Path, *lines: str) -> Trace:
    path = tmp_path / "rank00000.metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return MetricsLogs().read(str(path), TraceInfo(), rank=0, window=0)


def test_a_step_has_its_counters_and_reasons_in_words(tmp_path: Path) -> None:
    reasons = device_metrics.POWER_CAP | device_metrics.HW_THERMAL
    values = dict.fromkeys(device_metrics.NAMES, 0.5) | {
        "step": 7, "sm_clock_mhz": 1095.5, "throttle_reasons": reasons, "device_samples": 2, "remapped_rows": 3,
        "ecc_corrected_errors": 1, "ecc_uncorrected_errors": 0, "pending_row_remap": 1,
    }  # fmt: skip
    (row,) = device_counters.device_counters(logged(tmp_path, json.dumps(values))).rows(named=True)
    assert row.keys() - {"step"} == set(device_metrics.NAMES)
    assert row == values | {"throttle_reasons": ["power cap", "hardware thermal slowdown"]}


def test_a_log_without_counters_has_no_rows(tmp_path: Path) -> None:
    nulls = json.dumps({"step": 0, "loss": 1.0, **dict.fromkeys(device_metrics.NAMES)})
    for trace in (logged(tmp_path, '{"step":0,"loss":1}', nulls), drawn_traces.trace(rule_examples.HIDDEN)):
        table = device_counters.device_counters(trace)
        assert table.is_empty()
        assert table.schema == device_counters.DEVICE_METRICS.schema


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sm_clock_mhz", "-1"),
        ("sm_clock_mhz", "1e300"),
        ("max_sm_clock_mhz", "NaN"),
        ("min_sm_clock_mhz", "1" + "0" * 400),
        ("temperature_c", "true"),
        ("temperature_c", '"hot"'),
        ("power_w", "Infinity"),
        ("device_utilization_ratio", "1.5"),
        ("throttle_reasons", "2.5"),
        ("throttle_reasons", "-4"),
        ("throttle_reasons", "1e30"),
        ("ecc_uncorrected_errors", "1e19"),
    ],
)
def test_values_that_no_gpu_can_have_are_null(tmp_path: Path, name: str, value: str) -> None:
    line = f'{{"step": 0, "memory_clock_mhz": 2619, "{name}": {value}}}'
    (row,) = device_counters.device_counters(logged(tmp_path, line)).rows(named=True)
    assert row[name] is None
    assert row["memory_clock_mhz"] == 2619


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "power_w": {watts}}}' for step, watts in ((1, 300), (0, 100), (1, 400))]
    table = device_counters.device_counters(logged(tmp_path, *lines, '{"step": "x", "power_w": 5}'))
    assert table.select("step", "power_w").rows() == [(0, 100.0), (1, 400.0)]
    assert table["throttle_reasons"].dtype == pl.List(pl.String)
    assert table["throttle_reasons"].to_list() == [None, None]

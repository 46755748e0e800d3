"""GPU metrics of Nsight Systems exports, in the tables that its User Guide declares: nsys recorded no GPU here."""

import json
import shutil
import sqlite3

import polars as pl
import pytest

import tracekit
from tests.support import nsight_export
from tests.support.cli_runner import ROOT
from tests.support.nsight_export import Export
from tracekit.analysis.compute import device_counters
from tracekit.conventions import device_metrics

SAMPLE = ROOT / "sample_traces" / "gpu" / "compiled" / "rank00000.pt.trace.json.gz"
DECLARED = (ROOT / "tests" / "recordings" / "nsight" / "schema_user_guide.sql").read_text()
TYPE = 0x1000100000000
"""The type of a metric's samples: the lowest byte is the GPU as Nsight Systems numbers it."""
CLOCK, ACTIVE, DRAM = "GPC Clock Frequency [MHz]", "SMs Active [Throughput %]", "DRAM Read Bandwidth [Throughput %]"
NAMES = {4: CLOCK, 11: ACTIVE, 19: DRAM}
START_NS = nsight_export.START_NS


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """Return an export of one process that used device 0, with the declarations of the tables of metrics."""
    path = tmp_path_factory.mktemp("metrics") / "rank0.sqlite"
    made = Export(path, "2023.4")
    nsight_export.of_kineto(made, SAMPLE, 1234)
    made.connection.executescript(DECLARED)
    made.close()
    return path


@pytest.fixture
def copied(export, tmp_path):
    return shutil.copy(export, tmp_path / "rank0.sqlite")


def read(path):
    (source,) = tracekit.load(path, cache=False).sources
    return source.read()


def execute(path, statement, rows=((),)):
    connection = sqlite3.connect(path)
    connection.executemany(statement, rows)
    connection.commit()
    connection.close()


def add_metrics(path, samples, gpus=(0,)):
    """Insert samples: time, metric, value; the same of each GPU."""
    for gpu in gpus:
        rows = [(TYPE | gpu, 1, "GPU Metrics", metric, name) for metric, name in NAMES.items()]
        execute(path, "INSERT INTO TARGET_INFO_GPU_METRICS VALUES (?, ?, ?, ?, ?)", rows)
        execute(path, "INSERT INTO GPU_METRICS VALUES (?, ?, ?, ?)", [(at, TYPE | gpu, m, v) for at, m, v in samples])


def drawn(trace):
    """Return samples of 10 kHz over the trace, with values that differ."""
    first, last = (int(x) - START_NS for x in (trace.steps["start_ns"].min(), trace.steps["end_ns"].max()))
    times = range(first - 500_000, last + 500_000, 100_000)
    return [
        (at, metric, value)
        for i, at in enumerate(times)
        for metric, value in ((4, 1_200_000_000 + 1_000_000 * (i % 700)), (11, i % 101), (19, (i * 7) % 101))
    ]


def test_samples_are_those_of_the_tables_by_plain_sql(copied):
    samples = drawn(read(copied))
    add_metrics(copied, samples)
    found = read(copied)
    connection = sqlite3.connect(copied)
    rows = connection.execute(
        "SELECT metricName, timestamp + utcEpochNs, "
        "CASE WHEN metricName LIKE '%Clock%' THEN value / 1e6 ELSE value END "
        "FROM GPU_METRICS JOIN TARGET_INFO_GPU_METRICS USING (typeId, metricId) JOIN TARGET_INFO_SESSION_START_TIME"
    ).fetchall()
    connection.close()
    assert len(rows) == len(samples) > 300
    assert sorted(found.counters.select("name", "at_ns", "value").rows()) == sorted(rows)
    assert found.counters["device"].unique().to_list() == [0]


def test_the_clock_of_a_step_is_that_of_its_samples(copied):
    trace = read(copied)
    samples = drawn(trace)
    add_metrics(copied, samples)
    table = device_counters.device_counters(read(copied))
    clocks = [(at + START_NS, value / 1e6) for at, metric, value in samples if metric == 4]
    expected = []
    for step, start, end in trace.steps.select("step", "start_ns", "end_ns").rows():
        own = [value for at, value in clocks if start <= at < end]
        expected.append((step, pytest.approx(sum(own) / len(own)), min(own), max(own), len(own)))
    names = (device_metrics.least(device_metrics.SM_CLOCK), device_metrics.most(device_metrics.SM_CLOCK))
    assert table.select("step", device_metrics.SM_CLOCK, *names, device_metrics.SAMPLES).rows() == expected
    assert len(expected) > 1


def test_a_trace_has_the_metrics_of_the_devices_that_its_process_used(copied):
    execute(copied, "UPDATE TARGET_INFO_GPU SET pwGpuId = 5, cuDevice = 0")
    add_metrics(copied, [(10, 11, 1), (20, 11, 2)], gpus=(5,))
    add_metrics(copied, [(10, 11, 70)], gpus=(6,))
    assert read(copied).counters.select("device", "value").rows() == [(0, 1.0), (0, 2.0)]


def test_clocks_that_were_stored_in_32_bits_with_a_sign_are_read(copied):
    add_metrics(copied, [(10, 4, 2_526_795_000 - (1 << 32)), (20, 4, 1410)])
    assert read(copied).counters["value"].to_list() == [2526.795, 1410.0]


def test_versions_before_2023_4_have_samples_as_json(copied):
    execute(copied, "DROP TABLE GPU_METRICS")
    sources = [(1, '{"Name": "FTrace"}'), (2, '{"Name": "GpuMetrics", "TimeSource": "GpuPtimer"}'), (3, "{")]
    execute(copied, "INSERT INTO GENERIC_EVENT_SOURCES VALUES (?, ?)", sources)
    execute(copied, "INSERT INTO GENERIC_EVENT_TYPES VALUES (?, ?, '{}')", [(7, 1), (TYPE, 2)])
    rows = [
        (5, 10, TYPE, {"GPC Clock Frequency": "1410000000", "SM Active": "80"}),
        (15, None, TYPE, {"GPC Clock Frequency": "1395000000", "SM Active": "none"}),
        (25, 30, 7, {"SM Active": "99", "common_pid": 4}),
    ]
    execute(copied, "INSERT INTO GENERIC_EVENTS VALUES (?, ?, ?, ?)", [(*row, json.dumps(of)) for *row, of in rows])
    execute(copied, "INSERT INTO GENERIC_EVENTS VALUES (35, 40, ?, 'no json')", [(TYPE,)])
    found = read(copied).counters
    assert found.select("name", pl.col("at_ns") - START_NS, "value").rows() == [
        ("GPC Clock Frequency", 10, 1410.0),
        ("GPC Clock Frequency", 15, 1395.0),
        ("SM Active", 10, 80.0),
    ]


def test_many_samples_become_means_of_neighbours(copied, monkeypatch):
    monkeypatch.setattr("tracekit.ingest.readers.nsight.reader.MAX_SAMPLES", 3)
    add_metrics(copied, [(10 * i, 11, i) for i in (6, 5, 4, 3, 2, 1, 0)])
    found = read(copied).counters
    assert found.select(pl.col("at_ns") - START_NS, "value").rows() == [(0, 1.0), (30, 4.0), (60, 6.0)]


@pytest.mark.parametrize(
    ("column", "value"),
    [("value", "x"), ("value", None), ("timestamp", "y"), ("timestamp", 1 << 62), ("metricId", 999), ("typeId", b"")],
)
def test_samples_that_cannot_be_read_are_left_out(copied, column, value):
    execute(copied, "DROP TABLE GPU_METRICS")
    execute(copied, "CREATE TABLE GPU_METRICS (timestamp, typeId, metricId, value)")
    add_metrics(copied, [(10, 11, 1), (20, 11, 2)])
    execute(copied, f"UPDATE GPU_METRICS SET {column} = ? WHERE value = 1", [(value,)])
    assert read(copied).counters["value"].to_list() == [2.0]


def test_tables_without_the_columns_of_metrics_are_no_metrics(copied):
    for table in ("GPU_METRICS", "TARGET_INFO_GPU_METRICS", "GENERIC_EVENTS"):
        execute(copied, f"DROP TABLE {table}")
        execute(copied, f"CREATE TABLE {table} (other TEXT)")
    assert read(copied).counters.is_empty()

"""What the library does with hostile traces: events that it loses, and errors that are no TracekitError."""

import dataclasses
from pathlib import Path

import tracekit
from tests.fuzz import losses
from tracekit.errors import TracekitError

PLAIN, MERGED = ("trace", "packed trace", "summary"), ("merged trace",)
SPECIFIED = (
    "specified trace",
    "specified container",
    "specified packets",
    "specified planes",
    "specified results",
    "specified database",
    "specified logs",
)
OTHERS = (
    "archive",
    "Perfetto trace",
    "Nsight Systems export",
    "Ascend database",
    "XPlane profile",
    "rocprofv3 results",
)
TRACES = (*PLAIN, *MERGED, *OTHERS, *SPECIFIED)
_SQL = "SELECT name, count(*), sum(dur_ns) FROM ops GROUP BY ALL ORDER BY ALL"


def problem(kind: str, folder: Path, *, is_queried: bool) -> str:
    """Return which events of the trace in a folder are lost without a finding, "" if none are.

    Raises what `tracekit` raises, unless it is a TracekitError.
    """
    try:
        run = tracekit.load(folder, cache=False)
        for trace in run.traces():
            for table in dataclasses.fields(trace):  # some tables are built on access
                getattr(trace, table.name)
        _ = run.offsets, run.data_quality
        if is_queried:
            tracekit.query(run, _SQL)
    except TracekitError:
        pass
    lost = ""
    if kind in (*PLAIN, *MERGED):
        (path,) = folder.iterdir()
        lost = losses.silent(path)
        if kind in MERGED:
            lost = lost or losses.silent_of_ranks(path)
    return lost

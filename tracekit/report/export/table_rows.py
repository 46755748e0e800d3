"""The rows of a trace's tables that are no slices, so that an export can be read back without loss."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from tracekit.conventions import perfetto as conventions
from tracekit.model import environment
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.report.export.protobuf_wire import Ints

_SLICES = ("ops", "activities", "collectives", "checkpoints")
_TIMES = ("at_ns", "start_ns", "host_start_ns")
_UNDATED = ("lanes", "groups", "metrics", "data_quality", conventions.TRACE_ROW)


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows of a table, with the time at which each is shown, on the clock of the trace."""

    name: str
    rows: pl.DataFrame
    at_ns: Ints


def of_trace(trace: Trace, first_ns: int, *, step: int | None = None) -> list[TableRows]:
    """Return the rows of a trace's tables that are no slices, or those of one step; tables without rows are left out.

    A row without a time is shown at `first_ns`. Checkpoint stages without a time are rows, the others are slices.
    """
    tables = {name: table for name, table in trace.tables.items() if name not in _SLICES}
    tables["checkpoints"] = trace.checkpoints.filter(pl.any_horizontal(pl.col("start_ns", "dur_ns").is_null()))
    if step is not None:
        tables = {name: _of_step(table, step) for name, table in tables.items()}
    header = [(key, json.dumps(value)) for key, value in trace.header.items() if key != environment.DEVICE_OVERRIDES]
    tables[conventions.HEADER_ROWS] = pl.DataFrame(header, {"key": pl.String, "value": pl.String}, orient="row")
    return [_at_their_times(name, table, first_ns) for name, table in tables.items() if table.height]


def of_run(run: Run, first_ns: int) -> list[TableRows]:
    """Return the run's manifest, and what is wrong with its files; both are written once."""
    manifest = pl.DataFrame({"manifest": [json.dumps(run.manifest)]})
    issues = run.data_quality
    tables = {conventions.RUN_ROW: manifest, conventions.RUN_ISSUES: issues}
    return [_at_their_times(name, table, first_ns) for name, table in tables.items() if table.height]


def of_clock(fields: Mapping[str, Any], first_ns: int) -> TableRows:
    """Return the row that states which trace it is, and its clock."""
    stated = {name: [value] for name, value in fields.items() if value is not None}
    return _at_their_times(conventions.TRACE_ROW, pl.DataFrame(stated), first_ns)


def _of_step(table: pl.DataFrame, step: int) -> pl.DataFrame:
    return table.filter(pl.col("step") == step) if "step" in table.columns else table


def _at_their_times(name: str, table: pl.DataFrame, first_ns: int) -> TableRows:
    time = next((column for column in _TIMES if column in table.columns), None)
    if time is None or name in _UNDATED:
        return TableRows(name, table, np.full(table.height, first_ns, np.int64))
    return TableRows(name, table, table[time].fill_null(first_ns).to_numpy())

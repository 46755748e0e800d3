"""Host phases: the time in which the program compiles or collects garbage, in every step, however regular."""

import numpy as np
import polars as pl

from tracekit.analysis.time import breakdown, host_state, trace_columns
from tracekit.ingest.readers.normalize.name_patterns import COMPILER
from tracekit.model import intervals, nesting, schema
from tracekit.model.fact import trace_fact
from tracekit.model.sweep_line import Flags
from tracekit.model.trace import Trace

COLUMNS = schema.columns(
    "step phase start_ns dur_ns idle_ns name compile_id", phase=pl.String, name=pl.String, compile_id=pl.String
)
_PATTERNS = {host_state.COMPILE: COMPILER, host_state.GARBAGE_COLLECTION: host_state.COLLECTOR}
_COMPILE_ID = r"(?:compile_id=|^Torch-Compiled Region: )([\w!/.]+)"
"""torch/_dynamo/utils.py names the data of a compilation, and torch/_dynamo/eval_frame.py the code that it made."""


@trace_fact
def host_phases(trace: Trace) -> pl.DataFrame:
    """Spans in which a thread that launches work is in a compiler or in Python's garbage collector; use ``run.table``.

    Columns COLUMNS: step (in which it begins on the host, else on the device), phase (`host_state.COMPILE` or
    GARBAGE_COLLECTION), idle_ns (its time in which no device runs anything; on a CPU run all of it), name (of the
    outermost slice), compile_id (of torch.compile, "0/3"; null where none is
    recorded); one row per such slice, by start. Garbage that a compiler collects is part of the compilation.
    """
    outermost = {phase: _outermost(trace, pattern) for phase, pattern in _PATTERNS.items()}
    parent = trace_columns.parent_rows(trace)
    in_compiler = nesting.nearest(parent, outermost[host_state.COMPILE]) >= 0
    outermost[host_state.GARBAGE_COLLECTION] &= ~in_compiler
    rows = [
        trace.ops.filter(pl.Series(flags)).select(
            "id", "step", "lane", "name", "start_ns", "dur_ns", phase=pl.lit(phase)
        )
        for phase, flags in outermost.items()
    ]
    phases = _with_compile_ids(trace, pl.concat(rows)).sort("start_ns", "id")
    # Iterations that were found by repetition are not marked on the host.
    begun = trace_columns.windows(trace).select("start_ns", of_device="step").unique("of_device").sort("start_ns")
    located = phases.join_asof(begun, on="start_ns", check_sortedness=False)
    idle_ns = pl.col("dur_ns") - pl.Series(intervals.coverage(intervals.from_table(located), _busy(trace)))
    return schema.select(located.with_columns(pl.coalesce("step", "of_device").alias("step"), idle_ns=idle_ns), COLUMNS)


def _busy(trace: Trace) -> intervals.Spans:
    """Spans in which any device runs something, also what was queued before the recording."""
    devices = [device for device in breakdown.devices(trace) if device is not None]
    return intervals.union(*(spans for device in devices for spans in breakdown.busy(trace, device)))


def _outermost(trace: Trace, pattern: str) -> Flags:
    """Mark the slices of launching threads whose names match and that are in no other such slice."""
    matching = trace_columns.is_named(trace, pattern) & host_state.is_launching(trace)
    parent = trace_columns.parent_rows(trace)
    around = nesting.nearest(parent, matching)
    return np.asarray(matching & ((parent < 0) | (around[np.maximum(parent, 0)] < 0))) if len(parent) else matching


def _with_compile_ids(trace: Trace, phases: pl.DataFrame) -> pl.DataFrame:
    """The phases with the compile id that the first slice since they began states, before the next one begins."""
    stated = trace.ops.select(
        "lane", stated_ns="start_ns", compile_id=pl.col("name").str.extract(_COMPILE_ID)
    ).drop_nulls("compile_id")
    compiling = phases.filter(phase=host_state.COMPILE).sort("start_ns")
    until_ns = pl.col("start_ns").shift(-1).over("lane")
    followed = compiling.with_columns(until_ns=until_ns).join_asof(
        stated.sort("stated_ns"), left_on="start_ns", right_on="stated_ns", by="lane", strategy="forward",
        check_sortedness=False,
    )  # fmt: skip
    is_of_it = (pl.col("stated_ns") < pl.col("until_ns")).fill_null(value=True)
    ids = followed.select("id", compile_id=pl.when(is_of_it).then("compile_id"))
    return phases.join(ids, on="id", how="left")

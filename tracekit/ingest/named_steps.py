"""Steps that a user names: each occurrence of a span, such as an annotation around the loop's body, is one."""

import re

import numpy as np
import polars as pl

from tracekit.errors import InputError, similar_names
from tracekit.ingest.readers.normalize.host_slices import id_column
from tracekit.ingest.readers.normalize.steps import Steps, device_windows
from tracekit.model import units
from tracekit.model.trace import Trace

_KINDS = ("annotation", "cpu_op", "python")
_REPLACED_ISSUES = ("no_steps", "one_pass", "steps_from_optimizer", "steps_from_ranges", "steps_from_repetition")
_MAX_NAMES = 5


def with_named_steps(trace: Trace, name: str) -> Trace:
    """Return the trace with the spans of a name as its steps, numbered from 0, or by the numbers that end their names.

    Spans inside others of the name are none. Raises InputError, with the most similar names, if there is no such span.
    """
    ops = trace.ops
    steps = _steps(trace, name)
    start_ns = ops["start_ns"].to_numpy()
    launch = trace.activities["launch_id"]
    launch_ns = pl.Series(start_ns).gather(launch.replace_strict(ops["id"], np.arange(len(ops)), default=None))
    activities = _with_steps(trace.activities, steps, launch_ns)
    return trace.replace(
        ops=_with_steps(ops, steps, ops["start_ns"]),
        activities=activities,
        allocations=_with_steps(trace.allocations, steps, trace.allocations["at_ns"]),
        steps=trace.steps.clear().vstack(device_windows(steps, activities, trace.lanes).select(trace.steps.columns)),
        data_quality=trace.data_quality.filter(~pl.col("kind").is_in(_REPLACED_ISSUES)),
    )


def _steps(trace: Trace, name: str) -> Steps:
    spans = trace.ops.filter(pl.col("kind").is_in(_KINDS))
    number = pl.col("name").str.extract(rf"^{re.escape(name)}[^a-zA-Z\d]*([0-9]{{1,15}})\W*$").cast(pl.Int64)
    named = spans.filter(pl.col("name") == name).with_columns(number=pl.lit(None, pl.Int64))
    if named.is_empty():
        named = spans.with_columns(number=number).filter(pl.col("number").is_not_null())
    if named.is_empty():
        raise InputError(f"{trace.path}: no span is named {name!r}: {_similar(spans['name'], name)}")
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    outermost = named.sort("start_ns", -pl.col("dur_ns")).filter(
        pl.col("start_ns") >= end_ns.cum_max().shift().fill_null(pl.col("start_ns"))
    )
    numbers = outermost["number"]
    is_numbered = not numbers.null_count() and numbers.n_unique() == len(numbers)
    start_ns = outermost["start_ns"].to_numpy()
    return Steps(
        numbers.to_numpy() if is_numbered else np.arange(len(outermost)),
        start_ns,
        start_ns + outermost["dur_ns"].to_numpy(),
    )


def _similar(names: pl.Series, name: str) -> str:
    """Names of spans that may be meant, with how often they occur: similar ones, or else those of annotations."""
    counts = dict(names.value_counts(sort=True).iter_rows())
    similar = similar_names(name, counts, limit=_MAX_NAMES) or [n for n in counts if name.casefold() in n.casefold()]
    listed = ", ".join(f"{n} ({units.count(counts[n], 'time')})" for n in (similar or list(counts))[:_MAX_NAMES])
    return (
        f"the most similar are {listed}"
        if similar
        else f"the most frequent are {listed}"
        if counts
        else "it has no spans"
    )


def _with_steps(table: pl.DataFrame, steps: Steps, times_ns: pl.Series) -> pl.DataFrame:
    """Return a table in which each row has the step around its time; null for none."""
    index = np.where(times_ns.is_null().to_numpy(), -1, steps.at(times_ns.fill_null(0).to_numpy()))
    return table.with_columns(pl.Series("step", steps.step, pl.Int64).gather(id_column(index)))

"""Columns of a trace's tables as arrays, made once per trace: masks cost less than queries of the tables."""

import numpy as np
import polars as pl

from tracekit.model import columns, intervals
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import Trace


@memoize
def spans(trace: Trace) -> Spans:
    """Span of each op, shape (ops, 2), in order of the table."""
    return intervals.from_table(trace.ops)


@memoize
def parent_ids(trace: Trace) -> Ints:
    """Parent_id of each op, shape (ops,); -1 for none."""
    return columns.to_ints(trace.ops["parent_id"], -1)


@memoize
def parent_rows(trace: Trace) -> Ints:
    """Row in ops of the parent of each op, shape (ops,); -1 for none."""
    return columns.rows_of(trace.ops["id"].to_numpy(), parent_ids(trace))


@memoize
def launch_ids(trace: Trace) -> Ints:
    """Launch_id of each activity, shape (activities,); -1 for none."""
    return columns.to_ints(trace.activities["launch_id"], -1)


@memoize
def launch_rows(trace: Trace) -> Ints:
    """Row in ops of the call that launched each activity, shape (activities,); -1 for none."""
    return columns.rows_of(trace.ops["id"].to_numpy(), launch_ids(trace))


@memoize
def activity_steps(trace: Trace) -> Ints:
    """Step of each activity, shape (activities,); -1 for none."""
    return columns.to_ints(trace.activities["step"], -1)


def has_issue(trace: Trace, kind: str) -> bool:
    """Return whether the trace has a data-quality issue of a kind, such as sampled."""
    return kind in trace.data_quality["kind"].to_list()  # polars' own `in` is a query


@memoize
def windows(trace: Trace) -> pl.DataFrame:
    """Steps whose device window is known; columns as the steps table."""
    return trace.steps.drop_nulls(["start_ns", "end_ns"])


def in_steps(trace: Trace, rows: pl.DataFrame) -> Flags:
    """Mask of the rows of a table with column step that belong to a step, as `Trace.in_steps`; shape (rows,)."""
    marked = trace.steps["step"].null_count() < trace.steps.height
    return columns.to_ints(rows["step"], -1) >= 0 if marked else np.ones(rows.height, np.bool_)


@memoize
def is_kind(trace: Trace, kind: str) -> Flags:
    """Mask of the ops of a kind, such as runtime; shape (ops,)."""
    return columns.flags(trace.ops["kind"] == kind)


@memoize
def is_activity_kind(trace: Trace, kind: str) -> Flags:
    """Mask of the activities of a kind, such as compute; shape (activities,)."""
    return columns.flags(trace.activities["kind"] == kind)


@memoize
def is_phase(trace: Trace, phase: str) -> Flags:
    """Mask of the ops in a phase, such as backward; shape (ops,)."""
    return columns.flags(trace.ops["phase"] == phase)


@memoize
def is_named(trace: Trace, pattern: str) -> Flags:
    """Mask of the ops that have a name in which the regular expression matches; shape (ops,).

    Each distinct name is matched once: a trace has far fewer names than ops.
    """
    names, code = op_names(trace)
    return np.asarray(matches(names, pattern)[code], np.bool_)


FRAME_NAME = r"^(?<file>.+\.py)\((?<line>\d{1,9})\): (?<function>.+)$"
"""torch.profiler's name of a Python function: "src/train.py(12): main", with the line at which it was entered."""
_FRAMEWORK_ANNOTATION = (
    r"^ProfilerStep#|^Optimizer\.|^\w+::|^nn\.Module: |^FullyShardedDataParallel|^DistributedDataParallel|"
    r"^enumerate\(DataLoader|^## |^Torch-Compiled|^TorchDynamo|Compiled|^PP:|^(nccl|gloo|mpi|ucc|xccl|hccl):"
)
"""Annotations that PyTorch, its wrappers and the recorder write by themselves."""
_FRAMEWORK = r"^(torch/|<)|/torch/|^threading\.py|^queue\.py|(^|/)tracekit/capture/"


@memoize
def is_program_frame(trace: Trace) -> Flags:
    """Mask of the ops that are Python functions of the program, not of torch or the recorder; shape (ops,)."""
    is_python = is_kind(trace, "python")
    if not is_python.any():
        return is_python
    return np.asarray(is_python & is_named(trace, FRAME_NAME) & ~is_named(trace, _FRAMEWORK), np.bool_)


@memoize
def is_program_annotation(trace: Trace) -> Flags:
    """Mask of the ops that are annotations of the program, not of torch, wrappers or the recorder; shape (ops,)."""
    annotations = is_kind(trace, "annotation")
    if not annotations.any():
        return annotations
    return np.asarray(annotations & ~is_named(trace, _FRAMEWORK_ANNOTATION), np.bool_)


def matches(names: list[str], pattern: str) -> Flags:
    """Mask of the distinct names in which a regular expression matches; results of other traces are reused."""
    cached = _known_matches.get(pattern, {})
    unknown = [name for name in names if name not in cached]
    if unknown:
        if len(cached) + len(unknown) > _MAX_KNOWN_NAMES:
            cached, unknown = {}, names
        is_match = pl.Series(unknown, dtype=pl.String).str.contains(pattern)
        cached = _known_matches[pattern] = cached | dict(zip(unknown, is_match.to_list(), strict=True))
    return np.fromiter(map(cached.__getitem__, names), np.bool_, len(names))


_known_matches: dict[str, dict[str, bool]] = {}
"""Ranks of a run have mostly the same names, and to match a pattern costs more than to look up all names."""
_MAX_KNOWN_NAMES = 10_000


@memoize
def is_activity_named(trace: Trace, pattern: str) -> Flags:
    """Mask of the activities that have a name in which the regular expression matches; shape (activities,)."""
    names, code = activity_names(trace)
    return np.asarray(matches(names, pattern)[code], np.bool_)


@memoize
def activity_names(trace: Trace) -> tuple[list[str], Ints]:
    """Distinct names of activities, and the index of each one's name among them, shape (activities,)."""
    return distinct_names(trace.activities["name"])


@memoize
def op_names(trace: Trace) -> tuple[list[str], Ints]:
    """Distinct names of ops, and the index of each op's name among them, shape (ops,)."""
    return distinct_names(trace.ops["name"])


def distinct_names(column: pl.Series) -> tuple[list[str], Ints]:
    """Distinct names of a column, and the index of each row's name among them."""
    names = column.fill_null("") if column.null_count() else column
    distinct = names.unique(maintain_order=True)
    return distinct.to_list(), names.cast(pl.Enum(distinct)).to_physical().to_numpy().astype(np.int64)

"""The summary's rows as a document."""

import itertools
import re
from collections.abc import Sequence

import polars as pl

from tracekit.model import escaping, units
from tracekit.report.document import Document, Line, Table, faint, line

_HEADINGS = {
    "communication_ns": "comm",
    "overlapped_ns": "overlap",
    "exposed_communication_ns": "exposed\ncomm",
    "exposed_copy_ns": "exposed\ncopy",
    "arrived_last": "was\nlast",
    "flops_coverage_ratio": "FLOPs\nknown",
    "work_coverage_ratio": "work\nknown",
    "mfu_ratio": "MFU",
    "hfu_ratio": "HFU",
    "sm_clock_mhz": "SM\nclock",
    "memory_clock_mhz": "memory\nclock",
    "temperature_c": "temp.",
    "throttle_reasons": "throttled by",
    "bus_bytes_per_s": "bus\nbandwidth",
    "pairs": "shared\ncollectives",
    "matched_by": "matched by",
    "bubble_ratio": "bubble\nshare",
    "bubble_ns": "bubble",
    "ideal_bubble_ratio": "ideal\nshare",
    "formula_bubble_ratio": "formula\nshare",
    "warmup_ns": "warm-up",
    "cooldown_ns": "cool-down",
    "hidden_ns": "hidden",
    "waited_ns": "waited for\npeer",
    "hidden_ratio": "hidden\nshare",
    "max_load_ratio": "max\nload",
    "load_ratio": "load over\nmean",
    "expert_ns": "experts'\ncompute",
    "bytes_per_s": "bandwidth,\nat least",
    "queue_mean": "queue\nmean",
    "queue_p50": "queue\nmedian",
    "queue_max": "queue\nmax",
    "empty_ns": "queue\nempty",
    "full_ns": "queue\nfull",
    "delay_p50_ns": "delay\nmedian",
    "delay_p95_ns": "delay\np95",
    "short_ratio": "below\n10 µs",
    "short_ns": "time of\nthose",
    "flops_unknown_ns": "operations\nunknown",
    "compute_ratio": "of compute",
    "longest_ns": "longest",
    "longest_call": "longest\ncall",
    "busy_ns": "busy",
    "working_role": "for",
    "common_ns": "both\nrecorded",
    "other_work_ns": "other\nwork",
    "both_idle_ns": "both\nidle",
    "wait_ratio": "wait\nshare",
    "limit_ns": "shortest\nwait",
    "moved_bytes_per_s": "bandwidth",
}
# The columns that are dropped on a narrow terminal, in this order: those on pipelines, or those after the breakdown.
_PIPELINE_DROP_ORDER = (
    "uneven_ns", "schedule_ns", "host_ns", "communication_ns", "imbalance_ns", "steady_ns", "cooldown_ns", "warmup_ns",
    "formula_bubble_ratio",
)  # fmt: skip
_DROP_ORDER = (
    "memory_clock_mhz", "power_w", "temperature_c", "work_coverage_ratio", "hfu_ratio", "flops_coverage_ratio", "flops",
    "mfu_ratio", "throttle_reasons", "sm_clock_mhz",
)  # fmt: skip

_MISSING = {
    "arrived_last": "collectives that ranks share",
    "concurrent_kind": "work of two kinds that run concurrently on a device",
    "bubble_ns": "pipeline: no spans of a schedule, and no sends and receives from which to infer one",
    "axis": "collectives in steps",
    "passes": "pairs of all-to-alls around experts",
    "hidden_ns": "sends and receives of ring attention (axis cp)",
    "peer": "all-to-alls around experts with known split sizes",
    "queue_max": "work on device streams",
    "flops_unknown_ns": "compute whose work is unknown",
    "sensitivity": "complete trials of injected delays: record the training with --perturb",
    "working_role": "roles: all processes that were recorded at the same time run one program",
    "moved_bytes_per_s": "file system calls: the run has no I/O log of DFTracer (.pfw)",
}
"""What a run has none of where a table is without rows, by a column of the table."""

_TOTALS_HEADINGS = {
    "time_ratio": "share",
    "self_ratio": "share",
    "spread_ratio": "rank\nspread",
    "delay_p50_ns": "delay\nmedian",
    "delay_p95_ns": "delay\np95",
    "most_rank": "most\non",
    "self_ns": "self\ntime",
    "device_ns": "on\ndevice",
    "tflops_per_s": "TFLOP/s",
    "tbytes_per_s": "TB/s",
    "roofline_ratio": "of\nroofline",
}
# The columns that are dropped on a narrow terminal, in this order.
_TOTALS_DROP_ORDER = (
    "delay_p95_ns", "delay_p50_ns", "most_rank", "spread_ratio",
    "p50_ns", "kind", "bytes", "flops", "mean_ns", "p95_ns", "max_ns", "total_ns",
)  # fmt: skip
_SEQUENCE_HEADINGS = {
    "time_ratio": "share", "number": "#", "gap_ns": "gaps", "op_ns": "on\nhost", "per_step": "per\nstep",
}  # fmt: skip
_SEQUENCE_DROP_ORDER = ("launches", "time_ratio", "op_ns", "per_step", "op")
_NAMESPACES = re.compile(r"\(anonymous namespace\)::|\b(?:\w+::)+|^void ")
_MAX_NAME = 60


def document(rows: pl.DataFrame) -> Document:
    """The rows as a table, for programs as they are."""
    drop_order = _PIPELINE_DROP_ORDER if "bubble_ns" in rows.columns else _DROP_ORDER
    missing = next((subject for name, subject in _MISSING.items() if name in rows.columns), "work to break down")
    without_only_window = rows.drop("window") if "window" in rows.columns and rows["window"].n_unique() < 2 else rows
    table = Table(without_only_window, _HEADINGS, drop_order)
    part = table if rows.height else line(f"The traces contain no {missing}.")
    return Document(([part],), values=rows.to_dicts())


def totals(rows: pl.DataFrame, top: int) -> Document:
    """The first `top` rows as a table, and below it the share of the others."""
    share = next(name for name in ("time_ratio", "self_ratio") if name in rows.columns)
    if rows.is_empty():
        what = "kernels" if share == "time_ratio" else "ops of these kinds"
        return Document(([line(f"The traces contain no {what}.")],))
    table = Table(rows.head(top), _TOTALS_HEADINGS, _TOTALS_DROP_ORDER, longest_text=escaping.MAX_TEXT)
    rest = rows.slice(top)
    part = units.share(float(rest[share].sum() or 0))
    more = [faint(f"and {rest.height:,} more, {part} together: --top {rows.height}")] if rest.height else []
    return Document(([table, *more],))


def sequences(rows: pl.DataFrame, top: int) -> Document:
    """The first `top` sequences and the kernels of each, columns as `analysis.compute.kernel_sequences` makes them."""
    if rows.is_empty():
        return Document(([line("No sequence of kernels occurs twice.")],))
    first = rows.head(top).with_row_index("number", offset=1)
    table = Table(first.drop("kernels"), _SEQUENCE_HEADINGS, _SEQUENCE_DROP_ORDER)
    lines = [
        Line((" → ".join(_count_repeats(kernels)),), mark=str(number))
        for number, kernels in first.select("number", "kernels").iter_rows()
    ]
    more = rows.height - first.height
    text = f"and {more:,} more: --top {rows.height}; whole names with --format json"
    return Document(([table], [*lines, *([faint(text)] if more else [])]))


def _count_repeats(kernels: Sequence[str]) -> list[str]:
    """Short names of the kernels; one that follows itself once, with its count."""
    runs = [(name, len(list(same))) for name, same in itertools.groupby(kernels)]
    names = [(escaping.inert(_NAMESPACES.sub("", name), _MAX_NAME), count) for name, count in runs]
    return [name + (f" ×{count}" if count > 1 else "") for name, count in names]
